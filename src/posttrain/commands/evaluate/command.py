"""``posttrain evaluate``: models measured on held-out tasks under prompt templates."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from posttrain.commands.console import Text, open_console
from posttrain.commands.evaluate.files import (
    RESULTS,
    SUMMARY,
    EvaluationStore,
    Finished,
    discard,
    finished_before,
    read_finished,
    settings_replaced,
    told_results,
)
from posttrain.commands.evaluate.plan import Cell, Drawing, Plan, make_plan
from posttrain.commands.evaluate.progress import EvaluationProgress, choose_evaluation_progress
from posttrain.commands.evaluate.scorer import open_reward_model
from posttrain.commands.generate import ModelSource, Sampler, find_source, open_sampler, writes_answers
from posttrain.errors import UsageError
from posttrain.evals.generation import Evaluation, Scorer, evaluate, held_out_indices, task_label
from posttrain.evals.items import Item
from posttrain.evals.tables import Row, TextTable, notes_on, results_table
from posttrain.render import encode_prompt
from posttrain.reports.evaluation import by_evaluation, write_table_page
from posttrain.store.durable import replace_file
from posttrain.tasks.base import Task
from posttrain.untrusted import harmless

MAX_COLUMNS = 400
MAX_NAMED = 4


def run_evaluate(arguments: argparse.Namespace) -> int:
    """Measure every cell, print a table, write results, records and a summary; or test a difference."""
    if arguments.judge is not None and arguments.against is None:
        raise UsageError("--judge: it judges between two models; name the other one with --against MODEL")
    if arguments.against is not None:
        from posttrain.commands.evaluate.against import run_against

        return int(run_against(arguments))
    scorers = [name for name in arguments.models if is_scorer(find_source(name, arguments.runs_dir))]
    if scorers:  # their table tests the differences, whether that is asked for or not
        return _run_scorers(arguments, scorers)
    if arguments.compare:
        from posttrain.commands.evaluate.compare import run_comparison

        return run_comparison(arguments)
    plan = make_plan(arguments)
    finished = run_plan(plan, arguments.runs_dir, arguments.quiet)
    if not arguments.quiet:
        show(open_console(), plan, finished)
    return 0


def _run_scorers(arguments: argparse.Namespace, scorers: Sequence[str]) -> int:
    """Reward models are measured by the answers that a task gives."""
    if len(scorers) < len(arguments.models):
        others = ", ".join(name for name in arguments.models if name not in scorers)
        raise UsageError(f"{', '.join(scorers)}: a reward model is not measured in one table with models ({others})")
    from posttrain.commands.evaluate.scores import run_evaluate_scores

    return int(run_evaluate_scores(arguments))


def is_scorer(source: ModelSource) -> bool:
    """Whether a name stands for the run of a reward model."""
    return source.recipe is not None and not writes_answers(source.recipe)


def tell_names(names: Sequence[str]) -> str:
    """Settings by name, the first few of many."""
    told = ["data (other questions or gold answers)" if name == "data" else name for name in names[:MAX_NAMED]]
    return ", ".join(told) + (f" and {len(names) - MAX_NAMED} other settings" if len(names) > MAX_NAMED else "")


def run_plan(plan: Plan, runs_dir: str | Path, quiet: bool) -> list[Finished]:
    """Every cell in the plan's order, one model in memory at a time.

    What an interrupted table has finished with the same settings is kept; a table that is complete is made anew.
    """
    top = plan.folder / RESULTS
    if plan.is_table and top.is_file():
        for folder in (plan.folder, *(cell.folder for cell in plan.cells)):
            discard(folder)
    finished: dict[Path, Finished] = {}
    if plan.is_table:
        found = {cell.folder: finished_before(cell.folder, plan.settings(cell)) for cell in plan.cells}
        finished = {folder: before for folder, before in found.items() if before is not None}
    left = [cell for cell in plan.cells if cell.folder not in finished]
    with choose_evaluation_progress(open_console(), quiet) as progress:
        scorer = open_reward_model(plan.best_of, runs_dir) if plan.best_of is not None and left else None
        for name in dict.fromkeys(cell.source.name for cell in left):
            cells = [cell for cell in left if cell.source.name == name]
            finished |= _run_cells(plan, cells, runs_dir, scorer, progress)
    ordered = [finished[cell.folder] for cell in plan.cells]
    if plan.is_table:
        write_table(plan, ordered)
    return ordered


def _run_cells(
    plan: Plan, cells: Sequence[Cell], runs_dir: str | Path, scorer: Scorer | None, progress: EvaluationProgress
) -> dict[Path, Finished]:
    """The cells of one model, after a look whether each of their prompts can be written for it."""
    sampler = open_sampler(cells[0].source, runs_dir, engine=plan.engine, dtype=plan.dtype, device=plan.device)
    samplers = [sampler.with_template(cell.template) for cell in cells]
    for cell, own in zip(cells, samplers, strict=True):
        for example in cell.task.examples[:1]:
            encode_prompt(own.tokenizer, own.grader.template, example.messages)
    finished = {}
    for cell, own in zip(cells, samplers, strict=True):
        settings = plan.settings(cell)
        if names := settings_replaced(cell.folder, settings):
            progress.tell(f"{cell.folder}: an earlier evaluation there differs in {tell_names(names)}; it is replaced")
        with EvaluationStore(cell.folder, cell.name, settings) as recorder:
            drawing = replace(plan.drawing, max_tokens=cell.max_tokens)
            evaluation = measure(own, cell.task, drawing, recorder=recorder, scorer=scorer, progress=progress)
            recorder.finish(evaluation, settings)
        finished[cell.folder] = read_finished(cell.folder)
    return finished


def measure(
    sampler: Sampler,
    task: Task,
    drawing: Drawing,
    *,
    recorder: EvaluationStore | None = None,
    scorer: Scorer | None = None,
    progress: EvaluationProgress | None = None,
) -> Evaluation:
    """Evaluate a sampler on a task (``evals/generation.py``); with a recorder, on what it does not know yet."""
    known: dict[int, Item] = {}
    if recorder is not None and recorder.continues:
        examples = {i: task.examples[j] for i, j in enumerate(held_out_indices(len(task.examples), drawing.n))}
        known = recorder.known(examples, sampler.grader.format_part, drawing.samples)
    if progress is not None:
        progress.begin(f"{task_label(task)} · {sampler.label} · {sampler.grader.template.name}", len(known))
    return evaluate(
        sampler.engine,
        sampler.tokenizer,
        sampler.grader,
        task,
        n=drawing.n,
        sampling=sampler.sampling(drawing.max_tokens, drawing.temperature, drawing.top_k, drawing.top_p),
        context_tokens=sampler.context_tokens,
        seed=drawing.seed,
        samples=drawing.samples,
        ks=drawing.ks,
        batch=drawing.batch,
        known=known,
        scorer=scorer,
        record=recorder.record if recorder is not None else None,
        observe=progress.observe if progress is not None else None,
    )


def rows_of(finished: Sequence[Finished]) -> list[Row]:
    """The evaluations as rows of a table; the templates are told where they are not all one."""
    return [Row(found.label, found.template, found.evaluation, found.results) for found in finished]


def write_table(plan: Plan, finished: Sequence[Finished]) -> None:
    """``summary.md`` and ``results.json`` over all cells, in the folder above theirs.

    Raises:
        StorageError: the disk is full or not writable.
    """
    rows = rows_of(finished)
    folders = {
        " · ".join((row.evaluation, row.model, row.template or "")): cell
        for row, cell in zip(rows, plan.cells, strict=True)
    }
    pages = {name: str((cell.folder / SUMMARY).relative_to(plan.folder)) for name, cell in folders.items()}
    replace_file(
        plan.folder / SUMMARY, harmless(write_table_page(rows, notes_on(rows, _dropped(finished)), pages)).encode()
    )
    cells = [
        {
            "folder": str(cell.folder.relative_to(plan.folder)),
            "model": found.label,
            "evaluation": found.evaluation,
            "template": found.template,
            "results": told_results(found.results),
        }
        for cell, found in zip(plan.cells, finished, strict=True)
    ]
    replace_file(plan.folder / RESULTS, json.dumps({"cells": cells}, indent=1).encode() + b"\n")


def _dropped(finished: Sequence[Finished]) -> dict[str, dict[str, int]]:
    return {found.evaluation: found.settings.get("dropped", {}) for found in finished}


def show(console: Console, plan: Plan, finished: Sequence[Finished]) -> None:
    """The tables, what must be known beside them, and where the files are."""
    rows = rows_of(finished)
    for own in by_evaluation(rows):
        print_table(console, results_table(own))
    for note in notes_on(rows, _dropped(finished)):
        console.print(Text(note, style="dim"), soft_wrap=True)
    console.print(Text(f"summary, results and every answer: {plan.folder}"), soft_wrap=True)


def print_results(console: Console, rows: Sequence[tuple[str, Evaluation]]) -> None:
    """A table with one row per model: accuracy with its 95 % interval, and what surrounds it."""
    print_table(console, results_table([Row(label, None, e.name, e.results) for label, e in rows]))


def print_table(console: Console, content: TextTable) -> None:
    """A table of text; nothing in it is cut off, however narrow the terminal."""
    table = Table(title=Text(content.title), title_justify="left")
    for index, label in enumerate(content.header):
        table.add_column(Text(label), justify="left" if index < content.num_labels else "right", no_wrap=True)
    for line in content.lines:
        table.add_row(*map(Text, line))
    table.width = Measurement.get(console, console.options.update(width=MAX_COLUMNS), table).maximum
    console.print(table, crop=False, soft_wrap=True)
