"""Rendering with the tokenizer's chat template, and cached facts about it.

Facts are probed by rendering short conversations whose contents are placeholders: a number between two private-use
characters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from posttrain.data.render.encoding import Tokenizer
from posttrain.data.render.foreign import HAS_WORKERS, TemplateError, render_foreign
from posttrain.errors import UsageError

# Default for new models and those shipped with posttrain. Others run in workers, if available.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
OPENING = "\ue0f1"
CLOSING = "\ue0f2"
_PROBED: WeakKeyDictionary[Any, dict[tuple[str, ...], Any]] = WeakKeyDictionary()
Found = TypeVar("Found")


def render_dicts(
    tokenizer: Tokenizer, rows: list[dict[str, Any]], variables: Mapping[str, Any], *, prompt: bool
) -> str:
    """Render messages. Call arguments are JSON-encoded for templates that require strings.

    Raises:
        UsageError: missing chat template, or rendering fails.
    """
    if not tokenizer.chat_template:
        raise UsageError(
            "the tokenizer has no chat template. Choose a prompt.template without chat (plain, r1_zero, boxed; "
            "dialogue for multiple turns), or a chat model"
        )
    is_own = tokenizer.chat_template == CHAT_TEMPLATE and "chat_template" not in variables
    if is_own or not HAS_WORKERS:
        render = _render_here
    else:
        render = render_foreign
    try:
        return render(tokenizer, rows, variables, prompt=prompt)
    except TemplateError as error:
        functions = [call["function"] for row in rows for call in row.get("tool_calls", ())]
        if any(not isinstance(function["arguments"], str) for function in functions):
            for function in functions:
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
            return render_dicts(tokenizer, rows, variables, prompt=prompt)
        roles = ", ".join(row["role"] for row in rows)
        reason = str(error)[:500]
        raise UsageError(
            f"the tokenizer's chat template cannot render the roles {roles}: {reason}. "
            "Remove the refused message, or choose a different prompt.template"
        ) from error


def _render_here(
    tokenizer: Tokenizer, rows: list[dict[str, Any]], variables: Mapping[str, Any], *, prompt: bool
) -> str:
    try:
        return str(tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=prompt, **dict(variables)))
    except Exception as error:  # templates may raise anything
        raise TemplateError(str(error)) from error


def render_history(
    tokenizer: Tokenizer, turns: Sequence[tuple[str, str]], variables: Mapping[str, object], *, prompt: bool
) -> str:
    """Render trusted contents such as placeholders, by role. See ``render_dicts``."""
    return render_dicts(tokenizer, [{"role": r, "content": content} for r, content in turns], variables, prompt=prompt)


def mark(number: int) -> str:
    """Format a placeholder."""
    return f"{OPENING}{number}{CLOSING}"


def probed(
    tokenizer: Tokenizer, what: str, variables: Mapping[str, object], find: Callable[[Mapping[str, Any]], Found]
) -> Found:
    """Cache ``find`` per chat template and variables, ignoring tools."""
    settings = {key: value for key, value in variables.items() if key != "tools"}
    key = (what, str(tokenizer.chat_template), repr(sorted(settings.items(), key=lambda item: item[0])))
    known = _PROBED.setdefault(tokenizer, {})
    if key not in known:
        known[key] = find(settings)
    return known[key]
