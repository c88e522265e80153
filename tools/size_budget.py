"""Print the size and the density of the package by folder, and refuse what outgrew its budget.

What a reader pays for is tokens and density. Tokens are names, operators, numbers and strings of all Python below
``src``; a folder has a budget of them, and a feature raises its folder's in the commit that brings it. Density is
counted inside functions, without docstrings and imports, over the whole package: mathematics and tables are dense by
nature, so no module has a limit. Folded is a conditional expression or an ``or`` whose other side is empty, and a loop
over a conditional expression. A file is one idea and has at most 600 lines, a function at most 60. Lines and
statements are printed only: a limit on them is met by folding.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "posttrain"
EMBEDDED = {"tiny", "tiny-sft"}  # folders of weights
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_CONTRIB_LINES = 3_000
NUM_SHOWN = 5
MAX_NODES = 8.5  # expressions and statements, a statement
MAX_FOLDED = 140
MAX_TUPLE_ASSIGNMENTS = 12.0  # two values assigned in one statement, per 1,000 statements
MAX_CONDITIONAL_EXPRESSIONS = 40.0  # `x if c else y`, per 1,000 statements
# Tokens that a folder may have; "ground" is the modules outside of folders.
TOKENS: dict[str, int] = {
    "acting": 2_810,
    "algorithms": 13_499,
    "api": 20_815,
    "balances": 23_099,
    "commands": 69_392,
    "conformance": 15_247,
    "data": 68_814,
    "evaluation": 31_203,
    "graders": 40_383,
    "ground": 20_230,
    "interpret": 37_618,
    "models": 44_065,
    "other_names": 5_676,
    "recipes": 14_483,
    "reports": 17_605,
    "runs": 47_083,
    "sampling": 62_259,
    "store": 20_916,
    "sweeps": 26_292,
    "terminal": 4_444,
    "training": 73_933,
}
EMPTY = ("{}", "[]", "()", "''", "dict()", "list()", "tuple()", "set()")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
TOKEN_KINDS = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)


def count_tokens(text: str) -> int:
    """Return the number of names, operators, numbers and strings."""
    return sum(token.type in TOKEN_KINDS for token in tokenize.generate_tokens(io.StringIO(text).readline))


def nodes_inside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield every node of the bodies of functions and of lambdas once, without docstrings and imports."""
    seen: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            seen.update(id(part) for part in ast.walk(node.body[0]))
    for function in ast.walk(tree):
        bodies: list[ast.AST] = []
        if isinstance(function, FUNCTIONS):
            bodies = [*function.body]
        elif isinstance(function, ast.Lambda):
            bodies = [function]
        for body in bodies:
            for node in ast.walk(body):
                if id(node) in seen or isinstance(node, ast.Import | ast.ImportFrom):
                    continue
                seen.add(id(node))
                yield node


def is_folded(node: ast.AST) -> bool:
    """Return True if a node hides an `if` in an expression whose other side is empty."""
    if isinstance(node, ast.IfExp):
        return ast.unparse(node.orelse) in EMPTY
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
        return ast.unparse(node.values[-1]) in EMPTY
    if isinstance(node, ast.For | ast.comprehension):
        return isinstance(node.iter, ast.IfExp)
    return False


def is_tuple_assignment(node: ast.AST) -> bool:
    """Return True if a statement assigns several values that it also lists."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return any(isinstance(target, ast.Tuple) and len(target.elts) > 1 for target in node.targets)


def measure_density(tree: ast.AST) -> Counter[str]:
    """Return statements, nodes, folded, tuple assignments and conditional expressions inside functions."""
    counts: Counter[str] = Counter()
    for node in nodes_inside_functions(tree):
        counts["statements"] += isinstance(node, ast.stmt)
        counts["nodes"] += isinstance(node, ast.stmt | ast.expr)
        counts["folded"] += is_folded(node)
        counts["tuples"] += is_tuple_assignment(node)
        counts["conditionals"] += isinstance(node, ast.IfExp)
    return counts


def measure_functions(tree: ast.AST, place: str) -> list[tuple[int, str]]:
    """Return (lines, ``file:line name``) of every function."""
    found = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    return [((node.end_lineno or 0) - node.lineno + 1, f"{place}:{node.lineno} {node.name}") for node in found]


def measure(folder: Path) -> tuple[dict[str, Counter[str]], list[tuple[int, str]], list[tuple[int, str]]]:
    """Return the counts by package, and (lines, place) of every file and of every function."""
    sizes: dict[str, Counter[str]] = {}
    files: list[tuple[int, str]] = []
    functions: list[tuple[int, str]] = []
    for path in sorted(folder.rglob("*.py")):
        if EMBEDDED & set(path.parts):
            continue
        parts = path.relative_to(folder).parts
        name = "ground"
        if len(parts) > 1:
            name = parts[0]
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        lines = len(text.splitlines())
        place = str(path.relative_to(ROOT))
        size = sizes.setdefault(name, Counter())
        size += measure_density(tree)
        size["tokens"] += count_tokens(text)
        size["lines"] += lines
        size["files"] += 1
        files.append((lines, place))
        functions += measure_functions(tree, place)
    return sizes, files, functions


def describe(name: str, size: Counter[str], budget: str) -> str:
    """Return a line of the table."""
    statements = max(size["statements"], 1)
    nodes = size["nodes"] / statements
    tuples = 1e3 * size["tuples"] / statements
    conditionals = 1e3 * size["conditionals"] / statements
    counts = f"{size['files']:6}{size['lines']:8}{size['statements']:12}{size['tokens']:9}{budget:>11}"
    return f"{name:16}{counts}{nodes:8.2f}{size['folded']:8}{tuples:8.0f}{conditionals:13.0f}"


def density_faults(size: Counter[str]) -> list[str]:
    """Return what the whole package has too much of."""
    thousands = size["statements"] / 1e3
    measured = [
        ("nodes a statement", size["nodes"] / size["statements"], MAX_NODES),
        ("folded expressions", size["folded"], MAX_FOLDED),
        ("tuple assignments per 1,000 statements", size["tuples"] / thousands, MAX_TUPLE_ASSIGNMENTS),
        ("conditional expressions per 1,000 statements", size["conditionals"] / thousands, MAX_CONDITIONAL_EXPRESSIONS),
    ]
    return [f"the package has {value:.2f} {what}, at most {most}" for what, value, most in measured if value > most]


def main() -> int:
    """Print the table; return 1 if something is over its budget."""
    sizes, files, functions = measure(PACKAGE)
    over = []
    print(f"{'':16} files   lines  statements   tokens     budget   nodes  folded  tuples  conditionals")
    total: Counter[str] = Counter()
    for name, size in sorted(sizes.items()):
        total += size
        budget = TOKENS.get(name, 0)
        print(describe(name, size, str(budget)))
        if size["tokens"] > budget:
            over.append(f"{name} has {size['tokens']} tokens, of {budget}")
    print(describe("package", total, str(sum(TOKENS.values()))))
    over += density_faults(total)
    contrib_files = [path for path in (ROOT / "contrib").rglob("*.py") if "tests" not in path.parts]
    contrib = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in contrib_files)
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
