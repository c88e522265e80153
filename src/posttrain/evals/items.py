"""Each held-out item of an evaluation with its graded answers.

``items.jsonl`` holds one item per line. Results are computed from it, and two evaluations are compared by it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from posttrain.engines.rollout import Sampler
from posttrain.errors import DataError
from posttrain.render import stop_ids
from posttrain.render.assistant import encode_answer
from posttrain.store.durable import replace_file
from posttrain.store.metrics import MAX_BYTES
from posttrain.store.reading import read_record
from posttrain.store.rollouts import prompt_text, show_turns
from posttrain.types import Example, Rollout
from posttrain.untrusted import first_fault

Scalar = str | int | float | bool | None
_OPTIONAL = ("transcript", "response_ids")  # fields of a sample that are written only where there is something


@dataclass(frozen=True, slots=True)
class ItemSample:
    """One sampled answer to an item, graded.

    ``text``: the graded text (``Rollout.text``). ``extracted``: the answer in it. ``outcome``: the grader's verdict.
    ``in_format``: the template's format was kept; None for a template without one. ``parts``: the unweighted rewards
    and the grader's facts. ``score``: that of a reward model (``--best-of``). ``transcript``: all turns, of an answer
    with an environment. ``response_ids``: the sampled tokens, where ``text`` encodes to others.
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
    transcript: str | None = None
    response_ids: tuple[int, ...] | None = None

    @property
    def is_right(self) -> bool:
        return self.outcome == "right"


@dataclass(frozen=True, slots=True)
class Item:
    """One held-out example with its answers, in the order in which they were sampled.

    ``index``: its place among the items of the evaluation. ``meta``: the facts of the example that are plain values
    (subject, level, ...). No samples: its prompt did not fit into the model's context.
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


_ITEM = TypeAdapter(Item)


def item_of(example: Example, index: int, samples: Sequence[ItemSample] = ()) -> Item:
    """The item of an example."""
    return Item(example.id, index, prompt_text(example), example.answer, meta_of(example), tuple(samples))


def meta_of(example: Example) -> dict[str, Scalar]:
    """The facts of an example that are plain values."""
    return {key: value for key, value in example.meta.items() if value is None or isinstance(value, str | int | float)}


def digest_of(examples: Sequence[Example]) -> str:
    """SHA-256 (16 hex digits) of messages, gold answers, graders and facts: are these rows still the same?"""
    digest = hashlib.sha256()
    for example in examples:
        messages = [[message.role, message.content] for message in example.messages]
        content = [example.id, messages, example.answer, example.grader, example.meta]
        digest.update(json.dumps(content, default=_plain).encode() + b"\n")
    return digest.hexdigest()[:16]


def _plain(value: Any) -> Any:
    """A value that JSON does not know, in a form that is the same in every process."""
    if isinstance(value, Mapping):
        return dict(value)
    return sorted(map(repr, value)) if isinstance(value, Set) else repr(value)


def sample_of(rollout: Rollout, sampler: Sampler) -> ItemSample:
    """The record of a graded answer."""
    part, tokenizer, template = sampler.grader.format_part, sampler.tokenizer, sampler.grader.template
    ids = rollout.completion.ids
    ids = ids[:-1] if ids and ids[-1] in stop_ids(tokenizer, template) else ids
    encoded = encode_answer(tokenizer, template, rollout.text, rollout.prompt_ids, rollout.example.variables)
    return ItemSample(
        text=rollout.text,
        extracted=rollout.extracted,
        outcome=rollout.outcome,
        num_tokens=rollout.completion.num_own,
        finish=rollout.completion.finish,
        reward=rollout.reward,
        in_format=rollout.parts[part] > 0 if part in rollout.parts else None,
        parts=dict(rollout.parts),
        transcript=show_turns(rollout.turns, rollout.failures) or None,
        response_ids=None if rollout.turns or tuple(encoded) == tuple(ids) else tuple(ids),
    )


def item_line(item: Item | Mapping[str, Any]) -> bytes:
    """The line of an item; items of other kinds of evaluations are plain data."""
    if isinstance(item, Item):
        item = asdict(item)
        for sample in item["samples"]:
            for name in _OPTIONAL:
                if sample[name] is None:
                    del sample[name]
    return json.dumps(item).encode() + b"\n"


def parse_item(line: bytes | str) -> Item:
    """The item of a line.

    Raises:
        ValidationError: it is none.
    """
    return _ITEM.validate_json(line, strict=True)


def write_items(items: Sequence[Item | Mapping[str, Any]], path: Path) -> None:
    """``items.jsonl``, in one step.

    Raises:
        StorageError: the disk is full or not writable.
    """
    replace_file(path, b"".join(map(item_line, items)))


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
    items = []
    for number, line in enumerate(lines, 1):
        try:
            items.append(parse_item(line))
        except ValidationError as error:
            what = f"no item of an evaluation ({first_fault(error)}); evaluate again to replace the file"
            raise DataError(path, what, number) from None
        if samples is not None and len(items[-1].samples) not in (0, samples):
            what = f"{len(items[-1].samples)} answers, where the settings of the evaluation say {samples}"
            raise DataError(path, f"{what}; evaluate again to replace the file", number)
    return items
