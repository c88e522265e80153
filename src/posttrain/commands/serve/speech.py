"""An answer on its way: its tokens, the text that is certain, and where it ends."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.render.encoding import TextStream
from posttrain.store.durable import storage_errors
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


# What ``posttrain serve --record`` keeps: a line of JSON for every answer, with its tokens and log-probabilities.


class Recorder:
    """A JSONL file that lines are added to; each is written whole, in one piece.

    Raises:
        UsageError, StorageError: the file cannot be written, at once or when an answer is recorded.
    """

    def __init__(self, path: Path, model: str) -> None:
        self.path, self.model = path, model
        with storage_errors("records", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def add(
        self, request_id: str, endpoint: str, index: int, prompt: Sequence[int], speech: Speech, **asked: Any
    ) -> None:
        """Keep an answer; one that was broken off has the finish null."""
        line = {
            "id": request_id,
            "time": round(time.time(), 3),
            "endpoint": endpoint,
            "model": self.model,
            "index": index,
            "prompt_ids": list(prompt),
            "ids": speech.ids,
            "logprobs": speech.logprobs,
            "text": speech.text,
            "finish": speech.finish,
            **asked,
        }
        with storage_errors("records", self.path):
            os.write(self._descriptor, (json.dumps(line) + "\n").encode())

    def close(self) -> None:
        """Nothing is recorded after this."""
        os.close(self._descriptor)
