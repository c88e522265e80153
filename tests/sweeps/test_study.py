"""Study files: what they resolve to, what they refuse, and that the resolved file makes the same parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.errors import PosttrainError, RecipeError, UsageError
from posttrain.recipes.document import recipe_names, study_names
from posttrain.recipes.recipe import load_recipe
from posttrain.sweeps.compare import training_recipe_names
from posttrain.sweeps.plan import Labelling, Sampling, Training
from posttrain.sweeps.study import StudyPlan, load_study

TEXT = """\
study: overoptimization
description: A small one.
start: {recipe: tiny/sft, train: {steps: 2, warmup_steps: 0}}
reward_models:
  proxy:
    task: {name: stories, split: train, seed: 7, size: 40}
    rollout: {prompts: 8, group: 4, max_tokens: 8, select: best_and_worst}
    objective: bradley_terry
    train: {steps: 2, minibatches: 2}
    eval: {every: 0}
policies:
  grpo: rl/grpo
best_of_n: {task: {name: stories, split: validation}, n: 5, samples: 4, max_tokens: 8}
seeds: 2
"""
DRIFT = ("policies.grpo.eval.drift_prompts", "4")
STEPS = """\
study: best_of_n
start: tiny/sft
labelled: {task: {name: stories, split: train, size: 50}, n: 6, samples: 2}
reward_models:
  orm: {recipe: tiny/orm}
  prm: {data: {batch: 2}, objective: process, train: {steps: 2}, eval: {every: 0}}
best_of_n: {task: stories}
seeds: 2
"""


@pytest.fixture
def study(tmp_path: Path) -> Callable[..., StudyPlan]:
    def load(text: str, *overrides: tuple[str, str], **wanted: Any) -> StudyPlan:
        (tmp_path / "mine.yaml").write_text(text)
        return load_study(str(tmp_path / "mine.yaml"), overrides, folder=tmp_path / "out", **wanted)

    return load


def test_parts_stand_behind_what_they_need(study, tmp_path: Path) -> None:
    plan = study(TEXT, DRIFT)
    assert [part.name for part in plan.parts] == [
        "start",
        "proxy-seed0",
        "grpo-seed0",
        "proxy-seed0-best-of-4",
        "proxy-seed1",
        "grpo-seed1",
        "proxy-seed1-best-of-4",
    ]
    seen: set[str] = set()
    for part in plan.parts:
        assert set(part.needs) <= seen
        seen.add(part.name)
    assert plan.parts[2].needs == ("start", "proxy-seed0")
    assert plan.parts[6].needs == ("start", "proxy-seed1")


def test_a_policy_is_rewarded_by_the_proxy_of_its_seed_alone(study, tmp_path: Path) -> None:
    plan = study(TEXT, DRIFT)
    weights = str(tmp_path / "out" / "start" / "checkpoints" / "step-000002")
    for seed in (0, 1):
        policy = plan.trainings("policies")[seed]
        (reward,) = policy.recipe.rewards
        assert (reward.name, reward.weight) == ("reward_model", 1.0)
        assert reward.options["run"] == str(tmp_path / "out" / "cells" / f"proxy-seed{seed}")
        assert (policy.recipe.train.seed, policy.recipe.model.name) == (seed, weights)
        assert policy.folder == tmp_path / "out" / "cells" / f"grpo-seed{seed}"
        proxy = plan.trainings("reward_models")[seed].recipe
        assert (proxy.train.seed, proxy.model.name) == (seed, weights)
        assert [word.name for word in proxy.rewards] == ["correct"]
    assert plan.start.recipe.model.name == "tiny"


def test_best_of_n_is_an_ordinary_evaluation(study, tmp_path: Path) -> None:
    from posttrain.cli import parse

    part = study(TEXT, DRIFT).choosing[1]
    namespace = parse(part.words(resume=False))
    assert (namespace.command, namespace.n, namespace.samples, namespace.max_tokens) == ("evaluate", 5, 4, 8)
    assert (namespace.seed, namespace.temperature, namespace.task) == (1, 1.0, ["stories"])
    assert namespace.overrides == [("task.split", '"validation"')]
    assert namespace.best_of == str(tmp_path / "out" / "cells" / "proxy-seed1")
    assert namespace.models == [str(tmp_path / "out" / "start" / "checkpoints" / "step-000002")]
    assert namespace.out == str(part.folder)


@pytest.mark.parametrize("text", [TEXT.replace("rl/grpo", "{recipe: rl/grpo, eval: {drift_prompts: 4}}"), STEPS])
def test_the_resolved_file_makes_the_same_parts(study, tmp_path: Path, text: str) -> None:
    plan = study(text)
    again = study(plan.to_yaml())
    assert [p.name for p in again.parts] == [p.name for p in plan.parts]
    for one, other in zip(plan.parts, again.parts, strict=True):
        if isinstance(one, Training):
            assert isinstance(other, Training)
            assert one.recipe.fingerprint() == other.recipe.fingerprint()
        else:
            assert one == other
    resolved = yaml.safe_load(plan.to_yaml())
    assert "rewards" not in resolved.get("policies", {}).get("grpo", {})
    assert resolved["seeds"] == 2


def test_reward_models_of_steps_learn_from_labelled_answers(study, tmp_path: Path) -> None:
    plan = study(STEPS)
    names = ["labelled-seed{}", "orm-seed{}", "prm-seed{}", "orm-seed{}-best-of-64", "prm-seed{}-best-of-64"]
    assert [part.name for part in plan.parts] == ["start", *(name.format(seed) for seed in (0, 1) for name in names)]
    labelling = next(part for part in plan.parts if part.name == "labelled-seed1")
    assert isinstance(labelling, Labelling)
    assert labelling.target == tmp_path / "out" / "labelled" / "seed1.jsonl"
    assert "--best-of" not in labelling.command
    orm, prm = plan.trainings("reward_models")[2:]
    assert prm.needs == ("start", "labelled-seed1")
    assert prm.recipe.task.name == "preferences"
    assert prm.recipe.task.options["path"] == str(labelling.target)
    assert prm.recipe.task.options["step_separator"] == ""
    assert orm.needs == ("start",)  # the outcome model has a task of its own
    assert all(isinstance(part, Sampling) for part in plan.choosing)


def test_overrides_reach_every_part(study) -> None:
    changes = [("seeds", "1"), ("best_of_n.samples", "8"), ("start.train.steps", "3"), DRIFT]
    plan = study(TEXT, *changes, ("reward_models.proxy.rollout.prompts", "16"))
    assert len(plan.trainings("reward_models")) == 1
    assert plan.choosing[0].name == "proxy-seed0-best-of-8"
    assert plan.start.recipe.train.steps == 3
    assert plan.trainings("policies")[0].recipe.model.name.endswith("step-000003")
    rollout = plan.trainings("reward_models")[0].recipe.rollout
    assert rollout is not None
    assert rollout.prompts == 16
    assert len(study(TEXT, DRIFT, num_seeds=3).trainings("policies")) == 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds: 2", "sedes: 2", "mine.yaml:14: sedes: a study has no key 'sedes'. Did you mean 'seeds'?"),
        (
            "n: 5",
            "m: 5",
            "mine.yaml:13: best_of_n.m: section 'best_of_n' has no key 'm'. Known keys: task, n, samples, max_tokens, ",
        ),
        ("study: overoptimization", "extends: tiny/grpo\nstudy: overoptimization", "a study has no key 'extends'."),
        ("seeds: 2", "seeds: 0", "mine.yaml:14: seeds"),
        ("study: overoptimization", "study: other", "mine.yaml:1: study"),
        ("study: overoptimization", "# none", "this is no study"),
        ("study: overoptimization", "study: best_of_n", "a best_of_n study trains no policies"),
        ("bradley_terry", "dpo", "mine.yaml:5: reward_models.proxy: objective 'dpo' trains no reward model"),
        ("bradley_terry", "bradley_tery", "bradley_tery"),
        ("grpo: rl/grpo", "grpo: tiny/sft", "a policy learns from answers that it samples"),
        ("grpo: rl/grpo", "grpo: rl/grpo\n  proxy: rl/ppo", "mine.yaml:13: policies.proxy: a reward model and"),
        ("grpo: rl/grpo", "a b: rl/grpo", "a policy's name is made of letters"),
        ("grpo: rl/grpo", "grpo: {recipe: rl/grpo, rewards: correct}", "the reward of a policy is the study's"),
        ("grpo: rl/grpo", "grpo: rl/grpo", "policies.grpo.eval: give every and drift_prompts"),
        ("  proxy:\n", "  other: tiny/rm\n  proxy:\n", "has one reward model"),
        ("size: 40}", "size: 40, colour: red}", "colour"),
        (
            "start: {",
            "start: {model: {trust_remote_code: true}, ",
            "mine.yaml:3: start.model.trust_remote_code: a file cannot allow the Python of a model to run",
        ),
        (
            "grpo: rl/grpo",
            "grpo: {recipe: rl/grpo, rollout: {temperature: 0.7}, eval: {drift_prompts: 4}}",
            "mine.yaml:12: policies.grpo.rollout.temperature: 0.7 here and 1.0 in best_of_n",
        ),
    ],
)
def test_what_is_refused(study, old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(PosttrainError) as caught:
        study(TEXT.replace(old, new, 1))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("policy.grpo.train.lr", "1", "command line: policy: a study has no key 'policy'. Did you mean 'policies'?"),
        ("policies.grop.train.lr", "1", "has no policy 'grop'. Did you mean 'grpo'?"),
        ("policies.grpo.train.lrr", "1", "command line: policies.grpo.train.lrr"),
    ],
)
def test_overrides_of_what_is_not_there(study, key: str, value: str, message: str) -> None:
    with pytest.raises((UsageError, RecipeError)) as caught:
        study(TEXT, (key, value))
    assert message.replace("command line: policies.grpo.", "") in str(caught.value).replace("policies.grpo.", "")


def test_studies_that_ship_resolve_and_are_no_recipes_to_train(tmp_path: Path) -> None:
    assert set(study_names()) == {name for name in recipe_names() if name.startswith("study/")}
    assert set(study_names()) == {"study/overoptimization", "study/prm-vs-orm"}
    assert not set(study_names()) & set(training_recipe_names())
    for name in study_names():
        plan = load_study(name.removeprefix("study/"), folder=tmp_path)
        assert plan.num_seeds == 3
        assert len(plan.description) > 100
        with pytest.raises(RecipeError, match="run it with: posttrain study"):
            load_recipe(name)
