"""Parts of a mixture in a recipe: names, weights, and every message with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.errors import RecipeError
from posttrain.recipes.recipe import load_recipe
from posttrain.recipes.sections import Component, map_tasks, parts_of, task_components

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
        ("[{task: stries}]", r"mine\.yaml:2: task\.parts\.0\.task: there is no task.*Did you mean 'stories'"),
        ("[{task: stories, weight: 0}]", r"mine\.yaml:2: task\.parts\.0\.weight: .*greater than 0; got 0"),
        ("[{task: stories, weight: -1}]", r"task\.parts\.0\.weight: .*greater than 0; got -1"),
        ("[{task: stories, weight: true}]", r"task\.parts\.0\.weight: .*true and false are none"),
        ("[{task: stories, wieght: 1}]", r"task\.parts\.0\.wieght: a part has no key.*Did you mean 'weight'"),
        ("[{weight: 1}]", r"task\.parts\.0\.task: a part needs this key"),
        ("[3]", r"task\.parts\.0: "),
        ("[]", r"task\.parts: give a list of parts"),
        ("stories", r"task\.parts: give a list of parts"),
        ("[{task: stories}, {task: stories}]", r"task\.parts\.1\.name: task\.parts\.0 is called 'stories', too"),
        ("[{task: stories, name: a/b}]", r"task\.parts\.0\.name: .*made of letters.*got 'a/b'"),
        ("[{task: {name: mixture, parts: []}}]", r"task\.parts\.0\.task: a part is no mixture itself"),
    ],
)
def test_parts_that_are_none_are_reported_with_their_line(tmp_path: Path, parts: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load(tmp_path, f"task: {{name: mixture, parts: {parts}}}")


def test_lines_of_parts_below_one_another(tmp_path: Path) -> None:
    text = "task:\n  name: mixture\n  parts:\n    - task: stories\n    - task: stries\n      weight: 2\n"
    with pytest.raises(RecipeError, match=r"mine\.yaml:6: task\.parts\.1\.task: there is no task named 'stries'"):
        load(tmp_path, text)
    with pytest.raises(RecipeError, match=r"mine\.yaml:2: eval\.tasks\.0\.parts\.0\.task: there is no task"):
        load(tmp_path, "eval: {tasks: [{name: mixture, parts: [{task: stries}]}]}")
    with pytest.raises(RecipeError, match=r"task\.parts\.0\.task\.sied: task 'stories' has no key 'sied'"):
        load(tmp_path, "task: {name: mixture, parts: [{task: {name: stories, sied: 1}}]}").resolve()
