"""Losses in Tinker's protocol, mapped to registered objectives and summed over tokens.

Tinker thresholds are ratios (0.8, 1.2), while objective options are distances from 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from posttrain import registry
from posttrain.errors import UsageError
from posttrain.registry import suggest
from posttrain.training.step import Objective
from posttrain.training.stepwise.datums import TARGET_WEIGHTS, Datum
from posttrain.types import Batch, Loss, Outputs

LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
# Ratios are at most e^20 (see ``log_ratio``), so this bound never clips.
_NEVER = 1e9
# Batch field to row input name.
_RL_INPUTS = {"logprobs": "old_logprobs", "advantages": "advantages"}
_ABSENT = {
    "custom": "custom losses run in the client (forward_backward_custom), which calls cross_entropy on the server",
    "stable_reinforce": "this server does not store sampled sequences; use importance_sampling, ppo or cispo",
}


@dataclass(frozen=True, slots=True)
class NamedLoss:
    """Protocol loss.

    objective: registered objective. inputs: row inputs and their batch fields. defaults: default options. options:
    maps protocol options to objective options. narrows: restricts trained tokens.
    """

    objective: str
    inputs: Mapping[str, str]
    defaults: Mapping[str, float] = field(default_factory=dict)
    options: Callable[[Mapping[str, float]], dict[str, object]] = dict
    narrows: Callable[[Batch], Tensor] | None = None


def _clip(given: Mapping[str, float]) -> dict[str, object]:
    return {"clip_low": 1.0 - given[LOW], "clip_high": given[HIGH] - 1.0}


def _sampled(batch: Batch) -> Tensor:
    """Exclude the prompt, where clients send zeros for both values; a log-ratio penalty would otherwise count there."""
    return batch.mask & ((batch.field("old_logprobs") != 0) | (batch.field("advantages") != 0))


def _in_sequence(batch: Batch) -> Tensor:
    return batch.mask & (batch.field("sequence_ratio_mask") != 0)


LOSSES: dict[str, NamedLoss] = {
    "cross_entropy": NamedLoss("cross_entropy", {"weights": "correction"}),
    "importance_sampling": NamedLoss("grpo", _RL_INPUTS, options=lambda _: {"clip_low": 1.0, "clip_high": _NEVER}),
    "ppo": NamedLoss("grpo", _RL_INPUTS, {LOW: 0.8, HIGH: 1.2}, _clip),
    "cispo": NamedLoss("cispo", _RL_INPUTS, {LOW: 0.8, HIGH: 1.2}, _clip),
    "dro": NamedLoss("dro", _RL_INPUTS, {"beta": 0.05}, narrows=_sampled),
    "gspo": NamedLoss(
        "gspo_token",
        _RL_INPUTS | {"sequence_ratio_mask": "sequence_ratio_mask"},
        {LOW: 1.0 - 3e-4, HIGH: 1.0 + 4e-4},
        _clip,
        _in_sequence,
    ),
}


@dataclass(frozen=True, slots=True)
class ChosenLoss:
    """Loss with chosen options. ``fields``: batch field for each row input."""

    name: str
    objective: Objective
    fields: Mapping[str, str]


def choose_loss(name: str, options: Mapping[str, float | str]) -> ChosenLoss:
    """Look up a loss by protocol name.

    Raises:
        UsageError: unknown loss or option, or an invalid value.
    """
    if name in _ABSENT:
        raise UsageError(f"loss_fn: {name!r} is not supported: {_ABSENT[name]}")
    if name not in LOSSES:
        raise UsageError(f"loss_fn: unknown loss {name!r}.{suggest(name, LOSSES)} Known: {', '.join(LOSSES)}")
    chosen = LOSSES[name]
    given = dict(chosen.defaults)
    for key, value in options.items():
        if key not in given:
            takes = ", ".join(chosen.defaults) or "none"
            near = suggest(key, chosen.defaults)
            raise UsageError(f"loss_fn_config.{key}: {name} has no such option.{near} It has: {takes}")
        if isinstance(value, str) or not -_NEVER < value < _NEVER:
            raise UsageError(
                f"loss_fn_config.{key}: {value!r} is not a valid number for this option; give one like 0.5"
            )
        given[key] = value
    if LOW in given and not 0.0 <= given[LOW] <= 1.0 <= given[HIGH]:
        raise UsageError(
            f"loss_fn_config: {LOW} {given[LOW]} and {HIGH} {given[HIGH]} are invalid ratio bounds; give 0 <= low <= 1 "
            "<= high"
        )
    bound = registry.find("objective", chosen.objective, "loss_fn").bind(chosen.options(given), "loss_fn_config")
    return ChosenLoss(name, partial(_evaluate, bound, chosen.narrows), chosen.inputs)


def check_sequences(datum: Datum, where: str) -> None:
    """Reject advantages outside the tokens covered by GSPO's sequence ratio, where they would have no effect.

    Raises:
        UsageError: with the position.
    """
    if "sequence_ratio_mask" not in datum.inputs:
        return
    outside = (datum.inputs["sequence_ratio_mask"] == 0) & (datum.inputs["advantages"] != 0)
    if bool(outside.any()):
        place = int(outside.nonzero()[0, 0])
        raise UsageError(
            f"{where}.advantages: not 0 at position {place}, where sequence_ratio_mask is 0; mark the position, or set "
            "its advantage to 0"
        )


def token_sum(mask: Tensor) -> Tensor:
    """Weigh every token by 1: the loss is a sum, and callers normalize."""
    return mask.to(torch.float64)


def _evaluate(objective: Objective, narrows: Callable[[Batch], Tensor] | None, outputs: Outputs, batch: Batch) -> Loss:
    """Apply an objective to targets, one at a time for multiple targets per position."""
    if narrows is not None:
        batch = replace(batch, mask=narrows(batch))
    if outputs.candidate_logprobs is None:
        return Loss(objective(outputs, batch).values)
    columns = outputs.candidate_logprobs.unbind(dim=-1)
    weights = batch.fields.get(TARGET_WEIGHTS)
    if weights is None:
        return Loss(objective(Outputs(columns[0]), batch).values)
    values = [objective(Outputs(column), batch).values for column in columns]
    return Loss((torch.stack(values, dim=-1) * weights).sum(dim=-1))
