"""Template rendering: every page and every piece of HTML goes through here.

Text from models, recipes and data sets enters pages only through ``{{ }}``, which writes out control and hidden
characters (``untrusted.harmless``) and escapes everything else. Undefined names are errors. The shell (``page.jinja``)
holds the style sheet and a policy that blocks external resources and foreign scripts. Templates are loaded from this
package, never from runs or user folders.
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

MARKS = {" ": "·", "\n": "↵", "\r": "␍", "\t": "⇥"}  # same values as in ``templates/features.js``


def render(template: str, **context: object) -> str:
    """A complete page: a file in ``templates/`` with its variables."""
    return _environment().get_template(template).render(context)


def write_html(page: str, path: str | Path) -> Path:
    """Write a page, replacing an older one atomically.

    Raises:
        StorageError: the disk is full or not writable.
    """
    replace_file(Path(path), page.encode("utf-8"), durable=False)
    return Path(path)


def fact_lines(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    """Flatten nested facts into table rows such as ``("hardware: cores", 2)``, omitting None."""
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
    """Show a token with visible spaces and line breaks; unprintable characters are written out."""
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
    """Drop hidden characters from a ``{{ }}`` value before escaping. Our own markup is kept."""
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
    # Encode JSON for pages as ASCII without <, > and &, so that it cannot close a script element.
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
