"""``posttrain evaluate RUN`` of a reward model: the given answers of held-out tasks are scored."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from posttrain.commands.console import Text, open_console
from posttrain.commands.evaluate.command import print_table
from posttrain.commands.evaluate.files import ITEMS, RESULTS, SUMMARY, refuse_other, weights_mark
from posttrain.commands.evaluate.options import DEFAULT_BATCH
from posttrain.commands.evaluate.plan import EVALUATIONS, slug, words_of
from posttrain.commands.evaluate.scorer import open_reward_model
from posttrain.commands.generate import ModelSource, choose_task, find_source
from posttrain.errors import UsageError
from posttrain.evals.generation import task_label
from posttrain.models.sources import resolve_model_name
from posttrain.recipes.sections import Word
from posttrain.reports.charts.calibration import draw_calibration
from posttrain.reports.reward_model import NOTES, difference_tables, score_tables, ways_table, write_score_page
from posttrain.reward_models.evaluation import RewardEvaluation, evaluate_reward_model
from posttrain.reward_models.scoring import RewardModel
from posttrain.runs.environment import describe_environment
from posttrain.store.durable import replace_file, storage_errors
from posttrain.tasks.base import Task, build_task
from posttrain.untrusted import harmless

PICTURE = "calibration.png"


def run_evaluate_scores(arguments: argparse.Namespace) -> int:
    """Score the answers of every task with every reward model; print tables, write results, records and pages."""
    _refuse_sampling(arguments)
    named: list[Word | None] = [*words_of(arguments)["task"]] or [None]
    sources = _find_apart(arguments)
    words = [(source, choose_task(task, source.name, source.recipe)) for source in sources for task in named]
    tasks = {word.model_dump_json(): build_task(word, "--task") for _, word in words}
    cells = [(source, word, tasks[word.model_dump_json()]) for source, word in words]
    folders = _choose_folders(arguments.out, [(source, task) for source, _, task in cells])
    for folder in ([Path(arguments.out)] if arguments.out else []) + folders:
        refuse_other(folder)
    rows: list[tuple[str, RewardEvaluation]] = []
    opened: tuple[ModelSource, RewardModel] | None = None
    for (source, word, task), folder in zip(cells, folders, strict=True):
        if opened is None or opened[0] != source:
            opened = source, open_reward_model(source, arguments.runs_dir, **_placement(arguments))
        model = opened[1]
        found = evaluate_reward_model(model, task, n=arguments.n)
        write_scores(folder, model.label, found, settings_of(source, model, word, task, arguments.n))
        rows.append((model.label, found))
    if not arguments.quiet:
        show_scores(open_console(), rows, folders)
    return 0


def _find_apart(arguments: argparse.Namespace) -> list[ModelSource]:
    """The models; two that would be called alike are called by what was typed."""
    sources = [find_source(name, arguments.runs_dir) for name in dict.fromkeys(arguments.models)]
    labels = [source.label for source in sources]
    return [replace(s, label=s.name) if labels.count(s.label) > 1 else s for s in sources]


def _placement(arguments: argparse.Namespace) -> dict[str, str | None]:
    return {"dtype": arguments.dtype, "device": arguments.device}


def _refuse_sampling(arguments: argparse.Namespace) -> None:
    """Refuse options that would do nothing."""
    given = {
        "--samples": arguments.samples != 1,
        "--k": bool(arguments.k),
        "--temperature": arguments.temperature is not None,
        "--top-p": arguments.top_p is not None,
        "--top-k": arguments.top_k is not None,
        "--max-tokens": arguments.max_tokens is not None,
        "--best-of": arguments.best_of is not None,
        "--engine": arguments.engine != "native",
        "--seed": arguments.seed != 0,
        "--batch": arguments.batch != DEFAULT_BATCH,
    }
    for option, is_given in given.items():
        if is_given:
            raise UsageError(f"{option}: a reward model writes no answers; it scores those that the task gives")
    if arguments.template or any(key.startswith("template") for key, _ in arguments.overrides):
        raise UsageError("--template: a reward model is asked under the template that it was trained with")


def settings_of(source: ModelSource, model: RewardModel, word: Word, task: Task, n: int) -> dict[str, Any]:
    """All that decides about the results."""
    return {
        "model": source.name,
        "label": source.label,
        "step": model.step,
        "weights": weights_mark(resolve_model_name(source.path)),
        "kind": model.kind,
        "combine": model.combine if model.kind == "process" else None,
        "task": word.model_dump(),
        "template": model.template.name,
        "n": n,
        "dropped": task.dropped,
    }


def write_scores(folder: Path, label: str, found: RewardEvaluation, settings: Mapping[str, Any]) -> None:
    """``items.jsonl``, ``calibration.png`` (where a score states a probability), ``summary.md``, ``results.json``.

    What an earlier evaluation has left there is replaced; ``results.json`` comes last.

    Raises:
        StorageError: the disk is full or not writable.
    """
    with storage_errors("evaluation", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in (RESULTS, PICTURE):
            (folder / name).unlink(missing_ok=True)
    replace_file(folder / ITEMS, b"".join(json.dumps(item).encode() + b"\n" for item in found.items))
    picture = None
    if found.bins:
        what = "is the chosen answer" if found.view == "pairs" else "turns out right"
        picture = draw_calibration(found.bins, f"{label} on {found.name}", folder / PICTURE, what=what).name
    replace_file(folder / SUMMARY, harmless(write_score_page(label, found, settings, picture)).encode())
    content = {
        "evaluation": found.name,
        "measured": found.view,
        "results": found.results,
        "settings": dict(settings),
        "kinds": found.kinds,
        "calibration": [asdict(b) for b in found.bins],
        "not_measured": found.dropped,
        "environment": describe_environment(),
    }
    replace_file(folder / RESULTS, json.dumps(content, indent=1).encode() + b"\n")


def show_scores(console: Console, rows: Sequence[tuple[str, RewardEvaluation]], folders: Sequence[Path]) -> None:
    """A table for each task, what must be known beside it, and where the files are."""
    for table in [*score_tables(rows), *difference_tables(rows)]:
        print_table(console, table)
    for label, found in rows:
        ways = ways_table(found.results)
        if ways is not None:
            print_table(console, ways)
        if found.dropped:
            reasons = ", ".join(f"{count} {reason}" for reason, count in found.dropped.items())
            console.print(Text(f"{found.name} · {label}: not measured: {reasons}", style="dim"), soft_wrap=True)
    for view in dict.fromkeys(found.view for _, found in rows):
        console.print(Text(NOTES[view], style="dim"))
    for folder in folders:
        console.print(Text(f"summary, results and every score: {folder}"), soft_wrap=True)


def _choose_folders(out: str | None, cells: Sequence[tuple[ModelSource, Task]]) -> list[Path]:
    """A folder for each model and task: in its run, or below ``out``."""
    several_models = len({source.label for source, _ in cells}) > 1
    several = len(cells) > 1
    folders = []
    for source, task in cells:
        label = source.label if source.run is None or source.path != str(source.run) or (out and several_models) else ""
        name = slug("-".join(part for part in (label, task_label(task)) if part))
        if out:
            folders.append(Path(out) / name if several else Path(out))
        else:
            folders.append((source.run / "evaluation" if source.run else Path(EVALUATIONS)) / name)
    return folders
