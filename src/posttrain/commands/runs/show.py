"""``posttrain runs list | show | compare``: the runs that there are. ``change`` has the actions that change them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, JustifyMethod

from posttrain.commands.console import Text, counted, open_console, plain_table, say, write_json
from posttrain.commands.progress import BARS, SHOWN, show_duration, show_evaluation, sparkline
from posttrain.errors import DataError, UsageError
from posttrain.runs.directory import RunDirectory, find_run, list_names, run_names
from posttrain.runs.listing import (
    ABSENT,
    Link,
    RunSummary,
    SideBySide,
    SweepSummary,
    find_links,
    list_runs,
    put_side_by_side,
    show_run,
    summarize_sweep,
)
from posttrain.runs.paths import every_run_name, fits, sweep_names
from posttrain.store.metric_names import ACCURACY, METRICS, metric_of
from posttrain.store.metrics import MetricsLog
from posttrain.store.reading import read_text
from posttrain.store.rollouts import RolloutStore
from posttrain.untrusted import fitting, harmless

STYLES = {
    "running": "cyan",
    "finished": "green",
    "failed": "red",
    "interrupted": "yellow",
    "stopped": "green",
    "dead": "red",
    "damaged": "red",
    "sweep": "",
}
NUM_LISTED = 50
CURVES = ("reward", "accuracy", "completion_length", "loss", "entropy")
MAX_VALUE_CHARACTERS = 60


def run_list(arguments: argparse.Namespace) -> int:
    """List runs and sweeps: as a table, or as data."""
    root, limit = arguments.runs_dir, NUM_LISTED if arguments.limit is None else arguments.limit
    runs = list_runs(root, patterns=arguments.names, states=arguments.state, sort=arguments.sort)
    sweeps = [] if arguments.names or arguments.state else [summarize_sweep(root, name) for name in sweep_names(root)]
    if write_json({"runs": [asdict(run) for run in runs], "sweeps": [asdict(sweep) for sweep in sweeps]}):
        return 0
    if not runs and not sweeps:
        hint = "of these" if arguments.names or arguments.state else "yet. Start one: posttrain train tiny/grpo"
        print(f"no runs in {root} {hint}")
        return 0
    console = open_console()
    shown = runs[-limit:] if arguments.sort == "created" else runs[: limit or None]
    print_runs(console, shown, sweeps)
    if len(shown) < len(runs):
        more = f"and {len(runs) - len(shown):,} more runs; --limit 0 shows all, PATTERN and --state some"
        console.print(Text(more, style="yellow"))
    total = sum(run.disk_bytes for run in runs) + sum(sweep.disk_bytes for sweep in sweeps)
    say(console, f"{show_bytes(total)} in all; posttrain runs show NAME prints one in full", "dim")
    return 0


def print_runs(console: Console, runs: Sequence[RunSummary], sweeps: Sequence[SweepSummary] = ()) -> None:
    """Print a table with a row per run and sweep, and what is wrong with damaged ones."""
    rows: list[tuple[str, str, str, str, str, str, int]] = [
        (run.name, run.state, f"{run.step}/{run.steps}", run.model, run.objective, run.result or "–", run.disk_bytes)
        for run in runs
    ]
    for sweep in sweeps:
        state, finished = "running" if sweep.is_running else "sweep", f"{sweep.num_finished}/{sweep.num_runs} runs"
        rows.append((sweep.name, state, finished, "", "", "–", sweep.disk_bytes))
    table = plain_table()
    for name in ("run", "state", "step", "model", "objective", "held-out", "size"):
        is_name = name in ("run", "model", "held-out")  # broken into several lines in a narrow terminal
        justify: JustifyMethod = "right" if name in ("step", "size") else "left"
        table.add_column(name, no_wrap=not is_name, overflow="fold", justify=justify)
    for name, state, *further, size in rows:
        columns = [Text(name, style="bold"), Text(state, style=STYLES[state]), *map(Text, further)]
        table.add_row(*columns, Text(show_bytes(size)))
    console.print(table)
    for run in runs:
        if run.problem:
            console.print(Text(f"{run.name}: {run.problem}", style="red"))


def run_show(arguments: argparse.Namespace) -> int:
    """Show one run, or a sweep."""
    console, root = open_console(), Path(arguments.runs_dir)
    if arguments.name is None:
        raise UsageError(f"give the run's name: posttrain runs show NAME. {list_names(run_names(root))} in {root}")
    name = arguments.name.rstrip("/").removeprefix(f"{arguments.runs_dir}/")
    if name in sweep_names(root):
        _show_sweep(console, root, name)
        return 0
    folder = find_run(root, arguments.name)
    if folder.resolve().is_relative_to(root.resolve()):
        name = folder.resolve().relative_to(root.resolve()).as_posix()
    else:
        name, root = folder.name, folder.parent
    links = [link for link in find_links(root) if name in (link.child, link.parent)]
    info = show_run(folder) | {"name": name, "links": [asdict(link) for link in links]}
    if not write_json(info):
        _print_run(console, folder, info, links)
    return 0


def _show_sweep(console: Console, root: Path, name: str) -> None:
    sweep, runs = summarize_sweep(root, name), list_runs(root, patterns=[f"{name}/*", f"{name}/cells/*"])
    if write_json(asdict(sweep) | {"runs": [asdict(run) for run in runs]}):
        return
    state = "running" if sweep.is_running else "not running"
    say(console, f"{name}: {state}, {sweep.num_finished} of {counted(sweep.num_runs, 'run')} finished\n", "bold")
    table = sweep.path / "table.md"
    if table.is_file():
        try:
            say(console, f"{read_text(table).rstrip()}\n")
        except DataError as error:  # the runs are shown all the same
            say(console, str(error), "red")
    print_runs(console, runs)
    say(console, f"\nsee {sweep.path / 'report.html'}", "dim")


def _print_run(console: Console, folder: Path, info: Mapping[str, Any], links: Sequence[Link]) -> None:
    """Print one run in full: state, lineage, curves, evaluations, the last episode."""
    name = info["name"]
    children = ", ".join(f"{link.child} ({link.role})" for link in links if link.parent == name)
    checkpoints = ", ".join(f"{c['step']}{' (best)' if c['best'] else ''}" for c in info["checkpoints"])
    lines = [
        ("state", info["state"]),
        ("step", f"{info['step']} of {info['steps']}"),
        ("recipe", info["recipe"]),
        ("model", info["model"]),
        ("objective", info["objective"]),
        ("created", info["created"] or "?"),
        *((link.role, describe_link(link)) for link in links if link.child == name),
        ("used by", children),
        ("checkpoints", checkpoints or "none"),
        ("rollouts", f"{sum(info['rollouts'].values()):,} in {len(info['rollouts'])} steps"),
        ("size", show_bytes(info["disk_bytes"])),
        ("message", info["message"]),
        ("problem", info["problem"]),
    ]
    console.print(Text(name, style="bold"))
    table = plain_table("fact", "value", show_header=False, padding=(0, 2))
    for label, value in lines:
        if value:
            table.add_row(Text(label, style="dim"), Text(value))
    console.print(table)
    for warning in info["warnings"]:
        say(console, f"warning: {warning}", "yellow")
    is_damaged = bool(info["problem"])
    rows = [] if is_damaged else MetricsLog(folder / "metrics.jsonl").read()
    for metric in map(METRICS.__getitem__, CURVES):
        series = [row.metrics[metric.name] for row in rows if metric.name in row.metrics]
        if series:
            first, last = metric.show(series[0]), metric.show(series[-1])
            console.print(Text(f"{metric.label:>17}  {first:>9} {sparkline(series) or BARS[0]} {last}"))
    primary = ACCURACY if is_damaged else RunDirectory(folder).primary_metric()
    for item in info["evaluations"]:
        results = {key: value for key, value in item.items() if key not in ("name", "step")}
        about = {"name": item["name"], "step": item["step"], "primary_metric": primary, "results": results}
        console.print(Text(show_evaluation(about)))
    for line in [] if is_damaged else _last_episode(folder):
        say(console, line, "dim")
    say(console, f"\nsee {folder / 'report.html'}", "dim")


def _last_episode(folder: Path) -> list[str]:
    """The newest completion of several turns, where there is one: the prompt, each turn, its calls."""
    if not (folder / "rollouts.db").is_file():
        return []
    newest = RolloutStore(folder / "rollouts.db", read_only=True).training(limit=1, newest_first=True)
    if not newest or not newest[0].turns:
        return []
    row = newest[0]
    turns = counted(len(row.turns), "turn")
    about = f"\nthe last of step {row.step}: {turns}, {row.finish}, reward {row.reward:.3f}"
    fit = fitting([row.prompt, row.transcript])
    return [about, *fit(row.prompt).splitlines(), *fit(row.transcript).splitlines()]


def describe_link(link: Link) -> str:
    """``demo-sft, step 60``."""
    return link.parent + ("" if link.step is None else f", step {link.step}") + ("" if link.is_there else " (deleted)")


def show_bytes(count: int) -> str:
    """``512 B``, ``3.4 MiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def run_compare(arguments: argparse.Namespace) -> int:
    """Print results of several runs, and the keys in which their recipes differ."""
    root = arguments.runs_dir
    known = every_run_name(root)
    matching = [[run for run in known if fits(run, name)] or [name.rstrip("/")] for name in arguments.names]
    names = list(dict.fromkeys(name for group in matching for name in group))
    if len(names) < 2:
        raise UsageError("name two runs or more: posttrain runs compare NAME NAME")
    side_by_side = put_side_by_side([find_run(root, name) for name in names])
    if not write_json(to_data(side_by_side, names)):
        _print_side_by_side(open_console(), side_by_side, names)
    return 0


def to_data(side_by_side: SideBySide, names: Sequence[str]) -> dict[str, Any]:
    """Return plain data; a key that a recipe does not have is missing from its mapping."""
    recipe = {
        key: {name: value for name, value in zip(names, values, strict=True) if value is not ABSENT}
        for key, values in side_by_side.recipe.items()
    }
    return asdict(side_by_side) | {"names": list(names), "recipe": recipe}


def _print_side_by_side(console: Console, side_by_side: SideBySide, names: Sequence[str]) -> None:
    labels = [name.rpartition("/")[2] for name in names]
    labels = labels if len(set(labels)) == len(labels) else list(names)
    recipe: list[tuple[str, list[str]]] = []
    alone: dict[str, list[str]] = {}
    for key, values in sorted(side_by_side.recipe.items()):
        there = {label: _shorten(value) for label, value in zip(labels, values, strict=True) if value is not ABSENT}
        if len(there) == len(labels):
            recipe.append((key, list(there.values())))
        else:
            alone.setdefault(", ".join(there), []).append(f"{key} {' | '.join(dict.fromkeys(there.values()))}")
    for title, lines in (("outcome", _outcome(side_by_side)), ("recipe", recipe)):
        table = plain_table()
        for label in (title, *labels):
            table.add_column(Text(label), overflow="fold")
        for label, columns in lines:
            table.add_row(Text(label), *map(Text, columns))
        if lines:
            console.print(table)
            console.print()
    for which, keys in alone.items():
        say(console, f"only in {which}: {', '.join(keys)}\n")
    say(console, f"the recipes are equal in {side_by_side.num_equal_keys} {'further ' * bool(recipe)}keys", "dim")
    say(console, "one run of each is an impression; `posttrain sweep` trains several seeds", "dim")


def _shorten(value: object) -> str:
    text = harmless(str(value))
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[: MAX_VALUE_CHARACTERS - 1]}…"


def _outcome(side_by_side: SideBySide) -> list[tuple[str, list[str]]]:
    runs = side_by_side.runs
    lines = []
    for name, results in side_by_side.last.items():
        primaries = [metric_of(run.primary_metric or "accuracy") for run in runs]
        pairs = zip(results, primaries, strict=True)
        columns = ["–" if r is None else f"{primary.describe(r)} at step {r['step']}" for r, primary in pairs]
        lines.append((f"{name}, last", columns))
    for metric in map(METRICS.__getitem__, SHOWN):
        values = [run.metrics.get(metric.name) for run in runs]
        if any(value is not None for value in values):
            lines.append((metric.label, ["–" if value is None else metric.show(value) for value in values]))
    lines += [("state", [str(run.state) for run in runs]), ("step", [f"{run.step} of {run.steps}" for run in runs])]
    lines.append(("time", [show_duration(seconds) for seconds in side_by_side.seconds]))
    return lines
