"""The activations that a recipe of a dictionary means: opened, or recorded first."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.errors import UsageError
from posttrain.interpret.activations.documents import Documents, recorded_rollouts, task_prompts, texts
from posttrain.interpret.activations.loading import tokenizer_hash
from posttrain.interpret.activations.record import Recorder
from posttrain.interpret.activations.shards import ActivationStore
from posttrain.interpret.activations.store_index import INDEX, read_index
from posttrain.interpret.dictionaries.recipe import ActivationsSection
from posttrain.models.load import load_tokenizer
from posttrain.render.template import build_template
from posttrain.tasks.base import build_task

# A recording above this is begun only when that was asked for.
LARGE_BYTES = 1 << 30


def open_or_record(
    section: ActivationsSection, folder: Path, notify: Callable[[str], None], *, allow_large: bool = False
) -> ActivationStore:
    """The folder that a recipe names; else a recording in ``folder``, which goes on where it was interrupted.

    Raises:
        UsageError: no such model, site or text; too little room; or more than 1 GiB without ``allow_large``.
        DataError: a folder without finished activations.
    """
    if section.folder is not None:
        return ActivationStore.open(section.folder)
    assert section.model is not None, "the section's validator"
    assert section.site is not None, "the section's validator"
    documents = read_documents(section)
    paired = [] if section.paired is None else [section.model.model_copy(update={"name": section.paired})]
    recorder = Recorder(
        [section.model, *paired],
        documents.ids,
        [section.site],
        dtype=section.dtype,
        outliers=section.outliers,
        batch=section.batch,
        data=documents.data,
        dropped=documents.dropped,
        prompt_lengths=documents.prompt_lengths,
    )
    there = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0
    missing = recorder.size.num_bytes - there
    free = shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.exists())).free
    what = f"{recorder.size.rows:,} tokens of activations, {recorder.size.num_bytes / 1e9:.2f} GB at most"
    if missing > free:
        raise UsageError(f"{folder}: {what}, but {free / 1e9:.2f} GB are free; set activations.max_rows lower")
    if missing > LARGE_BYTES and not allow_large:
        raise UsageError(f"{what}: add --yes to record them, or set activations.max_rows lower")
    if not (folder / INDEX).is_file() or not read_index(folder).finished:
        notify(f"recording {what}, in {folder}")
    return recorder.write(folder)


def read_documents(section: ActivationsSection) -> Documents:
    """The texts of a section that records.

    Raises:
        UsageError, DataError: they cannot be read, or were made with another tokenizer.
    """
    assert section.model is not None, "the section's validator"
    tokenizer = load_tokenizer(section.model.name, trust_remote_code=section.model.runs_remote_code)
    limits: dict[str, Any] = {"context_tokens": section.context_tokens, "max_tokens": section.max_rows}
    if section.text is not None:
        return texts(section.text, tokenizer, **limits)
    if section.rollouts is not None:
        run = Path(section.rollouts)
        if tokenizer_hash(load_tokenizer(str(run))) != tokenizer_hash(tokenizer):
            raise UsageError(f"activations.rollouts: {run}: its tokenizer is not that of {section.model.name}")
        return recorded_rollouts(run / "rollouts.db", about=run.name, **limits)
    assert section.task is not None, "the section's validator"
    task = build_task(section.task, "activations.task")
    return task_prompts(task, tokenizer, build_template(section.template, "activations.template"), **limits)
