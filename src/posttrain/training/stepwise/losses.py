"""The losses of Tinker's protocol by their names there, each a registered objective; the sum over tokens is the loss.

A threshold of theirs is a ratio (0.8, 1.2), where an objective's option is the distance from 1.
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
# Ratios are at most e^20 (see ``log_ratio``), so nothing is clipped at this one.
_NEVER = 1e9
# Each input of a row, by the batch field that objectives read.
_RL_INPUTS = {"logprobs": "old_logprobs", "advantages": "advantages"}
_ABSENT = {
    "custom": "a loss of your own runs in the client (forward_backward_custom), which asks for cross_entropy here",
    "stable_reinforce": "this server records nothing about sampled sequences; use importance_sampling, ppo or cispo",
}


@dataclass(frozen=True, slots=True)
class NamedLoss:
    """A loss of the protocol.

    objective: the registered one. inputs: of a row, with the batch field that each becomes. defaults: of its options.
    options: from the protocol's options to the objective's. narrows: the tokens that the objective may read.
    """

    objective: str
    inputs: Mapping[str, str]
    defaults: Mapping[str, float] = field(default_factory=dict)
    options: Callable[[Mapping[str, float]], dict[str, object]] = dict
    narrows: Callable[[Batch], Tensor] | None = None


def _clip(given: Mapping[str, float]) -> dict[str, object]:
    return {"clip_low": 1.0 - given[LOW], "clip_high": given[HIGH] - 1.0}


def _sampled(batch: Batch) -> Tensor:
    """Leave out the prompt, where clients write 0 for both numbers; a penalty on the log-ratio would count there."""
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
    """A loss with its options. ``fields``: the batch field of each input of a row."""

    name: str
    objective: Objective
    fields: Mapping[str, str]


def choose_loss(name: str, options: Mapping[str, float | str]) -> ChosenLoss:
    """Return a loss by its name in the protocol.

    Raises:
        UsageError: no such loss, or an option that it does not have or cannot take.
    """
    if name in _ABSENT:
        raise UsageError(f"loss_fn: {name!r} is not here: {_ABSENT[name]}")
    if name not in LOSSES:
        raise UsageError(f"loss_fn: there is no loss {name!r}.{suggest(name, LOSSES)} There are: {', '.join(LOSSES)}")
    chosen = LOSSES[name]
    given = dict(chosen.defaults)
    for key, value in options.items():
        if key not in given:
            takes = ", ".join(chosen.defaults) or "none"
            near = suggest(key, chosen.defaults)
            raise UsageError(f"loss_fn_config.{key}: {name} has no such option.{near} It has: {takes}")
        if isinstance(value, str) or not -_NEVER < value < _NEVER:
            raise UsageError(f"loss_fn_config.{key}: {value!r} is no number that this option takes; give one like 0.5")
        given[key] = value
    if LOW in given and not 0.0 <= given[LOW] <= 1.0 <= given[HIGH]:
        raise UsageError(
            f"loss_fn_config: {LOW} {given[LOW]} and {HIGH} {given[HIGH]} are no ratios around 1; give 0 <= low <= 1 "
            "<= high"
        )
    bound = registry.find("objective", chosen.objective, "loss_fn").bind(chosen.options(given), "loss_fn_config")
    return ChosenLoss(name, partial(_evaluate, bound, chosen.narrows), chosen.inputs)


def check_sequences(datum: Datum, where: str) -> None:
    """Refuse advantages outside of the tokens whose ratio GSPO takes, which it could not weigh.

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
    """Weigh every token by 1: the loss is a sum, and the caller divides."""
    return mask.to(torch.float64)


def _evaluate(objective: Objective, narrows: Callable[[Batch], Tensor] | None, outputs: Outputs, batch: Batch) -> Loss:
    """Apply an objective to the targets, one after the other if a position has several."""
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
