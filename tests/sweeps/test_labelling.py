"""Labels of sampled steps, and that a reward model is asked about the very rows that it was trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from made_up_items import make_sample
from posttrain import registry
from posttrain.data.base import Task
from posttrain.errors import DataError, RunFailure
from posttrain.evaluation.items import Item, write_items
from posttrain.evaluation.reward_models.scoring import reasoning_of, split_steps
from posttrain.sweeps.labelling import label_steps, write_labelled
from posttrain.types import Example, Message
from refusing import refuses

GIVEN = ["2 + 3 = 5.", " 5 * 4 = 20."]


@pytest.mark.parametrize(
    ("steps", "is_correct", "labels"),
    [
        ([" 2 + 3 = 5.", " 5 * 4 = 20."], True, [1, 1]),
        ([" 2 + 3 = 6.", " 6 * 4 = 24."], False, [0, 0]),  # what follows from a slip is no better
        ([" 2 + 3 = 5.", " 5 * 4 = 24."], False, [1, 0]),
        ([" 2 + 3 = 5."], False, [0]),  # it ends early
        ([" 2 + 3 = 5.", " 5 * 4 = 20."], False, [1, 0]),  # and then it gave another answer
        ([" 2 + 3 = 5.", " 5 * 4 = 20.", " 20 + 1 = 21."], False, [1, 1, 0]),
        ([" 2 + 3 = 6.", " 5 * 4 = 20."], True, [0, 0]),  # right by luck: the step is still wrong
    ],
)
def test_a_step_is_good_as_long_as_the_working_is_the_given_one(steps, is_correct: bool, labels: list[int]) -> None:
    assert label_steps(steps, GIVEN, is_correct) == labels


@pytest.fixture
def task() -> Task:
    question = (Message("user", "How many?"),)
    return Task("made", "train", [Example("made/0", question, "20", "".join(GIVEN)), Example("made/1", question, "7")])


def item(index: int, texts: dict[str, str]) -> Item:
    samples = tuple(make_sample(outcome, text=text) for text, outcome in texts.items())
    return Item(f"made/{index}", index, "How many?", "20", {}, samples)


def test_rows_hold_the_steps_as_they_were_cut(task: Task, template, tmp_path: Path) -> None:
    correct = "<think> 2 + 3 = 5. 5 * 4 = 20. </think> <answer> 20 </answer>"
    texts = {correct: "r", "<think> 2 + 3 = 5. 5 * 4 = 21. </think> <answer> 21 </answer>": "w", "<think>": "n"}
    write_items([item(0, texts)], tmp_path / "items.jsonl")
    write_labelled(tmp_path / "items.jsonl", task, 2, template, tmp_path / "labelled.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "labelled.jsonl").read_text().splitlines()]
    assert [row["labels"] for row in rows] == [[1, 1], [1, 0]]  # an answer without steps teaches nothing
    assert rows[0]["completions"] == [" 2 + 3 = 5.", " 5 * 4 = 20."]
    assert rows[0]["prompt"] == "How many?"
    # read again as training reads it, the steps are those that the reward model is asked about
    read = registry.find("task", "preferences").bind(
        {"path": str(tmp_path / "labelled.jsonl"), "split": "all", "step_separator": ""}
    )()
    assert list(read.examples[0].responses[0].steps) == split_steps(reasoning_of(template, correct))
    assert read.examples[0].responses[0].step_labels == (1, 1)


def test_what_cannot_be_labelled_is_refused(task: Task, template, tmp_path: Path) -> None:
    other = Item("made/9", 0, "?", "1", {}, (make_sample("r", text="<think> 1. </think>"),))
    for one, error, message in (
        (item(1, {"<think> 7. </think>": "r"}), RunFailure, "made/1 has no"),
        (other, DataError, "task has made/0"),
        (item(0, {"<think>": "n"}), RunFailure, "no answer in"),
    ):
        write_items([one], tmp_path / "items.jsonl")
        with refuses(error, message):
            write_labelled(tmp_path / "items.jsonl", task, 2, template, tmp_path / "out.jsonl")
