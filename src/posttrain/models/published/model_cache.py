"""The folder in which models are kept that were fetched or dequantized."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.errors import UsageError
from posttrain.store.durable import aside_of, remove_asides, remove_tree, storage_errors, sync_folder
from posttrain.store.locks import Held, hold

WAIT_SECONDS = 600.0  # for another process that fetches the same


def cache_dir() -> Path:
    """Return ``$XDG_CACHE_HOME/posttrain``, or ``~/.cache/posttrain``."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):
        return Path(named) / "posttrain"
    try:
        return Path.home() / ".cache" / "posttrain"
    except RuntimeError as error:
        raise UsageError(f"there is no place for fetched models: {error}. Set XDG_CACHE_HOME") from None


def place_of(name: str) -> Path:
    """Return the folder of a model in the cache, which may not be there."""
    return cache_dir() / "models" / name


def is_cached(name: str) -> bool:
    """Return True if a model is there, whole."""
    return (place_of(name) / "config.json").is_file()


@contextmanager
def making(name: str) -> Iterator[Path | None]:
    """Yield a folder to fill, which becomes the model ``name`` if the body ends well; None if it is there already.

    Another process that makes the same is waited for. Whatever ends the body, nothing half stays.

    Raises:
        UsageError: another process holds the place for too long.
        StorageError: the disk is full or not writable.
    """
    place = place_of(name)
    with storage_errors("fetched models", place):
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            with hold(place.with_name(f"{name}.lock"), WAIT_SECONDS):
                if is_cached(name):
                    yield None
                    return
                remove_asides(place)
                aside = aside_of(place)
                aside.mkdir()
                try:
                    yield aside
                    remove_tree(place)
                    os.rename(aside, place)
                    sync_folder(place.parent)
                finally:
                    remove_tree(aside)
        except Held as error:
            raise UsageError(f"{place}: another process ({error}) makes this model; wait for it") from None
