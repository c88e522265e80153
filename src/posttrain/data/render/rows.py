"""Tokenized training rows: demonstrations, conversations, preference pairs, scored responses, labeled steps.

If the chat template leaves earlier turns unchanged, each conversation yields a single row: prompt, turn, intermediate
messages, turn, etc. Parts are tokenized separately, as during generation. Without a chat template, or if it rewrites
history (for example by dropping earlier thinking), each assistant turn becomes a separate row.
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
UNTRAINED = "no trained message (weight 0 or train: false)"


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A tokenized row with labels.

    Attributes:
        step_labels: label per position, for rows with labeled steps. Training uses only these positions, one per step.
        heard: context positions after the prompt, such as tool results, excluded from training.
        is_apart: the conversation was split into multiple rows, one per turn.
        margin: preference margin, if given.
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
    """Build an example's training units: each a tuple of rows, or a reason for dropping it.

    Pairs use the responses with the highest and lowest score and ignore all others. ``train_on`` applies to
    demonstrations. It defaults to all assistant turns for conversations, else the response.
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
    """Pair the highest- and lowest-scored responses, or give the reason for dropping them."""
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
        raise UsageError(f"example {example.id!r} ends with a call, which requires prompt.template chat")
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
    if train_on == "all":
        _refuse_untrained_part(example, (*example.messages, *example.conversation))
    prompt = encode_prompt(tokenizer, template, example.messages, example.variables)
    if best is not None:
        yield (_row(tokenizer, template, prompt, best, example),)
    elif example.demonstration is not None and not template.response(example):
        yield f"no answer found in a response, but template {template.name} writes it between tags"
    else:
        yield (_demonstration(tokenizer, template, prompt, example),)


def _with_conversation(example: Example, best: Response | None, train_on: TrainOn | None) -> Example:
    """Convert to a conversation if assistant turns inside the prompt are trained too (``train_on: assistant``)."""
    text = example.demonstration
    if text is None and best is not None:
        text = best.text
    if train_on != "assistant" or text is None or example.turns or example.conversation:
        return example
    if not any(message.role == "assistant" for message in example.messages):
        return example
    return replace(example, conversation=(*example.messages, Message("assistant", text)))


def _demonstration(tokenizer: Tokenizer, template: Template, prompt: Sequence[int], example: Example) -> TokenRow:
    """Tokenize tool turns and the response. Without a response, the last turn ends the episode."""
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
    """Build a single row for a conversation, or one row per assistant turn."""
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
    if response.answer is not None:  # formatted as a policy would write it
        written = Example("", (), answer=response.answer, solution=response.text, variables=example.variables)
        return TokenRow([*prompt, *encode_response(tokenizer, template, written, prompt)], len(prompt), response.score)
    if response.ids and decode_response(tokenizer, template, response.ids, prompt) == response.text:
        answer = list(response.ids)  # keep sampled tokens
    else:
        answer = encode_answer(tokenizer, template, response.text, prompt, example.variables)
    return TokenRow([*prompt, *answer, *end_ids(tokenizer, template)], len(prompt), response.score)


def _stepwise(
    tokenizer: Tokenizer, template: Template, prompt: Sequence[int], response: Response
) -> tuple[TokenRow, ...] | str:
    """Tokenize each step separately, to know its final token. Steps labeled None stay unlabeled."""
    if not all(response.steps):  # its label would fall into the previous step
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
    """Split into (messages through the last user message, subsequent tool turns).

    If anything other than tool use follows, no turns are split off.
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
    """Find trained assistant messages: all, or (``response``) only those after the last user message.

    An assistant message at the beginning is context only, as are messages marked as untrained.
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
    """Refuse conversation tasks with nothing to train.

    Raises:
        UsageError: all messages are untrained. The error states the number of examples.
    """
    if len(examples) and all(e.conversation and not trained_turns(e.conversation, train_on) for e in examples):
        raise UsageError(f"task {name!r}: no row is left to train on; dropped: {len(examples)} × {UNTRAINED}")


def _turns_apart(example: Example, train_on: str) -> Iterator[Example]:
    """Build one example per trained assistant response, including preceding calls."""
    conversation = example.conversation
    chosen = [place for place in trained_turns(conversation, train_on) if not conversation[place].calls]
    if train_on == "all":
        chosen = chosen[-1:]  # the last prompt contains the full conversation
    for place in chosen:
        messages, turns = split_turns(conversation[:place])
        if train_on == "all":
            _refuse_untrained_part(example, conversation)
        if not all(message.is_trained for message in conversation[len(messages) : place]):
            what = "an untrained call (weight 0)"
            raise UsageError(f"example {example.id!r}: {what} requires prompt.template chat. Remove the row")
        answer = example.answer
        if place < len(conversation) - 1:
            answer = None
        text = conversation[place].text
        yield replace(example, messages=messages, turns=turns, demonstration=text, answer=answer, conversation=())


def _refuse_untrained_part(example: Example, messages: Sequence[Message]) -> None:
    """Refuse untrained messages in text of which everything is trained (``train_on: all``)."""
    if not all(message.is_trained for message in messages):
        raise UsageError(
            f"example {example.id!r}: data.train_on all with an untrained message (weight 0) requires 'messages' and "
            "prompt.template chat. Remove the row"
        )


# Pieces in a row, and whether they are trained.
RowPart = tuple[Sequence[Piece], bool]


def _conversation_rows(tokenizer: Tokenizer, template: Template, example: Example, train_on: str) -> Iterator[TokenRow]:
    """Tokenize a conversation using its chat template.

    Yields one row, or one per trained turn if the template rewrites history. Yields nothing if nothing is trained.
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
        row = _row_of_parts(tokenizer, whole)
        if train_on == "all" and not whole[0][1]:
            row = replace(row, heard=row.heard | set(range(row.prompt_length)))
        yield row
        return
    if train_on == "all":
        if not all(message.is_trained for message in example.conversation):
            raise UsageError(
                f"example {example.id!r}: data.train_on all with an untrained message (weight 0) does not work if the "
                "chat template rewrites earlier turns. Use data.train_on assistant"
            )
        trained = trained[-1:]
    for i in trained:
        row = _row_of_parts(tokenizer, [(prompts[i], False), turns[i]])
        yield replace(row, is_apart=len(trained) > 1)


def _row_of_parts(tokenizer: Tokenizer, parts: Sequence[RowPart]) -> TokenRow:
    """Tokenize each part in the context of its predecessors. The first part is the prompt."""
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
    """Join all turns into one row. None if a later prompt changes earlier turns.

    ``num_unsaid``: number of trailing characters in a turn that are omitted if another message follows.
    """
    parts = list[RowPart]()
    previous = ""
    start = 0
    for i, prompt in prompts.items():
        text = text_of(prompt)
        if num_unsaid and not text.startswith(previous):
            previous = previous[:-num_unsaid]
            pieces, is_trained = parts[-1]
            parts[-1] = _shortened(pieces, num_unsaid), is_trained
        if not text.startswith(previous):
            return None
        # tool results are never trained, user messages only if everything is trained
        between = conversation[start:i]
        start = i + 1
        is_trained = train_on == "all" and conversation[i - 1].role != "tool" and _is_all_trained(between)
        parts += [(drop_text(prompt, len(previous)), is_trained), turns[i]]
        previous = text + text_of(turns[i][0])
    return parts


def _is_all_trained(between: Sequence[Message]) -> bool:
    """Check if the messages between two turns are trained: all, or none."""
    marks = {message.is_trained for message in between}
    if len(marks) > 1:
        roles = " and ".join(message.role for message in between)
        raise UsageError(
            f"data.train_on all trains adjacent messages ({roles}) together; mark all or none of them with weight 0"
        )
    return False not in marks


def _shortened(pieces: Sequence[Piece], count: int) -> list[Piece]:
    """Drop the last ``count`` characters, all within the final piece."""
    return [*pieces[:-1], Piece(pieces[-1].text[:-count], pieces[-1].trusted)]


def _turn(
    tokenizer: Tokenizer,
    template: Template,
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    prompt: Sequence[Piece],
) -> list[Piece]:
    """Build the last message as an assistant would generate it, taking all text that the chat template adds to the
    prompt.

    The turn ends at the chat template's last special token, or at an appended ``end_text`` if it writes none.
    """
    message = messages[-1]
    whole, hidden = render_pieces(tokenizer, messages, template.system, variables, prompt=False)
    if hidden and max(hidden) == len(messages) - 1:
        raise UsageError(f"the chat template drops the reasoning in message {len(messages)}. Remove it from the row")
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
    """Build the last message as a model would generate it, for chat templates that rewrite the prompt (``shown``)."""
    message = messages[-1]
    end = end_text(tokenizer, template)
    form = call_form(tokenizer, template)
    if message.calls and message.reasoning is None and form.is_native and form.end is None:
        turn = Turn(message.content, message.calls)
        written = turn_pieces(tokenizer, template, turn, form, encode_pieces(tokenizer, prompt))
        return [*written, Piece(end, trusted=True)]
    if message.calls or message.reasoning is not None:
        what = f"the chat template renders message {len(messages)} differently than after its prompt"
        raise UsageError(f"{what}. Choose a different prompt.template, or remove the row")
    text = message.content
    for stripped in (text, text.rstrip(), text.lstrip(), text.strip()):  # if stripped by the template
        if stripped and stripped + end in shown:
            text = stripped
            break
    before = encode_pieces(tokenizer, prompt)
    pieces = behind_prompt(tokenizer, template, [Piece(text, trusted=False)], before, variables)
    return [*pieces, Piece(end, trusted=True)]


def _ended(tokenizer: Tokenizer, template: Template, message: Message, pieces: list[Piece]) -> list[Piece]:
    """Cut a turn after its ending."""
    end = end_text(tokenizer, template)
    closing = ""  # template text after the message
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
    """Check if a token closes a block within a turn, not the turn itself."""
    return marker.strip() in marks or marker.strip().startswith("</")
