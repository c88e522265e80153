"""``posttrain what-if``: exact futures of a run with one thing changed, and the unchanged one.

Only the standard library is imported here until it runs (see ``cli``).
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
a change acts from the step after --at on; each value between commas is a future:
  posttrain what-if mine --at 40 train.lr=1e-5,1e-4 objective.clip_high=0.3 --seeds 3
  posttrain what-if mine --at 40 'objective=reinforce & regularize=null'   both in one future
  posttrain what-if mine --at 40 drop prompt:0-7 --steps 1     step 41 without prompt 0, 1, ... (3+5: without both)
  posttrain what-if mine --at 40 reward 3.2=0                  answer 2 to prompt 3 of step 41 gets the reward 0
  posttrain what-if runs/what-if-mine-at-40                    the table again
prompts of a step and answers to each are numbered from 0, in the order of its records
"""

OPTIONS = CommandOptions(
    option("run", metavar="RUN", help="a run with a checkpoint of that step or before; or results, to show them again"),
    option("changes", metavar="CHANGE", nargs="*", help="KEY=A,B, or drop prompt:N, or reward N.M=A,B"),
    option("--at", type=natural, metavar="STEP", help="go on from the weights after this step"),
    option("--steps", type=positive, metavar="N", help="steps of each future (default: 20, or what the run has left)"),
    option("--seeds", type=repetitions, default=1, metavar="N", help="futures of each change (default: 1, the run's)"),
    option("--jobs", type=positive, metavar="N", help="futures at a time (default: what the cores allow; 1 on a GPU)"),
    option("--run", dest="name", metavar="NAME", help="name of the results (default: what-if-RUN-at-STEP)"),
    option("--quiet", action="store_true", help="no progress and no table, only where the files are"),
    usage="posttrain what-if RUN --at STEP [CHANGE ...] [options]",
    epilog=EPILOG,
)  # fmt: skip


def run_what_if(arguments: argparse.Namespace) -> int:
    """Check what is asked for, play the futures, and print their table; 1 where one failed or nothing is as it was."""
    from posttrain.api.what_if import load_what_if, play_futures
    from posttrain.errors import INTERRUPTED, UsageError
    from posttrain.runs.directory import find_run
    from posttrain.runs.what_if.plan import is_result, plan_futures

    if arguments.at is None:
        if not is_result(arguments.run):
            raise UsageError("--at: after which step does something change? Give --at STEP")
        if arguments.changes:
            raise UsageError(f"{arguments.run}: these are results, which are only shown. Leave the changes out")
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
    """Print table, equality and failures, and where the files are; return the exit code."""
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
    """Play the futures of a folder as one of several processes; return the exit code."""
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
