"""Command line: ``posttrain demo | train | sweep | evaluate | generate | data | recipes | explain | runs``.

Imports only the standard library, keeping ``posttrain --help`` instant. Command bodies live in ``commands``, imported
on use; the same goes for options defined in separate modules.

Options unknown to a command are recipe keys (``--train.lr 1e-5``), validated later. User mistakes print a single
message on stderr and exit 2, failed work exits 1, Ctrl-C exits 130. Tracebacks appear only given ``--traceback`` or
the environment variable ``POSTTRAIN_TRACEBACK``.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import itertools
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

from posttrain import __version__
from posttrain.activity import heartbeat, is_redirected
from posttrain.commands.options import (
    ACCEPT_HELP,
    ALLOW_CODE_OPTIONS,
    MAX_TOKENS,
    MODEL,
    RULES,
    RUNS,
    STEERING,
    TEMPLATE,
    CommandOptions,
    Parser,
    address,
    natural,
    new_place,
    nonnegative_float,
    option,
    positive,
    proportion,
    runs_dir,
    seed_of,
    shown,
)
from posttrain.commands.typed import (
    ANY,
    complete_action,
    refuse_action,
    refuse_command,
    spelled,
    split_overrides,
    with_own_template_option,
)
from posttrain.errors import GONE, INTERRUPTED, PosttrainError, UsageError
from posttrain.other_names import answer_other_name
from posttrain.untrusted import declare_from_command_line, guard_output

# File system errors caused by impossible paths: too long, symlink loops, files used as folders.
NO_SUCH_PLACE = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)

DESCRIPTION = "The laboratory for language-model post-training: pure components, one loop."
EPILOG = """\
start here:
  posttrain demo                              watch a small model learn to reason, in minutes
  posttrain recipes                           list trainable recipes
  posttrain explain grpo                      show a component's equation and options
  posttrain train tiny/grpo --train.lr 6e-5   train; recipe keys are options
  posttrain runs                              list trained runs
"""
TRAIN_EPILOG = """\
recipe keys are options:
  posttrain train tiny/grpo --train.lr 6e-5 --rollout.group_size 16 --objective.clip_high 0.28
  posttrain train grpo-gsm8k --model.name tiny --task.path data/gsm8k_train.jsonl.gz
  posttrain train my-recipe.yaml --dry-run
"""
RECIPES_EPILOG = """\
JSON schema for recipe completion and checking in editors:
  posttrain recipes schema > recipe.schema.json
  # yaml-language-server: $schema=recipe.schema.json     (first line in a recipe)
"""
DATA_EPILOG = """\
task options follow the task name:
  posttrain data show stories --limit 2000 --model tiny --plot
  posttrain data show gsm8k --task.path data/gsm8k_test.jsonl.gz --task.split test --max-tokens 512
"""

RUNS_EPILOG = """\
runs are named by folder under --runs-dir; sweep runs like sweep-ppo/cells/ppo-seed0:
  posttrain runs --state finished --sort metric
  posttrain runs compare tiny-grpo tiny-grpo-2
  posttrain runs prune --all --keep best,last --dry-run
  posttrain runs delete 'test-*'
  posttrain runs delete tiny-grpo --step 100
  posttrain runs export tiny-grpo --to exported/tiny-grpo
"""

# Spin count for waiting torch threads, read when torch is imported. Under the default 300,000, if another process is
# computing, two threads run 3 to 4 times slower than one; using this value, 1.4 times.
SPINS = "3000"
_NO_TEXT = re.compile("[\0\ud800-\udfff]")  # Python maps non-UTF-8 bytes to lone surrogates


@dataclass(frozen=True)
class Command:
    """A command or subcommand.

    ``body``: implementing module in ``commands`` plus function taking the namespace; None: subcommands implement it.
    ``options``: where options are defined, unless in ``_OPTIONS``; defaults to ``OPTIONS`` from the body's module.
    ``keys``: recipe sections accepted as options (ANY: all; None: none). ``models``: options naming models or runs, so
    nonexistent names are refused before importing libraries. ``tables``: accepts ``--format``. ``runs``: opens runs.
    ``beats``: stream for heartbeats, chosen where progress appears, not results; "" if the command waits for a person.
    """

    help: str
    body: str | None = None
    keys: tuple[str, ...] | None = None
    models: tuple[str, ...] = ()
    tables: bool = False
    runs: bool = True
    options: str | None = None
    beats: str = "stderr"


def imported(place: str) -> Any:
    """Import ``module:name`` from ``posttrain.commands``."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"posttrain.commands.{module}"), name)


def build_parser(wanted: str | None = None) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Build the main parser, plus parsers by command name (including subcommands such as ``sae train``).

    ``wanted``: only this command gets options (``""``: none). By default all do.
    """
    common = Parser(add_help=False)
    common.add_argument(
        "--traceback", action="store_true", default=argparse.SUPPRESS, help="show where in the code an error arose"
    )
    form = Parser(add_help=False)
    form.add_argument("--format", choices=("table", "json"), default="table", help="of the tables (default: table)")
    form.add_argument("--json", action="store_const", const="json", dest="format", help="the same as --format json")
    how: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = Parser("posttrain", description=DESCRIPTION, epilog=EPILOG, parents=[common], **how)
    parser.add_argument("--version", action="version", version=f"posttrain {__version__}")
    groups: dict[str, Any] = {"": parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")}
    made: dict[str, argparse.ArgumentParser] = {}
    for name, command in COMMANDS.items():
        group, _, own = name.rpartition(" ")
        parents = [common]
        if command.tables:
            parents.append(form)
        if command.runs:
            default = "runs"
            if group and COMMANDS[group].runs:  # subcommands accept a runs directory if their parent lacks one
                default = argparse.SUPPRESS
            of_runs = Parser(add_help=False)
            CommandOptions(runs_dir(default), *ALLOW_CODE_OPTIONS).add_to(of_runs)
            parents.append(of_runs)
        description = f"{command.help[0].upper()}{command.help[1:]}."
        made[name] = groups[group].add_parser(own, help=command.help, description=description, parents=parents, **how)
        if command.body is None:
            title = "actions"
            if name == "runs":
                title = "actions (without one: list)"
            groups[name] = made[name].add_subparsers(dest="action", metavar="ACTION", title=title, required=True)
        if wanted not in (None, name.partition(" ")[0]):
            continue
        options = _options_of(name, command)
        if options is not None:
            options.add_to(made[name])
    return parser, made


def _options_of(name: str, command: Command) -> CommandOptions | None:
    """Find a command's options; None if its subcommands define them."""
    if name in _OPTIONS:
        return _OPTIONS[name]
    if command.options is not None:
        place = command.options
    elif command.body is not None:
        place = f"{command.body.partition(':')[0]}:OPTIONS"
    else:
        return None
    options: CommandOptions = imported(place)
    return options


_QUIET = option("--quiet", action="store_true", help="no progress, only notices and the result")
_TRUNCATED = (
    option("--top-p", type=proportion, default=1.0, help="nucleus sampling mass (default: 1)"),
    option("--top-k", type=positive, help="sample only from the N likeliest tokens (default: all)"),
)
_LISTED = option("action", nargs="?", choices=("list", "show"), default="list")
_OPTIONS = {
    "demo": CommandOptions(
        option(
            "--story", choices=("reasoning", "tools", "smollm2"), default="reasoning",
            help="story: learning to write out steps, or to use a calculator (default: reasoning)",
        ),
        seed_of("seed of both training runs"),
        option("--quiet", action="store_true", help="no live progress"),
    ),
    "train": CommandOptions(
        option("recipe", metavar="RECIPE", help="recipe name (see `posttrain recipes`) or YAML file"),
        option("--run", metavar="NAME", help="name of the run directory (default: the recipe's name)"),
        option("--resume", action="store_true", help="continue the run from its newest checkpoint"),
        option("--accept-changes", action="store_true", help=ACCEPT_HELP),
        option("--dry-run", action="store_true", help="check and print the resolved recipe; train nothing"),
        option("--memory", action="store_true", help="with --dry-run: estimate memory by part"),
        option("--gpu-memory", type=positive, metavar="GIB", help="with --memory: GPU size in GiB to plan for"),
        _QUIET,
        usage="posttrain train RECIPE [options] [--section.key value ...]",
        epilog=TRAIN_EPILOG,
    ),
    "generate": CommandOptions(
        MODEL,
        option("prompt", metavar="PROMPT", nargs="?", help="question (default: a task example)"),
        option("--task", help="task providing examples (default: the run's task, stories for tiny)"),
        TEMPLATE,
        option("--samples", type=positive, default=1, metavar="N", help="answers per prompt (default: 1)"),
        option("--limit", type=positive, metavar="N", help="task rows to answer (default: 1)"),
        MAX_TOKENS,
        option("--temperature", type=nonnegative_float, default=1.0, help="0 is greedy (default: 1)"),
        *_TRUNCATED,
        *RULES,
        seed_of("seed for sampling and choosing examples"),
        usage="posttrain generate MODEL_OR_RUN [PROMPT] [options] [--task.key value ...] [--template.key ...]",
        groups=STEERING,
    ),
    "chat": CommandOptions(
        ("models", MODEL[1] | {"nargs": "+"}),
        TEMPLATE,
        option("--system", metavar="TEXT", help="system message"),
        option("--tools", metavar="LIST", help="tools to offer, as in recipes (default: those of the run)"),
        option("--no-tools", action="store_true", help="offer no tools"),
        option("--temperature", type=nonnegative_float, default=0.7, help="0 is greedy (default: 0.7)"),
        *_TRUNCATED,
        MAX_TOKENS,
        seed_of(),
        usage="posttrain chat MODEL_OR_RUN [MODEL_OR_RUN ...] [options] [--template.key value ...]",
    ),
    "studio": CommandOptions(
        option("models", metavar="MODEL_OR_RUN", nargs="*", help="models to talk to (default: the first run)"),
        *address(7860),
        option(
            "--token", nargs="?", const="",
            help="require this login token; mandatory with --host (no value: generated)",
        ),
        option(
            "--sae", metavar="FOLDER", action="append", default=[],
            help="additional steering dictionary, besides dictionaries in runs",
        ),
        option("--browser", action="store_true", help="open it in the browser"),
    ),
    "recipes": CommandOptions(
        option("action", nargs="?", choices=("list", "show", "schema"), default="list"),
        option("name", nargs="?", help="the recipe to show"),
        epilog=RECIPES_EPILOG,
    ),
    "explain": CommandOptions(
        option("name", nargs="*", help="for example grpo, correct, KL penalty, train (default: list all names)")
    ),
    "data": CommandOptions(
        _LISTED,
        option("name", metavar="TASK", nargs="?", help="task name (see `posttrain data`)"),
        option("--limit", type=positive, metavar="N", help="maximum rows to read (default: all)"),
        option("--model", help="measure length by this model's tokenizer (default: characters)"),
        option("--max-tokens", type=positive, metavar="N", help="report how many examples exceed this length"),
        option("--examples", type=natural, default=3, help="examples to show in full (default: 3)"),
        seed_of("seed choosing examples"),
        option("--plot", type=new_place, metavar="FILE", nargs="?", const="", help="draw lengths and labels as a PNG"),
        usage="posttrain data {list,show} [TASK] [options] [--task.key value ...]",
        epilog=DATA_EPILOG,
    ),
    "runs": CommandOptions(epilog=RUNS_EPILOG),
    **{f"runs {name}": options for name, options in RUNS.items()},
}  # fmt: skip
_INPUT = ("task", "template")
_RUN_BODIES = {"export": "sharing.export:run_export"}
_RUN_BEATS = {"resume": "stdout", "manage": ""}
COMMANDS = {
    "demo": Command("watch a small model learn to reason, and read the report", "demo:run_demo", beats="stdout"),
    "new": Command("create a project: data rows, a reward, working recipes", "new:run_new", runs=False),
    "train": Command("train by a recipe", "train:run_train", keys=ANY, beats="stdout"),
    "sweep": Command("rows x seeds as one question: methods, one key, reward models, the whole of RLHF",
                     "sweeps:run_sweep", keys=ANY, tables=True, beats="stdout"),
    "what-if": Command("replay a run exactly with one change, beside the unchanged original",
                       "what_if:run_what_if", tables=True),
    "doctor": Command("diagnose a run from its records: faults, severity, false alarms",
                      "doctor:run_doctor", tables=True),
    "evaluate": Command("measure models on held-out tasks", "evaluate.command:run_evaluate", keys=(*_INPUT, "engine"),
                        models=("models", "against", "best_of", "judge"), tables=True, beats="stdout"),
    "generate": Command("sample answers from a model or run", "generate:run_generate", keys=_INPUT,
                        models=("model",)),
    "chat": Command("talk to one or several models", "chat.conversation:run_chat", keys=("template",),
                    models=("models",), beats=""),
    "serve": Command("serve a model over HTTP with an OpenAI-compatible API", "serve.command:run_serve",
                     keys=("template",), models=("model",), beats=""),
    "serve-command": Command("print the line that starts a vLLM server", "serve.command:run_serve_command",
                             options="serve.command:LINE_OPTIONS"),
    "quantize": Command("store a model in 8 or 4 bits, and say what that costs", "models.quantize:run_quantize",
                        keys=_INPUT, models=("model",), tables=True),
    "models": Command("list downloadable models, or fetch one", "models.listing:run_models",
                      tables=True, runs=False),
    "studio": Command("local web page: talk to models, inspect runs and rollouts", "chat.studio:run_studio",
                      models=("models",), beats=""),
    "recipes": Command("list everything that can be run, or show a recipe", "recipes:run_recipes",
                       tables=True, runs=False),
    "env": Command("versions, hardware and settings of this machine for a bug report, without secrets",
                   "sharing.environment:run_env", tables=True, runs=False),
    "completion": Command("shell completion for bash, zsh and fish: commands, options, keys, names",
                          "sharing.completion:run_completion", runs=False),
    "explain": Command("explain a component or a section of a recipe: equation, options, recipes that use it",
                       "explain:run_explain", tables=True, runs=False),
    "exercise": Command("implement a post-training function, then compare it with the reference",
                        "exercises.command:run_exercise", tables=True, runs=False),
    "conformance": Command("check the losses, advantages, scores and rows of anybody's trainer",
                           "conformance:run_conformance", runs=False),
    "data": Command("list data sets, or inspect one", "data:run_data", keys=("task",),
                    tables=True, runs=False),
    "runs": Command("list, compare, prune, delete, export and resume runs"),
    **{f"runs {name}": Command(text, _RUN_BODIES.get(name, f"runs:run_{name}"),
                               tables=name in ("list", "show", "compare"),
                               beats=_RUN_BEATS.get(name, "stderr"))
       for name, text in (
           ("list", "every run: its state, primary metric and size"),
           ("show", "show a run or sweep in full"),
           ("compare", "results of several runs, and the keys in which their recipes differ"),
           ("prune", "delete checkpoints except best and last"),
           ("delete", "delete runs, sweeps, or single checkpoints"),
           ("export", "copy a run's model, recipe and results to an empty folder"),
           ("resume", "resume a run from its newest checkpoint"),
           ("manage", "manage runs interactively in a terminal"),
       )},
    "activations": Command("record model layer activations", "interpret.activations:run_activations",
                           keys=_INPUT, models=("model", "paired")),
    "sae": Command("sparse autoencoders: train one, read its features, see what training changed", runs=False),
    "sae train": Command("train a sparse autoencoder on activations, by a recipe", "interpret.sae:run_sae_train",
                         options="interpret.sae:TRAIN_OPTIONS", keys=ANY, beats="stdout"),
    "sae features": Command("explain sparse autoencoder features on a single page",
                            "interpret.sae:run_sae_features", options="interpret.sae:FEATURES_OPTIONS", keys=()),
    "sae diff": Command("show what training changed, comparing two models through shared features",
                        "interpret.sae:run_sae_diff", options="interpret.sae:DIFF_OPTIONS", keys=ANY, beats="stdout"),
}  # fmt: skip


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; ``overrides`` collects recipe keys.

    Raises:
        UsageError: an unknown command (with a suggestion) or a key without a value.
        SystemExit: after ``--help`` or ``--version``, and if argparse refuses (code 2).
    """
    for argument in arguments:
        if _NO_TEXT.search(argument):
            raise UsageError(
                f"{shown(argument)}: an argument must be text in UTF-8, without a character NUL. Rename a file that is "
                "called so"
            )
    before = list(itertools.takewhile(lambda argument: argument.startswith("-"), arguments))
    if len(before) == len(arguments):
        parser, _ = build_parser("")
        namespace, unknown = parser.parse_known_args(before)
        if unknown:
            _refuse_unknown(unknown[0], "", ())
        namespace.overrides = []
        if namespace.command is None:
            parser.print_help()
        return namespace
    command = arguments[len(before)]
    parser, choices = build_parser(command)
    words = _in_our_spelling(command, arguments[len(before) + 1 :], choices)
    _refuse_gone(command, words)
    if command not in choices:
        refuse_command(command, list(choices))
    actions = [name.partition(" ")[2] for name in choices if name.startswith(f"{command} ")]
    if command in ("recipes", "data"):
        actions = ["list", "show"]
    if command == "recipes":
        actions.append("schema")
    if actions:
        refuse_action(command, words, actions)
    name = command
    called = [command]
    if words and f"{command} {words[0]}" in choices:
        called.append(words.pop(0))
        name = " ".join(called)
    overrides: list[tuple[str, str]] = []
    keys: Sequence[str] = ()
    if COMMANDS[name].body is not None:
        keys = COMMANDS[name].keys or ()
        words, overrides = split_overrides(words, choices[name], keys)
    namespace, unknown = parser.parse_known_args([*before, *called, *words])
    if unknown:
        _refuse_unknown(unknown[0], name, keys)
    namespace.overrides = overrides
    return namespace


def _in_our_spelling(command: str, words: Sequence[str], choices: Mapping[str, argparse.ArgumentParser]) -> list[str]:
    """Normalize a command's words: option spellings, implied subcommands."""
    options: set[str] = set()
    for name, parser in choices.items():
        if name.partition(" ")[0] == command:
            options |= parser._option_string_actions.keys()
    words = spelled(words, options)
    if any("template" in word for word in words):
        words = with_own_template_option(words, options, trains=command == "train")
    if command == "runs":
        words = complete_action(words)
    return words


def _refuse_gone(command: str, words: Sequence[str]) -> None:
    """Refuse removed commands, subcommands and options, naming their replacement."""
    called = [f"posttrain {command}"]
    if words:
        called.append(f"posttrain {command} {words[0]}")
    typed = list(called)
    for name in called:
        typed += [f"{name} {word.partition('=')[0]}" for word in words]
    for gone in typed:
        if gone in GONE:
            raise UsageError(f"`{gone}` was removed. Use {GONE[gone]}.")


def _refuse_unknown(word: str, name: str, keys: Sequence[str]) -> NoReturn:
    """Refuse words argparse did not recognize."""
    key, equals, value = word.lstrip("+").partition("=")
    hint = ""
    if name == "generate":
        hint = " Put texts containing spaces into quotes."
    if equals and keys:  # as verl and Hydra write it
        hint = f" Did you mean --{key} {value}?"
        if keys == ANY:
            hint = answer_other_name(key) or hint
    called = f"posttrain {name}".rstrip()
    raise UsageError(
        f"{shown(word)} is not an option for `{called}`, or an extra argument.{hint} See `{called} --help`"
    )


def run_command(arguments: Sequence[str]) -> int:
    """Parse a command line, run the command, return its exit code."""
    namespace = parse(arguments)
    if namespace.command is None:
        return 0
    declare_from_command_line(
        arguments,
        getattr(namespace, "allow_code", ()),
        trust_remote_code=getattr(namespace, "trust_remote_code", False),
    )
    command = COMMANDS[namespace.command]
    if namespace.command == "completion":
        namespace.command_line = imported("sharing.completion:CommandLine")(COMMANDS, build_parser)
    _refuse_absent_models(command, namespace)
    if command.body is None:
        command = COMMANDS[f"{namespace.command} {namespace.action}"]
    assert command.body is not None, "actions have bodies"
    tables: AbstractContextManager[None] = nullcontext()
    if getattr(namespace, "format", "table") != "table":
        tables = importlib.import_module("posttrain.terminal.console").tables_as_json()
    with tables, _heartbeat_of(command, namespace):
        return int(imported(command.body)(namespace))


def _refuse_absent_models(command: Command, namespace: argparse.Namespace) -> None:
    """Refuse nonexistent models or runs before importing libraries."""
    if getattr(namespace, "export_pt", None) or getattr(namespace, "import_pt", None):
        return  # here the first argument is an activations folder
    for argument in command.models:
        named = getattr(namespace, argument)
        if named is None:
            continue
        if isinstance(named, str):
            named = [named]
        refuse_absent = importlib.import_module("posttrain.runs.paths").refuse_absent
        for name in named:
            refuse_absent(namespace.runs_dir, name, may_be_file=argument == "judge")


def _heartbeat_of(command: Command, namespace: argparse.Namespace) -> AbstractContextManager[None]:
    """Build a heartbeat context reporting on long silent work when output is redirected."""
    is_printed = getattr(namespace, "dry_run", False)
    stream = sys.stdout
    if command.beats == "stderr" or is_printed:
        stream = sys.stderr
    is_first = os.environ.get("RANK", "0") == "0"  # of several processes that torchrun has started
    is_on = bool(command.beats) and not getattr(namespace, "quiet", False) and is_redirected() and is_first
    return heartbeat(f"posttrain {namespace.command}", stream, is_on=is_on)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a single command; return its exit code."""
    guard_output()
    os.environ.setdefault("PYTHON_COLORS", "0")  # of argparse and tracebacks, which would pass for foreign text
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    if not sys.warnoptions:  # deprecation notices from other packages
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")
    arguments = list(sys.argv[1:] if argv is None else argv)
    show_traceback = "--traceback" in arguments or bool(os.environ.get("POSTTRAIN_TRACEBACK"))
    if "POSTTRAIN_LIFELINE" in os.environ:  # started by a sweep
        importlib.import_module("posttrain.runs.children").end_with_parent()
    try:
        if arguments[:1] == ["__follow"]:  # worker process in a multi-process run
            return int(importlib.import_module("posttrain.runs.processes").follow())
        if arguments[:1] == ["__futures"]:  # one of several processes that play futures
            return int(imported("what_if:play_rest")(arguments[1:]))
        return run_command(arguments)
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
        print(
            f"posttrain: {shown(str(error.filename))}: {error.strerror}; choose another path or name", file=sys.stderr
        )
        return UsageError.exit_code
    except KeyboardInterrupt:
        is_resumable = arguments[:1] == ["train"] or arguments[:2] == ["sae", "train"]
        advice = ""
        if is_resumable:
            advice = "; continue with the same command and --resume"
        elif arguments[:1] in (["evaluate"], ["sweep"]):
            advice = "; continue with the same command"
        print(f"\nposttrain: interrupted{advice}", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
