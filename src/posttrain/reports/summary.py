"""The files that show a finished run: ``curves.png``, ``results.json``, ``report.html``."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.activity import phase
from posttrain.data.render.template import build_template
from posttrain.recipes.panel_prompts import MAX_PROMPTS, PANEL
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import Component
from posttrain.reports.charts import draw_png
from posttrain.reports.curves import choose_panels
from posttrain.reports.page import write_html
from posttrain.reports.run_page import (
    Chapter,
    ReportStage,
    RunReport,
    Transcript,
    TranscriptAnswer,
    render_report,
    turns_of,
)
from posttrain.runs.directory import RunDirectory, State
from posttrain.runs.listing import seconds_of
from posttrain.runs.models import read_run_recipe
from posttrain.store.durable import replace_file, sayable
from posttrain.store.metric_names import REWARD, Metric
from posttrain.store.metrics import EvaluationPoint, MetricsLog, MetricsRow, evaluation_points, learning_warnings
from posttrain.store.reading import read_text_file
from posttrain.store.rollouts import RecordedRollout, RolloutStore
from posttrain.terminal.training_progress import show_duration
from posttrain.untrusted import allow_code_options, fitting

NUM_TRANSCRIPTS = 6
NUM_PANEL_STEPS = 6  # answers to each fixed prompt: columns
PHASES = ("generate_seconds", "score_seconds", "fill_seconds", "update_seconds", "evaluation_seconds")


@phase("writing the report")
def write_summary(folder: str | Path) -> Path:
    """Write a run's summary, replacing an older one. Returns the report's path.

    Raises:
        DataError: a damaged record.
        StorageError: the disk is full or not writable.
    """
    run = RunDirectory(folder)
    recipe = read_run_recipe(run.folder)
    rows = MetricsLog(run.folder / "metrics.jsonl").read()
    points = evaluation_points(rows)
    title = f"{run.folder.name}: {recipe.objective.name} on {recipe.task.name}"
    primary = run.primary_metric()
    panels = choose_panels(rows, primary)
    if panels:
        draw_png(panels, title, run.folder / "curves.png")
    write_results(run, recipe.fingerprint(), rows, points)
    lead = [describe_settings(recipe)]
    lead += [f"Warning: {warning}." for warning in learning_warnings(rows).values()]
    fixed_prompts: list[Transcript] = []
    if recipe.eval.prompts:
        fixed_prompts = _fixed_prompts(run.folder, recipe.prompt.template, points)
    report = RunReport(
        title=title,
        lead=" ".join(lead),
        primary=primary,
        stages=_stages(points, primary),
        stages_note=note_on(points, primary),
        chapters=[chapter_of(run.folder, f"Training {run.folder.name}", "Recorded metrics by step.")],
        fixed_prompts=fixed_prompts,
        transcripts=_before_and_after(run.folder, recipe.prompt.template, points, primary),
        transcripts_note=f"The same {primary.of}, before training and after it; the first, nothing is picked.",
        environment=last_start(run),
        commands=_next_commands(run, writes=not recipe.trains_scorer),
    )
    return write_html(render_report(report), run.folder / "report.html")


def _next_commands(run: RunDirectory, *, writes: bool) -> list[tuple[str, str]]:
    """List next steps for a finished run, with commands. ``writes``: the run trained a policy."""
    folder = str(run.folder)
    options = allow_code_options(os.getcwd())  # allow code named by the recipe
    commands = []
    if writes:
        commands.append(("ask the trained model", ["posttrain", "generate", folder]))
    commands.append(("measure it again", ["posttrain", "evaluate", folder, *options]))
    again = ["posttrain", "train", str(run.recipe_path), "--run", f"{run.folder.name}-again", *options]
    commands.append(("train it again", again))
    return [(purpose, shlex.join(words)) for purpose, words in commands]


def describe_settings(recipe: Recipe) -> str:
    """Describe what was trained and how, from actual settings rather than the recipe's description."""
    model = recipe.model
    rollout = recipe.rollout
    data = recipe.data
    train = recipe.train
    place = Path(model.name)
    parts = []
    if model.init is not None:
        parts.append(f"a new model ({model.init.architecture})")
    elif place.match("*/checkpoints/step-*"):
        parts.append(f"{place.parts[-3]}, {place.name}")
    else:
        parts.append(model.name)
    if model.adapter is not None:
        parts.append(f"LoRA of rank {model.adapter.rank}")
    if model.load_bits is not None:
        parts.append(f"loaded in {model.load_bits} bits")
    if rollout is not None:
        parts.append(f"{rollout.num_prompts} prompts × {rollout.group_size} answers of {rollout.max_tokens} tokens")
    if data is not None:
        parts.append(f"{data.batch_size} examples a step, {data.max_length:,} tokens each at most")
    if train.steps is not None:
        parts.append(f"{train.steps:,} steps")
    else:
        parts.append(f"{train.num_epochs:g} epochs")
    parts += [f"learning rate {train.lr:g}", train.precision, f"seed {train.seed}"]
    return " · ".join(parts)


def write_results(
    run: RunDirectory, fingerprint: str, rows: Sequence[MetricsRow], points: Sequence[EvaluationPoint]
) -> None:
    """Write ``results.json``: state, plus first, best and last evaluation per task.

    ``fingerprint``: the recipe's fingerprint.
    """
    primary = run.primary_metric()
    evaluations = {}
    for task, own in _by_task(points).items():
        values = [primary.value(point.results) for point in own]
        ranked = [(primary.goodness(value), place) for place, value in enumerate(values) if value is not None]
        chosen = {"first": own[0]}
        if ranked:
            chosen["best"] = own[max(ranked)[1]]
        chosen["last"] = own[-1]
        evaluations[task] = {name: {**point.results, "step": point.step} for name, point in chosen.items()}
    content = {
        "run": run.folder.name,
        "state": _state_of(run),
        "step": max((row.step for row in rows), default=0),
        "fingerprint": fingerprint,
        "seconds": seconds_of(rows),
        "primary_metric": primary.name,
        "evaluations": evaluations,
    }
    text = json.dumps(sayable(content), indent=1, allow_nan=False) + "\n"
    replace_file(run.folder / "results.json", text.encode(), durable=False)


def _state_of(run: RunDirectory) -> State | None:
    """Current state. After the last step a run counts as finished, although ``status.json`` is only updated later."""
    status = run.read_status()
    if status is None:
        return None
    if status.state == "running" and status.step >= status.steps > 0:
        return "finished"
    return status.state


def chapter_of(folder: Path, title: str, text: str) -> Chapter:
    """Build a run's chapter: curves, time per phase, recipe."""
    rows = MetricsLog(folder / "metrics.jsonl").read()
    totals = {name: sum(row.timing.get(name, 0.0) for row in rows) for name in PHASES}
    spent = [f"{name.removesuffix('_seconds')} {show_duration(used)}" for name, used in totals.items() if used >= 0.5]
    info = [("steps", str(max((row.step for row in rows), default=0))), ("time", show_duration(seconds_of(rows)))]
    if spent:
        info.append(("of which", ", ".join(spent)))
    peak = max((row.timing.get("peak_memory_bytes", 0.0) for row in rows), default=0.0)
    if peak:
        info.append(("peak memory", f"{peak / 2**20:,.0f} MiB"))
    balanced = describe_balances(folder / "rollouts.db")
    if balanced:
        info.append(("balances", balanced))
    panels = choose_panels(rows, RunDirectory(folder).primary_metric())
    recipe = read_text_file(folder / "recipe.yaml")
    return Chapter(title, text, panels, recipe, info)


def describe_balances(path: Path) -> str:
    """Summarize how many updates balance and which do not. Empty without records.

    Raises:
        DataError: a damaged file.
    """
    if not path.exists():
        return ""
    count, violated = RolloutStore(path, read_only=True).count_updates()
    if not count:
        return ""
    if not violated:
        return f"{count:,} batches, all balance"
    parts = [f"{name} of {len(steps):,} (first: step {steps[0]:,})" for name, steps in violated.items()]
    return f"{count:,} batches; what does not balance: {', '.join(parts)}"


def last_start(run: RunDirectory) -> dict[str, Any]:
    """Return versions and hardware of the run's newest start, as the report shows them."""
    newest = run.newest_start()
    shown = {}
    if newest.get("command"):
        shown["command"] = shlex.join(map(str, newest["command"]))
    for name in ("started", "versions", "hardware", "git"):
        if newest.get(name):
            shown[name] = newest[name]
    return shown


def note_on(points: Sequence[EvaluationPoint], primary: Metric) -> str:
    """Note about evaluated examples, since recipes may evaluate on their training split."""
    trained = [name for name in dict.fromkeys(point.name for point in points) if name.endswith("/train")]
    but = ", never trained on"
    if trained:
        but = f", but {', '.join(trained)}: of the split that was trained on"
    return f"Held-out {primary.of}{but}. Before the first update and after the last."


def _stages(points: Sequence[EvaluationPoint], primary: Metric) -> list[ReportStage]:
    measured = [point for point in points if primary.value(point.results) is not None]
    stages = []
    for task, own in _by_task(measured).items():
        first_and_last = own[:1]
        if len(own) > 1:
            first_and_last.append(own[-1])
        for point in first_and_last:
            description = task
            if "n" in point.results:
                description = f"{task}, n = {point.results['n']:.0f}"
            stages.append(ReportStage(_label(point.step), description, point.results))
    return stages


def _by_task(points: Sequence[EvaluationPoint]) -> dict[str, list[EvaluationPoint]]:
    by_task: dict[str, list[EvaluationPoint]] = {}
    for point in points:
        by_task.setdefault(point.name, []).append(point)
    return by_task


def _label(step: int) -> str:
    if step == 0:
        return "before training"
    return f"after {step} steps"


def _fixed_prompts(folder: Path, template: Component, points: Sequence[EvaluationPoint]) -> list[Transcript]:
    """Collect fixed prompts (``eval.prompts``) with their answers at evaluations spread over the run."""
    steps = spread_steps({point.step for point in points})
    store = RolloutStore(folder / "rollouts.db", read_only=True)
    extract = build_template(template).extract
    by_prompt: dict[str, list[RecordedRollout]] = {}
    texts = []
    for step in steps:
        for row in store.evaluations(PANEL, step, limit=MAX_PROMPTS):
            by_prompt.setdefault(row.example_id, []).append(row)
            texts += [row.transcript, row.prompt]
    fit = fitting(texts)
    transcripts = []
    for rows in by_prompt.values():
        answers = []
        for row in rows:
            answer = answer_of(_label(row.step), row, extract)
            answers.append(replace(answer, text=fit(answer.text)))
        transcripts.append(Transcript(fit(rows[0].prompt), None, answers))
    return transcripts


def spread_steps(steps: Collection[int]) -> list[int]:
    """Return the first step, the last, and others evenly between: at most ``NUM_PANEL_STEPS``, in order."""
    ordered = sorted(steps)
    last = len(ordered) - 1
    if last < NUM_PANEL_STEPS:
        return ordered
    return [ordered[round(place * last / (NUM_PANEL_STEPS - 1))] for place in range(NUM_PANEL_STEPS)]


def _before_and_after(
    folder: Path, template: Component, points: Sequence[EvaluationPoint], primary: Metric
) -> list[Transcript]:
    """First problems answered in both first and last evaluations."""
    if not points:
        return []
    task = points[0].name
    steps = [point.step for point in points if point.name == task]
    store = RolloutStore(folder / "rollouts.db", read_only=True)
    extract = build_template(template).extract
    columns = {}
    for step in (steps[0], max(steps)):  # possibly identical
        columns[_label(step)] = {row.example_id: row for row in store.evaluations(task, step)}
    first = columns[_label(steps[0])]
    shared = [key for key in first if all(key in rows for rows in columns.values())][:NUM_TRANSCRIPTS]
    texts = []
    for rows in columns.values():
        for key in shared:
            texts += [rows[key].transcript, rows[key].prompt, rows[key].answer or ""]
    fit = fitting(texts)
    by_reward = primary.name == REWARD.name
    transcripts = []
    for key in shared:
        answers = []
        for label, rows in columns.items():
            answer = answer_of(label, rows[key], extract, by_reward)
            answers.append(replace(answer, text=fit(answer.text)))
        question = fit(first[key].prompt)
        gold = first[key].answer
        if gold is not None:
            gold = fit(gold)
        transcripts.append(Transcript(question, gold, answers, turns_of(question)))
    return transcripts


def answer_of(
    label: str, row: RecordedRollout, extract: Callable[[str], str | None], tells_reward: bool = False
) -> TranscriptAnswer:
    """Format a recorded completion as a transcript column. ``tells_reward``: no gold answer, so show its reward."""
    is_correct = None
    if row.outcome != "ungraded":
        is_correct = row.parts.get("correct") == 1.0
    reward = None
    if tells_reward:
        reward = row.reward
    return TranscriptAnswer(
        label=label,
        text=row.transcript,
        is_correct=is_correct,
        reward=reward,
        extracted=extract(row.completion),
        num_tokens=row.num_own,
        is_cut=row.finish == "length",
    )
