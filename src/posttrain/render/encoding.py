"""Pieces of text to token ids, such that untrusted text never becomes a special token.

Text from the data may contain ``<|im_end|>`` or ``</think>``. In a tokenizer where these are tokens of
their own, they are encoded as plain characters when they come from untrusted pieces. (A tag that a
tokenizer knows only as plain text looks the same from wherever it comes; there, the graders look
at the completion alone, never at the prompt.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

from posttrain.errors import UsageError

# Added tokens that are not flagged as special and yet mark structure: <think>, [INST], <|user|>.
_BRACKETED = re.compile(r"[<\[{|].*[>\]}|]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a prompt or response. Untrusted text can never become a special token."""

    text: str
    trusted: bool


@dataclass(frozen=True, slots=True)
class Markers:
    """The tokens of a tokenizer that only trusted text may produce.

    ``pattern`` finds them in text (the longest first; with the white space that a token's own
    definition swallows), or is None when there are none. ``leading`` are the ids that the tokenizer
    itself puts in front of a text (BOS).
    """

    ids: dict[str, int]
    pattern: re.Pattern[str] | None
    leading: tuple[int, ...]

    @property
    def id_set(self) -> frozenset[int]:
        return frozenset(self.ids.values())

    def find(self, text: str) -> Iterator[tuple[int, int, int]]:
        """(start, end, id) of every marker in the text."""
        if self.pattern is not None:
            for match in self.pattern.finditer(text):
                assert match.lastindex is not None, "every alternative is a group"
                yield match.start(), match.end(), self.ids[match[match.lastindex]]


_KNOWN: WeakKeyDictionary[Any, tuple[int, Markers]] = WeakKeyDictionary()


def markers_of(tokenizer: Any) -> Markers:
    """The markers of a tokenizer; computed once, and again when tokens were added.

    Special tokens count, and added tokens that look like tags. The unknown token does not: any
    text may hold unknown words.

    Raises:
        UsageError: not a fast tokenizer.
    """
    known = _KNOWN.get(tokenizer)
    if known is not None and known[0] == len(tokenizer):
        return known[1]
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise UsageError(
            f"{type(tokenizer).__name__} is not a fast tokenizer (tokenizer.json), so text from the data "
            "could not be kept from forging special tokens; convert it, or choose another model"
        )
    added = {
        token.content: (index, token)
        for index, token in tokenizer.added_tokens_decoder.items()
        if (token.special or _BRACKETED.fullmatch(token.content)) and index != tokenizer.unk_token_id
    }
    space = r"\s*"
    alternatives = [
        f"{space if token.lstrip else ''}({re.escape(content)}){space if token.rstrip else ''}"
        for content, (_, token) in sorted(added.items(), key=lambda item: -len(item[0]))
    ]
    markers = Markers(
        ids={content: index for content, (index, _) in added.items()},
        pattern=re.compile("|".join(alternatives)) if alternatives else None,
        leading=_leading_ids(tokenizer),
    )
    _KNOWN[tokenizer] = (len(tokenizer), markers)
    return markers


def _leading_ids(tokenizer: Any) -> tuple[int, ...]:
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    framed = tokenizer("a")["input_ids"]
    for start in range(len(framed) - len(plain) + 1):
        if framed[start : start + len(plain)] == plain:
            return tuple(framed[:start])
    return ()


def encode_pieces(tokenizer: Any, pieces: Sequence[Piece]) -> list[int]:
    """Token ids of the pieces, without any BOS or EOS that they do not spell out.

    Where no untrusted text touches a marker, the ids are those of the whole text encoded at once,
    as every other program would encode it. Otherwise the text is cut at the trusted markers, and
    everything between them is encoded with special tokens switched off.

    Raises:
        UsageError: a marker of a single character stands in untrusted text and cannot be spelled.
    """
    markers = markers_of(tokenizer)
    pieces = _merge(pieces)
    text = "".join(piece.text for piece in pieces)
    encoded = _backend(tokenizer, split_special=False).encode(text, add_special_tokens=False)
    ids: list[int] = encoded.ids
    special = markers.id_set
    if special.isdisjoint(ids) or _all_trusted(ids, encoded.offsets, special, pieces):
        return ids
    ids = []
    for part in _parts(pieces, markers):
        ids.extend([part] if isinstance(part, int) else encode_plain(tokenizer, part))
    return ids


def encode_plain(tokenizer: Any, text: str) -> list[int]:
    """Token ids of untrusted text; no marker is among them.

    Raises:
        UsageError: a marker of a single character cannot be spelled with other tokens.
    """
    markers = markers_of(tokenizer)
    ids: list[int] = _backend(tokenizer, split_special=True).encode(text, add_special_tokens=False).ids
    if markers.id_set.isdisjoint(ids):
        return ids
    # Added tokens that are not flagged as special are still matched: cut every marker in two.
    cuts = [0]
    for content in markers.ids:
        at = text.find(content)
        while at >= 0:
            cuts.append(at + 1)
            at = text.find(content, at + 1)
    if len(text) <= 1:
        raise UsageError(f"the tokenizer has the single character {text!r} as a special token, and the data contain it")
    cuts = sorted({*cuts, len(text)})
    if len(cuts) == 2:  # no marker stands there as written (a normaliser made it one): cut everywhere
        cuts = list(range(len(text) + 1))
    return [token for start, end in pairwise(cuts) for token in encode_plain(tokenizer, text[start:end])]


def _merge(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours of equal trust as one piece, so that both ways of encoding find the same markers."""
    merged: list[Piece] = []
    for piece in pieces:
        if merged and merged[-1].trusted == piece.trusted:
            merged[-1] = Piece(merged[-1].text + piece.text, piece.trusted)
        elif piece.text:
            merged.append(piece)
    return merged


def _backend(tokenizer: Any, *, split_special: bool) -> Any:
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = split_special
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    return backend


def _all_trusted(
    ids: list[int], offsets: list[tuple[int, int]], special: frozenset[int], pieces: Sequence[Piece]
) -> bool:
    """Whether every marker lies wholly in trusted text."""
    spans: list[tuple[int, int]] = []  # of untrusted text
    position = 0
    for piece in pieces:
        if not piece.trusted and piece.text:
            spans.append((position, position + len(piece.text)))
        position += len(piece.text)
    for token, (start, end) in zip(ids, offsets, strict=True):
        if token in special and any(start < high and low < end for low, high in spans):
            return False
    return True


def _parts(pieces: Sequence[Piece], markers: Markers) -> Iterator[str | int]:
    """Runs of plain text, and the ids of the markers in trusted pieces, in order."""
    run = ""
    for piece in pieces:
        start = 0
        for begin, end, index in markers.find(piece.text) if piece.trusted else ():
            run += piece.text[start:begin]
            if run:
                yield run
            run, start = "", end
            yield index
        run += piece.text[start:]
    if run:
        yield run


# Text from tokens as they come, without cutting a character in two.

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
