"""Dry runs, runs, sweeps and explanations say which options do nothing, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.api.training import inert_lines
from posttrain.cli import main
from posttrain.errors import UsageError
from posttrain.recipes.recipe import load_recipe
from posttrain.sweeps.file import training_recipe_names
from posttrain.sweeps.plan import load_sweep
from small_runs import Events, make_recipe, watched

LINE = "objective.clip_low, clip_high do nothing: one update per batch of answers"


def test_dry_run_says_which_options_do_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--train.num_minibatches", "1", "--train.ppo_epochs", "1", "--regularize.kl_estimator", "k2"]
    assert main(["train", "tiny/grpo", "--dry-run", *asked]) == 0
    said = capsys.readouterr().err
    assert LINE in said
    assert "regularize.kl_estimator does nothing: regularize.kl_coef is 0" in said
    assert main(["train", "tiny/grpo", "--dry-run", "--train.num_minibatches", "2"]) == 0
    assert "do nothing" not in capsys.readouterr().err


def test_run_says_which_options_do_nothing(tmp_path: Path) -> None:
    recipe = make_recipe("grpo", train={"steps": 1, "lr": 1e-3}, rollout={"max_tokens": 4})
    events = Events()
    watched(tmp_path, recipe, events)
    notices = [info["message"] for info in events.of("notice")]
    assert sum(LINE in message for message in notices) == 1
    assert set(inert_lines(recipe)) <= set(notices)


@pytest.mark.parametrize("name", training_recipe_names())
def test_line_of_shipped_recipe_names_key_and_reason(name: str) -> None:
    for line in inert_lines(load_recipe(name).resolve()):
        keys, colon, reason = line.partition(": ")
        assert "." in keys.split()[0]
        assert colon
        assert reason


@pytest.mark.parametrize(
    ("key", "values", "overrides", "reason"),
    [
        ("objective.clip_high", ["0.2", "0.28"], [("train.num_minibatches", "1")], "train.num_minibatches 1"),
        ("regularize.kl_estimator", ["k2", "k3"], [], "regularize.kl_coef is 0"),
        ("train.min_lr_ratio", ["0.1", "0.5"], [("train.schedule", "constant")], "train.schedule is constant"),
        ("train.save_every", ["500", "1000"], [], "120 steps"),
        ("rollout.max_rounds", ["2", "8"], [], "rollout.drop_uniform_groups is false"),
    ],
)
def test_sweep_over_key_that_does_nothing_is_refused(
    key: str, values: list[str], overrides: list[tuple[str, str]], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as refused:
        load_sweep("tiny/grpo", overrides, folder=tmp_path, over=(key, values))
    message = str(refused.value)
    assert message.startswith(f"--over {key}: ")
    assert reason in message


def test_sweep_over_key_that_acts_at_one_value_is_not_refused(tmp_path: Path) -> None:
    over = ("train.save_every", ["60", "500"])
    assert len(load_sweep("tiny/grpo", folder=tmp_path, over=over, num_seeds=1).rows) == 2
    clip = ("objective.clip_high", ["0.2", "0.28"])
    updates = [("train.num_minibatches", "2")]
    assert len(load_sweep("tiny/grpo", updates, folder=tmp_path, over=clip, num_seeds=1).rows) == 2


def test_sweep_over_key_that_does_nothing_ends_without_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--over", "objective.clip_high=0.2,0.28", "--train.num_minibatches", "1", "--dry-run"]
    assert main(["sweep", "tiny/grpo", *asked]) == 2
    said = capsys.readouterr().err
    assert "objective.clip_high" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("name", "when"),
    [
        ("clip_high", "multiple updates"),
        ("train.min_lr_ratio", "train.schedule is linear or cosine"),
        ("grpo", "multiple updates"),
        ("geometric_mask", "rollout.staleness"),
        ("eval", "eval.every is above 0"),
    ],
)
def test_explanation_says_when_option_acts(name: str, when: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", name]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "cts" in said
    assert when in said
