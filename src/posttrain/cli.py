"""The command line: ``posttrain demo | train | sweep | evaluate | generate | data | recipes | explain | runs``.

Only the standard library is imported here, so that ``posttrain --help`` answers at once; the body of
each command lives in ``commands`` and is imported when it runs, and so are options that stand in a module of their own.

Whatever option a command does not know is a key of the recipe (``--train.lr 1e-5``), checked by the
recipe itself. A user's mistake ends in one message on stderr and exit code 2, a failure of the work
in exit code 1, Ctrl-C in 130; a traceback is shown only with ``--traceback`` or when the environment
variable ``POSTTRAIN_TRACEBACK`` is set.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain import __version__
from posttrain.commands.options import (
    ACCEPT_HELP,
    Parser,
    add_consent,
    add_runs_dir,
    natural,
    new_place,
    nonnegative_float,
    port,
    positive,
    seed,
    share,
    shown,
)
from posttrain.errors import GONE, INTERRUPTED, PosttrainError, UsageError, nearest
from posttrain.untrusted import declare_from_command_line, guard_output

# What a file system says of a path that cannot be: too long a name, a circle of links, a file in the place of a folder.
NO_SUCH_PLACE = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)

DESCRIPTION = "The laboratory for language-model post-training: pure words, one loop."
EPILOG = """\
start here:
  posttrain demo                              watch a small model learn to reason, in minutes
  posttrain recipes                           what can be trained
  posttrain explain grpo                      a word of a recipe: its equation, its options
  posttrain train tiny/grpo --train.lr 1e-4   train; any key of the recipe is an option
  posttrain runs                              what has been trained
"""


# How often a thread of torch's looks whether there is more work before it sleeps: read when torch is imported. By the
# library's own 300,000 it looks for 10 ms, the slice of a core that the other threads needed: beside one computing
# process two threads were then 3 to 4 times as slow as one; with this 1.4 times, and on idle cores 5 % slower.
SPINS = "3000"
FORMATS = ("table", "json", "csv", "md")
HOME = "posttrain.commands."
ANY = ("",)


@dataclass(frozen=True)
class Command:
    """A command, or an action of one.

    ``help``: what ``--help`` says of it. ``body``: its module below ``HOME`` and the function that takes the namespace;
    None: its actions have them. ``options``: who gives it its options, a function here or one named likewise; by
    default ``add_options`` of the body's module. ``keys``: sections whose keys are options, too; ANY: all that a recipe
    has; None: those are no options. ``models``: options that name models or runs whose weights are read: what is not
    there is refused before a library is imported. ``tables``: they can be had in other forms. ``runs``: it opens runs.
    """

    help: str
    body: str | None = None
    options: Callable[[argparse.ArgumentParser], None] | str | None = None
    keys: tuple[str, ...] | None = None
    models: tuple[str, ...] = ()
    tables: bool = False
    runs: bool = True


def imported(place: str) -> Callable[..., Any]:
    """The function ``module:name`` below ``HOME``."""
    module, _, name = place.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(f"{HOME}{module}"), name)
    return function


def build_parser(wanted: str | None = None) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of the whole command line, and those of its commands (and of actions, ``sae train``) by name.

    ``wanted``: the one command that gets its options (``""``: none does); by default every command.
    """
    common: argparse.ArgumentParser = Parser(add_help=False)
    common.add_argument(
        "--traceback", action="store_true", default=argparse.SUPPRESS, help="show where in the code an error arose"
    )
    form = Parser(add_help=False)
    form.add_argument("--format", choices=FORMATS, default="table", help="of the tables (default: table)")
    how: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser: argparse.ArgumentParser = Parser(
        "posttrain", description=DESCRIPTION, epilog=EPILOG, parents=[common], **how
    )
    parser.add_argument("--version", action="version", version=f"posttrain {__version__}")
    groups = {"": parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")}
    made: dict[str, argparse.ArgumentParser] = {}
    for name, command in COMMANDS.items():
        group, _, own = name.rpartition(" ")
        parents = [common, *([form] if command.tables else [])]
        if command.runs:  # an action says where runs are if its command does not
            parents.append(Parser(add_help=False))
            add_runs_dir(parents[-1], argparse.SUPPRESS if group and COMMANDS[group].runs else "runs")
            add_consent(parents[-1])
        description = f"{command.help[0].upper()}{command.help[1:]}."
        made[name] = groups[group].add_parser(own, help=command.help, description=description, parents=parents, **how)
        if command.body is None:
            title = "actions (without one: list)" if name == "runs" else "actions"
            groups[name] = made[name].add_subparsers(dest="action", metavar="ACTION", title=title, required=True)
        if wanted not in (None, name.partition(" ")[0]):
            continue
        options = command.options or (command.body and f"{command.body.partition(':')[0]}:add_options")
        if options:
            (imported(options) if isinstance(options, str) else options)(made[name])
    return parser, made


TRAIN_EPILOG = """\
any key of the recipe is an option:
  posttrain train tiny/grpo --train.lr 3e-4 --rollout.group 16 --objective.clip_high 0.28
  posttrain train grpo-gsm8k --model.name tiny --task.path data/gsm8k_train.jsonl.gz
  posttrain train my-recipe.yaml --dry-run
"""

DATA_EPILOG = """\
options of the task go behind its name:
  posttrain data show stories --n 2000 --model tiny --plot
  posttrain data show gsm8k --task.path data/gsm8k_test.jsonl.gz --task.split test --max-tokens 512
"""


def _add_demo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--story",
        choices=("reasoning", "tools"),
        default="reasoning",
        help="what is learnt: that writing the steps pays, or when a calculator does (default: reasoning)",
    )
    parser.add_argument("--seed", type=seed, default=0, help="seed of both training runs (default: 0)")
    parser.add_argument("--quiet", action="store_true", help="no live progress")


def _add_train_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = TRAIN_EPILOG
    parser.usage = "posttrain train RECIPE [options] [--section.key value ...]"
    parser.add_argument("recipe", metavar="RECIPE", help="a name that `posttrain recipes` lists, or a YAML file")
    parser.add_argument("--run", metavar="NAME", help="name of the run directory (default: the recipe's name)")
    parser.add_argument("--resume", action="store_true", help="continue the run from its newest checkpoint")
    parser.add_argument("--accept-changes", action="store_true", help=ACCEPT_HELP)
    parser.add_argument("--dry-run", action="store_true", help="check and print the resolved recipe; train nothing")
    parser.add_argument("--memory", action="store_true", help="with --dry-run: say the memory that it takes, by part")
    parser.add_argument("--quiet", action="store_true", help="no progress, only notices and the result")


def _add_generate_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "posttrain generate MODEL_OR_RUN [PROMPT] [options] [--task.key value ...] [--template.key ...]"
    parser.add_argument("model", metavar="MODEL_OR_RUN", help="tiny, a model directory, a run, or a hub name")
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="a question (default: an example of the task)")
    parser.add_argument("--task", help="whose example is asked (default: the run's, and stories for tiny)")
    parser.add_argument("--template", help="prompt template (default: the run's, else r1_zero)")
    parser.add_argument("-n", type=positive, default=1, help="number of answers (default: 1)")
    parser.add_argument("--max-tokens", type=positive, help="longest answer (default: the run's, else 256)")
    parser.add_argument("--temperature", type=nonnegative_float, default=1.0, help="0 is greedy (default: 1)")
    parser.add_argument("--seed", type=seed, default=0, help="seed of the sampling, and which example (default: 0)")
    imported("interpret.steering:add_steering_options")(parser)


def _add_chat_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "posttrain chat MODEL_OR_RUN [MODEL_OR_RUN ...] [options] [--template.key value ...]"
    help_line = "tiny, a model directory, a run, or a hub name"
    parser.add_argument("models", metavar="MODEL_OR_RUN", nargs="+", help=help_line)
    parser.add_argument("--template", help="prompt template (default: the run's, else r1_zero)")
    parser.add_argument("--system", metavar="TEXT", help="a system message above the conversation")
    parser.add_argument("--temperature", type=nonnegative_float, default=0.7, help="0 is greedy (default: 0.7)")
    parser.add_argument("--top-p", type=share, default=1.0, help="only the likeliest tokens of this mass (default: 1)")
    parser.add_argument("--top-k", type=positive, help="only so many of the likeliest tokens (default: all)")
    parser.add_argument("--max-tokens", type=positive, help="longest reply (default: the run's, else 256)")
    parser.add_argument("--seed", type=seed, default=0, help="seed of the sampling (default: 0)")


def _add_studio_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", metavar="MODEL_OR_RUN", nargs="*", help="who speaks (default: the first run)")
    parser.add_argument("--host", default="127.0.0.1", help="where it listens (default: 127.0.0.1, this machine only)")
    parser.add_argument("--port", type=port, default=7860, help="default: 7860")
    parser.add_argument(
        "--token",
        nargs="?",
        const="",
        help="admit only who has it in the link; needed with --host (default: made up)",
    )
    parser.add_argument(
        "--sae", metavar="FOLDER", action="append", default=[], help="a dictionary to steer by, besides those of runs"
    )
    parser.add_argument("--browser", action="store_true", help="open it in the browser")


def _add_recipes_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("list", "show"), default="list")
    parser.add_argument("name", nargs="?", help="the recipe to show")


def _add_explain_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="such as grpo, correct, r1_zero, train; without it: all words")


def _add_data_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = DATA_EPILOG
    parser.usage = "posttrain data {list,show} [TASK] [options] [--task.key value ...]"
    parser.add_argument("action", nargs="?", choices=("list", "show"), default="list")
    parser.add_argument("name", metavar="TASK", nargs="?", help="a name that `posttrain data` lists")
    parser.add_argument("--n", type=positive, help="examples to read at most (default: all)")
    parser.add_argument("--model", help="count tokens of this model's tokenizer (default: characters)")
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="count examples that are longer than this")
    parser.add_argument("--examples", type=natural, default=3, help="examples to show in full (default: 3)")
    parser.add_argument("--seed", type=seed, default=0, help="which examples are shown (default: 0)")
    parser.add_argument(
        "--plot", type=new_place, metavar="FILE", nargs="?", const="", help="draw lengths and labels as a PNG"
    )


_ASKED = ("task", "template")
COMMANDS = {
    "demo": Command("watch a small model learn to reason, and read the report", "demo:run_demo", _add_demo_options),
    "train": Command("train by a recipe", "train:run_train", _add_train_options, ANY),
    "sweep": Command("rows x seeds as one question: methods, one key, reward models, the whole of RLHF",
                     "sweeps:run_sweep", keys=ANY, tables=True),
    "evaluate": Command("measure models on held-out tasks", "evaluate.command:run_evaluate", keys=(*_ASKED, "engine"),
                        models=("models", "against", "best_of", "judge"), tables=True),
    "generate": Command("sample answers from a model or a run", "generate:run_generate", _add_generate_options, _ASKED,
                        models=("model",)),
    "chat": Command("talk to a model, or to several at once", "chat.command:run_chat", _add_chat_options, ("template",),
                    models=("models",)),
    "serve": Command("let other programs ask a model over HTTP, as they ask OpenAI", "serve.command:run_serve",
                     keys=("template",), models=("model",)),
    "serve-command": Command("print the line that starts a vLLM server", "serve.command:run_serve_command",
                             "serve.command:add_line_options"),
    "quantize": Command("store a model in 8 or 4 bits, and say what that costs", "quantize:run_quantize", keys=_ASKED,
                        models=("model",), tables=True),
    "studio": Command("a page on this machine: talk to models, look into runs and rollouts", "chat.studio:run_studio",
                      _add_studio_options, models=("models",)),
    "recipes": Command("list the recipes that ship, or show one", "recipes:run_recipes", _add_recipes_options,
                       tables=True, runs=False),
    "explain": Command("explain a word or a section of a recipe: equation, options, recipes that use it",
                       "explain:run_explain", _add_explain_options, tables=True, runs=False),
    "data": Command("list the data sets, or show what is in one", "data:run_data", _add_data_options, ("task",),
                    tables=True, runs=False),
    "runs": Command("list, compare, prune, delete, export and resume runs", options="options:add_runs_options"),
    **{f"runs {name}": Command(text, f"runs.{body}", f"options:add_{name}_options", tables="show:" in body)
       for name, body, text in (
           ("list", "show:run_list", "every run: its state, primary metric and size"),
           ("show", "show:run_show", "one run or sweep in full"),
           ("compare", "show:run_compare", "results of several runs, and the keys in which their recipes differ"),
           ("prune", "change:run_prune", "delete checkpoints that are neither the best nor the last"),
           ("delete", "change:run_delete", "delete runs or sweeps, or a checkpoint of a run"),
           ("export", "change:run_export", "copy a run's model, recipe and results to a clean folder or archive"),
           ("resume", "change:run_resume", "go on with a run by its own recipe, from its newest checkpoint"),
           ("manage", "change:run_manage", "all of this, line by line in a terminal"),
       )},
    "activations": Command("record what layers of a model compute", "interpret.activations:run_activations",
                           keys=_ASKED, models=("model", "paired"), tables=True),
    "sae": Command("sparse autoencoders: train one, read its features, see what training changed", runs=False),
    "sae train": Command("train a sparse autoencoder on activations, by a recipe", "interpret.sae:run_sae_train",
                         "interpret.sae:add_train_options", ANY),
    "sae features": Command("what the features of a sparse autoencoder stand for, as one page",
                            "interpret.features:run_sae_features", keys=()),
    "sae diff": Command("what training changed: two models seen through the same features",
                        "interpret.sae:run_sae_diff", "interpret.sae:add_diff_options", ANY),
}  # fmt: skip


_RESUMABLE = ("train", "sae train")
_CONTINUING = ("sweep", "evaluate", "feedback", "activations", "sae diff", "runs resume")


def split_overrides(
    arguments: Sequence[str], own_options: Sequence[str], sections: Sequence[str]
) -> tuple[list[str], list[tuple[str, str]]]:
    """(arguments of the command itself, dotted keys with their values).

    Every ``--key value`` or ``--key=value`` whose key is no option of the command is an override.

    Raises:
        UsageError: a key without a value, or outside ``sections`` (ANY: the recipe will judge).
    """
    own: list[str] = []
    overrides: list[tuple[str, str]] = []
    keys: set[str] = set()
    tokens = iter(arguments)
    for token in tokens:
        name, equals, value = token.partition("=")
        if token == "--":
            own += [token, *tokens]
        elif not token.startswith("--") or name in own_options:
            own.append(token)
        else:
            _check_section(name, own_options, sections)
            following = value if equals else next(tokens, None)
            if following is None or (not equals and following.startswith("--")):
                raise UsageError(f"{shown(name)[1:-1]}: this key needs a value.{_suggest(name, own_options)}")
            if name in keys:
                raise UsageError(f"{shown(name)[1:-1]}: given twice; give it once")
            keys.add(name)
            overrides.append((name.removeprefix("--"), following))
    return own, overrides


def _check_section(name: str, own_options: Sequence[str], sections: Sequence[str]) -> None:
    if sections == ANY:
        return
    section, dot, _ = name.removeprefix("--").partition(".")
    if section not in sections or not dot:
        known = [o for o in own_options if o.startswith("--")] + [f"--{s}.KEY" for s in sections]
        raise UsageError(
            f"there is no option {shown(name)[1:-1]}.{_suggest(name, own_options)} Known: {', '.join(known)}"
        )


def _suggest(name: str, known: Sequence[str]) -> str:
    near = nearest(name, known)
    return f" Did you mean {near}?" if near else ""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The namespace of a command line; ``overrides`` holds the keys of the recipe.

    Raises:
        UsageError: an unknown command (with a suggestion) or a key without a value.
        SystemExit: after ``--help`` or ``--version``, and for what argparse refuses (code 2).
    """
    for argument in arguments:
        if any("\udc80" <= char <= "\udcff" for char in argument):  # bytes that are no UTF-8, as Python keeps them
            raise UsageError(f"{shown(argument)}: an argument must be text in UTF-8; a file of that name, rename")
    rest = list(arguments)
    overrides: list[tuple[str, str]] = []
    name, keys = "", None
    start = next((i for i, token in enumerate(rest) if not token.startswith("-")), None)
    parser, choices = build_parser("" if start is None else rest[start])
    if start is not None:
        command, known = rest[start], [name for name in choices if " " not in name]
        if command == "runs":
            rest = rest[: start + 1] + imported("options:complete_action")(rest[start + 1 :])
        actions = (f"posttrain {command}", " ".join(["posttrain", *rest[start : start + 2]]))
        options = (f"{action} {token.partition('=')[0]}" for action in actions for token in rest[start + 1 :])
        for gone in (*actions, *options):
            if gone in GONE:
                raise UsageError(f"`{gone}` was removed. Use {GONE[gone]}.")
        if command not in known:
            hint = _suggest(command, known)
            raise UsageError(f"there is no command {shown(command)}.{hint} Commands: {', '.join(known)}")
        name = " ".join(rest[start : start + 2])
        name, end = (name, start + 2) if name in choices else (command, start + 1)
        if (keys := COMMANDS[name].keys) is not None:
            own, overrides = split_overrides(rest[end:], list(choices[name]._option_string_actions), keys)
            rest = rest[:end] + own
    namespace, unknown = parser.parse_known_args(rest)
    if unknown:
        key, equals, value = unknown[0].partition("=")
        hint = f" Did you mean --{key} {value}?" if equals and keys is not None else ""
        if getattr(namespace, "action", None) == "resume" and key.startswith("--"):
            hint = " A run goes on by its own recipe, but for its length: --steps N."
        called = f"posttrain {name}".rstrip()
        raise UsageError(
            f"{shown(unknown[0])} is no option of `{called}`, or an argument too many.{hint} See `{called} --help`"
        )
    namespace.overrides = overrides
    if namespace.command is None:
        parser.print_help()
    return namespace


def refuse_absent_models(namespace: argparse.Namespace) -> None:
    """Refuse the first model or run that is nowhere.

    Raises:
        UsageError: with its name.
    """
    if getattr(namespace, "export_pt", None) or getattr(namespace, "import_pt", None):
        return  # there the first argument is a folder of activations, which says itself what it is not
    for option in COMMANDS[namespace.command].models:
        named = getattr(namespace, option)
        for name in [named] if isinstance(named, str) else named or ():
            importlib.import_module("posttrain.runs.paths").refuse_absent(namespace.runs_dir, name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    guard_output()
    os.environ.setdefault("PYTHON_COLORS", "0")  # of argparse and tracebacks, which would pass for text of strangers
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    if not sys.warnoptions:  # what other packages plan for their next release is not our user's business
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")
    arguments = list(sys.argv[1:] if argv is None else argv)
    show_traceback = "--traceback" in arguments or bool(os.environ.get("POSTTRAIN_TRACEBACK"))
    if "POSTTRAIN_LIFELINE" in os.environ:  # started by a sweep
        importlib.import_module("posttrain.runs.children").end_with_parent()
    try:
        if arguments[:1] == ["__follow"]:  # one of several processes that train a run
            return int(importlib.import_module("posttrain.runs.launch").follow())
        namespace = parse(arguments)
        if namespace.command is None:
            return 0
        declare_from_command_line(
            arguments,
            getattr(namespace, "allow_code", ()),
            trust_remote_code=getattr(namespace, "trust_remote_code", False),
        )
        command = namespace.command
        refuse_absent_models(namespace)
        body = COMMANDS[command].body or COMMANDS[f"{command} {namespace.action}"].body
        assert body is not None, "actions have bodies"
        if (form := getattr(namespace, "format", "table")) == "table":
            return int(imported(body)(namespace))
        with imported("console:tables_as")(form):
            return int(imported(body)(namespace))
    except PosttrainError as error:
        if show_traceback:
            raise
        print(f"posttrain: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in NO_SUCH_PLACE or show_traceback:
            raise
        print(f"posttrain: {shown(str(error.filename))}: {error.strerror}; give another place or name", file=sys.stderr)
        return UsageError.exit_code
    except KeyboardInterrupt:
        print(f"\nposttrain: interrupted{_how_to_go_on(arguments)}", file=sys.stderr)
        return INTERRUPTED


def _how_to_go_on(arguments: Sequence[str]) -> str:
    """What continues a command that was interrupted; nothing of one that begins anew or has done nothing yet."""
    words = [argument for argument in arguments if not argument.startswith("-")]
    command = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else "".join(words[:1])
    if "--dry-run" in arguments:
        return ""
    if command in _RESUMABLE:
        return f"; continue with the same command{'' if '--resume' in arguments else ' and --resume'}"
    return "; continue with the same command" if command in _CONTINUING else ""


if __name__ == "__main__":
    sys.exit(main())
