"""An evaluation says how many of its rows the model's run was trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.base import build_task
from posttrain.evaluation.plan import count_trained
from posttrain.evaluation.tables import ResultsRow, notes_on
from posttrain.recipes.recipe import Recipe, validate_recipe
from posttrain.recipes.sections import Component
from posttrain.sampling.models import ModelSource


@pytest.fixture
def file(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "questions.jsonl"
    rows = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(200)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"name": "jsonl", "path": str(path)}


def run_on(task: dict[str, Any]) -> ModelSource:
    base = {"model": {"name": "tiny"}, "data": {}, "objective": "cross_entropy", "train": {"steps": 1}}
    recipe: Recipe = validate_recipe(base | {"task": task}).resolve()
    return ModelSource("runs/x", "x", "runs/x", Path("runs/x"), recipe)


@pytest.mark.parametrize(("split", "expected"), [("test", 0), ("validation", 0), ("train", 50)])
def test_count_trained_parts_of_one_file_share_no_row(file: dict[str, Any], split: str, expected: int) -> None:
    task = build_task(Component(**file, split=split))
    assert count_trained(run_on(file), task, 50) == {"trained_rows": min(expected, len(task.examples))}


def test_count_trained_whole_file_counts_the_training_part(file: dict[str, Any]) -> None:
    whole, trained = (build_task(Component(**file, split=split)) for split in ("all", "train"))
    found = count_trained(run_on(file), whole, 500)
    assert found == {"trained_rows": len(trained.examples)}
    row = ResultsRow("x", None, "jsonl/all", {"n": 200.0, "truncated": 0.0} | found)
    assert notes_on([row], {}) == [
        f"jsonl/all · x: {len(trained.examples)} of 200 rows also appear in this run's training data"
    ]


def test_count_trained_nothing_to_compare_is_empty(file: dict[str, Any], tmp_path: Path) -> None:
    task = build_task(Component(**file, split="all"))
    assert count_trained(ModelSource("tiny", "tiny", "tiny"), task, 500) == {}
    assert count_trained(run_on({"name": "sums", "size": 10}), task, 500) == {}
    source = run_on(file)
    Path(file["path"]).unlink()
    assert count_trained(source, task, 500) == {}


def test_count_trained_made_up_examples_are_compared_within_a_split() -> None:
    word = {"name": "sums", "size": 20, "seed": 3}
    source = run_on(word)
    assert count_trained(source, build_task(Component(**word)), 10) == {"trained_rows": 10}
    assert count_trained(source, build_task(Component(**word, split="test")), 10) == {}
    mixture = {"name": "mixture", "parts": [{"task": word}, {"name": "more", "task": word | {"seed": 4}}]}
    assert count_trained(run_on(mixture), build_task(Component.model_validate(mixture)), 40) == {"trained_rows": 40}
