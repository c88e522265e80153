"""The comparison of two checkouts: it sees one bit, a name that is missing, and a renaming that is not needed."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import save_file

from posttrain.store.rollouts import RolloutStore

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "two_checkouts.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("two_checkouts", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_run(folder: Path, loss: float = 0.1, name: str = "loss", weight: float = 1.0) -> Path:
    checkpoint = folder / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    row = {"step": 1, "metrics": {name: loss, f"eval/stories/{name}": 0.5}, "timing": {"step_seconds": float(loss)}}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    save_file({"w": np.array([weight], dtype=np.float32)}, checkpoint / "model.safetensors")
    RolloutStore(folder / "rollouts.db").close()
    return folder


def test_equal_runs_are_equal(script: ModuleType, tmp_path: Path) -> None:
    comparison = script.Comparison()
    assert comparison.runs(make_run(tmp_path / "a"), make_run(tmp_path / "b")) == []
    assert comparison.compared == 4


def test_one_bit_is_seen(script: ModuleType, tmp_path: Path) -> None:
    before = make_run(tmp_path / "it")
    for number, change in enumerate(
        ({"loss": float(np.nextafter(0.1, 1))}, {"weight": float(np.nextafter(1, 2, dtype=np.float32))})
    ):
        (line,) = script.Comparison().runs(before, make_run(tmp_path / str(number) / "it", **change))
        assert ("metrics" if number == 0 else "weights") in line
    script.REGROUPED = frozenset({"loss"})
    assert script.Comparison().runs(before, tmp_path / "0" / "it") == []


def test_a_name_on_one_side_only_is_a_difference_unless_it_was_renamed(script: ModuleType, tmp_path: Path) -> None:
    before, after = make_run(tmp_path / "a"), make_run(tmp_path / "b", name="nll")
    assert len(script.Comparison().runs(before, after)) == 4
    script.RENAMED = {"loss": "nll"}
    comparison = script.Comparison()
    assert comparison.runs(before, after) == []
    assert comparison.used == {"loss"}


@pytest.mark.slow
def test_the_smallest_form_runs(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(ROOT / "src", other / "src", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, str(SCRIPT), str(ROOT), str(other), "--only", "sae", "--steps", "1"]
    same = subprocess.run(command, capture_output=True, text=True, check=False)
    assert same.returncode == 0, same.stdout + same.stderr
    assert "the same numbers, bit for bit" in same.stdout
