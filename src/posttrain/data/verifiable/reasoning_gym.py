"""All reasoning-gym datasets (Stojanovski et al. 2025): procedurally generated puzzles with scorers."""

from __future__ import annotations

import dataclasses
import hashlib
import os
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

_MAX_DRAWS = 500  # per item. The smallest splits receive one question in five.
_EVALUATES = "evaluates answers as code, so it would run model output"
_PAYS = "accepts degenerate answers, which training would exploit ({} of 40 questions)"
# Refused datasets with reasons: degenerate answers that earn reward, and for what fraction of 40 questions whose gold
# answer differs (reasoning-gym 0.1.25; docs/reference/reasoning-gym.md).
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
# These scorers evaluate expressions from the dataset, not from model output.
EVALUATES_QUESTIONS = frozenset(("bitwise_arithmetic", "number_sorting"))
Round = tuple[Mapping[str, Any], Any]  # dataset settings, dataset


def refuse_scorers(*, dataset: str, **_: Any) -> None:
    """Refuse datasets with untrusted scorers, without importing reasoning-gym.

    Raises:
        UsageError: the scorer evaluates model output as code, or rewards degenerate answers.
    """
    if dataset in REFUSED:
        raise UsageError(f"task reasoning_gym: the {dataset} scorer {REFUSED[dataset]}. Use a different dataset")


@register("task", held_out="validation", refuse=refuse_scorers)
def reasoning_gym(
    *,
    dataset: str,
    split: Split = "train",
    seed: Seed = 0,
    size: Annotated[int, Field(ge=1)] = 1000,
    options: dict[str, object] | None = None,
) -> Task:
    """Procedurally generated questions from a reasoning-gym dataset.

    Item i in a split is a function of (seed, split, i). Questions are assigned to splits by hash (60 % train, 20 %
    validation, 20 % test). Many questions accept multiple answers: ``meta["score"]`` holds the dataset's scorer, run
    in a worker process, for the reward ``task_score``; ``meta["entry"]`` holds the entry. Data sets are refused if
    their scorer evaluates answers as code, or rewards degenerate answers (``docs/reference/reasoning-gym.md``).

    Args:
        dataset: reasoning-gym name (``chain_sum``, ``basic_arithmetic``, ...).
        split: ``train``, ``validation`` or ``test``.
        seed: changes all questions.
        size: number of questions.
        options: dataset settings (``min_terms``, ...).

    Raises:
        MissingExtra: ``reasoning-gym`` is not installed.
        UnknownComponent: unknown dataset.
        UsageError: unknown option, invalid value, or an untrusted scorer. Raised later, while reading items, if there
            are too few distinct questions to fill the split.
    """
    gym_options = dict(options or {})
    create_dataset = _load_factory(dataset, gym_options)
    refuse_scorers(dataset=dataset)

    def make_round(number: int) -> Round:
        """Create the dataset used by draw ``number`` for all items."""
        drawn_seed = derive_key(seed, "reasoning_gym", number) % 2**31  # NumPy takes seeds below 2**32
        settings = {"seed": drawn_seed, "size": size, **gym_options}
        return settings, create_dataset(dataset, **settings)

    try:
        first = make_round(0)
    except (AssertionError, AttributeError, ValueError, TypeError) as error:
        raise UsageError(f"task reasoning_gym: {dataset} does not accept {gym_options}: {error}") from error
    return Task("reasoning_gym", split, examples_on_demand(dataset, split, size, first, make_round))


def _load_factory(dataset: str, options: Mapping[str, object]) -> Callable[..., Any]:
    """Check that dataset and options exist, and return the factory."""
    # It imports matplotlib, which fails if a notebook names a backend that this environment lacks.
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError:
        raise MissingExtra("reasoning_gym", "tasks", "the task reasoning_gym") from None
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    if dataset not in DATASETS:
        raise UnknownComponent(
            f"task reasoning_gym: unknown dataset {dataset!r}.{suggest(dataset, DATASETS)} "
            f"Known ({len(DATASETS)}): {', '.join(sorted(DATASETS))}"
        )
    known = [f.name for f in dataclasses.fields(DATASETS[dataset][1]) if f.name not in ("seed", "size")]
    for key in options:
        if key not in known:
            raise UsageError(
                f"task reasoning_gym: {dataset} has no option {key!r}.{suggest(key, known)} Known: {', '.join(known)}"
            )
    return create_dataset


def make_scorer(dataset: str, settings: Mapping[str, object], entry: Mapping[str, object]) -> WorkerScorer:
    """Create the scorer for an entry. ``settings`` generated its dataset (``seed``, ``size`` and options)."""
    from posttrain.data.verifiable.reasoning_gym_scoring import TARGET, dump_plain

    limits = Limits(compiles=dataset in EVALUATES_QUESTIONS)
    return WorkerScorer(TARGET, [dataset, dump_plain(settings), dump_plain(entry)], limits)


def split_of_question(question: str) -> Split:
    """Assign a question to a split by hash: 60 % train, 20 % validation, 20 % test."""
    bucket = hashlib.blake2b(question.encode("utf-8"), digest_size=8).digest()[0] * 5 // 256
    if bucket < 3:
        return "train"
    if bucket == 3:
        return "validation"
    return "test"


def examples_on_demand(
    name: str, split: Split, size: int, first: Round, make_round: Callable[[int], Round]
) -> ExamplesOnDemand:
    """Create a lazy sequence: item i is entry i from the first draw that puts it into the split.

    Draws are datasets with equal size: ``first``, then as many from ``make_round`` as needed.
    """
    rounds = [first]
    round_of: dict[int, int] = {}  # cached draws

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
            f"task reasoning_gym: {name} generates too few distinct questions to fill a separate {split} split. "
            "Choose options with more variety"
        )

    return ExamplesOnDemand(size, make)
