"""No command that opens runs imports what a stored recipe names; what one's own recipe names is imported as ever."""

from __future__ import annotations

import io
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from untrusted_sources import CODE, make_evil, plain_recipe

import fake_mcp
from posttrain import registry
from posttrain import untrusted as consent
from posttrain.cli import build_parser, main
from posttrain.errors import UnallowedCode
from refusing import refuses

# Recipes of strangers: the words that training alone needs, those that answering needs, those of a mixture, those of
# completions of several turns, and of a server of tools.
TRAINS = {
    "objective": CODE,
    "advantage": CODE,
    "aggregate": CODE,
    "optimizer": CODE,
    "track": [CODE],
    "eval": {"tasks": [CODE]},
}
ANSWERS = {"task": CODE, "prompt": {"template": CODE}, "rewards": [CODE, {"name": "correct", "mode": CODE}]}
MIXES = {"task": {"name": "mixture", "parts": [{"task": "stories"}, {"name": "more", "task": CODE}]}}
PLAYS = {"environment": CODE, "tools": [CODE]}
STARTS = {"tools": [{"name": "mcp", "command": ["touch", "it-ran"]}]}

SHORT = ["--max-tokens", "4"]
# Every command that may meet a run, as it would be typed; those that need none say so with an empty list.
COMMANDS: dict[str, list[list[str]]] = {
    "demo": [],  # trains two recipes of its own; a taken name is compared as `train` compares it
    "explain": [],
    "env": [],  # opens no run
    "completion": [],  # reads names of folders
    "conformance": [],  # runs the file that the reader names
    "exercise": [],  # runs the file that the reader names
    "models": [],  # opens no run
    "new": [],
    "train": [
        ["tiny/grpo", "--run", "evil"],
        ["tiny/grpo", "--run", "evil", "--resume"],
        ["runs/evil/recipe.yaml", "--run", "evil", "--resume"],
        ["runs/evil/recipe.yaml", "--run", "again"],
        ["runs/evil/better.yaml", "--dry-run"],
        ["own/link.yaml", "--dry-run"],
        ["own/extends.yaml", "--dry-run"],
        ["tiny/sft", "--model.name", "runs/evil", "--dry-run"],
    ],
    "sweep": [
        ["own/compare.yaml", "--dry-run"],
        ["runs/evil-compare/sweep.yaml", "--dry-run"],
        ["own/plain-compare.yaml", "--run", "evil-compare"],
        ["own/chain.yaml", "--dry-run"],
    ],
    "what-if": [["evil", "--at", "1"], ["evil", "--at", "1", "train.lr=0.5", "--quiet"]],
    "doctor": [["evil"], ["evil", "--json"], ["evil", "--audit", "1"]],
    "evaluate": [
        ["evil", "--limit", "2", *SHORT, "--out", "out"],
        ["evil", "tiny", "--limit", "2", *SHORT, "--out", "two"],
    ],
    "generate": [["evil", "Hello", *SHORT], ["evil", *SHORT], ["runs/evil/checkpoints/step-000001", "Hi", *SHORT]],
    "chat": [["evil", *SHORT], ["evil", "--no-tools", *SHORT]],
    "studio": [["evil"]],
    "serve": [["evil"], ["evil", "--train"]],
    "serve-command": [["evil"]],
    "quantize": [["evil", "--bits", "8"]],
    "recipes": [["show", "runs/evil/recipe.yaml"]],
    "data": [["show", "stories", "--model", "runs/evil", "--limit", "3"]],
    "activations": [["evil", "--layer", "1", "--max-rows", "8", "--out", "acts", "--yes"]],
    "sae": [],
    "sae train": [["runs/evil-sae/recipe.yaml", "--run", "new"], ["runs/evil-sae/recipe.yaml", "--dry-run"]],
    "sae features": [["runs/evil-sae"]],
    "sae diff": [["tiny", "evil", "--layer", "1", "--dry-run"]],
    "runs": [],
    "runs list": [[], ["--cells"]],
    "runs show": [["evil"], ["evil-compare"]],
    "runs compare": [["evil", "evil-sae"]],
    "runs prune": [["evil", "--keep", "last", "--yes"]],
    "runs delete": [["evil-sae", "--yes"]],
    "runs export": [["evil", "--to", "exported"]],
    "runs resume": [["evil"], ["evil", "--steps", "3"]],
    "runs manage": [[]],
}
KINDS = {"trains": TRAINS, "answers": ANSWERS, "mixes": MIXES, "plays": PLAYS, "starts": STARTS}
# Every command meets the recipe whose names answering needs, too; the other kinds meet those commands that read more.
CASES = [("answers", name, arguments) for name, several in COMMANDS.items() for arguments in several]
CASES += [
    (kind, name, COMMANDS[name][place])
    for kind in ("trains", "mixes", "plays", "starts")
    for name, place in (("train", 3), ("sweep", 2), ("evaluate", 0), ("chat", 0), ("runs show", 0), ("runs resume", 0))
]
CASES.append(("plays", "train", ["runs/evil/better.yaml", "--dry-run"]))


@pytest.fixture
def place(tmp_path: Path, no_code_allowed: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory that Python imports from, with nothing allowed yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if name.partition(".")[0] in ("runs", "own", "mine"):
            del sys.modules[name]


def lay_out(folder: Path, changes: dict[str, Any]) -> Path:
    """Runs of a stranger's, and files of one's own that point at them; returns what must not appear."""
    marker = folder / "it-ran"
    evil = make_evil(folder / "runs" / "evil", changes, marker)
    shutil.copyfile(evil / "recipe.yaml", evil / "better.yaml")
    sae = {"dictionary": CODE, "activations": {"model": "tiny", "task": "stories", "layer": 1}}
    make_evil(folder / "runs" / "evil-sae", {}, marker, recipe=sae, with_weights=False)
    base = {key: value for key, value in plain_recipe().items() if key not in ("objective", "advantage", "aggregate")}
    entry = folder / "runs" / "evil-compare" / "cells" / "grpo-seed0"
    make_evil(entry, changes, marker, with_weights=False)
    compare = {"base": {**base, **changes}, "rows": {"grpo": {"objective": CODE}}, "seeds": 1}
    (folder / "runs" / "evil-compare" / "sweep.yaml").write_text(yaml.safe_dump(compare))
    own = folder / "own"
    own.mkdir()
    (own / "link.yaml").symlink_to(evil / "recipe.yaml")
    (own / "extends.yaml").write_text("extends: ../runs/evil/recipe.yaml\n")
    plain = {"base": base, "rows": {"grpo": "rl/grpo"}, "seeds": 1}
    (own / "plain-compare.yaml").write_text(yaml.safe_dump(plain))
    (own / "compare.yaml").write_text(yaml.safe_dump({**plain, "start": "runs/evil/recipe.yaml"}))
    rows = {"rm": "tiny/rm", "judge": "tiny/rm", "a": {"recipe": "rl/grpo", "needs": "rm"}}
    chain = {"start": "runs/evil/recipe.yaml", "rows": rows, "head_to_head": {"judge": "judge", "task": "stories"}}
    (own / "chain.yaml").write_text(yaml.safe_dump(chain))
    return marker


def run(command: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, text: str = "Hi\n") -> int:
    """A command in this process; what it raises is its own defect."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    try:
        return main([*command.split(), *arguments])
    except SystemExit as end:
        return int(end.code or 0)


def test_every_command_is_attacked() -> None:
    assert set(build_parser()[1]) == set(COMMANDS), "a new command opens runs, or says in COMMANDS that it does not"


@pytest.mark.parametrize(("kind", "command", "arguments"), CASES, ids=[" ".join([k, n, *a]) for k, n, a in CASES])
def test_command_on_an_untrusted_run_runs_none_of_its_code(
    kind: str,
    command: str,
    arguments: list[str],
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    marker = lay_out(place, KINDS[kind])
    if command in ("studio", "serve"):
        monkeypatch.setattr(socket, "create_server", lambda *_, **__: nullcontext())
        monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)
    code = run(command, arguments, monkeypatch)
    assert code in (0, 1, 2), capsys.readouterr().err
    assert not marker.exists(), f"{command} {' '.join(arguments)} ran the code of a stranger"
    assert "runs.evil.payload" not in sys.modules


def test_the_payload_would_run(place: Path) -> None:
    """What the tests above look for does happen where somebody allows it."""
    marker = lay_out(place, TRAINS)
    with refuses(UnallowedCode, "--allow-code runs.evil.payload:f"):
        registry.find("objective", CODE, "objective")
    assert not marker.exists()
    consent.declare_code(CODE, place)
    registry.find("objective", CODE, "objective")
    assert marker.exists()


def test_a_command_of_a_stranger_s_run_is_started_once_it_is_allowed(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = fake_mcp.installed(monkeypatch)
    lay_out(place, STARTS)
    asked = ["evil", "--limit", "2", *SHORT, "--out", "out"]
    for command, arguments in (("runs resume", ["evil"]), ("evaluate", asked)):
        assert run(command, arguments, monkeypatch) == 2
        assert "tools.0.command: 'touch it-ran' is a command that a stored recipe starts" in capsys.readouterr().err
    assert run("chat", ["evil", *SHORT], monkeypatch) == 2
    stated = capsys.readouterr().err
    assert "'touch it-ran' is a command that a stored recipe starts" in stated
    assert "--no-tools" in stated
    assert run("chat", ["evil", "--no-tools", *SHORT], monkeypatch) == 0
    assert server.started == []
    assert run("chat", ["evil", *SHORT, "--allow-code", "command=touch it-ran"], monkeypatch) == 0
    assert server.started == [["touch", "it-ran"]]
    assert server.opened == server.closed == 1
    server.started.clear()
    consent._FOLDERS.clear()
    assert run("evaluate", [*asked, "--allow-code", "command=touch it-ran"], monkeypatch) == 0
    assert server.started == [["touch", "it-ran"]]
    assert server.opened == server.closed == 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rewards": [CODE]}, "rewards.0: reward"),
        ({"environment": CODE}, "environment: environment"),
        ({"tools": [CODE]}, "tools.0: tool"),
    ],
)
def test_a_resume_states_what_the_recipe_names_and_how_to_allow_it(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    named: str,
) -> None:
    marker = lay_out(place, changes)
    before = {path: path.read_bytes() for path in (place / "runs" / "evil").rglob("*") if path.is_file()}
    assert run("runs resume", ["evil"], monkeypatch) == 2
    message = capsys.readouterr().err
    assert f"{named} '{CODE}' is Python code that a stored recipe names" in message
    assert f"--allow-code {CODE}" in message
    assert {path: path.read_bytes() for path in before} == before
    assert run("runs resume", ["evil", "--allow-code", CODE], monkeypatch) != 0  # it has no optimizer to go on with
    assert marker.exists()


MINE = "def calm(text, *, limit: int = 5):\n    return float(len(text) < limit)\n"


def own_recipe(folder: Path) -> Path:
    """One's own recipe, with one's own module beside it."""
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(MINE)
    recipe = {"extends": "tiny/grpo", "rewards": ["correct", {"name": "mine:calm", "limit": 7}]}
    (folder / "mine.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "mine.yaml"


def test_ones_own_recipe_finds_its_code_next_to_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", [str(own_recipe(place / "own")), "--dry-run"], monkeypatch) == 0
    assert "- name: mine:calm\n  weight: 1.0\n  limit: 7" in capsys.readouterr().out


def test_what_is_typed_is_found_in_the_working_directory(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "mine.py").write_text(MINE)
    for arguments in (["--rewards", "mine:calm"], ["--rewards=[correct, {name: mine:calm, limit: 9}]"]):
        assert run("train", ["tiny/grpo", "--dry-run", *arguments], monkeypatch) == 0
        assert "name: mine:calm" in capsys.readouterr().out


def test_a_stored_recipe_with_ones_own_code_needs_its_name_and_maybe_its_folder(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own_recipe(place / "own")
    make_evil(place / "runs" / "mine", {"rewards": ["correct", {"name": "mine:calm", "limit": 7}]}, place / "it-ran")
    stored = ["runs/mine/recipe.yaml", "--dry-run"]
    assert run("train", stored, monkeypatch) == 2
    assert run("train", [*stored, "--allow-code", "mine:calm"], monkeypatch) == 2
    assert "'mine'" in capsys.readouterr().err
    assert run("train", [*stored, "--allow-code", "mine:calm@own"], monkeypatch) == 0
    assert run("train", [*stored, "--allow-code", "mine:calm@nowhere"], monkeypatch) == 2
    assert "'nowhere'" in capsys.readouterr().err


def test_a_run_with_code_of_ones_own_is_queried_without_it_and_measured_with_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own_recipe(place)
    changes = {"rewards": ["correct", {"name": "mine:calm", "limit": 7}], "objective": "mine:objective"}
    make_evil(place / "runs" / "mine", changes, place / "it-ran")
    assert run("generate", ["mine", "Hello", *SHORT], monkeypatch) == 0
    assert "Hello" in capsys.readouterr().out
    measured = ["mine", "--limit", "2", *SHORT, "--task", "stories", "--out", "out"]
    assert run("evaluate", measured, monkeypatch) == 2
    assert "--allow-code mine:calm" in capsys.readouterr().err
    assert run("evaluate", [*measured, "--allow-code", "mine:calm"], monkeypatch) == 0
