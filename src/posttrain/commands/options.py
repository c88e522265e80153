"""Options of the command line: their types, those that several commands have, and components (``--task NAME``).

A value that cannot be read is refused with one that works. Only the standard library is imported here, as in ``cli``.
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

if TYPE_CHECKING:  # only the standard library is imported with this module
    from posttrain.recipes.sections import Component

LARGEST = 10**9
MAY_BE_EMPTY = ("system",)  # options for which an empty text means nothing
ACCEPT_HELP = "resume although recipe or records are others than when the checkpoint was saved"
_SHOWN_CHARS = 60
_LONGEST_NAME = 255  # bytes, of a file or folder on any common file system


Argument = tuple[str, dict[str, Any]]
ArgumentGroups = Mapping[str, Sequence[Argument]]


def option(name: str, **settings: object) -> Argument:
    """Return an argument of a command and its settings, those of ``add_argument``."""
    return name, settings


class CommandOptions:
    """The arguments of a command, those in groups by the title of the group; usage and epilog of its help."""

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
        """Add all of them."""
        parser.usage = self.usage
        parser.epilog = self.epilog
        for title, arguments in self.groups.items():
            group: argparse._ActionsContainer = parser
            if title:
                group = parser.add_argument_group(title)
            for name, settings in arguments:
                group.add_argument(name, **settings)


class Parser(argparse.ArgumentParser):
    """A parser whose options are given once and not empty, unless they say otherwise (``nargs``, ``MAY_BE_EMPTY``)."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for name in (None, "store"):
            self.register("action", name, _StoreOnce)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> object:
        required = action.nargs not in ("?", argparse.PARSER) and action.dest not in MAY_BE_EMPTY
        if required and not all(text.strip() for text in arg_strings):
            raise argparse.ArgumentError(action, "the value is empty; give one")
        values = super()._get_values(action, arg_strings)
        if arg_strings and action.option_strings and values == []:
            raise argparse.ArgumentError(action, f"at least one is needed, not {shown(arg_strings[0])}")
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
        message = message.replace("ignored explicit argument", "it takes no value, so leave out")
        if len(message) >= 2000:
            message = f"{message[:1000]} ... {message[-500:]}"
        super().error(message)


class _StoreOnce(argparse._StoreAction):
    """Stores a value and refuses a second one, which would replace it silently."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        seen: set[str] = namespace.__dict__.setdefault("_given", set())
        if option_string is not None and self.dest in seen:
            raise argparse.ArgumentError(self, "given twice; give it once")
        seen.add(self.dest)
        super().__call__(parser, namespace, values, option_string)


def shown(text: str) -> str:
    """The text in quotes, the end of a long one left out."""
    return repr(cut_end(text, _SHOWN_CHARS))


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
    if os.path.lexists(path) and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{shown(text)} is no folder; give one, or a name for a new one")
    return text


def refuse_open_host(host: str, is_guarded: bool, option: str) -> None:
    """Refuse to serve others than this machine without a key.

    Raises:
        UsageError: with the option that sets one.
    """
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if not host or not (is_local or is_guarded):
        raise UsageError(f"--host {host!r}: others than this machine could ask; add {option}, or leave --host out")


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
            raise argparse.ArgumentTypeError(f"a whole number of at least {least} is needed, not {shown(text)}")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"a whole number of at most {most:,} is needed, not {shown(text)}")
        return value

    return read


seed = _whole(0, None)
natural = _whole(0, LARGEST)
positive = _whole(1, LARGEST)
repetitions = _whole(1, 1000)
port = _whole(1, 65_535)


def positives(text: str) -> list[int]:
    """``1,4,8``: whole numbers of at least 1."""
    return [positive(part) for part in names_between_commas(text)]


def naturals(text: str) -> list[int]:
    """``0,1``: whole numbers of at least 0."""
    return [natural(part) for part in names_between_commas(text)]


def nonnegative_float(text: str) -> float:
    """A number of at least 0."""
    try:
        if text.isascii():
            value = float(text)
        else:
            value = -1.0
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"a number of at least 0 is needed, not {shown(text)}")
    return value


def proportion(text: str) -> float:
    """A number above 0 and at most 1."""
    value = nonnegative_float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"a number above 0 and at most 1 is needed, not {shown(text)}")
    return value


def read_changes(text: str) -> dict[int, float | None]:
    """Read ``12=8, 40=off``: by feature the strength to add, None where it is to be taken out."""
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
            raise argparse.ArgumentTypeError(f"FEATURE=STRENGTH is needed, such as 12=8 or 12=off, not {part!r}")
        changes[natural(feature.strip())] = number
    return changes


def runs_dir(default: str = "runs") -> Argument:
    """Return ``--runs-dir``."""
    about = "where run directories are (default: runs)"
    return option("--runs-dir", type=folder_of_runs, default=default, metavar="DIR", help=about)


def seed_of(what: str = "seed of the sampling") -> Argument:
    """Return ``--seed``."""
    return option("--seed", type=seed, default=0, help=f"{what} (default: 0)")


def dtype_of(what: str, name: str = "--dtype") -> Argument:
    """Return ``--dtype``, or the same under another name."""
    return option(name, type=short_dtype, choices=("fp32", "bf16"), help=f"{what} (default: the run's, or fp32)")


def address(default_port: int) -> tuple[Argument, Argument]:
    """Return ``--host`` and ``--port``."""
    about = "where it listens (default: 127.0.0.1, this machine only)"
    own_port = option("--port", type=port, default=default_port, help=f"default: {default_port}")
    return option("--host", default="127.0.0.1", help=about), own_port


ALLOW_CODE_OPTIONS = (  # of code that a stored recipe names, and the Python of a model
    option(
        ALLOW_CODE, metavar="MODULE:FUNCTION[@FOLDER]", action="append", default=argparse.SUPPRESS,
        help="a function that a run's recipe names, and that may be imported; command=WORDS: one that it may start",
    ),
    option(
        TRUST_REMOTE_CODE, action="store_true", default=argparse.SUPPRESS,
        help="run the Python that comes with a model (no recipe can ask for it)",
    ),
)  # fmt: skip
MODEL = option(
    "model", metavar="MODEL_OR_RUN", help="tiny, a model directory, a run, one of its checkpoints, or a hub name"
)
TEMPLATE = option(
    "--template", help="prompt template (default: the run's, else the model's chat template, else r1_zero)"
)
MAX_TOKENS = option("--max-tokens", type=positive, help="longest answer (default: the run's, else 256)")
# Options of sampling that most answers leave as they are.
RULES = (
    option("--min-p", type=nonnegative_float, metavar="P", help="only tokens of this share of the largest chance"),
    option("--min-tokens", type=natural, metavar="N", help="no answer ends before it has so many tokens"),
    option("--repetition-penalty", type=nonnegative_float, metavar="R", help="of tokens that came before (default: 1)"),
    option("--stop", action="append", metavar="TEXT", help="ends an answer where it is complete; may be given again"),
)

# Options of a model that is steered, by the title of their group.
STEERING = {
    "steered by features of a sparse autoencoder": (
        option("--sae", metavar="FOLDER", help="a run of `sae train`, or a dictionary's folder"),
        option(
            "--steer", type=read_changes, action="append", default=[], metavar="FEATURE=STRENGTH",
            help="add this length of a feature's direction at every token, or take the feature out: 12=8,40=off",
        ),
    )
}  # fmt: skip


def chosen_components(arguments: argparse.Namespace) -> dict[str, Component]:
    """Return the components ``task`` and ``template`` of a command that takes one of each."""
    return {section: components[0] for section, components in read_components(arguments).items() if components}


def read_components(
    arguments: argparse.Namespace, sections: Sequence[str] = ("task", "template")
) -> dict[str, list[Component]]:
    """Return the components that the command line names (``--task``, ``--template``), each with its options.

    ``--task.key`` belongs to the only task, or to the model's own where none is named; with several it is
    ``--task.NAME.key``.

    Raises:
        UsageError: an option that belongs to none, or might belong to several.
    """
    from posttrain.recipes.overriding import apply_override
    from posttrain.recipes.sections import read_component

    named: dict[str, list[str]] = {}
    data: dict[str, dict[str, Any]] = {}  # by section, the component of each name; of the name "" where none is given
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
            raise UsageError(f"--{section}.{rest}: several are named, so say whose option this is: {options}")
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
            # a name that is empty was given, and is refused where it is looked up
            if component.name or component.options or named[section]:
                components[section].append(component)
    return components


_REMOVAL = (
    option("names", metavar="NAME", nargs="*", help="runs or sweeps; patterns such as 'test-*'"),
    option("--dry-run", action="store_true", help="say what would go; change nothing"),
    option("--yes", action="store_true", help="do not ask"),
)
_NAME = option("name", metavar="NAME", help="the run")
# Options of the actions of ``posttrain runs``.
RUNS = {
    "list": CommandOptions(
        option(
            "names", metavar="PATTERN", nargs="*", help="only runs whose name fits: 'tiny-*', or 'sweep-ppo/cells/*'"
        ),
        option("--state", action="append", default=[], metavar="STATE", help="only runs in this state"),
        option(
            "--sort", default="created", metavar="KEY",
            help="created, name, metric (the primary one) or size (default: created)",
        ),
        option(
            "--limit", type=natural, metavar="N",
            help="at most so many of a table, the last of them; 0: all (default: 50)",
        ),
    ),
    "show": CommandOptions(option("name", metavar="NAME", nargs="?", help="the run or sweep")),
    "compare": CommandOptions(option("names", metavar="NAME", nargs="*", help="two runs or more")),
    "prune": CommandOptions(
        *_REMOVAL,
        option("--all", action="store_true", help="every run, those of sweeps included"),
        option(
            "--keep", default="best,last", metavar="WHICH",
            help="best (kept in any case), last, a number of newest ones (default: best,last)",
        ),
    ),
    "delete": CommandOptions(
        *_REMOVAL,
        option(
            "--step", type=natural, metavar="N", action="append",
            help="only this checkpoint of one run; may be repeated",
        ),
        option("--force", action="store_true", help="even if other runs were trained from it or with it"),
    ),
    "export": CommandOptions(
        _NAME,
        option("--to", type=new_place, metavar="PLACE", help="a new folder"),
        option("--push", metavar="REPOSITORY", help="upload it to the Hugging Face hub, such as me/my-model"),
        option("--public", action="store_true", help="with --push: a new repository is public (default: private)"),
        option(
            "--gguf", metavar="TYPE", help="also as a GGUF file, by llama.cpp's converter: f32, f16, bf16 or q8_0"
        ),
        option("--weights", choices=("best", "last", "ema", "none"), help="default: best, else last"),
        option("--merge", action="store_true", help="add a LoRA adapter to its base: a model that stands alone"),
    ),
    "resume": CommandOptions(
        _NAME,
        option("--steps", type=positive, metavar="N", help="go on to this step (train.steps)"),
        option("--accept-changes", action="store_true", help=ACCEPT_HELP),
        option("--quiet", action="store_true", help="no progress, only notices and the result"),
    ),
    "manage": CommandOptions(),
}  # fmt: skip
