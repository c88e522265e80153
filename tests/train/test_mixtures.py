"""Runs on a mixture: shares and numbers by part in every kind of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.store.metrics import MetricsLog
from small_runs import one_layer_recipe, recorded, run, same_bits, saved_tensors, steps_of, untimed

pytestmark = pytest.mark.usefixtures("quick_stories")


def mixed(weights: dict[str, float], **options: Any) -> dict[str, Any]:
    """Stories of one step, two, ... under the names of the parts; 12 of each."""
    steps = {name: number for number, name in enumerate(weights, start=1)}
    parts = [
        {
            "name": name,
            "weight": weight,
            "task": {"name": "stories", "size": 12, "min_steps": n, "max_steps": n} | options,
        }
        for (name, weight), n in zip(weights.items(), steps.values(), strict=True)
    ]
    return {"name": "mixture", "parts": parts}


UPDATES = {"steps": 6, "lr": 1e-3, "epochs": 1, "minibatches": 2, "save_every": 1, "keep": 20}


def shares_of(folder: Path, *names: str) -> list[tuple[float, ...]]:
    """Prompts of each part in every rollout batch."""
    rows = [step for step in steps_of(folder) if f"{names[0]}:prompts" in step]
    return [tuple(row[f"{name}:prompts"] for name in names) for row in rows]


def test_prompts_by_part_in_rollouts_that_replace_groups_and_resume(tmp_path: Path) -> None:
    rollout = {"group": 2, "max_tokens": 4, "drop_uniform_groups": True, "max_rounds": 3, "staleness": 1}
    task = mixed({"one": 3, "two": 1})
    recipe = one_layer_recipe("grpo", task=task, train=UPDATES, rollout=rollout, rewards=["small_runs:many_vowels"])
    run(tmp_path / "whole", recipe)
    shares, training = shares_of(tmp_path / "whole", "one", "two"), recorded(tmp_path / "whole")[0]
    assert all(one == 3 * two for one, two in shares)
    assert any(one + two > 4 for one, two in shares), "groups were replaced"
    for step, row in enumerate(steps_of(tmp_path / "whole"), start=1):
        for name in ("one", "two") if "one:prompts" in row else ():
            rollouts = [r for r in training if r.step == step and r.example_id.startswith(f"{name}/")]
            assert row[f"{name}:prompts"] == len(rollouts) / 2 >= row[f"{name}:trained"]
            assert row[f"{name}:reward"] == pytest.approx(sum(r.reward for r in rollouts) / len(rollouts))
            assert row[f"{name}:num_tokens"] == pytest.approx(sum(r.num_own for r in rollouts) / len(rollouts))
            assert row[f"{name}:accuracy"] == sum(r.outcome == "right" for r in rollouts) / len(rollouts)
    run(tmp_path / "cut", recipe, stop_after=3)
    run(tmp_path / "cut", recipe, resume=True)
    assert untimed(tmp_path / "cut") == untimed(tmp_path / "whole")
    assert same_bits(saved_tensors(tmp_path / "cut", 6), saved_tensors(tmp_path / "whole", 6))


def test_demonstrations_by_part(tmp_path: Path) -> None:
    recipe = one_layer_recipe(
        "sft",
        task=mixed({"one": 3, "two": 1}),
        data={"batch": 8},
        train={"steps": 6, "save_every": 1},
    )
    run(tmp_path / "whole", recipe)
    rows = steps_of(tmp_path / "whole")
    assert [(row["one:rows"], row["two:rows"]) for row in rows] == [(6, 2)] * 6
    for row in rows:
        own = [name for name in ("one", "two") if row[f"{name}:rows"]]
        tokens = {name: row[f"{name}:rows"] * row[f"{name}:num_tokens"] for name in own}
        assert sum(tokens.values()) == pytest.approx(row["tokens"])
        told = sum(row[f"{name}:loss"] * tokens[name] for name in own) / row["tokens"]
        assert told == pytest.approx(row["loss"], rel=1e-5)
    run(tmp_path / "cut", recipe, stop_after=4)
    run(tmp_path / "cut", recipe, resume=True)
    assert same_bits(saved_tensors(tmp_path / "cut", 6), saved_tensors(tmp_path / "whole", 6))


@pytest.mark.parametrize(
    ("objective", "responses", "accuracy", "unit"),
    [
        ("dpo", "pair", "pair_accuracy", "pairs"),
        ("kto", "judged", None, "answers"),
        ("process", "steps", "step_accuracy", "solutions"),
    ],
)
def test_given_answers_by_part(objective: str, responses: str, accuracy: str | None, unit: str, tmp_path: Path) -> None:
    recipe = one_layer_recipe(
        "judged",
        task=mixed({"one": 1, "two": 1}, responses=responses),
        objective=objective,
        data={"batch": 6},
        train={"steps": 2},
        eval={"every": 2, "n": 12} if accuracy else {},
    )
    run(tmp_path, recipe)
    for row in steps_of(tmp_path):
        assert (row[f"one:{unit}"], row[f"two:{unit}"]) == (3, 3)
        told = ["loss", *([accuracy] if accuracy else [])]
        assert {f"{name}:{metric}" for name in ("one", "two") for metric in told} <= row.keys()
        if unit == "pairs":
            for metric in told:
                assert (row[f"one:{metric}"] + row[f"two:{metric}"]) / 2 == pytest.approx(row[metric], abs=1e-6)
    evaluated = MetricsLog(tmp_path / "metrics.jsonl").read()[-1].metrics
    if accuracy is not None:
        assert {f"eval/mixture/validation/{name}:{accuracy}" for name in ("one", "two")} <= evaluated.keys()
