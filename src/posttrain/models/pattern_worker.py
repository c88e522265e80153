"""The function of a worker process that matches the patterns of an adapter with the names of a model's modules."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

# The forms in which peft matches a pattern: of targets, of ranks and scales, of layers, of modules that are kept whole.
FORMS = (r"{}", r"(.*\.)?({})$", r"(?:^|.*?\.){}\.(?P<idx>\d+)\.", r"(^|.*\.){}($|\..*)")


def match_all(item: dict[str, Any]) -> int:
    """Match each of ``patterns`` with each of ``names`` in all forms; return how many matched. Only the end counts."""
    names: Sequence[str] = item["names"]
    return sum(_matches(form.replace("{}", pattern), names) for pattern in item["patterns"] for form in FORMS)


def _matches(pattern: str, names: Sequence[str]) -> int:
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError):  # in this form it is none, and peft will say so
        return 0
    return sum(bool(compiled.match(name)) + bool(compiled.fullmatch(name)) for name in names)
