"""Tables: whole in a pipe, with the name in a narrow terminal, and as JSON where that is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.table import Table

from posttrain.cli import main
from posttrain.commands.runs import print_runs
from posttrain.evaluation.tables import TextTable
from posttrain.runs.directory import RunDirectory, RunStatus
from posttrain.runs.listing import list_runs
from posttrain.terminal.console import OutputConsole, Text, open_console, print_table, tables_as_json

LONG = " ".join(["word"] * 80)


def make_table() -> Table:
    table = Table("name", "what", title=Text("things"))
    table.add_column("number", justify="right")
    table.add_row(Text("a\x1b[31m"), LONG, "1")
    table.add_row("b", "x,\ny|z", "2")
    return table


def test_json_holds_every_value_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    open_console().print(make_table())
    assert LONG in capsys.readouterr().out, "a pipe gets the whole width"
    with tables_as_json():
        console = open_console()
        console.print("a line")
        print("and another")
        console.print(make_table())
        print_table(console, TextTable("more", ["k", "95 %", "95 %"], [["1", "2", "3"]]))
    captured = capsys.readouterr()
    assert captured.err == "a line\nand another\n"
    assert "\x1b" not in captured.out
    things, more = json.loads(captured.out)
    assert things["rows"] == [
        {"name": "a\\x1b[31m", "what": LONG, "number": "1"},
        {"name": "b", "what": "x, y|z", "number": "2"},
    ]
    assert (things["title"], more["title"]) == ("things", "more")
    assert more["rows"] == [{"k": "1", "95 %": "2", "95 % (2)": "3"}]


COMMANDS = [["data"], ["explain", "aggregation"], ["runs"], ["runs", "show", "a"]]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_with_tables_take_a_form(
    words: list[str], runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs.parent)
    assert main([*words, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("a", "a-run-with-a-name"):
        run = RunDirectory(tmp_path / "runs" / name)
        run.folder.mkdir(parents=True)
        run.recipe_path.write_text(
            "model: {name: tiny}\ntask: {name: stories}\nobjective: {name: grpo}\ntrain: {steps: 10}\n"
        )
        run.write_status(RunStatus("finished", 10, 10, 1, "here", 5.0))
    return tmp_path / "runs"


def test_print_runs_narrow_terminal_folds_names_and_cuts_nothing(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = OutputConsole(width=60, force_terminal=True, color_system=None, markup=False)
    print_runs(console, list_runs(runs))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "state", "step", "model", "objective", "held-out", "size"]
    assert all(len(line.rstrip()) <= 60 for line in lines)
    assert "".join(line.split(" ")[0] for line in lines[2:]) == "a-run-with-a-name"
