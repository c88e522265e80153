"""Head-to-head evaluation on shared prompts: win rate, and KL between both policies."""

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

SIMILAR_LENGTH = 0.1  # answers count as similar if lengths differ by at most this fraction of the longer

# Scores answers, or compares pairs.
AnswerJudge = Callable[[Sequence[Rollout]], Sequence[float | None]] | PairJudge


@dataclass(frozen=True, slots=True)
class HeadToHeadItem:
    """Answers from models A and B for item ``index``, one or more per model."""

    index: int
    a: tuple[Rollout, ...]
    b: tuple[Rollout, ...]


@dataclass(slots=True)
class WinRate:
    """``results`` by metric, and one record per item. ``others``: results from additional judges."""

    results: dict[str, float] = field(default_factory=dict)
    items: list[dict[str, Any]] = field(default_factory=list)
    others: dict[str, dict[str, float]] = field(default_factory=dict)

    def add_judge(self, name: str, other: WinRate) -> None:
        """Add a second judge's results on these answers, and individual ``scores``."""
        self.others[name] = other.results
        for item, judged in zip(self.items, other.items, strict=True):
            for side in ("a", "b"):
                for answer, again in zip(item[side], judged[side], strict=True):
                    scores = answer.setdefault("scores", {})
                    scores[name] = again["score"]


def pair_up(a: Sequence[Rollout], b: Sequence[Rollout]) -> list[HeadToHeadItem]:
    """Pair items answered by both, by ``Rollout.prompt_index``, in ascending order."""
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
    """Score 1 if the task's grader accepts an answer, else 0."""
    return [float(rollout.outcome == "right") for rollout in rollouts]


def measure_wins(pairs: Sequence[HeadToHeadItem], judge: AnswerJudge) -> WinRate:
    """Measure how often A's answers beat B's; ties count ½.

    Within an item, all answers from A meet all from B; their average is the item's win rate, and intervals use items
    as clusters. Unscored answers lose to scored ones (``unscored``). ``win_rate`` splits into ``wins``, ``ties``,
    ``losses``. Because judges favor long answers, ``win_rate_similar`` covers only pairs with lengths within 10 % (on
    ``n_similar`` items), and ``characters_a``, ``characters_b`` report lengths. Pairwise judges have additional
    biases (``PairJudge.meet``).

    Raises:
        ValueError: no items.
    """
    if not pairs:
        raise ValueError("no items answered by both")
    meetings = [meeting for one in pairs for meeting in product(one.a, one.b)]
    scores: dict[int, float | None] = {}  # keyed by id(answer)
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
    """Compute KL(own‖other) in nats for each answer sampled from ``own``: exact next-token KL
    (``evaluation/kl_from_initial.py``), summed over tokens. ``num_ids``: size of the tokenizer's id range.

    Raises:
        UsageError: a likely token is outside the second model's vocabulary.
    """
    batch = answers_as_batch(answers)
    kl = [0.0] * len(answers)
    for micro in MicroBatching(max_tokens).over(batch, own):
        sums = kl_of_states(micro.part, own, nullcontext(other), num_ids).sum(dim=1)
        for row, value in zip(micro.rows, sums.tolist(), strict=True):
            kl[row] = value
    return kl


def summarize_kl(name: str, answers: Sequence[Rollout], kl: Sequence[float]) -> dict[str, float]:
    """Average ``name`` per answer, with an interval over items (``_low``, ``_high``), and ``<name>_per_token``."""
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
    """Explain why KL cannot be measured between these models; None if possible."""
    if a.model is None or b.model is None:
        return "requires in-process models; use --engine native"
    if drawing.temperature == 0:
        return "undefined for greedy decoding; give --temperature above 0"
    if drawing.top_k is not None or drawing.top_p < 1.0 or drawing.rules != NO_RULES:
        return (
            "sampling options modify the distributions; drop --top-k, --top-p, --min-p, --min-tokens, "
            "--repetition-penalty and --stop"
        )
    if a.tokenizer.get_vocab() != b.tokenizer.get_vocab():
        return "different tokenizers, so the distributions are not comparable"
    if any(item.a[0].prompt_ids != item.b[0].prompt_ids for item in items):
        return "different templates; give a shared one with --template"
    return None


@dataclass(frozen=True)
class HeadToHeadPlan:
    """A checked request: two models, the loaded task, a template per model, and the output folder."""

    sources: tuple[ModelSource, ModelSource]
    drawing: Drawing
    request: EvaluationRequest
    task: Task
    templates: tuple[Component, Component]
    folder: Path
    settings: dict[str, Any]


def plan_head_to_head(request: EvaluationRequest, judges: Sequence[str] = ()) -> HeadToHeadPlan:
    """Check a head-to-head request (A versus B) without loading models.

    The task defaults to A's. Templates default to each model's; if only one model was trained with a template, both
    use it.

    Args:
        judges: reward models, or judge files; the first decides wins. Empty: use the task's grader.

    Raises:
        UsageError: unusable options or combinations.
    """
    if len(set(judges)) < len(judges):
        raise UsageError("--judge: duplicate judge")
    for name, components in (("task", request.tasks), ("template", request.templates)):
        if len(components) > 1:
            raise UsageError(f"--{name}: only one allowed with --against")
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
    """Choose the given template, else the model's, else the second model's if only that was trained with one."""
    if model.recipe is None and other.recipe is not None:
        source = other
    else:
        source = model
    return complete_template(named, source) or source.template


def run_head_to_head(
    plan: HeadToHeadPlan, judges: Mapping[str, AnswerJudge], progress: EvaluationProgress | None = None
) -> tuple[WinRate, list[str]]:
    """Sample from both models, judge the answers, and measure KL.

    The first of ``judges`` decides; if empty, the task's grader. Returns the win rate, and notes.

    Raises:
        UsageError: no shared answered items, or neither gold answers nor a judge.
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
        raise UsageError("all prompts exceed the context of A or B")
    n = int(evaluations[0].results["n"])
    notes = list(warnings)
    num_too_long = n - len(items)
    if num_too_long:
        notes.append(f"skipped {num_too_long} of {n} prompts: too long for A or B")
    if not judges:
        num_answered = len(items)
        items = graded(items, plan.task)
        num_ungraded = num_answered - len(items)
        if num_ungraded:
            notes.append(f"skipped {num_ungraded} items without a gold answer")
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
        notes.append(f"{unscored:.1%} of answers could not be scored by the judge, and lose")
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
    """Add KL(A‖B) on A's answers and KL(B‖A) on B's, to results and answer records."""
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
    """Keep items with all answers graded.

    Raises:
        UsageError: no graded items; a judge is needed.
    """
    kept = []
    for item in items:
        if all(rollout.outcome != "ungraded" for rollout in (*item.a, *item.b)):
            kept.append(item)
    if not kept:
        raise UsageError(
            f"task {task.name!r} has no gold answers to decide wins; give --judge RUN (a reward-model run) or "
            "--judge FILE.yaml (a language model, see docs/how-to/llm-judge.md)"
        )
    return kept


def write_head_to_head(plan: HeadToHeadPlan, win_rate: WinRate, notes: Sequence[str], page: str) -> None:
    """Write ``items.jsonl``, ``summary.md`` and, last, ``results.json``, replacing earlier files.

    Raises:
        StorageError: writing failed, for example on a full disk.
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
