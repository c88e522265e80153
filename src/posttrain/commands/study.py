"""``posttrain study``: reward models, what is trained against them, and what is chosen by them, in one picture."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console

from posttrain.commands.console import Text, open_console, print_table
from posttrain.commands.progress import show_duration
from posttrain.errors import INTERRUPTED, RunFailure
from posttrain.runs.directory import check_run_name, name_of_recipe
from posttrain.sweeps.study import StudyPlan, Training, load_study

DEFAULT_RUNS = "runs"


def run_study(arguments: argparse.Namespace) -> int:
    """Check every part, make those that are not finished, and write tables, picture and report."""
    plan = load_study(
        arguments.recipe,
        arguments.overrides,
        folder=Path(arguments.runs_dir) / folder_name(arguments),
        num_seeds=arguments.seeds,
    )
    console = open_console()
    if arguments.dry_run:
        print_plan(console, plan)
        return 0
    from posttrain.reports.study import write_study
    from posttrain.sweeps.parts import read_failures, run_parts, unfinished
    from posttrain.sweeps.study_files import collect_study

    view = StudyProgress(console, arguments.quiet)
    outcome = run_parts(plan, jobs=arguments.jobs, observer=view)
    finished = {part.name for part in plan.parts} - set(unfinished(plan))
    try:
        found = collect_study(plan, finished, read_failures(plan, outcome), command_of(arguments))
    except RunFailure as failure:
        view.warn(str(failure))
    else:
        report = write_study(found, plan.folder)
        if not arguments.quiet:
            for table in found.report.tables:
                print_table(console, table)
            for line in (*found.report.findings, *found.report.notes):
                console.print(Text(line), soft_wrap=True)
            console.print(Text(f"report:  {report}"), soft_wrap=True)
            console.print(Text(f"its runs: posttrain runs --runs-dir {plan.folder / 'cells'}"), soft_wrap=True)
    console.print(Text(f"study:   {plan.folder}"), soft_wrap=True)
    if outcome.interrupted:
        view.warn("stopped; everything so far is saved. The same command goes on from here")
        return INTERRUPTED
    return 1 if outcome.failures else 0


def folder_name(arguments: argparse.Namespace) -> str:
    """The study's name: as asked for, else from the recipe's; ``study-`` stands before that."""
    if arguments.run is not None:
        return check_run_name(arguments.run)
    name = name_of_recipe(arguments.recipe)
    return name if name.startswith("study") else f"study-{name}"


def command_of(arguments: argparse.Namespace) -> str:
    """The command line that makes this study again."""
    words = ["posttrain", "study", arguments.recipe]
    for option, value in (("--seeds", arguments.seeds), ("--jobs", arguments.jobs), ("--run", arguments.run)):
        words += [option, str(value)] if value is not None else []
    if arguments.runs_dir != DEFAULT_RUNS:
        words += ["--runs-dir", arguments.runs_dir]
    for key, value in arguments.overrides:
        words += [f"--{key}", value]
    return shlex.join(words)


class StudyProgress:
    """One line per event; when quiet, only what went wrong."""

    def __init__(self, console: Console, quiet: bool) -> None:
        self.console, self.quiet = console, quiet
        self.num_parts = self.num_ended = 0

    def __call__(self, event: str, facts: dict[str, Any]) -> None:
        if event == "plan":
            self.num_parts, self.num_ended = facts["num_parts"], facts["num_finished"]
            line = f"{self.num_parts} parts, {facts['num_jobs']} at a time"
            self._say(f"{line}; {self.num_ended} are finished already" if self.num_ended else line, "dim")
        elif event == "begin":
            self._say(f"{facts['part'].name}: {'goes on' if facts['resumed'] else 'started'}", "dim")
        elif event == "progress":
            self._say("; ".join(facts["lines"]), "dim")
        elif event == "end":
            self.num_ended += 1
            line = f"{facts['part'].name}: finished in {show_duration(facts['seconds'])}"
            self._say(f"{line} ({self.num_ended} of {self.num_parts})", "bold")
        elif event == "failure":
            self.warn(f"{facts['part'].name}: failed: {facts['message']} ({facts['log']})")
        elif event == "dropped":
            self.warn(f"{facts['part'].name}: {facts['message']}")
        elif event == "stop":
            self._say(f"waiting for {facts['num_working']} parts to save what they have", "yellow")

    def _say(self, line: str, style: str = "") -> None:
        if not self.quiet:
            self.console.print(Text(line, style=style), soft_wrap=True)

    def warn(self, line: str) -> None:
        """Shown even when quiet."""
        self.console.print(Text(line, style="red"), soft_wrap=True)


def print_plan(console: Console, plan: StudyPlan) -> None:
    """What would be run: the parts, and the resolved study file."""
    console.print(Text(f"# {plan.folder}: {len(plan.parts)} parts, seeds 0 to {plan.num_seeds - 1}"))
    for part in plan.parts:
        what = f"{part.cell.recipe.train.steps} steps" if isinstance(part, Training) else " ".join(part.words)
        after = f" (after {', '.join(part.needs)})" if part.needs else ""
        console.print(Text(f"# {part.name}: {what}{after}"), soft_wrap=True)
    print(plan.to_yaml().rstrip())
