"""Bad command lines: every option of every parser, names and places that cannot be, and good ones as control."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from random import Random

from fuzz_case import COMPARISON, DIFF, FIFO, LOADERS, RL, SAE, SFT, Case, dump, with_value
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
    "f": {"f": b"x"},
    "f/x": {"f": b"x"},
    "pipe": {"pipe": FIFO},
    "circle": {"circle->": "circle"},
    "gone": {"gone->": "f/x", "f": b""},
}
OUTPUTS = (
    ("evaluate tiny --task stories --limit 1 --max-tokens 2 --quiet", "--out"),
    ("quantize tiny --bits 8 --limit 0 --quiet", "--out"),
    ("activations tiny --layer 1 --task stories --max-rows 2 --yes --quiet", "--out"),
)
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
            laid_out = {**files, **FILES.get(place, {})}
            cases.append(Case("runs-dir", (*words, *given, f"--runs-dir={place}"), shown, laid_out))
    for command, option in OUTPUTS:
        for place in ("f", "f/x", "pipe", LONG, "a/" + LONG):
            words = (*command.split(), f"{option}={place}")
            cases.append(Case("output", words, (option, place[:30]), FILES.get(place, {})))
    for name in (LONG, "a/b", "²", "", "..", "a b"):
        rows = f'rows:\n  "{name}": {{recipe: rl/grpo}}\n'.encode()
        text = dump({k: v for k, v in COMPARISON.items() if k != "rows"}) + rows
        cases.append(Case("row name", ("sweep", "mine.yaml"), ("rows", name[:30], "mine.yaml"), {"mine.yaml": text}))
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
