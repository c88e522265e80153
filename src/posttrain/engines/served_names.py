"""The names under which a server has a model: its folder's, with a fingerprint of the weights.

A server that was started before a folder's weights were written again does not pass for one that has them.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from posttrain.models.sources import resolve_model_name
from posttrain.store.checkpoint_files import stated_digests

WEIGHTS = ("model*.safetensors", "adapter_model.safetensors")
NUM_BLOCKS, BLOCK_BYTES = 256, 4096


def served_names(model: str) -> tuple[str, ...]:
    """Return the names under which a server may have ``model``, the one of ``posttrain serve-command`` first.

    ``tiny-grpo-step-000120-1f8a09c3``: run, checkpoint, fingerprint of the weights. A model that is only a hub name
    has that name. The second name is the folder itself, which vLLM takes when it is given no name.

    Raises:
        UsageError: no such folder or run.
    """
    source = absolute_source(model)
    folder = Path(source)
    if not folder.is_dir():
        return (source,)
    label = folder.name
    if folder.parent.name == "checkpoints":
        label = f"{folder.parent.parent.name}-{label}"
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.") or "model"
    return f"{label}-{fingerprint(folder)}", source


def absolute_source(model: str) -> str:
    """Return a folder as an absolute path, since a server may be started anywhere; or a hub name."""
    source = resolve_model_name(model)
    return str(Path(source).resolve()) if Path(source).is_dir() else source


def fingerprint(folder: Path) -> str:
    """Return eight hexadecimal digits of the weights in ``folder``.

    A run's checkpoint has the digest of every file in its manifest. Of another folder, whose files may be tens of
    gigabytes, size and 256 blocks of 4 KiB of each file are read: enough to tell two trainings apart, not a proof of
    equality.
    """
    digest = hashlib.blake2b(digest_size=4)
    known = stated_digests(folder)
    for file in sorted({file for pattern in WEIGHTS for file in folder.glob(pattern)}):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        if file.name in known:
            digest.update(known[file.name].encode())
            continue
        with file.open("rb") as opened:
            for i in range(NUM_BLOCKS):
                opened.seek(max(0, size - BLOCK_BYTES) * i // (NUM_BLOCKS - 1))
                digest.update(opened.read(BLOCK_BYTES))
    return digest.hexdigest()
