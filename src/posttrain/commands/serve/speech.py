"""An answer on its way: its tokens, the text that is certain, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.render.text_stream import TextStream
from posttrain.types import Finish


@dataclass(frozen=True, slots=True)
class Scored:
    """A token with its log-probability, and the likeliest tokens at its place with theirs (likeliest first)."""

    id: int
    logprob: float
    likely: tuple[tuple[int, float], ...] = ()


class Speech:
    """Takes the tokens of one answer in order; whole or as they come, its text is the same.

    ``ids`` and ``logprobs`` are those of the tokens up to its end, the end token included, and with a stop text those
    up to the token that completed it; ``text`` ends before the stop text. ``finish`` is None while it goes on.

    Args:
        ends: tokens that end an answer and are no text of it.
        stops: texts that end it.
        opening: of the template, what stands in front (``<think>``); no stop text is looked for in it.
        call_tag: what a call begins with; text from it on is certain with the last token alone.
    """

    def __init__(
        self, tokenizer: Any, ends: frozenset[int], stops: Sequence[str] = (), opening: str = "", call_tag: str = ""
    ) -> None:
        self.ends, self.stops, self.call_tag = ends, stops, call_tag
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.text = opening
        self.finish: Finish | None = None
        self._decoded = TextStream(tokenizer)
        self._held = ""  # may be the beginning of a stop text, or a call

    def push(self, token: int, logprob: float, *, is_last: bool) -> str:
        """The text that is certain with this token, maybe none."""
        assert self.finish is None, "nothing follows the end of an answer"
        self.ids.append(token)
        self.logprobs.append(logprob)
        is_end = token in self.ends
        self._held += "" if is_end else self._decoded.push(token)
        if is_end or is_last:
            self._held += self._decoded.flush()
        places = [place for stop in self.stops if (place := self._held.find(stop)) >= 0]
        if places or is_end:
            self.finish = "stop"
        elif is_last:
            self.finish = "length"
        certain = min(places) if places else len(self._held) - (0 if self.finish else self._open_length())
        if self.call_tag and self.finish is None and (place := self._held.find(self.call_tag)) >= 0:
            certain = min(certain, place)
        said, self._held = self._held[:certain], self._held[certain:]
        self.text += said
        return said

    def _open_length(self) -> int:
        """How many of the last characters could be the beginning of a stop text, or of a call."""
        awaited = (*self.stops, self.call_tag)
        longest = max(len(text) - 1 for text in awaited)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(text.startswith(self._held[-length:]) for text in awaited):
                return length
        return 0
