"""Sampled answers with a label on each step, by the given working: what a process reward model can learn from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from posttrain.errors import DataError, RunFailure
from posttrain.evals.generation import held_out_indices
from posttrain.evals.items import Item, read_items
from posttrain.render import Template
from posttrain.reward_models.scoring import reasoning_of, split_steps
from posttrain.store.durable import replace_file
from posttrain.tasks.base import Task


def label_steps(steps: Sequence[str], working: Sequence[str], is_right: bool) -> list[int]:
    """1 for a good step, 0 for a bad one, of an answer that is right or not.

    A step is good as long as it and all before it are those of the given working, white space aside. The last
    one must besides lead to the right answer: an answer that ends early or slips behind its working has a bad end.
    Steps of another way that is as good count as bad, so this is for tasks whose working leaves no choice.
    """
    labels: list[int] = []
    agrees = True
    for index, step in enumerate(steps):
        agrees = agrees and index < len(working) and step.split() == working[index].split()
        labels.append(int(agrees and (is_right or index < len(steps) - 1)))
    return labels


def labelled_rows(items: Sequence[Item], task: Task, n: int, template: Template) -> list[dict[str, object]]:
    """A row of the layout ``steps`` of the task ``preferences`` for each answer that has steps.

    Args:
        items: those of an evaluation of at most ``n`` problems of ``task``.
        template: the one under which the answers were written.

    Raises:
        RunFailure: a problem has no given working.
    """
    indices = held_out_indices(len(task.examples), n)
    rows: list[dict[str, object]] = []
    for item in items:
        example = task.examples[indices[item.index]]
        if example.id != item.id:
            raise DataError("labelled", f"the answers are to {item.id}, and the task has {example.id} in its place")
        if example.solution is None:
            raise RunFailure(f"labelled: {example.id} has no given working, so its steps cannot be labelled")
        working = split_steps(example.solution)
        for sample in item.samples:
            steps = split_steps(reasoning_of(template, sample.text))
            if steps:
                labels = label_steps(steps, working, sample.is_right)
                rows.append({"prompt": item.question, "completions": steps, "labels": labels})
    return rows


def write_labelled(items: Path, task: Task, n: int, template: Template, target: Path) -> None:
    """``labelled_rows`` of an ``items.jsonl`` as a file.

    Raises:
        DataError, RunFailure: as ``labelled_rows``, or no answer has a step.
        StorageError: the disk is full or not writable.
    """
    rows = labelled_rows(read_items(items), task, n, template)
    if not rows:
        raise RunFailure(f"labelled: none of the answers in {items} has a step")
    replace_file(target, b"".join(json.dumps(row).encode() + b"\n" for row in rows))
