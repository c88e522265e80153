"""Runs whose data have no gold answer: the primary metric, the best weights, and what is measured."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from closeness import approx
from posttrain.errors import UsageError
from posttrain.evaluation.generation import Evaluation, Questions
from posttrain.recipes.recipe import Recipe, load_recipe, validate_recipe
from posttrain.store.metric_names import REWARD
from posttrain.store.metrics import MetricsLog
from posttrain.training import held_out
from posttrain.training.build import prepare
from posttrain.training.sources.descriptions import describe_rollouts
from posttrain.types import Completion, Example, Message, Rollout
from refusing import refuses
from small_runs import Events, one_layer_recipe, shallow, watched

RESPONSE = "There are many apples in the box."


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": f"Tell me of the number {i}.", "chosen": f"{RESPONSE} {i}", "rejected": "I do not know."}
        for i in range(40)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def imitation(pairs: Path, **evaluation: Any) -> Recipe:
    task = {"name": "preferences", "path": str(pairs), "validation_share": 0.2}
    return validate_recipe(
        {
            "task": task,
            "model": {"name": shallow(1)},
            "prompt": {"template": "dialogue"},
            "data": {"batch_size": 4, "max_length": 128},
            "objective": "cross_entropy",
            "train": {"steps": 4, "lr": 1e-3, "save_every": 4, "keep_checkpoints": 1},
            "eval": {"every": 1, "num_examples": 6, "max_tokens": 4} | evaluation,
        }
    ).resolve()


def best_of(folder: Path) -> str | None:
    link = folder / "checkpoints" / "best"
    return os.readlink(link) if link.is_symlink() else None


def scripted(monkeypatch: pytest.MonkeyPatch, name: str, values: list[float]) -> None:
    def pretend(_: Any, request: Questions) -> Evaluation:
        return Evaluation("made/up", {name: values[request.step], "n": 1.0, "seconds": 0.0}, [])

    monkeypatch.setattr(held_out, "evaluate_sampler", pretend)


def test_the_held_out_loss_by_hand(pairs: Path) -> None:
    """The same as from the model's own forward pass, one demonstration at a time."""
    recipe = imitation(pairs)
    parts = prepare(recipe)
    assert parts.evaluator is not None
    (chosen,) = parts.evaluator.held_out.values()
    (evaluation,) = parts.evaluator(0)
    total, tokens, likeliest = 0.0, 0, 0
    for index in chosen.units:
        (row,) = chosen.batches.units[index]
        with torch.no_grad():
            logits = parts.model(torch.tensor([row.ids])).logits[0].double()
        for t in range(row.prompt_length, len(row.ids)):
            total -= float(logits[t - 1].log_softmax(-1)[row.ids[t]])
            likeliest += int(logits[t - 1].argmax()) == row.ids[t]
            tokens += 1
    results = evaluation.results
    assert (results["loss_tokens"], results["loss_rows"]) == (tokens, len(chosen.units))
    assert results["loss"] == approx(total / tokens, rel=1e-5)
    assert results["perplexity"] == approx(math.exp(total / tokens), rel=1e-4)
    assert results["token_accuracy"] == approx(likeliest / tokens)
    assert "accuracy" not in results


def test_imitation_without_gold_is_measured_by_its_loss_and_keeps_the_lowest(pairs: Path, tmp_path: Path) -> None:
    events = Events()
    watched(tmp_path / "run", imitation(pairs), events)
    evaluations = events.of("evaluation")
    assert {info["primary_metric"].name for info in evaluations} == {"loss"}
    losses = {info["step"]: info["results"]["loss"] for info in evaluations}
    assert losses[4] < losses[0]
    lowest = min(range(1, 5), key=lambda step: (losses[step], -step))
    assert best_of(tmp_path / "run") == f"step-{lowest:06d}"
    rows = MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    assert not any(key.endswith("/accuracy") for row in rows for key in row.metrics)


def test_an_unknown_best_is_refused_before_the_first_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, "accuracy", [0.5])
    recipe = one_layer_recipe("sft", eval={"every": 1, "num_examples": 1, "best": "acuracy"})
    with refuses(UsageError, "eval.best", "'acuracy'", "'accuracy'"):
        watched(tmp_path, recipe, Events())
    assert MetricsLog(tmp_path / "metrics.jsonl").read() == []


def test_a_policy_without_gold_answers_is_measured_by_its_reward(pairs: Path, tmp_path: Path) -> None:
    task = {"name": "preferences", "path": str(pairs), "validation_share": 0.2}
    evaluation = {"every": 2, "num_examples": 4, "max_tokens": 8, "num_kl_prompts": 2}
    recipe = one_layer_recipe("grpo", train={"steps": 4}, eval=evaluation)
    data = recipe.dump() | {"task": task, "prompt": {"template": "dialogue"}}
    events = Events()
    watched(tmp_path / "run", validate_recipe(data).resolve(), events)
    evaluations = events.of("evaluation")
    assert {info["primary_metric"] for info in evaluations} == {REWARD}
    results = {info["step"]: info["results"] for info in evaluations}
    assert results[0]["kl_initial"] == approx(0.0, abs=1e-6)
    assert all(r["reward_low"] <= r["reward"] <= r["reward_high"] for r in results.values())
    best = max((2, 4), key=lambda step: (results[step]["reward"], step))
    assert best_of(tmp_path / "run") == f"step-{best:06d}"
    steps = [info["metrics"] for info in events.of("step")]
    assert not any({"accuracy", "completion_length_wrong"} & metrics.keys() for metrics in steps)


def rollout(outcome: str, correct: float) -> Rollout:
    completion = Completion((5, 6), (-0.1, -0.2), "stop")
    parts = {"correct": correct, "xml_format": 1.0}
    return Rollout(
        Example("a", (Message("user", "?"),)), (1,), completion, "x", parts, correct, 1, 0, 0, 0, outcome=outcome
    )


def test_training_accuracy_is_over_what_can_be_graded() -> None:
    graded = describe_rollouts([[rollout("right", 1.0), rollout("wrong", 0.0)]], "xml_format")
    assert graded["accuracy"] == 0.5
    mixed = describe_rollouts([[rollout("right", 1.0), rollout("ungraded", 0.0)]], "xml_format")
    assert mixed["accuracy"] == 1.0
    assert "completion_length_wrong" not in mixed
    assert "accuracy" not in describe_rollouts([[rollout("ungraded", 0.0)]], "xml_format")


@pytest.mark.parametrize(
    ("overrides", "evaluated"),
    [([], ["stories"]), ([("task", "gsm8k")], []), ([("task", "gsm8k"), ("eval.tasks", "[math]")], ["math"])],
)
def test_evaluation_follows_the_task_of_the_command_line(
    overrides: list[tuple[str, str]], evaluated: list[str]
) -> None:
    """None named: the held-out split of the task that is trained on."""
    assert [word.name for word in load_recipe("tiny/grpo", overrides).eval.tasks] == evaluated
