"""Decide if a run may go on: compare the recipe with the newest checkpoint, and look for lost records.

A checkpoint records what decided it (``settings``: the recipe without its keys of place) and the number of records.
Before a run goes on, changes of the recipe and missing records are named, and it goes on with them only where that is
accepted; nothing was changed before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from posttrain import __version__
from posttrain.errors import RunConflict
from posttrain.recipes.overriding import LENGTHS
from posttrain.runs.directory import RunDirectory, RunRecipe
from posttrain.store.checkpoint_files import checkpoint_steps, newest_state
from posttrain.store.metrics import MetricsLog
from posttrain.store.rollouts import RolloutStore

ACCEPT = "--accept-changes"
LENGTH_KEYS = tuple(f"train.{key}" for key in LENGTHS)
_FILES = {
    "metrics": "metrics.jsonl: {} of {} lines",
    "rollouts": "rollouts.db: {} of {} rollouts",
    "evaluation_rollouts": "rollouts.db: {} of {} evaluation rollouts",
}
ChangedKeys = dict[str, tuple[object, object]]


def claim_to_resume(directory: RunDirectory, recipe: RunRecipe, accept_changes: bool = False) -> list[str]:
    """Check that the locked run may go on by ``recipe``, and store that; returns notices to show.

    Args:
        accept_changes: go on although the recipe or the records are others than the checkpoint's.

    Raises:
        RunConflict: they are, and it is not accepted; nothing was changed.
    """
    checkpoints = directory.folder / "checkpoints"
    step, state = newest_state(checkpoints) or (0, {})
    saved = step or max(checkpoint_steps(checkpoints), default=0)
    settings = state.get("settings")
    if isinstance(settings, Mapping):
        changed = directory.changed_keys(recipe, settings)
    else:
        changed = directory.changed_keys(recipe)
    if saved:
        missing = _missing_records(directory.folder, step, state)
    else:
        missing = _missing_checkpoints(directory, recipe)
    new_steps = recipe.train.steps
    is_short = "train.steps" in changed and new_steps is not None and new_steps <= saved
    problem = hard_changes(changed)
    if is_short:
        problem = f"train.steps {new_steps} is not above the newest checkpoint's step {saved}."
    elif changed and not problem and recipe.train.schedule != "constant":
        keys = " and ".join(sorted(changed))
        problem = f"{keys} changes the learning rates of train.schedule {recipe.train.schedule!r}."
    differing = []
    if problem:
        differing = changed_lines(changed)
    if is_short or ((problem or missing) and not accept_changes):
        raise RunConflict(_refusal(directory, differing, missing, problem))
    warnings: list[str] = []
    if missing or differing:
        what = "; ".join([*missing, *differing])
        warnings.append(f"{ACCEPT}: goes on after step {saved}, although it is not as it was then: {what}")
    elif changed:
        now = [f"{key} is now {new} instead of {old}" for key, (old, new) in sorted(changed.items())]
        warnings.append(f"{'; '.join(now)}; the steps up to {saved} are kept as they are")
    elsewhere = directory.changed_keys(recipe, places=True)
    elsewhere.pop("description", None)
    if elsewhere:
        warnings.append(f"another place than at the last start: {'; '.join(changed_lines(elsewhere))}")
    edited = {key: both for key, both in directory.changed_keys(recipe).items() if key not in changed}
    if edited and not differing:
        warnings.append(
            f"recipe.yaml had been changed, and is again what was trained with: {'; '.join(changed_lines(edited))}"
        )
    if changed or elsewhere or edited:
        directory.write_recipe(recipe)
    return warnings


def hard_changes(changed: ChangedKeys) -> str:
    """Return why a run cannot go on with these changes; empty if it may (``train.steps`` or ``num_epochs`` alone)."""
    hard = [key for key in changed if key not in LENGTH_KEYS]
    if not hard:
        return ""
    return f"Only {' or '.join(LENGTH_KEYS)} may change when a run is resumed, not {', '.join(hard)}."


def describe_changes(changed: ChangedKeys) -> str:
    """Return the changes as text, under a heading."""
    return "The recipes differ in:\n" + "\n".join(f"  {line}" for line in changed_lines(changed))


def _missing_records(folder: Path, step: int, state: Mapping[str, object]) -> list[str]:
    """Name the files that have fewer lines or rows than when the checkpoint was saved."""
    records = state.get("records")
    if not isinstance(records, Mapping):
        return []
    expected = {name: count for name, count in records.items() if isinstance(count, int)}
    if not expected:
        return []
    there = {"metrics": sum(row.step <= step for row in MetricsLog(folder / "metrics.jsonl").read())}
    path = folder / "rollouts.db"
    if expected.keys() - there.keys() and path.is_file():
        there |= RolloutStore(path, read_only=True).num_rows(step)
    missing = []
    for name, count in expected.items():
        gone = count - there.get(name, 0)
        if name in _FILES and gone > 0:
            missing.append(f"{_FILES[name].format(gone, count)} up to step {step} are missing")
    return missing


def _missing_checkpoints(directory: RunDirectory, recipe: RunRecipe) -> list[str]:
    """Tell of a run without any checkpoint whose status or metrics show that it had one."""
    status = directory.read_status()
    last = max((row.step for row in MetricsLog(directory.folder / "metrics.jsonl").read()), default=0)
    if status is not None and status.state in ("finished", "interrupted", "stopped"):  # both save a checkpoint
        last = max(last, status.step)
    elif last <= (recipe.train.save_every or last):
        return []
    if not last:
        return []
    folder = directory.folder / "checkpoints"
    return [f"checkpoints: there is none, and {last} steps were made; is the disk with {folder} mounted?"]


def _refusal(directory: RunDirectory, differing: list[str], missing: list[str], problem: str) -> str:
    parts = []
    remedies = []
    if differing:
        recipes = "this run belongs to another recipe. The recipes differ in:"
        parts.append("\n  ".join([recipes, *differing]) + f"\n{problem}")
        remedies.append("with the run's own recipe")
    if missing:
        parts.append("\n  ".join(["what was there when its newest checkpoint was saved is gone:", *missing]))
        remedies.append("with the files put back")
    version = ""
    made_by = directory.made_by()
    if made_by not in (None, __version__):
        version = f" It was made by posttrain {made_by}; this is {__version__}."
    return (
        f"{directory.folder}: {'; and '.join(parts)}\nNothing was changed.{version} Resume "
        f"{' and '.join(remedies)}, go on with it as it is now with {ACCEPT} (log.txt keeps what was "
        "different), or start under another name with --run NAME"
    )


def changed_lines(changed: ChangedKeys) -> list[str]:
    """Return a line for each key: the value in the run, and the new one."""

    def shown(value: object) -> str:
        if value is None:
            return "nothing"
        return repr(value)

    return [f"{key}: {shown(old)} in the run, {shown(new)} now" for key, (old, new) in sorted(changed.items())]
