"""``tools/gpu/run.sh`` in its smallest form, on a CPU: steps run, results are kept, and what fails is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "gpu" / "run.sh"


def call(out: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    environment = {**os.environ, "OUT": str(out), "PYTHON": sys.executable, "WHEELS": str(out / "no wheels")}
    command = [str(SCRIPT), *arguments, "--smallest", "--jobs", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    path = out / f"{arguments[0]}.json"
    return done, json.loads(path.read_text()) if path.is_file() else {}


@pytest.mark.slow
def test_check_smallest_runs_resumes_and_tests(tmp_path: Path) -> None:
    done, results = call(tmp_path, "check", "--only", "environment,run-grpo-deterministic,tests-engine,tests-recipes")
    assert done.returncode == 0, done.stdout + done.stderr
    states = {name: result["state"] for name, result in results.items()}
    assert states.pop("tests-recipes") == "nothing to do"
    assert set(states.values()) == {"ok"}
    assert results["environment"]["values"]["torch"]
    run = results["run-grpo-deterministic"]
    assert run["same_losses"] is True
    assert run["run b"]["last"][0]["step"] == 2
    assert run["run b"]["first"][0]["metrics"]["grad_norm"] > 0
    assert "passed" in results["tests-engine"]["tail"][-1]


@pytest.mark.slow
def test_measure_smallest_writes_rows_and_a_profile(tmp_path: Path) -> None:
    done, results = call(tmp_path, "measure", "--only", "decode-64,sft-0.6b,profile")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "decode, smallest, 8 rows of 16 tokens" in results["decode-64"]["tail"][-1]
    assert {"decode-64", "update"} <= results["profile"]["values"].keys()
    assert results["profile"]["values"]["update"]["top"][0][1] > 0


def test_script_refuses_a_step_that_it_has_not(tmp_path: Path) -> None:
    done, results = call(tmp_path, "check", "--only", "run-gpro")
    assert done.returncode != 0
    assert "'run-gpro'" in done.stderr
    assert results == {}
