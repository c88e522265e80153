"""Supervised objectives."""

from __future__ import annotations

from posttrain.registry import register
from posttrain.types import Batch, Loss, Outputs


@register("objective", level="token", needs=(), vanishes=())
def cross_entropy(outputs: Outputs, batch: Batch) -> Loss:
    """Maximum likelihood on trained tokens: pretraining and supervised fine-tuning.

    ``values[b, t] = −log p(tokens[b, t] | tokens[b, :t])`` at trained tokens.

    As the first stage of post-training: Ouyang et al. (2022), "Training language models to follow instructions with
    human feedback" (arXiv 2203.02155), section 3.5.

    What goes wrong: If masks exclude end tokens, the model never stops. Losses that include prompts are not comparable
    with losses on answers only.

    Shapes: logprobs ``[B, T]`` → values ``[B, T]``. ``aggregate: token_mean`` averages over all trained tokens in the
    optimizer batch, not in a micro-batch. ``data.train_on`` chooses trained tokens.
    """
    values = -outputs.logprobs
    return Loss(values, {"nll": values.detach()})


@register("objective", level="token", needs=(), vanishes=())
def dft(outputs: Outputs, batch: Batch) -> Loss:
    """Dynamic fine-tuning: likelihood loss, weighted by token probability.

    ``values[b, t] = −sg(p) log p`` with ``p = p(tokens[b, t] | tokens[b, :t])`` and sg the stop-gradient.

    Wu et al. (2025), "On the generalization of SFT: a reinforcement learning perspective with reward rectification"
    (arXiv 2508.05629), eq. 9, per token; ``aggregate: token_mean``. Maximum likelihood implicitly weights gradients by
    1/p. DFT removes this weight, so improbable tokens do not dominate.

    What goes wrong: Very improbable tokens get almost no gradient, so new facts and formats are learned slowly or not
    at all. Use ``cross_entropy`` for those. To compare both objectives, use ``nll``; their losses are not comparable.

    Shapes: logprobs ``[B, T]`` → values ``[B, T]``.
    """
    nll = -outputs.logprobs
    return Loss(outputs.logprobs.detach().exp() * nll, {"nll": nll.detach()})
