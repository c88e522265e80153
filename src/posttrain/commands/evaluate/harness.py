"""``posttrain evaluate MODEL --with lm-eval:TASKS``: the lm-evaluation-harness asks a model through our engine."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain import registry
from posttrain.commands.console import leaves_out_tables, open_console, print_table, say
from posttrain.commands.evaluate.command import SECTIONS
from posttrain.commands.options import words_of
from posttrain.engines.models import complete_template, open_model
from posttrain.errors import MissingExtra, UsageError
from posttrain.evals.plan import EVALUATIONS, slug
from posttrain.evals.tables import TextTable
from posttrain.runs.models import find_source
from posttrain.store.durable import replace_file

HARNESS = "lm-eval"
# Options that a task of the harness decides itself, or that mean nothing there, as they are unless given.
NOT_WITH_IT: dict[str, Any] = {
    "samples": 1,
    "k": None,
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "max_tokens": None,
    "task": None,
    "compare": False,
    "best_of": None,
    "against": None,
    "probes": False,
}


def run_harness(arguments: argparse.Namespace) -> int:
    """Measure one model on tasks of the harness; prints its metrics, and writes them with every answer.

    Raises:
        UsageError: another harness, no such task, more than one model, options that have no place, or a harness that is
            not installed.
    """
    harness, _, listed = arguments.asked_with.partition(":")
    tasks = [name.strip() for name in listed.split(",") if name.strip()]
    if harness != HARNESS or not tasks:
        raise UsageError(f"--with {arguments.asked_with}: give {HARNESS}:TASK, or {HARNESS}:TASK,TASK")
    if len(arguments.models) != 1:
        raise UsageError(f"--with {HARNESS}: it measures one model at a time, not {len(arguments.models)}")
    for name, unasked in NOT_WITH_IT.items():
        if getattr(arguments, name) != unasked:
            raise UsageError(f"--{name.replace('_', '-')}: it has no place with --with {HARNESS}; leave it out")
    folder = None if arguments.task_folder is None else Path(arguments.task_folder)
    if folder is not None and not folder.is_dir():
        raise UsageError(f"--task-folder {folder}: no such folder")
    if importlib.util.find_spec("lm_eval") is None:
        raise MissingExtra("lm_eval", HARNESS, f"--with {HARNESS}")
    source = find_source(arguments.models[0], arguments.runs_dir)
    words = words_of(arguments, SECTIONS)
    engine, templates = words["engine"][0], words["template"]
    if len(templates) > 1:
        raise UsageError(f"--template: with --with {HARNESS} one at most")
    template = complete_template(templates[0], source) if templates else None
    opened = open_model(source, template, engine=engine, dtype=arguments.dtype, device=arguments.device)
    if opened.model is None:
        raise UsageError(f"--engine {engine.name}: likelihoods are taken by the weights, which it has not; use native")
    results = _measure(opened, tasks, folder, arguments)
    out = Path(arguments.out or Path(EVALUATIONS) / slug(f"{source.label}-{HARNESS}-{'-'.join(tasks)}"))
    out.mkdir(parents=True, exist_ok=True)
    for name in ("results", "samples"):
        replace_file(out / f"{name}.json", json.dumps(results[name], default=str, indent=1).encode())
    if not leaves_out_tables(arguments.quiet):
        console = open_console()
        print_table(console, _table(results))
        say(console, f"results and every answer: {out}")
    return 0


def _measure(opened: Any, tasks: list[str], folder: Path | None, arguments: argparse.Namespace) -> Mapping[str, Any]:
    """What the harness says of these tasks; nothing is fetched."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ.setdefault(name, "1")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from posttrain.commands.evaluate.harness_model import HarnessModel

    place = "--task-folder" if folder is not None else f"--with {HARNESS}"
    manager = registry.call(
        place,
        lambda: TaskManager(include_path=None if folder is None else str(folder), include_defaults=folder is None),
    )
    for task in tasks:
        if task not in manager.all_tasks:
            where = (
                f"in {folder}" if folder is not None else "of the harness's own; --task-folder names a folder of yours"
            )
            raise UsageError(f"--with {HARNESS}: no task {task!r} {where}.{registry.suggest(task, manager.all_tasks)}")
    return dict(
        registry.call(
            f"--with {HARNESS}:{','.join(tasks)}",
            lambda: simple_evaluate(
                model=HarnessModel(opened, seed=arguments.seed, templated=arguments.template is not None),
                tasks=tasks,
                task_manager=manager,
                limit=arguments.n,
                log_samples=True,
                bootstrap_iters=0,
                random_seed=arguments.seed,
            ),
        )
    )


def _table(results: Mapping[str, Any]) -> TextTable:
    lines = []
    for task, measured in results["results"].items():
        items = len(results["samples"].get(task, ()))
        for metric, value in measured.items():
            if isinstance(value, float | int) and "_stderr" not in metric and "," in metric:
                lines.append([task, metric.replace(",none", ""), str(items), f"{value:.4g}"])
    return TextTable(HARNESS, ["task", "metric", "items", "value"], lines, num_labels=2)
