"""The one way to the templates: every page, and every piece of HTML, is drawn here.

What a model, a recipe or a data set wrote enters a page through ``{{ }}`` alone. That writes control and hidden
characters out (``untrusted.harmless``) and escapes the rest; a name that a template was not given is an error. The
shell (``page.jinja``) has the one style sheet and a policy under which a page loads nothing and runs no script but
its own. Templates come from this package, never from a run or a user's folder.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from posttrain.reports.charts import draw_svg
from posttrain.store.durable import replace_file
from posttrain.untrusted import harmless

MARKS = {" ": "·", "\n": "↵", "\r": "␍", "\t": "⇥"}  # as ``templates/features.js`` has them


def render(template: str, **context: object) -> str:
    """A whole page: a file of ``templates/`` with the names that it uses."""
    return _environment().get_template(template).render(context)


def write_html(page: str, path: str | Path) -> Path:
    """Write a page; an older one is replaced at once.

    Raises:
        StorageError: the disk is full or not writable.
    """
    replace_file(Path(path), page.encode("utf-8"), durable=False)
    return Path(path)


def fact_lines(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    """Nested facts as lines for a table: ``("hardware: cores", 2)``; those that are None are left out."""
    lines: list[tuple[str, object]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            lines += fact_lines(value, f"{prefix}{name}: ")
        elif name.endswith("_bytes"):
            lines.append((f"{prefix}{name.removesuffix('_bytes')}", f"{value / 2**30:,.1f} GiB"))
        elif isinstance(value, list | tuple):
            lines.append((f"{prefix}{name}", ", ".join(map(str, value)) or "none"))
        elif value is not None:
            lines.append((f"{prefix}{name}", value))
    return lines


def visible(text: str) -> str:
    """A token with its spaces and line ends to be seen; what cannot be printed is written out."""
    return "".join(_visible_char(char) for char in text)


def _visible_char(char: str) -> str:
    if char in MARKS:
        return MARKS[char]
    if char.isprintable():
        return char
    return repr(char)[1:-1]


def decimals(value: float | None) -> str:
    """Two decimals, or a dash."""
    if value is None:
        return "—"
    return f"{value:.2f}"


def _without_hidden_characters(value: object) -> object:
    """Drop hidden characters from a value of ``{{ }}`` before it is escaped; our own markup is kept."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return harmless(value)
    return value


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("posttrain.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_without_hidden_characters,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # JSON within a page is ASCII without <, > and &, so that it ends no script element.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters |= {
        "fmt": format,
        "fact_lines": fact_lines,
        "visible": visible,
        "decimals": decimals,
        "svg": lambda panel: Markup(draw_svg(panel)),
        "sha256": lambda text: base64.b64encode(hashlib.sha256(str(text).encode()).digest()).decode("ascii"),
    }
    return environment
