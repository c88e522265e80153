"""From the examples of a task to rows of tokens: demonstrations, pairs, judged answers, labelled steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from posttrain.render import Template, encode_plain, encode_prompt, encode_response, end_id
from posttrain.render.replies import encode_turns
from posttrain.types import Example, Response

Shape = Literal["demonstration", "judged", "pair", "steps"]


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids, the first trained position, and what is known of the answer.

    ``step_labels`` are per position (ends of labelled steps only) where the answer has steps; such rows are
    trained at these positions alone. ``heard`` are the positions of what tools returned, which is not trained.
    """

    ids: list[int]
    prompt_length: int
    score: float = 0.0
    step_labels: dict[int, int] = field(default_factory=dict)
    heard: frozenset[int] = frozenset()


def rows_of(tokenizer: Any, template: Template, example: Example, shape: Shape) -> Iterator[tuple[Row, ...] | str]:
    """The units of an example: tuples of rows, or the reason why there is none.

    A pair is the response of the highest score and that of the lowest; the rest of an example with
    more responses is not used.
    """
    prompt = encode_prompt(tokenizer, template, example.messages)
    if shape == "demonstration":
        if example.responses and example.solution is None and example.answer is None:
            best = max(example.responses, key=lambda r: r.score)
            yield (_row(tokenizer, template, prompt, best),)
        elif example.demonstration is not None and not template.response(example):
            yield f"a response without an answer, which template {template.name} would write between tags"
        else:
            answers = not example.turns or (example.answer, example.solution, example.demonstration) != (None,) * 3
            turns, own = encode_turns(tokenizer, template, example.turns, answers) if example.turns else ([], [])
            ids = [*prompt, *turns, *(encode_response(tokenizer, template, example) if answers else [])]
            yield (Row(ids, len(prompt), heard=frozenset(len(prompt) + i for i, mine in enumerate(own) if not mine)),)
        return
    if not example.responses:
        yield "no given responses"
    elif shape == "pair":
        yield _pair(tokenizer, template, prompt, example.responses)
    elif shape == "judged":
        for response in example.responses:
            yield (_row(tokenizer, template, prompt, response),)
    else:
        for response in example.responses:
            if all(response.steps):
                row = _stepwise(tokenizer, template, prompt, response)
                yield (row,) if row.step_labels else "no labelled steps"
            else:  # its label would stand at a token of the step before
                yield "an empty step"


def _row(tokenizer: Any, template: Template, prompt: Sequence[int], response: Response) -> Row:
    if response.answer is not None:  # in the form, and with the tags, that a policy would write
        written = Example("", (), answer=response.answer, solution=response.text)
        return Row([*prompt, *encode_response(tokenizer, template, written)], len(prompt), response.score)
    answer = [*encode_plain(tokenizer, response.text), end_id(tokenizer, template)]
    return Row([*prompt, *answer], len(prompt), response.score)


def _pair(
    tokenizer: Any, template: Template, prompt: Sequence[int], responses: Sequence[Response]
) -> tuple[Row, ...] | str:
    chosen = max(responses, key=lambda r: r.score)
    rejected = min(responses, key=lambda r: r.score)
    if chosen.score == rejected.score:
        return "all responses have the same score"
    rows = tuple(_row(tokenizer, template, prompt, r) for r in (chosen, rejected))
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
