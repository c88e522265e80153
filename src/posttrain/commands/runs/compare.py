"""``posttrain runs compare A B``: runs beside one another."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from posttrain.commands.console import Text, open_console, write_json
from posttrain.commands.progress import SHOWN, show_duration
from posttrain.commands.runs.show import show_bytes
from posttrain.errors import UsageError
from posttrain.runs.directory import find_run
from posttrain.runs.paths import comparison_names, every_run_name, fits
from posttrain.runs.side_by_side import ABSENT, SideBySide, put_side_by_side
from posttrain.untrusted import harmless

MAX_VALUE_CHARACTERS = 60


def run_compare_runs(arguments: argparse.Namespace) -> int:
    """Print in what the recipes differ and what came out."""
    known = every_run_name(arguments.runs_dir)
    fitting = [[run for run in known if fits(run, name)] or [name] for name in arguments.names]
    names = list(dict.fromkeys(name for group in fitting for name in group))
    if len(names) < 2:
        raise UsageError("name two runs or more: posttrain runs compare NAME NAME")
    side_by_side = put_side_by_side(find_runs(arguments.runs_dir, names))
    if not write_json(to_data(side_by_side, names)):
        print_side_by_side(open_console(), side_by_side, names)
    return 0


def find_runs(root: str, names: Sequence[str]) -> list[Path]:
    """The folders of the runs.

    Raises:
        UsageError: there is no such run, or it is a comparison.
    """
    for name in names:
        if name.rstrip("/") in comparison_names(root):
            raise UsageError(
                f"{name} is a comparison, with a table of its own: posttrain runs show NAME. Its runs can be compared "
                f"by name, such as {name.rstrip('/')}/cells/NAME"
            )
    return [find_run(root, name.rstrip("/")) for name in names]


def to_data(side_by_side: SideBySide, names: Sequence[str]) -> dict[str, Any]:
    """Plain data; a key that a recipe does not have is missing from its mapping."""
    recipe = {
        key: {name: value for name, value in zip(names, values, strict=True) if value is not ABSENT}
        for key, values in side_by_side.recipe.items()
    }
    return asdict(side_by_side) | {"names": list(names), "recipe": recipe}


def print_side_by_side(console: Console, side_by_side: SideBySide, names: Sequence[str]) -> None:
    """Three tables: what differs in the recipes, what came out, and where that was."""
    labels = [name.rstrip("/").rpartition("/")[2] for name in names]
    labels = labels if len(set(labels)) == len(labels) else list(names)
    if side_by_side.recipe:
        table = _table("recipe", labels)
        for key, values in sorted(side_by_side.recipe.items()):
            table.add_row(Text(key), *(_value_text(value) for value in values))
        console.print(table)
        console.print(Text(f"{side_by_side.num_equal_keys} further keys are equal", style="dim"))
    else:
        console.print(Text(f"the recipes are equal in all of their {side_by_side.num_equal_keys} keys"))
    console.print()
    table = _table("outcome", labels)
    for label, cells in _outcome(side_by_side):
        table.add_row(Text(label), *(Text(cell) for cell in cells))
    console.print(table)
    if side_by_side.environment:
        console.print()
        table = _table("where it ran", labels)
        for key, values in side_by_side.environment.items():
            table.add_row(Text(key), *(Text(value) for value in values))
        console.print(table)
    console.print(Text("\none run of each is an impression; `posttrain compare` trains several seeds", style="dim"))


def _table(title: str, labels: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(Text(title))
    for label in labels:
        table.add_column(Text(label), overflow="fold")
    return table


def _value_text(value: Any) -> Text:
    if value is ABSENT:
        return Text("not there", style="dim")
    text = harmless(str(value))
    return Text(text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[: MAX_VALUE_CHARACTERS - 1]}…")


def _outcome(side_by_side: SideBySide) -> list[tuple[str, list[str]]]:
    runs = side_by_side.runs
    rows: list[tuple[str, list[str]]] = [
        ("state", [str(run.state) for run in runs]),
        ("step", [f"{run.step} of {run.steps}" for run in runs]),
    ]
    for name, results in side_by_side.last.items():
        rows.append((f"{name}, last", _show_results(results, side_by_side)))
        best = side_by_side.best[name]
        if best != results:
            rows.append((f"{name}, best", _show_results(best, side_by_side)))
    for metric, label, form in SHOWN:
        values = side_by_side.metrics.get(metric)
        if values is not None:
            rows.append((label, ["–" if value is None else f"{value:{form}}" for value in values]))
    rows.append(("time", [show_duration(seconds) for seconds in side_by_side.seconds]))
    rows.append(("size", [show_bytes(run.disk_bytes) for run in runs]))
    return rows


def _show_results(items: Sequence[dict[str, Any] | None], side_by_side: SideBySide) -> list[str]:
    """What each run is told by, in one evaluation."""
    told = zip(items, side_by_side.headlines, strict=True)
    return ["–" if item is None else f"{h.tell(item, in_column=True)} at step {item['step']}" for item, h in told]
