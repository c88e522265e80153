"""`posttrain exercise`: the library's own functions are correct, and known mistakes are named."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from posttrain.cli import main
from posttrain.commands.exercises import checking, command
from posttrain.commands.exercises.checking import EXERCISES
from posttrain.graders.sandbox.workers import Limits

HALF = "import torch\n\n\ndef group_advantage(rewards):\n    centred = rewards - rewards.mean(1, keepdim=True)\n"


def check(name: str, source: str) -> dict[str, str]:
    """The verdict on a text, without a process of its own."""
    return checking.check({"name": name, "path": f"{name}.py", "source": source})


@pytest.mark.parametrize("name", EXERCISES)
def test_exercise_given_the_library_function_is_correct(name: str) -> None:
    source = f"from posttrain.commands.exercises.checking import EXERCISES\n{name} = EXERCISES[{name!r}].reference"
    assert check(name, source) == {"wrong": "", "printed": ""}


@pytest.mark.parametrize("name", EXERCISES)
def test_exercise_given_each_known_mistake_names_it(name: str) -> None:
    exercise = EXERCISES[name]
    assert len(exercise.mistakes) >= 3
    for message in exercise.mistakes:
        source = "from posttrain.commands.exercises.checking import EXERCISES\n"
        source += f"{name} = EXERCISES[{name!r}].mistakes[{message!r}]"
        assert check(name, source)["wrong"] == message


@pytest.mark.parametrize("name", EXERCISES)
def test_exercise_stub_is_a_file_that_only_lacks_its_body(name: str) -> None:
    tree = ast.parse(EXERCISES[name].stub)
    assert ast.get_docstring(tree)
    assert [node.name for node in tree.body if isinstance(node, ast.FunctionDef)] == [name]
    first = next(iter(EXERCISES[name].cases))
    line = EXERCISES[name].stub.splitlines().index("    raise NotImplementedError") + 1
    wrong = check(name, EXERCISES[name].stub)["wrong"]
    assert wrong == f"case 1 ({first}): {name} raised NotImplementedError (line {line})"


def test_exercise_given_an_unknown_mistake_shows_the_numbers_of_the_first_wrong_case() -> None:
    wrong = check("pass_at_k", "def pass_at_k(n, num_correct, k):\n    return 0.5\n")["wrong"]
    assert wrong == (
        # 1 − C(13, 4) / C(16, 4) = 1 − 715 / 1820
        "case 1 (3 of 16 correct): expected 0.607143, got 0.5\nall expected: 0.607143\ninputs: 16, 3, 4"
    )
    wrong = check("group_advantage", f"{HALF}    return 2 * centred / (rewards.std(1, keepdim=True) + 1e-4)\n")["wrong"]
    # mean 0.5, std sqrt(1 / 3): 0.5 / (0.57735 + 0.0001)
    assert wrong.startswith(
        "case 1 (three groups): expected 0.865875, got 1.73175 at [0, 0]\nall expected: [[0.865875,"
    )
    assert wrong.endswith("inputs: [[1, 0, 0, 1], [0, 0, 0, 1], [3, 1, 0.5, 2]]")


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("def f(:", "the file does not run: SyntaxError: invalid syntax (line 1)"),
        ("import torch\n1 / 0", "the file does not run: ZeroDivisionError: division by zero (line 2)"),
        ("x = 1", "the file defines no function group_advantage; begin with `posttrain exercise show group_advantage`"),
        (f"{HALF}    centred.x", "case 1 (three groups): group_advantage raised AttributeError: "
         "'Tensor' object has no attribute 'x' (line 6)"),
        (HALF, "case 1 (three groups): a tensor is expected, not None; is a `return` missing?"),
        (f"{HALF}    return centred.mean(1)", "case 1 (three groups): shape [3, 4] is expected, not [3]"),
    ],
)  # fmt: skip
def test_exercise_given_a_broken_file_states_what_is_broken(source: str, wrong: str) -> None:
    assert check("group_advantage", source)["wrong"].partition("\ninputs")[0] == wrong


def test_exercise_function_that_changes_its_inputs_is_judged_on_the_original_ones() -> None:
    source = f"{HALF}    rewards.zero_()\n    return centred\n"
    assert check("group_advantage", source)["wrong"].startswith("you did not divide by the standard deviation")


@pytest.mark.slow
def test_exercise_command_runs_the_file_in_a_process_and_shows_what_it_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text("print('hello')\nfrom posttrain.evaluation.statistics import pass_at_k\n")
    assert main(["exercise", "check", "pass-at-k", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["hello", "pass_at_k: correct in all 4 cases.",
                     "library implementation: posttrain.evaluation.statistics.pass_at_k"]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "output"),
    [
        ("while True: pass", "the function timed out (over 0.2 s of CPU time); check for endless loops"),
        ("import os; os._exit(3)", "the file ended its process: the process ended with exit code 3"),
        ("raise SystemExit", "the file ended its process: SystemExit: "),
    ],
)
@pytest.mark.slow
def test_exercise_function_that_hangs_or_exits_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, output: str
) -> None:
    monkeypatch.setattr(command, "LIMITS", Limits(cpu_seconds=0.2, compiles=True))
    path = tmp_path / "mine.py"
    path.write_text(f"def pass_at_k(n, num_correct, k):\n    {body}\n")
    assert command.check_file("pass_at_k", str(path)) == output


def test_exercise_list_and_show_print_the_exercises(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exercise"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:-1]] == list(EXERCISES)
    assert main(["exercise", "show", "gae"]) == 0
    assert capsys.readouterr().out == EXERCISES["gae"].stub


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "gea"], "there is no exercise 'gea'. Did you mean gae? Known: response_mask, "),
        (["show"], "show: NAME is missing. Known: "),
        (["check", "gae"], "check: FILE is missing. Begin with `posttrain exercise show gae > gae.py`"),
        (["check", "gae", "/no/such.py"], "/no/such.py: No such file or directory. Give your Python file"),
    ],
)
def test_exercise_command_given_a_wrong_name_or_file_refuses_it(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["exercise", *words]) == 2
    assert capsys.readouterr().err.startswith(f"posttrain: {message}")
