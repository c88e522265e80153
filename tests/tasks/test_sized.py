"""How many examples: every task that reads rows takes ``size`` and ``seed``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain import registry
from posttrain.errors import RecipeError
from posttrain.recipes.sections import Word
from posttrain.tasks.base import build_task, held_out_task
from posttrain.tasks.jsonl import jsonl

MAKERS = {"stories", "reasoning_gym"}  # these make as many examples as ``size`` says


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}?", "answer": i}) + "\n" for i in range(1000)))
    return str(file)


def test_every_task_says_how_many_examples() -> None:
    for name, entry in registry.entries("task").items():
        fields = entry.options_model().model_fields
        assert {"size", "seed"} <= fields.keys(), name
        assert "size: " in entry.doc.partition("Args:")[2].partition("Raises:")[0], name
        assert (fields["size"].default is None) == (name not in MAKERS), name


def test_size_is_a_function_of_the_seed_and_nests(path: str) -> None:
    def chosen(size: int, seed: int = 0) -> list[str]:
        return [e.id for e in jsonl(path=path, split="test", size=size, seed=seed).examples]

    first = chosen(100)
    assert first == chosen(100), "the same again"
    assert len(set(first)) == 100
    assert first == sorted(first, key=lambda name: int(name.rpartition("/")[2])), "in the order of the file"
    assert set(first) < set(chosen(300))
    assert len(set(first) & set(chosen(100, seed=1))) < 30, "about ten of a hundred"
    assert first != [f"jsonl/test/{n}" for n in range(1, 101)]


def test_what_is_left_out_is_counted_and_what_is_held_out_stays(path: str) -> None:
    whole = jsonl(path=path)
    few = jsonl(path=path, size=10)
    assert few.dropped == {"beyond task.size=10": len(whole.examples) - 10}
    assert jsonl(path=path, size=5000).examples == whole.examples
    word = Word(name="jsonl", path=path, size=10, seed=3)
    held_out = build_task(held_out_task(word))
    assert held_out.examples == jsonl(path=path, split="validation").examples
    assert len(held_out.examples) > 10
    stories = held_out_task(Word(name="stories", size=64, seed=3))
    assert (stories.options["size"], stories.options["seed"]) == (64, 3), "a maker's size is what it makes"


def test_sizes_that_are_none(path: str) -> None:
    with pytest.raises(RecipeError, match=r"task.size: .*greater than or equal to 1; got 0"):
        build_task(Word(name="jsonl", path=path, size=0))
