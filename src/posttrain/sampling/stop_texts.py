"""Stop texts, detected during sampling."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.data.render.encoding import decode_ids
from posttrain.types import Tokenizer

TOKENS_OF_A_CHARACTER = 4  # UTF-8 uses up to four bytes per character
TOKENS_BEFORE = 8  # margin for a character split by the window, and for leading white space dropped by decoders


class StopFinder:
    """Detects stop texts token by token."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        self.tokenizer, self.texts = tokenizer, tuple(texts)
        self.window = TOKENS_OF_A_CHARACTER * max(map(len, self.texts)) + TOKENS_BEFORE

    def ends(self, ids: Sequence[int]) -> bool:
        """Check if the last token completes a stop text. Earlier tokens were already checked."""
        tail = decode_ids(self.tokenizer, ids[-self.window :])
        return any(text in tail for text in self.texts)
