"""A policy that is trained against a reward model: the scores, the scale, and what is refused."""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path

import pytest

from closeness import approx
from posttrain import registry
from posttrain.errors import RecipeError, UsageError
from posttrain.evaluation.reward_models import scoring as module
from posttrain.evaluation.reward_models.scoring import load_reward_model
from posttrain.graders.rewards import bind_reward
from posttrain.recipes.recipe import load_recipe
from posttrain.types import Example, Message
from refusing import refuses
from small_runs import one_layer_recipe, run, steps_of

EXAMPLE = Example("e", (Message("user", "What is 1 plus 4?"),), "5")
TEXTS = ["<think>1 + 4 = 5. </think> <answer> 5 </answer>", "<think>no", "<think>" + "1 + 4 = 5. " * 300]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The run of a small reward model, trained on pairs of sums for a few steps."""
    folder = tmp_path_factory.mktemp("judge")
    recipe = one_layer_recipe("judged", train={"steps": 3, "lr": 3e-3}, eval={"tasks": ["small_runs:judged_sums"]})
    run(folder, recipe)
    (folder / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    return str(folder)


def word(judge: str, **options):
    return bind_reward(registry.find("reward", "reward_model"), {"run": judge, **options}, "rewards.0")


def values(judge: str, texts: list[str], finish: str = "stop", **options) -> list[float]:
    given = [{"example": EXAMPLE, "text": text, "finish": finish} for text in texts]
    return [found.value for found in word(judge, **options).grade(given, ["e"] * len(texts))]


def test_the_reward_is_the_models_score(judge: str) -> None:
    recipe = load_recipe(f"{judge}/recipe.yaml").resolve()
    model = load_reward_model(recipe, Path(judge) / "checkpoints", label="judge")
    assert values(judge, TEXTS[:2]) == model.score([EXAMPLE] * 2, TEXTS[:2], ["stop"] * 2)
    assert values(judge, TEXTS[:2], "length") == model.score([EXAMPLE] * 2, TEXTS[:2], ["length"] * 2)
    assert values(judge, TEXTS[:2], "length") != values(judge, TEXTS[:2])
    assert word(judge)({"example": EXAMPLE, "text": TEXTS[0], "finish": "stop"}) == approx(
        values(judge, TEXTS[:2])[0], abs=1e-5
    )


def test_what_cannot_be_scored_gets_the_lowest_score_and_is_counted(judge: str) -> None:
    given = [{"example": EXAMPLE, "text": text, "finish": "stop"} for text in TEXTS]
    found = word(judge).grade(given, ["e"] * 3)
    assert [dict(one.info) for one in found] == [{"unscored": 0.0}, {"unscored": 0.0}, {"unscored": 1.0}]
    assert found[2].value == min(found[0].value, found[1].value)


def test_normalized_scores_of_the_held_out_answers_have_mean_0_and_deviation_1(judge: str) -> None:
    mean, std = module.held_out_scale(judge)
    model = module.open_run(judge)
    task = registry.find("task", "small_runs:judged_sums").bind({}, "task")()
    scores = [s for e in task.examples for s in model.score_responses([e, e], e.responses)]
    assert statistics.fmean((s - mean) / std for s in scores) == approx(0.0, abs=1e-5)
    assert statistics.stdev((s - mean) / std for s in scores) == approx(1.0, abs=1e-5)
    plain, normal = values(judge, TEXTS[:2]), values(judge, TEXTS[:2], normalize=True)
    assert normal == approx([(s - mean) / std for s in plain])


def test_a_turn_that_the_policy_ended_has_its_end_token_however_the_episode_ended(judge: str) -> None:
    """Only a turn that ran out of tokens is scored as one that was cut off."""
    ended, cut = values(judge, TEXTS[:2]), values(judge, TEXTS[:2], "length")
    assert all(abs(a - b) > 1e-6 for a, b in zip(ended, cut, strict=True))
    for finish in ("ended", "out_of_turns", "tool_failed", "environment_failed"):
        assert values(judge, TEXTS[:2], finish) == ended


def test_a_policy_trains_against_it_and_a_better_judge_is_not_slipped_in(judge: str, tmp_path: Path) -> None:
    own = tmp_path / "judge"
    shutil.copytree(judge, own)  # the other tests' one stays as it is
    judge, tmp_path = str(own), tmp_path / "policy"
    rewards = [{"name": "reward_model", "run": judge}, {"name": "correct", "weight": 0.0}]
    recipe = one_layer_recipe("grpo", rewards=rewards, train={"steps": 2, "lr": 1e-3})
    run(tmp_path, recipe)
    steps = steps_of(tmp_path)
    assert len(steps) == 2
    assert all(step["reward"] == approx(step["reward/reward_model"]) for step in steps)
    assert {step["reward/unscored"] for step in steps} == {0.0}
    longer = one_layer_recipe("grpo", rewards=rewards, train={"steps": 3, "lr": 1e-3})
    run(Path(judge), one_layer_recipe("judged", train={"steps": 4, "lr": 3e-3}), resume=True)
    with refuses(UsageError, "rewards"):
        run(tmp_path, longer, resume=True)


def test_what_cannot_be_a_judge_is_refused_before_anything_is_sampled(judge: str, tmp_path: Path) -> None:
    with refuses(UsageError, "not a run folder"):
        word(str(tmp_path / "nowhere"))
    policy = one_layer_recipe("sft", train={"steps": 1})
    (tmp_path / "recipe.yaml").write_text(policy.to_yaml(), encoding="utf-8")
    with refuses(UsageError, "trained a policy"):
        word(str(tmp_path))
    with refuses(RecipeError, "'normalize'"):
        word(judge, normalise=True)
