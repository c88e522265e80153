"""Every task with the grader that it names: nothing, hedges and the prompt itself are wrong, the gold is right."""

from __future__ import annotations

import gzip
import random
from itertools import islice
from pathlib import Path

import empty_answers
import equivalents
import grader_answers
import pytest
from choice_answers import letter_hedges
from real_golds import TASKS, data_folder, golds_of, load

from posttrain import registry
from posttrain.data.base import Task
from posttrain.graders.grading import Submission, grade_submissions
from posttrain.types import Example

NUM_ROWS, NUM_EXAMPLES = 30, 2
UNGRADED = ("hh_rlhf", "judged_solutions", "math_shepherd", "preferences", "prm800k",
            "ultrafeedback")  # fmt: skip


def test_every_task_has_its_adversary() -> None:
    """A new task needs a row in the table of ``real_golds``."""
    assert set(registry.entries("task")) == set(TASKS)


def first_rows(name: str, folder: Path) -> Task:
    """The task of the first rows of its file."""
    file = TASKS[name][0]
    if file is None:
        return load(name)
    data = data_folder()
    if data is None:
        pytest.skip("POSTTRAIN_DATA names no folder with real rows")
    path = folder / f"{name}.jsonl.gz"
    with (
        gzip.open(data / f"{file}.jsonl.gz", "rt", encoding="utf-8") as rows,
        gzip.open(path, "wt", encoding="utf-8") as out,
    ):
        out.writelines(islice(rows, NUM_ROWS))
    return load(name, path)


def tagged(example: Example, answer: str) -> Submission:
    return Submission(
        f"<think> hm </think> <answer> {answer} </answer>", answer.strip() or None, example.answer, example.meta
    )


def untagged(example: Example, answer: str) -> Submission:
    return Submission(answer, None, example.answer, example.meta)


def wrong_answers(example: Example, other: str) -> list[Submission]:
    """Nothing, in its kinds, with and without tags; and, in tags, hedges between a gold and another answer."""
    nothing = empty_answers.invisible_texts()[::9]
    nothing += [] if example.grader == "refusal" else empty_answers.empty_marks()[::3]  # marks refuse nothing
    hedged: list[str] = []
    for gold in golds_of(example):
        if example.grader == "multiple_choice":
            hedged += letter_hedges(gold, "AB"[gold == "A"])
        else:
            hedged += grader_answers.hedges(gold, other)
    found = [way(example, answer) for answer in nothing for way in (tagged, untagged)]
    golds = golds_of(example)
    return found + [
        tagged(example, answer) for answer in hedged if not any(equivalents.compare(answer, g) == "same" for g in golds)
    ]


@pytest.mark.parametrize("name", sorted(TASKS))
def test_nothing_and_hedges_are_wrong_for_every_task(name: str, tmp_path: Path) -> None:
    task = first_rows(name, tmp_path)
    chosen = random.Random(name).sample(range(min(len(task.examples), NUM_ROWS)), min(NUM_EXAMPLES, len(task.examples)))
    examples = [task.examples[place] for place in chosen]
    graded = [(example, one) for example in examples for one in wrong_answers(example, "987654")]
    paid = []
    for grader in {example.grader for example in examples}:
        own = [(example, one) for example, one in graded if example.grader == grader]
        found = grade_submissions(grader, [one for _, one in own])
        paid += [
            (one.text, e.answer) for (e, one), verdict in zip(own, found, strict=True) if verdict.outcome == "right"
        ]
    assert not paid, "\n".join(f"{text!r} is right for {answer!r}" for text, answer in paid)
    assert len(graded) >= 50 * len(examples)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_the_gold_is_right_and_where_there_is_none_nothing_is(name: str, tmp_path: Path) -> None:
    for example in islice(first_rows(name, tmp_path).examples, NUM_EXAMPLES):
        assert bool(golds_of(example)) == (name not in (*UNGRADED, "episodes", "humaneval", "mbpp", "refusals"))
        for gold in golds_of(example):
            assert grade_submissions(example.grader, [tagged(example, gold)])[0].outcome == "right"
        if name in UNGRADED:
            assert grade_submissions(example.grader, [tagged(example, "17")])[0].outcome == "ungraded"
