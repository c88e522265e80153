"""Records of updates: stored, read again, checked again, resumed, and what ends a run."""

from __future__ import annotations

import math
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from balanced_runs import read_run
from closeness import approx
from posttrain.balances.checks import check_balances, read_balances
from posttrain.balances.limits import kl_limit
from posttrain.balances.of_answers import surprise_of
from posttrain.balances.record import StepRecord, TokenRecord
from posttrain.errors import DataError, Unbalanced
from posttrain.store.rollouts import RolloutStore
from posttrain.training import advantages
from posttrain.training.records.stored_records import read_records
from small_runs import Events, one_layer_recipe, run, same_bits, saved_tensors, watched

SHARED = {"steps": 4, "ppo_epochs": 2, "num_minibatches": 2}
KINDS: dict[str, dict[str, Any]] = {
    "grpo": {"kind": "grpo", "regularize": {"kl_coef": 0.1}, "train": SHARED},
    "reinforce": {"kind": "grpo", "objective": "reinforce", "rewards": ["small_runs:many_vowels"]},
    "returns": {"kind": "grpo", "objective": "reinforce", "advantage": "return_to_go", "kl_in_reward": {"weight": 0.1}},
    "dpo": {"kind": "judged", "objective": "dpo"},
    "sft": {"kind": "sft"},
    "dpo on samples": {
        "kind": "grpo",
        "objective": "dpo",
        "rollout": {"select": {"name": "right_and_wrong", "threshold": 0.25, "num_pairs": 2}},
    },
}


def recipe_of(name: str, **train: Any) -> Any:
    changes = dict(KINDS[name])
    return one_layer_recipe(**changes | {"train": {"steps": 3} | changes.get("train", {}) | train})


def stored(folder: Path) -> list[StepRecord]:
    return list(read_records(RolloutStore(folder / "rollouts.db", read_only=True)))


@pytest.mark.parametrize("name", KINDS)
def test_records_of_a_file_balance_as_those_of_the_run(name: str, tmp_path: Path) -> None:
    read = read_run(tmp_path, recipe_of(name))
    assert read.violated == {}
    records = stored(tmp_path)
    assert len(records) == len(read.events.of("step"))
    checked = set[str]()
    for record in records:
        readings = list(read_balances(record))
        assert [one for one in readings if not one.holds] == []
        checked |= {one.check for one in readings}
    assert {"tokens", "weights", "loss", "lr", "update", "moved", "leftover"} <= checked | {"tokens", "weights"}
    if records[0].answers:
        assert {"reward", "groups", "prompts", "finish", "version", "rows", "tokens", "weights", "sampler"} <= checked


def test_records_of_a_file_name_what_was_changed_in_it(tmp_path: Path) -> None:
    read_run(tmp_path, recipe_of("grpo"))
    records = stored(tmp_path)
    first = records[0]
    assert first.rows is not None
    changed = {
        "advantage": replace(first, rows=replace(first.rows, advantage=-first.rows.advantage)),
        "tokens": replace(first, rows=replace(first.rows, tokens=first.rows.tokens - 1)),
        "weights": replace(first, rows=replace(first.rows, weight=first.rows.weight * 1.01)),
        "loss": replace(first, measured={**first.measured, "loss": first.measured["loss"] + 0.01}),
        "sampler": replace(first, rows=replace(first.rows, kl_sampler=first.rows.kl_sampler + 1e-6)),
        "reference": replace(first, rows=replace(first.rows, kl_reference=first.rows.kl_reference + 1e-6)),
        "leftover": replace(first, measured={**first.measured, "leftover": 3.0}),
        "lr": replace(first, measured={**first.measured, "lr": 1e-2}),
        "update": replace(first, measured={**first.measured, "update_gap": 0.2}),
        "moved": replace(first, measured={**first.measured, "step_size": 0.0}),
        "reward": replace(first, answers=[replace(a, reward=a.reward + 0.1) for a in first.answers]),
        "groups": replace(first, answers=[first.answers[0], *first.answers[:-1]]),
        "prompts": replace(first, answers=[replace(a, epoch=3) for a in first.answers]),
        "version": replace(first, answers=[replace(a, version=7) for a in first.answers]),
    }
    for check, record in changed.items():
        found = {one.check: one for one in check_balances(record)}
        assert check in found, check
        assert found[check].step == 1
        assert found[check].causes
        assert found[check].decided_by in found[check].message


def test_a_mismatch_of_one_limit_follows_the_kind_of_numbers() -> None:
    """Half of the square of c · u · √(10 (L + 1)), worked by hand for four layers."""
    assert kl_limit(4, "fp32") == approx((256 * 2**-24) ** 2 * 50 / 2)
    assert kl_limit(4, "fp32", "bf16") == approx((4 * 2**-8) ** 2 * 50 / 2)
    assert kl_limit(4, "fp64") == kl_limit(4, "fp32")
    assert kl_limit(80, "fp32", "int4") == 0.02
    assert kl_limit(4, "fp32") < 1e-8 < 1e-5 < kl_limit(4, "fp32", "int8")


def test_a_strict_run_ends_before_the_weights_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = advantages.AdvantageEstimator.from_groups
    monkeypatch.setattr(advantages.AdvantageEstimator, "from_groups", lambda self, g: [-x for x in compute(self, g)])
    events = Events()
    with pytest.raises(Unbalanced, match="balance 'advantage' of update 1"):
        watched(tmp_path, recipe_of("reinforce", strict=True), events)
    assert events.of("step") == []
    assert run(tmp_path / "not strict", recipe_of("reinforce")).step == 3


def test_a_violation_is_told_once_and_stored_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = advantages.AdvantageEstimator.from_groups
    monkeypatch.setattr(advantages.AdvantageEstimator, "from_groups", lambda self, g: [-x for x in compute(self, g)])
    events = Events()
    watched(tmp_path, recipe_of("reinforce"), events)
    told = [one["message"] for one in events.of("notice") if "balance 'advantage'" in one["message"]]
    assert len(told) == 1
    assert "Likely causes: the baseline uses a different group" in told[0]
    count, violated = RolloutStore(tmp_path / "rollouts.db", read_only=True).count_updates()
    assert count == 3
    assert violated["advantage"] == [1, 2, 3]


@pytest.mark.parametrize("name", ["grpo", "returns", "sft"])
def test_a_resumed_run_balances_and_records_what_the_undisturbed_one_does(name: str, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    recipe = recipe_of(name, save_every=3, steps=4)
    run(whole, recipe)
    read = read_run(cut, recipe, stop_after=3)
    shutil.rmtree(cut / "checkpoints" / "step-000004", ignore_errors=True)
    again = read_run(cut, recipe, resume=True)
    assert (read.violated, again.violated) == ({}, {})
    assert same_bits(saved_tensors(whole, 4), saved_tensors(cut, 4))
    both = [RolloutStore(folder / "rollouts.db", read_only=True).updates() for folder in (whole, cut)]
    assert both[0] == both[1]


def test_a_file_before_the_records_has_none(tmp_path: Path) -> None:
    from old_runs import VERSION_0_2_0

    shutil.copy(VERSION_0_2_0 / "rollouts.db", tmp_path / "rollouts.db")
    assert stored(tmp_path) == []
    store = RolloutStore(tmp_path / "rollouts.db", read_only=True)
    assert store.count_updates() == (0, {})
    assert store.training(step=1)[0].sampler_logprobs is None


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE updates SET facts = '{}'",
        "UPDATE updates SET facts = 'nothing'",
        "UPDATE updates SET rows = x'00'",
        "UPDATE updates SET facts = json_set(facts, '$.columns.evil', 'f')",
        "UPDATE updates SET facts = json_set(facts, '$.columns.value', '999999s')",
        'UPDATE updates SET facts = replace(facts, \'"loss":\', \'"loss":1e999,"x":\')',
        "UPDATE about SET value = '{}' WHERE key = 'balances'",
        "UPDATE updates SET violated = x'ff'",
    ],
)
def test_a_damaged_record_is_refused_by_name(change: str, tmp_path: Path) -> None:
    run(tmp_path, recipe_of("sft"))
    db = sqlite3.connect(tmp_path / "rollouts.db", isolation_level=None)
    db.execute(change)
    db.close()
    with pytest.raises(DataError, match="damaged"):
        stored(tmp_path)


def test_records_add_little_to_the_file(tmp_path: Path) -> None:
    """Bytes of the columns and rows that came with the records, next to all others."""
    run(tmp_path, one_layer_recipe("grpo", rollout={"max_tokens": 24}, regularize={"kl_coef": 0.1}, train=SHARED))
    db = sqlite3.connect(tmp_path / "rollouts.db")
    texts = ("prompt", "completion", "token_ids", "parts", "example_id", "finish", "outcome")
    sizes = " + ".join(f"length(CAST({name} AS BLOB))" for name in texts)
    (before,) = db.execute(f"SELECT SUM({sizes} + 40) FROM rollouts").fetchone()
    (logprobs,) = db.execute("SELECT SUM(length(sampler_logprobs)) FROM rollouts").fetchone()
    (rows,) = db.execute("SELECT SUM(length(rows)) FROM updates").fetchone()
    db.close()
    assert (logprobs + rows) / before < 0.3


def test_an_objective_from_outside_says_that_it_has_no_balance(tmp_path: Path) -> None:
    recipe = one_layer_recipe("grpo", objective="small_runs:plain_reinforce", train={"steps": 2})
    read = read_run(tmp_path, recipe)
    assert read.violated == {}
    assert {"loss", "weights", "advantage", "tokens"} <= read.worst.keys()
    assert "gradient" not in read.worst
    assert [
        n for n in read.notices if n.startswith("balances: objective small_runs:plain_reinforce cannot be recomputed")
    ]


@pytest.mark.parametrize("doubt", [1e-2, 1e-3])
def test_draws_of_a_sure_model_are_no_surprise(doubt: float) -> None:
    """Tokens of probability 1 − ε, of which none, or each as often as it should, is another one; and of another ε."""
    number = 2000
    entropy = -(1 - doubt) * math.log1p(-doubt) - doubt * math.log(doubt)

    def deviation(others: int) -> float:
        logprobs = torch.full((1, number), math.log1p(-doubt), dtype=torch.float64)
        logprobs[0, :others] = math.log(doubt)
        mask = torch.ones(1, number, dtype=torch.bool)
        entropies = torch.full_like(logprobs, entropy)
        tokens = TokenRecord(mask, torch.zeros(1), logprobs, logprobs, logprobs, {}, entropy=entropies)
        sums = surprise_of(tokens, torch.tensor([True]))
        return sums["surprise"] / math.sqrt(sums["surprise_squared"])

    expected = round(number * doubt)
    spread = math.sqrt(number * doubt * (1 - doubt))
    assert abs(deviation(expected)) < 1.0
    assert -expected / spread - 1 < deviation(0) < 0
    assert deviation(round(expected + 30 * spread)) > 6.0
