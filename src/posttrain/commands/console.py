"""Output of commands: one console that no foreign text can steer, and one place for tables.

A pipe gets a table in its full width. With ``--format json|csv|md`` the tables of a command, and nothing else, are
written to standard output; all else goes to standard error.
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
    """The tables of a command in another form; ``content``: plain data that says more than they do, if there is any."""

    form: str
    tables: list[TextTable] = field(default_factory=list)
    content: Any = None


_COLLECTED: ContextVar[Collected | None] = ContextVar("collected", default=None)


class Text(rich.text.Text):
    """Text with a style; control characters in it are written out, so that it is as wide as it was measured."""

    def __init__(self, text: str = "", *args: Any, **options: Any) -> None:
        super().__init__(harmless(text), *args, **options)

    def append(self, text: rich.text.Text | str, style: Any = None) -> Text:
        """Add text; return itself."""
        super().append(harmless(text) if isinstance(text, str) else text, style)
        return self


class OutputConsole(Console):
    """A console that takes no string for markup, and writes out control characters in anything that it renders."""

    def render_str(self, text: str, **options: Any) -> rich.text.Text:
        """Return a string as text without markup, whatever a table or a bar would do."""
        return super().render_str(harmless(text), **{**options, "markup": False, "emoji": False})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of anything; only those of rich's own control codes may hold some."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else harmless(segment.text)
            yield segment if text == segment.text else Segment(text, segment.style)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; a table is collected where a form is asked for, and as wide as it needs to be in a pipe."""
        collected = _COLLECTED.get()
        if len(objects) != 1 or not isinstance(objects[0], Table):
            super().print(*objects, **options)
        elif collected is not None:
            collected.tables.append(read_table(objects[0]))
        elif self.is_terminal or objects[0].expand:
            super().print(*objects, **options)
        else:
            self.print_whole(objects[0], **options)

    def print_whole(self, table: Table, **options: Any) -> None:
        """Print a table in which nothing is wrapped or cut off, however narrow the terminal."""
        table.width = Measurement.get(self, self.options.update(width=MAX_COLUMNS), table).maximum
        super().print(table, **options | {"crop": False, "soft_wrap": True})

    def on_broken_pipe(self) -> None:
        """Leave it to ``cli.main``: a reader that stops early is no error. Rich would exit with 1 here."""
        raise BrokenPipeError


def counted(number: int, what: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


@contextmanager
def tables_as(form: str) -> Iterator[None]:
    """Collect tables, send all else to standard error, and write the tables at the end.

    Args:
        form: ``json`` (a list of ``{"title", "rows"}``, or the content given to ``write_json``), ``csv`` or ``md``.
    """
    collected, output = Collected(form), sys.stdout
    token = _COLLECTED.set(collected)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _COLLECTED.reset(token)
    output.write(_written(collected))


def write_json(content: Any) -> bool:
    """With ``--format json``, write this instead of tables; return whether it is asked for."""
    collected = _COLLECTED.get()
    if collected is None or collected.form != "json":
        return False
    collected.content = content
    return True


def leaves_out_tables(quiet: bool) -> bool:
    """Return whether ``--quiet`` holds for tables, too: not where ``--format`` asks for them."""
    return quiet and _COLLECTED.get() is None


def wants_json() -> bool:
    """Return whether ``--format json`` was given."""
    collected = _COLLECTED.get()
    return collected is not None and collected.form == "json"


def _written(collected: Collected) -> str:
    """Return tables as text in a form; the second column of a name is ``name (2)``."""
    if collected.form == "md":
        from posttrain.evals.tables import to_markdown

        return "\n".join(map(to_markdown, collected.tables))
    parts: list[str] = []
    content: list[dict[str, Any]] = []
    for table in collected.tables:
        seen = [list(table.header[: index + 1]).count(label) for index, label in enumerate(table.header)]
        header = [f"{label} ({n})" if n > 1 else label for label, n in zip(table.header, seen, strict=True)]
        part = io.StringIO()
        csv.writer(part, lineterminator="\n").writerows([header, *table.lines])
        parts.append(part.getvalue())
        content.append({"title": table.title, "rows": [dict(zip(header, line, strict=True)) for line in table.lines]})
    if collected.form == "csv":
        return "\n".join(parts)
    whole = content if collected.content is None else collected.content
    return harmless_json(json.dumps(sayable(whole), indent=1, default=str, allow_nan=False)) + "\n"


def read_table(table: Table) -> TextTable:
    """Return the texts of a table of rich, without their styles."""

    from posttrain.evals.tables import TextTable

    def text_of(cell: Any) -> str:
        return harmless(cell.plain if isinstance(cell, rich.text.Text) else str(cell)).replace("\n", " ").strip()

    labels = [column.justify != "right" for column in table.columns]
    lines = zip(*([text_of(cell) for cell in column.cells] for column in table.columns), strict=True)
    num_labels = labels.index(False) if False in labels else len(labels)
    header = [text_of(column.header) for column in table.columns]
    return TextTable(text_of(table.title or ""), header, [list(line) for line in lines], num_labels)


def open_console() -> OutputConsole:
    """Return standard output; a pipe is as wide as a document."""
    options: dict[str, Any] = {"file": getattr(sys.stdout, "rich_proxied_file", sys.stdout), "highlight": False}
    options |= {"markup": False, "emoji": False}
    console = OutputConsole(**options)
    return console if console.is_terminal else OutputConsole(**options, width=PIPED_COLUMNS)


def say(console: Console, text: str, style: str = "") -> None:
    """Print a line; it is broken where the terminal ends, and in a pipe not at all."""
    console.print(Text(text, style=style), soft_wrap=True)


def plain_table(*columns: str, right: Sequence[str] = (), **options: Any) -> Table:
    """Return a table without rules; the columns on the ``right`` hold numbers."""
    table = Table(*columns, **{"box": None, "pad_edge": False, "padding": (0, 2, 0, 0), **options})
    for column in right:
        table.add_column(column, justify="right")
    return table


def print_table(console: Console, content: TextTable) -> None:
    """Print a table of text, whole."""
    table = Table(title=Text(content.title), title_justify="left")
    for index, label in enumerate(content.header):
        table.add_column(Text(label), justify="left" if index < content.num_labels else "right", no_wrap=True)
    for line in content.lines:
        table.add_row(*map(Text, line))
    if _COLLECTED.get() is None and isinstance(console, OutputConsole):
        console.print_whole(table)
    else:
        console.print(table)
