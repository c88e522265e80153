"""``posttrain feedback`` as a user types it: pairs by a rule, training on them, and the rule is broken less."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.cli import main

pytestmark = pytest.mark.usefixtures("no_curves")

RULE = """\
principles:
  - name: plain ending
    rule: {name: without_phrases, phrases: [So the answer is], instead: "Answer:"}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rule.yaml").write_text(RULE)
    return tmp_path


def feedback(*arguments: str) -> int:
    return main(["feedback", *arguments, "--task", "stories", "--principles", "rule.yaml", "--max-tokens", "48"])


def about(place: Path, name: str) -> dict:
    content: dict = json.loads((place / f"{name}.about.json").read_text())
    return content


def test_a_rule_is_learnt_from_ones_own_answers(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 96 held-out answers about one in four breaks the rule; after thirty steps of DPO not one in ten does."""
    assert feedback("tiny", "--n", "240", "--out", "pairs.jsonl") == 0
    shown = capsys.readouterr().out
    made = about(place, "pairs")
    assert f"{made['num_pairs']} pairs from 240 prompts of stories/train" in shown
    assert made["num_pairs"] == made["broken"]["plain ending"] > 40
    assert made["num_pairs"] + sum(made["dropped"].values()) == 240
    assert made["broken_chosen"] == {}
    rows = [json.loads(line) for line in (place / "pairs.jsonl").read_text().splitlines()]
    assert all(
        "So the answer is" in row["rejected"] and "So the answer is" not in row["chosen"]
        and row["rejected"].replace("So the answer is", "Answer:") == row["chosen"]
        for row in rows
    )  # fmt: skip
    changes = ["--model.name", "tiny", "--model.adapter", "null", "--prompt.template", "plain", "--data.batch", "8"]
    changes += ["--train.steps", "30", "--train.lr", "2e-4", "--train.warmup_steps", "3", "--eval.every", "0"]
    assert main(["train", "dpo-preferences", "--task.path", "pairs.jsonl", "--run", "dpo", *changes, "--quiet"]) == 0
    held_out = ["--task.split", "validation", "--n", "96", "--seed", "5"]
    assert feedback("tiny", *held_out, "--out", "before.jsonl", "--quiet") == 0
    assert feedback("dpo", *held_out, "--out", "after.jsonl", "--quiet") in (0, 1)  # 1: not one pair is left to make
    out = capsys.readouterr().out
    before = about(place, "before")
    assert before["broken"]["plain ending"] / before["num_answers"] > 0.18
    after = about(place, "after") if (place / "after.about.json").exists() else {"num_answers": 80, "broken": {}}
    assert after["broken"].get("plain ending", 0) / after["num_answers"] < 0.1, out


def test_the_same_command_makes_the_same_file(place: Path) -> None:
    contents = []
    for batch in ("64", "5"):
        assert feedback("tiny", "--n", "30", "--batch", batch, "--quiet") == 0
        contents.append((place / "pairs.jsonl").read_text())
    assert contents[0] == contents[1] != ""
    assert not (place / "pairs.jsonl.part").exists()


def test_two_answers_are_labelled_by_the_model(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "rule.yaml").write_text("principles:\n  - {name: short, prefer: Which answer is shorter?}\n".replace(
        "Which answer is shorter?", "'Which answer is shorter?'"))  # fmt: skip
    assert feedback("tiny", "--n", "12", "--way", "label") == 0
    rows = [json.loads(line) for line in (place / "pairs.jsonl").read_text().splitlines()]
    assert len(rows) > 2
    assert all(row["score_chosen"] > 0.5 for row in rows)
    assert all(row["score_chosen"] + row["score_rejected"] == pytest.approx(1.0) for row in rows)
    assert "Rules" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "pairs.json"], "--out pairs.json: pairs are written as JSON lines; give a name that ends in .jsonl"),
        (["--way", "label", "--temperature", "0"], "--way label: two different answers are compared"),
        (["--template", "r1_zero"], "--template r1_zero: it writes <think> and <answer> as tokens of their own"),
        (["--principles", "nothere.yaml"], "--principles nothere.yaml: no such file; give a YAML file of principles"),
        (["--task.pth", "x"], "has no key 'pth'"),
        (["--engin", "x"], "there is no option --engin. Did you mean --engine?"),
    ],
)
def test_what_cannot_be_is_said_in_one_message(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    given = [] if "--principles" in arguments else ["--principles", "rule.yaml"]
    assert main(["feedback", "tiny", "--task", "stories", *given, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert sorted(path.name for path in place.iterdir()) == ["rule.yaml"]
