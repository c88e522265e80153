"""How a sweep is run from the command line, and what is printed of it."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from posttrain.commands.console import Text, counted, full_width, leaves_out_tables, open_console, plain_table, say
from posttrain.commands.progress import show_duration
from posttrain.commands.train import tell_missing
from posttrain.errors import INTERRUPTED, RunFailure
from posttrain.runs.directory import check_run_name, name_of_recipe
from posttrain.sweeps.comparison import Comparison
from posttrain.sweeps.plan import Plan, Training
from posttrain.sweeps.runner import Outcome, run_sweep
from posttrain.sweeps.study import StudyResults

DEFAULT_RUNS = "runs"
# (outcome, command line) -> the report's path, and what prints the results
Report = Callable[[Outcome, str], tuple[Path, Callable[[Console], None]]]


def run_sweep_command(arguments: argparse.Namespace, plan: Plan, about: list[str], report: Report) -> int:
    """Make what is not finished and report; with ``--dry-run`` only print ``about`` and the resolved file."""
    console = open_console()
    if arguments.dry_run:
        for line in about:
            say(console, f"# {line}")
        print(plan.to_yaml().rstrip())
        tell_missing((part.recipe for part in plan.parts if isinstance(part, Training)), plan.folder)
        return 0
    view = SweepProgress(console, arguments.quiet, plan.parts_are)
    outcome = run_sweep(plan, jobs=arguments.jobs, observer=view)
    places = [(plan.what, str(plan.folder))]
    try:
        page, show = report(outcome, command_of(arguments))
    except RunFailure as failure:
        view.warn(str(failure))
    else:
        if not leaves_out_tables(arguments.quiet):
            show(console)
            places += [("report", str(page)), ("its runs", f"posttrain runs --runs-dir {plan.folder / 'cells'}")]
    width = max(len("report: "), len(plan.what) + 1)
    for name, place in places:
        say(console, f"{name + ':':<{width}} {place}")
    if outcome.interrupted:
        view.warn("stopped; everything so far is saved. The same command goes on from here")
        return INTERRUPTED
    return 1 if outcome.failures else 0


def describe_parts(plan: Plan) -> list[str]:
    """What would be made, part by part, and after what."""
    lines = [f"{plan.folder}: {len(plan.parts)} parts, seeds 0 to {plan.num_seeds - 1}"]
    for part in plan.parts:
        work = f"{part.recipe.train.steps} steps" if isinstance(part, Training) else " ".join(part.words(resume=False))
        after = f" (after {', '.join(part.needs)})" if part.needs else ""
        lines.append(f"{part.name}: {work}{after}")
    return lines


def folder_of(arguments: argparse.Namespace) -> Path:
    """Where the sweep is: called as asked for, else by its recipe's name, with the command's before it."""
    name = name_of_recipe(arguments.recipe) if arguments.run is None else check_run_name(arguments.run)
    if arguments.run is None and getattr(arguments, "over", None) is not None:
        name = f"{name}-over-{arguments.over[0]}"
    is_whole = arguments.run is not None or name.startswith(arguments.command)
    return Path(arguments.runs_dir) / (name if is_whole else f"{arguments.command}-{name}")


def command_of(arguments: argparse.Namespace) -> str:
    """The command line that makes this sweep again."""
    words = ["posttrain", arguments.command, arguments.recipe]
    if getattr(arguments, "methods", None) is not None:
        words += ["--methods", ",".join(arguments.methods)]
    if getattr(arguments, "over", None) is not None:
        key, values = arguments.over
        words += ["--over", f"{key}={','.join(values)}"]
    for option, value in (("--seeds", arguments.seeds), ("--jobs", arguments.jobs), ("--run", arguments.run)):
        words += [option, str(value)] if value is not None else []
    if arguments.runs_dir != DEFAULT_RUNS:
        words += ["--runs-dir", arguments.runs_dir]
    for key, value in arguments.overrides:
        words += [f"--{key}", value]
    return shlex.join(words)


class SweepProgress:
    """One line per event; when quiet, only what went wrong. ``parts_are``: what a user calls the parts."""

    def __init__(self, console: Console, quiet: bool, parts_are: str) -> None:
        self.console, self.quiet, self.parts_are = console, quiet, parts_are
        self.num_parts = self.num_ended = 0

    def __call__(self, event: str, facts: dict[str, Any]) -> None:
        name = facts["part"].name if "part" in facts else ""
        if event == "plan":
            self.num_parts, self.num_ended = facts["num_parts"], facts["num_finished"]
            line = f"{self._counted(self.num_parts)}, {facts['num_jobs']} at a time"
            line += f", {counted(facts['num_threads'], 'thread')} each"
            self._say(f"{line}; {self.num_ended} finished already" if self.num_ended else line, "dim")
        elif event == "begin":
            self._say(f"{name}: {'goes on' if facts['resumed'] else 'started'}", "dim")
        elif event == "evaluation" and facts["told"]:
            step = f"step {facts['step']}/{facts['part'].recipe.train.steps}"
            self._say(f"{name}: {step}, {facts['told']}{_left(facts['remaining'])}")
        elif event == "progress":
            self._say("; ".join(facts["lines"]), "dim")
        elif event == "end":
            self._say(f"{name}: {self._end_line(facts)}", "bold")
        elif event in ("failure", "dropped"):
            self.num_ended += 1
            what = f"failed: {facts['message']} ({facts['log']})" if event == "failure" else facts["message"]
            self.warn(f"{name}: {what}")
        elif event == "stop":
            self._say(f"{self._counted(facts['num_working'])} at work", "yellow")

    def _end_line(self, facts: dict[str, Any]) -> str:
        told = f", {facts['told']}" if facts["told"] else ""
        line = f"finished in {show_duration(facts['seconds'])}{told}"
        if facts["part"].alone:
            return line
        self.num_ended += 1
        return f"{line} ({self.num_ended} of {self.num_parts}){_left(facts['remaining'])}"

    def _counted(self, number: int) -> str:
        return counted(number, self.parts_are.removesuffix("s"))

    def _say(self, line: str, style: str = "") -> None:
        if not self.quiet:
            say(self.console, line, style)

    def warn(self, line: str) -> None:
        """Shown even when quiet."""
        say(self.console, line, "red")


def _left(seconds: float | None) -> str:
    return f"; {show_duration(seconds)} left" if seconds is not None and seconds >= 1 else ""


def print_comparison(comparison: Comparison, console: Console) -> None:
    """The table, its notes and what differs."""
    from posttrain.reports.sweeps import describe_differences, make_notes, make_table

    content = make_table(comparison)
    table = plain_table()
    for index, label in enumerate(content.header):
        two_lines = label.replace(", ", " ").replace(" ", "\n", 1)
        table.add_column(Text(two_lines), no_wrap=True, justify="left" if index == 0 else "right", vertical="bottom")
    for index, line in enumerate(content.lines):
        is_method = index < len(comparison.rows)
        table.add_row(*(Text(text) for text in line), style="" if is_method else "dim")
    console.print()
    table.width = full_width(console, table)
    console.print(table, crop=False, soft_wrap=True)  # nothing is cut off
    console.print()
    for note in [*make_notes(comparison), *describe_differences(comparison)]:
        console.print(Text(note, style="dim"))
    console.print()


def print_study(study: StudyResults, console: Console) -> None:
    """The tables, what they say, and how to read them."""
    from posttrain.commands.console import print_table

    for table in study.report.tables:
        print_table(console, table)
    for line in (*study.report.findings, *study.report.notes):
        say(console, line)
