"""The reasoning_gym task: items by (seed, split, index), the data set's own scorer, refusals."""

from __future__ import annotations

import pickle
import re
import sys
from datetime import date
from typing import Any

import pytest

from posttrain import registry
from posttrain.data.verifiable.reasoning_gym import (
    REFUSED,
    examples_on_demand,
    make_scorer,
    reasoning_gym,
    split_of_question,
)
from posttrain.errors import MissingExtra, UnknownComponent, UsageError
from posttrain.graders.grading import Submission, grade_submissions
from posttrain.graders.scored import task_score
from refusing import refuses


def test_without_the_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with refuses(MissingExtra, "task reasoning_gym needs"):
        reasoning_gym(dataset="chain_sum")


pytest.importorskip("reasoning_gym")


def test_answers_are_right_and_ids_stable() -> None:
    task = reasoning_gym(dataset="chain_sum", size=30)
    assert len(task.examples) == 30
    for i, example in enumerate(task.examples):
        assert example.id == f"reasoning_gym/chain_sum/train/{i}"
        terms = re.findall(r"[+-]?\s*\d+", example.meta["entry"]["metadata"]["expression"])
        assert int(example.answer or "") == sum(int(term.replace(" ", "")) for term in terms)
        assert example.messages[0].content == example.meta["entry"]["question"]


def test_items_are_a_function_of_seed_split_and_index() -> None:
    def texts(**options: Any) -> list[str]:
        return [e.messages[0].content for e in reasoning_gym(dataset="chain_sum", **options).examples]

    small = texts(size=20)
    assert texts(size=60)[:20] == small
    assert texts(size=20, seed=1) != small
    examples = reasoning_gym(dataset="chain_sum", size=20).examples
    assert examples[7].messages[0].content == small[7]
    assert (examples[-1].id, examples[-1].messages) == (examples[19].id, examples[19].messages)
    assert [e.id for e in examples[2:4]] == ["reasoning_gym/chain_sum/train/2", "reasoning_gym/chain_sum/train/3"]
    with pytest.raises(IndexError):
        examples[20]


def test_no_question_stands_in_two_splits() -> None:
    """Sums of two digits: there are 200 of them, so that drawing alone would repeat nearly all."""
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    splits = [
        {
            example.messages[0].content
            for seed in (0, 1)
            for example in reasoning_gym(
                dataset="chain_sum", split=split, size=300, seed=seed, options=options
            ).examples
        }
        for split in ("train", "validation", "test")
    ]
    assert [len(questions) > 20 for questions in splits] == [True, True, True]
    assert sum(map(len, splits)) == len(set().union(*splits))


def test_too_few_questions_for_a_split_are_refused() -> None:
    same = {}, [{"question": "1 + 1?", "answer": "2"}]
    held = split_of_question("1 + 1?")
    other = "test" if held != "test" else "train"
    assert examples_on_demand("same", held, 1, same, lambda _: same)[0].answer == "2"
    with refuses(UsageError, "few distinct questions", f"{other} split"):
        examples_on_demand("same", other, 1, same, lambda _: same)[0]  # type: ignore[arg-type]


def test_the_own_scorer_accepts_more_than_the_gold_text() -> None:
    example = reasoning_gym(dataset="basic_arithmetic", size=1).examples[0]
    assert example.answer is not None
    kept = pickle.loads(pickle.dumps(example.meta))
    given = [example.answer, f" {example.answer} ", "nonsense", None, example.answer]
    same, also, nonsense, nothing, again = task_score(given, [example.meta] * 4 + [kept])
    assert (same, nothing, again) == (1.0, 0.0, 1.0)
    assert also > 0.5
    assert nonsense < 0.1


def outcomes(dataset: str, answers: list[str]) -> list[str]:
    meta = reasoning_gym(dataset=dataset, size=1).examples[0].meta
    return [
        verdict.outcome
        for verdict in grade_submissions("scored", [Submission("", answer, None, meta) for answer in answers])
    ]


def test_a_scorer_that_raises_is_an_outcome() -> None:
    assert outcomes("boxnet", ["0", "[]", "0"]) == ["crash", "wrong", "crash"]


def test_reasoning_gym_scorers_that_cannot_be_trusted_are_refused_by_name() -> None:
    assert len(REFUSED) == 20
    for dataset, reason in REFUSED.items():
        with pytest.raises(UsageError, match=re.escape(f"the {dataset} scorer {reason}. Use a different dataset")):
            reasoning_gym(dataset=dataset, size=1)


SLOW = {
    "futoshiki",
    "knight_swap",
    "zebra_puzzles",
    "puzzle24",
    "sokoban",
    "sudoku",
    "composite",
    "intermediate_integration",
}


def test_entry_of_tuples_sets_and_dates_is_decoded_as_it_was() -> None:
    from posttrain.data.verifiable.reasoning_gym_scoring import dump_plain, load_plain

    entry = {
        "a": (1, [2.5, None]),
        "b": {3, 4},
        "c": date(2024, 2, 29),
        "d": {1: "x", (1, 2): True},
        "#e": frozenset("f"),
    }
    assert str(types_of(load_plain(dump_plain(entry)))) == str(types_of(entry))
    assert load_plain(dump_plain(entry)) == entry
    with refuses(TypeError, "entry holds object"):
        dump_plain([object()])


@pytest.mark.slow
def test_entries_travel_as_they_are_and_the_gold_answer_is_right_in_a_worker() -> None:
    from reasoning_gym.factory import DATASETS, create_dataset

    from posttrain.data.verifiable.reasoning_gym_scoring import dump_plain, load_plain

    answers, metas = [], []
    for name in sorted(set(DATASETS) - SLOW - REFUSED.keys()):
        settings = {"seed": 7, "size": 2}
        entry = create_dataset(name, **settings)[1]
        back = load_plain(dump_plain(entry))
        assert (back, str(types_of(back))) == (entry, str(types_of(entry))), name
        if name not in NO_GOLD:
            answers.append(str(entry["answer"]))
            metas.append({"score": make_scorer(name, settings, entry), "name": name})
    scores = task_score(answers, metas)
    assert [meta["name"] for meta, score in zip(metas, scores, strict=True) if score != 1.0] == []


NO_GOLD = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


def types_of(value: Any) -> Any:
    """The types below a value; those of NumPy's numbers and texts are the plain ones."""
    if isinstance(value, dict):
        return {str(key): (type(key).__name__, types_of(one)) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [type(value).__name__, *map(types_of, value)]
    return next(kind.__name__ for kind in (bool, int, float, str, date, type(None)) if isinstance(value, kind))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dataset": "chain_sums"}, UnknownComponent, "'chain_sums'"),
        ({"dataset": "chain_sum", "options": {"min_term": 2}}, UsageError, "'min_terms'"),
        ({"dataset": "chain_sum", "options": {"seed": 2}}, UsageError, "'seed'"),
        ({"dataset": "chain_sum", "options": {"min_terms": 9, "max_terms": 2}}, UsageError, "does not accept"),
        ({"dataset": "chain_sum", "options": {"min_terms": "x"}}, UsageError, "does not accept"),
        ({"dataset": "composite", "options": {"datasets": [{"name": "chain_sum"}]}}, UsageError, "does not accept"),
    ],
)
def test_refusals(options: dict[str, Any], error: type[UsageError], message: str) -> None:
    with refuses(error, message):
        registry.find("task", "reasoning_gym").bind(options)()
