"""From the rows of published data sets to what an objective reads: units, labels, margins, and what they leave out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain import registry
from posttrain.data.base import Task
from posttrain.data.render.rows import Shape
from posttrain.training.sources.dataset import SupervisedSource
from posttrain.types import Batch
from small_runs import make_recipe


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def task(name: str, **options: Any) -> Task:
    built: Task = registry.find("task", name).bind(options, "task")()
    return built


def read(tokenizer: Any, given: Task, shape: Shape) -> SupervisedSource:
    template = registry.find("template", "r1_zero").bind({"preamble": ""})()
    recipe = make_recipe("judged", data={"batch_size": 2, "max_length": 512})
    return SupervisedSource(recipe, given, template, tokenizer, 512, shape=shape)


def everything(source: SupervisedSource) -> Batch:
    return source.batch_of(range(source.num_examples))


def test_every_rated_step_is_trained_once(tokenizer: Any, tmp_path: Path) -> None:
    """A tree of candidates becomes rows; each rated candidate stands at exactly one trained position of them all."""
    steps = [
        {"completions": [{"text": "a b", "rating": 1}, {"text": "c", "rating": -1}], "chosen_completion": 0},
        {"completions": [{"text": "d", "rating": 0}, {"text": "e", "rating": None}], "human_completion": {"text": "f"}},
        {"completions": [{"text": "g", "rating": -1}, {"text": "h", "rating": 1}]},
    ]
    row = {"question": {"problem": "q?"}, "label": {"steps": steps}}
    given = task("prm800k", path=write(tmp_path / "x.jsonl", [row]), split="test", num_classes=3)
    source = read(tokenizer, given, "steps")
    batch = everything(source)
    assert given.dropped == source.dropped == {"a candidate step without a rating": 1}
    trained = [
        (tokenizer.decode([int(batch.tokens[b, t])]).strip(), int(batch.field("step_labels")[b, t]))
        for b, t in batch.mask.nonzero().tolist()
    ]
    assert sorted(trained) == [("b", 2), ("c", 0), ("d", 1), ("g", 0), ("h", 2)]
