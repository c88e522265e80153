"""Run environment: command, commit, versions and hardware."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from posttrain import __version__
from posttrain.errors import hide_secrets
from posttrain.store import posix

_PACKAGES = ("torch", "transformers", "peft", "safetensors", "tokenizers", "numpy")
_GIT_TIMEOUT_SECONDS = 5.0


def describe_environment() -> dict[str, object]:
    """Collect ``env.json``: time, command, git, versions and hardware as plain data."""
    import torch

    hardware: dict[str, object] = {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }
    memory = posix.memory_bytes()
    if memory is not None:
        hardware["memory_bytes"] = memory
    hardware["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    versions = {"posttrain": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        versions[name] = metadata.version(name)
    return {
        "started": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "command": [hide_secrets(word) for word in sys.argv],
        "git": git_state(Path(__file__).parent),
        "versions": versions,
        "hardware": hardware,
    }


def git_state(folder: Path) -> dict[str, str | int | None] | None:
    """Describe the checkout tracking ``folder``: commit and number of changed files. None outside a checkout."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None or not _git(folder, "ls-files"):  # installed inside some other checkout
        return None
    changes = _git(folder, "status", "--porcelain")
    num_changed = None
    if changes is not None:
        num_changed = len(changes.splitlines())
    return {"commit": commit, "changed_files": num_changed}


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None  # git missing or hanging: continue without a commit
    if done.returncode == 0:
        return done.stdout.strip()
    return None
