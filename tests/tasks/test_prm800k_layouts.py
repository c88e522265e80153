"""PRM800K's two layouts: the same solutions, whichever way they are written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from posttrain.errors import DataError
from posttrain.tasks.reading import Row
from posttrain.tasks.steps.prm800k import Candidate, Solution, Step, read_solutions

PROBLEM = "What is 2 + 3 + 4?"


def rated(text: str, rating: int | None, **more: Any) -> dict[str, Any]:
    return {"text": text, "rating": rating, "flagged": False} | more


def step(*completions: dict[str, Any], chosen: int | None = None, human: Any = None) -> dict[str, Any]:
    return {"completions": list(completions), "chosen_completion": chosen, "human_completion": human}


def published(*steps: dict[str, Any], finish: str = "solution", **more: Any) -> dict[str, Any]:
    """A row as in the published files."""
    return {
        "generation": None,
        "is_quality_control_question": False,
        "is_initial_screening_question": False,
        "question": {"problem": PROBLEM, "ground_truth_answer": "9"},
        "label": {"steps": list(steps), "finish_reason": finish},
    } | more


def candidate(before: Sequence[str], text: str, rating: int | None, **more: Any) -> dict[str, Any]:
    """A row of one candidate step."""
    return {"instruction": PROBLEM, "responses": list(before), "next_response": text, "rating": rating} | more


def solutions(rows: Sequence[Mapping[str, Any]], dropped: Counter[str] | None = None) -> list[Solution]:
    given = (Row("f.jsonl", line, row) for line, row in enumerate(rows, start=1))
    return list(read_solutions(given, Counter() if dropped is None else dropped))


EXPECTED = [
    Step([Candidate("2+3=5.", 1), Candidate("2+3=6.", -1)], chosen=0),
    Step([Candidate("Hm.", 0), Candidate("5+4=9, by hand.", None)], chosen=1),
    Step([Candidate("Nine.\n\n# Answer\n\n9", 1)], chosen=0),
]


def test_both_layouts_give_the_same_solution() -> None:
    (as_published,) = solutions(
        [
            published(
                step(rated("2+3=5.", 1), rated("2+3=6.", -1), chosen=0),
                step(rated("Hm.", 0), human={"text": "5+4=9, by hand.", "rating": None, "source": "human"}),
                step(rated("Nine.\n\n# Answer\n\n9", 1), chosen=0),
            )
        ]
    )
    assert as_published == Solution(1, PROBLEM, EXPECTED, "solution")
    first, second = "2+3=5.", "5+4=9, by hand."
    (by_rows,) = solutions(
        [
            candidate([], first, 1, is_preferred_response=True),
            candidate([], "2+3=6.", -1, is_preferred_response=False),
            candidate([first], "Hm.", 0),
            candidate([first], second, None, is_human_response=True, is_preferred_response=True),
            candidate([first, second], "Nine.", 1, is_preferred_response=True, is_solution=True, answer="9"),
        ]
    )
    assert by_rows == Solution(1, PROBLEM, EXPECTED, None)


def test_what_was_not_chosen_ends_the_solution() -> None:
    """The first error of phase 2, and a labeller who gave up: an empty step behind the last one is none."""
    (found_error,) = solutions([published(step(rated("2+3=6.", -1), rated("2+3=5.", 1)), finish="found_error")])
    assert found_error.steps == [Step([Candidate("2+3=6.", -1), Candidate("2+3=5.", 1)], None)]
    assert found_error.finish == "found_error"
    empty = {"completions": None, "human_completion": None, "chosen_completion": None}
    (gave_up,) = solutions([published(step(rated("2+3=5.", 1), chosen=0), empty, finish="give_up")])
    assert gave_up.steps == [Step([Candidate("2+3=5.", 1)], 0)]


def test_zero_is_a_rating_and_null_is_none() -> None:
    (found,) = solutions([published(step(rated("a", 0), rated("b", None), rated("c", -1, flagged=True), chosen=0))])
    assert [c.rating for c in found.steps[0].candidates] == [0, None, None]


def test_solutions_that_are_left_out() -> None:
    good = step(rated("a", 1), chosen=0)
    dropped: Counter[str] = Counter()
    found = solutions(
        [
            published(good),
            published(good, is_quality_control_question=True),
            published(good, is_initial_screening_question=True, is_quality_control_question=None),
            published(good, finish="bad_problem"),
            published(good, step(rated(" ", 1), chosen=0)),
            published(good, finish="give_up"),
        ],
        dropped,
    )
    assert [solution.line for solution in found] == [1, 6]
    assert dropped == {
        "a quality-control solution, given to every labeller": 1,
        "a screening solution, given to every labeller": 1,
        "a problem that the labeller found broken": 1,
        "a blank step": 1,
    }


def test_rows_of_several_solutions_are_told_apart() -> None:
    other = {"instruction": "Other?"}
    rows = [
        candidate([], "a", 1),
        candidate(["a"], "b", 1),
        candidate([], "a", 1),  # the same problem once more
        candidate([], "x", -1),
        candidate(["a"], "c", 1),
        candidate(["a", "c"], "d", -1),
        candidate(["z"], "e", 1),  # behind a step that is none of those before
        candidate([], "a", 1) | other,
        candidate([], "b", 1),  # beside no candidate of this problem
    ]
    found = solutions(rows)
    assert [solution.line for solution in found] == [1, 3, 7, 8, 9]
    assert [[[c.text for c in s.candidates] for s in solution.steps] for solution in found] == [
        [["a"], ["b"]],
        [["a", "x"], ["c"], ["d"]],
        [["z"], ["e"]],
        [["a"]],
        [["b"]],
    ]
    assert [[s.chosen for s in solution.steps] for solution in found] == [
        [0, None],
        [0, 0, None],
        [0, None],
        [None],
        [None],
    ]
    assert found[2].steps[0].candidates == [Candidate("z", None)]  # its rating is not in the file


def test_of_equal_candidates_the_preferred_one_goes_on() -> None:
    rows = [
        candidate([], "a", -1, is_preferred_response=False),
        candidate([], "a", 1, is_preferred_response=True),
        candidate(["a"], "b", 1),
    ]
    assert [solution.steps[0].chosen for solution in solutions(rows)] == [1]
    unmarked = [row | {"is_preferred_response": None} for row in rows]
    assert [solution.steps[0].chosen for solution in solutions(unmarked)] == [0]
    # what the next rows say counts for more than the mark
    marked_elsewhere = [
        candidate([], "a", 1),
        candidate([], "b", 1, is_preferred_response=True),
        candidate(["a"], "c", 1),
    ]
    assert [solution.steps[0].chosen for solution in solutions(marked_elsewhere)] == [0]


def test_blank_rows_are_counted() -> None:
    dropped: Counter[str] = Counter()
    (found,) = solutions([candidate([], "a", 1), candidate([], " ", 1), candidate(["a", None], "b", 1)], dropped)  # type: ignore[list-item]
    assert dropped == {"a blank step": 2}
    assert len(found.steps) == 1
    assert solutions([]) == []


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "q", "completions": []},
            r"the row has the keys prompt, completions, of neither layout; one needs the published",
        ),
        (published(step(rated("a", 2), chosen=0)), "'rating' must be −1, 0, 1 or null; got 2"),
        (published(step(rated("a", 1), chosen=1)), "step 1: 'chosen_completion' is 1 of 1 completions"),
        (published(step("a", chosen=0)), "step 1: a completion must be an object"),  # type: ignore[arg-type]
        (published(question="q"), "'question' must be an object; got 'q'"),
        (published(question={}), "the key 'problem' is missing"),
        (published(label={"steps": 3}), "'label' needs 'steps', a list"),
        (published("a"), r"'label.steps' 1 must be an object"),  # type: ignore[arg-type]
        (candidate([], "a", 1) | {"responses": "b"}, "'responses' must be a list"),
        (candidate([], "a", True), "'rating' must be −1, 0, 1 or null; got True"),
        (candidate([], 5, 1), "'step 1' must be text"),  # type: ignore[arg-type]
    ],
)
def test_malformed_rows_are_refused_with_their_line(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"f\.jsonl:1: {message}"):
        solutions([row])
