"""A reward model on solutions with labelled steps: is each judged rightly, and is the first wrong one found?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.evals.calibration import logit
from posttrain.evals.ranking import COMBINE, best_of_n, first_error, pair_wins, score_first_errors
from posttrain.reward_models.scoring import RewardModel
from posttrain.reward_models.views import View, add_area, add_calibration, add_share, meta_of
from posttrain.types import Example, Response


@dataclass(frozen=True, slots=True)
class Solution:
    """A given solution: the ``place``-th of its example, with P(good) of each step."""

    example: Example
    place: int
    response: Response
    probabilities: list[float]


def evaluate_steps(model: RewardModel, examples: Sequence[Example]) -> View:
    """Solutions with labelled steps: is each step judged rightly, and is the first wrong one found?

    A step is good if its class is not the lowest, and called good if P(good) > 1/2; one without a label counts nowhere.
    Over solutions: ``accuracy`` (the first step with P(good) < 1/2 is the first that is labelled bad, or neither is
    there) and what ``score_first_errors`` adds. Over steps: ``step_accuracy`` (as in training, with two classes),
    ``positive_share``, ``step_auc``, and calibration of P(good). Where solutions are judged as a whole, each way to
    combine the probabilities gives an ``auc_<way>``, and with several solutions to a problem ``top_one_<way>``.
    """
    view = View()
    labelled: list[tuple[Example, int, Response]] = []
    for example in examples:
        if not example.responses:
            view.dropped["no given responses"] += 1
        for place, response in enumerate(example.responses):
            if all(label is None for label in response.step_labels):
                view.dropped["no labelled steps"] += 1
            elif not all(response.steps):
                view.dropped["an empty step"] += 1
            else:
                labelled.append((example, place, response))
    probabilities = model.score_steps([e for e, _, _ in labelled], [r.steps for _, _, r in labelled])
    solutions = [Solution(*what, p) for what, p in zip(labelled, probabilities, strict=True) if p is not None]
    if len(solutions) < len(labelled):
        view.dropped[model.unscored] += len(labelled) - len(solutions)
    view.items = [_item(solution) for solution in solutions]
    view.results["n"] = float(len(solutions))
    if solutions:
        _summarize(view)
        view.results |= combine_ways(solutions)
    return view


def _item(solution: Solution) -> dict[str, Any]:
    response = solution.response
    predicted, actual = first_error(solution.probabilities), labelled_error(response)
    return {
        "id": f"{solution.example.id}#{solution.place}",
        "problem": solution.example.id,
        "meta": meta_of(solution.example),
        "right": float(predicted == actual),
        "predicted_error": predicted,
        "first_error": actual,
        "probabilities": solution.probabilities,
        "labels": list(response.step_labels),
        "label": response.score,
        "steps": list(response.steps),
    }


def labelled_error(response: Response) -> int | None:
    """The first step (from 0) whose label is the lowest class; None where there is none."""
    return next((index for index, label in enumerate(response.step_labels) if label == 0), None)


def _summarize(view: View) -> None:
    problems = [item["problem"] for item in view.items]
    add_share(view.results, "accuracy", [item["right"] for item in view.items], problems)
    errors = score_first_errors(*([item[key] for item in view.items] for key in ("predicted_error", "first_error")))
    del errors["first_error_accuracy"]  # which is the accuracy
    view.results |= errors
    judged = [
        (p, float(z > 0), item["problem"])
        for item in view.items
        for p, z in zip(item["probabilities"], item["labels"], strict=True)
        if z is not None
    ]
    probabilities, good, of_problem = ([row[i] for row in judged] for i in range(3))
    called = pair_wins(probabilities, [0.5] * len(judged))
    rightly = [c if z else 1.0 - c for c, z in zip(called, good, strict=True)]
    view.results["num_steps"] = float(len(judged))
    add_share(view.results, "step_accuracy", rightly, of_problem)
    view.results["positive_share"] = statistics.fmean(good)
    add_area(view.results, "step_auc", probabilities, good, of_problem)
    add_calibration(view, [logit(p) for p in probabilities], good)


def combine_ways(solutions: Sequence[Solution]) -> dict[str, float]:
    """By each way to combine the steps' probabilities: ``auc`` over solutions, ``top_one`` over problems.

    Empty where the solutions as a whole are not judged right (1) or wrong (0), or all are the same.
    """
    rights = [solution.response.score for solution in solutions]
    if set(rights) != {0.0, 1.0}:
        return {}
    problems: dict[str, list[int]] = {}
    for index, solution in enumerate(solutions):
        problems.setdefault(solution.example.id, []).append(index)
    groups = [places for places in problems.values() if len(places) > 1]
    measures: dict[str, float] = {"num_problems": float(len(groups))}
    names = [solution.example.id for solution in solutions]
    for way, combine in COMBINE.items():
        scores = [combine(solution.probabilities) for solution in solutions]
        add_area(measures, f"auc_{way}", scores, rights, names)
        chosen = [best_of_n([scores[i] for i in g], [rights[i] for i in g], len(g)) for g in groups]
        add_share(measures, f"top_one_{way}", chosen)
    add_share(measures, "random_one", [statistics.fmean(rights[i] for i in g) for g in groups])
    add_share(measures, "oracle", [max(rights[i] for i in g) for g in groups])
    return measures
