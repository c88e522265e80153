"""What is left for the eye when a run ends: ``curves.png``, ``results.json``, ``report.html``."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from posttrain.commands.progress import show_duration
from posttrain.recipes.recipe import Recipe
from posttrain.render.template import build_template
from posttrain.reports.charts import draw_png
from posttrain.reports.curves import choose_panels
from posttrain.reports.page import write_html
from posttrain.reports.run import Answer, Chapter, Report, Stage, Transcript, render_report, turns_of
from posttrain.runs.directory import RunDirectory
from posttrain.runs.models import read_run_recipe
from posttrain.store.durable import replace_file, sayable
from posttrain.store.headline import REWARD, Headline
from posttrain.store.metrics import EvaluationPoint, MetricsLog, MetricsRow, evaluation_points
from posttrain.store.reading import read_text
from posttrain.store.rollouts import RecordedRollout, RolloutStore
from posttrain.untrusted import consent_options, fitting

NUM_TRANSCRIPTS = 6
PHASES = ("generate_seconds", "score_seconds", "fill_seconds", "update_seconds", "evaluation_seconds")


def write_summary(folder: str | Path) -> Path:
    """Draw and write what a run's records say; returns the report's path. Anything older is replaced.

    Raises:
        DataError: a record of the run is damaged.
        StorageError: the disk is full or not writable.
    """
    run = RunDirectory(folder)
    recipe = read_run_recipe(run.folder)
    rows = MetricsLog(run.folder / "metrics.jsonl").read()
    points = evaluation_points(rows)
    title = f"{run.folder.name}: {recipe.objective.name} on {recipe.task.name}"
    headline = run.headline()
    panels = choose_panels(rows, headline)
    if panels:
        draw_png(panels, title, run.folder / "curves.png")
    write_results(run, recipe, rows, points)
    leave, folder = consent_options(os.getcwd()), str(run.folder)  # for the code that the recipe names
    again = ["posttrain", "train", str(run.recipe_path), "--run", f"{run.folder.name}-again", *leave]
    commands = [("measure it again", ["posttrain", "evaluate", folder, *leave]), ("train it again", again)]
    if not recipe.trains_scorer:
        commands.insert(0, ("ask the trained model", ["posttrain", "generate", folder]))
    report = Report(
        title=title,
        lead=recipe.description or f"{recipe.model.name}, trained with {recipe.objective.name}.",
        headline=headline,
        stages=_stages(points, headline),
        stages_note=note_on(points, headline),
        chapters=[chapter_of(run.folder, f"Training {run.folder.name}", "What the run recorded, step by step.")],
        transcripts=_before_and_after(run.folder, recipe, points),
        transcripts_note=f"The same {headline.of}, before training and after it; the first, nothing is picked.",
        environment=last_start(run),
        commands=[(what, shlex.join(words)) for what, words in commands],
    )
    return write_html(render_report(report), run.folder / "report.html")


def write_results(
    run: RunDirectory, recipe: Recipe, rows: Sequence[MetricsRow], points: Sequence[EvaluationPoint]
) -> Path:
    """``results.json``: where the run stands and its first, best and last evaluation of each task."""
    headline, evaluations = run.headline(), {}
    for task in dict.fromkeys(point.name for point in points):
        own = [point for point in points if point.name == task]
        told = [("first", own[0]), ("last", own[-1])]
        measured = [(value, point) for point in own if (value := headline.value(point.results)) is not None]
        if measured:  # what was never measured has no best
            best = max(measured, key=lambda one: (headline.goodness(one[0]), one[1].step))[1]  # as checkpoints/best
            told.insert(1, ("best", best))
        evaluations[task] = {name: {**point.results, "step": point.step} for name, point in told}
    status = run.read_status()
    content = {
        "run": run.folder.name,
        "state": status.state if status is not None else None,
        "step": max((row.step for row in rows), default=0),
        "fingerprint": recipe.fingerprint(),
        "seconds": seconds_of(rows),
        "headline": asdict(headline),
        "evaluations": evaluations,
    }
    path = run.folder / "results.json"
    replace_file(path, json.dumps(sayable(content), indent=1, allow_nan=False).encode() + b"\n", durable=False)
    return path


def seconds_of(rows: Sequence[MetricsRow]) -> float:
    """Seconds spent in steps and evaluations, over all starts of the run."""
    return sum(row.timing.get(name, 0.0) for row in rows for name in ("step_seconds", "evaluation_seconds"))


def chapter_of(folder: Path, title: str, text: str) -> Chapter:
    """A report's chapter on one run: curves, where the time went, recipe."""
    rows = MetricsLog(folder / "metrics.jsonl").read()
    totals = {name: sum(row.timing.get(name, 0.0) for row in rows) for name in PHASES}
    facts = [("steps", str(max((row.step for row in rows), default=0))), ("time", show_duration(seconds_of(rows)))]
    spent = [
        f"{name.removesuffix('_seconds')} {show_duration(value)}" for name, value in totals.items() if value >= 0.5
    ]
    if spent:
        facts.append(("of which", ", ".join(spent)))
    peak = max((row.timing.get("peak_memory_bytes", 0.0) for row in rows), default=0.0)
    if peak:
        facts.append(("peak memory", f"{peak / 2**20:,.0f} MiB"))
    panels = choose_panels(rows, RunDirectory(folder).headline())
    return Chapter(title, text, panels, read_text(folder / "recipe.yaml"), facts)


def last_start(run: RunDirectory) -> dict[str, Any]:
    """Versions and hardware of the run's newest start, as the report shows them."""
    starts = run.read_environment().get("starts", [])
    if not starts:
        return {}
    newest = starts[-1]
    shown = {name: newest.get(name) for name in ("started", "versions", "hardware", "git") if newest.get(name)}
    command = newest.get("command")
    return {"command": shlex.join(map(str, command)), **shown} if command else shown


def note_on(points: Sequence[EvaluationPoint], headline: Headline) -> str:
    """Note on the measured examples: a recipe may have its training split measured, too."""
    trained = [name for name in dict.fromkeys(point.name for point in points) if name.endswith("/train")]
    but = f", but {', '.join(trained)}: of the split that was trained on" if trained else ", never trained on"
    return f"Held-out {headline.of}{but}. Before the first update and after the last."


def _stages(points: Sequence[EvaluationPoint], headline: Headline) -> list[Stage]:
    stages = []
    points = [point for point in points if headline.value(point.results) is not None]
    for task in dict.fromkeys(point.name for point in points):
        own = [point for point in points if point.name == task]
        for point in own[:1] + own[1:][-1:]:
            label = "before training" if point.step == 0 else f"after {point.step} steps"
            count = f", n = {point.results['n']:.0f}" if "n" in point.results else ""
            stages.append(Stage(label, f"{task}{count}", point.results))
    return stages


def _before_and_after(folder: Path, recipe: Recipe, points: Sequence[EvaluationPoint]) -> list[Transcript]:
    if not points:
        return []
    task, first, last = points[0].name, points[0].step, max(p.step for p in points if p.name == points[0].name)
    store = RolloutStore(folder / "rollouts.db", read_only=True)
    extract = build_template(recipe.prompt.template).extract
    columns: list[tuple[str, Mapping[str, RecordedRollout]]] = []
    for step in dict.fromkeys((first, last)):
        label = "before training" if step == 0 else f"after {step} steps"
        columns.append((label, {row.example_id: row for row in store.evaluations(task, step)}))
    shared = [key for key in columns[0][1] if all(key in rows for _, rows in columns)][:NUM_TRANSCRIPTS]
    texts = [
        (row.transcript, row.prompt, row.answer or "") for _, rows in columns for row in map(rows.get, shared) if row
    ]
    fit = fitting([text for each in texts for text in each])
    transcripts, tells_reward = [], RunDirectory(folder).headline().metric == REWARD.metric
    for key in shared:
        given = [answer_of(label, rows[key], extract, tells_reward) for label, rows in columns]
        answers = [replace(answer, text=fit(answer.text)) for answer in given]
        asked = columns[0][1][key]
        question, gold = fit(asked.prompt), None if asked.answer is None else fit(asked.answer)
        transcripts.append(Transcript(question, gold, answers, turns_of(question)))
    return transcripts


def answer_of(label: str, row: RecordedRollout, extract: Any, tells_reward: bool = False) -> Answer:
    """A recorded completion as a column of a transcript; ``tells_reward`` where there is no gold answer."""
    return Answer(
        label=label,
        text=row.transcript,
        is_right=None if row.outcome == "ungraded" else row.parts.get("correct") == 1.0,
        reward=row.reward if tells_reward else None,
        extracted=extract(row.completion),
        num_tokens=row.num_own,
        is_cut=row.finish == "length",
    )
