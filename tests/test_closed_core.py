"""A run imports what its recipe names, and nothing of the laboratory around the core."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MOST_MODULES = 188  # what `tiny/grpo` needed when this was last counted; the command calls `posttrain.api`
LABORATORY = ("interpret", "sweeps", "reports")
# Of the rooms of words, what `tiny/grpo` names, and what these modules share.
NAMED = {
    "algorithms.advantages",
    "algorithms.aggregation",
    "algorithms.objectives.policy_gradient",
    "algorithms.objectives.primitives",
    "algorithms.objectives.surrogate",
    "algorithms.selection",
    "graders.answers",
    "graders.column_rewards",
    "graders.grading",
    "graders.numeric",
    "graders.rewards",
    "graders.signs",
    "data.base",
    "data.stories.families",
    "data.stories.task",
}
FOLDERS = {"algorithms", "algorithms.objectives", "graders", "data", "data.stories"}

# Ends the process when update number 2 begins, as the loop is imported by the command itself.
PROGRAM = """
import os
import sys
from importlib.machinery import PathFinder


class Watch:
    def find_spec(self, name, path=None, target=None):
        if name != "posttrain.training.loop":
            return None
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def and_watch(module):
            execute(module)
            update = module.Loop.update

            def watched(loop):
                if loop.step == 1:
                    print(*sorted(n for n in sys.modules if n.partition(".")[0] == "posttrain"), flush=True)
                    os._exit(0)
                update(loop)

            module.Loop.update = watched

        spec.loader.exec_module = and_watch
        return spec


sys.meta_path.insert(0, Watch())
from posttrain.cli import main

sys.exit(main(sys.argv[1:]))
"""


def test_training_imports_what_its_recipe_names(tmp_path: Path):
    options = "train tiny/grpo --eval.every 0 --rollout.num_prompts 2 --rollout.group_size 2 --rollout.max_tokens 8"
    command = [sys.executable, "-c", PROGRAM, *options.split(), "--runs-dir", str(tmp_path), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    modules = done.stdout.split()
    assert "posttrain.training.step" in modules
    names = {name.removeprefix("posttrain.") for name in modules}
    assert {name for name in names if name.partition(".")[0] in LABORATORY} == set()
    named = ("algorithms", "graders", "data")
    words = {name for name in names if name.partition(".")[0] in named and not name.startswith("data.re")}
    assert words - FOLDERS == NAMED
    assert len(modules) <= MOST_MODULES, f"{len(modules)} modules: {', '.join(modules)}"
