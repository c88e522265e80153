"""A model's own graded answers become data: judged one by one, or in pairs of a right and a wrong one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sample_rows import write_rows

from posttrain.cli import main
from posttrain.data.base import build_task
from posttrain.data.preferences import preferences
from posttrain.data.render import end_id
from posttrain.data.render.rows import rows_of
from posttrain.data.render.template import build_template
from posttrain.data.steps import judged_solutions
from posttrain.errors import DataError
from posttrain.evaluation.items import Item, ItemSample, write_items
from posttrain.recipes.sections import Component
from posttrain.types import Message, Response
from refusing import refuses

pytestmark = pytest.mark.usefixtures("no_curves")


def answered(text: str, outcome: str) -> ItemSample:
    return ItemSample(text, None, outcome, num_tokens=3, finish="stop", reward=0.0, in_format=True, parts={})


def items_file(folder: Path) -> str:
    """Three questions: of both kinds, right ones alone with a failed grading, and none that was sampled."""
    both = [("4", "right"), ("5", "wrong"), ("", "no_answer"), ("four", "right"), ("2+2=4", "right"), ("6", "wrong")]
    alone = [("9", "right"), ("3^2", "timeout"), ("x", "crash"), ("9?", "ungraded")]
    items = [
        Item("gsm8k/train/1", 0, "2+2?", "4", {"level": 1}, tuple(answered(*a) for a in both)),
        Item("gsm8k/train/2", 1, "3*3?", "9", {}, tuple(answered(*a) for a in alone)),
        Item("gsm8k/train/3", 2, "7?", "7"),
    ]
    write_items(items, folder / "items.jsonl")
    return str(folder / "items.jsonl")


def test_an_answer_is_read_back_with_the_tokens_that_were_sampled(tmp_path: Path, tokenizer) -> None:
    template = build_template(Component(name="plain"))
    whole = tokenizer.encode("four")
    apart = [token for letter in "four" for token in tokenizer.encode(letter)]
    assert whole != apart
    samples = tuple(replace(answered("four", "right"), response_ids=ids) for ids in (None, tuple(apart), (1, 2)))
    write_items([Item("q/1", 0, "2+2?", "4", {}, samples)], tmp_path / "items.jsonl")
    (example,) = judged_solutions(path=str(tmp_path / "items.jsonl"), split="test").examples
    rows = [unit[0] for unit in rows_of(tokenizer, template, example, "judged")]
    end = end_id(tokenizer, template)  # ids of another tokenizer decode to another text, and are not used
    assert [row.ids[row.prompt_length :] for row in rows] == [[*ids, end] for ids in (whole, apart, whole)]


def test_answers_are_judged_by_the_graders_word(tmp_path: Path) -> None:
    task = judged_solutions(path=items_file(tmp_path), split="test")
    first, second = task.examples
    assert (first.id, first.messages, first.meta) == (
        "judged_solutions/test/1",
        (Message("user", "2+2?"),),
        {"level": 1},
    )
    assert [(r.text, r.score) for r in first.responses] == [
        ("4", 1.0),
        ("5", 0.0),
        ("four", 1.0),
        ("2+2=4", 1.0),
        ("6", 0.0),
    ]
    assert second.responses == (Response("9", 1.0),)
    assert task.dropped == {
        "'response' is blank": 1,
        "ungraded answer: grader timeout": 1,
        "ungraded answer: grader crash": 1,
        "ungraded answer: nothing to grade against": 1,
        "nothing sampled (prompt too long)": 1,
    }
    named = judged_solutions(path=items_file(tmp_path), split="test", solution_key="text", verdict_key="ok")
    assert [e.responses for e in named.examples] == [e.responses for e in task.examples]
    assert len(judged_solutions(path=items_file(tmp_path), split="test", size=1).examples) == 1


def test_pairs_are_of_a_right_and_a_wrong_answer_to_one_question(tmp_path: Path) -> None:
    task = preferences(path=items_file(tmp_path), split="all")
    assert [e.id for e in task.examples] == ["preferences/all/1.1", "preferences/all/1.2"]
    assert {e.messages for e in task.examples} == {(Message("user", "2+2?"),)}
    assert [[(r.text, r.score) for r in e.responses] for e in task.examples] == [
        [("4", 1.0), ("5", 0.0)],
        [("four", 1.0), ("6", 0.0)],
    ]
    assert task.dropped == {
        "blank answer": 1,
        "correct answer without an incorrect counterpart": 2,
        "ungraded answer: grader timeout": 1,
        "ungraded answer: grader crash": 1,
        "ungraded answer: nothing to grade against": 1,
        "nothing sampled (prompt too long)": 1,
    }


def test_items_without_a_pair_are_refused_with_the_reasons(tmp_path: Path) -> None:
    write_items([Item("a/1", 0, "q", "1", {}, (answered("2", "wrong"),))], tmp_path / "items.jsonl")
    with refuses(DataError, "incorrect answer without"):
        preferences(path=str(tmp_path / "items.jsonl"))


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ({"a": 1}, "'samples' must be a list of answers"),
        ([{"outcome": "right"}], "samples 1 lacks 'text'"),
        (["4"], "samples 1 lacks 'text'"),
        ([{"text": "4", "outcome": "good"}], "samples 1: 'outcome' must be one of right, wrong"),
        ([{"text": "4", "outcome": ["right"]}], "samples 1: 'outcome' must be one of right, wrong"),
    ],
)
def test_other_items_are_refused_by_line(tmp_path: Path, samples: Any, message: str) -> None:
    row = {"id": "a", "index": 0, "question": "q", "samples": samples}
    path = write_rows(tmp_path / "x.jsonl", [row])
    for read in (judged_solutions, preferences):
        with pytest.raises(DataError, match=rf"x\.jsonl:1: {message}"):
            read(path=path)


@pytest.mark.slow
def test_evaluate_then_train_with_what_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two commands of the recipe's comment, with the embedded model on one-step problems in GSM8K's layout."""
    monkeypatch.chdir(tmp_path)
    stories = build_task(Component(name="stories", size=12, max_steps=1)).examples
    problems = [{"question": e.messages[0].content, "answer": f"{e.solution}\n#### {e.answer}"} for e in stories]
    write_rows(tmp_path / "problems.jsonl", problems)
    request = ["--task", "gsm8k", "--task.path", "problems.jsonl", "--task.split", "test", "--template", "plain"]
    drawn = ["--samples", "8", "--max-tokens", "24", "--quiet", "--out", "own"]
    assert main(["evaluate", "tiny", *request, *drawn]) == 0
    items = [json.loads(line) for line in (tmp_path / "own/items.jsonl").read_text().splitlines()]
    outcomes = [sample["outcome"] for item in items for sample in item["samples"] if sample["text"].strip()]
    assert {"right", "wrong"} <= set(outcomes)
    task = judged_solutions(path="own/items.jsonl", split="test")
    assert [r.score == 1.0 for e in task.examples for r in e.responses] == [word == "right" for word in outcomes]
    small = ["--model.name", "tiny", "--prompt.template", "plain", "--train.steps", "2", "--data.batch_size", "4"]
    data = ["--task.path", "own/items.jsonl", "--eval.every", "0", "--quiet"]
    assert main(["train", "orm-gsm8k-own", *data, *small, "--run", "orm"]) == 0
    assert main(["train", "dpo-preferences", *data, *small, "--run", "dpo"]) == 0
    for run in ("orm", "dpo"):
        assert len((tmp_path / "runs" / run / "metrics.jsonl").read_text().splitlines()) == 2
