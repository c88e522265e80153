"""``posttrain conformance``: check if another trainer computes the published equations.

Imports only the standard library; checks need torch.
"""

from __future__ import annotations

import argparse
import json
import sys

from posttrain.commands.options import CommandOptions, option

EPILOG = """\
the module defines one or more of these functions, in float64:
  loss(batch, config, micro_batches)       scalar loss for an optimizer step
  advantages(rewards, group)               advantage per reward
  score(logits, tokens, temperature)       token log-probabilities, optionally with entropies
  rows(prompts, answers, pad, end)         padded tokens and mask
to skip an unsupported case, return NotImplemented
  posttrain conformance mine.py
  posttrain conformance trl --format json
"""

OPTIONS = CommandOptions(
    option(
        "module", metavar="MODULE",
        help="a Python file, a module, or a built-in adapter (own, trl); the code is executed",
    ),
    option("--format", choices=("table", "json"), default="table", dest="output", help="(default: table)"),
    option("--json", action="store_const", const="json", dest="output", help="the same as --format json"),
    epilog=EPILOG,
)  # fmt: skip


def run_conformance(arguments: argparse.Namespace) -> int:
    """Run all checks, print a table; exit code 1 if a result fits neither the equations nor a known convention."""
    from posttrain.conformance.run import check_module, table_lines

    report = check_module(arguments.module)
    if arguments.output == "json":
        json.dump(report.as_dict(), sys.stdout, indent=1)
        print()
    else:
        print(*table_lines(report), sep="\n")
    return 0 if report.conforms else 1
