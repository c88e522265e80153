"""``posttrain sae train``: from a recipe to a run directory with a dictionary in it."""

from __future__ import annotations

import argparse
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any, cast

from posttrain.commands.progress import choose_progress, show_duration
from posttrain.errors import INTERRUPTED, UsageError
from posttrain.interpret.dictionaries.recipe import SaeRecipe, load_sae_recipe
from posttrain.recipes.recipe import Recipe
from posttrain.train.files import Observer, RunFiles

DICTIONARY, ACTIVATIONS, RESULTS = "dictionary", "activations", "dictionary.json"


def run_sae_train(arguments: argparse.Namespace) -> int:
    """Check the recipe, record activations if it says so, train, measure, and write the dictionary."""
    recipe = load_sae_recipe(arguments.recipe, arguments.overrides).resolve()
    if arguments.dry_run:
        print(f"# {arguments.recipe}, resolved; fingerprint {recipe.fingerprint()}")
        print(recipe.to_yaml().rstrip())
        return 0
    from posttrain.runs.launch import launch

    with choose_progress(arguments.recipe, arguments.quiet) as progress:
        result = launch(
            cast(Recipe, recipe),  # a run directory asks no more of a recipe than this one has
            root=arguments.runs_dir,
            name=arguments.run,
            recipe_name=arguments.recipe,
            resume=arguments.resume,
            accept_changes=arguments.accept_changes,
            observer=progress,
            train=partial(_train, allow_large=arguments.yes),
        )
    if not arguments.quiet:
        print(f"{result.step} steps, {show_duration(progress.history.elapsed())}")
        _print_results(result.folder)
    print(f"run:        {result.folder}")
    if not arguments.quiet and result.reason == "finished":
        print(f"dictionary: {result.folder / DICTIONARY}")
    return 0 if result.reason == "finished" else INTERRUPTED


class _Result:
    """What ``launch`` asks of a training."""

    def __init__(self, step: int, reason: str, evaluations: dict[str, dict[str, float]]) -> None:
        self.step, self.reason, self.evaluations = step, reason, evaluations


def _train(
    recipe: Any, files: RunFiles, *, resume: bool, observer: Observer, should_stop: Any, allow_large: bool
) -> _Result:
    from posttrain.interpret.dictionaries.exchange import describe_training, save_dictionary
    from posttrain.interpret.dictionaries.measures import recovered_by, results_of
    from posttrain.interpret.dictionaries.rows import StoreRows, open_or_record
    from posttrain.interpret.dictionaries.training import train_dictionary
    from posttrain.store.durable import replace_file
    from posttrain.store.metrics import TrackedMetrics, TrackedRun, build_trackers

    assert isinstance(recipe, SaeRecipe)

    def notify(message: str) -> None:
        observer("notice", {"message": message})

    trackers = build_trackers(recipe.track, TrackedRun(files.folder, recipe.dump(), notify))
    recorded = files.folder / ACTIVATIONS
    is_new = not recorded.exists()
    store = open_or_record(recipe.activations, recorded, notify, allow_large=allow_large)
    rows = StoreRows(store, recipe.activations.site, recipe.activations.source)
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
        if is_new and not resume:  # so that the run, which came to nothing, can be taken back
            shutil.rmtree(recorded, ignore_errors=True)
        raise
    finally:
        metrics.close()
    if trained.reason == "finished":
        save_dictionary(trained.dictionary, files.folder / DICTIONARY, describe_training(rows, recipe, trained.step))
        recovered = recovered_by(rows, recipe, trained.dictionary, notify)
        content = json.dumps(results_of(trained.quality, recovered), indent=1)
        replace_file(files.folder / RESULTS, content.encode() + b"\n")
    return _Result(trained.step, trained.reason, trained.evaluations)


def _print_results(folder: Path) -> None:
    path = folder / RESULTS
    if not path.is_file():
        return
    results = json.loads(path.read_text(encoding="utf-8"))
    held_out = results["held_out"]
    print(
        f"held out:   FVU {held_out['fvu']:.4f} · L0 {held_out['l0']:.1f} · {held_out['silent']:.1%} of the features "
        f"silent · {held_out['dense']:.1%} active on more than a tenth of the rows"
    )
    if "recovered" in results:
        found = results["recovered"]
        print(
            f"in place:   CE {found['ce']:.3f} becomes {found['ce_spliced']:.3f} (zeros {found['ce_zero']:.3f}, mean "
            f"{found['ce_mean']:.3f}): {found['ce_recovered_zero']:.1%} recovered, {found['ce_recovered_mean']:.1%} of "
            "what the mean loses"
        )
