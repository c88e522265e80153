"""Policies against the start: read from evaluations, over seeds, against one another, with numbers worked by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import DataError
from posttrain.sweeps.head_to_head import (
    Comparison,
    Estimate,
    WrittenItem,
    against_each_other,
    choose_samples,
    findings,
    over_seeds,
    rank_policies,
    read_comparison,
    reward_gain,
    show_estimate,
    tables,
)


def answered(index: int, own: float | None, start: float, text: str = "yes") -> dict[str, Any]:
    """A prompt to which a policy (score ``own``) and the start have answered; the proxy doubles every score."""

    def answer(score: float | None, text: str) -> dict[str, Any]:
        return {"text": text, "score": score, "scores": {"p": None if score is None else 2 * score}}

    asked = {"index": index, "question": f"q{index}", "answer": f"gold {index}"}
    return asked | {"a": [answer(own, text)], "b": [answer(start, "no")]}


def parsed(*items: dict[str, Any]) -> list[WrittenItem]:
    return [WrittenItem.model_validate(item) for item in items]


def test_reward_is_counted_in_deviations_of_the_starts_scores_and_unscored_prompts_are_left_out() -> None:
    items = parsed(answered(0, 3.0, 0.0), answered(1, 1.0, 2.0), answered(2, None, 50.0))
    # gains 3 and -1, mean 1; the start's scores 0 and 2 deviate by 1
    gain = reward_gain(items, None)
    assert gain.mean == pytest.approx(1.0)
    half = 12.706204736432095 * math.sqrt(8.0 / 2)  # variance of (3, -1) is 8, over 2 prompts
    assert (gain.low, gain.high) == (pytest.approx(1.0 - half), pytest.approx(1.0 + half))
    assert reward_gain(items, "p").mean == pytest.approx(1.0)  # the unit doubles with the scores


def test_seeds_give_students_t_and_one_seed_its_own_interval() -> None:
    assert over_seeds([]) is None
    own = Estimate(0.6, 0.5, 0.7)
    assert over_seeds([own]) is own
    three = over_seeds([Estimate(x, 0, 1) for x in (0.6, 0.7, 0.8)])
    assert three is not None
    assert three.mean == pytest.approx(0.7)
    assert three.high - three.mean == pytest.approx(4.302652729911275 * 0.1 / math.sqrt(3))
    wide = over_seeds([Estimate(x, 0, 1) for x in (0.2, 0.9)], is_share=True)
    assert wide is not None
    assert (wide.low, wide.high) == (0.0, 1.0)  # a share stays one
    assert show_estimate(own, is_share=True) == "60.0 % [50.0, 70.0]"


def comparison(row: str, seed: int, rate: Estimate, proxy: Estimate, scores: list[float]) -> Comparison:
    items = parsed(*(answered(index, score, 0.0, row) for index, score in enumerate(scores)))
    measures = {"win_rate": rate, "win_rate_proxy": proxy, "reward_judge": rate, "reward_proxy": rate}
    return Comparison(row, seed, measures | {"length_ratio": Estimate(1.0, 1.0, 1.0)}, items)


def test_policies_are_compared_with_one_another_through_the_judges_scores_prompt_by_prompt() -> None:
    share = Estimate(0.5, 0.4, 0.6)
    left = [comparison("a", 0, share, share, [1.0, 2.0, 3.0, 4.0]), comparison("a", 1, share, share, [0.0, 0.0])]
    right = [comparison("b", 0, share, share, [0.0, 2.0, 9.0, 1.0]), comparison("b", 1, share, share, [1.0, 1.0])]
    rates = against_each_other(rank_policies([*left, *right]))
    # seed 0: win, tie, loss, win = 0.625; seed 1: two losses
    assert rates["a", "b"].mean == pytest.approx((0.625 + 0.0) / 2)
    text = json.dumps([table.lines for table in tables(rank_policies([*left, *right]), rates)])
    assert "a over b" in text


def test_what_is_said_of_a_policy_follows_from_its_intervals() -> None:
    better, unclear = Estimate(0.8, 0.7, 0.9), Estimate(0.55, 0.45, 0.65)
    said = findings(
        rank_policies([comparison("b", 0, unclear, better, [1.0]), comparison("a", 0, better, better, [1.0])]),
        "cells/a-seed0",
    )
    assert said[0].startswith("a: wins 80.0 % [70.0, 90.0] by the judge: better than the start")
    assert said[0].endswith("among answers equally long that is not shown")
    assert "not distinguishable from the start; it wins by the proxy alone" in said[1]
    assert said[2].endswith("too high: cells/a-seed0")


def test_samples_are_the_first_prompts_of_the_lowest_seed_with_every_answer() -> None:
    share = Estimate(0.5, 0.4, 0.6)
    shown = choose_samples([comparison(name, seed, share, share, [1.0] * 6) for seed in (1, 0) for name in "ab"])
    assert [sample.question for sample in shown] == ["q0", "q1", "q2", "q3"]
    assert [sample.gold for sample in shown] == ["gold 0", "gold 1", "gold 2", "gold 3"]
    assert [(name, text) for name, text, _ in shown[0].answers] == [("start", "no"), ("a", "a"), ("b", "b")]


def test_damaged_records_are_one_message(tmp_path: Path) -> None:
    for content in (None, "{", '{"results": {}}'):
        if content is not None:
            (tmp_path / "results.json").write_text(content)
            (tmp_path / "items.jsonl").write_text("")
        with pytest.raises(DataError, match="its files are damaged"):
            read_comparison(tmp_path, "a", 0)


WRITTEN: dict[str, Any] = {
    "results": {"characters_a": 100.0, "characters_b": 90}
    | {f"{name}{end}": 0.5 for name in ("win_rate", "kl_ab") for end in ("", "_low", "_high")},
    "others": {"p": {"win_rate": 0.6, "win_rate_low": 0.5, "win_rate_high": 0.7}},
}


def read_written(folder: Path, results: Any, item: Any) -> Comparison:
    for name, content in (("results.json", results), ("items.jsonl", item)):
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode() + b"\n")
    return read_comparison(folder, "a", 0)


def test_results_that_no_evaluation_has_written_is_one_message(tmp_path: Path) -> None:
    good = answered(0, 3.0, 0.0)
    whole = read_written(tmp_path, WRITTEN, good)
    assert [item.model_dump() for item in whole.items] == [good]
    older = {key: value for key, value in good.items() if key != "answer"}
    assert read_written(tmp_path, WRITTEN, older).items[0].answer is None
    read_written(tmp_path, WRITTEN, good)
    assert whole.measures["length_ratio"].mean == pytest.approx(100 / 90)
    changes: list[Any] = [b"[" * 100_000, b"1" * 5000, [], {"results": 7}, WRITTEN | {"others": {"p": 7}}]
    numbers = ("win_rate", "kl_ab_high", "characters_a")
    wrong = (None, "0.5", True, [0.5], 10**400, math.inf)
    changes += [WRITTEN | {"results": WRITTEN["results"] | {name: value}} for name in numbers for value in wrong]
    for results in changes:
        with pytest.raises(DataError, match="its files are damaged"):
            read_written(tmp_path, results, good)
    answer = good["a"][0]
    answers = [answer | change for change in ({"score": "1"}, {"score": math.nan}, {"scores": []}, {"text": 7})]
    items = [good | change for change in ({"index": []}, {"question": None}, {"b": []}, *({"a": [x]} for x in answers))]
    for item in (*items, [], b"[" * 100_000):
        with pytest.raises(DataError, match="its files are damaged"):
            read_written(tmp_path, WRITTEN, item)
