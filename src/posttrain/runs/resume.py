"""Check if a run may be resumed: compare the recipe with the newest checkpoint, and detect lost records.

A checkpoint stores its recipe (``settings``, without place keys) and record counts. Before resuming, recipe changes
and missing records are reported, and require explicit acceptance. Nothing is modified before that.
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
    """Check that the locked run may continue with ``recipe``, and store the recipe; returns notices to show.

    Args:
        accept_changes: continue although recipe or records differ from the checkpoint.

    Raises:
        RunConflict: they differ and this was not accepted. Nothing was changed.
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
        problem = f"train.steps {new_steps} must exceed step {saved} of the newest checkpoint."
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
        warnings.append(f"{ACCEPT}: continuing after step {saved} despite differences: {what}")
    elif changed:
        now = [f"{key} is now {new} instead of {old}" for key, (old, new) in sorted(changed.items())]
        warnings.append(f"{'; '.join(now)}; steps up to {saved} remain unchanged")
    elsewhere = directory.changed_keys(recipe, places=True)
    elsewhere.pop("description", None)
    if elsewhere:
        warnings.append(f"locations differ from the last start: {'; '.join(changed_lines(elsewhere))}")
    edited = {key: both for key, both in directory.changed_keys(recipe).items() if key not in changed}
    if edited and not differing:
        warnings.append(
            f"recipe.yaml was edited; restored the recipe used for training: {'; '.join(changed_lines(edited))}"
        )
    if changed or elsewhere or edited:
        directory.write_recipe(recipe)
    return warnings


def hard_changes(changed: ChangedKeys) -> str:
    """Explain which changes prevent resuming; empty if only ``train.steps`` or ``num_epochs`` changed."""
    hard = [key for key in changed if key not in LENGTH_KEYS]
    if not hard:
        return ""
    return f"Only {' or '.join(LENGTH_KEYS)} may change when a run is resumed, not {', '.join(hard)}."


def describe_changes(changed: ChangedKeys) -> str:
    """Format changes as text under a heading."""
    return "The recipes differ in:\n" + "\n".join(f"  {line}" for line in changed_lines(changed))


def _missing_records(folder: Path, step: int, state: Mapping[str, object]) -> list[str]:
    """List files with fewer rows than recorded in the checkpoint."""
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
    """Detect missing checkpoints: none exists, but status or metrics show that one was saved."""
    status = directory.read_status()
    last = max((row.step for row in MetricsLog(directory.folder / "metrics.jsonl").read()), default=0)
    # these states all imply a saved checkpoint
    if status is not None and status.state in ("finished", "interrupted", "stopped"):
        last = max(last, status.step)
    elif last <= (recipe.train.save_every or last):
        return []
    if not last:
        return []
    folder = directory.folder / "checkpoints"
    return [f"checkpoints: none found after {last} steps; is the disk with {folder} mounted?"]


def _refusal(directory: RunDirectory, differing: list[str], missing: list[str], problem: str) -> str:
    parts = []
    remedies = []
    if differing:
        recipes = "this run belongs to a different recipe. The recipes differ in:"
        parts.append("\n  ".join([recipes, *differing]) + f"\n{problem}")
        remedies.append("with the original recipe")
    if missing:
        parts.append("\n  ".join(["records saved with the newest checkpoint are missing:", *missing]))
        remedies.append("after restoring the files")
    version = ""
    made_by = directory.made_by()
    if made_by not in (None, __version__):
        version = f" It was created by posttrain {made_by}; this is {__version__}."
    return (
        f"{directory.folder}: {'; and '.join(parts)}\nNothing was changed.{version} Resume "
        f"{' and '.join(remedies)}, continue anyway with {ACCEPT} (log.txt records the differences), or start under "
        "a different name with --run NAME"
    )


def changed_lines(changed: ChangedKeys) -> list[str]:
    """Format one line per key: the run's value and the new one."""

    def shown(value: object) -> str:
        if value is None:
            return "nothing"
        return repr(value)

    return [f"{key}: {shown(old)} in the run, {shown(new)} now" for key, (old, new) in sorted(changed.items())]
