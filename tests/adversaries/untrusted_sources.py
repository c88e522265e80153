"""A run of a stranger's, as it would be downloaded: it loads, verifies and resumes, and means harm."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from posttrain.models.sources import TINY
from posttrain.recipes.recipe import load_recipe
from posttrain.runs.directory import RunDirectory, RunStatus
from posttrain.store.checkpoint_files import mark_best, seal, step_folder
from posttrain.store.metrics import MetricsLog
from posttrain.store.rollouts import RolloutStore

CODE = "runs.evil.payload:f"  # found from the working directory, which holds the runs
SMALL = [
    ("train.steps", "2"),
    ("rollout.num_prompts", "2"),
    ("rollout.group_size", "2"),
    ("rollout.max_tokens", "4"),
    ("eval.num_examples", "2"),
    ("eval.max_tokens", "4"),
]


def plain_recipe() -> dict[str, Any]:
    """A resolved recipe that trains the embedded model for two steps."""
    return load_recipe("tiny/grpo", SMALL).resolve().dump()


def make_evil(
    folder: Path,
    changes: Mapping[str, Any],
    marker: Path,
    recipe: Mapping[str, Any] | None = None,
    with_weights: bool = True,
) -> Path:
    """A run whose recipe has ``changes``, and whose module leaves ``marker``; its checkpoint verifies."""
    (folder / "checkpoints").mkdir(parents=True)
    if with_weights:
        path = step_folder(folder / "checkpoints", 1)
        shutil.copytree(TINY, path)
        seal(path, 1)
        mark_best(folder / "checkpoints", 1)
    (folder / "evaluation").mkdir()
    (folder / "payload.py").write_text(
        f"from pathlib import Path\nPath({str(marker)!r}).touch()\n\n\ndef f(*given, **more):\n    return 0.0\n"
    )
    run = RunDirectory(folder)
    run.recipe_path.write_text(yaml.safe_dump({**(recipe or plain_recipe()), **changes}))
    start = {"versions": {"posttrain": "0.0.1"}, "hardware": {"cpus": 1, "gpus": []}}
    run.environment_path.write_text(json.dumps({"recipe": "tiny/grpo", "created": "2026-01-01", "starts": [start]}))
    run.write_status(RunStatus("interrupted", 1, 2, 1, "elsewhere", 5.0))
    run.log_path.write_text("")
    log = MetricsLog(folder / "metrics.jsonl")
    log.append(1, {"reward": 0.5})
    log.close()
    with RolloutStore(folder / "rollouts.db"):
        pass
    return folder


def contents(folder: Path) -> dict[str, bytes | str]:
    """Every file below a folder with its content, and every folder."""
    found = sorted(folder.rglob("*"))
    return {str(item.relative_to(folder)): item.read_bytes() if item.is_file() else "folder" for item in found}
