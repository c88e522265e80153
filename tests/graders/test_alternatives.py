"""Several gold answers, each of which is right."""

from __future__ import annotations

import pytest

from posttrain.graders import grading
from posttrain.graders.grading import Submission, Verdict, any_answer


def test_any_of_the_answers_is_right() -> None:
    submissions = [
        Submission("", "6630", "6630.65", {"answers": ("6630.65", "6630")}),
        Submission("", "6630.65", "6630.65", {"answers": ("6630.65", "6630")}),
        Submission("", "6631", "6630.65", {"answers": ("6630.65", "6630")}),
        Submission("", None, "6630.65", {"answers": ("6630.65", "6630")}),
        Submission("", "7", "7", {}),
        Submission("", "7", None, {}),
    ]
    found = any_answer(submissions, mode="numeric")
    assert [v.outcome for v in found] == ["right", "right", "wrong", "no_answer", "right", "ungraded"]


def test_a_grading_that_was_stopped_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    request: list[str | None] = []

    def grade(name: str, submissions: list[Submission]) -> list[Verdict]:
        request.extend(submission.answer for submission in submissions)
        outcomes = {"slow": Verdict("timeout"), "no": Verdict("wrong", "x"), "yes": Verdict("right", "y")}
        return [outcomes[submission.answer or ""] for submission in submissions]

    monkeypatch.setattr(grading, "grade", grade)
    golds = [("no", "slow"), ("slow", "yes"), ("no", "no")]
    found = any_answer([Submission("", "z", own[0], {"answers": own}) for own in golds])
    assert [(v.outcome, v.extracted) for v in found] == [("timeout", None), ("right", "y"), ("wrong", "x")]
    assert request == ["no", "slow", "slow", "yes", "no", "no"]
