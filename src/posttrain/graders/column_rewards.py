"""Rewards in TRL's form: ``(prompts, completions, completion_ids, **columns) -> list[float | None]``, maybe async.

A function is in this form if it asks for one of ``COLUMN_ARGUMENTS``. Of rows whose prompt is a list of messages,
``prompts`` and ``completions`` are lists of messages, of all others texts. None in the result says nothing of a
completion.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any

from posttrain.errors import RewardFailure
from posttrain.option_types import shorten, shown_with_type
from posttrain.registry import suggest
from posttrain.types import Example, Turn

COLUMN_ARGUMENTS = ("completions", "completion_ids", "prompts", "trainer_state", "log_metric", "log_extra")
# What is taken of an answer to call such a reward.
READ = ("prompt", "text", "example", "completion_ids", "turns")
_OF_THE_PROMPT = frozenset({"prompt", "messages", "completion", "completion_ids"})  # no columns in TRL either
_METRIC_NAME = re.compile(r"[\w./:@%+-][\w ./:@%+-]{0,99}")


@dataclass(slots=True)
class TrainingState:
    """The fields of transformers' ``TrainerState``, which TRL's rewards get as ``trainer_state``.

    ``global_step``: finished updates; ``max_steps``: updates of the run; ``epoch``: passes over the prompts. Others
    have their defaults; ``log_history`` is empty.
    """

    epoch: float | None = 0.0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: int = 1
    eval_steps: int = 0
    save_steps: int = 0
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0.0
    log_history: list[dict[str, float]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RewardLog:
    """The state of training that rewards read, and what they log of the answers that are graded together.

    ``metrics``: the values by name, which are averaged over the step. ``extra``: a value for each answer by column.
    """

    num_answers: int
    state: TrainingState = field(default_factory=TrainingState)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        """Add a number of this batch to a metric of the step.

        Raises:
            RewardFailure: no name of a metric, or no finite number.
        """
        if not isinstance(name, str) or not _METRIC_NAME.fullmatch(name):
            raise RewardFailure(f"log_metric: {shorten(name)} is no name. Give up to 100 letters, digits or ._-/:@%+")
        item = getattr(value, "item", None)
        number: object = value
        if callable(item) and getattr(value, "ndim", None) == 0:
            number = item()
        if not isinstance(number, Real) or not math.isfinite(number):
            raise RewardFailure(f"log_metric: {name!r} is {shown_with_type(value)}. Give a finite number")
        self.metrics.setdefault(name, []).append(float(number))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add a column to the records of the answers, one value each.

        Raises:
            RewardFailure: the column has no name, or another number of values.
        """
        if not isinstance(column, str) or not column:
            raise RewardFailure(f"log_extra: {shorten(column)} is no name of a column. Give a text")
        if isinstance(values, str | bytes) or not isinstance(values, Iterable):
            raise RewardFailure(f"log_extra: {column!r} is {shown_with_type(values)}. Give a list of one value each")
        listed = [_plain(value) for value in values]
        if len(listed) != self.num_answers:
            raise RewardFailure(
                f"log_extra: {column!r} has {len(listed)} values for {self.num_answers} completions. Give one each"
            )
        self.extra[column] = listed


def _plain(value: object) -> object:
    """Return a value as JSON can hold it: lists and mappings of plain values too, anything else as text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return str(value)


def takes_columns(function: Callable[..., Any]) -> bool:
    """Return True for a reward in TRL's form."""
    return not inspect.signature(function).parameters.keys().isdisjoint(COLUMN_ARGUMENTS)


def call_with_columns(
    reward: partial[object],
    log: RewardLog,
    prompt: Sequence[str],
    text: Sequence[str],
    example: Sequence[Example],
    completion_ids: Sequence[Sequence[int]],
    turns: Sequence[Sequence[Turn]],
) -> object:
    """Call a reward in TRL's form, with a list for each key of the rows; a row without the key has None there.

    Raises:
        RewardFailure: it asks for a column that no row has.
    """
    columns = _columns_of(example)
    columns["prompts"] = [_prompt_of(*pair) for pair in zip(example, prompt, strict=True)]
    columns["completions"] = [_completion_of(*parts) for parts in zip(example, text, turns, strict=True)]
    columns["completion_ids"] = [list(ids) for ids in completion_ids]
    columns["trainer_state"] = log.state
    columns["log_metric"] = log.log_metric
    columns["log_extra"] = log.log_extra
    # of what is not bound yet, by the recipe or by functools.partial
    parameters = inspect.signature(reward).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [p.name for p in parameters if p.kind in by_name and p.default is inspect.Parameter.empty]
    lacking = [name for name in needed if name not in columns]
    if lacking:
        raise RewardFailure(
            f"reward {getattr(reward.func, '__name__', 'function')!r} asks for {', '.join(lacking)}, which no row has."
            f"{suggest(lacking[0], columns)} There are: {', '.join(columns)}"
        )
    if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        columns = {one.name: columns[one.name] for one in parameters if one.name in columns}
    return reward(**{key: column for key, column in columns.items() if key not in reward.keywords})


def _columns_of(examples: Sequence[Example]) -> dict[str, Any]:
    """The columns as the rows have them; gold answer and solution also where they come from elsewhere."""
    rows = []
    for example in examples:
        row = {"solution": example.solution, "answer": example.answer, **example.meta, **example.columns}
        rows.append({key: value for key, value in row.items() if key not in _OF_THE_PROMPT})
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: [row.get(key) for row in rows] for key in keys}


def _prompt_of(example: Example, prompt: str) -> object:
    """The messages of a conversation with their roles, or the prompt as the model reads it."""
    if not example.is_conversation:
        return prompt
    return [{"role": message.role, "content": message.text} for message in example.messages]


def _completion_of(example: Example, text: str, turns: Sequence[Turn]) -> object:
    """The answer as text, or as messages: of several turns each with its calls, and their results."""
    if not example.is_conversation:
        return text
    if not turns:
        return [{"role": "assistant", "content": text}]
    messages: list[dict[str, Any]] = []
    for turn in turns:
        message: dict[str, Any] = {"role": "assistant", "content": turn.text}
        calls = []
        for call in turn.calls:
            calls.append({"type": "function", "function": {"name": call.tool, "arguments": _arguments_of(call)}})
        if calls:
            message["tool_calls"] = calls
        messages.append(message)
        messages += [{"role": "tool", "name": call.tool, "content": call.result} for call in turn.calls]
        messages += [{"role": "user", "content": reply} for reply in turn.replies]
    return messages


def _arguments_of(call: Any) -> object:
    try:
        return json.loads(call.raw_arguments)
    except ValueError:
        return call.raw_arguments


def listed_results(values: object) -> object:
    """Return the results of a reward in TRL's form as a list, whatever can be iterated over; anything else as it is."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        return values
    return list(values)


def hint_of(error: Exception) -> str:
    """Return a sentence about an error that a reward raises if it takes texts for messages or messages for texts."""
    message = str(error)
    if "string indices" in message:
        return (
            "Prompts and completions are texts, as the prompt of the row is a text. For messages write it as messages: "
            '{"prompt": [{"role": "user", "content": "..."}]}. '
        )
    if isinstance(error, AttributeError | TypeError) and re.search(r"'list' object has|not 'list'|got 'list'", message):
        return (
            "Prompts and completions are lists of messages, as the prompt of the row is one. The text is "
            'completion[0]["content"]. '
        )
    return ""


def await_results(pending: Sequence[Coroutine[Any, Any, object]]) -> list[object]:
    """Return the results of coroutines, or the errors that they raise, in order; they run at the same time.

    In a thread of its own where this one has an event loop already (notebooks).
    """

    async def ended(work: Coroutine[Any, Any, object]) -> object:
        try:
            return await work
        except SystemExit as error:  # which would end the event loop
            return error

    async def together() -> list[object]:
        return list(await asyncio.gather(*map(ended, pending), return_exceptions=True))

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(together())
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, together()).result()
