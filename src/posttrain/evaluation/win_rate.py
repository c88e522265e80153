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
from posttrain.evaluation.plan import Drawing, EvaluationProgress, EvaluationRequest, measure, place_of
from posttrain.evaluation.statistics import pair_wins
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.micro import split_rows
from posttrain.recipes.sections import Component
from posttrain.sampling.llm_judge import PairJudge
from posttrain.sampling.models import ModelSource, OpenedModel, complete_template, open_model
from posttrain.store.rollouts import prompt_text
from posttrain.types import Rollout

SIMILAR_LENGTH = 0.1  # lengths that differ by at most this share of the longer one are alike

# Scores answers, or compares two of them.
Judge = Callable[[Sequence[Rollout]], Sequence[float | None]] | PairJudge


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
            for answer, again in zip([*item["a"], *item["b"]], [*judged["a"], *judged["b"]], strict=True):
                answer.setdefault("scores", {})[name] = again["score"]


def pair_up(a: Sequence[Rollout], b: Sequence[Rollout]) -> list[HeadToHeadItem]:
    """The items that both models have answered, by ``Rollout.prompt_index``, in order."""
    sides: tuple[dict[int, list[Rollout]], dict[int, list[Rollout]]] = ({}, {})
    for side, rollouts in zip(sides, (a, b), strict=True):
        for rollout in rollouts:
            side.setdefault(rollout.prompt_index, []).append(rollout)
    return [
        HeadToHeadItem(i, tuple(sides[0][i]), tuple(sides[1][i])) for i in sorted(sides[0].keys() & sides[1].keys())
    ]


def judge_by_grade(rollouts: Sequence[Rollout]) -> list[float]:
    """1 for an answer that the task's grader finds right, else 0."""
    return [float(rollout.outcome == "right") for rollout in rollouts]


def measure_wins(pairs: Sequence[HeadToHeadItem], judge: Judge) -> WinRate:
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
        ranks = {key: -math.inf if score is None else score for key, score in scores.items()}
        opinions = pair_wins([ranks[id(x)] for x, _ in meetings], [ranks[id(y)] for _, y in meetings])
        info = {"unscored": sum(scores[id(answer)] is None for answer in answers) / len(answers)}
    worths = iter(opinions)
    items = [_item(one, scores, [next(worths) for _ in product(one.a, one.b)]) for one in pairs]
    similar = [item["win_rate_similar"] for item in items if item["num_similar"]]
    draws = max(1, min(min(len(one.a), len(one.b)) for one in pairs))
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
    lengths = [(len(a.text), len(b.text)) for a, b in product(head_to_head.a, head_to_head.b)]
    alike = [w for w, pair in zip(worths, lengths, strict=True) if max(pair) - min(pair) <= SIMILAR_LENGTH * max(pair)]
    item: dict[str, Any] = {
        "id": example.id,
        "index": head_to_head.index,
        "question": prompt_text(example),
        "answer": example.answer,
        "win_rate": statistics.fmean(worths),
        "wins": sum(worth > 0.5 for worth in worths) / len(worths),
        "ties": sum(worth == 0.5 for worth in worths) / len(worths),
        "losses": sum(worth < 0.5 for worth in worths) / len(worths),
        "num_similar": len(alike),
    }
    if alike:
        item["win_rate_similar"] = statistics.fmean(alike)
    for side, rollouts in (("a", head_to_head.a), ("b", head_to_head.b)):
        item[f"characters_{side}"] = statistics.fmean(len(rollout.text) for rollout in rollouts)
        item[side] = [
            {"text": one.text, "outcome": one.outcome, "extracted": one.extracted, "score": scores.get(id(one))}
            for one in rollouts
        ]
    return item


@torch.no_grad()
def measure_kl(
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
    for rows in split_rows(batch, max_tokens):
        sums = kl_of_states(batch.select(rows), own, nullcontext(other), num_ids).sum(dim=1)
        for row, value in zip(rows, sums.tolist(), strict=True):
            kl[row] = value
    return kl


def summarize_kl(name: str, answers: Sequence[Rollout], kl: Sequence[float]) -> dict[str, float]:
    """``name`` per answer, with the interval of a mean over items (``_low``, ``_high``), and ``<name>_per_token``."""
    of_item: dict[int, list[float]] = {}
    for rollout, value in zip(answers, kl, strict=True):
        of_item.setdefault(rollout.prompt_index, []).append(value)
    results = mean_interval(name, [statistics.fmean(values) for values in of_item.values()])
    tokens = sum(rollout.completion.num_own for rollout in answers)
    return results | {f"{name}_low": max(0.0, results[f"{name}_low"]), f"{name}_per_token": math.fsum(kl) / tokens}


def why_no_kl(a: OpenedModel, b: OpenedModel, drawing: Drawing, items: Sequence[HeadToHeadItem]) -> str | None:
    """Return why the KL between two models cannot be measured here; None where it can."""
    reasons = {
        "it needs both models in this process; use --engine native": a.model is None or b.model is None,
        "greedy decoding draws from no distribution; give --temperature above 0": drawing.temperature == 0,
        "the answers are drawn from cut distributions; leave --top-k and --top-p out": (
            drawing.top_k is not None or drawing.top_p < 1.0
        ),
        "the two models have different tokenizers, so their distributions are over different tokens": (
            a.tokenizer.get_vocab() != b.tokenizer.get_vocab()
        ),
        "the two models are asked under different templates; give both one with --template": any(
            item.a[0].prompt_ids != item.b[0].prompt_ids for item in items
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


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

    A task that is not named is that of A; a template, the model's own, or that of the one that has one.

    Args:
        judges: reward models, and files of judges, of which the first says who wins; none: the task's grader.

    Raises:
        UsageError: words, options or combinations that cannot be.
    """
    if len(set(judges)) < len(judges):
        raise UsageError("--judge: the same judge is named twice")
    for name, components in (("task", request.tasks), ("template", request.templates)):
        if len(components) > 1:
            raise UsageError(f"--{name}: one at a time with --against")
    a, b = request.models
    if a.label == b.label:
        a, b = (replace(source, label=f"{source.name} ({side})") for source, side in ((a, "A"), (b, "B")))
    for source in (a, b):
        source.refuse_scorer()
    component = choose_task(next(iter(request.tasks), None), a.name, a.recipe)
    named = next(iter(request.templates), None)
    # the template named, else the model's own, else that of the other one: it was trained with none
    tellers = [own if own.recipe is not None or other.recipe is None else other for own, other in ((a, b), (b, a))]
    first, second = (complete_template(named, teller) or teller.template for teller in tellers)
    drawing = replace(request.drawing, max_tokens=request.drawing.max_tokens or max(a.max_tokens, b.max_tokens), ks=())
    task = build_task(component, "--task")
    name = f"against-{b.label}-{task_label(task)}"
    folder = place_of(a, request.out, name if a.run is not None else f"{a.label}-{name}")
    refuse_other(folder)
    drawn = ("n", "samples", "temperature", "top_k", "top_p", "max_tokens", "seed")
    settings = {
        "a": a.name,
        "b": b.name,
        "judge": ", ".join(judges) or "the task's grader",
        "task": component.model_dump(),
        "templates": [first.model_dump(), second.model_dump()],
        **{name: getattr(drawing, name) for name in drawn},
        "dropped": task.dropped,
    }
    own = folder if request.out else folder_of_its_own(folder, {"": settings})
    return HeadToHeadPlan((a, b), drawing, request, task, (first, second), own, settings)


def run_head_to_head(
    plan: HeadToHeadPlan, judges: Mapping[str, Judge], progress: EvaluationProgress | None = None
) -> tuple[WinRate, list[str]]:
    """Sample from both models, judge (the first of ``judges`` counts; none: the task's grader) and measure the KL.

    Returns the win rate, and notes on it.

    Raises:
        UsageError: no item that both answered, or none with a gold answer and no judge.
    """
    request = plan.request
    models, evaluations = [], []
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
    n, notes = int(evaluations[0].results["n"]), list(warnings)
    if left := n - len(items):
        notes.append(f"{left} of {n} prompts do not fit into one of the models; they are left out")
    if not judges:
        answered, items = items, graded(items, plan.task)
        if left := len(answered) - len(items):
            notes.append(f"{left} items have no gold answer; they are left out")
    (_, first), *others = judges.items() or [("", judge_by_grade)]
    win_rate = measure_wins(items, first)
    for name, judge in others:
        win_rate.add_judge(name, measure_wins(items, judge))
    if win_rate.results["unscored"]:
        notes.append(f"{win_rate.results['unscored']:.1%} of the answers could not be scored by the judge; they lose")
    for side, evaluation in zip("ab", evaluations, strict=True):
        if evaluation.results.get("num_graded", 0.0) > 0:
            for suffix in ("", "_low", "_high"):
                win_rate.results[f"accuracy_{side}{suffix}"] = evaluation.results[f"accuracy{suffix}"]
    if (reason := why_no_kl(models[0], models[1], plan.drawing, items)) is not None:
        return win_rate, [*notes, f"no KL: {reason}"]
    forwards = [Forward(model.model, plan.drawing.temperature) for model in models]
    sides = [[one for pair in items for one in getattr(pair, side)] for side in ("a", "b")]
    num_ids = max(max(model.tokenizer.get_vocab().values()) for model in models) + 1
    for name, answers, (own, other) in zip(("ab", "ba"), sides, (forwards, forwards[::-1]), strict=True):
        kl = measure_kl(answers, own, other, num_ids=num_ids)
        win_rate.results |= summarize_kl(f"kl_{name}", answers, kl)
        for answer, value in zip([one for item in win_rate.items for one in item[name[0]]], kl, strict=True):
            answer[f"kl_{name}"] = value
    return win_rate, notes


def graded(items: Sequence[HeadToHeadItem], task: Task) -> list[HeadToHeadItem]:
    """The items whose answers were all graded.

    Raises:
        UsageError: none was; a judge is needed.
    """
    kept = [c for c in items if all(rollout.outcome != "ungraded" for rollout in (*c.a, *c.b))]
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
    content = {
        "evaluation": task_label(plan.task),
        "a": plan.sources[0].label,
        "b": plan.sources[1].label,
        "results": win_rate.results,
        **({"others": win_rate.others} if win_rate.others else {}),
        "notes": list(notes),
        "settings": plan.settings,
    }
    write_records(plan.folder, win_rate.items, page, content)
