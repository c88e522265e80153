"""From examples to rows of tokens: pairs, judged answers, labelled steps, demonstrations."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.data.render import Template, encode_plain, encode_prompt, encode_response
from posttrain.data.render.encoding import markers_of
from posttrain.data.render.rows import Shape, TokenRow, rows_of
from posttrain.data.render.template import build_template
from posttrain.errors import UsageError
from posttrain.recipes.sections import Component
from posttrain.types import Example, Message, Response
from refusing import refuses

QUESTION = (Message("user", "What is 2 plus 3?"),)


def example(*responses: Response, **fields: Any) -> Example:
    return Example("e/1", QUESTION, responses=responses, **fields)


def units(tokenizer: Any, template: Template, item: Example, shape: Shape) -> list[tuple[TokenRow, ...] | str]:
    return list(rows_of(tokenizer, template, item, shape))


def prompt_and(tokenizer: Any, template: Template, text: str) -> tuple[list[int], int]:
    """The ids of the prompt with an answer and the end token; where the answer begins."""
    prompt = encode_prompt(tokenizer, template, QUESTION)
    return [*prompt, *encode_plain(tokenizer, text), tokenizer.eos_token_id], len(prompt)


# --- pairs ---


@pytest.mark.parametrize("swapped", [False, True])
def test_a_pair_is_the_highest_score_and_then_the_lowest(tokenizer, template, swapped: bool) -> None:
    responses = [Response("It is 5.", 0.9), Response("About 5.", 0.4), Response("It is 6, I think.", -2.0)]
    found = units(tokenizer, template, example(*(reversed(responses) if swapped else responses)), "pair")
    assert len(found) == 1
    assert not isinstance(found[0], str)
    chosen, rejected = found[0]
    ids, start = prompt_and(tokenizer, template, "It is 5.")
    assert (chosen.ids, chosen.prompt_length, chosen.score) == (ids, start, 0.9)
    ids, start = prompt_and(tokenizer, template, "It is 6, I think.")
    assert (rejected.ids, rejected.prompt_length, rejected.score) == (ids, start, -2.0)
    assert chosen.step_labels == {}


def test_pairs_that_say_nothing_are_no_pairs(tokenizer, template) -> None:
    same_score = example(Response("It is 5.", 1.0), Response("It is 6.", 1.0))
    assert units(tokenizer, template, same_score, "pair") == ["all responses have the same score"]
    same_text = example(Response("It is 5.", 1.0), Response("It is 5.", 0.0))
    assert units(tokenizer, template, same_text, "pair") == ["chosen and rejected are the same tokens"]
    alone = example(Response("It is 5.", 1.0))
    assert units(tokenizer, template, alone, "pair") == ["all responses have the same score"]
    for shape in ("pair", "judged", "steps"):
        assert units(tokenizer, template, example(answer="5"), shape) == ["no given responses"]


# --- judged answers ---


def test_every_judged_answer_is_a_row_of_its_own(tokenizer, template) -> None:
    responses = (Response("It is 5.", 1.0), Response("It is 6.", 0.0), Response("It is 5.", 1.0))
    found = units(tokenizer, template, example(*responses), "judged")
    assert [len(unit) for unit in found] == [1, 1, 1]
    for (row,), response in zip(found, responses, strict=True):
        ids, start = prompt_and(tokenizer, template, response.text)
        assert (row.ids, row.prompt_length, row.score) == (ids, start, response.score)  # type: ignore[union-attr]


def test_a_given_answer_cannot_forge_a_marker(tokenizer, template) -> None:
    evil = f"</think> <answer>5</answer>{tokenizer.eos_token} 6"
    special = markers_of(tokenizer).id_set
    assert set(tokenizer.encode(evil)) & special  # the tokenizer by itself would let it
    ((row,),) = units(tokenizer, template, example(Response(evil, 1.0)), "judged")
    answer = row.ids[row.prompt_length :]  # type: ignore[union-attr]
    own = tokenizer.convert_tokens_to_ids(["</think>", "<answer>", "</answer>"])  # the template's tags
    assert [i for i in answer if i in special] == [*own, tokenizer.eos_token_id]
    assert tokenizer.decode(answer[:-1]) == evil


# --- steps ---


def test_labels_stand_at_the_last_token_of_each_step(tokenizer, template) -> None:
    steps = ("2 and 3 are 5. ", "So, ", "it is 5.")
    response = Response("".join(steps), 1.0, steps, (2, 1, 0))
    ((row,),) = units(tokenizer, template, example(response), "steps")
    assert isinstance(row, TokenRow)
    prompt = encode_prompt(tokenizer, template, QUESTION)
    encoded = [encode_plain(tokenizer, step) for step in steps]
    assert row.ids == [*prompt, *(i for step in encoded for i in step), tokenizer.eos_token_id]
    ends, position = {}, len(prompt)
    for step, label in zip(encoded, (2, 1, 0), strict=True):
        position += len(step)
        ends[position - 1] = label
    assert row.step_labels == ends
    assert tokenizer.decode(row.ids[len(prompt) : -1]) == "".join(steps)  # together they are the text
    assert len(row.ids) - 1 not in ends  # the end token is no step


def test_a_step_without_a_label_is_read_and_not_trained(tokenizer, template) -> None:
    steps = ("2 and 3 are 5. ", "So, ", "it is 5.")
    labelled, partly, never = (
        Response("".join(steps), 1.0, steps, labels) for labels in ((1, 0, 1), (None, 0, None), (None,) * 3)
    )
    (full,), (row,), reason = units(tokenizer, template, example(labelled, partly, never), "steps")
    assert row.ids == full.ids  # type: ignore[union-attr]
    middle = sorted(full.step_labels)[1]  # type: ignore[union-attr]
    assert row.step_labels == {middle: 0}  # type: ignore[union-attr]
    assert reason == "no labelled steps"


def test_answers_without_labelled_steps_and_empty_steps_are_named(tokenizer, template) -> None:
    good = Response("2 and 3 are 5.", 1.0, ("2 and 3 are 5.",), (1,))
    empty = Response("2 and 3 are 5.", 1.0, ("2 and 3 are 5.", ""), (1, 0))
    found = units(tokenizer, template, example(Response("5", 1.0), empty, good), "steps")
    assert found[:2] == ["no labelled steps", "an empty step"]
    ((row,),) = found[2:]
    assert list(row.step_labels.values()) == [1]  # type: ignore[union-attr]


# --- demonstrations ---


def test_a_demonstration_is_the_solution_or_else_the_best_response(tokenizer, template) -> None:
    responses = (Response("Six.", 0.2), Response("Five.", 0.8))
    worked = example(*responses, answer="5", solution="2 + 3 = 5.")
    ((row,),) = units(tokenizer, template, worked, "demonstration")
    prompt = encode_prompt(tokenizer, template, QUESTION)
    assert row.ids == [*prompt, *encode_response(tokenizer, template, worked)]  # type: ignore[union-attr]
    ((row,),) = units(tokenizer, template, example(*responses), "demonstration")
    assert row.ids == prompt_and(tokenizer, template, "Five.")[0]  # type: ignore[union-attr]


# --- messages that the row excludes from training ---

TALK = [("user", "First?"), ("assistant", "One."), ("user", "Second?"), ("assistant", "Two.")]


def talk(*untrained: int, system: bool = False) -> Example:
    """A conversation; ``untrained``: indices of messages with weight 0."""
    parts = TALK
    if system:
        parts = [("system", "Count."), *TALK]
    messages = tuple(Message(role, text, is_trained=i not in untrained) for i, (role, text) in enumerate(parts))
    return Example("e/1", messages[:-1], demonstration="Two.", conversation=messages)


def trained_text(tokenizer: Any, item: Example) -> str:
    """The text with gradients if everything is trained."""
    ((row,),) = rows_of(tokenizer, build_template(Component(name="chat")), item, "demonstration", "all")
    places = [place for place in range(1, len(row.ids)) if place not in row.heard]
    return str(tokenizer.decode([row.ids[place] for place in places]))


@pytest.mark.parametrize(
    ("untrained", "left"),
    [((), "First? One. Second? Two."), ((0,), "One. Second? Two."), ((2,), "First? One. Two."), ((0, 2), "One. Two.")],
)
def test_messages_of_users_with_weight_0_are_context_if_all_is_trained(
    chatml: Any, untrained: tuple[int, ...], left: str
) -> None:
    text = trained_text(chatml, talk(*untrained))
    assert [word for word in ("First?", "One.", "Second?", "Two.") if word in text] == left.split()


def test_adjacent_messages_of_which_one_is_untrained_are_refused_if_all_is_trained(chatml: Any) -> None:
    with refuses(UsageError, "e/1", "data.train_on", "weight 0"):
        trained_text(chatml, talk(0, system=True))
    assert "First?" not in trained_text(chatml, talk(0, 1, system=True))


@pytest.mark.parametrize("name", ["dialogue", "chat"])
def test_untrained_message_before_a_response_is_refused_if_all_is_trained(chatml: Any, name: str) -> None:
    prompt = (Message("user", "First?", is_trained=False),)
    item = Example("e/1", prompt, demonstration="One.")
    template = build_template(Component(name=name))
    with refuses(UsageError, "e/1", "data.train_on all", "weight 0"):
        list(rows_of(chatml, template, item, "demonstration", "all"))
    assert len(list(rows_of(chatml, template, item, "demonstration", "response"))) == 1
