"""Checkpoints robust to kills, full disks and bit flips.

``checkpoints/step-000100/`` contains the model in Hugging Face layout (peft layout for adapters), the tokenizer,
``optimizer.safetensors``, ``rollout_buffer.safetensors`` (rollouts needed by later steps), ``heads.safetensors``
(heads and critics), ``averages.safetensors`` (weight averages), ``reference.safetensors`` (moving reference),
``state.json``, and ``manifest.json`` with SHA-256 hashes for every file. Optional files are omitted if empty.
Checkpoints are written to ``.tmp-*``, synced and renamed, so a final folder name implies completeness; loading
verifies the manifest. With ``scale.checkpoint: sharded``, each process writes optimizer shards to ``optimizer``
(torch.distributed.checkpoint, safetensors). Pickle is never used.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, FiniteFloat, NonNegativeInt, PositiveInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging as transformers_logging

from posttrain import registry
from posttrain.errors import CheckpointError, UsageError
from posttrain.models.answer_end import write_ends
from posttrain.models.load import ONE_FILE, note_base_bits, quiet_transformers
from posttrain.models.sources import SCORE, resolve_model_name
from posttrain.models.trained_heads import Fill, copy_tensors, place_in_memory
from posttrain.models.written.older_readers import write_older_keys
from posttrain.models.written.untrained import complete_folder
from posttrain.process_group import SINGLE_PROCESS, ProcessGroup
from posttrain.recipes.other_models import TeacherSection
from posttrain.recipes.sections import Component
from posttrain.store.checkpoint_files import (
    ASIDE,
    Unverified,
    checkpoint_steps,
    read_newest,
    remove_tree,
    rename_into_place,
    seal,
    set_aside_steps,
    step_folder,
    verify,
)
from posttrain.store.durable import explain_storage, storage_errors
from posttrain.training.checks import OWN_TEACHER
from posttrain.training.parts.averages import AVERAGES
from posttrain.types import Model, Tokenizer
from posttrain.untrusted import first_fault


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Verified checkpoint without model weights, which ``restore_model(model, path)`` loads.

    ``optimizer``, ``rollout_buffer``, ``heads``, ``averages`` and ``reference`` are CPU tensors by name. ``skipped``
    explains why newer checkpoints failed verification, newest first.
    """

    path: Path
    step: int
    state: dict[str, Any]
    optimizer: Mapping[str, Tensor]
    rollout_buffer: dict[str, Tensor] | None
    heads: dict[str, Tensor] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    averages: dict[str, Tensor] = field(default_factory=dict)
    reference: dict[str, Tensor] = field(default_factory=dict)


def save_checkpoint(
    folder: str | Path,
    *,
    step: int,
    model: Model,
    tokenizer: Tokenizer,
    optimizer: Mapping[str, Tensor],
    state: Mapping[str, object],
    rollout_buffer: Mapping[str, Tensor] | None = None,
    heads: Mapping[str, Tensor] | None = None,
    reference: Mapping[str, Tensor] | None = None,
    score: tuple[Tensor, int] | None = None,
    weights: Mapping[str, Tensor] | None = None,
    averages: Mapping[str, Tensor] | None = None,
    ends: Collection[int] | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Path:
    """Write a checkpoint and return its folder.

    Args:
        folder: run's ``checkpoints`` folder. model: transformers or peft model, saved with ``save_pretrained``.
        tokenizer: saved likewise; may be None. optimizer: tensors by name, sharded if multiple processes write.
        state: remaining loop state, JSON-serializable. heads: from ``head_tensors``.
        rollout_buffer: rollout tensors needed by later steps. score: reward head weight and scoring token id.
        weights: unsharded tensors for a sharded model (``names_to_write``). ends: token ids that end an answer.
        averages: from ``average_tensors``. reference: moving reference weights.
        process_group: writing processes. Each writes its optimizer shards; the main process writes everything else.

    Raises:
        StorageError: full or read-only disk. Older checkpoints are untouched.
    """
    root, final = Path(folder), step_folder(Path(folder), step)
    aside = process_group.broadcast(root / f"{ASIDE}{final.name}-{os.getpid()}", "place of the checkpoint")
    try:
        with storage_errors(f"checkpoint {final.name}", root):
            if process_group.is_main:
                remove_tree(aside)
                aside.mkdir(parents=True)
            if process_group.size > 1:
                from posttrain.training.distributed import save_shards

                process_group.agree(False, "folder of the checkpoint")
                save_shards(optimizer, aside / "optimizer")
                if not process_group.is_main:
                    return final
            else:
                save_file(_storable(optimizer), aside / "optimizer.safetensors")
            write_model(aside, model, score, None if weights is None else _storable(weights))
            _write_tokenizer(aside, tokenizer, ends)
            _write_tensors(aside, rollout_buffer=rollout_buffer, heads=heads, averages=averages, reference=reference)
            (aside / "state.json").write_text(json.dumps(state, indent=1, sort_keys=True), encoding="utf-8")
            seal(aside, step)
            rename_into_place(aside, final)
    except SafetensorError as error:  # safetensors raises a custom error on full disks
        raise explain_storage(f"checkpoint {final.name}", root, error) from error
    finally:
        if process_group.is_main and aside.exists():  # other processes may still be writing; resume removes leftovers
            shutil.rmtree(aside, ignore_errors=process_group.size > 1)
    return final


def _write_tensors(path: Path, **named: Mapping[str, Tensor] | None) -> None:
    """Write each non-empty mapping to a separate file."""
    for name, tensors in named.items():
        if tensors:
            save_file(_storable(tensors), path / f"{name}.safetensors")


def _write_tokenizer(path: Path, tokenizer: Tokenizer | None, ends: Collection[int] | None) -> None:
    """Write the tokenizer, end token ids readable by other programs, and compatibility keys for older readers."""
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
        write_ends(path, tokenizer, ends)
    write_older_keys(path)


def load_checkpoint(folder: str | Path, step: int | None = None, *, set_aside: bool = False) -> Checkpoint | None:
    """Load the newest valid checkpoint; None if no checkpoints exist.

    Args:
        folder: run's ``checkpoints`` folder.
        step: load only this step.
        set_aside: rename invalid checkpoints to ``failed-step-*`` so these steps can be saved again. Only for the
            process holding the run lock.

    Raises:
        CheckpointError: no valid checkpoint among existing ones, or the requested step is invalid.
    """
    root = Path(folder)
    steps = checkpoint_steps(root)
    if step is not None:
        if step not in steps:
            there = ", ".join(str(s) for s in steps) or "none"
            raise CheckpointError(f"{root}: no checkpoint of step {step}; there are: {there}")
        steps = [step]
    skipped: list[str] = []
    newest = read_newest(root, steps, partial(_read, skipped), skipped)
    if newest is not None:
        found, checkpoint = newest
        if set_aside and skipped:
            set_aside_steps(root, [s for s in steps if s > found])
        return checkpoint
    if not steps:
        return None
    raise CheckpointError(
        f"{root}: no checkpoint verifies against its manifest. " + "; ".join(skipped) + ". "
        "Restore one of these folders from a backup, or restart under another name with --run NAME; "
        "nothing was changed"
    )


def restore_model(model: Model, path: str | Path, fill: Fill = Tensor.copy_) -> None:
    """Copy checkpoint weights bit for bit into a live model with the same architecture.

    Tied weights are stored once and loaded under all names. For peft models only adapters are loaded; the base stays
    unchanged. Tensors without a trained counterpart are skipped. Assumes a verified checkpoint. ``fill`` copies into
    a live tensor, which may be sharded.

    Raises:
        CheckpointError: names, shapes or dtypes differ between checkpoint and model.
    """
    folder = Path(path)
    if hasattr(model, "peft_config"):
        from posttrain.models.lora import ADAPTER_SCORE, ADAPTER_WEIGHTS

        for adapter in model.peft_config:
            place = folder if adapter == "default" else folder / adapter
            stored = load_file(place / ADAPTER_WEIGHTS)
            stored.pop(ADAPTER_SCORE, None)  # reward head, stored with heads
            copy_tensors(stored, _adapter_tensors(model, adapter), place, fill)
        return
    live, stored = model.state_dict(), {}
    for file in sorted(folder.glob("model*.safetensors")):
        stored.update(load_file(file))
    stored.pop(SCORE, None)  # reward head, stored with heads
    config = folder / "config.json"
    stored_config = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    parts = [one for one in (stored_config, *stored_config.values()) if isinstance(one, dict)]
    own = next((part for part in parts if part.get("model_type") == model.config.model_type), None)
    if own is not None and not stored.keys() <= live.keys():
        # fused architectures (experts) and submodels use different names on disk
        options = {"config": type(model.config)(**own), "dtype": model.dtype, "local_files_only": True}
        with quiet_transformers():
            read, found = type(model).from_pretrained(folder, output_loading_info=True, **options)
        stored = {name: tensor for name, tensor in read.state_dict().items() if name not in found["missing_keys"]}
    copy_tensors(stored, live, folder, fill)


class KeptBest(BaseModel, strict=True, extra="allow"):
    """Best evaluation step and results."""

    step: FiniteFloat
    __pydantic_extra__: dict[str, float]


class KeptState(BaseModel, strict=True, extra="allow"):
    """Keys in ``state.json`` used on resume, validated because checkpoints may be untrusted."""

    best: KeptBest | None = None
    evaluations: dict[str, dict[str, float]] | None = None
    model: str | None = None
    num_threads: Annotated[int, Field(gt=0, le=1024)] | None = None
    processes: PositiveInt = 1
    rewards: dict[str, str] = {}
    source: dict[str, FiniteFloat] = {}
    stale: NonNegativeInt = 0
    steps: NonNegativeInt | None = None
    teacher: str | None = None
    unevaluated: bool = False


def _read(skipped: list[str], path: Path, step: int) -> Checkpoint:
    files = verify(path, step)
    state = (path / "state.json").read_bytes() if "state.json" in files else b"{}"
    try:
        KeptState.model_validate_json(state)
    except ValidationError as error:
        raise Unverified("state.json", f"says what no run writes: {first_fault(error)}") from None
    optimizer: Mapping[str, Tensor]
    if any(name.startswith("optimizer/") for name in files):
        from posttrain.training.distributed import StoredShards

        optimizer = StoredShards(path / "optimizer")
    else:
        optimizer = _tensors(path, "optimizer.safetensors")
    buffer = _tensors(path, "rollout_buffer.safetensors") if "rollout_buffer.safetensors" in files else None
    heads = _tensors(path, "heads.safetensors") if "heads.safetensors" in files else {}
    averages = _tensors(path, AVERAGES) if AVERAGES in files else {}
    reference = _tensors(path, "reference.safetensors") if "reference.safetensors" in files else {}
    return Checkpoint(path, step, json.loads(state), optimizer, buffer, heads, list(skipped), averages, reference)


def _tensors(path: Path, name: str) -> dict[str, Tensor]:
    try:
        return load_file(path / name)
    except SafetensorError as error:
        raise Unverified(name, f"holds no tensors ({error})") from None


def names_to_write(model: Model) -> set[str]:
    """List ``state_dict`` names to store: adapter weights only, or tied weights once."""
    tensors = model.state_dict()
    if hasattr(model, "peft_config"):
        return {name for name in tensors if any(_is_of(adapter, name) for adapter in model.peft_config)}
    tied = getattr(model, "all_tied_weights_keys", {})
    places = {}
    for name in sorted(tensors, key=lambda name: name not in tied):  # keep the last name, because loading uses it
        place = place_in_memory(tensors[name])
        places[place if place[0] else name, tensors[name].shape] = name
    return set(places.values())


def write_model(path: Path, model: Model, score: tuple[Tensor, int] | None, own: dict[str, Tensor] | None) -> None:
    """Save the model through its library, or save ``own`` weights as a single file."""
    if score is not None:
        from posttrain.models.scorer import save_adapter_scorer, save_scorer
    with _without_progress_bars():
        if hasattr(model, "peft_config"):
            # "auto" would query the Hub for embedding resizes, but adapters never resize embeddings
            model.save_pretrained(path, save_embedding_layers=False, state_dict=own)
            note_base_bits(model, path)
            if score is not None:
                save_adapter_scorer(path, model, score[0])
        elif score is None or not save_scorer(path, model, *score, own):
            model.save_pretrained(path, state_dict=own, **({} if own is None else ONE_FILE))
            complete_folder(path, model)


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    was_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            transformers_logging.enable_progress_bar()


def _adapter_tensors(model: Model, adapter: str) -> dict[str, Tensor]:
    """Collect adapter tensors under peft's on-disk names, without the adapter name."""
    tag = f".{adapter}"
    live = {name: tensor for name, tensor in model.state_dict().items() if _is_of(adapter, name)}
    return {name.replace(f".modules_to_save{tag}", "").replace(tag, ""): tensor for name, tensor in live.items()}


def _is_of(adapter: str, name: str) -> bool:
    return f".{adapter}." in name or name.endswith(f".{adapter}")


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Make tensors contiguous and unshared, as required by safetensors."""
    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        if own.untyped_storage().data_ptr() in seen:
            own = own.clone()
        seen.add(own.untyped_storage().data_ptr())
        plain[name] = own
    return plain


def origins_of(source: str, teacher: TeacherSection | None, rewards: Sequence[Component]) -> dict[str, Any]:
    """Record the last path component (checkpoint, folder or Hub name) for each model; ``rewards`` by run.

    ``source``: trained model path.
    """
    taught: str | None = None
    if teacher is not None and teacher.name != OWN_TEACHER:
        taught = Path(resolve_model_name(teacher.name)).name
    scorers: dict[str, str] = {}
    for index, component in enumerate(rewards):
        option = registry.find("reward", component.name, f"rewards.{index}").traits.get("model_option")
        if option is not None:
            run = str(component.options[option])
            scorers[run] = Path(resolve_model_name(run)).name
    return {"model": Path(source).name, "teacher": taught, "rewards": scorers}


def check_origins(models: Mapping[str, str], now: Mapping[str, Any], began: Mapping[str, Any]) -> None:
    """Reject resuming if an initial model, teacher or reward run now resolves to a different checkpoint.

    ``models``: model names in the recipe, by key.

    Raises:
        UsageError: a name now refers to a different checkpoint.
    """
    named = [("model.name", models["model.name"], began.get("model"), now["model"])]
    if now["teacher"] is not None:
        named.append(("teacher.name", models["teacher.name"], began.get("teacher"), now["teacher"]))
    named += [("rewards", run, began.get("rewards", {}).get(run), place) for run, place in now["rewards"].items()]
    for key, name, then, place in named:
        if then not in (None, place):
            raise UsageError(
                f"{key}: {name!r} pointed to {then} when this run began, but now points to {place}. Point "
                f"`checkpoints/best` there back to {then}, or restart under another name with --run NAME"
            )
