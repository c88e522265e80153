"""No answer is right without being right, in any grader; and none that is right is refused."""

from __future__ import annotations

import random
import re

import empty_answers
import equivalents
import grader_answers
import pytest
from adversary import Report, attack_with_constants, attack_with_near_golds, attack_with_own, submission, with_grader
from choice_answers import letter_hedges
from correct_answers import CHOICE, math_pairs, numeric_pairs
from real_golds import MATH_TASKS, NUMBER_TASKS, PANEL, VALUES, data_folder, real_golds

from posttrain import registry
from posttrain.graders.grading import Submission, grade_submissions

needs_data = pytest.mark.skipif(data_folder() is None, reason="POSTTRAIN_DATA names no folder with real rows")
NUMBERS = ("17", "-3", "0", "1", "0.5", "1/2", "1,200", "25%", "18", "2", "42", "3.14", "-0.25", "1000")
TEXTS = ("yes", "no", "Evelyn", "A", "B", "(1,2)", "x+1", "17", "-1", "n", "two")
SAMPLE = 5  # one in so many of the invisible texts goes to the slower graders of the fast suite


def marks() -> list[str]:
    return empty_answers.invisible_texts()[::SAMPLE] + empty_answers.empty_marks()


def check(report: Report, least: int) -> None:
    """No failure, and as many comparisons as the test says that it makes."""
    assert not report.failures, report.summary()
    assert report.counts["comparisons"] >= least


def test_every_grader_has_its_adversary() -> None:
    """A new grader needs a test here."""
    assert set(registry.entries("grader")) == {
        "any_answer", "code_tests", "exact", "math", "multiple_choice", "numeric",
        "refusal", "scored",
    }  # fmt: skip


# What the table says of golds that are known to be different, and of what is known to be the same.
DIFFERENT = [
    ("17", "18"), ("5 cm", "5 inches"), ("\\{\\}", "17"), ("(-1)^n", "-1"), ("2+(-1)^n", "1"), ("\\ln|x|",
    "\\ln x"), ("4=5", "5"),
    ("\\angle ABC", "\\angle BAC"), ("[0,1)", "[0,1]"), ("(1,2)", "(2,1)"), ("\\{1,2\\}", "\\{1,2,3\\}"), ("101_2",
    "101_3"),
    ("x", "y"), ("x=3", "y=3"), ("0.33", "1/3"), ("2^{2005}", "2^{2004}"), ("\\text{yes}", "\\text{no}"),
    ("\\sqrt[3]{x^3}", "|x|"),
    ("\\min(n,7)", "n"), ("10^{-40}", "0"), ("101_2", "5"), ("1:2", "2:1"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_the_table_calls_different_what_is(one: str, other: str) -> None:
    assert equivalents.compare(one, other) == equivalents.compare(other, one) == "different"


def test_the_table_never_calls_equal_spellings_different() -> None:
    message = [equivalents.compare(gold, given) for _, gold, given in math_pairs()]
    assert "different" not in message
    assert message.count("same") >= 0.97 * len(message)


@needs_data
def test_the_table_decides_on_almost_all_golds() -> None:
    golds, rng = real_golds(MATH_TASKS), random.Random(0)
    assert all(equivalents.compare(gold, gold) != "different" for gold in golds)
    pairs = [(rng.choice(golds), rng.choice(golds)) for _ in range(500)]
    assert sum(equivalents.compare(*pair) == "unknown" for pair in pairs) < 0.03 * len(pairs)


def test_nothing_is_no_answer_in_mathematics() -> None:
    check(attack_with_constants(with_grader("math"), marks(), PANEL[::4]), 1600)


def test_constants_and_lists_are_right_for_what_they_say_in_mathematics() -> None:
    answers = grader_answers.constants()[::2] + grader_answers.lists()
    check(attack_with_constants(with_grader("math"), answers, PANEL[::4]), 2000)


def test_tricks_are_no_values() -> None:
    check(attack_with_constants(with_grader("math"), grader_answers.tricks(), VALUES), 1690)


def test_hedges_and_mutations_of_golds_are_wrong_in_mathematics() -> None:
    report = attack_with_own(with_grader("math"), PANEL, random.Random(0), len(PANEL) // 4)
    check(report, 450)
    decided = report.counts["comparisons"]
    assert report.counts["mutations_unknown"] < decided, "the table must decide on most of them"


@needs_data
def test_hedges_mutations_and_neighbours_of_real_golds_are_wrong_in_mathematics() -> None:
    golds = real_golds(MATH_TASKS)
    report = attack_with_own(with_grader("math"), golds, random.Random(1), 8)
    report.add(attack_with_near_golds(with_grader("math"), golds, random.Random(2), 200))
    check(report, 500)


@pytest.mark.slow
@needs_data
def test_more_of_all_that_on_real_golds() -> None:
    golds, rng = real_golds(MATH_TASKS), random.Random(3)
    report = attack_with_constants(
        with_grader("math"), grader_answers.constant_answers(), [*PANEL, *rng.sample(golds, 40)]
    )
    report.add(attack_with_own(with_grader("math"), golds, rng, 400))
    report.add(attack_with_near_golds(with_grader("math"), golds, rng, 6000))
    check(report, 100_000)


@pytest.mark.parametrize("kind", sorted({kind for kind, _, _ in math_pairs()}))
def test_every_spelling_of_a_right_answer_is_right_in_mathematics(kind: str) -> None:
    pairs = [(gold, given) for own, gold, given in math_pairs() if own == kind]
    refused = [pair for pair, correct in zip(pairs, with_grader("math")(pairs), strict=True) if not correct]
    assert refused == []


def test_constants_hedges_and_mutations_are_wrong_as_numbers() -> None:
    report = attack_with_constants(with_grader("numeric"), grader_answers.constant_answers(), NUMBERS)
    check(report.add(attack_with_own(with_grader("numeric"), NUMBERS, random.Random(0), len(NUMBERS))), 15_000)


@needs_data
def test_real_numbers() -> None:
    golds, rng = real_golds(NUMBER_TASKS), random.Random(0)
    report = attack_with_constants(
        with_grader("numeric"), grader_answers.constant_answers()[::9], rng.sample(golds, 30)
    )
    report.add(attack_with_own(with_grader("numeric"), golds, rng, 20))
    check(report.add(attack_with_near_golds(with_grader("numeric"), golds, rng, 1000)), 5000)


def test_every_spelling_of_a_number_is_right() -> None:
    pairs = numeric_pairs()
    refused = [pair for pair, correct in zip(pairs, with_grader("numeric")(pairs), strict=True) if not correct]
    assert refused == []


def test_text_is_right_as_it_stands() -> None:
    report = attack_with_constants(with_grader("exact"), grader_answers.constant_answers(), TEXTS)
    check(report.add(attack_with_own(with_grader("exact"), TEXTS, random.Random(0), len(TEXTS))), 12_000)
    assert with_grader("exact")([(text, text) for text in TEXTS]) == [True] * len(TEXTS)


def test_one_of_several_golds_is_no_leave_for_hedges() -> None:
    meta = {"answers": ("17", "\\frac{1}{2}")}
    wrong = [
        *marks(),
        *grader_answers.hedges("17", "18"),
        *grader_answers.hedges("\\frac{1}{2}", "3"),
        "17 or 1/2",
        "17, 1/2",
        "18",
    ]
    found = grade_submissions("any_answer", [submission(answer, "17", **meta) for answer in wrong])
    assert [answer for answer, verdict in zip(wrong, found, strict=True) if verdict.outcome == "right"] == []
    correct = grade_submissions("any_answer", [submission(answer, "17", **meta) for answer in ("17", "0.5")])
    assert [verdict.outcome for verdict in correct] == ["right", "right"]


CHOICES = ("a wolf", "the tide", "an oak", "some salt")


def letters(texts: list[str], gold: str) -> list[str]:
    """The texts that are right for the letter: as a response, in answer tags, and in a box."""
    ways = [(text, text, None) for text in texts]
    ways += [(text, f"<think> hm </think> <answer> {text} </answer>", text.strip() or None) for text in texts]
    ways += [(text, f"So it is $\\boxed{{{text}}}$.", text) for text in texts if text.count("{") == text.count("}")]
    found = grade_submissions(
        "multiple_choice", [Submission(whole, own, gold, {"choices": CHOICES}) for _, whole, own in ways]
    )
    return [whole for (_, whole, _), verdict in zip(ways, found, strict=True) if verdict.outcome == "right"]


@pytest.mark.parametrize(("gold", "other"), [("A", "B"), ("B", "C"), ("C", "A"), ("D", "A")])
def test_hedges_choose_no_letter(gold: str, other: str) -> None:
    assert letters(list(letter_hedges(gold, other)), gold) == []


@pytest.mark.parametrize("gold", ["A", "B", "C", "D"])
def test_constants_choose_the_letter_that_they_are(gold: str) -> None:
    """Of all constant answers the letter alone is right, in its spellings."""
    answers = grader_answers.constant_answers()
    spellings = re.compile(rf"\W*(?:\\text\{{)?\W*{gold}\W*")
    correct = letters(answers, gold)
    assert [text for text in correct if not spellings.fullmatch(_inner(text))] == []
    assert gold in correct


def _inner(text: str) -> str:
    found = re.search(r"<answer>(.*)</answer>|\\boxed\{(.*)\}\$\.", text, re.DOTALL)
    return text if found is None else found[1] or found[2] or ""


def test_copied_choices_and_questions_choose_nothing() -> None:
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", CHOICES, strict=True))
    question = f"Which of these howls?\n{listed}\nAnswer with a letter."
    for gold in "ABCD":
        assert (
            letters(
                [listed, question, listed.replace("\n", " "), ", ".join(CHOICES), *grader_answers.copies(question)],
                gold,
            )
            == []
        )


@pytest.mark.parametrize("way", [0, 1])
def test_every_way_to_name_a_letter_is_read(way: int) -> None:
    wrapped = [
        (text, text, None) if way == 0 else (text, f"<think>x</think> <answer> {text} </answer>", text)
        for text in CHOICE
    ]
    found = grade_submissions(
        "multiple_choice", [Submission(whole, own, "B", {"choices": CHOICES}) for _, whole, own in wrapped]
    )
    assert [text for (text, _, _), verdict in zip(wrapped, found, strict=True) if verdict.outcome != "right"] == []


def test_nothing_that_is_no_program_succeeds() -> None:
    """Attacks by programs have a table of their own: ``test_code_attacks``."""
    tests = {
        "names": ("f",),
        "code": "assert not f(2)\nassert f(3) is None",
        "prefix": "def f(n):\n    'Nothing.'\n",
        "goes_on": True,
    }
    texts = [*empty_answers.invisible_texts()[::6], *grader_answers.constant_answers()[::25], "```python\n\n```", "```"]
    graded = grade_submissions("code_tests", [Submission(text, text, None, {"tests": tests}) for text in texts])
    assert {verdict.outcome for verdict in graded} == {"no_answer"}
