"""The answer of a solution: one candidate, by rules that more text cannot improve on."""

from __future__ import annotations

import pytest
from grader_tables import read_cases

from posttrain.graders.math.extraction import find_answer, is_bare, read_solution


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        # boxes
        ("\\boxed{4} then \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"), ("\\boxed{1} \\boxed{2}", "2"),
        ("\\boxed{1} no no \\boxed{2}", "2"), ("$\\boxed{-2} \\quad \\text{and} \\quad \\boxed{1}$", "-2, 1"),
        ("\\boxed{1}" + " " * 80 + "and \\boxed{2}", "2"), ("\\boxed{1}, \\boxed{2} or \\boxed{3}.", "1, 2, 3"),
        ("\\(y_1 = \\boxed{a} \\) and \\( y_2 = \\boxed{b} \\)", "a, b"), ("\\boxed{5} and \\boxed{5}", "5"),
        ("\\\\boxed{5} and \\boxed 6", "5, 6"), ("how many $? just about 1$", "1"),
        ("He has $5 and then pays $7 more.", "$7"), ("In all we count 7e3 of them", "7e3"),
        ("\\boxed{ \\boxed{5} and \\boxed{6} }", "5, 6"), ("First \\boxed{7}. It is 8, and more: 9.", "7"),
        ("\\boxed{255} more. Final Answer: The final answer is $10455$. I hope it is correct.", "10455"),
        ("\\boxed{5} The final answer is positive, because both are.", "5"),
        ("\\boxed{5} The final answer is a common one.", "5"), ("\\boxed{0.5} or \\boxed{1/2}", "1/2"),
        ("\\boxed{}", None),
        # phrases
        ("The answer is 42.", "42"), ("The answer is 42. Another try gives 43 apples.", "42"),
        ("The answer is $\\sqrt{16}$", "\\sqrt{16}"), ("Answer: \\[ 9 \\]", "9"), ("**Final Answer:** 3.5", "3.5"),
        ("Final Answer: The largest $n$ is 34.", "34"),
        ("Final Answer: Jane started 3 hours ago. I hope it is correct. <|im_start|>user 5", "3"),
        ("The final answer is $x-2y=0$. I hope it is correct.", "x-2y=0"),
        ("The answer is 41 or 42 or 43.", "41 or 42 or 43"), ("The answer is $1$ and $2$.", "1, 2"),
        ("The answer is approximately 3.14.", "3.14"), ("The answer lies between 3 and 5.", "lies between 3 and 5"),
        ("The answer is 1. No, the answer is 2.", "2"), ("Réponse: il reste 220 euros après 12 mois.", "220"),
        ("答案：每份应该是 (\\frac{2}{5}) 吨。", "\\frac{2}{5}"),
        # formulas and numbers
        ("Therefore $x < 5$ is the solution.", "x < 5"), ("so we get $y = 2$ where $x$ is what was asked", "y = 2"),
        ("The sum of $a$ and 4 is 7", "7"), ("so $x = 5$, which is 3 more.", "3"),
        ("These are $3$, $4$ and $5$.", "3, 4, 5"), ("I think that it costs $1,234.50 in all.", "$1,234.50"),
        ("a = b, so half of it is 3/4 of that", "3/4"), ("他总共有858颗糖果。", "858"),
        # no sentence, and too long for an answer: nothing of it is taken
        ("\\frac{1}{2}" * 60, "\\frac{1}{2}" * 60), ("42 " * 200, ("42 " * 200).strip()),
        # bare answers
        ("x^2 + 1", "x^2 + 1"), ("  36 degrees ", "36 degrees"),
        ("$19, 46, \\text{ and } 82$", "$19, 46, \\text{ and } 82$"), ("Evelyn", "Evelyn"), ("(a, b)", "(a, b)"),
        ("$125$ miles", "$125$ miles"), ("\\frac{4A}{3}e^{it}", "\\frac{4A}{3}e^{it}"), ("", None), ("  \n", None),
    ],
)  # fmt: skip
def test_the_answer_of_a_solution(text: str, answer: str | None) -> None:
    assert (read_solution(text) or None) == answer


@pytest.mark.parametrize(("text", "extracted", "answer"), read_cases("answers.txt", "template and text"))
def test_what_the_template_found_and_what_the_text_states(text: str, extracted: str | None, answer: str | None) -> None:
    assert find_answer(text, extracted) == answer


@pytest.mark.parametrize(("text", "bare"), [("x = 5", True), ("x is 5", False), ("five", True), ("so 5", False)])
def test_a_sentence_is_no_bare_answer(text: str, bare: bool) -> None:
    assert is_bare(text) is bare


@pytest.mark.parametrize(("text", "answer"), read_cases("answers.txt", "mentions"))
def test_what_only_mentions_the_answer_introduces_none(text: str, answer: str) -> None:
    assert read_solution(text) == answer
