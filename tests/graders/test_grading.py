"""Blank answers have one meaning in every grader, reward and template; several gold answers are each right."""

from __future__ import annotations

import pytest

from posttrain.data.render.templates import boxed_answer, chat, tagged_answer
from posttrain.graders import grading
from posttrain.graders.grading import Submission, Verdict, any_answer, grade_submissions, is_blank
from posttrain.graders.rewards import xml_format

BLANK = [
    "", " \t\n", "\x00", "\x1b", "\u200b", "\ufeff", "\u00ad", "\u00a0", "\u2028", "\u2029", "\u3000", "\u2060",
    "\u200e",
    "\u0301", "\ufe0f", "\u20dd", "\u2800", "\u3164", "\u115f", "\u1160", "\uffa0", "\U000e0041", "\ue000", "\uffff",
    "\ud800", "\ufffd", "\ufffc", "\u180e", "\u034f", " \u200b\x00\ufeff\u3164 ",
]  # fmt: skip


@pytest.mark.parametrize("text", BLANK)
def test_nothing_to_see_is_blank_everywhere(text: str) -> None:
    assert is_blank(text)
    answered = f"<think> a </think> <answer>{text}</answer>"
    assert xml_format(answered, ("think", "answer")) == 0.0
    assert tagged_answer(answered, "think") is None
    assert chat().extract(answered) is None
    assert boxed_answer(f"\\boxed{{{text}}}") is None
    for grader in ("numeric", "exact", "scored", "multiple_choice", "refusal", "code_tests"):
        meta = {"score": lambda _: 1.0, "kind": "harmful", "tests": {"names": ["f"], "code": "assert f() == 1"}}
        assert grade_submissions(grader, [Submission(answered, text, "B", meta)])[0].outcome == "no_answer", grader
        assert grade_submissions(grader, [Submission(text, text, "B", meta)])[0].outcome == "no_answer"


@pytest.mark.parametrize("text", ["0", ".", "-", "\u200b7\u200b", "e\u0301", "é", "答", "🙂", "∅", "\u2801", "ㅎ"])
def test_what_can_be_seen_is_not_blank(text: str) -> None:
    assert not is_blank(text)
    assert xml_format(f"<think> a </think> <answer>{text}</answer>", ("think", "answer")) == 1.0


def test_a_megabyte_is_looked_at_once() -> None:
    assert is_blank("\u200b" * 10**6)
    assert not is_blank("\u200b" * 10**6 + "x")


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


@pytest.mark.parametrize(
    ("answers", "outcomes"),
    [
        ("abc", ["wrong", "right"]),  # one answer, not three of a letter
        ('["a", "abc"]', ["right", "right"]),
        ([10], ["wrong", "wrong"]),
        ({"text": ["abc"], "answer_start": [1]}, ["ungraded", "ungraded"]),
    ],
)
def test_any_answer_of_another_form_than_a_list_of_texts(answers: object, outcomes: list[str]) -> None:
    asked = [Submission("", text, None, {"answers": answers}) for text in ("a", "abc")]
    assert [verdict.outcome for verdict in any_answer(asked, mode="exact")] == outcomes


def test_a_grading_that_was_stopped_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    request: list[str | None] = []

    def grade_submissions(name: str, submissions: list[Submission]) -> list[Verdict]:
        request.extend(submission.answer for submission in submissions)
        outcomes = {"slow": Verdict("timeout"), "no": Verdict("wrong", "x"), "yes": Verdict("right", "y")}
        return [outcomes[submission.answer or ""] for submission in submissions]

    monkeypatch.setattr(grading, "grade_submissions", grade_submissions)
    golds = [("no", "slow"), ("slow", "yes"), ("no", "no")]
    found = any_answer([Submission("", "z", own[0], {"answers": own}) for own in golds])
    assert [(v.outcome, v.extracted) for v in found] == [("timeout", None), ("right", "y"), ("wrong", "x")]
    assert request == ["no", "slow", "slow", "yes", "no", "no"]
