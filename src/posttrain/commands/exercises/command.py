"""``posttrain exercise``: list or show exercises, or check a solution."""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.commands.options import CommandOptions, option
from posttrain.errors import UsageError, nearest
from posttrain.graders.sandbox.workers import Limits, WorkerPool
from posttrain.terminal.console import Text, open_console, plain_table, print_rows, say

LIMITS = Limits(cpu_seconds=10.0, wall_seconds=20.0, memory_bytes=2**30, compiles=True)
EPILOG = """\
write a function, and compare it with library implementation:
  posttrain exercise
  posttrain exercise show group_advantage > group_advantage.py
  posttrain exercise check group_advantage group_advantage.py
"""


OPTIONS = CommandOptions(
    option("action", nargs="?", choices=("list", "show", "check"), default="list"),
    option("name", metavar="NAME", nargs="?", help="an exercise that `posttrain exercise` lists"),
    option("file", metavar="FILE", nargs="?", help="your Python file, which `check` runs"),
    epilog=EPILOG,
)


def run_exercise(arguments: argparse.Namespace) -> int:
    """List exercises, print an exercise template, or check a solution; exit code 1 if wrong."""
    from posttrain.commands.exercises.checking import EXERCISES  # imports torch

    console = open_console()
    if arguments.action == "list":
        rows = [(Text(name, style="cyan"), one.chapter, one.about) for name, one in EXERCISES.items()]
        print_rows(console, plain_table("exercise", "chapter", "what to write"), rows, crop=False)
        say(console, "chapters are those of the RLHF book; read one: posttrain exercise show NAME")
        return 0
    if arguments.name is None:
        raise UsageError(f"{arguments.action}: NAME is missing. Known: {', '.join(EXERCISES)}")
    name = arguments.name.replace("-", "_")
    if name not in EXERCISES:
        near = nearest(name, EXERCISES)
        hint = ""
        if near:
            hint = f" Did you mean {near}?"
        raise UsageError(f"there is no exercise {arguments.name!r}.{hint} Known: {', '.join(EXERCISES)}")
    if arguments.action == "show":
        print(EXERCISES[name].stub, end="")
        return 0
    wrong = check_file(name, arguments.file)
    if wrong:
        say(console, f"{name}: not yet. {wrong}")
        return 1
    say(console, f"{name}: correct in all {len(EXERCISES[name].cases)} cases.", "green")
    say(console, f"library implementation: {EXERCISES[name].library}")
    return 0


def check_file(name: str, path: str | None) -> str:
    """Check a solution file; returns an error description, empty if correct. Forwards captured output to the terminal.

    Raises:
        UsageError: missing file, or not UTF-8 text.
    """
    if path is None:
        raise UsageError(f"check: FILE is missing. Begin with `posttrain exercise show {name} > {name}.py`")
    try:
        source = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason: str | None = "not valid UTF-8 text"
        if isinstance(error, OSError):
            reason = error.strerror
        raise UsageError(f"{path}: {reason}. Give your Python file") from None
    pool = WorkerPool("posttrain.commands.exercises.checking:check", 1, LIMITS)
    try:
        (result,) = pool.run([{"name": name, "path": path, "source": source}])
    finally:
        pool.close()
    if result.kind == "timeout":
        return f"the function timed out ({result.reason}); check for endless loops"
    if result.kind == "crash":
        return f"the file ended its process: {result.reason}"
    if result.value["printed"]:
        say(open_console(), result.value["printed"].rstrip(), "dim")
    return str(result.value["wrong"])
