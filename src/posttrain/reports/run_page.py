"""``report.html`` for a run or a chain of runs: one self-contained page (``templates/run.jinja``)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.reports.charts import Panel
from posttrain.reports.page import render
from posttrain.store.metric_names import ACCURACY, Metric, metric_of

_TAG = re.compile("(</?(?:think|answer|reasoning)>)")
_TURN = re.compile(r"(?:\A|\n\n)(system|user|assistant): ")
# Additional results per stage, and results by mixture part (``PART:NAME``).
_COLUMNS = ("format", "shows_reasoning", "completion_length", "truncated")
_OF_A_PART = ("accuracy", "called")


@dataclass(frozen=True)
class ReportStage:
    """A model along the chain, with held-out results (``evaluation/generation.py``)."""

    label: str
    description: str
    results: Mapping[str, float]


@dataclass(frozen=True)
class TranscriptAnswer:
    """One model's text for a problem. ``extracted``: the extracted answer, or None.

    ``is_correct`` is None without a gold answer; ``reward`` is shown instead, if available.
    """

    label: str
    text: str
    is_correct: bool | None
    extracted: str | None
    num_tokens: int | None = None
    is_cut: bool = False
    reward: float | None = None

    @property
    def verdict(self) -> str:
        """``right``, ``no answer``, or the wrong answer. Without gold answer, the reward or nothing."""
        if self.is_correct is None:
            if self.reward is None:
                return ""
            return f"reward {self.reward:.3f}"
        if self.is_correct:
            return "right"
        if self.extracted is None:
            return "no answer"
        return f"wrong: {self.extracted[:24]}"

    @property
    def pieces(self) -> list[str]:
        """Split the text at reasoning tags; every second piece is a tag."""
        return _TAG.split(self.text)


@dataclass(frozen=True)
class Transcript:
    """The same problem, answered by each model. ``turns`` of a dialogue: (who, what), in place of the question."""

    question: str
    gold: str | None
    answers: Sequence[TranscriptAnswer]
    turns: Sequence[tuple[str, str]] = ()


def turns_of(question: str) -> list[tuple[str, str]]:
    """Turns of a recorded dialogue (``store.rollouts.prompt_text``) as (role, text). Empty for single messages."""
    pieces = _TURN.split(question)
    if pieces[0] or len(pieces) == 1:
        return []
    return list(zip(pieces[1::2], pieces[2::2], strict=True))


@dataclass(frozen=True)
class Chapter:
    """A training run: curves, captions, recipe."""

    title: str
    text: str
    panels: Sequence[Panel]
    recipe: str
    info: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class RunReport:
    """Page contents. ``commands``: (purpose, command). ``primary``: primary metric of all stages.

    ``fixed_prompts``: those of ``eval.prompts``, with an answer by step.
    """

    title: str
    lead: str
    stages: Sequence[ReportStage] = ()
    stages_note: str = ""
    chapters: Sequence[Chapter] = ()
    transcripts: Sequence[Transcript] = ()
    transcripts_note: str = ""
    environment: Mapping[str, object] = field(default_factory=dict)
    commands: Sequence[tuple[str, str]] = ()
    primary: Metric = ACCURACY
    fixed_prompts: Sequence[Transcript] = ()


def render_report(report: RunReport) -> str:
    """The whole page as HTML."""
    names = [*report.primary.further, *_COLUMNS]
    measured = dict.fromkeys(key for stage in report.stages for key in stage.results)
    names += [key for key in measured if ":" in key and "=" not in key and key.rpartition(":")[2] in _OF_A_PART]
    return render(
        "run.jinja",
        report=report,
        columns=[metric_of(name) for name in names if name in measured],
        has_interval=any(report.primary.interval(stage.results) for stage in report.stages),
        title=report.title,
        lead=report.lead,
        environment=report.environment,
    )
