"""Output of commands: one console that no foreign text can steer, and one place for tables.

A pipe gets a table in its full width. With ``--format json`` the tables of a command, and nothing else, are written to
standard output; all else goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import rich.text
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.table import Table

from posttrain.store.durable import sayable
from posttrain.untrusted import harmless, harmless_json, note_output

if TYPE_CHECKING:  # training prints no table of an evaluation
    from posttrain.evaluation.tables import TextTable
    from posttrain.recipes.sections import Component
    from posttrain.sampling.models import ModelSource

PIPED_COLUMNS = 120
MAX_COLUMNS = 10_000


@dataclass
class CollectedTables:
    """The tables of a command as plain data; ``content``: data that say more than they do, if there are any."""

    tables: list[dict[str, object]] = field(default_factory=list)
    content: object = None


_COLLECTED: ContextVar[CollectedTables | None] = ContextVar("collected", default=None)


class Text(rich.text.Text):
    """Text with a style; control characters in it are written out, so that it is as wide as it was measured."""

    def __init__(self, text: str = "", *args: Any, **options: Any) -> None:
        super().__init__(harmless(text), *args, **options)

    def append(self, text: rich.text.Text | str, style: str | Style | None = None) -> Text:
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
            text = segment.text
            if not segment.control:
                text = harmless(text)
            if text == segment.text:
                yield segment
            else:
                yield Segment(text, segment.style)

    def print(self, *objects: object, **options: Any) -> None:
        """Print; a table is collected where a form is asked for, and as wide as it needs to be in a pipe."""
        note_output()
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


def pluralize(number: int, what: str) -> str:
    """``1 run``, ``2 runs``."""
    if number == 1:
        return f"{number} {what}"
    return f"{number} {what}s"


def show_bytes(count: int) -> str:
    """``512 B``, ``3.4 MiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            if unit == "B":
                return f"{size:.0f} {unit}"
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


@contextmanager
def tables_as_json() -> Iterator[None]:
    """Collect tables, send all else to standard error, and write them as JSON at the end.

    They become a list of ``{"title", "rows"}``, unless ``print_json`` was given something else.
    """
    collected = CollectedTables()
    output = sys.stdout
    token = _COLLECTED.set(collected)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _COLLECTED.reset(token)
    content: object = collected.tables
    if collected.content is not None:
        content = collected.content
    output.write(harmless_json(json.dumps(sayable(content), indent=1, default=str, allow_nan=False)) + "\n")


def print_json(content: object) -> bool:
    """With ``--format json``, write this instead of tables; return whether it is asked for."""
    collected = _COLLECTED.get()
    if collected is not None:
        collected.content = content
    return collected is not None


def leaves_out_tables(quiet: bool) -> bool:
    """Return whether ``--quiet`` holds for tables, too: not where ``--format json`` asks for them."""
    return quiet and _COLLECTED.get() is None


def read_table(table: Table) -> dict[str, object]:
    """Return the texts of a table of rich by column; the second column of a name is ``name (2)``."""

    def text_of(value: object) -> str:
        text = str(value)
        if isinstance(value, rich.text.Text):
            text = value.plain
        return harmless(text).replace("\n", " ").strip()

    labels = [text_of(column.header) for column in table.columns]
    names = []
    for index, label in enumerate(labels):
        num_before = labels[:index].count(label)
        if num_before:
            label = f"{label} ({num_before + 1})"
        names.append(label)
    columns = [[text_of(value) for value in column.cells] for column in table.columns]
    rows = [dict(zip(names, line, strict=True)) for line in zip(*columns, strict=True)]
    return {"title": text_of(table.title or ""), "rows": rows}


def open_console() -> OutputConsole:
    """Return standard output; a pipe is as wide as a document."""
    options: dict[str, Any] = {"file": getattr(sys.stdout, "rich_proxied_file", sys.stdout), "highlight": False}
    options |= {"markup": False, "emoji": False}
    if is_notebook():  # claims to be a terminal, but a cell would keep every redrawn panel
        options |= {"force_jupyter": False, "force_terminal": False}
    console = OutputConsole(**options)
    if console.is_terminal:
        return console
    return OutputConsole(**options, width=PIPED_COLUMNS)


def is_notebook() -> bool:
    """Check if output goes to a notebook cell: from Python, or from a command (``!posttrain``) started by a kernel."""
    return type(sys.stdout).__module__.startswith("ipykernel.") or "JPY_PARENT_PID" in os.environ


def say(console: Console, text: str, style: str = "") -> None:
    """Print a line; it is broken where the terminal ends, and in a pipe not at all."""
    console.print(Text(text, style=style), soft_wrap=True)


def say_template(source: ModelSource, template: Component | None = None) -> None:
    """Print on stderr under which template a model is asked, if neither the user nor a run says so."""
    line = source.describe_template(template)
    if line is not None:
        print(harmless(line), file=sys.stderr, flush=True)


def plain_table(*columns: str, right: Sequence[str] = (), **options: Any) -> Table:
    """Return a table without rules; the columns in ``right`` hold numbers and are aligned on the right."""
    table = Table(*columns, **{"box": None, "pad_edge": False, "padding": (0, 2, 0, 0), **options})
    for column in right:
        table.add_column(column, justify="right")
    return table


def print_rows(
    console: Console, table: Table, rows: Iterable[Sequence[rich.text.Text | str]], *, crop: bool = True
) -> None:
    """Fill a table with rows of texts, and print it."""
    for row in rows:
        cells = []
        for cell in row:
            if isinstance(cell, str):
                cell = Text(cell)
            cells.append(cell)
        table.add_row(*cells)
    console.print(table, crop=crop)


def print_table(console: Console, content: TextTable) -> None:
    """Print a table of text, whole."""
    table = Table(title=Text(content.title), title_justify="left")
    for index, label in enumerate(content.header):
        justify: JustifyMethod = "right"
        if index < content.num_labels:
            justify = "left"
        table.add_column(Text(label), justify=justify, no_wrap=True)
    for line in content.lines:
        table.add_row(*map(Text, line))
    if _COLLECTED.get() is None and isinstance(console, OutputConsole):
        console.print_whole(table)
    else:
        console.print(table)
