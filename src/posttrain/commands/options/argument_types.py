"""What the options of commands are read as; what cannot be read is refused with what would work."""

from __future__ import annotations

import argparse
import os
import stat
from pathlib import Path
from typing import Any

from posttrain.consent import ALLOW_CODE, TRUST_REMOTE_CODE
from posttrain.errors import UsageError

LARGEST = 10**9
LARGEST_PORT = 65_535
MOST_SEEDS = 1000
ACCEPT_HELP = "resume although recipe or records are others than when the checkpoint was saved"
_SHOWN_CHARS = 60
_LONGEST_NAME = 255  # bytes, of a file or folder on any common file system


class Parser(argparse.ArgumentParser):
    """A parser whose options are given once and not empty, unless they say otherwise (``nargs``, ``may_be_empty``)."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for name in (None, "store"):
            self.register("action", name, _StoreOnce)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        required = action.nargs not in ("?", argparse.PARSER) and action.dest not in MAY_BE_EMPTY
        if required and not all(text.strip() for text in arg_strings):
            raise argparse.ArgumentError(action, "the value is empty; give one")
        values = super()._get_values(action, arg_strings)
        if arg_strings and action.option_strings and values == []:
            raise argparse.ArgumentError(action, f"at least one is needed, not {shown(arg_strings[0])}")
        return values

    def error(self, message: str) -> Any:
        """End with the usage, the message and exit code 2."""
        message = message.replace("ignored explicit argument", "it takes no value, so leave out")
        super().error(message if len(message) < 2000 else f"{message[:1000]} ... {message[-500:]}")


# Where nothing is something, such as no system message.
MAY_BE_EMPTY = ("system",)


class _StoreOnce(argparse._StoreAction):
    """Keeps a value, once: of two, one would be lost without a word."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if option_string is not None:
            seen: set[str] = namespace.__dict__.setdefault("_given", set())
            if self.dest in seen:
                raise argparse.ArgumentError(self, "given twice; give it once")
            seen.add(self.dest)
        super().__call__(parser, namespace, values, option_string)


def shown(text: str) -> str:
    """The text in quotes, the end of a long one left out."""
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...")


def new_place(text: str) -> str:
    """A path under which a file or folder is, or could be made."""
    path = Path(text)
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in path.parts):
        raise argparse.ArgumentTypeError(f"{shown(text)} holds a name of more than {_LONGEST_NAME} bytes; give another")
    for above in path.parents:
        try:
            is_folder = stat.S_ISDIR(above.stat().st_mode)
        except FileNotFoundError:
            is_folder = not above.is_symlink()  # it will be made
        except (OSError, ValueError):
            is_folder = False
        if not is_folder:
            raise argparse.ArgumentTypeError(f"{shown(str(above))} is no folder; give another place than {shown(text)}")
    return text


def folder_of_runs(text: str) -> str:
    """A folder, or a name that one could be made under."""
    path = Path(new_place(text))
    if path.is_symlink() and not path.exists():
        raise argparse.ArgumentTypeError(f"{shown(text)} is a link that leads nowhere; give a folder")
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{shown(text)} is no folder; give one, or a name for a new one")
    return text


def add_runs_dir(parser: argparse.ArgumentParser, default: str = "runs") -> None:
    """Give a parser the option that says where runs are."""
    help_line = "where run directories are (default: runs)"
    parser.add_argument("--runs-dir", type=folder_of_runs, default=default, metavar="DIR", help=help_line)


def add_consent(parser: argparse.ArgumentParser) -> None:
    """Code that a stored recipe names, and the Python of a model: neither runs without being asked for here."""
    parser.add_argument(
        ALLOW_CODE,
        metavar="MODULE:FUNCTION[@FOLDER]",
        action="append",
        default=argparse.SUPPRESS,
        help="a function that a run's recipe names, and that may be imported (again for another)",
    )
    parser.add_argument(
        TRUST_REMOTE_CODE,
        action="store_true",
        default=argparse.SUPPRESS,
        help="run the Python that comes with a model (no recipe can ask for it)",
    )


def names(text: str) -> list[str]:
    """``a,b``: the names between the commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = natural(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is needed, not {shown(text)}")
    return value


def positives(text: str) -> list[int]:
    """``1,4,8``: whole numbers of at least 1."""
    return [positive(part) for part in names(text)]


def natural(text: str) -> int:
    """A whole number of at least 0 and at most ``LARGEST``."""
    value = seed(text)
    if value > LARGEST:
        raise argparse.ArgumentTypeError(f"a whole number of at most {LARGEST:,} is needed, not {shown(text)}")
    return value


def seed(text: str) -> int:
    """A whole number of at least 0."""
    try:
        value = int(text) if text.isascii() else -1
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"a whole number of at least 0 is needed, not {shown(text)}")
    return value


def repetitions(text: str) -> int:
    """How many seeds something is done with."""
    value = positive(text)
    if value > MOST_SEEDS:
        raise argparse.ArgumentTypeError(f"at most {MOST_SEEDS:,} seeds can be given, not {shown(text)}")
    return value


def port(text: str) -> int:
    """The number of a port.

    Raises:
        UsageError: it is none; one message, without the usage of the command.
    """
    value = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(LARGEST_PORT)) else 0
    if not 1 <= value <= LARGEST_PORT:
        raise UsageError(f"--port {shown(text)}: a whole number from 1 to {LARGEST_PORT} is needed")
    return value


def naturals(text: str) -> list[int]:
    """``0,1``: whole numbers of at least 0."""
    return [natural(part) for part in names(text)]


def nonnegative_float(text: str) -> float:
    """A number of at least 0."""
    try:
        value = float(text) if text.isascii() else -1.0
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"a number of at least 0 is needed, not {shown(text)}")
    return value


def share(text: str) -> float:
    """A number above 0 and at most 1."""
    value = nonnegative_float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"a number above 0 and at most 1 is needed, not {shown(text)}")
    return value
