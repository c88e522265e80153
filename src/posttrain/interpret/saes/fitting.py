"""Dictionary training: data rows, loss, optimizer steps, in-memory training, and quality.

``sae_training`` runs the same steps with checkpoints and metrics.

FVU = Σ‖x − x̂‖² / Σ‖x − μ‖², with one global μ and float64 sums. Averaging per-row ratios, or measuring variance
around 0, would look far better. CE recovered = (CE_zero − CE_spliced) / (CE_zero − CE): ``spliced`` replaces the
model's activations at the site by reconstructions, ``zero`` by zeros.
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
PREFIX = "dictionary."  # prefix for weight names in stored states


class StoreRows:
    """Rows from one site in recorded activations.

    ``site`` is optional if unique. ``source``: ``model``, ``base``, ``post`` or ``difference`` (post − base); None if
    a single model was recorded. ``UsageError``: no such site or source.
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
                what = "required"
            else:
                what = f"unknown source {source!r}"
            raise UsageError(f"activations.source: {what}; available: {', '.join(known)}")

    def gather(self, rows: Tensor) -> Tensor:
        """Read float32 [n, d] for rows ``int64 [n]``."""
        if self.source != DIFFERENCE:
            return self.store.gather(rows, self.site, self.source).float()
        base = self.store.gather(rows, self.site, "base").float()
        post = self.store.gather(rows, self.site, "post").float()
        return post - base

    def boundary(self, row: int) -> int:
        """Find the first row in the document containing ``row``."""

        def document(number: int) -> int:
            return int(self.store.documents(torch.tensor([number]))[0])

        return bisect_left(range(row), document(row), key=document)

    def whole_documents(self, limit: int) -> Iterator[tuple[int, int]]:
        """Yield (start, end) covering whole documents, up to ``limit`` rows unless one document is longer."""
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
    """Build the error raised if fewer rows than a batch remain for training."""
    return UsageError(
        f"{rows} rows of activations minus {held_out:,} held out (eval.rows) leave less than a "
        f"batch of {batch:,} (train.batch). Record more, or lower either"
    )


def first_held_out(rows: StoreRows, held_out: int, batch: int) -> int:
    """Count training rows: all except the last ``held_out``, rounded to a document boundary."""
    start = rows.num_rows - held_out
    if start > 0:
        start = rows.boundary(start) or start  # a single document is split
    if start < batch:
        raise too_few_rows(f"{rows.num_rows:,}", held_out, batch)
    return start


def sample_rows(rows: StoreRows, num_rows: int, seed: int) -> Tensor:
    """Sample up to ``SAMPLE_ROWS`` from the first ``num_rows`` rows, by seed: float32 [n, d]."""
    size = min(SAMPLE_ROWS, num_rows)
    chosen = generator(seed, "dictionary sample").integers(0, num_rows, size=size)
    return rows.gather(torch.from_numpy(np.sort(chosen)))


class RowBatches:
    """Training batches: consecutive epochs of shuffled rows, without gaps between epochs.

    Step s uses positions s·batch … (s + 1)·batch in this sequence, so training can resume at any step.
    """

    def __init__(self, rows: StoreRows, num_rows: int, batch: int, seed: int) -> None:
        self.rows = rows
        self.num_rows = num_rows
        self.batch = batch
        shuffled = partial(permutation, seed, "dictionary rows")
        self.order = lru_cache(maxsize=2)(lambda epoch: torch.from_numpy(shuffled(epoch, num_rows)))

    def of_step(self, step: int) -> Tensor:
        """Read the batch for a step, counted from 0: float32 ``[batch, d]``."""
        return self.rows.gather(self.indices(step))

    def indices(self, step: int) -> Tensor:
        """Look up a step's row indices, ``int64 [batch]``."""
        places = torch.arange(step * self.batch, (step + 1) * self.batch)
        epochs = places // self.num_rows
        parts = []
        for epoch in epochs.unique().tolist():
            of_epoch = places[epochs == epoch] % self.num_rows
            parts.append(self.order(epoch)[of_epoch])
        return torch.cat(parts)


# Dictionary loss with hand-written gradients for the matrix products. For scaled rows x [n, d]:
#
#     c = b_enc − b_dec·W_enc     pre = x·W_enc + c     f = kind(pre)     x̂ = f·W_dec + b_dec
#     loss = mean (x − x̂)² + penalty(f) + auxk · mean (x − x̂ − ê)²
#
# ê (AuxK, Gao et al. 2024) reconstructs the remaining error from features inactive for long: the d/2 largest
# pre-activations among them, per row.
#
# Hand-written gradients are faster than autograd: the decoder bias is merged into the encoder bias (five matrix
# products instead of six, without copying x), and bf16 rounds each operand once. Weights, biases, their gradients and
# all sums stay fp32. Only ``pre`` to ``f`` uses autograd, so kinds are plain functions.


@dataclass(slots=True)
class StepMeasures:
    """Measures from one step, as tensors: ``fired`` bool [F], ``features`` [n, F], updated running ``threshold``."""

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
    """Compute the loss for scaled rows [n, d], with custom gradients on ``backward``, and step measures.

    ``progress`` in [0, 1]: completed fraction of training. ``auxk``: weight for AuxK, which revives features marked in
    ``dead`` (bool [F]). ``dtype``: for matrix products.
    """
    with torch.no_grad():
        loss, gradients, measured = _evaluate(sae, x, progress, auxk, dead, dtype)
    weights = (sae.W_enc, sae.W_dec, sae.b_enc, sae.b_dec)
    return _Loss.apply((loss, gradients), *weights), measured


class _Loss(torch.autograd.Function):
    """Loss with precomputed gradients, returned once by the backward pass."""

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
    # active features have nonzero gradient; cheaper than scanning n times as many activations
    fired = (on_decoder != 0).any(dim=1)
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
    """Compute mean (x − x̂ − ê)²; adds ``auxk`` times its gradients, in place, to ``on_pre`` and ``on_decoder``.

    The error is treated as constant: only dead features receive gradients.
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
    """Trains a prepared dictionary on its device; ``measured`` and ``grad_norm`` describe the latest step."""

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
        """Compute the next step's learning rate: linear warmup, then constant, then linear decay."""
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
        """Run one optimizer step on raw rows [n, d]."""
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
        """Collect training state, using names from version 0.2.0."""
        weights = {f"{PREFIX}{name}": value for name, value in self.dictionary.state_dict().items()}
        return {"global_step": self.step, "state_dict": weights, "optimizer_states": [self.optimizer.state_dict()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore training from ``state``."""
        weights = {name.removeprefix(PREFIX): value for name, value in state["state_dict"].items()}
        self.dictionary.load_state_dict(weights)
        self.optimizer.load_state_dict(state["optimizer_states"][0])
        self.step = int(state["global_step"])

    def _loss(self, batch: Tensor) -> Tensor:
        """Compute the loss for raw rows [n, d], updating firing counts and running threshold."""
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
    """Build an initialized dictionary for rows of width d; call ``prepare`` before training."""
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
    """Train a dictionary on the first ``num_rows`` rows like `posttrain sae train`; returns one for raw activations.

    ``frozen_decoder``: train only the encoder, on random directions: a baseline independent of the model.
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
    """Dictionary quality on held-out rows.

    ``fvu``; ``l0``: features per row; ``silent``, ``dense``: fraction of features never active, and active on over a
    tenth of rows.
    """

    rows: int
    fvu: float
    l0: float
    silent: float
    dense: float

    def numbers(self) -> dict[str, float]:
        """Convert to numbers for ``metrics.jsonl``."""
        return {"fvu": self.fvu, "l0": self.l0, "silent": self.silent, "dense": self.dense}


def in_batches(rows: StoreRows, start: int, end: int, size: int = 4096) -> Iterator[Tensor]:
    """Yield [n, d] for rows ``start`` … ``end``, in order."""
    for first in range(start, end, size):
        yield rows.gather(torch.arange(first, min(first + size, end)))


def median_norm(rows: StoreRows) -> float:
    """Compute the median norm over all rows."""
    norms = [x.norm(dim=1) for x in in_batches(rows, 0, rows.num_rows)]
    return float(torch.cat(norms).double().median())


@torch.no_grad()
def measure_quality(sae: SparseAutoencoder, batches: Iterable[Tensor]) -> Quality:
    """Measure quality on raw activation batches [n, d], on the dictionary's device."""
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
        # shift by an approximate center, to avoid cancellation between large sums
        if shift is None:
            shift = x.double().mean(0)
        moved = x.double() - shift
        total += moved.sum(0)
        squares += moved.square().sum()
        active += (features > 0).sum(0)
        count += len(x)
    assert count > 0, "no rows to measure"
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
    """Measure recovered cross-entropy on documents (token ids), averaged over predicted tokens, in nats.

    Returns ``tokens`` (predicted tokens), ``ce``, ``ce_spliced``, ``ce_zero`` and ``ce_recovered``. Each document's
    first token, and activations with a norm above ``limit``, are never replaced: dictionaries are not trained on
    them.
    """
    device = device_of(model)
    texts = [torch.tensor([list(ids)], device=device) for ids in documents if len(ids) > 1]
    if not texts:
        raise UsageError("eval.documents: splicing needs at least 2 tokens, but held-out documents are shorter")

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
    with phase("measuring the model with the dictionary spliced in", 3 * len(texts), "documents") as measured:
        ce = cross_entropy(None)
        spliced = cross_entropy(sae.to(device))
        zero = cross_entropy(torch.zeros_like)
    recovered = float("nan")
    if zero != ce:
        recovered = (zero - spliced) / (zero - ce)
    return {"tokens": float(count), "ce": ce, "ce_spliced": spliced, "ce_zero": zero, "ce_recovered": recovered}
