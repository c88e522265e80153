"""``posttrain evaluate A --against B``: whose answers win, and how far apart two models are."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.commands.console import Text, open_console
from posttrain.commands.evaluate.command import measure, print_table
from posttrain.commands.evaluate.files import ITEMS, RESULTS, SUMMARY, refuse_other
from posttrain.commands.evaluate.plan import EVALUATIONS, Drawing, drawing_of, slug, words_of
from posttrain.commands.evaluate.progress import choose_evaluation_progress
from posttrain.commands.evaluate.scorer import open_reward_model
from posttrain.commands.generate import ModelSource, Sampler, choose_task, complete_template, find_source, open_sampler
from posttrain.errors import UsageError
from posttrain.evals.generation import Evaluation, task_label
from posttrain.evals.win_rate import (
    Contest,
    Judge,
    WinRate,
    judge_by_grade,
    measure_kl,
    measure_wins,
    pair_up,
    summarize_kl,
)
from posttrain.models.forward.forward import Forward
from posttrain.recipes.sections import Word
from posttrain.reports.win_rate import contest_table, write_contest_page
from posttrain.reward_models.scoring import RewardModel
from posttrain.runs.environment import describe_environment
from posttrain.store.durable import replace_file, storage_errors
from posttrain.store.rollouts import prompt_text
from posttrain.tasks.base import Task, build_task
from posttrain.types import Rollout
from posttrain.untrusted import harmless

TOKENS_PER_MICRO = 1 << 14


@dataclass(frozen=True)
class ContestPlan:
    """Two models, what they are asked, under which templates, and how their answers are drawn."""

    a: ModelSource
    b: ModelSource
    task: Task
    task_word: Word
    templates: tuple[Word, Word]
    drawing: Drawing
    engine: Word
    judge: str | None
    folder: Path


def run_against(arguments: argparse.Namespace) -> int:
    """Sample from both models, judge, measure the KL both ways, print a table, write results and records."""
    plan = plan_contest(arguments)
    judge = _open_judge(plan.judge, arguments)
    console = open_console()
    samplers, evaluations = [], []
    with choose_evaluation_progress(console, arguments.quiet) as progress:
        for source, template in zip((plan.a, plan.b), plan.templates, strict=True):
            sampler = open_sampler(
                source,
                arguments.runs_dir,
                template,
                engine=plan.engine,
                dtype=arguments.dtype,
                device=arguments.device,
            )
            samplers.append(sampler)
            evaluations.append(measure(sampler, plan.task, plan.drawing, progress=progress))
    contests = pair_up(evaluations[0].rollouts, evaluations[1].rollouts)
    notes = _missing(evaluations, contests)
    if judge is None:
        contests, left = graded(contests, plan.task)
        notes += left
    found = measure_wins(contests, judge or judge_by_grade)
    if found.results["unscored"]:
        notes.append(f"{found.results['unscored']:.1%} of the answers could not be scored by the judge; they lose")
    for item, contest in zip(found.items, contests, strict=True):
        item["question"] = prompt_text(contest.a[0].example)
    _add_accuracies(found.results, evaluations)
    reason = why_no_kl(samplers[0], samplers[1], plan.drawing, contests)
    if reason is None:
        add_kl(found, samplers, plan.drawing, contests)
    else:
        notes.append(f"no KL: {reason}")
    table = contest_table(task_label(plan.task), plan.a.label, plan.b.label, found.results)
    write_contest(plan, found, notes, write_contest_page(table, notes, settings_of(plan), found.items))
    if not arguments.quiet:
        print_table(console, table)
        for note in notes:
            console.print(Text(note, style="dim"), soft_wrap=True)
        console.print(Text(f"summary, results and every answer: {plan.folder}"), soft_wrap=True)
    return 0


def plan_contest(arguments: argparse.Namespace) -> ContestPlan:
    """Check what was asked for as far as that goes without loading a model.

    Answers are drawn at temperature 1 unless another is given: a KL is between distributions.

    Raises:
        UsageError: words, options or combinations that cannot be.
    """
    for option in ("compare", "best_of", "k"):
        if getattr(arguments, option):
            raise UsageError(f"--{option.replace('_', '-')}: leave it out with --against, which it says nothing to")
    if len(arguments.models) != 1:
        raise UsageError(f"--against: one model stands against it, not {len(arguments.models)}")
    a, b = (find_source(name, arguments.runs_dir) for name in (arguments.models[0], arguments.against))
    if a.label == b.label:
        a, b = (replace(source, label=f"{source.name} ({side})") for source, side in ((a, "A"), (b, "B")))
    for source in (a, b):
        source.refuse_scorer()
    words = words_of(arguments)
    for name in ("task", "template"):
        if len(words[name]) > 1:
            raise UsageError(f"--{name}: one at a time with --against")
    word = choose_task(next(iter(words["task"]), None), a.name, a.recipe)
    template = next(iter(words["template"]), None)
    drawn = vars(arguments) | {"temperature": 1.0 if arguments.temperature is None else arguments.temperature}
    drawing = drawing_of(argparse.Namespace(**drawn))
    drawing = replace(drawing, max_tokens=drawing.max_tokens or max(a.max_tokens, b.max_tokens), ks=())
    task = build_task(word, "--task")
    name = slug(f"against-{b.label}-{task_label(task)}")
    if a.run is None:
        name = slug(f"{a.label}-{name}")
    folder = Path(arguments.out) if arguments.out else (a.run / "evaluation" if a.run else Path(EVALUATIONS)) / name
    refuse_other(folder)
    templates = [_template_of(template, own, other) for own, other in ((a, b), (b, a))]
    return ContestPlan(
        a=a,
        b=b,
        task=task,
        task_word=word,
        templates=(templates[0], templates[1]),
        drawing=drawing,
        engine=words["engine"][0],
        judge=arguments.judge,
        folder=folder,
    )


def _template_of(given: Word | None, own: ModelSource, other: ModelSource) -> Word:
    """The template named, else the model's own, else that of the other one: it was trained with none."""
    teller = own if own.recipe is not None or other.recipe is None else other
    return complete_template(given, teller) or teller.template


def _open_judge(name: str | None, arguments: argparse.Namespace) -> Judge | None:
    if name is None:
        return None
    model: RewardModel = open_reward_model(name, arguments.runs_dir, device=arguments.device)
    return lambda rollouts: model.score(
        [r.example for r in rollouts], [r.text for r in rollouts], [r.completion.finish for r in rollouts]
    )


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
            "reward model"
        )
    left = len(contests) - len(kept)
    return kept, [f"{left} items have no gold answer; they are left out"] if left else []


def _add_accuracies(results: dict[str, float], evaluations: Sequence[Evaluation]) -> None:
    for side, evaluation in zip("ab", evaluations, strict=True):
        if evaluation.results.get("num_graded", 0.0) > 0:
            for suffix in ("", "_low", "_high"):
                results[f"accuracy_{side}{suffix}"] = evaluation.results[f"accuracy{suffix}"]


def why_no_kl(a: Sampler, b: Sampler, drawing: Drawing, contests: Sequence[Contest]) -> str | None:
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


def add_kl(found: WinRate, samplers: Sequence[Sampler], drawing: Drawing, contests: Sequence[Contest]) -> None:
    """KL(A‖B) over A's answers and KL(B‖A) over B's (``evals/win_rate.py``), into results and items."""
    forwards = [Forward(sampler.model, drawing.temperature) for sampler in samplers]
    sides: tuple[list[Rollout], list[Rollout]] = (
        [rollout for contest in contests for rollout in contest.a],
        [rollout for contest in contests for rollout in contest.b],
    )
    for name, answers, (own, other) in zip(("ab", "ba"), sides, (forwards, forwards[::-1]), strict=True):
        kl = measure_kl(answers, own, other, tokens_per_micro=TOKENS_PER_MICRO)
        found.results |= summarize_kl(f"kl_{name}", answers, kl)
        values = iter(kl)
        for item in found.items:
            for answer in item[name[0]]:
                answer[f"kl_{name}"] = next(values)


def settings_of(plan: ContestPlan) -> dict[str, Any]:
    """All that decides about the results."""
    drawing = plan.drawing
    return {
        "a": plan.a.name,
        "b": plan.b.name,
        "judge": plan.judge or "the task's grader",
        "task": plan.task_word.model_dump(),
        "templates": [word.model_dump() for word in plan.templates],
        "n": drawing.n,
        "samples": drawing.samples,
        "temperature": drawing.temperature,
        "top_k": drawing.top_k,
        "top_p": drawing.top_p,
        "max_tokens": drawing.max_tokens,
        "seed": drawing.seed,
        "dropped": plan.task.dropped,
    }


def write_contest(plan: ContestPlan, found: WinRate, notes: Sequence[str], page: str) -> None:
    """``items.jsonl``, ``summary.md`` and, last, ``results.json``; those of an earlier evaluation are replaced.

    Raises:
        StorageError: the disk is full or not writable.
    """
    folder = plan.folder
    with storage_errors("evaluation", folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULTS).unlink(missing_ok=True)
    replace_file(folder / ITEMS, b"".join(json.dumps(item).encode() + b"\n" for item in found.items))
    replace_file(folder / SUMMARY, harmless(page).encode())
    content: Mapping[str, Any] = {
        "evaluation": task_label(plan.task),
        "a": plan.a.label,
        "b": plan.b.label,
        "results": found.results,
        "notes": list(notes),
        "settings": settings_of(plan),
        "environment": describe_environment(),
    }
    replace_file(folder / RESULTS, json.dumps(content, indent=1).encode() + b"\n")
