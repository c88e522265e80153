"""What lists say of a run, out of its files; remembered by file, so that ten thousand runs are listed at once.

A recipe takes milliseconds to parse; its facts are kept in the user's cache folder for as long as the file is the same
(``store/remembered.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from posttrain.errors import DataError
from posttrain.recipes.document import flatten
from posttrain.runs.directory import RunDirectory
from posttrain.store.metrics import MetricsLog, is_evaluation
from posttrain.store.remembered import Remembered

NAMES = ("model.name", "teacher.name")  # `tiny` and hub names stand here too
_MAX_CHARACTERS = 200
_WORTH_SAVING = 20  # new facts: fewer are found again in less time than writing all takes
_facts = Remembered("runs")


@dataclass(frozen=True, slots=True)
class RecipeFacts:
    """Of ``recipe.yaml``; ``leads``: the values by dotted key that may lead to another run."""

    steps: int = 0
    objective: str = "?"
    model: str = "?"
    leads: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EnvironmentFacts:
    """Of ``env.json``: the recipe's name, and the first start (ISO 8601, UTC)."""

    recipe: str = "?"
    created: str | None = None


def recipe_facts(folder: Path) -> RecipeFacts:
    """Raises ``DataError`` for a recipe that cannot be read."""
    try:
        return RecipeFacts(**_facts.get(folder / "recipe.yaml", lambda path: asdict(_read_recipe(path.parent))))
    except OSError as error:
        raise DataError(folder / "recipe.yaml", f"the run's recipe cannot be read ({error.strerror})") from None


def environment_facts(folder: Path) -> EnvironmentFacts:
    """Raises ``DataError`` where ``env.json`` is damaged."""
    try:
        return EnvironmentFacts(**_facts.get(folder / "env.json", lambda path: asdict(_read_environment(path.parent))))
    except OSError:  # there is none; reading it says what else it may be
        return _read_environment(folder)


def created_of(folder: Path) -> str | None:
    """The first start of a run. Raises ``DataError`` where ``env.json`` is damaged."""
    return environment_facts(folder).created


def last_metrics(folder: Path) -> dict[str, float]:
    """The metrics of the last step, evaluations left out. Raises ``DataError`` for a damaged line on the way there."""
    row = MetricsLog(folder / "metrics.jsonl").last(lambda row: not is_evaluation(row))
    return row.metrics if row is not None else {}


def save_facts() -> None:
    """Keep what was found for the next command."""
    _facts.save(at_least=_WORTH_SAVING)


def names_run(key: str) -> bool:
    """Whether the value of a dotted key of a recipe is a run."""
    return key.endswith(".run")


def _read_environment(folder: Path) -> EnvironmentFacts:
    environment = RunDirectory(folder).read_environment()
    return EnvironmentFacts(environment.get("recipe", "?")[:_MAX_CHARACTERS], environment.get("created"))


def _read_recipe(folder: Path) -> RecipeFacts:
    directory = RunDirectory(folder)
    recipe = directory.read_recipe()
    steps = _section(recipe, "train").get("steps") or 0  # null where passes are counted, and the status knows
    if not isinstance(steps, int):
        raise DataError(directory.recipe_path, "train.steps is no whole number")
    leads = {
        key: value
        for key, value in flatten(recipe).items()
        if isinstance(value, str) and value and (key in NAMES or "/" in value or names_run(key))
    }
    objective = _word(recipe, "objective" if "objective" in recipe else "dictionary")
    return RecipeFacts(steps, objective[:_MAX_CHARACTERS], _model(recipe)[:_MAX_CHARACTERS], leads)


def _section(recipe: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = recipe.get(key)
    return value if isinstance(value, Mapping) else {}


def _word(recipe: Mapping[str, Any], key: str) -> str:
    value = recipe.get(key)
    return value if isinstance(value, str) else str(_section(recipe, key).get("name", "?"))


def _model(recipe: Mapping[str, Any]) -> str:
    """Of a dictionary's run, whose activations it is of: a model, or a folder that holds them."""
    activations = _section(recipe, "activations")
    return str(activations["folder"]) if "folder" in activations else _word(activations or recipe, "model")
