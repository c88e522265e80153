"""Dictionary lookup and feature steering for ``sae features``, ``generate`` and the studio.

Imports only the standard library until a model is steered (see ``cli``).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.commands.options import read_changes
from posttrain.errors import UsageError

if TYPE_CHECKING:
    from posttrain.interpret.features.steering import Steering

DICTIONARY = "dictionary"


def find_sae(name: str, runs_dir: str | Path) -> tuple[Path, Path | None]:
    """Find a dictionary folder by path or run name, and the run that trained it (None if unknown)."""
    from posttrain.interpret.saes.sae import CONFIG
    from posttrain.runs.directory import find_run, run_names

    path = Path(name)
    if (path / CONFIG).is_file():
        run = path.resolve().parent
        return path, run if (run / "recipe.yaml").is_file() else None
    if not (path / "recipe.yaml").is_file() and name not in run_names(runs_dir):
        raise UsageError(
            f"{name}: neither a folder with a dictionary ({CONFIG} and weights) nor a run in {runs_dir}; "
            "train a dictionary with `posttrain sae train`, or fetch one with `hf download` and give the folder"
        )
    run = find_run(runs_dir, name)
    if not has_sae(run):
        raise UsageError(f"{name}: this run has no dictionary yet; `posttrain sae train` writes it at the end")
    return run / DICTIONARY, run


def has_sae(run: Path) -> bool:
    """Check if a run contains a trained dictionary."""
    from posttrain.interpret.saes.sae import CONFIG

    return (run / DICTIONARY / CONFIG).is_file()


def read_steering(text: str, sae: str, model: object, runs_dir: str | Path) -> Steering | None:
    """Parse steering text from the studio, ``12=8, 40=off``; None if blank."""
    if not text.strip():
        return None
    if not sae.strip():
        raise UsageError("select a dictionary: a `posttrain sae train` run, or a folder")
    try:
        changes = read_changes(text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"steering: {error}") from None
    return _load(model, sae.strip(), runs_dir, changes)


def check_steering(arguments: argparse.Namespace) -> None:
    """Refuse a dictionary without a change, or a change without a dictionary, before any model is loaded."""
    if arguments.sae is None and arguments.steer:
        raise UsageError("--steer needs --sae to select a dictionary")
    if arguments.sae is not None and not arguments.steer:
        raise UsageError("--sae needs --steer FEATURE=STRENGTH to have an effect")
    if arguments.sae is not None:
        find_sae(arguments.sae, arguments.runs_dir)


def steering_of(arguments: argparse.Namespace, model: object) -> tuple[AbstractContextManager[None], str]:
    """Build a steering context from command line options, with a description (empty if unused)."""
    if arguments.sae is None:
        return nullcontext(), ""
    changes: dict[int, float | None] = {}
    for given in arguments.steer:
        changes |= given
    steering = _load(model, arguments.sae, arguments.runs_dir, changes)
    parts = [f"{feature} off" if x is None else f"{feature} {x:+g}" for feature, x in changes.items()]
    return steering.applied(), f"{steering.site}: {', '.join(parts)}"


def _load(model: object, sae: str, runs_dir: str | Path, changes: Mapping[int, float | None]) -> Steering:
    from posttrain.interpret.features.steering import load_steering

    return load_steering(model, find_sae(sae, runs_dir)[0], changes)
