"""Prompts of a task that are rendered already: they end as a prompt template ends a prompt, and are not rendered twice.

A single prompt that ends so may be anybody's text. More than half of a task's prompts are a form of the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from posttrain.data.base import PART, ExamplesOnDemand, Task
from posttrain.data.render.chat_template import mark, render_history
from posttrain.data.render.encoding import Tokenizer
from posttrain.data.render.template import Template
from posttrain.errors import UsageError
from posttrain.types import Example

_NUM_READ = 64
# The ends of common forms, where an assistant begins to speak: turn markers, and names with another speaker before.
_TURN = re.compile(
    r"(?:<\|im_start\|>assistant|<\|start_header_id\|>assistant<\|end_header_id\|>|<\|assistant\|>|<start_of_turn>model"
    r"|<\|turn>model|<｜Assistant｜>|<\|start\|>assistant|\[/INST\])\s*(?:<think>)?\s*\Z"
)
_SPEAKER = re.compile(r"^[ \t#*]*(?:Human|User|Instruction|Question):", re.MULTILINE)
_ASSISTANT = re.compile(r"[ \t#*]*((?:Assistant|Response):)\**")
_TAKEN_BY = {"Assistant: <think>": "r1_zero or as_is, which take", "Assistant:": "dialogue or as_is, which take"}


def take_rendered(task: Task, template: Template, tokenizer: Tokenizer, where: str = "task") -> Task:
    """The task with the prompts that the template itself has rendered marked, and a line that says so.

    Each part of a mixture is a file. Under a template that renders nothing, rendered prompts are marked without a line:
    a reward model may read them by another template.

    Raises:
        UsageError: the prompts are rendered in another form.
    """
    if template.name == "document":
        return task
    if template.takes_rendered:
        if note_rendered(task, tokenizer):
            return _change(task, _marked)
        return task
    own = _own_end(template)
    lines = []
    marked = set()
    parts = _read_parts(task)
    first = ""
    if sum(map(len, parts.values())) < len(task.examples):
        first = "the first "
    for part, texts in parts.items():
        ends = list(filter(None, (_end_of(text, template, tokenizer) for text in texts)))
        if 2 * len(ends) <= len(texts):
            continue
        end = max(ends, key=ends.count)
        share = f"{len(ends)} of {len(texts)} prompts"
        place = where
        if part:
            place = f"{where}: part {part!r}"
        if end != own:
            raise UsageError(
                f"{place}: {len(ends)} of {first}{len(texts)} prompts are rendered already: they end in {end!r}, and "
                f"prompt.template {template.name} would render them again. Use prompt.template "
                f"{_TAKEN_BY.get(end, 'as_is, which takes')} them as they are, or give the questions alone"
            )
        marked.add(part)
        line = f"{place}: {share} that were read are rendered already (they end in {end!r}) and are taken as they are"
        lines.append(line)
    if not marked:
        return task

    def take(example: Example) -> Example:
        is_own = _part_of(example, task) in marked and _end_of(_prompt_of(example), template, tokenizer) == own
        if not is_own:
            return example
        return replace(_marked(example), conversation=())

    return replace(_change(task, take), warnings=(*task.warnings, *lines))


def _read_parts(task: Task) -> dict[str, list[str]]:
    """Return the prompts of the first examples of each part of a mixture; of a task without parts under no name."""
    texts: dict[str, list[str]] = {}
    for example in islice(task.examples, _NUM_READ * max(1, len(task.parts))):
        texts.setdefault(_part_of(example, task), []).append(_prompt_of(example))
    return texts


def _part_of(example: Example, task: Task) -> str:
    if not task.parts:
        return ""
    return str(example.meta.get(PART, ""))


def _marked(example: Example) -> Example:
    """Return the example with its prompt marked as rendered."""
    if not _prompt_of(example):
        return example
    return replace(example, messages=(replace(example.messages[0], is_rendered=True),))


def _change(task: Task, change: Callable[[Example], Example]) -> Task:
    """Return the task with changed examples; those that are made on demand stay so."""
    if isinstance(task.examples, ExamplesOnDemand):
        return replace(task, examples=task.examples.changed(change))
    return replace(task, examples=[change(example) for example in task.examples])


def take_rendered_prompts(
    examples: Sequence[Example], template: Template, tokenizer: Tokenizer, where: str
) -> tuple[list[Example], tuple[str, ...]]:
    """Return prompts that are asked once, those marked that are rendered already, and lines that say so.

    Raises:
        UsageError: they are rendered in a form other than the template's.
    """
    task = take_rendered(Task("prompts", "prompts", list(examples)), template, tokenizer, where)
    return list(task.examples), task.warnings


def note_rendered(task: Task, tokenizer: Tokenizer | None = None) -> str:
    """Return a line about a task whose prompts are rendered already, in any form; nothing for other tasks."""
    texts = [_prompt_of(example) for example in islice(task.examples, _NUM_READ)]
    ends = [end for end in (_any_end(text, tokenizer) for text in texts) if end]
    if not ends or 2 * len(ends) <= len(texts):
        return ""
    end = max(ends, key=ends.count)
    takes = _TAKEN_BY.get(end, "as_is, which takes")
    return (
        f"{len(ends)} of the {len(texts)} prompts that were read are rendered already: they end in {end!r}. Use "
        f"prompt.template {takes} them as they are"
    )


def _any_end(text: str, tokenizer: Tokenizer | None) -> str:
    """Return the end of a prompt that is rendered in a common form, or in the tokenizer's; empty for any other text."""
    kept = text.rstrip()
    turn = _TURN.search(kept)
    if turn is not None:
        return turn[0].strip()
    suffix = "" if tokenizer is None else _chat_end(tokenizer)
    if suffix and kept.endswith(suffix):
        return suffix
    return _named_end(kept)


def _prompt_of(example: Example) -> str:
    """The prompt, if it is one text of a user."""
    if len(example.messages) == 1 and example.messages[0].role == "user":
        return example.messages[0].content
    return ""


def _own_end(template: Template) -> str:
    """The text with which the template ends a prompt by itself; empty if a question ends it."""
    return template.frame[1].strip()


def _end_of(text: str, template: Template, tokenizer: Tokenizer) -> str:
    """The end of a rendered prompt; empty for any other text."""
    own = _own_end(template)
    kept = text.rstrip()
    if own and kept.endswith(own):
        return own
    turn = _TURN.search(kept)
    if turn is not None:
        return turn[0].strip()
    suffix = _chat_end(tokenizer)
    if suffix and kept.endswith(suffix):
        return suffix
    if own or template.chat:
        return _named_end(kept)
    return ""


def _named_end(text: str) -> str:
    """The name of the assistant with which a transcript ends; empty for any other text."""
    before = text.removesuffix("<think>").rstrip()
    named = _ASSISTANT.fullmatch(before.rpartition("\n")[2])
    if named is None or not _SPEAKER.search(before):
        return ""
    if before == text:
        return named[1]
    return f"{named[1]} <think>"


def _chat_end(tokenizer: Tokenizer) -> str:
    """The text that the tokenizer's chat template writes before an answer, if it has a turn marker."""
    if not tokenizer.chat_template:
        return ""
    with suppress(UsageError):
        rendered = render_history(tokenizer, [("user", mark(0))], {}, prompt=True)
        end = rendered.partition(mark(0))[2].strip()
        if re.search(r"[<\[|]", end):
            return end
    return ""
