"""The options of ``posttrain sae``. Only the standard library is imported here (see ``cli``)."""

from __future__ import annotations

import argparse

from posttrain.commands.interpret import features_options, sae_diff_options
from posttrain.commands.options.argument_types import ACCEPT_HELP

EPILOG = ""  # each action has its own
ACTIONS = {
    "train": "train a sparse autoencoder on activations, by a recipe",
    "features": "what the features of a sparse autoencoder stand for, as one page",
    "diff": "what training changed: two models seen through the same features",
}

SAE_TRAIN_EPILOG = """\
any key of the recipe is an option:
  posttrain sae train tiny/sae --dictionary.k 8 --train.steps 400
  posttrain sae train tiny/sae --dictionary l1 --dictionary.coefficient 0.01
  posttrain sae train mine.yaml --activations.folder activations/both --activations.source difference
"""


def add_options(
    parser: argparse.ArgumentParser, common: argparse.ArgumentParser, places: argparse.ArgumentParser
) -> dict[str, argparse.ArgumentParser]:
    """Add the actions; returns their parsers, as ``sae train``."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)
    made = {
        name: actions.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            parents=[common, places],
            allow_abbrev=False,
        )
        for name, text in ACTIONS.items()
    }
    _add_train_options(made["train"])
    features_options.add_features_options(made["features"])
    sae_diff_options.add_diff_options(made["diff"])
    return {f"sae {name}": parser for name, parser in made.items()}


def _add_train_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "posttrain sae train RECIPE [options] [--section.key value ...]"
    parser.epilog = SAE_TRAIN_EPILOG
    parser.add_argument("recipe", metavar="RECIPE", help="tiny/sae, sae-qwen3-14b-layer20, or a YAML file")
    parser.add_argument("--run", metavar="NAME", help="name of the run directory (default: the recipe's name)")
    parser.add_argument("--resume", action="store_true", help="continue the run from its newest checkpoint")
    parser.add_argument("--accept-changes", action="store_true", help=ACCEPT_HELP)
    parser.add_argument("--yes", action="store_true", help="record activations without asking, however large they are")
    parser.add_argument("--dry-run", action="store_true", help="check and print the resolved recipe; train nothing")
    parser.add_argument("--quiet", action="store_true", help="no progress, only notices and the result")
