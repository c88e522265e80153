"""The house rules that a reader relies on: rooms, one door per heavy dependency, light start."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "posttrain"

# The rooms from the ground up (one or several modules or folders on a line): a room imports only what stands before it.
ROOMS: dict[str, tuple[str, ...]] = {
    "ground": (
        "__init__",
        "types",
        "errors",
        "strict_yaml",
        "option_types",
        "registry",
        "randomness",
        "untrusted",
        "world",
    ),
    "recipes": ("recipes",),
    "algorithms": ("algorithms",),
    "graders": ("graders",),
    "rewards": ("rewards",),
    "render": ("render",),
    "tasks": ("tasks",),
    "environments": ("environments",),
    "store": ("store",),
    "models": ("models",),
    "engines": ("engines",),
    "evals": ("evals",),
    "reward_models": ("reward_models",),
    "train": ("train",),
    # The core ends here; what follows is the laboratory, which the core never imports.
    "interpret": ("interpret",),
    "runs": ("runs",),
    "sweeps": ("sweeps",),
    "reports": ("reports",),
    "commands": ("commands",),
    "cli": ("cli", "__main__"),
}
RANK = {name: rank for rank, names in enumerate(ROOMS.values()) for name in names}
PURE_ROOMS = ("algorithms", "graders", "rewards", "render")

# Where a heavy dependency may be imported; everyone else goes through that door.
DOORS: dict[str, tuple[str, ...]] = {
    "sqlite3": ("store/",),
    "datasets": ("tasks/",),
    "pyarrow": ("tasks/",),
    "reasoning_gym": ("tasks/verifiable/reasoning_gym",),
    "rich": ("commands/",),
    "gradio": ("commands/chat/",),
    "starlette": ("commands/serve/",),
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
    "torch.distributed": ("train/distributed.py",),
    "httpx2": ("engines/http.py",),
    "ray": ("runs/ray.py",),
    "accelerate": ("train/distributed.py",),
    "lightning": ("interpret/dictionaries/training.py",),
    "wandb": ("store/trackers.py",),
    "tensorboard": ("store/trackers.py",),
    "torch.utils.tensorboard": ("store/trackers.py",),
    "sympy": ("graders/math/values.py", "graders/math/magnitudes.py"),
    "mpmath": ("graders/math/values.py", "graders/math/magnitudes.py"),
    "antlr4": ("graders/math/values.py",),
    "math_verify": ("graders/math/values.py",),
    "latex2sympy2_extended": ("graders/math/values.py",),
}
SINGLE_DOORS = ("datasets", "pyarrow")

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
    *(f"graders.sandbox.{name}" for name in ("inside", "sandbox", "system_calls", "worker_process", "workers")),
    *(f"graders.code.{name}" for name in ("exchange", "judging")),
}


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
def imported_names(path: Path, *, at_import_time: bool = False) -> tuple[str, ...]:
    """Dotted names that a file imports, anywhere; or only those that run when it is imported."""
    tree = tree_of(path)
    return tuple(_names_in(_toplevel(tree.body) if at_import_time else ast.walk(tree), path))


def _names_in(nodes: Iterable[ast.AST], path: Path) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide what is imported"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _toplevel(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        for part in ("body", "orelse", "handlers", "finalbody"):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _toplevel(getattr(node, part, []))


def ours(names: Iterable[str]) -> set[str]:
    """Of imported names, the modules of this package, as in ``MODULES``."""
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


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    assert component(module) in RANK, f"{module}: say in ROOMS where it belongs"
    for target in ours(imported_names(MODULES[module])):
        assert RANK[component(target)] <= RANK[component(module)], f"{module} imports {target}, which stands above it"


def _folders() -> dict[str, list[Path]]:
    folders: dict[str, list[Path]] = {}
    for path in MODULES.values():
        folders.setdefault(str(path.parent.relative_to(PACKAGE)), []).append(path)
    return folders


@pytest.mark.parametrize("folder", _folders())
def test_a_folder_has_few_modules(folder: str) -> None:
    files = [path for path in _folders()[folder] if path.name != "__init__.py"]
    assert len(files) <= 14, f"{folder} has {len(files)} modules"


@pytest.mark.parametrize("folder", [f for f in _folders() if f != "."])
def test_a_room_says_in_one_sentence_what_it_is(folder: str) -> None:
    tree = tree_of(PACKAGE / folder / "__init__.py")
    assert ast.get_docstring(tree), f"{folder}/__init__.py says in one sentence what belongs there"


def test_imports_have_no_cycle() -> None:
    graph = {name: ours(imported_names(path, at_import_time=True)) - {name} for name, path in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join((*trail, name))}"
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())
    assert done == set(MODULES)


@pytest.mark.parametrize("package", DOORS)
def test_one_door_per_heavy_dependency(package: str) -> None:
    users = [
        str(path.relative_to(PACKAGE))
        for path in MODULES.values()
        if any(name == package or name.startswith(package + ".") for name in imported_names(path))
    ]
    strangers = [user for user in users if not user.startswith(DOORS[package])]
    assert strangers == [], f"{package} is imported outside its door {DOORS[package]}"
    if package in SINGLE_DOORS:
        assert len(users) <= 1, f"{package} has more than one door: {users}"


@pytest.mark.parametrize("module", [m for m in MODULES if component(m) in PURE_ROOMS and m not in WORKERS])
def test_words_are_pure(module: str) -> None:
    tree = tree_of(MODULES[module])
    impure = {name.partition(".")[0] for name in imported_names(MODULES[module])} & IMPURE_MODULES
    assert impure == set(), f"{module} is a word: no files, clocks or devices"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in IMPURE_CALLS, f"{module}:{node.lineno} calls {node.func.id}"
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("cuda", "device_count"), f"{module}:{node.lineno} names a device"


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_swallowed(module: str) -> None:
    for node in ast.walk(tree_of(MODULES[module])):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type is not None else "everything"
            broad = {"everything", "Exception", "BaseException"}
            if caught in broad:
                reraises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
                assert reraises, f"{module}:{node.lineno} catches {caught} and goes on"


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
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


def test_ground_imports_no_torch() -> None:
    names = ", ".join(f"posttrain.{name}" for name in ROOMS["ground"] if name != "__init__")
    assert run_python(f"import sys, {names}\nprint('torch' in sys.modules)").strip() == "False"


def test_listing_recipes_imports_no_torch() -> None:
    code = "import sys\nfrom posttrain.cli import main\nmain(['recipes'])\nprint('torch' in sys.modules)"
    assert run_python(code).splitlines()[-1] == "False"


@pytest.mark.parametrize("module", [name for name in MODULES if component(name) not in ROOMS["cli"]])
def test_no_namespace_is_made_up(module: str) -> None:
    """What a command does with a command line, a library call does with a typed request."""
    tree = tree_of(MODULES[module])
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not [call for call in calls if call.endswith("Namespace")]


def test_a_model_is_asked_and_evaluated_without_the_laboratory() -> None:
    code = (
        "import sys, posttrain.engines.models, posttrain.evals.plan, posttrain.evals.win_rate, posttrain.runs.models\n"
        "print(sorted(name for name in sys.modules if name.startswith(('posttrain.interpret', 'posttrain.commands'))))"
    )
    assert run_python(code).strip() == "[]"
