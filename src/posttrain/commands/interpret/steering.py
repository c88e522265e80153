"""Dictionaries by name, and models steered by their features: for ``sae features``, ``generate`` and the studio.

Only the standard library is imported before a model is steered (see ``cli``).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.commands.options import names, natural, naturals
from posttrain.errors import UsageError

if TYPE_CHECKING:
    from posttrain.interpret.features.steering import Change, Steering

DICTIONARY = "dictionary"
OFF = "off"


def add_steering_options(parser: argparse.ArgumentParser) -> None:
    """A dictionary whose features change what the model computes."""
    group = parser.add_argument_group("steered by features of a sparse autoencoder")
    group.add_argument("--sae", metavar="FOLDER", help="a run of `sae train`, or a dictionary's folder")
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


@dataclass(frozen=True, slots=True)
class DictionaryPlace:
    """The folder of a dictionary, and the run that trained it where there is one."""

    folder: Path
    run: Path | None


def find_dictionary(name: str, runs_dir: str | Path) -> DictionaryPlace:
    """A dictionary by its folder, or by the name or path of the run that trained it.

    Raises:
        UsageError: there is none.
    """
    from posttrain.interpret.dictionaries.exchange import CONFIG
    from posttrain.runs.directory import find_run, run_names

    path = Path(name)
    if (path / CONFIG).is_file():
        run = path.resolve().parent
        return DictionaryPlace(path, run if (run / "recipe.yaml").is_file() else None)
    if not (path / "recipe.yaml").is_file() and name not in run_names(runs_dir):
        raise UsageError(
            f"{name}: neither a folder with a dictionary ({CONFIG} and weights) nor a run in {runs_dir}; "
            "`posttrain sae train` makes one, and `hf download` gets the folder of one on the hub, to be named here"
        )
    run = find_run(runs_dir, name)
    if not has_dictionary(run):
        raise UsageError(f"{name}: this run has no dictionary yet; `posttrain sae train` makes one when it ends")
    return DictionaryPlace(run / DICTIONARY, run)


def has_dictionary(run: Path) -> bool:
    """Whether a run has trained one."""
    from posttrain.interpret.dictionaries.exchange import CONFIG

    return (run / DICTIONARY / CONFIG).is_file()


def change_of(changes: Mapping[int, float | None]) -> Change:
    """By feature a strength to add, or None to take it out."""
    from posttrain.interpret.features.steering import Change

    strengths = {feature: x for feature, x in changes.items() if x is not None}
    return Change(strengths, {feature: 0.0 for feature, x in changes.items() if x is None})


def show_change(steering: Steering, change: Change) -> str:
    """``resid.2: 12 +8, 40 off``."""
    parts = [f"{feature} {strength:+g}" for feature, strength in change.strengths.items()]
    parts += [f"{feature} {OFF}" for feature in change.values]
    return f"{steering.site}: {', '.join(parts)}"


def read_steering(text: str, dictionary: str, model: Any, runs_dir: str | Path) -> Steering | None:
    """What was typed into the studio, ``12=8, 40=off``; None for nothing.

    Raises:
        UsageError: it cannot be read, or the dictionary does not fit the model.
    """
    if not text.strip():
        return None
    if not dictionary.strip():
        raise UsageError("name the dictionary whose features are meant: a run of `posttrain sae train`, or a folder")
    try:
        changes = read_changes(text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"steering: {error}") from None
    return _load(model, dictionary.strip(), runs_dir, change_of(changes))


def check_steering(arguments: argparse.Namespace) -> None:
    """Refuse a dictionary without a change, or a change without a dictionary, before any model is loaded.

    Raises:
        UsageError: either, or there is no such dictionary.
    """
    is_changed = bool(arguments.steer or arguments.ablate)
    if arguments.sae is None and is_changed:
        raise UsageError("--steer and --ablate need --sae, the dictionary whose features are meant")
    if arguments.sae is not None:
        if not is_changed:
            raise UsageError("--sae needs --steer FEATURE=STRENGTH or --ablate FEATURE; alone it changes nothing")
        find_dictionary(arguments.sae, arguments.runs_dir)


def steering_of(arguments: argparse.Namespace, model: Any) -> tuple[AbstractContextManager[None], str]:
    """What the options of ``generate`` do to a model: a context, and how it is called (empty: nothing).

    Raises:
        UsageError: the dictionary does not fit the model.
    """
    if arguments.sae is None:
        return nullcontext(), ""
    changes: dict[int, float | None] = {}
    for option in arguments.steer:
        changes |= option
    change = change_of(changes)
    change = replace(change, values=dict(change.values) | dict.fromkeys(arguments.ablate, 0.0))
    steering = _load(model, arguments.sae, arguments.runs_dir, change)
    return steering.applied(), show_change(steering, change)


def _load(model: Any, dictionary: str, runs_dir: str | Path, change: Change) -> Steering:
    from posttrain.interpret.features.steering import load_steering

    return load_steering(model, find_dictionary(dictionary, runs_dir).folder, change)
