"""The options of ``posttrain study``. Only the standard library is imported here (see ``cli``)."""

from __future__ import annotations

import argparse

from posttrain.commands.options.argument_types import positive, repetitions

EPILOG = """\
the same command again goes on where it stopped; finished parts are kept:
  posttrain study overoptimization
  posttrain study prm-vs-orm --seeds 1 --best_of_n.samples 16
  posttrain study overoptimization --run more-pairs --reward_models.proxy.rollout.prompts 512
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which study, how many seeds, where."""
    parser.usage = "posttrain study RECIPE [options] [--section.key value ...] [--policies.NAME.key value ...]"
    parser.add_argument("recipe", metavar="RECIPE", help="a study/ name that `posttrain recipes` lists, or a file")
    parser.add_argument("--seeds", type=repetitions, metavar="N", help="how often all is done (default: the recipe's)")
    parser.add_argument("--jobs", type=positive, metavar="N", help="parts at a time (default: cores; 1 on a GPU)")
    parser.add_argument("--run", metavar="NAME", help="name of the directory (default: the recipe's name)")
    parser.add_argument("--dry-run", action="store_true", help="check everything and print it resolved; run nothing")
    parser.add_argument("--quiet", action="store_true", help="no progress and no table, only where the files are")
