"""Uploads to a stand-in hub: what is asked of it, what it then holds, and refusals before anything is written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_runs import WEIGHTS, make_run

from hub_server import Hub, hub_server
from posttrain.errors import UsageError
from posttrain.runs.push import check_repository
from refusing import refuses

TOKEN = "hf_" + "a" * 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    run = make_run(folder, "a", best=2, accuracies={0: 0.1, 2: 0.75, 3: 0.5})
    (run / "results.json").write_text('{"run": "a"}')
    return folder


def is_private(made: dict[str, Any]) -> bool:
    """Read the answer of either version of huggingface_hub."""
    return made.get("private") is True or made.get("visibility") == "private"


def push(root: Path, hub: Hub | None, *options: str, code: str | None = None, token: str = TOKEN) -> tuple[int, str]:
    """Run ``runs export`` (or ``code``) in a process whose hub is the stand-in; returns exit code and output."""
    surroundings = {**os.environ, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(root.parent / "home")}
    surroundings.pop("HF_TOKEN", None)
    surroundings["HF_HUB_OFFLINE"] = "1"
    if hub is not None:
        surroundings |= {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    if token:
        surroundings["HF_TOKEN"] = token
    command = [sys.executable, "-m", "posttrain", "runs", "export", "a", "--runs-dir", str(root), *options]
    if code is not None:
        command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def test_push_uploads_model_card_recipe_and_results_in_one_commit(root: Path) -> None:
    with hub_server() as hub:
        status, output = push(root, hub, "--push", "me/mine")
        assert (status, f"{hub.url}/me/mine" in output) == (0, True), output
    made = [(one["name"], one.get("organization"), is_private(one)) for one in hub.created]
    assert made == [("mine", "me", True)]
    assert [commit["summary"] for commit in hub.commits] == ["a after step 2"]
    kept = ["README.md", "config.json", "metrics.jsonl", "model.safetensors", "recipe.yaml", "results.json"]
    assert sorted(hub.files) == kept
    assert hub.files["model.safetensors"] == WEIGHTS
    assert hub.files["results.json"] == b'{"run": "a"}'
    assert hub.files["README.md"].startswith(b"---\nlibrary_name: transformers")
    methods = [(method, path.partition("?")[0]) for method, path, _ in hub.requests]
    first = [("POST", "/api/repos/create"), ("POST", "/api/models/me/mine/preupload/main")]
    posts = [one for one in methods if one[0] == "POST" and not one[1].startswith("/api/validate")]
    assert posts[:2] == first
    assert ("POST", "/me/mine.git/info/lfs/objects/batch") in methods
    assert posts[-1] == ("POST", "/api/models/me/mine/commit/main")
    to_hub = [authorization for method, path, authorization in hub.requests if "/api/" in path and method == "POST"]
    assert set(to_hub) == {f"Bearer {TOKEN}"}


def test_push_with_a_place_keeps_the_export_and_makes_a_public_repository(root: Path, tmp_path: Path) -> None:
    with hub_server() as hub:
        status, output = push(root, hub, "--to", str(tmp_path / "out"), "--push", "me/mine", "--public")
        assert status == 0, output
    assert not is_private(hub.created[0])
    assert hub.files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}


def test_push_to_hub_of_a_run_makes_the_same_calls(root: Path) -> None:
    code = f"import posttrain as pt; print(pt.load_run({str(root / 'a')!r}).push_to_hub('me/mine', weights='last'))"
    with hub_server() as hub:
        status, output = push(root, hub, code=code)
        assert (status, output.splitlines()[0]) == (0, f"{hub.url}/me/mine"), output
    assert [commit["summary"] for commit in hub.commits] == ["a after step 3"]
    assert "model.safetensors" in hub.files


def test_push_offline_without_token_or_refused_says_so_and_writes_nothing(root: Path, tmp_path: Path) -> None:
    place = tmp_path / "out"
    status, output = push(root, None, "--push", "me/mine", "--to", str(place))
    assert (status, "HF_HUB_OFFLINE" in output, "hf upload me/mine" in output, place.exists()) == (2, True, True, False)
    with hub_server() as hub:
        status, output = push(root, hub, "--push", "me/mine", "--to", str(place), token="")
        assert (status, "HF_TOKEN" in output, place.exists(), hub.requests) == (2, True, False, [])
        hub.refusal = 403
        status, output = push(root, hub, "--push", "me/mine")
        assert (status, "--push me/mine" in output, "refused" in output, TOKEN in output) == (2, True, True, False)
    status, output = push(root, hub, "--push", "me/mine")  # the server has gone
    assert (status, "could not be reached" in output) == (2, True)


def test_places_and_names_that_cannot_be_are_refused(root: Path) -> None:
    for options, named in (((), "--to"), (("--public", "--to", "x"), "--push"), (("--push", "a/b/c"), "a/b/c")):
        status, output = push(root, None, *options)
        assert (status, named in output) == (2, True), output
    for name in ("", "-a", "a/b/c", "a b", "../x", "a--b", 3):
        with refuses(UsageError, "--push", "me/my-model"):
            check_repository(name)
