"""``posttrain sweep``: train rows x seeds, producing a shared table, page and plot.

Imports only the standard library until executed (see ``cli``).
"""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

from posttrain.commands.options import CommandOptions, names_between_commas, option, positive, repetitions, shown

if TYPE_CHECKING:
    from posttrain.sweeps.comparison.plan import ComparisonPlan
    from posttrain.sweeps.plan import SweepPlan

EPILOG = """\
repeat a command to continue; finished trials are reused:
  posttrain sweep ppo-grpo-dpo --seeds 3
  posttrain sweep tiny/grpo --over train.lr=1e-4,3e-4,1e-3 --seeds 3
  posttrain sweep mine.yaml --rows grpo,dapo --train.steps 60 --rows.dapo.objective.clip_high 0.3
  posttrain sweep overoptimization --seeds 1 --best_of_n.samples 16
  posttrain sweep methods --rows grpo,gspo,ppo --comparison.over.values [8] --seeds 5
"""


def read_over(text: str) -> tuple[str, list[str]]:
    """Split ``train.lr=1e-4,3e-4`` into key and values."""
    from posttrain.recipes.overriding import split_values

    key, _, listed = text.partition("=")
    values = split_values(listed)
    if not key.strip() or len(values) < 2 or not all(values):
        raise argparse.ArgumentTypeError(f"needs KEY=A,B with two or more values, not {shown(text)}")
    return key.strip().removeprefix("--"), values


OPTIONS = CommandOptions(
    option(
        "recipe", metavar="SWEEP_OR_RECIPE",
        help="a sweep listed by `posttrain recipes`, a file, or a single-run recipe",
    ),
    option(
        "--over", type=read_over, metavar="KEY=A,B",
        help="for single-run recipes, a row per key value: train.lr=1e-4,3e-4",
    ),
    option(
        "--rows", type=names_between_commas, metavar="A,B",
        help="only these rows and prerequisites (default: all)",
    ),
    option("--seeds", type=repetitions, metavar="N", help="runs per row (default: set in the file)"),
    option("--jobs", type=positive, metavar="N", help="concurrent trials (default: cores; 1 on a GPU)"),
    option("--run", metavar="NAME", help="directory name (default: sweep name)"),
    option("--dry-run", action="store_true", help="check and print the resolved sweep without running"),
    option("--quiet", action="store_true", help="hide progress and table; print only file locations"),
    usage="posttrain sweep SWEEP_OR_RECIPE [options] [--section.key value ...] [--rows.NAME.key value ...]",
    epilog=EPILOG,
)  # fmt: skip


def run_sweep(arguments: argparse.Namespace) -> int:
    """Check all trials, run unfinished ones, and write results, tables, plot and page."""
    from posttrain.api.sweep import folder_of, load_plan, make_sweep
    from posttrain.errors import INTERRUPTED
    from posttrain.sweeps.comparison.plan import ComparisonPlan
    from posttrain.terminal.console import leaves_out_tables, open_console, print_table, say

    options = {"rows": arguments.rows, "num_seeds": arguments.seeds, "over": arguments.over}
    over = None
    if arguments.over is not None:
        over = arguments.over[0]
    folder = folder_of(arguments.run, arguments.recipe, over, arguments.runs_dir)
    plan = load_plan(arguments.recipe, arguments.overrides, folder=folder, **options)
    console = open_console()
    if arguments.dry_run:
        for line in describe_plan(plan):
            say(console, f"# {line}")
        print(plan.to_yaml().rstrip())
        _check_rows(plan)
        return 0

    done = make_sweep(plan, command_of(arguments), arguments.jobs, quiet=arguments.quiet)
    if done.results is not None and not leaves_out_tables(arguments.quiet):
        for table in done.results.tables:
            print_table(console, table)
        results = done.results
        for line in (*results.problems, *results.findings, *results.notes, *results.differences):
            say(console, line)
        say(console, f"report: {done.report}")
        if not isinstance(plan, ComparisonPlan):
            say(console, f"its runs: posttrain runs --runs-dir {plan.folder / 'cells'}")
    say(console, f"sweep: {plan.folder}")
    if plan.content.page and not (arguments.quiet or done.is_interrupted):
        say(console, f"read on: {plan.content.page}")
    if done.is_interrupted:
        return INTERRUPTED
    if done.failures:
        return 1
    return 0


def _check_rows(plan: SweepPlan | ComparisonPlan) -> None:
    """Check every row's recipe before training, and report missing prerequisites."""
    from posttrain.api.training import refuse_tasks
    from posttrain.commands.train import check_data, check_packages, check_tools, tell_missing
    from posttrain.sweeps.comparison.plan import ComparisonPlan

    starts = []
    if isinstance(plan, ComparisonPlan):
        trained = [row.recipe for row in plan.rows]
    else:
        trained = [trial.recipe for trial in plan.trainings]
        if plan.start is not None:
            starts = [plan.start.recipe]
    for recipe in [*starts, *(row.recipe for row in plan.rows if "labelled" not in row.needs)]:
        refuse_tasks([recipe.task, *recipe.eval.tasks])
        check_data(recipe.task, recipe.eval, recipe.data)
        check_tools(recipe.environment, recipe.tools or (), recipe.rewards)
        check_packages(recipe)
    tell_missing([*starts, *trained], plan.folder)


def describe_plan(plan: SweepPlan | ComparisonPlan) -> list[str]:
    """Describe trials and prerequisites, differences between rows, and inactive options."""
    from posttrain.api.training import inert_lines
    from posttrain.sweeps.comparison.plan import ComparisonPlan, describe_design
    from posttrain.sweeps.comparison.runner import load_records

    if isinstance(plan, ComparisonPlan):
        lines = [f"{plan.folder}: a comparison", *describe_design(plan, load_records(plan))]
        for first in plan.first_trials():
            lines += [f"{first.name}: {line}" for line in inert_lines(first.recipe)]
        return lines
    lines = [f"{plan.folder}: {len(plan.trials)} trials, seeds 0 to {plan.num_seeds - 1}"]
    for trial in plan.trials:
        after = ""
        if trial.needs:
            after = f" (after {', '.join(trial.needs)})"
        lines.append(f"{trial.name}: posttrain {shlex.join(trial.command)}{after}")
    if plan.base is not None:
        for row in plan.rows:
            changes = ", ".join(sorted(row.differs)) or "nothing but the method"
            lines.append(f"{row.name} ({row.source}) differs from the base in {changes}")
    for row in plan.rows:
        lines += [f"{row.name}: {line}" for line in inert_lines(row.recipe)]
    return lines


def command_of(arguments: argparse.Namespace) -> str:
    """The command line that makes this sweep again."""
    words = ["posttrain", "sweep", arguments.recipe]
    if arguments.rows is not None:
        words += ["--rows", ",".join(arguments.rows)]
    if arguments.over is not None:
        key, values = arguments.over
        words += ["--over", f"{key}={','.join(values)}"]
    if arguments.seeds is not None:
        words += ["--seeds", str(arguments.seeds)]
    if arguments.jobs is not None:
        words += ["--jobs", str(arguments.jobs)]
    if arguments.run is not None:
        words += ["--run", arguments.run]
    if arguments.runs_dir != "runs":
        words += ["--runs-dir", arguments.runs_dir]
    for key, value in arguments.overrides:
        words += [f"--{key}", value]
    return shlex.join(words)
