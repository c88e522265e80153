"""The scorers of tasks: in processes that can be killed, each answer by itself."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.graders.grading import Submission, grade_submissions
from posttrain.graders.sandbox.workers import Limits, WorkerResult
from posttrain.graders.scored import WorkerScorer, score_answers, task_score

LIMITS = Limits(cpu_seconds=0.5, wall_seconds=15.0, memory_bytes=128 * 2**20)


def scorer(kind: str) -> WorkerScorer:
    """A scorer that does with the answer what ``worker_functions`` calls ``kind``."""
    return WorkerScorer("worker_functions:answer_as_number", kind, LIMITS)


def outcomes(kinds: list[str], answer: str | None) -> list[tuple[str, float]]:
    submissions = [Submission("", answer, None, {"score": scorer(kind)}) for kind in kinds]
    return [(verdict.outcome, verdict.info["task_score"]) for verdict in grade_submissions("scored", submissions)]


def test_a_scorer_that_raises_or_hangs_is_an_outcome_and_the_others_are_scored() -> None:
    kinds = ["echo", "raise", "spin", "allocate", "fault", "leave", "echo"]
    assert outcomes(kinds, "1") == [
        ("right", 1.0), ("crash", 0.0), ("timeout", 0.0), ("right", 1.0), ("crash", 0.0), ("crash", 0.0),
        ("right", 1.0),
    ]  # fmt: skip
    assert outcomes(["allocate", "echo"], "99999999999") == [("crash", 0.0), ("right", 99999999999.0)]
    metas = [{"score": scorer(kind)} for kind in kinds]
    assert task_score(["1"] * len(kinds), metas) == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0]


def test_partial_and_missing_scores() -> None:
    assert outcomes(["echo"], "0.75") == [("wrong", 0.75)]
    for blank in (None, "", " \u200b\n", "\x00"):
        assert outcomes(["echo", "raise"], blank) == [("no_answer", 0.0)] * 2
    [verdict] = grade_submissions("scored", [Submission("", "1", "1", {})])
    assert (verdict.outcome, verdict.info) == ("ungraded", {"task_score": 0.0})


def test_equal_answers_to_a_question_are_scored_once_and_in_order() -> None:
    calls: list[str] = []

    def own(answer: str) -> float:
        calls.append(answer)
        return float(answer)

    one, other = scorer("echo"), scorer("pid")
    request: list[tuple[Any, str | None]] = [
        (one, "0.5"),
        (other, "1"),
        (own, "2"),
        (one, "0.5"),
        (other, "1"),
        (one, "3"),
    ]
    results = score_answers(request)
    assert results[:1] + results[2:4] + results[5:] == [WorkerResult("value", value) for value in (0.5, 2.0, 0.5, 3.0)]
    assert results[1] == results[4]
    assert calls == ["2"]


def test_a_function_of_a_user_is_called_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        grade_submissions("scored", [Submission("", "1", None, {"score": lambda _: 1 / 0})])
