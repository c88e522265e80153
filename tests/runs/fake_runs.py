"""Run directories without training: everything that the functions over runs look at, and no model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from posttrain.runs.directory import RunDirectory, RunStatus
from posttrain.store.checkpoint_files import seal, step_folder
from posttrain.store.metrics import MetricsLog

RECIPE: dict[str, Any] = {
    "model": {"name": "tiny"},
    "task": {"name": "stories"},
    "objective": {"name": "grpo", "clip_high": 0.2},
    "train": {"steps": 10, "lr": 0.001},
}
WEIGHTS = b"w" * 1000
OPTIMIZER = b"o" * 2000


def make_run(
    root: Path,
    name: str,
    *,
    recipe: Mapping[str, Any] | None = None,
    model: str = "tiny",
    state: str = "finished",
    steps: Sequence[int] = (1, 2, 3),
    best: int | None = None,
    accuracies: Mapping[int, float] | None = None,
    created: str = "2026-01-01T00:00:00+00:00",
    checkpoint_state: Mapping[str, Any] | None = None,
) -> Path:
    """A run with a checkpoint at each of ``steps``; every one holds 1,000 bytes of weights and 2,000 of optimizer."""
    folder = root / name
    (folder / "checkpoints").mkdir(parents=True)
    content = {**RECIPE, "model": {"name": model}, **(recipe or {})}
    run = RunDirectory(folder)
    run.recipe_path.write_text(yaml.safe_dump(content, sort_keys=False))
    start = {"versions": {"posttrain": "0.1.0"}, "hardware": {"cpus": 2, "gpus": []}}
    run.environment_path.write_text(json.dumps({"recipe": "tiny/grpo", "created": created, "starts": [start]}))
    measured = dict(accuracies or {})
    last = measured[max(measured)] if measured else None
    at = max(steps, default=0)
    status = RunStatus(state, at, 10, 1, "here", 5.0)
    if last is not None:
        status = replace(
            status, primary_metric="accuracy", held_out={"accuracy": last}, evaluation="stories/validation"
        )
    run.write_status(status)
    log = MetricsLog(folder / "metrics.jsonl")
    for step in range(at + 1):
        if step:
            log.append(step, {"reward": step / 8, "loss": 1 / step}, {"step_seconds": 2.0})
        if step in measured:
            log.append(step, {"eval/stories/validation/accuracy": measured[step]}, {"evaluation_seconds": 1.0})
    log.close()
    for step in steps:
        add_checkpoint(folder, step, checkpoint_state)
    if best is not None:
        os.symlink(f"step-{best:06d}", folder / "checkpoints" / "best")
    return folder


def add_checkpoint(folder: Path, step: int, state: Mapping[str, Any] | None = None) -> Path:
    """A checkpoint with a manifest that verifies."""
    path = step_folder(folder / "checkpoints", step)
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(WEIGHTS)
    (path / "config.json").write_text('{"model_type": "none"}')
    (path / "optimizer.safetensors").write_bytes(OPTIMIZER)
    (path / "state.json").write_text(json.dumps(dict(state or {})))
    seal(path, step)
    return path


def make_sweep(root: Path, name: str, methods: Sequence[str] = ("grpo", "dapo"), num_seeds: int = 1) -> Path:
    """A finished sweep with a start that every cell names."""
    folder = root / name
    make_run(folder, "start", steps=(2,), best=2)
    content = {"base": {}, "rows": {method: {} for method in methods}, "seeds": num_seeds}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    (folder / "table.md").write_text("| method | right |\n")
    weights = f"{root.name}/{name}/start/checkpoints/step-000002"
    for method in methods:
        for seed in range(num_seeds):
            make_run(folder / "cells", f"{method}-seed{seed}", model=weights, steps=(1, 2), best=2)
    return folder


def snapshot(root: Path) -> dict[str, Any]:
    """Every file, folder and link under ``root`` with its content and time of change, but for locks."""
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        if not path.name.startswith(".lock"):
            content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
            found[str(path.relative_to(root))] = (content, path.lstat().st_mtime_ns if path.is_file() else 0)
    return found
