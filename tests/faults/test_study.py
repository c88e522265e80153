"""The 32 faults of the study: each is named within three batches, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from balanced_runs import Read, reading
from faults.patches import STUDY
from posttrain.errors import PosttrainError
from posttrain.recipes.recipe import Recipe, load_recipe
from small_runs import watched

SLOW = pytest.mark.slow
SETTING = {
    "rollout.num_prompts": "4",
    "rollout.group_size": "8",
    "train.num_minibatches": "2",
    "regularize.kl_coef": "0.02",
    "train.lr": "1e-4",
    "train.warmup_steps": "0",
    "train.schedule": "constant",
    "train.save_every": "0",
    "eval.every": "0",
}


def study_recipe(steps: int, changes: dict[str, dict[str, Any]]) -> Recipe:
    """``tiny/grpo`` in the setting of the study."""
    further = {f"{section}.{key}": str(value) for section, keys in changes.items() for key, value in keys.items()}
    options = SETTING | further | {"train.steps": str(steps)}
    return load_recipe("tiny/grpo", list(options.items())).resolve()


@pytest.mark.parametrize("number", [pytest.param(n, marks=SLOW if f.by > 6 else ()) for n, f in STUDY.items()])
def test_balances_of_a_fault_name_it(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = STUDY[number]
    recipe = study_recipe(fault.by, fault.changes)
    fault.patch(monkeypatch)
    read = Read()
    refusal = ""
    with reading(read):
        try:
            watched(tmp_path, recipe, read.events)
        except PosttrainError as refused:
            refusal = str(refused)
    if fault.refused:
        assert fault.refused in refusal
        return
    named = {check: step for check, step in read.violated.items() if check in fault.names}
    assert named, f"{fault.label}: {read.violated}, {read.worst}, {refusal}"
    assert min(named.values()) <= fault.by
    # what no run learns from is refused, with the cause that comes first
    told = [refusal, *read.notices]
    assert (
        any(f"balance {check!r}" in text for check in named for text in told)
        or "sampler and trained model differ" in refusal
    )
