"""``posttrain compare``: several methods on the same ground, several seeds each, one table."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from posttrain.commands.console import Text, open_console
from posttrain.commands.progress import show_duration
from posttrain.errors import INTERRUPTED
from posttrain.reports.comparison import describe_differences, make_notes, make_table, write_comparison
from posttrain.runs.directory import check_run_name, name_of_recipe
from posttrain.sweeps.compare import Plan, load_comparison
from posttrain.sweeps.comparison import Comparison

DEFAULT_RUNS = "runs"
MAX_COLUMNS = 400


def run_compare(arguments: argparse.Namespace) -> int:
    """Check every cell, train those that are not finished, and write table, picture and report."""
    plan = load_comparison(
        arguments.recipe,
        arguments.overrides,
        folder=Path(arguments.runs_dir) / folder_name(arguments),
        methods=arguments.methods,
        num_seeds=arguments.seeds,
    )
    console = open_console()
    if arguments.dry_run:
        print_plan(console, plan)
        return 0
    from posttrain.sweeps.cells import run_cells
    from posttrain.sweeps.comparison_files import collect_results

    view = CompareProgress(console, arguments.quiet)
    outcome = run_cells(plan, jobs=arguments.jobs, observer=view)
    comparison = collect_results(plan, outcome, command_of(arguments))
    report = write_comparison(comparison, plan.folder)
    if not arguments.quiet:
        print_comparison(console, comparison)
    console.print(Text(f"comparison: {plan.folder}"), soft_wrap=True)
    if not arguments.quiet:
        console.print(Text(f"report:     {report}"), soft_wrap=True)
        console.print(Text(f"its runs:   posttrain runs --runs-dir {plan.folder / 'cells'}"), soft_wrap=True)
    if outcome.interrupted:
        view.warn("stopped; everything so far is saved. The same command goes on from here")
        return INTERRUPTED
    return 1 if outcome.failures else 0


def folder_name(arguments: argparse.Namespace) -> str:
    """The comparison's name: as asked for, else from the recipe's; ``compare-`` stands before that."""
    if arguments.run is not None:
        return check_run_name(arguments.run)
    name = name_of_recipe(arguments.recipe)
    return name if name.startswith("compare") else f"compare-{name}"


def command_of(arguments: argparse.Namespace) -> str:
    """The command line that makes this comparison again."""
    words = ["posttrain", "compare", arguments.recipe]
    if arguments.methods is not None:
        words += ["--methods", ",".join(arguments.methods)]
    for option, value in (("--seeds", arguments.seeds), ("--jobs", arguments.jobs), ("--run", arguments.run)):
        words += [option, str(value)] if value is not None else []
    if arguments.runs_dir != DEFAULT_RUNS:
        words += ["--runs-dir", arguments.runs_dir]
    for key, value in arguments.overrides:
        words += [f"--{key}", value]
    return shlex.join(words)


class CompareProgress:
    """One line per event; when quiet, only what went wrong."""

    def __init__(self, console: Console, quiet: bool) -> None:
        self.console, self.quiet = console, quiet
        self.num_cells = self.num_ended = 0

    def __call__(self, event: str, facts: dict[str, Any]) -> None:
        if event == "plan":
            self.num_cells, self.num_ended = facts["num_cells"], facts["num_finished"]
            self._say(self._plan_line(facts), "dim")
        elif event == "begin":
            self._say(f"{facts['cell'].name}: {'goes on' if facts['resumed'] else 'started'}", "dim")
        elif event == "evaluation" and facts["accuracy"] is not None:
            line = f"{facts['cell'].name}: step {facts['step']}/{facts['steps']}, {facts['accuracy']:.1%} right"
            self._say(line + _left(facts["remaining"]))
        elif event == "end":
            self._say(f"{facts['cell'].name}: {self._end_line(facts)}", "bold")
        elif event == "failure":
            self.num_ended += 1
            self.warn(f"{facts['cell'].name}: failed: {facts['message']} ({facts['log']})")
        elif event == "stop":
            self._say(f"waiting for {facts['num_working']} runs to save a checkpoint", "yellow")

    def _plan_line(self, facts: dict[str, Any]) -> str:
        line = f"{facts['num_cells']} runs, {facts['num_jobs']} at a time, {facts['num_threads']} threads each"
        return f"{line}; {facts['num_finished']} are finished already" if facts["num_finished"] else line

    def _end_line(self, facts: dict[str, Any]) -> str:
        is_start = facts["cell"].name == "start"
        self.num_ended += 0 if is_start else 1
        count = "" if is_start else f" ({self.num_ended} of {self.num_cells})"
        accuracy = "" if facts["accuracy"] is None else f", {facts['accuracy']:.1%} right"
        left = "" if is_start else _left(facts["remaining"])
        return f"finished in {show_duration(facts['seconds'])}{accuracy}{count}{left}"

    def _say(self, line: str, style: str = "") -> None:
        if not self.quiet:
            self.console.print(Text(line, style=style), soft_wrap=True)

    def warn(self, line: str) -> None:
        """Shown even when quiet."""
        self.console.print(Text(line, style="red"), soft_wrap=True)


def _left(seconds: float | None) -> str:
    return f"; {show_duration(seconds)} left" if seconds is not None and seconds >= 1 else ""


def print_plan(console: Console, plan: Plan) -> None:
    """What would be run: the rows and the resolved compare file."""
    steps = plan.base.train.steps
    console.print(Text(f"# {plan.folder}: {len(plan.cells)} runs of {steps} steps, seeds 0 to {plan.num_seeds - 1}"))
    if plan.start is not None:
        console.print(Text(f"# start: {plan.start_source}, {plan.start.recipe.train.steps} steps"), soft_wrap=True)
    for method in plan.methods:
        changes = ", ".join(sorted(method.differs)) or "nothing but the method"
        console.print(Text(f"# {method.name} ({method.source}) differs from the base in {changes}"), soft_wrap=True)
    print(plan.to_yaml().rstrip())


def print_comparison(console: Console, comparison: Comparison) -> None:
    """The table, its notes and what differs."""
    content = make_table(comparison)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, label in enumerate(content.header):
        two_lines = label.replace(", ", " ").replace(" ", "\n", 1)
        table.add_column(Text(two_lines), no_wrap=True, justify="left" if index == 0 else "right", vertical="bottom")
    for index, line in enumerate(content.lines):
        is_method = index < len(comparison.rows)
        table.add_row(*(Text(text) for text in line), style="" if is_method else "dim")
    console.print()
    needed = Measurement.get(console, console.options.update(width=MAX_COLUMNS), table).maximum
    console.print(table, width=max(needed, console.width), crop=False, soft_wrap=True)  # nothing is cut off
    console.print()
    for note in [*make_notes(comparison), *describe_differences(comparison)]:
        console.print(Text(note, style="dim"))
    console.print()
