"""`posttrain evaluate` and `posttrain generate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.apps.sampling import choose_task, chosen_words
from posttrain.cli import main, parse
from posttrain.errors import UsageError
from posttrain.recipe import Word, load_recipe
from posttrain.store.rollouts import RolloutStore


def words(*arguments: str) -> dict[str, Word]:
    return chosen_words(parse(["evaluate", "tiny", *arguments]))


def test_words_of_the_command_line_take_their_options() -> None:
    found = words("--task", "gsm8k", "--task.path", "x.jsonl", "--template", "boxed", "--task.validation_share", "0.1")
    assert found["task"] == Word(name="gsm8k", path="x.jsonl", validation_share=0.1)
    assert found["template"] == Word(name="boxed")
    assert words() == {}


def test_the_test_split_is_measured_unless_another_is_given() -> None:
    assert choose_task(None, "tiny", None).options["split"] == "test"
    given = Word(name="gsm8k", path="x.jsonl")
    assert choose_task(given, "tiny", None).options == {"path": "x.jsonl", "split": "test"}
    assert choose_task(Word(name="stories", split="validation"), "tiny", None).options["split"] == "validation"


def test_a_run_is_measured_on_its_own_task() -> None:
    recipe = load_recipe("tiny/grpo", [("task.max_steps", "2")])
    word = choose_task(None, "runs/x", recipe)
    assert (word.name, word.options["max_steps"], word.options["split"]) == ("stories", 2, "test")


def test_a_runs_own_file_is_never_measured_on_what_was_trained() -> None:
    recipe = load_recipe("grpo-gsm8k", [("task.path", "train.jsonl")])
    assert choose_task(None, "runs/x", recipe).options["split"] == "validation"
    other = choose_task(Word(name="", path="test.jsonl"), "runs/x", recipe)
    assert other.options["path"] == "test.jsonl"
    assert other.options["split"] == "test"


def test_a_model_that_is_no_run_needs_a_task() -> None:
    with pytest.raises(UsageError, match="--task is needed"):
        choose_task(None, "some/model", None)


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "test.jsonl"
    rows = [{"question": f"What is {a} + 1?", "answer": f"{a} + 1 = {a + 1}\n#### {a + 1}"} for a in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_evaluation_writes_results_and_every_answer(
    problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["evaluate", "tiny", "--task", "gsm8k", "--task.path", str(problems), "--max-tokens", "6"]
    arguments += ["--out", str(out), "--n", "4"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "gsm8k/test, n = 4" in shown
    content = json.loads((out / "results.json").read_text())
    assert content["evaluation"] == "gsm8k/test"
    assert content["results"]["n"] == 4.0
    assert content["results"]["accuracy_low"] <= content["results"]["accuracy"] <= content["results"]["accuracy_high"]
    assert content["settings"]["task"]["path"] == str(problems)
    first = RolloutStore(out / "rollouts.db", read_only=True).evaluations("gsm8k/test")
    assert len(first) == 4
    assert main([*arguments, "--quiet"]) == 0  # again: replaced, not added, and the same answers
    assert capsys.readouterr().out == ""
    again = RolloutStore(out / "rollouts.db", read_only=True).evaluations("gsm8k/test")
    assert [row.completion for row in again] == [row.completion for row in first]


def test_a_malformed_line_is_named(problems: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with problems.open("a") as file:
        file.write("{not json\n")
    assert main(["evaluate", "tiny", "--task", "gsm8k", "--task.path", str(problems)]) == 2
    assert f"{problems}:7:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "tiny", "--task", "gsm9k"], "there is no task named 'gsm9k'. Did you mean 'gsm8k'?"),
        (["evaluate", "tiny", "--task.sizze", "3"], "task 'stories' has no key 'sizze'. Did you mean 'size'?"),
        (["evaluate", "tiny", "--template", "boxd"], "there is no template named 'boxd'. Did you mean 'boxed'?"),
        (["generate", "./nowhere", "Hello"], "nowhere"),
    ],
)
def test_bad_words_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_generation_is_a_function_of_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "tiny", "-n", "2", "--max-tokens", "8", "--seed"]
    assert main([*arguments, "1"]) == 0
    first = capsys.readouterr().out
    assert main([*arguments, "1"]) == 0
    assert capsys.readouterr().out == first
    assert main([*arguments, "2"]) == 0
    assert capsys.readouterr().out != first
    assert first.count("mean log-prob") == 2


def test_generation_answers_the_prompt_that_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "tiny", "Eva has 3 shells [bold].", "--temperature", "0", "--max-tokens", "4"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Eva has 3 shells [bold].\n")
    assert "4 tokens · cut off" in shown or "ended by itself" in shown
    assert "wrong" not in shown  # nobody knows the right answer


def test_a_reward_model_is_not_asked_for_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--task.size", "40", "--data.batch", "2", "--train.steps", "1", "--eval.every", "0"]
    assert main(["train", "tiny/rm", "--runs-dir", str(tmp_path), "--run", "rm", *small]) == 0
    assert "ask it" not in capsys.readouterr().out
    assert "posttrain generate" not in (tmp_path / "rm" / "report.html").read_text()
    for command in ("generate", "evaluate"):
        assert main([command, str(tmp_path / "rm")]) == 2
        assert "reward model (bradley_terry); it scores answers and writes none" in capsys.readouterr().err
