"""Tokenize trusted and untrusted text such that untrusted text never yields special tokens.

Data may contain ``<|im_end|>`` or ``</think>``. If the tokenizer defines these as tokens, untrusted pieces encode
them as plain characters. Tags without dedicated tokens look the same from any source; graders therefore inspect only
the completion, never the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from threading import RLock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from posttrain.data.render.foreign import refuse_panic, try_text, try_tokens
from posttrain.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast as Tokenizer
else:
    Tokenizer = Any

# Added tokens that mark structure without being flagged as special: <think>, [INST], <|user|>.
_BRACKETED = re.compile(r"[<\[{|].*[>\]}|]", re.DOTALL)
THINK = "<think>"
END_THINK = "</think>"
# Tag pairs written by assistants. A closing tag without its opening tag counts only if the prompt opened the block.
_PAIRED = ((THINK, END_THINK), ("[THINK]", "[/THINK]"), ("<tool_call>", "</tool_call>"))
# Longer texts (in characters) are encoded as a batch of one, because batch encoding releases the GIL.
_LONG_TEXT = 2**14


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a prompt or response. Untrusted text never becomes a special token."""

    text: str
    trusted: bool


def text_of(pieces: Iterable[Piece]) -> str:
    """Concatenate pieces, trusted or not."""
    return "".join(piece.text for piece in pieces)


class Markers:
    """Tokens that only trusted text may produce.

    Attributes:
        ids: token id by content.
        swallows: by content, whether the token absorbs preceding and following whitespace.
        leading: ids prepended by the tokenizer to every input (BOS).
        anchors: prefix texts mapped to ids, used to encode text in mid-sequence. Empty when position does not matter.
        restarts: text directly after a marker is encoded as if at the beginning of a sequence.
        adds_space: a prefix space is added even before an existing one, so decoding must remove it.
        context: prefix ids used to decode text in mid-sequence, if the decoder strips leading spaces. Otherwise empty.
    """

    def __init__(self, ids: dict[str, int], swallows: dict[str, tuple[bool, bool]], leading: tuple[int, ...]) -> None:
        self.ids = ids
        self.swallows = swallows
        self.leading = leading
        self.anchors = dict[str, list[int]]()
        self.restarts = False
        self.adds_space = True
        self.context: list[int] = []
        self.id_set = frozenset(ids.values())
        # marker lengths by first character, longest first: some tokenizers define thousands of markers
        self._lengths: dict[str, list[int]] = {}
        for letter in {content[0] for content in ids}:
            lengths = {len(content) for content in ids if content[0] == letter}
            self._lengths[letter] = sorted(lengths, reverse=True)

    def _at(self, text: str, place: int) -> str | None:
        for length in self._lengths.get(text[place], ()):
            part = text[place : place + length]
            if part in self.ids:
                return part
        return None

    def starts(self, text: str) -> list[int]:
        """List all positions where a marker begins, including nested ones."""
        return [place for place in range(len(text)) if self._at(text, place) is not None]

    def find(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Find markers as (start, end, id), left to right, preferring the longest match at each position."""
        last = 0
        for place in self.starts(text):
            content = self._at(text, place)
            if place < last or content is None:
                continue
            start = place
            end = place + len(content)
            before, behind = self.swallows[content]
            while before and start > last and text[start - 1].isspace():
                start -= 1
            while behind and end < len(text) and text[end].isspace():
                end += 1
            yield start, end, self.ids[content]
            last = end


_KNOWN: WeakKeyDictionary[Tokenizer, tuple[int, Markers]] = WeakKeyDictionary()


def markers_of(tokenizer: Tokenizer) -> Markers:
    """Collect a tokenizer's markers. Cached until tokens are added.

    Includes special tokens and added tokens that look like tags. Excludes the unknown token, since arbitrary text may
    contain unknown words.

    Raises:
        UsageError: not a fast tokenizer.
    """
    known = _KNOWN.get(tokenizer)
    if known is not None and known[0] == len(tokenizer):
        return known[1]
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise UsageError(
            f"{type(tokenizer).__name__} is not a fast tokenizer (tokenizer.json), so data could forge "
            "special tokens. Convert the tokenizer, or choose a different model"
        )
    ids: dict[str, int] = {}
    swallows: dict[str, tuple[bool, bool]] = {}
    for index, token in tokenizer.added_tokens_decoder.items():
        is_marker = token.content and (token.special or _BRACKETED.fullmatch(token.content))
        if is_marker and index != tokenizer.unk_token_id:
            ids[token.content] = index
            swallows[token.content] = (token.lstrip, token.rstrip)
    markers = Markers(ids, swallows, _leading_ids(tokenizer))

    def encode(text: str) -> list[int]:
        return list(_encode(tokenizer, text, split_special=False).ids)

    anchors = {text: encode(text) for text in ("\n", ".")}
    alone = encode("a")
    if encode("\na") != [*anchors["\n"], *alone]:  # SentencePiece prepends a space
        markers.anchors = anchors
        markers.restarts = any(encode(f"{content}a")[1:] == alone for content in ids)
    markers.context = _context(tokenizer, anchors["."])
    markers.adds_space = encode(" a") != alone
    _KNOWN[tokenizer] = (len(tokenizer), markers)
    return markers


def _leading_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Find ids prepended by the tokenizer to every input."""
    try_text(tokenizer, "a", split_special=False)
    with refuse_panic(tokenizer):
        plain = tokenizer("a", add_special_tokens=False)["input_ids"]
        framed = tokenizer("a")["input_ids"]
    for start in range(len(framed) - len(plain) + 1):
        if framed[start : start + len(plain)] == plain:
            return tuple(framed[:start])
    return ()


def _decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return decode_ids(tokenizer, ids, clean_up_tokenization_spaces=False)


def decode_ids(tokenizer: Tokenizer, ids: Sequence[int], **options: bool) -> str:
    """Decode ids including special tokens, with options for ``tokenizer.decode``.

    Raises:
        UsageError: decoding fails, or an untrusted tokenizer exceeds its limits.
    """
    ids = list(ids)
    try_tokens(tokenizer, ids)
    with refuse_panic(tokenizer):
        return str(tokenizer.decode(ids, skip_special_tokens=False, **options))


def _context(tokenizer: Tokenizer, anchor: list[int]) -> list[int]:
    """Find a prefix such that decoding preserves leading whitespace. Empty if unnecessary or impossible."""
    spaced = "  a"
    ids = _encode(tokenizer, f".{spaced}", split_special=False).ids
    if ids[: len(anchor)] != anchor or _decode(tokenizer, ids[len(anchor) :]) == spaced:
        return []
    if _decode(tokenizer, ids) == f".{spaced}":
        return anchor
    return []


def context_behind(tokenizer: Tokenizer, before: Sequence[int]) -> list[int]:
    """Choose prefix ids for decoding after ``before``, so that leading whitespace is preserved."""
    if not before or getattr(tokenizer, "backend_tokenizer", None) is None:
        return []
    markers = markers_of(tokenizer)
    if markers.restarts and markers.adds_space and before[-1] in markers.id_set:
        return []
    return markers.context


def decode_behind(tokenizer: Tokenizer, ids: Sequence[int], before: Sequence[int] = ()) -> str:
    """Decode ids that follow ``before``, keeping special tokens."""
    context = context_behind(tokenizer, before)
    return _decode(tokenizer, [*context, *ids])[len(_decode(tokenizer, context)) :]


def _behind(markers: Markers, before: Sequence[int], encode: Callable[[str], list[int]]) -> list[int]:
    """Encode text following ``before``. ``encode`` tokenizes the text after a given anchor."""
    if before and not (markers.restarts and before[-1] in markers.id_set):
        for anchor, start in markers.anchors.items():
            ids = encode(anchor)
            if ids[: len(start)] == start:  # no merge across the boundary
                return ids[len(start) :]
    return encode("")


def encode_pieces(tokenizer: Tokenizer, pieces: Sequence[Piece], before: Sequence[int] = ()) -> list[int]:
    """Tokenize pieces. BOS and EOS are included only if spelled out.

    If no untrusted text touches a marker, this equals tokenizing everything at once, as other programs would.
    Otherwise, text is split at trusted markers and tokenized with special tokens disabled.

    Args:
        before: preceding ids. Some tokenizers prepend a space at the beginning of a sequence.

    Raises:
        UsageError: untrusted text contains a single-character marker, which cannot be escaped.
    """
    markers = markers_of(tokenizer)

    def encode(anchor: str) -> list[int]:
        merged: list[Piece] = []  # merge neighbors with equal trust, so that both encodings find the same markers
        for piece in (Piece(anchor, trusted=True), *pieces):
            if merged and merged[-1].trusted == piece.trusted:
                merged[-1] = Piece(merged[-1].text + piece.text, piece.trusted)
            elif piece.text:
                merged.append(piece)
        encoded = _encode(tokenizer, text_of(merged), split_special=False)
        ids: list[int] = encoded.ids
        if markers.id_set.isdisjoint(ids) or _are_trusted(markers, ids, encoded.offsets, merged):
            return ids
        return _encode_cut(tokenizer, markers, merged)

    return _behind(markers, before, encode)


def _encode_cut(tokenizer: Tokenizer, markers: Markers, pieces: Sequence[Piece]) -> list[int]:
    """Split at trusted markers and tokenize everything between them with special tokens disabled."""
    ids: list[int] = []
    run = ""  # text since the last marker
    for piece in pieces:
        if not piece.trusted:
            run += piece.text
            continue
        start = 0
        for begin, end, index in markers.find(piece.text):
            ids += encode_plain(tokenizer, run + piece.text[start:begin], ids)
            ids.append(index)
            run = ""
            start = end
        run += piece.text[start:]
    return ids + encode_plain(tokenizer, run, ids)


def _are_trusted(markers: Markers, ids: list[int], offsets: list[tuple[int, int]], pieces: Sequence[Piece]) -> bool:
    """Check if all markers among ``ids`` lie entirely within trusted text."""
    spans = list[tuple[int, int]]()  # of untrusted text
    position = 0
    for piece in pieces:
        if not piece.trusted:
            spans.append((position, position + len(piece.text)))
        position += len(piece.text)
    found = [span for token, span in zip(ids, offsets, strict=True) if token in markers.id_set]
    return not any(start < high and low < end for start, end in found for low, high in spans)


def encode_plain(tokenizer: Tokenizer, text: str, before: Sequence[int] = ()) -> list[int]:
    """Tokenize untrusted text following ``before``, without producing markers.

    Raises:
        UsageError: a single-character marker, which other tokens cannot spell.
    """
    if not text:
        return []
    markers = markers_of(tokenizer)
    ids = _behind(markers, before, lambda anchor: list(_encode(tokenizer, anchor + text, split_special=True).ids))
    if markers.id_set.isdisjoint(ids):
        return ids
    # Added tokens not flagged as special still match: split each marker.
    if len(text) <= 1:
        raise UsageError(f"the data contains {text!r}, a single-character special token of this tokenizer. Remove it")
    cuts = sorted({0, *(start + 1 for start in markers.starts(text)), len(text)})
    if len(cuts) == 2:  # the marker results from normalization: cut everywhere
        cuts = list(range(len(text) + 1))
    ids = []
    for start, end in pairwise(cuts):
        ids += encode_plain(tokenizer, text[start:end], ids or before)
    return ids


# Tokenizer settings are shared between threads: sampling and training may encode concurrently.
_ENCODING = RLock()


def _encode(tokenizer: Tokenizer, text: str, *, split_special: bool) -> Any:
    backend = tokenizer.backend_tokenizer
    with _ENCODING, refuse_panic(tokenizer):
        backend.encode_special_tokens = split_special
        backend.no_truncation()
        backend.no_padding()
        try_text(tokenizer, text, split_special=split_special)
        if len(text) > _LONG_TEXT:
            return backend.encode_batch([text], add_special_tokens=False)[0]
        return backend.encode(text, add_special_tokens=False)


_BROKEN = "\ufffd"  # decoded from invalid or incomplete bytes
_MAX_PENDING = 4  # maximum bytes in a character


class TextStream:
    """Incremental decoding: yields text per token, adding up to the jointly decoded text.

    A token with an incomplete character yields nothing; the token completing it yields the whole character.

    Args:
        before: preceding ids.
        lead: text that ends a response before its stop token. Held back until more text follows.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = (), lead: str = "") -> None:
        self.tokenizer = tokenizer
        self.lead = lead
        self.ids: list[int] = list(context_behind(tokenizer, before))
        self._context = 0  # decode jointly from here: some tokenizers merge a token with its predecessor
        self._shown = len(self.ids)  # tokens whose text has been given
        self._held = ""

    def push(self, token: int) -> str:
        """Add a token and return newly completed text, possibly empty."""
        self.ids.append(token)
        text = self._rest()
        if text.endswith(_BROKEN) and len(self.ids) - self._shown < _MAX_PENDING:
            return ""
        text = self.flush()
        shown = len(text) - self._begun_lead(text)
        self._held = text[shown:]
        return text[:shown]

    def _begun_lead(self, text: str) -> int:
        """Count trailing characters that may begin the lead."""
        for length in range(min(len(self.lead), len(text)), 0, -1):
            if text.endswith(self.lead[:length]):
                return length
        return 0

    def flush(self) -> str:
        """Flush remaining text, using replacement characters for incomplete bytes."""
        text = self._held + self._rest()
        self._context = self._shown
        self._shown = len(self.ids)
        self._held = ""
        return text

    def end(self) -> str:
        """Flush remaining text after a stop token, without the lead."""
        return self.flush().removesuffix(self.lead)

    def _rest(self) -> str:
        before = _decode(self.tokenizer, self.ids[self._context : self._shown])
        text = _decode(self.tokenizer, self.ids[self._context :])
        return text[len(before) :]


def mark_tags(pieces: Sequence[Piece], names: Sequence[str] = (), *, is_open: bool = False) -> list[Piece]:
    """Mark assistant tags as trusted, leaving all text unchanged.

    Args:
        names: tag names used by the prompt format.
        is_open: the prompt ends inside a thinking block, so the first closing tag counts.
    """
    marked: list[Piece] = []
    is_first = True
    for piece in pieces:
        at = 0
        text = piece.text
        tags = set[tuple[int, int]]()
        if not piece.trusted:
            tags.update(_tags(text, names, is_open, is_first))
        for start, end in sorted(tags):
            if start >= at:
                marked += [Piece(text[at:start], trusted=False), Piece(text[start:end], trusted=True)]
                at = end
        marked.append(Piece(text[at:], piece.trusted))
        is_open = is_open and END_THINK not in text
        is_first = is_first and not text.strip()
    return [piece for piece in marked if piece.text]


def _tags(text: str, names: Sequence[str], is_open: bool, is_first: bool) -> Iterator[tuple[int, int]]:
    at = 0
    if is_open and END_THINK in text:
        at = text.index(END_THINK) + len(END_THINK)
        yield at - len(END_THINK), at
    for opening, closing in _PAIRED:
        first = at if opening == THINK else 0
        yield from _pairs(text, opening, closing, first)
    start = len(text) - len(text.lstrip())
    if is_first and not is_open and text.startswith(THINK, start):  # cut off within its thinking
        yield start, start + len(THINK)
    if names:
        either = "|".join(map(re.escape, names))
        for match in re.finditer(f"</?(?:{either})>", text):
            yield match.span()


def _pairs(text: str, opening: str, closing: str, at: int) -> Iterator[tuple[int, int]]:
    """Find paired tags in linear time."""
    while (start := text.find(opening, at)) >= 0:
        end = text.find(closing, start + len(opening))
        if end < 0:
            return
        at = end + len(closing)
        yield start, start + len(opening)
        yield end, at


def drop_text(pieces: Sequence[Piece], length: int) -> list[Piece]:
    """The pieces behind the first ``length`` characters."""
    rest = []
    for piece in pieces:
        if length < len(piece.text):
            rest.append(Piece(piece.text[length:], piece.trusted))
        length = max(0, length - len(piece.text))
    return rest
