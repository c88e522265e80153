"""Rows that a dictionary learns from, one step of its training, a training in memory, and quality.

``training`` takes the same steps with checkpoints and metrics.

FVU = Σ‖x − x̂‖² / Σ‖x − μ‖², with one mean μ over all rows and sums in float64. A ratio per row, or to zero instead of
the mean, reads far better than it is. CE recovered = (CE_zero − CE_spliced) / (CE_zero − CE), where ``spliced`` puts
the reconstruction in the place of the model's activations at the site, and ``zero`` zeros.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.activity import phase
from posttrain.errors import UsageError
from posttrain.interpret.activations.shards import ActivationStore
from posttrain.interpret.activations.sites import device_of, replaced
from posttrain.interpret.saes.sae import SparseAutoencoder, keep_largest
from posttrain.interpret.saes.sae_recipe import DIFFERENCE, SaeComponent, SaeTrainSection
from posttrain.models.forward.precision import DTYPES
from posttrain.randomness import generator, permutation
from posttrain.types import Model

SAMPLE_ROWS = 65_536
PREFIX = "dictionary."  # of the names of weights in a stored state


class StoreRows:
    """Rows of one site of recorded activations.

    ``site`` may be left out where there is one. ``source``: ``model``, ``base``, ``post`` or ``difference`` (post −
    base); None where one model was recorded. ``UsageError``: there is no such site or source.
    """

    def __init__(self, store: ActivationStore, site: str | None = None, source: str | None = None) -> None:
        self.store = store
        self.num_rows = store.num_rows
        self.d = store.width(site)
        self.site = site or store.sites[0]
        known = list(store.sources)
        if store.sources == ("base", "post"):
            known.append(DIFFERENCE)
        self.source = source
        if source is None and len(known) == 1:
            self.source = known[0]
        if self.source not in known:
            if source is None:
                what = "say which"
            else:
                what = f"there is no {source!r}"
            raise UsageError(f"activations.source: {what}; these activations have {', '.join(known)}")

    def gather(self, rows: Tensor) -> Tensor:
        """Return float32 [n, d] of the rows ``int64 [n]``."""
        if self.source != DIFFERENCE:
            return self.store.gather(rows, self.site, self.source).float()
        base = self.store.gather(rows, self.site, "base").float()
        post = self.store.gather(rows, self.site, "post").float()
        return post - base

    def boundary(self, row: int) -> int:
        """Return the first row of the document that ``row`` is of."""

        def document(number: int) -> int:
            return int(self.store.documents(torch.tensor([number]))[0])

        return bisect_left(range(row), document(row), key=document)

    def whole_documents(self, limit: int) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of rows that no document crosses: at most ``limit``, but where a document is longer."""
        start = 0
        while start < self.num_rows:
            end = start
            cut = start
            while cut <= start:
                end += limit
                if end < self.num_rows:
                    cut = self.boundary(end)
                else:
                    cut = self.num_rows
            yield start, cut
            start = cut


def too_few_rows(rows: str, held_out: int, batch: int) -> UsageError:
    """Return the error for rows that leave less than a batch to train on."""
    return UsageError(
        f"{rows} rows of activations, of which {held_out:,} are held out (eval.rows), do not make one "
        f"batch of {batch:,} (train.batch). Record more, or set them lower"
    )


def first_held_out(rows: StoreRows, held_out: int, batch: int) -> int:
    """Return how many rows are trained on: all but the last ``held_out``, and no document on both sides."""
    start = rows.num_rows - held_out
    if start > 0:
        start = rows.boundary(start) or start  # one document alone is cut
    if start < batch:
        raise too_few_rows(f"{rows.num_rows:,}", held_out, batch)
    return start


def sample_rows(rows: StoreRows, num_rows: int, seed: int) -> Tensor:
    """Draw at most ``SAMPLE_ROWS`` of the first ``num_rows`` rows by the seed: float32 [n, d]."""
    size = min(SAMPLE_ROWS, num_rows)
    chosen = generator(seed, "dictionary sample").integers(0, num_rows, size=size)
    return rows.gather(torch.from_numpy(np.sort(chosen)))


class RowBatches:
    """The batches of a training: epochs of shuffled rows, one after the other, without a gap between them.

    Step s takes places s·batch … (s + 1)·batch of that sequence, so that a run goes on at any step.
    """

    def __init__(self, rows: StoreRows, num_rows: int, batch: int, seed: int) -> None:
        self.rows = rows
        self.num_rows = num_rows
        self.batch = batch
        shuffled = partial(permutation, seed, "dictionary rows")
        self.order = lru_cache(maxsize=2)(lambda epoch: torch.from_numpy(shuffled(epoch, num_rows)))

    def of_step(self, step: int) -> Tensor:
        """Return the batch of a step, counted from 0: float32 ``[batch, d]``."""
        return self.rows.gather(self.indices(step))

    def indices(self, step: int) -> Tensor:
        """Return the rows of the batch of a step, ``int64 [batch]``."""
        places = torch.arange(step * self.batch, (step + 1) * self.batch)
        epochs = places // self.num_rows
        parts = []
        for epoch in epochs.unique().tolist():
            of_epoch = places[epochs == epoch] % self.num_rows
            parts.append(self.order(epoch)[of_epoch])
        return torch.cat(parts)


# The loss of a dictionary, with the gradients of its matrix products by hand. For rows x [n, d] (scaled):
#
#     c = b_enc − b_dec·W_enc     pre = x·W_enc + c     f = kind(pre)     x̂ = f·W_dec + b_dec
#     loss = mean (x − x̂)² + penalty(f) + auxk · mean (x − x̂ − ê)²
#
# ê (AuxK, Gao et al. 2024) is what the features that have not fired for long make of the error that is left: the d/2
# largest of their pre-activations in each row.
#
# By hand because it is faster than autograd: the bias of the decoder is folded into that of the encoder (five matrix
# products instead of six, and no copy of x), and with bf16 each operand is rounded once. Weights, biases, their
# gradients and all sums stay fp32. From ``pre`` to ``f`` it is autograd, so that a kind is a plain function.


@dataclass(slots=True)
class StepMeasures:
    """Numbers of a step, as tensors: ``fired`` bool [F], ``features`` [n, F], ``threshold`` the new running one."""

    squared_error: Tensor
    penalty: Tensor
    auxiliary: Tensor
    fired: Tensor
    features: Tensor
    threshold: Tensor | None = None


def sae_loss(
    sae: SparseAutoencoder,
    x: Tensor,
    *,
    progress: float = 1.0,
    auxk: float = 0.0,
    dead: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, StepMeasures]:
    """Return the loss of scaled rows [n, d], whose ``backward`` fills the gradients, and what was measured.

    ``progress`` in [0, 1]: the share of the training that is done. ``auxk``: weight of AuxK, which revives the features
    in ``dead`` (bool [F]). ``dtype``: of the operands of the matrix products.
    """
    with torch.no_grad():
        loss, gradients, measured = _evaluate(sae, x, progress, auxk, dead, dtype)
    weights = (sae.W_enc, sae.W_dec, sae.b_enc, sae.b_dec)
    return _Loss.apply((loss, gradients), *weights), measured


class _Loss(torch.autograd.Function):
    """A loss whose gradients are known; the backward pass hands them out, once."""

    @staticmethod
    def forward(ctx: Any, known: tuple[Tensor, list[Tensor]], *weights: Tensor) -> Tensor:
        loss, ctx.gradients = known
        return loss

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        ctx.gradients = ()
        return (None, *(gradient.mul_(upstream[0]) for gradient in gradients))


def _evaluate(
    sae: SparseAutoencoder, x: Tensor, progress: float, auxk: float, dead: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor], StepMeasures]:
    encoder = sae.W_enc.detach()
    decoder = sae.W_dec.detach()
    b_dec = sae.b_dec.detach()
    bias = sae.b_enc.detach() - b_dec @ encoder
    low_x = x.to(dtype)
    low_encoder = encoder.to(dtype)
    low_decoder = decoder.to(dtype)
    pre = torch.addmm(bias.to(dtype), low_x, low_encoder).requires_grad_()
    with torch.enable_grad():
        codes = sae.codes(pre, sae.threshold, progress)
    features = codes.features.detach()
    error = (b_dec - x).add_(features @ low_decoder)
    squared = torch.linalg.vector_norm(error).square() / error.numel()
    scaled = error * (2.0 / error.numel())
    low = scaled.to(dtype)
    on_decoder = (features.T @ low).to(error.dtype)
    outputs = [codes.features]
    upstream = [low @ low_decoder.T]
    if codes.penalty is not None:
        outputs = [*outputs, codes.penalty]
        upstream = [*upstream, torch.ones_like(codes.penalty)]
    (on_pre,) = torch.autograd.grad(outputs, [pre], upstream)
    fired = (on_decoder != 0).any(dim=1)  # a feature that was active somewhere got a gradient; n times as few numbers
    auxiliary = x.new_zeros(())
    if auxk and dead is not None:
        revived = _revive(dead, auxk, pre.detach(), error, low_decoder, on_pre, on_decoder)
        auxiliary = auxk * revived
    sums = on_pre.sum(0, dtype=encoder.dtype)
    on_encoder = (low_x.T @ on_pre).to(encoder.dtype).addr_(b_dec, sums, alpha=-1)
    on_b_dec = scaled.sum(0) - encoder @ sums
    penalty = x.new_zeros(())
    if codes.penalty is not None:
        penalty = codes.penalty.detach()
    measured = StepMeasures(squared, penalty, auxiliary, fired, features, codes.threshold)
    return squared + penalty + auxiliary, [on_encoder, on_decoder, sums, on_b_dec], measured


def _revive(
    dead: Tensor, auxk: float, pre: Tensor, error: Tensor, decoder: Tensor, on_pre: Tensor, on_decoder: Tensor
) -> Tensor:
    """Return mean (x − x̂ − ê)²; add ``auxk`` times its gradients, in place, to those of ``pre`` and the decoder.

    The error is a constant here: only dead features learn from it.
    """
    places = dead.nonzero().squeeze(1)
    if not len(places):
        return error.new_zeros(())
    chosen = pre[:, places]
    width = max(1, error.shape[1] // 2)
    if len(places) <= width:
        features = torch.relu(chosen)
    else:
        features = keep_largest(chosen, width)
    rows = decoder[places]
    left = (features @ rows).to(error.dtype) + error
    low = (left * (2.0 * auxk / left.numel())).to(decoder.dtype)
    on_decoder.index_add_(0, places, (features.T @ low).to(error.dtype))
    on_pre.index_add_(1, places, (low @ rows.T) * (features > 0))
    return torch.linalg.vector_norm(left).square() / left.numel()


class Learner:
    """A prepared dictionary that learns, on its device; ``measured`` and ``grad_norm`` are of the last step."""

    measured: StepMeasures
    grad_norm: Tensor

    def __init__(self, sae: SparseAutoencoder, settings: SaeTrainSection) -> None:
        self.dictionary = sae
        self.settings = settings
        self.step = 0
        self.auxk = 0.0
        if settings.auxk is not None:
            self.auxk = settings.auxk
        elif sae.needs_rank:
            self.auxk = 1 / 32
        self.dead_rows = max(1, round(settings.dead_after * settings.steps * settings.batch))
        self.parameters = [p for p in sae.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(self.parameters, self.rate(), fused=True)

    def rate(self) -> float:
        """Return the learning rate of the next step: it rises over the first and falls over the last steps."""
        settings = self.settings
        rising = settings.warmup * settings.steps
        falling = settings.decay * settings.steps
        reached = 1.0
        if rising:
            reached = min(reached, (self.step + 1) / rising)
        if falling:
            reached = min(reached, (settings.steps - self.step) / falling)
        return settings.learning_rate(self.dictionary.features) * max(0.0, reached)

    def update(self, batch: Tensor) -> None:
        """Take a step on raw rows [n, d]."""
        limit = self.settings.max_grad_norm
        if limit is None:
            limit = float("inf")
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        self.optimizer.zero_grad(set_to_none=True)
        self._loss(batch).backward()
        self.grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters, limit)
        self.optimizer.step()
        self.dictionary.normalize()
        self.step += 1

    def state(self) -> dict[str, object]:
        """Return what the steps so far have changed, under the names that runs of 0.2.0 have."""
        weights = {f"{PREFIX}{name}": value for name, value in self.dictionary.state_dict().items()}
        return {"global_step": self.step, "state_dict": weights, "optimizer_states": [self.optimizer.state_dict()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state``."""
        weights = {name.removeprefix(PREFIX): value for name, value in state["state_dict"].items()}
        self.dictionary.load_state_dict(weights)
        self.optimizer.load_state_dict(state["optimizer_states"][0])
        self.step = int(state["global_step"])

    def _loss(self, batch: Tensor) -> Tensor:
        """Return the loss of raw rows [n, d]; keep which features fired, and the running threshold."""
        dead = None
        if self.auxk:
            dead = self.dictionary.since_fired > self.dead_rows
        sae = self.dictionary
        loss, self.measured = sae_loss(
            sae,
            sae.scaled(batch),
            progress=self.step / self.settings.steps,
            auxk=self.auxk,
            dead=dead,
            dtype=DTYPES[self.settings.precision],
        )
        sae.since_fired.add_(len(batch)).masked_fill_(self.measured.fired, 0)
        if self.measured.threshold is not None:
            sae.threshold.copy_(self.measured.threshold)
        return loss


def build_sae(d: int, component: SaeComponent, seed: int) -> SparseAutoencoder:
    """Return a dictionary for rows of width d with its first weights, not yet prepared."""
    return SparseAutoencoder(d, component.num_features(d), component.name, component.options, seed)


def fit_sae(
    rows: StoreRows,
    num_rows: int,
    component: SaeComponent,
    settings: SaeTrainSection,
    *,
    seed: int,
    frozen_decoder: bool = False,
    device: torch.device | str = "cpu",
) -> SparseAutoencoder:
    """Train a dictionary of the first ``num_rows`` rows as `posttrain sae train` does; it takes raw activations.

    ``frozen_decoder``: the encoder alone, on random directions: the baseline that knows nothing of the model.
    """
    sae = build_sae(rows.d, component, seed).to(device)
    sae.prepare(sample_rows(rows, num_rows, seed).to(device))
    sae.W_dec.requires_grad_(not frozen_decoder)
    learner = Learner(sae, settings)
    batches = RowBatches(rows, num_rows, min(settings.batch, num_rows), seed)
    while learner.step < settings.steps:
        learner.update(batches.of_step(learner.step).to(device))
    return sae.requires_grad_(False).fold()


# Quality.


@dataclass(frozen=True, slots=True)
class Quality:
    """A dictionary on some rows.

    ``fvu``; ``l0`` features per row; ``silent``, ``dense``: shares of features that no row activates, and that are
    active on more than a tenth of the rows.
    """

    rows: int
    fvu: float
    l0: float
    silent: float
    dense: float

    def numbers(self) -> dict[str, float]:
        """Return the numbers for ``metrics.jsonl``."""
        return {"fvu": self.fvu, "l0": self.l0, "silent": self.silent, "dense": self.dense}


def in_batches(rows: StoreRows, start: int, end: int, size: int = 4096) -> Iterator[Tensor]:
    """Yield [n, d] of the rows ``start`` … ``end`` in their order."""
    for first in range(start, end, size):
        yield rows.gather(torch.arange(first, min(first + size, end)))


def median_norm(rows: StoreRows) -> float:
    """Return the median norm of all rows."""
    norms = [x.norm(dim=1) for x in in_batches(rows, 0, rows.num_rows)]
    return float(torch.cat(norms).double().median())


@torch.no_grad()
def measure_quality(sae: SparseAutoencoder, batches: Iterable[Tensor]) -> Quality:
    """Measure quality on batches [n, d] of raw activations, on the dictionary's device."""
    device = sae.b_dec.device
    total = torch.zeros(sae.d, dtype=torch.float64, device=device)
    squares = torch.zeros((), dtype=torch.float64, device=device)
    errors = torch.zeros((), dtype=torch.float64, device=device)
    active = torch.zeros(sae.features, dtype=torch.int64, device=device)
    count = 0
    shift: Tensor | None = None
    for batch in batches:
        x = batch.to(device)
        features = sae.encode(x)
        errors += (sae.decode(features) - x).double().square().sum()
        # about a point near the mean, so that subtracting two large sums does not cost digits
        if shift is None:
            shift = x.double().mean(0)
        moved = x.double() - shift
        total += moved.sum(0)
        squares += moved.square().sum()
        active += (features > 0).sum(0)
        count += len(x)
    assert count > 0, "there are rows to measure on"
    variance = squares - total.square().sum() / count
    return Quality(
        rows=count,
        fvu=float(errors / variance),
        l0=float(active.sum()) / count,
        silent=float((active == 0).double().mean()),
        dense=float((active > 0.1 * count).double().mean()),
    )


@torch.no_grad()
def recover(
    model: Model, sae: SparseAutoencoder, site: str, documents: Sequence[Sequence[int]], limit: float = float("inf")
) -> dict[str, float]:
    """Measure what is recovered on documents (token ids), one at a time: means over the predicted tokens, in nats.

    Returns ``tokens`` (how many were predicted), ``ce``, ``ce_spliced``, ``ce_zero`` and ``ce_recovered``. The first
    token of a document, and activations with a norm above ``limit``, stay as they are: a dictionary does not learn
    them.
    """
    device = device_of(model)
    texts = [torch.tensor([list(ids)], device=device) for ids in documents if len(ids) > 1]
    if not texts:
        raise UsageError("eval.documents: splicing takes a document of two tokens; none that is held out has them")

    def but_for_outliers(change: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        flat = values.reshape(-1, values.shape[-1]).float()
        new = change(flat).reshape(values.shape).to(values.dtype)
        stays = values.float().norm(dim=-1, keepdim=True) > limit
        stays[:, 0] = True
        return torch.where(stays, values, new)

    def cross_entropy(change: Callable[[Tensor], Tensor] | None) -> float:
        total = 0.0
        place: AbstractContextManager[None] = nullcontext()
        if change is not None:
            place = replaced(model, site, lambda x: but_for_outliers(change, x))
        with place:
            for tokens in texts:
                logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
                log_probs = torch.log_softmax(logits.float(), dim=-1)
                total -= float(log_probs.gather(1, tokens[0, 1:, None]).sum(dtype=torch.float64))
                measured.num_done += 1
        return total / count

    count = sum(tokens.shape[1] - 1 for tokens in texts)
    with phase("measuring the model with the dictionary in place", 3 * len(texts), "documents") as measured:
        ce = cross_entropy(None)
        spliced = cross_entropy(sae.to(device))
        zero = cross_entropy(torch.zeros_like)
    recovered = float("nan")
    if zero != ce:
        recovered = (zero - spliced) / (zero - ce)
    return {"tokens": float(count), "ce": ce, "ce_spliced": spliced, "ce_zero": zero, "ce_recovered": recovered}
