"""Print the size of the package and refuse files and functions that outgrew their budget.

Size is a feature: a reader should find any formula within two files of the command. Files have at
most 400 lines, functions at most 60 (docstring included).
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "posttrain"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
NUM_SHOWN = 5


def measure_functions(path: Path) -> list[tuple[int, str]]:
    """(lines, ``file:line name``) of every function in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            place = f"{path.relative_to(PACKAGE.parent.parent)}:{node.lineno} {node.name}"
            found.append((node.end_lineno - node.lineno + 1, place))
    return found


def main() -> int:
    paths = sorted(PACKAGE.rglob("*.py"))
    root = PACKAGE.parent.parent
    files = sorted(
        ((len(p.read_text(encoding="utf-8").splitlines()), str(p.relative_to(root))) for p in paths), reverse=True
    )
    functions = sorted((item for path in paths for item in measure_functions(path)), reverse=True)
    print(f"package: {sum(size for size, _ in files)} lines in {len(files)} files, {len(functions)} functions")
    for title, rows, limit in (("files", files, MAX_FILE_LINES), ("functions", functions, MAX_FUNCTION_LINES)):
        print(f"longest {title} (budget {limit} lines):")
        for size, place in rows[:NUM_SHOWN]:
            print(f"  {size:4d}  {place}")
    over = [(size, place) for size, place in files if size > MAX_FILE_LINES]
    over += [(size, place) for size, place in functions if size > MAX_FUNCTION_LINES]
    for size, place in over:
        print(f"over budget: {place} has {size} lines", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
