"""Two models on the same prompts: whose answers win, and how far apart their distributions are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from posttrain.data.base import Task, build_task, choose_task
from posttrain.data.rendered import take_rendered
from posttrain.errors import UsageError
from posttrain.evaluation.files import folder_of_its_own, refuse_other, write_records
from posttrain.evaluation.generation import task_label
from posttrain.evaluation.items import mean_interval, with_interval
from posttrain.evaluation.kl_from_initial import MAX_TOKENS, answers_as_batch, kl_of_states
from posttrain.evaluation.plan import Drawing, EvaluationProgress, EvaluationRequest, evaluation_folder, measure
from posttrain.evaluation.statistics import pair_wins
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.micro import MicroBatching
from posttrain.recipes.sections import Component
from posttrain.sampling.base import NO_RULES
from posttrain.sampling.llm_judge import PairJudge
from posttrain.sampling.models import ModelSource, OpenedModel, complete_template, open_model
from posttrain.store.rollouts import prompt_text
from posttrain.types import Rollout

SIMILAR_LENGTH = 0.1  # lengths that differ by at most this share of the longer one are alike

# Scores answers, or compares two of them.
AnswerJudge = Callable[[Sequence[Rollout]], Sequence[float | None]] | PairJudge


@dataclass(frozen=True, slots=True)
class HeadToHeadItem:
    """The answers of two models, A and B, to the prompt of item ``index``: one or several each."""

    index: int
    a: tuple[Rollout, ...]
    b: tuple[Rollout, ...]


@dataclass(slots=True)
class WinRate:
    """``results`` by name, and one record per item. ``others``: results by further judges."""

    results: dict[str, float] = field(default_factory=dict)
    items: list[dict[str, Any]] = field(default_factory=list)
    others: dict[str, dict[str, float]] = field(default_factory=dict)

    def add_judge(self, name: str, other: WinRate) -> None:
        """Add another judge's results on the same answers, and its score of each (``scores``)."""
        self.others[name] = other.results
        for item, judged in zip(self.items, other.items, strict=True):
            for side in ("a", "b"):
                for answer, again in zip(item[side], judged[side], strict=True):
                    scores = answer.setdefault("scores", {})
                    scores[name] = again["score"]


def pair_up(a: Sequence[Rollout], b: Sequence[Rollout]) -> list[HeadToHeadItem]:
    """The items that both models have answered, by ``Rollout.prompt_index``, in order."""
    of_a: dict[int, list[Rollout]] = {}
    of_b: dict[int, list[Rollout]] = {}
    for of_side, rollouts in ((of_a, a), (of_b, b)):
        for rollout in rollouts:
            of_side.setdefault(rollout.prompt_index, []).append(rollout)
    items = []
    for index in sorted(of_a.keys() & of_b.keys()):
        items.append(HeadToHeadItem(index, tuple(of_a[index]), tuple(of_b[index])))
    return items


def judge_by_grade(rollouts: Sequence[Rollout]) -> list[float]:
    """1 for an answer that the task's grader finds right, else 0."""
    return [float(rollout.outcome == "right") for rollout in rollouts]


def measure_wins(pairs: Sequence[HeadToHeadItem], judge: AnswerJudge) -> WinRate:
    """Measure how often an answer of A is judged better than one of B; a tie counts one half.

    Within an item every answer of A meets every answer of B; the mean is one number per item, and the intervals count
    items. An answer without a score loses against one that has it (``unscored``). ``win_rate`` has the parts ``wins``,
    ``ties``, ``losses``. Judges like long answers, so there is also ``win_rate_similar``, over meetings of answers
    whose lengths differ by at most 10 % (in ``n_similar`` items), and ``characters_a``, ``characters_b``. A judge that
    compares adds its own biases (``PairJudge.meet``).

    Raises:
        ValueError: no item.
    """
    if not pairs:
        raise ValueError("no item that both models answered")
    meetings = [meeting for one in pairs for meeting in product(one.a, one.b)]
    scores: dict[int, float | None] = {}  # by the identity of an answer
    if isinstance(judge, PairJudge):
        opinions, info = judge.meet([(prompt_text(x.example), x.text, y.text) for x, y in meetings])
    else:
        answers = [rollout for one in pairs for rollout in (*one.a, *one.b)]
        scores = dict(zip(map(id, answers), judge(answers), strict=True))
        ranks = {}
        for key, score in scores.items():
            if score is None:
                ranks[key] = -math.inf
            else:
                ranks[key] = score
        opinions = pair_wins([ranks[id(x)] for x, _ in meetings], [ranks[id(y)] for _, y in meetings])
        num_unscored = sum(scores[id(answer)] is None for answer in answers)
        info = {"unscored": num_unscored / len(answers)}
    items = []
    start = 0
    for one in pairs:
        end = start + len(one.a) * len(one.b)
        items.append(_item(one, scores, opinions[start:end]))
        start = end
    similar = [item["win_rate_similar"] for item in items if item["num_similar"]]
    fewest = min(min(len(one.a), len(one.b)) for one in pairs)
    draws = max(1, fewest)
    results = {"n": float(len(pairs)), "unscored": 0.0} | info
    results |= with_interval("win_rate", [item["win_rate"] for item in items], draws)
    for name in ("wins", "ties", "losses", "characters_a", "characters_b"):
        results[name] = statistics.fmean(item[name] for item in items)
    results["n_similar"] = float(len(similar))
    if similar:
        results |= with_interval("win_rate_similar", similar, draws)
    return WinRate(results, items)


def _item(head_to_head: HeadToHeadItem, scores: Mapping[int, float | None], worths: Sequence[float]) -> dict[str, Any]:
    example = head_to_head.a[0].example
    similar = []
    for worth, (a, b) in zip(worths, product(head_to_head.a, head_to_head.b), strict=True):
        shorter, longer = sorted((len(a.text), len(b.text)))
        if longer - shorter <= SIMILAR_LENGTH * longer:
            similar.append(worth)
    item: dict[str, Any] = {
        "id": example.id,
        "index": head_to_head.index,
        "question": prompt_text(example),
        "answer": example.answer,
        "win_rate": statistics.fmean(worths),
        "wins": sum(worth > 0.5 for worth in worths) / len(worths),
        "ties": sum(worth == 0.5 for worth in worths) / len(worths),
        "losses": sum(worth < 0.5 for worth in worths) / len(worths),
        "num_similar": len(similar),
    }
    if similar:
        item["win_rate_similar"] = statistics.fmean(similar)
    for side, rollouts in (("a", head_to_head.a), ("b", head_to_head.b)):
        item[f"characters_{side}"] = statistics.fmean(len(rollout.text) for rollout in rollouts)
        records = []
        for one in rollouts:
            score = scores.get(id(one))
            records.append({"text": one.text, "outcome": one.outcome, "extracted": one.extracted, "score": score})
        item[side] = records
    return item


@torch.no_grad()
def measure_answer_kl(
    answers: Sequence[Rollout],
    own: Forward,
    other: Forward,
    *,
    max_tokens: int = MAX_TOKENS,
    num_ids: int | None = None,
) -> list[float]:
    """Measure KL(own‖other) of each answer that ``own`` sampled, in nats: the exact KL of the two next-token
    distributions (``evaluation/kl_from_initial.py``), summed over its tokens. ``num_ids``: ids that the tokenizer has.

    Raises:
        UsageError: the other model's vocabulary lacks a likely token.
    """
    batch = answers_as_batch(answers)
    kl = [0.0] * len(answers)
    for micro in MicroBatching(max_tokens).over(batch, own):
        sums = kl_of_states(micro.part, own, nullcontext(other), num_ids).sum(dim=1)
        for row, value in zip(micro.rows, sums.tolist(), strict=True):
            kl[row] = value
    return kl


def summarize_kl(name: str, answers: Sequence[Rollout], kl: Sequence[float]) -> dict[str, float]:
    """``name`` per answer, with the interval of a mean over items (``_low``, ``_high``), and ``<name>_per_token``."""
    of_item: dict[int, list[float]] = {}
    for rollout, value in zip(answers, kl, strict=True):
        of_item.setdefault(rollout.prompt_index, []).append(value)
    of_items = [statistics.fmean(values) for values in of_item.values()]
    results = mean_interval(name, of_items)
    results[f"{name}_low"] = max(0.0, results[f"{name}_low"])
    num_tokens = sum(rollout.completion.num_own for rollout in answers)
    results[f"{name}_per_token"] = math.fsum(kl) / num_tokens
    return results


def why_no_kl(a: OpenedModel, b: OpenedModel, drawing: Drawing, items: Sequence[HeadToHeadItem]) -> str | None:
    """Return why the KL between two models cannot be measured here; None where it can."""
    if a.model is None or b.model is None:
        return "it needs both models in this process; use --engine native"
    if drawing.temperature == 0:
        return "greedy decoding draws from no distribution; give --temperature above 0"
    if drawing.top_k is not None or drawing.top_p < 1.0 or drawing.rules != NO_RULES:
        return (
            "the answers are drawn from changed distributions; leave --top-k, --top-p, --min-p, --min-tokens, "
            "--repetition-penalty and --stop out"
        )
    if a.tokenizer.get_vocab() != b.tokenizer.get_vocab():
        return "the two models have different tokenizers, so their distributions are over different tokens"
    if any(item.a[0].prompt_ids != item.b[0].prompt_ids for item in items):
        return "the two models are asked under different templates; give both one with --template"
    return None


@dataclass(frozen=True)
class HeadToHeadPlan:
    """Two models whose request was checked, the task that was read, a template for each, the folder for the files."""

    sources: tuple[ModelSource, ModelSource]
    drawing: Drawing
    request: EvaluationRequest
    task: Task
    templates: tuple[Component, Component]
    folder: Path
    settings: dict[str, Any]


def plan_head_to_head(request: EvaluationRequest, judges: Sequence[str] = ()) -> HeadToHeadPlan:
    """Check the request for two models, A and B, as far as that goes without loading one.

    A task that is not named is A's. A template that is not named is the model's own; a model that was trained with none
    takes the other's.

    Args:
        judges: reward models, and files of judges, of which the first says who wins; none: the task's grader.

    Raises:
        UsageError: options or combinations that cannot be used.
    """
    if len(set(judges)) < len(judges):
        raise UsageError("--judge: the same judge is named twice")
    for name, components in (("task", request.tasks), ("template", request.templates)):
        if len(components) > 1:
            raise UsageError(f"--{name}: one at a time with --against")
    a, b = request.models
    if a.label == b.label:
        a = replace(a, label=f"{a.name} (A)")
        b = replace(b, label=f"{b.name} (B)")
    for source in (a, b):
        source.refuse_scorer()
    component = choose_task(next(iter(request.tasks), None), a.name, a.task)
    named = next(iter(request.templates), None)
    first = _choose_template(named, a, b)
    second = _choose_template(named, b, a)
    max_tokens = request.drawing.max_tokens or max(a.max_tokens, b.max_tokens)
    drawing = replace(request.drawing, max_tokens=max_tokens, ks=())
    task = build_task(component, "--task")
    name = f"against-{b.label}-{task_label(task)}"
    if a.run is None:
        name = f"{a.label}-{name}"
    folder = evaluation_folder(a, request.out, name)
    refuse_other(folder)
    drawn = {key: getattr(drawing, key) for key in ("n", "samples", "temperature", "top_k", "top_p")}
    drawn |= drawing.rules.given()
    settings = {
        "a": a.name,
        "b": b.name,
        "judge": ", ".join(judges) or "the task's grader",
        "task": component.model_dump(),
        "templates": [first.model_dump(), second.model_dump()],
        **drawn,
        "max_tokens": drawing.max_tokens,
        "seed": drawing.seed,
        "dropped": task.dropped,
    }
    if request.out:
        own = folder
    else:
        own = folder_of_its_own(folder, {"": settings})
    return HeadToHeadPlan((a, b), drawing, request, task, (first, second), own, settings)


def _choose_template(named: Component | None, model: ModelSource, other: ModelSource) -> Component:
    """Return the template named, else the model's own, else the other one's if only that was trained with one."""
    if model.recipe is None and other.recipe is not None:
        source = other
    else:
        source = model
    return complete_template(named, source) or source.template


def run_head_to_head(
    plan: HeadToHeadPlan, judges: Mapping[str, AnswerJudge], progress: EvaluationProgress | None = None
) -> tuple[WinRate, list[str]]:
    """Sample from both models, judge (the first of ``judges`` counts; none: the task's grader) and measure the KL.

    Returns the win rate, and notes on it.

    Raises:
        UsageError: no item that both answered, or none with a gold answer and no judge.
    """
    request = plan.request
    models = []
    evaluations = []
    warnings = dict.fromkeys(plan.task.warnings)
    for source, template in zip(plan.sources, plan.templates, strict=True):
        model = open_model(source, template, engine=request.engine, dtype=request.dtype, device=request.device)
        models.append(model)
        task = take_rendered(plan.task, model.grader.template, model.tokenizer, "--task")
        warnings = dict.fromkeys((*warnings, *task.warnings))
        evaluations.append(measure(model, task, plan.drawing, progress=progress))
    items = pair_up(evaluations[0].rollouts, evaluations[1].rollouts)
    if not items:
        raise UsageError("no prompt fits into the contexts of both models")
    n = int(evaluations[0].results["n"])
    notes = list(warnings)
    num_too_long = n - len(items)
    if num_too_long:
        notes.append(f"{num_too_long} of {n} prompts do not fit into one of the models; they are left out")
    if not judges:
        num_answered = len(items)
        items = graded(items, plan.task)
        num_ungraded = num_answered - len(items)
        if num_ungraded:
            notes.append(f"{num_ungraded} items have no gold answer; they are left out")
    if judges:
        (_, first), *others = judges.items()
    else:
        first = judge_by_grade
        others = []
    win_rate = measure_wins(items, first)
    for name, judge in others:
        win_rate.add_judge(name, measure_wins(items, judge))
    unscored = win_rate.results["unscored"]
    if unscored:
        notes.append(f"{unscored:.1%} of the answers could not be scored by the judge; they lose")
    for side, evaluation in zip("ab", evaluations, strict=True):
        if evaluation.results.get("num_graded", 0.0) > 0:
            for suffix in ("", "_low", "_high"):
                win_rate.results[f"accuracy_{side}{suffix}"] = evaluation.results[f"accuracy{suffix}"]
    reason = why_no_kl(models[0], models[1], plan.drawing, items)
    if reason is None:
        _add_kl(win_rate, items, models, plan.drawing.temperature)
    else:
        notes.append(f"no KL: {reason}")
    return win_rate, notes


def _add_kl(
    win_rate: WinRate, items: Sequence[HeadToHeadItem], models: Sequence[OpenedModel], temperature: float
) -> None:
    """Add KL(A‖B) on A's answers and KL(B‖A) on B's, to the results and to each answer."""
    a, b = (Forward(model.model, temperature) for model in models)
    num_ids = max(max(model.tokenizer.get_vocab().values()) for model in models) + 1
    answers_of_a = [answer for item in items for answer in item.a]
    answers_of_b = [answer for item in items for answer in item.b]
    for side, name, answers, own, other in (
        ("a", "kl_ab", answers_of_a, a, b),
        ("b", "kl_ba", answers_of_b, b, a),
    ):
        kl = measure_answer_kl(answers, own, other, num_ids=num_ids)
        win_rate.results |= summarize_kl(name, answers, kl)
        records = [record for item in win_rate.items for record in item[side]]
        for record, value in zip(records, kl, strict=True):
            record[name] = value


def graded(items: Sequence[HeadToHeadItem], task: Task) -> list[HeadToHeadItem]:
    """The items whose answers were all graded.

    Raises:
        UsageError: none was; a judge is needed.
    """
    kept = []
    for item in items:
        if all(rollout.outcome != "ungraded" for rollout in (*item.a, *item.b)):
            kept.append(item)
    if not kept:
        raise UsageError(
            f"task {task.name!r} has no gold answers by which one answer could win; give --judge RUN, the run of a "
            "reward model, or --judge FILE.yaml, which names a language model (docs/how-to/llm-judge.md)"
        )
    return kept


def write_head_to_head(plan: HeadToHeadPlan, win_rate: WinRate, notes: Sequence[str], page: str) -> None:
    """``items.jsonl``, ``summary.md`` and, last, ``results.json``; those of an earlier evaluation are replaced.

    Raises:
        StorageError: the disk is full or not writable.
    """
    content: dict[str, object] = {
        "evaluation": task_label(plan.task),
        "a": plan.sources[0].label,
        "b": plan.sources[1].label,
        "results": win_rate.results,
    }
    if win_rate.others:
        content["others"] = win_rate.others
    content["notes"] = list(notes)
    content["settings"] = plan.settings
    write_records(plan.folder, win_rate.items, page, content)
