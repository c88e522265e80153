"""Where commands print: one console, wide enough for tables when it is no terminal."""

from __future__ import annotations

from rich.console import Console

PIPED_COLUMNS = 120


class OutputConsole(Console):
    """A console whose reader may stop early (``posttrain explain | head``) without that being an error."""

    def on_broken_pipe(self) -> None:
        """Leave it to ``cli.main``; rich would exit with 1 here."""
        raise BrokenPipeError


def open_console() -> Console:
    """Standard output. No text is styled by its content; a pipe is as wide as a document."""
    console = OutputConsole(highlight=False)
    return console if console.is_terminal else OutputConsole(highlight=False, width=PIPED_COLUMNS)
