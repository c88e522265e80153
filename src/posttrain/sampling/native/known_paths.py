"""Models for which the fast path was compared with the model before: a small file each, in the cache folder.

The comparison takes longer than a short answer. Its result is kept for the model, its type of numbers and its device,
and for the versions of the libraries and of the code that computes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from posttrain import __version__
from posttrain.errors import StorageError, UsageError
from posttrain.models.forward import forward
from posttrain.models.published.model_cache import cache_dir
from posttrain.store.durable import replace_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FOLDER = "compared"
CONTENT = b"the fast path computes what the model does\n"
MAX_FILES = 200  # the oldest are removed: each checkpoint of a run is another model


def fingerprint(model: PreTrainedModel, facts: Iterable[object]) -> str:
    """Return a hash of everything that the comparison of a path with ``model`` depends on.

    Of the weights the first numbers of each are read. ``facts``: what the engine adds, such as the prompts' lengths.
    """
    weights = [parameter.detach().reshape(-1)[:4].float().tolist() for parameter in model.parameters()]
    device = next(model.parameters()).device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    versions = [__version__, torch.__version__, version("transformers"), _digest_of_code()]
    about = [versions, [str(device.type), where, torch.get_num_threads()], weights, list(map(str, facts))]
    content = json.dumps([about, model.config.to_dict()], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def is_known(name: str) -> bool:
    """Return whether the fast path was compared for a fingerprint, with success."""
    with suppress(UsageError, OSError):
        return (_folder() / name).read_bytes() == CONTENT
    return False


def remember(name: str) -> None:
    """Keep a success; a cache that cannot be written keeps nothing."""
    with suppress(UsageError, StorageError, OSError):
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        for old in _oldest(list(folder.iterdir())):
            old.unlink(missing_ok=True)
        replace_file(folder / name, CONTENT, durable=False)


def _folder() -> Path:
    return cache_dir() / FOLDER


def _oldest(files: Sequence[Path]) -> list[Path]:
    """Return the files beyond ``MAX_FILES``, with room for one more."""
    too_many = len(files) + 1 - MAX_FILES
    if too_many <= 0:
        return []
    return sorted(files, key=lambda file: file.stat().st_mtime)[:too_many]


@cache
def _digest_of_code() -> str:
    """Return a hash of the modules that compute both sides: the native engine and the forward pass."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(forward.__file__).parent):
        for file in sorted(folder.glob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()
