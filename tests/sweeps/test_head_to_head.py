"""Policies against the start: read from evaluations, over seeds, with numbers worked by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from closeness import approx
from posttrain.errors import DataError
from posttrain.evaluation.statistics import wilson_interval
from posttrain.sweeps.head_to_head import (
    Estimate,
    PolicyComparison,
    head_to_head_part,
    over_seeds,
    read_comparison,
    reward_gain,
    show_estimate,
)
from posttrain.sweeps.judges import JudgeAgreement, read_agreement
from refusing import refuses

WRITTEN: dict[str, Any] = {
    "results": {"characters_a": 100.0, "characters_b": 90}
    | {f"{name}{end}": 0.5 for name in ("win_rate", "kl_ab") for end in ("", "_low", "_high")},
    "others": {"p": {"win_rate": 0.6, "win_rate_low": 0.5, "win_rate_high": 0.7}},
}


KNOWS = JudgeAgreement(0, 0.65, 0.582, 0.713, 200)
COIN = JudgeAgreement(0, 0.6, *wilson_interval(6, 10), 10)


def answered(own: float | None, start: float) -> dict[str, Any]:
    """A prompt to which a policy (score ``own``) and the start have answered; the proxy doubles every score."""
    scores = {"a": own, "b": start}
    sides = {
        side: [{"score": x, "text": side, "scores": {"p": None if x is None else 2 * x}}] for side, x in scores.items()
    }
    return {"question": "How?", **sides}


def comparison(row: str, seed: int, rate: Estimate, proxy: Estimate = (0.5, 0.4, 0.6)) -> PolicyComparison:
    measures = {"win_rate": rate, "win_rate_proxy": proxy, "reward_judge": rate, "reward_proxy": rate}
    return PolicyComparison(row, seed, measures | {"length_ratio": (1.0, 1.0, 1.0)})


def test_reward_gain_is_in_deviations_of_the_starts_scores_without_unscored_prompts() -> None:
    items = [answered(3.0, 0.0), answered(1.0, 2.0), answered(None, 50.0)]
    # gains 3 and -1, mean 1; the start's scores 0 and 2 deviate by 1
    mean, low, high = reward_gain(items, None)
    assert mean == approx(1.0)
    half = 12.706204736432095 * math.sqrt(8.0 / 2)  # variance of (3, -1) is 8, over 2 prompts
    assert (low, high) == (approx(1.0 - half), approx(1.0 + half))
    assert reward_gain(items, "p")[0] == approx(1.0)  # the unit doubles with the scores


def test_over_seeds_gives_students_t_and_of_one_seed_its_own_interval() -> None:
    assert over_seeds([]) is None
    assert over_seeds([(0.6, 0.5, 0.7)]) == (0.6, 0.5, 0.7)
    mean, _, high = over_seeds([(x, 0, 1) for x in (0.6, 0.7, 0.8)])
    assert mean == approx(0.7)
    assert high - mean == approx(4.302652729911275 * 0.1 / math.sqrt(3))
    assert over_seeds([(x, 0, 1) for x in (0.2, 0.9)], is_share=True)[1:] == (0.0, 1.0)  # a share stays one
    assert show_estimate((0.6, 0.5, 0.7), is_share=True) == "60.0% [50.0, 70.0]"


def test_findings_follow_from_the_intervals() -> None:
    better, unclear = (0.8, 0.7, 0.9), (0.55, 0.45, 0.65)
    weights = {"a-seed0": "cells/a-seed0"}
    policies = [comparison("b", 0, unclear, better), comparison("a", 0, better, better)]
    part = head_to_head_part(policies, weights, [KNOWS])
    assert part.findings[0] == "the judge agrees with held-out labels: 65.0% [58.2, 71.3], n = 200"
    assert part.findings[1].startswith("a: wins 80.0% [70.0, 90.0] under the judge: better than the initial model")
    assert part.findings[1].endswith("but not measurably at similar length")
    assert "not distinguishable from the initial model; it wins only under the proxy" in part.findings[2]
    assert part.findings[3].endswith("optimistic): cells/a-seed0")
    assert [line[:3] for line in part.tables[0].lines] == [
        ["a", "1", "80.0% [70.0, 90.0]"],
        ["b", "1", "55.0% [45.0, 65.0]"],
    ]
    assert part.data["policies"]["a"]["win_rate"] == {"mean": 0.8, "low": 0.7, "high": 0.9}


def test_head_to_head_part_of_a_judge_like_a_coin_gives_no_verdict() -> None:
    """60 % of 10 pairs: Wilson's interval [31.3, 83.2] has one half in it."""
    better = (0.8, 0.7, 0.9)
    part = head_to_head_part([comparison("a", 0, better, better)], {"a-seed0": "cells/a-seed0"}, [COIN])
    assert "no better than chance" in part.findings[0]
    assert "60.0% [31.3, 83.2], n = 10" in part.findings[0]
    assert part.findings[1:] == ["a: wins 80.0% [70.0, 90.0] under the judge"]
    assert (part.data["best"], part.data["judge_knows"]) == (None, False)
    assert part.data["judges"][0]["n"] == 10


def test_head_to_head_part_needs_the_agreement_of_the_judge_of_every_seed() -> None:
    policies = [comparison("a", seed, (0.8, 0.7, 0.9)) for seed in (0, 1)]
    places = {f"a-seed{seed}": f"cells/a-seed{seed}" for seed in (0, 1)}
    assert "not measured (seed 1)" in head_to_head_part(policies, places, [KNOWS]).findings[0]
    weak = head_to_head_part(policies, places, [KNOWS, replace(COIN, seed=1)])
    assert "seed 0: 65.0%" in weak.findings[0]
    assert weak.data["best"] is None
    assert head_to_head_part(policies, places, [KNOWS, replace(KNOWS, seed=1)]).data["judge_knows"] is True


def test_head_to_head_part_best_is_the_start_if_no_policy_wins_more_than_half() -> None:
    policies = [comparison("a", 0, (0.417, 0.35, 0.48)), comparison("b", 0, (0.3, 0.2, 0.4))]
    part = head_to_head_part(policies, {"start": "start/final", "a-seed0": "a", "b-seed0": "b"}, [KNOWS])
    assert part.data["best"] == "start/final"
    assert "worse than the initial model" in part.findings[1]
    assert part.findings[-1].endswith("initial model is best: start/final")


def test_read_agreement_of_pairs_of_answers_and_of_nothing() -> None:
    pairs = {"pair_accuracy": 0.65, "pair_accuracy_low": 0.582, "pair_accuracy_high": 0.713, "n": 200.0}
    assert read_agreement(0, pairs) == KNOWS
    named = {name.replace("pair", "answer"): value for name, value in pairs.items()}
    judged = read_agreement(0, named | {"correct_share": 0.3})
    assert judged is not None
    assert (judged.chance, judged.excludes_chance) == (0.7, False)
    assert read_agreement(0, {"loss": 0.3, "pair_accuracy": 0.6}) is None


def read_written(folder: Path, results: Any, item: Any) -> PolicyComparison:
    for name, content in (("results.json", results), ("items.jsonl", item)):
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode() + b"\n")
    return read_comparison(folder, "a", 0)


def test_read_comparison_of_written_files_and_of_damaged_ones(tmp_path: Path) -> None:
    good = answered(3.0, 0.0)
    with refuses(DataError, "damaged files"):
        read_comparison(tmp_path, "a", 0)
    whole = read_written(tmp_path, WRITTEN, good)
    assert whole.measures["reward_judge"][0] == 3.0
    assert whole.measures["length_ratio"][0] == approx(100 / 90)
    assert whole.measures["win_rate_proxy"] == (0.6, 0.5, 0.7)
    assert whole.measures["kl"] == (0.5, 0.5, 0.5)
    changes: list[Any] = [b"{", b"[" * 100_000, b"1" * 5000, [], {"results": 7}, WRITTEN | {"others": {"p": 7}}]
    changes += [WRITTEN | {"results": WRITTEN["results"] | {"win_rate": value}} for value in (None, "x", [0.5])]
    for results in changes:
        with refuses(DataError, "damaged files"):
            read_written(tmp_path, results, good)
    for item in (good | {"b": []}, good | {"a": [{"text": "x"}]}, [], b"[" * 100_000):
        with refuses(DataError, "damaged files"):
            read_written(tmp_path, WRITTEN, item)
