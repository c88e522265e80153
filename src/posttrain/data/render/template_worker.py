"""Worker process that renders untrusted chat templates using transformers."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

_MAX_REASON = 500  # characters


class _Holder:
    """Attributes needed by ``apply_chat_template``."""

    def __init__(self, template: str | dict[str, str], tokens: dict[str, str]) -> None:
        self.chat_template = template
        self.special_tokens_map = tokens
        self.get_chat_template = partial(PreTrainedTokenizerBase.get_chat_template, self)


def _raised(error: BaseException) -> BaseException:
    """Unwrap a template's error. Jinja builds code objects for tracebacks, and workers forbid them."""
    while isinstance(error, PermissionError) and error.__context__ is not None:
        error = error.__context__
    return error


def render_conversation(item: dict[str, Any]) -> dict[str, str | int]:
    """Render a conversation, returning ``text``, its ``length`` if too long, or any template ``error``.

    ``item`` contains ``template``, special ``tokens`` by name, ``given`` (messages and variables as JSON), ``prompt``
    and ``max_chars``.
    """
    rows, variables = json.loads(item["given"])
    holder: Any = _Holder(item["template"], item["tokens"])
    options = {"tokenize": False, "add_generation_prompt": item["prompt"], **variables}
    try:
        text = str(PreTrainedTokenizerBase.apply_chat_template(holder, rows, **options))
    except Exception as error:  # noqa: BLE001 - templates may raise anything
        raised = _raised(error)
        if isinstance(raised, MemoryError):
            raise raised from None
        return {"error": str(raised)[:_MAX_REASON]}
    if len(text) > item["max_chars"]:
        return {"length": len(text)}
    return {"text": text}
