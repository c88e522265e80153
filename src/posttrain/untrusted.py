"""Text of strangers on a terminal and in Markdown: what a model wrote, and what a run, a recipe or a data file says.

A control character in it could move the cursor, write the clipboard, or answer in the user's name; one that turns the
reading direction or has no width could show another text than there is. ``harmless`` writes such characters out
(``\\x1b``). It is called wherever text becomes a line of a table (``commands/console.py``) and again by the last door
before a terminal: ``guard_output`` puts it between ``print`` and the standard streams.

In Markdown it is shown as it is, and never as markup, HTML or a link (``plain``, ``paragraph``, ``bullets``, ``code``).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from pydantic import ValidationError

MAX_SHOWN = 1 << 22  # characters of others on one page: more take a minute to draw, and nobody reads them
# A joiner (U+200C, U+200D) belongs between letters of some scripts and in emoji; elsewhere it hides.
_JOINED = "[^\x00-\u024f\\s\u200c\u200d]"
_SELECTOR = "[\ufe00-\ufe0f\U000e0100-\U000e01ef]"
_HIDDEN = re.compile(
    "(\U0001f3f4[\U000e0030-\U000e0039\U000e0061-\U000e007a]{3,6}\U000e007f)"  # the flag of a region: kept
    "|[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e00ff]"
    f"|(?<!{_JOINED})[\u200c\u200d]|[\u200c\u200d](?!{_JOINED})|(?<={_SELECTOR}){_SELECTOR}"
)
_MARKUP = re.compile(r"([\\`\[\]<|])")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
_BLOCK = re.compile(r"(?P<number>\d*)(?=[.)]|[-#>=+*~_:!])")
_CURSOR = re.compile("\n*(?:\x1b\\[A)+")


def harmless(text: str) -> str:
    """``text`` with its control, hidden and direction characters written out; line ends and tabs stay.

    Characters: C0 but ``\\n`` and ``\\t``, DEL, C1, Unicode's format characters (bidirectional controls, zero width,
    tags), lone surrogates, and variation selectors in a row. Joiners within letters and emoji stay.
    """
    return _HIDDEN.sub(lambda match: match[1] or match[0].encode("unicode_escape").decode(), text)


def first_fault(error: ValidationError) -> str:
    """The first thing that is wrong with a document that was checked: where in it, and what."""
    fault = error.errors()[0]
    return harmless(f"{'.'.join(map(str, fault['loc'])) or 'all of it'}: {fault['msg']}")[:200]


def harmless_json(content: str) -> str:
    """JSON text with the same characters as escapes of JSON, so that it may be shown and is read as before."""
    return _HIDDEN.sub(lambda match: match[1] or _json_escape(match[0]), content)


def _json_escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))


def fitting(texts: Sequence[str]) -> Callable[[str], str]:
    """How each of ``texts`` is shown so that together they have room on one page: where it is short, the two ends."""
    lengths = [len(text) for text in texts]
    room = sum(lengths) if sum(lengths) <= MAX_SHOWN else MAX_SHOWN // len(lengths)

    def fit(text: str) -> str:
        left = len(text) - room // 2 * 2
        if len(text) <= room:
            return text
        return f"{text[: room // 2]} [... {left:,} characters are left out here ...] {text[room // 2 + left :]}"

    return fit


class HarmlessStream:
    """A text stream through which only harmless text passes; in all else it is the stream behind it.

    ``rich_proxied_file`` is that stream: rich, whose colours are ours, writes to it directly (and has its own check).
    Progress bars of tqdm keep their carriage return and their steps up, but not what else stands in them.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        """Write ``text``; returns its length, as streams do."""
        shown = harmless(text)
        if shown != text and sys._getframe(1).f_globals.get("__name__", "").startswith("tqdm."):
            if _CURSOR.fullmatch(text):
                shown = text
            elif text.startswith("\r"):
                shown = f"\r{harmless(text[1:])}"
        self.rich_proxied_file.write(shown)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of ``lines``."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def guard_output() -> None:
    """Let only harmless text reach standard output and standard error from here on.

    They stay guarded when a command ends: the interpreter prints the last traceback after that. A stream that cannot
    show a character (a terminal without Unicode) shows "?" instead of failing.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or isinstance(stream, HarmlessStream):
            continue
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
        setattr(sys, name, HarmlessStream(stream))


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
