"""Text from tokens as they come, without cutting a character in two."""

from __future__ import annotations

from typing import Any

_BROKEN = "\ufffd"  # what decoding puts where bytes are no character, or not yet
_MAX_PENDING = 4  # no character has more bytes


class TextStream:
    """The text that each token adds; together they are the text of all tokens decoded at once.

    A token that holds only the beginning of a character adds nothing; the one that completes it adds the whole.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self._context = (
            0  # the tokens from here on are decoded together: some tokenizers join a token to the one before
        )
        self._shown = 0  # tokens whose text has been given

    def push(self, token: int) -> str:
        """The text that is complete with this token, maybe empty."""
        self.ids.append(token)
        text = self._rest()
        if text.endswith(_BROKEN) and len(self.ids) - self._shown < _MAX_PENDING:
            return ""
        self._context, self._shown = self._shown, len(self.ids)
        return text

    def flush(self) -> str:
        """What is left when no token follows: bytes that stayed incomplete, as replacement characters."""
        text = self._rest()
        self._context, self._shown = self._shown, len(self.ids)
        return text

    def _rest(self) -> str:
        before = self._decode(self.ids[self._context : self._shown])
        return self._decode(self.ids[self._context :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
