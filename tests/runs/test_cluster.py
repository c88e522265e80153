"""The launcher ``ray`` without Ray: what is refused. ``tests/ray_cluster`` has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.errors import MissingExtra, UsageError
from posttrain.runs.launch import RunStart, launch
from refusing import refuses
from small_runs import make_recipe

RAY = {"processes": 2, "launcher": "ray"}


def test_ray_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refuses(MissingExtra, "scale.launcher", "'ray'"):
        launch(make_recipe("sft", scale=RAY), RunStart(root=tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


def test_a_process_of_torchruns_places_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refuses(UsageError, "scale.launcher"):
        launch(make_recipe("sft", scale=RAY), RunStart(root=tmp_path / "runs"))


def test_restarts_are_rays() -> None:
    assert make_recipe("sft", scale=RAY | {"restarts": 0}).scale.restarts == 0
    with refuses(UsageError, "'restarts'"):
        make_recipe("sft", scale={"processes": 2, "restarts": 3})
    with refuses(UsageError, "scale.restarts"):
        make_recipe("sft", scale=RAY | {"restarts": -1})
