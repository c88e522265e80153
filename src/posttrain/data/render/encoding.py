"""Pieces of text to token ids, such that untrusted text never becomes a special token.

Text from the data may contain ``<|im_end|>`` or ``</think>``. In a tokenizer where these are tokens of
their own, they are encoded as plain characters when they come from untrusted pieces. (A tag that a
tokenizer knows only as plain text looks the same from wherever it comes; there, the graders look
at the completion alone, never at the prompt.)
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

# Added tokens that are not flagged as special and yet mark structure: <think>, [INST], <|user|>.
_BRACKETED = re.compile(r"[<\[{|].*[>\]}|]", re.DOTALL)
THINK = "<think>"
END_THINK = "</think>"
# Pairs of tags that an assistant writes. The second alone is a tag only where the prompt has opened the block.
_PAIRED = ((THINK, END_THINK), ("[THINK]", "[/THINK]"), ("<tool_call>", "</tool_call>"))
# Characters from which a text is encoded as a batch of one, for which the library lets other threads run meanwhile.
_LONG_TEXT = 2**14


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a prompt or response. Untrusted text can never become a special token."""

    text: str
    trusted: bool


def text_of(pieces: Iterable[Piece]) -> str:
    """The text of pieces, trusted or not."""
    return "".join(piece.text for piece in pieces)


class Markers:
    """The tokens of a tokenizer that only trusted text may produce.

    Attributes:
        ids: by content.
        swallows: by content, whether the token takes the white space before and behind it along.
        leading: the ids that the tokenizer itself puts in front of a text (BOS).
        anchors: texts with their ids, behind which a text is encoded that is no beginning; none where it is the same.
        restarts: a text right behind a marker is encoded as a beginning.
        adds_space: a beginning gets a space also where it has one, so that one is to be taken away again.
        context: ids behind which others are decoded that are no beginning, where a decoder strips the space in front
            of a text; empty where it is the same.
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
        # by first letter the lengths, longest first: some tokenizers have thousands of markers
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
        """The places where a marker begins, those within others too."""
        return [place for place in range(len(text)) if self._at(text, place) is not None]

    def find(self, text: str) -> Iterator[tuple[int, int, int]]:
        """(start, end, id) of every marker in the text, from left to right, of those at one place the longest."""
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
    if encode("\na") != [*anchors["\n"], *alone]:  # a space in front of a text, as SentencePiece writes it
        markers.anchors = anchors
        markers.restarts = any(encode(f"{content}a")[1:] == alone for content in ids)
    markers.context = _context(tokenizer, anchors["."])
    markers.adds_space = encode(" a") != alone
    _KNOWN[tokenizer] = (len(tokenizer), markers)
    return markers


def _leading_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that the tokenizer itself puts in front of a text."""
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
    """The text of ids, special tokens too, with options of ``tokenizer.decode``.

    Raises:
        UsageError: the tokenizer is of others and does not come to an end, or fails.
    """
    ids = list(ids)
    try_tokens(tokenizer, ids)
    with refuse_panic(tokenizer):
        return str(tokenizer.decode(ids, skip_special_tokens=False, **options))


def _context(tokenizer: Tokenizer, anchor: list[int]) -> list[int]:
    """The ids of a text behind which white space is decoded that is lost at the beginning; none if none is lost."""
    spaced = "  a"
    ids = _encode(tokenizer, f".{spaced}", split_special=False).ids
    if ids[: len(anchor)] != anchor or _decode(tokenizer, ids[len(anchor) :]) == spaced:
        return []
    if _decode(tokenizer, ids) == f".{spaced}":
        return anchor
    return []


def context_behind(tokenizer: Tokenizer, before: Sequence[int]) -> list[int]:
    """The ids behind which ids are decoded that follow ``before``, so that no white space in front of them is lost."""
    if not before or getattr(tokenizer, "backend_tokenizer", None) is None:
        return []
    markers = markers_of(tokenizer)
    if markers.restarts and markers.adds_space and before[-1] in markers.id_set:
        return []
    return markers.context


def decode_behind(tokenizer: Tokenizer, ids: Sequence[int], before: Sequence[int] = ()) -> str:
    """The text of ids that follow the ids ``before``; special tokens are kept."""
    context = context_behind(tokenizer, before)
    return _decode(tokenizer, [*context, *ids])[len(_decode(tokenizer, context)) :]


def _behind(markers: Markers, before: Sequence[int], encode: Callable[[str], list[int]]) -> list[int]:
    """The ids of a text behind the ids ``before``; ``encode`` gives those of an anchor with the text."""
    if before and not (markers.restarts and before[-1] in markers.id_set):
        for anchor, start in markers.anchors.items():
            ids = encode(anchor)
            if ids[: len(start)] == start:  # no merge across the border
                return ids[len(start) :]
    return encode("")


def encode_pieces(tokenizer: Tokenizer, pieces: Sequence[Piece], before: Sequence[int] = ()) -> list[int]:
    """Token ids of the pieces, without any BOS or EOS that they do not spell out.

    Where no untrusted text touches a marker, the ids are those of the whole text encoded at once,
    as every other program would encode it. Otherwise the text is cut at the trusted markers, and
    everything between them is encoded with special tokens switched off.

    Args:
        before: the ids in front of them: some tokenizers put a space in front of a text that begins.

    Raises:
        UsageError: a marker of a single character stands in untrusted text and cannot be spelled.
    """
    markers = markers_of(tokenizer)

    def encode(anchor: str) -> list[int]:
        merged: list[Piece] = []  # neighbours of equal trust as one: both ways of encoding find the same markers
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
    """The ids of a text that is cut at its trusted markers, with special tokens switched off between them."""
    ids: list[int] = []
    run = ""  # the text since the last marker
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
    """Return True if every marker among the ids lies wholly in trusted text."""
    spans = list[tuple[int, int]]()  # of untrusted text
    position = 0
    for piece in pieces:
        if not piece.trusted:
            spans.append((position, position + len(piece.text)))
        position += len(piece.text)
    found = [span for token, span in zip(ids, offsets, strict=True) if token in markers.id_set]
    return not any(start < high and low < end for start, end in found for low, high in spans)


def encode_plain(tokenizer: Tokenizer, text: str, before: Sequence[int] = ()) -> list[int]:
    """Token ids of untrusted text behind the ids ``before``; no marker is among them.

    Raises:
        UsageError: a marker of a single character cannot be spelled with other tokens.
    """
    if not text:
        return []
    markers = markers_of(tokenizer)
    ids = _behind(markers, before, lambda anchor: list(_encode(tokenizer, anchor + text, split_special=True).ids))
    if markers.id_set.isdisjoint(ids):
        return ids
    # Added tokens that are not flagged as special are still matched: cut every marker in two.
    if len(text) <= 1:
        raise UsageError(f"the tokenizer has the single character {text!r} as a special token, and the data contain it")
    cuts = sorted({0, *(start + 1 for start in markers.starts(text)), len(text)})
    if len(cuts) == 2:  # no marker stands there as written (a normaliser made it one): cut everywhere
        cuts = list(range(len(text) + 1))
    ids = []
    for start, end in pairwise(cuts):
        ids += encode_plain(tokenizer, text[start:end], ids or before)
    return ids


# The settings of a tokenizer hold for every thread: a batch may be sampled while the trainer encodes.
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


_BROKEN = "\ufffd"  # decoded where bytes are no character, or not yet
_MAX_PENDING = 4  # no character has more bytes


class TextStream:
    """The text that each token adds; together they are the text of all tokens decoded at once.

    A token that holds only the beginning of a character adds nothing; the one that completes it adds the whole.

    Args:
        before: the ids in front of them.
        lead: the text that ends an answer before the token at which it stops; held back until more follows.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = (), lead: str = "") -> None:
        self.tokenizer = tokenizer
        self.lead = lead
        self.ids: list[int] = list(context_behind(tokenizer, before))
        self._context = 0  # tokens from here on are decoded together: some tokenizers join a token to the one before
        self._shown = len(self.ids)  # tokens whose text has been given
        self._held = ""

    def push(self, token: int) -> str:
        """The text that is complete with this token, maybe empty."""
        self.ids.append(token)
        text = self._rest()
        if text.endswith(_BROKEN) and len(self.ids) - self._shown < _MAX_PENDING:
            return ""
        text = self.flush()
        shown = len(text) - self._begun_lead(text)
        self._held = text[shown:]
        return text[:shown]

    def _begun_lead(self, text: str) -> int:
        """The number of characters at the end of a text with which the lead may begin."""
        for length in range(min(len(self.lead), len(text)), 0, -1):
            if text.endswith(self.lead[:length]):
                return length
        return 0

    def flush(self) -> str:
        """The text that is left when no token follows: incomplete bytes as replacement characters."""
        text = self._held + self._rest()
        self._context = self._shown
        self._shown = len(self.ids)
        self._held = ""
        return text

    def end(self) -> str:
        """The text that is left behind the token at which the answer stops: without what leads to it."""
        return self.flush().removesuffix(self.lead)

    def _rest(self) -> str:
        before = _decode(self.tokenizer, self.ids[self._context : self._shown])
        text = _decode(self.tokenizer, self.ids[self._context :])
        return text[len(before) :]


def mark_tags(pieces: Sequence[Piece], names: Sequence[str] = (), *, is_open: bool = False) -> list[Piece]:
    """The same text with the tags of an assistant in trusted pieces.

    Args:
        names: of the tags of the prompt template.
        is_open: a block of thinking is open before the text, so that the first closing tag is one.
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
    """The places of the tags of each pair, in time that is linear in the length of the text."""
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
