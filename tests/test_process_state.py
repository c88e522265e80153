"""What a reward leaves changed: named, put back, and refused where nothing can be put back."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from posttrain.consent import declare_code
from posttrain.engines.rollout import Attempt, build_grader
from posttrain.engines.scripted import ScriptedEngine
from posttrain.errors import RewardFailure
from posttrain.process_state import process_kept
from posttrain.recipes.sections import RewardWord
from posttrain.registry import find
from posttrain.types import Completion, Example, Message

assert ScriptedEngine  # registers the engine that the run below names


def changes() -> dict[str, Callable[[], object]]:
    return {
        "the working directory": lambda: os.chdir("/"),
        "whether gradients are computed": lambda: torch.set_grad_enabled(False),
        "torch's default type": lambda: torch.set_default_dtype(torch.float64),
        "torch's number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
        "torch's deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
        "standard output": lambda: setattr(sys, "stdout", None),
    }


@pytest.mark.parametrize("what", changes())
def test_what_was_changed_is_named_and_put_back(what: str) -> None:
    def state() -> list[object]:
        return [os.getcwd(), torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads(), sys.stdout,
                torch.are_deterministic_algorithms_enabled()]  # fmt: skip

    before = state()

    def change(*, and_fail: bool) -> None:
        with process_kept("reward 'r'"):
            changes()[what]()
            if and_fail:
                raise KeyError("its own error stays")

    with pytest.warns(UserWarning, match=f"^reward 'r' changed {what}; it was put back$"):
        change(and_fail=False)
    assert state() == before
    with pytest.warns(UserWarning, match=what), pytest.raises(KeyError):
        change(and_fail=True)
    assert state() == before


def test_what_leaves_nothing_changed_says_nothing(tmp_path: Path) -> None:
    own = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for turn in range(3):
            with process_kept("reward 'r'"):
                os.chdir(tmp_path)
                os.chdir("/")
                random.seed(0)
                torch.manual_seed(0)
                if own is not None:
                    own.close()
                own = (tmp_path / f"log-{turn}").open("w")
                os.chdir(start)
    assert own is not None
    own.close()


start = os.getcwd()


def test_a_file_that_is_not_its_own_cannot_be_closed_unseen(tmp_path: Path) -> None:
    ours = (tmp_path / "ours").open("w")
    with (
        pytest.raises(RewardFailure, match=r"reward 'r' closed .*/ours, which it had not opened"),
        process_kept("reward 'r'"),
    ):
        os.close(ours.fileno())
    with pytest.raises(OSError, match="Bad file descriptor"):
        ours.close()


def test_closed_standard_streams_are_open_again() -> None:
    script = """
import os, sys
from posttrain.process_state import process_kept
with process_kept("reward 'r'"):
    os.close(2); sys.stdout.close(); os.close(0)
print("out"); print("err", file=sys.stderr); sys.stdout.flush()
with process_kept("reward 'r'"):
    sys.stderr.close()
print("err again", file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "out\n")
    assert "reward 'r' changed standard input, standard output, standard error; it was put back" in done.stderr
    assert done.stderr.splitlines()[-1] == "err again"


def grade(function: Callable[..., object], weight: float, monkeypatch: pytest.MonkeyPatch) -> float:
    module = type(sys)("some_rewards")
    module.reward = function  # type: ignore[attr-defined]
    function.__module__ = "some_rewards"
    monkeypatch.setitem(sys.modules, "some_rewards", module)
    declare_code("some_rewards:reward")
    grader = build_grader(
        [RewardWord(name="some_rewards:reward", weight=weight)], find("template", "r1_zero").bind({})()
    )
    example = Example("a/1", (Message("user", "?"),), "2")
    return grader.grade([Attempt(example, "?", "2", Completion((1,), (-1.0,), "stop"))])[0].reward


@pytest.mark.parametrize("code", [0, 1, None, "bye"])
def test_a_reward_does_not_end_the_program(code: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RewardFailure, match=r"example 'a/1': the function raised SystemExit"):
        grade(lambda text: sys.exit(code), 1.0, monkeypatch)  # type: ignore[arg-type]


def test_control_c_in_a_reward_is_no_failure_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(text: str) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grade(stopped, 1.0, monkeypatch)


def test_rewards_that_cannot_be_averaged_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert grade(lambda text: 1e15, 1.0, monkeypatch) == 1e15
    for text in ("1e308", "-1e308", "1.1e15", str(sys.float_info.max)):
        with pytest.raises(RewardFailure, match=r"example 'a/1': the function returned .*beyond 1e\+15 nothing can be"):
            grade(eval(f"lambda text: {text}"), 0.0, monkeypatch)
    with pytest.raises(RewardFailure, match=r"the weighted sum of the rewards is 1e\+16; .*beyond 1e\+15"):
        grade(lambda text: 1e15, 10.0, monkeypatch)
