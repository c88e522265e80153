"""Where commands print: one console, wide enough for tables when it is no terminal."""

from __future__ import annotations

import re

from rich.console import Console

PIPED_COLUMNS = 120
# Characters by which a text could steer the terminal that shows it, and those that turn the reading direction.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """``text`` with control characters written out (``\\x1b``); line ends and tabs stay.

    For what models and data say: an escape sequence in it would otherwise reach the terminal.
    """
    return _STEERING.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class OutputConsole(Console):
    """A console whose reader may stop early (``posttrain explain | head``) without that being an error."""

    def on_broken_pipe(self) -> None:
        """Leave it to ``cli.main``; rich would exit with 1 here."""
        raise BrokenPipeError


def open_console() -> Console:
    """Standard output. No text is styled by its content; a pipe is as wide as a document."""
    console = OutputConsole(highlight=False)
    return console if console.is_terminal else OutputConsole(highlight=False, width=PIPED_COLUMNS)
