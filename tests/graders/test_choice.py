"""Letters of choices: what counts as choosing one, and what does not."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from posttrain.graders.choice import LETTERS, chosen_letter, multiple_choice, read_gold
from posttrain.graders.grading import Submission, Verdict

CHOICES = ("4", "-4", "B cells", "A and B")


def verdict(text: str, gold: str | None = "B", extracted: str | None = None, **meta: Any) -> Verdict:
    return multiple_choice(Submission(text, extracted, gold, meta))


@pytest.mark.parametrize(
    "text",
    ["B", " B\n", "(B)", "[B]", "B.", "B)", "B:", "**B**", "$B$", "`B`", "\\text{B}", "\\boxed{\\text{(B)}}",
     "Option B", "b)", "(b)", "option (b)", "b) -4", "B) -4", "B. -4", "B: -4", "B - -4", "B (minus four)", "Answer: B",
     "The answer: **B**",
     "**Answer:** B", "### Answer\nB", "The answer is B.", "The answer is (B)", "the answer is: $\\boxed{B}$",
     "The correct answer is option B, because it is.", "Final answer: B", "The best choice is B: -4",
     "So the answer must be B", "My answer is therefore clearly B!", "Hence option B is correct.",
     "I think that (B) must be the right answer", "B is the correct choice", "D is tempting.\nB",
     "A. is wrong, as 4 > 0.\nB. is right.\nSo:\nB", "B\n\nBecause it is negative.", "B, not A",
     "The answer is A. No, wait: the answer is B.", "If it were positive, the answer would be A. So the answer is B.",
     "The answer is B. A is wrong since it is positive.", "I would go with B.", "So I choose (b).", "Therefore, (B).",
    "The answer is the letter B.", '{"answer": "B"}',
     "The answer to the question is B", "The answer would then be B", "Answer - B", "The correct option is (B) -4.",
     "-4", "The answer is -4.", "It is negative.\n-4", "It is B.", "It's (B)!", "I (personally) believe it is B",
     "I believe that it is **B**.", "I. think the answer is B", "I - well - think the answer is B.",
     "So, it must be B.",
     "I'd rule out A, C and D. So B", "It is 4 or -4. Therefore, B.", "E. coli is no cell. The answer is B.",
     "The answer is A. Wait, no. It is B.", "The answer is A. Hmm, actually it's B.", "The answer is A. No, B.",
     "A is correct. Wait, no.\nThe answer is B.", "The answer is B. So A, C and D are wrong.",
     "It is A, no? The answer is B.",
     "B. No, because it is negative.", "The answer is B. No, because it is negative.", "The answer is B. It is B.",
     "The answer is B. That much is clear. It is B, since -4 < 0.",
     "B is the answer", "B is the answer.", "**B** is the answer.", "(B) is the answer", "So B is the answer.",
     "B is my answer",
     "B is my final answer.", "Option B is the final answer.", "My final choice is B.", "My choice: B", "My pick is B",
     "answer: b",
     "Answer: b.", "ANSWER: b", "Final answer: b", "**Answer:** b", "答案是B", "答案是 B。", "答案：B", "答案为B",
     "正确答案是B",
     "所以答案是（B）", "选B", "故选：B", "应选B。", "答案是B，因为它是负数。", "I think B.",
     "Definitely B.", "B!", "I'd say B.",
     "B is the answer. A is wrong.", "B is the answer, but A is tempting.",
     "The final choice is B, because it is negative.",
     "B) Wait for the sign", "The answer is B. No other number fits.", "The answer is B. It is wrong to say 4."],
)  # fmt: skip
def test_one_letter_is_chosen(text: str) -> None:
    assert chosen_letter(text, CHOICES) == "B"


@pytest.mark.parametrize(
    "text",
    ["", "?", "A B C D", "A, B, C, D", "A. B. C. D.", "A/B", "A|B", "A B", "AB", "A or B", "(A) or (B)", "B or A",
     "A and B?", "A or maybe B", "B. Or A.", "The answer is A or B.", "Answer: A/B", "The answer is B, or possibly C",
     "(B) (C)", "A\nB\nC\nD", "A.\nB.\nC.\nD.", "A. 4\nB. -4\nC. B cells\nD. A and B",
     "a) 4\nb) -4", "(a) 4\n(b) -4", "A cat",
     "The answer is A cat.", "I think so.", "b", "a", "The answer is b", "the answer is a letter",
     "The answer is not B",
     "The answer is unknown", "I don't think the answer is B", "I do not believe that B is correct.",
     "If the answer is B, then what?",
     "Neither A nor B is correct", "It is A or B is correct.", "Suppose the answer is B", "B is not correct",
     "B is the best known of all", "BECAUSE", "The answer is D-glucose", "The answer is C++", "The answer is F(x)",
     "The answer is B = 3", "B) 4", "The answer is B: 4", "A is wrong and B is wrong.",
     "The answer is: A) 4 B) -4", "I would not choose B", "The correct answer is not A but B.",
     "The answer is B. Wait, no.", "The answer is B. No.", "The answer is B.\n\nHmm. Wait, that is not right.",
     "B. -4\nWait, no, I take it back.", "B is correct. Sorry, I was wrong.", "Option B is correct. Scratch that.",
     "The answer is B. Clearly so. It is C, since it is.", "B. -4\nIt is C, in fact.", "I (personally) doubt it is B.",
     "If not A, it is B.", "Is it B?", "It is not B.", "Say it is B. Then 4 < 0.", "They think it is B.",
     "It is B or C.",
     "It is B cells", "No B.", "I. think", "B - wait, no", "I, for one, pass", "I - I pass", "I don't believe it is B.",
     "I cannot say it is B.", "B or C", "A. No, B? maybe C", "B is the answer, or maybe C",
     "B is the answer. Or is it C?",
     "A or B is the answer", "Either A or B is the answer.", "B is not the answer", "I doubt B is the answer",
     "I doubt that B is correct.", "If B is the answer, then", "B is the answer?", "Is B the answer?",
     "My choice is A or B",
     "My final choice is between A and B", "My choice is not B", "answer: a or b", "answer: a b c d",
     "answer: a letter",
     "答案是A或B", "答案是A、B", "答案是A还是B", "选A或者B", "不选B", "答案不是B", "答案是B细胞", "选项B错误",
     "如果选B",
     "答案是B。不对", "选A、B、C、D", "答案：ABCD", "答案是A，也可能是B", "B is the answer. Wait, no.",
     "B! C! D!", "B! Or C!",
     "I think B or C.", "Definitely B or C", "My guess is B, maybe C"],
)  # fmt: skip
def test_nothing_is_chosen(text: str) -> None:
    assert chosen_letter(text, CHOICES) is None


WORLD = ("a wolf", "the tide", "an oak", "some salt")


@pytest.mark.parametrize(
    "text",
    ["A. No: B", "A. I mean B.", "A. Rather B.", "A, I mean B", "The answer is A. Just kidding, B.",
     "The answer is A. Not.",
     "The answer is A, not.", "Nobody says A is the answer.", "They say A is the answer.", "A: false",
     "[A] is wrong, [B] is right",
     "A. a wolf B. the tide C. an oak D. some salt", "A: a wolf, B: the tide", "The answer is A. a wolf B. the tide",
     "They think the answer is A.", "Nobody would say that the answer is A.",
     "It is unlikely that A is the answer.",
     "The answer is A.\nJust kidding, B.", "A\nI mean B.", "A\nNot.", "A is the answer. Not.", "A is correct, not.",
     "A is the answer. Make that B.", "The answer is A. It isn't A but B.", "The answer is A. So B instead.",
     "The answer is a wolf. Not.", "A, no wait, actually B",
     "Answer: A. Or rather: B", "A: wrong", "Option A. Nope.", "The answer is A\nB", "A. Change to B."],
)  # fmt: skip
@pytest.mark.parametrize("form", ["{}", "<think>x</think> <answer> {} </answer>", "So it is \\boxed{{{}}}."])
def test_a_choice_that_is_taken_back_or_reported_is_none(text: str, form: str) -> None:
    assert verdict(form.format(text), "A", text, choices=WORLD).outcome != "right"


@pytest.mark.parametrize(
    "text",
    ["B, not A", "B. It is not A.", "The answer is B. Not A, C or D.", "The answer is B. So A, C and D are wrong.",
     "B: the tide, as A is wrong", "The answer is B, which is better than A.",
     "B. Unlike A, it comes and goes.", "The answer is B.\n\nWhy:\nA. Wolves eat.\nB. It turns.\nC. Oaks stand.",
     "The answer is B. I ruled out A.", "I would say that the answer is B.", "We can say B is the answer.",
     "The answer is B. Wrong: A, C, D.", "You can say that B is the answer.", "They say many things. The answer is B.",
     "The answer is B. I mean the tide.",
     "The answer is the tide. So B.", "B. the tide (not a wolf)", "[B] the tide", "B, since vitamin C. It heals.",
     "The answer is A. Just kidding.\nThe answer is B.", "A. False friends.\nB. The best.\nSo B.",
     "Nobody says that. B is the answer."],
)  # fmt: skip
def test_what_is_said_of_other_letters_leaves_a_choice_standing(text: str) -> None:
    assert verdict(text, "B", choices=WORLD).outcome == "right"


def test_false_is_a_text_where_it_may_be_one() -> None:
    assert chosen_letter("B: false", ("true", "false")) == "B"
    assert chosen_letter("B: false", WORLD) is None
    assert chosen_letter("B is false") is None


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B cells", "C"),  # a choice's text comes before a letter in it
        ("The answer is B cells", "C"),
        ("b CELLS.", "C"),
        ("A and B", "D"),
        ("D) A and B", "D"),
        ("The answer is D. A and B.", "D"),
        ("4", "A"),
        ("The answer is E", "E"),  # no choice, and so never right
        ("The answer is B.\nE", "E"),
        ("The answer is B. Wait, no. It is C.", "C"),
        ("B. Wait, no. It is C.", "C"),
        ("The answer is B. No, it is E.", "E"),
        ("The answer is A because it is.", "A"),
    ],
)
def test_texts_of_choices(text: str, letter: str) -> None:
    assert chosen_letter(text, CHOICES) == letter


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


@pytest.mark.parametrize(
    ("text", "extracted", "outcome"),
    [
        ("<think>A? No.</think> <answer> B </answer>", "B", "right"),
        ("<think>The answer is B.</think> <answer> A </answer>", "A", "wrong"),
        ("<think>The answer is B.", None, "no_answer"),
        ("<think>The answer is B.</think> I do not know.", None, "no_answer"),
        ("<think>x</think> The answer is B.", None, "right"),
        ("<think>The answer is B.</think> <answer> A or B </answer>", "A or B", "no_answer"),
        ("<think>x</think> <answer> -4 </answer>", "-4", "right"),
        ("The answer is B, for 2 + 2 = 4", "4", "right"),  # a last number that is also choice A
        ("It is 4 at first. \\boxed{B}", "B", "right"),
        ("The answer is A. \\boxed{B} is the answer.", "B", "right"),
        ("", "B", "right"),
        ("", None, "no_answer"),
    ],
)
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
