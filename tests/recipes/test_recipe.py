"""Recipes: strictness with places, overrides, resolution and round trip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.errors import RecipeError
from posttrain.recipes.document import parse_yaml
from posttrain.recipes.overriding import apply_override, merge
from posttrain.recipes.recipe import Recipe, load_recipe, validate_recipe
from posttrain.recipes.sections import Component
from posttrain.untrusted import declare_code
from refusing import refuses

TEXT = """\
model: {name: tiny}
task: {name: stories, split: train}
rewards:
  - correct
  - {name: xml_format, weight: 0.2}
rollout: {num_prompts: 4, group_size: 4}
objective: {name: grpo, clip_high: 0.28}
train:
  steps: 5
  lr: 1e-4
"""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_defaults_words_and_round_trip(tmp_path: Path):
    recipe = load_recipe(write(tmp_path, TEXT)).resolve()
    assert recipe.train.lr == 1e-4  # YAML 1.1 reads 1e-4 as text
    assert recipe.advantage.name == "normalized"
    assert recipe.objective.options["clip_low"] == 0.2
    assert [(w.name, w.weight) for w in recipe.rewards] == [("correct", 1.0), ("xml_format", 0.2)]
    again = load_recipe(write(tmp_path, recipe.to_yaml())).resolve()
    assert again == recipe
    assert again.fingerprint() == recipe.fingerprint()


def test_the_fingerprint_follows_the_content(tmp_path: Path):
    path = write(tmp_path, TEXT)
    base = load_recipe(path).resolve().fingerprint()
    assert load_recipe(path, [("objective.clip_low", "0.2")]).resolve().fingerprint() == base  # the default, said aloud
    assert load_recipe(path, [("train.lr", "2e-4")]).resolve().fingerprint() != base


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  steps: 5", "  stepz: 5", "mine.yaml:9: train.stepz"),
        ("  steps: 5", "  steps: many", "mine.yaml:9: train.steps"),
        ("  steps: 5", "  steps: 0", "mine.yaml:9: train.steps"),
        ("train:", "trian:", "mine.yaml:8: trian"),
        ("task: {name: stories, split: train}\n", "", "task:"),
        ("rollout: {num_prompts: 4, group_size: 4}\n", "", "and 'data'"),
        ("  lr: 1e-4", "  lr: 1e-4\n  lr: 2e-4", "mine.yaml:11: train.lr"),
        ("train:", "train: [", "mine.yaml"),
    ],
)
def test_refusals_name_file_line_and_key(tmp_path: Path, old: str, new: str, message: str):
    assert old in TEXT
    with refuses(RecipeError, message):
        load_recipe(write(tmp_path, TEXT.replace(old, new)))


def test_overrides():
    data = {"objective": {"name": "grpo", "clip_low": 0.1}, "task": "stories", "rewards": ["correct"]}
    apply_override(data, "train.lr", "1e-5")
    apply_override(data, "task.split", "test")
    apply_override(data, "rewards.0.weight", "0.5")
    apply_override(data, "objective", "reinforce")
    apply_override(data, "model.adapter", "{kind: lora, rank: 4}")
    assert data["train"]["lr"] == 1e-5
    assert data["task"] == {"name": "stories", "split": "test"}
    assert data["rewards"] == [{"name": "correct", "weight": 0.5}]
    assert data["objective"] == "reinforce"
    assert data["model"]["adapter"]["rank"] == 4
    apply_override(data, "rewards.correct.weight", "0.25")
    assert data["rewards"] == [{"name": "correct", "weight": 0.25}]
    data["rewards"] += ["overlong", "overlong"]
    with refuses(RecipeError, "rewards.overlong", "'overlong'"):
        apply_override(data, "rewards.overlong.limit", "5")
    with refuses(RecipeError, "rewards.corect"):
        apply_override(data, "rewards.corect.weight", "1")
    del data["rewards"][1:]
    with refuses(RecipeError, "0 to 0"):
        apply_override(data, "rewards.3.weight", "1")
    with refuses(RecipeError, "train.lr"):
        apply_override(data, "train.lr.x", "1")


@pytest.mark.parametrize(
    ("text", "value"),
    [('"2026"', "2026"), ("'007'", "007"), ('"null"', "null"), ("2026", 2026), (" 7 ", 7), ("[a, '7']", ["a", "7"])],
)  # fmt: skip
def test_apply_override_quoted_value_is_text(text: str, value: Any) -> None:
    """The command line and a file read a value alike."""
    data: dict[str, Any] = {}
    apply_override(data, "a.b", text)
    assert data["a"]["b"] == value
    assert type(data["a"]["b"]) is type(value)
    assert parse_yaml(f"b: {text}\n", "x.yaml")[0]["b"] == value


def test_overrides_in_any_order_put_a_component_before_its_options(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(TEXT, encoding="utf-8")
    by_name = [("task.name", "jsonl"), ("task.path", "rows.jsonl")]
    for overrides in (by_name, by_name[::-1], [("task.path", "rows.jsonl"), ("task", "jsonl")]):
        task = load_recipe(str(path), overrides).task
        assert (task.name, task.options) == ("jsonl", {"path": "rows.jsonl"})
    renamed = load_recipe(str(path), [("rewards.0.weight", "0.5"), ("rewards.0.name", "xml_soft")]).rewards[0]
    assert (renamed.name, renamed.weight) == ("xml_soft", 0.5)  # an entry of a list keeps what belongs to its place


def test_override_names_an_entry_of_a_list(tmp_path: Path) -> None:
    path = write(tmp_path, TEXT.replace("{name: xml_format, weight: 0.2}", "{name: overlong, limit: 8, cache: 2}"))
    recipe = load_recipe(
        path,
        [("rewards.overlong.limit", "9"), ("description", '"2026"'), ("eval.every", "-1"), ("train.save_every", "-1")],
    )
    assert recipe.rewards[1].options["limit"] == 9
    assert (recipe.description, recipe.eval.every, recipe.train.save_every) == ("2026", 0, 0)
    with refuses(RecipeError, "rewards.1.limt", "'overlong'", "'limt'"):
        load_recipe(path, [("rewards.overlong.limt", "9")]).resolve()
    with refuses(RecipeError, "command line: eval.every"):
        load_recipe(path, [("eval.every", "-2")])


def test_missing_files_and_names():
    with refuses(RecipeError, "no/such.yaml"):
        load_recipe("no/such.yaml")
    with refuses(RecipeError, "'grpo-gsm8kk'"):
        load_recipe("grpo-gsm8kk")


def test_recipe_as_other_files_are_written_is_refused_with_what_to_write(tmp_path: Path) -> None:
    for name, text, message in (
        ("rows.jsonl", '{"prompt": "a"}', "rows.jsonl"),
        ("a.yaml", "train.lr: 1", "'train.lr'"),
    ):
        (tmp_path / name).write_text(text)
        with refuses(RecipeError, message):
            load_recipe(str(tmp_path / name))
    (tmp_path / "recipe.yaml").write_text("{}")
    with pytest.raises(RecipeError, match=f"run folder; `posttrain runs resume {tmp_path.name}` continues it"):
        load_recipe(str(tmp_path))


def test_a_recipe_that_is_no_mapping():
    with refuses(RecipeError, "mapping of sections"):
        parse_yaml("- 1\n- 2\n", "x.yaml")


def test_words_that_do_not_belong_together_are_named_with_their_line(tmp_path: Path):
    lines = TEXT.replace("rollout: {num_prompts: 4, group_size: 4}", "data: {}").splitlines()
    path = write(tmp_path, "\n".join([*lines, "advantage: raw", ""]))
    line = len(lines) + 1
    with pytest.raises(RecipeError, match=rf"mine\.yaml:{line}: advantage: 'advantage' works only with 'rollout'"):
        load_recipe(path)
    supervised = write(tmp_path, "\n".join([*lines, ""]))
    with refuses(RecipeError, "command line: correction", "'correction'", "'rollout'"):
        load_recipe(supervised, [("correction", "icepop")])
    with refuses(RecipeError, "command line: train.ppo_epochs"):
        load_recipe(supervised, [("train.ppo_epochs", "2")])
    with refuses(RecipeError, "command line: data", "'rollout'"):
        load_recipe(write(tmp_path, TEXT), [("data.batch_size", "2")])


# --- recipes that extend others ---


def extending(tmp_path: Path, text: str, overrides: list[tuple[str, str]] | None = None, base: str = TEXT) -> Recipe:
    """The recipe ``text`` over ``base``, which it names as BASE."""
    below = tmp_path / "base.yaml"
    below.write_text(base)
    path = tmp_path / "above.yaml"
    path.write_text(text.replace("BASE", str(below)))
    return load_recipe(str(path), overrides or [])


def test_sections_are_merged_and_words_replaced(tmp_path: Path) -> None:
    base = TEXT.replace("train:", "description: below\naggregate: {name: constant, length: 9}\ntrain:")
    recipe = extending(
        tmp_path,
        "extends: BASE\ntrain: {steps: 7}\nobjective: {name: grpo, kl: 0.1}\nrewards: [exact]\n"
        "rollout: {select: {name: above, threshold: 1.0}}\nmodel: {adapter: {rank: 4}}\n",
        base=base,
    )
    assert (recipe.train.steps, recipe.train.lr) == (7, 1e-4)  # the other keys of a section stay
    assert recipe.objective.options == {"kl": 0.1}  # clip_high is gone: the word is another one
    assert [w.name for w in recipe.rewards] == ["exact"]  # a list is replaced
    assert recipe.rollout is not None
    assert (recipe.rollout.num_prompts, recipe.rollout.select) == (4, Component(name="above", threshold=1.0))
    assert recipe.model.name == "tiny"
    assert recipe.model.adapter is not None
    assert recipe.aggregate == Component(name="constant", length=9)
    assert recipe.description == ""  # what is said of the one below does not hold for this one


def test_options_without_a_name_change_the_word_below(tmp_path: Path) -> None:
    both = extending(tmp_path, "extends: BASE\nobjective: {kl: 0.1}\n")
    assert both.objective == Component(name="grpo", clip_high=0.28, kl=0.1)
    bare = extending(
        tmp_path, "extends: BASE\ntask: {split: test}\n", base=TEXT.replace("{name: stories, split: train}", "stories")
    )
    assert bare.task == Component(name="stories", split="test")


def test_a_section_with_a_key_called_name_is_no_word(tmp_path: Path) -> None:
    base = TEXT.replace("{name: tiny}", "{name: tiny, adapter: {rank: 4}}")
    recipe = extending(tmp_path, "extends: BASE\nmodel: {name: other}\n", base=base)
    assert recipe.model.name == "other"
    assert recipe.model.adapter is not None


def test_null_takes_a_key_away(tmp_path: Path) -> None:
    base = TEXT.replace("train:", "advantage: raw\ntrain:")
    supervised = "extends: BASE\nrollout: null\nadvantage: null\nrewards: null\ndata: {batch_size: 3}\n"
    supervised += "objective: cross_entropy\n"
    recipe = extending(tmp_path, supervised, base=base)
    assert (recipe.rollout, recipe.advantage, recipe.rewards) == (None, None, [])
    assert recipe.data is not None
    # inside a section it is a value, where the key may have none
    assert extending(tmp_path, "extends: BASE\ntrain: {max_grad_norm: null}\n").train.max_grad_norm is None
    with refuses(RecipeError, "above.yaml:2: train.lr"):
        extending(tmp_path, "extends: BASE\ntrain: {lr: null}\n")


def test_overrides_come_last_and_extension_is_transitive(tmp_path: Path) -> None:
    (tmp_path / "middle.yaml").write_text(f"extends: {tmp_path / 'base.yaml'}\ntrain: {{steps: 6, lr: 2e-4}}\n")
    text = f"extends: {tmp_path / 'middle.yaml'}\ntrain: {{steps: 7}}\n"
    recipe = extending(tmp_path, text, [("rollout.group_size", "8"), ("objective", "reinforce")])
    assert (recipe.train.steps, recipe.train.lr) == (7, 2e-4)
    assert recipe.rollout is not None
    assert (recipe.rollout.num_prompts, recipe.rollout.group_size) == (4, 8)
    assert recipe.objective == Component(name="reinforce")
    again = load_recipe(write(tmp_path, recipe.resolve().to_yaml())).resolve()
    assert again.fingerprint() == recipe.resolve().fingerprint()  # the dump stands alone


def test_merge_leaves_what_it_was_given(tmp_path: Path) -> None:
    below, above = {"a": {"x": 1, "y": {"z": 2}}}, {"a": {"y": {"z": 3}, "x": None}}
    assert merge(below, above) == {"a": {"y": {"z": 3}, "x": None}}
    assert merge(below, {"a": None}) == {}
    assert below == {"a": {"x": 1, "y": {"z": 2}}}
    assert above == {"a": {"y": {"z": 3}, "x": None}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: tiny/grpoo\n", "above.yaml:1: extends"),
        ("train: {}\nextends: no/such.yaml\n", "above.yaml:2: extends: no/such.yaml"),
        ("extends: [a, b]\n", "above.yaml:1: extends"),
        ("extends: BASE\nobjective: null\n", "above.yaml:2: objective"),
        ("extend: BASE\n", "above.yaml:1: extend"),
    ],
)
def test_refusals_name_the_line_that_extends(tmp_path: Path, text: str, message: str) -> None:
    with refuses(RecipeError, message):
        extending(tmp_path, text)


def test_an_error_of_the_recipe_below_is_named_there(tmp_path: Path) -> None:
    text = "extends: BASE\n\n\n\n\n\ntrain: {warmup_steps: 1}\n"
    broken = TEXT.replace("  steps: 5", "  stepz: 5")
    with refuses(RecipeError, "base.yaml:9: train.stepz", "'train'", "'stepz'"):
        extending(tmp_path, text, base=broken)
    with refuses(RecipeError, "above.yaml:7: train.steps"):
        extending(tmp_path, text.replace("{warmup_steps: 1}", "{steps: 0}"))
    with refuses(RecipeError, "base.yaml"):
        extending(tmp_path, text, base="train: [")
    with refuses(RecipeError, "command line: train.steps"):
        extending(tmp_path, text, [("train.steps", "0")])


def test_circles_are_refused(tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text(f"extends: {two}\n")
    two.write_text(f"train: {{}}\nextends: {one}\n")
    with refuses(RecipeError, "two.yaml' and '", "one.yaml"):
        load_recipe(str(one))
    alone = tmp_path / "alone.yaml"
    alone.write_text(f"extends: {alone}\n")
    with refuses(RecipeError, "alone.yaml:1: extends: '", "alone.yaml' extends itself"):
        load_recipe(str(alone))


# --- what follows from the objective ---


def resolved(objective: Any, source: str = "rollout", **changes: Any) -> Recipe:
    base = {k: v for k, v in yaml.safe_load(TEXT).items() if k != "rollout"}
    section = {"rollout": {"num_prompts": 4, "group_size": 4}} if source == "rollout" else {"data": {}}
    if source == "data":
        base.pop("rewards")
    return validate_recipe(base | section | {"objective": objective} | changes).resolve()


@pytest.mark.parametrize(
    ("objective", "aggregate", "select", "advantage", "head"),
    [
        ("grpo", "token_mean", "every", "normalized", None),
        ("ppo", "token_mean", "every", "gae", "separate"),
        ("cross_entropy", "token_mean", "every", None, None),
        ("dpo", "unit_mean", "best_and_worst", None, None),
        ("kto", "unit_mean", "every", None, None),
        ("bradley_terry", "unit_mean", "best_and_worst", None, "separate"),
        ("outcome", "token_mean", "every", None, "separate"),
    ],
)
def test_words_that_follow_from_the_objective(
    objective: str, aggregate: str, select: str, advantage: str | None, head: str | None
) -> None:
    recipe = resolved(objective)
    assert recipe.aggregate is not None
    assert recipe.aggregate.name == aggregate
    assert recipe.rollout is not None
    assert recipe.rollout.select is not None
    assert recipe.rollout.select.name == select
    assert (recipe.advantage.name if recipe.advantage else None) == advantage
    assert (recipe.head.trunk if recipe.head else None) == head
    again = validate_recipe(yaml.safe_load(recipe.to_yaml())).resolve()
    assert again == recipe
    if objective in ("dpo", "kto", "cross_entropy"):  # of data: neither selection nor advantage
        of_data = resolved(objective, source="data")
        assert (of_data.rollout, of_data.advantage, of_data.aggregate) == (None, None, recipe.aggregate)


def test_what_a_recipe_states_goes_before_what_follows() -> None:
    recipe = resolved(
        "ppo",
        advantage={"name": "return_to_go"},
        aggregate="sequence_mean",
        head={"trunk": "shared"},
        rollout={"num_prompts": 4, "group_size": 4, "select": "every"},
    )
    assert (recipe.advantage.name, recipe.aggregate.name, recipe.head.trunk) == (
        "return_to_go",
        "sequence_mean",
        "shared",
    )
    assert recipe.advantage.options == {"gamma": 1.0, "whiten": True}  # defaults filled in
    pairs = resolved("dpo", rollout={"num_prompts": 4, "group_size": 4, "select": "right_and_wrong"})
    assert pairs.rollout.select.options == {"threshold": 0.5, "num_pairs": 1}


def test_an_unregistered_objective_reads_advantages() -> None:
    """A function of a user's without traits is a token objective over rollouts."""
    declare_code("posttrain.algorithms.objectives.surrogate:clipped_surrogate")
    recipe = resolved("posttrain.algorithms.objectives.surrogate:clipped_surrogate")
    assert (recipe.aggregate.name, recipe.advantage.name, recipe.head) == ("token_mean", "normalized", None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"correction": "token_tis"}, "rollout.old_logprobs"),
        ({"kl_in_reward": {"weight": -1.0}}, "kl_in_reward.weight"),
        ({"kl_in_reward": {"target": 1.0}}, "kl_in_reward.weight"),
        ({"kl_in_reward": {"weight": 1.0, "target": 0.0}}, "kl_in_reward.target"),
        ({"kl_in_reward": {"weight": 1.0, "estimator": "k4"}}, "kl_in_reward.estimator"),
        ({"head": {"trunk": "mine"}}, "head.trunk"),
        ({"teacher": {"top_k": 3}}, "teacher.name"),
    ],
)
def test_sections_are_checked(changes: dict[str, Any], message: str) -> None:
    with refuses(RecipeError, message):
        resolved("grpo", **changes)


@pytest.mark.parametrize(("name", "key"), [("rl/ppo", "objective.value_clip"), ("rl/grpo", "train.max_grad_norm")])
def test_a_null_that_was_requested_stays(name: str, key: str, tmp_path: Path) -> None:
    """Else the stored recipe would fill the default in again, and be another experiment."""
    section, option = key.split(".")

    def value_in(recipe: Recipe) -> Any:
        part = getattr(recipe, section)
        return part.options[option] if isinstance(part, Component) else getattr(part, option)

    assert value_in(load_recipe(name).resolve()) is not None
    recipe = load_recipe(name, [(key, "null")]).resolve()
    assert value_in(recipe) is None
    stored = tmp_path / "recipe.yaml"
    stored.write_text(recipe.to_yaml())
    again = load_recipe(str(stored)).resolve()
    assert value_in(again) is None
    assert again.fingerprint() == recipe.fingerprint() != load_recipe(name).resolve().fingerprint()
    above = tmp_path / "above.yaml"
    above.write_text(f"extends: {name}\n{section}: {{{option}: null}}\n")
    assert value_in(load_recipe(str(above)).resolve()) is None


def test_regularizers_belong_to_objectives_with_a_policy_term() -> None:
    base = {"task": "stories", "rollout": {"num_prompts": 2, "group_size": 2}, "objective": "grpo"}
    assert validate_recipe(base).resolve().dump()["regularize"] == {
        "kl_coef": 0.0,
        "kl_estimator": "k3",
        "entropy_coef": 0.0,
    }
    recipe = validate_recipe(base | {"regularize": {"kl_coef": 0.1, "entropy_coef": 0.01}}).resolve()
    assert (recipe.regularize.kl_coef, recipe.regularize.entropy_coef) == (0.1, 0.01)
    for objective in ("dpo", "on_policy_distillation"):
        assert "regularize" not in validate_recipe(base | {"objective": objective}).resolve().dump()
        with pytest.raises(RecipeError, match=f"regularize: objective '{objective}' has no policy term"):
            validate_recipe(base | {"objective": objective, "regularize": {"kl_coef": 0.1}}).resolve()
    with refuses(RecipeError, "'regularize'", "'kl_weight'"):
        validate_recipe(base | {"regularize": {"kl_weight": 0.1}})
    with refuses(RecipeError, "'grpo'", "'kl'"):
        validate_recipe(base | {"objective": {"name": "grpo", "kl": 0.1}}).resolve()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("train.str", "3", "command line: train.str"),  # not a type's name
        ("track", "5", "command line: track"),
        ("rewards", "[5]", "command line: rewards.0"),
        ("model.adapter", "{targets: q}", "targets"),
        ("model.adapter", "{targets: [1]}", "command line: model.adapter.targets.0"),
        ("rollout", "3", "rollout"),
        ("train.steps", str([*range(60)]), "train.steps"),
        ("data", "{batch_size: 4}", "'rollout'"),
    ],
)
def test_a_wrong_value_is_shown_by_its_key_and_kind_and_never_as_a_whole_section(
    key: str, value: str, message: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("tiny/grpo", [(key, value)])
    assert message in str(caught.value)
    assert "{" not in str(caught.value)
    assert "description" not in str(caught.value)
