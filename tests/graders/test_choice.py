"""Letters of choices: what counts as choosing one, and what does not."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from grader_tables import read_cases

from posttrain.graders.choice import LETTERS, chosen_letter, multiple_choice, read_gold
from posttrain.graders.grading import Submission, Verdict

CHOICES = ("4", "-4", "B cells", "A and B")


def verdict(text: str, gold: str | None = "B", extracted: str | None = None, **meta: Any) -> Verdict:
    return multiple_choice(Submission(text, extracted, gold, meta))


@pytest.mark.parametrize(("section", "letter"), [("one letter", "B"), ("nothing", None)])
def test_a_text_chooses_one_letter_or_none(section: str, letter: str | None) -> None:
    texts = read_cases("choice_texts.txt", section)
    assert [text for text in texts if chosen_letter(text, CHOICES) != letter] == []


WORLD = ("a wolf", "the tide", "an oak", "some salt")


@pytest.mark.parametrize("form", ["{}", "<think>x</think> <answer> {} </answer>", "So it is \\boxed{{{}}}."])
def test_a_choice_that_is_taken_back_or_reported_is_none(form: str) -> None:
    texts = read_cases("choice_texts.txt", "taken back")
    assert [t for t in texts if verdict(form.format(t), "A", t, choices=WORLD).outcome == "right"] == []


def test_what_is_reported_of_other_letters_leaves_a_choice_unchanged() -> None:
    texts = read_cases("choice_texts.txt", "standing")
    assert [text for text in texts if verdict(text, "B", choices=WORLD).outcome != "right"] == []


def test_false_is_a_text_where_it_may_be_one() -> None:
    assert chosen_letter("B: false", ("true", "false")) == "B"
    assert chosen_letter("B: false", WORLD) is None
    assert chosen_letter("B is false") is None


@pytest.mark.parametrize(("text", "letter"), read_cases("answers.txt", "texts of choices"))
def test_texts_of_choices(text: str, letter: str) -> None:
    assert chosen_letter(text, CHOICES) == letter


@pytest.mark.parametrize("choices", [["7", "42"], '["7", "42"]', {"text": ["7", "42"], "label": ["A", "B"]}])
def test_choices_may_be_json_text_or_texts_with_labels(choices: object) -> None:
    assert verdict("42", "b", choices=choices) == Verdict("right", "B")
    assert verdict("7", "B", choices=choices) == Verdict("wrong", "A")


def test_a_text_that_two_choices_have_is_no_answer() -> None:
    assert chosen_letter("12", ("12", "-4", "4", "12")) is None
    assert chosen_letter("12") is None  # without choices no text is known
    assert chosen_letter("c", ("2c", "c", "0.8c", "0.5c")) is None  # one letter could be a label


@pytest.mark.parametrize("letter", LETTERS)
def test_letters_up_to_j(letter: str) -> None:
    assert verdict(f"The answer is ({letter}).", letter).outcome == "right"
    assert verdict(letter, "A" if letter != "A" else "B").outcome == "wrong"


def test_the_pronoun_is_no_letter() -> None:
    for choices in (CHOICES, (), [f"text {letter}" for letter in LETTERS]):
        assert chosen_letter("I (personally) believe it is C", choices) == "C"
        assert chosen_letter("I. think the answer is C", choices) == "C"
        assert (
            chosen_letter("I", choices) == chosen_letter("I.", choices) == chosen_letter("I) yes", choices[:0]) == "I"
        )
    assert chosen_letter("I. text I", [f"text {letter}" for letter in LETTERS]) == "I"
    assert chosen_letter("I) 4x", CHOICES) is None
    assert verdict("I (personally) believe it is C", "C").outcome == "right"


def test_what_a_response_makes_up_behind_its_answer_is_another_question() -> None:
    more = "\n\nWhat is 1 + 1?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer: A"
    assert chosen_letter(f"Answer: B{more}", CHOICES) == "B"
    assert chosen_letter(f" B. -4{more}", CHOICES) == "B"
    assert chosen_letter(f"Let me see.{more}", CHOICES) == "A"


@pytest.mark.parametrize(("text", "extracted", "outcome"), read_cases("answers.txt", "where the answer is read"))
def test_where_the_answer_is_read(text: str, extracted: str | None, outcome: str) -> None:
    assert verdict(text, extracted=extracted, choices=CHOICES).outcome == outcome


def test_what_was_read_is_recorded() -> None:
    assert verdict("It is (C).\n(C)").extracted == "C"
    assert verdict("A or B").extracted is None
    assert verdict("B", None).outcome == "ungraded"
    assert verdict("B", "not a letter at all").outcome == "ungraded"


@pytest.mark.parametrize(
    ("gold", "letter"),
    [("B", "B"), (" (C) ", "C"), ("D. text", "D"), ("A Peter", "A"), ("So the answer is\nC Cecile", "C"), ("-4", "B"),
     ("banana", None), ("", None)],
)  # fmt: skip
def test_gold_letters(gold: str, letter: str | None) -> None:
    assert read_gold(gold, CHOICES) == letter


@pytest.mark.parametrize(
    "text",
    ["a" * 10**6, "answer " * 10**5, "answer is A or " * 10**5, " " * 10**6, "A\n" * 10**5 + "B", "**" * 10**5,
     "not the " * 10**5, "B is the correct" * 10**5, "\\text{" * 10**5, "\x00" * 1000, "A " + "or " * 10**5,
     "(" * 10**6, "It is A. " * 10**5, "no, " * 10**5, "\n" * 10**6 + "x", "The answer is A" + "\n " * 10**5,
     "so it is really " * 10**5],
)  # fmt: skip
def test_hostile_texts_are_read_at_once(text: str) -> None:
    start = time.process_time()
    assert verdict(text, choices=CHOICES).outcome != "right"
    assert time.process_time() - start < 2.0  # some hundredths of a second on an idle machine


needs_data = pytest.mark.skipif(
    "POSTTRAIN_DATA" not in os.environ, reason="POSTTRAIN_DATA names no folder with real rows"
)


@needs_data
def test_cases_of_other_graders() -> None:
    """All agree but one, whose Chinese sentence ("B is not A") is not read; none is a false positive."""
    path = Path(os.environ["POSTTRAIN_DATA"]) / "grader" / "grader_cases.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        rows = [row for row in map(json.loads, stream) if row["kind"] == "choice" and row["policy"] is None]
    found = {row["id"]: verdict(row["prediction"], row["gold"]).outcome == "right" for row in rows}
    assert len(rows) == 9
    assert [row["id"] for row in rows if found[row["id"]] and not row["expected"]] == []
    assert [row["id"] for row in rows if found[row["id"]] != row["expected"]] == ["g392"]
