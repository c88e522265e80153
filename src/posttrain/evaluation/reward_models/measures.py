"""Measure reward models on held-out tasks: pairs, judged answers, solutions with labelled steps."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.data.base import Task, build_task, choose_task
from posttrain.data.render.rows import rows_of
from posttrain.data.rendered import take_rendered
from posttrain.errors import UsageError
from posttrain.evaluation.files import folder_of_its_own, refuse_other, weights_mark, write_records
from posttrain.evaluation.generation import held_out, task_label
from posttrain.evaluation.items import Kinds, by_kind, meta_of
from posttrain.evaluation.plan import EvaluationRequest, count_trained, evaluation_folder, slug, tell_apart
from posttrain.evaluation.reward_models.scoring import RewardModel, open_reward_model
from posttrain.evaluation.statistics import (
    area_under_curve,
    best_of_n,
    first_error,
    pair_wins,
    score_first_errors,
    wilson_interval,
)
from posttrain.models.sources import resolve_model_name
from posttrain.recipes.sections import Component
from posttrain.sampling.models import ModelSource
from posttrain.types import Example, Response

# Accuracy metric by view.
ACCURACIES = {"pairs": "pair_accuracy", "judged answers": "answer_accuracy", "labelled steps": "solution_accuracy"}


@dataclass(slots=True)
class RewardEvaluation:
    """Reward-model evaluation results for one ``view`` of a task's data.

    ``results`` by metric, one record per item, counts of ``dropped`` items by reason, and ``kinds``: n and accuracy by
    metadata key and value.
    """

    view: str
    name: str = ""
    results: dict[str, float] = field(default_factory=dict)
    items: list[dict[str, Any]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    kinds: Kinds = field(default_factory=dict)


def add_share(
    results: dict[str, float], name: str, values: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> None:
    """Add the average of per-item ``values`` in [0, 1], with interval bounds ``<name>_low`` and ``<name>_high``.

    ``clusters``: one per value; values within a cluster are dependent, lowering the effective sample size. Empty
    ``values`` add nothing.
    """
    if values:
        share = statistics.fmean(values)
        results[name] = share
        if clusters is None:
            effective = float(len(values))
        else:
            effective = effective_number(values, clusters)
        low, high = wilson_interval(share * effective, effective)
        results[f"{name}_low"] = low
        results[f"{name}_high"] = high


def effective_number(values: Sequence[float], clusters: Sequence[Hashable]) -> float:
    """Compute the effective sample size: independent 0/1 values giving the same standard error.

    ``p (1 − p) / SE²`` with the clustered variance ``SE² = Σ_g (Σ_{i∈g} (x_i − p))² / n²``, clamped to 1..n; the
    number of clusters if all values are equal. Korn and Graubard (1998).
    """
    n = len(values)
    share = statistics.fmean(values)
    shifts: dict[Hashable, float] = {}
    for value, cluster in zip(values, clusters, strict=True):
        shifts[cluster] = shifts.get(cluster, 0.0) + value - share
    spread = math.fsum(shift * shift for shift in shifts.values())
    if spread == 0.0:  # equal values: within-cluster dependence is unknown, so count clusters
        return float(len(shifts))
    return max(1.0, min(float(n), share * (1.0 - share) * n * n / spread))


def _area(name: str, scores: Sequence[float], labels: Sequence[float]) -> dict[str, float]:
    """Compute the ROC AUC for label 1 versus 0; empty if either is missing."""
    correct = []
    wrong = []
    for score, label in zip(scores, labels, strict=True):
        if label == 1.0:
            correct.append(score)
        elif label == 0.0:
            wrong.append(score)
    if correct and wrong:
        return {name: area_under_curve(correct, wrong)}
    return {}


def break_down_verdicts(items: Sequence[dict[str, Any]], name: str) -> Kinds:
    """Compute accuracy ``name`` by kind (``items.by_kind``) over items with a verdict in ``right``."""
    judged = [item for item in items if item["right"] is not None]

    def measure(places: Sequence[int]) -> dict[str, float]:
        own = [judged[place] for place in places]
        results = {"n": float(len(own))}
        clusters = [item.get("problem", item["id"]) for item in own]
        add_share(results, name, [float(item["right"]) for item in own], clusters)
        return results

    return by_kind([item["meta"] for item in judged], measure)


def evaluate_pairs(model: RewardModel, examples: Sequence[Example]) -> RewardEvaluation:
    """Score each example's best versus worst response, using the pairing from training; unusable pairs are dropped.

    ``pair_accuracy``: the chosen answer scores higher, ties count ½. ``margin``: mean score difference.
    """
    view = RewardEvaluation("pairs")
    pairs: list[tuple[Example, Response, Response]] = []
    for example in examples:
        (unit,) = rows_of(model.tokenizer, model.template, example, "pair")
        if isinstance(unit, str):
            view.dropped[unit] += 1
        else:
            best = max(example.responses, key=lambda r: r.score)
            worst = min(example.responses, key=lambda r: r.score)
            pairs.append((example, best, worst))
    scores = model.score_responses(
        [example for example, _, _ in pairs for _ in range(2)],
        [response for _, best, worst in pairs for response in (best, worst)],
    )
    for (example, chosen, rejected), won, lost in zip(pairs, scores[0::2], scores[1::2], strict=True):
        if won is None or lost is None:
            view.dropped[model.unscored] += 1
            continue
        view.items.append(
            {
                "id": example.id,
                "meta": meta_of(example),
                "right": pair_wins([won], [lost])[0],
                "margin": won - lost,
                "chosen_score": won,
                "rejected_score": lost,
                "chosen": chosen.text,
                "rejected": rejected.text,
            }
        )
    view.results["n"] = float(len(view.items))
    add_share(view.results, ACCURACIES[view.view], [float(item["right"]) for item in view.items])
    if view.items:
        for name in ("margin", "chosen_score", "rejected_score"):
            view.results[name] = statistics.fmean(item[name] for item in view.items)
    return view


def evaluate_judged(model: RewardModel, examples: Sequence[Example]) -> RewardEvaluation:
    """Evaluate answers labelled correct (1) or wrong (0), with one or more answers per problem.

    Over answers: ``auc`` and, if scores imply probabilities, ``answer_accuracy`` (thresholded at ½, ties count ½).
    Over problems: see ``choose_among``.
    """
    view = RewardEvaluation("judged answers")
    num_missing = sum(not example.responses for example in examples)
    if num_missing:
        view.dropped["no given responses"] = num_missing
    answers = [(example, response) for example in examples for response in example.responses]
    scores = model.score_responses([e for e, _ in answers], [r for _, r in answers])
    groups: dict[str, list[tuple[float, float]]] = {}
    for (example, response), score in zip(answers, scores, strict=True):
        group = groups.setdefault(example.id, [])
        if score is None:
            view.dropped[model.unscored] += 1
            group.append((-math.inf, response.score))
            probability = None
        else:
            group.append((score, response.score))
            probability = model.probability(score)
        if probability is None:
            right = None
        elif response.score:
            right = pair_wins([probability], [0.5])[0]
        else:
            right = pair_wins([1.0 - probability], [0.5])[0]
        view.items.append(
            {
                "id": f"{example.id}#{len(group) - 1}",
                "problem": example.id,
                "meta": meta_of(example),
                "right": right,
                "score": score,
                "probability": probability,
                "label": response.score,
                "answer": response.answer,
                "text": response.text,
            }
        )
    scored = [item for item in view.items if item["score"] is not None]
    view.results["n"] = float(len(scored))
    if scored:
        problems = [item["problem"] for item in scored]
        labels = [item["label"] for item in scored]
        view.results["correct_share"] = statistics.fmean(labels)
        view.results |= _area("auc", [item["score"] for item in scored], labels)
        if model.kind != "preference":
            add_share(view.results, ACCURACIES[view.view], [item["right"] for item in scored], problems)
    view.results |= choose_among([group for group in groups.values() if len(group) > 1])
    return view


def choose_among(groups: Sequence[Sequence[tuple[float, float]]]) -> dict[str, float]:
    """Measure best-of-n selection over problems with at least two answers (``num_problems``).

    ``top_one``: accuracy of the top-scored answer, averaging ties. Baselines: ``random_one`` (mean), ``oracle`` (any
    correct).

    Args:
        groups: per problem, (score, label) pairs; score −inf if missing.
    """
    measures: dict[str, float] = {}
    if groups:
        measures["num_problems"] = float(len(groups))
    top_one = []
    random_one = []
    oracle = []
    for group in groups:
        scores = [score for score, _ in group]
        labels = [label for _, label in group]
        top_one.append(best_of_n(scores, labels, len(scores)))
        random_one.append(statistics.fmean(labels))
        oracle.append(max(labels))
    add_share(measures, "top_one", top_one)
    add_share(measures, "random_one", random_one)
    add_share(measures, "oracle", oracle)
    return measures


def evaluate_steps(model: RewardModel, examples: Sequence[Example]) -> RewardEvaluation:
    """Evaluate step verdicts and first-error localization on solutions with labelled steps.

    A step is good unless labelled with the lowest class, and predicted good if P(good) > ½ (½ counts half). Unlabelled
    steps are ignored. Over solutions: ``solution_accuracy`` (the first step with P(good) < ½ matches the first step
    labelled bad, or neither exists) plus ``score_first_errors``. Over steps: ``step_accuracy`` (two classes, like in
    training), ``positive_share`` and ``step_auc``.
    """
    view = RewardEvaluation("labelled steps")
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
    scores = model.score_steps([e for e, _, _ in labelled], [r.steps for _, _, r in labelled])
    for (example, place, response), probabilities in zip(labelled, scores, strict=True):
        if probabilities is None:
            view.dropped[model.unscored] += 1
            continue
        predicted = first_error(probabilities)
        actual = None
        if 0 in response.step_labels:
            actual = response.step_labels.index(0)
        view.items.append(
            {
                "id": f"{example.id}#{place}",
                "problem": example.id,
                "meta": meta_of(example),
                "right": float(predicted == actual),
                "predicted_error": predicted,
                "first_error": actual,
                "probabilities": probabilities,
                "labels": list(response.step_labels),
                "label": response.score,
                "steps": list(response.steps),
            }
        )
    view.results["n"] = float(len(view.items))
    if view.items:
        _summarize_steps(view)
    return view


def _summarize_steps(view: RewardEvaluation) -> None:
    problems = [item["problem"] for item in view.items]
    add_share(view.results, ACCURACIES[view.view], [item["right"] for item in view.items], problems)
    predicted = [item["predicted_error"] for item in view.items]
    actual = [item["first_error"] for item in view.items]
    view.results |= score_first_errors(predicted, actual)
    probabilities = []
    good = []
    of_problem = []
    for item in view.items:
        for probability, label in zip(item["probabilities"], item["labels"], strict=True):
            if label is not None:
                probabilities.append(probability)
                good.append(float(label > 0))
                of_problem.append(item["problem"])
    called = pair_wins(probabilities, [0.5] * len(good))
    view.results["labelled_steps"] = float(len(good))
    rightly = []
    for call, is_good in zip(called, good, strict=True):
        if is_good:
            rightly.append(call)
        else:
            rightly.append(1.0 - call)
    add_share(view.results, "step_accuracy", rightly, of_problem)
    view.results["positive_share"] = statistics.fmean(good)
    view.results |= _area("step_auc", probabilities, good)


def evaluate_reward_model(model: RewardModel, task: Task, *, n: int) -> RewardEvaluation:
    """Score the given responses of a task's ``n`` evaluation examples.

    The view depends on data and model: labelled steps for a process model; else pairs, if scores are ratings, or if
    every example has two responses and the model predicts only preferences; else judged answers (scores 0 and 1).
    Unscorable items are skipped and counted (``dropped``).

    Raises:
        UsageError: an empty task, no responses, or no scorable item.
    """
    started = time.perf_counter()
    examples = held_out(task, n, distinct=False)
    if not any(example.responses for example in examples):
        raise UsageError(
            f"task {task.name!r} has no given responses to score; choose a task with pairs, judged answers or labelled "
            "steps (for stories: --task.responses pair, judged or steps)"
        )
    groups = [example.responses for example in examples if example.responses]
    responses = [response for group in groups for response in group]
    is_rated = any(response.score not in (0.0, 1.0) for response in responses)
    if model.kind == "process" and any(response.steps for response in responses):
        view = evaluate_steps(model, examples)
    elif is_rated or (model.kind == "preference" and all(len(group) == 2 for group in groups)):
        view = evaluate_pairs(model, examples)
    else:
        view = evaluate_judged(model, examples)
    if not view.results.get("n"):
        raise UsageError(f"task {task.name!r}: no scorable items; dropped: {dict(view.dropped)}")
    view.results |= {"dropped": float(view.dropped.total()), "seconds": time.perf_counter() - started}
    view.name = task_label(task)
    view.kinds = break_down_verdicts(view.items, ACCURACIES[view.view])
    return view


@dataclass(frozen=True)
class Scored:
    """One reward model's evaluation on one task, with settings and output folder.

    ``notes``: warnings about the task's rows.
    """

    label: str
    evaluation: RewardEvaluation
    settings: dict[str, Any]
    folder: Path
    notes: tuple[str, ...] = ()


def run_scoring(request: EvaluationRequest) -> Iterator[Scored]:
    """Score every task's given answers with every reward model, keeping only one model in memory.

    Raises:
        UsageError: unusable options or models; most are detected before loading any model.
    """
    sources = tell_apart(request.models)
    named: Sequence[Component | None] = request.tasks or [None]
    chosen = []
    for source in sources:
        for name in named:
            chosen.append((source, choose_task(name, source.name, source.task)))
    components = {component.model_dump_json(): component for _, component in chosen}
    tasks = {key: build_task(component, "--task") for key, component in components.items()}
    trials = [(source, component, tasks[component.model_dump_json()]) for source, component in chosen]
    folders = _choose_folders(request.out, [(source, task) for source, _, task in trials])
    if request.out:
        refuse_other(request.out)
    for folder in folders:
        refuse_other(folder)
    model: RewardModel | None = None
    opened: ModelSource | None = None
    for (source, component, task), folder in zip(trials, folders, strict=True):
        if model is None or opened != source:
            model = open_reward_model(source, dtype=request.dtype, device=request.device)
            opened = source
        task = take_rendered(task, model.template, model.tokenizer, "--task")
        evaluation = evaluate_reward_model(model, task, n=request.drawing.n)
        evaluation.results.update(count_trained(source, task, request.drawing.n))
        settings = {
            "model": source.name,
            "label": source.label,
            "step": model.step,
            "weights": weights_mark(resolve_model_name(source.path)),
            "kind": model.kind,
            "task": component.model_dump(),
            "template": model.template.name,
            "n": request.drawing.n,
            "dropped": task.dropped,
        }
        if request.out:
            own = folder
        else:
            own = folder_of_its_own(folder, {"": settings})
        yield Scored(model.label, evaluation, settings, own, task.warnings)


def _choose_folders(out: Path | None, trials: Sequence[tuple[ModelSource, Task]]) -> list[Path]:
    """Choose a folder per model and task: inside the run, or below ``out``."""
    is_shared = out is not None and len({source.label for source, _ in trials}) > 1
    folders = []
    for source, task in trials:
        is_whole_run = source.run is not None and source.path == str(source.run)
        if is_whole_run and not is_shared:
            name = task_label(task)
        else:
            name = f"{source.label}-{task_label(task)}"
        if out and len(trials) > 1:
            place: Path | None = out / slug(name)
        else:
            place = out
        folders.append(evaluation_folder(source, place, name))
    return folders


def write_scores(scored: Scored, page: str) -> None:
    """Write ``items.jsonl``, ``summary.md`` (``page``) and, last, ``results.json``, replacing earlier files.

    Raises:
        StorageError: writing failed, for example on a full disk.
    """
    one = scored.evaluation
    content = {
        "evaluation": one.name,
        "measured": one.view,
        "results": one.results,
        "settings": scored.settings,
        "kinds": one.kinds,
        "not_measured": one.dropped,
    }
    write_records(scored.folder, one.items, page, content)
