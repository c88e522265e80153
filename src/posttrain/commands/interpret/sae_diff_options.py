"""The options of ``posttrain sae diff``. Only the standard library is imported here (see ``cli``)."""

from __future__ import annotations

import argparse

from posttrain.commands.options.argument_types import natural, repetitions

EPILOG = """\
any key of the recipe is an option; the same command again keeps what is there:
  posttrain sae diff tiny/what-did-rl-change
  posttrain sae diff runs/tiny-sft runs/tiny-grpo --layer 3 --seeds 5
  posttrain sae diff tiny runs/tiny-sft --task stories --changes.prompts 256 --changes.dictionary.k 8
  posttrain sae diff tiny/what-did-rl-change --changes.causal.measure accuracy --run by-accuracy
"""


def add_diff_options(parser: argparse.ArgumentParser) -> None:
    """Which models or recipe, where to look, how often, where to."""
    parser.usage = "posttrain sae diff BASE POST | RECIPE [options] [--section.key value ...]"
    parser.epilog = EPILOG
    parser.add_argument(
        "models",
        metavar="MODEL_OR_RUN",
        nargs="+",
        help="the model before training and the one after it (models or runs); or a recipe: tiny/what-did-rl-change",
    )
    parser.add_argument("--layer", type=natural, metavar="L", help="the layer to look at (default: the middle one)")
    parser.add_argument("--site", choices=("resid", "mlp", "attn"), help="of the layer (default: resid)")
    parser.add_argument("--seeds", type=repetitions, metavar="N", help="dictionaries to train (default: 3)")
    parser.add_argument("--run", metavar="NAME", help="name of the directory under the runs directory")
    parser.add_argument("--yes", action="store_true", help="record activations without asking, however large they are")
    parser.add_argument("--dry-run", action="store_true", help="check and print the resolved recipe; do nothing")
    parser.add_argument("--quiet", action="store_true", help="no progress, only where the report is")
