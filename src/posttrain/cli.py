"""The command line: ``posttrain demo | train | sweep | evaluate | generate | data | recipes | explain | runs``.

Only the standard library is imported here, so that ``posttrain --help`` answers at once. The body of each command lives
in ``commands`` and is imported when it runs, and so are options that stand in a module of their own.

An option that a command does not know is a key of the recipe (``--train.lr 1e-5``), checked by the recipe. A user's
mistake ends in one message on stderr and exit code 2, a failure of the work in exit code 1, Ctrl-C in 130; a traceback
is shown only with ``--traceback`` or when the environment variable ``POSTTRAIN_TRACEBACK`` is set.
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
from typing import Any, NoReturn, cast

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

# Errors of a file system about a path that cannot be: too long, a circle of links, a file in the place of a folder.
NO_SUCH_PLACE = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)

DESCRIPTION = "The laboratory for language-model post-training: pure components, one loop."
EPILOG = """\
start here:
  posttrain demo                              watch a small model learn to reason, in minutes
  posttrain recipes                           what can be trained
  posttrain explain grpo                      a component: its equation, its options
  posttrain train tiny/grpo --train.lr 6e-5   train; any key of the recipe is an option
  posttrain runs                              what has been trained
"""
TRAIN_EPILOG = """\
any key of the recipe is an option:
  posttrain train tiny/grpo --train.lr 6e-5 --rollout.group_size 16 --objective.clip_high 0.28
  posttrain train grpo-gsm8k --model.name tiny --task.path data/gsm8k_train.jsonl.gz
  posttrain train my-recipe.yaml --dry-run
"""
RECIPES_EPILOG = """\
a schema by which editors complete and check recipes:
  posttrain recipes schema > recipe.schema.json
  # yaml-language-server: $schema=recipe.schema.json     (the first line of a recipe)
"""
DATA_EPILOG = """\
options of the task follow its name:
  posttrain data show stories --limit 2000 --model tiny --plot
  posttrain data show gsm8k --task.path data/gsm8k_test.jsonl.gz --task.split test --max-tokens 512
"""

RUNS_EPILOG = """\
a run is named by its folder under --runs-dir; one of a sweep as sweep-ppo/cells/ppo-seed0:
  posttrain runs --state finished --sort metric
  posttrain runs compare tiny-grpo tiny-grpo-2
  posttrain runs prune --all --keep best,last --dry-run
  posttrain runs delete 'test-*'
  posttrain runs delete tiny-grpo --step 100
  posttrain runs export tiny-grpo --to exported/tiny-grpo
"""

# How often a waiting thread of torch's looks for work before it sleeps: read when torch is imported. With the library's
# 300,000, two threads next to another computing process are 3 to 4 times as slow as one; with this 1.4 times.
SPINS = "3000"
_NO_TEXT = re.compile("[\0\ud800-\udfff]")  # bytes that are no UTF-8 are lone surrogates in Python


@dataclass(frozen=True)
class Command:
    """A command, or an action of one.

    ``body``: its module in ``commands`` and the function that takes the namespace; None: its actions have them.
    ``options``: the place of its options, if they are not in ``_OPTIONS``; by default ``OPTIONS`` of the body's module.
    ``keys``: sections whose keys are options, too (ANY: all of a recipe; None: none). ``models``: options that
    name models or runs: a name that is nowhere is refused before a library is imported. ``tables``: it takes
    ``--format``. ``runs``: it opens runs. ``beats``: where a long silence is broken: where its progress is shown, and
    not where its result is; "" for what waits for a person.
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
    """Return what ``module:name`` names in ``posttrain.commands``."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"posttrain.commands.{module}"), name)


def build_parser(wanted: str | None = None) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of the whole command line, and those of its commands (and of actions, ``sae train``) by name.

    ``wanted``: the one command that gets its options (``""``: none does); by default every command.
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
            if group and COMMANDS[group].runs:  # an action says where runs are if its command does not
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
    """Return the options of a command; None of one whose actions have them."""
    if name in _OPTIONS:
        return _OPTIONS[name]
    if command.options is not None:
        return cast(CommandOptions, imported(command.options))
    if command.body is None:
        return None
    module = command.body.partition(":")[0]
    return cast(CommandOptions, imported(f"{module}:OPTIONS"))


_QUIET = option("--quiet", action="store_true", help="no progress, only notices and the result")
_TRUNCATED = (
    option("--top-p", type=proportion, default=1.0, help="only the likeliest tokens of this mass (default: 1)"),
    option("--top-k", type=positive, help="only so many of the likeliest tokens (default: all)"),
)
_LISTED = option("action", nargs="?", choices=("list", "show"), default="list")
_OPTIONS = {
    "demo": CommandOptions(
        option(
            "--story", choices=("reasoning", "tools", "smollm2"), default="reasoning",
            help="what is learnt: that writing the steps pays, or when a calculator does (default: reasoning)",
        ),
        seed_of("seed of both training runs"),
        option("--quiet", action="store_true", help="no live progress"),
    ),
    "train": CommandOptions(
        option("recipe", metavar="RECIPE", help="a name that `posttrain recipes` lists, or a YAML file"),
        option("--run", metavar="NAME", help="name of the run directory (default: the recipe's name)"),
        option("--resume", action="store_true", help="continue the run from its newest checkpoint"),
        option("--accept-changes", action="store_true", help=ACCEPT_HELP),
        option("--dry-run", action="store_true", help="check and print the resolved recipe; train nothing"),
        option("--memory", action="store_true", help="with --dry-run: say the memory that it takes, by part"),
        option("--gpu-memory", type=positive, metavar="GIB", help="with --memory: plan for a GPU of so many GiB"),
        _QUIET,
        usage="posttrain train RECIPE [options] [--section.key value ...]",
        epilog=TRAIN_EPILOG,
    ),
    "generate": CommandOptions(
        MODEL,
        option("prompt", metavar="PROMPT", nargs="?", help="a question (default: an example of the task)"),
        option("--task", help="whose example is asked (default: the run's, and stories for tiny)"),
        TEMPLATE,
        option("--samples", type=positive, default=1, metavar="N", help="answers to each prompt (default: 1)"),
        option("--limit", type=positive, metavar="N", help="rows of the task that are answered (default: 1)"),
        MAX_TOKENS,
        option("--temperature", type=nonnegative_float, default=1.0, help="0 is greedy (default: 1)"),
        *_TRUNCATED,
        *RULES,
        seed_of("seed of the sampling, and which example"),
        usage="posttrain generate MODEL_OR_RUN [PROMPT] [options] [--task.key value ...] [--template.key ...]",
        groups=STEERING,
    ),
    "chat": CommandOptions(
        ("models", MODEL[1] | {"nargs": "+"}),
        TEMPLATE,
        option("--system", metavar="TEXT", help="a system message above the conversation"),
        option("--temperature", type=nonnegative_float, default=0.7, help="0 is greedy (default: 0.7)"),
        *_TRUNCATED,
        MAX_TOKENS,
        seed_of(),
        usage="posttrain chat MODEL_OR_RUN [MODEL_OR_RUN ...] [options] [--template.key value ...]",
    ),
    "studio": CommandOptions(
        option("models", metavar="MODEL_OR_RUN", nargs="*", help="who speaks (default: the first run)"),
        *address(7860),
        option(
            "--token", nargs="?", const="",
            help="admit only who logs in with it; needed with --host (without a value: made up)",
        ),
        option(
            "--sae", metavar="FOLDER", action="append", default=[],
            help="a dictionary to steer by, besides those of runs",
        ),
        option("--browser", action="store_true", help="open it in the browser"),
    ),
    "recipes": CommandOptions(
        option("action", nargs="?", choices=("list", "show", "schema"), default="list"),
        option("name", nargs="?", help="the recipe to show"),
        epilog=RECIPES_EPILOG,
    ),
    "explain": CommandOptions(
        option("name", nargs="*", help="such as grpo, correct, KL penalty, train; without it: all names")
    ),
    "data": CommandOptions(
        _LISTED,
        option("name", metavar="TASK", nargs="?", help="a name that `posttrain data` lists"),
        option("--limit", type=positive, metavar="N", help="rows to read at most (default: all)"),
        option("--model", help="count tokens of this model's tokenizer (default: characters)"),
        option("--max-tokens", type=positive, metavar="N", help="count examples that are longer than this"),
        option("--examples", type=natural, default=3, help="examples to show in full (default: 3)"),
        seed_of("which examples are shown"),
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
    "new": Command("write a project of your own: rows, a reward, recipes that run", "new:run_new", runs=False),
    "train": Command("train by a recipe", "train:run_train", keys=ANY, beats="stdout"),
    "sweep": Command("rows x seeds as one question: methods, one key, reward models, the whole of RLHF",
                     "sweeps:run_sweep", keys=ANY, tables=True, beats="stdout"),
    "what-if": Command("exact futures of a run with one thing changed, next to the unchanged one",
                       "what_if:run_what_if", tables=True),
    "doctor": Command("what is wrong with a run, from its records: faults, levels, and what only looks wrong",
                      "doctor:run_doctor", tables=True),
    "evaluate": Command("measure models on held-out tasks", "evaluate.command:run_evaluate", keys=(*_INPUT, "engine"),
                        models=("models", "against", "best_of", "judge"), tables=True, beats="stdout"),
    "generate": Command("sample answers from a model or a run", "generate:run_generate", keys=_INPUT,
                        models=("model",)),
    "chat": Command("talk to a model, or to several at once", "chat.conversation:run_chat", keys=("template",),
                    models=("models",), beats=""),
    "serve": Command("let other programs ask a model over HTTP, as they ask OpenAI", "serve.command:run_serve",
                     keys=("template",), models=("model",), beats=""),
    "serve-command": Command("print the line that starts a vLLM server", "serve.command:run_serve_command",
                             options="serve.command:LINE_OPTIONS"),
    "quantize": Command("store a model in 8 or 4 bits, and say what that costs", "models.quantize:run_quantize",
                        keys=_INPUT, models=("model",), tables=True),
    "models": Command("list the models that can be had by name, or fetch one", "models.listing:run_models",
                      tables=True, runs=False),
    "studio": Command("a page on this machine: talk to models, look into runs and rollouts", "chat.studio:run_studio",
                      models=("models",), beats=""),
    "recipes": Command("list everything that can be run, or show a recipe", "recipes:run_recipes",
                       tables=True, runs=False),
    "env": Command("versions, hardware and settings of this machine for a bug report, without secrets",
                   "sharing.environment:run_env", tables=True, runs=False),
    "completion": Command("completion of commands, options, keys and names in bash, zsh and fish",
                          "sharing.completion:run_completion", runs=False),
    "explain": Command("explain a component or a section of a recipe: equation, options, recipes that use it",
                       "explain:run_explain", tables=True, runs=False),
    "exercise": Command("write a function of post-training, and compare it with the library's own",
                        "exercises.command:run_exercise", tables=True, runs=False),
    "conformance": Command("check the losses, advantages, scores and rows of anybody's trainer",
                           "conformance:run_conformance", runs=False),
    "data": Command("list the data sets, or show what is in one", "data:run_data", keys=("task",),
                    tables=True, runs=False),
    "runs": Command("list, compare, prune, delete, export and resume runs"),
    **{f"runs {name}": Command(text, _RUN_BODIES.get(name, f"runs:run_{name}"),
                               tables=name in ("list", "show", "compare"),
                               beats=_RUN_BEATS.get(name, "stderr"))
       for name, text in (
           ("list", "every run: its state, primary metric and size"),
           ("show", "one run or sweep in full"),
           ("compare", "results of several runs, and the keys in which their recipes differ"),
           ("prune", "delete checkpoints that are neither the best nor the last"),
           ("delete", "delete runs or sweeps, or a checkpoint of a run"),
           ("export", "copy a run's model, recipe and results to a clean folder"),
           ("resume", "go on with a run by its own recipe, from its newest checkpoint"),
           ("manage", "all of this, line by line in a terminal"),
       )},
    "activations": Command("record what layers of a model compute", "interpret.activations:run_activations",
                           keys=_INPUT, models=("model", "paired")),
    "sae": Command("sparse autoencoders: train one, read its features, see what training changed", runs=False),
    "sae train": Command("train a sparse autoencoder on activations, by a recipe", "interpret.sae:run_sae_train",
                         options="interpret.sae:TRAIN_OPTIONS", keys=ANY, beats="stdout"),
    "sae features": Command("what the features of a sparse autoencoder stand for, as one page",
                            "interpret.sae:run_sae_features", options="interpret.sae:FEATURES_OPTIONS", keys=()),
    "sae diff": Command("what training changed: two models seen through the same features",
                        "interpret.sae:run_sae_diff", options="interpret.sae:DIFF_OPTIONS", keys=ANY, beats="stdout"),
}  # fmt: skip


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the namespace of a command line; ``overrides`` holds the keys of the recipe.

    Raises:
        UsageError: an unknown command (with a suggestion) or a key without a value.
        SystemExit: after ``--help`` or ``--version``, and for what argparse refuses (code 2).
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
    """Return what follows a command, with options as the command spells them and with the action that is meant."""
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
    """Refuse a command, an action or an option that was removed, with what to use instead."""
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
    """Refuse what argparse has left over of a command line."""
    key, equals, value = word.lstrip("+").partition("=")
    hint = ""
    if name == "generate":
        hint = " Put a text of several words into quotes."
    if equals and keys:  # as verl and Hydra write it
        hint = f" Did you mean --{key} {value}?"
        if keys == ANY:
            hint = answer_other_name(key) or hint
    called = f"posttrain {name}".rstrip()
    raise UsageError(f"{shown(word)} is no option of `{called}`, or an argument too many.{hint} See `{called} --help`")


def run_command(arguments: Sequence[str]) -> int:
    """Parse a command line and run its command; return the exit code."""
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
    """Refuse a model or run that is nowhere, before a library is imported."""
    if getattr(namespace, "export_pt", None) or getattr(namespace, "import_pt", None):
        return  # with these, the first argument is a folder of activations
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
    """Return the block in which a line says what a command does, after a long silence in a file or pipe."""
    is_printed = getattr(namespace, "dry_run", False)
    stream = sys.stdout
    if command.beats == "stderr" or is_printed:
        stream = sys.stderr
    is_first = os.environ.get("RANK", "0") == "0"  # of several processes that torchrun has started
    is_on = bool(command.beats) and not getattr(namespace, "quiet", False) and is_redirected() and is_first
    return heartbeat(f"posttrain {namespace.command}", stream, is_on=is_on)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    guard_output()
    os.environ.setdefault("PYTHON_COLORS", "0")  # of argparse and tracebacks, which would pass for foreign text
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    if not sys.warnoptions:  # plans of other packages for their next release
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")
    arguments = list(sys.argv[1:] if argv is None else argv)
    show_traceback = "--traceback" in arguments or bool(os.environ.get("POSTTRAIN_TRACEBACK"))
    if "POSTTRAIN_LIFELINE" in os.environ:  # started by a sweep
        importlib.import_module("posttrain.runs.children").end_with_parent()
    try:
        if arguments[:1] == ["__follow"]:  # one of several processes that train a run
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
        print(f"posttrain: {shown(str(error.filename))}: {error.strerror}; give another place or name", file=sys.stderr)
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
