"""Hostile answers: none hangs, none crashes the workers, none scores, and grading goes on as if nothing had been."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest
from hostile_answers import GOLDS, hostile_answers

from posttrain.graders.answers import find_boxes, last_number
from posttrain.graders.grading import Submission, Verdict
from posttrain.graders.math.equality import compare_answers
from posttrain.graders.math.extraction import find_answer
from posttrain.graders.math.grader import math
from posttrain.graders.numeric import exact, numeric

# Gold answers, each with a right answer that needs a worker.
HONEST = (("\\sqrt{12}", "2\\sqrt{3}"), ("(r+5)^2", "(r+5)(r+5)"), ("\\{1,2\\}", "2, 1"), ("x+1", "1+x"))


def submit(answer: str, gold: str, way: str) -> Submission:
    """An answer as a template with tags, one with boxes, or one that finds the last number hands it over."""
    if way == "tags":
        text = f"<think> So be it. </think> <answer> {answer} </answer>"
        return Submission(text, answer.strip() or None, gold)
    if way == "box":
        boxes = find_boxes(text := f"Therefore $\\boxed{{{answer}}}$.")
        return Submission(text, text[boxes[-1].start : boxes[-1].end].strip() if boxes else None, gold)
    return Submission(answer, last_number(answer), gold)


def grade_hostile(answers: list[str], way: str) -> tuple[list[Verdict], float]:
    """All answers, each against one of the golds in turn, with honest ones in between; seconds per answer."""
    submissions, expected = [], []
    for place, answer in enumerate(answers):
        submissions.append(submit(answer, GOLDS[place % len(GOLDS)], way))
        gold, given = HONEST[place % len(HONEST)]
        submissions.append(submit(given, gold, "box"))
        expected.append(len(submissions) - 1)
    # Slow answers end within the limit, on a machine several times slower too; endless ones do not.
    start = time.monotonic()
    verdicts = math(submissions, timeout_seconds=0.5, num_workers=2)
    seconds = (time.monotonic() - start) / len(answers)
    assert [verdicts[place].outcome for place in expected] == ["right"] * len(expected), "the workers serve on"
    return [verdict for place, verdict in enumerate(verdicts) if place not in set(expected)], seconds


def test_no_hostile_answer_hangs_crashes_or_scores(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    answers = hostile_answers(canary)
    assert len(set(answers)) >= 200
    verdicts, seconds = grade_hostile(answers, "tags")
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    assert outcomes["right"] == 0, [v.extracted for v in verdicts if v.outcome == "right"]
    assert set(outcomes) <= {"wrong", "no_answer", "timeout", "crash"}
    assert outcomes["timeout"] >= 3, "some really take for ever"
    assert outcomes["timeout"] + outcomes["crash"] < len(verdicts) / 20, "most are refused at once"
    assert seconds < 1
    assert not canary.exists()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tags", "box", "number"])
def test_no_hostile_answer_scores_for_any_gold(tmp_path: Path, way: str) -> None:
    canary = tmp_path / "canary"
    for answer in hostile_answers(canary):
        if way == "number" and "\n42\n" in f"\n{answer}\n":
            continue
        verdicts = math([submit(answer, gold, way) for gold in GOLDS], timeout_seconds=0.5, num_workers=2)
        assert "right" not in {verdict.outcome for verdict in verdicts}, answer[:100]
    assert not canary.exists()


def test_no_hostile_answer_scores_with_the_fast_graders(tmp_path: Path) -> None:
    for answer in hostile_answers(tmp_path / "canary"):
        submissions = [submit(answer, gold, "tags") for gold in (GOLDS if len(answer) < 10_000 else GOLDS[:2])]
        found = [grader(one).outcome for one in submissions for grader in (numeric, exact)]
        assert "right" not in found, answer[:100]


def test_finding_an_answer_takes_time_in_proportion_to_the_text() -> None:
    """Quadratic work would take minutes."""
    start, size = time.process_time(), 20_000
    units = ["\\boxed{", "{", "}", "\\", "$", "\\(", "\\[", "\\frac{", "answer is ", "is ", "1,"]
    for unit in [*units, "<answer>", "</answer>"]:
        find_answer(unit * size, None)
        find_answer(unit * size, "x")
    assert time.process_time() - start < size / 2000


REVERSED = (
    "</think> 42 <think>", "<think> it is 42", "<think> <answer> 42 </answer>", "</answer> 42 <answer>", "<answer> 42",
    "42 </answer>", "<think> 42 </think> </answer> 42 <answer>", "<answer> 41 </answer> 42",
    "<answer> 41 </answer> \\boxed{42}", "<answer> 41 </answer> <answer> 42 </answer>",
    "<answer> <answer> 41 </answer> 42 </answer>", "<answer> </answer> 42",
)  # fmt: skip


@pytest.mark.parametrize("extracted", [None, "42"])
def test_tags_that_are_reversed_repeated_or_cut_off_do_not_score(extracted: str | None) -> None:
    """Only a complete answer that the template itself chose counts, if it finds 42 or nothing."""
    verdicts = math([Submission(text, extracted, "42") for text in REVERSED])
    for text, verdict in zip(REVERSED, verdicts, strict=True):
        chosen = extracted is not None and text.endswith("</answer> <answer> 42 </answer>")
        assert verdict.outcome in (("right",) if chosen else ("no_answer", "wrong")), text


def test_the_text_of_an_answer_is_never_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In this process nothing refuses it, so that a call would be seen."""
    import builtins

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("text was given to Python")

    compare_answers(["\\sqrt{12}", "2\\sqrt{3}", 0.0])  # whatever is imported on first use is there now
    for name in ("eval", "exec", "compile"):
        monkeypatch.setattr(builtins, name, refuse)
    canary = tmp_path / "canary"
    codes = [answer for answer in hostile_answers(canary) if str(canary) in answer]
    assert len(codes) > 15
    for answer in [*codes, "1.5", "x^{12}+0.1", "\\frac{3}{4}i", "12\\%", "1{,}000", "2 \\cdot 10^{5}"]:
        for gold in ("42", "x+1", "(1,2)"):
            assert compare_answers([gold, answer, 0.0]) is False
    assert not canary.exists()
