"""The activations that a recipe is trained on: a folder that it names, or a recording inside the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from posttrain.interpret.activations.documents import read_documents
from posttrain.interpret.activations.record import Recorder
from posttrain.interpret.activations.shards import INDEX, ActivationStore, read_index
from posttrain.interpret.activations.sites import check_layers
from posttrain.interpret.dictionaries.recipe import ActivationsSection
from posttrain.models.load import load_tokenizer

ACTIVATIONS = "activations"  # the folder inside a run


def open_or_record(
    section: ActivationsSection,
    run: Path,
    notify: Callable[[str], None],
    *,
    allow_large: bool = False,
    check_rows: Callable[[int], None] = lambda most: None,
) -> ActivationStore:
    """Open the folder that a recipe names, or the run's recording, which is made where it is not finished.

    Every file of a recording that is used again is compared with its hash first (about a second per GB).
    ``check_rows`` gets how many rows the texts give at most, and may refuse them before anything is computed.

    Raises:
        UsageError: no such model, site or text; too little room; or more than 1 GiB without ``allow_large``.
        DataError: a folder without finished activations, or a damaged recording.
    """
    if section.folder is not None:
        return ActivationStore.open(section.folder)
    place = run / ACTIVATIONS
    if (place / INDEX).is_file() and read_index(place).finished:
        return ActivationStore.open(place, verify=True)
    model = section.model
    assert model is not None, "the section's validator"
    assert section.site is not None, "the section's validator"
    check_layers(model.name, [section.site])  # before texts are read
    documents = read_documents(
        load_tokenizer(model.name, trust_remote_code=model.runs_remote_code),
        task=section.task,
        template=section.template,
        text=section.text,
        rollouts=None if section.rollouts is None else Path(section.rollouts),
        context_tokens=section.context_tokens,
        max_tokens=section.max_rows,
        where="activations.",
    )
    check_rows(documents.num_tokens)
    recorder = Recorder(
        model, documents, [section.site], dtype=section.dtype, outliers=section.outliers, batch=section.batch
    )
    size = recorder.check_room(place, allow_large=allow_large, fewer="activations.max_rows")
    notify(f"recording activations: {size}")
    return recorder.write(place)
