"""Loss configurations to test, and synthetic float64 batches.

A batch maps names to tensors with B rows and T tokens; ``x[b, t]`` describes token t:

* ``logprobs`` ``[B, T]``: policy, differentiable;
* ``mask`` ``bool [B, T]``: True for trained tokens;
* ``old_logprobs``, ``ref_logprobs``, ``sampler_logprobs`` ``[B, T]``: policy before the update, reference, sampling
  engine;
* ``advantages`` ``[B, T]``, and ``row_advantages`` ``[B]``, the same as one value per row;
* ``entropy`` ``[B, T]``: policy, differentiable;
* ``student_logits``, ``teacher_logits`` ``[B, T, V]``; distillation is differentiated by student logits.

Rows for preference losses are pairs: chosen, rejected, chosen, rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Fields = dict[str, Tensor]
FieldTensors = Mapping[str, Tensor]
# One optimizer step: row indices per micro-batch.
MicroBatches = Sequence[Sequence[int]]

LEAVES = ("logprobs", "entropy", "student_logits")  # a loss is differentiated by these
NUM_CLASSES = 3
SHARPEST = 0.7  # of the differences between two policies, in nats
# Cycled over rows and added to log-ratios, so that row means fall beyond a clip on either side, or inside.
ROW_DRIFTS = (0.45, -0.45, -0.2, 0.2)


@dataclass(frozen=True, slots=True)
class Config:
    """The requested loss.

    Attributes:
        objective: as in ``OBJECTIVES``.
        aggregation: ``token_mean``, ``sequence_mean``, ``constant`` (sum over rows × ``length``), ``pair_mean``.
        clip_low, clip_high: ratio clip, 1 − ε_low and 1 + ε_high; for ``gmpo`` the log-ratio, ±ε_high. ``cispo``
            clips its weight.
        tau_positive, tau_negative: for ``sapo``.
        beta: for preference losses; for ``orpo`` the odds term's weight. ``gamma``: SimPO's margin.
        label_smoothing: for ``dpo``.
        kl_coef: β in ``+ β · k3`` to the reference, per token.
        entropy_coef: c in ``− c · H``, per token.
        cap: if set, weight values by min(π_old / μ, cap), with μ the sampler, without gradient.
        divergence, jsd_weight: for ``distillation``; ``jsd`` uses the teacher's weight in the mixture.
        length: for ``constant``, in tokens.
        accumulation: configured micro-batches per step; an epoch's final step may have fewer.
    """

    objective: str
    aggregation: str = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.3
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    beta: float = 0.5
    gamma: float = 0.3
    label_smoothing: float = 0.0
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    cap: float | None = None
    divergence: str = "forward_kl"
    jsd_weight: float = 0.1
    length: int = 8
    accumulation: int = 1

    @property
    def label(self) -> str:
        """Name the case: objective, aggregation and additional terms."""
        added = [self.objective]
        if self.objective == "distillation":
            added.append(self.divergence)
        if self.aggregation != "pair_mean":
            added.append(self.aggregation)
        for option in ("label_smoothing", "kl_coef", "entropy_coef", "cap"):
            if getattr(self, option):
                added.append(f"{option} {getattr(self, option):g}")
        return ", ".join(added)


@dataclass(frozen=True, slots=True)
class ObjectiveCase:
    """Batch fields and options used by an objective. ``rows_per_unit``: 2 for pairs."""

    fields: tuple[str, ...]
    options: tuple[str, ...] = ()
    rows_per_unit: int = 1

    @property
    def has_advantages(self) -> bool:
        """True of a policy gradient."""
        return "advantages" in self.fields


_RATIO = ("advantages", "old_logprobs")
OBJECTIVES = {
    "cross_entropy": ObjectiveCase(()),
    "reinforce": ObjectiveCase(("advantages",)),
    "grpo": ObjectiveCase(_RATIO, ("clip_low", "clip_high")),
    "gspo": ObjectiveCase(_RATIO, ("clip_low", "clip_high")),
    "cispo": ObjectiveCase(_RATIO, ("clip_high",)),
    "gmpo": ObjectiveCase(_RATIO, ("clip_high",)),
    "sapo": ObjectiveCase(_RATIO, ("tau_positive", "tau_negative")),
    "distillation": ObjectiveCase(("teacher_logits",)),
    "dpo": ObjectiveCase(("ref_logprobs",), ("beta",), 2),
    "ipo": ObjectiveCase(("ref_logprobs",), ("beta",), 2),
    "simpo": ObjectiveCase((), ("beta", "gamma"), 2),
    "orpo": ObjectiveCase((), ("beta",), 2),
}
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")


def all_configs() -> list[Config]:
    """Return every configuration that a loss is asked for; it may decline any."""
    policy = [name for name, about in OBJECTIVES.items() if about.rows_per_unit == 1 and name != "distillation"]
    configs = [Config(name, aggregation) for name in policy for aggregation in AGGREGATIONS]
    configs += [Config("grpo", kl_coef=0.4), Config("grpo", entropy_coef=0.2), Config("grpo", cap=1.2)]
    configs += [Config("distillation", divergence=name) for name in ("forward_kl", "reverse_kl", "jsd")]
    configs += [Config(name, "pair_mean") for name in ("dpo", "ipo", "simpo", "orpo")]
    return [*configs, Config("dpo", "pair_mean", label_smoothing=0.2)]


def read_fields(config: Config) -> tuple[str, ...]:
    """List batch fields read by a configuration, besides leaves and mask."""
    added = {"ref_logprobs": config.kl_coef, "entropy": config.entropy_coef, "sampler_logprobs": config.cap}
    return (*OBJECTIVES[config.objective].fields, *(name for name, is_on in added.items() if is_on))


def acting_options(config: Config) -> tuple[str, ...]:
    """List options that affect a configuration's loss."""
    added = [name for name in ("label_smoothing", "kl_coef", "entropy_coef", "cap") if getattr(config, name)]
    if config.divergence == "jsd":
        added.append("jsd_weight")
    if config.aggregation == "constant":
        added.append("length")
    return (*OBJECTIVES[config.objective].options, *added)


def made_batch(lengths: Sequence[int], *, width: int | None = None, seed: int = 16) -> Fields:
    """Build a batch where row b has ``lengths[b]`` trained tokens, left-aligned and padded.

    Token and row ratios fall on both sides of 1, both beyond and within a clip of 0.3; advantages have both signs.
    """
    rows = len(lengths)
    if width is None:
        width = max(lengths)
    random = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=random, dtype=torch.float64)

    positions = torch.arange(width)
    mask = positions[None] < torch.tensor(list(lengths))[:, None]
    logprobs = -0.2 - 1.5 * numbers(rows, width)
    row_advantages = 0.4 + numbers(rows)
    row_advantages[1::2] *= -1.0
    drifts = torch.tensor([ROW_DRIFTS[row % len(ROW_DRIFTS)] for row in range(rows)], dtype=torch.float64)
    distributions = [2.0 * numbers(rows, width, NUM_CLASSES) for _ in range(2)]
    batch = {
        "logprobs": logprobs,
        "old_logprobs": logprobs - drifts[:, None] + SHARPEST * (2.0 * numbers(rows, width) - 1.0),
        "ref_logprobs": logprobs + SHARPEST * (2.0 * numbers(rows, width) - 1.0),
        "entropy": 0.5 + numbers(rows, width),
        "row_advantages": row_advantages,
        "advantages": row_advantages[:, None].expand(rows, width).clone(),
        "student_logits": distributions[0],
        "teacher_logits": distributions[1],
        "mask": mask,
    }
    batch["sampler_logprobs"] = batch["old_logprobs"] + SHARPEST * (2.0 * numbers(rows, width) - 1.0)
    return with_padding(batch, 0.0)


def map_tokens(batch: FieldTensors, change: Callable[[Tensor], Tensor]) -> Fields:
    """Apply ``change`` to every per-token field."""
    changed = dict(batch)
    for name, x in batch.items():
        if x.ndim > 1:
            changed[name] = change(x)
    return changed


def with_padding(batch: FieldTensors, content: float) -> Fields:
    """Fill untrained positions with multiples of ``content``, different in each field."""
    changed = dict(batch)
    for number, name in enumerate(batch):
        x = batch[name]
        if x.ndim > 1 and name != "mask":
            outside = ~batch["mask"].view(*batch["mask"].shape, *[1] * (x.ndim - 2))
            changed[name] = x.masked_fill(outside, content * (number + 1))
    return changed


def select_rows(batch: FieldTensors, rows: Sequence[int]) -> Fields:
    """Return some rows, in order."""
    return {name: x[list(rows)] for name, x in batch.items()}


def widened(batch: FieldTensors, columns: int) -> Fields:
    """Append padding columns."""

    def widen(x: Tensor) -> Tensor:
        more = torch.zeros(x.shape[0], columns, *x.shape[2:], dtype=x.dtype)
        return torch.cat([x, more], dim=1)

    return map_tokens(batch, widen)


def with_hole(batch: FieldTensors, at: int, size: int) -> Fields:
    """Insert ``size`` untrained tokens before token ``at`` in every row, like tool output."""

    def spread(x: Tensor) -> Tensor:
        hole = torch.zeros(x.shape[0], size, *x.shape[2:], dtype=x.dtype)
        return torch.cat([x[:, :at], hole, x[:, at:]], dim=1)

    return map_tokens(batch, spread)


def with_empty_rows(batch: FieldTensors, count: int = 1) -> Fields:
    """Append fully masked rows."""
    rows = batch["mask"].shape[0]
    longer = select_rows(batch, [*range(rows), *range(count)])
    longer["mask"] = longer["mask"].clone()
    longer["mask"][rows:] = False
    return longer
