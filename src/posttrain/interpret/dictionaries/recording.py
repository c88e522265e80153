"""The activations that a recipe is trained on: a folder that it names, or a recording that dictionaries share.

What is recorded lies under ``activations/`` beside the runs, under a name that follows from all that decides its rows:
the models' weights, the texts, the sites and the settings. A second training on the same records nothing again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain.errors import DataError, RunConflict, UsageError
from posttrain.interpret.activations.documents import recorded_rollouts, task_prompts, texts
from posttrain.interpret.activations.record import LARGE_BYTES, ActivationStream, Recorder, recording_key
from posttrain.interpret.activations.shards import INDEX, ActivationStore, Documents, check_files, read_index
from posttrain.interpret.activations.sites import check_layers, tokenizer_hash
from posttrain.interpret.dictionaries.recipe import ActivationsSection
from posttrain.models.attention import chosen_attention
from posttrain.models.load import load_tokenizer
from posttrain.render.template import build_template
from posttrain.store.durable import replace_file, storage_errors
from posttrain.store.locks import Held, hold
from posttrain.tasks.base import build_task

# The folder beside the runs, and the file in a run that says which recording in it was used.
ACTIVATIONS, USED = "activations", "activations.txt"
_MAX_LABEL_CHARS = 60


def open_or_record(
    section: ActivationsSection,
    run: Path,
    notify: Callable[[str], None],
    *,
    allow_large: bool = False,
    check_rows: Callable[[int], None] = lambda most: None,
) -> ActivationStore:
    """The folder that a recipe names; else the recording for all that the section says, made where there is none.

    One that was interrupted goes on, one that is damaged is made again, and ``notify`` is told which it is. Every file
    of a recording that is used again is compared with its hash first (about a second per GB). Weights without files of
    their own have no hash, so their activations are recorded into the run and not shared. ``check_rows`` is told how
    many rows the texts give at most, and may refuse them before anything is computed.

    Raises:
        UsageError: no such model, site or text; too little room; more than 1 GiB without ``allow_large``; or the run
            was begun on other activations than model and texts give now.
        DataError: a folder without finished activations.
        RunConflict: another process is recording the same.
    """
    if section.folder is not None:
        return ActivationStore.open(section.folder)
    assert section.model is not None, "the section's validator"
    assert section.one_site is not None, "the section's validator"
    sites = section.sites or [section.one_site, *([] if section.target is None else [section.target])]
    check_layers(section.model.name, sites)  # before texts are read
    documents = read_documents(section)
    check_rows(sum(map(len, documents.ids)))
    paired = [] if section.paired is None else [section.model.model_copy(update={"name": section.paired})]
    models = [section.model, *paired]
    options: dict[str, Any] = {"dtype": section.dtype, "outliers": section.outliers, "batch": section.batch}
    key = recording_key(models, documents, sites, **options)
    if section.stream_rows is not None:
        if key is not None:
            _refuse_another(run, key)
            replace_file(run / USED, f"{key}\n".encode())
        recorder = Recorder(models, documents, sites, rows_per_shard=section.stream_rows, **options)
        return ActivationStream(recorder, notify)
    if key is None:
        place = run / ACTIVATIONS
    else:
        place = run.parent / ACTIVATIONS / f"{'-'.join(sites)[:_MAX_LABEL_CHARS]}-{key}"
        _refuse_another(run, place.name)
    with _locked(place), chosen_attention(section.model):
        store = _usable(place, notify)
        if store is None:
            recorder = Recorder(models, documents, sites, **options)
            _check_room(recorder, place, notify, allow_large=allow_large)
            store = recorder.write(place)
    if key is not None:
        replace_file(run / USED, f"{place.name}\n".encode())
    return store


def recorded_for(run: Path) -> Path | None:
    """The folder of the activations that a run recorded or shared; None where there is none any more."""
    places = [run / ACTIVATIONS]
    if (run / USED).is_file():
        # the last part alone: what stands in a stranger's run leads to no other folder
        places.append(run.parent / ACTIVATIONS / Path((run / USED).read_text(encoding="utf-8").strip()).name)
    return next((place for place in places if (place / INDEX).is_file()), None)


def forget_recorded(run: Path) -> None:
    """Take back what ``open_or_record`` wrote into a run that came to nothing; what is shared stays."""
    (run / USED).unlink(missing_ok=True)
    shutil.rmtree(run / ACTIVATIONS, ignore_errors=True)


def _refuse_another(run: Path, name: str) -> None:
    if (run / USED).is_file() and (before := (run / USED).read_text(encoding="utf-8").strip()) != name:
        raise UsageError(
            f"{run}: this run was begun on the activations {before}, but model, texts and settings give {name} now: "
            "one of them has changed since. Start again under another name with --run NAME"
        )


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    with storage_errors("activations", place):
        place.parent.mkdir(parents=True, exist_ok=True)
    try:
        with hold(place.parent / f".lock-{place.name}"):
            yield
    except Held as held:
        raise RunConflict(f"{place}: another process is recording these activations ({held}); wait for it") from None


def _usable(place: Path, notify: Callable[[str], None]) -> ActivationStore | None:
    """A finished recording whose files are as they were written; None if it has to be made, or to go on."""
    if not (place / INDEX).is_file():
        return None
    try:
        index = read_index(place)
        check_files(place, index)
    except DataError as error:
        notify(f"{error}. Activations are recorded again")
        with storage_errors("activations", place):
            shutil.rmtree(place)
        return None
    if not index.finished:
        notify(f"going on with the recording of activations that was interrupted, in {place}")
        return None
    notify(f"using the {index.rows:,} rows of activations recorded before, in {place}")
    return ActivationStore.open(place)


def _check_room(recorder: Recorder, place: Path, notify: Callable[[str], None], *, allow_large: bool) -> None:
    missing, free = recorder.room(place)
    what = f"{recorder.size.rows:,} tokens of activations, {recorder.size.num_bytes / 1e9:.2f} GB at most"
    if missing > free:
        raise UsageError(f"{place}: {what}, but {free / 1e9:.2f} GB are free; set activations.max_rows lower")
    if missing > LARGE_BYTES and not allow_large:
        raise UsageError(f"{what}: add --yes to record them, or set activations.max_rows lower")
    if missing == recorder.size.num_bytes:
        notify(f"recording {what}, in {place}")


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
