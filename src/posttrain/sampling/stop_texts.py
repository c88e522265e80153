"""Texts that end an answer, found while it is sampled."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.data.render.encoding import decode_ids
from posttrain.types import Tokenizer

TOKENS_OF_A_CHARACTER = 4  # a character of UTF-8 has at most four bytes
TOKENS_BEFORE = 8  # a character that begins before the window, and white space that a decoder takes off its front


class StopFinder:
    """Says of an answer token by token whether it is complete."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        self.tokenizer, self.texts = tokenizer, tuple(texts)
        self.window = TOKENS_OF_A_CHARACTER * max(map(len, self.texts)) + TOKENS_BEFORE

    def ends(self, ids: Sequence[int]) -> bool:
        """Return whether the last of the ids of an answer (or turn) completes a text; none was complete before."""
        tail = decode_ids(self.tokenizer, ids[-self.window :])
        return any(text in tail for text in self.texts)
