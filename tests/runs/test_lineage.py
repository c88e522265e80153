"""Runs and the runs that they came from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from fake_runs import make_run, make_sweep

from posttrain.runs.listing import Link, find_links, steps_in_use


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An SFT run, and a reward model trained from it; the working directory is the folder above."""
    folder = tmp_path / "runs"
    make_run(folder, "sft", best=2)
    make_run(folder, "rm", model="runs/sft", checkpoint_state={"model": "step-000002"})
    monkeypatch.chdir(tmp_path)
    return folder


def link_of(root: Path, child: str, **recipe: Any) -> list[Link]:
    make_run(root, child, recipe=recipe, steps=())
    return [link for link in find_links(root) if link.child == child]


@pytest.mark.parametrize(
    ("value", "step"),
    [
        ("runs/sft", None),
        ("runs/../runs/sft", None),
        ("runs/sft/checkpoints/step-000003", 3),
        ("runs/sft/checkpoints/best", 2),
    ],
)
def test_every_way_to_name_a_run(root: Path, value: str, step: int | None) -> None:
    value = value.format(root=root)
    assert link_of(root, "x", model={"name": value}) == [Link("x", "start", "sft", step)]


@pytest.mark.parametrize("value", ["tiny", "Qwen/Qwen3-0.6B", "../elsewhere/sft", "runs/../sft"])
def test_what_is_no_run_here(root: Path, value: str) -> None:
    assert link_of(root, "x", model={"name": value}) == []


def test_roles_come_from_the_key(root: Path) -> None:
    rewards = [{"name": "correct"}, {"name": "reward_model", "run": "runs/rm"}]
    found = link_of(
        root, "ppo", model={"name": "runs/sft"}, rewards=rewards, teacher={"name": "runs/rm/checkpoints/best"}
    )
    assert [(link.role, link.parent) for link in found] == [("start", "sft"), ("reward", "rm"), ("teacher", "rm")]


def test_any_value_that_leads_into_a_run_counts(root: Path) -> None:
    (link,) = link_of(root, "x", task={"name": "jsonl", "path": "runs/sft/evaluation/rows.jsonl"})
    assert (link.role, link.parent, link.step) == ("data", "sft", None)


def test_a_parent_that_was_deleted_is_remembered(root: Path) -> None:
    (link,) = link_of(root, "x", model={"name": "runs/gone/checkpoints/step-000007"})
    assert (link.parent, link.step, link.is_there) == ("gone", 7, False)


def test_the_childs_checkpoints_remember_which_step_it_was(root: Path) -> None:
    (link,) = find_links(root)
    assert (link.child, link.parent, link.step) == ("rm", "sft", 2)
    state = {"rewards": {"runs/rm": "step-000003"}, "model": "step-000001"}
    rewards = [{"name": "reward_model", "run": "runs/rm"}]
    make_run(root, "ppo", model="runs/sft", recipe={"rewards": rewards}, checkpoint_state=state)
    assert {link.parent: link.step for link in find_links(root) if link.child == "ppo"} == {"sft": 1, "rm": 3}


def test_from_another_working_directory(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    assert [(link.child, link.parent) for link in find_links(root)] == [("rm", "sft")]
    assert [(link.child, link.parent) for link in find_links("../runs")] == [("rm", "sft")]
    os.symlink(root, tmp_path / "other-name")
    assert [(link.child, link.parent) for link in find_links(tmp_path / "other-name")] == [("rm", "sft")]


def test_sweeps_are_families(root: Path) -> None:
    make_sweep(root, "sweep-x")
    links = [link for link in find_links(root) if link.parent == "sweep-x/start"]
    assert [link.child for link in links] == ["sweep-x/cells/dapo-seed0", "sweep-x/cells/grpo-seed0"]
    assert {link.step for link in links} == {2}


def test_steps_in_use(root: Path) -> None:
    make_run(root, "x", model="runs/sft/checkpoints/step-000003", steps=())
    make_run(root, "y", model="runs/rm", steps=())
    links = find_links(root)
    assert steps_in_use(root, "sft", links) == {2: "rm", 3: "x"}
    assert steps_in_use(root, "rm", links) == {3: "y"}  # no best is marked, so the newest is meant
    assert steps_in_use(root, "y", links) == {}
