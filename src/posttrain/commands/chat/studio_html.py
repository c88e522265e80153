"""What the studio shows, as HTML: replies with their tokens coloured, rollouts side by side, curves of runs.

All text that a model or a data set wrote is escaped; nothing here runs a script.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Literal

from posttrain.commands.chat.conversation import SpokenToken
from posttrain.reports.charts.charts import draw_panel
from posttrain.reports.charts.panels import Panel, Series
from posttrain.reports.charts.style import STYLE
from posttrain.store.rollouts import RecordedRollout
from posttrain.types import Message

Colouring = Literal["nothing", "probability", "entropy"]
COLOURINGS: tuple[Colouring, ...] = ("nothing", "probability", "entropy")
NUM_CURVES = 8  # more lines in one picture cannot be told apart

# Nested, so that the reports' style holds within the studio's own pictures and nowhere else on the page.
CSS = (
    ".studio { "
    + STYLE.replace(":root", "&")
    + """
& { --c4: #b8860b; --c5: #00838f; --c6: #ad1457; --c7: #555555; color: var(--ink); }
.panel polyline.c4 { stroke: var(--c4); } .panel polyline.c5 { stroke: var(--c5); }
.panel polyline.c6 { stroke: var(--c6); } .panel polyline.c7 { stroke: var(--c7); }
.key.c4::before { background: var(--c4); } .key.c5::before { background: var(--c5); }
.key.c6::before { background: var(--c6); } .key.c7::before { background: var(--c7); }
.talk { display: flex; flex-direction: column; gap: 10px; min-height: 12rem; }
.turn { border-radius: 10px; padding: 8px 12px; white-space: pre-wrap; overflow-wrap: anywhere; max-width: 92%; }
.turn.user { align-self: flex-end; background: var(--track); }
.turn.assistant { align-self: flex-start; background: var(--card); border: 1px solid var(--rule); }
.turn.system { align-self: center; color: var(--soft); font-size: 0.85rem; }
.turn .facts { display: block; color: var(--soft); font-size: 0.8rem; margin-top: 6px; }
.tok { border-radius: 3px; }
.group { margin: 14px 0 26px; }
.differences, .differences tr, .differences td, .differences th { border-left: 0; border-right: 0; border-bottom: 0; }
.differences tr { border-top: 0; } .differences td:first-child { white-space: nowrap; color: var(--soft); }
.marked { background: var(--track); }
}
"""
)


def _framed(content: str) -> str:
    return f'<div class="studio">{content}</div>'


def draw_conversation(messages: Sequence[Message], reply: str = "") -> str:
    """The turns so far as bubbles; ``reply`` is the HTML of one that is being written or was written last."""
    turns = [f'<div class="turn {escape(m.role)}">{escape(m.content)}</div>' for m in messages]
    if reply:
        turns.append(f'<div class="turn assistant">{reply}</div>')
    return _framed(f'<div class="talk">{"".join(turns)}</div>')


def draw_reply(tokens: Sequence[SpokenToken], colouring: Colouring, facts: str = "") -> str:
    """A reply with a background for each token: red where the model was unsure, green where it was sure.

    Resting the pointer on a token shows its probability, the entropy, and what else was likely there.
    """
    spans = "".join(_draw_token(token, colouring) for token in tokens if token.text)
    return spans + (f'<span class="facts">{escape(facts)}</span>' if facts else "")


def _draw_token(token: SpokenToken, colouring: Colouring) -> str:
    likely = ", ".join(f"{text!r} {math.exp(logprob):.2f}" for text, logprob in token.likely)
    note = f"probability {math.exp(token.logprob):.3f}, entropy {token.entropy:.2f} nats. Likely here: {likely}"
    style = ""
    if colouring != "nothing":
        sure = math.exp(token.logprob) if colouring == "probability" else math.exp(-token.entropy)
        style = f' style="background: hsl({120 * sure:.0f} 70% 50% / {0.12 + 0.38 * (1 - sure):.2f})"'
    return f'<span class="tok"{style} title="{escape(note, quote=True)}">{escape(token.text)}</span>'


def draw_rollouts(groups: Sequence[Sequence[RecordedRollout]], text: str = "", note: str = "") -> str:
    """Each prompt with its samples side by side: reward and, in brackets, advantage; ``text`` is marked."""
    if not groups:
        return draw_note("no rollout fits; widen the filter")
    above = f'<p class="soft">{escape(note)}</p>' if note else ""
    return _framed(above + "".join(_draw_group(group, text) for group in groups))


def _draw_group(group: Sequence[RecordedRollout], text: str) -> str:
    first = group[0]
    gold = "" if first.answer is None else f" <b>Gold: {escape(first.answer)}</b>"
    cards = "".join(_draw_rollout(rollout, text) for rollout in group)
    return (
        f'<div class="group"><p class="soft">step {first.step}, {escape(first.example_id)}</p>'
        f'<p class="question">{_mark(first.prompt, text)}{gold}</p><div class="answers">{cards}</div></div>'
    )


def _draw_rollout(rollout: RecordedRollout, text: str) -> str:
    is_right = rollout.parts.get("correct") == 1.0
    parts = ", ".join(f"{name} {value:g}" for name, value in rollout.parts.items())
    advantage = "" if rollout.advantage is None else f" ({rollout.advantage:+.2f})"
    cut = ' <span class="cut">cut off</span>' if rollout.finish == "length" else ""
    return (
        f'<div class="answer{" right" if is_right else ""}"><h3><span>sample {rollout.rollout_index}</span>'
        f'<span class="verdict">{rollout.reward:.3g}{advantage}</span></h3>'
        f"<pre>{_mark(rollout.completion, text)}{cut}</pre>"
        f'<p class="soft">{escape(parts)}; {rollout.num_tokens} tokens</p></div>'
    )


def _mark(content: str, text: str) -> str:
    if not text:
        return escape(content)
    return f'<span class="marked">{escape(text)}</span>'.join(escape(part) for part in content.split(text))


def draw_curves(curves: Mapping[str, Mapping[str, tuple[list[float], list[float]]]]) -> str:
    """One picture for each metric with a line for each run: ``curves[metric][run]`` is (steps, values)."""
    panels = []
    for metric, by_run in curves.items():
        series = [Series(run, steps, values) for run, (steps, values) in by_run.items() if steps][:NUM_CURVES]
        if series:
            panels.append(draw_panel(Panel(metric, "", series)))
    if not panels:
        return draw_note("choose runs and metrics")
    most = max(sum(bool(steps) for steps, _ in by_run.values()) for by_run in curves.values())
    note = f'<p class="soft">the first {NUM_CURVES} of {most} runs are drawn</p>' if most > NUM_CURVES else ""
    return _framed(f'{note}<div class="panels">{"".join(panels)}</div>')


def draw_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first column names its rows."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return _framed(f'<div class="scroll"><table class="differences"><tr>{top}</tr>{body}</table></div>')


def draw_note(text: str) -> str:
    """A line in grey: what could be done here."""
    return _framed(f'<p class="soft">{escape(text)}</p>')
