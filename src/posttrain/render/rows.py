"""From the examples of a task to rows of tokens: demonstrations, conversations, pairs, judged answers, labelled steps.

A conversation whose chat template writes earlier turns as they were written is one row: prompt, turn, what is said
between, turn. Each part is encoded by itself, as it is while the model answers. Where a template rewrites earlier turns
(one that drops what was thought), and where there is no chat template, each turn of the assistant is a row of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from posttrain.errors import UsageError
from posttrain.render.assistant import behind_prompt, decode_response, encode_answer, encode_response
from posttrain.render.encoding import Piece, drop_text, encode_pieces, encode_plain, markers_of
from posttrain.render.replies import encode_turns
from posttrain.render.template import Template, encode_prompt, end_id, prompt_pieces
from posttrain.render.turns import as_row_texts, render_pieces, with_reasoning
from posttrain.types import Example, Message, Response, Turn

Shape = Literal["demonstration", "judged", "pair", "steps"]
TrainOn = Literal["assistant", "response", "all"]


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids, the first trained position, and what is known of the answer.

    ``step_labels`` are per position (ends of labelled steps only) where the answer has steps; such rows are
    trained at these positions alone. ``heard`` are the positions behind the prompt that are read and not trained, such
    as what tools return. ``is_apart``: one of several rows of a conversation, one for each turn. ``margin``: of a pair
    whose row states it.
    """

    ids: list[int]
    prompt_length: int
    score: float = 0.0
    step_labels: dict[int, int] = field(default_factory=dict)
    heard: frozenset[int] = frozenset()
    is_apart: bool = False
    margin: float | None = None


def rows_of(
    tokenizer: Any, template: Template, example: Example, shape: Shape, train_on: TrainOn | None = None
) -> Iterator[tuple[Row, ...] | str]:
    """The units of an example: tuples of rows, or the reason why there is none.

    A pair is the response of the highest score and that of the lowest; the rest of an example with
    more responses is not used. ``train_on``: of demonstrations; by default every turn of the assistant where the row is
    a conversation, else the response.
    """
    if (
        shape == "demonstration"
        and template.turns == "last"
        and not all(m.is_trained for m in example.conversation[-1:])
    ):
        yield UNTRAINED
        return
    if shape == "demonstration" and template.turns != "last":
        if train_on == "assistant" and not example.conversation:
            example = _as_conversation(example)
        if example.conversation:
            yield from _conversation(tokenizer, template, example, train_on or "assistant")
            return
    prompt = encode_prompt(tokenizer, template, example.messages, example.variables)
    if shape == "demonstration":
        if example.responses and example.solution is None and example.answer is None:
            best = max(example.responses, key=lambda r: r.score)
            yield (_row(tokenizer, template, prompt, best, example),)
        elif example.demonstration is not None and not template.response(example):
            yield f"a response without an answer, which template {template.name} would write between tags"
        else:
            answers = not example.turns or (example.answer, example.solution, example.demonstration) != (None,) * 3
            turns, own = (
                encode_turns(tokenizer, template, example.turns, answers, prompt) if example.turns else ([], [])
            )
            behind = [*prompt, *turns]
            ids = [*behind, *(encode_response(tokenizer, template, example, behind) if answers else [])]
            yield (Row(ids, len(prompt), heard=frozenset(len(prompt) + i for i, mine in enumerate(own) if not mine)),)
        return
    if not example.responses:
        yield "no given responses"
    elif shape == "pair":
        unit = _pair(tokenizer, template, prompt, example)
        yield unit if isinstance(unit, str) else tuple(replace(row, margin=example.margin) for row in unit)
    elif shape == "judged":
        for response in example.responses:
            yield (_row(tokenizer, template, prompt, response, example),)
    else:
        for response in example.responses:
            if all(response.steps):
                row = _stepwise(tokenizer, template, prompt, response)
                yield (row,) if row.step_labels else "no labelled steps"
            else:  # its label would stand at a token of the step before
                yield "an empty step"


def _as_conversation(example: Example) -> Example:
    """An example whose prompt has turns of the assistant, as a conversation; any other as it is."""
    text = example.demonstration
    if text is None and example.responses and (example.solution, example.answer) == (None, None):
        text = max(example.responses, key=lambda r: r.score).text
    if text is None or example.turns or all(message.role != "assistant" for message in example.messages):
        return example
    return replace(example, conversation=(*example.messages, Message("assistant", text)))


def _conversation(
    tokenizer: Any, template: Template, example: Example, train_on: TrainOn
) -> Iterator[tuple[Row, ...] | str]:
    """One row of a conversation, or one for each turn of the assistant."""
    if template.turns == "apart":
        chosen = list(turns_apart(example, train_on))
        for one in chosen:
            for unit in rows_of(tokenizer, template, one, "demonstration"):
                is_apart = len(chosen) > 1 and not isinstance(unit, str)
                yield (replace(unit[0], is_apart=True),) if is_apart and not isinstance(unit, str) else unit
        if not chosen:
            yield UNTRAINED
        return
    try:
        rows = list(conversation_rows(tokenizer, template, example, train_on))
    except UsageError as error:
        raise UsageError(f"example {example.id!r}: {error}") from error
    yield from ((row,) for row in rows) if rows else (UNTRAINED,)


def _row(tokenizer: Any, template: Template, prompt: Sequence[int], response: Response, example: Example) -> Row:
    if response.answer is not None:  # in the form, and with the tags, that a policy would write
        written = Example("", (), answer=response.answer, solution=response.text, variables=example.variables)
        return Row([*prompt, *encode_response(tokenizer, template, written, prompt)], len(prompt), response.score)
    if response.ids and decode_response(tokenizer, template, response.ids, prompt) == response.text:
        answer = list(response.ids)  # as it was sampled
    else:
        answer = encode_answer(tokenizer, template, response.text, prompt, example.variables)
    return Row([*prompt, *answer, end_id(tokenizer, template)], len(prompt), response.score)


def _pair(tokenizer: Any, template: Template, prompt: Sequence[int], example: Example) -> tuple[Row, ...] | str:
    chosen = max(example.responses, key=lambda r: r.score)
    rejected = min(example.responses, key=lambda r: r.score)
    if chosen.score == rejected.score:
        return "all responses have the same score"
    rows = tuple(_row(tokenizer, template, prompt, r, example) for r in (chosen, rejected))
    if rows[0].ids == rows[1].ids:
        return "chosen and rejected are the same tokens"
    return rows


def _stepwise(tokenizer: Any, template: Template, prompt: Sequence[int], response: Response) -> Row:
    """The steps behind one another, each encoded alone so that its last token is known; None is no label."""
    ids = list(prompt)
    labels: dict[int, int] = {}
    for step, label in zip(response.steps, response.step_labels, strict=True):
        ids += encode_plain(tokenizer, step)
        if label is not None:
            labels[len(ids) - 1] = label
    return Row([*ids, end_id(tokenizer, template)], len(prompt), response.score, labels)


# Conversations by their chat template: which parts the assistant writes, and which it only reads.

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


def conversation_rows(tokenizer: Any, template: Template, example: Example, train_on: str) -> Iterator[Row]:
    """The rows of a conversation by its chat template.

    One row, or where the template rewrites earlier turns one for each trained turn; none where nothing is trained.

    Raises:
        UsageError: the chat template cannot render the conversation.
    """
    variables = {**template.variables, **as_row_texts(example.variables)}
    trained = trained_turns(example.conversation, train_on)
    if not trained:
        return
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
    whole = _joined(conversation, places, prompts, turns, train_on)
    if whole is None and train_on == "all" and len(trained) < len(places):
        raise UsageError(
            f"example {example.id!r}: data.train_on all with a message of weight 0, and the chat template rewrites "
            "earlier turns; use data.train_on assistant"
        )
    chosen = trained[-1:] if train_on == "all" else trained
    for parts in [[prompts[i], turns[i]] for i in chosen] if whole is None else [whole]:
        ids, heard = encode_pieces(tokenizer, parts[0].pieces), set[int]()
        prompt_length = len(ids)
        for part in parts[1:]:
            encoded = encode_pieces(tokenizer, part.pieces)
            heard |= set() if part.is_trained else set(range(len(ids), len(ids) + len(encoded)))
            ids = ids + encoded
        yield Row(ids, prompt_length, heard=frozenset(heard), is_apart=whole is None and len(chosen) > 1)


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
