"""The options of ``posttrain activations`` and ``sae``. Only the standard library is imported here (see ``cli``)."""

from __future__ import annotations

import argparse
from typing import Protocol

from posttrain.commands.interpret import activations_options, features_options, sae_diff_options
from posttrain.commands.runs.options import ACCEPT_HELP

# The actions of ``posttrain sae``: what each does, and where its body is.
SAE_ACTIONS = {
    "train": "train a sparse autoencoder on activations, by a recipe",
    "features": "what the features of a sparse autoencoder stand for, as one page",
    "diff": "what training changed: two models seen through the same features",
}
BODIES = {
    "activations": ("posttrain.commands.interpret.activations", "run_activations"),
    "sae train": ("posttrain.commands.interpret.sae", "run_sae_train"),
    "sae features": ("posttrain.commands.interpret.features", "run_sae_features"),
    "sae diff": ("posttrain.commands.interpret.sae_diff", "run_sae_diff"),
}
# As ``cli.OVERRIDABLE``: whose keys are further options; None: any key of a recipe.
OVERRIDABLE: dict[str, tuple[str, ...] | None] = {
    "activations": activations_options.SECTIONS,
    "sae train": None,
    "sae features": (),
    "sae diff": None,
}

SAE_TRAIN_EPILOG = """\
any key of the recipe is an option:
  posttrain sae train tiny/sae --dictionary.k 8 --train.steps 400
  posttrain sae train tiny/sae --dictionary l1 --dictionary.coefficient 0.01
  posttrain sae train mine.yaml --activations.folder activations/both --activations.source difference
"""


class AddCommand(Protocol):
    """Makes the parser of one command, as ``cli.build_parser`` does it."""

    def __call__(
        self, name: str, help_line: str, *parents: argparse.ArgumentParser, epilog: str = ""
    ) -> argparse.ArgumentParser: ...


def add_options(
    add: AddCommand, common: argparse.ArgumentParser, places: argparse.ArgumentParser
) -> dict[str, argparse.ArgumentParser]:
    """Add both commands; returns the parsers of the actions as ``sae train``."""
    activations_options.add_options(
        add("activations", "record what layers of a model compute", places, epilog=activations_options.EPILOG)
    )
    sae = add("sae", "sparse autoencoders: train one, read its features, see what training changed")
    actions = sae.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)
    made = {
        name: actions.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            parents=[common, places],
            allow_abbrev=False,
        )
        for name, text in SAE_ACTIONS.items()
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
