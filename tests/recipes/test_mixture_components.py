"""Parts of a mixture in a recipe: names, weights, and every message with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.errors import RecipeError
from posttrain.recipes.recipe import load_recipe
from posttrain.recipes.sections import Component, map_tasks, parts_of, task_components
from refusing import refuses

HEAD = "extends: tiny/grpo\n"


def load(folder: Path, text: str):
    file = folder / "mine.yaml"
    file.write_text(HEAD + text)
    return load_recipe(str(file))


def test_parts_are_called_by_their_tasks_or_as_they_are_reported(tmp_path: Path) -> None:
    text = "task: {name: mixture, parts: [{task: gsm8k, weight: 2}, {task: {name: stories, size: 9}, name: easy}]}"
    word = load(tmp_path, text).task
    assert [(p.name, p.weight, p.task.name) for p in parts_of(word)] == [("gsm8k", 2, "gsm8k"), ("easy", 1, "stories")]
    assert [task.name for task in task_components(word)] == ["gsm8k", "stories"]
    other = map_tasks(word, lambda task: Component(name=task.name, split="test"))
    assert [task.options for task in task_components(other)] == [{"split": "test"}] * 2
    assert [p.name for p in parts_of(other)] == ["gsm8k", "easy"]
    alone = Component(name="stories")
    assert task_components(alone) == [alone]
    assert parts_of(alone) == []
    assert parts_of(Component(name="mixture", parts=[{"task": "mine:sums"}]))[0].name == "sums"


def test_every_option_of_every_part_is_in_the_resolved_recipe(tmp_path: Path) -> None:
    recipe = load(tmp_path, "task: {name: mixture, parts: [{task: stories}]}").resolve()
    (part,) = recipe.dump()["task"]["parts"]
    assert part["name"] == "stories"
    assert part["weight"] == 1.0
    assert part["task"]["max_steps"] == 4
    again = load_recipe("tiny/grpo", [("task", str(recipe.dump()["task"]))]).resolve()
    assert again.task == recipe.task
    path = tmp_path / "two.yaml"
    path.write_text("extends: tiny/grpo\ntask: {name: mixture, parts: [{task: stories}, {task: stories, name: b}]}\n")
    changed = load_recipe(str(path), [("task.parts.1.weight", "5")]).resolve()
    assert [part["weight"] for part in changed.task.options["parts"]] == [1, 5]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ("[{task: stries}]", "mine.yaml:2: task.parts.0.task"),
        ("[{task: stories, weight: 0}]", "mine.yaml:2: task.parts.0.weight"),
        ("[{task: stories, wieght: 1}]", "task.parts.0.wieght"),
        ("[{weight: 1}]", "task.parts.0.task"),
        ("[]", "task.parts"),
        ("stories", "task.parts"),
        ("[{task: stories}, {task: stories}]", "task.parts.1.name"),
        ("[{task: stories, name: a/b}]", "task.parts.0.name"),
        ("[{task: {name: mixture, parts: []}}]", "task.parts.0.task"),
    ],
)
def test_parts_that_are_none_are_reported_with_their_line(tmp_path: Path, parts: str, message: str) -> None:
    with refuses(RecipeError, message):
        load(tmp_path, f"task: {{name: mixture, parts: {parts}}}")


def test_lines_of_parts_below_one_another(tmp_path: Path) -> None:
    text = "task:\n  name: mixture\n  parts:\n    - task: stories\n    - task: stries\n      weight: 2\n"
    with refuses(RecipeError, "mine.yaml:6: task.parts.1.task", "'stries'"):
        load(tmp_path, text)
    with refuses(RecipeError, "mine.yaml:2: eval.tasks.0.parts.0.task"):
        load(tmp_path, "eval: {tasks: [{name: mixture, parts: [{task: stries}]}]}")
    with refuses(RecipeError, "task.parts.0.task.sied", "'stories'", "'sied'"):
        load(tmp_path, "task: {name: mixture, parts: [{task: {name: stories, sied: 1}}]}").resolve()
