"""``posttrain data`` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.cli import main

ROWS = [
    {"prompt": "Name a colour.", "chosen": "Blue is one.", "rejected": "No."},
    {"prompt": "Name a river.", "chosen": "The Nile.", "rejected": "I would rather not say, to be quite honest."},
    {"prompt": "Name a colour.", "chosen": "Same.", "rejected": "Same."},
    {"prompt": "Name a [bold]tree[/bold].", "chosen": "Oak", "rejected": "Oak "},
]


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return path


def test_show_tells_counts_and_prints_examples_in_full(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    picture = tmp_path / "p.png"
    command = ["data", "show", "preferences", "--task.path", str(pairs), "--task.split", "all", "--plot", str(picture)]
    assert main([*command, "--max-tokens", "40"]) == 0
    out = capsys.readouterr().out
    assert "preferences/all: 3 examples" in out
    assert "left out: 1 × 'chosen' and 'rejected' are identical" in out
    assert "pairs: 3, 1 identical up to white space" in out
    assert "chosen answers are longer in 33.3% of pairs" in out
    assert "longer than 40 characters, prompt and answer: 1 (33.3%)" in out
    assert "Name a [bold]tree[/bold]." in out  # data are no markup
    assert "I would rather not say, to be quite honest." in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not [w for w in recwarn if "grid" in str(w.message)]


def test_tokens_of_a_model_and_a_choice_of_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", "stories", "--limit", "40", "--model", "tiny", "--examples", "0"]) == 0
    out = capsys.readouterr().out
    assert "stories/train: 50,000 examples, the first 40 of which were read" in out
    assert "tokens of tiny" in out
    assert "stories/train/" not in out.replace("stories/train:", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show"], "task's name: posttrain"),
        (["show", "gsm8c"], "'gsm8k'"),
        (["show", "gsm8k", "--task.pth", "x"], "'path'"),
        (["show", "gsm8k", "--task.path", "nowhere.jsonl"], "no such file"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", *arguments]) == 2
    assert message in capsys.readouterr().err
