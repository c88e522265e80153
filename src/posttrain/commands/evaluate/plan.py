"""What ``posttrain evaluate`` was asked for: models × tasks × templates as cells, and where their files go."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from posttrain import registry
from posttrain.commands.evaluate.files import refuse_other, weights_mark
from posttrain.commands.evaluate.options import SECTIONS
from posttrain.commands.generate import ModelSource, check_rewards, choose_task, complete_template, find_source
from posttrain.errors import UsageError
from posttrain.evals.generation import held_out_indices, task_label
from posttrain.evals.items import digest_of
from posttrain.evals.measures import default_ks
from posttrain.models.sources import resolve_model_name
from posttrain.recipes.document import apply_override
from posttrain.recipes.sections import Word, read_word
from posttrain.render.template import build_template
from posttrain.tasks.base import Task, build_task

EVALUATIONS = "evaluations"
MAX_NAME_CHARS = 100


@dataclass(frozen=True)
class Drawing:
    """How answers are drawn and counted: the same for every cell.

    ``max_tokens`` None: each model's own. ``batch`` None: all answers at once.
    """

    n: int
    samples: int = 1
    ks: tuple[int, ...] = ()
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    max_tokens: int | None = None
    seed: int = 0
    batch: int | None = None


@dataclass(frozen=True)
class Cell:
    """One evaluation: a model on a task under a template, with the folder for its files.

    ``data`` is the digest of the examples that are asked (``evals/items.py``).
    """

    source: ModelSource
    task: Task
    task_word: Word
    template: Word
    max_tokens: int
    folder: Path
    data: str

    @property
    def name(self) -> str:
        return task_label(self.task)


@dataclass(frozen=True)
class Plan:
    """All cells, by model and task and template in the order asked for; ``folder`` holds them."""

    cells: list[Cell]
    folder: Path
    drawing: Drawing
    engine: Word
    dtype: Literal["float32", "bfloat16"] | None
    device: Literal["auto", "cpu", "cuda"] | None
    best_of: str | None
    best_of_weights: str | None = None

    @property
    def is_table(self) -> bool:
        return len(self.cells) > 1

    def settings(self, cell: Cell) -> dict[str, Any]:
        """All that decides about a cell's answers, as plain data; what is not set is left out."""
        checkpoint = resolve_model_name(cell.source.path)
        found: dict[str, Any] = {
            "model": cell.source.name,
            "label": cell.source.label,
            "checkpoint": checkpoint,
            "weights": weights_mark(checkpoint),
            "task": cell.task_word.model_dump(),
            "data": cell.data,
            "dropped": cell.task.dropped,
            "template": cell.template.model_dump(),
            "max_tokens": cell.max_tokens,
        }
        drawn = {field.name: getattr(self.drawing, field.name) for field in fields(Drawing)}
        found |= {name: value for name, value in drawn.items() if name not in ("max_tokens", "batch")}
        found |= {
            "engine": self.engine.model_dump(),
            "dtype": self.dtype,
            "device": self.device,
            "best_of": self.best_of,
            "best_of_weights": self.best_of_weights,
        }
        return {name: value for name, value in found.items() if value is not None}


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Check what was asked for as far as that goes without loading a model.

    Raises:
        UsageError: words, options or combinations that cannot be.
    """
    words = words_of(arguments)
    drawing = drawing_of(arguments)
    sources = [find_source(name, arguments.runs_dir) for name in dict.fromkeys(arguments.models)]
    sources = _tell_apart(sources)
    for source in sources:
        source.refuse_scorer()
    if arguments.compare and arguments.max_tokens is None:  # both are measured alike
        drawing = replace(drawing, max_tokens=max(source.max_tokens for source in sources))
    none: list[Word | None] = [None]
    combinations = [
        (source, choose_task(task, source.name, source.recipe), complete_template(template, source) or source.template)
        for source in sources
        for task in (words["task"] or none)
        for template in (words["template"] or none)
    ]
    engine = words["engine"][0]
    registry.find("engine", engine.name, "--engine").options(engine.options, "--engine")
    for _, _, template in combinations:  # before a task is read, which may take long
        build_template(template, "--template")
    for source, _, template in combinations:
        check_rewards(source, template)
    tasks = _build_tasks([task for _, task, _ in combinations])
    folder, names = _choose_folders(arguments.out, combinations, tasks)
    refuse_other(folder)
    data = {key: _digest(task, drawing.n) for key, task in tasks.items()}
    cells = [
        Cell(
            source,
            tasks[_key(task)],
            task,
            template,
            drawing.max_tokens or source.max_tokens,
            folder / name,
            data[_key(task)],
        )
        for (source, task, template), name in zip(combinations, names, strict=True)
    ]
    best_of_weights = None
    if arguments.best_of is not None:
        best_of_weights = weights_mark(resolve_model_name(find_source(arguments.best_of, arguments.runs_dir).path))
    return Plan(cells, folder, drawing, engine, arguments.dtype, arguments.device, arguments.best_of, best_of_weights)


def drawing_of(arguments: argparse.Namespace) -> Drawing:
    """How answers are drawn, with the defaults that depend on one another.

    Raises:
        UsageError: an option that would do nothing, or k answers out of fewer.
    """
    samples = arguments.samples
    temperature = arguments.temperature if arguments.temperature is not None else float(samples > 1)
    if temperature == 0 and samples > 1:
        raise UsageError("--samples: greedy decoding gives the same answer every time; give --temperature above 0")
    for option, value in (("--top-p", arguments.top_p), ("--top-k", arguments.top_k)):
        if temperature == 0 and value is not None:
            raise UsageError(f"{option}: greedy decoding draws nothing; give --temperature above 0 with it")
    for k in arguments.k or ():
        if k > samples:
            raise UsageError(f"--k {k}: that needs at least {k} answers to each item; give --samples {k} or more")
    if arguments.best_of is not None and samples == 1:
        raise UsageError("--best-of: there is nothing to choose from; give --samples 2 or more")
    return Drawing(
        n=arguments.n,
        samples=samples,
        ks=tuple(sorted(set(arguments.k))) if arguments.k else default_ks(samples),
        temperature=temperature,
        top_k=arguments.top_k,
        top_p=1.0 if arguments.top_p is None else arguments.top_p,
        max_tokens=arguments.max_tokens,
        seed=arguments.seed,
        batch=arguments.batch,
    )


def words_of(arguments: argparse.Namespace) -> dict[str, list[Word]]:
    """The words ``task``, ``template`` and ``engine`` of the command line, each with its options.

    ``--task.key`` belongs to the only task, or to the model's own where none is named; with several it is
    ``--task.NAME.key``.

    Raises:
        UsageError: an option that belongs to none, or might belong to several.
    """
    named = {section: list(dict.fromkeys(_as_list(getattr(arguments, section)))) for section in SECTIONS}
    data = {section: {name: {"name": name} for name in names or [""]} for section, names in named.items()}
    for key, value in arguments.overrides:
        section, _, rest = key.partition(".")
        owner, own_key = _owner(section, rest, named[section])
        wrapped: dict[str, Any] = {section: data[section][owner]}
        apply_override(wrapped, f"{section}.{own_key}", value)
    words = {section: [read_word(word, f"--{section}") for word in own.values()] for section, own in data.items()}
    return {section: [word for word in own if word.name or word.options] for section, own in words.items()}


def _as_list(value: str | Sequence[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _owner(section: str, key: str, names: Sequence[str]) -> tuple[str, str]:
    """Which of the named words an option belongs to, and its key there."""
    for name in sorted(names, key=len, reverse=True):
        if key.startswith(f"{name}."):
            return name, key.removeprefix(f"{name}.")
    if len(names) <= 1:
        return (names[0] if names else ""), key
    options = ", ".join(f"--{section}.{name}.{key}" for name in names)
    raise UsageError(f"--{section}.{key}: several are named, so say whose option this is: {options}")


def _key(task: Word) -> str:
    return task.model_dump_json()


def _build_tasks(words: Sequence[Word]) -> dict[str, Task]:
    return {_key(word): build_task(word, "--task") for word in {_key(word): word for word in words}.values()}


def _digest(task: Task, n: int) -> str:
    return digest_of([task.examples[i] for i in held_out_indices(len(task.examples), n)])


def _tell_apart(sources: Sequence[ModelSource]) -> list[ModelSource]:
    """No two models are called alike: those that would be are called by what was typed."""
    labels = [source.label for source in sources]
    return [replace(s, label=s.name) if labels.count(s.label) > 1 else s for s in sources]


def _choose_folders(
    out: str | None, cells: Sequence[tuple[ModelSource, Word, Word]], tasks: Mapping[str, Task]
) -> tuple[Path, list[str]]:
    """The folder for everything, and below it the name of each cell's (none for a single cell).

    By default it lies in the run, where there is one run alone, and says what it is of.
    """
    facts = [(source.label, task_label(tasks[_key(task)]), template.name) for source, task, template in cells]
    models, labels, templates = (list(dict.fromkeys(column)) for column in zip(*facts, strict=True))
    source, _, template = cells[0]
    run = source.run if len(models) == 1 else None
    is_own = len(templates) == 1 and template == source.template
    place = "+".join(models) if run is None else Path(source.path).name if source.path != str(run) else ""
    parts = [part for part in (place, "+".join(labels), "" if is_own else "+".join(templates)) if part]
    folder = Path(out) if out else (run / "evaluation" if run else Path(EVALUATIONS)) / slug("-".join(parts))
    varied = [i for i, column in enumerate((models, labels, templates)) if len(column) > 1]
    return folder, _unique([slug("-".join(fact[i] for i in varied)) for fact in facts]) if len(cells) > 1 else [""]


def _unique(names: Sequence[str]) -> list[str]:
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        unique.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return unique


def slug(text: str) -> str:
    """A text as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9._+@-]+", "-", text)[:MAX_NAME_CHARS].strip("-.") or "evaluation"
