"""Untrusted text and code: model output, plus content from runs, recipes and data files.

Text: control, bidirectional and zero-width characters are escaped (``harmless``), including on standard streams
(``guard_output``). Markdown output never interprets it as markup, HTML or links.

Code: opening runs imports nothing. ``module:function`` is imported only if allowed on the command line
(``--objective mine:surprised``, ``--allow-code mine:surprised``) or by a recipe file being trained. Commands started by
recipes follow the same rule (``--allow-code 'command=python server.py'``). Python code inside models runs only under
``--trust-remote-code``.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import TextIOWrapper
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from posttrain.errors import RecipeError, UnallowedCode

if TYPE_CHECKING:
    from pydantic import ValidationError

MAX_SHOWN = 1 << 22  # untrusted characters per page: more take a minute to draw, and go unread
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
    """Return ``text`` with control, hidden and direction characters written out; line ends and tabs stay.

    Characters: C0 but ``\\n`` and ``\\t``, DEL, C1, Unicode's format characters (bidirectional controls, zero width,
    tags), lone surrogates, and variation selectors in a row. Joiners within letters and emoji stay.
    """
    return _HIDDEN.sub(lambda match: match[1] or match[0].encode("unicode_escape").decode(), text)


def first_fault(error: ValidationError) -> str:
    """Describe a document's first validation error: place and problem."""
    fault = error.errors()[0]
    return harmless(f"{'.'.join(map(str, fault['loc'])) or 'all of it'}: {fault['msg']}")[:200]


def describe_fault(error: ValidationError) -> str:
    """Describe a document's first validation error, including the value found."""
    fault = error.errors(include_url=False)[0]
    if fault["type"] == "missing":
        return first_fault(error)
    return f"{first_fault(error)}; got {fault['input']!r:.80}"


def cut_end(text: str, limit: int) -> str:
    """Return ``text``; of a longer one the first ``limit`` characters and three dots."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}..."


def harmless_json(content: str) -> str:
    """Escape harmful characters in JSON text, which then displays safely and parses identically."""
    return _HIDDEN.sub(lambda match: match[1] or _json_escape(match[0]), content)


def _json_escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))


def fitting(texts: Sequence[str]) -> Callable[[str], str]:
    """Build a function shortening each text to both ends, if ``texts`` together exceed a page."""
    room = sum(len(text) for text in texts)
    if room > MAX_SHOWN:
        room = MAX_SHOWN // len(texts)

    def fit(text: str) -> str:
        if len(text) <= room:
            return text
        half = room // 2
        left = len(text) - 2 * half
        return f"{text[:half]} [... {left:,} characters are left out here ...] {text[half + left :]}"

    return fit


_LAST_OUTPUT = [0.0]  # monotonic seconds


def note_output() -> None:
    """Remember that something was printed now."""
    _LAST_OUTPUT[0] = time.monotonic()


def seconds_since_output() -> float:
    """Seconds since anything was printed through guarded streams or posttrain consoles."""
    return time.monotonic() - _LAST_OUTPUT[0]


class HarmlessStream:
    """Text stream wrapper that escapes harmful text; otherwise behaves like the wrapped stream.

    ``rich_proxied_file`` is the wrapped stream: rich emits posttrain's colors and has separate checks, so it writes
    there directly. tqdm progress bars keep carriage returns and cursor-up sequences; the rest is escaped.
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
        note_output()
        self.rich_proxied_file.write(shown)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several lines."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self.rich_proxied_file, name)


def guard_output() -> None:
    """Guard standard output and standard error against harmful text from now on.

    Guards stay after commands end, because the interpreter prints final tracebacks later. If a terminal lacks Unicode
    support, unsupported characters become "?" instead of failing.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or isinstance(stream, HarmlessStream):
            continue
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
        setattr(sys, name, HarmlessStream(stream))


def plain(text: str) -> str:
    """Escape text for a single line or table cell: no links, images, HTML, code or cell separators."""
    return _MARKUP.sub(r"\\\1", _CONTROLS.sub(" ", text))


def paragraph(text: str) -> str:
    """Escape text for a separate paragraph: additionally no headings, lists, quotes or front matter."""
    shown = plain(" ".join(text.split()))
    block = _BLOCK.match(shown)
    if not block:
        return shown
    return f"{block['number']}\\{shown[block.end() :]}"


def bullets(lines: Iterable[str]) -> str:
    """Return a list, a line each; "" for none."""
    return "".join(f"- {plain(line)}\n" for line in lines)


def code(text: str) -> str:
    """Format text as inline code that backticks cannot end."""
    shown = _CONTROLS.sub(" ", text).replace("|", "¦")
    fence = "`" * (max((len(run) for run in re.findall(r"`+", shown)), default=0) + 1)
    if shown.startswith("`") or shown.endswith("`"):
        padding = " "
    else:
        padding = ""
    return f"{fence}{padding}{shown}{padding}{fence}"


FileKind = Literal["file", "folder", "pipe", "device", "socket", "nothing"]
_KINDS: dict[int, FileKind] = {
    stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"
}  # fmt: skip


def kind_of_file(path: str | Path) -> FileKind:
    """Determine a path's file kind, following links; ``nothing`` if unreachable."""
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):  # missing file, symlink loop, overlong name, or NUL
        return "nothing"
    return _KINDS.get(stat.S_IFMT(mode), "device")


ALLOW_CODE, TRUST_REMOTE_CODE = "--allow-code", "--trust-remote-code"
COMMAND = "command="  # prefix for commands in ``--allow-code``, followed by shell words
REMOTE_CODE = "trust_remote_code"
STORED_RECIPE = "recipe.yaml"
_PLAN = "sweep.yaml"
# Files found beside a run's recipe or a comparison's plan.
_RECORDS = ("status.json", "env.json", "checkpoints", "cells")
_NAME = re.compile(r"(?<![\w./])[^\W\d][\w.]*:[^\W\d]\w*(?![\w:])")

_FOLDERS: dict[str, tuple[str, ...]] = {}  # declared names, with module search folders
_IMPORTED: set[str] = set()
_REMOTE_CODE = [False]


def declare_code(content: object, *folders: str | Path) -> None:
    """Allow code named in ``content`` (text or plain data).

    This covers every ``module:function``, searched in these folders, and every word list under a ``command`` key.
    """
    places = [os.path.abspath(folder) for folder in folders]
    for words in _commands(content):
        _FOLDERS[command_name(words)] = ()
    for text in _texts(content):
        if text.startswith(COMMAND):
            _FOLDERS[text] = ()
            continue
        for name in _NAME.findall(text):
            _FOLDERS[name] = tuple(dict.fromkeys((*_FOLDERS.get(name, ()), *places)))


def declare_from_command_line(
    arguments: Iterable[str], allowed: Iterable[str] = (), *, trust_remote_code: bool = False
) -> None:
    """Allow code named on the command line.

    ``allowed`` (``--allow-code``): ``module:function``, ``module:function@FOLDER`` or ``command=WORDS``.

    Raises:
        UnallowedCode: an ``--allow-code`` entry is malformed, or its folder is missing.
    """
    for text in allowed:
        if text.startswith(COMMAND):
            _allow_command(text)
            continue
        name, at, folder = text.partition("@")
        if not _NAME.fullmatch(name):
            raise UnallowedCode(f"{ALLOW_CODE} {text!r}: give the name that the message shows, as module:function")
        if at and not Path(folder).is_dir():
            raise UnallowedCode(f"{ALLOW_CODE} {text!r}: there is no folder {folder!r}")
        if not at:
            folder = os.getcwd()
        declare_code(name, folder)
    words = list(arguments)
    declare_code([text for text in words if "@" not in text], os.getcwd())
    declare_commands(pairwise([*words, ""]))
    _REMOTE_CODE[0] = trust_remote_code


def declare_commands(typed: Iterable[tuple[str, str]]) -> None:
    """Allow commands given under ``--tools`` keys; ``typed`` pairs each command-line word with its successor."""
    for word, following in typed:
        key, equals, text = word.partition("=")
        if not key.startswith("--tools"):
            continue
        from posttrain.strict_yaml import read_yaml  # conformance checks run without yaml

        if not equals:
            text = following
        with suppress(RecipeError):  # the reader reports this later
            content, _ = read_yaml(text, key)
            declare_code({key.rpartition(".")[2]: content})


def command_name(words: Sequence[str]) -> str:
    """Format a command's name for ``--allow-code``."""
    return COMMAND + shlex.join(words)


def _allow_command(text: str) -> None:
    try:
        words = shlex.split(text.removeprefix(COMMAND))
    except ValueError as error:
        raise UnallowedCode(
            f"{ALLOW_CODE} {text!r}: no shell reads this ({error}); quote it as in the message"
        ) from None
    _FOLDERS[command_name(words)] = ()


def prepare_command(words: Sequence[str], place: str) -> None:
    """Record that a declared command is started. ``place`` prefixes error messages.

    Raises:
        UnallowedCode: not declared.
    """
    name = command_name(words)
    if name not in _FOLDERS:
        raise UnallowedCode(
            f"{place}: {shlex.join(words)!r} is a command that a stored recipe starts, and opening a run starts none. "
            f"If you trust it, name it: {ALLOW_CODE} {shlex.quote(name)}"
        )
    _IMPORTED.add(name)


def prepare_import(name: str, place: str) -> None:
    """Make a declared ``module:function`` importable. ``place`` prefixes error messages.

    Raises:
        UnallowedCode: not declared.
    """
    if not _NAME.fullmatch(name):
        raise UnallowedCode(
            f"{place}{name!r}: code of your own is named as module:function; write it like mine:surprised"
        )
    if name not in _FOLDERS:
        raise UnallowedCode(
            f"{place}{name!r} is Python code that a stored recipe names, and opening a run imports none. If you trust "
            f"it, name it: {ALLOW_CODE} {name} (its module is looked for in the working directory, or where "
            f"{ALLOW_CODE} {name}@FOLDER says)"
        )
    for folder in reversed(_FOLDERS[name]):  # earlier folders take precedence
        if folder not in sys.path:
            sys.path.insert(0, folder)
    _IMPORTED.add(name)


def is_declared(name: str) -> bool:
    """Check if a component name may be used: anything except undeclared ``module:function``."""
    return ":" not in name or name in _FOLDERS


def declared_code() -> dict[str, list[str]]:
    """List importable names and folders, for another process in the same run."""
    return {name: list(folders) for name, folders in _FOLDERS.items()}


def allow_code_options(near: str | None = None) -> list[str]:
    """Build options letting another posttrain command import everything this process imported.

    ``near``: omit this folder, because that command is typed there.
    """
    words = []
    for name in sorted(_IMPORTED):
        if name.startswith(COMMAND):
            words += [ALLOW_CODE, name]
        for folder in _FOLDERS[name]:
            words.append(ALLOW_CODE)
            if folder == near:
                words.append(name)
            else:
                words.append(f"{name}@{folder}")
    if _REMOTE_CODE[0]:
        words.append(TRUST_REMOTE_CODE)
    return words


def trusts_remote_code() -> bool:
    """Check if the command line has ``--trust-remote-code``."""
    return _REMOTE_CODE[0]


def is_stored(place: str | Path) -> bool:
    """Check if a document belongs to a run or sweep, rather than being a user's recipe.

    ``recipe.yaml`` always counts as stored; other files count if run records exist beside them.
    """
    path = Path(place)
    return any(_is_record(form) for form in (path, path.resolve()))


def _is_record(path: Path) -> bool:
    if path.name == STORED_RECIPE:
        return True
    for folder in (path.parent, path.parent.parent):
        is_of_run = any((folder / name).is_file() for name in (STORED_RECIPE, _PLAN))
        if is_of_run and any((folder / name).exists() for name in _RECORDS):
            return True
    return False


def refuse_remote_code(document: object, overridden: Collection[str], place_of: Callable[[str], str]) -> None:
    """Refuse ``trust_remote_code: true`` in a document, except keys set on the command line (``overridden``).

    ``place_of`` maps a dotted key to the message prefix.

    Raises:
        RecipeError: requested by a file, but not on the command line.
    """
    keys = [key for key in _remote_code_keys(document) if key not in overridden]
    if keys and not trusts_remote_code():
        raise RecipeError(
            f"{place_of(keys[0])}{keys[0]}: a file cannot allow the Python of a model to run; leave the key out and "
            f"say {TRUST_REMOTE_CODE} on the command line, every time"
        )


def without_remote_code(document: object) -> Any:
    """Copy a document, dropping ``trust_remote_code`` everywhere."""
    if isinstance(document, Mapping):
        return {key: without_remote_code(value) for key, value in document.items() if key != REMOTE_CODE}
    if isinstance(document, list):
        return [without_remote_code(item) for item in document]
    return document


def _remote_code_keys(document: object, prefix: str = "") -> Iterator[str]:
    pairs: Iterable[tuple[object, object]] = ()
    if isinstance(document, Mapping):
        pairs = document.items()
    elif isinstance(document, list):
        pairs = enumerate(document)
    for key, value in pairs:
        if key == REMOTE_CODE and value not in (False, None):
            yield f"{prefix}{key}"
        yield from _remote_code_keys(value, f"{prefix}{key}.")


def _commands(content: object) -> Iterator[list[str]]:
    """Yield word lists found under ``command`` keys."""
    if isinstance(content, Mapping):
        for key, item in content.items():
            if key == "command" and isinstance(item, list) and all(isinstance(word, str) for word in item):
                yield item
            yield from _commands(item)
    elif isinstance(content, list | tuple):
        for item in content:
            yield from _commands(item)


def _texts(content: object) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, Mapping):
        for item in content.values():
            yield from _texts(item)
    elif isinstance(content, list | tuple):
        for item in content:
            yield from _texts(item)


def entries_of(value: object) -> list[Any]:
    """Read an expected list; empty if the value is anything else."""
    if isinstance(value, list):
        return value
    return []


def fields_of(value: object) -> dict[str, Any]:
    """Read an expected object; empty if the value is anything else."""
    if isinstance(value, dict):
        return value
    return {}
