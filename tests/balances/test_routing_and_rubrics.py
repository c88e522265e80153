"""Balances of routers under an auxiliary loss, and of rewards by criteria: they hold, and find what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from balanced_runs import Read, read_run
from posttrain.balances.findings import Reading
from posttrain.balances.of_answers import criterion_weights, read_answers
from posttrain.balances.of_routing import read_routing
from posttrain.balances.record import SampledAnswer, SamplingFacts, StepRecord, UpdateFacts
from posttrain.models.forward.routing.routers import RouterSums
from posttrain.training.records.stored_records import read_run_records
from small_runs import make_recipe

SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 12, "num_hidden_layers": 2, "num_experts": 4,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
    "max_position_embeddings": 512, "initializer_range": 0.3,
}  # fmt: skip
OF_ROUTERS = {"routed", "router_loss"}


def moe_recipe(kind: str, **changes: Any) -> Any:
    init = {"architecture": "qwen3_moe", "config": SIZES, "tokenizer": {"num_documents": 50, "vocab_size": 280}}
    train = {"steps": 2, "lr": 1e-2, "router_aux_loss_coef": 0.1, "micro_batch_rows": 3} | changes.pop("train", {})
    if kind == "grpo":
        changes = {"rewards": ["small_runs:vowel_share"]} | changes
    return make_recipe(kind, model={"init": init}, train=train, **changes)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("sft", {}),
        ("sft", {"train": {"micro_batch_rows": None}}),
        ("grpo", {"rollout": {"router_replay": True}, "train": {"num_minibatches": 2}}),
        ("grpo", {"rollout": {"mask_truncated": True, "truncated_divisor": "all", "stop": ["a", "e", "t"]}}),
    ],
    ids=["sft", "one micro-batch", "replay", "left out"],
)
def test_balances_of_routers_hold(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    read = read_run(tmp_path, moe_recipe(kind, **changes))
    assert read.violated == {}, [one for one in read.readings if not one[1].holds]
    assert read.worst.keys() >= OF_ROUTERS
    stored = [one for record in read_run_records(tmp_path) for one in read_routing(record)]
    assert [one.check for one in stored] == ["routed", "routed"], "files keep no sums by expert"
    assert all(one.holds for one in stored)


def padding_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere: Callable[..., Tensor] = lambda packing: torch.ones_like(packing.tokens)  # noqa: E731
    monkeypatch.setattr("posttrain.models.forward.forward.rows_of_tokens", everywhere)


def last_micro_batch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RouterSums, "added", lambda self, other: other)


def factor_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = RouterSums.auxiliary_loss
    monkeypatch.setattr(RouterSums, "auxiliary_loss", lambda self, of: whole(self, of) / len(self.counts))


@pytest.mark.parametrize(
    ("fault", "finds"),
    [(padding_counts, {"routed"}), (last_micro_batch_alone, {"routed"}), (factor_is_missing, {"router_loss"})],
)
def test_balances_of_routers_find_what_is_wrong(
    fault: Callable[[pytest.MonkeyPatch], None], finds: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    read: Read = read_run(tmp_path, moe_recipe("sft"))
    assert OF_ROUTERS & read.violated.keys() == finds
    assert any(f"balance '{name}'" in notice for name in finds for notice in read.notices)


def rubric_reading(found: float, parts: dict[str, float], weights: tuple[float, ...]) -> list[Reading]:
    """Criteria with these weights, the reward that was paid, and what the judge said."""
    answer = SampledAnswer(
        0, 0, 0, (1,), (2,), None, None, {"rubric": found, **parts}, found, None, "stop", 0, criteria=weights
    )
    facts = UpdateFacts(None, None, sampling=SamplingFacts(1, 1, {"rubric": 1.0}, rubric="rubric"))  # type: ignore[arg-type]
    read = read_answers(StepRecord(1, 0, facts, {}, answers=[answer]))
    return [one for one in read if one.check == "rubric"]


def test_rubric_balance_is_the_weighted_share_of_what_was_judged() -> None:
    """Weights 3, 1 and -2; met are the first and the fault: (3 - 2) / 4. Without the second: (3 - 2) / 3."""
    weights = (3.0, 1.0, -2.0)
    said = {"rubric:1": 1.0, "rubric:2": 0.0, "rubric:3": 1.0}
    assert rubric_reading(0.25, said, weights)[0].holds
    without = {name: x for name, x in said.items() if name != "rubric:2"}
    assert rubric_reading(1 / 3, without, weights)[0].holds
    for wrong in (0.5, 1 / 6, -0.25, float("nan")):
        assert not rubric_reading(wrong, said, weights)[0].holds
    assert not rubric_reading(0.25, without, weights)[0].holds, "an unjudged criterion is in neither sum"
    assert not rubric_reading(0.25, said | {"rubric:1": 0.5, "rubric:2": 1.5}, weights)[0].holds, "yes or no"
    assert rubric_reading(0.7, {}, weights)[0].holds, "nothing was judged: the mean of others is paid"
    assert rubric_reading(0.25, said, ()) == []


def test_weights_of_criteria_are_read_from_rows() -> None:
    criteria = ["is polite", {"criterion": "names the year", "weight": 3}, {"text": "is long", "points": -2}]
    assert criterion_weights(criteria) == (1.0, 3.0, -2.0)
    assert criterion_weights('["a", "b"]') == (1.0, 1.0)
    assert criterion_weights(None) == ()


def test_routing_of_a_record_without_sums_is_not_read(tmp_path: Path) -> None:
    read_run(tmp_path, moe_recipe("sft", train={"steps": 1}))
    (record,) = read_run_records(tmp_path)
    assert len(list(read_routing(record))) == 1
    without = {name: x for name, x in record.measured.items() if not name.startswith("router_")}
    assert list(read_routing(replace(record, measured=without))) == []
    twice = record.measured | {"router_choices": 2 * record.measured["router_choices"]}
    assert not next(iter(read_routing(replace(record, measured=twice)))).holds
