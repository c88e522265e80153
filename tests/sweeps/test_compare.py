"""What a compare file becomes: cells, their recipes, what differs, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RecipeError, UnknownWord, UsageError
from posttrain.recipes.document import merge
from posttrain.recipes.recipe import Recipe, load_recipe
from posttrain.recipes.sections import DataSection
from posttrain.sweeps.compare import (
    METHOD_KEYS,
    ComparisonPlan,
    changes_between,
    comparison_names,
    describe_comparison,
    differences,
    load_comparison,
    method_part,
    training_recipe_names,
    without_method,
)

EXAMPLE = Path(__file__).with_name("comparison.yaml")


def load(*overrides: tuple[str, str], **wanted: Any) -> ComparisonPlan:
    return load_comparison(str(EXAMPLE), overrides, folder="runs/example", **wanted)


def load_text(tmp_path: Path, text: str, *overrides: tuple[str, str]) -> ComparisonPlan:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return load_comparison(str(path), overrides, folder=tmp_path / "out")


BASE = """\
base:
  task: {name: stories, size: 40}
  rollout: {prompts: 2, group: 2, max_tokens: 8}
  train: {steps: 2}
  eval: {every: 1, n: 5}
"""


def test_every_method_key_is_one_of_a_recipe() -> None:
    for key in METHOD_KEYS:
        section, _, name = key.rpartition(".")
        models: dict[str, Any] = {"": Recipe, "rollout": type(load_recipe("tiny/grpo").rollout), "data": DataSection}
        assert name in models[section].model_fields, key


def test_cells_are_methods_by_seeds() -> None:
    plan = load()
    assert [cell.name for cell in plan.cells] == [
        *("grpo-seed0", "wide-seed0", "plain-seed0"),
        *("grpo-seed1", "wide-seed1", "plain-seed1"),
    ]
    assert [cell.recipe.train.seed for cell in plan.cells] == [0, 0, 0, 1, 1, 1]
    assert plan.cells[4].folder == Path("runs/example/cells/wide-seed1")
    assert plan.cells[4].recipe.description == "wide with seed 1, a cell of the comparison example."


def test_of_a_recipe_only_the_method_is_taken() -> None:
    recipe = load().cells[0].recipe
    donor = load_recipe("tiny/grpo").resolve()
    assert recipe.objective == donor.objective
    assert recipe.advantage == donor.advantage
    assert recipe.aggregate == donor.aggregate
    assert recipe.rollout is not None
    assert recipe.rollout.drop_uniform_groups is False  # the recipe's, not the base's
    assert (recipe.rollout.prompts, recipe.rollout.max_tokens) == (2, 8)  # the base's, as all below
    assert (recipe.train.lr, recipe.train.steps, recipe.train.schedule) == (1e-4, 2, "constant")
    assert recipe.task.options["size"] == 40
    assert [word.name for word in recipe.rewards] == ["correct", "xml_format"]


def test_overrides_alone_change_the_base() -> None:
    recipe = load().cells[2].recipe
    assert (recipe.objective.name, recipe.advantage and recipe.advantage.name) == ("reinforce", "centered")
    assert recipe.rollout is not None
    assert recipe.rollout.drop_uniform_groups is True  # the base's


def test_what_differs_outside_of_the_method_is_told() -> None:
    plan = load()
    assert [method.differs for method in plan.methods] == [{}, {"train.lr": (1e-4, 2e-4)}, {}]
    assert plan.cells[1].recipe.objective.options["clip_high"] == 0.4
    assert [method.source for method in plan.methods] == [
        "tiny/grpo",
        "tiny/grpo with overrides",
        "a recipe of its own",
    ]


def test_every_cell_starts_from_the_last_weights_of_the_start() -> None:
    plan = load()
    assert plan.start is not None
    assert plan.start.recipe.train.steps == 2
    assert plan.start.recipe.train.seed == 0
    assert {cell.recipe.model.name for cell in plan.cells} == {"runs/example/start/checkpoints/step-000002"}


def test_a_method_may_start_elsewhere_but_it_is_told() -> None:
    plan = load(("methods.plain.model.name", "tiny"), methods=["plain", "grpo"])
    # the base's own model is tiny too, so nothing differs until the start takes its place
    assert {cell.method: cell.recipe.model.name for cell in plan.cells} == {
        "plain": "runs/example/start/checkpoints/step-000002",
        "grpo": "runs/example/start/checkpoints/step-000002",
    }
    plan = load(("methods.plain.model.name", "other"), methods=["plain"])
    assert plan.cells[0].recipe.model.name == "other"
    assert plan.methods[0].differs == {"model.name": ("the start", "other")}


def test_methods_and_seeds_can_be_chosen() -> None:
    plan = load(methods=["plain", "grpo", "plain"], num_seeds=1)
    assert [cell.name for cell in plan.cells] == ["plain-seed0", "grpo-seed0"]


def test_overrides_of_the_base_reach_every_cell() -> None:
    plan = load(("train.steps", "7"), ("methods.grpo.regularize.kl", "0.5"), ("start.train.steps", "3"))
    assert {cell.recipe.train.steps for cell in plan.cells} == {7}
    assert [cell.recipe.regularize.kl for cell in plan.cells[:2]] == [0.5, 0.0]
    assert plan.start is not None
    assert plan.start.recipe.train.steps == 3


def test_the_resolved_file_makes_the_same_cells_again(tmp_path: Path) -> None:
    plan = load(("train.lr", "0.003"))
    path = tmp_path / "compare.yaml"
    path.write_text(plan.to_yaml())
    again = load_comparison(str(path), folder="runs/example")
    assert [cell.recipe.fingerprint() for cell in again.cells] == [cell.recipe.fingerprint() for cell in plan.cells]
    assert plan.start is not None
    assert again.start is not None
    assert again.start.recipe.fingerprint() == plan.start.recipe.fingerprint()
    assert again.to_yaml() == plan.to_yaml()


def test_a_base_may_be_a_name_with_a_method_of_its_own(tmp_path: Path) -> None:
    text = "base: {recipe: tiny/grpo, task: {size: 40}}\nmethods: {as_it_is: , kl: {regularize: {kl: 0.1}}}\n"
    plan = load_text(tmp_path, text)
    assert plan.num_seeds == 3
    assert plan.start is None
    first, second = (method.recipe for method in plan.methods)
    assert first.objective == load_recipe("tiny/grpo").resolve().objective
    assert second.objective == first.objective
    assert (first.regularize.kl, second.regularize.kl) == (0.0, 0.1)
    assert first.task.options["seed"] == 2  # tiny/grpo's
    assert first.model.name == "tiny"


def test_defaults_follow_the_objective_that_a_method_ends_with(tmp_path: Path) -> None:
    plan = load_text(tmp_path, f"{BASE}methods: {{a: {{objective: grpo}}, b: {{objective: dpo}}}}\n")
    token, pair = (method.recipe for method in plan.methods)
    assert token.aggregate is not None
    assert pair.aggregate is not None
    assert (token.aggregate.name, pair.aggregate.name) == ("token_mean", "unit_mean")
    assert token.advantage is not None
    assert pair.advantage is None


def test_a_method_of_the_other_kind_brings_what_it_learns_from_and_all_else_is_held_equal(tmp_path: Path) -> None:
    """A base that samples beside demonstrations, and a base of demonstrations beside a method that samples."""
    (tmp_path / "mine.yaml").write_text(f"{BASE}methods:\n  rl: rl/grpo\n  sft: tiny/sft\n")
    plan = load_comparison(str(tmp_path / "mine.yaml"), folder=tmp_path / "c", num_seeds=1)
    rl, sft = (method.recipe for method in plan.methods)
    assert rl.rollout is not None
    assert sft.rollout is None
    assert sft.data is not None
    assert sft.task.options["worked"] == 0.2  # tiny/sft's own task
    assert sft.objective.name == "cross_entropy"
    assert sft.rewards == []
    for key in ("model", "prompt"):
        assert getattr(sft, key) == getattr(rl, key)
    assert (sft.train.steps, sft.train.lr) == (rl.train.steps, rl.train.lr)
    (measured,) = sft.eval.tasks  # on what the base is measured, not on what its own task holds out
    assert (measured.name, measured.options["split"]) == (rl.task.name, "validation")
    differs = {method.name: method.differs for method in plan.methods}
    assert differs["rl"] == {}
    assert differs["sft"]["what it learns from"] == ("its own answers", "data")
    assert not any(key.startswith(("rollout", "data", "model", "train.lr")) for key in differs["sft"])
    (tmp_path / "again.yaml").write_text(plan.to_yaml())
    again = load_comparison(str(tmp_path / "again.yaml"), folder=tmp_path / "c", num_seeds=1)
    assert [method.recipe.dump() for method in again.methods] == [method.recipe.dump() for method in plan.methods]
    (tmp_path / "data.yaml").write_text("base: tiny/sft\nmethods: {sft: {}, rl: tiny/grpo}\n")
    rows = load_comparison(str(tmp_path / "data.yaml"), folder=tmp_path / "d", num_seeds=1).methods
    assert [row.recipe.rollout is not None for row in rows] == [False, True]
    assert rows[1].recipe.rewards


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BASE, "mine.yaml: methods: a comparison needs this key"),
        (f"{BASE}methods: {{a: tiny/grpo}}\nsedes: 2\n", "mine.yaml:7: sedes: a comparison has no key 'sedes'."),
        (f"{BASE}methods: {{a: tiny/grpo}}\nseeds: 0\n", "mine.yaml:7: seeds: Input should be greater than or equal"),
        (f"{BASE}methods: {{a b: tiny/grpo}}\n", "mine.yaml:6: methods.a b: a method's name is made of letters"),
        (f"{BASE}methods: {{a: tiny/grop}}\n", "method 'a': no recipe file or shipped recipe 'tiny/grop'. Did"),
        (f"{BASE}methods:\n  a: {{recipe: nowhere.yaml}}\n", "method 'a': nowhere.yaml: no such recipe file"),
        (f"{BASE}methods:\n  a:\n", "mine.yaml:7: methods.a: give a recipe or an objective; the base has none"),
        (
            f"{BASE}methods:\n  a: tiny/grpo\n  b:\n    objective: grpo\n    trian: {{lr: 1}}\n",
            "method 'b': {place}:10: trian: a recipe has no key 'trian'. Did you mean 'train'?",
        ),
        (
            f"{BASE}methods:\n  b: {{recipe: tiny/grpo, train: {{lr: fast}}}}\n",
            "method 'b': {place}:7: train.lr: Input should be a valid number",
        ),
        (
            f"{BASE}methods: {{b: {{recipe: tiny/grpo, objective: {{clip_hgh: 1}}}}}}\n",
            "method 'b': objective.clip_hgh: objective 'grpo' has no key 'clip_hgh'. Did you mean 'clip_high'?",
        ),
        (BASE.replace("steps", "stesp") + "methods: {a: tiny/grpo}\n", "base: {place}:4: train.stesp: section 'train'"),
        (BASE.replace("stories", "story") + "methods: {a: tiny/grpo}\n", "base: task: there is no task named 'story'"),
        (BASE.replace("every: 1", "every: 0") + "methods: {a: tiny/grpo}\n", "yaml:5: base.eval.every: 0 switches"),
        (f"start: tiny/stf\n{BASE}methods: {{a: tiny/grpo}}\n", "start: no recipe file or shipped recipe 'tiny/stf'"),
        ("task: stories\nobjective: grpo\n", "this is a recipe of one run; train it with: posttrain train"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_method_line_and_remedy(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises((RecipeError, UnknownWord)) as caught:
        load_text(tmp_path, text)
    assert message.replace("{place}", str(tmp_path / "mine.yaml")) in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("regularize.kl", "1", "this belongs to the methods; give it to one of them: --methods.NAME.regularize.kl"),
        ("rollout.select", "every", "--methods.NAME.rollout.select"),
        ("train.seed", "1", "--seeds says how many"),
        ("methods.gropo.train.lr", "1", "has no method 'gropo'. Did you mean 'grpo'?"),
        ("train.lrr", "1", "base: command line: train.lrr: section 'train' has no key 'lrr'"),
        ("methods.grpo.train.lrr", "1", "method 'grpo': command line: train.lrr: section 'train' has no key 'lrr'"),
        ("seeds", "none", "command line: seeds: "),
    ],
)
def test_overrides_that_do_not_fit_are_refused(key: str, value: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load((key, value))
    assert message in str(caught.value)


def test_words_that_do_not_fit_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    """A later cell's mistake is found before the first one is begun."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        "base: {recipe: tiny/grpo, eval: {every: 10}}\nseeds: 2\n"
        "methods: {grpo: rl/grpo, blind: {recipe: rl/grpo, advantage: gae}}\n"
    )
    with pytest.raises(RecipeError, match=r"^blind-seed0: advantage: 'gae' needs values, which objective 'grpo' does"):
        load_comparison(str(path), folder=tmp_path / "unused")
    assert load_comparison(str(path), folder=tmp_path / "unused", methods=["grpo"]).cells


def test_an_unknown_method_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UsageError, match=r"--methods: .* has no method 'wyde'. Did you mean 'wide'\? There: grpo, "):
        load(methods=["grpo", "wyde"])
    with pytest.raises(UsageError, match="name at least one of grpo"):
        load(methods=[])


def test_a_start_leaves_no_room_for_a_new_model() -> None:
    with pytest.raises(RecipeError, match="leaves nothing for 'start' to do"):
        load(("model.init.architecture", "qwen3"))


def test_no_compare_file_lets_a_models_own_python_run_but_the_command_line_may(tmp_path: Path) -> None:
    text = f"{BASE}methods:\n  a: {{objective: grpo, model: {{trust_remote_code: true}}}}\n"
    with pytest.raises(RecipeError, match=r"mine\.yaml:7: methods\.a\.model\.trust_remote_code: a file cannot allow"):
        load_text(tmp_path, text)
    text = f"{BASE}methods: {{a: {{objective: grpo}}}}\n"
    plan = load_text(tmp_path, text, ("methods.a.model.trust_remote_code", "true"))
    assert plan.methods[0].recipe.model.trust_remote_code


def test_changes_laid_over_the_old_give_the_new() -> None:
    old = {"a": 1, "m": {"name": "x", "p": 1, "q": 2}, "s": {"k": 1, "l": [1, 2]}, "model": {"name": "t", "d": 1}}
    new = {"m": {"name": "y", "p": 3}, "s": {"k": 1, "l": [1]}, "model": {"name": "u", "d": 1}, "b": {"c": 2}}
    changes = changes_between(old, new)
    assert changes == {
        "a": None,
        "m": {"name": "y", "p": 3},
        "s": {"l": [1]},
        "model": {"name": "u"},
        "b": {"c": 2},
    }
    assert merge(old, changes) == new


def test_method_and_rest_are_apart() -> None:
    data = {"objective": {"name": "x"}, "rollout": {"group": 2, "select": "every"}, "train": {"lr": 1}, "teacher": None}
    assert method_part(data) == {"objective": {"name": "x"}, "rollout": {"select": "every"}}
    rated = {"objective": {"name": "kto"}, "data": {"batch": 4, "label_above": 6.5}}
    assert method_part(rated) == {"objective": {"name": "kto"}, "data": {"label_above": 6.5}}
    assert without_method(data) == {"rollout": {"group": 2}, "train": {"lr": 1}}
    assert data["rollout"] == {"group": 2, "select": "every"}  # unchanged
    other = {**data, "objective": {"name": "y"}, "train": {"lr": 2, "seed": 5}, "description": "z"}
    assert differences(data, other) == {"train.lr": (1, 2)}


def test_shipped_comparisons_are_whole_and_apart_from_recipes() -> None:
    assert not set(comparison_names()) & set(training_recipe_names())
    assert "tiny/grpo" in training_recipe_names()
    for name in comparison_names():
        plan = load_comparison(name, folder="runs/x")
        assert len(plan.cells) == len(plan.methods) * plan.num_seeds
        assert len(describe_comparison(name)) > 40
        short = load_comparison(name.removeprefix("compare/"), folder="runs/x")
        assert json.dumps(short.resolved) == json.dumps(plan.resolved)
