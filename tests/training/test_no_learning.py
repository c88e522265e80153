"""A run that cannot learn says so while it trains, in ``runs show``, in its report and in its sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.cli import main
from small_runs import Events, one_layer_recipe, steps_of, watched

# The base model knows no answer format, so that every reward is 0.
BLIND = ("--model.name", "tiny", "--rollout.num_prompts", "2", "--rollout.group_size", "2", "--rollout.max_tokens", "8")
SHORT = ("--train.steps", "3", "--eval.every", "0", "--task.size", "64")
WARNING = "in the first 3 batches rewards were equal within every group"


@pytest.mark.usefixtures("no_curves")
def test_train_base_model_without_format_warns_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--runs-dir", str(tmp_path))
    assert main(["train", "tiny/grpo", *BLIND, *SHORT, "--run", "blind", *where]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"note: uniform_groups: {WARNING}" in shown
    assert "after SFT on this format (tiny-sft, or your run)" in shown
    assert main(["runs", "show", "blind", *where]) == 0
    assert WARNING in " ".join(capsys.readouterr().out.split())
    assert WARNING in (tmp_path / "blind" / "report.html").read_text()


def test_train_rate_too_small_for_the_weights_warns_once(tmp_path: Path) -> None:
    events = Events()
    watched(tmp_path, one_layer_recipe("sft", train={"steps": 12, "lr": 1e-30}, data={"batch_size": 1}), events)
    message = [info["message"] for info in events.of("notice") if "weights_moved" in info["message"]]
    assert message == [
        "weights_moved: no weight has moved in 10 steps. The learning rate of 1e-30 is too small for this weight "
        "dtype: raise train.lr, or set model.dtype fp32"
    ]
    assert ["weights_moved" in step for step in steps_of(tmp_path)] == [True] * 10 + [False] * 2


def test_train_run_that_learns_does_not_warn(tmp_path: Path) -> None:
    events = Events()
    watched(tmp_path, one_layer_recipe("grpo"), events)
    assert not [info for info in events.of("notice") if "learn" in info["message"]]
    assert {step["weights_moved"] for step in steps_of(tmp_path)} == {1.0}


@pytest.mark.slow
def test_sweep_of_a_key_without_effect_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    over = ("--over", "train.lr=1e-5,1e-4", "--seeds", "1", "--jobs", "1", "--run", "s", "--runs-dir", str(tmp_path))
    assert main(["sweep", "tiny/grpo", *over, *BLIND, *SHORT]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "all rows have equal metrics for every seed" in shown
    assert WARNING in shown
