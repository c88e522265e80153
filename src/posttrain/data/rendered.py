"""Detect already rendered prompts, by comparing their ends to prompt templates, to avoid rendering them twice.

A single match may be coincidence. A task counts as rendered if more than half of its prompts match.
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
# Common suffixes before an assistant turn: turn markers, or names if another speaker precedes.
_TURN = re.compile(
    r"(?:<\|im_start\|>assistant|<\|start_header_id\|>assistant<\|end_header_id\|>|<\|assistant\|>|<start_of_turn>model"
    r"|<\|turn>model|<｜Assistant｜>|<\|start\|>assistant|\[/INST\])\s*(?:<think>)?\s*\Z"
)
_SPEAKER = re.compile(r"^[ \t#*]*(?:Human|User|Instruction|Question):", re.MULTILINE)
_ASSISTANT = re.compile(r"[ \t#*]*((?:Assistant|Response):)\**")
_TAKEN_BY = {"Assistant: <think>": "r1_zero or as_is", "Assistant:": "dialogue or as_is"}


def take_rendered(task: Task, template: Template, tokenizer: Tokenizer, where: str = "task") -> Task:
    """Mark prompts already rendered by this template, and add a startup line.

    Each part of a mixture is checked separately. Templates that render nothing mark rendered prompts silently, since
    a reward model may use a different template.

    Raises:
        UsageError: prompts are rendered in a different format.
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
                f"{place}: {len(ends)} of {first}{len(texts)} prompts are rendered already (they end in {end!r}), and "
                f"prompt.template {template.name} would render them again. Use prompt.template "
                f"{_TAKEN_BY.get(end, 'as_is')}, or provide plain questions"
            )
        marked.add(part)
        line = f"{place}: {share} read are rendered already (they end in {end!r}) and used unchanged"
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
    """Read the first prompts for each mixture part. Tasks without parts use an empty name."""
    texts: dict[str, list[str]] = {}
    for example in islice(task.examples, _NUM_READ * max(1, len(task.parts))):
        texts.setdefault(_part_of(example, task), []).append(_prompt_of(example))
    return texts


def _part_of(example: Example, task: Task) -> str:
    if not task.parts:
        return ""
    return str(example.meta.get(PART, ""))


def _marked(example: Example) -> Example:
    """Mark an example's prompt as rendered."""
    if not _prompt_of(example):
        return example
    return replace(example, messages=(replace(example.messages[0], is_rendered=True),))


def _change(task: Task, change: Callable[[Example], Example]) -> Task:
    """Apply ``change`` to all examples, keeping lazy ones lazy."""
    if isinstance(task.examples, ExamplesOnDemand):
        return replace(task, examples=task.examples.changed(change))
    return replace(task, examples=[change(example) for example in task.examples])


def take_rendered_prompts(
    examples: Sequence[Example], template: Template, tokenizer: Tokenizer, where: str
) -> tuple[list[Example], tuple[str, ...]]:
    """Mark already rendered prompts in a one-time request, and return startup lines.

    Raises:
        UsageError: prompts are rendered in a format different from the template's.
    """
    task = take_rendered(Task("prompts", "prompts", list(examples)), template, tokenizer, where)
    return list(task.examples), task.warnings


def note_rendered(task: Task, tokenizer: Tokenizer | None = None) -> str:
    """Format a line if a task's prompts are already rendered, in any format. Empty otherwise."""
    texts = [_prompt_of(example) for example in islice(task.examples, _NUM_READ)]
    ends = [end for end in (_any_end(text, tokenizer) for text in texts) if end]
    if not ends or 2 * len(ends) <= len(texts):
        return ""
    end = max(ends, key=ends.count)
    suitable = _TAKEN_BY.get(end, "as_is")
    return (
        f"{len(ends)} of {len(texts)} prompts read are rendered already (they end in {end!r}). Use prompt.template "
        f"{suitable} to keep them unchanged"
    )


def _any_end(text: str, tokenizer: Tokenizer | None) -> str:
    """Find a rendered prompt's suffix, in a common format or the tokenizer's. Empty for any other text."""
    kept = text.rstrip()
    turn = _TURN.search(kept)
    if turn is not None:
        return turn[0].strip()
    suffix = "" if tokenizer is None else _chat_end(tokenizer)
    if suffix and kept.endswith(suffix):
        return suffix
    return _named_end(kept)


def _prompt_of(example: Example) -> str:
    """Get the prompt if it is a single user message."""
    if len(example.messages) == 1 and example.messages[0].role == "user":
        return example.messages[0].content
    return ""


def _own_end(template: Template) -> str:
    """Suffix that the template adds to prompts. Empty if prompts end with the question."""
    return template.frame[1].strip()


def _end_of(text: str, template: Template, tokenizer: Tokenizer) -> str:
    """Find a rendered prompt's suffix. Empty for any other text."""
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
    """Find the assistant's name at the end of a transcript. Empty for any other text."""
    before = text.removesuffix("<think>").rstrip()
    named = _ASSISTANT.fullmatch(before.rpartition("\n")[2])
    if named is None or not _SPEAKER.search(before):
        return ""
    if before == text:
        return named[1]
    return f"{named[1]} <think>"


def _chat_end(tokenizer: Tokenizer) -> str:
    """Find the generation prompt written by the chat template, if it contains a marker."""
    if not tokenizer.chat_template:
        return ""
    with suppress(UsageError):
        rendered = render_history(tokenizer, [("user", mark(0))], {}, prompt=True)
        end = rendered.partition(mark(0))[2].strip()
        if re.search(r"[<\[|]", end):
            return end
    return ""
