"""Command line options: types, options shared by commands, and components (``--task NAME``).

Error messages for invalid values suggest a valid one. Imports only the standard library, like ``cli``.
"""

from __future__ import annotations

import argparse
import ipaddress
import math
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import UsageError, nearest
from posttrain.other_names import short_dtype
from posttrain.untrusted import ALLOW_CODE, TRUST_REMOTE_CODE, cut_end

if TYPE_CHECKING:  # keeps this module free of heavy imports
    from posttrain.recipes.sections import Component

LARGEST = 10**9
MAY_BE_EMPTY = ("system",)  # options that accept an empty text
ACCEPT_HELP = "resume even if recipe or records changed since the checkpoint"
_SHOWN_CHARS = 60
_LONGEST_NAME = 255  # bytes, a limit in common file systems


Argument = tuple[str, dict[str, Any]]
ArgumentGroups = Mapping[str, Sequence[Argument]]


def option(name: str, **settings: object) -> Argument:
    """Build an argument with settings for ``add_argument``."""
    return name, settings


class CommandOptions:
    """Arguments of a command, optionally in titled groups, with usage and epilog for the help text."""

    def __init__(
        self,
        *arguments: Argument,
        usage: str | None = None,
        epilog: str | None = None,
        groups: ArgumentGroups | None = None,
    ) -> None:
        self.groups: dict[str, Sequence[Argument]] = {"": arguments}
        if groups is not None:
            self.groups.update(groups)
        self.usage = usage
        self.epilog = epilog

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Register all arguments with a parser."""
        parser.usage = self.usage
        parser.epilog = self.epilog
        for title, arguments in self.groups.items():
            group: argparse._ActionsContainer = parser
            if title:
                group = parser.add_argument_group(title)
            for name, settings in arguments:
                group.add_argument(name, **settings)


class Parser(argparse.ArgumentParser):
    """A parser that rejects repeated and empty options, except with ``nargs`` or in ``MAY_BE_EMPTY``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for name in (None, "store"):
            self.register("action", name, _StoreOnce)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> object:
        required = action.nargs not in ("?", argparse.PARSER) and action.dest not in MAY_BE_EMPTY
        if required and not all(text.strip() for text in arg_strings):
            raise argparse.ArgumentError(action, "the value is empty; give a value")
        values = super()._get_values(action, arg_strings)
        if arg_strings and action.option_strings and values == []:
            raise argparse.ArgumentError(action, f"needs at least one value, not {shown(arg_strings[0])}")
        return values

    def _check_value(self, action: argparse.Action, value: object) -> None:
        choices = action.choices or ()
        if value not in choices:
            near = nearest(str(value), map(str, choices))
            if near:
                raise argparse.ArgumentError(action, f"there is no {shown(str(value))}. Did you mean {near}?")
        super()._check_value(action, value)

    def error(self, message: str) -> Any:
        """End with the usage, the message and exit code 2."""
        message = message.replace("ignored explicit argument", "takes no value; remove")
        if len(message) >= 2000:
            message = f"{message[:1000]} ... {message[-500:]}"
        super().error(message)


class _StoreOnce(argparse._StoreAction):
    """Store a value, and reject repetition instead of silently overwriting."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        seen: set[str] = namespace.__dict__.setdefault("_given", set())
        if option_string is not None and self.dest in seen:
            raise argparse.ArgumentError(self, "given twice; give it once")
        seen.add(self.dest)
        super().__call__(parser, namespace, values, option_string)


def shown(text: str) -> str:
    """Quote and shorten a text for an error message."""
    return repr(cut_end(text, _SHOWN_CHARS))


def new_place(text: str) -> str:
    """Parse a path to an existing file or folder, or to a location where it could be created."""
    path = Path(text)
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in path.parts):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} contains a name longer than {_LONGEST_NAME} bytes; give a shorter one"
        )
    for above in path.parents:
        try:
            is_folder = stat.S_ISDIR(above.stat().st_mode)
        except FileNotFoundError:
            is_folder = not above.is_symlink()  # it will be made
        except (OSError, ValueError):
            is_folder = False
        if not is_folder:
            raise argparse.ArgumentTypeError(
                f"{shown(str(above))} is not a folder; choose a location other than {shown(text)}"
            )
    return text


def folder_of_runs(text: str) -> str:
    """Parse an existing folder, or a name for a new folder."""
    path = Path(new_place(text))
    if os.path.lexists(path) and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a folder; give a folder, or a new name")
    return text


def refuse_open_host(host: str, is_guarded: bool, option: str) -> None:
    """Refuse to listen on a public address without a key.

    Raises:
        UsageError: missing key. The message suggests the option to add.
    """
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if not host or not (is_local or is_guarded):
        raise UsageError(f"--host {host!r}: other machines could connect; add {option}, or omit --host")


def names_between_commas(text: str) -> list[str]:
    """``a,b``: the names between the commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _whole(least: int, most: int | None) -> Callable[[str], int]:
    def read(text: str) -> int:
        if text.isascii() and text.strip().isdigit() and len(text) < 4000:
            value = int(text)
        else:
            value = -1
        if value < least:
            raise argparse.ArgumentTypeError(f"needs a whole number, {least} or more, not {shown(text)}")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"needs a whole number, {most:,} or less, not {shown(text)}")
        return value

    return read


seed = _whole(0, None)
natural = _whole(0, LARGEST)
positive = _whole(1, LARGEST)
repetitions = _whole(1, 1000)
port = _whole(1, 65_535)


def positives(text: str) -> list[int]:
    """Parse comma-separated positive integers: ``1,4,8``."""
    return [positive(part) for part in names_between_commas(text)]


def naturals(text: str) -> list[int]:
    """Parse comma-separated non-negative integers: ``0,1``."""
    return [natural(part) for part in names_between_commas(text)]


def nonnegative_float(text: str) -> float:
    """Parse a non-negative number."""
    try:
        if text.isascii():
            value = float(text)
        else:
            value = -1.0
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"needs a number, 0 or more, not {shown(text)}")
    return value


def proportion(text: str) -> float:
    """Parse a number above 0, up to 1."""
    value = nonnegative_float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"needs a number above 0, up to 1, not {shown(text)}")
    return value


def read_changes(text: str) -> dict[int, float | None]:
    """Parse ``12=8, 40=off`` to feature strengths; None removes a feature."""
    changes: dict[int, float | None] = {}
    for part in names_between_commas(text):
        feature, equals, strength = part.partition("=")
        try:
            if strength.strip() == "off":
                number = None
            else:
                number = float(strength)
        except ValueError:
            number = math.nan
        if not equals or (number is not None and not math.isfinite(number)):
            raise argparse.ArgumentTypeError(f"needs FEATURE=STRENGTH, such as 12=8 or 12=off, not {part!r}")
        changes[natural(feature.strip())] = number
    return changes


def runs_dir(default: str = "runs") -> Argument:
    """Return ``--runs-dir``."""
    about = "folder containing run directories (default: runs)"
    return option("--runs-dir", type=folder_of_runs, default=default, metavar="DIR", help=about)


def seed_of(what: str = "seed of the sampling") -> Argument:
    """Return ``--seed``."""
    return option("--seed", type=seed, default=0, help=f"{what} (default: 0)")


def dtype_of(what: str, name: str = "--dtype") -> Argument:
    """Convert ``--dtype``, accepting common aliases."""
    return option(name, type=short_dtype, choices=("fp32", "bf16"), help=f"{what} (default: the run's, or fp32)")


def address(default_port: int) -> tuple[Argument, Argument]:
    """Return ``--host`` and ``--port``."""
    about = "listening address (default: 127.0.0.1, this machine only)"
    own_port = option("--port", type=port, default=default_port, help=f"default: {default_port}")
    return option("--host", default="127.0.0.1", help=about), own_port


ALLOW_CODE_OPTIONS = (  # code named by a stored recipe, and Python code shipped with a model
    option(
        ALLOW_CODE, metavar="MODULE:FUNCTION[@FOLDER]", action="append", default=argparse.SUPPRESS,
        help="allow importing this function, named by a run's recipe; command=WORDS: allow starting this command",
    ),
    option(
        TRUST_REMOTE_CODE, action="store_true", default=argparse.SUPPRESS,
        help="run Python code shipped with a model (recipes cannot set this)",
    ),
)  # fmt: skip
MODEL = option("model", metavar="MODEL_OR_RUN", help="tiny, a model directory, a run, a checkpoint, or a hub name")
TEMPLATE = option(
    "--template", help="prompt template (default: the run's, else the model's chat template, else r1_zero)"
)
MAX_TOKENS = option("--max-tokens", type=positive, help="maximum answer length (default: the run's, else 256)")
# Less common sampling options.
RULES = (
    option("--min-p", type=nonnegative_float, metavar="P", help="minimum probability relative to the top token"),
    option("--min-tokens", type=natural, metavar="N", help="minimum answer length"),
    option(
        "--repetition-penalty", type=nonnegative_float, metavar="R", help="penalty for repeated tokens (default: 1)"
    ),
    option("--stop", action="append", metavar="TEXT", help="stop text; can be repeated"),
)

# Steering options, under a help heading.
STEERING = {
    "steered by features of a sparse autoencoder": (
        option("--sae", metavar="FOLDER", help="a `sae train` run, or a dictionary folder"),
        option(
            "--steer", type=read_changes, action="append", default=[], metavar="FEATURE=STRENGTH",
            help="add a feature direction with this strength to each token, or remove it: 12=8,40=off",
        ),
    )
}  # fmt: skip


def chosen_components(arguments: argparse.Namespace) -> dict[str, Component]:
    """Parse ``task`` and ``template`` components for commands that accept one of each."""
    return {section: components[0] for section, components in read_components(arguments).items() if components}


def read_components(
    arguments: argparse.Namespace, sections: Sequence[str] = ("task", "template")
) -> dict[str, list[Component]]:
    """Parse components named on the command line (``--task``, ``--template``), including options.

    ``--task.key`` applies to the only task, or to the model's task if none is given. With multiple tasks, use
    ``--task.NAME.key``.

    Raises:
        UsageError: an option without a component, or an ambiguous one.
    """
    from posttrain.recipes.overriding import apply_override
    from posttrain.recipes.sections import read_component

    named: dict[str, list[str]] = {}
    data: dict[str, dict[str, Any]] = {}  # by section, then by component name; "" if no name is given
    for section in sections:
        given = getattr(arguments, section, None)
        if isinstance(given, str):
            named[section] = [given]
        elif given is not None:
            named[section] = list(dict.fromkeys(given))
        else:
            named[section] = []
        data[section] = {name: {"name": name} for name in named[section] or [""]}
    for key, value in arguments.overrides:
        section, _, rest = key.partition(".")
        own = sorted(named[section], key=len, reverse=True)
        owner = next((name for name in own if rest.startswith(f"{name}.")), None)
        if owner is None and len(own) > 1:
            options = ", ".join(f"--{section}.{name}.{rest}" for name in named[section])
            raise UsageError(f"--{section}.{rest}: ambiguous with multiple components; write {options}")
        if owner is not None:
            rest = rest.removeprefix(f"{owner}.")
        elif own:
            owner = own[0]
        else:
            owner = ""
        wrapped: dict[str, object] = {section: data[section][owner]}
        apply_override(wrapped, f"{section}.{rest}", value)
    components: dict[str, list[Component]] = {}
    for section, by_name in data.items():
        components[section] = []
        for content in by_name.values():
            component = read_component(content, f"--{section}")
            # an empty name is kept here, and rejected at lookup
            if component.name or component.options or named[section]:
                components[section].append(component)
    return components


_REMOVAL = (
    option("names", metavar="NAME", nargs="*", help="runs or sweeps; patterns such as 'test-*'"),
    option("--dry-run", action="store_true", help="show deletions without changing anything"),
    option("--yes", action="store_true", help="do not ask"),
)
_NAME = option("name", metavar="NAME", help="the run")
# Options of the actions of ``posttrain runs``.
RUNS = {
    "list": CommandOptions(
        option(
            "names", metavar="PATTERN", nargs="*", help="only matching names: 'tiny-*', or 'sweep-ppo/cells/*'"
        ),
        option("--state", action="append", default=[], metavar="STATE", help="filter by state"),
        option(
            "--sort", default="created", metavar="KEY",
            help="created, name, metric (the primary one) or size (default: created)",
        ),
        option(
            "--limit", type=natural, metavar="N",
            help="show only the last N rows; 0: all (default: 50)",
        ),
    ),
    "show": CommandOptions(option("name", metavar="NAME", nargs="?", help="the run or sweep")),
    "compare": CommandOptions(option("names", metavar="NAME", nargs="*", help="two or more runs")),
    "prune": CommandOptions(
        *_REMOVAL,
        option("--all", action="store_true", help="all runs, including sweeps"),
        option(
            "--keep", default="best,last", metavar="WHICH",
            help="best (always kept), last, or a number of newest checkpoints (default: best,last)",
        ),
    ),
    "delete": CommandOptions(
        *_REMOVAL,
        option(
            "--step", type=natural, metavar="N", action="append",
            help="delete only this checkpoint; can be repeated",
        ),
        option("--force", action="store_true", help="delete even if other runs depend on it"),
    ),
    "export": CommandOptions(
        _NAME,
        option("--to", type=new_place, metavar="PLACE", help="a new folder"),
        option("--push", metavar="REPOSITORY", help="upload to the Hugging Face hub, such as me/my-model"),
        option("--public", action="store_true", help="with --push: create a public repository (default: private)"),
        option(
            "--gguf", metavar="TYPE", help="also write a GGUF file with llama.cpp: f32, f16, bf16 or q8_0"
        ),
        option("--weights", choices=("best", "last", "ema", "none"), help="default: best, else last"),
        option("--merge", action="store_true", help="merge a LoRA adapter into the base model"),
    ),
    "resume": CommandOptions(
        _NAME,
        option("--steps", type=positive, metavar="N", help="new last step (train.steps)"),
        option("--accept-changes", action="store_true", help=ACCEPT_HELP),
        option("--quiet", action="store_true", help="hide progress; print only notices and results"),
    ),
    "manage": CommandOptions(),
}  # fmt: skip
