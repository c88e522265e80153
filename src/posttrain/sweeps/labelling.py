"""Labels of steps: of a model's answers, each step compared with the working that the task gives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from posttrain.data.base import Task
from posttrain.data.render import Template
from posttrain.errors import DataError, RunFailure
from posttrain.evaluation.generation import distinct_indices
from posttrain.evaluation.items import read_items
from posttrain.evaluation.reward_models.scoring import reasoning_of, split_steps
from posttrain.store.durable import replace_file


def label_steps(steps: Sequence[str], working: Sequence[str], is_correct: bool) -> list[int]:
    """1 for a good step, 0 for a bad one, of an answer that is right or not.

    A step is good as long as it and all before it are those of the given working, white space aside. The last one
    must also lead to the right answer. Steps of another way that is as good count as bad, so this is for tasks whose
    working leaves no choice.
    """
    labels: list[int] = []
    agrees = True
    for index, step in enumerate(steps):
        agrees = agrees and index < len(working) and step.split() == working[index].split()
        is_last = index == len(steps) - 1
        labels.append(int(agrees and (is_correct or not is_last)))
    return labels


def write_labelled(items: Path, task: Task, n: int, template: Template, target: Path) -> None:
    """Write a row of the layout ``steps`` of the task ``preferences`` for each answer that has steps.

    Args:
        items: ``items.jsonl`` of an evaluation of at most ``n`` problems of ``task``.
        template: the one under which the answers were written.

    Raises:
        DataError, RunFailure: answers to other problems, a problem without a given working, or no step at all.
        StorageError: the disk is full or not writable.
    """
    indices = distinct_indices(task.examples, n)
    rows: list[dict[str, object]] = []
    for item in read_items(items):
        example = task.examples[indices[item.index]]
        if example.id != item.id:
            raise DataError("labelled", f"the answers are to {item.id}, and the task has {example.id} in its place")
        if example.solution is None:
            raise RunFailure(f"labelled: {example.id} has no given working, so its steps cannot be labelled")
        working = split_steps(example.solution)
        for sample in item.samples:
            steps = split_steps(reasoning_of(template, sample.text))
            if steps:
                labels = label_steps(steps, working, sample.is_correct)
                rows.append({"prompt": item.question, "completions": steps, "labels": labels})
    if not rows:
        raise RunFailure(f"labelled: none of the answers in {items} has a step")
    replace_file(target, b"".join(json.dumps(row).encode() + b"\n" for row in rows))
