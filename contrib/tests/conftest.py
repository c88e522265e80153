"""Tests of the components in ``contrib``, which are importable here as a recipe next to them finds them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

CONTRIB = Path(__file__).parents[1]
TESTS = CONTRIB.parent / "tests"
for folder in (CONTRIB, CONTRIB / "constitutional", CONTRIB / "nim", TESTS, TESTS / "adversaries"):
    sys.path.insert(0, str(folder))
spec = importlib.util.spec_from_file_location("conftest_of_tests", TESTS / "conftest.py")
assert spec is not None
assert spec.loader is not None
shared = importlib.util.module_from_spec(spec)
spec.loader.exec_module(shared)
allowed_code_kept, no_curves = shared.allowed_code_kept, shared.no_curves
