"""``posttrain runs list | show | compare``: what has been trained, and its state. ``change`` has what changes runs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from posttrain.commands.console import (
    Text,
    counted,
    open_console,
    plain_table,
    say,
    wants_json,
    write_json,
)
from posttrain.commands.progress import BARS, SHOWN, show_duration, show_evaluation, show_number, sparkline
from posttrain.errors import DataError, UsageError
from posttrain.runs.directory import RunDirectory, find_run, list_names, run_names
from posttrain.runs.lineage import Link, find_links, find_links_around
from posttrain.runs.listing import (
    ABSENT,
    ComparisonSummary,
    Filter,
    RunSummary,
    SideBySide,
    check_states,
    list_runs,
    put_side_by_side,
    recipe_facts,
    show_run,
    sort_runs,
    summarize_comparison,
)
from posttrain.runs.paths import comparison_names, every_run_name, fits
from posttrain.runs.removal import unfinished_deletions
from posttrain.store.headline import ACCURACY
from posttrain.store.metrics import MetricsLog
from posttrain.store.reading import read_text
from posttrain.store.rollouts import RolloutStore
from posttrain.untrusted import fitting, harmless

STYLES = {
    "running": "cyan",
    "finished": "green",
    "failed": "red",
    "interrupted": "yellow",
    "unfinished": "yellow",
    "dead": "red",
    "damaged": "red",
}
NUM_LISTED = 50
COURSES = ("reward", "accuracy", "num_tokens", "loss", "entropy")


def run_show(arguments: argparse.Namespace) -> int:
    """Show one run, or a comparison."""
    console = open_console()
    if arguments.name is None:
        known = list_names(run_names(arguments.runs_dir))
        raise UsageError(f"give the run's name: posttrain runs show NAME. {known} in {arguments.runs_dir}")
    name = arguments.name.rstrip("/").removeprefix(f"{arguments.runs_dir}/")
    if name in comparison_names(arguments.runs_dir):
        comparison = summarize_comparison(arguments.runs_dir, name)
        if not write_json(asdict(comparison)):
            print_comparison(console, arguments.runs_dir, comparison)
        return 0
    folder = find_run(arguments.runs_dir, arguments.name)
    root, name = _home_of(folder, Path(arguments.runs_dir))
    links = find_links(root, of=name)
    if not (wants_json() and write_json(show_run(folder) | {"name": name, "links": [asdict(link) for link in links]})):
        print_run(console, folder, name, links)
    return 0


def _home_of(folder: Path, root: Path) -> tuple[Path, str]:
    """(runs folder, name in it) of a run that may have been named by a path elsewhere."""
    if folder.resolve().is_relative_to(root.resolve()):
        return root, folder.resolve().relative_to(root.resolve()).as_posix()
    return folder.parent, folder.name


def run_list(arguments: argparse.Namespace) -> int:
    """List the runs: as a table, or as data."""
    console, root = open_console(), arguments.runs_dir
    wanted = Filter(check_states(arguments.state), tuple(arguments.tag), tuple(arguments.names))
    with_cells = arguments.cells or any("/" in name for name in arguments.names)
    limit = NUM_LISTED if arguments.limit is None else arguments.limit
    by_start = arguments.sort == "created" and not wanted
    newest = limit if limit and by_start and not wants_json() else None
    every = list_runs(root, with_cells=with_cells, newest=newest)
    comparisons = [] if wanted else [summarize_comparison(root, name) for name in comparison_names(root)]
    runs = [run for run in sort_runs(every, arguments.sort) if wanted(run)]
    number = len(every_run_name(root) if with_cells else run_names(root)) if newest else len(runs)
    if wants_json():
        links = find_links(root, [run.name for run in runs])
        listing: dict[str, Sequence[Any]] = {"runs": runs, "links": links, "comparisons": comparisons}
        write_json({key: [asdict(item) for item in items] for key, items in listing.items()})
        return 0
    if limit:
        runs = runs[-limit:] if by_start else runs[:limit]
    if not every and not comparisons:
        print(f"no runs in {root} yet. Start one: posttrain train tiny/grpo")
    elif not runs and wanted:
        print(f"none of the {len(every)} runs in {root} is like that")
    else:
        print_runs(console, root, runs)
    if comparisons:
        print_comparisons(console, comparisons)
    _print_foot(console, root, runs, comparisons, number)
    return 0


def print_runs(console: Console, root: str | Path, runs: Sequence[RunSummary]) -> None:
    """A table with a row per run. What they were trained from and their tags have columns where there are any."""
    links = find_links_around(root, [run.name for run in runs])
    parents = {run.name: describe_parents(run.name, links) for run in runs}
    further = {"from": any(parents.values()), "tags": any(run.tags for run in runs)}
    table = plain_table()
    for name in ("run", "state", "step", "model", "objective", "held-out", "size", *(n for n in further if further[n])):
        is_name = name in ("run", "model", "from", "tags")  # of which a narrow terminal makes several lines
        justify: Literal["left", "right"] = "right" if name in ("step", "size") else "left"
        table.add_column(name, no_wrap=not is_name, overflow="fold", justify=justify)
    for run in runs:
        cells = [
            Text(run.name, style="bold"),
            Text(run.state, style=STYLES[run.state]),
            Text(f"{run.step}/{run.steps}"),
            Text(base_model(root, run, links)),
            Text(run.objective),
            Text(run.told or "–"),
            Text(show_bytes(run.disk_bytes)),
            *([Text(parents[run.name])] if further["from"] else []),
            *([Text(" ".join(run.tags), style="magenta")] if further["tags"] else []),
        ]
        table.add_row(*cells)
    console.print(table)
    for run in runs:
        if run.problem:
            console.print(Text(f"{run.name}: {run.problem}", style="red"))


def print_comparisons(console: Console, comparisons: Sequence[ComparisonSummary]) -> None:
    """A table with a row per comparison."""
    table = plain_table()
    for column in ("comparison", "state", "finished", "methods", "size"):
        table.add_column(column, no_wrap=column != "methods", justify="right" if column == "size" else "left")
    for item in comparisons:
        table.add_row(
            Text(item.name, style="bold"),
            Text(item.state, style=STYLES[item.state]),
            f"{item.num_finished} of {item.num_cells}",
            Text(", ".join(item.methods)),
            show_bytes(item.disk_bytes),
        )
    console.print()
    console.print(table)


def _print_foot(
    console: Console, root: str, runs: Sequence[RunSummary], comparisons: Sequence[ComparisonSummary], number: int
) -> None:
    if number > len(runs):
        more = f"and {number - len(runs):,} more runs; --limit 0 shows all, PATTERN and --state some"
        console.print(Text(more, style="yellow"))
    sizes = [run.disk_bytes for run in runs if run.name.count("/") == 0] + [item.disk_bytes for item in comparisons]
    if len(sizes) > 1 or comparisons:
        counts = ", ".join(counted(n, what) for n, what in ((len(runs), "run"), (len(comparisons), "comparison")) if n)
        console.print(Text(f"{counts}, {show_bytes(sum(sizes))} in all", style="dim"))
    left = unfinished_deletions(root)
    if left:
        what = f"{counted(len(left), 'deletion')} cut off, with {show_bytes(sum(left.values()))} left behind"
        console.print(Text(f"{what}; `posttrain runs delete` without a name goes on with them", style="yellow"))
    if runs or comparisons:
        console.print(Text("posttrain runs show NAME tells more", style="dim"))


def print_comparison(console: Console, root: str, item: ComparisonSummary) -> None:
    """One comparison: where it stands, its table, its runs."""
    console.print(Text(item.name, style="bold"))
    facts = [("state", item.state), ("finished", f"{item.num_finished} of {item.num_cells} runs")]
    facts += [("methods", ", ".join(item.methods)), ("size", show_bytes(item.disk_bytes))]
    facts += [("problem", item.problem)] if item.problem else []
    _print_facts(console, facts)
    table = item.path / "table.md"
    if table.is_file():
        console.print()
        try:
            say(console, read_text(table).rstrip())
        except DataError as error:  # the runs are shown all the same
            say(console, str(error), "red")
    console.print()
    print_runs(console, root, item.runs)
    say(console, f"\nsee {item.path / 'report.html'}", "dim")


def print_run(console: Console, folder: Path, name: str, links: Sequence[Link]) -> None:
    """One run in full: its standing, its family, its courses and evaluations, what was said about it."""
    facts = show_run(folder)
    console.print(Text(name, style="bold"))
    _print_facts(console, _facts(facts, name, links))
    rows = MetricsLog(folder / "metrics.jsonl").read() if not facts["problem"] else []
    for name in COURSES:
        series = [row.metrics[name] for row in rows if name in row.metrics]
        if series:
            first, last = show_number(series[0], ".3f"), show_number(series[-1], ".3f")
            console.print(Text(f"{name:>12}  {first:>9} {sparkline(series) or BARS[0]} {last}"))
    headline = ACCURACY if facts["problem"] else RunDirectory(folder).headline()
    for item in facts["evaluations"]:
        results = {key: value for key, value in item.items() if key not in ("name", "step")}
        about = {"name": item["name"], "step": item["step"], "headline": headline}
        console.print(Text(show_evaluation(about | {"results": results})))
    for line in _last_episode(folder) if not facts["problem"] else []:
        say(console, line, "dim")
    say(console, f"\nsee {folder / 'report.html'}", "dim")


def _last_episode(folder: Path) -> list[str]:
    """The newest completion of several turns, where there is one: what was asked, each turn, its calls."""
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


def _print_facts(console: Console, facts: Sequence[tuple[str, str]]) -> None:
    table = plain_table("fact", "value", show_header=False, padding=(0, 2))
    for label, value in facts:
        table.add_row(Text(label, style="dim"), Text(value))
    console.print(table)


def _facts(facts: Mapping[str, Any], name: str, links: Sequence[Link]) -> list[tuple[str, str]]:
    children = ", ".join(f"{link.child} ({link.role})" for link in links if link.parent == name)
    checkpoints = ", ".join(f"{c['step']}{' (best)' if c['best'] else ''}" for c in facts["checkpoints"])
    disk = ", ".join(f"{kind} {show_bytes(size)}" for kind, size in facts["disk"].items() if size)
    lines = [
        ("state", facts["state"]),
        ("step", f"{facts['step']} of {facts['steps']}"),
        ("recipe", facts["recipe"]),
        ("model", facts["model"]),
        ("objective", facts["objective"]),
        ("created", facts["created"] or "?"),
        *((link.role, describe_link(link)) for link in links if link.child == name),
        *([("used by", children)] if children else []),
        ("checkpoints", checkpoints or "none"),
        ("rollouts", f"{sum(facts['rollouts'].values()):,} in {len(facts['rollouts'])} steps"),
        ("size", f"{show_bytes(facts['disk_bytes'])} ({disk})"),
    ]
    lines += [("tags", " ".join(facts["tags"]))] if facts["tags"] else []
    message = facts["status"].get("message")
    lines += [("message", message)] if message else []
    return lines + ([("problem", facts["problem"])] if facts["problem"] else [])


def describe_link(link: Link) -> str:
    """``demo-sft, step 60``."""
    return link.parent + ("" if link.step is None else f", step {link.step}") + ("" if link.is_there else " (deleted)")


def describe_parents(name: str, links: Sequence[Link]) -> str:
    """What a run stands on, in a few words: its start by name alone, anything else with its role."""
    own = [link for link in links if link.child == name]
    return ", ".join(link.parent if link.role == "start" else f"{link.role} {link.parent}" for link in own)


def base_model(root: str | Path, run: RunSummary, links: Sequence[Link]) -> str:
    """The model that training began with, over all runs on the way."""
    starts = {link.child: link.parent for link in links if link.role == "start"}
    name, model, seen = run.name, run.model, set[str]()
    while name in starts and name not in seen:
        seen.add(name)
        name = starts[name]
        try:
            model = recipe_facts(Path(root) / name).model
        except DataError:  # it is gone, or damaged
            model = name
    return model


def show_bytes(count: int) -> str:
    """``512 B``, ``3.4 MiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


# ``posttrain runs compare A B``: runs beside one another.

MAX_VALUE_CHARACTERS = 60


def run_compare(arguments: argparse.Namespace) -> int:
    """Print in what the recipes differ and what came out."""
    known = every_run_name(arguments.runs_dir)
    fitting = [[run for run in known if fits(run, name)] or [name] for name in arguments.names]
    names = list(dict.fromkeys(name for group in fitting for name in group))
    if len(names) < 2:
        raise UsageError("name two runs or more: posttrain runs compare NAME NAME")
    for name in names:
        if name.rstrip("/") in comparison_names(arguments.runs_dir):
            raise UsageError(
                f"{name} is a comparison, with a table of its own: posttrain runs show NAME. Its runs can be compared "
                f"by name, such as {name.rstrip('/')}/cells/NAME"
            )
    side_by_side = put_side_by_side([find_run(arguments.runs_dir, name.rstrip("/")) for name in names])
    if not write_json(to_data(side_by_side, names)):
        print_side_by_side(open_console(), side_by_side, names)
    return 0


def to_data(side_by_side: SideBySide, names: Sequence[str]) -> dict[str, Any]:
    """Plain data; a key that a recipe does not have is missing from its mapping."""
    recipe = {
        key: {name: value for name, value in zip(names, values, strict=True) if value is not ABSENT}
        for key, values in side_by_side.recipe.items()
    }
    return asdict(side_by_side) | {"names": list(names), "recipe": recipe}


def print_side_by_side(console: Console, side_by_side: SideBySide, names: Sequence[str]) -> None:
    """Print two tables: the keys in which the recipes differ, and the results."""
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
        table.add_row(Text(label), *map(Text, cells))
    console.print(table)
    console.print(Text("\none run of each is an impression; `posttrain sweep` trains several seeds", style="dim"))


def _table(title: str, labels: Sequence[str]) -> Table:
    table = plain_table()
    table.add_column(Text(title))
    for label in labels:
        table.add_column(Text(label), overflow="fold")
    return table


def _value_text(value: Any) -> Text:
    text = harmless(str(value))
    text = text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[: MAX_VALUE_CHARACTERS - 1]}…"
    return Text(text, style="dim" if value is ABSENT else "")


def _outcome(side_by_side: SideBySide) -> list[tuple[str, list[str]]]:
    runs = side_by_side.runs
    rows: list[tuple[str, list[str]]] = [
        ("state", [str(run.state) for run in runs]),
        ("step", [f"{run.step} of {run.steps}" for run in runs]),
    ]
    for name, results in side_by_side.last.items():
        told = zip(results, side_by_side.headlines, strict=True)
        cells = ["–" if r is None else f"{h.tell(r, in_column=True)} at step {r['step']}" for r, h in told]
        rows.append((f"{name}, last", cells))
    for metric, label, form in SHOWN:
        values = side_by_side.metrics.get(metric)
        if values is not None:
            rows.append((label, ["–" if value is None else show_number(value, form) for value in values]))
    rows.append(("time", [show_duration(seconds) for seconds in side_by_side.seconds]))
    rows.append(("size", [show_bytes(run.disk_bytes) for run in runs]))
    return rows
