"""What a reward model is measured by: pairs, answers that are judged, solutions with labelled steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.evals.items import meta_of
from posttrain.evals.ranking import (
    COMBINE,
    area_under_curve,
    best_of_n,
    first_error,
    pair_wins,
    score_first_errors,
    vote,
    vote_key,
)
from posttrain.evals.statistics import logit, paired_bootstrap, sigmoid
from posttrain.graders.answers import last_boxed
from posttrain.render.rows import rows_of
from posttrain.reward_models.biases import add_biases
from posttrain.reward_models.scoring import RewardModel
from posttrain.reward_models.views import View, add_area, add_calibration, add_share
from posttrain.types import Example, Response

# A reward model on pairs: is the chosen answer scored higher, by how much, and more often than by length alone?


def evaluate_pairs(model: RewardModel, examples: Sequence[Example]) -> View:
    """Each example's best response against its worst, as training pairs them; what training would drop is dropped.

    ``accuracy``: the chosen answer has the higher score, ties one half. ``margin``: mean difference of the scores.
    ``longer_accuracy``: what always taking the longer text (in characters) would get. ``gain_over_length``: accuracy
    less that of the better of "the longer" and "the shorter", with the interval of the paired difference
    (bootstrap). Length and style: ``biases.add_biases``. Where
    the difference of two scores is a log-odds (not of process models): calibration of ``σ(r_w − r_l)``.
    """
    view = View()
    pairs: list[tuple[Example, Response, Response]] = []
    for example in examples:
        (unit,) = rows_of(model.tokenizer, model.template, example, "pair")
        if isinstance(unit, str):
            view.dropped[unit] += 1
        else:
            best, worst = (choose(example.responses, key=lambda r: r.score) for choose in (max, min))
            pairs.append((example, best, worst))
    asked = [example for example, _, _ in pairs for _ in range(2)]
    scores = model.score_responses(asked, [response for _, *both in pairs for response in both])
    for (example, chosen, rejected), won, lost in zip(pairs, scores[0::2], scores[1::2], strict=True):
        if won is None or lost is None:
            view.dropped[model.unscored] += 1
            continue
        lengths = len(chosen.text), len(rejected.text)
        view.items.append(
            {
                "id": example.id,
                "meta": meta_of(example),
                "right": pair_wins([won], [lost])[0],
                "margin": won - lost,
                "chosen_score": won,
                "rejected_score": lost,
                "chosen_characters": lengths[0],
                "rejected_characters": lengths[1],
                "chosen": chosen.text,
                "rejected": rejected.text,
            }
        )
    _summarize_pairs(model, view)
    return view


def _summarize_pairs(model: RewardModel, view: View) -> None:
    wins = [float(item["right"]) for item in view.items]
    view.results["n"] = float(len(wins))
    if not wins:
        return
    add_share(view.results, "accuracy", wins)
    for name in ("margin", "chosen_score", "rejected_score"):
        view.results[name] = statistics.fmean(item[name] for item in view.items)
    longer = pair_wins(*([item[f"{side}_characters"] for item in view.items] for side in ("chosen", "rejected")))
    add_share(view.results, "longer_accuracy", longer)
    baseline = longer if sum(longer) >= len(longer) / 2 else [1.0 - win for win in longer]
    gain = paired_bootstrap(baseline, wins)
    view.results |= {
        "gain_over_length": gain.difference,
        "gain_over_length_low": gain.low,
        "gain_over_length_high": gain.high,
    }
    add_biases(view.results, view.items)
    if model.kind != "process":
        add_calibration(view, [item["margin"] for item in view.items], [1.0] * len(wins), folded=True)


# A reward model on judged answers: does it know right from wrong, and what does choosing by it gain?

Group = list[tuple[Response, float]]


def evaluate_judged(model: RewardModel, examples: Sequence[Example]) -> View:
    """Answers that are right (1) or wrong (0), one or several to a problem.

    Over answers: ``auc``, and where a score states a probability ``accuracy`` (it is on the right side of one half,
    a tie counts one half) and its calibration. Over problems: see ``choose_among``.
    """
    view = View()
    answers: list[tuple[Example, Response]] = []
    for example in examples:
        if not example.responses:
            view.dropped["no given responses"] += 1
        answers += [(example, response) for response in example.responses]
    scores = model.score_responses([e for e, _ in answers], [r for _, r in answers])
    places: dict[str, int] = {}
    for (example, response), score in zip(answers, scores, strict=True):
        place = places[example.id] = places.get(example.id, -1) + 1
        probability = None if score is None else model.probability(score)
        judged = None if probability is None else pair_wins([probability], [0.5])[0]
        if judged is not None and response.score == 0.0:
            judged = 1.0 - judged
        if score is None:
            view.dropped[model.unscored] += 1
        view.items.append(
            {
                "id": f"{example.id}#{place}",
                "problem": example.id,
                "meta": meta_of(example),
                "right": judged,
                "score": score,
            }
            | {"probability": probability, "label": response.score, "answer": response.answer, "text": response.text}
        )
    _summarize_answers(model, view)
    groups = group_by_problem(examples, [r for _, r in answers], scores)
    view.results |= choose_among(groups, model.kind)
    return view


def _summarize_answers(model: RewardModel, view: View) -> None:
    scored = [item for item in view.items if item["score"] is not None]
    view.results["n"] = float(len(scored))
    if not scored:
        return
    problems = [item["problem"] for item in scored]
    view.results["right_share"] = statistics.fmean(item["label"] for item in scored)
    add_area(view.results, "auc", [item["score"] for item in scored], [item["label"] for item in scored], problems)
    if model.kind == "preference":
        return
    add_share(view.results, "accuracy", [item["right"] for item in scored], problems)
    add_calibration(view, [logit(item["probability"]) for item in scored], [item["label"] for item in scored])


def group_by_problem(
    examples: Sequence[Example], responses: Sequence[Response], scores: Sequence[float | None]
) -> list[Group]:
    """The answers of each problem that has at least two, with their scores; −inf for one without a score."""
    taken = iter(zip(responses, scores, strict=True))
    groups: list[Group] = []
    for example in examples:
        scored = [next(taken) for _ in example.responses]
        if len(scored) > 1:
            groups.append([(response, -math.inf if score is None else score) for response, score in scored])
    return groups


def choose_among(groups: Sequence[Group], kind: str) -> dict[str, float]:
    """What choosing by score gains, over problems with at least two answers (``num_problems``).

    ``top_one``: the top-scored answer is right, ties shared. Beside it: ``random_one`` (the mean), ``oracle`` (any is
    right), ``best_of@2``, ``best_of@4``, ... (of so many of the answers, exactly), and where every problem has final
    answers that can be told ``majority`` and ``weighted_majority`` (weights: the probability of being right; of
    preferences, the softmax of the scores). ``problem_auc``: the mean, over problems with right and wrong answers,
    of the share of their right-wrong pairs that are in the right order.
    """
    if not groups:
        return {}
    measures: dict[str, float] = {"num_problems": float(len(groups))}
    scores = [[score for _, score in group] for group in groups]
    rights = [[response.score for response, _ in group] for group in groups]
    add_share(measures, "top_one", [best_of_n(s, r, len(s)) for s, r in zip(scores, rights, strict=True)])
    add_share(measures, "random_one", [statistics.fmean(r) for r in rights])
    add_share(measures, "oracle", [max(r) for r in rights])
    k, fewest = 2, min(len(s) for s in scores)
    while k < fewest:
        add_share(measures, f"best_of@{k}", [best_of_n(s, r, k) for s, r in zip(scores, rights, strict=True)])
        k *= 2
    mixed = [
        area_under_curve([s for s, r in pairs if r == 1.0], [s for s, r in pairs if r == 0.0])
        for pairs in (list(zip(s, r, strict=True)) for s, r in zip(scores, rights, strict=True))
        if {r for _, r in pairs} == {0.0, 1.0}
    ]
    add_share(measures, "problem_auc", mixed)
    keys = [[_vote_of(response) for response, _ in group] for group in groups]
    if all(any(key is not None for key in own) for own in keys):
        add_share(measures, "majority", [vote(a, r) for a, r in zip(keys, rights, strict=True)])
        weights = [vote_weights(s, kind) for s in scores]
        weighted = [vote(a, r, w) for a, r, w in zip(keys, rights, weights, strict=True)]
        add_share(measures, "weighted_majority", weighted)
    return measures


def _vote_of(response: Response) -> str | None:
    """What a given answer votes for: its final answer, else the last box in its text; None where there is neither."""
    final = response.answer if response.answer is not None else last_boxed(response.text)
    return None if final is None else vote_key(final)


def vote_weights(scores: Sequence[float], kind: str) -> list[float]:
    """Of each answer to a problem, the weight of its vote: at least 0, and 0 for one without a score."""
    if kind == "process":
        return [max(0.0, score) for score in scores]
    if kind == "outcome":
        return [0.0 if score == -math.inf else sigmoid(score) for score in scores]
    highest = max(scores)
    return [0.0 if score == -math.inf else math.exp(score - highest) for score in scores]


# A reward model on solutions with labelled steps: is each judged rightly, and is the first wrong one found?


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
        _summarize_steps(view)
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


def _summarize_steps(view: View) -> None:
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
