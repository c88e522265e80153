"""The adapter of verifiers without the package; tests with it are in ``tests/adapters``."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from posttrain import registry
from posttrain.errors import UnallowedCode, UsageError
from posttrain.untrusted import declare_code
from refusing import refuses

pytestmark = pytest.mark.slow
PARTS = [("task", "verifiers_rows"), ("task", "verifiers_episodes"), ("environment", "verifiers_turns")]
LOAD = "made_environment:load_environment"


@pytest.fixture(autouse=True)
def _declared(monkeypatch: pytest.MonkeyPatch) -> None:
    declare_code([LOAD, *(f"verifiers_adapter:{name}" for _, name in PARTS)])
    module = ModuleType("made_environment")
    module.load_environment = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_environment", module)


@pytest.mark.parametrize(("kind", "name"), PARTS)
def test_package_that_is_missing_or_of_another_kind_is_named(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = registry.find(kind, f"verifiers_adapter:{name}").bind({"load": LOAD})
    package = registry.import_component(kind, f"verifiers_adapter:{name}", kind).function.__globals__["_package"]
    monkeypatch.setitem(sys.modules, "verifiers", None)
    package.cache_clear()
    with refuses(UsageError, "pip install", "verifiers"):
        make()
    later = ModuleType("verifiers")
    later.__version__ = "0.4.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verifiers", later)
    with refuses(UsageError, "0.4.0", "pip install"):
        make()
    package.cache_clear()


@pytest.mark.parametrize(("kind", "name"), PARTS)
def test_function_that_is_not_named_or_not_allowed_is_refused(kind: str, name: str) -> None:
    with refuses(UsageError, f"{kind}.load", "my_env:load_environment"):
        registry.find(kind, f"verifiers_adapter:{name}").bind({"load": "owner/my-env"})()
    with refuses(UnallowedCode, "somebody:load_environment"):
        registry.find(kind, f"verifiers_adapter:{name}").bind({"load": "somebody:load_environment"})()
