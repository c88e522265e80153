"""The files of an evaluation: written as it goes, continued where it was interrupted, read again to be compared.

A folder holds ``rollouts.db`` (every batch once it is graded), and when all is done ``items.jsonl``, ``summary.md``
and, last, ``results.json``. A folder without ``results.json`` is of an interrupted evaluation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, FiniteFloat, PositiveInt, ValidationError

from posttrain.errors import DataError, UsageError
from posttrain.evals.generation import Evaluation
from posttrain.evals.items import Item, item_of, read_items, sample_of, write_items
from posttrain.evals.measures import Kinds
from posttrain.store.durable import refuse_links, replace_file, storage_errors
from posttrain.store.environment import describe_environment
from posttrain.store.reading import read_record
from posttrain.store.rollouts import RolloutStore
from posttrain.types import Example, Rollout
from posttrain.untrusted import first_fault, harmless

ROLLOUTS, ITEMS, RESULTS, SUMMARY = "rollouts.db", "items.jsonl", "results.json", "summary.md"
_SETTINGS, _MARK = "settings", "settings_mark"
# Of which weights, and how they were named: not what was asked of them.
_OF_WEIGHTS = {"model", "checkpoint", "weights", "best_of_weights", "step", "a", "b"}

# ``summary.md`` of an evaluation, from it, its settings and its environment (``reports.evaluation.write_page``).
WritePage = Callable[[Evaluation, Mapping[str, Any], Mapping[str, Any]], str]


@dataclass(frozen=True)
class Finished:
    """An evaluation as its folder tells it."""

    folder: Path
    evaluation: str
    results: dict[str, float]
    settings: dict[str, Any]
    kinds: Kinds
    timing: dict[str, float]

    @property
    def label(self) -> str:
        """What its model is called."""
        return str(self.settings.get("label") or self.settings.get("model") or self.folder.name)

    @property
    def template(self) -> str:
        """The name of its template."""
        word = self.settings.get("template", "")
        return str(word["name"] if isinstance(word, Mapping) else word)

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
    """What ``results.json`` says that is read again; a stranger's may say anything."""

    evaluation: str
    results: dict[str, FiniteFloat | None]
    settings: _Settings
    kinds: Kinds = {}
    timing: dict[str, float] = {}


class EvaluationStore:
    """The recorder of one evaluation. ``known``: items that an interrupted one with the same settings has answered.

    Args:
        folder: made if missing; what an evaluation with other settings, or a finished one, has left is replaced.
        name: the evaluation's name.
        settings: all that decides about the answers.

    Raises:
        StorageError: the disk is full or not writable.
    """

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        self.folder, self.name, self.settings = folder, name, settings
        mark = resume_mark(settings)
        refuse_links(folder)
        with storage_errors("evaluation", folder):
            folder.mkdir(parents=True, exist_ok=True)
            interrupted = (folder / ROLLOUTS).is_file() and not (folder / RESULTS).exists()
            before = RolloutStore(folder / ROLLOUTS)
            self.continues = interrupted and before.about().get(_MARK) == mark
            if not self.continues:  # before the new mark is written: no old answer may ever stand under it
                before.trim(-1)
            for left in (RESULTS, SUMMARY, ITEMS):
                (folder / left).unlink(missing_ok=True)
        about = {_MARK: mark, _SETTINGS: json.dumps(settings, default=str)}
        self.store = RolloutStore(folder / ROLLOUTS, about=about)

    def __enter__(self) -> Self:
        self.store.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.store.__exit__(*error)

    def known(self, examples: Mapping[int, Example], format_part: str | None, samples: int) -> dict[int, Item]:
        """Items by index whose samples are all there already; ``examples`` by index."""
        recorded: dict[int, dict[int, Any]] = {}
        for row in self.store.evaluations(self.name):
            recorded.setdefault(row.prompt_index, {})[row.rollout_index] = row
        return {
            index: item_of(examples[index], index, [sample_of(rows[i], format_part) for i in range(samples)])
            for index, rows in recorded.items()
            if set(rows) == set(range(samples)) and index in examples and rows[0].example_id == examples[index].id
        }

    def record(self, rollouts: list[Rollout]) -> None:
        """Write a batch; it is on the disk when this returns."""
        self.store.record(rollouts, evaluation=self.name)
        self.store.flush()

    def finish(self, evaluation: Evaluation, write_page: WritePage) -> None:
        """Write what is computed from the rollouts; ``results.json`` comes last."""
        self.store.close()
        environment = describe_environment()
        content = {
            "evaluation": evaluation.name,
            "results": evaluation.results,
            "settings": dict(self.settings),
            "kinds": evaluation.kinds,
            "timing": evaluation.timing,
            "environment": environment,
        }
        write_records(
            self.folder, evaluation.items, lambda: write_page(evaluation, self.settings, environment), content
        )


def write_evaluation(folder: Path, evaluation: Evaluation, settings: Mapping[str, Any], write_page: WritePage) -> None:
    """All files of an evaluation that is in memory, rollouts included; those of an earlier one are replaced.

    Raises:
        StorageError: the disk is full or not writable.
    """
    recorder = EvaluationStore(folder, evaluation.name, settings)
    recorder.store.trim(-1)
    recorder.record(evaluation.rollouts)
    recorder.finish(evaluation, write_page)


def write_records(
    folder: Path,
    items: Sequence[Item | Mapping[str, Any]],
    write_page: Callable[[], str],
    content: Mapping[str, Any],
) -> None:
    """``items.jsonl``, ``summary.md`` and, last, ``results.json``; those of an earlier evaluation are replaced.

    Raises:
        StorageError: the disk is full or not writable.
    """
    with storage_errors("evaluation", folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULTS).unlink(missing_ok=True)
    write_items(items, folder / ITEMS)
    replace_file(folder / SUMMARY, harmless(write_page()).encode())
    replace_file(folder / RESULTS, json.dumps(content, indent=1).encode() + b"\n")


def read_finished(folder: str | Path) -> Finished:
    """What an evaluation has written to ``folder``.

    Raises:
        DataError: it is the folder of no evaluation, of an interrupted one, or of several.
    """
    path = Path(folder) / RESULTS
    content = _content(path)
    _refuse_other_kind(path, content)
    try:
        checked = _Written.model_validate(content)
    except ValidationError as error:
        raise DataError(path, f"not the results of an evaluation ({first_fault(error)})") from None
    results = {name: value for name, value in checked.results.items() if value is not None}
    return Finished(Path(folder), checked.evaluation, results, content["settings"], checked.kinds, checked.timing)


def _content(path: Path) -> Any:
    try:
        return json.loads(read_record(path))
    except FileNotFoundError:
        what = "no evaluation was finished here; `posttrain evaluate` writes this file last"
        raise DataError(path, what) from None
    except (ValueError, RecursionError) as error:
        raise DataError(path, f"cannot be read ({error}); evaluate again to replace it") from None


def _refuse_other_kind(path: Path, content: Any) -> None:
    """Raises ``DataError`` for results that are not of answers to items: a reward model's, a contest's."""
    if not isinstance(content, dict):
        return
    if isinstance(content.get("cells"), list):
        folders = ", ".join(str(path.parent / str(dict(cell).get("folder"))) for cell in content["cells"] if cell)
        raise DataError(path, f"these are several evaluations; name one of them: {folders}")
    if "measured" in content:
        what = f"these are the results of a reward model ({content['measured']}), which wrote no answers to compare"
        raise DataError(path, f"{what}; `posttrain evaluate RM_A RM_B` tests the difference of two reward models")
    if "a" in content and "b" in content:
        what = f"these are the results of --against: {content['a']} and {content['b']} are compared in them already"
        raise DataError(path, f"{what}; `posttrain evaluate --compare A B` tests the difference of two models")


def is_evaluation(folder: str | Path) -> bool:
    """Whether a folder is of an evaluation, finished or not, and not of a model or a run."""
    path = Path(folder)
    is_other = (path / "recipe.yaml").is_file() or (path / "config.json").is_file()
    return not is_other and any((path / name).is_file() for name in (RESULTS, ROLLOUTS))


def finished_before(folder: Path, settings: Mapping[str, Any]) -> Finished | None:
    """A cell of an interrupted table that was finished with the same settings, or None."""
    if not (folder / RESULTS).is_file():
        return None
    finished = read_finished(folder)
    return finished if resume_mark(finished.settings) == resume_mark(settings) else None


def settings_replaced(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """In which settings an evaluation, finished or interrupted, that was left in ``folder`` differs from this one.

    Empty where there is none, where it does not tell, and where it differs in none.
    """
    before: Any = None
    try:
        if (folder / RESULTS).is_file():
            written = _content(folder / RESULTS)
            before = written.get(_SETTINGS) if isinstance(written, dict) else None
        elif (folder / ROLLOUTS).is_file():
            before = json.loads(RolloutStore(folder / ROLLOUTS, read_only=True).about().get(_SETTINGS, "null"))
    except (DataError, ValueError):
        return []
    if not isinstance(before, dict):
        return []
    one, other = (_deciding(json.loads(json.dumps(options, default=str))) for options in (before, settings))
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def folder_of_its_own(wanted: Path, asked: Mapping[str, Mapping[str, Any]]) -> Path:
    """``wanted``, or the first of ``wanted-2``, ``wanted-3``, ... where no evaluation lies that was asked otherwise.

    The same model's newer weights are not asked otherwise: what they give replaces what the older ones gave.

    Args:
        asked: settings by the name of a folder below that for everything; the empty name is itself.
    """
    folder, number = wanted, 1
    while any(set(settings_replaced(folder / name, own)) - _OF_WEIGHTS for name, own in asked.items()):
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


def _deciding(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without the place of a server: the same model answers the same wherever it is served."""
    engine = settings.get("engine")
    if not isinstance(engine, Mapping):
        return dict(settings)
    return {**settings, "engine": {key: value for key, value in engine.items() if key != "url"}}


def resume_mark(settings: Mapping[str, Any]) -> str:
    """The fingerprint of all settings that must be the same for an evaluation to go on."""
    return fingerprint(_deciding(settings))


def fingerprint(settings: Mapping[str, Any]) -> str:
    """SHA-256 (16 hex digits) of settings: answers under another one are other answers."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


def weights_mark(path: str) -> str | None:
    """A fingerprint of name, size and time of change of the weights in a local folder; None for a hub name."""
    folder = Path(path)
    if not folder.is_dir():
        return None
    files = [(file.name, file.stat()) for file in sorted(folder.glob("*.safetensors"))]
    return fingerprint({name: [stat.st_size, stat.st_mtime_ns] for name, stat in files})


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


def discard(folder: Path) -> None:
    """Take away what makes a folder that of an evaluation, so that the next one there begins anew."""
    with storage_errors("evaluation", folder):
        for name in (RESULTS, ROLLOUTS, f"{ROLLOUTS}-wal", f"{ROLLOUTS}-shm"):
            (folder / name).unlink(missing_ok=True)
