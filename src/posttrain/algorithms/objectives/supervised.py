"""Supervised objectives."""

from __future__ import annotations

from posttrain.registry import register
from posttrain.types import Batch, Loss, Outputs


@register("objective", level="token", needs=(), vanishes=())
def cross_entropy(outputs: Outputs, batch: Batch) -> Loss:
    """Maximum likelihood of the trained tokens: pretraining and supervised fine-tuning.

    ``values[b, t] = −log p(tokens[b, t] | tokens[b, :t])`` at trained tokens.

    As the first step of post-training: Ouyang et al. (2022), "Training language models to follow instructions with
    human feedback" (arXiv 2203.02155), section 3.5.

    What goes wrong: Masks that leave out the end token give a model that never stops. Loss that falls on the prompt
    too is not comparable.

    Shapes: logprobs ``[B, T]`` → values ``[B, T]``. With ``aggregate: token_mean`` the loss is the
    mean over all trained tokens of the optimizer batch, not of the micro-batch. ``data.train_on`` chooses the
    trained tokens.
    """
    values = -outputs.logprobs
    return Loss(values, {"nll": values.detach()})


@register("objective", level="token", needs=(), vanishes=())
def dft(outputs: Outputs, batch: Batch) -> Loss:
    """Dynamic fine-tuning: each token's likelihood loss weighted by its own probability.

    ``values[b, t] = −sg(p) log p`` with ``p = p(tokens[b, t] | tokens[b, :t])`` and sg the stop-gradient.

    Wu et al. (2025), "On the generalization of SFT: a reinforcement learning perspective with reward rectification"
    (arXiv 2508.05629), eq. 9, token by token; ``aggregate: token_mean``. The gradient of maximum likelihood has a
    hidden weight 1/p; DFT takes it away, so improbable tokens do not dominate.

    What goes wrong: Tokens that the model finds impossible get no gradient. New facts and formats are learned slowly
    or not at all; use ``cross_entropy`` for those. The loss is not comparable with that of ``cross_entropy``: compare
    ``nll``.

    Shapes: logprobs ``[B, T]`` → values ``[B, T]``.
    """
    nll = -outputs.logprobs
    return Loss(outputs.logprobs.detach().exp() * nll, {"nll": nll.detach()})
