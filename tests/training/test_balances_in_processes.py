"""Balances of runs in several processes: the main one reads what all computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import process_group_of, train_case

from balanced_runs import Read, reading
from small_runs import make_recipe, shallow

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"kind": "grpo", "regularize": {"kl_coef": 0.1}, "train": {"num_minibatches": 2}},
    "ppo": {"kind": "grpo", "objective": "ppo", "kl_in_reward": {"weight": 0.1}},
    "dpo": {"kind": "judged", "objective": "dpo", "data": {"batch_size": 6}},
    "sft": {"kind": "sft", "data": {"batch_size": 6}},
}


@pytest.mark.parametrize("sharding", [pytest.param("none", marks=pytest.mark.slow), "fsdp2"])
def test_balances_in_two_processes_hold(sharding: str, tmp_path: Path) -> None:
    with process_group_of(2) as process_group:
        for name, changes in CASES.items():
            train = {"steps": 4, "micro_batch_tokens": 400} | changes.get("train", {})
            one_layer = {"model": {"name": shallow(1)}, "scale": {"sharding": sharding}}
            recipe = make_recipe(**changes | one_layer | {"train": train})
            read = Read()
            with reading(read):
                train_case(process_group, recipe.dump(), tmp_path / name)
            assert read.violated == {}, name
            assert {"loss", "gradient", "tokens", "weights", "update", "moved"} <= read.worst.keys()
