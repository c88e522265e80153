"""Bad command lines: every option of every parser, names and places that cannot be, and good ones as control."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from random import Random

from fuzz_case import COMPARISON, DIFF, FIFO, FOLDER, LOADERS, RL, SAE, SFT, STUDY, Case, dump, merged, with_value
from fuzz_texts import BOMB

from posttrain.cli import COMMANDS, build_parser

HUGE = "9" * 5000
BAD: dict[str, tuple[str, ...]] = {
    "positive": (
        "0",
        "-1",
        "x",
        "1.5",
        "²",
        "1e30",
        "100000000000000",
        HUGE,
        "nan",
        "1:30",
        "٣",
        "0x10",
        "1 2",
        "+-1",
        "[]",
    ),
    "positives": ("0", "-1", "x", "1,x", "1,²", "1,100000000000000", "nan", ",", "1;2"),
    "natural": ("-1", "x", "1.5", "²", "1e30", "nan", "1:30", "٣", "--3", "[]"),
    "seed": ("-1", "x", "1.5", "²", "1e30", "nan", "1:30", "٣", "[]"),
    "naturals": ("-1", "x", "1,x", "²", "nan", ",", "1,100000000000000"),
    "nonnegative_float": ("-1", "x", "nan", "inf", "-inf", "²", "1:30", "1e999", "[]", "1,5"),
    "share": ("0", "-1", "2", "x", "nan", "inf", "²", "1:30", "1e-999"),
    "int": ("x", "1.5", "²", HUGE, "nan"),
    "port": ("0", "-1", "65536", "99999", "x", "²", "1e3", HUGE),
}
VALID = {
    "positive": "2",
    "positives": "2,3",
    "natural": "2",
    "naturals": "1,2",
    "nonnegative_float": "0.5",
    "share": "0.5",
    "int": "8",
    "port": "8001",
    "seed": "3",
    "names": "stories",
}
SEEDS = {"--seed"}
MAY_BE_EMPTY = {"--system"}
FILES = {"recipe": "mine.yaml"}
RECIPES = {"train": RL, "sweep": COMPARISON, "sae train": SAE, "sae diff": DIFF}


def parsers() -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """The words of every command, and of every action of one, with its parser."""
    whole, _ = build_parser()
    yield from _below((), whole)


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
    for action in parser._actions:
        if action.option_strings or isinstance(action, argparse._SubParsersAction):
            continue
        if action.nargs in (None, "+") or (
            action.nargs == "*" and command in ("runs prune", "runs delete", "runs compare")
        ):
            if action.choices:
                given.append(str(next(iter(action.choices))))
                continue
            recipe = command in RECIPES and action.dest in ("recipe", "models")
            given.append("mine.yaml" if recipe else "some-run" if words[0] == "runs" else "tiny")
            if recipe:
                files["mine.yaml"] = dump(RECIPES[command])
    for action in parser._actions:
        if action.required and action.option_strings:
            option = action.option_strings[0]
            given += [option, str(next(iter(action.choices))) if action.choices else "to"]
    return given, files


def argument_cases(random: Random) -> list[Case]:
    """Every option of every command with values that it must refuse, twice, empty, or without its value."""
    cases = []
    for words, parser in parsers():
        given, files = fill(words, parser)
        start = (*words, *given)
        for action in parser._actions:
            if not action.option_strings or isinstance(action, argparse._HelpAction):
                continue
            option = action.option_strings[0]
            flag = action.nargs == 0
            kind = getattr(action.type, "__name__", "None")
            name = "seed" if option in SEEDS else kind
            if flag:
                if len(option) > 2:
                    cases.append(Case("argument: flag with a value", (*start, f"{option}=3"), (option,), files))
                continue
            values = list(BAD.get(name, ())) + (["nonsense", "²", "1"] if action.choices and kind != "int" else [])
            for value in values:
                shown = [f"{option}={value}"] if len(option) > 2 else [f"{option}{value}"]
                cases.append(Case("argument", (*start, *shown), (option,), files))
            if option not in MAY_BE_EMPTY and action.nargs != "?":
                shown = [option, ""] if random.random() < 0.5 or len(option) == 2 else [f"{option}="]
                cases.append(Case("argument: empty", (*start, *shown), (option,), files))
            if isinstance(action, argparse._StoreAction) and not action.required:
                value = str(next(iter(action.choices))) if action.choices else VALID.get(name, "x")
                cases.append(Case("argument: twice", (*start, option, value, option, value), (option,), files))
            if action.nargs != "?":
                cases.append(Case("argument: no value", (*start, option), (option,), files))
        for wrong in ("--nonsense", "--²", "--" + "x" * 3000, "--sed", "-z", "---", "--=", "--.", "--quiet.x"):
            more = ["1"] if wrong not in ("-z",) else []
            cases.append(
                Case(
                    "argument: unknown",
                    (*start, wrong, *more),
                    (wrong[:30], wrong.strip("-=.")[:30] or "key", "no option --.", "unrecognized", "'quiet'", "'1'"),
                    files,
                )
            )
        for action in parser._actions:
            if not action.option_strings and action.nargs in (None, "+") and words[0] != "runs":
                cases.append(
                    Case("argument: positional missing", words, (str(action.metavar or action.dest), action.dest), {})
                )
                break
    return cases


def override_cases(random: Random) -> list[Case]:
    """Options that are keys of a recipe, as they cannot be."""
    cases = []
    bad: tuple[tuple[str, ...], ...] = (
        ("--train..lr", "1"),
        ("--.lr", "1"),
        ("--train.", "1"),
        ("--rewards.99.weight", "1"),
        ("--rewards.².weight", "1"),
        ("--rewards.²", "1"),
        ("--rewards.-1", "x"),
        ("--rewards.1e3", "x"),
        ("--rewards.٠.weight", "x"),
        ("--rewards.0.weight.x", "1"),
        ("--train.lr.x", "1"),
        ("--train.lr",),
        ("--train.lr", "--quiet"),
        ("--extends", "x"),
        ("--train", "3"),
        ("--train", "[]"),
        ("--train", "text"),
        ("--rollout", "5"),
        ("--" + "a." * 3000 + "b", "1"),
        ("--train." + "x" * 100_000, "1"),
        ("--train.lr", "x" * 100_000),
        ("--train.lr", BOMB),
        ("--objective", BOMB),
        ("--objective", "{name: grpo, name: grpo}"),
        ("--objective", "[a: "),
        ("--description", "bad \udcff bytes"),
        ("--task.\udcff", "1"),
        ("--model.name", "bad\udcff"),
        ("--train.lr", "1", "--train.lr", "2"),
        ("--train.lr=1", "--train.lr=1"),
        ("--train.steps", "1", "--train.lr", "1", "--train.steps", "1"),
        ("--train.lr", ""),
        ("--train.lr="),
        ("--train.steps", "1 2"),
        ("--train.steps", "--"),
        ("--train.lr", "[" * 5000),
        ("--train.lr", "{a: " * 5000),
        ("--objective", "!!python/object/apply:os.system [id]"),
        ("--task", "!!python/name:os.system"),
        ("--train.steps", "٣"),
        ("--train.lr", "٣"),
    )
    for more in bad:
        more = (more,) if isinstance(more, str) else more
        key = more[0].removeprefix("--").partition("=")[0]
        names = (
            key[:40],
            repr(key)[1:-1][:40],
            more[-2 if len(more) > 2 else 0].lstrip("-").partition("=")[0][:40],
            "list has entries",
            key.rpartition(".")[0] or key,
        )
        for words, recipe in (
            (("train",), RL),
            (("sae", "train"), SAE),
            (("sae", "diff"), DIFF),
            (("sweep",), COMPARISON),
        ):
            if words != ("train",) and key.partition(".")[0] not in ("train", "description"):
                continue
            if words in (("sae", "diff"),) and key.partition(".")[0] == "train":
                more = tuple(m.replace("--train", "--changes.train") for m in more)
            if words == ("sweep",) and "bad \udcff bytes" not in more and key.startswith("train.") is False:
                continue
            cases.append(
                Case("override", (*words, "mine.yaml", *more), (*names, "changes", "'bad"), {"mine.yaml": dump(recipe)})
            )
    for command, about in COMMANDS.items():
        for section in filter(None, about.keys or ()):
            start = (*command.split(), *({"data": ["show", "stories"]}.get(command, ["tiny"])))
            if command == "quantize":
                start = (*start, "--bits", "8")
            if command == "activations":
                start = (*start, "--layer", "1", "--task", "stories", "--yes", "--out", "acts")
            for wrong, value in (("nonsense", "1"), ("²", "1"), ("", "1"), ("name.x", "1")):
                option = f"--{section}.{wrong}"
                extra = ("--task", "stories", "--n", "1") if command == "evaluate" else ()
                cases.append(Case("override", (*start, *extra, option, value), (option, f"{section}.{wrong}", section)))
    return cases


LONG = "x" * 300
RUN_NAMES = (
    LONG,
    "x" * 256,
    "a/b",
    "..",
    ".",
    "/",
    "²",
    "a b",
    "a\nb",
    "bad\udcff",
    ".hidden",
    "a:b",
    "a\\b",
    "\x1b[2J",
    " ",
    "~",
    "$HOME",
    "*",
    "x" * 4000,
)


def place_cases(random: Random) -> list[Case]:
    """Folders and files that are something else, and names that no folder can have."""
    cases = []
    for words, recipe in LOADERS.values():
        files = {"mine.yaml": dump(recipe)}
        for name in RUN_NAMES:
            shown = ("--run", repr(name)[1:-1][:30])
            cases.append(Case("run name", (*words, "mine.yaml", f"--run={name}", "--quiet"), shown, files))
    for words, parser in parsers():
        options = {o for action in parser._actions for o in action.option_strings}
        if "--runs-dir" not in options or words[0] in ("serve", "serve-command", "chat", "studio"):
            continue
        given, files = fill(words, parser)
        if words[0] == "demo" or words in (("runs", "manage"),):
            given = [*given]
        for place, more in (
            ("f", {"f": b"x"}),
            ("f/x", {"f": b"x"}),
            ("pipe", {"pipe": FIFO}),
            (LONG, {}),
            ("a/" + LONG, {}),
            ("gone", {"gone->": "f/x", "f": b""}),
            ("circle", {"circle->": "circle"}),
            ("/dev/null", {}),
        ):
            if words in (
                ("sae", "features"),
                ("sae", "diff"),
                ("sae", "train"),
                ("quantize",),
                ("evaluate",),
                ("generate",),
                ("activations",),
            ) and place not in ("f", LONG):
                continue
            if place == "/proc/self" and words[0] == "runs":
                continue
            if words == ("demo",) and place in ("gone", "circle"):
                continue
            cases.append(
                Case("runs-dir", (*words, *given, f"--runs-dir={place}"), ("--runs-dir", place[:40]), {**files, **more})
            )
    return cases + output_cases(random) + named_run_cases(random)


def output_cases(random: Random) -> list[Case]:
    """Where results shall go, and where texts shall come from."""
    cases = []
    outs: tuple[tuple[str, dict[str, bytes | str]], ...] = (
        ("f", {"f": b"x"}),
        ("f/x", {"f": b"x"}),
        ("pipe", {"pipe": FIFO}),
        (LONG, {}),
        ("a/" + LONG, {}),
        ("bad\udcff/" + LONG, {}),
        ("circle/x", {"circle->": "circle"}),
    )
    ways = (
        (("evaluate", "tiny", "--task", "stories", "--n", "1", "--max-tokens", "2", "--quiet"), "--out"),
        (("quantize", "tiny", "--bits", "8", "--n", "0", "--quiet"), "--out"),
        (("activations", "tiny", "--layer", "1", "--task", "stories", "--max-rows", "2", "--yes", "--quiet"), "--out"),
    )
    for words, option in ways:
        for place, files in outs:
            cases.append(
                Case("output", (*words, f"{option}={place}"), (option, place[:30], repr(place)[1:-1][:30]), files)
            )
    pictures: tuple[tuple[str, dict[str, bytes | str]], ...] = (
        ("f/x.png", {"f": b"x"}),
        ("nowhere/x.png", {}),
        (LONG + ".png", {}),
        ("x.nonsense", {}),
        ("pipe.png", {"pipe.png": FIFO}),
    )
    for place, files in pictures:
        cases.append(
            Case("output", ("data", "show", "stories", "--n", "2", f"--plot={place}"), ("--plot", place[:30]), files)
        )
    for option in ("--text", "--rollouts", "--import-pt", "--paired"):
        for place, files in (
            ("nowhere", {}),
            ("d", {"d": FOLDER}),
            ("pipe", {"pipe": FIFO}),
            (LONG, {}),
            ("e", {"e": b""}),
            ("b", {"b": b"\xff\xfe" * 9}),
            ("/dev/zero", {}),
            ("circle", {"circle->": "circle"}),
            ("f/x", {"f": b"x"}),
        ):
            task = ("--task", "stories") if option == "--paired" else ()
            start = (
                "activations",
                "tiny",
                "--layer",
                "1",
                "--max-rows",
                "2",
                "--yes",
                "--quiet",
                "--out",
                "acts",
                *task,
            )
            cases.append(Case("input", (*start, f"{option}={place}"), (option, place[:30]), files))
    for place, files in (
        ("nowhere", {}),
        ("d", {"d": FOLDER}),
        ("pipe", {"pipe": FIFO}),
        (LONG, {}),
        ("f", {"f": b"x"}),
        ("f/x", {"f": b"x"}),
    ):
        cases.append(
            Case(
                "input",
                ("generate", "tiny", "x", f"--sae={place}", "--steer", "1=2", "--max-tokens", "2"),
                ("--sae", place[:30]),
                files,
            )
        )
        cases.append(Case("input", ("sae", "features", place), (place[:30], "DICTIONARY"), files))
    return cases


def named_run_cases(random: Random) -> list[Case]:
    """Runs that are not there, by names that lead elsewhere; commands and words that there are not."""
    cases = []
    for action in ("show", "compare", "delete", "prune", "export", "resume"):
        for name in (
            LONG,
            "..",
            "../..",
            "/etc",
            "/",
            "nowhere",
            "²",
            "bad\udcff",
            "a b",
            "\x1b[2J",
            "x" * 5000,
            "a/b/c/d",
            ".",
            "f",
            "f/x",
            "pipe",
            "[",
            "*?",
            "runs/runs",
        ):
            words = ["runs", action, *(["x"] if action == "compare" else []), name]
            words += ["--to", "to"] if action == "export" else ["--yes"] if action in ("delete", "prune") else []
            files = {"f": b"x"} if name.startswith("f") else {"pipe": FIFO} if name == "pipe" else {}
            cases.append(
                Case(
                    "named run",
                    tuple(words),
                    (name[:30], repr(name)[1:-1][:30], *(["'x'"] if action == "compare" else [])),
                    files,
                )
            )
    for words, names in (
        (("trian",), ("trian",)),
        (("",), ("''", "COMMAND")),
        (("²",), ("²",)),
        (("TRAIN",), ("TRAIN",)),
        (("x" * 5000,), ("xxx",)),
        (("bad\udcff",), ("bad",)),
        (("--nonsense",), ("--nonsense",)),
        (("runs", "nonsense"), ("nonsense",)),
        (("sae", "nonsense"), ("nonsense",)),
        (("sae",), ("ACTION", "action")),
        (("recipes", "nonsense"), ("nonsense",)),
        (("data", "nonsense"), ("nonsense",)),
        (("explain", "nonsense"), ("nonsense",)),
        (("explain", ""), ("''", "NAME", "name")),
        (("explain", "nowhere:f"), ("nowhere",)),
        (("explain", ":"), (":",)),
        (("data", "show", "nonsense"), ("nonsense",)),
        (("data", "show", ""), ("task", "TASK", "NAME")),
        (("data", "show"), ("name", "NAME")),
        (("data", "show", "nowhere:f"), ("nowhere",)),
        (("data", "show", "jsonl"), ("path",)),
        (("data", "show", "x" * 5000), ("xxx",)),
        (("recipes", "show"), ("NAME", "name")),
        (("recipes", "show", "nonsense"), ("nonsense",)),
        (("recipes", "list", "x", "y"), ("y", "unrecognized")),
        (("train", "tiny/grpo", "more"), ("more",)),
        (("train", "tiny/grop"), ("tiny/grop",)),
        (("compare", "tiny/grpo"), ("posttrain sweep",)),
        (("sae", "train", "tiny/grpo"), ("tiny/grpo",)),
        (("sae", "diff", "tiny/grpo"), ("tiny/grpo",)),
        (("train", "sweep/ppo-grpo-dpo"), ("sweep",)),
        (("evaluate", "tiny", "--task", "nonsense"), ("nonsense",)),
        (("evaluate", "tiny", "--task", ","), ("--task",)),
        (("evaluate", "tiny", "--template", "nonsense", "--task", "stories"), ("nonsense",)),
        (("evaluate", "tiny", "--engine", "nonsense", "--task", "stories"), ("nonsense",)),
        (("evaluate", "tiny", "--task", "stories", "--k", "5", "--n", "1"), ("--k", "k")),
        (("generate", "tiny", "--template", "nonsense"), ("nonsense",)),
        (("generate", "tiny", "x" * 200_000), ("prompt", "PROMPT", "tokens")),
        (("generate", "tiny", "bad \udcff"), ("prompt", "PROMPT", "'bad")),
        (("runs", "--state", "nonsense"), ("nonsense", "--state")),
        (("runs", "--sort", "²"), ("--sort", "²")),
        (("runs", "prune", "--all", "--keep", "²", "--yes"), ("--keep",)),
        (("runs", "prune", "--all", "--keep", "nonsense", "--yes"), ("--keep",)),
        (("serve", "nowhere/at/all"), ("nowhere",)),
        (("serve", "tiny", "--host", "0.0.0.0"), ("--api-key",)),
        (("serve", "tiny", "--api-key", "short"), ("--api-key",)),
        (("serve-command", "nowhere/at/all"), ("nowhere",)),
        (("generate", "tiny", "x", "--steer", "²:1"), ("--steer",)),
        (("generate", "tiny", "x", "--steer", "1:nan"), ("--steer",)),
        (("generate", "tiny", "x", "--steer", ":"), ("--steer",)),
        (("generate", "tiny", "x", "--steer", "1:" + HUGE), ("--steer",)),
        (
            ("activations", "tiny", "--site", "nonsense", "--task", "stories", "--out", "acts"),
            ("nonsense", "--site", "--layer"),
        ),
        (
            ("activations", "tiny", "--site", "resid.²", "--task", "stories", "--out", "acts"),
            ("resid.²", "--site", "--layer"),
        ),
        (
            ("activations", "tiny", "--site", "resid." + HUGE, "--task", "stories", "--out", "acts"),
            ("resid.", "--site", "--layer"),
        ),
        (("activations", "tiny", "--layer", "99", "--task", "stories", "--out", "acts"), ("99", "--layer")),
        (("sweep", "mine.yaml", "--rows", "nonsense"), ("nonsense",)),
        (("sweep", "mine.yaml", "--rows", ","), ("--rows",)),
        (("sweep", "mine.yaml", "--seeds", "1000000"), ("--seeds",)),
    ):
        cases.append(Case("words", words, names, {"mine.yaml": dump(COMPARISON)} if "mine.yaml" in words else {}))
    for name in (LONG, "a/b", "²", "", "..", "a b", "bad\\udcff", "3"):
        for section, recipe, words in (("rows", COMPARISON, ("sweep",)), ("rows", STUDY, ("sweep",))):
            text = (
                dump({k: v for k, v in recipe.items() if k != section}).decode()
                + f"{section}:\n  {name if name in ('null', '3') else chr(34) + name + chr(34)}: {{recipe: rl/grpo}}\n"
            )
            if name == "3":
                continue
            cases.append(
                Case(
                    "method name",
                    (*words, "mine.yaml"),
                    (section, name[:30], "mine.yaml"),
                    {"mine.yaml": text.encode()},
                )
            )
    return cases


def good_cases(random: Random) -> list[Case]:
    """What must work: a repair that refuses too much fails here."""
    lrs = ("1e-4", "3.0e-5", "0.1", "1E-3", ".5", "1_0")
    cases = [
        Case("good", (*words, "mine.yaml", "--dry-run"), (), {"mine.yaml": dump(recipe)}, good=True)
        for words, recipe in LOADERS.values()
        if words != ("study",)
    ]
    for lr in lrs:
        cases.append(
            Case("good", ("train", "mine.yaml", "--dry-run", "--train.lr", lr), (), {"mine.yaml": dump(RL)}, good=True)
        )
        cases.append(
            Case(
                "good",
                ("train", "mine.yaml", "--dry-run"),
                (),
                {"mine.yaml": with_value(RL, "train.lr", lr)},
                good=True,
            )
        )
    for key, text in (
        ("train.gradient_checkpointing", "yes"),
        ("train.gradient_checkpointing", "on"),
        ("train.gradient_checkpointing", "False"),
        ("train.steps", "1_000"),
        ("train.steps", "0x10"),
        ("train.steps", "'8'"),
        ("train.steps", "8.0"),
        ("train.seed", "1" + "0" * 30),
        ("train.seed", "0"),
        ("description", "2024-05-17"),
        ("description", "1:30"),
        ("description", "yes"),
        ("description", "'010'"),
        ("description", '"\\u00e9 \\U0001F600"'),
        ("train.max_grad_norm", "null"),
        ("train.max_grad_norm", "~"),
        ("train.max_grad_norm", ""),
        ("rewards", "correct"),
        ("rewards", "[correct, {name: xml_soft, weight: -0.5}]"),
        ("objective", "grpo"),
        ("objective", "!!map {name: grpo}"),
        ("description", "!!str 3"),
        ("rollout.max_tokens", "32768"),
        ("rollout.group", "1024"),
        ("train.tokens_per_micro", "131072"),
        ("model.adapter", "{rank: 2, targets: [q_proj, v_proj]}"),
        ("model.adapter", "{rank: 2}"),
        ("train.lr", "+1e-4"),
        ("train", "&t {steps: 1, lr: 0.001}\neval: {n: 3}"),
        ("description", "|\n  text\n  over lines"),
        ("rollout.top_p", "1"),
        ("task.families", "[chain]"),
        ("description", "<<"),
        ("description", "="),
    ):
        cases.append(
            Case("good", ("train", "mine.yaml", "--dry-run"), (), {"mine.yaml": with_value(RL, key, text)}, good=True)
        )
    merging = b"shared: &s {steps: 1, lr: 0.001}\n"
    text = dump(SFT).decode().replace("train:\n", "train:\n  <<: {warmup_steps: 2}\n")
    cases.append(Case("good", ("train", "mine.yaml", "--dry-run"), (), {"mine.yaml": text.encode()}, good=True))
    assert merging
    for before, after in (
        (b"\xef\xbb\xbf", b""),
        (b"", b"...\n"),
        (b"---\n", b""),
        (b"%YAML 1.2\n---\n", b""),
        (b"# \xc3\xa9\n", b"\n\n\n"),
    ):
        cases.append(
            Case("good", ("train", "mine.yaml", "--dry-run"), (), {"mine.yaml": before + dump(RL) + after}, good=True)
        )
    cases.append(
        Case(
            "good", ("train", "mine.yaml", "--dry-run"), (), {"mine.yaml": dump(RL).replace(b"\n", b"\r\n")}, good=True
        )
    )
    for words in (
        ("recipes",),
        ("recipes", "show", "tiny/grpo"),
        ("explain",),
        ("explain", "grpo"),
        ("explain", "train"),
        ("data",),
        ("runs",),
        ("serve-command", "tiny"),
        ("--version",),
        ("train", "tiny/grpo", "--dry-run"),
        ("sweep", "ppo-grpo-dpo", "--dry-run"),
        ("runs", "--runs-dir", "nowhere"),
        ("data", "show", "stories", "--n", "3"),
        ("train", "--help"),
        ("sae", "train", "tiny/sae", "--dry-run"),
        ("explain", "--help"),
        ("generate", "tiny", "hello", "--max-tokens", "3", "--seed", "1" + "0" * 30),
        ("data", "show", "stories", "--n=3", "--task.size=30", "--examples", "0"),
    ):
        cases.append(Case("good", words, (), {}, good=True))
    return cases


__all__ = ["argument_cases", "good_cases", "merged", "override_cases", "place_cases"]
