"""Training a dictionary as a run: from a recipe to a run directory with a dictionary in it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from posttrain.errors import UsageError
from posttrain.interpret.dictionaries.exchange import describe_training, save_dictionary
from posttrain.interpret.dictionaries.measures import recovered_by, results_of
from posttrain.interpret.dictionaries.recipe import SaeRecipe
from posttrain.interpret.dictionaries.recording import forget_recorded, open_or_record
from posttrain.interpret.dictionaries.rows import StoreRows
from posttrain.interpret.dictionaries.training import train_dictionary
from posttrain.store.durable import replace_file
from posttrain.store.metrics import TrackedMetrics, TrackedRun, build_trackers
from posttrain.train.files import Observer, RunFiles

DICTIONARY, RESULTS = "dictionary", "dictionary.json"


@dataclass(frozen=True)
class DictionaryRun:
    """What ``runs.launch`` asks of a training."""

    step: int
    reason: str
    evaluations: dict[str, dict[str, float]]


def train_run(
    recipe: Any, files: RunFiles, *, resume: bool, observer: Observer, should_stop: Any, allow_large: bool
) -> DictionaryRun:
    """Record activations if the recipe says so, train, measure, and write the dictionary."""
    assert isinstance(recipe, SaeRecipe)

    def notify(message: str) -> None:
        observer("notice", {"message": message})

    trackers = build_trackers(recipe.track, TrackedRun(files.folder, recipe.dump(), notify))
    store = open_or_record(recipe.activations, files.folder, notify, allow_large=allow_large)
    asked = recipe.activations
    rows = StoreRows(store, asked.one_site, asked.source, asked.target)
    metrics = TrackedMetrics(files.metrics, trackers)
    try:
        trained = train_dictionary(
            rows,
            recipe,
            checkpoints=files.checkpoints,
            metrics=metrics,
            resume=resume,
            observer=observer,
            should_stop=should_stop,
        )
    except UsageError:
        if not resume:  # so that the run, which came to nothing, can be taken back
            forget_recorded(files.folder)
        raise
    finally:
        metrics.close()
    if trained.reason == "finished":
        save_dictionary(trained.dictionary, files.folder / DICTIONARY, describe_training(rows, recipe, trained.step))
        recovered = recovered_by(rows, recipe, trained.dictionary, notify)
        content = json.dumps(results_of(trained.quality, recovered), indent=1)
        replace_file(files.folder / RESULTS, content.encode() + b"\n")
    return DictionaryRun(trained.step, trained.reason, trained.evaluations)
