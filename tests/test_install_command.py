"""What to type for an extra: from the checkout, or from where the package was installed; the index has no such name."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain import errors

ROOT = Path(errors.__file__).parents[2]


def test_from_a_checkout_it_names_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert errors.install_command("studio").endswith(f"pip install -e '{ROOT}[studio]'")
    monkeypatch.chdir(ROOT)
    assert errors.install_command("studio").endswith("pip install -e '.[studio]'")


def test_from_elsewhere_it_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "lib" / "posttrain" / "errors.py"))
    assert errors.install_command("studio").endswith("pip install 'posttrain[studio]'")
