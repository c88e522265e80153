"""``posttrain what-if``: exact counterfactual continuations of a run, plus an unchanged one.

Imports only the standard library until executed (see ``cli``).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from posttrain.commands.options import (
    ALLOW_CODE_OPTIONS,
    CommandOptions,
    Parser,
    natural,
    option,
    positive,
    repetitions,
)

if TYPE_CHECKING:
    from posttrain.api.what_if import WhatIf

EPILOG = """\
changes apply from the step after --at; each comma-separated value is a separate future:
  posttrain what-if mine --at 40 train.lr=1e-5,1e-4 objective.clip_high=0.3 --seeds 3
  posttrain what-if mine --at 40 'objective=reinforce & regularize=null'   combined in a single future
  posttrain what-if mine --at 40 drop prompt:0-7 --steps 1     step 41 without prompt 0, 1, ... (3+5: without both)
  posttrain what-if mine --at 40 reward 3.2=0                  answer 2 to prompt 3 of step 41 gets the reward 0
  posttrain what-if runs/what-if-mine-at-40                    show results again
prompts and answers are numbered from 0, in recorded order
"""

OPTIONS = CommandOptions(
    option("run", metavar="RUN", help="a run with a checkpoint at or before STEP; or a results folder to display"),
    option("changes", metavar="CHANGE", nargs="*", help="KEY=A,B, or drop prompt:N, or reward N.M=A,B"),
    option("--at", type=natural, metavar="STEP", help="continue from the state after this step"),
    option("--steps", type=positive, metavar="N", help="steps per future (default: 20, or the remaining steps)"),
    option("--seeds", type=repetitions, default=1, metavar="N", help="futures per change (default: 1, the run's seed)"),
    option("--jobs", type=positive, metavar="N", help="concurrent futures (default: limited by cores; 1 on a GPU)"),
    option("--run", dest="name", metavar="NAME", help="results folder name (default: what-if-RUN-at-STEP)"),
    option("--quiet", action="store_true", help="hide progress and table; print only file locations"),
    usage="posttrain what-if RUN --at STEP [CHANGE ...] [options]",
    epilog=EPILOG,
)  # fmt: skip


def run_what_if(arguments: argparse.Namespace) -> int:
    """Check arguments, play futures, print a table; exit code 1 if one failed or the unchanged one differs."""
    from posttrain.api.what_if import load_what_if, play_futures
    from posttrain.errors import INTERRUPTED, UsageError
    from posttrain.runs.directory import find_run
    from posttrain.runs.what_if.plan import is_result, plan_futures

    if arguments.at is None:
        if not is_result(arguments.run):
            raise UsageError("--at: missing. Give --at STEP, the last unchanged step")
        if arguments.changes:
            raise UsageError(f"{arguments.run}: a results folder can only be displayed. Remove the changes")
        return _show(load_what_if(arguments.run), is_brief=False)
    run = find_run(arguments.runs_dir, arguments.run)
    planned = plan_futures(run, arguments.at, arguments.changes, arguments.steps, arguments.seeds)
    how = {"jobs": arguments.jobs, "name": arguments.name, "runs_dir": arguments.runs_dir}
    done = play_futures(planned, **how, quiet=arguments.quiet)
    code = _show(done, is_brief=arguments.quiet)
    if done.is_interrupted:
        return INTERRUPTED
    return code


def _show(done: WhatIf, *, is_brief: bool) -> int:
    """Print table, equality check, failures and file locations; return the exit code."""
    from posttrain.terminal.console import leaves_out_tables, open_console, print_table, say

    console = open_console()
    results = done.results
    if not leaves_out_tables(is_brief):
        print_table(console, results.table())
        for line in results.notes():
            say(console, line, "dim")
    style = "green"
    if not results.equality.holds:
        style = "red"
    say(console, results.equality.describe(results.plan), style)
    if done.picture is not None:
        say(console, f"picture: {done.picture}")
    say(console, f"what-if: {done.folder}")
    if results.failures or not results.equality.holds:
        return 1
    return 0


def play_rest(arguments: Sequence[str]) -> int:
    """Worker entry point: play futures in a folder; return the exit code."""
    from pathlib import Path

    from posttrain.errors import INTERRUPTED
    from posttrain.runs.children import stop_on_signals
    from posttrain.runs.what_if.play import play_all
    from posttrain.runs.what_if.runner import STOPPING
    from posttrain.untrusted import declare_from_command_line

    parser = Parser("posttrain __futures")
    CommandOptions(option("folder"), *ALLOW_CODE_OPTIONS).add_to(parser)
    namespace = parser.parse_args(arguments)
    allowed = getattr(namespace, "allow_code", ())
    declare_from_command_line((), allowed, trust_remote_code=getattr(namespace, "trust_remote_code", False))
    with stop_on_signals(STOPPING) as should_stop:
        play_all(Path(namespace.folder), should_stop, lambda future, status: None)
        if should_stop():
            return INTERRUPTED
    return 0
