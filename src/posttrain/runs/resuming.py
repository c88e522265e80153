"""Before a run goes on: check that it is still the run that its newest checkpoint was saved in.

A checkpoint records what decided it (``settings``: the recipe without its keys of place) and the number of records.
Changes of the recipe and missing records are named, and the run goes on with them only where that is accepted; nothing
was changed before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from posttrain import __version__
from posttrain.errors import RunConflict
from posttrain.recipes.recipe import Recipe
from posttrain.runs.directory import RunDirectory
from posttrain.store.checkpoint_files import checkpoint_steps, newest_state
from posttrain.store.metrics import MetricsLog
from posttrain.store.rollouts import RolloutStore

ACCEPT = "--accept-changes"
LENGTHS = ("train.steps", "train.num_epochs")
_FILES = {
    "metrics": "metrics.jsonl: {} of {} lines",
    "rollouts": "rollouts.db: {} of {} rollouts",
    "evaluation_rollouts": "rollouts.db: {} of {} evaluation rollouts",
}
Changes = dict[str, tuple[object, object]]


def claim_to_resume(directory: RunDirectory, recipe: Recipe, accept_changes: bool = False) -> list[str]:
    """Check that the locked run may go on by ``recipe``, and store that; returns notices to show.

    Args:
        accept_changes: go on although the recipe or the records are others than the checkpoint's.

    Raises:
        RunConflict: they are, and it is not accepted; nothing was changed.
    """
    step, state = newest_state(directory.folder / "checkpoints") or (0, {})
    saved = step or max(checkpoint_steps(directory.folder / "checkpoints"), default=0)
    settings = state.get("settings")
    changed = directory.changed_keys(recipe, *([settings] if isinstance(settings, Mapping) else []))
    missing = _missing_records(directory.folder, step, state) if saved else _missing_checkpoints(directory, recipe)
    new = recipe.train.steps if "train.steps" in changed else None
    is_short = new is not None and new <= saved
    problem = hard_changes(changed)
    if is_short:
        problem = f"train.steps {new} is not above the newest checkpoint's step {saved}."
    elif changed and not problem and recipe.train.schedule != "constant":
        keys = " and ".join(sorted(changed))
        problem = f"{keys} changes the learning rates of train.schedule {recipe.train.schedule!r}."
    differing = _lines(changed) if problem else []
    if is_short or ((problem or missing) and not accept_changes):
        raise RunConflict(_refusal(directory, differing, missing, problem))
    warnings: list[str] = []
    if missing or differing:
        what = "; ".join([*missing, *differing])
        warnings.append(f"{ACCEPT}: goes on after step {saved}, although it is not as it was then: {what}")
    elif changed:
        now = "; ".join(f"{key} is now {new} instead of {old}" for key, (old, new) in sorted(changed.items()))
        warnings.append(f"{now}; the steps up to {saved} are kept as they are")
    elsewhere = {key: both for key, both in directory.changed_keys(recipe, places=True).items() if key != "description"}
    if elsewhere:
        warnings.append(f"another place than at the last start: {'; '.join(_lines(elsewhere))}")
    edited = {key: both for key, both in directory.changed_keys(recipe).items() if key not in changed}
    if edited and not differing:
        warnings.append(
            f"recipe.yaml had been changed, and is again what was trained with: {'; '.join(_lines(edited))}"
        )
    if changed or elsewhere or edited:
        directory.write_recipe(recipe)
    return warnings


def hard_changes(changed: Changes) -> str:
    """Return why a run cannot go on with these changes; empty if it may (``train.steps`` or ``passes`` alone)."""
    hard = [key for key in changed if key not in LENGTHS]
    length = " or ".join(LENGTHS)
    return f"Only {length} may change when a run is resumed, not {', '.join(hard)}." if hard else ""


def describe_changes(changed: Changes) -> str:
    """Return a line for each key: the value in the run, and the new one."""
    return "The recipes differ in:\n" + "\n".join(f"  {line}" for line in _lines(changed))


def _missing_records(folder: Path, step: int, state: Mapping[str, object]) -> list[str]:
    """Name the files that have fewer lines or rows than when the checkpoint was saved."""
    records = state.get("records")
    expected = {name: n for name, n in (records if isinstance(records, Mapping) else {}).items() if isinstance(n, int)}
    if not expected:
        return []
    there = {"metrics": sum(row.step <= step for row in MetricsLog(folder / "metrics.jsonl").read())}
    path = folder / "rollouts.db"
    if expected.keys() - there.keys() and path.is_file():
        there |= RolloutStore(path, read_only=True).num_rows(step)
    return [
        f"{_FILES[name].format(count - there.get(name, 0), count)} up to step {step} are missing"
        for name, count in expected.items()
        if name in _FILES and there.get(name, 0) < count
    ]


def _missing_checkpoints(directory: RunDirectory, recipe: Recipe) -> list[str]:
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
    if differing:
        recipes = "this run belongs to another recipe. The recipes differ in:"
        parts.append("\n  ".join([recipes, *differing]) + f"\n{problem}")
    if missing:
        parts.append("\n  ".join(["what was there when its newest checkpoint was saved is gone:", *missing]))
    back = ["with the run's own recipe" if differing else "", "with the files put back" if missing else ""]
    made_by = directory.made_by()
    version = "" if made_by in (None, __version__) else f" It was made by posttrain {made_by}; this is {__version__}."
    return (
        f"{directory.folder}: {'; and '.join(parts)}\nNothing was changed.{version} Resume "
        f"{' and '.join(filter(None, back))}, go on with it as it is now with {ACCEPT} (log.txt keeps what was "
        "different), or start under another name with --run NAME"
    )


def _lines(changed: Changes) -> list[str]:
    def shown(value: object) -> str:
        return "nothing" if value is None else repr(value)

    return [f"{key}: {shown(old)} in the run, {shown(new)} now" for key, (old, new) in sorted(changed.items())]
