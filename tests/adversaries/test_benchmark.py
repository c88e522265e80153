"""The benchmark of the graders meets the adversary, in its smallest form."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from real_golds import data_folder

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "grading.py"


@pytest.mark.slow
@pytest.mark.skipif(data_folder() is None, reason="POSTTRAIN_DATA names no folder with real rows")
def test_benchmark_reports_its_cases_and_findings() -> None:
    command = [sys.executable, str(SCRIPT), "--only", "adversary", "--size", "smallest"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for part in (
        "math: {'answers': ",
        "numeric: {'answers': ",
        "'comparisons': ",
        "failures: {}",
        "spellings refused: 0 of",
        "'mmlu': [",
    ):
        assert part in done.stdout, done.stdout
