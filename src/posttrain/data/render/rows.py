"""Rows of tokens of a task's examples: demonstrations, conversations, pairs, judged answers, labelled steps.

A conversation whose chat template writes earlier turns as they were written is one row: prompt, turn, the messages
between, turn. Each part is encoded by itself, as it is while the model answers. Where a template rewrites earlier turns
(one that drops what was thought), and where there is no chat template, each turn of the assistant is a row of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from posttrain.data.messages import last_of_user
from posttrain.data.render.assistant import (
    behind_prompt,
    decode_response,
    encode_answer,
    encode_response,
    encode_turns,
    out_of_channels,
    turn_pieces,
)
from posttrain.data.render.encoding import (
    Piece,
    Tokenizer,
    drop_text,
    encode_pieces,
    encode_plain,
    markers_of,
    text_of,
)
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
class TokenRow:
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
) -> Iterator[tuple[TokenRow, ...] | str]:
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
        yield _pair(tokenizer, template, prompt, example)
    elif shape == "judged":
        for response in example.responses:
            yield (_row(tokenizer, template, prompt, response, example),)
    else:
        for response in example.responses:
            yield _stepwise(tokenizer, template, prompt, response)


def _pair(
    tokenizer: Tokenizer, template: Template, prompt: Sequence[int], example: Example
) -> tuple[TokenRow, ...] | str:
    """The responses of the highest and of the lowest score, or the reason why they are no pair."""
    better = max(example.responses, key=lambda response: response.score)
    worse = min(example.responses, key=lambda response: response.score)
    chosen = _row(tokenizer, template, prompt, better, example)
    rejected = _row(tokenizer, template, prompt, worse, example)
    if better.score == worse.score:
        return "all responses have the same score"
    if chosen.ids == rejected.ids:
        return "chosen and rejected are the same tokens"
    return replace(chosen, margin=example.margin), replace(rejected, margin=example.margin)


def _demonstrations(
    tokenizer: Tokenizer, template: Template, example: Example, train_on: TrainOn | None
) -> Iterator[tuple[TokenRow, ...] | str]:
    last_message = example.conversation[-1:]
    if template.turns != "rendered" and any(message.calls for message in last_message):
        raise UsageError(f"example {example.id!r} ends with a call, which needs the prompt.template chat")
    if template.turns == "last" and not all(message.is_trained for message in last_message):
        yield UNTRAINED
        return
    best: Response | None = None
    if example.responses and example.solution is None and example.answer is None:
        best = max(example.responses, key=lambda response: response.score)
    if template.turns != "last":
        example = _with_conversation(example, best, train_on)
        if example.conversation:
            yield from _conversation(tokenizer, template, example, train_on or "assistant")
            return
    prompt = encode_prompt(tokenizer, template, example.messages, example.variables)
    if best is not None:
        yield (_row(tokenizer, template, prompt, best, example),)
    elif example.demonstration is not None and not template.response(example):
        yield f"a response without an answer, which template {template.name} would write between tags"
    else:
        yield (_demonstration(tokenizer, template, prompt, example),)


def _with_conversation(example: Example, best: Response | None, train_on: TrainOn | None) -> Example:
    """The example as a conversation, if the assistant's turns in its prompt are to be trained, too (``assistant``)."""
    text = example.demonstration
    if text is None and best is not None:
        text = best.text
    if train_on != "assistant" or text is None or example.turns or example.conversation:
        return example
    if not any(message.role == "assistant" for message in example.messages):
        return example
    return replace(example, conversation=(*example.messages, Message("assistant", text)))


def _demonstration(tokenizer: Tokenizer, template: Template, prompt: Sequence[int], example: Example) -> TokenRow:
    """The turns of an example and its answer behind a prompt; without an answer the last turn ends the episode."""
    has_answer = (example.answer, example.solution, example.demonstration) != (None, None, None)
    is_answered = has_answer or not example.turns
    ids = list(prompt)
    heard = frozenset[int]()
    if example.turns:
        turns, written = encode_turns(tokenizer, template, example.turns, is_answered, prompt)
        heard = frozenset(place for place, is_own in enumerate(written, start=len(prompt)) if not is_own)
        ids += turns
    if is_answered:
        ids += encode_response(tokenizer, template, example, ids)
    return TokenRow(ids, len(prompt), heard=heard)


def _conversation(
    tokenizer: Tokenizer, template: Template, example: Example, train_on: TrainOn
) -> Iterator[tuple[TokenRow, ...] | str]:
    """One row of a conversation, or one for each turn of the assistant."""
    units: list[tuple[TokenRow, ...] | str] = []
    if template.turns == "apart":
        chosen = list(_turns_apart(example, train_on))
        for one in chosen:
            for unit in rows_of(tokenizer, template, one, "demonstration"):
                if len(chosen) > 1 and not isinstance(unit, str):
                    unit = (replace(unit[0], is_apart=True),)
                units.append(unit)
    else:
        try:
            units += [(row,) for row in _conversation_rows(tokenizer, template, example, train_on)]
        except UsageError as error:
            raise UsageError(f"example {example.id!r}: {error}") from error
    yield from units or [UNTRAINED]


def _row(
    tokenizer: Tokenizer, template: Template, prompt: Sequence[int], response: Response, example: Example
) -> TokenRow:
    if response.answer is not None:  # in the form, and with the tags, that a policy would write
        written = Example("", (), answer=response.answer, solution=response.text, variables=example.variables)
        return TokenRow([*prompt, *encode_response(tokenizer, template, written, prompt)], len(prompt), response.score)
    if response.ids and decode_response(tokenizer, template, response.ids, prompt) == response.text:
        answer = list(response.ids)  # as it was sampled
    else:
        answer = encode_answer(tokenizer, template, response.text, prompt, example.variables)
    return TokenRow([*prompt, *answer, *end_ids(tokenizer, template)], len(prompt), response.score)


def _stepwise(
    tokenizer: Tokenizer, template: Template, prompt: Sequence[int], response: Response
) -> tuple[TokenRow, ...] | str:
    """The steps behind one another, each encoded alone so that its last token is known; None is no label."""
    if not all(response.steps):  # its label would be at a token of the step before
        return "an empty step"
    ids = list(prompt)
    labels: dict[int, int] = {}
    for step, label in zip(response.steps, response.step_labels, strict=True):
        ids += encode_plain(tokenizer, step, ids)
        if label is not None:
            labels[len(ids) - 1] = label
    ids += end_ids(tokenizer, template)
    if not labels:
        return "no labelled steps"
    return (TokenRow(ids, len(prompt), response.score, labels),)


def split_turns(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], tuple[Turn, ...]]:
    """(the messages up to the last of the user, the turns behind it in which tools are used).

    All messages and no turns, if no tool is used behind the last message of the user.
    """
    last = last_of_user(messages)
    if last is None:
        return messages, ()
    tail = messages[last + 1 :]
    if not tail or not all(message.calls or message.role == "tool" for message in tail):
        return messages, ()
    results = iter([message.content for message in tail if message.role == "tool"])
    turns = []
    for message in tail:
        if message.calls:
            calls = tuple(replace(call, result=next(results)) for call in message.calls)
            turns.append(Turn(message.text, calls))
    return messages[: last + 1], tuple(turns)


def trained_turns(conversation: Sequence[Message], train_on: str) -> list[int]:
    """The places of the assistant's messages that are trained: all, or (``response``) those after the last user's.

    A message that nothing comes before is read only, and so is one that is not to be trained.
    """
    first = 1
    if train_on == "response":
        first += last_of_user(conversation) or 0
    found = []
    for place, message in enumerate(conversation):
        if place >= first and message.role == "assistant" and message.is_trained:
            found.append(place)
    return found


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
    chosen = [place for place in trained_turns(conversation, train_on) if not conversation[place].calls]
    if train_on == "all":
        chosen = chosen[-1:]  # all of a conversation is in its last prompt
    for place in chosen:
        messages, turns = split_turns(conversation[:place])
        if train_on == "all":
            read_only = conversation
            what = "data.train_on all with a message of weight 0"
        else:
            read_only = conversation[len(messages) : place]
            what = "a call of weight 0"
        if not all(message.is_trained for message in read_only):
            raise UsageError(f"example {example.id!r}: {what} needs the prompt.template chat; leave the row out")
        answer = example.answer
        if place < len(conversation) - 1:
            answer = None
        text = conversation[place].text
        yield replace(example, messages=messages, turns=turns, demonstration=text, answer=answer, conversation=())


# A part of a row: its pieces, and whether the assistant writes it and is trained on it.
RowPart = tuple[Sequence[Piece], bool]


def _conversation_rows(tokenizer: Tokenizer, template: Template, example: Example, train_on: str) -> Iterator[TokenRow]:
    """The rows of a conversation by its chat template.

    One row, or one for each trained turn if the template rewrites earlier turns; none if nothing is trained.
    """
    variables = {**template.variables, **as_row_texts(example.variables)}
    trained = trained_turns(example.conversation, train_on)
    if not trained:
        return
    messages = [out_of_channels(tokenizer, message, variables) for message in example.conversation]
    conversation = with_reasoning(tokenizer, messages, variables)
    places = [i for i, message in enumerate(conversation) if message.role == "assistant" and 0 < i <= trained[-1]]
    prompts = {i: prompt_pieces(tokenizer, template, conversation[:i], example.variables) for i in places}
    turns: dict[int, RowPart] = {}
    for i in places:
        pieces = _turn(tokenizer, template, conversation[: i + 1], variables, prompts[i])
        turns[i] = pieces, i in trained
    end = ending(tokenizer)
    num_unsaid = 0
    if end is not None and end.middle:
        num_unsaid = len(end.text) - len(end.middle)
    whole = _joined(conversation, prompts, turns, train_on, num_unsaid)
    if whole is not None:
        yield _row_of_parts(tokenizer, whole)
        return
    if train_on == "all":
        if len(trained) < len(places):
            raise UsageError(
                f"example {example.id!r}: data.train_on all with a message of weight 0, and the chat template rewrites "
                "earlier turns; use data.train_on assistant"
            )
        trained = trained[-1:]
    for i in trained:
        row = _row_of_parts(tokenizer, [(prompts[i], False), turns[i]])
        yield replace(row, is_apart=len(trained) > 1)


def _row_of_parts(tokenizer: Tokenizer, parts: Sequence[RowPart]) -> TokenRow:
    """A row of parts, each encoded behind those before it; the first is the prompt."""
    (prompt, _), *others = parts
    ids = encode_pieces(tokenizer, prompt)
    prompt_length = len(ids)
    heard = set[int]()
    for pieces, is_trained in others:
        start = len(ids)
        ids = ids + encode_pieces(tokenizer, pieces, ids)
        if not is_trained:
            heard.update(range(start, len(ids)))
    return TokenRow(ids, prompt_length, heard=frozenset(heard))


def _joined(
    conversation: Sequence[Message],
    prompts: Mapping[int, Sequence[Piece]],
    turns: Mapping[int, RowPart],
    train_on: str,
    num_unsaid: int,
) -> list[RowPart] | None:
    """All turns in one row; None if a later prompt does not begin with the turns before it.

    ``num_unsaid``: how many characters a turn ends with that are not written before another message.
    """
    parts = list[RowPart]()
    previous = ""
    for i, prompt in prompts.items():
        text = text_of(prompt)
        if num_unsaid and not text.startswith(previous):
            previous = previous[:-num_unsaid]
            pieces, is_trained = parts[-1]
            parts[-1] = _shortened(pieces, num_unsaid), is_trained
        if not text.startswith(previous):
            return None
        # results of tools are never trained, the user's messages only with all
        is_trained = train_on == "all" and conversation[i - 1].role != "tool"
        parts += [(drop_text(prompt, len(previous)), is_trained), turns[i]]
        previous = text + text_of(turns[i][0])
    return parts


def _shortened(pieces: Sequence[Piece], count: int) -> list[Piece]:
    """The pieces without the last characters, which are of the last piece."""
    return [*pieces[:-1], Piece(pieces[-1].text[:-count], pieces[-1].trusted)]


def _turn(
    tokenizer: Tokenizer,
    template: Template,
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    prompt: Sequence[Piece],
) -> list[Piece]:
    """The last message as the assistant writes it behind the prompt, its end included: what its chat template adds.

    It goes up to the last token with which the template ends it. The end token is added if the template ends a turn
    with none.
    """
    message = messages[-1]
    whole, hidden = render_pieces(tokenizer, messages, template.system, variables, prompt=False)
    if hidden and max(hidden) == len(messages) - 1:
        raise UsageError(f"the chat template does not show the reasoning of message {len(messages)}; leave it out")
    if not text_of(whole).startswith(text_of(prompt)):
        return _turn_rewritten(tokenizer, template, messages, variables, prompt, text_of(whole))
    pieces = drop_text(whole, len(text_of(prompt)))
    has_own = message.reasoning is not None or begins_with_empty_thinking(message.content)
    if not has_own and pieces and pieces[0].trusted:
        pieces[0] = Piece(without_empty_thinking(tokenizer, pieces[0].text, variables), trusted=True)
    return _ended(tokenizer, template, message, pieces)


def _turn_rewritten(
    tokenizer: Tokenizer,
    template: Template,
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    prompt: Sequence[Piece],
    shown: str,
) -> list[Piece]:
    """The last message of a conversation that is ``shown`` otherwise than its prompt was, as a model writes it."""
    message = messages[-1]
    end = end_text(tokenizer, template)
    form = call_form(tokenizer, template)
    if message.calls and message.reasoning is None and form.is_native and form.end is None:
        turn = Turn(message.content, message.calls)
        written = turn_pieces(tokenizer, template, turn, form, encode_pieces(tokenizer, prompt))
        return [*written, Piece(end, trusted=True)]
    if message.calls or message.reasoning is not None:
        what = f"the chat template writes message {len(messages)} otherwise than behind its prompt"
        raise UsageError(f"{what}; choose another prompt.template, or leave the row out")
    text = message.content
    for stripped in (text, text.rstrip(), text.lstrip(), text.strip()):  # as the template strips it
        if stripped and stripped + end in shown:
            text = stripped
            break
    before = encode_pieces(tokenizer, prompt)
    pieces = behind_prompt(tokenizer, template, [Piece(text, trusted=False)], before, variables)
    return [*pieces, Piece(end, trusted=True)]


def _ended(tokenizer: Tokenizer, template: Template, message: Message, pieces: list[Piece]) -> list[Piece]:
    """The pieces of a turn up to its end."""
    end = end_text(tokenizer, template)
    closing = ""  # the template's own text behind the message
    if pieces and pieces[-1].trusted:
        closing = pieces[-1].text
    if not message.calls and closing.startswith(end):
        return [*pieces[:-1], Piece(end, trusted=True)]
    found = list(markers_of(tokenizer).find(closing))
    if not found:
        return [*pieces, Piece(end, trusted=True)]
    marks = call_marks(tokenizer, template)
    ends = [stop for _, stop, index in found if index == end_id(tokenizer, template)]
    if not ends:
        ends = [stop for start, stop, _ in found if not _is_tag(closing[start:stop], marks)]
    if not ends:  # a template may end a call with nothing but its closing tag
        ends = [stop for _, stop, _ in found]
    return [*pieces[:-1], Piece(closing[: ends[-1]], trusted=True)]


def _is_tag(marker: str, marks: Sequence[str]) -> bool:
    """Return True if a token closes what is written in a turn, and not the turn."""
    return marker.strip() in marks or marker.strip().startswith("</")
