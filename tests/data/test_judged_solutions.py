"""Sampled solutions of a problem become the responses of one example."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from sample_rows import needs_data, real_file, write_rows

from posttrain.data.steps import judged_solutions
from posttrain.errors import DataError
from posttrain.types import Message, Response
from refusing import refuses

ROW = {"question": "1+1?", "response": "It is 2.", "is_correct": True, "level": 3, "gold": "2"}


def test_solutions_are_grouped_by_problem(tmp_path: Path) -> None:
    rows = [
        ROW,
        ROW | {"question": "2+2?", "response": "4", "is_correct": 1, "level": 1},
        ROW | {"response": "It is 3.", "is_correct": False},
        ROW | {"question": " 1+1?\n", "is_correct": 1},  # an equal draw stays
    ]
    task = judged_solutions(path=write_rows(tmp_path / "x.jsonl", rows), split="test")
    first, second = task.examples
    assert (first.id, first.messages) == ("judged_solutions/test/1", (Message("user", "1+1?"),))
    assert first.responses == (Response("It is 2.", 1.0), Response("It is 3.", 0.0), Response("It is 2.", 1.0))
    assert (first.meta, second.meta) == ({"level": 3}, {"level": 1})
    assert (second.id, second.responses) == ("judged_solutions/test/2", (Response("4", 1.0),))
    assert task.dropped == {}


def test_other_keys_and_what_is_dropped(tmp_path: Path) -> None:
    row = {"prompt": "q", "text": "a", "ok": 1}
    rows = [row, row | {"text": ""}, row | {"ok": None}, row | {"prompt": None}, row | {"text": "b"}]
    keys = {"problem_key": "prompt", "solution_key": "text", "verdict_key": "ok"}
    path = write_rows(tmp_path / "x.jsonl", rows)
    task = judged_solutions(path=path, split="test", **keys)  # type: ignore[arg-type]
    assert task.examples[0].responses == (Response("a", 1.0), Response("b", 1.0))
    expected = {"'text' is blank": 1, "'ok' is missing": 1, "'prompt' is missing": 1}
    assert task.dropped == expected
    with refuses(DataError, "x.jsonl", "'question'"):
        judged_solutions(path=path)


@needs_data
def test_real_rows() -> None:
    task = judged_solutions(path=real_file("orm_math/qwen_math_cot_samples"), split="test")
    assert (len(task.examples), task.dropped) == (100, {})
    assert {len(example.responses) for example in task.examples} == {8}
    assert Counter(r.score for e in task.examples for r in e.responses) == {1.0: 728, 0.0: 72}
    assert {example.meta["level"] for example in task.examples} == {f"Level {n}" for n in range(1, 6)}
