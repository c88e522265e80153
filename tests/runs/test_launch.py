from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from posttrain import __version__
from posttrain.errors import NonFiniteLoss, RunConflict, UsageError
from posttrain.process_group import SINGLE_PROCESS, ProcessGroup
from posttrain.recipes.recipe import Recipe
from posttrain.runs.children import stop_on_signals
from posttrain.runs.directory import RunDirectory, RunStatus, lock_run
from posttrain.runs.launch import RunStart, launch
from posttrain.runs.paths import locate
from posttrain.runs.removal import delete
from posttrain.store.metric_names import ACCURACY
from posttrain.training.files import Observer, RunFiles
from refusing import refuses

MakeRecipe = Callable[..., Recipe]


pytestmark = pytest.mark.usefixtures("no_code_allowed")  # a message would name what tests before have allowed


@dataclass
class Result:
    step: int
    reason: str
    evaluations: dict[str, dict[str, float]] = field(default_factory=lambda: {"held out": {"accuracy": 0.5}})


@dataclass
class FakeLoop:
    """Stands in for the training loop: counts its calls, saves empty checkpoints, stops where told."""

    stop_after: int | None = None
    fail: BaseException | None = None
    signal_at: int | None = None
    calls: list[tuple[bool, int]] = field(default_factory=list)

    def __call__(
        self,
        recipe: Recipe,
        files: RunFiles,
        *,
        resume: bool,
        observer: Observer,
        should_stop: Callable[[], bool],
        process_group: ProcessGroup,
    ) -> Result:
        assert process_group is SINGLE_PROCESS
        self.calls.append((resume, recipe.train.steps))
        done = sorted(int(p.name[5:]) for p in files.checkpoints.glob("step-*"))
        step = done[-1] if done else 0
        info = {"steps": recipe.train.steps, "resumed_from": step if resume else None, "dropped": {"too long": 3}}
        info["num_examples"] = 50
        observer("start", info)
        while step < recipe.train.steps and step != self.stop_after and not should_stop():
            step += 1
            observer("step", {"step": step, "metrics": {}, "timing": {}})
            if step == self.signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
            if step == 3 and self.fail is not None:
                raise self.fail
        (files.checkpoints / f"step-{step:06d}").mkdir(exist_ok=True)
        observer("checkpoint", {"step": step, "path": "there", "best": False})
        observer(
            "evaluation", {"step": step, "name": "held out", "primary_metric": ACCURACY, "results": {"accuracy": 0.5}}
        )
        reason = "finished" if step == recipe.train.steps else "interrupted"
        observer("finish", {"step": step, "reason": reason})
        return Result(step, reason)


def status_of(folder: Path) -> RunStatus:
    status = RunDirectory(folder).read_status()
    assert status is not None
    return status


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


class Notes(list):
    """An observer that keeps the notices."""

    def __call__(self, event: str, info: dict[str, Any]) -> None:
        if event == "notice":
            self.append(info["message"])


def test_a_run_that_finishes(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    events: list[str] = []
    loop = FakeLoop()
    result = launch(
        make_recipe(),
        RunStart(root=tmp_path, recipe_name="tiny/grpo"),
        observer=lambda e, _: events.append(e),
        train=loop,
    )
    assert (result.folder, result.step, result.reason) == (tmp_path / "tiny-grpo", 10, "finished")
    assert result.evaluations == {"held out": {"accuracy": 0.5}}
    assert events == ["start", *["step"] * 10, "checkpoint", "evaluation", "finish"]
    status = status_of(result.folder)
    assert (status.state, status.step, status.steps) == ("finished", 10, 10)
    assert (status.primary_metric, status.held_out) == ("accuracy", {"accuracy": 0.5})
    assert (status.evaluation, status.pid) == ("held out", os.getpid())
    directory = RunDirectory(result.folder)
    assert directory.changed_keys(make_recipe()) == {}
    assert directory.read_environment()["recipe"] == "tiny/grpo"
    assert [line[21:] for line in directory.log_path.read_text().splitlines()] == [
        "started: 10 steps on 50 examples; dropped: 3 too long",
        "step 10: saved there",
        "step 10: held out: accuracy 0.5",
        "finished",
    ]
    assert (result.folder / "evaluation").is_dir()


def test_default_names_count_on_and_a_taken_name_is_refused_without_resume(
    tmp_path: Path, make_recipe: MakeRecipe
) -> None:
    names = [
        launch(make_recipe(), RunStart(root=tmp_path, recipe_name="tiny/grpo"), train=FakeLoop()).folder.name
        for _ in "12"
    ]
    assert names == ["tiny-grpo", "tiny-grpo-2"]
    folder = launch(make_recipe(), RunStart(root=tmp_path, name="a"), train=FakeLoop(stop_after=4)).folder
    before = everything(tmp_path)
    taken = r"a: this run with the same recipe already exists and is at step 4 of 10 \({}\)\. Continue it with --resume"
    with pytest.raises(RunConflict, match=taken.format("interrupted")):
        launch(make_recipe(), RunStart(root=tmp_path, name="a"), train=FakeLoop())
    assert everything(tmp_path) == before
    RunDirectory(folder).write_status(replace(status_of(folder), state="running"))
    with pytest.raises(RunConflict, match=taken.format("killed")):
        launch(make_recipe(), RunStart(root=tmp_path, name="a"), train=FakeLoop())


@pytest.mark.parametrize("resume", [False, True])
def test_another_recipe_is_refused_and_the_keys_are_listed(
    tmp_path: Path, make_recipe: MakeRecipe, resume: bool
) -> None:
    made = RunDirectory(launch(make_recipe(), RunStart(root=tmp_path, name="a"), train=FakeLoop(stop_after=4)).folder)
    content = made.environment_path.read_text()
    made.environment_path.write_text(content.replace(f'"posttrain": "{__version__}"', '"posttrain": "0.1.7"'))
    before, loop = everything(tmp_path), FakeLoop()
    with pytest.raises(RunConflict) as caught:
        launch(make_recipe(lr=2e-3, seed=7), RunStart(root=tmp_path, name="a", resume=resume), train=loop)
    message = str(caught.value)
    assert "train.seed" in message
    assert "--run NAME" in message
    assert ("by posttrain 0.1.7" in message) == resume
    assert loop.calls == []
    assert everything(tmp_path) == before


def test_resume_continues_and_states_how(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    notes = Notes()
    result = launch(make_recipe(), RunStart(root=tmp_path, name="a"), observer=notes, train=FakeLoop(stop_after=4))
    assert (result.step, result.reason, status_of(result.folder).state) == (4, "interrupted", "interrupted")
    assert notes == [
        f"stopped and saved after step 4 of 10; continue with: posttrain runs resume a --runs-dir {tmp_path}"
    ]
    leftover = result.folder / "checkpoints" / ".tmp-step-000005-99"
    leftover.mkdir()
    notes, loop = Notes(), FakeLoop()
    result = launch(make_recipe(), RunStart(root=tmp_path, name="a", resume=True), observer=notes, train=loop)
    assert loop.calls == [(True, 10)]
    assert (result.step, status_of(result.folder).state) == (10, "finished")
    assert len(RunDirectory(result.folder).read_environment()["starts"]) == 2
    assert notes == ["removed leftovers from a killed write: .tmp-step-000005-99"]
    assert not leftover.exists()
    notes = Notes()
    result = launch(make_recipe(), RunStart(root=tmp_path, name="a", resume=True), observer=notes, train=FakeLoop())
    assert (result.step, result.reason) == (10, "finished")
    assert notes == ["this run is already finished; checking it and showing the results"]


def test_resume_without_a_name_takes_the_newest_run_of_the_recipes_name(
    tmp_path: Path, make_recipe: MakeRecipe
) -> None:
    def start(resume: bool = False) -> str:
        loop = FakeLoop(stop_after=None if resume else 4)
        return launch(
            make_recipe(), RunStart(root=tmp_path, recipe_name="tiny/grpo", resume=resume), train=loop
        ).folder.name

    assert [start(), start()] == ["tiny-grpo", "tiny-grpo-2"]
    launch(make_recipe(), RunStart(root=tmp_path, name="tiny-grpo-mine"), train=FakeLoop())
    os.utime(tmp_path / "tiny-grpo-2" / "recipe.yaml", (1000, 1000))
    assert start(resume=True) == "tiny-grpo"
    with refuses(UsageError, "nothing to continue"):
        launch(make_recipe(), RunStart(root=tmp_path / "none", resume=True), train=FakeLoop())
    with refuses(UsageError, "'tiny-gpro'", "'tiny-grpo'"):
        launch(make_recipe(), RunStart(root=tmp_path, name="tiny-gpro", resume=True), train=FakeLoop())


def test_more_steps_are_accepted_on_resume(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    launch(make_recipe(), RunStart(root=tmp_path, name="a"), train=FakeLoop())
    notes, loop = Notes(), FakeLoop()
    launch(make_recipe(steps=15), RunStart(root=tmp_path, name="a", resume=True), observer=notes, train=loop)
    assert loop.calls == [(True, 15)]
    assert notes == ["train.steps is now 15 instead of 10; steps up to 10 remain unchanged"]
    assert RunDirectory(tmp_path / "a").changed_keys(make_recipe(steps=15)) == {}
    assert status_of(tmp_path / "a").steps == 15


@pytest.mark.parametrize(
    ("first", "then", "why"),
    [
        ({}, {"steps": 4}, "train.steps"),
        ({"schedule": "linear"}, {"steps": 20, "schedule": "linear"}, "train.schedule"),
        ({}, {"steps": 20, "lr": 2e-3}, "train.num_epochs"),
    ],
)
def test_changes_that_would_make_it_another_run_are_refused(
    tmp_path: Path, make_recipe: MakeRecipe, first: dict, then: dict, why: str
) -> None:
    launch(make_recipe(**first), RunStart(root=tmp_path, name="a"), train=FakeLoop(stop_after=4))
    before = everything(tmp_path)
    with refuses(RunConflict, why):
        launch(make_recipe(**then), RunStart(root=tmp_path, name="a", resume=True), train=FakeLoop())
    assert everything(tmp_path) == before


@pytest.mark.parametrize("resume", [False, True])
def test_a_live_run_is_refused(tmp_path: Path, make_recipe: MakeRecipe, resume: bool) -> None:
    folder = launch(make_recipe(), RunStart(root=tmp_path, name="a"), train=FakeLoop(stop_after=4)).folder
    before = everything(tmp_path)
    with lock_run(folder), refuses(RunConflict, "process is using"):
        launch(make_recipe(), RunStart(root=tmp_path, name="a", resume=resume), train=FakeLoop())
    del before["a/.lock"]
    assert before.items() <= everything(tmp_path).items()


def test_a_folder_of_something_else_is_refused_and_an_empty_one_taken(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".lock").write_text("pid 1")  # a start that was killed before anything was written
    before = everything(tmp_path)
    for name in ("thesis", "file"):
        with pytest.raises(RunConflict, match=f"{name}: this is not a run"):
            launch(make_recipe(), RunStart(root=tmp_path, name=name), train=FakeLoop())
    with refuses(UsageError, "cannot write runs", "Give another place"):
        launch(make_recipe(), RunStart(root=tmp_path / "file"), train=FakeLoop())
    assert everything(tmp_path) == before
    assert launch(make_recipe(), RunStart(root=tmp_path, name="empty"), train=FakeLoop()).step == 10


def test_a_failure_is_recorded_and_can_be_resumed(
    tmp_path: Path, make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    error = NonFiniteLoss("loss is NaN at step 3")
    error.add_note("step 2 could not be saved")
    with refuses(NonFiniteLoss, "at step 3"):
        launch(make_recipe(), RunStart(root="runs", name="a"), train=FakeLoop(fail=error))
    status, message = status_of(Path("runs/a")), "NonFiniteLoss: loss is NaN at step 3; step 2 could not be saved"
    assert (status.state, status.step, status.message) == ("failed", 3, message)
    assert [line[21:] for line in RunDirectory("runs/a").log_path.read_text().splitlines()[-2:]] == [
        f"failed: {message}",
        "failed after step 3 of 10; no checkpoint was saved yet; continue with: posttrain runs resume a",
    ]
    assert launch(make_recipe(), RunStart(root="runs", name="a", resume=True), train=FakeLoop()).reason == "finished"
    assert status_of(Path("runs/a")).message is None
    launch(make_recipe(), RunStart(root="runs", name="b"), train=FakeLoop(stop_after=2))
    notes = Notes()
    with pytest.raises(ZeroDivisionError) as caught:
        launch(
            make_recipe(),
            RunStart(root="runs", name="b", resume=True),
            observer=notes,
            train=FakeLoop(fail=ZeroDivisionError()),
        )
    assert caught.traceback[-1].name == "__call__"
    assert "the newest checkpoint is step 2; continue with" in notes[0]


@pytest.mark.parametrize("trouble", ["observer", "disk"])
def test_further_trouble_does_not_hide_the_first_error(
    tmp_path: Path, make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def observer(event: str, info: dict[str, Any]) -> None:
        if event == "notice" and trouble == "observer":
            raise BrokenPipeError("nobody reads")
        if event == "step" and trouble == "disk" and info["step"] == 3:
            monkeypatch.setattr(os, "replace", full)

    with pytest.raises(ZeroDivisionError) as caught:
        launch(
            make_recipe(),
            RunStart(root=tmp_path, name="a"),
            observer=observer,
            train=FakeLoop(fail=ZeroDivisionError()),
        )
    assert ("nobody reads" if trouble == "observer" else "the disk is full") in caught.value.__notes__[0]


def test_a_recipe_that_cannot_run_leaves_no_directory_behind(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    def refuse(recipe: Recipe, files: RunFiles, **_: object) -> Result:
        (files.folder / "tensorboard").mkdir(exist_ok=True)  # trackers begin before the first evaluation
        (files.folder / "tensorboard" / "events").write_text("begun")
        raise UsageError("no such model")

    for root in (tmp_path, tmp_path / "new"):
        with refuses(UsageError, "no such model"):
            launch(make_recipe(), RunStart(root=root, recipe_name="tiny/grpo"), train=refuse)
        assert os.listdir(tmp_path) == []
    launch(make_recipe(), RunStart(root=tmp_path, name="a"), train=FakeLoop(stop_after=4))
    with pytest.raises(UsageError):
        launch(make_recipe(), RunStart(root=tmp_path, name="a", resume=True), train=refuse)
    assert status_of(tmp_path / "a").state == "failed"
    assert (tmp_path / "a" / "checkpoints" / "step-000004").is_dir()


def test_a_signal_lets_the_step_end_and_handlers_come_back(
    tmp_path: Path, make_recipe: MakeRecipe, capfd: pytest.CaptureFixture
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    result = launch(make_recipe(), RunStart(root=tmp_path, name="a"), train=FakeLoop(signal_at=6))
    assert (result.step, result.reason) == (6, "interrupted")
    assert status_of(result.folder).state == "interrupted"
    assert (result.folder / "checkpoints" / "step-000006").is_dir()
    assert "stopping after this" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_second_signal_exits() -> None:
    def work() -> None:
        with stop_on_signals() as should_stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert should_stop()
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        work()
    assert caught.value.code == 128 + signal.SIGTERM


def test_a_closed_terminal_stops_like_ctrl_c_unless_nohup_is_set() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may be under nohup
    try:
        with stop_on_signals() as should_stop:
            assert not should_stop()
            os.kill(os.getpid(), signal.SIGHUP)
            assert should_stop()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with stop_on_signals() as should_stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not should_stop()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_launch_without_flock_starts_resumes_and_is_deleted(
    tmp_path: Path, make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems have no locks."""

    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    launch(make_recipe(), RunStart(root=tmp_path, name="a"), train=FakeLoop(stop_after=4))
    with refuses(RunConflict, "already exists"):
        launch(make_recipe(), RunStart(root=tmp_path, name="a"), train=FakeLoop())
    with lock_run(tmp_path / "a"), refuses(RunConflict, "process is using"):
        launch(make_recipe(), RunStart(root=tmp_path, name="a", resume=True), train=FakeLoop())
    assert launch(make_recipe(), RunStart(root=tmp_path, name="a", resume=True), train=FakeLoop()).reason == "finished"
    delete(tmp_path, locate(tmp_path, "a"))
    assert list(tmp_path.iterdir()) == []


def forget_key(run_folder: Path) -> None:
    """Make the run one of a version without ``train.skip_zero_rows``."""
    path = run_folder / "recipe.yaml"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if "skip_zero_rows" not in line]
    assert len(kept) == len(lines) - 1
    path.write_text("".join(kept), encoding="utf-8")
    for state in run_folder.glob("checkpoints/*/state.json"):
        content = json.loads(state.read_text())
        content.get("settings", {}).get("train", {}).pop("skip_zero_rows", None)
        state.write_text(json.dumps(content))


def test_resume_of_a_run_without_skip_zero_rows_computes_every_row(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    """It is the same run, not another recipe; a new run of the stored recipe leaves rows out."""
    seen: list[bool] = []

    class Watched(FakeLoop):
        def __call__(self, recipe: Recipe, *arguments: Any, **options: Any) -> Any:
            seen.append(recipe.train.skip_zero_rows)
            return super().__call__(recipe, *arguments, **options)

    folder = launch(make_recipe(), RunStart(root=tmp_path, name="a"), train=Watched(stop_after=4)).folder
    forget_key(folder)
    assert RunDirectory(folder).changed_keys(make_recipe()) == {}
    launch(make_recipe(), RunStart(root=tmp_path, name="a", resume=True), train=Watched(stop_after=2))
    launch(make_recipe(steps=15), RunStart(root=tmp_path, name="a", resume=True), train=Watched())
    launch(make_recipe(), RunStart(root=tmp_path, name="b"), train=Watched())
    assert seen == [True, False, False, True]
    assert RunDirectory(folder).read_recipe()["train"]["skip_zero_rows"] is False
