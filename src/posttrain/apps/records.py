"""``posttrain runs``: what has been trained, and how it stands."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from posttrain.apps.console import open_console
from posttrain.apps.progress import BARS, show_evaluation, sparkline
from posttrain.errors import UsageError
from posttrain.runs.directory import find_run, run_names
from posttrain.runs.listing import list_runs, show_run
from posttrain.store.metrics import MetricsLog

STYLES = {
    "running": "cyan",
    "finished": "green",
    "failed": "red",
    "interrupted": "yellow",
    "dead": "red",
    "damaged": "red",
}
COURSES = ("reward", "accuracy", "num_tokens", "loss", "entropy")


def run_runs(arguments: argparse.Namespace) -> int:
    """List the runs, or show one."""
    console = open_console()
    if arguments.action == "list":
        _print_list(console, arguments.runs_dir)
        return 0
    if arguments.name is None:
        known = ", ".join(run_names(arguments.runs_dir)) or "none yet"
        raise UsageError(f"give the run's name: posttrain runs show NAME. Runs in {arguments.runs_dir}: {known}")
    _print_run(console, find_run(arguments.runs_dir, arguments.name))
    return 0


def _print_list(console: Console, root: str) -> None:
    runs = list_runs(root)
    if not runs:
        print(f"no runs in {root} yet. Start one: posttrain train tiny/grpo")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("run", "state", "step", "model", "objective", "held-out", "size"):
        table.add_column(column, no_wrap=column != "model", justify="right" if column in ("step", "size") else "left")
    for run in runs:
        accuracy = "–" if run.accuracy is None else f"{run.accuracy:.1%}"
        table.add_row(
            Text(run.name, style="bold"),
            Text(run.state, style=STYLES[run.state]),
            f"{run.step}/{run.steps}",
            Text(run.model),
            Text(run.objective),
            accuracy,
            show_bytes(run.disk_bytes),
        )
    console.print(table)
    for run in runs:
        if run.problem:
            console.print(Text(f"{run.name}: {run.problem}", style="red"))
    console.print(Text("posttrain runs show NAME tells more", style="dim"))


def _print_run(console: Console, folder: Path) -> None:
    facts = show_run(folder)
    table = Table.grid(padding=(0, 2))
    for label, value in _facts(facts):
        table.add_row(Text(label, style="dim"), Text(value))
    console.print(Text(facts["name"], style="bold"))
    console.print(table)
    rows = MetricsLog(folder / "metrics.jsonl").read() if not facts["problem"] else []
    for name in COURSES:
        series = [row.metrics[name] for row in rows if name in row.metrics]
        if series:
            console.print(Text(f"{name:>12}  {series[0]:9.3f} {sparkline(series) or BARS[0]} {series[-1]:.3f}"))
    for item in facts["evaluations"]:
        results = {key: value for key, value in item.items() if key not in ("name", "step")}
        console.print(Text(show_evaluation({"name": item["name"], "step": item["step"], "results": results})))
    console.print(Text(f"\nsee {folder / 'report.html'}", style="dim"), soft_wrap=True)


def _facts(facts: dict[str, Any]) -> list[tuple[str, str]]:
    checkpoints = ", ".join(f"{c['step']}{' (best)' if c['best'] else ''}" for c in facts["checkpoints"])
    found = [
        ("state", facts["state"]),
        ("step", f"{facts['step']} of {facts['steps']}"),
        ("recipe", facts["recipe"]),
        ("model", facts["model"]),
        ("objective", facts["objective"]),
        ("created", facts["created"] or "?"),
        ("checkpoints", checkpoints or "none"),
        ("rollouts", f"{sum(facts['rollouts'].values()):,} in {len(facts['rollouts'])} steps"),
        ("size", show_bytes(facts["disk_bytes"])),
    ]
    message = facts["status"].get("message")
    if message:
        found.append(("message", message))
    if facts["problem"]:
        found.append(("problem", facts["problem"]))
    return found


def show_bytes(count: int) -> str:
    """``512 B``, ``3.4 MiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
