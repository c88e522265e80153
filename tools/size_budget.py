"""Print the size of the package by folder, and refuse folders, files and functions that outgrew their budget.

Statements are ``ast.stmt`` nodes of all Python below ``src``, docstrings not counted; lines are those of Python and of
templates. A budget falls with every step that removes something; what raises one says in the same commit why. A file is
one idea and has at most 600 lines, a function at most 60; a folder has at most 14 modules.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "posttrain"
COUNTED = (".py", ".html", ".js", ".css", ".jinja")
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
NUM_SHOWN = 5
MAX_CONTRIB_LINES = 3_000
# (statements, lines) that a folder may have; "ground" is the modules outside of folders.
BUDGETS: dict[str, tuple[int, int]] = {
    "algorithms": (566, 1806),
    "api": (783, 1642),
    "commands": (4133, 7475),
    "data": (4667, 8429),
    "evaluation": (1878, 3572),
    "graders": (2984, 5140),
    "ground": (1379, 2924),
    "interpret": (2394, 4351),
    "models": (2586, 4586),
    "other_names": (85, 1471),
    "recipes": (689, 1382),
    "reports": (826, 2171),
    "runs": (1354, 2326),
    "sampling": (3693, 6412),
    "store": (1086, 2117),
    "sweeps": (1113, 1881),
    "training": (3215, 5331),
}


@dataclass
class Size:
    """Statements without docstrings, lines and files of a folder."""

    statements: int = 0
    lines: int = 0
    files: int = 0
    functions: list[tuple[int, str]] = field(default_factory=list)


def count_statements(tree: ast.AST) -> int:
    """Return the number of statements, docstrings not counted."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    count = 0
    for node in ast.walk(tree):
        count += isinstance(node, ast.stmt)
        count -= isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
    return count


def measure_functions(tree: ast.AST, place: str) -> list[tuple[int, str]]:
    """Return (lines, ``file:line name``) of every function."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [((node.end_lineno or 0) - node.lineno + 1, f"{place}:{node.lineno} {node.name}") for node in found]


def measure(folder: Path) -> tuple[dict[str, Size], list[tuple[int, str]]]:
    """Return the sizes by package, and (lines, path) of every file."""
    sizes: dict[str, Size] = {}
    files: list[tuple[int, str]] = []
    embedded = {"tiny", "tiny-sft"}
    paths = sorted(p for p in folder.rglob("*") if p.suffix in COUNTED and not embedded & set(p.parts))
    for path in paths:
        parts, place = path.relative_to(folder).parts, str(path.relative_to(ROOT))
        size = sizes.setdefault(parts[0] if len(parts) > 1 else "ground", Size())
        text = path.read_text(encoding="utf-8")
        lines = len(text.splitlines())
        size.lines, size.files = size.lines + lines, size.files + 1
        files.append((lines, place))
        if path.suffix == ".py":
            tree = ast.parse(text)
            size.statements += count_statements(tree)
            size.functions += measure_functions(tree, place)
    return sizes, files


def main() -> int:
    """Print the table; return 1 if something is over its budget."""
    sizes, files = measure(PACKAGE)
    functions = [function for size in sizes.values() for function in size.functions]
    contrib = sum(
        len(p.read_text(encoding="utf-8").splitlines())
        for p in (ROOT / "contrib").rglob("*.py")
        if "tests" not in p.parts
    )
    over = []
    print(f"{'':16}{'statements':>14}{'lines':>16}{'files':>8}")
    for name, size in sorted(sizes.items()):
        statements, lines = BUDGETS.get(name, (0, 0))
        print(f"{name:16}{size.statements:6} of {statements:5}{size.lines:7} of {lines:6}{size.files:8}")
        if size.statements > statements or size.lines > lines:
            over.append(f"{name} has {size.statements} statements and {size.lines} lines, of {statements} and {lines}")
    total = [sum(getattr(size, key) for size in sizes.values()) for key in ("statements", "lines", "files")]
    print(f"{'package':16}{total[0]:6}{'':9}{total[1]:7}{'':10}{total[2]:8}")
    print(f"contrib: {contrib} of {MAX_CONTRIB_LINES} lines")
    if contrib > MAX_CONTRIB_LINES:
        over.append(f"contrib has {contrib} lines, its budget is {MAX_CONTRIB_LINES}")
    for title, rows, limit in (("files", files, MAX_FILE_LINES), ("functions", functions, MAX_FUNCTION_LINES)):
        print(f"longest {title} (budget {limit} lines):")
        for lines, place in sorted(rows, reverse=True)[:NUM_SHOWN]:
            print(f"  {lines:4d}  {place}")
        over += [f"{place} has {lines} lines, the budget is {limit}" for lines, place in rows if lines > limit]
    for line in over:
        print(f"over budget: {line}", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
