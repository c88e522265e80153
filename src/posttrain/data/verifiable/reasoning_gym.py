"""Any data set of reasoning-gym (Stojanovski et al. 2025): procedural puzzles with scorers."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field

from posttrain.data.base import ExamplesOnDemand, Split, Task
from posttrain.errors import MissingExtra, UnknownComponent, UsageError
from posttrain.graders.sandbox.workers import Limits
from posttrain.graders.scored import WorkerScorer
from posttrain.option_types import Seed
from posttrain.randomness import derive_key
from posttrain.registry import register, suggest
from posttrain.types import Example, Message

_MAX_DRAWS = 500  # of one item: one in five belongs to the smallest split
_EVALUATES = "evaluates the answer as code, so that what a model writes would run"
_PAYS = "calls answers right that answer nothing, and a run would learn them ({} of 40 questions)"
# Data sets that are refused, and why: the answers that answer nothing, and the share of 40 questions whose gold answer
# is another that they are paid for (reasoning-gym 0.1.25; docs/reference/reasoning-gym.md).
REFUSED = {
    **dict.fromkeys(("binary_matrix", "countdown", "n_queens", "spiral_matrix", "string_insertion"), _EVALUATES),
    **dict.fromkeys(("intermediate_integration", "polynomial_multiplication", "simple_integration"), _EVALUATES),
    "puzzle24": _EVALUATES,
    "advanced_geometry": _PAYS.format("{gold}, {other}: 25 %"),
    "coin_flip": _PAYS.format("0: 92 %"),
    "complex_arithmetic": _PAYS.format("nan: 100 %"),
    "fraction_simplification": _PAYS.format("{gold} or {other}: 52 %"),
    "game_of_life_halting": _PAYS.format("nan: 100 %"),
    "gsm_symbolic": _PAYS.format("{gold} or {other}: 100 %"),
    "letter_jumble": _PAYS.format("{gold} or {other}: 57 %"),
    "sokoban": _PAYS.format("{gold} or {other}: 27 %"),
    "spell_backward": _PAYS.format("{gold} or {other}: 22 %"),
    "time_intervals": _PAYS.format("{gold}, {other}: 52 %"),
    "word_sorting": _PAYS.format("{gold}, {other}: 100 %"),
}
# The scorer evaluates text that the data set wrote, and not the answer.
EVALUATES_QUESTIONS = frozenset(("bitwise_arithmetic", "number_sorting"))
Round = tuple[Mapping[str, Any], Any]  # the settings of a data set, and the data set


def refuse_scorers(*, dataset: str, **_: Any) -> None:
    """Refuse data sets whose scorer cannot be trusted, without importing reasoning-gym.

    Raises:
        UsageError: the scorer evaluates what a model writes, or pays for answers that answer nothing.
    """
    if dataset in REFUSED:
        raise UsageError(f"task reasoning_gym: the scorer of {dataset} {REFUSED[dataset]}. Use another data set")


@register("task", held_out="validation", refuse=refuse_scorers)
def reasoning_gym(
    *,
    dataset: str,
    split: Split = "train",
    seed: Seed = 0,
    size: Annotated[int, Field(ge=1)] = 1000,
    options: dict[str, object] | None = None,
) -> Task:
    """Questions of one reasoning-gym data set, made on demand.

    Item i of a split is a function of (seed, split, i). A hash of a question decides the one split that may hold it
    (60 % train, 20 % validation, 20 % test). Many questions have several right answers: the data set's own scorer,
    which runs in a worker process, is in ``meta["score"]`` for the reward ``task_score``, and the entry in
    ``meta["entry"]``. Data sets are refused whose scorer evaluates answers as code, or pays for answers that answer
    nothing (``docs/reference/reasoning-gym.md``).

    Args:
        dataset: its name in reasoning-gym (``chain_sum``, ``basic_arithmetic``, ...).
        split: ``train``, ``validation`` or ``test``.
        seed: another seed, other questions.
        size: number of questions.
        options: the data set's own settings (``min_terms``, ...).

    Raises:
        MissingExtra: ``reasoning-gym`` is not installed.
        UnknownComponent: no data set of that name.
        UsageError: an option that the data set does not have or does not accept; a scorer that cannot be trusted;
            later, for an item, too few distinct questions to fill the split.
    """
    gym_options = dict(options or {})
    create_dataset = _load_factory(dataset, gym_options)
    refuse_scorers(dataset=dataset)

    def make_round(number: int) -> Round:
        """The data set that draw ``number`` of every item comes from."""
        drawn_seed = derive_key(seed, "reasoning_gym", number) % 2**31  # NumPy takes seeds below 2**32
        settings = {"seed": drawn_seed, "size": size, **gym_options}
        return settings, create_dataset(dataset, **settings)

    try:
        first = make_round(0)
    except (AssertionError, AttributeError, ValueError, TypeError) as error:
        raise UsageError(f"task reasoning_gym: {dataset} does not accept {gym_options}: {error}") from error
    return Task("reasoning_gym", split, examples_on_demand(dataset, split, size, first, make_round))


def _load_factory(dataset: str, options: Mapping[str, object]) -> Callable[..., Any]:
    """The function that makes data sets, once it is sure that this one exists and has these options."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError:
        raise MissingExtra("reasoning_gym", "tasks", "the task reasoning_gym") from None
    if dataset not in DATASETS:
        raise UnknownComponent(
            f"task reasoning_gym: there is no data set named {dataset!r}.{suggest(dataset, DATASETS)} "
            f"There are {len(DATASETS)}: {', '.join(sorted(DATASETS))}"
        )
    known = [f.name for f in dataclasses.fields(DATASETS[dataset][1]) if f.name not in ("seed", "size")]
    for key in options:
        if key not in known:
            raise UsageError(
                f"task reasoning_gym: {dataset} has no option {key!r}.{suggest(key, known)} Known: {', '.join(known)}"
            )
    return create_dataset


def make_scorer(dataset: str, settings: Mapping[str, object], entry: Mapping[str, object]) -> WorkerScorer:
    """The data set's own scorer of one entry; ``settings`` made the data set (``seed``, ``size`` and options)."""
    from posttrain.data.verifiable.reasoning_gym_scoring import TARGET, dump_plain

    limits = Limits(compiles=dataset in EVALUATES_QUESTIONS)
    return WorkerScorer(TARGET, [dataset, dump_plain(settings), dump_plain(entry)], limits)


def split_of_question(question: str) -> Split:
    """The one split that may hold a question: 60 % train, 20 % validation, 20 % test."""
    bucket = hashlib.blake2b(question.encode("utf-8"), digest_size=8).digest()[0] * 5 // 256
    if bucket < 3:
        return "train"
    if bucket == 3:
        return "validation"
    return "test"


def examples_on_demand(
    name: str, split: Split, size: int, first: Round, make_round: Callable[[int], Round]
) -> ExamplesOnDemand:
    """A sequence whose item i is entry i of the first data set whose entry i belongs to the split.

    The data sets are an endless row of equally large ones: ``first``, then those of ``make_round``.
    """
    rounds = [first]
    round_of: dict[int, int] = {}  # found by earlier look-ups, so that an item is searched for once

    def make(item: int) -> Example:
        for number in range(round_of.get(item, 0), _MAX_DRAWS):
            if number == len(rounds):
                rounds.append(make_round(number))
            settings, made = rounds[number]
            entry: dict[str, object] = made[item]
            question = str(entry["question"])
            if split_of_question(question) == split:
                round_of[item] = number
                answer = None if entry["answer"] is None else str(entry["answer"])
                meta = {"dataset": name, "entry": entry, "score": make_scorer(name, settings, entry)}
                id = f"reasoning_gym/{name}/{split}/{item}"
                return Example(id, (Message("user", question),), answer=answer, meta=meta, grader="scored")
        raise UsageError(
            f"task reasoning_gym: {name} asks too few distinct questions with these options to fill "
            f"a {split} split of its own; give options that vary more"
        )

    return ExamplesOnDemand(size, make)
