"""The demo's promise, measured: minutes of training, so in the slow suite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.cli import main
from posttrain.store.metrics import MetricsLog, evaluation_points


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_grpo_turns_a_guesser_into_a_worker(seed: int, tmp_path: Path) -> None:
    """At most 45 % right after SFT, at least 95 % after GRPO and 99 % in format, of 500 held-out problems."""
    assert main(["demo", "--seed", str(seed), "--quiet", "--runs-dir", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "demo-grpo" / "demo.json").read_text())["results"]
    assert results["after SFT"]["n"] == 500
    assert results["after SFT"]["accuracy"] <= 0.45
    assert results["after GRPO"]["accuracy"] >= 0.95
    assert results["after GRPO"]["format"] >= 0.99
    assert results["after GRPO"]["shows_reasoning"] > results["after SFT"]["shows_reasoning"] + 0.5
    logs = (MetricsLog(tmp_path / name / "metrics.jsonl").read() for name in ("demo-sft", "demo-grpo"))
    sft, grpo = (evaluation_points(rows) for rows in logs)
    assert sft[-1].results["accuracy"] == grpo[0].results["accuracy"]  # one model on one set of problems


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_grpo_finds_out_when_a_calculator_pays(seed: int, tmp_path: Path) -> None:
    """Large sums from less than 10 % right to at least 90 %; small ones stay right, with at most 10 % calls."""
    assert main(["demo", "--story", "tools", "--seed", str(seed), "--quiet", "--runs-dir", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "demo-tools-grpo" / "demo.json").read_text())["results"]
    before, after = results["after SFT"], results["after GRPO"]
    assert before["large:accuracy"] < 0.1
    assert after["large:accuracy"] >= 0.9
    assert after["small:accuracy"] >= 0.9
    assert after["small:called"] <= 0.1
