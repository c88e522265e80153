"""A reward model measured on a held-out task: pairs, judged answers, labelled steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.engines.models import ModelSource
from posttrain.errors import UsageError
from posttrain.evals.files import folder_of_its_own, refuse_other, weights_mark, write_records
from posttrain.evals.generation import held_out_indices, task_label
from posttrain.evals.plan import EvaluationRequest, place_of, slug, tell_apart
from posttrain.models.sources import resolve_model_name
from posttrain.recipes.sections import Word
from posttrain.reward_models.measures import (
    RewardEvaluation,
    break_down,
    evaluate_judged,
    evaluate_pairs,
    evaluate_steps,
)
from posttrain.reward_models.scoring import RewardModel, open_reward_model
from posttrain.store.environment import describe_environment
from posttrain.tasks.base import Task, build_task, choose_task


def evaluate_reward_model(model: RewardModel, task: Task, *, n: int) -> RewardEvaluation:
    """Score the given responses of the ``n`` examples that every evaluation of the task uses.

    The view follows from the data and the model: labelled steps for a model that judges steps; else pairs, where scores
    are ratings, or where every example has two responses and the model knows only preferences; else judged answers
    (scores of 0 and 1). Items that cannot be scored are left out and counted (``dropped``).

    Raises:
        UsageError: an empty task, one without responses, or one of which nothing can be scored.
    """
    started = time.perf_counter()
    if len(task.examples) == 0:
        raise UsageError(f"task {task.name!r}, split {task.split!r}: no example to evaluate on")
    examples = [task.examples[i] for i in held_out_indices(len(task.examples), n)]
    if not any(example.responses for example in examples):
        raise UsageError(
            f"task {task.name!r} has no given responses, so there is nothing that a reward model could score; name a "
            "task of pairs, judged answers or labelled steps (for stories: --task.responses pair, judged or steps)"
        )
    groups = [example.responses for example in examples if example.responses]
    responses = [response for group in groups for response in group]
    is_rated = any(response.score not in (0.0, 1.0) for response in responses)
    if model.kind == "process" and any(response.steps for response in responses):
        view = evaluate_steps(model, examples)
    elif is_rated or (model.kind == "preference" and all(len(group) == 2 for group in groups)):
        view = evaluate_pairs(model, examples)
    else:
        view = evaluate_judged(model, examples)
    if not view.results.get("n"):
        raise UsageError(f"task {task.name!r}: nothing is left to score; dropped: {dict(view.dropped)}")
    view.results |= {"dropped": float(view.dropped.total()), "seconds": time.perf_counter() - started}
    view.name, view.kinds = task_label(task), break_down(view.items)
    return view


@dataclass(frozen=True)
class Scored:
    """A reward model measured on a task, the settings that decide about the results, the folder for its files."""

    label: str
    evaluation: RewardEvaluation
    settings: dict[str, Any]
    folder: Path


def run_scoring(asked: EvaluationRequest) -> Iterator[Scored]:
    """Score the given answers of every task with every reward model, one model in memory at a time.

    Raises:
        UsageError: words or models that cannot be, before any model is loaded.
    """
    sources = tell_apart(asked.models)
    named: Sequence[Word | None] = asked.tasks or [None]
    words = [(source, choose_task(task, source.name, source.recipe)) for source in sources for task in named]
    tasks = {word.model_dump_json(): build_task(word, "--task") for _, word in words}
    cells = [(source, word, tasks[word.model_dump_json()]) for source, word in words]
    folders = _choose_folders(asked.out, [(source, task) for source, _, task in cells])
    for folder in ([asked.out] if asked.out else []) + folders:
        refuse_other(folder)
    model: RewardModel | None = None
    for place, ((source, word, task), folder) in enumerate(zip(cells, folders, strict=True)):
        if model is None or cells[place - 1][0] != source:
            model = open_reward_model(source, dtype=asked.dtype, device=asked.device)
        evaluation = evaluate_reward_model(model, task, n=asked.drawing.n)
        settings = {
            "model": source.name,
            "label": source.label,
            "step": model.step,
            "weights": weights_mark(resolve_model_name(source.path)),
            "kind": model.kind,
            "task": word.model_dump(),
            "template": model.template.name,
            "n": asked.drawing.n,
            "dropped": task.dropped,
        }
        own = folder if asked.out else folder_of_its_own(folder, {"": settings})
        yield Scored(model.label, evaluation, settings, own)


def _choose_folders(out: Path | None, cells: Sequence[tuple[ModelSource, Task]]) -> list[Path]:
    """A folder for each model and task: in its run, or below ``out``."""
    is_shared = out is not None and len({source.label for source, _ in cells}) > 1
    folders = []
    for source, task in cells:
        is_whole_run = source.run is not None and source.path == str(source.run)
        name = task_label(task) if is_whole_run and not is_shared else f"{source.label}-{task_label(task)}"
        folders.append(place_of(source, out / slug(name) if out and len(cells) > 1 else out, name))
    return folders


def write_scores(scored: Scored, page: str) -> None:
    """``items.jsonl``, ``summary.md`` (``page``) and, last, ``results.json``; those of an earlier one are replaced.

    Raises:
        StorageError: the disk is full or not writable.
    """
    one = scored.evaluation
    content = {
        "evaluation": one.name,
        "measured": one.view,
        "results": one.results,
        "settings": scored.settings,
        "kinds": one.kinds,
        "not_measured": one.dropped,
        "environment": describe_environment(),
    }
    write_records(scored.folder, one.items, page, content)
