"""Checkpoints that survive kills, full disks and flipped bits.

``checkpoints/step-000100/`` holds the model in the Hugging Face layout (peft's layout for an
adapter), the tokenizer, ``optimizer.safetensors``, ``rollout_buffer.safetensors`` (a rollout batch that
still has optimizer steps to serve, if any), ``heads.safetensors`` (heads and critics that are
trained beside the model, if any), ``state.json`` and ``manifest.json`` with the SHA-256 of every
file. A checkpoint is written aside as ``.tmp-*``, fsynced and renamed, so a folder with a
final name is complete; on load the manifest is verified. No pickles anywhere.

Several processes write one together with ``scale.checkpoint: sharded``. The model is then in the layout that the
Hugging Face libraries have for large ones: whole tensors dealt out to files, ``model-00001-of-00002.safetensors``, and
an index; ``optimizer-00001-of-00002.safetensors`` has of each tensor the rows that its process had, and says in its
header under ``rows`` which (``{name: [first, of how many]}``).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveInt, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging as transformers_logging

from posttrain.errors import CheckpointError
from posttrain.models.load import ONE_FILE, note_base_bits
from posttrain.models.sources import SCORE
from posttrain.models.trained_heads import Fill, copy_tensors, place_in_memory
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
from posttrain.store.durable import explain_storage, storage_errors, sync_file
from posttrain.untrusted import first_fault
from posttrain.world import ONE, World

Rows = dict[str, tuple[int, int]]  # of a tensor that is cut along its first dimension: the first row, of how many
SHARE = "share"  # of the others, until all are there: transformers deletes files that are called as parts of a model


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
    optimizer: Mapping[str, Tensor]
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
    rows: Rows | None = None,
    weights: Mapping[str, Tensor] | None = None,
    world: World = ONE,
) -> Path:
    """Write the checkpoint of ``step``; returns its folder.

    Args:
        folder: the run's ``checkpoints`` folder.
        model: a transformers or peft model; written by its own ``save_pretrained``.
        tokenizer: likewise, or None.
        optimizer: the optimizer's tensors by name.
        state: what else the loop needs, for JSON; of the main process.
        rollout_buffer: tensors of a rollout batch that later steps still use. heads: those of ``head_tensors``.
        score: of a reward model, the weight of its head and the id of the token at which it is read: the model is
            then written in the layout of sequence classification too, where that fits.
        rows: of each tensor of ``optimizer`` that is cut, which of its rows this process has.
        weights: of a model in parts, whole, what this process writes of it (``names_to_write``).
        world: those that write it together, each its share of the weights and of the optimizer; the main one all else.

    Raises:
        StorageError: the disk is full or not writable. Nothing new stands under a final name; older ones are untouched.
    """
    root = Path(folder)
    final = step_folder(root, step)
    aside = world.tell(root / f"{ASIDE}{final.name}-{os.getpid()}", "place of the checkpoint")
    try:
        with storage_errors(f"checkpoint {final.name}", root):
            if world.is_main:
                remove_tree(aside)
                aside.mkdir(parents=True)
            world.agree(False, "folder of the checkpoint")
            header = None if rows is None else {"rows": json.dumps(rows)}
            save_file(_storable(optimizer), aside / _part_name("optimizer", world.rank, world.size), header)
            _write_model(aside, model, tokenizer, score, world, weights)
            if not world.is_main:
                return final
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
        if world.is_main and aside.exists():  # others may be writing there still; what is left goes on resume
            shutil.rmtree(aside, ignore_errors=world.size > 1)
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


def restore_model(model: Any, path: str | Path, fill: Fill = Tensor.copy_) -> None:
    """Copy a checkpoint's weights into a live model of the same shape, bit for bit, in place.

    Tied weights are stored once and fill all their names. A peft model gets its adapters; its base
    is left alone. The checkpoint is taken as verified. ``fill`` copies one tensor into a live one, which may lie in
    parts.

    Raises:
        CheckpointError: the checkpoint holds other weights than the model has (names, shapes, types).
    """
    folder = Path(path)
    if hasattr(model, "peft_config"):
        for adapter in model.peft_config:
            place = folder if adapter == "default" else folder / adapter
            from posttrain.models.adapter_files import ADAPTER_SCORE, ADAPTER_WEIGHTS

            stored = load_file(place / ADAPTER_WEIGHTS)
            stored.pop(ADAPTER_SCORE, None)  # a reward model's head, which is among the heads
            copy_tensors(stored, _adapter_tensors(model, adapter), place, fill)
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
    copy_tensors(stored, live, folder, fill)


class _Strict(BaseModel):
    """Keys that nobody reads here may say what they like: settings, choices of the machine."""

    model_config = ConfigDict(strict=True, extra="allow")


class KeptBest(_Strict):
    """The step of the best evaluation, and what was measured then."""

    step: FiniteFloat
    __pydantic_extra__: dict[str, float]


class KeptSource(_Strict):
    """See ``RolloutSource.state``."""

    kl_weight: FiniteFloat = 0.0


class KeptState(_Strict):
    """What ``state.json`` says that a resumed run reads; a stranger's checkpoint may say anything."""

    best: KeptBest | None = None
    evaluations: dict[str, dict[str, float]] | None = None
    model: str | None = None
    num_threads: Annotated[int, Field(gt=0, le=1024)] | None = None
    processes: PositiveInt = 1
    rewards: dict[str, str] = {}
    source: KeptSource = KeptSource()
    steps: NonNegativeInt | None = None
    teacher: str | None = None
    unevaluated: bool = False


def _read(path: Path, step: int, skipped: list[str]) -> Checkpoint:
    files = verify(path, step)
    state = (path / "state.json").read_bytes() if "state.json" in files else b"{}"
    try:
        KeptState.model_validate_json(state)
    except ValidationError as error:
        raise Unverified("state.json", f"says what no run writes: {first_fault(error)}") from None
    return Checkpoint(
        path=path,
        step=step,
        state=json.loads(state),
        optimizer=_read_optimizer(path, files),
        rollout_buffer=_tensors(path, "rollout_buffer.safetensors") if "rollout_buffer.safetensors" in files else None,
        heads=_tensors(path, "heads.safetensors") if "heads.safetensors" in files else {},
        skipped=list(skipped),
    )


def _tensors(path: Path, name: str) -> dict[str, Tensor]:
    try:
        return load_file(path / name)
    except SafetensorError as error:
        raise Unverified(name, f"holds no tensors ({error})") from None


class JoinedRows(Mapping[str, Tensor]):
    """Tensors of which several files have some rows each; one is read, whole, when it is asked for.

    Raises:
        CheckpointError: the files do not have all rows, or do not say which.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._place = files[0].parent
        self._having: dict[str, list[tuple[int, int | None, Any]]] = {}
        for file in files:
            stored = safe_open(file, framework="pt")
            try:
                rows = {n: (int(a), int(b)) for n, (a, b) in json.loads((stored.metadata() or {})["rows"]).items()}
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
                raise CheckpointError(f"{file}: its header does not say which rows it has") from None
            for name in stored.keys():  # noqa: SIM118
                self._having.setdefault(name, []).append((*rows.get(name, (0, None)), stored))
        self._names = sorted(self._having)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Tensor:
        having = sorted(self._having[name], key=lambda part: part[0])
        parts: list[Tensor] = [stored.get_tensor(name) for *_, stored in having]
        if len(parts) == 1 and having[0][1] is None:
            return parts[0]
        starts = [0, *accumulate(len(part) for part in parts)]
        if [(first, of) for first, of, _ in having] != [(start, starts[-1]) for start in starts[:-1]]:
            raise CheckpointError(f"{self._place}: rows of {name} are missing; this checkpoint is not whole")
        return torch.cat(parts)


def _read_optimizer(path: Path, files: Mapping[str, Any]) -> Mapping[str, Tensor]:
    parts = sorted(name for name in files if name.startswith("optimizer-") and name.endswith(".safetensors"))
    try:
        return JoinedRows([path / name for name in parts]) if parts else load_file(path / "optimizer.safetensors")
    except SafetensorError as error:
        raise Unverified("optimizer.safetensors", f"holds no tensors ({error})") from None


def _part_name(stem: str, rank: int, size: int) -> str:
    return f"{stem}.safetensors" if size == 1 else f"{stem}-{rank + 1:05d}-of-{size:05d}.safetensors"


def names_to_write(model: Any, world: World) -> Collection[str]:
    """Of the entries of the model's ``state_dict``, those that this process writes as one of a ``world``."""
    shares = _deal(model, world.size)
    if shares is not None:
        return shares[world.rank]
    if not world.is_main:
        return ()
    if hasattr(model, "peft_config"):
        return [name for name in model.state_dict() if any(_is_of(adapter, name) for adapter in model.peft_config)]
    return _named_once(model)


def _named_once(model: Any) -> dict[str, Tensor]:
    """The model's tensors, tied ones once: of several names of a tensor the one that is loaded is kept."""
    tied, tensors = getattr(model, "all_tied_weights_keys", {}), model.state_dict()
    named = sorted(tensors.items(), key=lambda item: item[0] not in tied)
    places = {name: place_in_memory(tensor) for name, tensor in named}
    kept = {(place if place[0] else name, tensors[name].shape): name for name, place in places.items()}
    return {name: tensors[name] for name in kept.values()}


def _deal(model: Any, size: int) -> list[dict[str, Tensor]] | None:
    """The model's weights in as many shares of about the same size, tied ones once; None where one process writes all.

    That is an adapter, and an architecture whose weights on disk are others than in memory (fused experts).
    """
    if size == 1 or hasattr(model, "peft_config"):
        return None
    tensors = _named_once(model)
    changes = any(getattr(model, key, None) for key in ("_weight_conversions", "_keys_to_ignore_on_save"))
    if changes or any(tensor.ndim > 2 for tensor in tensors.values()):
        return None
    ordered = sorted(tensors, key=lambda name: (-tensors[name].nbytes, name))
    shares: list[dict[str, Tensor]] = [{} for _ in range(size)]
    loads = [0] * size
    for name in ordered:
        lightest = loads.index(min(loads))
        shares[lightest][name] = tensors[name]
        loads[lightest] += tensors[name].nbytes
    return shares


def _write_index(path: Path, shares: list[dict[str, Tensor]]) -> None:
    """Give all shares their names, and say which file has which weights."""
    names = [_part_name("model", rank, len(shares)) for rank in range(len(shares))]
    (path / "model.safetensors").rename(path / names[0])
    for rank, name in enumerate(names[1:], 1):
        (path / _part_name(SHARE, rank, len(shares))).rename(path / name)
    written = safe_open(path / names[0], framework="pt").keys()  # a reward model's head among them
    places = dict.fromkeys(written, names[0])
    places |= {name: names[rank] for rank, share in enumerate(shares) if rank for name in share}
    total = sum(tensor.nbytes for share in shares for tensor in share.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    content = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (path / "model.safetensors.index.json").write_text(content, encoding="utf-8")


def _write_model(
    path: Path,
    model: Any,
    tokenizer: Any,
    score: tuple[Tensor, int] | None,
    world: World,
    weights: Mapping[str, Tensor] | None,
) -> None:
    """The model with its configuration and tokenizer, or this process's share of it, when all have written theirs."""
    shares = _deal(model, world.size)
    own = weights if shares is None or weights is not None else shares[world.rank]
    own = None if own is None else _storable(own)
    if world.is_main:
        with _without_progress_bars():
            _write_main(path, model, score, own)
        if tokenizer is not None:
            tokenizer.save_pretrained(path)
    else:
        if own is not None and shares is not None:
            save_file(own, path / _part_name(SHARE, world.rank, world.size), {"format": "pt"})
        for stem in ("optimizer", SHARE)[: 1 if shares is None else 2]:
            sync_file(path / _part_name(stem, world.rank, world.size))
    world.agree(False, "parts of the checkpoint")
    if world.is_main and shares is not None:
        _write_index(path, shares)


def _write_main(path: Path, model: Any, score: tuple[Tensor, int] | None, own: dict[str, Tensor] | None) -> None:
    """The model as its library writes it, or ``own`` of its weights in one file."""
    if score is not None:
        from posttrain.models.scorer import save_adapter_scorer, save_scorer
    if hasattr(model, "peft_config"):
        # "auto" would ask the hub whether the embedding was resized; an adapter never resizes it
        model.save_pretrained(path, save_embedding_layers=False, state_dict=own)
        note_base_bits(model, path)
        if score is not None:
            save_adapter_scorer(path, model, score[0])
    elif score is None or not save_scorer(path, model, *score, own):
        model.save_pretrained(path, state_dict=own, **({} if own is None else ONE_FILE))


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
    live = {name: tensor for name, tensor in model.state_dict().items() if _is_of(adapter, name)}
    return {name.replace(f".modules_to_save{tag}", "").replace(tag, ""): tensor for name, tensor in live.items()}


def _is_of(adapter: str, name: str) -> bool:
    return f".{adapter}." in name or name.endswith(f".{adapter}")


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
