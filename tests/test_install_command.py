"""The command that installs an extra: from the checkout, or from where the package was installed, never the index."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain import errors

ROOT = Path(errors.__file__).parents[2]


def install_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given_arguments: Any) -> str:
    """The command of a package that lies in an environment, with this record of where it came from."""
    text = None if given_arguments is None else json.dumps(given_arguments)
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "lib" / "posttrain" / "errors.py"))
    monkeypatch.setattr(errors, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))
    return errors.install_command("studio").partition("install ")[2]


def test_from_a_checkout_it_names_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert errors.install_command("studio").endswith(f"pip install -e '{ROOT}[studio]'")
    monkeypatch.chdir(ROOT)
    assert errors.install_command("studio").endswith("pip install -e '.[studio]'")


@pytest.mark.parametrize(
    ("given_arguments", "command"),
    [
        ({"url": "file:///somewhere/posttrain", "dir_info": {}}, "'posttrain[studio] @ file:///somewhere/posttrain'"), (
            {"url": "https://x.example/p.git", "vcs_info": {"vcs": "git", "commit_id": "ab12"}},
            "'posttrain[studio] @ git+https://x.example/p.git@ab12'",
        )],
)  # fmt: skip
def test_from_elsewhere_it_names_that_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given_arguments: Any, command: str
) -> None:
    assert install_from(monkeypatch, tmp_path, given_arguments) == command
