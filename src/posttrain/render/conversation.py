"""Whole conversations as rows of tokens: which of them the assistant writes, and which it only reads.

A chat template that writes earlier turns as they were written gives one row: prompt, turn, what is said between, turn.
Each part is encoded by itself, as it is while the model answers. Where a template rewrites earlier turns (one that
drops what was thought), and where there is no chat template, each turn of the assistant is a row of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.errors import UsageError
from posttrain.render.assistant import behind_prompt
from posttrain.render.encoding import Piece, drop_text, encode_pieces, markers_of
from posttrain.render.template import Template, end_id, prompt_pieces
from posttrain.render.turns import as_row_texts, render_pieces, with_reasoning
from posttrain.types import Example, Message, Turn

UNTRAINED = "no message that is trained (weight 0 or train: false)"
# An empty block of thinking that some chat templates write into the last turn alone.
_EMPTY_THINKING = re.compile(r"\A<think>\s*</think>\s*")


@dataclass(frozen=True)
class Part:
    """A part of a row: its pieces, and whether the assistant writes it and is trained on it."""

    pieces: Sequence[Piece]
    is_trained: bool

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


def split_turns(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], tuple[Turn, ...]]:
    """(the messages up to the last of the user, the turns behind it in which tools are used).

    All messages and no turns, where no tool is used behind the last message of the user.
    """
    last = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    tail = messages[last + 1 :]
    if last < 0 or not tail or not all(message.calls or message.role == "tool" for message in tail):
        return messages, ()
    results = iter(message.content for message in tail if message.role == "tool")
    turns = [
        Turn(message.text, tuple(replace(call, result=next(results)) for call in message.calls))
        for message in tail
        if message.calls
    ]
    return messages[: last + 1], tuple(turns)


def trained_turns(conversation: Sequence[Message], train_on: str) -> list[int]:
    """The places of the assistant's messages that are trained: all, or (``response``) those after the last user's.

    A message that nothing comes before is read only, and so is one that is not to be trained.
    """
    last = max((i for i, message in enumerate(conversation) if message.role == "user"), default=0)
    return [
        i
        for i, message in enumerate(conversation)
        if message.role == "assistant" and message.is_trained and i > 0 and (train_on != "response" or i > last)
    ]


def refuse_untrained(name: str, examples: Sequence[Example], train_on: str) -> None:
    """Refuse a task of conversations in which no message is trained.

    Raises:
        UsageError: with the number of examples.
    """
    if len(examples) and all(e.conversation and not trained_turns(e.conversation, train_on) for e in examples):
        raise UsageError(f"task {name!r}: no row is left to train on; dropped: {len(examples)} × {UNTRAINED}")


def turns_apart(example: Example, train_on: str) -> Iterator[Example]:
    """One example for each answer of the assistant that is trained, the calls before it included."""
    conversation = example.conversation
    chosen = [i for i in trained_turns(conversation, train_on) if not conversation[i].calls]
    for i in chosen[-1:] if train_on == "all" else chosen:  # all of a conversation is in its last prompt
        message = conversation[i]
        messages, turns = split_turns(conversation[:i])
        read_only = conversation if train_on == "all" else conversation[len(messages) : i]
        if not all(one.is_trained for one in read_only):
            what = "a call of weight 0" if train_on != "all" else "data.train_on all with a message of weight 0"
            raise UsageError(f"example {example.id!r}: {what} needs the prompt.template chat; leave the row out")
        is_last = i == len(conversation) - 1
        yield replace(
            example,
            messages=messages,
            turns=turns,
            demonstration=message.text,
            answer=example.answer if is_last else None,
            conversation=(),
        )


def conversation_rows(
    tokenizer: Any, template: Template, example: Example, train_on: str
) -> list[list[tuple[list[int], bool]]]:
    """The rows of a conversation by its chat template: parts as ids, each with whether it is trained.

    One row, or where the template rewrites earlier turns one for each trained turn; none where nothing is trained.

    Raises:
        UsageError: the chat template cannot render the conversation.
    """
    variables = {**template.variables, **as_row_texts(example.variables)}
    trained = trained_turns(example.conversation, train_on)
    if not trained:
        return []
    conversation = with_reasoning(tokenizer, example.conversation, variables)
    places = [i for i, message in enumerate(conversation) if message.role == "assistant" and 0 < i <= trained[-1]]
    prompts = {i: Part(prompt_pieces(tokenizer, template, conversation[:i], example.variables), False) for i in places}
    turns = {
        i: Part(_turn(tokenizer, template, conversation[: i + 1], variables, prompts[i]), i in trained) for i in places
    }
    last = len(conversation) - 1
    if last in turns:
        written = _as_written(tokenizer, template, example.conversation[last], variables, prompts[last])
        # white space that a template writes before every answer is its own
        if written is not None and (
            written.text[0].isspace() or turns[last].text.removesuffix(written.text).strip() != ""
        ):
            turns[last] = replace(written, is_trained=turns[last].is_trained)
    rows = [_joined(conversation, places, prompts, turns, train_on)]
    if rows[0] is None:
        if train_on == "all" and len(trained) < len(places):
            raise UsageError(
                f"example {example.id!r}: data.train_on all with a message of weight 0, and the chat template rewrites "
                "earlier turns; use data.train_on assistant"
            )
        chosen = trained[-1:] if train_on == "all" else trained
        rows = [[prompts[i], turns[i]] for i in chosen]
    return [[(encode_pieces(tokenizer, p.pieces), p.is_trained) for p in row] for row in rows if row is not None]


def _joined(
    conversation: Sequence[Message],
    places: Sequence[int],
    prompts: dict[int, Part],
    turns: dict[int, Part],
    train_on: str,
) -> list[Part] | None:
    """All turns in one row; None where a later prompt does not begin with what was said before it."""
    parts, said = list[Part](), ""
    for i in places:
        if not prompts[i].text.startswith(said):
            return None
        # what tools return is never trained, what users say only with all
        is_trained = train_on == "all" and conversation[i - 1].role != "tool"
        parts += [Part(drop_text(prompts[i].pieces, len(said)), is_trained), turns[i]]
        said = prompts[i].text + turns[i].text
    return parts


def _as_written(
    tokenizer: Any, template: Template, message: Message, variables: Mapping[str, Any], prompt: Part
) -> Part | None:
    """The last message with its white space as the row has it; None of one with calls or with reasoning apart.

    No prompt shows it again, so that what the chat template would make of it does not matter.
    """
    if message.calls or message.reasoning is not None:
        return None
    content, before = [Piece(message.content, trusted=False)], encode_pieces(tokenizer, prompt.pieces)
    end = Piece(tokenizer.decode([end_id(tokenizer, template)]), trusted=True)
    return Part([*behind_prompt(tokenizer, template, content, before, variables), end], True)


def _turn(
    tokenizer: Any, template: Template, messages: Sequence[Message], variables: Mapping[str, Any], prompt: Part
) -> list[Piece]:
    """The last message as the assistant writes it behind the prompt, its end included: what its chat template adds."""
    message, end = messages[-1], tokenizer.decode([end_id(tokenizer, template)])
    whole, hidden = render_pieces(tokenizer, messages, template.system, variables, prompt=False)
    if hidden and max(hidden) == len(messages) - 1:
        raise UsageError(f"the chat template does not show the reasoning of message {len(messages)}; leave it out")
    if not Part(whole, False).text.startswith(prompt.text):
        if message.calls or message.reasoning is not None:
            what = f"the chat template writes message {len(messages)} otherwise than behind its prompt"
            raise UsageError(f"{what}; choose another prompt.template, or leave the row out")
        content, before = [Piece(message.content, trusted=False)], encode_pieces(tokenizer, prompt.pieces)
        return [*behind_prompt(tokenizer, template, content, before, variables), Piece(end, trusted=True)]
    pieces = drop_text(whole, len(prompt.text))
    if message.reasoning is None and pieces and pieces[0].trusted:
        pieces[0] = Piece(_EMPTY_THINKING.sub("", pieces[0].text), trusted=True)
    return _up_to(tokenizer, pieces, end)


def _up_to(tokenizer: Any, pieces: Sequence[Piece], end: str) -> list[Piece]:
    """The pieces up to the end token, or to the last marker where the template ends such a turn with another one.

    The end token is added where it ends a turn with none.
    """
    kept: list[Piece] = []
    for piece in pieces:
        at = piece.text.find(end) if piece.trusted else -1
        if at >= 0:
            return [*kept, Piece(piece.text[: at + len(end)], trusted=True)]
        kept.append(piece)
    markers = list(markers_of(tokenizer).find(kept[-1].text)) if kept and kept[-1].trusted else []
    if markers:
        return [*kept[:-1], Piece(kept[-1].text[: markers[-1][1]], trusted=True)]
    return [*kept, Piece(end, trusted=True)]
