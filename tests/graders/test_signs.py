"""Digits and signs of other scripts in answers."""

from __future__ import annotations

import pytest

from posttrain.graders.answers import last_number, parse_quantity
from posttrain.graders.grading import Submission, grade_submissions
from posttrain.graders.signs import fold_signs


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("12", "１２"),
        ("１２", "12"),
        ("-5", "－５"),
        ("0.5", "０．５"),
        ("1000", "１，０００"),
        ("50%", "５０％"),
        ("1/2", "１／２"),
        ("3", "٣"),
        ("1234.5", "١٬٢٣٤٫٥"),
        ("42", "४२"),
        ("7", "۷"),
    ],
)
@pytest.mark.parametrize("grader", ["numeric", "math"])
def test_number_in_digits_of_another_script_is_the_number(grader: str, gold: str, answer: str) -> None:
    wrong = gold.translate(str.maketrans("1234567890", "2345678901")) if gold.isascii() else "99"
    for own, expected in ((gold, "right"), (wrong, "wrong")):
        submission = Submission(f"The answer is {answer}", last_number(answer), own)
        assert grade_submissions(grader, [submission])[0].outcome == expected


@pytest.mark.parametrize(("gold", "answer"), [("(1,2)", "（１，２）"), ("3:4", "３：４")])
def test_formula_in_full_width_signs_is_the_formula(gold: str, answer: str) -> None:
    assert grade_submissions("math", [Submission(f"\\boxed{{{answer}}}", answer, gold)])[0].outcome == "right"


@pytest.mark.parametrize(
    "text", ["Ｂ", "（Ｂ）", "答案是Ｂ", "答案：Ｂ。", "Ｂ．iron", "ｉｒｏｎ", "The answer is （ｂ）"]
)
def test_choice_in_full_width_letters_is_read(text: str) -> None:
    for gold, expected in (("B", "right"), ("Ａ", "wrong")):
        submission = Submission(text, None, gold, {"choices": ["wood", "iron"]})
        assert grade_submissions("multiple_choice", [submission])[0].outcome == expected


def test_full_width_comma_parts_what_is_listed() -> None:
    assert (last_number("100，200"), parse_quantity("100，200")) == ("200", None)
    assert fold_signs("１，０００，０００") == "1,000,000"


@pytest.mark.parametrize("text", ["²", "④②", "½", "𝟒𝟐", "四", "é", "x → y", "ｙｅｓ", "［"])
def test_other_signs_stay_as_they_are(text: str) -> None:
    assert fold_signs(text) == text
