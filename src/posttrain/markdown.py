"""Text of recipes, data and models inside Markdown pages: shown as it is, and never as markup, HTML or a link."""

from __future__ import annotations

import re
from collections.abc import Iterable

_MARKUP = re.compile(r"([\\`\[\]<|])")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
_BLOCK = re.compile(r"(?P<number>\d*)(?=[.)]|[-#>=+*~_:!])")


def plain(text: str) -> str:
    """On one line, in a cell of a table or behind other text: no link, image, HTML, code or further cell begins."""
    return _MARKUP.sub(r"\\\1", _CONTROLS.sub(" ", text))


def paragraph(text: str) -> str:
    """As a paragraph of its own: no heading, list, quotation or front matter either."""
    shown = plain(" ".join(text.split()))
    block = _BLOCK.match(shown)
    return f"{block['number']}\\{shown[block.end() :]}" if block else shown


def bullets(lines: Iterable[str]) -> str:
    """A list, a line each; "" for none."""
    return "".join(f"- {plain(line)}\n" for line in lines)


def code(text: str) -> str:
    """As code within a line; no backtick in it can end it."""
    shown = _CONTROLS.sub(" ", text).replace("|", "¦")
    fence = "`" * (max((len(run) for run in re.findall(r"`+", shown)), default=0) + 1)
    padding = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{padding}{shown}{padding}{fence}"
