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
import os
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain import __version__
from posttrain.activity import heartbeat, is_redirected
from posttrain.commands.interpret.steering import STEERING
from posttrain.commands.options import (
    ACCEPT_HELP,
    ALLOW_CODE_OPTIONS,
    MAX_TOKENS,
    MODEL,
    RUNS,
    TEMPLATE,
    Options,
    Parser,
    address,
    natural,
    new_place,
    nonnegative_float,
    option,
    positive,
    refuse_action,
    refuse_command,
    runs_dir,
    seed_of,
    share,
    shown,
    spelled,
)
from posttrain.errors import GONE, INTERRUPTED, PosttrainError, UsageError, nearest
from posttrain.other_names import answer_absent, answer_option, answer_other_name
from posttrain.other_names.command_names import WORDS
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
ANY = ("",)
_NO_TEXT = re.compile("[\0\ud800-\udfff]")  # bytes that are no UTF-8 are lone surrogates in Python
_DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2015\u2212"  # hyphen, and what web pages and word processors make of it
_OTHER_DASH = re.compile(f"-*[{_DASHES[1:]}][{_DASHES}]*[A-Za-z][\\w.-]*")


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
        parents = [common, *([form] if command.tables else [])]
        if command.runs:  # an action says where runs are if its command does not
            parents.append(Parser(add_help=False))
            where = runs_dir(argparse.SUPPRESS if group and COMMANDS[group].runs else "runs")
            Options(where, *ALLOW_CODE_OPTIONS).add_to(parents[-1])
        description = f"{command.help[0].upper()}{command.help[1:]}."
        made[name] = groups[group].add_parser(own, help=command.help, description=description, parents=parents, **how)
        if command.body is None:
            title = "actions (without one: list)" if name == "runs" else "actions"
            groups[name] = made[name].add_subparsers(dest="action", metavar="ACTION", title=title, required=True)
        if wanted not in (None, name.partition(" ")[0]):
            continue
        place = command.options or (command.body and f"{command.body.partition(':')[0]}:OPTIONS")
        if name in _OPTIONS or place:
            (_OPTIONS.get(name) or imported(str(place))).add_to(made[name])
    return parser, made


_QUIET = option("--quiet", action="store_true", help="no progress, only notices and the result")
_TRUNCATED = (
    option("--top-p", type=share, default=1.0, help="only the likeliest tokens of this mass (default: 1)"),
    option("--top-k", type=positive, help="only so many of the likeliest tokens (default: all)"),
)
_LISTED = option("action", nargs="?", choices=("list", "show"), default="list")
_OPTIONS = {
    "demo": Options(
        option(
            "--story", choices=("reasoning", "tools", "smollm2"), default="reasoning",
            help="what is learnt: that writing the steps pays, or when a calculator does (default: reasoning)",
        ),
        seed_of("seed of both training runs"),
        option("--quiet", action="store_true", help="no live progress"),
    ),
    "train": Options(
        option("recipe", metavar="RECIPE", help="a name that `posttrain recipes` lists, or a YAML file"),
        option("--run", metavar="NAME", help="name of the run directory (default: the recipe's name)"),
        option("--resume", action="store_true", help="continue the run from its newest checkpoint"),
        option("--accept-changes", action="store_true", help=ACCEPT_HELP),
        option("--dry-run", action="store_true", help="check and print the resolved recipe; train nothing"),
        option("--memory", action="store_true", help="with --dry-run: say the memory that it takes, by part"),
        _QUIET,
        usage="posttrain train RECIPE [options] [--section.key value ...]",
        epilog=TRAIN_EPILOG,
    ),
    "generate": Options(
        MODEL,
        option("prompt", metavar="PROMPT", nargs="?", help="a question (default: an example of the task)"),
        option("--task", help="whose example is asked (default: the run's, and stories for tiny)"),
        TEMPLATE,
        option("--samples", type=positive, default=1, metavar="N", help="answers to each prompt (default: 1)"),
        option("--limit", type=positive, metavar="N", help="rows of the task that are answered (default: 1)"),
        MAX_TOKENS,
        option("--temperature", type=nonnegative_float, default=1.0, help="0 is greedy (default: 1)"),
        *_TRUNCATED,
        seed_of("seed of the sampling, and which example"),
        usage="posttrain generate MODEL_OR_RUN [PROMPT] [options] [--task.key value ...] [--template.key ...]",
        groups=STEERING,
    ),
    "chat": Options(
        ("models", MODEL[1] | {"nargs": "+"}),
        TEMPLATE,
        option("--system", metavar="TEXT", help="a system message above the conversation"),
        option("--temperature", type=nonnegative_float, default=0.7, help="0 is greedy (default: 0.7)"),
        *_TRUNCATED,
        MAX_TOKENS,
        seed_of(),
        usage="posttrain chat MODEL_OR_RUN [MODEL_OR_RUN ...] [options] [--template.key value ...]",
    ),
    "studio": Options(
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
    "recipes": Options(_LISTED, option("name", nargs="?", help="the recipe to show")),
    "explain": Options(
        option("name", nargs="*", help="such as grpo, correct, KL penalty, train; without it: all names")
    ),
    "data": Options(
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
    "runs": Options(epilog=RUNS_EPILOG),
    **{f"runs {name}": options for name, options in RUNS.items()},
}  # fmt: skip
_INPUT = ("task", "template")
_RUN_BEATS = {"resume": "stdout", "manage": ""}
COMMANDS = {
    "demo": Command("watch a small model learn to reason, and read the report", "demo:run_demo", beats="stdout"),
    "new": Command("write a project of your own: rows, a reward, recipes that run", "new:run_new", runs=False),
    "train": Command("train by a recipe", "train:run_train", keys=ANY, beats="stdout"),
    "sweep": Command("rows x seeds as one question: methods, one key, reward models, the whole of RLHF",
                     "sweeps:run_sweep", keys=ANY, tables=True, beats="stdout"),
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
    "explain": Command("explain a component or a section of a recipe: equation, options, recipes that use it",
                       "explain:run_explain", tables=True, runs=False),
    "exercise": Command("write a function of post-training, and compare it with the library's own",
                        "exercises.command:run_exercise", tables=True, runs=False),
    "data": Command("list the data sets, or show what is in one", "data:run_data", keys=("task",),
                    tables=True, runs=False),
    "runs": Command("list, compare, prune, delete, export and resume runs"),
    **{f"runs {name}": Command(text, f"runs:run_{name}", tables=name in ("list", "show", "compare"),
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


def split_overrides(
    arguments: Sequence[str], parser: argparse.ArgumentParser, sections: Sequence[str]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the arguments of the command itself, words before options, and dotted keys with their values.

    Every ``--key value`` or ``--key=value`` whose key is no option of the command is an override. Words stand together,
    because argparse before Python 3.12 looks for them in one place alone.

    Raises:
        UsageError: neither an option nor a key in ``sections`` (ANY: the recipe will judge), no value, or a second one.
    """
    words: list[str] = []
    own: list[str] = []
    overrides: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        name, equals, value = token.partition("=")
        key, quoted, action = name.lstrip(_DASHES), shown(name)[1:-1], parser._option_string_actions.get(name)
        if token == "--":
            return [*own, *words, token, *rest], list(overrides.items())
        if rest[:1] == ["="] and rest[1:]:
            raise UsageError(f"{quoted} = {shown(rest[1])[1:-1]}: leave out the =, as in --{key} VALUE")
        if action is not None:
            is_next = action.nargs is None or (action.nargs == "?" and not "".join(rest[:1]).startswith("-"))
            own += [token, rest.pop(0)] if is_next and rest and not equals else [token]
            continue
        if _OTHER_DASH.fullmatch(name):
            raise UsageError(f"{quoted}: this begins with a dash that is no hyphen. Write --{key}")
        if not token.startswith("-") or " " in name or token[1:2] in "0123456789.":
            words.append(token)
            continue
        is_key = sections == ANY or ("." in key and key.partition(".")[0] in sections)
        if not (is_key and name.startswith("--")) or (sections == ANY and _word_of(name, parser)):
            known = [o for o in parser._option_string_actions if o.startswith("--")] + [f"--{s}.KEY" for s in sections]
            listed = "" if sections == ANY else f" Known: {', '.join(known)}"
            raise UsageError(f"there is no option {quoted}.{_suggest(name, parser, sections)}{listed}")
        following = value if equals else rest.pop(0) if rest else "--"
        if not equals and following.startswith("--"):
            raise UsageError(f"{quoted}: this key needs a value.{_suggest(name, parser, sections)}")
        if key in overrides:
            raise UsageError(f"{quoted}: given twice; give it once")
        overrides[key] = following
    return [*words, *own], list(overrides.items())


def _word_of(name: str, parser: argparse.ArgumentParser) -> str:
    """Return how a command takes what is an option elsewhere (``--model tiny``), if it is a word without one."""
    words, plain = parser._get_positional_actions(), name.strip("-").replace("-", "_")
    word = next((word for word in words if plain in WORDS.get(word.dest, "").split()), None)
    listed = " ".join(str(word.metavar or word.dest) for word in words)
    return f" {word.metavar} stands without one: `{parser.prog} {listed}`." if word else ""


def _suggest(name: str, parser: argparse.ArgumentParser, sections: Sequence[str]) -> str:
    """Return what was probably meant by ``name``, which is no option of the command."""
    if "." in name and (sections == ANY and not name.startswith("--")):
        return f" Did you mean -{name}?"
    if "." in name and parser.prog.endswith(" resume"):
        return " A run goes on by its own recipe, but for its length: --steps N."
    own = parser._option_string_actions
    meant = answer_option(name, [*own, *(f"--{section}" for section in sections)])
    if not meant:
        elsewhere = answer_other_name(name) if sections == ANY and "." not in name else answer_absent(name)
        meant = "" if elsewhere else nearest(name, own) or ""
    else:
        elsewhere = ""
    return _word_of(name, parser) or (f" Did you mean {meant}?" if meant else elsewhere)


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
    rest = list(arguments)
    overrides: list[tuple[str, str]] = []
    name = ""
    keys: Sequence[str] = ()
    start = next((i for i, token in enumerate(rest) if not token.startswith("-")), None)
    parser, choices = build_parser("" if start is None else rest[start])
    if start is not None:
        command, actions = rest[start], [n.partition(" ")[2] for n in choices if n.startswith(f"{rest[start]} ")]
        options = {o for n, c in choices.items() if n.partition(" ")[0] == command for o in c._option_string_actions}
        rest[start + 1 :] = spelled(rest[start + 1 :], options)
        if any("template" in argument for argument in rest[start + 1 :]):
            rename = imported("options:with_own_template_option")
            rest[start + 1 :] = rename(rest[start + 1 :], options, trains=command == "train")
        if command == "runs":
            rest = rest[: start + 1] + imported("options:complete_action")(rest[start + 1 :])
        name = " ".join(rest[start : start + 2])
        typed = (f"posttrain {command}", f"posttrain {name}")
        for gone in (*typed, *(f"{one} {token.partition('=')[0]}" for one in typed for token in rest[start + 1 :])):
            if gone in GONE:
                raise UsageError(f"`{gone}` was removed. Use {GONE[gone]}.")
        if command not in choices:
            refuse_command(command, list(choices))
        if actions := actions or (["list", "show"] if command in ("recipes", "data") else []):
            refuse_action(command, rest[start + 1 :], actions)
        name, end = (name, start + 2) if name in choices else (command, start + 1)
        if COMMANDS[name].body is not None:
            keys = COMMANDS[name].keys or ()
            own, overrides = split_overrides(rest[end:], choices[name], keys)
            rest = rest[:end] + own
    namespace, unknown = parser.parse_known_args(rest)
    if unknown:
        key, equals, value = unknown[0].lstrip("+").partition("=")
        hint = " Put a text of several words into quotes." if name == "generate" else ""
        if equals and keys:  # as verl and Hydra write it
            hint = (answer_other_name(key) if keys == ANY else "") or f" Did you mean --{key} {value}?"
        called = f"posttrain {name}".rstrip()
        raise UsageError(
            f"{shown(unknown[0])} is no option of `{called}`, or an argument too many.{hint} See `{called} --help`"
        )
    namespace.overrides = overrides
    if namespace.command is None:
        parser.print_help()
    return namespace


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
    if not getattr(namespace, "export_pt", None) and not getattr(namespace, "import_pt", None):
        for option in command.models:  # with these two, the first argument is a folder of activations
            named = getattr(namespace, option)
            for name in [named] if isinstance(named, str) else named or ():
                importlib.import_module("posttrain.runs.paths").refuse_absent(
                    namespace.runs_dir, name, may_be_file=option == "judge"
                )
    if command.body is None:
        command = COMMANDS[f"{namespace.command} {namespace.action}"]
    if getattr(namespace, "format", "table") == "table":
        return _run_body(command, namespace)
    with imported("console:tables_as_json")():
        return _run_body(command, namespace)


def _run_body(command: Command, namespace: argparse.Namespace) -> int:
    """Run a command's function, with a line about what it does after a long silence in a file or pipe."""
    assert command.body is not None, "actions have bodies"
    is_printed = getattr(namespace, "dry_run", False)
    stream = sys.stderr if command.beats == "stderr" or is_printed else sys.stdout
    is_first = os.environ.get("RANK", "0") == "0"  # of several processes that torchrun has started
    is_on = bool(command.beats) and not getattr(namespace, "quiet", False) and is_redirected() and is_first
    with heartbeat(f"posttrain {namespace.command}", stream, is_on=is_on):
        return int(imported(command.body)(namespace))


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
        advice = "; continue with the same command and --resume" if is_resumable else ""
        advice = "; continue with the same command" if arguments[:1] in (["evaluate"], ["sweep"]) else advice
        print(f"\nposttrain: interrupted{advice}", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
