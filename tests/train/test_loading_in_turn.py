"""The processes of a machine load an unsharded model one after the other."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from small_runs import end_of, make_recipe, start, train_command

KILLER = f"""
import os
if os.environ.get("RANK") == "1":
    from posttrain.train import build
    build._load_trained = lambda *arguments: os.kill(os.getpid(), {int(signal.SIGKILL)})
"""
NOTES = """
import os, time
from posttrain.train import build
load = build._load_trained

def noted(*arguments):
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"{os.environ.get('RANK', 0)} in\\n")
    loaded = load(*arguments)
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"{os.environ.get('RANK', 0)} out\\n")
    return loaded

build._load_trained = noted
"""


def ended(folder: Path, customize: str, steps: int) -> tuple[int, str]:
    """Exit code and errors of SFT without answers, with sharded weights, in two processes."""
    recipe = make_recipe(
        "sft", eval={"every": 0}, scale={"processes": 2, "sharding": "fsdp2"}, train={"steps": steps, "lr": 1e-4}
    )
    (folder / "sitecustomize.py").write_text(customize)  # which Python imports at its start
    places = os.pathsep.join([str(folder), *(p for p in sys.path if p)])
    return end_of(
        start(train_command(folder, recipe), {**os.environ, "PYTHONPATH": places, "NOTES": f"{folder}/notes"})
    )


def test_each_loads_when_the_one_before_has_loaded(tmp_path: Path) -> None:
    code, error = ended(tmp_path, NOTES, 1)
    assert code == 0, error
    assert (tmp_path / "notes").read_text().split("\n") == ["0 in", "0 out", "1 in", "1 out", ""]


def test_a_process_that_is_killed_in_its_turn_is_named(tmp_path: Path) -> None:
    code, error = ended(tmp_path, KILLER, 2)
    assert code == 1
    assert "rank 1 of 2: its process was ended by SIGKILL" in error
