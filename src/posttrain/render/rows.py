"""From the examples of a task to rows of tokens: demonstrations, pairs, judged answers, labelled steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from posttrain.errors import UsageError
from posttrain.render import Template, encode_plain, encode_prompt, encode_response, end_id
from posttrain.render.assistant import decode_response, encode_answer
from posttrain.render.conversation import UNTRAINED, conversation_rows, turns_apart
from posttrain.render.replies import encode_turns
from posttrain.types import Example, Message, Response

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
        rows = conversation_rows(tokenizer, template, example, train_on)
    except UsageError as error:
        raise UsageError(f"example {example.id!r}: {error}") from error
    for parts in rows:
        ids, heard = list(parts[0][0]), set[int]()
        for part, is_trained in parts[1:]:
            heard |= set() if is_trained else set(range(len(ids), len(ids) + len(part)))
            ids += part
        yield (Row(ids, len(parts[0][0]), heard=frozenset(heard), is_apart=len(rows) > 1),)
    if not rows:
        yield UNTRAINED


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
