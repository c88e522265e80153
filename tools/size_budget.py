"""Print the size of the package by room, and refuse rooms, files and functions that outgrew their budget.

Size is a feature: a reader should find any formula within two files of the command. A file is one idea and has at
most 600 lines, a function at most 60 (docstring included); a folder has at most 14 modules
(``tests/test_architecture.py``). A room has a budget of lines, and so has the package: what raises one says in the
same commit why the room needs it, and what it made superfluous.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "posttrain"
COUNTED = (".py", ".cpp", ".h", ".html", ".js", ".css", ".jinja")
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
NUM_SHOWN = 5
MAX_PACKAGE_LINES = 76207
# Lines that a room may have; "ground" is what stands beside the rooms.
ROOMS: dict[str, int] = {
    "ground": 2539,
    "recipes": 1350,
    "algorithms": 2049,
    "graders": 6678,
    "rewards": 471,
    "render": 2213,
    "tasks": 5841,
    "environments": 1769,
    "store": 2734,
    "models": 4138,
    "engines": 8239,
    "evals": 3021,
    "reward_models": 1623,
    "train": 7426,
    "interpret": 7080,
    "runs": 3736,
    "sweeps": 3238,
    "reports": 3157,
    "commands": 8905,
}


def measure_functions(path: Path) -> list[tuple[int, str]]:
    """(lines, ``file:line name``) of every function in a file."""
    functions = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            place = f"{path.relative_to(PACKAGE.parent.parent)}:{node.lineno} {node.name}"
            functions.append((node.end_lineno - node.lineno + 1, place))
    return functions


def measure_rooms(files: list[tuple[int, Path]]) -> dict[str, tuple[int, int]]:
    """(lines, files) of every room."""
    rooms: dict[str, tuple[int, int]] = {}
    for size, path in files:
        parts = path.relative_to(PACKAGE).parts
        room = parts[0] if len(parts) > 1 else "ground"
        lines, count = rooms.get(room, (0, 0))
        rooms[room] = (lines + size, count + 1)
    return rooms


def main() -> int:
    paths = sorted(p for p in PACKAGE.rglob("*") if p.suffix in COUNTED and "tiny" not in p.relative_to(PACKAGE).parts)
    files = sorted(((len(p.read_text(encoding="utf-8").splitlines()), p) for p in paths), reverse=True)
    functions = sorted((item for p in paths if p.suffix == ".py" for item in measure_functions(p)), reverse=True)
    total = sum(size for size, _ in files)
    rooms = measure_rooms(files)
    print(f"package: {total} lines (budget {MAX_PACKAGE_LINES}) in {len(files)} files, {len(functions)} functions")
    for room, (lines, count) in sorted(rooms.items()):
        print(f"  {lines:6d} of {ROOMS.get(room, 0):6d}  {room} ({count} files)")
    over = [f"{room} has {lines} lines, its budget is {ROOMS.get(room, 0)}" for room, (lines, _) in rooms.items()
            if lines > ROOMS.get(room, 0)]  # fmt: skip
    if total > MAX_PACKAGE_LINES:
        over.append(f"the package has {total} lines, its budget is {MAX_PACKAGE_LINES}")
    named = [(size, str(p.relative_to(PACKAGE.parent.parent))) for size, p in files]
    for title, rows, limit in (("files", named, MAX_FILE_LINES), ("functions", functions, MAX_FUNCTION_LINES)):
        print(f"longest {title} (budget {limit} lines):")
        for size, place in rows[:NUM_SHOWN]:
            print(f"  {size:4d}  {place}")
        over += [f"{place} has {size} lines, the budget is {limit}" for size, place in rows if size > limit]
    for line in over:
        print(f"over budget: {line}", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
