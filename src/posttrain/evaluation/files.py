"""Evaluation folders: ``items.jsonl``, ``summary.md`` and, written last, ``results.json``."""

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
# Settings naming or fingerprinting the evaluated weights.
_OF_WEIGHTS = {"model", "checkpoint", "weights", "best_of_weights", "step", "a", "b"}

# Renders ``summary.md`` from evaluation, settings and environment (``reports.evaluation.write_page``).
WritePage = Callable[[Evaluation, Mapping[str, object], Mapping[str, object]], str]


@dataclass(frozen=True)
class FinishedEvaluation:
    """A finished evaluation, loaded from disk."""

    folder: Path
    evaluation: str
    results: dict[str, float]
    settings: dict[str, Any]
    kinds: Kinds
    timing: dict[str, float]

    @property
    def label(self) -> str:
        """Model name for display."""
        return str(self.settings.get("label") or self.settings.get("model") or self.folder.name)

    @property
    def template(self) -> str:
        """Template name."""
        template = self.settings.get("template", "")
        if isinstance(template, Mapping):
            return str(template["name"])
        return str(template)

    def items(self) -> list[Item]:
        """Read the items (see ``read_items``), each with ``settings["samples"]`` answers or none."""
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
    """Schema of ``results.json``, limited to keys read back; an untrusted file may hold anything."""

    evaluation: str
    results: dict[str, FiniteFloat | None]
    settings: _Settings
    kinds: Kinds = {}
    timing: dict[str, float] = {}


def write_evaluation(
    folder: Path, settings: Mapping[str, object], evaluation: Evaluation, write_page: WritePage
) -> None:
    """Write items, page and results; ``settings`` must include everything affecting the answers."""
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
    """Write ``items.jsonl``, ``summary.md`` and, last, ``results.json``, replacing earlier files.

    ``environment``: reused from the page; described here if None.

    Raises:
        StorageError: writing failed, for example on a full disk.
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
    """Read the finished evaluation in ``folder``.

    Raises:
        DataError: not an evaluation folder, interrupted, or a different kind of evaluation.
    """
    path = Path(folder) / RESULTS
    try:
        content = json.loads(read_record(path))
    except FileNotFoundError:
        raise DataError(
            path, "missing, so no finished evaluation; `posttrain evaluate` writes this file last"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(path, f"cannot be read ({error}); evaluate again to replace it") from None
    keys = {}
    if isinstance(content, dict):
        keys = content
    if "measured" in keys:
        raise DataError(
            path,
            f"reward-model results ({keys['measured']}) contain no generated answers to compare; "
            "`posttrain evaluate RM_A RM_B` compares reward models",
        )
    if "a" in keys and "b" in keys:
        raise DataError(
            path,
            f"head-to-head results (--against) already compare {keys['a']} and {keys['b']}; "
            "`posttrain evaluate --compare A B` compares separate evaluations",
        )
    try:
        checked = _Written.model_validate(content)
    except ValidationError as error:
        raise DataError(path, f"invalid evaluation results ({first_fault(error)})") from None
    results = {name: value for name, value in checked.results.items() if value is not None}
    return FinishedEvaluation(
        Path(folder), checked.evaluation, results, content["settings"], checked.kinds, checked.timing
    )


def is_evaluation_folder(folder: str | Path) -> bool:
    """Check if a folder contains evaluation results rather than a model or run."""
    path = Path(folder)
    is_other = (path / "recipe.yaml").is_file() or (path / "config.json").is_file()
    return (path / RESULTS).is_file() and not is_other


def finished_before(folder: Path, settings: Mapping[str, object]) -> FinishedEvaluation | None:
    """Read the evaluation in a folder if its settings match; else None."""
    if not (folder / RESULTS).is_file():
        return None
    finished = read_finished(folder)
    if _deciding(finished.settings) == _deciding(settings):
        return finished
    return None


def settings_replaced(folder: Path, settings: Mapping[str, object]) -> list[str]:
    """List settings that differ from the evaluation stored in ``folder``; empty if unreadable."""
    try:
        content = json.loads(read_record(folder / RESULTS))
        before = _deciding(dict(content["settings"]))
    except (FileNotFoundError, DataError, ValueError, KeyError, TypeError, RecursionError):
        return []
    now = _deciding(settings)
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]


def folder_of_its_own(wanted: Path, wanted_settings: Mapping[str, Mapping[str, object]]) -> Path:
    """Choose ``wanted`` or the first of ``wanted-2``, ``wanted-3``, ... free of evaluations with different settings.

    Newer weights for a model count as the same settings: new results replace older ones.

    Args:
        wanted_settings: settings by subfolder name; the empty name means the folder itself.
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
    """Normalize identifying settings through JSON, dropping the server address."""
    deciding: dict[str, object] = json.loads(json.dumps(settings, default=str))
    engine = deciding.get("engine")
    if isinstance(engine, dict):
        deciding["engine"] = {key: value for key, value in engine.items() if key != "url"}
    return deciding


def weights_mark(path: str) -> str | None:
    """Fingerprint names, sizes and modification times of ``*.safetensors`` files; None for a hub name."""
    folder = Path(path)
    if not folder.is_dir():
        return None
    files = [(file.name, file.stat()) for file in sorted(folder.glob("*.safetensors"))]
    marks = json.dumps({name: [stat.st_size, stat.st_mtime_ns] for name, stat in files}, sort_keys=True)
    return hashlib.sha256(marks.encode()).hexdigest()[:16]


def refuse_other(folder: Path) -> None:
    """Refuse to write evaluation files into a run or model folder, where they would overwrite existing files.

    Raises:
        UsageError: ``folder`` is a run or model folder.
    """
    for name, what in (("recipe.yaml", "a run"), ("config.json", "a model")):
        if (folder / name).is_file():
            raise UsageError(
                f"--out {folder}: already contains {what}; give a different folder, such as {folder}/evaluation/a"
            )
