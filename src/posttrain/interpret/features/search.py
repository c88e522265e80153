"""Features found in ``features.json``: by token that they are active on or promote, context, or number."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from posttrain.errors import DataError

NUM_TOKENS = 5


@dataclass(frozen=True, slots=True)
class Hit:
    """One feature: what a reader needs to decide whether to try it.

    ``context``: its strongest, with the active tokens between << and >>. ``largest``: the unit of a strength.
    """

    number: int
    speaks_for: tuple[str, ...]
    context: str
    density: float
    largest: float
    address: str


@dataclass(frozen=True, slots=True)
class _Entry:
    """A feature with what is searched, in lower case: tokens that it promotes, active tokens, whole contexts."""

    hit: Hit
    haystacks: tuple[str, ...]


def search_features(path: Path, query: str, limit: int = 20) -> tuple[list[Hit], int]:
    """The features that fit, those first that promote the text, then those that are active on it, or have it in
    a context; and how many there are in all. ``#3 #17`` are numbers.

    Raises:
        DataError: no such file, or not one that `posttrain sae features` wrote.
    """
    try:
        entries = _read(path, path.stat().st_mtime_ns)
    except FileNotFoundError:
        raise DataError(path, "there is no such file; `posttrain sae features` makes it") from None
    wanted = query.strip().lower()
    if wanted.startswith("#"):
        numbers = {int(number) for number in re.findall(r"[0-9]{1,9}", wanted)}
        hits = [entry.hit for entry in entries if entry.hit.number in numbers]
    else:
        ranked = [(_rank(entry, wanted), entry.hit) for entry in entries] if wanted else []
        fitting = [(rank, hit) for rank, hit in ranked if rank is not None]
        hits = [hit for _, hit in sorted(fitting, key=lambda pair: (pair[0], -pair[1].density, pair[1].number))]
    return hits[:limit], len(hits)


def _rank(entry: _Entry, wanted: str) -> int | None:
    return next((rank for rank, text in enumerate(entry.haystacks) if wanted in text), None)


@lru_cache(maxsize=2)
def _read(path: Path, written: int) -> tuple[_Entry, ...]:
    """``written``: when, so that a file that was made anew is read anew."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return tuple(_entry(feature) for feature in content["features"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(path, f"this is no file of features ({type(error).__name__})") from None


def _entry(feature: dict[str, Any]) -> _Entry:
    speaks_for = tuple(str(token) for token, *_ in feature["promoted"])
    contexts = [
        ([str(token) for token in context["tokens"]], [bool(x) for x in context["activations"]])
        for context in feature["contexts"]
    ]
    active = [token for tokens, fired in contexts for token, on in zip(tokens, fired, strict=True) if on]
    texts = ["".join(tokens) for tokens, _ in contexts]
    marked = [f"<<{token}>>" if on else token for token, on in zip(*contexts[0], strict=True)] if contexts else []
    hit = Hit(
        number=int(feature["feature"]),
        speaks_for=speaks_for[:NUM_TOKENS],
        context="".join(marked),
        density=float(feature["density"]),
        largest=float(feature["max"]),
        address=str(feature["address"]),
    )
    searched = (speaks_for, active, texts)
    return _Entry(hit, tuple("\0".join(parts).lower() for parts in searched))
