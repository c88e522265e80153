"""Your own rows: any file of prompts with answers, solutions or whole conversations."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from posttrain.registry import register
from posttrain.tasks.base import Task
from posttrain.tasks.reading import Row, read_file
from posttrain.tasks.splits import Split, choose_split
from posttrain.types import Example, Message


@register("task", held_out="validation")
def jsonl(
    *,
    path: str,
    split: Split = "train",
    prompt_key: str = "prompt",
    messages_key: str = "messages",
    answer_key: str = "answer",
    solution_key: str = "solution",
    validation_share: Annotated[float, Field(ge=0, lt=1)] = 0.05,
) -> Task:
    """Rows of a ``.jsonl``, ``.jsonl.gz`` or ``.parquet`` file.

    A row has a prompt (text) or messages (a list of role and content), an answer (text or a number), and
    maybe a solution. A conversation that ends with the assistant's message is a demonstration: that
    message is the solution, and such a row needs no answer.

    Args:
        path: the file.
        split: ``validation`` is a part of the rows chosen by a hash of the prompt, and ``train`` is the rest;
            ``test`` is the whole file.
        prompt_key, messages_key: where the prompt stands; a row with both uses the messages.
        answer_key: where the gold answer stands; ``""`` if the data have none.
        solution_key: where the worked solution stands; rows may lack it.
        validation_share: share of the rows that is held out.

    Raises:
        DataError: a missing or malformed file or row, with its line.
        MissingExtra: a parquet file, and ``pyarrow`` is not installed.
    """
    keys = (prompt_key, messages_key, answer_key, solution_key)
    examples = [read_example(row, split, *keys) for row in read_file(path)]
    return Task("jsonl", split, choose_split(examples, split, validation_share, path))


def read_example(
    row: Row, split: str, prompt_key: str, messages_key: str, answer_key: str, solution_key: str
) -> Example:
    """One row as an example.

    Raises:
        DataError: a key is missing, of the wrong type or empty.
    """
    if messages_key in row.data:
        messages = row.messages(messages_key)
    else:
        messages = (Message("user", row.text(prompt_key)),)
    solution = row.text(solution_key) if row.has(solution_key) else None
    demonstrates = messages[-1].role == "assistant"
    if demonstrates:
        if len(messages) == 1:
            raise row.fail(f"{messages_key!r} holds nothing but the assistant's message; a prompt must come before it")
        if solution is not None:
            raise row.fail(f"both {solution_key!r} and an assistant's message at the end of {messages_key!r}: give one")
        solution, messages = messages[-1].content, messages[:-1]
    answer = None
    if answer_key and not (demonstrates and not row.has(answer_key)):
        if answer_key not in row.data:
            raise row.fail(
                f"the key {answer_key!r} is missing. There are: {', '.join(row.data)}. Name the right one as "
                'task.answer_key, or set it to "" if the data have no answers'
            )
        answer = row.answer(answer_key)
    return Example(id=f"jsonl/{split}/{row.line}", messages=messages, answer=answer, solution=solution)
