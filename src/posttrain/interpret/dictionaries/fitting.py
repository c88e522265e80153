"""One step of training a dictionary, and a training in memory that is made of such steps.

What Lightning runs with checkpoints and metrics (``training``) are the same steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.interpret.dictionaries.dictionary import Dictionary, keep_largest
from posttrain.interpret.dictionaries.recipe import DictionaryTrainSection, DictionaryWord
from posttrain.interpret.dictionaries.rows import RowBatches, Rows, sample_rows

# The loss of a dictionary, with the gradients of its matrix products by hand. For rows x [n, d] (scaled):
#
#     c = b_enc − b_dec·W_enc     pre = x·W_enc + c     f = kind(pre)     x̂ = f·W_dec + b_dec
#     loss = mean (x − x̂)² + penalty(f) + auxk · mean (x − x̂ − ê)²
#
# ê (AuxK, Gao et al. 2024) is what the features that have not fired for long make of the error that is left: the d/2
# largest of their pre-activations in each row.
#
# By hand, since what autograd adds costs more than it seems: the bias of the decoder is folded into that of the encoder
# (five matrix products instead of six, and no copy of x), and with bf16 each operand is rounded once. Weights, biases,
# their gradients and all sums stay fp32. The selection between ``pre`` and ``f`` is left to autograd, so that a new
# kind is a plain function.


@dataclass(slots=True)
class Measured:
    """Numbers of a step, as tensors (no waiting for a device).

    ``squared_error``: mean over rows and d. ``fired`` [F]: whether a feature was active. ``threshold``: the new running
    threshold or None. ``features`` [n, F].
    """

    squared_error: Tensor
    penalty: Tensor
    auxiliary: Tensor
    fired: Tensor
    features: Tensor
    threshold: Tensor | None = None


def dictionary_loss(
    dictionary: Dictionary,
    x: Tensor,
    *,
    progress: float = 1.0,
    auxk: float = 0.0,
    dead: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Measured]:
    """Return the loss (a scalar whose ``backward`` fills the gradients) of scaled rows [n, d], and what was measured.

    ``progress`` in [0, 1]: the share of the training that is done. ``dead`` [F]: which features AuxK revives; None for
    no AuxK. ``dtype``: of the operands of the matrix products.
    """
    with torch.no_grad():
        loss, gradients, measured = _evaluate(dictionary, x, progress, auxk, dead, dtype)
    weights = (dictionary.W_enc, dictionary.W_dec, dictionary.b_enc, dictionary.b_dec)
    return _Loss.apply((loss, gradients), *weights), measured


class _Loss(torch.autograd.Function):
    """A loss whose gradients are known; the backward pass hands them out, once."""

    @staticmethod
    def forward(ctx: Any, known: tuple[Tensor, list[Tensor]], *weights: Tensor) -> Tensor:
        loss, ctx.gradients = known
        return loss

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, ()
        return (None, *(gradient.mul_(upstream[0]) for gradient in gradients))


def _evaluate(
    dictionary: Dictionary, x: Tensor, progress: float, auxk: float, dead: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor], Measured]:
    encoder, decoder, b_dec = dictionary.W_enc.detach(), dictionary.W_dec.detach(), dictionary.b_dec.detach()
    bias = dictionary.b_enc.detach() - b_dec @ encoder
    low_x, low_encoder, low_decoder = x.to(dtype), encoder.to(dtype), decoder.to(dtype)
    pre = torch.addmm(bias.to(dtype), low_x, low_encoder).requires_grad_()
    with torch.enable_grad():
        codes = dictionary.codes(pre, dictionary.threshold, progress)
    features = codes.features.detach()
    error = (b_dec - x).add_(features @ low_decoder)
    squared = torch.linalg.vector_norm(error).square() / error.numel()
    heard = error * (2.0 / error.numel())
    low = heard.to(dtype)
    on_decoder = (features.T @ low).to(error.dtype)
    outputs, upstream = [codes.features], [low @ low_decoder.T]
    if codes.penalty is not None:
        outputs, upstream = [*outputs, codes.penalty], [*upstream, torch.ones_like(codes.penalty)]
    (on_pre,) = torch.autograd.grad(outputs, [pre], upstream)
    fired = (on_decoder != 0).any(dim=1)  # a feature that was active somewhere got a gradient; n times as few numbers
    auxiliary = x.new_zeros(())
    if auxk and dead is not None:
        auxiliary = auxk * _revive(dead, auxk, pre.detach(), error, low_decoder, on_pre, on_decoder)
    sums = on_pre.sum(0, dtype=encoder.dtype)
    on_encoder = (low_x.T @ on_pre).to(encoder.dtype).addr_(b_dec, sums, alpha=-1)
    on_b_dec = heard.sum(0) - encoder @ sums
    penalty = x.new_zeros(()) if codes.penalty is None else codes.penalty.detach()
    measured = Measured(squared, penalty, auxiliary, fired, features, codes.threshold)
    return squared + penalty + auxiliary, [on_encoder, on_decoder, sums, on_b_dec], measured


def _revive(
    dead: Tensor, auxk: float, pre: Tensor, error: Tensor, decoder: Tensor, on_pre: Tensor, on_decoder: Tensor
) -> Tensor:
    """mean (x − x̂ − ê)²; ``auxk`` times its gradients are added, in place, to those of ``pre`` and the decoder.

    The error is a constant here: only dead features learn from it.
    """
    places = dead.nonzero().squeeze(1)
    if not len(places):
        return error.new_zeros(())
    chosen = pre[:, places]
    width = max(1, error.shape[1] // 2)
    features = torch.relu(chosen) if len(places) <= width else keep_largest(chosen, width)
    rows = decoder[places]
    left = (features @ rows).to(error.dtype) + error
    low = (left * (2.0 * auxk / left.numel())).to(decoder.dtype)
    on_decoder.index_add_(0, places, (features.T @ low).to(error.dtype))
    on_pre.index_add_(1, places, (low @ rows.T) * (features > 0))
    return torch.linalg.vector_norm(left).square() / left.numel()


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_dictionary(rows: Rows, word: DictionaryWord, seed: int) -> Dictionary:
    """Return a dictionary for such rows with its first weights; ``input_scale`` and ``b_dec`` are not set yet."""
    return Dictionary(rows.d, word.num_features(rows.d), word.name, word.options, seed)


class Learner:
    """A prepared dictionary that learns: its loss, gradient clipping, optimizer and schedule.

    ``measured`` and ``grad_norm`` are of the last step. A feature is dead that no row of ``dead_rows`` activated.
    """

    def __init__(self, dictionary: Dictionary, settings: DictionaryTrainSection) -> None:
        self.dictionary, self.settings = dictionary, settings
        self.auxk = settings.auxk if settings.auxk is not None else (1 / 32 if dictionary.needs_rank else 0.0)
        self.dead_rows = max(1, round(settings.dead_after * settings.steps * settings.batch))
        self.parameters = [p for p in dictionary.parameters() if p.requires_grad]
        self.measured: Measured | None = None
        self.grad_norm: Tensor | None = None

    def optimizer(self) -> tuple[torch.optim.Adam, torch.optim.lr_scheduler.LambdaLR]:
        """Adam, and its rate that rises over the first and falls over the last steps."""
        settings, steps = self.settings, self.settings.steps
        optimizer = torch.optim.Adam(self.parameters, settings.learning_rate(self.dictionary.features), fused=True)
        rising, falling = settings.warmup * steps, settings.decay * steps

        def factor(step: int) -> float:
            up = (step + 1) / rising if rising else 1.0
            down = (steps - step) / falling if falling else 1.0
            return max(0.0, min(1.0, up, down))

        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def loss(self, batch: Tensor, step: int) -> Tensor:
        """Return the loss of raw rows [n, d] at a step; which features fired, and the running threshold, are kept."""
        dictionary = self.dictionary
        loss, measured = dictionary_loss(
            dictionary,
            dictionary.scaled(batch),
            progress=step / self.settings.steps,
            auxk=self.auxk,
            dead=dictionary.since_fired > self.dead_rows if self.auxk else None,
            dtype=_DTYPES[self.settings.precision],
        )
        self.measured = measured
        dictionary.since_fired.add_(len(batch)).masked_fill_(measured.fired, 0)
        if measured.threshold is not None:
            dictionary.threshold.copy_(measured.threshold)
        return loss

    def clip(self) -> None:
        """Bring the gradient to at most ``max_grad_norm``, and note how long it was."""
        limit = self.settings.max_grad_norm
        self.grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters, float("inf") if limit is None else limit)


def fit_dictionary(
    rows: Rows,
    num_rows: int,
    word: DictionaryWord,
    settings: DictionaryTrainSection,
    *,
    seed: int,
    frozen_decoder: bool = False,
    device: torch.device | str = "cpu",
) -> Dictionary:
    """A dictionary of the first ``num_rows`` rows, on raw activations, trained like one of `posttrain sae train`.

    Args:
        frozen_decoder: its directions stay the random ones of the beginning; only the encoder learns. The baseline that
            says what a set of directions gives that knows nothing of the model.
    """
    dictionary = build_dictionary(rows, word, seed).to(device)
    dictionary.prepare(sample_rows(rows, num_rows, seed).to(device))
    dictionary.W_dec.requires_grad_(not frozen_decoder)
    learner = Learner(dictionary, settings)
    optimizer, schedule = learner.optimizer()
    for step, batch in enumerate(RowBatches(rows, num_rows, min(settings.batch, num_rows), settings.steps, seed)):
        optimizer.zero_grad(set_to_none=True)
        learner.loss(batch.to(device), step).backward()
        learner.clip()
        optimizer.step()
        schedule.step()
        dictionary.normalize()
    return dictionary.requires_grad_(False).fold()
