"""Worker function: match adapter patterns against module names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

# Forms used by peft for targets, ranks, scales, layers, modules saved whole.
FORMS = (r"{}", r"(.*\.)?({})$", r"(?:^|.*?\.){}\.(?P<idx>\d+)\.", r"(^|.*\.){}($|\..*)")


def match_all(item: dict[str, Any]) -> int:
    """Match all ``patterns`` against all ``names`` in every form; returns the match count. Only termination matters."""
    names: Sequence[str] = item["names"]
    return sum(_matches(form.replace("{}", pattern), names) for pattern in item["patterns"] for form in FORMS)


def _matches(pattern: str, names: Sequence[str]) -> int:
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError):  # invalid in this form; peft will report it
        return 0
    return sum(bool(compiled.match(name)) + bool(compiled.fullmatch(name)) for name in names)
