"""The response after the thinking, and the part of it that is the answer."""

from __future__ import annotations

import pytest
from grader_tables import read_cases

from posttrain.graders.answers import answer_region, final_response, tagged_response
from posttrain.graders.grading import Submission


@pytest.mark.parametrize(("text", "expected"), read_cases("answers.txt", "final response"))
def test_thinking_is_over_at_the_last_closing_tag(text: str, expected: str | None) -> None:
    assert final_response(text) == expected


@pytest.mark.parametrize(("text", "expected"), read_cases("answers.txt", "tagged response"))
def test_answer_tags_are_no_part_of_the_response(text: str, expected: str | None) -> None:
    assert tagged_response(text) == expected


@pytest.mark.parametrize(
    ("text", "extracted", "expected"),
    [
        ("<think>B</think> <answer> C </answer>", "C", ("C", True)),
        ("<think>\\boxed{A}</think> It is $\\boxed{B}$.", "B", ("B", True)),
        ("It is $\\boxed{4}$, not 5.", "5", ("4", True)),
        ("It is B, since 2 + 2 = 4.", "4", ("It is B, since 2 + 2 = 4.", False)),  # the last number is no mark
        ("It is B, since 2 + 2 = 4.", None, ("It is B, since 2 + 2 = 4.", False)),
        ("<think>x</think> FINAL: B!", "B", ("B", True)),  # a rule of the template's own
        ("", "B", ("B", True)),
        ("  ", None, None),
        ("<think>so B", "B", None),
    ],
)
def test_the_region_of_the_answer(text: str, extracted: str | None, expected: tuple[str, bool] | None) -> None:
    assert answer_region(Submission(text, extracted, "B")) == expected
