"""The file of a sweep: its rows, their recipes, what each needs, what differs, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import PosttrainError, RecipeError, UnknownComponent, UsageError
from posttrain.recipes.recipe import Recipe, load_recipe
from posttrain.recipes.sections import DataSection
from posttrain.sweeps.comparison.plan import names_comparison
from posttrain.sweeps.file import METHOD_KEYS, differences, shipped_sweeps, training_recipe_names, with_method_of
from posttrain.sweeps.plan import SweepPlan, Training, load_sweep
from refusing import refuses

EXAMPLE = Path(__file__).with_name("sweep.yaml")
ROOT = Path(__file__).resolve().parents[2]


def load(*overrides: tuple[str, str], **wanted: Any) -> SweepPlan:
    return load_sweep(str(EXAMPLE), overrides, folder="runs/example", **wanted)


def load_text(tmp_path: Path, text: str, *overrides: tuple[str, str], **wanted: Any) -> SweepPlan:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return load_sweep(str(path), overrides, folder=tmp_path / "out", **wanted)


BASE = """\
base:
  task: {name: stories, size: 40}
  rollout: {num_prompts: 2, group_size: 2, max_tokens: 8}
  train: {steps: 2}
  eval: {every: 1, num_examples: 5}
"""


def test_every_method_key_is_one_of_a_recipe() -> None:
    for key in METHOD_KEYS:
        section, _, name = key.rpartition(".")
        models: dict[str, Any] = {"": Recipe, "rollout": type(load_recipe("tiny/grpo").rollout), "data": DataSection}
        assert name in models[section].model_fields, key


def test_trials_are_rows_by_seeds_from_the_last_weights_of_the_start() -> None:
    plan = load()
    assert [trial.name for trial in plan.trainings] == [
        f"{n}-seed{i}" for i in (0, 1) for n in ("grpo", "wide", "plain")
    ]
    assert [trial.recipe.train.seed for trial in plan.trainings] == [0, 0, 0, 1, 1, 1]
    assert plan.trainings[4].folder == Path("runs/example/cells/wide-seed1")
    assert plan.trainings[4].recipe.description == "wide with seed 1, a trial of the sweep example."
    assert plan.start is not None
    assert (plan.start.recipe.train.steps, plan.start.recipe.train.seed) == (2, 0)
    assert {trial.recipe.model.name for trial in plan.trainings} == {"runs/example/start/checkpoints/step-000002"}


def test_of_a_recipe_only_the_method_is_taken_and_overrides_change_the_base() -> None:
    plan, source = load(), load_recipe("tiny/grpo").resolve()
    recipe, _, other = (row.recipe for row in plan.rows)
    assert (recipe.objective, recipe.advantage, recipe.aggregate) == (
        source.objective,
        source.advantage,
        source.aggregate,
    )
    assert recipe.rollout is not None
    assert recipe.rollout.drop_uniform_groups is False  # the recipe's, not the base's
    assert (recipe.rollout.num_prompts, recipe.rollout.max_tokens) == (2, 8)  # the base's, as all below
    assert (recipe.train.lr, recipe.train.steps, recipe.train.schedule) == (1e-4, 2, "constant")
    assert recipe.task.options["size"] == 40
    assert [word.name for word in recipe.rewards] == ["correct", "xml_format"]
    assert (other.objective.name, other.advantage and other.advantage.name) == ("reinforce", "centered")
    assert other.rollout is not None
    assert other.rollout.drop_uniform_groups is True  # the base's
    assert [row.differs for row in plan.rows] == [{}, {"train.lr": (1e-4, 2e-4)}, {}]
    assert plan.trainings[1].recipe.objective.options["clip_high"] == 0.4
    assert [row.source for row in plan.rows] == ["tiny/grpo", "tiny/grpo with overrides", "an inline recipe"]


def test_rows_and_seeds_can_be_chosen() -> None:
    plan = load(rows=["plain", "grpo", "plain"], num_seeds=1)
    assert [trial.name for trial in plan.trainings] == ["grpo-seed0", "plain-seed0"]
    with refuses(UsageError, "--rows", "'wyde'", "'wide'"):
        load(rows=["grpo", "wyde"])
    with refuses(UsageError, "name at least"):
        load(rows=[])


def test_a_key_of_the_command_line_reaches_every_row() -> None:
    plan = load(("train.steps", "7"), ("train.lr", "0.5"), ("rows.grpo.train.lr", "0.25"), ("start.train.steps", "3"))
    assert {trial.recipe.train.steps for trial in plan.trainings} == {7}
    assert [trial.recipe.train.lr for trial in plan.trainings[:3]] == [0.25, 0.5, 0.5]  # also where the row has its own
    assert plan.start is not None
    assert plan.start.recipe.train.steps == 3
    with refuses(RecipeError, "'plain'", "objective.clip_high", "'reinforce'"):
        load(("objective.clip_high", "0.9"))
    clipped = load(("objective.clip_high", "0.9"), rows=["grpo", "wide"], num_seeds=1)
    assert [trial.recipe.objective.options["clip_high"] for trial in clipped.trainings] == [0.9, 0.9]


def test_a_base_may_be_a_name_with_a_method_of_its_own(tmp_path: Path) -> None:
    text = "base: {recipe: tiny/grpo, task: {size: 40}}\nrows: {as_it_is: , kl: {regularize: {kl_coef: 0.1}}}\n"
    plan = load_text(tmp_path, text)
    assert plan.num_seeds == 3
    assert plan.start is None
    first, second = (row.recipe for row in plan.rows)
    assert first.objective == load_recipe("tiny/grpo").resolve().objective
    assert second.objective == first.objective
    assert (first.regularize.kl_coef, second.regularize.kl_coef) == (0.0, 0.1)
    assert first.task.options["seed"] == 2  # tiny/grpo's
    assert first.model.name == "tiny-sft"


def test_defaults_follow_the_objective_that_a_method_ends_with(tmp_path: Path) -> None:
    plan = load_text(tmp_path, f"{BASE}rows: {{a: {{objective: grpo}}, b: {{objective: dpo}}}}\n")
    token, pair = (row.recipe for row in plan.rows)
    assert token.aggregate is not None
    assert pair.aggregate is not None
    assert (token.aggregate.name, pair.aggregate.name) == ("token_mean", "unit_mean")
    assert token.advantage is not None
    assert pair.advantage is None


TO_GRPO = f"{BASE}rows: {{a: tiny/grpo}}\n"
GRPO = "{objective: grpo"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BASE, "mine.yaml: rows"),
        (f"{TO_GRPO}sedes: 2\n", "mine.yaml:7: sedes"),
        (f"{BASE}rows: {{a b: tiny/grpo}}\n", "mine.yaml:6"),
        (f"{BASE}rows: {{a: tiny/grop}}\n", "'tiny/grop'"),
        (f"{BASE}rows:\n  a:\n", "mine.yaml:7: rows.a"),
        (f"{BASE}rows:\n  b: {GRPO}, trian: {{}}}}\n", "mine.yaml:7: trian"),
        (f"{BASE}rows: {{b: {GRPO}, train: {{lr: fast}}}}}}\n", "yaml:6: train.lr"),
        (f"{BASE}rows: {{b: {{objective: {{name: grpo, clip_hgh: 1}}}}}}\n", "objective.clip_hgh"),
        (TO_GRPO.replace("steps", "stesp"), "mine.yaml:4: train.stesp"),
        (f"{BASE}rows: {{a: {GRPO}, needs: b}}, b: {GRPO}, needs: a}}}}\n", "b depend on each other"),
        (f"{BASE}rows: {{a: {GRPO}, needs: c}}, b: tiny/grpo}}\n", "yaml:6: rows.a.needs"),
        (f"{BASE}rows: {{a: tiny/sft}}\n", "'a'"),
    ],
)
def test_mistakes_are_named_with_row_line_and_remedy(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises((RecipeError, UnknownComponent)) as caught:
        load_text(tmp_path, text)
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("data.batch_size", "1", "base: command line"),
        ("objective.clip_hgh", "1", "objective.clip_hgh"),
        ("methods.grpo.train.lr", "1", "command line: methods"),
        ("model.name", "other", "rows.grpo.model.name"),
        ("rows.wide.model.name", "other", "rows.wide.model.name"),
        ("train.seed", "1", "--seeds"),
        ("rows.gropo.train.lr", "1", "'gropo'"),
        ("train.lrr", "1", "base: command line"),
    ],
)
def test_overrides_that_do_not_fit_are_refused(key: str, value: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load((key, value))
    assert message in str(caught.value)


def test_words_that_do_not_fit_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    """A later trial's mistake is found before the first one is begun."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        "base: {recipe: tiny/grpo, eval: {every: 10}}\nseeds: 2\n"
        "rows: {grpo: rl/grpo, blind: {recipe: rl/grpo, advantage: gae}}\n"
    )
    with refuses(RecipeError, "blind-seed0: advantage", "'gae'", "'grpo'"):
        load_sweep(str(path), folder=tmp_path / "unused")
    assert load_sweep(str(path), folder=tmp_path / "unused", rows=["grpo"]).trainings


def test_no_sweep_file_lets_a_models_own_python_run_but_the_command_line_may(tmp_path: Path) -> None:
    text = f"{BASE}rows:\n  a: {{objective: grpo, model: {{trust_remote_code: true}}}}\n"
    with refuses(RecipeError, "mine.yaml:7: rows.a.model.trust_remote_code"):
        load_text(tmp_path, text)
    text = f"{BASE}rows: {{a: {{objective: grpo}}}}\n"
    plan = load_text(tmp_path, text, ("rows.a.model.trust_remote_code", "true"))
    assert plan.rows[0].recipe.model.trust_remote_code


def test_with_method_of_and_differences_are_apart() -> None:
    data = {
        "objective": {"name": "x"},
        "rollout": {"group_size": 2, "select": "every"},
        "train": {"lr": 1},
        "teacher": None,
    }
    base = {"objective": {"name": "y"}, "advantage": {"name": "z"}, "rollout": {"group_size": 4, "max_rounds": 3}}
    assert with_method_of(base, data) == {"objective": {"name": "x"}, "rollout": {"group_size": 4, "select": "every"}}
    assert base["rollout"] == {"group_size": 4, "max_rounds": 3}  # unchanged
    other = {**data, "objective": {"name": "y"}, "train": {"lr": 2, "seed": 5}, "description": "z"}
    assert differences(data, other) == {"train.lr": (1, 2)}


COMPARISONS = {"sweep/methods", "sweep/preference-methods"}


def test_shipped_sweeps_are_whole_and_apart_from_recipes() -> None:
    names = ("hh-gpt2", "overoptimization", "ppo-grpo-dpo", "prm-vs-orm")
    assert set(shipped_sweeps()) - COMPARISONS == {f"sweep/{name}" for name in (*names, "staleness", "tiny", "tiny-hh")}
    assert not set(shipped_sweeps()) & set(training_recipe_names())
    for name in shipped_sweeps():
        if name in COMPARISONS:
            assert names_comparison(name, [], None)
            continue
        plan = load_sweep(name, folder="runs/x", num_seeds=1)
        assert len(plan.trainings) == len(plan.rows)
        assert len(plan.content.description) > 100
        assert (ROOT / plan.content.page).is_file()
    assert load_sweep("tiny-hh", folder="runs/x", num_seeds=1).to_yaml() == plan.to_yaml()  # the last one
    with refuses(RecipeError, "posttrain sweep sweep/tiny"):
        load_recipe("sweep/tiny")


# Over one key of a recipe.


def test_each_value_of_a_key_is_a_row_with_its_seeds(tmp_path: Path) -> None:
    over = ("train.lr", ["1e-4", "3e-4"])
    plan = load_sweep("tiny/grpo", [("train.steps", "5")], folder=tmp_path, num_seeds=3, over=over)
    assert [row.name for row in plan.rows] == ["lr-1e-4", "lr-3e-4"]
    assert [row.differs for row in plan.rows] == [{"train.lr": (3.0e-5, 1.0e-4)}, {"train.lr": (3.0e-5, 3.0e-4)}]
    trials = [(t.recipe.train.lr, t.recipe.train.seed, t.recipe.train.steps) for t in plan.trainings]
    assert trials == [(lr, seed, 5) for seed in range(3) for lr in (1e-4, 3e-4)]
    words = load_sweep("tiny/grpo", folder=tmp_path, num_seeds=1, over=("objective", ["grpo", "reinforce"]))
    assert [trial.recipe.objective.name for trial in words.trainings] == ["grpo", "reinforce"]
    alone = load_sweep("tiny/grpo", folder=tmp_path, num_seeds=2)
    assert [trial.name for trial in alone.trainings] == ["grpo-seed0", "grpo-seed1"]


@pytest.mark.parametrize(
    ("name", "over", "error", "message"),
    [
        ("tiny/grpo", ("trian.lr", ["1", "2"]), RecipeError, "'trian'"),
        ("tiny/grpo", ("train.lr", ["fast", "slow"]), RecipeError, "train.lr"),
        ("tiny/grpo", ("train.seed", ["1", "2"]), UsageError, "--seeds"),
        ("tiny/grpo", ("train.lr", ["1e-4", "1e-4"]), UsageError, "row name lr-1e-4"),
        ("tiny", ("train.lr", ["1", "2"]), UsageError, "already has rows"),
    ],
)
def test_values_that_cannot_be_rows_are_refused(
    name: str, over: tuple[str, list[str]], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with refuses(error, message):
        load_sweep(name, folder=tmp_path, num_seeds=1, over=over)


# Rows that need one another.

NEEDS = """\
start: {recipe: tiny/sft, train: {steps: 2, warmup_steps: 0}}
rows:
  proxy:
    task: {name: stories, split: train, seed: 7, size: 40}
    rollout: {num_prompts: 8, group_size: 4, max_tokens: 8, select: best_and_worst}
    objective: bradley_terry
    train: {steps: 2, num_minibatches: 2}
    eval: {every: 0}
  grpo: {recipe: rl/grpo, needs: proxy, eval: {num_kl_prompts: 4}}
best_of_n: {task: {name: stories, split: validation}, n: 5, samples: 4, max_tokens: 8}
seeds: 2
"""
STEPS = """\
start: tiny/sft
labelled: {task: {name: stories, split: train, size: 50}, n: 6, samples: 2}
rows:
  orm: {recipe: tiny/orm}
  prm: {needs: labelled, data: {batch_size: 2}, objective: process, train: {steps: 2}, eval: {every: 0}}
best_of_n: {task: stories}
seeds: 2
"""
RLHF = """\
start: {recipe: tiny/sft, train: {steps: 2, warmup_steps: 0}}
rows:
  proxy: {recipe: tiny/rm, train: {steps: 3}}
  judge: {recipe: tiny/rm, train: {steps: 4}}
  grpo: {recipe: rl/grpo, needs: proxy}
  dpo-files: {recipe: tiny/rm, objective: {name: dpo, beta: 0.1}, head: null}
head_to_head: {judge: judge, task: {name: stories, split: validation}, n: 8, samples: 2}
seeds: 2
"""
CHAIN = """\
rows:
  ppo: {recipe: rl/ppo, needs: [sft, rm]}
  sft: {recipe: tiny/sft, train: {steps: 3}}
  rm: {recipe: tiny/rm, needs: sft}
seeds: 1
"""


def trial_of(plan: SweepPlan, name: str) -> Any:
    return next(trial for trial in plan.trials if trial.name == name)


@pytest.mark.parametrize("text", [NEEDS, STEPS, RLHF, CHAIN, EXAMPLE.read_text()])
def test_trials_stand_behind_what_they_need_and_the_resolved_file_makes_the_same(tmp_path: Path, text: str) -> None:
    plan = load_text(tmp_path, text)
    seen: set[str] = set()
    for trial in plan.trials:
        assert set(trial.needs) <= seen
        seen.add(trial.name)
    again = load_text(tmp_path, plan.to_yaml())
    assert again.to_yaml() == plan.to_yaml()
    assert [trial.name for trial in again.trials] == [trial.name for trial in plan.trials]
    for one, other in zip(plan.trials, again.trials, strict=True):
        assert one.command == other.command
        assert not isinstance(one, Training) or one.recipe.fingerprint() == other.recipe.fingerprint()


def test_a_policy_is_rewarded_by_the_reward_model_of_its_seed_alone(tmp_path: Path) -> None:
    plan = load_text(tmp_path, NEEDS)
    names = ["proxy-seed{}", "grpo-seed{}", "proxy-seed{}-best-of-n"]
    assert [t.name for t in plan.trials] == ["start", *(name.format(seed) for seed in (0, 1) for name in names)]
    weights = str(tmp_path / "out" / "start" / "checkpoints" / "step-000002")
    for seed, policy, proxy in zip((0, 1), plan.policies, plan.scorers, strict=True):
        (reward,) = policy.recipe.rewards
        assert (reward.name, reward.weight) == ("reward_model", 1.0)
        assert reward.options["run"] == str(tmp_path / "out" / "cells" / f"proxy-seed{seed}")
        assert (policy.recipe.train.seed, policy.recipe.model.name) == (seed, weights)
        assert policy.needs == ("start", f"proxy-seed{seed}")
        assert (proxy.recipe.train.seed, proxy.recipe.model.name) == (seed, weights)
        assert [word.name for word in proxy.recipe.rewards] == ["correct"]


def test_a_row_begins_with_the_weights_of_the_policy_that_it_needs(tmp_path: Path) -> None:
    plan = load_text(tmp_path, CHAIN)
    assert [trial.name for trial in plan.trials] == ["sft-seed0", "rm-seed0", "ppo-seed0"]
    sft, rm, ppo = plan.trainings
    assert (rm.recipe.model.name, ppo.recipe.model.name) == (sft.weights, sft.weights)
    assert ppo.needs == ("sft-seed0", "rm-seed0")
    assert ppo.recipe.rewards[0].options["run"] == str(rm.folder)
    assert [row.name for row in load_text(tmp_path, CHAIN, rows=["rm"]).rows] == ["sft", "rm"]  # and what it needs


def test_a_reward_model_among_other_rewards_keeps_its_options(tmp_path: Path) -> None:
    rewards = "[{name: reward_model, run: runs/x, normalize: true, weight: 0.5}, {name: xml_format, weight: 0.1}]"
    plan = load_text(tmp_path, RLHF.replace("needs: proxy", f"needs: proxy, rewards: {rewards}"))
    model, form = trial_of(plan, "grpo-seed0").recipe.rewards
    assert (model.options["normalize"], model.weight, form.weight) == (True, 0.5, 0.1)
    assert model.options["run"].endswith("cells/proxy-seed0")


def test_best_of_n_is_an_ordinary_evaluation(tmp_path: Path) -> None:
    from posttrain.cli import parse

    trial = load_text(tmp_path, NEEDS).evaluations("best_of_n")[1]
    namespace = parse(list(trial.command))
    assert (namespace.command, namespace.limit, namespace.samples, namespace.max_tokens) == ("evaluate", 5, 4, 8)
    assert (namespace.seed, namespace.temperature, namespace.task) == (1, 1.0, ["stories"])
    assert namespace.overrides == [("task.split", '"validation"')]
    assert namespace.best_of == str(tmp_path / "out" / "cells" / "proxy-seed1")
    assert namespace.models == [str(tmp_path / "out" / "start" / "checkpoints" / "step-000002")]
    assert namespace.out == str(trial.folder)


def test_policies_are_compared_with_the_start_by_a_judge_that_they_never_met(tmp_path: Path) -> None:
    plan = load_text(tmp_path, RLHF)
    names = ["proxy", "judge", "grpo", "dpo-files"]
    own = [f"{{0}}-seed{seed}" for seed in (0, 1)]
    expected = ["start"]
    for seed in own:
        expected += [*(seed.format(name) for name in names), *(f"{seed}-head-to-head".format(n) for n in names[2:])]
    assert [trial.name for trial in plan.trials] == expected
    trial, trials = trial_of(plan, "grpo-seed1-head-to-head"), tmp_path / "out" / "cells"
    assert trial.needs == ("start", "grpo-seed1", "judge-seed1", "proxy-seed1")
    words = list(trial.command)
    assert plan.start is not None
    assert words[words.index("--against") + 1] == plan.start.weights
    assert (
        words[words.index("--judge") + 1] == f"{trials / 'judge-seed1'},{trials / 'proxy-seed1'}"
    )  # the judge decides
    assert trial_of(plan, "dpo-files-seed1").recipe.rewards == []
    some = load_text(tmp_path, RLHF, rows=["grpo"])
    assert sorted(row.name for row in some.rows) == ["grpo", "judge", "proxy"]
    assert load_text(tmp_path, RLHF, rows=["all"]).to_yaml() == plan.to_yaml()


def test_reward_models_of_steps_learn_from_labelled_answers(tmp_path: Path) -> None:
    plan = load_text(tmp_path, STEPS)
    names = ["labelled-seed{}", "orm-seed{}", "prm-seed{}", "orm-seed{}-best-of-n", "prm-seed{}-best-of-n"]
    assert [t.name for t in plan.trials] == ["start", *(name.format(seed) for seed in (0, 1) for name in names)]
    labelling = trial_of(plan, "labelled-seed1")
    assert labelling.last_file == tmp_path / "out" / "labelled" / "seed1.jsonl"
    assert "--best-of" not in labelling.command
    orm, prm = plan.scorers[2:]
    assert prm.needs == ("start", "labelled-seed1")
    assert prm.recipe.task.name == "preferences"
    options = prm.recipe.task.options
    assert (options["path"], options["step_separator"]) == (str(labelling.last_file), "")
    assert orm.needs == ("start",)  # the outcome model has a task of its own


@pytest.mark.parametrize(
    ("text", "old", "new", "message"),
    [
        (NEEDS, "n: 5", "m: 5", "mine.yaml:10: best_of_n.m"),
        (NEEDS, "bradley_terry", "dpo", "best_of_n"),
        (NEEDS, "rl/grpo", "tiny/sft", "mine.yaml:9: rows.grpo"),
        (NEEDS, "needs: proxy", "needs: proxy, rewards: correct", "rows.grpo.rewards"),
        (NEEDS, "num_kl_prompts: 4", "every: 0", "rows.grpo.eval"),
        (
            NEEDS,
            "eval: {num_kl",
            "rollout: {temperature: 0.7}, eval: {num_kl",
            "rows.grpo.rollout.temperature: 0.7 here",
        ),
        (NEEDS, "  proxy:\n", "  other: tiny/rm\n  proxy:\n", "best_of_n"),
        (NEEDS, "start: {", "start: {model: {trust_remote_code: true}, ", "start.model.trust_remote_code: a file"),
        (NEEDS, "  proxy:\n", "  proxy:\n    model: {init: {architecture: qwen3}}\n", "another run's weights"),
        (NEEDS, "  grpo:", "  start:", "may contain letters"),
        (STEPS, "needs: labelled", "needs: labelled, task: stories", "the labelled steps"),
        (STEPS, "start: tiny/sft\n", "", "labelled"),
        (RLHF, "judge: judge,", "judge: proxy,", "head_to_head.judge"),
        (RLHF, "judge: judge,", "judge: poxy,", "head_to_head.judge"),
        (CHAIN, "[sft, rm]", "[sft, rm, rmm]", "'rmm'"),
        ("study: best_of_n\n", "s", "s", "mine.yaml:1: study"),
        ("base: tiny/grpo\nmethods: {a: {}}\n", "m", "m", "mine.yaml:2: methods"),
    ],
)
def test_rows_that_cannot_be_are_refused(tmp_path: Path, text: str, old: str, new: str, message: str) -> None:
    assert old in text
    with pytest.raises(PosttrainError) as caught:
        load_text(tmp_path, text.replace(old, new, 1))
    assert message in str(caught.value)
