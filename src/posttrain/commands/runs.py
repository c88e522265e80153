"""``posttrain runs``: list, show, compare, and actions that change runs; deletions ask first."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, JustifyMethod

from posttrain.commands import options
from posttrain.commands.sharing.export import run_export
from posttrain.errors import DataError, PosttrainError, RunConflict, UsageError
from posttrain.registry import suggest
from posttrain.runs.directory import RunDirectory, find_run, list_names, run_names
from posttrain.runs.listing import (
    ABSENT,
    Link,
    RunSummary,
    SideBySide,
    SweepSummary,
    disk_bytes,
    find_links,
    list_runs,
    put_side_by_side,
    show_run,
    summarize_run,
    summarize_sweep,
)
from posttrain.runs.paths import NamedFolder, every_run_name, fits, locate_all, locate_run, runs_of, started_sweeps
from posttrain.runs.removal import (
    check_steps,
    check_unused,
    delete,
    find_leftovers,
    parse_keep,
    plan_prune,
    prune,
    refuse_live,
)
from posttrain.store.checkpoint_files import best_step, checkpoint_steps, step_folder
from posttrain.store.metric_names import ACCURACY, METRICS, metric_of
from posttrain.store.metrics import MetricsLog, MetricsRow
from posttrain.store.reading import read_text_file
from posttrain.store.rollouts import RolloutStore
from posttrain.terminal.console import (
    Text,
    open_console,
    plain_table,
    pluralize,
    print_json,
    print_rows,
    say,
    show_bytes,
)
from posttrain.terminal.training_progress import BARS, SHOWN, show_duration, show_evaluation, show_kinds, sparkline
from posttrain.untrusted import cut_end, fitting, harmless

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
NUM_NAMED = 8  # runs in a message
CURVES = ("reward", "accuracy", "completion_length", "loss", "entropy")
MAX_VALUE_CHARACTERS = 60


def run_list(arguments: argparse.Namespace) -> int:
    """List runs and sweeps, as a table or as JSON."""
    root = arguments.runs_dir
    limit = arguments.limit
    if limit is None:
        limit = NUM_LISTED
    runs = list_runs(root, patterns=arguments.names, states=arguments.state, sort=arguments.sort)
    is_filtered = bool(arguments.names or arguments.state)
    sweeps = []
    if not is_filtered:
        sweeps = [summarize_sweep(root, name) for name in started_sweeps(root)]
    if print_json({"runs": [asdict(run) for run in runs], "sweeps": [asdict(sweep) for sweep in sweeps]}):
        return 0
    if not runs and not sweeps:
        hint = "yet. Start one: posttrain train tiny/grpo"
        if is_filtered:
            hint = "of these"
        print(f"no runs in {root} {hint}")
        return 0
    console = open_console()
    shown = runs
    if limit and arguments.sort == "created":
        shown = runs[-limit:]
    elif limit:
        shown = runs[:limit]
    print_runs(console, shown, sweeps)
    if len(shown) < len(runs):
        more = f"and {len(runs) - len(shown):,} more runs; --limit 0 shows all, PATTERN and --state some"
        console.print(Text(more, style="yellow"))
    total = sum(run.disk_bytes for run in runs) + sum(sweep.disk_bytes for sweep in sweeps)
    say(console, f"{show_bytes(total)} in total; posttrain runs show NAME shows details", "dim")
    return 0


def print_runs(console: Console, runs: Sequence[RunSummary], sweeps: Sequence[SweepSummary] = ()) -> None:
    """Print a table of runs and sweeps, with errors for damaged ones."""
    rows = []
    for run in runs:
        step = f"{run.step}/{run.steps}"
        size = show_bytes(run.disk_bytes)
        name = Text(run.name, style="bold")
        state = Text(run.state, style=STYLES[run.state])
        rows.append((name, state, step, run.model, run.objective, run.result or "–", size))
    for sweep in sweeps:
        state_of_sweep = "sweep"
        if sweep.is_running:
            state_of_sweep = "running"
        name = Text(sweep.name, style="bold")
        state = Text(state_of_sweep, style=STYLES[state_of_sweep])
        finished = f"{sweep.num_finished}/{sweep.num_runs} runs"
        rows.append((name, state, finished, "", "", "–", show_bytes(sweep.disk_bytes)))
    table = plain_table()
    for label in ("run", "state", "step", "model", "objective", "held-out", "size"):
        is_name = label in ("run", "model", "held-out")  # broken into several lines in a narrow terminal
        justify: JustifyMethod = "left"
        if label in ("step", "size"):
            justify = "right"
        table.add_column(label, no_wrap=not is_name, overflow="fold", justify=justify)
    print_rows(console, table, rows)
    for run in runs:
        if run.problem:
            console.print(Text(f"{run.name}: {run.problem}", style="red"))


def run_show(arguments: argparse.Namespace) -> int:
    """Show a run or a sweep."""
    console = open_console()
    root = Path(arguments.runs_dir)
    if arguments.name is None:
        raise UsageError(f"give the run's name: posttrain runs show NAME. {list_names(run_names(root))} in {root}")
    name = arguments.name.rstrip("/").removeprefix(f"{arguments.runs_dir}/")
    if name in started_sweeps(root):
        _show_sweep(console, root, name)
        return 0
    folder = find_run(root, arguments.name)
    if folder.resolve().is_relative_to(root.resolve()):
        name = folder.resolve().relative_to(root.resolve()).as_posix()
    else:
        name = folder.name
        root = folder.parent
    links = [link for link in find_links(root) if name in (link.child, link.parent)]
    info = show_run(folder) | {"name": name, "links": [asdict(link) for link in links]}
    if not print_json(info):
        _print_run(console, folder, info, links)
    return 0


def _show_sweep(console: Console, root: Path, name: str) -> None:
    sweep = summarize_sweep(root, name)
    runs = list_runs(root, patterns=[f"{name}/*", f"{name}/cells/*"])
    if print_json(asdict(sweep) | {"runs": [asdict(run) for run in runs]}):
        return
    state = "not running"
    if sweep.is_running:
        state = "running"
    say(console, f"{name}: {state}, {sweep.num_finished} of {pluralize(sweep.num_runs, 'run')} finished\n", "bold")
    table = sweep.path / "table.md"
    if table.is_file():
        try:
            say(console, f"{read_text_file(table).rstrip()}\n")
        except DataError as error:  # errors must not prevent the list
            say(console, str(error), "red")
    print_runs(console, runs)
    say(console, f"\nsee {sweep.path / 'report.html'}", "dim")


def _print_run(console: Console, folder: Path, info: Mapping[str, Any], links: Sequence[Link]) -> None:
    """Print a run in full: state, lineage, curves, evaluations, last episode."""
    console.print(Text(info["name"], style="bold"))
    table = plain_table("fact", "value", show_header=False, padding=(0, 2))
    facts = _facts(info, links)
    print_rows(console, table, [(Text(label, style="dim"), value) for label, value in facts if value])
    for warning in info["warnings"]:
        say(console, f"warning: {warning}", "yellow")
    is_damaged = bool(info["problem"])
    primary = ACCURACY
    if not is_damaged:
        primary = RunDirectory(folder).primary_metric()
        _print_curves(console, MetricsLog(folder / "metrics.jsonl").read())
    for item in info["evaluations"]:
        results = {key: value for key, value in item.items() if key not in ("name", "step")}
        about = {"name": item["name"], "step": item["step"], "primary_metric": primary, "results": results}
        console.print(Text(show_evaluation(about)))
    newest = {item["name"]: item for item in info["evaluations"]}
    for task, item in newest.items():
        for line in show_kinds(item):
            say(console, f"{task} {line}", "dim")
    if not is_damaged:
        for line in _last_episode(folder):
            say(console, line, "dim")
    say(console, f"\nsee {folder / 'report.html'}", "dim")


def _facts(info: Mapping[str, Any], links: Sequence[Link]) -> list[tuple[str, str | None]]:
    """Collect facts about a run, keyed by label."""
    name = info["name"]
    children = ", ".join(f"{link.child} ({link.role})" for link in links if link.parent == name)
    checkpoints = []
    for checkpoint in info["checkpoints"]:
        shown = str(checkpoint["step"])
        if checkpoint["best"]:
            shown = f"{shown} (best)"
        checkpoints.append(shown)
    return [
        ("state", info["state"]),
        ("step", f"{info['step']} of {info['steps']}"),
        ("recipe", info["recipe"]),
        ("model", info["model"]),
        ("objective", info["objective"]),
        ("created", info["created"] or "?"),
        *((link.role, describe_link(link)) for link in links if link.child == name),
        ("used by", children),
        ("checkpoints", ", ".join(checkpoints) or "none"),
        ("rollouts", f"{sum(info['rollouts'].values()):,} in {len(info['rollouts'])} steps"),
        ("size", show_bytes(info["disk_bytes"])),
        ("message", info["message"]),
        ("problem", info["problem"]),
    ]


def _print_curves(console: Console, rows: Sequence[MetricsRow]) -> None:
    for name in CURVES:
        metric = METRICS[name]
        series = [row.metrics[name] for row in rows if name in row.metrics]
        if series:
            first = metric.show(series[0])
            last = metric.show(series[-1])
            console.print(Text(f"{metric.label:>17}  {first:>9} {sparkline(series) or BARS[0]} {last}"))


def _last_episode(folder: Path) -> list[str]:
    """Format the newest multi-turn completion, if any: prompt, turns and calls."""
    if not (folder / "rollouts.db").is_file():
        return []
    newest = RolloutStore(folder / "rollouts.db", read_only=True).training(limit=1, newest_first=True)
    if not newest or not newest[0].turns:
        return []
    row = newest[0]
    turns = pluralize(len(row.turns), "turn")
    about = f"\nthe last of step {row.step}: {turns}, {row.finish}, reward {row.reward:.3f}"
    fit = fitting([row.prompt, row.transcript])
    return [about, *fit(row.prompt).splitlines(), *fit(row.transcript).splitlines()]


def describe_link(link: Link) -> str:
    """``demo-sft, step 60``."""
    text = link.parent
    if link.step is not None:
        text = f"{text}, step {link.step}"
    if not link.is_there:
        text = f"{text} (deleted)"
    return text


def run_compare(arguments: argparse.Namespace) -> int:
    """Compare results from several runs, and list differing recipe keys."""
    root = arguments.runs_dir
    known = every_run_name(root)
    matching = []
    for name in arguments.names:
        matching += [run for run in known if fits(run, name)] or [name.rstrip("/")]
    names = list(dict.fromkeys(matching))
    if len(names) < 2:
        raise UsageError("give two or more runs: posttrain runs compare NAME NAME")
    side_by_side = put_side_by_side([find_run(root, name) for name in names])
    if not print_json(to_data(side_by_side, names)):
        _print_side_by_side(open_console(), side_by_side, names)
    return 0


def to_data(side_by_side: SideBySide, names: Sequence[str]) -> dict[str, object]:
    """Convert a comparison to plain data; keys missing from a recipe are omitted."""
    recipe = {
        key: {name: value for name, value in zip(names, values, strict=True) if value is not ABSENT}
        for key, values in side_by_side.recipe.items()
    }
    return asdict(side_by_side) | {"names": list(names), "recipe": recipe}


def _print_side_by_side(console: Console, side_by_side: SideBySide, names: Sequence[str]) -> None:
    labels = [name.rpartition("/")[2] for name in names]
    if len(set(labels)) != len(labels):
        labels = list(names)
    recipe: list[tuple[str, list[str]]] = []
    alone: dict[str, list[str]] = {}
    for key, values in sorted(side_by_side.recipe.items()):
        there: dict[str, str] = {}
        for label, value in zip(labels, values, strict=True):
            if value is not ABSENT:
                there[label] = cut_end(harmless(str(value)), MAX_VALUE_CHARACTERS)
        if len(there) == len(labels):
            recipe.append((key, list(there.values())))
        else:
            alone.setdefault(", ".join(there), []).append(f"{key} {' | '.join(dict.fromkeys(there.values()))}")
    for title, lines in (("outcome", _outcome(side_by_side)), ("recipe", recipe)):
        table = plain_table()
        for label in (title, *labels):
            table.add_column(Text(label), overflow="fold")
        if lines:
            print_rows(console, table, [(label, *columns) for label, columns in lines])
            console.print()
    for which, keys in alone.items():
        say(console, f"only in {which}: {', '.join(keys)}\n")
    keys_alike = "keys"
    if recipe:
        keys_alike = "further keys"
    say(console, f"the recipes are equal in {side_by_side.num_equal_keys} {keys_alike}", "dim")
    say(console, "single runs are anecdotal; `posttrain sweep` trains multiple seeds", "dim")


def _outcome(side_by_side: SideBySide) -> list[tuple[str, list[str]]]:
    runs = side_by_side.runs
    lines = []
    for name, results in side_by_side.last.items():
        columns = []
        for run, result in zip(runs, results, strict=True):
            if result is None:
                columns.append("–")
            else:
                primary = metric_of(run.primary_metric or "accuracy")
                columns.append(f"{primary.describe(result)} at step {result['step']}")
        lines.append((f"{name}, last", columns))
    for name in SHOWN:
        if not any(name in run.metrics for run in runs):
            continue
        metric = METRICS[name]
        columns = []
        for run in runs:
            if name in run.metrics:
                columns.append(metric.show(run.metrics[name]))
            else:
                columns.append("–")
        lines.append((metric.label, columns))
    lines.append(("state", [str(run.state) for run in runs]))
    lines.append(("step", [f"{run.step} of {run.steps}" for run in runs]))
    lines.append(("time", [show_duration(seconds) for seconds in side_by_side.seconds]))
    return lines


def _may_delete(console: Console, what: str, arguments: argparse.Namespace) -> bool:
    """Ask for confirmation unless ``--yes`` is given; report that nothing changed if declined.

    Raises:
        UsageError: no terminal to ask in.
    """
    if arguments.dry_run:
        say(console, f"would delete {what}; nothing was changed")
        return False
    if not arguments.yes and not sys.stdin.isatty():
        raise UsageError(f"Delete {what}? No terminal to ask in; give --yes. Nothing was changed")
    if arguments.yes or input(harmless(f"Delete {what}? [y/N] ")).strip().lower() in ("y", "yes"):
        return True
    say(console, "nothing was changed")
    return False


def run_prune(arguments: argparse.Namespace) -> int:
    """Show checkpoints to delete, ask, and delete. With ``--all``, running runs are skipped."""
    root = arguments.runs_dir
    keep = parse_keep(arguments.keep)
    console = open_console()
    if not arguments.names and not arguments.all:
        raise UsageError("give --all for every run, or names. Nothing was changed")
    links = find_links(root)
    plans = list[tuple[NamedFolder, list[int]]]()
    for place in locate_all(root, arguments.names or every_run_name(root)):
        for run in runs_of(root, place):
            try:
                refuse_live(root, run)
                plans.append((run, plan_prune(root, run, keep, links)))
            except (RunConflict, DataError) as error:
                if run.name in arguments.names:
                    raise
                say(console, f"left out: {error}", "yellow")
    with_something = [(run, steps) for run, steps in plans if steps or find_leftovers(run)]
    _prune_all(console, root, with_something, arguments)
    return 0


def _prune_all(
    console: Console, root: str, plans: Sequence[tuple[NamedFolder, Sequence[int]]], arguments: argparse.Namespace
) -> None:
    count = freed = 0
    for run, steps in plans:
        folder = run.path / "checkpoints"
        leftovers = [item for item in find_leftovers(run) if not item.is_symlink()]
        size = sum(disk_bytes(place) for place in [*(step_folder(folder, step) for step in steps), *leftovers])
        count += len(steps)
        freed += size
        kept = [step for step in checkpoint_steps(folder) if step not in steps]
        going = [*map(str, steps), *(item.name for item in leftovers)]
        say(console, f"{run.name}: delete {', '.join(going)} ({show_bytes(size)}); keep {', '.join(map(str, kept))}")
        best = best_step(folder)
        if best in steps:
            say(
                console,
                f"{run.name}: {best} is the best checkpoint; without it, the run name refers to the newest checkpoint",
            )
    what = f"{pluralize(count, 'checkpoint')} of {pluralize(len(plans), 'run')}, {show_bytes(freed)}"
    if not plans:
        console.print("there is nothing to prune")
    elif _may_delete(console, what, arguments):
        for run, steps in plans:
            prune(root, run, steps)
        say(console, f"deleted {what}")


def run_delete(arguments: argparse.Namespace) -> int:
    """Delete runs and sweeps, or checkpoints from a single run."""
    root = arguments.runs_dir
    console = open_console()
    if not arguments.names:
        raise UsageError("missing run names. Nothing was changed")
    if not arguments.step:
        _delete_runs(console, root, locate_all(root, arguments.names), arguments)
        return 0
    if len(arguments.names) != 1:
        raise UsageError("--step N deletes checkpoints; give exactly one run name. Nothing was changed")
    place = locate_run(root, arguments.names[0])
    refuse_live(root, place)
    steps = check_steps(root, place, arguments.step, find_links(root), force=arguments.force)
    _prune_all(console, root, [(place, steps)], arguments)
    return 0


def _delete_runs(console: Console, root: str, places: Sequence[NamedFolder], arguments: argparse.Namespace) -> None:
    sweeps = {place.name for place in places if place.is_sweep}
    places = [place for place in places if place.is_sweep or place.name.partition("/")[0] not in sweeps]
    for place in places:
        refuse_live(root, place)
    used = check_unused(root, places)
    if used and not arguments.force:
        lines = "\n".join(f"  {link.child}: its {link.role} is {describe_link(link)}" for link in used[:NUM_NAMED])
        more = ""
        if len(used) > NUM_NAMED:
            more = f"\n  and {len(used) - NUM_NAMED} more"
        raise RunConflict(
            f"other runs depend on these files:\n{lines}{more}\n"
            "Without them, these runs cannot be resumed, and adapters cannot be loaded. Nothing was changed; also give "
            "those names, or delete anyway with --force"
        )
    sizes = [disk_bytes(place.path) for place in places]
    for place, size in zip(places, sizes, strict=True):
        say(console, f"{place.name}: {_describe_place(root, place)}, {show_bytes(size)}")
    kind = "run"
    if sweeps:
        kind = "sweep"
    what = f"{pluralize(len(places), kind)}, {show_bytes(sum(sizes))}"
    if _may_delete(console, what, arguments):
        for place in places:
            delete(root, place)
        say(console, f"deleted {what}")


def _describe_place(root: str, place: NamedFolder) -> str:
    if place.is_sweep:
        return f"a sweep with {pluralize(len(runs_of(root, place)), 'run')}"
    run = summarize_run(place.path)
    about = f"{run.state} at step {run.step} of {run.steps}"
    if run.result:
        about = f"{about}, {run.result}"
    return about


def run_resume(arguments: argparse.Namespace) -> int:
    """Resume training with the stored recipe, like ``posttrain train --resume``; returns the exit code.

    Raises:
        RunConflict: another process uses this run.
    """
    from posttrain.commands.interpret.sae import train_sae_recipe
    from posttrain.commands.train import check_recipe, train_recipe
    from posttrain.runs.launch import RunStart
    from posttrain.runs.models import read_run_recipe  # imports torch, which listing runs does not need

    place = locate_run(arguments.runs_dir, arguments.name)
    refuse_live(arguments.runs_dir, place)
    run = RunDirectory(place.path)
    changes = []
    if arguments.steps is not None:
        changes.append(("train.steps", str(arguments.steps)))
    name = str(run.recipe_path)
    runs_dir = str(place.path.parent)
    start = RunStart(runs_dir, place.path.name, name, resume=True, accept_changes=arguments.accept_changes)
    if "dictionary" in run.read_recipe():
        from posttrain.interpret.saes.sae_recipe import load_sae_recipe

        recipe = load_sae_recipe(name, changes).resolve()
        return train_sae_recipe(recipe, start, quiet=arguments.quiet, allow_large=True)
    read_run_recipe(place.path).resolve(to_read=True)
    return train_recipe(check_recipe(name, changes), start, quiet=arguments.quiet)


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": run_list,
    "show": run_show,
    "compare": run_compare,
    "prune": run_prune,
    "delete": run_delete,
    "export": run_export,
    "resume": run_resume,
}


def run_manage(arguments: argparse.Namespace) -> int:
    """Read and execute actions line by line, until the user quits.

    Raises:
        UsageError: standard input is not a terminal.
    """
    if not sys.stdin.isatty():
        raise UsageError("runs manage needs a terminal; `posttrain runs --help` lists non-interactive commands")
    console = open_console()
    line = "list"
    while line not in ("q", "quit", "exit"):
        try:
            if line:
                _run_action(arguments.runs_dir, *shlex.split(line))
            line = input(f"\n{' · '.join(ACTIONS)} · quit; ACTION -h prints its options\nruns> ").strip()
        except EOFError:
            return 0
        except SystemExit:  # of argparse, which has said why
            say(console, "")
            line = ""
        except (PosttrainError, ValueError) as error:  # of the action or shlex
            say(console, str(error), "red")
            line = ""
        except KeyboardInterrupt:
            say(console, "\nstopped", "yellow")
            line = ""
    return 0


def _run_action(root: str, action: str, *words: str) -> None:
    if action not in ACTIONS:
        raise UsageError(f"unknown action {action!r}.{suggest(action, ACTIONS)}")
    parser = options.Parser(action, allow_abbrev=False)
    options.RUNS[action].add_to(parser)
    namespace = parser.parse_args(words)
    namespace.runs_dir = root
    ACTIONS[action](namespace)
