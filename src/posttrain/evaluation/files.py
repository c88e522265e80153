"""The folder of an evaluation: ``items.jsonl``, ``summary.md`` and, written last, ``results.json``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, FiniteFloat, PositiveInt, ValidationError

from posttrain.errors import DataError, UsageError
from posttrain.evaluation.generation import Evaluation
from posttrain.evaluation.items import Item, Kinds, read_items, write_items
from posttrain.store.durable import refuse_links, replace_file, storage_errors, write_json
from posttrain.store.environment import describe_environment
from posttrain.store.reading import read_record
from posttrain.untrusted import first_fault, harmless

ITEMS = "items.jsonl"
RESULTS = "results.json"
SUMMARY = "summary.md"
# Settings that say which weights were asked and how they were named.
_OF_WEIGHTS = {"model", "checkpoint", "weights", "best_of_weights", "step", "a", "b"}

# ``summary.md`` of an evaluation, from it, its settings and its environment (``reports.evaluation.write_page``).
WritePage = Callable[[Evaluation, Mapping[str, object], Mapping[str, object]], str]


@dataclass(frozen=True)
class FinishedEvaluation:
    """A finished evaluation, read from its folder."""

    folder: Path
    evaluation: str
    results: dict[str, float]
    settings: dict[str, Any]
    kinds: Kinds
    timing: dict[str, float]

    @property
    def label(self) -> str:
        """The name of its model."""
        return str(self.settings.get("label") or self.settings.get("model") or self.folder.name)

    @property
    def template(self) -> str:
        """The name of its template."""
        template = self.settings.get("template", "")
        if isinstance(template, Mapping):
            return str(template["name"])
        return str(template)

    def items(self) -> list[Item]:
        """Its items (see ``read_items``); each has as many answers as the settings say, or none."""
        return read_items(self.folder / ITEMS, self.settings.get("samples", 1))


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Template(_Strict):
    name: str


class _Settings(_Strict):
    label: str | None = None
    model: str | None = None
    template: _Template | str | None = None
    samples: PositiveInt = 1
    ks: list[PositiveInt] = []
    dropped: dict[str, int] = {}


class _Written(_Strict):
    """The keys of ``results.json`` that are read again; an untrusted file may hold anything."""

    evaluation: str
    results: dict[str, FiniteFloat | None]
    settings: _Settings
    kinds: Kinds = {}
    timing: dict[str, float] = {}


def write_evaluation(
    folder: Path, settings: Mapping[str, object], evaluation: Evaluation, write_page: WritePage
) -> None:
    """Write the items, the page and the results; ``settings`` are all that decides about the answers."""
    refuse_links(folder)
    environment = describe_environment()
    content = {
        "evaluation": evaluation.name,
        "results": evaluation.results,
        "settings": dict(settings),
        "kinds": evaluation.kinds,
        "timing": evaluation.timing,
    }
    write_records(folder, evaluation.items, write_page(evaluation, settings, environment), content, environment)


def write_records(
    folder: Path,
    items: Sequence[Item | Mapping[str, object]],
    page: str,
    content: Mapping[str, object],
    environment: Mapping[str, object] | None = None,
) -> None:
    """``items.jsonl``, ``summary.md`` and, last, ``results.json``; those of an earlier evaluation are replaced.

    ``environment``: described already for the page.

    Raises:
        StorageError: the disk is full or not writable.
    """
    with storage_errors("evaluation", folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULTS).unlink(missing_ok=True)
    write_items(items, folder / ITEMS)
    replace_file(folder / SUMMARY, harmless(page).encode())
    if environment is None:
        environment = describe_environment()
    write_json(folder / RESULTS, {**content, "environment": environment}, default=str)


def read_finished(folder: str | Path) -> FinishedEvaluation:
    """The finished evaluation in ``folder``.

    Raises:
        DataError: it is the folder of no evaluation, of an interrupted one, or of another kind.
    """
    path = Path(folder) / RESULTS
    try:
        content = json.loads(read_record(path))
    except FileNotFoundError:
        raise DataError(path, "no evaluation was finished here; `posttrain evaluate` writes this file last") from None
    except (ValueError, RecursionError) as error:
        raise DataError(path, f"cannot be read ({error}); evaluate again to replace it") from None
    keys = {}
    if isinstance(content, dict):
        keys = content
    if "measured" in keys:
        raise DataError(
            path,
            f"these are the results of a reward model ({keys['measured']}), which wrote no answers to compare; "
            "`posttrain evaluate RM_A RM_B` tests the difference of two reward models",
        )
    if "a" in keys and "b" in keys:
        raise DataError(
            path,
            f"these are the results of --against: {keys['a']} and {keys['b']} are compared in them already; "
            "`posttrain evaluate --compare A B` tests the difference of two models",
        )
    try:
        checked = _Written.model_validate(content)
    except ValidationError as error:
        raise DataError(path, f"not the results of an evaluation ({first_fault(error)})") from None
    results = {name: value for name, value in checked.results.items() if value is not None}
    return FinishedEvaluation(
        Path(folder), checked.evaluation, results, content["settings"], checked.kinds, checked.timing
    )


def is_evaluation_folder(folder: str | Path) -> bool:
    """Return whether a folder is of an evaluation, and not of a model or a run."""
    path = Path(folder)
    is_other = (path / "recipe.yaml").is_file() or (path / "config.json").is_file()
    return (path / RESULTS).is_file() and not is_other


def finished_before(folder: Path, settings: Mapping[str, object]) -> FinishedEvaluation | None:
    """The evaluation in a folder, if it was finished with the same settings; else None."""
    if not (folder / RESULTS).is_file():
        return None
    finished = read_finished(folder)
    if _deciding(finished.settings) == _deciding(settings):
        return finished
    return None


def settings_replaced(folder: Path, settings: Mapping[str, object]) -> list[str]:
    """Return the settings in which an evaluation in ``folder`` differs from this one; none where they are not read."""
    try:
        content = json.loads(read_record(folder / RESULTS))
        before = _deciding(dict(content["settings"]))
    except (FileNotFoundError, DataError, ValueError, KeyError, TypeError, RecursionError):
        return []
    now = _deciding(settings)
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]


def folder_of_its_own(wanted: Path, wanted_settings: Mapping[str, Mapping[str, object]]) -> Path:
    """``wanted``, or the first of ``wanted-2``, ``wanted-3``, ... without an evaluation of another question.

    Newer weights of the same model are the same question: their results replace the older ones.

    Args:
        wanted_settings: settings by the name of a folder below; the empty name is the folder itself.
    """
    folder = wanted
    number = 1
    while True:
        changed: set[str] = set()
        for name, settings in wanted_settings.items():
            changed.update(settings_replaced(folder / name, settings))
        if changed <= _OF_WEIGHTS:
            return folder
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")


def _deciding(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the settings that identify an evaluation, as JSON has them, without the address of a server."""
    deciding: dict[str, object] = json.loads(json.dumps(settings, default=str))
    engine = deciding.get("engine")
    if isinstance(engine, dict):
        deciding["engine"] = {key: value for key, value in engine.items() if key != "url"}
    return deciding


def weights_mark(path: str) -> str | None:
    """A fingerprint of name, size and time of change of the weights in a local folder; None for a hub name."""
    folder = Path(path)
    if not folder.is_dir():
        return None
    files = [(file.name, file.stat()) for file in sorted(folder.glob("*.safetensors"))]
    marks = json.dumps({name: [stat.st_size, stat.st_mtime_ns] for name, stat in files}, sort_keys=True)
    return hashlib.sha256(marks.encode()).hexdigest()[:16]


def refuse_other(folder: Path) -> None:
    """Keep an evaluation's files out of the folder of a run or a model, whose own would be overwritten.

    Raises:
        UsageError: it is one.
    """
    for name, what in (("recipe.yaml", "a run"), ("config.json", "a model")):
        if (folder / name).is_file():
            raise UsageError(
                f"--out {folder}: that is the folder of {what}; give another, such as {folder}/evaluation/a"
            )
