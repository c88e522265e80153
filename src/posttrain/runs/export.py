"""Export a run to a clean folder: Hugging Face model, recipe and results.

The weights come from a checkpoint verified against its manifest, without training-only files (optimizer, rollout
buffer). Everything is written to a temporary folder and renamed into place.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal, get_args

import yaml

from posttrain.activity import phase
from posttrain.errors import CheckpointError, RunFailure, StorageError, UsageError
from posttrain.models.answer_end import names_of_ends, write_ends
from posttrain.models.config import read_object
from posttrain.models.sources import ADAPTER_CONFIG, base_of, is_adapter
from posttrain.other_names import short_dtype
from posttrain.runs.directory import RunDirectory
from posttrain.runs.gguf_export import check_gguf, find_converter, write_gguf
from posttrain.runs.listing import summarize_run
from posttrain.store.checkpoint_files import (
    MANIFEST,
    Unverified,
    best_step,
    checkpoint_steps,
    digest_of,
    step_folder,
    verify,
)
from posttrain.store.durable import aside_of, remove_asides, remove_tree, storage_errors, sync_folder
from posttrain.untrusted import code, harmless, paragraph, plain

if TYPE_CHECKING:  # listing runs imports no torch
    from posttrain.recipes.sections import ModelSection

WeightsKind = Literal["best", "last", "ema", "none"]
RECORDS = ("recipe.yaml", "results.json", "metrics.jsonl", "curves.png", "report.html")
# Checkpoint files used only for resuming.
_OPTIMIZER = re.compile(r"optimizer-[0-9]+-of-[0-9]+\.safetensors")
_TRAINING_ONLY = (
    "optimizer.safetensors",
    "rollout_buffer.safetensors",
    "reference.safetensors",
    "averages.safetensors",
    "state.json",
    MANIFEST,
)
HEADS = "heads.safetensors"
_AVERAGED = "the weights are an exponential moving average (train.ema_decay)"
_SCORER = (
    "the adapter is a reward model for peft's AutoPeftModelForSequenceClassification (num_labels=1): set "
    "config.pad_token_id = None and score one text at a time, with the end token appended"
)


@dataclass(frozen=True, slots=True)
class Export:
    """An export's folder, weight step (None if omitted), size, and notices to show."""

    target: Path
    step: int | None
    num_files: int
    num_bytes: int
    warnings: tuple[str, ...] = ()


@phase("exporting")
def export_run(
    root: str | Path,
    folder: str | Path,
    target: str | Path,
    *,
    weights: WeightsKind | None = None,
    merge: bool = False,
    gguf: str | None = None,
) -> Export:
    """Copy model, recipe and results from the run in ``folder`` to a new folder.

    Args:
        root: the runs folder, which must not contain the target.
        weights: which checkpoint; default: best, or newest if none is marked best. ``ema``: averaged weights
            (``train.ema_decay``) from the newest checkpoint.
        merge: merge a LoRA adapter into its base model.
        gguf: weight type for an additional GGUF file, written by llama.cpp's converter (``GGUFType``).

    Raises:
        UsageError: the target exists or is inside the runs folder, or the checkpoint or converter is missing.
        CheckpointError: verification failed.
        StorageError: the disk is full or not writable.
    """
    run = Path(folder)
    goal = Path(target)
    _check_target(Path(root), goal)
    step = _choose_step(run, weights)
    if merge and step is None:
        raise UsageError("--merge: --weights none exports no weights; omit one of them")
    converter: list[str] = []
    if gguf is not None:
        converter = _choose_converter(goal, gguf, step)
    content = aside_of(goal)
    with storage_errors("the export", goal):
        goal.parent.mkdir(parents=True, exist_ok=True)
        remove_asides(goal)
        try:
            content.mkdir()
            warnings = []
            if step is not None:
                if weights == "ema":
                    warnings = _write_average(run, step, content, merge)
                else:
                    warnings = _copy_weights(run, step, content, merge)
                warnings += _serve_older_readers(content)
            if gguf is not None:
                warnings += write_gguf(converter, content, run.name, gguf)
            for name in RECORDS:
                if (run / name).is_file() and not (run / name).is_symlink():
                    shutil.copyfile(run / name, content / name)
            (content / "README.md").write_text(model_card(run, step, content), encoding="utf-8")
            sizes = [item.stat().st_size for item in content.rglob("*") if item.is_file()]
            os.rename(content, goal)
            sync_folder(goal.parent)
        finally:
            remove_tree(content)
    return Export(goal, step, len(sizes), sum(sizes), tuple(warnings))


def _choose_converter(goal: Path, gguf: str, step: int | None) -> list[str]:
    check_gguf(gguf)
    if step is None:
        raise UsageError("--gguf: --weights none exports no weights; leave one of them out")
    return find_converter(goal, gguf)


def _check_target(root: Path, goal: Path) -> None:
    if os.path.lexists(goal):
        raise UsageError(f"--to {goal}: already exists. Nothing was changed; choose a new name")
    if goal.resolve().is_relative_to(root.resolve()):
        raise UsageError(
            f"--to {goal}: this is inside the runs folder, where it would look like a run; choose a location outside"
        )
    if goal.name.endswith((".tar", ".tgz", ".zip", ".gz")):
        raise UsageError(f"--to {goal}: an export is a folder, not an archive; pack it afterwards with `tar -czf`")


def _choose_step(run: Path, weights: WeightsKind | None) -> int | None:
    folder = run / "checkpoints"
    steps = checkpoint_steps(folder)
    best = best_step(folder)
    if weights not in (None, *get_args(WeightsKind)):
        raise UsageError(f"--weights {weights!r}: give best, last, ema or none")
    if weights == "none":
        return None
    if weights == "best" and best is None:
        raise UsageError(f"--weights best: {run.name} has no checkpoint marked as best; use --weights last")
    if not steps:
        raise UsageError(f"{run.name} has no checkpoint; --weights none exports only recipe and results")
    if weights in ("last", "ema") or best is None:
        return steps[-1]
    return best


def model_card(run: Path, step: int | None, weights: Path) -> str:
    """Write an export's ``README.md``: origin of the ``weights``, results, and loading notes."""
    summary = summarize_run(run)
    made_by = RunDirectory(run).made_by() or "?"
    description = str(RunDirectory(run).read_recipe().get("description") or "").strip()
    lines = []
    shown_weights = "none"
    if step is not None:
        shown_weights = f"after step {step} of {summary.steps}"
        lines += _front_matter(summary.model, weights)
    lines += [f"# {plain(run.name)}", ""]
    if description:
        lines += [paragraph(description), ""]
    lines += [
        f"- trained with: posttrain {plain(made_by)}, recipe {code(summary.recipe)} (resolved: `recipe.yaml`)",
        f"- from: {code(summary.model)}",
        f"- objective: {plain(summary.objective)}",
        f"- weights: {shown_weights}",
        f"- last held-out evaluation: {plain(summary.result) or 'none'}",
    ]
    version = _written_by(weights)
    if version is not None:
        lines.append(
            f"- written by transformers {plain(version)}; also includes keys for 4.57 if it supports the architecture"
        )
    ends = [code(name) for name in names_of_ends(weights)]
    if ends:
        lines.append(f"- an answer ends at {' or '.join(ends)} (`generation_config.json`)")
    lines.append("")
    if is_adapter(str(weights)):
        scorer = ""
        if _is_scorer(weights):
            scorer = f" {_SCORER[0].upper()}{_SCORER[1:]}."
        lines += [f"The weights are a LoRA adapter in peft's layout; `adapter_config.json` names its base.{scorer}", ""]
    return harmless("\n".join(lines))


def _written_by(weights: Path) -> str | None:
    """Read the transformers version from a model's configuration."""
    path = weights / "config.json"
    if not path.is_file():
        return None
    version = read_object(path).get("transformers_version")
    if version is None:
        return None
    return str(version)


def _front_matter(model: str, weights: Path) -> list[str]:
    """Build the model card metadata for the hub."""
    front: dict[str, object] = {"library_name": "transformers", "tags": ["posttrain"]}
    if is_adapter(str(weights)):
        front["library_name"] = "peft"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        front["base_model"] = model
    return ["---", yaml.safe_dump(front).rstrip(), "---", ""]


def _copy_weights(run: Path, step: int, content: Path, merge: bool) -> list[str]:
    """Copy or merge the weights, and compare them with the trained model; returns notices."""
    source = step_folder(run / "checkpoints", step)
    dtype = _dtype_of(run)
    digests = _verified(source)
    adapter = source / ADAPTER_CONFIG
    has_head = HEADS in digests
    if merge:
        _refuse_unmergeable(run, source)
        _merge_into_base(dtype, source, content)
        return []
    base = ""
    if adapter.is_file():
        base = str(read_object(adapter).get("base_model_name_or_path"))
    lower = ""
    if base:
        with suppress(UsageError):  # if the base is missing, peft cannot find it either
            lower = base_of(str(source))
    if lower and is_adapter(lower):  # peft would silently load the wrong model
        remedy = "--merge exports a standalone model"
        if has_head:
            remedy = "train it from a merged export"
        raise UsageError(
            f"{run.name}: the adapter is stacked on another adapter, {base}, which peft cannot load; {remedy}"
        )
    _copy_files(source, content, digests)
    if not base:
        return []
    what = f"the weights are an adapter for {base}"
    if Path(base).exists():
        what += ", a local folder"
        if not has_head:
            what += "; --merge exports a standalone model"
    if lower and Path(lower).is_dir():
        _compare_with_trained(dtype, source, content, "the exported adapter")
    else:
        what += ". The base is not available here, so the adapter was not compared with the trained model"
    if _is_scorer(content):
        return [what, _SCORER]
    return [what]


def _serve_older_readers(content: Path) -> list[str]:
    """Add keys for transformers 4. Returns a notice if this model cannot be expressed in them."""
    from posttrain.models.written.older_readers import write_older_keys

    if not (content / "config.json").is_file() and not (content / "tokenizer_config.json").is_file():
        return []
    if write_older_keys(content):
        return []
    return ["config.json: transformers 4 cannot express this model's rotary embedding; load it with transformers 5"]


def _write_average(run: Path, step: int, content: Path, merge: bool) -> list[str]:
    """Write a checkpoint's averaged weights as a model, merging an averaged adapter if asked; returns a notice.

    Raises:
        UsageError: no average was kept, it includes a head, or no adapter to merge. CheckpointError: verification
            failed.
    """
    source = step_folder(run / "checkpoints", step)
    _verified(source)
    if not merge:
        _save_average(run, source, content)
        return [_AVERAGED]
    _refuse_unmergeable(run, source)
    with TemporaryDirectory(dir=content) as folder:
        _save_average(run, source, Path(folder))
        _merge_into_base(_dtype_of(run), Path(folder), content)
    return [_AVERAGED]


def _refuse_unmergeable(run: Path, source: Path) -> None:
    """Refuse to merge a checkpoint without adapter, or with a head that only works together with the adapter."""
    if not (source / ADAPTER_CONFIG).is_file():
        raise UsageError(f"--merge: {run.name} has no adapter; its weights are already complete")
    if (source / HEADS).is_file():
        raise UsageError(
            f"--merge: {run.name} includes a head with the adapter, which merging would lose; omit --merge"
        )


def _save_average(run: Path, source: Path, content: Path) -> None:
    """Save the checkpoint's model with averaged weights."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from posttrain.models.load import load_model, quiet_transformers
    from posttrain.training.parts.averages import AVERAGES, EMA

    dtype, stored = _dtype_of(run), {}
    try:
        if (source / AVERAGES).is_file():
            stored = load_file(source / AVERAGES)
    except SafetensorError as error:
        raise CheckpointError(f"{source / AVERAGES}: contains no tensors ({error})") from None
    averaged = {name.removeprefix(f"{EMA}."): x for name, x in stored.items() if name.startswith(f"{EMA}.")}
    if not averaged:
        raise UsageError(f"--weights ema: {run.name} has no averaged weights; train with train.ema_decay")
    loaded = load_model(_model_section(source, dtype), seed=0)
    named = dict(loaded.model.named_parameters())
    foreign = sorted(averaged.keys() - named.keys())
    if foreign:
        raise UsageError(f"--weights ema: {run.name} also trains {foreign[0]}, which the export would lose")
    with quiet_transformers():
        for name, value in averaged.items():
            named[name].data.copy_(value)
        loaded.model.save_pretrained(content)
    loaded.tokenizer.save_pretrained(content)
    write_ends(content, loaded.tokenizer)


def _dtype_of(run: Path) -> str:
    model = RunDirectory(run).read_recipe().get("model")
    if isinstance(model, Mapping):
        return short_dtype(str(model.get("dtype", "?")))
    return "?"


def _copy_files(source: Path, content: Path, digests: Mapping[str, str]) -> None:
    for name, digest in digests.items():
        (content / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, content / name, follow_symlinks=False)
        if digest_of(content / name) != digest:
            raise StorageError(f"{name}: the copy differs from the checkpoint; try a different disk")


def _verified(source: Path) -> dict[str, str]:
    """Verify a checkpoint, and map the files to export to their SHA-256. All must be inside the checkpoint."""
    try:
        entries = verify(source)
        kept = [name for name in entries if name not in _TRAINING_ONLY and not _OPTIMIZER.fullmatch(name)]
        for name in kept:  # an untrusted manifest may name any path
            if Path(name).is_absolute() or (source / name).resolve() != source.resolve() / name:
                raise Unverified(name, "leads outside the checkpoint")
    except Unverified as reason:
        raise CheckpointError(
            f"{source}: {reason}; damaged weights are not exported. Choose a different checkpoint with --weights, "
            "or use --weights none for recipe and results only"
        ) from None
    except FileNotFoundError:
        raise UsageError(f"{source}: the run has just deleted this checkpoint; repeat the command") from None
    return {name: str(entries[name]["sha256"]) for name in kept}


def _is_scorer(folder: Path) -> bool:
    return is_adapter(str(folder)) and read_object(folder / ADAPTER_CONFIG).get("task_type") == "SEQ_CLS"


def _merge_into_base(dtype: str, source: Path, content: Path) -> None:
    from posttrain.models.load import load_model, quiet_transformers
    from posttrain.models.written.untrained import complete_folder, note_untrained
    from posttrain.recipes.sections import AdapterSection

    section = _model_section(source, dtype).model_copy(update={"adapter": AdapterSection()})
    loaded = load_model(section, seed=0)  # loading with a new adapter section merges the existing adapter
    with quiet_transformers():
        note_untrained(loaded.model, str(source))
        loaded.model.save_pretrained(content)
        complete_folder(content, loaded.model)
    loaded.tokenizer.save_pretrained(content)
    write_ends(content, loaded.tokenizer)
    del loaded  # keep only one model in memory
    _compare_with_trained(dtype, source, content, "--merge")


def _model_section(folder: Path, dtype: str) -> ModelSection:
    from posttrain.recipes.sections import ModelSection

    return ModelSection.model_validate({"name": str(folder), "dtype": dtype, "device": "cpu"})


def _compare_with_trained(dtype: str, source: Path, content: Path, what: str) -> None:
    """Load the adapter in ``source`` and its export, one after the other, and compare them.

    Raises:
        RunFailure: the models differ.
    """
    from posttrain.models.export_comparison import check_same, read_probe
    from posttrain.models.load import load_model

    given = read_object(source / ADAPTER_CONFIG).get("trainable_token_indices")
    tokens = []
    if isinstance(given, dict):  # by module
        for ids in given.values():
            tokens += ids
    elif given:
        tokens += given

    def compare(dtype_of_weights: str) -> None:
        trained = read_probe(load_model(_model_section(source, dtype_of_weights), seed=0).model, tokens)
        exported = read_probe(load_model(_model_section(content, dtype_of_weights), seed=0).model, tokens)
        check_same(trained, exported, what, exact=dtype != "bf16")

    if dtype != "fp32":
        compare(dtype)
        return
    try:
        compare("fp32")
    except RunFailure:
        # In fp32, two ways to compute the same model may differ by more than the tolerance. In fp64 only the weights'
        # rounding matters.
        compare("fp64")
