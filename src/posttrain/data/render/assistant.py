"""Shared encoding of assistant text following a prompt.

Demonstrations, preference pairs, scored responses and policy output all pass through here. Tags for thinking, calls,
and the prompt format become the tokenizer's special tokens, like in generated text. Turn and role markers stay plain
characters.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from posttrain.data.render.calls import CallForm, write_calls
from posttrain.data.render.chat_template import mark, probed, render_history
from posttrain.data.render.encoding import (
    END_THINK,
    THINK,
    Piece,
    Tokenizer,
    decode_behind,
    decode_ids,
    drop_text,
    encode_pieces,
    mark_tags,
    markers_of,
    text_of,
)
from posttrain.data.render.template import (
    OPENED,
    Template,
    end_id,
    end_ids,
    end_lead,
    end_text,
    ending,
    render_pieces,
    stop_ids,
    without_empty_thinking,
    without_end,
)
from posttrain.data.render.template_calls import call_form, call_marks
from posttrain.errors import UsageError
from posttrain.types import Example, Message, Turn

_LONGEST_OPENING = 8  # tokens in a tag plus trailing whitespace
Channels = tuple[str, str]  # opening and closing thinking delimiters, for chat templates without thinking tags


def opening_of(tokenizer: Tokenizer, template: Template, prompt: Sequence[int]) -> str:
    """Find the open thinking block at a prompt's end, including whitespace. Empty if none.

    Only chat templates, rendered prompts and the format's opening can open one. User text cannot.
    """
    if template.opening or not prompt or not (template.chat or template.name == "as_is"):
        return template.opening
    tail = list(prompt[-_LONGEST_OPENING:])
    tag = markers_of(tokenizer).ids.get(THINK)
    if tag is not None and tag not in tail:
        return ""
    while tag is not None and tag in tail[1:]:
        tail = tail[1:]
    found = OPENED.search(decode_ids(tokenizer, tail, clean_up_tokenization_spaces=False))
    if found:
        return found[0]
    return ""


def behind_prompt(
    tokenizer: Tokenizer,
    template: Template,
    pieces: Sequence[Piece],
    prompt: Sequence[int] = (),
    variables: Mapping[str, object] | None = None,
) -> list[Piece]:
    """Build assistant text continuing a prompt.

    A thinking block opened by the prompt is not opened again. A response without thinking first closes it, then adds
    the chat template's usual prefix. Assistant tags in untrusted pieces become trusted.

    Args:
        prompt: prompt ids, if any.
        variables: the row's chat template variables.
    """
    if template.name == "document":
        return list(pieces)
    opening = opening_of(tokenizer, template, prompt)
    text = text_of(pieces)
    is_thinking = text.lstrip().startswith(THINK)
    lead = ""
    if prompt and template.chat:
        settings = {**template.variables, **(variables or {})}
        lead, channels = _known_leads(tokenizer, settings)
        written = _in_channels(text, lead, channels)
        if written is not None:
            return written
    if opening and is_thinking:
        pieces = _without_opening(pieces, text, opening)
    before: list[Piece] = []
    is_answer = not is_thinking and not (opening and END_THINK in text)
    brings_space = lead.isspace() and text[:1].isspace()
    if lead and is_answer and not brings_space:
        before.append(Piece(lead, trusted=True))
    if template.space and text and not text[0].isspace():
        before.append(Piece(template.space, trusted=True))
    marked = mark_tags(pieces, template.tags, is_open=bool(opening))
    return [*before, *_mark_calls(tokenizer, template, marked)]


def _without_opening(pieces: Sequence[Piece], text: str, opening: str) -> list[Piece]:
    """Drop the beginning of a response if the prompt already contains it."""
    at = text.index(THINK) + len(THINK)
    for character in opening.partition(THINK)[2]:
        if text[at : at + 1] != character:
            break
        at += 1
    return drop_text(pieces, at)


def _mark_calls(tokenizer: Tokenizer, template: Template, pieces: list[Piece]) -> list[Piece]:
    """Mark call delimiters of the chat template as trusted."""
    marks = "|".join(map(re.escape, call_marks(tokenizer, template)))
    if not marks:
        return pieces
    marked: list[Piece] = []
    for piece in pieces:
        if piece.trusted:
            marked.append(piece)
            continue
        for number, text in enumerate(re.split(f"({marks})", piece.text)):
            is_mark = number % 2 == 1
            marked.append(Piece(text, trusted=is_mark))
    return [piece for piece in marked if piece.text]


def encode_response(
    tokenizer: Tokenizer, template: Template, example: Example, prompt: Sequence[int] = ()
) -> list[int]:
    """Tokenize a demonstration following a prompt, including the ending.

    Raises:
        UsageError: nothing to demonstrate, or missing ``eos_token``.
    """
    pieces = behind_prompt(tokenizer, template, template.response(example), prompt, example.variables)
    ids = encode_pieces(tokenizer, pieces, prompt)
    if not ids:
        raise UsageError(f"example {example.id!r}: the demonstration is empty")
    if ids[-1] == end_id(tokenizer, template):  # a rendered response may include it
        return ids
    return with_end(tokenizer, template, pieces, prompt)


def with_end(
    tokenizer: Tokenizer,
    template: Template,
    pieces: Sequence[Piece],
    before: Sequence[int] = (),
    *,
    continued: bool = False,
) -> list[int]:
    """Tokenize a response plus ending. ``continued``: another message follows.

    Raises:
        UsageError: missing ``eos_token``.
    """
    end = end_ids(tokenizer, template, continued=continued)
    if len(end) == 1:
        return [*encode_pieces(tokenizer, pieces, before), *end]
    text = end_text(tokenizer, template, continued=continued)
    return encode_pieces(tokenizer, [*pieces, Piece(text, trusted=True)], before)


def encode_answer(
    tokenizer: Tokenizer, template: Template, text: str, prompt: Sequence[int], variables: Mapping[str, object]
) -> list[int]:
    """Tokenize given assistant text following a prompt, without ending."""
    pieces = behind_prompt(tokenizer, template, [Piece(text, trusted=False)], prompt, variables)
    if text:
        return encode_pieces(tokenizer, pieces, prompt)
    return []


def decode_response(tokenizer: Tokenizer, template: Template, ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
    """Decode a response for grading: opening plus completion, without ending but with other special tokens.

    Args:
        prompt: prompt ids. If they end in an open thinking block, the result begins with that block.
    """
    text = decode_behind(tokenizer, without_end(tokenizer, template, ids), prompt)
    lead = end_lead(tokenizer, template)
    if lead and len(ids) and ids[-1] in stop_ids(tokenizer, template):
        text = text.removesuffix(lead)  # the tokenizer may have merged it into the response
    return opening_of(tokenizer, template, prompt) + text


def _leads(tokenizer: Tokenizer, settings: Mapping[str, object]) -> tuple[str, Channels]:
    """Find the prefix that a chat template writes before a response, and any channel delimiters.

    Prefixes are kept only if they contain a marker, a closing thinking tag, or only whitespace, which responses may
    include.
    """
    question = Message("user", "a")
    find = markers_of(tokenizer).find

    def tail(answer: Message) -> list[str]:
        """List trusted text around the parts of a response."""
        whole, _ = render_pieces(tokenizer, [question, answer], "", settings, prompt=False)
        if not text_of(whole).startswith(prompt):
            return []
        behind = drop_text(whole, len(prompt))
        if all(piece.trusted for piece in behind):  # cannot locate the response
            return []
        parts = [""]
        for piece in behind:
            if piece.trusted:
                parts[-1] += piece.text
            else:
                parts.append("")
        return parts

    try:
        prompt = text_of(render_pieces(tokenizer, [question], "", settings, prompt=True)[0])
        plain = tail(Message("assistant", "b"))
        thinking = tail(Message("assistant", "b", reasoning="c"))
    except UsageError:  # rendering the prompt will report the error
        return "", ("", "")
    lead = ""
    if plain:
        lead = without_empty_thinking(tokenizer, plain[0], settings)
    elif OPENED.search(prompt):
        lead = f"\n{END_THINK}\n\n"
    if not any(find(lead)) and END_THINK not in lead and not lead.isspace():
        lead = ""
    channels = ("", "")
    if len(thinking) == 3 and THINK not in thinking[0] and any(find(thinking[0])):
        channels = (thinking[0], thinking[1])
    return lead, channels


def _known_leads(tokenizer: Tokenizer, variables: Mapping[str, object]) -> tuple[str, Channels]:
    """Cache ``_leads`` per chat template and variables."""
    return probed(tokenizer, "leads", variables, lambda settings: _leads(tokenizer, settings))


def out_of_channels(tokenizer: Tokenizer, message: Message, variables: Mapping[str, object]) -> Message:
    """Split a message written with the template's channel markers into reasoning and content."""
    if message.role != "assistant" or message.reasoning is not None or message.calls:
        return message
    lead, (before, between) = _known_leads(tokenizer, variables)
    if not before or not between:
        return message
    thinking, closed, answer = message.content.removeprefix(before).partition(between)
    if message.content.startswith(before) and closed and answer:
        return replace(message, content=answer, reasoning=thinking)
    if lead and message.content.startswith(lead) and len(message.content) > len(lead):
        return replace(message, content=message.content.removeprefix(lead))
    return message


def _in_channels(text: str, lead: str, channels: Channels) -> list[Piece] | None:
    """Split text containing thinking or channel markers. None if it contains neither."""
    before, between = channels
    if not before:
        return None
    if text.startswith(before):
        thinking, closed, answer = text[len(before) :].partition(between)
        parts = [(before, True), (thinking, False), (closed, True), (answer, False)]
    elif text.startswith(lead):
        parts = [(lead, True), (text[len(lead) :], False)]
    elif text.lstrip().startswith(THINK) and END_THINK in text:
        thinking, _, answer = text.partition(THINK)[2].partition(END_THINK)
        parts = [(before, True), (thinking.strip("\n"), False), (between, True), (answer.lstrip("\n"), False)]
    else:
        return None
    return [Piece(part, trusted) for part, trusted in parts if part]


# Probe turns: plain text, and text after thinking.
_PROBES = ("{}", "<think>\n{}\n</think>\n\n{}")


@dataclass(frozen=True)
class ReplyFrame:
    """Trusted text around a turn's tool results.

    Attributes:
        end: id ending a turn, and the first id in ``before``. Not repeated if a turn already ends there.
        strips: contents are stripped.
        wrapped: results are already marked as such.
    """

    before: str
    between: str
    after: str
    end: int | None
    strips: bool
    wrapped: bool

    def encode(
        self, tokenizer: Tokenizer, template: Template, results: Sequence[str], tags: tuple[str, str], last: int | None
    ) -> list[int]:
        """Tokenize a reply following a turn that ends with ``last``. Results never become special tokens.

        Args:
            tags: delimiters for each result, used unless ``wrapped``.
        """
        opening, closing = tags
        if self.wrapped:
            opening = ""
            closing = ""
        pieces = [Piece(self.before, trusted=True)]
        for number, result in enumerate(results):
            if number:
                pieces.append(Piece(self.between, trusted=True))
            if self.strips:
                result = result.strip()
            pieces.append(Piece(opening, trusted=True))
            pieces.append(Piece(template.quote(result), trusted=False))
            pieces.append(Piece(closing, trusted=True))
        pieces.append(Piece(self.after, trusted=True))
        context = [last] if last is not None else []
        ids = encode_pieces(tokenizer, pieces, context)
        if self.end is not None and last == self.end and self.end in ids:
            return ids[ids.index(self.end) + 1 :]
        return ids


def encode_turns(
    tokenizer: Tokenizer, template: Template, turns: Sequence[Turn], answered: bool, prompt: Sequence[int] = ()
) -> tuple[list[int], list[bool]]:
    """Tokenize a demonstration's turns like an episode, and flag ids written by the model.

    Args:
        answered: a response follows. If not, the last call ended the episode without results.

    Raises:
        UsageError: the chat template rewrites history, or missing ``eos_token``.
    """
    frame = reply_frame(tokenizer, template)
    form = call_form(tokenizer, template)
    ids: list[int] = []
    own: list[bool] = []
    for number, turn in enumerate(turns, start=1):
        is_heard = answered or number < len(turns)
        written = encode_turn(tokenizer, template, turn, form, [*prompt, *ids], continued=is_heard)
        ids += written
        own += [True] * len(written)
        if is_heard:
            results = [call.result for call in turn.calls]
            heard = frame.encode(tokenizer, template, results, form.results, written[-1])
            ids += heard
            own += [False] * len(heard)
    return ids, own


def encode_turn(
    tokenizer: Tokenizer,
    template: Template,
    turn: Turn,
    form: CallForm,
    prompt: Sequence[int] = (),
    *,
    continued: bool = True,
) -> list[int]:
    """Tokenize a turn as a model would write it, including text, calls, and end.

    ``continued``: another message follows.

    Raises:
        UsageError: missing ``eos_token``.
    """
    pieces = turn_pieces(tokenizer, template, turn, form, prompt)
    if turn.calls and form.end is not None:
        return [*encode_pieces(tokenizer, pieces, prompt), form.end]
    return with_end(tokenizer, template, pieces, prompt, continued=continued)


def turn_pieces(
    tokenizer: Tokenizer, template: Template, turn: Turn, form: CallForm, prompt: Sequence[int] = ()
) -> list[Piece]:
    """Build a turn as a model would write it, without ending."""
    pieces = [Piece(" " if template.opening else "", trusted=True), Piece(turn.text, trusted=False)]
    if turn.text or form.end is None:  # calls with a special ending are separate messages
        pieces = behind_prompt(tokenizer, template, pieces, prompt)
    if turn.calls:
        return [*pieces, *write_calls(turn.calls, form, bool(turn.text))]
    return pieces


def reply_frame(tokenizer: Tokenizer, template: Template, roles: Sequence[str] = ("tool", "user")) -> ReplyFrame:
    """Find the reply frame. In chats, use the first supported role.

    Raises:
        UsageError: the chat template rewrites history. The message includes a diff.
    """
    if not template.chat:
        before, after = template.frame
        return ReplyFrame(before, "\n", after, None, strips=False, wrapped=False)
    refusals = []
    for role in roles:
        try:
            return _by_difference(tokenizer, template.variables, role)
        except UsageError as error:
            refusals.append(error)
    if "rewrites" in str(refusals[-1]):
        raise refusals[-1]
    raise refusals[0]


def _by_difference(tokenizer: Tokenizer, variables: Mapping[str, object], role: str) -> ReplyFrame:
    """Infer the frame for replies in a role. It must not depend on turn contents."""

    def render(*turns: tuple[str, str]) -> str:
        return render_history(tokenizer, [("user", mark(20)), *turns], variables, prompt=True)

    heard = [mark(10), mark(11)]
    tails = set()
    for probe in _PROBES:
        quoted = [probe.format(mark(2 * i), mark(2 * i + 1)) for i in range(2)]
        history = list[tuple[str, str]]()
        before = render()
        for turn, reply in zip(quoted, heard, strict=True):
            history += [("assistant", turn), (role, reply)]
            after = render(*history)
            if not after.startswith(before + turn):
                raise UsageError(_rewrites(before + turn, after))
            opening, shown, closing = after[len(before + turn) :].partition(reply)
            if not shown or reply in closing:
                raise UsageError(f"the tokenizer's chat template must show {role!r} messages exactly once")
            tails.add((opening, closing))
            before = after
    if len(tails) > 1:
        raise UsageError(_rewrites(*sorted("".join(tail) for tail in tails)[:2]))
    ((opening, closing),) = tails
    strips = f" {heard[0]} " not in render(("assistant", mark(0)), (role, f" {heard[0]} "))
    between = "\n"  # if the template accepts only one message
    with suppress(UsageError):
        both = render(("assistant", mark(0)), (role, heard[0]), (role, heard[1]))
        behind_first = both.partition(opening + heard[0])[2]
        gap, found, rest = behind_first.partition(heard[1])
        if found and rest == closing:
            between = gap
    end = None
    own = ending(tokenizer)
    if own is not None and own.middle and opening.startswith(own.middle):
        end = own.ids[0]
    return ReplyFrame(opening, between, closing, end, strips, wrapped=role == "tool")


def _rewrites(expected: str, written: str) -> str:
    """Explain how a template rewrites earlier turns, including a diff."""
    placeholder = mark(0).replace("0", r"(\d+)")
    said = re.sub(placeholder, r"TEXT\1", expected)
    rendered = re.sub(placeholder, r"TEXT\1", written)[: len(said) + 80]
    shown = difflib.unified_diff(said.splitlines(), rendered.splitlines(), "said", "rendered", n=1, lineterm="")
    return (
        "the tokenizer's chat template rewrites history: adding a turn changes how earlier turns are rendered, so "
        "training would use text never seen at inference. Use a chat template keeping earlier turns unchanged, or a "
        "prompt.template without chat (r1_zero, plain, boxed). The difference:\n" + "\n".join(list(shown)[:16])
    )
