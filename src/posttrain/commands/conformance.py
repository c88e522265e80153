"""``posttrain conformance``: whether somebody's trainer computes what it says.

Only the standard library is imported here; the checks take torch and nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys

from posttrain.commands.options import CommandOptions, option

EPILOG = """\
the module has one function or more, in float64:
  loss(batch, config, micro_batches)       the number to differentiate, of one optimizer step
  advantages(rewards, group)               one number for each reward
  score(logits, tokens, temperature)       log-probabilities of the tokens, maybe with their entropies
  rows(prompts, answers, pad, end)         tokens and mask of rows
what a function does not offer it declines: return NotImplemented
  posttrain conformance mine.py
  posttrain conformance trl --format json
"""

OPTIONS = CommandOptions(
    option(
        "module", metavar="MODULE",
        help="a Python file, a module, or an adapter that comes with it: own, trl; its code is run",
    ),
    option("--format", choices=("table", "json"), default="table", dest="output", help="(default: table)"),
    option("--json", action="store_const", const="json", dest="output", help="the same as --format json"),
    epilog=EPILOG,
)  # fmt: skip


def run_conformance(arguments: argparse.Namespace) -> int:
    """Run every check, print the table; 1 where something is neither as in the equations nor a convention."""
    from posttrain.conformance.run import check_module, table_lines

    report = check_module(arguments.module)
    if arguments.output == "json":
        json.dump(report.as_dict(), sys.stdout, indent=1)
        print()
    else:
        print(*table_lines(report), sep="\n")
    return 0 if report.conforms else 1
