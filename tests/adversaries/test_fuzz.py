"""Bad command lines, recipes, models and data: one message that names place and remedy, exit code 2, nothing left.

The cases are made by the files ``fuzz_*.py`` next to this one, from the parser, the sections, the registered components
and lists of what has gone wrong before; each knows by its making that it is bad and what the message has to name.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import signal
import tempfile
from pathlib import Path
from random import Random
from types import FrameType

import fuzz_arguments
import fuzz_data
import fuzz_keys
import fuzz_texts
import pytest
import torch  # noqa: F401  its libraries take addresses, which are not those of a case
from fuzz_case import Case

from posttrain import cli, registry
from posttrain.recipes.recipe import Recipe

FEW, MANY = 120, 5000
# Limits of one case: of CPU time, and of all time, since other work may hold the cores.
LIMITS = ((signal.ITIMER_PROF, 20.0), (signal.ITIMER_REAL, 300.0))
LONGEST_MESSAGE = 6000
MOST_MEMORY = 2 << 30  # bytes of addresses that the cases may add to those of the process
GENERATORS = (
    fuzz_keys.key_cases,
    fuzz_keys.option_cases,
    fuzz_arguments.argument_cases,
    fuzz_arguments.override_cases,
    fuzz_arguments.place_cases,
    fuzz_texts.text_cases,
    fuzz_texts.file_cases,
    fuzz_data.data_cases,
    fuzz_data.good_data_cases,
    fuzz_arguments.good_cases,
)
# What a message contains next to what is wrong: what would work.
REMEDY = re.compile(
    r"\b(should|must|give|choose|known|needs?|needed|there (is|are)|there:|did you mean|write|use|at least|at most|"
    r"set|import|makes one|try|no such|leave|expected|run it with|lists|invalid choice|unrecognized|instead|required|"
    r"has no|takes|holds|save|download|wait|remove|replace|rename|merge|keep|add|check|available|supported|requires?|"
    r"name|train it with|is no|lower|drop|work on|means?|says)\b"
)


class DidNotEnd(BaseException):
    """What ends a case that hangs: nothing that a command handles, as it handles errors of the system."""


def make_cases(seed: int, count: int) -> list[Case]:
    """``count`` cases, drawn in turn from each class until it is used up."""
    random = Random(seed)
    classes = [make(random) for make in GENERATORS]
    for cases in classes:
        random.shuffle(cases)
    chosen: list[Case] = []
    while len(chosen) < count and any(classes):
        chosen += [cases.pop() for cases in classes if cases]
    return chosen[:count]


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """What lies in a folder: kind and size by path; links are not followed."""
    found = {}
    for top, folders, files in os.walk(folder):
        for name in (*folders, *files):
            state = Path(top, name).lstat()
            found[str(Path(top, name).relative_to(folder))] = (state.st_mode, 0 if name in folders else state.st_size)
    return found


def judge(case: Case, code: int, out: str, text: str) -> list[str]:
    """What is wrong with how the command ended."""
    message = text.lower()
    if case.good:
        faults = {f"good input ended with {code}": code != 0}
    else:
        faults = {
            f"exit code {code}": code != 2,
            "not one message": len(re.findall(r"^posttrain(?: [a-z -]+)?: ", text, re.MULTILINE)) != 1,
            "no place": not any(name.lower() in message for name in case.names),
            "no remedy": not REMEDY.search(message),
            f"a message of {len(text)} characters": len(text) > LONGEST_MESSAGE,
        }
    faults["a traceback is shown"] = "Traceback" in out or "Traceback" in text
    return [fault for fault, is_there in faults.items() if is_there]


def run_cases(
    count: int, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run each case in a folder of its own; what did not end as it should is shown."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise DidNotEnd

    monkeypatch.setattr(tempfile, "tempdir", str(folder / "temporary"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))  # which importing torch makes, once
    handlers = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    failed = []
    cases = make_cases(seed, count)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_MEMORY, limits[1]))
    try:
        for index, case in enumerate(cases):
            work, temporary = folder / str(index), folder / "temporary"
            work.mkdir()
            temporary.mkdir()
            monkeypatch.chdir(work)
            case.lay_out(work)
            before = listing(work)
            for timer, seconds in LIMITS:
                signal.setitimer(timer, seconds)
            try:
                faults = judge(case, cli.main([*case.words]), *capsys.readouterr())
            except SystemExit as end:
                faults = judge(case, int(end.code or 0), *capsys.readouterr())
            except (Exception, DidNotEnd) as error:  # noqa: BLE001  it would be a traceback, or was stopped
                faults = [f"traceback: {error!r}"]
                capsys.readouterr()
            finally:
                for timer, _ in LIMITS:
                    signal.setitimer(timer, 0)
            left = [] if case.good else sorted(name for name, _ in listing(work).items() ^ before.items())
            left += os.listdir(temporary)
            if faults or left:
                failed.append(f"{case.kind}: {faults} left: {left[:4]} {[word[:200] for word in case.words]}")
            monkeypatch.chdir(folder)
            shutil.rmtree(work)
            shutil.rmtree(temporary)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert not failed, "\n".join(failed)
    assert len(cases) == count


def test_few_bad_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_cases(FEW, 12, tmp_path, monkeypatch, capsys)


@pytest.mark.slow
def test_many_bad_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_cases(MANY, 5, tmp_path, monkeypatch, capsys)


def test_every_command_option_key_word_and_task_is_tried() -> None:
    random = Random(0)
    tried = {word for case in fuzz_arguments.argument_cases(random) for word in case.words}
    for words, parser in fuzz_arguments.parsers():
        for action in parser._actions:
            options = [o for o in action.option_strings[:1] if not isinstance(action, argparse._HelpAction)]
            assert all(any(word.startswith(option) for word in tried) for option in options), (words, options)
    with_body = {name for name, command in cli.COMMANDS.items() if command.body}
    assert {" ".join(words) for words, _ in fuzz_arguments.parsers()} >= with_body
    keys = {name for case in fuzz_keys.key_cases(random) for name in case.names}
    free = {key for key, field in fuzz_keys.walk(Recipe) if not fuzz_keys.is_component(field.annotation)}
    assert free <= keys
    options = {name for case in fuzz_keys.option_cases(random) for name in case.names}
    for kind, (_, _, where) in fuzz_keys.COMPONENT_PLACES.items():
        for entry in registry.entries(kind).values():
            wanted = {f"{where}.{key}" for key in entry.options_model.model_fields}
            assert wanted - {f"{where}.{key}" for key in ("texts", "variables", "options", "mode")} <= options
    assert fuzz_keys.COMPONENT_PLACES.keys() == set(registry.ALL_KINDS) - {
        "batch_field",
        "principle",
    }  # no key names these
    assert fuzz_data.path_tasks().keys() == fuzz_data.ROWS.keys()
