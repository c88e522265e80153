"""Label reasoning steps by comparison with the task's reference solution."""

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
    """Label the steps of an answer: 1 for good, 0 for bad.

    A step is good while all steps so far match the reference solution, ignoring whitespace. The last step must also
    lead to a correct answer. Valid alternative steps count as bad, so this suits only tasks with a unique solution
    path.
    """
    labels: list[int] = []
    agrees = True
    for index, step in enumerate(steps):
        agrees = agrees and index < len(working) and step.split() == working[index].split()
        is_last = index == len(steps) - 1
        labels.append(int(agrees and (is_correct or not is_last)))
    return labels


def write_labelled(items: Path, task: Task, n: int, template: Template, target: Path) -> None:
    """Write one row per answer with steps, in the ``steps`` layout of the ``preferences`` task.

    Args:
        items: ``items.jsonl`` from an evaluation of at most ``n`` problems in ``task``.
        template: template used to sample the answers.

    Raises:
        DataError, RunFailure: answers to different problems, a problem without a reference solution, or no steps at
            all.
        StorageError: the disk is full or not writable.
    """
    indices = distinct_indices(task.examples, n)
    rows: list[dict[str, object]] = []
    for item in read_items(items):
        example = task.examples[indices[item.index]]
        if example.id != item.id:
            raise DataError("labelled", f"answers belong to {item.id}, but the task has {example.id} at this position")
        if example.solution is None:
            raise RunFailure(f"labelled: {example.id} has no reference solution, so steps cannot be labelled")
        working = split_steps(example.solution)
        for sample in item.samples:
            steps = split_steps(reasoning_of(template, sample.text))
            if steps:
                labels = label_steps(steps, working, sample.is_correct)
                rows.append({"prompt": item.question, "completions": steps, "labels": labels})
    if not rows:
        raise RunFailure(f"labelled: no answer in {items} contains steps")
    replace_file(target, b"".join(json.dumps(row).encode() + b"\n" for row in rows))
