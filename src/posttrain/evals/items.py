"""What an evaluation keeps of each held-out item: every answer that was sampled, and what the grader said.

``items.jsonl`` holds one per line. It is what results are computed from and what two evaluations are compared by.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from posttrain.errors import DataError
from posttrain.store.durable import replace_file
from posttrain.store.metrics import MAX_BYTES
from posttrain.store.reading import read_record
from posttrain.store.rollouts import RecordedRollout, prompt_text
from posttrain.types import Example, Rollout
from posttrain.untrusted import first_fault

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class ItemSample:
    """One sampled answer to an item, graded.

    ``text`` is what was graded (``Rollout.text``), ``extracted`` the answer in it, ``outcome`` the grader's word.
    ``in_format``: the template's format was kept; None of a template without one. ``parts`` are the unweighted rewards
    and the grader's facts.
    ``score``: that of a reward model, where one was asked.
    """

    text: str
    extracted: str | None
    outcome: str
    num_tokens: Annotated[int, Field(ge=0, lt=1 << 53)]
    finish: str
    reward: FiniteFloat
    in_format: bool | None
    parts: dict[str, float]
    score: FiniteFloat | None = None

    @property
    def is_right(self) -> bool:
        return self.outcome == "right"


@dataclass(frozen=True, slots=True)
class Item:
    """One held-out example with its answers, in the order in which they were sampled.

    ``id`` is the example's, ``index`` its place among the items of the evaluation. ``meta`` are the facts of the
    example that are plain values (subject, level, ...). No samples: its prompt did not fit into the model's
    context.
    """

    id: str
    index: int
    question: str
    answer: str | None
    meta: dict[str, Scalar] = field(default_factory=dict)
    samples: tuple[ItemSample, ...] = ()

    @property
    def num_right(self) -> int:
        return sum(sample.is_right for sample in self.samples)

    @property
    def share(self) -> float:
        """The share of its samples that were right; 0 without samples."""
        return self.num_right / len(self.samples) if self.samples else 0.0

    @property
    def is_ungraded(self) -> bool:
        """There was nothing to grade its answers against."""
        return bool(self.samples) and all(sample.outcome == "ungraded" for sample in self.samples)


def item_of(example: Example, index: int, samples: Sequence[ItemSample] = ()) -> Item:
    """The item of an example."""
    return Item(example.id, index, prompt_text(example), example.answer, meta_of(example), tuple(samples))


def meta_of(example: Example) -> dict[str, Scalar]:
    """The facts of an example that are plain values, as its items keep them."""
    return {key: value for key, value in example.meta.items() if value is None or isinstance(value, str | int | float)}


def digest_of(examples: Sequence[Example]) -> str:
    """SHA-256 (16 hex digits) of what is asked and what is right: messages, gold answer, grader and its facts.

    An id says which row of a file an example was; this says whether the row is still the same.
    """
    digest = hashlib.sha256()
    for example in examples:
        asked = [[message.role, message.content] for message in example.messages]
        content = [example.id, asked, example.answer, example.grader, example.meta]
        digest.update(json.dumps(content, default=_plain).encode() + b"\n")
    return digest.hexdigest()[:16]


def _plain(value: Any) -> Any:
    """What JSON does not know, in a form that is the same in every process."""
    if isinstance(value, Mapping):
        return dict(value)
    return sorted(map(repr, value)) if isinstance(value, Set) else repr(value)


def sample_of(rollout: Rollout | RecordedRollout, format_part: str | None) -> ItemSample:
    """What an item keeps of a rollout, whether it comes from the engine or out of ``rollouts.db``."""
    if isinstance(rollout, RecordedRollout):
        text, num_tokens, finish = rollout.completion, rollout.num_own, rollout.finish
    else:
        text, num_tokens, finish = rollout.text, rollout.completion.num_own, rollout.completion.finish
    return ItemSample(
        text=text,
        extracted=rollout.extracted,
        outcome=rollout.outcome,
        num_tokens=num_tokens,
        finish=finish,
        reward=rollout.reward,
        in_format=rollout.parts[format_part] > 0 if format_part in rollout.parts else None,
        parts=dict(rollout.parts),
    )


def with_scores(items: Sequence[Item], scores: Sequence[Sequence[float | None]]) -> list[Item]:
    """The items with the scores of a reward model, one per sample (None: it could not be scored)."""
    return [
        replace(item, samples=tuple(replace(s, score=x) for s, x in zip(item.samples, row, strict=True)))
        for item, row in zip(items, scores, strict=True)
    ]


def write_items(items: Sequence[Item | Mapping[str, Any]], path: Path) -> None:
    """``items.jsonl``, in one step; items of other kinds of evaluations are plain data.

    Raises:
        StorageError: the disk is full or not writable.
    """
    plain = (asdict(item) if isinstance(item, Item) else item for item in items)
    replace_file(path, b"".join(json.dumps(item).encode() + b"\n" for item in plain))


def read_items(path: str | Path, samples: int | None = None) -> list[Item]:
    """The items that ``write_items`` wrote.

    Args:
        samples: how many answers an item has, if it has any; None: any number.

    Raises:
        DataError: no such file, a line that is no item, or one with another number of answers.
    """
    try:
        lines = read_record(Path(path), MAX_BYTES).decode().splitlines()
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise DataError(path, f"cannot be read ({error}); `posttrain evaluate` writes it") from None
    items, kind = [], TypeAdapter(Item)
    for number, line in enumerate(lines, 1):
        try:
            items.append(kind.validate_json(line, strict=True))
        except ValidationError as error:
            what = f"no item of an evaluation ({first_fault(error)}); evaluate again to replace the file"
            raise DataError(path, what, number) from None
        if samples is not None and len(items[-1].samples) not in (0, samples):
            what = f"{len(items[-1].samples)} answers, where the settings of the evaluation say {samples}"
            raise DataError(path, f"{what}; evaluate again to replace the file", number)
    return items
