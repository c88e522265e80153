"""Files for other machines: workflows pin their actions to commits, and the image has what its commands need."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_actions_are_pinned_to_commits_with_their_version(path: Path) -> None:
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if "uses:" in line]
    assert lines
    for line in lines:
        assert re.fullmatch(r"- uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_may_only_read(path: Path) -> None:
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["permissions"] == {"contents": "read"}


def test_workflow_of_every_push_tries_windows() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    commands = [step.get("run", "") for step in jobs["windows"]["steps"]]
    assert {"posttrain --help", "posttrain recipes", "posttrain explain grpo"} <= set(commands)
    (tests,) = [command for command in commands if "pytest" in command]
    for place in tests.partition("pytest ")[2].split():
        assert (ROOT / place).exists(), place


def test_image_has_the_sandbox_and_both_servers() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", text)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {"sandbox", "serve", "studio"} <= set(extras.split(",")) <= set(known)


def test_setup_installs_what_tests_use() -> None:
    """A test that is skipped because a package is missing tests nothing."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    (extras,) = re.findall(r"-e '\.\[(dev,[\w,]+)\]'", text)
    assert {"tasks", "quantize", "track", "interpret", "serve", "studio"} <= set(extras.split(","))
