"""What the studio shows, as HTML (``templates/studio.jinja``); nothing in it runs a script."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Literal

from posttrain.commands.chat.conversation import SpokenToken
from posttrain.evals.tables import TextTable
from posttrain.reports.charts.panels import NUM_COLORS, Panel, Series
from posttrain.reports.page import draw, render
from posttrain.store.rollouts import RecordedRollout
from posttrain.types import Message

PAGE = "studio.jinja"
Colouring = Literal["nothing", "probability", "entropy"]
COLOURINGS: tuple[Colouring, ...] = ("nothing", "probability", "entropy")


@cache
def stylesheet() -> str:
    """The reports' style, nested: it holds within the studio's pictures alone, and there before Gradio's."""
    return f".studio.studio {{ {render('style.css').replace(':root', '&')} & {{ color: var(--ink); }} }}"


def draw_conversation(messages: Sequence[Message], reply: str = "") -> str:
    """The turns so far as bubbles; ``reply`` is what ``draw_reply`` made of the last one."""
    return draw(PAGE, "conversation", messages, reply)


def draw_reply(tokens: Sequence[SpokenToken], colouring: Colouring, facts: str = "", opening: str = "") -> str:
    """A reply with a background for each token: red where the model was unsure, green where it was sure.

    ``opening``: the beginning that its template gave it (``<think>``).

    Resting the pointer on a token shows its probability, the entropy, and what else was likely there.
    """
    return draw(PAGE, "reply", [(t.text, _color(t, colouring), _note(t)) for t in tokens if t.text], facts, opening)


def _color(token: SpokenToken, colouring: Colouring) -> str:
    if colouring == "nothing":
        return ""
    sure = math.exp(token.logprob) if colouring == "probability" else math.exp(-token.entropy)
    return f"hsl({120 * sure:.0f} 70% 50% / {0.12 + 0.38 * (1 - sure):.2f})"


def _note(token: SpokenToken) -> str:
    likely = ", ".join(f"{text!r} {math.exp(logprob):.2f}" for text, logprob in token.likely)
    return f"probability {math.exp(token.logprob):.3f}, entropy {token.entropy:.2f} nats. Likely here: {likely}"


def draw_rollouts(groups: Sequence[Sequence[RecordedRollout]], text: str = "", note: str = "") -> str:
    """Each prompt with its samples side by side: reward and, in brackets, advantage; ``text`` is marked."""
    if not groups:
        return draw_note("no rollout fits; widen the filter")
    pattern = re.compile(f"({re.escape(text)})") if text else None
    return draw(PAGE, "rollouts", groups, lambda content: pattern.split(content) if pattern else [content], note)


def draw_curves(curves: Mapping[str, Mapping[str, tuple[list[float], list[float]]]]) -> str:
    """One picture for each metric with a line for each run: ``curves[metric][run]`` is (steps, values)."""
    panels = []
    for metric, by_run in curves.items():
        series = [Series(run, steps, values) for run, (steps, values) in by_run.items() if steps][:NUM_COLORS]
        if series:
            panels.append(Panel(metric, "", series))
    if not panels:
        return draw_note("choose runs and metrics")
    most = max(sum(bool(steps) for steps, _ in by_run.values()) for by_run in curves.values())
    note = f"the first {NUM_COLORS} of {most} runs are drawn" if most > NUM_COLORS else ""
    return draw(PAGE, "curves", panels, note)


def draw_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts."""
    return draw(PAGE, "table", TextTable("", list(head), [list(row) for row in rows], num_labels=len(head)))


def draw_problem(text: str) -> str:
    """What went wrong, in the place where it would have been shown."""
    return draw(PAGE, "problem", text)


def draw_note(text: str) -> str:
    """A line in grey: what could be done here."""
    return draw(PAGE, "note", text)
