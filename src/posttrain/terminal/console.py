"""Console output for commands, safe against escape sequences in untrusted text.

In a pipe, tables are printed at full width. With ``--format json``, only tables go to stdout, and all other output
goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
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

if TYPE_CHECKING:  # avoid importing evaluation code in training
    from posttrain.evaluation.tables import TextTable
    from posttrain.recipes.sections import Component
    from posttrain.sampling.models import ModelSource

PIPED_COLUMNS = 120
MAX_COLUMNS = 10_000


@dataclass
class CollectedTables:
    """Tables collected as plain data; ``content``: structured data to write instead, if given."""

    tables: list[dict[str, object]] = field(default_factory=list)
    content: object = None


_COLLECTED: ContextVar[CollectedTables | None] = ContextVar("collected", default=None)


class Text(rich.text.Text):
    """Styled text with control characters escaped, so the measured width is correct."""

    def __init__(self, text: str = "", *args: Any, **options: Any) -> None:
        super().__init__(harmless(text), *args, **options)

    def append(self, text: rich.text.Text | str, style: str | Style | None = None) -> Text:
        """Add text; return itself."""
        super().append(harmless(text) if isinstance(text, str) else text, style)
        return self


class OutputConsole(Console):
    """A console that disables markup and escapes control characters in all output."""

    def render_str(self, text: str, **options: Any) -> rich.text.Text:
        """Convert a string to text, with markup always disabled."""
        return super().render_str(harmless(text), **{**options, "markup": False, "emoji": False})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render segments, escaping control characters except in rich's control segments."""
        for segment in super().render(renderable, options):
            text = segment.text
            if not segment.control:
                text = harmless(text)
            if text == segment.text:
                yield segment
            else:
                yield Segment(text, segment.style)

    def print(self, *objects: object, **options: Any) -> None:
        """Print objects. Tables are collected with ``--format json``, and printed at full width in a pipe."""
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
        """Print a table without wrapping or cropping, even in narrow terminals."""
        table.width = Measurement.get(self, self.options.update(width=MAX_COLUMNS), table).maximum
        super().print(table, **options | {"crop": False, "soft_wrap": True})

    def on_broken_pipe(self) -> None:
        """Let ``cli.main`` handle broken pipes, which are not errors; rich would exit with 1."""
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
    """Collect tables, redirect other output to stderr, and write JSON at the end.

    The output is a list of ``{"title", "rows"}``, unless ``print_json`` set other content.
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
    """With ``--format json``, write this content instead of tables. Returns True if JSON was requested."""
    collected = _COLLECTED.get()
    if collected is not None:
        collected.content = content
    return collected is not None


def leaves_out_tables(quiet: bool) -> bool:
    """Check if ``--quiet`` hides tables; with ``--format json``, tables are always written."""
    return quiet and _COLLECTED.get() is None


def read_table(table: Table) -> dict[str, object]:
    """Convert a rich table to plain data by column; duplicate headers are renamed ``name (2)``."""

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
    """Open stdout as a console, with a fixed width for pipes."""
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
    """Print a line, wrapped only by the terminal."""
    console.print(Text(text, style=style), soft_wrap=True)


def teller(console: Console, *, quiet: bool) -> Callable[[str, bool], None]:
    """Build a function that prints a line of progress, or a failure if its flag is set. ``quiet``: failures only."""

    def tell(line: str, is_failure: bool) -> None:
        if is_failure:
            say(console, line, "red")
        elif not quiet:
            say(console, line, "dim")

    return tell


def say_template(source: ModelSource, template: Component | None = None) -> None:
    """Print the prompt template on stderr if neither the user nor a run specified it."""
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
    """Print a text table at full width."""
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
