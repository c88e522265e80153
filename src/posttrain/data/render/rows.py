"""Rows of tokens of a task's examples: demonstrations, conversations, pairs, judged answers, labelled steps.

A conversation whose chat template writes earlier turns as they were written is one row: prompt, turn, the messages
between, turn. Each part is encoded by itself, as it is while the model answers. Where a template rewrites earlier turns
(one that drops what was thought), and where there is no chat template, each turn of the assistant is a row of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from posttrain.data.render.assistant import (
    behind_prompt,
    decode_response,
    encode_answer,
    encode_response,
    encode_turns,
    out_of_channels,
    turn_pieces,
)
from posttrain.data.render.encoding import Piece, Tokenizer, drop_text, encode_pieces, encode_plain, markers_of
from posttrain.data.render.sheet import as_row_texts
from posttrain.data.render.template import (
    Template,
    begins_with_empty_thinking,
    encode_prompt,
    end_id,
    end_ids,
    end_text,
    ending,
    prompt_pieces,
    render_pieces,
    with_reasoning,
    without_empty_thinking,
)
from posttrain.data.render.template_calls import call_form, call_marks
from posttrain.errors import UsageError
from posttrain.types import Example, Message, Response, Turn

Shape = Literal["demonstration", "judged", "pair", "steps"]
TrainOn = Literal["assistant", "response", "all"]
UNTRAINED = "no message that is trained (weight 0 or train: false)"


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids, the first trained position, and the facts of the answer.

    Attributes:
        step_labels: per position (ends of labelled steps only) where the answer has steps; such rows are
            trained at these positions alone.
        heard: the positions behind the prompt that are read and not trained, such as the results of tools.
        is_apart: one of several rows of a conversation, one for each turn.
        margin: of a pair whose row states it.
    """

    ids: list[int]
    prompt_length: int
    score: float = 0.0
    step_labels: dict[int, int] = field(default_factory=dict)
    heard: frozenset[int] = frozenset()
    is_apart: bool = False
    margin: float | None = None


def rows_of(
    tokenizer: Tokenizer, template: Template, example: Example, shape: Shape, train_on: TrainOn | None = None
) -> Iterator[tuple[Row, ...] | str]:
    """The units of an example: tuples of rows, or the reason why there is none.

    A pair is the response of the highest score and that of the lowest; the rest of an example with
    more responses is not used. ``train_on``: of demonstrations; by default every turn of the assistant where the row is
    a conversation, else the response.
    """
    if shape == "demonstration":
        yield from _demonstrations(tokenizer, template, example, train_on)
        return
    prompt = encode_prompt(tokenizer, template, example.messages, example.variables)
    if not example.responses:
        yield "no given responses"
    elif shape == "pair":
        chosen = max(example.responses, key=lambda r: r.score)
        rejected = min(example.responses, key=lambda r: r.score)
        rows = tuple(_row(tokenizer, template, prompt, r, example) for r in (chosen, rejected))
        if chosen.score == rejected.score:
            yield "all responses have the same score"
        elif rows[0].ids == rows[1].ids:
            yield "chosen and rejected are the same tokens"
        else:
            yield tuple(replace(row, margin=example.margin) for row in rows)
    elif shape == "judged":
        yield from ((_row(tokenizer, template, prompt, response, example),) for response in example.responses)
    else:
        for response in example.responses:
            if all(response.steps):
                row = _stepwise(tokenizer, template, prompt, response)
                yield (row,) if row.step_labels else "no labelled steps"
            else:  # its label would stand at a token of the step before
                yield "an empty step"


def _demonstrations(
    tokenizer: Tokenizer, template: Template, example: Example, train_on: TrainOn | None
) -> Iterator[tuple[Row, ...] | str]:
    if template.turns != "rendered" and any(message.calls for message in example.conversation[-1:]):
        raise UsageError(f"example {example.id!r} ends with a call, which needs the prompt.template chat")
    if template.turns == "last" and not all(m.is_trained for m in example.conversation[-1:]):
        yield UNTRAINED
        return
    given = example.responses and (example.solution, example.answer) == (None, None)
    if given:
        best = max(example.responses, key=lambda r: r.score)
    else:
        best = None
    if template.turns != "last":
        if best is not None and example.demonstration is None:
            text = best.text
        else:
            text = example.demonstration
        has_turns = any(message.role == "assistant" for message in example.messages)
        if train_on == "assistant" and has_turns and text is not None and not (example.turns or example.conversation):
            example = replace(example, conversation=(*example.messages, Message("assistant", text)))
        if example.conversation:
            yield from _conversation(tokenizer, template, example, train_on or "assistant")
            return
    prompt = encode_prompt(tokenizer, template, example.messages, example.variables)
    if best is not None:
        yield (_row(tokenizer, template, prompt, best, example),)
    elif example.demonstration is not None and not template.response(example):
        yield f"a response without an answer, which template {template.name} would write between tags"
    else:
        answers = not example.turns or (example.answer, example.solution, example.demonstration) != (None,) * 3
        if example.turns:
            turns, own = encode_turns(tokenizer, template, example.turns, answers, prompt)
        else:
            turns = []
            own = []
        ids = [*prompt, *turns]
        ids += encode_response(tokenizer, template, example, ids) if answers else []
        yield (Row(ids, len(prompt), heard=frozenset(len(prompt) + i for i, mine in enumerate(own) if not mine)),)


def _conversation(
    tokenizer: Tokenizer, template: Template, example: Example, train_on: TrainOn
) -> Iterator[tuple[Row, ...] | str]:
    """One row of a conversation, or one for each turn of the assistant."""
    units: list[tuple[Row, ...] | str]
    if template.turns == "apart":
        chosen = list(_turns_apart(example, train_on))
        units = [unit for one in chosen for unit in rows_of(tokenizer, template, one, "demonstration")]
        if len(chosen) > 1:
            units = [unit if isinstance(unit, str) else (replace(unit[0], is_apart=True),) for unit in units]
    else:
        try:
            units = [(row,) for row in _conversation_rows(tokenizer, template, example, train_on)]
        except UsageError as error:
            raise UsageError(f"example {example.id!r}: {error}") from error
    yield from units or [UNTRAINED]


def _row(tokenizer: Tokenizer, template: Template, prompt: Sequence[int], response: Response, example: Example) -> Row:
    if response.answer is not None:  # in the form, and with the tags, that a policy would write
        written = Example("", (), answer=response.answer, solution=response.text, variables=example.variables)
        return Row([*prompt, *encode_response(tokenizer, template, written, prompt)], len(prompt), response.score)
    if response.ids and decode_response(tokenizer, template, response.ids, prompt) == response.text:
        answer = list(response.ids)  # as it was sampled
    else:
        answer = encode_answer(tokenizer, template, response.text, prompt, example.variables)
    return Row([*prompt, *answer, *end_ids(tokenizer, template)], len(prompt), response.score)


def _stepwise(tokenizer: Tokenizer, template: Template, prompt: Sequence[int], response: Response) -> Row:
    """The steps behind one another, each encoded alone so that its last token is known; None is no label."""
    ids = list(prompt)
    labels: dict[int, int] = {}
    for step, label in zip(response.steps, response.step_labels, strict=True):
        ids += encode_plain(tokenizer, step, ids)
        if label is not None:
            labels[len(ids) - 1] = label
    return Row([*ids, *end_ids(tokenizer, template)], len(prompt), response.score, labels)


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


def _turns_apart(example: Example, train_on: str) -> Iterator[Example]:
    """One example for each answer of the assistant that is trained, the calls before it included."""
    conversation = example.conversation
    chosen = [i for i in trained_turns(conversation, train_on) if not conversation[i].calls]
    for i in chosen[-1:] if train_on == "all" else chosen:  # all of a conversation is in its last prompt
        messages, turns = split_turns(conversation[:i])
        if train_on == "all":
            read_only = conversation
        else:
            read_only = conversation[len(messages) : i]
        if not all(one.is_trained for one in read_only):
            if train_on != "all":
                what = "a call of weight 0"
            else:
                what = "data.train_on all with a message of weight 0"
            raise UsageError(f"example {example.id!r}: {what} needs the prompt.template chat; leave the row out")
        yield replace(
            example,
            messages=messages,
            turns=turns,
            demonstration=conversation[i].text,
            answer=example.answer if i == len(conversation) - 1 else None,
            conversation=(),
        )


# A part of a row: its pieces, and whether the assistant writes it and is trained on it.
Part = tuple[Sequence[Piece], bool]


def _text(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _conversation_rows(tokenizer: Tokenizer, template: Template, example: Example, train_on: str) -> Iterator[Row]:
    """The rows of a conversation by its chat template.

    One row, or where the template rewrites earlier turns one for each trained turn; none where nothing is trained.
    """
    variables = {**template.variables, **as_row_texts(example.variables)}
    trained = trained_turns(example.conversation, train_on)
    if not trained:
        return
    conversation = with_reasoning(
        tokenizer, [out_of_channels(tokenizer, one, variables) for one in example.conversation], variables
    )
    places = [i for i, message in enumerate(conversation) if message.role == "assistant" and 0 < i <= trained[-1]]
    prompts = {i: prompt_pieces(tokenizer, template, conversation[:i], example.variables) for i in places}
    turns: dict[int, Part] = {}
    for i in places:
        pieces = _turn(tokenizer, template, conversation[: i + 1], variables, prompts[i])
        turns[i] = pieces, i in trained
    end = ending(tokenizer)
    if end is not None and end.middle:
        unsaid = len(end.text) - len(end.middle)
    else:
        unsaid = 0
    whole = _joined(conversation, prompts, turns, train_on, unsaid)
    if whole is None and train_on == "all" and len(trained) < len(places):
        raise UsageError(
            f"example {example.id!r}: data.train_on all with a message of weight 0, and the chat template rewrites "
            "earlier turns; use data.train_on assistant"
        )
    if train_on == "all":
        chosen = trained[-1:]
    else:
        chosen = trained
    for (prompt, _), *parts in [[(prompts[i], False), turns[i]] for i in chosen] if whole is None else [whole]:
        ids = encode_pieces(tokenizer, prompt)
        heard = set[int]()
        prompt_length = len(ids)
        for part, is_trained in parts:
            encoded = encode_pieces(tokenizer, part, ids)
            heard |= set() if is_trained else set(range(len(ids), len(ids) + len(encoded)))
            ids = ids + encoded
        yield Row(ids, prompt_length, heard=frozenset(heard), is_apart=whole is None and len(chosen) > 1)


def _joined(
    conversation: Sequence[Message],
    prompts: Mapping[int, Sequence[Piece]],
    turns: Mapping[int, Part],
    train_on: str,
    unsaid: int,
) -> list[Part] | None:
    """All turns in one row; None where a later prompt does not begin with the turns before it.

    ``unsaid``: how many characters a turn ends with that are not written before another message.
    """
    parts = list[Part]()
    previous = ""
    for i, prompt in prompts.items():
        if unsaid and not _text(prompt).startswith(previous):
            previous = previous[:-unsaid]
            pieces, is_trained = parts[-1]
            parts[-1] = _shortened(pieces, unsaid), is_trained
        if not _text(prompt).startswith(previous):
            return None
        # results of tools are never trained, the user's messages only with all
        is_trained = train_on == "all" and conversation[i - 1].role != "tool"
        parts += [(drop_text(prompt, len(previous)), is_trained), turns[i]]
        previous = _text(prompt) + _text(turns[i][0])
    return parts


def _shortened(pieces: Sequence[Piece], count: int) -> list[Piece]:
    """The pieces without the last characters, which are of the last piece."""
    return [*pieces[:-1], Piece(pieces[-1].text[:-count], pieces[-1].trusted)]


def _as_text(
    tokenizer: Tokenizer, template: Template, text: str, prompt: Sequence[Piece], variables: Mapping[str, Any]
) -> list[Piece]:
    """A message as the text that a model writes behind the prompt, its end included."""
    before = encode_pieces(tokenizer, prompt)
    pieces = behind_prompt(tokenizer, template, [Piece(text, trusted=False)], before, variables)
    return [*pieces, Piece(end_text(tokenizer, template), trusted=True)]


def _turn(
    tokenizer: Tokenizer,
    template: Template,
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    prompt: Sequence[Piece],
) -> list[Piece]:
    """The last message as the assistant writes it behind the prompt, its end included: what its chat template adds.

    It goes up to the last token with which the template ends it. The end token is added where it ends a turn with none.
    """
    message = messages[-1]
    whole, hidden = render_pieces(tokenizer, messages, template.system, variables, prompt=False)
    if hidden and max(hidden) == len(messages) - 1:
        raise UsageError(f"the chat template does not show the reasoning of message {len(messages)}; leave it out")
    if not _text(whole).startswith(_text(prompt)):
        form = call_form(tokenizer, template)
        if message.calls and message.reasoning is None and form.is_native and form.end is None:
            turn = Turn(message.content, message.calls)
            written = turn_pieces(tokenizer, template, turn, form, encode_pieces(tokenizer, prompt))
            return [*written, Piece(end_text(tokenizer, template), trusted=True)]
        if message.calls or message.reasoning is not None:
            what = f"the chat template writes message {len(messages)} otherwise than behind its prompt"
            raise UsageError(f"{what}; choose another prompt.template, or leave the row out")
        end = end_text(tokenizer, template)
        content = message.content
        shown = _text(whole)
        forms = (content, content.rstrip(), content.lstrip(), content.strip())  # as the template strips it
        content = next((form for form in forms if form and form + end in shown), content)
        return _as_text(tokenizer, template, content, prompt, variables)
    pieces = drop_text(whole, len(_text(prompt)))
    has_own = message.reasoning is not None or begins_with_empty_thinking(message.content)
    if not has_own and pieces and pieces[0].trusted:
        pieces[0] = Piece(without_empty_thinking(tokenizer, pieces[0].text, variables), trusted=True)
    return _ended(tokenizer, template, message, pieces)


def _ended(tokenizer: Tokenizer, template: Template, message: Message, pieces: list[Piece]) -> list[Piece]:
    """The pieces of a turn up to its end."""
    end = end_text(tokenizer, template)
    if pieces and pieces[-1].trusted:
        last = pieces[-1]
    else:
        last = Piece("", trusted=True)
    if not message.calls and last.text.startswith(end):
        return [*pieces[:-1], Piece(end, trusted=True)]
    marks = call_marks(tokenizer, template)
    found = list(markers_of(tokenizer).find(last.text))
    own = [stop for _, stop, index in found if index == end_id(tokenizer, template)]
    ends = own or [stop for start, stop, _ in found if not _is_tag(last.text[start:stop], marks)]
    if found:  # a template may end a call with nothing but its closing tag
        if ends:
            cut = ends[-1]
        else:
            cut = found[-1][1]
        return [*pieces[:-1], Piece(last.text[:cut], trusted=True)]
    return [*pieces, Piece(end, trusted=True)]


def _is_tag(marker: str, marks: Sequence[str]) -> bool:
    """Return True if a token closes what is written in a turn, and not the turn."""
    return marker.strip() in marks or marker.strip().startswith("</")
