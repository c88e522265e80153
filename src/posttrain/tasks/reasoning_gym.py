"""Any data set of reasoning-gym (Stojanovski et al. 2025): procedural puzzles with scorers."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from posttrain.errors import MissingExtra, UnknownWord, UsageError
from posttrain.option_types import Seed
from posttrain.randomness import derive_key
from posttrain.registry import register, suggest
from posttrain.tasks.base import ExamplesOnDemand, Task
from posttrain.tasks.splits import Split
from posttrain.types import Example, Message

_MAX_DRAWS = 500  # of one item: one in five belongs to the smallest split


@register("task", held_out="validation")
def reasoning_gym(
    *,
    dataset: str,
    split: Split = "train",
    seed: Seed = 0,
    size: Annotated[int, Field(ge=1)] = 1000,
    options: dict[str, Any] | None = None,
) -> Task:
    """Questions of one reasoning-gym data set, made on demand.

    Item i of a split is a function of (seed, split, i). No question stands in two splits, whatever
    the seeds: a hash of its text decides the one split that may hold it (60 % train, 20 %
    validation, 20 % test), and a question that belongs elsewhere is drawn again. Many questions have several
    right answers, and some data sets give no gold answer at all: the data set's own scorer is in
    ``meta["score"]``, for the reward ``task_score``; the entry is in ``meta["entry"]``.

    Args:
        dataset: its name in reasoning-gym (``chain_sum``, ``countdown``, ...).
        split: ``train``, ``validation`` or ``test``.
        seed: another seed, other questions.
        size: number of questions.
        options: the data set's own settings (``min_terms``, ...).

    Raises:
        MissingExtra: ``reasoning-gym`` is not installed.
        UnknownWord: no data set of that name.
        UsageError: an option that the data set does not have or does not accept; later, for an item,
            too few distinct questions to fill the split.
    """
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError:
        raise MissingExtra("reasoning_gym", "tasks", "the task reasoning_gym") from None
    if dataset not in DATASETS:
        raise UnknownWord(
            f"task reasoning_gym: there is no data set named {dataset!r}.{suggest(dataset, DATASETS)} "
            f"There are {len(DATASETS)}: {', '.join(sorted(DATASETS))}"
        )
    given = dict(options or {})
    known = [f.name for f in dataclasses.fields(DATASETS[dataset][1]) if f.name not in ("seed", "size")]
    for key in given:
        if key not in known:
            raise UsageError(
                f"task reasoning_gym: {dataset} has no option {key!r}.{suggest(key, known)} Known: {', '.join(known)}"
            )

    def make_round(number: int) -> Any:
        """The data set that draw ``number`` of every item comes from."""
        drawn_seed = derive_key(seed, "reasoning_gym", number) % 2**31  # NumPy takes seeds below 2**32
        return create_dataset(dataset, seed=drawn_seed, size=size, **given)

    try:
        first = make_round(0)
    except (AssertionError, ValueError, TypeError) as error:
        raise UsageError(f"task reasoning_gym: {dataset} does not accept {given}: {error}") from error
    return Task("reasoning_gym", split, GymExamples(dataset, split, size, first, make_round))


def split_of(question: str) -> Split:
    """The one split that may hold a question: 60 % train, 20 % validation, 20 % test."""
    bucket = hashlib.blake2b(question.encode("utf-8"), digest_size=8).digest()[0] * 5 // 256
    return "train" if bucket < 3 else "validation" if bucket == 3 else "test"


class GymExamples(ExamplesOnDemand):
    """A sequence whose item i is made when it is asked for.

    Item i is entry i of the first of an endless row of equally large data sets (``make_round``)
    whose entry i belongs to the split.
    """

    def __init__(self, name: str, split: Split, size: int, first: Any, make_round: Callable[[int], Any]) -> None:
        super().__init__(size)
        self.name, self.split = name, split
        self.make_round = make_round
        self.rounds = [first]
        self.round_of: dict[int, int] = {}  # what earlier look-ups found, so that an item is searched for once

    def make(self, item: int) -> Example:
        made, entry = self._find(item)
        answer = entry["answer"]
        return Example(
            id=f"reasoning_gym/{self.name}/{self.split}/{item}",
            messages=(Message("user", str(entry["question"])),),
            answer=None if answer is None else str(answer),
            meta={"dataset": self.name, "entry": entry, "score": partial(_score, made, entry)},
            grader="scored",
        )

    def _find(self, item: int) -> tuple[Any, dict[str, Any]]:
        for number in range(self.round_of.get(item, 0), _MAX_DRAWS):
            if number == len(self.rounds):
                self.rounds.append(self.make_round(number))
            entry = self.rounds[number][item]
            if split_of(str(entry["question"])) == self.split:
                self.round_of[item] = number
                return self.rounds[number], entry
        raise UsageError(
            f"task reasoning_gym: {self.name} asks too few distinct questions with these options to fill "
            f"a {self.split} split of its own; give options that vary more"
        )


def _score(made: Any, entry: dict[str, Any], extracted: str | None) -> float:
    """The data set's own score of an answer."""
    return float(made.score_answer(answer=extracted, entry=entry))
