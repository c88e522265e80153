"""Supervised objectives."""

from __future__ import annotations

from posttrain.registry import register
from posttrain.types import Batch, Loss, Outputs


@register("objective", level="token", needs=(), vanishes=())
def cross_entropy(outputs: Outputs, batch: Batch) -> Loss:
    """Maximum likelihood of the trained tokens: pretraining and supervised fine-tuning.

    ``values[b, t] = −log p(tokens[b, t] | tokens[b, :t])`` at trained tokens.

    What goes wrong: Masks that leave out the end token give a model that never stops. Loss that falls on the prompt
    too is not comparable.

    Shapes: logprobs ``[B, T]`` → values ``[B, T]``. With ``aggregate: token_mean`` the loss is the
    mean over all trained tokens of the optimizer batch (not of the micro-batch); which tokens are
    trained is the mask's business (``data.train_on``).
    """
    values = -outputs.logprobs
    return Loss(values, {"nll": values.detach()})
