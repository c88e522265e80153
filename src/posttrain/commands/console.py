"""Where commands print: one console, wide enough for tables when it is no terminal, that no foreign text can steer."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import rich.text
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table

from posttrain.untrusted import harmless

if TYPE_CHECKING:
    from posttrain.evals.tables import TextTable

PIPED_COLUMNS = 120
MAX_COLUMNS = 400


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

    def on_broken_pipe(self) -> None:
        """Leave it to ``cli.main``; rich would exit with 1 here."""
        raise BrokenPipeError


def open_console() -> Console:
    """Standard output. No text is styled by its content; a pipe is as wide as a document."""
    options: dict[str, Any] = {"file": getattr(sys.stdout, "rich_proxied_file", sys.stdout), "highlight": False}
    options |= {"markup": False, "emoji": False}
    console = OutputConsole(**options)
    return console if console.is_terminal else OutputConsole(**options, width=PIPED_COLUMNS)


def print_table(console: Console, content: TextTable) -> None:
    """A table of text; nothing in it is cut off, however narrow the terminal."""
    table = Table(title=Text(content.title), title_justify="left")
    for index, label in enumerate(content.header):
        table.add_column(Text(label), justify="left" if index < content.num_labels else "right", no_wrap=True)
    for line in content.lines:
        table.add_row(*map(Text, line))
    table.width = Measurement.get(console, console.options.update(width=MAX_COLUMNS), table).maximum
    console.print(table, crop=False, soft_wrap=True)
