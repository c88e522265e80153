"""Runs that earlier versions stored, which this one must open."""

import shutil
from pathlib import Path

VERSION_0_2_0 = Path(__file__).with_name("version-0.2.0")
# The metrics of the same run, which version 0.2.0 trained for four steps without a stop.
UNTIL_STEP_4 = Path(__file__).with_name("version-0.2.0-to-step-4.jsonl")


def copy_old_run(runs_dir: Path, name: str = "old") -> Path:
    """Copy the run of version 0.2.0 (GRPO, two of its steps) into a folder of runs; return its folder."""
    return Path(shutil.copytree(VERSION_0_2_0, runs_dir / name, symlinks=True))
