"""Relatives of the faults of the study, on one layer: what is named must not depend on how a fault is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from balanced_runs import Read, reading
from faults.patches import (
    Fault,
    Patch,
    of_attribute,
    of_generate,
    of_mask,
    of_pieces,
    of_registered,
    of_update,
    of_values,
    shift_mask,
)
from posttrain.algorithms.objectives import surrogate
from posttrain.errors import PosttrainError
from posttrain.sampling import rollout as graded
from posttrain.sampling.native import schedule
from posttrain.sampling.native.engine import NativeEngine
from posttrain.training import advantages, idle_rows, loop, step
from posttrain.training.sources import RowOrder, rollouts
from posttrain.training.sources.unit_batches import UnitBatches
from posttrain.training.sources.units import TaskUnits
from posttrain.types import Loss
from small_runs import one_layer_recipe, watched

SFT = {"kind": "sft"}
DPO = {"kind": "judged", "objective": "dpo"}
PAIRS_OF_ROWS = {"train": {"micro_batch_rows": 2}}
KL = {"regularize": {"kl_coef": 0.1}}


def part_of_gradient(share: float) -> Patch:
    """The value as it is, and its gradient times ``share``."""

    def change(loss: Loss, outputs: Any, batch: Any) -> Loss:
        fixed = loss.values.detach()
        return Loss(fixed + share * (loss.values - fixed), loss.metrics)

    return of_values(change)


def one_seed(generate: Any) -> Any:
    def changed(self: Any, prompts: Any, keys: Any, sampling: Any) -> Any:
        return generate(self, prompts, [[row[0]] * len(row) for row in keys], sampling)

    return changed


def cold_draws(draw: Any) -> Any:
    """Draw at a lower temperature, and report the probabilities of the higher one."""

    def changed(logits: Any, uniforms: Any, sampling: Any) -> Any:
        token, _ = draw(logits / 0.5, uniforms, sampling)
        table = (logits / (sampling.temperature or 1.0)).float().softmax(-1)
        return token, table.gather(-1, token.view(-1, 1)).view(token.shape)

    return changed


def half_of_rows(minibatch: Any) -> Any:
    def changed(self: Any, *arguments: Any) -> Any:
        batch = minibatch(self, *arguments)
        return batch.select(range(batch.num_rows // 2))

    return changed


def interleaved(collect: Any) -> Any:
    def changed(sampler: Any, request: Any) -> Any:
        groups, seconds = collect(sampler, request)
        flat = [answer for pair in zip(*groups, strict=True) for answer in pair]
        size = request.group
        return [flat[start : start + size] for start in range(0, len(flat), size)], seconds

    return changed


def of_parts(sum_up: Any) -> Any:
    def changed(parts: Any, extracted: Any) -> Any:
        grade = sum_up(parts, extracted)
        return replace(grade, parts={name: value / 2 for name, value in grade.parts.items()})

    return changed


def biased_std(compute: Any) -> Any:
    def changed(self: Any, groups: Any) -> Any:
        return [(g - g.mean()) / (g.std(correction=0) + 1e-4) for g in groups]

    return changed


def row_means(weigh: Any) -> Any:
    def changed(aggregate: Any, batch: Any, level: str) -> Any:
        mask = batch.mask.double()
        return mask / mask.sum(dim=1, keepdim=True) / len(mask)

    return changed


def all_idle(find: Any) -> Any:
    def changed(batch: Any, vanishes: Any) -> Any:
        idle = find(batch, vanishes)
        idle[: len(idle) // 2] = True
        return idle

    return changed


def without_end(sample: Any) -> Any:
    def changed(self: Any, row: Any, *rest: Any) -> Any:
        made = sample(self, row, *rest)
        made.mask[-1] = False
        return made

    return changed


def swapped(unit_at: Any) -> Any:
    def changed(self: Any, place: int) -> Any:
        return tuple(reversed(unit_at(self, place)))

    return changed


def later_passes(turn: Any) -> Any:
    def changed(self: Any, batch: int, attempt: int = 0) -> Any:
        first = turn(self, 0, attempt)
        return replace(first, epochs=[batch] * len(first.epochs))

    return changed


def without_momentum(optimizer: Any, *rest: Any) -> tuple[Any, ...]:
    for group in optimizer.param_groups:
        group["betas"] = (0.0, 0.999)
    return optimizer, *rest


def frozen(apply: Any) -> Any:
    def changed(optimizer: Any, own: Any, *rest: Any) -> Any:
        kept = [(p, p.detach().clone()) for p in own[::2]]
        norm = apply(optimizer, own, *rest)
        for parameter, before in kept:
            parameter.data.copy_(before)
        return norm

    return changed


def of_estimator(change: Callable[[torch.Tensor], torch.Tensor]) -> Patch:
    return lambda m: m.setitem(surrogate.KL_ESTIMATORS, "k3", change)


RELATIVES = [
    Fault("the mask is shifted by one", of_mask(shift_mask), ("tokens",)),
    Fault("a third of the gradient", part_of_gradient(1 / 3), ("gradient",), 2, KL),
    Fault("no gradient", part_of_gradient(0.0), ("gradient",), 2),
    Fault("the gradient goes up", part_of_gradient(-1.0), ("gradient",), 2),
    Fault(
        "standard deviation of all, not of all but one",
        of_attribute(advantages.AdvantageEstimator, "from_groups", biased_std),
        ("advantage",),
    ),
    Fault("mean of rows in place of tokens", of_attribute(step, "_weigh", row_means), ("weights", "loss"), 2, SFT),
    Fault("k1 in place of k3", of_estimator(lambda r: r), ("loss", "gradient"), 3, KL),
    Fault("a KL of twice the weight", of_estimator(lambda r: 2 * (torch.expm1(-r) + r)), ("loss",), 3, KL),
    Fault("halved parts of rewards", of_attribute(graded, "_sum_up", of_parts), ("reward",)),
    Fault("answers of two prompts in a group", of_attribute(rollouts, "collect", interleaved), ("groups",)),
    Fault("one seed for a group", of_attribute(NativeEngine, "generate", one_seed), ("samples",)),
    Fault(
        "draws that are colder than their probabilities",
        of_attribute(schedule, "draw", cold_draws),
        ("draws",),
        3,
        {"rollout": {"max_tokens": 40}},
    ),
    Fault(
        "half of the rows",
        of_attribute(rollouts.RolloutSource, "_minibatch", half_of_rows),
        ("rows",),
        2,
        {"train": {"num_minibatches": 2}},
    ),
    Fault("the first prompts in every pass", of_attribute(RowOrder, "round_of", later_passes), ("prompts",)),
    Fault(
        "twice the scheduled rate",
        of_attribute(loop, "learning_rate", lambda rate: lambda options, n: 2 * rate(options, n)),
        ("lr",),
    ),
    Fault("no momentum", of_update(without_momentum), ("update",), 3),
    Fault("every other tensor is never updated", of_attribute(loop, "apply_update", frozen), ("update",)),
    Fault(
        "rows with an advantage are skipped",
        of_attribute(idle_rows, "find_idle_rows", all_idle),
        ("idle", "gradient"),
        2,
    ),
    Fault(
        "the end of a demonstration is not trained",
        of_attribute(UnitBatches, "_sample", without_end),
        ("tokens",),
        2,
        SFT,
    ),
    Fault("chosen and rejected are swapped", of_attribute(TaskUnits, "__getitem__", swapped), ("prompts",), 3, DPO),
    Fault("mean of micro-batches' means", of_pieces(True), ("weights", "loss"), 2, SFT | PAIRS_OF_ROWS),
    Fault(
        "a reference of other weights",
        of_registered("ref_logprobs", lambda x: x - 0.01 * (x != 0)),
        ("reference",),
        1,
        KL,
    ),
    Fault("the sampler's end tokens are lost", of_generate(lambda e, p, s: (p, replace(s, max_tokens=5))), ("finish",)),
]


@pytest.mark.parametrize("fault", RELATIVES, ids=lambda fault: fault.label)
def test_balances_of_a_relative_name_it(fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = dict(fault.changes)
    kind = changes.pop("kind", "grpo")
    train = {"steps": fault.by} | changes.pop("train", {})
    recipe = one_layer_recipe(kind, **changes, train=train)
    fault.patch(monkeypatch)
    read = Read()
    with reading(read):
        try:
            watched(tmp_path, recipe, read.events)
        except PosttrainError as refused:
            read.events("notice", {"message": str(refused)})
    named = set(read.violated) & set(fault.names)
    assert named, f"{fault.label}: {read.violated}, {read.worst}, {read.notices}"
