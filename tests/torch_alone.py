"""A Python process in which torch is installed, with what it requires, and nothing else."""

from __future__ import annotations

import subprocess
import sys

# The modules of the wheel of torch, and what its metadata require; numpy is not among them.
OF_TORCH = (
    "torch",
    "torchgen",
    "functorch",
    "filelock",
    "typing_extensions",
    "sympy",
    "mpmath",
    "networkx",
    "jinja2",
    "markupsafe",
    "fsspec",
)

# No installed package is found but those that are named; the standard library and posttrain stay.
PROGRAM = """
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

ALLOWED = {allowed}


class Named:
    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        is_there = package in sys.stdlib_module_names or package in ALLOWED or package == "posttrain"
        return PathFinder.find_spec(name, path, target) if is_there else None


sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Named()]
"""


def run_with_torch_alone(code: str, *, modules: tuple[str, ...] = (), torch: bool = True) -> str:
    """Run code where only torch (or not even that) and the named modules can be imported; return what it printed."""
    allowed = set(modules)
    if torch:
        allowed.update(OF_TORCH)
    program = PROGRAM.format(allowed=allowed) + code
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
