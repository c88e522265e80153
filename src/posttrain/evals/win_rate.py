"""Two models on the same prompts: whose answers win, and how far apart their distributions are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from posttrain.engines.judging.reward import PairJudge
from posttrain.engines.models import ModelSource, OpenedModel, complete_template, open_model
from posttrain.errors import UsageError
from posttrain.evals.drift import MAX_TOKENS, answers_as_batch, kl_of_states
from posttrain.evals.files import folder_of_its_own, refuse_other, write_records
from posttrain.evals.generation import Evaluation, task_label
from posttrain.evals.measures import with_interval
from posttrain.evals.plan import EVALUATIONS, Drawing, EvaluationProgress, EvaluationRequest, measure, slug
from posttrain.evals.ranking import pair_wins
from posttrain.evals.statistics import half_width
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.micro import split_rows
from posttrain.recipes.sections import Word
from posttrain.store.environment import describe_environment
from posttrain.store.rollouts import prompt_text
from posttrain.tasks.base import Task, build_task, choose_task
from posttrain.types import Rollout

# Answers whose lengths differ by at most this share of the longer one count as equally long.
SIMILAR_LENGTH = 0.1

TOKENS_PER_MICRO = 1 << 14

# What scores answers, or compares two of them.
Judge = Callable[[Sequence[Rollout]], Sequence[float | None]] | PairJudge


@dataclass(frozen=True, slots=True)
class Contest:
    """What two models, A and B, answered to the prompt of item ``index``: one or several answers each."""

    index: int
    a: tuple[Rollout, ...]
    b: tuple[Rollout, ...]


@dataclass(slots=True)
class WinRate:
    """``results`` by name, and one record per item. ``others``: results by judges beside the one that counts."""

    results: dict[str, float] = field(default_factory=dict)
    items: list[dict[str, Any]] = field(default_factory=list)
    others: dict[str, dict[str, float]] = field(default_factory=dict)

    def add_judge(self, name: str, other: WinRate) -> None:
        """What another judge says of the same answers: its results, and its score of each (``scores``)."""
        self.others[name] = other.results
        for item, judged in zip(self.items, other.items, strict=True):
            for side in ("a", "b"):
                for answer, again in zip(item[side], judged[side], strict=True):
                    answer.setdefault("scores", {})[name] = again["score"]


def pair_up(a: Sequence[Rollout], b: Sequence[Rollout]) -> list[Contest]:
    """The items that both models have answered, by ``Rollout.prompt_index``, in order."""
    sides: tuple[dict[int, list[Rollout]], dict[int, list[Rollout]]] = ({}, {})
    for side, rollouts in zip(sides, (a, b), strict=True):
        for rollout in rollouts:
            side.setdefault(rollout.prompt_index, []).append(rollout)
    return [Contest(i, tuple(sides[0][i]), tuple(sides[1][i])) for i in sorted(sides[0].keys() & sides[1].keys())]


def judge_by_grade(rollouts: Sequence[Rollout]) -> list[float]:
    """1 for an answer that the task's grader finds right, else 0."""
    return [float(rollout.outcome == "right") for rollout in rollouts]


def measure_wins(contests: Sequence[Contest], judge: Judge) -> WinRate:
    """How often an answer of A is judged better than one of B; a tie counts one half.

    Within an item every answer of A meets every answer of B; the mean of these is one number per item, and the
    intervals count items. An answer that the judge cannot score loses against one that it can (``unscored`` counts
    them).

    ``win_rate``, with its parts ``wins``, ``ties``, ``losses``. ``characters_a``, ``characters_b``: mean lengths.
    Judges like long answers, therefore also ``win_rate_similar``: over meetings of answers whose lengths differ by
    at most 10 % of the longer, in the ``n_similar`` items that have some. A judge that compares adds what
    it is drawn by (``PairJudge.meet``).

    Raises:
        ValueError: no item.
    """
    if not contests:
        raise ValueError("no item that both models answered")
    win_rate = WinRate()
    scores, worth, facts = _judged(contests, judge)
    similar: list[float] = []
    unscored = 0
    for contest, (of_a, of_b), outcomes in zip(contests, scores, worth, strict=True):
        unscored += sum(score is None for score in (*of_a, *of_b))
        meetings = _meetings(contest)
        lengths = [[len(rollout.text) for rollout in side] for side in (contest.a, contest.b)]
        alike = [w for w, (i, j) in zip(outcomes, meetings, strict=True) if _similar(lengths[0][i], lengths[1][j])]
        item = _item(contest, of_a, of_b, outcomes) | {"num_similar": len(alike)}
        if alike:
            similar.append(statistics.fmean(alike))
            item["win_rate_similar"] = similar[-1]
        win_rate.items.append(item)
    draws = max(1, min(len(contest.a) for contest in contests), min(len(contest.b) for contest in contests))
    num_answers = sum(len(contest.a) + len(contest.b) for contest in contests)
    compares = isinstance(judge, PairJudge)
    win_rate.results = {"n": float(len(contests)), "unscored": 0.0 if compares else unscored / num_answers} | facts
    win_rate.results |= with_interval("win_rate", [item["win_rate"] for item in win_rate.items], draws)
    for name in ("wins", "ties", "losses", "characters_a", "characters_b"):
        win_rate.results[name] = statistics.fmean(item[name] for item in win_rate.items)
    win_rate.results["n_similar"] = float(len(similar))
    if similar:
        win_rate.results |= with_interval("win_rate_similar", similar, draws)
    return win_rate


Scores = tuple[list[float | None], list[float | None]]


def _meetings(contest: Contest) -> list[tuple[int, int]]:
    return [(i, j) for i in range(len(contest.a)) for j in range(len(contest.b))]


def _judged(contests: Sequence[Contest], judge: Judge) -> tuple[list[Scores], list[list[float]], dict[str, float]]:
    """For each contest the scores of its answers and the worth of A's in each meeting; facts about the judge."""
    if isinstance(judge, PairJudge):
        asked = [
            (prompt_text(contest.a[i].example), contest.a[i].text, contest.b[j].text)
            for contest in contests
            for i, j in _meetings(contest)
        ]
        told, facts = judge.meet(asked)
        worth = iter(told)
        scores: list[Scores] = [([None] * len(contest.a), [None] * len(contest.b)) for contest in contests]
        return scores, [[next(worth) for _ in _meetings(contest)] for contest in contests], facts
    numbers = iter(judge([rollout for contest in contests for rollout in (*contest.a, *contest.b)]))
    scores = [([next(numbers) for _ in contest.a], [next(numbers) for _ in contest.b]) for contest in contests]
    outcomes = [
        pair_wins([_number(of_a[i]) for i, _ in met], [_number(of_b[j]) for _, j in met])
        for (of_a, of_b), met in zip(scores, map(_meetings, contests), strict=True)
    ]
    return scores, outcomes, {}


def _item(
    contest: Contest, of_a: Sequence[float | None], of_b: Sequence[float | None], outcomes: Sequence[float]
) -> dict[str, Any]:
    example = contest.a[0].example
    return {
        "id": example.id,
        "index": contest.index,
        "win_rate": statistics.fmean(outcomes),
        "wins": sum(worth > 0.5 for worth in outcomes) / len(outcomes),
        "ties": outcomes.count(0.5) / len(outcomes),
        "losses": sum(worth < 0.5 for worth in outcomes) / len(outcomes),
        "characters_a": statistics.fmean(len(rollout.text) for rollout in contest.a),
        "characters_b": statistics.fmean(len(rollout.text) for rollout in contest.b),
        "a": [_answer(rollout, score) for rollout, score in zip(contest.a, of_a, strict=True)],
        "b": [_answer(rollout, score) for rollout, score in zip(contest.b, of_b, strict=True)],
    }


def _answer(rollout: Rollout, score: float | None) -> dict[str, Any]:
    return {"text": rollout.text, "outcome": rollout.outcome, "extracted": rollout.extracted, "score": score}


def _number(score: float | None) -> float:
    return -math.inf if score is None else score


def _similar(left: int, right: int) -> bool:
    return abs(left - right) <= SIMILAR_LENGTH * max(left, right)


@torch.no_grad()
def measure_kl(answers: Sequence[Rollout], own: Forward, other: Forward, *, tokens_per_micro: int) -> list[float]:
    """KL(own‖other) of each answer that ``own`` sampled, in nats: the sum over its tokens of the exact KL between the
    two next-token distributions (``evals/drift.py``), both at their ``Forward.temperature``.

    The mean over answers estimates the KL of the two distributions over whole answers.

    Raises:
        UsageError: the other model's vocabulary lacks a likely token.
    """
    batch = answers_as_batch(answers)
    kl = [0.0] * len(answers)
    for rows in split_rows(batch, min(tokens_per_micro, MAX_TOKENS)):
        sums = kl_of_states(batch.select(rows), own, nullcontext(other)).sum(dim=1)
        for row, value in zip(rows, sums.tolist(), strict=True):
            kl[row] = value
    return kl


def summarize_kl(name: str, answers: Sequence[Rollout], kl: Sequence[float]) -> dict[str, float]:
    """``name`` per answer, with the interval of a mean over items (``_low``, ``_high``), and ``<name>_per_token``."""
    of_item: dict[int, list[float]] = {}
    for rollout, value in zip(answers, kl, strict=True):
        of_item.setdefault(rollout.prompt_index, []).append(value)
    means = [statistics.fmean(values) for values in of_item.values()]
    center, half = statistics.fmean(means), half_width(means)
    tokens = sum(rollout.completion.num_own for rollout in answers)
    return {
        name: center,
        f"{name}_low": max(0.0, center - half),
        f"{name}_high": center + half,
        f"{name}_per_token": math.fsum(kl) / tokens,
    }


@dataclass(frozen=True)
class ContestPlan:
    """Two models whose words were checked: the task that was read, a template for each, the folder for the files.

    ``judges``: reward models, and files of judges, of which the first says who wins; none: the task's grader.
    """

    a: ModelSource
    b: ModelSource
    drawing: Drawing
    asked: EvaluationRequest
    judges: tuple[str, ...]
    task: Task
    task_word: Word
    templates: tuple[Word, Word]
    folder: Path

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides about the results."""
        drawing = self.drawing
        return {
            "a": self.a.name,
            "b": self.b.name,
            "judge": ", ".join(self.judges) or "the task's grader",
            "task": self.task_word.model_dump(),
            "templates": [word.model_dump() for word in self.templates],
            "n": drawing.n,
            "samples": drawing.samples,
            "temperature": drawing.temperature,
            "top_k": drawing.top_k,
            "top_p": drawing.top_p,
            "max_tokens": drawing.max_tokens,
            "seed": drawing.seed,
            "dropped": self.task.dropped,
        }


def plan_contest(asked: EvaluationRequest, judges: Sequence[str] = ()) -> ContestPlan:
    """Check what was asked of two models, A and B, as far as that goes without loading one.

    A task that is not named is that of A; a template, the model's own, or that of the one that has one.

    Raises:
        UsageError: words, options or combinations that cannot be.
    """
    if len(set(judges)) < len(judges):
        raise UsageError("--judge: the same judge is named twice")
    for name, words in (("task", asked.tasks), ("template", asked.templates)):
        if len(words) > 1:
            raise UsageError(f"--{name}: one at a time with --against")
    a, b = asked.models
    if a.label == b.label:
        a, b = (replace(source, label=f"{source.name} ({side})") for source, side in ((a, "A"), (b, "B")))
    for source in (a, b):
        source.refuse_scorer()
    word = choose_task(next(iter(asked.tasks), None), a.name, a.recipe)
    template = next(iter(asked.templates), None)
    drawing = replace(asked.drawing, max_tokens=asked.drawing.max_tokens or max(a.max_tokens, b.max_tokens), ks=())
    task = build_task(word, "--task")
    name = slug(f"against-{b.label}-{task_label(task)}")
    if a.run is None:
        name = slug(f"{a.label}-{name}")
    folder = asked.out or (a.run / "evaluation" if a.run else Path(EVALUATIONS)) / name
    refuse_other(folder)
    templates = (_template_of(template, a, b), _template_of(template, b, a))
    plan = ContestPlan(a, b, drawing, asked, tuple(judges), task, word, templates, folder)
    return plan if asked.out else replace(plan, folder=folder_of_its_own(folder, {"": plan.settings}))


def _template_of(named: Word | None, own: ModelSource, other: ModelSource) -> Word:
    """The template named, else the model's own, else that of the other one: it was trained with none."""
    teller = own if own.recipe is not None or other.recipe is None else other
    return complete_template(named, teller) or teller.template


def run_contest(
    plan: ContestPlan, judges: Mapping[str, Judge], progress: EvaluationProgress | None = None
) -> tuple[WinRate, list[str]]:
    """Sample from both models, judge (the first of ``judges`` counts; none: the task's grader) and measure the KL.

    Returns what was found, and what must be known beside it.

    Raises:
        UsageError: no item that both answered, or none with a gold answer and no judge.
    """
    asked = plan.asked
    models, evaluations = [], []
    for source, template in zip((plan.a, plan.b), plan.templates, strict=True):
        model = open_model(source, template, engine=asked.engine, dtype=asked.dtype, device=asked.device)
        models.append(model)
        evaluations.append(measure(model, plan.task, plan.drawing, progress=progress))
    contests = pair_up(evaluations[0].rollouts, evaluations[1].rollouts)
    notes = _missing(evaluations, contests)
    if not judges:
        contests, left = graded(contests, plan.task)
        notes += left
    (_, first), *others = judges.items() or [("", judge_by_grade)]
    win_rate = measure_wins(contests, first)
    for name, judge in others:
        win_rate.add_judge(name, measure_wins(contests, judge))
    if win_rate.results["unscored"]:
        notes.append(f"{win_rate.results['unscored']:.1%} of the answers could not be scored by the judge; they lose")
    for item, contest in zip(win_rate.items, contests, strict=True):
        example = contest.a[0].example
        item |= {"question": prompt_text(example), "answer": example.answer}
    _add_accuracies(win_rate.results, evaluations)
    reason = why_no_kl(models[0], models[1], plan.drawing, contests)
    if reason is None:
        add_kl(win_rate, models, plan.drawing, contests)
    else:
        notes.append(f"no KL: {reason}")
    return win_rate, notes


def _missing(evaluations: Sequence[Evaluation], contests: Sequence[Contest]) -> list[str]:
    """Raises ``UsageError`` where no item is left."""
    n = int(evaluations[0].results["n"])
    if not contests:
        raise UsageError("no prompt fits into the contexts of both models")
    left = n - len(contests)
    return [f"{left} of {n} prompts do not fit into one of the models; they are left out"] if left else []


def graded(contests: Sequence[Contest], task: Task) -> tuple[list[Contest], list[str]]:
    """The contests whose answers were all graded, and what to say of the others.

    Raises:
        UsageError: none was; a judge is needed.
    """
    kept = [c for c in contests if all(rollout.outcome != "ungraded" for rollout in (*c.a, *c.b))]
    if not kept:
        raise UsageError(
            f"task {task.name!r} has no gold answers by which one answer could win; give --judge RUN, the run of a "
            "reward model, or --judge FILE.yaml, which names a language model (docs/judges.md)"
        )
    left = len(contests) - len(kept)
    return kept, [f"{left} items have no gold answer; they are left out"] if left else []


def _add_accuracies(results: dict[str, float], evaluations: Sequence[Evaluation]) -> None:
    for side, evaluation in zip("ab", evaluations, strict=True):
        if evaluation.results.get("num_graded", 0.0) > 0:
            for suffix in ("", "_low", "_high"):
                results[f"accuracy_{side}{suffix}"] = evaluation.results[f"accuracy{suffix}"]


def why_no_kl(a: OpenedModel, b: OpenedModel, drawing: Drawing, contests: Sequence[Contest]) -> str | None:
    """Why the KL between two models cannot be had here; None where it can."""
    if a.model is None or b.model is None:
        return "it needs both models in this process; use --engine native"
    if drawing.temperature == 0:
        return "greedy decoding draws from no distribution; give --temperature above 0"
    if drawing.top_k is not None or drawing.top_p < 1.0:
        return "the answers are drawn from cut distributions; leave --top-k and --top-p out"
    if a.tokenizer.get_vocab() != b.tokenizer.get_vocab():
        return "the two models have different tokenizers, so their distributions are over different tokens"
    if any(contest.a[0].prompt_ids != contest.b[0].prompt_ids for contest in contests):
        return "the two models are asked under different templates; give both one with --template"
    return None


def add_kl(win_rate: WinRate, models: Sequence[OpenedModel], drawing: Drawing, contests: Sequence[Contest]) -> None:
    """KL(A‖B) over A's answers and KL(B‖A) over B's , into results and items."""
    forwards = [Forward(model.model, drawing.temperature) for model in models]
    sides: tuple[list[Rollout], list[Rollout]] = (
        [rollout for contest in contests for rollout in contest.a],
        [rollout for contest in contests for rollout in contest.b],
    )
    for name, answers, (own, other) in zip(("ab", "ba"), sides, (forwards, forwards[::-1]), strict=True):
        kl = measure_kl(answers, own, other, tokens_per_micro=TOKENS_PER_MICRO)
        win_rate.results |= summarize_kl(f"kl_{name}", answers, kl)
        values = iter(kl)
        for item in win_rate.items:
            for answer in item[name[0]]:
                answer[f"kl_{name}"] = next(values)


def write_contest(plan: ContestPlan, win_rate: WinRate, notes: Sequence[str], page: str) -> None:
    """``items.jsonl``, ``summary.md`` and, last, ``results.json``; those of an earlier evaluation are replaced.

    Raises:
        StorageError: the disk is full or not writable.
    """
    content = {
        "evaluation": task_label(plan.task),
        "a": plan.a.label,
        "b": plan.b.label,
        "results": win_rate.results,
        **({"others": win_rate.others} if win_rate.others else {}),
        "notes": list(notes),
        "settings": plan.settings,
        "environment": describe_environment(),
    }
    write_records(plan.folder, win_rate.items, lambda: page, content)
