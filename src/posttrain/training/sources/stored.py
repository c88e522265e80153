"""Serialize sampled batches exactly, for checkpoints and other processes."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache
from itertools import chain, pairwise
from math import prod
from pathlib import Path
from typing import Annotated, Any, Protocol, get_type_hints

import torch
from pydantic import ConfigDict, Field, TypeAdapter, create_model
from safetensors.torch import save as serialize
from torch import Tensor

from posttrain.errors import StorageError
from posttrain.recipes.sections import RolloutSection
from posttrain.sampling.rollout import Grader
from posttrain.store.durable import replace_file
from posttrain.store.turns import read_turns, write_turns
from posttrain.training.sources.prompts import Prompts
from posttrain.types import Batch, Completion, ExpertChoices, KeptRows, KeptSets, Message, Rollout

Groups = list[list[Rollout]]
START_AGAIN = "restore the checkpoint from a backup, or restart under another name with --run NAME"
_OF_A_BATCH = ("tokens", "lengths", "mask", "group", "prefix")
_ANSWERS = "answers"  # absent in checkpoints before 0.3
_FIELD = "stream."
_KEPT = "kept."
_OF_KEPT_ROWS = ("ids", "starts", "counts")
_EXPERTS = "experts"
_Count = Annotated[int, Field(ge=0, lt=1 << 31)]
_COUNTS = TypeAdapter(list[_Count])
# Known or reconstructed on load; an episode's prompt comes from its environment's start.
_OF_THE_TASK = ("example", "prompt_ids", "completion", "advantage", "turns", "failures")
# Stored fields. Earlier versions may lack fields with defaults, and may contain extra ones, listed in _GONE.
_OF_A_ROLLOUT = {f.name: f for f in fields(Rollout) if f.name not in _OF_THE_TASK}
_GONE: tuple[str, ...] = ()
_OF_A_COMPLETION = {f.name for f in fields(Completion)}


@dataclass(slots=True)
class Drawn:
    """Graded groups for one rollout batch: all ``sampled`` groups and the ``chosen`` ones.

    ``accepted``: fraction that fits. ``version``: sampling weights version. ``timing``: seconds by phase.
    """

    sampled: Groups
    chosen: Groups
    accepted: float
    version: int
    timing: dict[str, float]


class PromptSource(Protocol):
    """Rollout source interface used here."""

    prompts: Prompts
    grader: Grader
    options: RolloutSection

    def check_experts(self, experts: Tensor | None) -> None:
        """See ``RolloutSource.check_experts``."""


def write_drawn(drawn: Drawn) -> dict[str, object]:
    """Convert a drawn batch to plain data, with indices for examples and prompts."""
    places = {id(group): place for place, group in enumerate(drawn.sampled)}
    return {
        "sampled": [[_write_rollout(rollout) for rollout in group] for group in drawn.sampled],
        "chosen": [places[id(group)] for group in drawn.chosen],
        "accepted": drawn.accepted,
        "version": drawn.version,
        "timing": drawn.timing,
    }


def read_drawn(stored: Mapping[str, Any], source: PromptSource) -> Drawn:
    """Load data from ``write_drawn``, using examples and prompts from ``source``."""

    def read(row: Mapping[str, Any]) -> Rollout:
        index = row["prompt_index"]
        known = {name: x for name, x in row.items() if name in _OF_A_ROLLOUT}
        completion = _read_completion(row["completion"])
        drawn = source.prompts.at(index)
        prompt = tuple(drawn.ids)
        example = drawn.example
        if "episode" in row:
            episode = row["episode"]
            messages = tuple(Message(*message) for message in episode["messages"])
            example = replace(example, messages=messages)
            prompt = tuple(episode["prompt_ids"])
            known["turns"] = read_turns(episode["turns"])
            known["failures"] = tuple(episode["failures"])
        if completion.experts is not None and completion.experts.num_positions != len(prompt) + len(completion.ids) - 1:
            raise ValueError("other experts")
        return Rollout(example=example, prompt_ids=prompt, completion=completion, **known)

    sampled = [[read(row) for row in group] for group in stored["sampled"]]
    chosen = [sampled[place] for place in stored["chosen"]]
    return Drawn(sampled, chosen, stored["accepted"], stored["version"], dict(stored["timing"]))


def _read_completion(stored: Mapping[str, Any]) -> Completion:
    """Load a completion, converting JSON lists to tuples."""
    known: dict[str, Any] = {}
    for name, value in stored.items():
        if name not in _OF_A_COMPLETION:
            continue
        if isinstance(value, list):
            value = tuple(value)
        if name == "kept" and value is not None:
            value = KeptSets(tuple(value["ids"]), tuple(value["offsets"]), value["num_cut"])
        if name == "experts" and value is not None:
            value = _read_experts(value)
        known[name] = value
    return Completion(**known)


def check_written(stored: Mapping[str, Any], source: PromptSource, vocabulary: int) -> None:
    """Reject anything that ``write_drawn`` would not write for ``source``, because checkpoints may be untrusted.

    ``stored`` also contains the batch number. Token ids must be below ``vocabulary``.

    Raises:
        ValueError: wrong type, length or range. KeyError: missing entry.
    """
    _groups_type().validate_json(json.dumps(stored["sampled"]), strict=True)
    _COUNTS.validate_python([stored["batch"], stored["version"]], strict=True)
    parts = {name for name, _, _ in source.grader.rewards}
    if type(stored.get("accepted", 0.0)) is not float:
        raise ValueError("no share that fits")
    if any(len(rollouts) != source.options.group_size for rollouts in stored["sampled"]):
        raise ValueError("other groups")
    for rollout in chain.from_iterable(stored["sampled"]):
        completion = rollout["completion"]
        ids = completion["ids"]
        own = completion["own"]
        _COUNTS.validate_python([completion["version"]], strict=True)
        if len(completion["logprobs"]) != len(ids):
            raise ValueError("other lengths")
        if own is not None and len(own) != len(ids):
            raise ValueError("other lengths")
        if not parts - set(rollout.get("skipped", ())) <= rollout["parts"].keys():
            raise ValueError("other rewards")
        if not all(0 <= token < vocabulary for token in ids):
            raise ValueError("other tokens")
        if completion.get("kept") is not None:
            _check_kept(completion["kept"], len(ids), vocabulary)
        experts: Tensor | None = None
        if completion.get("experts") is not None:
            experts = _read_experts(completion["experts"]).tensor()
        if ids:  # an environment may fail before anything is sampled
            source.check_experts(experts)


def _read_experts(stored: Mapping[str, Any]) -> ExpertChoices:
    """Load expert choices, whose ids are base64 text.

    Raises:
        ValueError: malformed text, or another size.
    """
    ids = b64decode(stored["ids"], validate=True)
    sizes = (stored["num_positions"], stored["num_routers"], stored["top_k"])
    if min(sizes) < 1 or 2 * prod(sizes) != len(ids):
        raise ValueError("other experts")
    return ExpertChoices(*sizes, ids)


def _check_kept(kept: Mapping[str, Any], num_tokens: int, vocabulary: int) -> None:
    """Reject kept sets that do not match the number of tokens.

    Raises:
        ValueError: mismatched sets.
    """
    offsets = kept["offsets"]
    if len(offsets) != num_tokens + 1 or offsets[0] != 0 or offsets[-1] != len(kept["ids"]):
        raise ValueError("other sets")
    if any(start > end for start, end in pairwise(offsets)) or kept["num_cut"] < 0:
        raise ValueError("other sets")
    if not all(0 <= token < vocabulary for token in kept["ids"]):
        raise ValueError("other sets")


@cache
def _groups_type() -> TypeAdapter[Any]:
    """Build the type adapter for groups written by ``write_drawn``."""
    strict = ConfigDict(strict=True, extra="forbid")
    types = get_type_hints(Rollout)
    plain: dict[str, Any] = dict.fromkeys(_GONE, (Any, None))
    for name, declared in _OF_A_ROLLOUT.items():
        kind = types[name]
        if kind is int:
            kind = _Count
        default: Any = ...
        if declared.default is not MISSING:
            default = declared.default
        elif declared.default_factory is not MISSING:
            default = Field(default_factory=declared.default_factory)
        plain[name] = (kind, default)
    kinds = {"messages": list[tuple[str, str]], "prompt_ids": list[int], "turns": list[Any], "failures": list[str]}
    episode_fields: dict[str, Any] = {name: (kind, ...) for name, kind in kinds.items()}
    episode: Any = create_model("Episode", __config__=strict, **episode_fields)
    rollout: Any = create_model(
        "Rollout", __config__=strict, completion=(Completion, ...), episode=(episode | None, None), **plain
    )
    return TypeAdapter(list[list[rollout]])


def write_batch(batch: Batch) -> dict[str, Tensor]:
    """Convert a batch to tensors for saving."""
    tensors: dict[str, Tensor] = {name: getattr(batch, name) for name in _OF_A_BATCH}
    if batch.answers is not None:
        tensors[_ANSWERS] = batch.answers
    for name, numbers in batch.fields.items():
        tensors[f"{_FIELD}{name}"] = numbers
    if batch.kept is not None:
        for name in _OF_KEPT_ROWS:
            tensors[f"{_KEPT}{name}"] = getattr(batch.kept, name)
    if batch.experts is not None:
        tensors[_EXPERTS] = batch.experts
    return tensors


def read_batch(tensors: Mapping[str, Tensor], rows_per_unit: int, vocabulary: int) -> Batch:
    """Load data from ``write_batch``, possibly from an untrusted checkpoint.

    Raises:
        ValueError, KeyError: wrong type, shape or range.
    """
    tokens, lengths, mask, group, prefix = (tensors[name] for name in _OF_A_BATCH)
    fields: dict[str, Tensor] = {}
    for name, numbers in tensors.items():
        if name.startswith(_FIELD):
            fields[name.removeprefix(_FIELD)] = numbers
    are_whole_numbers = all(x.dtype == torch.long for x in (tokens, lengths, group, prefix))
    if not are_whole_numbers or mask.dtype != torch.bool or tokens.ndim != 2 or not tokens.numel():
        raise ValueError("other kinds")
    rows, width = tokens.shape
    if mask.shape != tokens.shape or rows % rows_per_unit:
        raise ValueError("other shapes")
    if any(x.shape != (rows,) for x in (lengths, group, prefix)):
        raise ValueError("other shapes")
    if any(x.shape[:2] not in ((rows,), (rows, width)) for x in fields.values()):
        raise ValueError("other fields")
    if int(lengths.min()) < 1 or int(lengths.max()) > width:
        raise ValueError("other lengths")
    if (prefix < 0).any() or (prefix > lengths).any():
        raise ValueError("other lengths")
    answers = tensors.get(_ANSWERS)
    if answers is not None and (answers.dtype != torch.long or answers.shape != (rows,)):
        raise ValueError("other answers")
    places = torch.arange(width)
    cannot_be_trained = (places >= lengths[:, None]) | (places == 0)
    if (mask & cannot_be_trained).any():
        raise ValueError("other lengths")
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise ValueError("other tokens")
    kept = _read_kept(tensors, tokens, vocabulary)
    experts = tensors.get(_EXPERTS)
    if experts is not None and (experts.ndim != 4 or experts.shape[:2] != tokens.shape):
        raise ValueError("other experts")
    return Batch(
        tokens,
        lengths,
        mask,
        group,
        prefix,
        fields,
        rows_per_unit=rows_per_unit,
        answers=answers,
        kept=kept,
        experts=experts,
    )


def _read_kept(tensors: Mapping[str, Tensor], tokens: Tensor, vocabulary: int) -> KeptRows | None:
    """Load a batch's kept sets; None if absent."""
    if f"{_KEPT}ids" not in tensors:
        return None
    ids, starts, counts = (tensors[f"{_KEPT}{name}"] for name in _OF_KEPT_ROWS)
    if ids.dtype != torch.int32 or ids.ndim != 1 or starts.dtype != torch.long or counts.dtype != torch.long:
        raise ValueError("other sets")
    if starts.shape != tokens.shape or counts.shape != tokens.shape or bool((starts < 0).any() or (counts < 0).any()):
        raise ValueError("other sets")
    if int(starts.max()) > len(ids) or int(counts.max()) > len(ids) or int((starts + counts).max()) > len(ids):
        raise ValueError("other sets")
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocabulary):
        raise ValueError("other sets")
    return KeptRows(ids, starts, counts)


def _write_rollout(rollout: Rollout) -> dict[str, object]:
    plain = {name: getattr(rollout, name) for name in _OF_A_ROLLOUT}
    completion: dict[str, object] = {f.name: getattr(rollout.completion, f.name) for f in fields(Completion)}
    if rollout.completion.kept is not None:
        completion["kept"] = asdict(rollout.completion.kept)
    if rollout.completion.experts is not None:
        experts = asdict(rollout.completion.experts)
        experts["ids"] = b64encode(experts["ids"]).decode("ascii")
        completion["experts"] = experts
    plain["completion"] = completion
    if rollout.turns or rollout.failures:
        plain["episode"] = {
            "messages": [[message.role, message.content] for message in rollout.example.messages],
            "prompt_ids": rollout.prompt_ids,
            "turns": write_turns(rollout.turns),
            "failures": rollout.failures,
        }
    return plain


def save_batch(folder: Path, batch: Batch, step: int, *, is_main: bool) -> str:
    """Save a failed step's batch for inspection; returns a message with the path or the reason for failure."""
    path = folder / f"nonfinite-step-{step:06d}.safetensors"
    if not is_main:
        return "Rank 0 saves the batch"
    tensors = {"tokens": batch.tokens, "lengths": batch.lengths, "mask": batch.mask}
    tensors |= {f"stream.{name}": x for name, x in batch.fields.items()}
    try:
        replace_file(path, serialize({name: x.clone() for name, x in tensors.items()}))  # fields may share memory
    except StorageError as failure:
        return f"The batch could not be saved: {failure}"
    return f"The batch is saved in {path}"
