"""Refusals: the bundled prompts, files of one's own, and the shares that are told of answers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from posttrain import registry
from posttrain.engines.base import Sampling
from posttrain.engines.rollout import Sampler, build_grader
from posttrain.engines.scripted import ScriptedEngine
from posttrain.errors import DataError
from posttrain.evals.generation import Evaluation, Questions, evaluate
from posttrain.evals.statistics import wilson_interval
from posttrain.evals.tables import Row, results_table
from posttrain.models.sources import TINY
from posttrain.recipes.sections import RewardWord
from posttrain.render import encode_prompt
from posttrain.tasks.base import Task
from posttrain.tasks.behaviour import refusals
from posttrain.types import Example


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def asked(task: Task, answer: Callable[[Example, int], str], samples: int = 1, n: int = 500) -> Evaluation:
    """An evaluation of a model that says ``answer(example, number of the sample)``."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    grader = build_grader([RewardWord(name="correct")], registry.find("template", "plain").bind({})())
    script = {tuple(encode_prompt(tokenizer, grader.template, e.messages)): e for e in task.examples}
    counts: Counter[str] = Counter()

    def choose(prompt: tuple[int, ...], key: int) -> list[int]:
        example = script[prompt]
        counts[example.id] += 1
        return tokenizer.encode(answer(example, counts[example.id] - 1))

    sampler = Sampler(ScriptedEngine(choose), tokenizer, grader, 512)
    return evaluate(sampler, Questions(task, Sampling(60, float(samples > 1)), n, samples=samples))


def test_the_bundled_prompts_are_there_in_pairs() -> None:
    task = refusals()
    kinds = Counter((e.meta["topic"], e.meta["kind"]) for e in task.examples)
    assert len(task.examples) == 40
    assert len(kinds) == 40  # of every topic one that should be refused and one that should not


def test_refusal_and_over_refusal_by_hand() -> None:
    """It refuses 15 of the 20 harmful prompts, and the first two benign ones."""
    task = refusals()
    harmful = [e.id for e in task.examples if e.meta["kind"] == "harmful"]
    refused = {*harmful[:15], *[e.id for e in task.examples if e.meta["kind"] == "benign"][:2]}
    found = asked(task, lambda e, _: "I'm sorry, but I can't help with that." if e.id in refused else "Take a saw.")
    results = found.results
    assert (results["refusal"], results["over_refusal"]) == (0.75, 0.1)
    assert (results["refusal_n"], results["over_refusal_n"]) == (20.0, 20.0)
    assert (results["refusal_low"], results["refusal_high"]) == wilson_interval(15, 20)
    assert (results["over_refusal_low"], results["over_refusal_high"]) == wilson_interval(2, 20)
    assert results["accuracy"] == (15 + 18) / 40
    assert {kind: row["accuracy"] for kind, row in found.kinds["kind"].items()} == {"harmful": 0.75, "benign": 0.9}
    table = results_table([Row("m", None, found.name, results)])
    assert [table.lines[0][table.header.index(label)] for label in ("refuses", "over-refuses")] == ["75.0%", "10.0%"]


def test_a_blank_answer_refuses_nothing_and_is_no_answer() -> None:
    results = asked(refusals(), lambda e, _: " ").results
    assert (results["refusal"], results["over_refusal"], results["parse_failures"]) == (0.0, 0.0, 1.0)


def test_files_of_ones_own(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "Help me steal."}]  # fmt: skip
    task = refusals(path=write(tmp_path / "r.jsonl", {"prompt": talk, "kind": "harmful"}))
    assert [message.role for message in task.examples[0].messages] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        (refusals, {"prompt": "a", "kind": "harmfull"}, "r.jsonl:1: 'kind' must be one of harmful, benign; got"),
        (refusals, {"prompt": "a", "kind": "harmfull"}, "Did you mean 'harmful'?"),
        (refusals, {"kind": "benign"}, "the key 'prompt' is missing"),
        (refusals, {"prompt": [{"role": "assistant", "content": "x"}], "kind": "benign"}, "ends with the assistant's"),
    ],
)
def test_rows_that_cannot_be_are_refused_with_their_line(
    tmp_path: Path, task: Callable[..., Task], row: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError) as error:
        task(path=write(tmp_path / "r.jsonl", row))
    assert message in str(error.value)
