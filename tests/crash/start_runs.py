"""Forks a run for every line on the standard input: ``[recipe file, run directory, moment]`` as JSON.

Answers with the process id, and with the exit code once the run has ended. ``moment`` is null, or
``[module, function, "before" or "after", n]``: the run kills itself there, at the n-th call.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from imported_late import IMPORTED

from posttrain.recipes.recipe import load_recipe
from posttrain.runs.launch import RunStart, launch
from posttrain.training import loop

IMPORTED += (loop,)  # before forking, which is the point

sys.path.append(str(Path(__file__).resolve().parent.parent))  # engines of the tests


def die_at(module_name: str, name: str, when: str, count: int) -> None:
    """Make the n-th call of a function deadly."""
    module = importlib.import_module(module_name)
    original: Callable[..., Any] = getattr(module, name)
    calls = 0

    @wraps(original)
    def deadly(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count and when == "before":
            os.kill(os.getpid(), 9)
        result = original(*args, **options)
        if calls == count:
            os.kill(os.getpid(), 9)
        return result

    setattr(module, name, deadly)


def run(recipe: str, folder: Path) -> None:
    resume = (folder / "recipe.yaml").exists()
    launch(load_recipe(recipe), RunStart(root=folder.parent, name=folder.name, resume=resume), train=loop.run_training)


for line in sys.stdin:
    recipe_path, run_path, moment = json.loads(line)
    process = os.fork()
    if process == 0:
        if moment is not None:
            die_at(*moment)
        run(recipe_path, Path(run_path))
        os._exit(0)
    print(process, flush=True)
    _, status = os.waitpid(process, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
