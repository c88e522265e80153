"""Change one expression of the package at a time, and see whether the tests of its package notice.

A mutant is one change in one function: a comparison with its neighbour (``<`` for ``<=``), ``+`` for ``-``, ``and``
for ``or``, a number one higher, a dropped statement. It is drawn by a seed and recorded as text (the function, the
kind of change, the expression before and after, and which of several equal expressions), so that the same mutants can
be made again after the code around them changed; a function that moved within its package is found by its name.

Everything tracked is copied to a temporary folder, where one mutant after another is made and unmade. The test files
that name the mutant's module run first, then the others of its package, up to the first failure. Tests that fail, or
do not come to an end, have caught it.

    python tools/mutants.py draw FILE [--seed 54]     write 60 mutants that nobody ran
    python tools/mutants.py run FILE --name NAME      run each, and record what caught it under NAME
    python tools/mutants.py compare FILE A B          which were caught in A and survive in B; exit 1 if any
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCES = Path("src", "posttrain")
# By package: how many mutants, and the folders of its tests.
PACKAGES: dict[str, tuple[int, tuple[str, ...]]] = {
    "training": (16, ("tests/training",)),
    "algorithms": (12, ("tests/algorithms",)),
    "data/render": (10, ("tests/data/render", "tests/real")),
    "sampling": (12, ("tests/sampling",)),
    "store": (10, ("tests/store",)),
}
ELSEWHERE = "plugin"  # a folder whose code runs inside of another program
CPU_SECONDS = 600  # of one process, whatever else the machine does
WALL_SECONDS = 5400.0
EXIT_NO_TESTS = 5
PLAIN = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "amin": "amax", "amax": "amin"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Mutant:
    """One change of one function.

    Args:
        package: A key of `PACKAGES`.
        module: The file, below ``src/posttrain``.
        function: Its name with the classes around it.
        kind: The kind of change, such as ``comparison``.
        nth: Which of the function's expressions that read ``before`` and have this kind, from 1.
        before: The expression as it is, in one line.
        after: The expression that stands for it.
    """

    package: str
    module: str
    function: str
    kind: str
    nth: int
    before: str
    after: str

    def describe(self) -> str:
        module = self.module.removesuffix(".py").replace("/", ".")
        return f"{module}.{self.function}: {self.kind} {self.nth}: {self.before} -> {self.after}"


Site = tuple[str, ast.expr | ast.stmt, str]  # the kind, the node, its text afterwards


def has_text(node: ast.expr) -> bool:
    """Return True if an operand is visibly a text or a list, whose other operators are errors of type."""
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def changes_of_expression(node: ast.expr) -> Iterator[Site]:
    """Yield the changes of one expression."""
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            ops = [*node.ops[:index], COMPARISONS[type(operator)](), *node.ops[index + 1 :]]
            yield "comparison", node, ast.unparse(ast.Compare(node.left, ops, node.comparators))
    elif isinstance(node, ast.BinOp):
        other = OPERATORS.get(type(node.op))
        if other is not None and not has_text(node.left) and not has_text(node.right):
            yield "operator", node, ast.unparse(ast.BinOp(node.left, other(), node.right))
    elif isinstance(node, ast.BoolOp):
        flipped = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and or", node, ast.unparse(ast.BoolOp(flipped, node.values))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", node, ast.unparse(node.operand)
    elif isinstance(node, ast.IfExp):
        yield "sides", node, ast.unparse(ast.IfExp(node.test, node.orelse, node.body))
    elif isinstance(node, ast.Constant):
        yield from changes_of_constant(node)
    elif isinstance(node, ast.Name) and node.id in CALLS:
        yield "call", node, CALLS[node.id]
    elif isinstance(node, ast.Attribute) and node.attr in CALLS:
        yield "call", node, ast.unparse(ast.Attribute(node.value, CALLS[node.attr], ast.Load()))


def changes_of_constant(node: ast.Constant) -> Iterator[Site]:
    if isinstance(node.value, bool):
        yield "constant", node, repr(not node.value)
    elif isinstance(node.value, int):
        yield "constant", node, repr(node.value + 1)
    elif isinstance(node.value, float):
        yield "constant", node, repr(2 * node.value or 1.0)


def changes_of_statement(node: ast.stmt) -> Iterator[Site]:
    """Yield the changes of one statement: to drop it, or to subtract what it adds."""
    if isinstance(node, ast.AugAssign):
        other = OPERATORS.get(type(node.op))
        if other is not None and not has_text(node.value):
            yield "operator", node, ast.unparse(ast.AugAssign(node.target, other(), node.value))
    elif (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)) or (
        isinstance(node, ast.Assign) and all(isinstance(t, ast.Attribute | ast.Subscript) for t in node.targets)
    ):
        yield "statement", node, "pass"


def parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what a function consists of in the order of the source, without annotations, messages and functions."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for part in value if isinstance(value, list) else [value]:
            if not isinstance(part, ast.AST) or isinstance(part, ast.Raise | ast.JoinedStr | ast.Assert | ast.ClassDef):
                continue
            if isinstance(part, FUNCTIONS):
                continue
            yield part
            yield from parts(part)


def sites(function: ast.AST) -> Iterator[Site]:
    """Yield every change of a function in the order of the source."""
    for node in parts(function):
        if isinstance(node, ast.expr):
            yield from changes_of_expression(node)
        elif isinstance(node, ast.stmt):
            yield from changes_of_statement(node)


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield (qualified name, node) of every function, those inside of functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            name = f"{prefix}{node.name}"
            if isinstance(node, FUNCTIONS):
                yield name, node
            yield from functions(node, f"{name}.")
        else:
            yield from functions(node, prefix)


def mutants_of(package: str, module: Path, function: str, node: ast.AST) -> Iterator[tuple[Mutant, Site]]:
    """Yield every mutant of one function with its place."""
    seen: Counter[tuple[str, str, str]] = Counter()
    for site in sites(node):
        kind, place, after = site
        before = ast.unparse(place)
        seen[kind, before, after] += 1
        mutant = Mutant(package, module.as_posix(), function, kind, seen[kind, before, after], before, after)
        yield mutant, site


def modules_of(package: str, root: Path) -> list[Path]:
    """Return the files of a package, below ``src/posttrain``."""
    folder = root / SOURCES
    found = sorted((folder / package).rglob("*.py"))
    return [path.relative_to(folder) for path in found if ELSEWHERE not in path.parts]


def draw(seed: int) -> list[Mutant]:
    """Return mutants in functions drawn uniformly within each package, one a function, all kinds alike."""
    drawn = []
    for package, (count, _) in PACKAGES.items():
        numbers = random.Random(f"{seed} {package}")
        by_function = []
        for module in modules_of(package, ROOT):
            tree = ast.parse((ROOT / SOURCES / module).read_text(encoding="utf-8"))
            for name, node in functions(tree):
                found = [mutant for mutant, _ in mutants_of(package, module, name, node)]
                if found:
                    by_function.append(found)
        for found in numbers.sample(by_function, count):
            kind = numbers.choice(sorted({mutant.kind for mutant in found}))
            drawn.append(numbers.choice([mutant for mutant in found if mutant.kind == kind]))
    return drawn


def find(mutant: Mutant, root: Path) -> tuple[Path, Site] | None:
    """Return the file and the place of a mutant: in its module, else in a function of its name in its package."""
    modules = modules_of(mutant.package, root)
    modules.sort(key=lambda module: module.as_posix() != mutant.module)
    for module in modules:
        tree = ast.parse((root / SOURCES / module).read_text(encoding="utf-8"))
        for name, node in functions(tree):
            if name.rpartition(".")[2] != mutant.function.rpartition(".")[2]:
                continue
            for other, site in mutants_of(mutant.package, module, name, node):
                if (other.kind, other.nth, other.before, other.after) == (
                    mutant.kind,
                    mutant.nth,
                    mutant.before,
                    mutant.after,
                ):
                    return root / SOURCES / module, site
    return None


def changed(text: str, site: Site) -> str:
    """Return the source with one place changed; an expression in parentheses, so that nothing binds otherwise."""
    _, node, after = site
    lines = text.splitlines(keepends=True)
    first, last = lines[node.lineno - 1].encode(), lines[(node.end_lineno or 0) - 1].encode()
    new = f"({after})" if isinstance(node, ast.expr) else after
    edited = first[: node.col_offset].decode() + new + last[node.end_col_offset :].decode()
    return "".join([*lines[: node.lineno - 1], edited, *lines[node.end_lineno :]])


def ordered_tests(mutant: Mutant, root: Path) -> list[str]:
    """Return the test files of the package, those that name the module or the function first."""
    dotted = mutant.module.removesuffix(".py").replace("/", ".")
    parent, _, module = dotted.rpartition(".")
    name = mutant.function.split(".")[-1].lstrip("_")
    ranked = []
    for folder in PACKAGES[mutant.package][1]:
        for path in sorted((root / folder).rglob("test_*.py")):
            text = path.read_text(encoding="utf-8")
            names_it = f"posttrain.{dotted}" in text or f"from posttrain.{parent} import {module}" in text
            ranked.append((-2 * names_it - (name in text), len(text), str(path.relative_to(root))))
    return [path for *_, path in sorted(ranked)]


def limit_processor_time() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))


def run_tests(root: Path, paths: list[str]) -> dict[str, Any]:
    """Return the verdict of some tests on what is in a folder, the first test that failed, and the seconds."""
    environment = {**os.environ, **PLAIN, "PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "--tb=no", "-rfE", "-p", "no:cacheprovider", *paths]
    start = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=WALL_SECONDS,
            preexec_fn=limit_processor_time,
        )
    except subprocess.TimeoutExpired:
        return {"verdict": "caught", "by": "time", "seconds": round(WALL_SECONDS)}
    seconds = round(time.monotonic() - start)
    if done.returncode in (0, EXIT_NO_TESTS):
        return {"verdict": "survived", "by": "", "seconds": seconds}
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    by = failed[0].split(" ")[1] if failed else (done.stderr or done.stdout).strip().rpartition("\n")[2]
    return {"verdict": "caught", "by": by, "seconds": seconds}


def copy_tracked(target: Path) -> None:
    """Copy every tracked file, as it is in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)


def run_all(
    mutants: list[Mutant], root: Path, earlier: dict[str, dict[str, Any]]
) -> Iterator[tuple[Mutant, dict[str, Any]]]:
    """Yield what the tests say of each mutant, made in a copy of everything; the test that caught it earlier first."""
    for mutant in mutants:
        place = find(mutant, root)
        if place is None:
            yield mutant, {"verdict": "gone", "by": "", "seconds": 0}
            continue
        path, site = place
        text = path.read_text(encoding="utf-8")
        path.write_text(changed(text, site), encoding="utf-8")
        try:
            test = earlier.get(mutant.describe(), {}).get("by", "").partition("[")[0]
            file, _, name = test.partition("::")
            result = {"verdict": "survived"}
            if (root / file).is_file() and f"def {name.rpartition('::')[2]}(" in (root / file).read_text(
                encoding="utf-8"
            ):
                result = run_tests(root, [test])
            if result["verdict"] == "survived":
                result = run_tests(root, ordered_tests(mutant, root))
            yield mutant, result
        finally:
            path.write_text(text, encoding="utf-8")


def run_command(path: Path, name: str, packages: list[str], unchanged: bool, after: str | None) -> int:
    """Run the mutants of a file that have no result under a name, writing each result as it comes."""
    record = json.loads(path.read_text(encoding="utf-8"))
    mutants = [Mutant(**mutant) for mutant in record["mutants"]]
    results = record["runs"].setdefault(name, {})
    earlier = record["runs"].get(after, {})
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        root = Path(folder).resolve()
        copy_tracked(root)
        for package in packages if unchanged else ():
            found = run_tests(root, list(PACKAGES[package][1]))
            print(f"{package}, unchanged: {found}", flush=True)
            if found["verdict"] != "survived":
                return 1
        waiting = [mutant for mutant in mutants if mutant.package in packages and mutant.describe() not in results]
        for mutant, result in run_all(waiting, root, earlier):
            print(f"{result['verdict']:8} {result['seconds']:4} s  {mutant.describe()}  {result['by']}", flush=True)
            again = json.loads(path.read_text(encoding="utf-8"))
            again["runs"].setdefault(name, {})[mutant.describe()] = result
            path.write_text(json.dumps(again, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def compare(path: Path, first: str, second: str) -> int:
    """Print the counts of two runs and every mutant that only the first caught; return 1 if there is one."""
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    for name in (first, second):
        print(name, dict(Counter(result["verdict"] for result in runs[name].values())))
    caught = [mutant for mutant, result in runs[first].items() if result["verdict"] == "caught"]
    lost = [mutant for mutant in caught if runs[second].get(mutant, {}).get("verdict") != "caught"]
    for mutant in lost:
        print("lost:", mutant)
    return 1 if lost else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="write mutants that nobody ran")
    running = commands.add_parser("run", help="run the tests on each")
    comparing = commands.add_parser("compare", help="what one run caught and another did not")
    for command in (drawing, running, comparing):
        command.add_argument("file", type=Path)
    drawing.add_argument("--seed", type=int, default=54)
    running.add_argument("--name", required=True, help="of this run, such as a commit")
    running.add_argument("--packages", nargs="*", choices=list(PACKAGES), default=list(PACKAGES))
    running.add_argument("--unchanged", action="store_true", help="first see that the tests pass without a mutant")
    running.add_argument("--after", help="an earlier run, whose catching test is tried first")
    comparing.add_argument("first")
    comparing.add_argument("second")
    given = parser.parse_args()
    if given.command == "draw":
        mutants = draw(given.seed)
        record = {"seed": given.seed, "mutants": [asdict(mutant) for mutant in mutants], "runs": {}}
        given.file.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print("\n".join(mutant.describe() for mutant in mutants))
        return 0
    if given.command == "run":
        return run_command(given.file, given.name, given.packages, given.unchanged, given.after)
    return compare(given.file, given.first, given.second)


if __name__ == "__main__":
    sys.exit(main())
