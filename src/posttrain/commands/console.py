"""Where commands print: one console that no foreign text can steer, and one door for tables.

A pipe gets a table in its full width. With ``--format json|csv|md`` the tables of a command, and nothing else, are what
it writes to standard output; what else it says goes to standard error.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import rich.text
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table

from posttrain.store.durable import sayable
from posttrain.untrusted import harmless, harmless_json

if TYPE_CHECKING:  # training prints no table of an evaluation
    from posttrain.evals.tables import TextTable

PIPED_COLUMNS = 120
MAX_COLUMNS = 10_000


@dataclass
class Collected:
    """The tables of a command that are asked for in a form other than that of a terminal.

    ``content`` is plain data that says more than the tables do, where the command has such.
    """

    form: str
    tables: list[TextTable] = field(default_factory=list)
    content: Any = None


_COLLECTED: ContextVar[Collected | None] = ContextVar("collected", default=None)


class Text(rich.text.Text):
    """Text with a style: what is foreign in it is written out, so that it is as wide as it was measured."""

    def __init__(self, text: str = "", *args: Any, **options: Any) -> None:
        super().__init__(harmless(text), *args, **options)

    def append(self, text: rich.text.Text | str, style: Any = None) -> Text:
        """Add text; returns itself."""
        super().append(harmless(text) if isinstance(text, str) else text, style)
        return self


class OutputConsole(Console):
    """A console that takes no string for markup, and writes out what is foreign in anything that it renders.

    Its reader may stop early (``posttrain explain | head``) without that being an error.
    """

    def render_str(self, text: str, **options: Any) -> rich.text.Text:
        """Strings as cells, titles and lines: never markup, whatever a table or a bar would do."""
        return super().render_str(harmless(text), **{**options, "markup": False, "emoji": False})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of anything; only those of rich's own control codes may hold some."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else harmless(segment.text)
            yield segment if text == segment.text else Segment(text, segment.style)

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich does; a table is collected where a form is asked for, and as wide as it needs to be in a pipe."""
        collected = _COLLECTED.get()
        if len(objects) != 1 or not isinstance(objects[0], Table):
            super().print(*objects, **options)
        elif collected is not None:
            collected.tables.append(read_table(objects[0]))
        elif self.is_terminal or objects[0].expand:
            super().print(*objects, **options)
        else:
            objects[0].width = full_width(self, objects[0])
            super().print(*objects, **options | {"crop": False, "soft_wrap": True})

    def on_broken_pipe(self) -> None:
        """Leave it to ``cli.main``; rich would exit with 1 here."""
        raise BrokenPipeError


def counted(number: int, what: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def full_width(console: Console, table: Table) -> int:
    """How many columns a table takes in which nothing is wrapped."""
    return Measurement.get(console, console.options.update(width=MAX_COLUMNS), table).maximum


@contextmanager
def tables_as(form: str) -> Iterator[None]:
    """Within, tables are collected, and all else goes to standard error; at the end they are written in this form.

    Args:
        form: ``json`` (a list of ``{"title", "rows"}``, or what ``write_json`` was given), ``csv`` or ``md``.
    """
    collected, output = Collected(form), sys.stdout
    token = _COLLECTED.set(collected)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _COLLECTED.reset(token)
    if form == "json" and collected.content is not None:
        output.write(_to_json(collected.content))
    else:
        output.write(_written(form, collected.tables))


def write_json(content: Any) -> bool:
    """With ``--format json``: let this be what is written instead of tables; whether it is asked for."""
    collected = _COLLECTED.get()
    if collected is None or collected.form != "json":
        return False
    collected.content = content
    return True


def leaves_out_tables(quiet: bool) -> bool:
    """Whether ``--quiet`` holds for tables, too: not where ``--format`` asks for them."""
    return quiet and _COLLECTED.get() is None


def wants_json() -> bool:
    """Whether ``--format json`` was given."""
    collected = _COLLECTED.get()
    return collected is not None and collected.form == "json"


def _to_json(content: Any) -> str:
    return harmless_json(json.dumps(sayable(content), indent=1, default=str, allow_nan=False)) + "\n"


def _written(form: str, tables: Sequence[TextTable]) -> str:
    """Tables as text in a form; the second column of a name is ``name (2)``."""
    if form == "md":
        from posttrain.evals.tables import to_markdown

        return "\n".join(map(to_markdown, tables))
    parts: list[str] = []
    rows: list[dict[str, Any]] = []
    for table in tables:
        seen = [list(table.header[: index + 1]).count(label) for index, label in enumerate(table.header)]
        header = [f"{label} ({n})" if n > 1 else label for label, n in zip(table.header, seen, strict=True)]
        part = io.StringIO()
        csv.writer(part, lineterminator="\n").writerows([header, *table.lines])
        parts.append(part.getvalue())
        rows.append({"title": table.title, "rows": [dict(zip(header, line, strict=True)) for line in table.lines]})
    return _to_json(rows) if form == "json" else "\n".join(parts)


def read_table(table: Table) -> TextTable:
    """The texts of a table of rich, without their styles."""

    from posttrain.evals.tables import TextTable

    def text_of(cell: Any) -> str:
        return harmless(cell.plain if isinstance(cell, rich.text.Text) else str(cell)).replace("\n", " ").strip()

    labels = [column.justify != "right" for column in table.columns]
    lines = zip(*([text_of(cell) for cell in column.cells] for column in table.columns), strict=True)
    num_labels = labels.index(False) if False in labels else len(labels)
    header = [text_of(column.header) for column in table.columns]
    return TextTable(text_of(table.title or ""), header, [list(line) for line in lines], num_labels)


def open_console() -> Console:
    """Standard output. No text is styled by its content; a pipe is as wide as a document."""
    options: dict[str, Any] = {"file": getattr(sys.stdout, "rich_proxied_file", sys.stdout), "highlight": False}
    options |= {"markup": False, "emoji": False}
    console = OutputConsole(**options)
    return console if console.is_terminal else OutputConsole(**options, width=PIPED_COLUMNS)


def say(console: Console, text: str, style: str = "") -> None:
    """A line of any width; it is broken where the terminal ends, and in a pipe not at all."""
    console.print(Text(text, style=style), soft_wrap=True)


def plain_table(*columns: str, right: Sequence[str] = (), **options: Any) -> Table:
    """A table without lines, two blanks between its columns, of which those on the ``right`` hold numbers."""
    table = Table(*columns, **{"box": None, "pad_edge": False, "padding": (0, 2, 0, 0), **options})
    for column in right:
        table.add_column(column, justify="right")
    return table


def print_table(console: Console, content: TextTable) -> None:
    """A table of text; nothing in it is cut off, however narrow the terminal."""
    table = Table(title=Text(content.title), title_justify="left")
    for index, label in enumerate(content.header):
        table.add_column(Text(label), justify="left" if index < content.num_labels else "right", no_wrap=True)
    for line in content.lines:
        table.add_row(*map(Text, line))
    table.width = full_width(console, table)
    console.print(table, crop=False, soft_wrap=True)
