"""Bad command lines: every option of every parser, names and places that cannot be, and good ones as control."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from random import Random

from fuzz_case import COMPARISON, DIFF, FIFO, FOLDER, LOADERS, RL, SAE, SFT, STUDY, Case, dump, with_value
from fuzz_texts import BOMB

from posttrain.cli import COMMANDS, build_parser

HUGE, LONG = "9" * 5000, "x" * 300
BAD: dict[str, list[str]] = {
    "positive": ["0", "-1", "x", "1.5", "²", "1e30", "10" * 7, "nan", "1:30", "٣", "0x10", "+-1", "[]", HUGE, "1 2"],
    "positives": ["0", "-1", "x", "1,x", "1,²", "1,100000000000000", "nan", ",", "1;2"],
    "natural": ["-1", "x", "1.5", "²", "1e30", "nan", "1:30", "٣", "--3", "[]"],
    "seed": ["-1", "x", "1.5", "²", "1e30", "nan", "1:30", "٣", "[]"],
    "naturals": ["-1", "x", "1,x", "²", "nan", ",", "1,100000000000000"],
    "nonnegative_float": ["-1", "x", "nan", "inf", "-inf", "²", "1:30", "1e999", "[]", "1,5"],
    "share": ["0", "-1", "2", "x", "nan", "inf", "²", "1:30", "1e-999"],
    "int": ["x", "1.5", "²", HUGE, "nan"],
    "port": [*["0", "-1", "65536", "99999", "x", "²", "1e3"], HUGE],
}
VALID = {"positive": "2", "positives": "2,3", "natural": "2", "naturals": "1,2", "nonnegative_float": "0.5"}
VALID |= {"share": "0.5", "int": "8", "port": "8001", "seed": "3", "names": "stories"}
RECIPES = {"train": RL, "sweep": COMPARISON, "sae train": SAE, "sae diff": DIFF}


def parsers() -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """The words of every command, and of every action of one, with its parser."""
    yield from _below((), build_parser()[0])


def _below(
    words: tuple[str, ...], parser: argparse.ArgumentParser
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if words and not inner:
        yield words, parser
    for action in inner:
        for name, child in action.choices.items():
            yield from _below((*words, name), child)


def fill(words: tuple[str, ...], parser: argparse.ArgumentParser) -> tuple[list[str], dict[str, bytes | str]]:
    """Positional arguments that the command needs, and files for them."""
    given: list[str] = []
    files: dict[str, bytes | str] = {}
    command = " ".join(words)
    needs_names = command in ("runs prune", "runs delete", "runs compare")
    for action in parser._actions:
        if action.option_strings or isinstance(action, argparse._SubParsersAction):
            continue
        if action.nargs not in (None, "+") and not (action.nargs == "*" and needs_names):
            continue
        if action.choices:
            given.append(str(next(iter(action.choices))))
        elif command in RECIPES and action.dest in ("recipe", "models"):
            given.append("mine.yaml")
            files["mine.yaml"] = dump(RECIPES[command])
        else:
            given.append("some-run" if words[0] == "runs" else "tiny")
    for action in parser._actions:
        if action.required and action.option_strings:
            given += [action.option_strings[0], str(next(iter(action.choices))) if action.choices else "to"]
    return given, files


def argument_cases(random: Random) -> list[Case]:
    """Every option of every command with values that it must refuse, twice, empty, or without its value."""
    cases = []
    for words, parser in parsers():
        given, files = fill(words, parser)
        start = (*words, *given)
        for action in parser._actions:
            if action.option_strings and not isinstance(action, argparse._HelpAction):
                cases += _option_cases(random, start, action, files)
        for wrong in ("--nonsense", "--²", "--" + "x" * 3000, "--sed", "-z", "---", "--=", "--.", "--quiet.x"):
            names = (wrong[:30], wrong.strip("-=.")[:30] or "key", "no option --.", "unrecognized", "'quiet'", "'1'")
            more = () if wrong == "-z" else ("1",)
            cases.append(Case("argument: unknown", (*start, wrong, *more), names, files))
        first = next((a for a in parser._actions if not a.option_strings and a.nargs in (None, "+")), None)
        if first is not None and words[0] != "runs":
            cases.append(Case("argument: positional missing", words, (str(first.metavar or first.dest), first.dest)))
    return cases


def _option_cases(
    random: Random, start: tuple[str, ...], action: argparse.Action, files: dict[str, bytes | str]
) -> list[Case]:
    option = action.option_strings[0]
    if action.nargs == 0:
        is_long = len(option) > 2
        return [Case("argument: flag with a value", (*start, f"{option}=3"), (option,), files)] if is_long else []
    name = "seed" if option == "--seed" else getattr(action.type, "__name__", "None")
    bad = [*BAD.get(name, ()), *(["nonsense", "²", "1"] if action.choices and name != "int" else [])]
    ways = [[f"{option}={value}" if len(option) > 2 else f"{option}{value}"] for value in bad]
    if option != "--system" and action.nargs != "?":  # an empty system message is one
        ways.append([option, ""] if random.random() < 0.5 or len(option) == 2 else [f"{option}="])
    if isinstance(action, argparse._StoreAction) and not action.required:
        value = str(next(iter(action.choices))) if action.choices else VALID.get(name, "x")
        ways.append([option, value, option, value])
    if action.nargs != "?":
        ways.append([option])
    return [Case("argument", (*start, *way), (option,), files) for way in ways]


OVERRIDES: tuple[tuple[str, ...], ...] = (
    *((key, "1") for key in ("--train..lr", "--.lr", "--train.", "--train.lr.x", "--" + "a." * 3000 + "b")),
    *((f"--rewards.{key}", "1") for key in ("99.weight", "².weight", "²", "٠.weight", "0.weight.x")),
    *((f"--rewards.{key}", "x") for key in ("-1", "1e3")),
    *(("--train", value) for value in ("3", "[]", "text")),
    *(("--train.lr", value) for value in ("x" * 100_000, BOMB, "", "[" * 5000, "{a: " * 5000, "٣")),
    *(("--objective", value) for value in (BOMB, "{name: grpo, name: grpo}", "[a: ")),
    *(("--train.steps", value) for value in ("1 2", "--", "٣")),
    ("--train.lr",),
    ("--train.lr="),
    ("--train.lr", "--quiet"),
    ("--extends", "x"),
    ("--rollout", "5"),
    ("--train." + "x" * 100_000, "1"),
    ("--description", "bad \udcff bytes"),
    ("--task.\udcff", "1"),
    ("--model.name", "bad\udcff"),
    ("--train.lr", "1", "--train.lr", "2"),
    ("--train.lr=1", "--train.lr=1"),
    ("--objective", "!!python/object/apply:os.system [id]"),
    ("--task", "!!python/name:os.system"),
)


def override_cases(random: Random) -> list[Case]:
    """Options that are keys of a recipe, as they cannot be."""
    cases = []
    for more in OVERRIDES:
        more = (more,) if isinstance(more, str) else more
        key = more[0].removeprefix("--").partition("=")[0]
        last = more[-2 if len(more) > 2 else 0].lstrip("-").partition("=")[0][:40]
        names = (key[:40], repr(key)[1:-1][:40], last, "list has entries", key.rpartition(".")[0] or key)
        for words, recipe in (("train",), RL), (("sae", "train"), SAE), (("sae", "diff"), DIFF):
            if words != ("train",) and key.partition(".")[0] not in ("train", "description"):
                continue
            if words == ("sae", "diff"):
                more = tuple(word.replace("--train", "--changes.train") for word in more)
            files = {"mine.yaml": dump(recipe)}
            cases.append(Case("override", (*words, "mine.yaml", *more), (*names, "changes", "'bad"), files))
    behind = {"quantize": "tiny --bits 8", "data": "show stories", "evaluate": "tiny --task stories --limit 1"}
    behind["activations"] = "tiny --layer 1 --task stories --yes --out acts"
    for command, about in COMMANDS.items():
        for section in filter(None, about.keys or ()):
            start = (*command.split(), *behind.get(command, "tiny").split())
            for wrong, value in (("nonsense", "1"), ("²", "1"), ("", "1"), ("name.x", "1")):
                option = f"--{section}.{wrong}"
                cases.append(Case("override", (*start, option, value), (option, f"{section}.{wrong}", section)))
    return cases


RUN_NAMES = [LONG, "x" * 256, "a b", "a\nb", "bad\udcff", "\x1b[2J", " ", "x" * 4000]
RUN_NAMES += ["a/b", "..", ".", "/", "²", ".hidden", "a:b", "a\\b", "~", "$HOME", "*"]
FILES: dict[str, dict[str, bytes | str]] = {
    "nowhere": {},
    "f": {"f": b"x"},
    "f/x": {"f": b"x"},
    "d": {"d": FOLDER},
    "pipe": {"pipe": FIFO},
    "circle": {"circle->": "circle"},
    "gone": {"gone->": "f/x", "f": b""},
    "e": {"e": b""},
    "b": {"b": b"\xff\xfe" * 9},
    "/dev/zero": {},
    "/dev/null": {},
    LONG: {},
    "a/" + LONG: {},
}
OUTPUTS = (
    ("evaluate tiny --task stories --limit 1 --max-tokens 2 --quiet", "--out"),
    ("quantize tiny --bits 8 --limit 0 --quiet", "--out"),
    ("activations tiny --layer 1 --task stories --max-rows 2 --yes --quiet", "--out"),
)
RECORDING = "activations tiny --layer 1 --max-rows 2 --yes --quiet --out acts"
QUICK = ("runs", "sweep", "train")  # commands that say at once that a folder of runs cannot be


def place_cases(random: Random) -> list[Case]:
    """Folders and files that are something else, and names that no folder can have."""
    cases = []
    for words, recipe in LOADERS.values():
        for name in RUN_NAMES:
            shown, files = ("--run", repr(name)[1:-1][:30]), {"mine.yaml": dump(recipe)}
            cases.append(Case("run name", (*words, "mine.yaml", f"--run={name}", "--quiet"), shown, files))
    for words, parser in parsers():
        options = {o for action in parser._actions for o in action.option_strings}
        if "--runs-dir" not in options or words[0] in ("serve", "serve-command", "chat", "studio"):
            continue
        given, files = fill(words, parser)
        everywhere = ("f", "f/x", "pipe", LONG, "a/" + LONG, "gone", "circle", "/dev/null")
        for place in everywhere if words[0] in QUICK else ("f", LONG):
            shown = ("--runs-dir", place[:40])
            cases.append(Case("runs-dir", (*words, *given, f"--runs-dir={place}"), shown, {**files, **FILES[place]}))
    return cases + output_cases(random) + named_run_cases(random)


def output_cases(random: Random) -> list[Case]:
    """Where results shall go, and where texts shall come from."""
    cases = []

    def add(kind: str, command: str, option: str, place: str, more: str = "") -> None:
        words = (*command.split(), f"{option}={place}", *more.split())
        cases.append(Case(kind, words, (option, place[:30], repr(place)[1:-1][:30]), FILES.get(place, {})))

    for command, option in OUTPUTS:
        for place in ("f", "f/x", "pipe", LONG, "a/" + LONG, "bad\udcff/" + LONG):
            add("output", command, option, place)
    for place in ("nowhere/x.png", LONG + ".png", "x.nonsense"):
        add("output", "data show stories --limit 2", "--plot", place)
    for option in ("--text", "--rollouts", "--import-pt", "--paired"):
        for place in ("nowhere", "d", "pipe", LONG, "e", "b", "/dev/zero", "circle", "f/x"):
            add("input", RECORDING, option, place, "--task stories" if option == "--paired" else "")
    for place in ("nowhere", "d", "pipe", LONG, "f", "f/x"):
        add("input", "generate tiny x", "--sae", place, "--steer 1=2 --max-tokens 2")
        cases.append(Case("input", ("sae", "features", place), (place[:30], "DICTIONARY"), FILES[place]))
    return cases


# A command line each, and behind the bar what the message may name it by.
WORDS = f"""
trian | trian
'' | '' COMMAND
² | ²
TRAIN | TRAIN
{"x" * 5000} | xxx
--nonsense | --nonsense
runs nonsense | nonsense
sae nonsense | nonsense
sae | ACTION action
recipes nonsense | nonsense
data nonsense | nonsense
explain nonsense | nonsense
explain '' | '' NAME name
explain nowhere:f | nowhere
explain : | :
data show nonsense | nonsense
data show '' | task TASK NAME
data show | name NAME
data show nowhere:f | nowhere
data show jsonl | path
data show {"x" * 5000} | xxx
recipes show | NAME name
recipes show nonsense | nonsense
recipes list x y | y unrecognized
train tiny/grpo more | more
train tiny/grop | tiny/grop
compare tiny/grpo | sweep
sae train tiny/grpo | tiny/grpo
sae diff tiny/grpo | tiny/grpo
train sweep/ppo-grpo-dpo | sweep
evaluate tiny --task nonsense | nonsense
evaluate tiny --task , | --task
evaluate tiny --template nonsense --task stories | nonsense
evaluate tiny --engine nonsense --task stories | nonsense
evaluate tiny --task stories --k 5 --limit 1 | --k k
generate tiny --template nonsense | nonsense
generate tiny {"x" * 200_000} | prompt PROMPT tokens
runs --state nonsense | nonsense --state
runs --sort ² | --sort ²
runs prune --all --keep ² --yes | --keep
runs prune --all --keep nonsense --yes | --keep
serve nowhere/at/all | nowhere
serve tiny --host 0.0.0.0 | --api-key
serve tiny --api-key short | --api-key
serve-command nowhere/at/all | nowhere
generate tiny x --steer ²:1 | --steer
generate tiny x --steer 1:nan | --steer
generate tiny x --steer : | --steer
generate tiny x --steer 1:{HUGE} | --steer
activations tiny --site resid.² --task stories --out acts | --site --layer
activations tiny --layer 99 --task stories --out acts | 99 --layer
sweep mine.yaml --rows nonsense | nonsense
sweep mine.yaml --rows , | --rows
sweep mine.yaml --seeds 1000000 | --seeds
"""


NO_RUNS = [LONG, "bad\udcff", "a b", "\x1b[2J", "x" * 5000, "..", "../..", "/etc", "/", "nowhere", "²", ".", "f", "f/x"]
NO_RUNS += ["pipe", "[", "*?"]


def named_run_cases(random: Random) -> list[Case]:
    """Runs that are not there, by names that lead elsewhere; commands and words that there are not."""
    cases = []
    for action in ("show", "compare", "delete", "prune", "export", "resume"):
        for name in NO_RUNS:
            behind = {"compare": ["x", name], "export": [name, "--to", "to"]}
            behind |= {"delete": [name, "--yes"], "prune": [name, "--yes"]}
            names = (name[:30], repr(name)[1:-1][:30], *(["'x'"] if action == "compare" else []))
            words = ("runs", action, *behind.get(action, [name]))
            cases.append(Case("named run", words, names, FILES.get(name, {}) if name != LONG else {}))
    for line in filter(None, WORDS.splitlines()):
        command, _, names_of = line.partition(" | ")
        words = tuple(shlex.split(command))
        files = {"mine.yaml": dump(COMPARISON)} if "mine.yaml" in words else {}
        cases.append(Case("words", words, tuple(names_of.split()), files))
    for words, names in (("bad\udcff",), ("bad",)), (("generate", "tiny", "bad \udcff"), ("prompt", "PROMPT", "'bad")):
        cases.append(Case("words", words, names))
    for name in (LONG, "a/b", "²", "", "..", "a b", "bad\\udcff"):
        for recipe in (COMPARISON, STUDY):
            rows = f'rows:\n  "{name}": {{recipe: rl/grpo}}\n'.encode()
            text = dump({k: v for k, v in recipe.items() if k != "rows"}) + rows
            shown = ("rows", name[:30], "mine.yaml")
            cases.append(Case("row name", ("sweep", "mine.yaml"), shown, {"mine.yaml": text}))
    return cases


# Keys with YAML that they take.
GOOD_VALUES = r"""
train.gradient_checkpointing | yes
train.gradient_checkpointing | on
train.gradient_checkpointing | False
train.steps | 1_000
train.steps | 0x10
train.steps | '8'
train.steps | 8.0
train.seed | 1000000000000000000000000000000
train.seed | 0
description | 2024-05-17
description | 1:30
description | yes
description | '010'
description | "\u00e9 \U0001F600"
description | !!str 3
description | <<
description | =
train.max_grad_norm | null
train.max_grad_norm | ~
train.max_grad_norm |
rewards | correct
rewards | [correct, {name: xml_soft, weight: -0.5}]
objective | !!map {name: grpo}
rollout.max_tokens | 32768
rollout.group_size | 1024
rollout.top_p | 1
train.micro_batch_tokens | 131072
model.adapter | {rank: 2, targets: [q_proj, v_proj]}
train.lr | +1e-4
train.lr | 3.0e-5
train.lr | 1E-3
train.lr | .5
train.lr | 1_0
task.families | [chain]
"""
GOOD_WORDS = f"""
recipes
recipes show tiny/grpo
explain
explain grpo
explain train
explain --help
data
runs
runs --runs-dir nowhere
serve-command tiny
--version
train tiny/grpo --dry-run
train tiny/grpo --dry-run --train.lr 1E-3
train --help
sweep ppo-grpo-dpo --dry-run
sae train tiny/sae --dry-run
data show stories --limit 3
data show stories --limit=3 --task.size=30 --examples 0
generate tiny hello --max-tokens 3 --seed {"1" + "0" * 30}
"""


def good_cases(random: Random) -> list[Case]:
    """What must work: a repair that refuses too much fails here."""
    train = ("train", "mine.yaml", "--dry-run")
    files = [((*words, "mine.yaml", "--dry-run"), dump(recipe)) for words, recipe in LOADERS.values()]
    for line in filter(None, GOOD_VALUES.splitlines()):
        key, _, text = (part.strip() for part in line.partition("|"))
        files.append((train, with_value(RL, key, text)))
    files.append((train, with_value(RL, "train", "&t {steps: 1, lr: 0.001}\neval: {num_examples: 3}")))
    files.append((train, with_value(RL, "description", "|\n  text\n  over lines")))
    files.append((train, dump(SFT).replace(b"train:\n", b"train:\n  <<: {warmup_steps: 2}\n")))
    files += [
        (train, before + dump(RL)) for before in (b"\xef\xbb\xbf", b"---\n", b"%YAML 1.2\n---\n", b"# \xc3\xa9\n")
    ]
    files += [(train, dump(RL) + after) for after in (b"...\n", b"\n\n")]
    files.append((train, dump(RL).replace(b"\n", b"\r\n")))
    lines = [((*line.split(),), None) for line in GOOD_WORDS.splitlines() if line]
    return [
        Case("good", words, (), {} if content is None else {"mine.yaml": content}, good=True)
        for words, content in [*files, *lines]
    ]
