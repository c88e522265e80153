"""Where the program stands in an answer. Text rules only: nothing a model wrote is parsed or compiled out here."""

from __future__ import annotations

import re
from collections.abc import Sequence

from posttrain.graders.blank import is_blank
from posttrain.graders.responses import tagged_response

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n`]*$", re.MULTILINE)
_PYTHON = ("", "python", "python3", "py")
_DEFINITION = r"^(?:async[ \t]+def|def|class)[ \t]+{name}\b|^{name}[ \t]*="
MAX_CHARS = 100_000


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """(language in lower case, content) of each complete fenced block, in order. Linear."""
    blocks = []
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif fence[1].startswith(opened[1]) and not fence[2]:
            blocks.append((opened[2].lower(), text[opened.end() : fence.start()].strip("\n")))
            opened = None
    return blocks


def extract_program(text: str, names: Sequence[str], prefix: str = "", *, goes_on: bool = False) -> str | None:
    """The program in a completion, or None.

    Of what follows the thinking it is the last complete fenced block of Python that defines one of ``names``, else the
    last such block; without any block the text itself, if it defines one of ``names``, or if it ``goes_on`` in the
    body that ``prefix`` began (cut at the first line that does not belong to it). ``prefix`` is put before it.
    """
    response = tagged_response(text)
    if response is None or is_blank(response) or len(response) > MAX_CHARS:
        return None
    blocks = _programs(response)
    program = next((one for one in reversed(blocks) if defines(one, names)), blocks[-1] if blocks else None)
    if program is None and _FENCE.search(response) is None:
        if defines(response, names):
            program = response
        elif goes_on:
            program = _body(response)
    if program is None:
        return None
    return f"{prefix.rstrip()}\n{program}\n" if prefix else program


def last_program(text: str) -> str | None:
    """The last complete fenced block of Python of what follows the thinking, or None."""
    response = tagged_response(text)
    blocks = [] if response is None else _programs(response)
    return blocks[-1] if blocks else None


def _programs(response: str) -> list[str]:
    return [content for language, content in fenced_blocks(response) if language in _PYTHON and not is_blank(content)]


def defines(program: str, names: Sequence[str]) -> bool:
    """Whether a function, class or variable of one of these names is defined at the left margin."""
    pattern = "|".join(_DEFINITION.format(name=re.escape(name)) for name in names)
    return re.search(pattern, program, re.MULTILINE) is not None


def _body(text: str) -> str | None:
    """The indented lines that a text begins with: how a model goes on that was given the head of a function."""
    kept = []
    for line in text.split("\n"):
        if line.strip() and not line.startswith((" ", "\t")):
            break
        kept.append(line)
    body = "\n".join(kept)
    return None if is_blank(body) else body.strip("\n")
