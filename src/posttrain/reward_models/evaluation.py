"""What a reward model is worth on a held-out task: pairs, judged answers, labelled steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.errors import UsageError
from posttrain.evals.calibration import Bin
from posttrain.evals.generation import held_out_indices, task_label
from posttrain.evals.measures import Kinds
from posttrain.reward_models.pairs import evaluate_pairs
from posttrain.reward_models.scoring import RewardModel
from posttrain.reward_models.solutions import evaluate_judged
from posttrain.reward_models.steps import evaluate_steps
from posttrain.reward_models.views import break_down
from posttrain.tasks.base import Task
from posttrain.types import Example

# What can be measured, and how.
VIEWS = {"pairs": evaluate_pairs, "judged answers": evaluate_judged, "labelled steps": evaluate_steps}


@dataclass(frozen=True, slots=True)
class RewardEvaluation:
    """``results`` by name (``accuracy`` is the mean of ``right`` over ``items``, where these have it).

    ``view``: what was measured (a key of ``VIEWS``). ``dropped``: what could not be measured, by reason.
    ``kinds``: by a fact of the items and its values, n and accuracy.
    """

    name: str
    view: str
    results: dict[str, float]
    items: list[dict[str, Any]]
    bins: list[Bin] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    kinds: Kinds = field(default_factory=dict)


def evaluate_reward_model(model: RewardModel, task: Task, *, n: int) -> RewardEvaluation:
    """Score the given responses of the ``n`` examples that every evaluation of the task uses.

    What is measured follows from the data and the model (``choose_view``). What cannot be scored is left out and
    counted (``dropped``); it is not in ``n``, which counts pairs, answers, or solutions.

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
    name = choose_view(model, examples)
    view = VIEWS[name](model, examples)
    if not view.results.get("n"):
        raise UsageError(f"task {task.name!r}: nothing is left to score; dropped: {dict(view.dropped)}")
    seconds = time.perf_counter() - started
    results = view.results | {"dropped": float(sum(view.dropped.values())), "seconds": seconds}
    kinds = break_down(view.items)
    return RewardEvaluation(task_label(task), name, results, view.items, view.bins, dict(view.dropped), kinds)


def choose_view(model: RewardModel, examples: Sequence[Example]) -> str:
    """What to measure: a key of ``VIEWS``.

    Labelled steps for a model that judges steps; else pairs, where every example has two responses and the model
    knows only preferences, or where scores are ratings; else judged answers (scores of 0 and 1).
    """
    given = [example.responses for example in examples if example.responses]
    if model.kind == "process" and any(response.steps for responses in given for response in responses):
        return "labelled steps"
    if any(response.score not in (0.0, 1.0) for responses in given for response in responses):
        return "pairs"
    in_pairs = all(len(responses) == 2 for responses in given)
    return "pairs" if in_pairs and model.kind == "preference" else "judged answers"
