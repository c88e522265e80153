"""``make test-ray`` runs the tests of this folder in an environment that has Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import TESTS, Machines, machines


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.ray)


@pytest.fixture(scope="session", autouse=True)
def _paths_of_workers() -> Iterator[None]:
    """Ray's workers and what they start find the package and the words of the tests where this process does."""
    with pytest.MonkeyPatch.context() as patch:
        places = [str(TESTS / "runs"), str(TESTS), *(p for p in sys.path if p)]
        patch.syspath_prepend(TESTS / "runs")
        patch.setenv("PYTHONPATH", os.pathsep.join(places))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")  # without a network a process waits minutes for it at its end
        yield


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Machines]:
    """For tests that leave the nodes as they are."""
    with machines(2) as made:
        yield made
