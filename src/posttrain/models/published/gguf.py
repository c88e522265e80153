"""GGUF files, written by llama.cpp and others: dequantized once to Hugging Face format."""

from __future__ import annotations

import io
import json
import shutil
import struct
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from posttrain.errors import PosttrainError, UsageError, first_line
from posttrain.models.published.catalog import MAGIC
from posttrain.models.published.gguf_contents import check_contents, check_loaded, check_number_of_weights
from posttrain.models.published.model_cache import is_cached, making, place_of
from posttrain.option_types import shorten
from posttrain.store.checkpoint_files import digest_of
from posttrain.store.durable import storage_errors

VERSIONS = (2, 3)
MAX_ENTRIES = 1_000_000  # plausible maximum for tensors and metadata entries
CHECKS = 2  # changes if files that were converted before may now be refused
FREE_SHARE = 8  # 4-bit data expands eightfold in fp32


def dequantized(path: Path) -> Path:
    """Convert a GGUF model to a Hugging Face folder on first use.

    Weights become fp32. Cache folders are keyed by file content and ``CHECKS``.

    Raises:
        UsageError: not GGUF, damaged, or unsupported by transformers.
        StorageError: cache not writable.
    """
    check_header(path)
    name = f"gguf-{CHECKS}-{digest_of(path)[:24]}"
    if not is_cached(name):
        with making(name) as aside:
            if aside is not None:
                print(f"{path.name}: dequantizing to fp32, once", file=sys.stderr, flush=True)
                write_folder(path, aside, title=path.name)
    return place_of(name)


def check_header(path: Path) -> None:
    """Refuse non-GGUF files and unsupported versions.

    Raises:
        UsageError: states the reason.
    """
    with open(path, "rb") as file:
        head = file.read(24)
    if len(head) < 24 or head[:4] != MAGIC:
        raise UsageError(f"model.name: {path} is no GGUF file (it does not begin with GGUF)")
    version, num_tensors, num_entries = struct.unpack("<IQQ", head[4:])
    if version not in VERSIONS:
        raise UsageError(f"model.name: {path} is a GGUF file of version {version}; versions 2 and 3 are read")
    if max(num_tensors, num_entries) > MAX_ENTRIES:
        raise UsageError(
            f"model.name: {path} is damaged: its header counts {num_tensors:,} tensors and {num_entries:,} entries"
        )


def write_folder(path: Path, folder: Path, *, title: str, notes: str = "") -> None:
    """Convert GGUF to a model folder: fp32 weights, tokenizer, stop tokens, model card.

    Raises:
        UsageError: transformers cannot read it.
        StorageError: disk full or read-only.
    """
    needed = path.stat().st_size * FREE_SHARE
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UsageError(
            f"{path.name}: dequantized to fp32 it takes up to {needed / 2**30:.1f} GB, and {folder.parent} has "
            f"{free / 2**30:.1f} GB free. Free some space, or set XDG_CACHE_HOME to another disk"
        )
    model, tokenizer = read_gguf(path)
    with storage_errors("the dequantized model", folder), redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(_card(path, title, notes), encoding="utf-8")


def read_gguf(path: Path) -> tuple[Any, Any]:
    """Load fp32 model and tokenizer through transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    try:
        import gguf  # noqa: F401  # transformers needs it, and says so less clearly
    except ImportError:
        raise UsageError("a GGUF file needs the package gguf; install it with: pip install gguf") from None
    try:
        options = {"pretrained_model_name_or_path": str(path.parent.resolve()), "gguf_file": path.name}
        with redirect_stderr(io.StringIO()):  # progress bars
            check_contents(path)
            config = AutoConfig.from_pretrained(**options)
            check_number_of_weights(path, config)
            tokenizer = AutoTokenizer.from_pretrained(**options)
            transformers_logging.set_verbosity_error()  # its report of weights, which ``check_loaded`` makes
            reports = {"output_loading_info": True, "ignore_mismatched_sizes": True}
            read, report = AutoModelForCausalLM.from_pretrained(**options, **reports, dtype=torch.float32)
        check_loaded(path, read.config, report)
        config = read.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # dequantized to fp32
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(read.state_dict())
        model.generation_config = read.generation_config
    except PosttrainError:
        raise
    except Exception as error:  # the reader raises anything for a damaged file
        what = f"{type(error).__name__}: {first_line(error)}"
        raise UsageError(
            f"model.name: {path}: transformers cannot read this GGUF file ({shorten(what)}); give a model in the "
            "Hugging Face layout instead"
        ) from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    return model, tokenizer


def _card(path: Path, title: str, notes: str) -> str:
    about = {"file": path.name, "bytes": path.stat().st_size}
    lines = [
        f"# {title}",
        "",
        f"Dequantized from `{path.name}` to fp32 by posttrain. The weights are as exact as the bits of that file.",
        notes,
        "",
        f"Source: `{json.dumps(about)}`",
    ]
    return "\n".join(lines) + "\n"
