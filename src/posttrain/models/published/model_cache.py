"""Cache folder for downloaded or dequantized models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.errors import UsageError
from posttrain.store.durable import aside_of, remove_asides, remove_tree, storage_errors, sync_folder
from posttrain.store.locks import Held, hold

WAIT_SECONDS = 600.0  # while another process fetches this model


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
    """Build a cached model's path, which may not exist yet."""
    return cache_dir() / "models" / name


def is_cached(name: str) -> bool:
    """Check if a model is completely cached."""
    return (place_of(name) / "config.json").is_file()


@contextmanager
def making(name: str) -> Iterator[Path | None]:
    """Yield an empty folder to fill; on success it becomes model ``name``. Yields None if already cached.

    Waits for other processes creating this model. After errors, partial content is removed.

    Raises:
        UsageError: timed out waiting for another process.
        StorageError: disk full or read-only.
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
