"""Items: what is kept of a rollout, and files that hold them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from made_up_items import make_item, make_items, make_sample
from posttrain import registry
from posttrain.errors import DataError
from posttrain.evaluation.items import (
    Item,
    break_down,
    digest_examples,
    kind_results,
    read_items,
    sample_of,
    write_items,
)
from posttrain.evaluation.statistics import wilson_interval
from posttrain.recipes.sections import RewardComponent
from posttrain.sampling.fake_engine import FakeEngine
from posttrain.sampling.rollout import Sampler, build_grader
from posttrain.store.metric_names import find_metric
from posttrain.types import Completion, Example, Message, Rollout
from refusing import refuses


def make_rollout(text: str, ids: list[int], **changes) -> Rollout:
    rollout = Rollout(
        example=Example("sums/4", (Message("user", "1 + 1?"),), "2"),
        prompt_ids=(1, 2),
        completion=Completion(tuple(ids), (-1.0,) * len(ids), "stop"),
        text=text,
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


@pytest.fixture
def sampler(tokenizer) -> Sampler:
    template = registry.find("template", "r1_zero").bind({"preamble": ""})()
    grader = build_grader([RewardComponent(name="correct"), RewardComponent(name="xml_format")], template)
    return Sampler(FakeEngine([]), tokenizer, grader, 128)


def test_a_sample_keeps_text_verdict_and_length(sampler) -> None:
    ids = [*sampler.tokenizer.encode(" two </think> <answer> 2 </answer>"), sampler.tokenizer.eos_token_id]
    sample = sample_of(make_rollout("<think> two </think> <answer> 2 </answer>", ids), sampler)
    assert (sample.num_tokens, sample.finish, sample.reward, sample.in_format) == (len(ids), "stop", 1.25, True)
    assert sample.is_correct
    assert (sample.transcript, sample.response_ids) == (None, None)
    assert not sample_of(make_rollout("x", ids, parts={"xml_format": 0.0}), sampler).in_format
    assert sample_of(make_rollout("x", ids, parts={"correct": 1.0}), sampler).in_format is None


def test_a_sample_carries_its_ids_where_the_text_encodes_to_others(sampler, tmp_path: Path) -> None:
    tokenizer = sampler.tokenizer
    whole = tokenizer.encode(" hello")
    apart = [token for letter in " hello" for token in tokenizer.encode(letter)]
    assert whole != apart
    samples = [
        sample_of(make_rollout("<think> hello", [*ids, tokenizer.eos_token_id]), sampler) for ids in (whole, apart)
    ]
    assert [sample.response_ids for sample in samples] == [None, tuple(apart)]
    items = [replace(make_item(0, "r"), samples=tuple(samples))]
    write_items(items, tmp_path / "items.jsonl")
    assert read_items(tmp_path / "items.jsonl") == items
    first, second = json.loads((tmp_path / "items.jsonl").read_text())["samples"]
    assert "response_ids" not in first
    assert second["response_ids"] == apart


def test_items_are_read_as_they_were_written(tmp_path: Path) -> None:
    odd = make_sample("w", text="a\nb\u2028\u0085c \x00 \u00e9", score=-0.5)
    items = [
        make_item(0, "rw", level=3),
        Item("x/1", 1, "long\nquestion", None),
        replace(make_item(2, "n"), samples=(odd,)),
    ]
    write_items(items, tmp_path / "items.jsonl")
    assert read_items(tmp_path / "items.jsonl") == items


def test_a_file_that_holds_no_items_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    with refuses(DataError, "items.jsonl"):
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
        with pytest.raises(DataError, match=rf"items\.jsonl:2: not an evaluation item \({where}: ") as refused:
            read_items(path)
        assert "\x1b" not in str(refused.value)
    path.write_text(good + '{"id": "x"}\n' + "[" * 5000)
    with refuses(DataError, "items.jsonl:2"):
        read_items(path)


def test_a_digest_follows_what_is_requested_and_what_is_right() -> None:
    example = Example("made/0", (Message("user", "1 + 1?"),), "2", meta={"tags": frozenset("abc"), "level": 1})
    changed = [
        replace(example, messages=(Message("user", "1 + 2?"),)),
        replace(example, messages=(Message("system", "1 + 1?"),)),
        replace(example, answer="3"),
        replace(example, grader="exact"),
        replace(example, meta={"tags": frozenset("abd"), "level": 1}),
    ]
    marks = [digest_examples(found) for found in ([example], *([other] for other in changed), [example, example], [])]
    assert len(set(marks)) == 8
    assert digest_examples([replace(example, solution="count")]) == marks[0]  # what no grader reads


def test_kind_results_name_each_value_with_its_interval_and_number() -> None:
    items = [
        replace(item, meta={"level": 1 + n % 2, "subject": "a/b: c" if n < 4 else "d"})
        for n, item in enumerate(make_items(["r", "w", "r", "r", "w", "w", "r", "w"]))
    ]
    kinds = break_down(items)
    found = kind_results(kinds)
    assert {name: value for name, value in found.items() if name.endswith(":accuracy")} == {
        "level=1:accuracy": 0.75,
        "level=2:accuracy": 0.25,
        "subject=a_b_c:accuracy": 0.75,
        "subject=d:accuracy": 0.25,
    }
    assert (found["level=1:accuracy_low"], found["level=1:accuracy_high"]) == wilson_interval(3, 4)
    assert found["level=1:accuracy_n"] == 4.0
    assert all(len(name.split("/")) == 1 for name in found)
    metric = find_metric("eval/sums/test/level=1:accuracy")
    assert metric is not None
    assert metric.unit == "share"
