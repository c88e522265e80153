"""Checkpoints that survive kills, full disks and flipped bits.

``checkpoints/step-000100/`` holds the model in the Hugging Face layout (peft's layout for an
adapter), the tokenizer, ``optimizer.safetensors``, ``rollout_buffer.safetensors`` (a rollout batch that
still has optimizer steps to serve, if any), ``heads.safetensors`` (heads and critics that are
trained beside the model, if any), ``state.json`` and ``manifest.json`` with the SHA-256 of every
file. A checkpoint is written aside as ``.tmp-*``, fsynced and renamed, so a folder with a
final name is complete; on load the manifest is verified. No pickles anywhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging as transformers_logging

from posttrain.errors import CheckpointError
from posttrain.models.load import SCORE, note_base_bits
from posttrain.models.trained_heads import copy_tensors
from posttrain.store.checkpoint_files import (
    ASIDE,
    Unverified,
    checkpoint_steps,
    remove_tree,
    rename_into_place,
    seal,
    set_aside_steps,
    step_folder,
    verify,
)
from posttrain.store.durable import explain_storage, storage_errors


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint: everything but the model, which ``restore_model(model, path)`` fills.

    ``optimizer``, ``rollout_buffer`` and ``heads`` (for ``restore_heads``; empty if there were
    none) are CPU tensors by name. ``skipped`` says, newest first, which newer checkpoints did not
    verify and why.
    """

    path: Path
    step: int
    state: dict[str, Any]
    optimizer: dict[str, Tensor]
    rollout_buffer: dict[str, Tensor] | None
    heads: dict[str, Tensor] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


def save_checkpoint(
    folder: str | Path,
    *,
    step: int,
    model: Any,
    tokenizer: Any,
    optimizer: Mapping[str, Tensor],
    state: Mapping[str, Any],
    rollout_buffer: Mapping[str, Tensor] | None = None,
    heads: Mapping[str, Tensor] | None = None,
    score: tuple[Tensor, int] | None = None,
) -> Path:
    """Write the checkpoint of ``step``; returns its folder.

    Args:
        folder: the run's ``checkpoints`` folder.
        model: a transformers or peft model; written by its own ``save_pretrained``.
        tokenizer: likewise, or None.
        optimizer: the optimizer's tensors by name.
        state: whatever else the loop needs, as plain data for JSON.
        rollout_buffer: tensors of a rollout batch that later optimizer steps still use.
        heads: what ``head_tensors`` gives for the heads and critics.
        score: of a reward model, the weight of its head and the id of the token at which it is read: the
            model is then written in the layout of sequence classification too, where that fits.

    Raises:
        StorageError: the disk is full or not writable. Nothing new stands under a final name;
            older checkpoints are untouched.
    """
    root = Path(folder)
    final = step_folder(root, step)
    aside = root / f"{ASIDE}{final.name}-{os.getpid()}"
    try:
        with storage_errors(f"checkpoint {final.name}", root):
            root.mkdir(parents=True, exist_ok=True)
            remove_tree(aside)
            aside.mkdir()
            with _without_progress_bars():
                _write_model(aside, model, tokenizer, score)
            save_file(_storable(optimizer), aside / "optimizer.safetensors")
            if rollout_buffer is not None:
                save_file(_storable(rollout_buffer), aside / "rollout_buffer.safetensors")
            if heads:
                save_file(_storable(heads), aside / "heads.safetensors")
            (aside / "state.json").write_text(json.dumps(state, indent=1, sort_keys=True), encoding="utf-8")
            seal(aside, step)
            rename_into_place(aside, final)
    except SafetensorError as error:  # safetensors reports a full disk as an error of its own
        raise explain_storage(f"checkpoint {final.name}", root, error) from error
    finally:
        remove_tree(aside)
    return final


def load_checkpoint(folder: str | Path, step: int | None = None, *, set_aside: bool = False) -> Checkpoint | None:
    """The newest checkpoint that verifies, or None where there is none at all.

    Args:
        folder: the run's ``checkpoints`` folder.
        step: this one and no other.
        set_aside: rename those that do not verify to ``failed-step-*``, so that the run can write
            these steps anew and pruning does not count them. Only for the process that holds the
            run's lock.

    Raises:
        CheckpointError: some exist but none verifies, or the one asked for does not.
    """
    root = Path(folder)
    steps = checkpoint_steps(root)
    if step is not None:
        if step not in steps:
            there = ", ".join(str(s) for s in steps) or "none"
            raise CheckpointError(f"{root}: no checkpoint of step {step}; there are: {there}")
        steps = [step]
    skipped: list[str] = []
    for candidate in reversed(steps):
        path = step_folder(root, candidate)
        try:
            checkpoint = _read(path, candidate, skipped)
        except (Unverified, OSError) as reason:
            skipped.append(f"{path.name}: {reason}")
            continue
        if set_aside and skipped:
            set_aside_steps(root, [s for s in steps if s > candidate])
        return checkpoint
    if not steps:
        return None
    raise CheckpointError(
        f"{root}: no checkpoint verifies against its manifest. " + "; ".join(skipped) + ". "
        "Restore one of these folders from a copy, or start again under another name with --run NAME; "
        "nothing was changed"
    )


def restore_model(model: Any, path: str | Path) -> None:
    """Copy a checkpoint's weights into a live model of the same shape, bit for bit, in place.

    Tied weights are stored once and fill all their names. A peft model gets its adapters; its base
    is left alone. The checkpoint is taken as verified.

    Raises:
        CheckpointError: the checkpoint holds other weights than the model has (names, shapes, types).
    """
    folder = Path(path)
    if hasattr(model, "peft_config"):
        for adapter in model.peft_config:
            place = folder if adapter == "default" else folder / adapter
            stored = load_file(place / "adapter_model.safetensors")
            copy_tensors(stored, _adapter_tensors(model, adapter), place)
        return
    live, stored = model.state_dict(), {}
    for file in sorted(folder.glob("model*.safetensors")):
        stored.update(load_file(file))
    stored.pop(SCORE, None)  # a reward model's head, which is among the heads
    same_kind = _model_type(folder) == model.config.model_type
    if same_kind and not stored.keys() <= live.keys():
        # architectures that fuse weights in memory (experts) have names of their own on disk
        with _without_progress_bars():
            stored = type(model).from_pretrained(folder, dtype=model.dtype, local_files_only=True).state_dict()
    copy_tensors(stored, live, folder)


def _read(path: Path, step: int, skipped: list[str]) -> Checkpoint:
    files = verify(path, step)
    rollout_buffer = load_file(path / "rollout_buffer.safetensors") if "rollout_buffer.safetensors" in files else None
    heads = load_file(path / "heads.safetensors") if "heads.safetensors" in files else {}
    return Checkpoint(
        path=path,
        step=step,
        state=json.loads((path / "state.json").read_text(encoding="utf-8")),
        optimizer=load_file(path / "optimizer.safetensors"),
        rollout_buffer=rollout_buffer,
        heads=heads,
        skipped=list(skipped),
    )


def _write_model(path: Path, model: Any, tokenizer: Any, score: tuple[Tensor, int] | None) -> None:
    if score is not None:
        from posttrain.models.scorer import save_adapter_scorer, save_scorer
    if hasattr(model, "peft_config"):
        # "auto" would ask the hub whether the embedding was resized; an adapter never resizes it
        model.save_pretrained(path, save_embedding_layers=False)
        note_base_bits(model, path)
        if score is not None:
            save_adapter_scorer(path, model, score[0])
    elif score is None or not save_scorer(path, model, *score):
        model.save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    was_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            transformers_logging.enable_progress_bar()


def _model_type(folder: Path) -> str:
    config = folder / "config.json"
    return str(json.loads(config.read_text(encoding="utf-8")).get("model_type")) if config.is_file() else ""


def _adapter_tensors(model: Any, adapter: str) -> dict[str, Tensor]:
    """An adapter's tensors under the names that peft gives them on disk, where its own name is left out."""
    tag = f".{adapter}"
    live = {name: tensor for name, tensor in model.state_dict().items() if f"{tag}." in name or name.endswith(tag)}
    return {name.replace(f".modules_to_save{tag}", "").replace(tag, ""): tensor for name, tensor in live.items()}


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as safetensors wants them: contiguous, each with memory of its own."""
    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        if own.untyped_storage().data_ptr() in seen:
            own = own.clone()
        seen.add(own.untyped_storage().data_ptr())
        plain[name] = own
    return plain
