"""A run as a clean folder or archive to give away: the model in the Hugging Face layout, recipe and results.

The weights are taken from a checkpoint that verifies against its manifest; what only training needs
(optimizer, rollout buffer) stays behind. Everything is written aside and renamed into place.
"""

from __future__ import annotations

import os
import re
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from posttrain.errors import CheckpointError, RunFailure, StorageError, UsageError
from posttrain.models.sources import ADAPTER_CONFIG, base_of, is_adapter
from posttrain.models.stated_sizes import read_object
from posttrain.runs.directory import TAGS, RunDirectory
from posttrain.runs.listing import evaluations, summarize_run
from posttrain.store.checkpoint_files import (
    MANIFEST,
    Unverified,
    best_step,
    checkpoint_steps,
    remove_tree,
    step_folder,
    verify,
)
from posttrain.store.durable import aside_of, remove_asides, storage_errors, sync_folder
from posttrain.store.headline import Headline
from posttrain.store.metrics import MetricsLog
from posttrain.untrusted import code, harmless, paragraph, plain

if TYPE_CHECKING:  # listing runs imports no torch
    from posttrain.recipes.sections import ModelSection

Weights = Literal["best", "last", "none"]
ARCHIVES = (".tar.gz", ".tgz")
RECORDS = ("recipe.yaml", "results.json", "metrics.jsonl", "curves.png", "report.html", TAGS)
# Of a checkpoint, what only a resumed run reads.
_OPTIMIZER = re.compile(r"optimizer-[0-9]+-of-[0-9]+\.safetensors")
_TRAINING_ONLY = ("optimizer.safetensors", "rollout_buffer.safetensors", "state.json", MANIFEST)
_CARD, _HEADS = "README.md", "heads.safetensors"
_SCORER = (
    "the adapter is a reward model for peft's AutoPeftModelForSequenceClassification (num_labels=1): set "
    "config.pad_token_id = None and ask one text at a time, ended by the end token, whose score it is"
)


@dataclass(frozen=True, slots=True)
class Export:
    """What was exported: where to, which step's weights (None: none), and what to know about it."""

    target: Path
    step: int | None
    num_files: int
    num_bytes: int
    notices: tuple[str, ...] = ()


def export_run(
    root: str | Path, folder: str | Path, target: str | Path, *, weights: Weights | None = None, merge: bool = False
) -> Export:
    """Copy what is worth keeping of the run in ``folder`` to a new folder, or to a ``.tar.gz``.

    Args:
        root: the runs folder; the target may not lie in it.
        weights: which checkpoint; by default the best, or the newest where none is marked.
        merge: add a LoRA adapter to its base, so that the model stands alone.

    Raises:
        UsageError: the target exists or lies in the runs folder, or there is no such checkpoint.
        CheckpointError: the checkpoint does not verify.
        StorageError: the disk is full or not writable; the target is not there.
    """
    run, goal = Path(folder), Path(target)
    _check_target(Path(root), goal)
    step = choose_step(run, weights)
    is_archive = goal.name.endswith(ARCHIVES)
    name = run.name if is_archive else goal.name
    aside = aside_of(goal)
    with storage_errors("the export", goal):
        goal.parent.mkdir(parents=True, exist_ok=True)
        remove_asides(goal)
        try:
            content = aside / name
            content.mkdir(parents=True)
            notices = [] if step is None else _copy_weights(run, step, content, merge)
            _copy_records(run, content)
            (content / _CARD).write_text(model_card(run, step, content), encoding="utf-8")
            files = sorted(item for item in content.rglob("*") if item.is_file())
            count, size = len(files), sum(item.stat().st_size for item in files)
            written = _pack(content, aside / goal.name) if is_archive else content
            os.rename(written, goal)
            sync_folder(goal.parent)
        finally:
            remove_tree(aside)
    return Export(goal, step, count, size, tuple(notices))


def choose_step(run: Path, weights: Weights | None) -> int | None:
    """The checkpoint whose weights are meant; None if none are.

    Raises:
        UsageError: there is no such checkpoint.
    """
    folder = run / "checkpoints"
    steps, best = checkpoint_steps(folder), best_step(folder)
    if weights == "none":
        return None
    if weights == "best" and best is None:
        raise UsageError(f"--weights best: no checkpoint of {run.name} is marked as the best; use --weights last")
    if not steps:
        raise UsageError(f"{run.name} has no checkpoint; --weights none exports recipe and results alone")
    return steps[-1] if weights == "last" or best is None else best


def model_card(run: Path, step: int | None, weights: Path) -> str:
    """``README.md`` of an export: where the ``weights`` in it come from, what was measured, how to load them."""
    recipe = RunDirectory(run).read_recipe()
    summary = summarize_run(run)
    base = _text(recipe, "model", "name")
    version = RunDirectory(run).made_by() or "?"
    library = "peft" if is_adapter(str(weights)) else "transformers"
    front: dict[str, Any] = {"library_name": library, "tags": ["posttrain"]}
    front |= {"base_model": base} if base.count("/") == 1 and not Path(base).exists() else {}
    head = ["---", yaml.safe_dump(front, sort_keys=False).rstrip(), "---", ""] if step is not None else []
    about = str(recipe.get("description") or "").strip()
    lines = [f"# {plain(run.name)}", "", *([paragraph(about), ""] if about else [])]
    facts = [
        ("trained with", f"posttrain {plain(str(version))}, recipe {code(summary.recipe)} (resolved: `recipe.yaml`)"),
        ("from", code(base)),
        ("objective", plain(summary.objective)),
        ("task", plain(_text(recipe, "task", "name"))),
        ("weights", "none" if step is None else f"after step {step} of {summary.steps}"),
    ]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts), ""]
    rows = evaluations(MetricsLog(run / "metrics.jsonl").read())
    headline = RunDirectory(run).headline()
    measured = [row for row in rows if headline.value(row) is not None]
    if measured:
        lines += [
            "Held-out evaluations:",
            "",
            f"| task | after step | n | {plain(headline.label)} | 95 % interval |",
            "|---|---|---|---|---|",
        ]
        lines += [_evaluation_row(row, headline) for row in measured]
        lines.append("")
    if _is_scorer(weights):
        lines += [f"{_SCORER[0].upper()}{_SCORER[1:]}.", ""]
    if library == "peft":
        lines += ["The weights are a LoRA adapter in peft's layout; `adapter_config.json` names its base.", ""]
    return harmless("\n".join([*head, *lines]))


def _evaluation_row(row: Mapping[str, Any], headline: Headline) -> str:
    bounds = headline.interval(row)
    interval = "" if bounds is None else f"{headline.show(bounds[0])} to {headline.show(bounds[1])}"
    count = f"{row['n']:.0f}" if "n" in row else ""
    return f"| {plain(row['name'])} | {row['step']} | {count} | {headline.show(row[headline.metric])} | {interval} |"


def _text(recipe: Mapping[str, Any], section: str, key: str) -> str:
    value = recipe.get(section)
    return str(value.get(key, "?")) if isinstance(value, Mapping) else str(value or "?")


def _check_target(root: Path, goal: Path) -> None:
    if os.path.lexists(goal):
        raise UsageError(f"--to {goal}: there is something already. Nothing was changed; choose a new name")
    if goal.resolve().is_relative_to(root.resolve()):
        raise UsageError(
            f"--to {goal}: this lies in the runs folder, where it would look like a run; choose a place outside"
        )
    if goal.name.endswith((".tar", ".zip", ".gz")) and not goal.name.endswith(ARCHIVES):
        raise UsageError(f"--to {goal}: archives are written as .tar.gz; any other name is that of a folder")


def _copy_weights(run: Path, step: int, content: Path, merge: bool) -> list[str]:
    source = step_folder(run / "checkpoints", step)
    try:
        names = [name for name in verify(source, step) if name not in _TRAINING_ONLY and not _OPTIMIZER.fullmatch(name)]
        for name in names:  # a manifest of unknown origin may name anything
            inside = not Path(name).is_absolute() and (source / name).resolve() == source.resolve() / name
            if not inside:
                raise Unverified(name, "leads out of the checkpoint")
    except Unverified as reason:
        raise CheckpointError(
            f"{source}: {reason}; damaged weights are not exported. Choose another checkpoint with --weights, "
            "or --weights none for recipe and results alone"
        ) from None
    except FileNotFoundError:
        raise UsageError(f"{source}: the run has just deleted this checkpoint; do the same again") from None
    adapter = source / ADAPTER_CONFIG
    if merge:
        if not adapter.is_file():
            raise UsageError(f"--merge: {run.name} has no adapter; its weights are whole already")
        if _HEADS in names:
            raise UsageError(
                f"--merge: {run.name} has a head beside its adapter, which a merged model would lose; leave out --merge"
            )
        _merge_into_base(RunDirectory(run).read_recipe(), source, content)
        return []
    base = str(read_object(adapter).get("base_model_name_or_path")) if adapter.is_file() else ""
    lower = ""
    with suppress(UsageError):  # a base that is not there peft does not find either
        lower = base_of(str(source)) if base else ""
    if lower and is_adapter(lower):  # peft would load another model, and say nothing
        remedy = "train it from a merged export" if _HEADS in names else "--merge exports a model that stands alone"
        raise UsageError(f"{run.name}: its adapter stands on an adapter, {base}, which peft does not load; {remedy}")
    for name in names:
        (content / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, content / name, follow_symlinks=False)
    _check_copies(source, content, names)
    if not base:
        return []
    remedy = "" if _HEADS in names else "; --merge exports a model that stands alone"
    what = f"the weights are an adapter on top of {base}"
    what += f", which is a folder of this machine{remedy}" if Path(base).exists() else ""
    if lower and Path(lower).is_dir():
        _compare_with_trained(RunDirectory(run).read_recipe(), source, content, "the exported adapter")
    else:
        what += ". The base is not here, so the adapter was not compared with the trained model"
    return [what, _SCORER] if _is_scorer(content) else [what]


def _is_scorer(folder: Path) -> bool:
    return is_adapter(str(folder)) and read_object(folder / ADAPTER_CONFIG).get("task_type") == "SEQ_CLS"


def _check_copies(source: Path, content: Path, names: Sequence[str]) -> None:
    """Read what was copied again: it has to be what the checkpoint's manifest names.

    Raises:
        StorageError: the copy differs.
    """
    for name in names:
        with (source / name).open("rb") as ours, (content / name).open("rb") as copied:
            if file_digest(ours, "sha256").digest() != file_digest(copied, "sha256").digest():
                raise StorageError(f"{name}: the copy differs from the checkpoint; try another disk")


def _merge_into_base(recipe: Mapping[str, Any], source: Path, content: Path) -> None:
    from posttrain.models.load import load_merged, quiet_transformers

    loaded = load_merged(_section(recipe, source))
    with quiet_transformers():
        loaded.model.save_pretrained(content)
    loaded.tokenizer.save_pretrained(content)
    del loaded  # one model at a time
    _compare_with_trained(recipe, source, content, "--merge")


def _section(recipe: Mapping[str, Any], folder: Path, dtype: str | None = None) -> ModelSection:
    from posttrain.recipes.sections import ModelSection

    chosen = {"name": str(folder), "dtype": dtype or _text(recipe, "model", "dtype"), "device": "cpu"}
    return ModelSection.model_validate(chosen)


def _compare_with_trained(recipe: Mapping[str, Any], source: Path, content: Path, what: str) -> None:
    """Load the adapter in ``source`` and what was exported of it, one after the other, and compare them.

    Raises:
        RunFailure: they are not the same model.
    """
    from posttrain.models.comparison import check_same, read_probe
    from posttrain.models.load import load_model

    given = read_object(source / ADAPTER_CONFIG).get("trainable_token_indices") or []
    tokens = [index for ids in (given.values() if isinstance(given, dict) else [given]) for index in ids]
    dtype = _text(recipe, "model", "dtype")
    # The rounding of two ways to compute the same in fp32 may exceed the tolerance; that of the weights does not.
    for last, chosen in [(True, dtype)] if dtype != "float32" else [(False, dtype), (True, "float64")]:
        folders = (_section(recipe, folder, chosen) for folder in (source, content))
        trained, exported = (read_probe(load_model(section, seed=0).model, tokens) for section in folders)
        try:
            check_same(trained, exported, what, exact=dtype != "bfloat16")
        except RunFailure:
            if last:
                raise
        else:
            return


def _copy_records(run: Path, content: Path) -> None:
    for name in RECORDS:
        if (run / name).is_file() and not (run / name).is_symlink():
            shutil.copyfile(run / name, content / name)


def _pack(content: Path, archive: Path) -> Path:
    """The folder as a ``.tar.gz`` that names no user of this machine."""
    with tarfile.open(archive, "w:gz") as file:
        file.add(content, arcname=content.name, filter=_anonymous)
    return archive


def _anonymous(item: tarfile.TarInfo) -> tarfile.TarInfo:
    item.uid = item.gid = 0
    item.uname = item.gname = ""
    return item
