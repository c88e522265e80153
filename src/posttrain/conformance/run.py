"""Run all checks on a module defining some of ``loss``, ``advantages``, ``score`` and ``rows``; print the table."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from posttrain.conformance.advantages import check_advantages
from posttrain.conformance.findings import Finding, in_one_line, worst
from posttrain.conformance.losses import check_losses
from posttrain.conformance.rows import check_rows
from posttrain.conformance.scores import check_scores
from posttrain.errors import RunFailure, UsageError
from posttrain.registry import call
from posttrain.untrusted import harmless

ADAPTERS = "posttrain.conformance.adapters"
SHIPPED = ("own", "trl")
# Supported functions with their arguments.
KINDS: dict[str, tuple[str, Callable[[Any], Iterator[Finding]]]] = {
    "loss": ("batch, config, micro_batches", check_losses),
    "advantages": ("rewards, group", check_advantages),
    "score": ("logits, tokens, temperature", check_scores),
    "rows": ("prompts, answers, pad, end", check_rows),
}
HEADER = ("function", "case", "checks", "largest gap", "at", "result")
MOST_CASES = 4  # max cases named per line
NUMBERS = (2, 3)  # right-aligned table columns


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """The findings about a module, in the order of the checks."""

    module: str
    findings: tuple[Finding, ...]

    @property
    def conforms(self) -> bool:
        """True if every check matched an equation or a convention."""
        return worst(self.findings) in ("ok", "convention")

    def count(self, status: str) -> int:
        """Count findings with a status."""
        return sum(one.status == status for one in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain data. Infinite gaps become None, which JSON can represent."""
        counts = {status: self.count(status) for status in ("ok", "convention", "fails", "bad")}
        findings = [asdict(one) for one in self.findings]
        for one in findings:
            if one["gap"] == math.inf:
                one["gap"] = None
        return {
            "module": self.module,
            "conforms": self.conforms,
            "counts": counts,
            "findings": findings,
        }


def check_module(module: str | os.PathLike[str] | ModuleType | Mapping[str, Callable[..., Any]]) -> ConformanceReport:
    """Check a trainer's functions, given as a module, module name, Python file, or functions by name.

    Raises:
        UsageError: the module cannot be imported, or defines none of the functions.
    """
    if isinstance(module, Mapping):
        name = "functions"
        functions = dict(module)
    else:
        if isinstance(module, str | os.PathLike):
            name = str(module)
            loaded = load_module(name)
        elif isinstance(module, ModuleType):
            name = module.__name__
            loaded = module
        else:
            raise UsageError(
                f"module: {type(module).__name__} is not a module. Give a module, its name, a Python file, "
                "or functions by name"
            )
        functions = {kind: getattr(loaded, kind) for kind in KINDS if hasattr(loaded, kind)}
    wanted = "; ".join(f"{kind}({arguments})" for kind, (arguments, _) in KINDS.items())
    if not functions:
        raise UsageError(f"{name}: no function to check. Define one of {wanted}")
    findings: list[Finding] = []
    for kind, function in functions.items():
        if kind not in KINDS:
            raise UsageError(f"{name}: {kind}: unknown function. Known: {wanted}")
        if not callable(function):
            raise UsageError(f"{name}: {kind}: {type(function).__name__} is not a function. Give one of {wanted}")
        findings += KINDS[kind][1](function)
    return ConformanceReport(name, tuple(findings))


def load_module(name: str) -> ModuleType:
    """Import a module by name, file path, or short name of a bundled adapter.

    Raises:
        UsageError: missing, or failed to import.
    """
    if name in SHIPPED:
        name = f"{ADAPTERS}.{name}"
    try:
        if name.endswith(".py"):
            return call("module", _import_file, name)
        return call("module", _import_name, name)
    except RunFailure as failure:
        cause = failure.__cause__
        reason = in_one_line(f"{type(cause).__name__}: {cause}")
        raise UsageError(
            f"{name}: it cannot be imported ({reason}). Give a module, a Python file, or {' or '.join(SHIPPED)}"
        ) from cause


def _import_name(name: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def _import_file(name: str) -> ModuleType:
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"{name}: no such file. Give a file or a module name")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None, "a file that ends in .py has a loader"
    assert spec.loader is not None, "a file that ends in .py has a loader"
    module = module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def table_lines(report: ConformanceReport) -> list[str]:
    """Format the table: a line per case, followed by deviations."""
    cases: dict[tuple[str, str], list[Finding]] = {}
    for one in report.findings:
        cases.setdefault((one.function, one.case), []).append(one)
    rows = [HEADER]
    for (function, case), findings in cases.items():
        gap, place = largest_of(findings)
        rows.append((function, case, str(len(findings)), gap, place, worst(findings)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        padded = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        for column in NUMBERS:
            padded[column] = row[column].rjust(widths[column])
        lines.append("  ".join(padded).rstrip())
    return [*lines, *_exceptions(report.findings), "", _summary(report)]


def largest_of(findings: Sequence[Finding]) -> tuple[str, str]:
    """Largest gap and its check, ignoring conventions."""
    compared = [one for one in findings if one.gap is not None and one.status != "convention"]
    if not compared:
        return "-", "-"
    largest = max(compared, key=lambda one: one.gap or 0.0)
    return f"{largest.gap:.1e}", largest.check


def _exceptions(findings: Sequence[Finding]) -> list[str]:
    """Deviations from equations, each listed once with its cases."""
    lines: list[str] = []
    for status, heading in (("convention", "conventions"), ("fails", "fails"), ("bad", "cannot be compared")):
        places: dict[tuple[str, str, str], list[str]] = {}
        for one in findings:
            if one.status == status:
                places.setdefault((one.function, one.check, one.note), []).append(one.case)
        if places:
            lines += ["", heading]
        for (function, check, note), cases in places.items():
            named = "; ".join(cases[:MOST_CASES])
            more = len(cases) - MOST_CASES
            if more > 0:
                named += f"; and {more} more"
            lines.append(f"  {function} {check}: {note} [{named}]")
    return lines


def _summary(report: ConformanceReport) -> str:
    named = (("convention", "conventions"), ("fails", "fail"), ("bad", "cannot be compared"))
    others = [f"{report.count(status)} {text}" for status, text in named if report.count(status)]
    parts = [f"{report.count('ok')} of {len(report.findings)} checks match the equations", *others]
    return f"{harmless(report.module)}: {', '.join(parts)}"
