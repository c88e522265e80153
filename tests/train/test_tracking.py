"""``track`` in a recipe: what is shown elsewhere equals ``metrics.jsonl``, which is as it was without."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.errors import MissingExtra, UnknownWord
from posttrain.runs.directory import RunDirectory
from posttrain.store.metrics import MetricsLog, MetricsRow
from posttrain.train import loop
from small_runs import Events, make_recipe, run, steps_of, untimed, watched

EVALUATION = {"every": 2, "n": 4, "max_tokens": 10}


class Shown(list):
    """A tracker of the tests' own."""

    def start(self, kept: list[MetricsRow]) -> None:
        self[:] = kept

    def log(self, row: MetricsRow) -> None:
        self.append(row)

    def close(self) -> None:
        self.append("closed")


def test_a_tracked_run_is_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown()
    monkeypatch.setattr(loop, "build_trackers", lambda words, run: [shown] if words else [])
    plain = make_recipe("sft", train={"steps": 4}, eval=EVALUATION)
    tracked = make_recipe("sft", train={"steps": 4}, eval=EVALUATION, track=["tensorboard", {"name": "wandb"}])
    assert plain.fingerprint() == tracked.fingerprint()
    assert tracked.dump()["track"][1] == {"name": "wandb"}  # project and mode are the environment's, or the defaults
    run(tmp_path / "plain", plain)
    run(tmp_path / "tracked", tracked, stop_after=3)
    rows = MetricsLog(tmp_path / "tracked" / "metrics.jsonl").read()
    assert shown == [*rows, "closed"]
    run(tmp_path / "tracked", tracked, resume=True)
    assert untimed(tmp_path / "tracked") == untimed(tmp_path / "plain")
    assert shown == [*MetricsLog(tmp_path / "tracked" / "metrics.jsonl").read(), "closed"]
    assert len(steps_of(tmp_path / "tracked")) == 4


def test_trackers_may_change_when_a_run_is_resumed(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.write_recipe(make_recipe("sft", track="tensorboard"))
    assert directory.changed_keys(make_recipe("sft")) == {}
    assert list(directory.changed_keys(make_recipe("sft", train={"lr": 1.0}))) == ["train.lr"]


def test_refusals_come_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownWord, match=r"track\.0: there is no tracker named 'tensorbord'.*'tensorboard'"):
        make_recipe("sft", track="tensorbord")
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    monkeypatch.setattr(loop, "prepare", None)  # not reached
    events = Events()
    with pytest.raises(MissingExtra, match="track: wandb needs the package"):
        watched(tmp_path, make_recipe("sft", track="wandb"), events)
    assert events == []
