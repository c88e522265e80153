"""A reward model on judged answers: does it know right from wrong, and what does choosing by it gain?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from posttrain.evals.calibration import logit, sigmoid
from posttrain.evals.ranking import area_under_curve, best_of_n, pair_wins, vote
from posttrain.evals.voting import vote_key
from posttrain.graders.answers import last_boxed
from posttrain.reward_models.scoring import RewardModel
from posttrain.reward_models.views import View, add_area, add_calibration, add_share, meta_of
from posttrain.types import Example, Response

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
