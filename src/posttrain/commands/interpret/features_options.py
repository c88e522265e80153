"""The options of ``posttrain sae features``, and those by which features steer a model. Standard library only."""

from __future__ import annotations

import argparse
import math

from posttrain.commands.options.argument_types import names, natural, naturals, new_place, positive

EPILOG = """\
one page that needs nothing else, and the same as JSON beside it:
  posttrain sae features runs/tiny-sae
  posttrain sae features runs/tiny-sae --features 3,17 --contexts 40 --out features/two.html
  posttrain sae features some-dictionary --activations activations/stories --model runs/tiny-grpo
a feature that looks interesting can be tried out:
  posttrain generate tiny --sae runs/tiny-sae --steer 3=4 --ablate 17
"""
OFF = "off"


def add_features_options(parser: argparse.ArgumentParser) -> None:
    """Which dictionary, over which rows, and what is shown of it."""
    parser.usage = "posttrain sae features RUN_OR_DICTIONARY_FOLDER [options]"
    parser.epilog = EPILOG
    parser.add_argument("dictionary", metavar="RUN_OR_DICTIONARY_FOLDER", help="a run of `sae train`, or a folder")
    parser.add_argument("--activations", metavar="FOLDER", help="rows to read (default: what the run was trained on)")
    parser.add_argument("--site", metavar="NAME", help="of these rows, such as resid.20 (default: the dictionary's)")
    parser.add_argument(
        "--source", metavar="NAME", help="model, base, post, difference or both (default: the dictionary's)"
    )
    parser.add_argument("--model", metavar="NAME", help="for tokens and logit lens (default: the dictionary's)")
    parser.add_argument("--no-lens", action="store_true", help="leave out the logit lens; the model is not loaded")
    parser.add_argument("--features", type=naturals, metavar="1,2,3", help="only these (default: all)")
    parser.add_argument("--contexts", type=positive, default=10, metavar="N", help="of each feature (default: 10)")
    parser.add_argument(
        "--top", type=positive, default=10, metavar="N", help="tokens at each end of the logit lens (default: 10)"
    )
    parser.add_argument(
        "--out", type=new_place, metavar="FILE", help="the page (default: features.html beside the dictionary)"
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")


def add_steering_options(parser: argparse.ArgumentParser) -> None:
    """A dictionary whose features change what the model computes."""
    group = parser.add_argument_group("steered by features of a sparse autoencoder")
    group.add_argument("--sae", metavar="FOLDER", help="a run of `sae train`, or the folder of a dictionary")
    group.add_argument(
        "--steer",
        type=read_changes,
        action="append",
        default=[],
        metavar="FEATURE=STRENGTH",
        help="add so much of a feature's direction at every token; several: 12=8,40=-4",
    )
    group.add_argument(
        "--ablate", type=naturals, action="extend", default=[], metavar="FEATURE", help="take a feature out"
    )


def read_changes(text: str) -> dict[int, float | None]:
    """``12=8, 40=off``: by feature the strength to add, None where it is to be taken out."""
    changes: dict[int, float | None] = {}
    for part in names(text):
        feature, equals, strength = part.partition("=")
        try:
            number = None if strength.strip() == OFF else float(strength)
        except ValueError:
            number = math.nan
        if not equals or (number is not None and not math.isfinite(number)):
            raise argparse.ArgumentTypeError(f"FEATURE=STRENGTH is needed, such as 12=8 or 12={OFF}, not {part!r}")
        changes[natural(feature.strip())] = number
    return changes
