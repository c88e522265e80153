"""Answers for which every reward returned None: no part of the baseline, an advantage of 0, and rows of the batch."""

from __future__ import annotations

import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import posttrain as pt
from closeness import approx
from posttrain.algorithms.advantages import batch_normalized, centered, normalized
from posttrain.store.rollouts import RecordedRollout
from posttrain.training.advantages import AdvantageEstimator
from posttrain.training.sources.stored import _groups_type, _write_rollout
from posttrain.types import Completion, Example, Message, Rollout
from small_runs import one_layer_recipe

NAN = float("nan")


def grouped(*rows: list[float]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


def test_advantages_without_the_unscored_are_those_of_the_rest() -> None:
    found = AdvantageEstimator(normalized).from_groups(
        grouped([1.0, NAN, 0.0, 0.5], [NAN, NAN, 2.0, NAN], [NAN] * 4, [1.0, 2.0, 3.0, 4.0])
    )
    assert found is not None
    spread = statistics.stdev([1.0, 0.0, 0.5]) + 1e-4
    assert found[0].tolist() == approx([0.5 / spread, 0.0, -0.5 / spread, 0.0], abs=1e-15)
    assert found[1].tolist() == [0.0] * 4, "one answer has no others to be compared with"
    assert found[2].tolist() == [0.0] * 4
    whole = AdvantageEstimator(normalized).from_groups(grouped([1.0, 2.0, 3.0, 4.0]))
    assert whole is not None
    assert torch.equal(found[3], whole[0])


@pytest.mark.parametrize("center", ["batch", "group"])
def test_batch_statistics_are_of_all_scored_answers_in_groups_of_any_size(center: Literal["batch", "group"]) -> None:
    rewards = grouped([1.0, NAN, 0.0, 0.5], [NAN, NAN, 2.0, NAN], [1.0, 2.0, 3.0, 4.0])
    function = partial(batch_normalized, center=center, epsilon=0.0)
    found = AdvantageEstimator(function, spans_groups=True).from_groups(rewards)
    assert found is not None
    centred = [1.0, 0.0, 0.5, 1.0, 2.0, 3.0, 4.0]  # an answer without others in its group is not compared
    mean = statistics.fmean(centred)
    if center == "group":
        centred, mean = [0.5, -0.5, 0.0, -1.5, -0.5, 0.5, 1.5], 0.0
    spread = statistics.pstdev(centred)
    scaled = [(x - mean) / spread for x in centred]
    assert found[0].tolist() == approx([scaled[0], 0.0, scaled[1], scaled[2]], abs=1e-12)
    assert found[1].tolist() == [0.0] * 4
    assert found[2].tolist() == approx(scaled[3:], abs=1e-12)


def test_group_of_one_is_its_own_and_no_reward_at_all_gives_zeros() -> None:
    from posttrain.algorithms.advantages import raw

    found = AdvantageEstimator(raw).from_groups(grouped([0.5], [NAN]))
    assert found is not None
    assert [row.tolist() for row in found] == [[0.5], [0.0]]
    found = AdvantageEstimator(centered).from_groups(grouped([NAN, NAN]))
    assert found is not None
    assert [row.tolist() for row in found] == [[0.0, 0.0]]


def of_length(completions: list[str], log_metric: Any, log_extra: Any, **columns: Any) -> list[float | None]:
    """Score the answers with an even number of letters by it."""
    sizes = [len(text) for text in completions]
    log_metric("letters", sum(sizes) / len(sizes))
    log_extra("size", sizes)
    return [size / 10 if size % 2 == 0 else None for size in sizes]


def even_only(completions: list[str], **columns: Any) -> list[float | None]:
    return [0.5 if len(text) % 2 == 0 else None for text in completions]


def trained(folder: Path, **keys: Any) -> tuple[list[RecordedRollout], list[dict[str, Any]], Any]:
    recipe = one_layer_recipe("grpo").model_dump(mode="json", exclude_none=True)
    name = {key: recipe[key] for key in ("task", "prompt", "rollout", "objective", "model") if key in recipe}
    name["train"] = {"steps": 3, "lr": 1e-3, "strict": True}
    run = pt.train(
        name, rewards=[of_length, (even_only, 0.5)], runs_dir=folder, run="mine", progress=False, eval__every=0, **keys
    )
    rows = [row for step in (1, 2, 3) for row in run.rollouts(step=step)]
    metrics = [json.loads(line)["metrics"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return rows, metrics, pt.diagnose(run)


@pytest.mark.parametrize(
    "advantage", ["batch_normalized", {"name": "batch_normalized", "center": "group"}, "mean_scaled", "gdpo"]
)
def test_run_with_unscored_answers_balances_under_every_advantage(tmp_path: Path, advantage: Any) -> None:
    rows, _, report = trained(tmp_path, advantage=advantage)
    assert 0 < sum(row.is_scored for row in rows) < len(rows)
    assert [one for one in report if one.kind == "fault"] == []


def test_run_with_answers_that_no_reward_scores_balances(tmp_path: Path) -> None:
    rows, metrics, report = trained(tmp_path)
    odd = [row for row in rows if row.extra["size"] % 2]
    assert 0 < len(odd) < len(rows), "some of both"
    assert all(not row.is_scored and row.advantage == 0.0 and row.skipped for row in odd)
    groups: dict[tuple[int, int], list[RecordedRollout]] = {}
    for row in rows:
        groups.setdefault((row.step, row.prompt_index), []).append(row)
    compared = 0
    for group in groups.values():
        scored = [row for row in group if row.is_scored]
        rewards = [row.extra["size"] / 10 + 0.25 for row in scored]
        assert [row.reward for row in scored] == approx(rewards, abs=1e-12)
        if len(set(rewards)) > 1:
            compared += 1
            spread = statistics.stdev(rewards) + 1e-4
            mean = statistics.fmean(rewards)
            assert [row.advantage for row in scored] == approx([(x - mean) / spread for x in rewards], abs=1e-12)
        else:
            assert [row.advantage for row in scored] == [0.0] * len(scored)
    assert compared > 2
    for step, found in enumerate(metrics, 1):
        own = [row for row in rows if row.step == step]
        scored = [row for row in own if row.is_scored]
        assert found["no_reward"] == approx(1 - len(scored) / len(own), abs=1e-12)
        assert found["reward"] == approx(statistics.fmean(row.reward for row in scored), abs=1e-12)
        assert found["letters"] == approx(statistics.fmean(row.extra["size"] for row in own), abs=1e-12)
    assert [one for one in report if one.kind == "fault"] == []


def test_rollout_that_waits_in_a_checkpoint_keeps_what_rewards_said() -> None:
    example = Example("a/1", (Message("user", "How many?"),))
    rollout = Rollout(example, (1,), Completion((3,), (-0.5,), "stop"), "4", {}, 0.0, 1, 0, 0, 0)
    rollout.skipped, rollout.is_scored = ["mine"], False
    rollout.extra, rollout.logged = {"size": 1}, {"letters": [1.0]}
    written = json.dumps([[_write_rollout(rollout)]])
    _groups_type().validate_json(written, strict=True)
    [[read]] = json.loads(written)
    assert (read["skipped"], read["is_scored"], read["extra"], read["logged"]) == (
        ["mine"], False, {"size": 1}, {"letters": [1.0]},
    )  # fmt: skip
