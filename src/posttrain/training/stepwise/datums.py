"""Training rows supplied by a caller: token ids, targets per position, and loss inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.errors import UsageError
from posttrain.sampling.base import check_ids
from posttrain.types import Batch, Sample, collate

TARGETS = "target_tokens"
MAX_TARGETS = 128  # per position
TARGET_WEIGHTS = "target_weights"  # batch field with target weights, for multiple targets per position


@dataclass(frozen=True, slots=True)
class Datum:
    """Row with N tokens and a target at each: ``targets[i]`` follows ``ids[:i + 1]``.

    targets: ``int64 [N]``, or ``[N, K]`` for K targets per position; inputs: ``float32`` tensors by name with equal
    shape.
    """

    ids: tuple[int, ...]
    targets: Tensor
    inputs: Mapping[str, Tensor]

    @property
    def follows(self) -> bool:
        """True if every target is the next token, as in ordinary language modeling."""
        if self.targets.ndim != 1:
            return False
        return self.targets[:-1].tolist() == list(self.ids[1:])


def check_datum(datum: Datum, where: str, names: Sequence[str], vocabulary: int, context: int) -> None:
    """Validate a row for a loss; ``names``: inputs used by the loss.

    Raises:
        UsageError: starts with ``where`` and the input name.
    """
    length = len(datum.ids)
    if not 1 <= length <= context:
        raise UsageError(f"{where}.model_input: {length} tokens; the model reads 1 to {context}. Cut the row")
    check_ids(f"{where}.model_input", datum.ids, vocabulary)
    shape = tuple(datum.targets.shape)
    if not shape or len(shape) > 2 or shape[0] != length:
        raise UsageError(
            f"{where}.{TARGETS}: shape {shape} for {length} tokens; give one target at each token, [{length}], or K of "
            f"them, [{length}, K]"
        )
    if len(shape) == 2 and not 1 <= shape[1] <= MAX_TARGETS:
        raise UsageError(f"{where}.{TARGETS}: {shape[1]} targets at each token; give 1 to {MAX_TARGETS}")
    check_ids(f"{where}.{TARGETS}", datum.targets.flatten().tolist(), vocabulary)
    _check_names(datum, where, names)
    for name, values in datum.inputs.items():
        if values.shape != datum.targets.shape:
            raise UsageError(
                f"{where}.{name}: shape {tuple(values.shape)}; {TARGETS} has {shape}. Give one number each"
            )
        if not bool(torch.isfinite(values).all()):
            place = int((~torch.isfinite(values.flatten())).nonzero()[0])
            value = float(values.flatten()[place])
            raise UsageError(f"{where}.{name}: value number {place} is {value}; numbers must be finite")


def _check_names(datum: Datum, where: str, names: Sequence[str]) -> None:
    missing = [name for name in names if name not in datum.inputs]
    unread = [name for name in datum.inputs if name not in names]
    reads = ", ".join((TARGETS, *names))
    if missing:
        raise UsageError(f"{where}.{missing[0]}: missing; this loss needs {reads}")
    if unread:
        raise UsageError(f"{where}.{unread[0]}: not used by this loss; remove it. Inputs: {reads}")


def collate_datums(datums: Sequence[Datum], fields: Mapping[str, str]) -> Batch:
    """Collate rows into a batch. ``tokens[b, i + 1]`` is the target at position i, and every target is trained.

    If targets differ from the next token or there are several, ``teacher_ids`` ``int64 [B, T, K]`` lists them, and
    forward passes return their log-probabilities. ``fields``: batch field name for each input. With multiple targets,
    weights are stored as ``target_weights`` ``[B, T, K]``.
    """
    as_given = all(datum.follows for datum in datums)
    samples = []
    for datum in datums:
        last = int(datum.targets.flatten()[-1])
        ids = (*datum.ids, last)
        samples.append(Sample(ids, [False] + [True] * len(datum.ids)))
    batch = collate(samples)
    width = batch.tokens.shape[1]
    for name, field in fields.items():
        values = _padded([datum.inputs[name] for datum in datums], width)
        if values.ndim == 3:
            field = TARGET_WEIGHTS
        batch.fields[field] = values
    if not as_given:
        targets = [_in_columns(datum.targets) for datum in datums]
        most = max(one.shape[1] for one in targets)
        batch.fields["teacher_ids"] = torch.zeros((len(datums), width, most), dtype=torch.long)
        for row, one in enumerate(targets):
            batch.fields["teacher_ids"][row, 1 : 1 + len(one), : one.shape[1]] = one
    return batch


def _in_columns(values: Tensor) -> Tensor:
    """Reshape ``[N]`` to ``[N, 1]``."""
    if values.ndim == 1:
        return values[:, None]
    return values


def _padded(rows: Sequence[Tensor], width: int) -> Tensor:
    """Shift values to target positions, ``[B, T]`` (or ``[B, T, K]`` with multiple columns)."""
    most = max(_in_columns(one).shape[1] for one in rows)
    whole = torch.zeros((len(rows), width, most), dtype=torch.float32)
    for row, one in enumerate(rows):
        columns = _in_columns(one)
        whole[row, 1 : 1 + len(columns), : columns.shape[1]] = columns
    if all(one.ndim == 1 for one in rows):
        return whole[:, :, 0]
    return whole
