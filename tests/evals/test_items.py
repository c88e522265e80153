"""Items: what is kept of a rollout, and files that hold them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from made_up_items import make_item, make_sample
from posttrain.errors import DataError
from posttrain.evals.items import Item, digest_of, item_of, read_items, sample_of, with_scores, write_items
from posttrain.store.rollouts import RolloutStore
from posttrain.types import Completion, Example, Message, Rollout


def test_an_item_keeps_plain_facts_of_its_example() -> None:
    messages = (Message("system", "Be brief."), Message("user", "1 + 1?"))
    meta = {"level": 3, "subject": "sums", "score": len, "names": ["a"], "hard": True, "extra": None}
    item = item_of(Example("sums/4", messages, "2", meta=meta), 7)
    assert (item.id, item.index, item.answer, item.samples) == ("sums/4", 7, "2", ())
    assert item.question == "system: Be brief.\n\nuser: 1 + 1?"
    assert item.meta == {"level": 3, "subject": "sums", "hard": True, "extra": None}
    assert (item.share, item.is_ungraded) == (0.0, False)


def make_rollout(**changes) -> Rollout:
    rollout = Rollout(
        example=Example("sums/4", (Message("user", "1 + 1?"),), "2"),
        prompt_ids=(1, 2),
        completion=Completion((5, 6, 0), (-1.0, -1.0, -1.0), "stop"),
        text="<think> two </think> <answer> 2 </answer>",
        parts={"correct": 1.0, "xml_format": 0.5, "strict": 0.25},
        reward=1.25,
        step=0,
        epoch=0,
        prompt_index=0,
        rollout_index=1,
        extracted="2",
        outcome="right",
    )
    return replace(rollout, **changes)


def test_a_sample_is_the_same_from_the_engine_and_from_the_database(tmp_path: Path) -> None:
    rollout = make_rollout()
    sample = sample_of(rollout, "xml_format")
    assert (sample.num_tokens, sample.finish, sample.reward, sample.in_format) == (3, "stop", 1.25, True)
    assert sample.is_right
    assert not sample_of(make_rollout(parts={"xml_format": 0.0}), "xml_format").in_format
    assert sample_of(rollout, None).in_format is None
    with RolloutStore(tmp_path / "rollouts.db") as store:
        store.record([rollout], evaluation="sums/test")
        (row,) = store.evaluations("sums/test")
    assert sample_of(row, "xml_format") == sample


def test_items_are_read_as_they_were_written(tmp_path: Path) -> None:
    odd = make_sample("w", text="a\nb\u2028\u0085c \x00 \u00e9", score=-0.5)
    items = [
        make_item(0, "rw", level=3),
        Item("x/1", 1, "long\nquestion", None),
        replace(make_item(2, "n"), samples=(odd,)),
    ]
    write_items(items, tmp_path / "items.jsonl")
    assert read_items(tmp_path / "items.jsonl") == items


def test_scores_are_added_in_order() -> None:
    items = with_scores([make_item(0, "rw"), Item("x/1", 1, "long", None)], [[0.5, None], []])
    assert [sample.score for sample in items[0].samples] == [0.5, None]
    assert items[1].samples == ()


def test_a_file_that_holds_no_items_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    with pytest.raises(DataError, match=r"items\.jsonl: cannot be read"):
        read_items(path)
    write_items([make_item(0, "r")], path)
    good = path.read_text()
    for changed, where in (
        ({"id": 7}, "id"),
        ({"id": []}, "id"),
        ({"samples": 3}, "samples"),
        ({"samples": [{"num_tokens": "many"}]}, r"samples\.0\.text"),
        ({"samples": [asdict(make_sample("r", num_tokens=10**400))]}, r"samples\.0\.num_tokens"),
        ({"samples": [asdict(make_sample("r", reward=float("inf")))]}, r"samples\.0\.reward"),
        ({"meta": {"level": []}}, r"meta\.level\.str"),
        ({"question": "\x1b[31m", "index": "\x1b[31m"}, "index"),
    ):
        path.write_text(good + json.dumps(json.loads(good) | changed) + "\n")
        with pytest.raises(DataError, match=rf"items\.jsonl:2: no item of an evaluation \({where}: ") as refused:
            read_items(path)
        assert "\x1b" not in str(refused.value)
    path.write_text(good + '{"id": "x"}\n' + "[" * 5000)
    with pytest.raises(DataError, match=r"items\.jsonl:2: no item of an evaluation \(index: Field required\)"):
        read_items(path)


def test_a_digest_follows_what_is_asked_and_what_is_right() -> None:
    example = Example("made/0", (Message("user", "1 + 1?"),), "2", meta={"tags": frozenset("abc"), "level": 1})
    changed = [
        replace(example, messages=(Message("user", "1 + 2?"),)),
        replace(example, messages=(Message("system", "1 + 1?"),)),
        replace(example, answer="3"),
        replace(example, grader="exact"),
        replace(example, meta={"tags": frozenset("abd"), "level": 1}),
    ]
    marks = [digest_of(found) for found in ([example], *([other] for other in changed), [example, example], [])]
    assert len(set(marks)) == 8
    assert digest_of([replace(example, solution="count")]) == marks[0]  # what no grader reads
