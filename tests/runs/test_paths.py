"""From a name to a folder that may be changed: never one outside of the runs folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fake_runs import make_run, make_sweep, snapshot
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.cli import main
from posttrain.errors import UsageError
from posttrain.recipes.recipe import load_recipe
from posttrain.runs.directory import RunDirectory
from posttrain.runs.models import find_source
from posttrain.runs.paths import (
    NamedFolder,
    every_run_name,
    locate,
    locate_all,
    refuse_absent,
    started_sweeps,
    trial_names,
)
from refusing import refuses


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two runs, a sweep, and things that are neither."""
    folder = tmp_path / "runs"
    make_run(folder, "a", steps=())
    make_run(folder, "b.2", steps=())
    make_sweep(folder, "sweep-x")
    (folder / "notes").mkdir()
    make_run(folder, ".deleting-a-1", steps=())
    return folder


def test_names_of_runs_and_sweeps(root: Path) -> None:
    assert started_sweeps(root) == ["sweep-x"]
    values = ["sweep-x/start", "sweep-x/cells/dapo-seed0", "sweep-x/cells/grpo-seed0"]
    assert trial_names(root, "sweep-x") == values
    assert every_run_name(root) == ["a", "b.2", *values]
    assert every_run_name(root / "nowhere") == started_sweeps(root / "nowhere") == []


def test_a_name_may_be_what_a_shell_completes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "a/", f"{root}/a", f"{root}/a/"):
        assert locate(root, name) == NamedFolder("a", root / "a")
    monkeypatch.chdir(root.parent)
    assert locate("runs", "runs/sweep-x/start").path == Path("runs/sweep-x/start")
    monkeypatch.chdir(root)
    assert locate(".", "./a").path == Path("a")


def test_patterns_do_not_reach_into_sweeps(root: Path) -> None:
    assert [place.name for place in locate_all(root, ["*"])] == ["a", "b.2", "sweep-x"]
    assert [place.name for place in locate_all(root, ["a", "?", "a/"])] == ["a"]
    assert [place.name for place in locate_all(root, ["*/cells/g*"])] == ["sweep-x/cells/grpo-seed0"]
    with refuses(UsageError, "'z*'", "b.2"):
        locate_all(root, ["z*"])


@pytest.mark.parametrize("name", ["link", "sweep-x/cells/link", "linked-folder/a"])
def test_links_are_refused(root: Path, tmp_path: Path, name: str) -> None:
    outside = make_run(tmp_path / "elsewhere", "a", steps=())
    os.symlink(outside, root / "link")
    os.symlink(outside, root / "sweep-x" / "cells" / "link")
    os.symlink(tmp_path / "elsewhere", root / "linked-folder")
    (tmp_path / "elsewhere" / "sweep.yaml").write_text("rows: {}")
    (tmp_path / "elsewhere" / "start").symlink_to(outside)
    with pytest.raises(UsageError, match=r"this links to another location|no run"):
        locate(root, name)
    with refuses(UsageError, "links to another"):
        locate(root, "linked-folder")


PARTS = st.sampled_from(
    ["..", ".", "", "a", "b.2", "runs", "link", "secret", "sweep-x", "cells", "grpo-seed0", "start", "~", "*", "?",
     "[a-z]*", " ", "\n", "\x00", "-rf", "checkpoints", "$HOME", "a\\..\\..", "．．", "{root}", "{outside}"]
)  # fmt: skip
NAMES = st.one_of(st.lists(PARTS, min_size=1, max_size=5).map("/".join), st.text(max_size=12))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=NAMES)
def test_no_name_leads_out_of_the_runs_folder(name: str, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    if not outside.exists():
        make_run(outside, "secret", steps=())
        os.symlink(outside / "secret", root / "link")
    full = name.replace("{root}", str(root)).replace("{outside}", str(outside))
    try:
        places = locate_all(root, [full])
    except UsageError:
        return
    for place in places:
        real = Path(os.path.realpath(place.path))
        assert real.is_relative_to(os.path.realpath(root))
        assert real != Path(os.path.realpath(root))
        assert place.name in {*every_run_name(root), *started_sweeps(root)}


@pytest.mark.parametrize("command", ["delete --yes --force", "prune --yes --keep 1", "resume"])
def test_command_with_a_name_that_leads_outside_is_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    outside = tmp_path / "outside"
    make_run(outside, "secret")
    os.symlink(outside / "secret", root / "link")
    monkeypatch.chdir(tmp_path)
    before = snapshot(tmp_path)
    for name in ("..", f"{outside}/secret", "link", "link/.", "a/../../outside/secret"):
        assert main(["runs", "--runs-dir", "runs", *command.split(), name]) == 2
    assert snapshot(tmp_path) == before


def test_the_name_of_a_sweep_leads_to_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_sweep(Path("runs"), "both")
    values = r"choose a run inside it\. Runs there: both/start, both/cells/dapo-seed0, both/cells/grpo-seed0"
    for name in ("both", "runs/both", "runs/both/"):
        with pytest.raises(UsageError, match=values):
            refuse_absent("runs", name)
    refuse_absent("runs", "both/start")
    RunDirectory(Path("runs/both/cells/dapo-seed0")).write_recipe(load_recipe("tiny/grpo"))
    source = find_source("both/cells/dapo-seed0", "runs")
    assert source.run == Path("runs/both/cells/dapo-seed0")
    assert source.label == "dapo-seed0"


def test_find_source_of_tiny_sft_has_the_template_of_its_training() -> None:
    trained = load_recipe("tiny/sft").resolve().prompt.template
    assert find_source("tiny-sft", "runs").template == trained
    assert find_source("tiny", "runs").template.options == {}
