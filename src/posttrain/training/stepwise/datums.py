"""Rows that a caller gives to a loss: token ids, the target at each position, and the numbers that the loss reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.errors import UsageError
from posttrain.sampling.base import check_ids
from posttrain.types import Batch, Sample, collate

TARGETS = "target_tokens"
MAX_TARGETS = 128  # of one position
TARGET_WEIGHTS = "target_weights"  # the batch field of the weights of several targets at each position


@dataclass(frozen=True, slots=True)
class Datum:
    """A row of N tokens with a target at each: ``targets[i]`` is what follows ``ids[:i + 1]``.

    targets ``int64 [N]``, or ``[N, K]`` for K targets at each position; inputs: ``float32`` tensors of the same shape
    by name.
    """

    ids: tuple[int, ...]
    targets: Tensor
    inputs: Mapping[str, Tensor]

    @property
    def follows(self) -> bool:
        """True if the target at each position is the next token, as where a model reads its own text."""
        if self.targets.ndim != 1:
            return False
        return self.targets[:-1].tolist() == list(self.ids[1:])


def check_datum(datum: Datum, where: str, names: Sequence[str], vocabulary: int, context: int) -> None:
    """Refuse a row that a loss cannot read; ``names``: of the inputs that the loss reads.

    Raises:
        UsageError: the message begins with ``where`` and the name of the input.
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
        raise UsageError(f"{where}.{missing[0]}: it is missing; this loss reads {reads}")
    if unread:
        raise UsageError(f"{where}.{unread[0]}: this loss does not read it; leave it out. It reads {reads}")


def collate_datums(datums: Sequence[Datum], fields: Mapping[str, str]) -> Batch:
    """Return rows as a batch: ``tokens[b, i + 1]`` is the target of position i, and every target is trained.

    Where a target is not the next token, or there are several, the batch field ``teacher_ids`` ``int64 [B, T, K]``
    names them, so that the forward pass gives their log-probabilities. ``fields``: the name of the batch field that
    each input becomes; the weights of several targets become ``target_weights`` ``[B, T, K]``.
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
    """``[N]`` as ``[N, 1]``."""
    if values.ndim == 1:
        return values[:, None]
    return values


def _padded(rows: Sequence[Tensor], width: int) -> Tensor:
    """``[B, T]``, or ``[B, T, K]`` if a row has several columns, moved to where the targets are."""
    most = max(_in_columns(one).shape[1] for one in rows)
    whole = torch.zeros((len(rows), width, most), dtype=torch.float32)
    for row, one in enumerate(rows):
        columns = _in_columns(one)
        whole[row, 1 : 1 + len(columns), : columns.shape[1]] = columns
    if all(one.ndim == 1 for one in rows):
        return whole[:, :, 0]
    return whole
