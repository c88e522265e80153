from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.errors import DataError, UsageError
from posttrain.recipes.recipe import Recipe
from posttrain.runs.directory import RunDirectory, RunStatus, check_run_name, name_of_recipe, new_status
from refusing import refuses

MakeRecipe = Callable[..., Recipe]


def test_status_comes_back_and_is_replaced_whole(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.read_status() is None
    status = RunStatus("failed", 3, 10, 4711, "here", 12.5, "NonFiniteLoss: at step 4")
    status = replace(
        status, primary_metric="reward", held_out={"reward": 0.75, "kl_initial": 2.0}, evaluation="hh/validation"
    )
    directory.write_status(RunStatus("running", 2, 10, 4711, "here", 11.5))
    directory.write_status(status)
    assert directory.read_status() == status
    assert os.listdir(tmp_path) == ["status.json"]
    again = new_status(20, status)
    assert (again.state, again.step, again.steps, again.message) == ("running", 3, 20, None)
    assert (again.primary_metric, again.held_out, again.pid) == ("reward", status.held_out, os.getpid())


def test_changed_keys_are_dotted_with_both_values(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    directory = RunDirectory(tmp_path)
    directory.write_recipe(make_recipe())
    assert directory.read_recipe() == make_recipe().dump()
    assert directory.changed_keys(make_recipe()) == {}
    other = make_recipe(lr=2e-3, max_grad_norm=None)
    other.objective = type(other.objective).model_validate({"name": "reinforce"})
    changed = directory.changed_keys(other)
    assert changed["train.lr"] == (1e-3, 2e-3)
    assert changed["train.max_grad_norm"] == (1.0, None)
    assert changed["objective.name"] == ("grpo", "reinforce")
    assert {key.partition(".")[0] for key in changed} == {"train", "objective"}


def test_a_recipe_stored_by_another_version_is_compared_with_its_defaults_or_as_it_is(
    tmp_path: Path, make_recipe: MakeRecipe
) -> None:
    directory = RunDirectory(tmp_path)
    directory.write_recipe(make_recipe())
    text = directory.recipe_path.read_text()
    assert "  warmup_steps: 0\n" in text
    directory.recipe_path.write_text(text.replace("  warmup_steps: 0\n", ""))
    assert directory.changed_keys(make_recipe()) == {}
    assert directory.changed_keys(make_recipe(warmup_steps=5)) == {"train.warmup_steps": (0, 5)}
    directory.recipe_path.write_text(text + "retired: 5\n")
    assert directory.changed_keys(make_recipe()) == {"retired": (5, None)}
    directory.recipe_path.write_text("- no mapping\n")
    with refuses(DataError, "not a mapping"):
        directory.changed_keys(make_recipe())


def test_environment_keeps_every_start(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.read_environment() == {}
    directory.write_environment("tiny/grpo", "abc")
    directory.write_environment("other-name", "def")
    environment = directory.read_environment()
    assert environment["recipe"] == "tiny/grpo"
    assert [start["fingerprint"] for start in environment["starts"]] == ["abc", "def"]
    start = environment["starts"][0]
    assert environment["created"] == start["started"]
    assert start["versions"]["python"] == ".".join(str(n) for n in sys.version_info[:3])
    assert start["versions"]["torch"].startswith("2.")
    assert start["hardware"]["cpus"] == os.cpu_count()
    assert start["command"] == sys.argv


def test_git_state_is_that_of_the_checkout(tmp_path: Path) -> None:
    from posttrain.store.environment import git_state

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@x"]
        done = subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], capture_output=True, check=True)
        return done.stdout.decode().strip()

    assert git_state(tmp_path) is None
    git("init", "-q")
    (tmp_path / "code.py").write_text("x = 1\n")
    git("add", "code.py")
    git("commit", "-qm", "first")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "changed_files": 0}
    (tmp_path / "code.py").write_text("x = 2\n")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "changed_files": 1}
    (tmp_path / "installed").mkdir()
    assert git_state(tmp_path / "installed") is None  # not tracked: an environment inside a checkout


def test_names_of_runs() -> None:
    names = {"tiny/grpo": "tiny-grpo", "/some/where/my recipe.yaml": "my-recipe", "../x.yml": "x", "☃": "run"}
    for recipe_name, name in names.items():
        assert name_of_recipe(recipe_name) == name
        assert check_run_name(name) == name
    for name in ("", "..", "a/b", ".hidden", "-x", "a\n"):
        with refuses(UsageError, "--run"):
            check_run_name(name)


def test_log_key_of_the_environment_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_API_KEY", "sk-0123456789")
    monkeypatch.setenv("SHORT_TOKEN", "abc")
    directory = RunDirectory(tmp_path)
    directory.log("failed: AuthenticationError: sk-0123456789 is no key, abc is short")
    status = RunStatus("failed", 1, 2, os.getpid(), "lab", 5.0, message="AuthenticationError: sk-0123456789 is no key")
    directory.write_status(status)
    assert directory.read_status() == replace(status, message="AuthenticationError: *** is no key")
    assert directory.log_path.read_text().endswith("AuthenticationError: *** is no key, abc is short\n")
