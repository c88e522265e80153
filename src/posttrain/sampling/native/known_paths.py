"""Cache of models whose fast path was verified: one small file each in the cache folder.

Verification takes longer than a short answer. Results are keyed by model, dtype, device, library versions and our
code.
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
MAX_FILES = 200  # oldest are removed; every checkpoint adds a file


def fingerprint(model: PreTrainedModel, facts: Iterable[object]) -> str:
    """Hash everything that affects comparing a path with ``model``.

    Includes the first numbers of each weight, and ``facts`` from the engine, such as prompt lengths.
    """
    weights = [parameter.detach().reshape(-1)[:4].float().tolist() for parameter in model.parameters()]
    device = next(model.parameters()).device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    versions = [__version__, torch.__version__, version("transformers"), _digest_of_code()]
    about = [versions, [str(device.type), where, torch.get_num_threads()], weights, list(map(str, facts))]
    content = json.dumps([about, model.config.to_dict()], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def is_known(name: str) -> bool:
    """Check if the fast path was verified for a fingerprint."""
    with suppress(UsageError, OSError):
        return (_folder() / name).read_bytes() == CONTENT
    return False


def remember(name: str) -> None:
    """Record a success; ignored if the cache is not writable."""
    with suppress(UsageError, StorageError, OSError):
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        for old in _oldest(list(folder.iterdir())):
            old.unlink(missing_ok=True)
        replace_file(folder / name, CONTENT, durable=False)


def _folder() -> Path:
    return cache_dir() / FOLDER


def _oldest(files: Sequence[Path]) -> list[Path]:
    """Select the oldest files to remove, so that one more fits within ``MAX_FILES``."""
    too_many = len(files) + 1 - MAX_FILES
    if too_many <= 0:
        return []
    return sorted(files, key=lambda file: file.stat().st_mtime)[:too_many]


@cache
def _digest_of_code() -> str:
    """Hash the source code of both computations: native engine and forward pass."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(forward.__file__).parent):
        for file in sorted(folder.glob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()
