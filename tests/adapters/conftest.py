"""What the packages of others are held against: a server over ``tiny``, and what ``posttrain evaluate`` says there."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from answered import MAX_TOKENS, Answered

from posttrain.cli import main
from posttrain.untrusted import declare_code
from serving import Served, serving

sys.path.insert(0, str(Path(__file__).parents[2] / "contrib"))


@pytest.fixture(autouse=True)
def _declared() -> None:
    declare_code(["gymnasium_adapter:gymnasium", "openenv_adapter:openenv"])


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served"), "tiny", "--record", "asked.jsonl") as server:
        yield server


@pytest.fixture(scope="session")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Answered:
    """Six stories, answered by ``posttrain evaluate``."""
    out = tmp_path_factory.mktemp("evaluated") / "own"
    request = ["--task", "stories", "--limit", "6", "--max-tokens", str(MAX_TOKENS), "--out", str(out), "--quiet"]
    assert main(["evaluate", "tiny", *request]) == 0
    items = [json.loads(line) for line in (out / "items.jsonl").read_text().splitlines()]
    answers = {item["question"]: item["samples"][0]["text"] for item in items}
    assert len(answers) == 6
    assert len(set(answers.values())) > 1, "answers to compare by"
    return Answered(out / "items.jsonl", answers)
