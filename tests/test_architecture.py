"""Rules of the architecture: layers, one importing module for each heavy dependency, a light start."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "posttrain"

# The packages from the ground up (modules or folders): a package imports only from those above it in this table.
PACKAGES: dict[str, tuple[str, ...]] = {
    "ground": (
        "acting",
        "__init__",
        "types",
        "errors",
        "other_names",
        "strict_yaml",
        "option_types",
        "components",
        "registry",
        "signatures",
        "randomness",
        "untrusted",
        "process_group",
        "activity",
        "folders",
    ),
    "recipes": ("recipes",),
    "balances": ("balances",),  # above the algorithms, so that it cannot use what it computes again
    "algorithms": ("algorithms",),
    "graders": ("graders",),
    "store": ("store",),
    "data": ("data",),
    "models": ("models",),
    "sampling": ("sampling",),
    "evaluation": ("evaluation",),
    "training": ("training",),
    # The core ends here; what follows is the laboratory, which the core never imports.
    "interpret": ("interpret",),
    "runs": ("runs",),
    "sweeps": ("sweeps",),
    "terminal": ("terminal",),
    "reports": ("reports",),
    "api": ("api",),
    "conformance": ("conformance",),
    "commands": ("commands",),  # a command calls the API, which knows no command
    "cli": ("cli", "__main__"),
}
MOST_RECIPE_TAKERS = 38  # a function takes the sections and callables that it needs
RANK = {name: rank for rank, names in enumerate(PACKAGES.values()) for name in names}
PURE_PACKAGES = ("balances.", "algorithms.", "graders.", "data.render.")

# Where a heavy dependency may be imported; everyone else goes through that door.
ALLOWED_IMPORTERS: dict[str, tuple[str, ...]] = {
    "sqlite3": ("store/",),
    "datasets": ("data/",),
    "pyarrow": ("data/",),
    "reasoning_gym": ("data/verifiable/reasoning_gym",),
    "rich": ("commands/", "terminal/"),
    "gradio": ("commands/chat/",),
    "starlette": ("commands/serve/",),
    "google.protobuf": ("commands/serve/tinker/wire.py",),
    "lm_eval": (),  # contrib/ asks through it
    "uvicorn": ("commands/serve/",),
    "fastapi": ("commands/chat/",),  # what gradio is mounted on
    "matplotlib": ("reports/charts.py",),
    "jinja2": ("reports/page.py",),
    "markupsafe": ("reports/page.py",),  # of charts that we drew; templates escape every text
    "peft": ("models/",),
    "bitsandbytes": ("models/quantize.py",),
    # what runs inside a server, to which we talk over HTTP; and vLLM in the trainer's own process
    "vllm": (),  # a server of its own
    "torch.distributed": ("training/distributed.py",),
    "httpx2": ("sampling/http.py",),
    "ray": ("runs/ray.py",),
    "mcp": ("sampling/environments/mcp_tools.py",),
    "accelerate": ("training/distributed.py",),
    "wandb": ("store/trackers.py",),
    "trackio": ("store/tracking/with_trackio.py",),
    "mlflow": ("store/tracking/with_mlflow.py",),
    "swanlab": ("store/tracking/with_swanlab.py",),
    "tensorboard": ("store/trackers.py",),
    "torch.utils.tensorboard": ("store/trackers.py",),
    "sympy": ("graders/math/values.py", "graders/math/magnitudes.py"),
    "mpmath": ("graders/math/values.py", "graders/math/magnitudes.py"),
    "antlr4": ("graders/math/values.py",),
    "math_verify": ("graders/math/values.py",),
    "latex2sympy2_extended": ("graders/math/values.py",),
}
SINGLE_IMPORTERS = ("datasets", "pyarrow")

# A word is a pure function: none of these are imported or called by one.
IMPURE_MODULES = {
    "os",
    "io",
    "pathlib",
    "shutil",
    "tempfile",
    "subprocess",
    "socket",
    "time",
    "datetime",
    "random",
    "secrets",
}
IMPURE_CALLS = {"open", "print", "input"}
# Not words but what some words run in: processes that can be killed, sandboxes, and what runs inside of them.
WORKERS = {
    *(f"graders.sandbox.{name}" for name in ("inside", "sandbox", "worker_process", "workers")),
    *(f"graders.code.{name}" for name in ("exchange", "judging")),
}

# What compares floats with a bound; of the tests, ``closeness.py`` calls it and everyone else calls that.
COMPARISONS = {
    "approx",
    "allclose",
    "isclose",
    "assert_close",
    "assert_allclose",
    "assert_almost_equal",
    "assert_array_almost_equal",
}
TINY = 1e-4  # a difference below a number of this size is a comparison too

# A name means one thing. These classes share a name with a class or a type alias, each for its reason.
DOUBLE_CLASSES = {
    "Grader": "the public API's name for the graders that one call reaches; below it a recipe's rewards with weights",
}
# Modules that offer the functions of one interface by its names, as classes have methods (``conformance.run``).
ADAPTERS = "conformance.adapters."


def modules() -> dict[str, Path]:
    """Dotted name under ``posttrain`` -> file, for every module of the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts)] = path
    return found


MODULES = modules()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))


@cache
def imported_names(path: Path) -> tuple[str, ...]:
    """Dotted names that a file imports, anywhere in it."""
    found: list[str] = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide what is imported"
            assert node.module is not None
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return tuple(found)


def ours(names: Iterable[str]) -> set[str]:
    """Return those of the imported names that are modules of this package, as in ``MODULES``."""
    found = set()
    for name in names:
        if name == "posttrain":
            found.add("__init__")
        elif name.startswith("posttrain."):
            dotted = name.removeprefix("posttrain.")
            for candidate in (dotted, f"{dotted}.__init__"):
                if candidate in MODULES:
                    found.add(candidate)
    return found


def component(module: str) -> str:
    return module.partition(".")[0]


def test_imports_point_down() -> None:
    unplaced = [module for module in MODULES if component(module) not in RANK]
    assert unplaced == [], "say in PACKAGES where they belong"
    upward = [
        f"{module} imports {target}"
        for module, path in MODULES.items()
        for target in ours(imported_names(path))
        if RANK[component(target)] > RANK[component(module)]
    ]
    assert upward == []


def test_folders_have_few_modules_and_a_sentence() -> None:
    folders: dict[Path, list[Path]] = {}
    for path in MODULES.values():
        folders.setdefault(path.parent, []).append(path)
    for folder, files in folders.items():
        assert len([path for path in files if path.name != "__init__.py"]) <= 14, folder
        if folder != PACKAGE:
            assert ast.get_docstring(tree_of(folder / "__init__.py")), f"{folder}: say what belongs there"


def test_imports_have_no_cycle() -> None:
    """Lazy imports and those for types count too."""
    graph = {name: ours(imported_names(path)) - {name, "__init__"} for name, path in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join((*trail[trail.index(name) :], name))}"
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())
    assert done == set(MODULES)


def test_each_heavy_dependency_has_one_importer() -> None:
    for package, importers in ALLOWED_IMPORTERS.items():
        users = [
            str(path.relative_to(PACKAGE))
            for path in MODULES.values()
            if any(name == package or name.startswith(package + ".") for name in imported_names(path))
        ]
        outside = [user for user in users if not user.startswith(importers)]
        assert outside == [], f"{package} is imported outside of {importers}"
        assert package not in SINGLE_IMPORTERS or len(users) <= 1, f"{package}: {users}"


def test_components_are_pure() -> None:
    for module, path in MODULES.items():
        if not module.startswith(PURE_PACKAGES) or module in WORKERS:
            continue
        impure = {name.partition(".")[0] for name in imported_names(path)} & IMPURE_MODULES
        assert impure == set(), f"{module}: no files, clocks or devices"
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in IMPURE_CALLS, f"{module}:{node.lineno} calls {node.func.id}"
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("cuda", "device_count"), f"{module}:{node.lineno} names a device"


def test_no_exception_is_swallowed() -> None:
    for module, path in MODULES.items():
        for node in nodes_of(path):
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type is not None else "everything"
                if caught in ("everything", "Exception", "BaseException"):
                    reraises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
                    body = ast.unparse(node.body[0])  # an attribute keeps it for the caller, who raises it
                    is_kept = re.fullmatch(rf"\w+\.error = {node.name}", body) is not None
                    assert reraises or is_kept, f"{module}:{node.lineno} catches {caught} and goes on"


def is_own_comparison(node: ast.AST) -> bool:
    """Return True for code that compares floats with a bound past the helper of the tests."""
    if isinstance(node, ast.Attribute):
        return node.attr in COMPARISONS
    if isinstance(node, ast.ImportFrom) and node.module != "closeness":
        return any(alias.name in COMPARISONS for alias in node.names)
    if not isinstance(node, ast.Compare) or not isinstance(node.ops[-1], ast.Lt | ast.LtE):
        return False
    limit = node.comparators[-1]
    is_tiny = isinstance(limit, ast.Constant) and isinstance(limit.value, float) and 0 < limit.value <= TINY
    return is_tiny and re.search(r"abs\(|difference", ast.unparse(node)) is not None


def is_registered(node: ast.FunctionDef) -> bool:
    """Return True for a component: its name is the key that recipes give, so that one kind may repeat another's."""
    calls = [one.func for one in node.decorator_list if isinstance(one, ast.Call)]
    return any(isinstance(one, ast.Name) and one.id == "register" for one in calls)


def exported_classes(tree: ast.Module) -> set[str]:
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}


def exported_aliases(tree: ast.Module) -> set[str]:
    """The names of types that a module builds from others, and of type variables."""
    found: list[ast.expr] = []
    for node in tree.body:
        if isinstance(node, ast.Assign):
            found += node.targets
        elif isinstance(node, ast.AnnAssign):
            found.append(node.target)
    names = {target.id for target in found if isinstance(target, ast.Name)}
    return {name for name in names if re.fullmatch(r"[A-Z][A-Za-z]*[a-z][A-Za-z]*", name)}


def exported_functions(tree: ast.Module) -> set[str]:
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    names = {node.name for node in functions if not (isinstance(node, ast.FunctionDef) and is_registered(node))}
    return {name for name in names if name != "main" and not name.startswith("_")}


def homes_of(exported: Callable[[ast.Module], set[str]]) -> dict[str, list[str]]:
    """Exported name -> the modules that define it."""
    homes: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for name in exported(tree_of(path)):
            homes.setdefault(name, []).append(module)
    return homes


def names_in(annotation: ast.expr | None) -> set[str]:
    """The names in an annotation, quoted ones too."""
    if annotation is None:
        return set()
    found = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    for node in ast.walk(annotation):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"\w+", node.value))
    return found


def test_few_functions_take_the_whole_recipe() -> None:
    """A function (nested or a method, too) counts once if any of its parameters is annotated with ``Recipe``."""
    takers = []
    for module, path in MODULES.items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                own = node.args
                parameters = [*own.posonlyargs, *own.args, *own.kwonlyargs, own.vararg, own.kwarg]
                if any(one is not None and "Recipe" in names_in(one.annotation) for one in parameters):
                    takers.append(f"{module}.{node.name}")
    assert len(takers) <= MOST_RECIPE_TAKERS, takers


def test_class_name_has_one_meaning() -> None:
    """A type alias may repeat another alias (a shape, a type variable), but not a class."""
    classes = homes_of(exported_classes)
    aliases = homes_of(exported_aliases)
    doubles = {name: homes + aliases.get(name, []) for name, homes in classes.items()}
    doubles = {name: homes for name, homes in doubles.items() if len(homes) > 1}
    assert {name: homes for name, homes in doubles.items() if name not in DOUBLE_CLASSES} == {}
    assert set(DOUBLE_CLASSES) <= set(doubles), "a double that is gone leaves the list"


def test_function_name_has_one_meaning() -> None:
    doubles = {}
    for name, homes in homes_of(exported_functions).items():
        if len(homes) > 1 and not all(home.startswith(ADAPTERS) for home in homes):
            doubles[name] = homes
    assert doubles == {}


def test_exported_names_are_seen_and_components_are_not() -> None:
    code = (
        "class Row: pass\nclass _Column: pass\nShape = tuple[int, int]\nMAX = 1\nItemT: object = 1\n"
        "def read(): pass\nasync def wait(): pass\ndef main(): pass\ndef _hidden(): pass\n"
        "@register('grader')\ndef math(): pass\n@cache\ndef known(): pass"
    )
    tree = ast.parse(code)
    assert exported_classes(tree) == {"Row"}
    assert exported_aliases(tree) == {"Shape", "ItemT"}
    assert exported_functions(tree) == {"read", "wait", "known"}


def test_floats_of_two_computations_are_compared_by_one_helper() -> None:
    """So that `make test-noise` sees every bound."""
    for folder in (ROOT / "tests", ROOT / "contrib" / "tests"):
        for path in sorted(folder.rglob("*.py")):
            if path != ROOT / "tests" / "closeness.py":
                found = [node.lineno for node in nodes_of(path) if is_own_comparison(node)]
                assert found == [], f"{path}: compare by approx, allclose or assert_close of closeness.py"


@pytest.mark.parametrize(
    "code", ["pytest.approx(1.0)", "torch.allclose(a, b)", "from pytest import approx", "(a - b).abs().max() < 1e-5"]
)
def test_a_comparison_past_the_helper_is_seen(code: str) -> None:
    assert any(is_own_comparison(node) for node in ast.walk(ast.parse(code)))


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from posttrain.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as done:\n    assert done.code == 0\n"
        "print('LOADED', sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    out = run_python(code)
    assert "usage: posttrain" in out
    loaded = set(ast.literal_eval(out.partition("LOADED ")[2]))
    assert loaded.isdisjoint({"torch", "numpy", "pydantic", "yaml", "rich", "transformers", "matplotlib"})


def test_no_command_line_is_made_up() -> None:
    """A library call takes a typed request where a command takes a command line."""
    for module, path in MODULES.items():
        functions = [node.func for node in nodes_of(path) if isinstance(node, ast.Call)]
        calls = [node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in functions]
        assert component(module) in PACKAGES["cli"] or not any(call == "Namespace" for call in calls), module


def test_imports_of_lists_and_of_a_dry_run_load_no_torch_and_no_transformers() -> None:
    names = ", ".join(f"posttrain.{name}" for name in PACKAGES["ground"] if name != "__init__")
    code = (
        f"import sys, {names}, posttrain.runs.launch, posttrain.runs.listing\nprint('torch' in sys.modules)\n"
        "from posttrain.cli import main\nmain(['recipes'])\nmain(['data'])\nprint('torch' in sys.modules)\n"
        "main(['train', 'tiny/grpo', '--dry-run'])\nprint('transformers' in sys.modules)"
    )
    lines = run_python(code).splitlines()
    assert [line for line in lines if line in ("True", "False")] == ["False"] * 3


def eager_imports(path: Path) -> set[str]:
    """The modules of this package that importing a file imports: outside of functions and of ``if TYPE_CHECKING``."""
    found: list[str] = []
    todo: list[ast.AST] = list(tree_of(path).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            todo += ast.iter_child_nodes(node)
    packages = {".".join(name.split(".")[:length]) for name in found for length in range(2, name.count(".") + 1)}
    return ours({*found, *packages})


def test_a_model_is_queried_and_evaluated_without_the_laboratory() -> None:
    reached, todo = set[str](), {"sampling.models", "runs.models", "evaluation.plan", "evaluation.win_rate"}
    while todo:
        reached |= todo
        todo = {target for name in todo for target in eager_imports(MODULES[name])} - reached
    assert {"training.checks", "sampling.base"} & reached, "the imports are followed"
    assert {name for name in reached if component(name) in ("interpret", "commands")} == set()
