"""No byte of a stranger's text reaches the terminal as it is: every command, every option, hostile files and models."""

from __future__ import annotations

import argparse
import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from hostile_text import HOSTILE, RECIPE, SEEN, break_run, leaks, poison_run, write_recipes
from rich.table import Table
from yaml import safe_dump

from posttrain import registry
from posttrain.cli import build_parser, main
from posttrain.terminal.console import Text, open_console
from posttrain.untrusted import harmless, harmless_json

Show = Callable[[Sequence[str]], str]
ENDLESS = ("--help", "--traceback", "--browser")
# By command, an honest line of it that ends soon; hostile words are put in place of its parts and behind it.
HONEST: dict[tuple[str, ...], list[str]] = {
    ("demo",): ["--quiet", "--runs-dir", "blocked/runs"],
    ("train",): ["honest.yaml", "--dry-run"],
    ("sweep",): ["sweep/ppo-grpo-dpo", "--dry-run"],
    ("what-if",): ["honest", "--at", "1", "drop", "prompt:x"],
    ("doctor",): ["evil"],
    ("env",): ["--packages"],
    ("completion",): ["words", ":runs", ":show", ":"],
    ("evaluate",): ["tiny", "--limit", "2", "--max-tokens", "2"],
    ("generate",): ["tiny", "Hello", "--max-tokens", "2"],
    ("chat",): ["tiny", "--max-tokens", "2"],
    ("serve",): ["no/such/model"],
    ("serve-command",): ["tiny"],
    ("quantize",): ["tiny", "--bits", "7"],
    ("studio",): ["no/such/model"],
    ("recipes",): ["show", "tiny/grpo"],
    ("models",): ["list"],
    ("explain",): ["grpo"],
    ("conformance",): ["no/such/file.py"],
    ("new",): ["blocked"],
    ("exercise",): ["list"],
    ("data",): ["show", "stories", "--limit", "2"],
    ("runs", "list"): [],
    ("runs", "show"): ["honest"],
    ("runs", "compare"): ["honest", "evil"],
    ("runs", "prune"): ["evil", "--dry-run"],
    ("runs", "delete"): ["evil", "--dry-run"],
    ("runs", "export"): ["evil", "--to", "exported"],
    ("runs", "resume"): ["honest"],
    ("runs", "manage"): [],
    ("activations",): ["tiny", "--layer", "2", "--text", "no/such/file"],
    ("sae", "train"): ["tiny/sae", "--dry-run"],
    ("sae", "features"): ["no/such/run"],
    ("sae", "diff"): ["tiny", "honest", "--dry-run"],
}


def leaves(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Every command that does something, with its parser."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield path, parser
    for action in below:
        for name, inner in action.choices.items():
            yield from leaves(inner, (*path, name))


PARSERS = dict(leaves(build_parser()[0]))


@pytest.fixture(scope="module")
def stage(no_curves: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with an honest run, what a stranger made of it, and hostile files."""
    folder = tmp_path_factory.mktemp("terminal")
    here = Path.cwd()
    os.chdir(folder)
    try:
        Path("honest.yaml").write_text(safe_dump(RECIPE), encoding="utf-8")
        assert main(["train", "honest.yaml", "--run", "honest", "--quiet"]) == 0
        poison_run(Path("runs/honest"), Path("runs/evil"))
        poison_run(Path("runs/honest"), Path("runs") / f"e{HOSTILE.replace('/', '')}"[:120])
        break_run(Path("runs/honest"), Path("broken/damaged"))
        place = Path("runs/sweep")
        place.mkdir()
        content = {"base": {}, "start": HOSTILE, "rows": {HOSTILE: HOSTILE}}
        (place / "sweep.yaml").write_text(safe_dump(content), encoding="utf-8")
        (place / "table.md").write_text(HOSTILE, encoding="utf-8")
        (place / "results.json").write_text("{}", encoding="utf-8")
        Path("blocked").write_text("a file", encoding="utf-8")
        Path("recipes").mkdir()
        write_recipes(Path("recipes"))
    finally:
        os.chdir(here)
    return folder


@pytest.fixture
def show(
    request: pytest.FixtureRequest, stage: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Show:
    """Run a command line where the stage is; what it shows, checked. With colours and live displays unless ``pipe``."""
    monkeypatch.chdir(stage)
    in_terminal = getattr(request, "param", "terminal") == "terminal"
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    if in_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "250")

    def run(arguments: Sequence[str]) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{HOSTILE}\n/help\n/set {HOSTILE} 1\n/system {HOSTILE}\nq\n"))
        with suppress(SystemExit):
            main(list(arguments))
        shown = "".join(capfd.readouterr())
        assert leaks(shown, in_terminal=in_terminal) == [], arguments
        return shown

    return run


def hostile_lines(path: tuple[str, ...]) -> Iterator[list[str]]:
    """The honest line with each of its parts in turn replaced, and with each option that takes a text before it."""
    honest, parser = HONEST[path], PARSERS[path]
    for index, word in enumerate(honest):
        if not word.startswith("-") and not (index and honest[index - 1].startswith("-")):
            yield [*path, *honest[:index], HOSTILE, *honest[index + 1 :]]
    yield [*path, *honest, HOSTILE]
    yield [*path, *honest, f"--{HOSTILE}", "1"]
    yield [*path, *honest, f"--train.{HOSTILE}={HOSTILE}"]
    seen = set()
    for action in parser._actions:
        kind = (action.type, bool(action.choices), action.nargs) if action.type or action.choices else action.dest
        for option in action.option_strings[-1:] if kind not in seen else ():  # one option of each type of number
            seen.add(kind)
            if option not in ENDLESS and not (path == ("studio",) and option == "--port"):
                value = f"blocked/{HOSTILE}" if option == "--runs-dir" else HOSTILE
                yield [*path, f"{option}={value}", *honest]  # before what is refused in any case


def test_every_command_has_an_honest_line() -> None:
    assert set(HONEST) == set(PARSERS)


@pytest.mark.parametrize("show", ["pipe"], indirect=True)
@pytest.mark.parametrize("path", PARSERS, ids=" ".join)
def test_hostile_arguments_of_every_command(path: tuple[str, ...], show: Show) -> None:
    shown = [show(line) for line in hostile_lines(path)]
    assert sum(SEEN in text for text in shown) >= 3  # it is told what was wrong, in characters that can be seen


@pytest.mark.parametrize("show", ["pipe", "terminal"], indirect=True)
def test_hostile_runs(show: Show, stage: Path) -> None:
    (named,) = (name for name in os.listdir(stage / "runs") if name.startswith("eq"))
    show(["runs", "--format", "json"])
    show(["runs", "--runs-dir", "broken"])
    assert SEEN in show(["runs"])
    for name in ("evil", named, "sweep", "broken/damaged"):
        seen = [show(["runs", "show", name]), show(["runs", "show", "--format", "json", name])]
        assert SEEN in "".join(seen).replace("\\u001b", "\\x1b"), name
        for action in (["prune", "--dry-run"], ["delete", "--dry-run"], ["resume"]):
            show(["runs", *action, name])
        show(["runs", "export", name, "--to", "exported"])
        for command in ("generate", "evaluate", "studio", "sae features"):
            show([*command.split(), name])
        show(["train", "honest.yaml", "--run", name])
    assert SEEN in show(["runs", "compare", "honest", "evil", named])
    show(["runs", "compare", "--format", "json", "honest", "evil"])


def test_hostile_recipes(show: Show, stage: Path) -> None:
    output = 0
    for path in sorted((stage / "recipes").iterdir()):
        file = str(path.relative_to(stage))
        shown = [show(["train", file, "--dry-run"])]
        if path.stem in ("sweep", "dictionary"):
            commands = ["sweep"], ["sae", "train"], ["recipes", "show"], ["explain"]
            shown += [show([*command, file]) for command in commands]
        output += any(SEEN in text for text in shown)
    assert output >= 12


def test_hostile_data(show: Show, stage: Path) -> None:
    row = {"question": HOSTILE, "answer": HOSTILE, "problem": HOSTILE, "id": HOSTILE, HOSTILE: HOSTILE}
    for name, content in {
        "bad.jsonl": f"{{{HOSTILE}\n",
        "row.jsonl": json.dumps(row) + "\n",
        "gsm8k.jsonl": json.dumps({"question": HOSTILE, "answer": f"{HOSTILE}\n#### {HOSTILE}"}) + "\n",
        "kind.jsonl": json.dumps({"question": [HOSTILE], "answer": {HOSTILE: 1}}) + "\n",
    }.items():
        (stage / name).write_text(content, encoding="utf-8")
        for task in ("gsm8k", "preferences", "jsonl"):
            show(["data", "show", task, "--task.path", name])
        show(["evaluate", "tiny", "--task", "gsm8k", "--task.path", name, "--limit", "1", "--max-tokens", "2"])
    assert SEEN in show(["data", "show", "gsm8k", "--task.path", "gsm8k.jsonl", "--task.split", "test"])
    assert SEEN in show(["data", "show", "gsm8k", "--task.path", HOSTILE])


def test_what_a_model_writes(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "posttrain.api.measure.decode_response", lambda *_: f"{HOSTILE}</think> <answer>{HOSTILE}</answer>"
    )
    assert SEEN in show(["generate", "tiny", "--max-tokens", "2"])
    texts = f"[{harmless_json(safe_dump(HOSTILE, default_style=chr(34), width=10**6)).strip()}]"
    small = ["--limit", "2", "--max-tokens", "200", "--engine", "scripted", "--engine.texts", texts]
    show(["evaluate", "tiny", *small])
    show(["evaluate", "tiny", "honest", "--compare", *small])


def test_what_a_model_states_in_a_chat(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.commands.chat.conversation.ChatSession.reply", lambda *_: iter([HOSTILE]))
    assert show(["chat", "tiny", "--max-tokens", "2"]).count(SEEN) >= 2


def test_a_reward_that_raises_and_prints(show: Show, stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hostile_reward(text: str) -> float:
        """Raises what it was told."""
        print(HOSTILE)
        print(HOSTILE, file=sys.stderr)
        raise ValueError(HOSTILE)

    entry = registry.Entry("reward", "hostile_reward", hostile_reward, {})
    monkeypatch.setitem(registry._ENTRIES["reward"], "hostile_reward", entry)  # for this test alone

    changes = ["--rewards", "[hostile_reward]", "--eval.every", "0"]
    shown = show(["train", "honest.yaml", "--run", f"raises{len(os.listdir(stage / 'runs'))}", *changes])
    assert SEEN in shown
    (folder,) = sorted((stage / "runs").glob("raises*"))[-1:]
    assert leaks((folder / "log.txt").read_text(encoding="utf-8")) == []
    assert SEEN in (folder / "log.txt").read_text(encoding="utf-8")


DRIVER = """
import sys
import posttrain.reports.summary
from posttrain.cli import main
posttrain.reports.summary.write_summary = lambda folder: folder  # whose pictures take as long as all the rest
lines = [line.split("\\x00") for line in open(sys.argv[1], encoding="utf-8", newline="").read().split("\\x01")]
for line in lines:
    try:
        main(line)
    except SystemExit:
        pass
main(["--traceback", "train", open(sys.argv[2], encoding="utf-8", newline="").read()])
"""


def test_a_real_terminal(stage: Path) -> None:
    """Live displays, prompts and the interpreter's own traceback, on a pty."""
    changes = ["--run", "in-a-terminal", "--rewards", "[no_such_reward]"]
    lines = [["runs"], ["runs", "show", "evil"], ["train", "recipes/key.yaml"], ["train", "honest.yaml", *changes]]
    lines += [["train", "honest.yaml", "--run", "live"], ["generate", "tiny", HOSTILE, "--max-tokens", "2"]]
    lines += [["runs", "delete", "evil"]]  # which asks; a hostile name is refused before
    (stage / "lines").write_text("\x01".join("\x00".join(line) for line in lines), encoding="utf-8", newline="")
    (stage / "last").write_text(HOSTILE, encoding="utf-8", newline="")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", DRIVER, "lines", "last"]
    with subprocess.Popen(command, cwd=stage, stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True) as child:
        os.close(theirs)
        os.write(ours, b"n\nn\nn\n")
        shown = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            shown += piece
        assert child.wait(timeout=120) == 1
    os.close(ours)
    text = shown.decode("utf-8")
    assert leaks(text, in_terminal=True) == []
    assert "Traceback (most recent call last)" in text
    assert "step 1/1" in text
    assert "[y/N]" in text
    assert text.count(SEEN) > 7  # one less without the remarks
    assert "\x1b[1m" in text  # our own colours


def test_honest_text_is_unchanged() -> None:
    honest = "Grüße, naïve café e\u0301; 漢字かな한국어; العربية עברית; می‌خواهم; हिन्दी क्‍ष; × − ≈ π 𝔸\n\t│┏━┓│ ▁▂▃ – …"
    emoji = "🙂 👩‍❤️‍👨 👨🏽‍🚀 🏴󠁧󠁢󠁥󠁮󠁧󠁿 🇨🇭 ☀️ 1️⃣"
    for text in (honest, emoji, "".join(map(chr, range(0x20, 0x7F)))):
        assert harmless(text) == text
        assert Text(text).plain == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", "\\x1b[2J"),
        ("\x9b2J", "\\x9b2J"),
        ("a\r\nb\tc", "a\\r\nb\tc"),
        ("\x00\x07\x08\x7f\x85", "\\x00\\x07\\x08\\x7f\\x85"),
        ("\u202eabc\u2066", "\\u202eabc\\u2066"),
        ("a\u200db \u200c", "a\\u200db \\u200c"),
        ("\u0645\u200c\u200c\u062e", "\u0645\\u200c\\u200c\u062e"),
        ("x\ufe0f\ufe01\ufe02", "x\ufe0f\\ufe01\\ufe02"),
        ("hid\u00adden \U000e0068\U000e0069", "hid\\xadden \\U000e0068\\U000e0069"),
        ("\udc9b\ud800", "\\udc9b\\ud800"),
    ],
)
def test_what_is_written_out(text: str, shown: str) -> None:
    assert harmless(text) == shown
    assert harmless(shown) == shown


def test_json_stays_json() -> None:
    content = {HOSTILE: [HOSTILE, "Grüße 漢字 🙂"], "s": "\ud83d"}
    for is_ascii in (True, False):
        text = harmless_json(json.dumps(content, ensure_ascii=is_ascii))
        assert leaks(text) == []
        assert json.loads(text) == content
    assert "漢字" in text


def test_strings_are_never_markup(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = open_console()
    evil = "[red]a[/red] [link=file:///etc]b[/link] [/nothing] :smile:"
    table = Table(evil, title=evil, caption=evil)
    table.add_row(evil)
    console.print(evil, markup=True)
    console.print(table, width=200)
    shown = capsys.readouterr().out
    assert shown.count(evil) == 5
    assert "\x1b]8" not in shown
    assert "\x1b[31m" not in shown
