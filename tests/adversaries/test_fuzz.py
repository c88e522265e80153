"""Bad command lines, recipes, models and data, by the thousand: one message, exit code 2, nothing left behind.

The cases are made by the files ``fuzz_*.py`` beside this one, from the parser, the sections, the registered words and
lists of what has gone wrong before; each knows by its making that it is bad and what the message has to name.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import fuzz_arguments
import fuzz_data
import fuzz_keys
import pytest

from posttrain import registry
from posttrain.cli import COMMANDS
from posttrain.recipes.recipe import Recipe

FEW, MANY = 120, 5000


def run_fuzzer(folder: Path, *arguments: str) -> dict[str, Any]:
    """The report of the fuzzer's own process."""
    place = folder / "report.json"
    command = [sys.executable, str(Path(__file__).parent / "fuzz_runner.py"), "--out", str(place), *arguments]
    found = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    assert place.is_file(), found.stderr
    return dict(json.loads(place.read_text()))


def assert_all_held(report: dict[str, Any], count: int) -> None:
    output = "\n".join(
        f"{case['class']}: {case['faults']} {case['words']}\n    {case['text'][-300:]}" for case in report["failed"]
    )
    assert not report["failed"], output
    assert sum(report["total"].values()) == count


def test_few_bad_commands(tmp_path: Path) -> None:
    assert_all_held(run_fuzzer(tmp_path, "--seed", "12", "--count", str(FEW)), FEW)


@pytest.mark.slow
def test_many_bad_commands(tmp_path: Path) -> None:
    assert_all_held(run_fuzzer(tmp_path, "--seed", "5", "--count", str(MANY)), MANY)


def test_every_command_option_key_word_and_task_is_tried() -> None:
    random = Random(0)
    tried = {word for case in fuzz_arguments.argument_cases(random) for word in case.words}
    for words, parser in fuzz_arguments.parsers():
        for action in parser._actions:
            options = [o for o in action.option_strings[:1] if not isinstance(action, argparse._HelpAction)]
            assert all(any(word.startswith(option) for word in tried) for option in options), (words, options)
    with_body = {name for name, command in COMMANDS.items() if command.body}
    assert {" ".join(words) for words, _ in fuzz_arguments.parsers()} >= with_body
    keys = {name for case in fuzz_keys.key_cases(random) for name in case.names}
    free = {key for key, field in fuzz_keys.walk(Recipe) if not fuzz_keys.is_component(field.annotation)}
    assert free <= keys
    options = {name for case in fuzz_keys.option_cases(random) for name in case.names}
    for kind, (_, _, where) in fuzz_keys.COMPONENT_PLACES.items():
        for entry in registry.entries(kind).values():
            wanted = {f"{where}.{key}" for key in entry.options_model.model_fields}
            assert wanted - {f"{where}.{key}" for key in ("texts", "variables", "options", "mode")} <= options
    assert fuzz_keys.COMPONENT_PLACES.keys() == registry.COMPONENT_MODULES.keys() - {
        "batch_field",
        "principle",
    }  # no key names these
    assert fuzz_data.path_tasks().keys() == fuzz_data.ROWS.keys()
