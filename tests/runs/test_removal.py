"""Deleting and pruning: what goes, what stays, what is refused, and what a kill in between leaves."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from fake_runs import add_checkpoint, make_run, make_sweep, snapshot

from posttrain.errors import RunConflict, UsageError
from posttrain.runs import removal
from posttrain.runs.directory import lock_run, run_names
from posttrain.runs.listing import find_links
from posttrain.runs.paths import locate
from posttrain.runs.removal import check_steps, check_unused, delete, plan_prune, prune, refuse_live
from posttrain.store.checkpoint_files import best_step, checkpoint_steps, verify
from refusing import refuses


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_a_run_is_deleted_with_all_that_is_in_it_and_its_links_are_not_followed(root: Path, tmp_path: Path) -> None:
    folder, outside = make_run(root, "a"), tmp_path / "outside"
    make_run(root, "b")
    make_run(outside, "data")
    (tmp_path / "file").write_text("precious")
    os.symlink(outside, folder / "data")
    os.symlink(tmp_path / "file", folder / "rollouts.db")
    os.symlink(outside / "data" / "checkpoints", folder / "checkpoints" / "linked")
    os.link(tmp_path / "file", folder / "hard")
    before = [snapshot(outside), snapshot(root / "b")]
    delete(root, locate(root, "a"))
    assert os.listdir(root) == ["b"]
    assert [snapshot(outside), snapshot(root / "b")] == before
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_run_in_which_a_process_works_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch, is_seen: bool) -> None:
    """Also one that is resumed between the check and the deletion."""
    make_run(root, "a")
    place = locate(root, "a")
    before = snapshot(root)
    if not is_seen:
        monkeypatch.setattr(removal, "refuse_live", lambda *_: None)
    with lock_run(root / "a"):
        with refuses(RunConflict, "process is using", "Nothing was changed"):
            delete(root, place)
        with refuses(RunConflict, "process is using"):
            prune(root, place, [1])
    assert snapshot(root) == before


@pytest.mark.parametrize("held", ["sweep-x", "sweep-x/cells/grpo-seed0", "sweep-x/start"])
def test_a_sweep_at_work_is_refused_with_all_its_runs(root: Path, held: str) -> None:
    make_sweep(root, "sweep-x")
    with lock_run(root / held):
        for name in {"sweep-x", held}:
            with refuses(RunConflict, "process is using"):
                refuse_live(root, locate(root, name))
        if held == "sweep-x":
            with pytest.raises(RunConflict):
                delete(root, locate(root, "sweep-x/cells/dapo-seed0"))


def test_a_sweep_is_deleted_whole_and_a_trial_alone(root: Path) -> None:
    make_sweep(root, "sweep-x")
    make_sweep(root, "sweep-y")
    delete(root, locate(root, "sweep-x"))
    delete(root, locate(root, "sweep-y/cells/dapo-seed0"))
    assert os.listdir(root) == ["sweep-y"]
    assert run_names(root / "sweep-y" / "cells") == ["grpo-seed0"]


def test_what_other_runs_stand_on_is_found(root: Path) -> None:
    make_run(root, "sft")
    make_run(root, "grpo", model="runs/sft")
    make_run(root, "longer", model="runs/grpo/checkpoints/step-000002")
    named = [locate(root, name) for name in ("sft", "grpo", "longer")]
    assert [(link.child, link.parent) for link in check_unused(root, named[:1])] == [("grpo", "sft")]
    assert [(link.child, link.parent) for link in check_unused(root, named[:2])] == [("longer", "grpo")]
    assert check_unused(root, named[2:]) == check_unused(root, named) == []
    make_sweep(root, "sweep-x")
    assert check_unused(root, [locate(root, "sweep-x")]) == []
    assert len(check_unused(root, [locate(root, "sweep-x/start")])) == 2


def delete_and_die(root: Path, module: ModuleType, name: str, when: str) -> int:
    """The exit code of a process that is killed before or after it calls a function in a deletion."""
    original: Callable[..., object] = getattr(module, name)

    def deadly(*arguments: object, **options: object) -> None:
        if when == "after":
            original(*arguments, **options)
        os.kill(os.getpid(), 9)

    child = os.fork()
    if child == 0:
        try:
            setattr(module, name, deadly)
            delete(root, locate(root, "a"))
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    ("module", "function", "when", "gone"),
    [(os, "rename", "before", False), (os, "rename", "after", True), (removal, "remove_tree", "before", True)],
)
def test_a_kill_leaves_a_whole_run_or_none_and_the_next_deletion_the_rest(
    root: Path, tmp_path: Path, module: ModuleType, function: str, when: str, gone: bool
) -> None:
    make_run(root, "a")
    make_run(root, "b")
    make_run(tmp_path, "outside")
    os.symlink(tmp_path / "outside", root / ".deleting-link")
    before = snapshot(root / "a")
    assert delete_and_die(root, module, function, when) == -9
    assert run_names(root) == (["b"] if gone else ["a", "b"])
    assert len(list(root.glob(".deleting-a-*"))) == (1 if gone else 0)
    if not gone:
        assert snapshot(root / "a") == before
    delete(root, locate(root, "b"))
    assert sorted(os.listdir(root)) == [".deleting-link", *([] if gone else ["a"])]
    assert (tmp_path / "outside" / "recipe.yaml").exists()


@pytest.mark.parametrize(
    ("keep", "best", "stay"),
    [
        (("best", "last"), 2, [2, 5]),
        (("best",), 2, [2]),
        (("2",), 1, [1, 4, 5]),
        (("best", "2"), 5, [4, 5]),
        (("best",), None, [5]),
    ],
)
def test_which_checkpoints_stay(
    root: Path, tmp_path: Path, keep: tuple[str, ...], best: int | None, stay: list[int]
) -> None:
    folder = make_run(root, "a", steps=range(1, 6), best=best) / "checkpoints"
    before = snapshot(root)
    steps = plan_prune(root, locate(root, "a"), keep)
    assert steps == sorted({1, 2, 3, 4, 5} - set(stay))
    assert snapshot(root) == before
    prune(root, locate(root, "a"), steps)
    assert checkpoint_steps(folder) == stay
    for step in stay:
        verify(folder / f"step-{step:06d}", step)
    assert best_step(folder) == (best if best in stay else None)
    assert (folder / "best").is_symlink() == (best in stay)


def test_checkpoints_on_which_other_runs_stand_stay(root: Path) -> None:
    make_run(root, "sft", steps=range(1, 6), best=5)
    make_run(root, "by-path", model="runs/sft/checkpoints/step-000001")
    make_run(root, "by-memory", model="runs/sft", checkpoint_state={"model": "step-000002"})
    reward = {"name": "reward_model", "run": "runs/sft"}
    make_run(root, "by-reward", recipe={"rewards": [reward]}, checkpoint_state={"rewards": {"runs/sft": "step-000003"}})
    assert plan_prune(root, locate(root, "sft"), ("last",), find_links(root)) == [4]
    make_run(root, "before-its-first-step", model="runs/sft", steps=())
    os.unlink(root / "sft" / "checkpoints" / "best")
    os.symlink("step-000004", root / "sft" / "checkpoints" / "best")
    assert plan_prune(root, locate(root, "sft"), ("last",), find_links(root)) == []
    with refuses(RunConflict, "--force"):
        check_steps(root, locate(root, "sft"), [4], find_links(root))


def test_delete_a_single_checkpoint_that_nothing_needs(root: Path) -> None:
    folder = make_run(root, "a", steps=range(1, 6), best=2) / "checkpoints"
    with refuses(UsageError, "--step"):
        check_steps(root, locate(root, "a"), [3, 7])
    prune(root, locate(root, "a"), check_steps(root, locate(root, "a"), [3]))
    assert (checkpoint_steps(folder), best_step(folder)) == ([1, 2, 4, 5], 2)
    prune(root, locate(root, "a"), check_steps(root, locate(root, "a"), [2, 5, 5]))
    assert (checkpoint_steps(folder), (folder / "best").is_symlink()) == ([1, 4], False)
    make_run(root, "b", state="interrupted", best=1)
    assert plan_prune(root, locate(root, "b"), ("best",)) == [2]
    with refuses(RunConflict, "b:"):
        check_steps(root, locate(root, "b"), [3])
    assert check_steps(root, locate(root, "b"), [3], force=True) == [3]


NOBODY = 2**22 + 1  # above the highest number that Linux gives to a process


def test_leftovers_go_too(root: Path) -> None:
    folder = make_run(root, "a") / "checkpoints"
    add_checkpoint(root / "a", 9)
    os.rename(folder / "step-000009", folder / "failed-step-000009")
    (folder / ".tmp-step-000004-77").mkdir()
    os.symlink("step-000001", folder / ".tmp-best-77")
    (root / "a" / f".tmp-status.json-{NOBODY}").write_bytes(b"x" * 7)
    living = root / "a" / f".tmp-notes.json-{os.getppid()}"
    living.write_bytes(b"x")
    prune(root, locate(root, "a"), [1])
    assert list((root / "a").glob(".tmp-*")) == [living]
    assert sorted(os.listdir(folder)) == ["step-000002", "step-000003"]


def test_checkpoints_that_are_a_link_are_refused(root: Path, tmp_path: Path) -> None:
    make_run(root, "a", steps=())
    make_run(tmp_path, "outside", best=1)
    os.rmdir(root / "a" / "checkpoints")
    os.symlink(tmp_path / "outside" / "checkpoints", root / "a" / "checkpoints")
    with refuses(UsageError, "links to another"):
        plan_prune(root, locate(root, "a"), ("last",))
    delete(root, locate(root, "a"))
    assert checkpoint_steps(tmp_path / "outside" / "checkpoints") == [1, 2, 3]


def test_a_kill_while_pruning_leaves_no_part_of_a_checkpoint(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(root, "a", best=1) / "checkpoints"

    def stop(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", stop)
        with pytest.raises(KeyboardInterrupt):
            prune(root, locate(root, "a"), [2, 3])
    assert checkpoint_steps(folder) == [1, 3]
    prune(root, locate(root, "a"), [3])
    assert sorted(os.listdir(folder)) == ["best", "step-000001"]
