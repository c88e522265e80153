"""A project of ``posttrain new``: its rows are right, its recipes resolve, and its page can be followed."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest

from posttrain.cli import main
from posttrain.data.base import build_task
from posttrain.recipes.sections import Component

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "your-own-project.md"
EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)\.")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new") / "mine"
    assert main(["new", str(folder)]) == 0
    return folder


def rows_of(project: Path, name: str) -> list[dict[str, str]]:
    lines = (project / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 512
    return [json.loads(line) for line in lines]


def result_of(working: str, prompt: str) -> int:
    """Work the equations out: each holds, and begins with numbers of the prompt or with earlier results."""
    known = {1, 2, 3, *map(int, re.findall(r"\d+", prompt))}  # half, double and triple are words
    assert EQUATION.sub("", working).strip() == ""
    for left, sign, right, result in EQUATION.findall(working):
        assert {int(left), int(right)} <= known, (working, prompt)
        worked = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}
        assert int(result) == (int(left) / int(right) if sign == "/" else worked[sign])
        known.add(int(result))
    return int(result)


def test_new_writes_rows_whose_answers_are_right(project: Path) -> None:
    demonstrations, preferences, questions = (
        rows_of(project, n) for n in ("demonstrations", "preferences", "questions")
    )
    for row in demonstrations:
        assert result_of(row["solution"], row["prompt"]) == int(row["answer"])
    for row in preferences:
        working, _, answer = row["chosen"].removesuffix(".").partition(" The answer is ")
        assert result_of(working, row["prompt"]) == int(answer) != int(row["rejected"][len("The answer is ") : -1])
    options = {"name": "stories", "split": "validation", "seed": 13, "size": 512, "max_steps": 2}
    for row, story in zip(questions, build_task(Component.model_validate(options), "task").examples, strict=True):
        assert row["prompt"] == story.messages[0].content
        assert result_of(str(story.solution), row["prompt"]) == int(row["answer"])
    assert not {row["prompt"] for row in questions} & {row["prompt"] for row in (*demonstrations, *preferences)}


def test_new_writes_a_reward_that_pays_for_what_is_near(project: Path) -> None:
    near = runpy.run_path(str(project / "my_rewards.py"))["near"]
    assert [near(text, "12") for text in ("12", " 12 ", "13", "11", "14", "twelve", None)] == [1, 1, 0.3, 0.3, 0, 0, 0]
    assert near("13", "12", partial=0.0) == 0


def test_new_folder_that_holds_something_is_refused(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.name for path in project.iterdir())
    assert main(["new", str(project)]) == 2
    assert "is not empty. Give" in capsys.readouterr().err
    assert sorted(path.name for path in project.iterdir()) == before


@pytest.mark.parametrize("name", ["sft", "grpo", "dpo"])
def test_new_recipes_resolve(
    name: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    assert main(["train", f"{name}.yaml", "--dry-run"]) == 0
    assert f"# {name}.yaml, resolved; fingerprint " in capsys.readouterr().out


def commands_of_the_page() -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def test_the_page_shows_the_reward_of_the_project(project: Path) -> None:
    (shown,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert (project / "my_rewards.py").read_text(encoding="utf-8").endswith(shown)


@pytest.mark.slow
def test_every_command_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = commands_of_the_page()
    assert len(commands) >= 15
    for program, *words in commands:
        if program == "cd":
            monkeypatch.chdir(words[0])
            continue
        assert program == "posttrain"
        assert main(words) == 0, words
    assert list(Path("out/sft").rglob("config.json"))
    assert all(Path(f"runs/{name}/report.html").is_file() for name in ("sft", "grpo", "dpo"))
