"""Turns of rollouts as plain data, and as text for readers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from posttrain.types import Call, Turn

# Lines resembling the arrows added by ``show_turns``, after any line separator.
_BREAKS = r"\n\r\v\f\x1c-\x1e\x85\u2028\u2029"
_ARROW = re.compile(rf"(^|[{_BREAKS}])([^\S{_BREAKS}]*->)")


def show_turns(turns: Sequence[Turn], failures: Sequence[str] = ()) -> str:
    """Format turns as readable text with tool results and rewards. Empty for a single turn without calls.

    Arrows at line starts in model or tool output are escaped with a backslash, to distinguish them from added arrows.
    """
    if len(turns) < 2 and not failures and not any(turn.calls or turn.replies for turn in turns):
        return ""
    lines = []
    for turn in turns:
        lines.append(_quote(turn.text))
        for call in turn.calls:
            result = _quote(f"{call.tool} ({call.outcome}): {call.result}")
            lines.append(f"-> {result}")
        lines += [f"-> {_quote(reply)}" for reply in turn.replies]
        if turn.reward is not None:
            lines.append(f"-> paid {turn.reward:g}")
    lines += [f"-> failed: {failure}" for failure in failures]
    return "\n".join(lines)


def _quote(text: str) -> str:
    return _ARROW.sub(r"\1\\\2", text)


def write_turns(turns: Sequence[Turn]) -> list[dict[str, object]]:
    """Convert turns to plain data."""
    rows = []
    for turn in turns:
        calls = []
        for call in turn.calls:
            calls.append({f.name: storable(getattr(call, f.name)) for f in fields(Call)})
        row: dict[str, object] = {"text": storable(turn.text), "calls": calls}
        if turn.reward is not None:
            row["reward"] = turn.reward
        if turn.replies:
            row["replies"] = [storable(reply) for reply in turn.replies]
        rows.append(row)
    return rows


def read_turns(rows: Sequence[Mapping[str, Any]]) -> tuple[Turn, ...]:
    """Restore turns from ``write_turns`` data.

    Raises:
        KeyError, TypeError, ValueError: invalid data.
    """
    turns = []
    for row in rows:
        calls = tuple(_read_call(call) for call in row["calls"])
        replies = row.get("replies", [])
        if not isinstance(replies, list):
            raise ValueError("a turn's replies are not listed")
        texts = [row["text"], *replies]
        for call in calls:
            texts += [getattr(call, f.name) for f in fields(Call)]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a turn contains non-text values")
        reward = row.get("reward")
        if reward is not None and (not isinstance(reward, float) or not math.isfinite(reward)):
            raise ValueError("a turn's reward is not a finite number")
        turns.append(Turn(row["text"], calls, reward, tuple(replies)))
    return tuple(turns)


def _read_call(stored: Mapping[str, Any]) -> Call:
    known = {name: stored[name] for name in (f.name for f in fields(Call)) if name in stored}
    return Call(**known)


def storable(text: str) -> str:
    """Escape lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode()
