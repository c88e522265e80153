"""``report.html``: one self-contained page that tells what a run, or a chain of runs, has done.

Pure: facts in, text out. Everything that a model or a data set wrote is escaped; the page loads
nothing from anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from posttrain.reports.charts.charts import draw_interval, draw_panel
from posttrain.reports.charts.panels import Panel
from posttrain.reports.charts.style import draw_page
from posttrain.store.durable import replace_file

TAG = re.compile(r"&lt;/?(?:think|answer|reasoning)&gt;")


@dataclass(frozen=True)
class Stage:
    """One model of the story with its held-out results (``evals/generation.py``)."""

    label: str
    description: str
    results: Mapping[str, float]


@dataclass(frozen=True)
class Answer:
    """What one model wrote for a problem. ``extracted``: the answer found in it, None for none."""

    label: str
    text: str
    is_right: bool
    extracted: str | None
    num_tokens: int
    is_cut: bool = False


@dataclass(frozen=True)
class Transcript:
    """The same problem, answered by each model."""

    question: str
    gold: str | None
    answers: Sequence[Answer]


@dataclass(frozen=True)
class Chapter:
    """One training run: its curves, what to look for, its recipe."""

    title: str
    text: str
    panels: Sequence[Panel]
    recipe: str
    facts: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Report:
    """All that the page tells. ``commands``: (what it does, command to type)."""

    title: str
    lead: str
    stages: Sequence[Stage] = ()
    stages_note: str = ""
    chapters: Sequence[Chapter] = ()
    transcripts: Sequence[Transcript] = ()
    transcripts_note: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    commands: Sequence[tuple[str, str]] = ()


def write_report(report: Report, path: str | Path) -> Path:
    """Write the page; an older one is replaced at once.

    Raises:
        StorageError: the disk is full or not writable.
    """
    target = Path(path)
    replace_file(target, render_report(report).encode("utf-8"), durable=False)
    return target


def render_report(report: Report) -> str:
    """The whole page as HTML."""
    parts = [f"<h1>{escape(report.title)}</h1>", f'<p class="lead">{escape(report.lead)}</p>']
    if report.stages:
        parts.append(_stages(report.stages, report.stages_note))
    if report.transcripts:
        parts.append(_transcripts(report.transcripts, report.transcripts_note))
    parts += [_chapter(chapter) for chapter in report.chapters]
    if report.commands:
        rows = "".join(
            f'<tr><td class="name">{escape(what)}</td><td class="commands"><pre>{escape(command)}</pre></td></tr>'
            for what, command in report.commands
        )
        parts.append(f'<h2>What to type next</h2><div class="card scroll"><table>{rows}</table></div>')
    if report.environment:
        parts.append(f"<h2>Where it ran</h2>{_facts(list(_flatten(report.environment)))}")
    return draw_page(report.title, "".join(parts))


def _stages(stages: Sequence[Stage], note: str) -> str:
    columns = [
        ("format", "in format"),
        ("worked", "shows its working"),
        ("num_tokens", "tokens"),
        ("truncated", "cut off"),
    ]
    shown = [(key, label) for key, label in columns if any(key in stage.results for stage in stages)]
    head = "".join(f"<th>{escape(label)}</th>" for _, label in shown)
    body = "".join(_stage_row(stage, [key for key, _ in shown]) for stage in stages)
    return (
        f"<h2>How they do on problems they have never seen</h2><p>{escape(note)}</p>"
        '<div class="card scroll"><table><thead><tr><th>model</th><th>right, with 95 % interval</th>'
        f"{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _stage_row(stage: Stage, keys: Sequence[str]) -> str:
    results = stage.results
    value, low, high = results["accuracy"], results["accuracy_low"], results["accuracy_high"]
    cells = [
        f'<td><strong>{escape(stage.label)}</strong><br><span class="soft">{escape(stage.description)}</span></td>',
        f'<td class="number"><strong>{value:.1%}</strong> <span class="soft">[{low:.1%}, {high:.1%}]</span>'
        f"{draw_interval(value, low, high)}</td>",
    ]
    for key in keys:
        number = results.get(key)
        text = "–" if number is None else f"{number:.0f}" if key == "num_tokens" else f"{number:.1%}"
        cells.append(f'<td class="number">{text}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def _transcripts(transcripts: Sequence[Transcript], note: str) -> str:
    parts = [f"<h2>Side by side</h2><p>{escape(note)}</p>"]
    for transcript in transcripts:
        gold = "" if transcript.gold is None else f" <b>Answer: {escape(transcript.gold)}</b>"
        answers = "".join(_answer(answer) for answer in transcript.answers)
        question = f'<p class="question">{escape(transcript.question)}{gold}</p>'
        parts.append(f'<div class="card transcript">{question}<div class="answers">{answers}</div></div>')
    return "".join(parts)


def _answer(answer: Answer) -> str:
    if answer.is_right:
        verdict = "right"
    else:
        verdict = "no answer" if answer.extracted is None else f"wrong: {answer.extracted[:24]}"
    text = TAG.sub(lambda match: f'<span class="tag">{match.group()}</span>', escape(answer.text))
    if answer.is_cut:
        text += '<span class="cut"> … cut off</span>'
    return (
        f'<div class="answer{" right" if answer.is_right else ""}"><h3><span>{escape(answer.label)}</span>'
        f'<span class="verdict">{escape(verdict)}</span></h3><pre>{text}</pre>'
        f'<span class="soft">{answer.num_tokens} tokens</span></div>'
    )


def _chapter(chapter: Chapter) -> str:
    panels = "".join(draw_panel(panel) for panel in chapter.panels)
    return (
        f"<h2>{escape(chapter.title)}</h2><p>{escape(chapter.text)}</p>"
        f'{_facts(chapter.facts) if chapter.facts else ""}<div class="panels">{panels}</div>'
        f'<details class="card"><summary>the resolved recipe</summary><pre>{escape(chapter.recipe)}</pre></details>'
    )


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    rows = "".join(f'<tr><td class="name">{escape(name)}</td><td>{escape(value)}</td></tr>' for name, value in facts)
    return f'<div class="card scroll"><table>{rows}</table></div>'


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Sequence[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += _flatten(value, f"{prefix}{name}: ")
        elif value is not None:
            found.append((f"{prefix}{name}", str(value)))
    return found
