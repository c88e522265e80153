"""Python that documents show: what can be said of it without a run."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import posttrain as pt
from page_commands import blocks
from posttrain.api.inputs import overrides_of
from posttrain.errors import PosttrainError

# Names that a page takes for given: what its text says is at hand.
GIVEN = {"rows", "held_out", "run", "pairs", "model", "tokenizer", "questions", "frame", "reward", "mine", "recipe"}


def python_of(page: Path) -> list[str]:
    """The Python blocks of a page."""
    return [text for language, text in blocks(page) if language == "python"]


def faults_of_python(texts: Sequence[str]) -> list[str]:
    """What is wrong with the blocks of a page, which are read in order as one program."""
    faults: list[str] = []
    trees: list[ast.Module] = []
    for text in texts:
        try:
            trees.append(ast.parse(text))
        except SyntaxError as error:
            faults.append(str(error))
    known = {*dir(builtins), *GIVEN, "__file__", "__name__"}.union(*map(_bound, trees))
    for tree in trees:
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        faults += [f"name {name} is not defined" for name in sorted(used - known)]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom | ast.Import):
                faults += _faults_of_import(node)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pt":
                faults += [] if hasattr(pt, node.attr) else [f"posttrain has no {node.attr}"]
            elif isinstance(node, ast.Call):
                faults += _faults_of_call(node)
    return faults


def _bound(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name


def _faults_of_import(node: ast.ImportFrom | ast.Import) -> list[str]:
    modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    faults = []
    for name in (name for name in modules if name.partition(".")[0] == "posttrain"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            faults.append(str(error))
            continue
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            is_module = hasattr(module, "__path__") and find_spec(f"{name}.{alias.name}") is not None
            if not hasattr(module, alias.name) and not is_module:
                faults.append(f"{name} has no {alias.name}")
    return faults


def _faults_of_call(node: ast.Call) -> list[str]:
    """Arguments of ``pt.train(...)`` and the others: keywords of the function, or keys of a recipe."""
    called = node.func
    is_ours = isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "pt"
    function = getattr(pt, called.attr, None) if is_ours and isinstance(called, ast.Attribute) else None
    if not inspect.isfunction(function) or any(isinstance(one, ast.Starred) for one in node.args):
        return []
    names = [keyword.arg for keyword in node.keywords if keyword.arg]
    parameters = inspect.signature(function).parameters
    try:
        inspect.signature(function).bind(*[None] * len(node.args), **dict.fromkeys(names))
    except TypeError as error:
        missing = len(names) < len(node.keywords)  # a ``**options``
        return [] if missing else [f"{function.__name__}: {error}"]
    unknown = [name for name in names if name not in parameters]
    if "others" in parameters:  # which are refused by name
        return [f"{function.__name__} has no {name}" for name in unknown]
    faults = []
    for name in unknown:
        try:
            overrides_of({name: 1})
        except PosttrainError as error:
            faults.append(str(error))
    return faults
