"""Runs without a fault balance: every formula and every way to run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from balanced_runs import read_run
from balances.clean_cases import CASES, FAST
from posttrain.untrusted import declare_code
from small_runs import make_recipe, one_layer_recipe


def cases() -> list[Any]:
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name", cases())
def test_balances_of_a_clean_run_hold(name: str, tmp_path: Path) -> None:
    declare_code("choosing_engine:choosing_by_script")
    changes = dict(CASES[name])
    if "load_bits" in changes.get("model", {}):
        pytest.importorskip("bitsandbytes", reason="the extra 'quantize' is not installed")
    changes["train"] = {"steps": 3} | changes.get("train", {})
    make = make_recipe if changes.pop("whole", False) else one_layer_recipe
    read = read_run(tmp_path, make(**changes))
    assert read.violated == {}, [one for one in read.readings if not one[1].holds]
    assert {"tokens", "weights", "loss", "lr", "moved", "leftover"} <= read.worst.keys()
    assert not any("balance '" in notice for notice in read.notices)
