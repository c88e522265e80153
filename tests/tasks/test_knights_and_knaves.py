"""Knights and knaves in their layouts; real puzzles are solved again by trying every case."""

from __future__ import annotations

import ast
import itertools
import json
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from posttrain import registry
from posttrain.errors import DataError, RecipeError
from posttrain.graders.grading import Submission
from posttrain.graders.knights import knights_and_knaves as grade
from posttrain.tasks.verifiable.knights_and_knaves import knights_and_knaves, write_answer

ROW = {
    "quiz": " Ann says that Bob is a knave. Who is who? ",
    "names": ["Ann", "Bob"],
    "solution": [True, False],
    "statements": "(('lying', 1), ('lying', 0))",
}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_row(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", [ROW])
    (example,) = knights_and_knaves(split="test", path=path).examples
    assert example.messages[0].content == (
        "Ann says that Bob is a knave. Who is who?\n"
        'Answer with one line for each of them, such as "(1) NAME is a knight" or "(2) NAME is a knave".'
    )
    assert (example.id, example.grader) == ("knights_and_knaves/test/1", "knights_and_knaves")
    assert example.answer == "(1) Ann is a knight\n(2) Bob is a knave"
    assert example.meta == {
        "people": 2,
        "names": ("Ann", "Bob"),
        "solution": (True, False),
        "statements": "(('lying', 1), ('lying', 0))",
    }
    (bare,) = knights_and_knaves(split="test", path=path, instruction="").examples
    assert bare.messages[0].content == "Ann says that Bob is a knave. Who is who?"


def test_sizes_and_splits(tmp_path: Path) -> None:
    three = {"quiz": "q", "names": ["A", "B", "C"], "solution": [True, True, False]}
    path = write(tmp_path / "x.jsonl", [{**ROW, "quiz": f"q{i}"} for i in range(30)] + [three])
    sides = [knights_and_knaves(split=s, path=path, people=[2]).examples for s in ("train", "validation")]  # type: ignore[arg-type]
    assert sum(len(side) for side in sides) == 30
    assert not {e.messages for e in sides[0]} & {e.messages for e in sides[1]}
    assert [e.id for e in knights_and_knaves(split="test", path=path, people=[3]).examples] == [
        "knights_and_knaves/test/31"
    ]
    with pytest.raises(DataError, match=r"no puzzle with 4 or 5 people. There are some with 2, 3"):
        knights_and_knaves(path=path, people=[5, 4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"names": ["Ann"]}, "'solution' must be true or false for each of 1 names"),
        ({"names": ["Ann", "Ann"]}, "'names' must be different names"),
        ({"names": ["Ann", " "]}, "'names' must be different names"),
        ({"names": "Ann"}, "'names' must be a list"),
        ({"solution": [1, 0]}, "'solution' must be true or false"),
        ({"quiz": ""}, "'quiz' is empty"),
    ],
)
def test_bad_rows(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"x\.jsonl:2: .*{message}"):
        knights_and_knaves(path=write(tmp_path / "x.jsonl", [ROW, {**ROW, **change}]))


def test_missing_keys_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the key 'names' is missing. There are: quiz"):
        knights_and_knaves(path=write(tmp_path / "x.jsonl", [{"quiz": "q"}]))


def test_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTTRAIN_DATA", raising=False)
    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((name, config, split))
        return [{**ROW, "quiz": f"{split} {i}"} for i in range(2)]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    ids = [e.id for e in knights_and_knaves(split="test", people=[2]).examples]
    assert ids == ["knights_and_knaves/test/1", "knights_and_knaves/test/2"]
    assert len({e.id for e in knights_and_knaves(validation_share=0).examples}) == 14
    assert asked == [("K-and-K/knights-and-knaves", "test", "2ppl")] + [
        ("K-and-K/knights-and-knaves", "train", f"{n}ppl") for n in range(2, 9)
    ]


def test_options_are_checked() -> None:
    entry = registry.find("task", "knights_and_knaves")
    assert entry.traits["held_out"] == "validation"
    with pytest.raises(RecipeError, match=r"task.people.0: .*greater than or equal to 2"):
        entry.bind({"people": [1]}, "task")


needs_data = pytest.mark.skipif(
    "POSTTRAIN_DATA" not in os.environ, reason="POSTTRAIN_DATA names no folder with real rows"
)


def is_true(statement: Any, world: Sequence[bool]) -> bool:
    """What a statement says of a world in which ``world[i]`` tells whether i is a knight."""
    operator, *parts = statement
    if operator in ("telling-truth", "lying"):
        return world[parts[0]] == (operator == "telling-truth")
    values = [is_true(part, world) for part in parts]
    return {
        "not": not values[0],
        "and": all(values),
        "or": any(values),
        "->": not values[0] or values[-1],
        "<=>": values[0] == values[-1],
    }[operator]


@needs_data
@pytest.mark.parametrize(("name", "count"), [("train", 2700), ("test", 150)])
def test_real_rows(name: str, count: int) -> None:
    """Each puzzle has the one solution that it states; it is graded right, and with any one role turned wrong."""
    path = Path(os.environ["POSTTRAIN_DATA"]) / "kk_logic" / f"{name}.jsonl.gz"
    task = knights_and_knaves(split="test", path=str(path))
    assert len(task.examples) == count
    for example in task.examples:
        names, solution = example.meta["names"], example.meta["solution"]
        said = ast.literal_eval(example.meta["statements"])
        worlds = itertools.product((True, False), repeat=len(names))
        consistent = [w for w in worlds if all(is_true(s, w) == role for s, role in zip(said, w, strict=True))]
        assert consistent == [solution]
        assert example.answer is not None
        assert grade(Submission(example.answer, None, None, example.meta)).outcome == "right"
        for turned in range(len(names)):
            other = [role != (i == turned) for i, role in enumerate(solution)]
            found = grade(Submission(write_answer(names, other), None, None, example.meta))
            assert found.outcome == "wrong"
            assert found.facts["people_right"] == pytest.approx(1 - 1 / len(names))
