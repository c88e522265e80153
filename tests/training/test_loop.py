"""The loop end to end with the embedded model: resuming, learning, evaluating, and failing well."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from closeness import allclose, approx
from posttrain.algorithms.objectives import primitives
from posttrain.errors import NonFiniteLoss, RewardFailure, UsageError
from posttrain.evaluation.generation import Evaluation, Questions, evaluate_sampler, held_out_indices
from posttrain.store.metrics import MetricsLog
from posttrain.training import held_out, loop
from posttrain.training.build import prepare
from refusing import refuses
from small_runs import (
    Events,
    one_layer_recipe,
    recorded,
    run,
    same_bits,
    saved_tensors,
    shallow,
    steps_of,
    untimed,
    watched,
)

EVALUATION = {"every": 2, "num_examples": 4, "max_tokens": 10}
LORA = {"adapter": {"rank": 4, "dropout": 0.2}}
RUNS: dict[str, tuple[dict[str, Any], int]] = {
    # name: (recipe, updates after which it is stopped)
    "grpo": ({"kind": "grpo", "regularize": {"kl_coef": 0.1}, "train": {"steps": 4, "save_every": 2}}, 3),
    "lion and frozen embeddings": (
        {"kind": "grpo", "optimizer": "lion", "train": {"steps": 2, "lr_ratios": {"*embed_tokens*": 0.0}}},
        1,
    ),
    "adafactor": ({"kind": "sft", "optimizer": "adafactor", "train": {"steps": 2}}, 1),
    "adamw_8bit": ({"kind": "sft", "optimizer": "adamw_8bit", "train": {"steps": 2}}, 1),
    "dynamic sampling": (
        {"kind": "grpo", "rewards": ["small_runs:many_vowels"], "rollout": {"drop_uniform_groups": True}},
        1,
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_stopped_and_resumed_equals_undisturbed(name: str, tmp_path: Path) -> None:
    changes, stop_after = RUNS[name]
    recipe = one_layer_recipe(**changes, eval=EVALUATION)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    undisturbed = run(whole, recipe)
    first = run(cut, recipe, stop_after=stop_after)
    assert (first.step, first.reason) == (stop_after, "interrupted")
    events = Events()
    second = watched(cut, recipe, events, resume=True)
    assert events.of("start")[0]["resumed_from"] == stop_after
    assert [info["step"] for info in events.of("step")] == list(range(stop_after + 1, recipe.train.steps + 1))
    assert (second.step, second.reason) == (undisturbed.step, "finished")
    assert second.evaluations == undisturbed.evaluations
    ours, theirs = saved_tensors(whole, recipe.train.steps), saved_tensors(cut, recipe.train.steps)
    assert same_bits(ours, theirs)
    assert any(key.startswith("optimizer.safetensors:") for key in ours)
    assert untimed(cut) == untimed(whole)
    assert recorded(cut) == recorded(whole)
    assert all(float(row["grad_norm"]) > 0 for row in steps_of(whole))


def test_a_resumed_run_keeps_its_number_of_threads(tmp_path: Path) -> None:
    """The number of parts of a sum changes its last bits."""
    recipe, events = one_layer_recipe("grpo", train={"steps": 2}), Events()
    own, seen = torch.get_num_threads(), []

    def observe(event: str, info: dict[str, Any]) -> None:
        events(event, info)
        if event == "step":
            seen.append(torch.get_num_threads())

    try:
        torch.set_num_threads(own + 1)
        run(tmp_path / "whole", recipe)
        run(tmp_path / "cut", recipe, stop_after=1)
        torch.set_num_threads(own)
        watched(tmp_path / "cut", recipe, observe, resume=True)
        assert (seen, torch.get_num_threads()) == ([own + 1], own)
    finally:
        torch.set_num_threads(own)
    message = f"number of threads: {own + 1}, as at the start of this run (default here: {own})"
    assert message in [info["message"] for info in events.of("notice")]
    for name in ("whole", "cut"):
        state = tmp_path / name / "checkpoints" / "step-000002" / "state.json"
        assert json.loads(state.read_text())["num_threads"] == own + 1
    assert same_bits(saved_tensors(tmp_path / "whole", 2), saved_tensors(tmp_path / "cut", 2))
    assert recorded(tmp_path / "cut") == recorded(tmp_path / "whole")


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    recipe = one_layer_recipe("sft", train={"steps": 2}, eval=EVALUATION)
    result = run(tmp_path, recipe)
    assert result.evaluations["stories/validation"]["n"] == 4.0

    def everything() -> dict[Path, bytes]:
        """Return all files but the database, which counts its own openings."""
        return {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.name != "rollouts.db"}

    before, rows = everything(), recorded(tmp_path)
    assert run(tmp_path, recipe, resume=True) == result
    assert everything() == before
    assert recorded(tmp_path) == rows


def test_a_run_that_began_from_another_runs_best_checkpoint_keeps_to_it(tmp_path: Path) -> None:
    """The first run goes on and finds a better one; silently, that would be another base and reference."""
    first = one_layer_recipe("sft", train={"steps": 2, "save_every": 1})
    run(tmp_path / "first", first)
    (tmp_path / "first" / "recipe.yaml").write_text(first.to_yaml())
    best = tmp_path / "first" / "checkpoints" / "best"
    best.symlink_to("step-000001")
    recipe = one_layer_recipe("grpo", model={"name": str(tmp_path / "first")} | LORA, train={"steps": 2})
    run(tmp_path / "second", recipe, stop_after=1)
    best.unlink()
    best.symlink_to("step-000002")
    with refuses(UsageError, "points to step-000002"):
        run(tmp_path / "second", recipe, resume=True)
    best.unlink()
    best.symlink_to("step-000001")
    assert run(tmp_path / "second", recipe, resume=True).step == 2


def test_loop_clamped_log_ratios_are_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events()
    recipe = one_layer_recipe("grpo", train={"steps": 2, "ppo_epochs": 2, "lr": 3e-3})
    monkeypatch.setattr(primitives, "MAX_LOG_RATIO", 1e-3)  # the second update on a batch goes beyond it
    watched(tmp_path, recipe, events)
    shares = [row["clamped_log_ratios"] for row in steps_of(tmp_path)]
    assert shares[0] == 0.0
    assert shares[1] > 0.5
    text = [
        message
        for message in (info["message"] for info in events.of("notice"))
        if message.startswith("clamped_log_ratios")
    ]
    assert [message.partition(" of the")[0] for message in text] == [f"clamped_log_ratios: {shares[1]:.2%}"]


def test_every_rollout_comes_from_the_newest_weights(tmp_path: Path) -> None:
    """On a fresh batch sampler and trainer agree; one update later, on the same batch, they do not."""
    recipe = one_layer_recipe("grpo", train={"steps": 4, "ppo_epochs": 2, "lr": 3e-3})
    run(tmp_path, recipe)
    rows = steps_of(tmp_path)
    for fresh, stale in zip(rows[0::2], rows[1::2], strict=True):
        assert "reward" in fresh
        assert "reward" not in stale
        assert fresh["kl_sampler"] == approx(0.0, abs=1e-8)
        assert fresh["ratio"] == approx(1.0, abs=1e-5)
        assert stale["kl_sampler"] > 1e-4
    steps = [row.step for row in recorded(tmp_path)[0]]
    assert sorted(set(steps)) == [1, 3]


def test_adapter_dropout_is_active_in_the_update_alone(tmp_path: Path) -> None:
    rows = {}
    for dropout in (0.0, 0.5):
        folder = tmp_path / str(dropout)
        recipe = one_layer_recipe(
            "grpo", model={"adapter": {"rank": 4, "dropout": dropout}}, train={"steps": 2, "lr": 1e-2}
        )
        run(folder, recipe)
        rows[dropout] = steps_of(folder)
    # B = 0 at first: the dropout shows in the gradient of B, not in the log-probabilities
    assert rows[0.0][0]["reward"] == rows[0.5][0]["reward"]
    assert rows[0.5][0]["kl_sampler"] == approx(0.0, abs=1e-8)
    assert abs(rows[0.5][0]["grad_norm"] / rows[0.0][0]["grad_norm"] - 1) > 0.02
    assert rows[0.0][1]["kl_sampler"] == approx(0.0, abs=1e-8)
    assert rows[0.5][1]["kl_sampler"] > 1e-6


def test_evaluation_before_the_first_step_is_of_the_initial_model(tmp_path: Path) -> None:
    recipe = one_layer_recipe("sft", train={"steps": 3, "lr": 3e-3}, eval=EVALUATION | {"num_examples": 6})
    run(tmp_path, recipe)
    rows = MetricsLog(tmp_path / "metrics.jsonl").read()
    evaluated = {r.step: r.metrics for r in rows if "eval/stories/validation/accuracy" in r.metrics}
    assert sorted(evaluated) == [0, 2, 3]  # before the first, every second, and the last
    parts = prepare(recipe)
    evaluator = parts.evaluator
    assert evaluator is not None
    expected = evaluate_sampler(evaluator.sampler, Questions(evaluator.tasks[0], evaluator.sampling(0.0), n=6))
    info = {f"eval/{expected.name}/{k}": v for k, v in expected.results.items() if k != "seconds"}
    assert evaluated[0] == info
    records = recorded(tmp_path)[1]
    assert [r.completion for r in records if r.step == 0] == [r.text for r in expected.rollouts]
    assert [r.step for r in records] == [0] * 6 + [2] * 6 + [3] * 6
    assert [r.completion for r in records if r.step == 3] != [r.completion for r in records if r.step == 0]
    assert {r.evaluation for r in records} == {"stories/validation"}


def test_which_items_are_evaluated_and_how() -> None:
    """The first, another sample, several answers to each: the run's own key decides, and everything else stays."""
    items, ids = {}, list[str]()
    for name, options in {
        "sample": {},
        "first": {"items": "first"},
        "other": {"items_seed": 1},
        "several": {"samples": 3, "temperature": 1.5, "top_p": 0.9},
    }.items():
        evaluator = prepare(one_layer_recipe("sft", eval=EVALUATION | {"num_examples": 6} | options)).evaluator
        assert evaluator is not None
        ids = ids or [example.id for example in evaluator.tasks[0].examples]  # of the whole task, in the first case
        (evaluation,) = evaluator(0)
        items[name] = [(ids.index(r.example.id), r.rollout_index, r.text) for r in evaluation.rollouts]
    chosen = {name: [index for index, *_ in rows] for name, rows in items.items()}
    assert chosen["first"] == list(range(6))
    assert chosen["sample"] == held_out_indices(len(ids), 6) != chosen["other"]
    assert chosen["other"] == held_out_indices(len(ids), 6, seed=1)
    assert [row[:2] for row in items["several"]] == [(i, k) for i in chosen["sample"] for k in range(3)]
    assert len({text for *_, text in items["several"]}) > 6
    assert (evaluation.results["n"], evaluation.results["samples"]) == (6.0, 3.0)
    assert evaluation.results["pass@3"] >= evaluation.results["accuracy"]


def scripted_accuracies(monkeypatch: pytest.MonkeyPatch, accuracies: list[float]) -> None:
    def pretend(_: Any, request: Questions) -> Evaluation:
        return Evaluation("stories/validation", {"accuracy": accuracies[request.step], "seconds": 0.0}, [])

    monkeypatch.setattr(held_out, "evaluate_sampler", pretend)


def test_the_best_evaluation_is_kept_whatever_save_every_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # steps:                          0    1    2    3    4    5    6    7    8
    scripted_accuracies(monkeypatch, [0.9, 0.3, 0.5, 0.5, 0.2, 0.1, 0.4, 0.4, 0.1])
    recipe = one_layer_recipe(
        "sft", train={"steps": 8, "save_every": 4, "keep_checkpoints": 1}, eval={"every": 1, "num_examples": 1}
    )
    events = Events()
    watched(tmp_path, recipe, events)
    checkpoints = tmp_path / "checkpoints"
    assert os.readlink(checkpoints / "best") == "step-000003"  # a tie goes to the later one
    assert sorted(path.name for path in checkpoints.glob("step-*")) == ["step-000003", "step-000008"]
    saved = [(f["step"], f["best"]) for f in events.of("checkpoint")]
    assert saved == [(1, True), (2, True), (3, True), (4, False), (8, False)]
    assert json.loads((checkpoints / "step-000008" / "state.json").read_text())["best"] == {"accuracy": 0.5, "step": 3}


def test_a_reward_that_is_not_finite_ends_the_run_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = one_layer_recipe("grpo", train={"save_every": 1, "steps": 3})
    run(tmp_path, recipe, stop_after=1)
    before = saved_tensors(tmp_path, 1)
    small_runs = importlib.import_module("small_runs")
    monkeypatch.setattr(small_runs, "vowel_share", small_runs.never_finite)
    with refuses(RewardFailure, "'small_runs:vowel_share'"):
        run(tmp_path, recipe, resume=True)
    assert same_bits(saved_tensors(tmp_path, 1), before)
    assert [step for step, _ in untimed(tmp_path)] == [1]
    monkeypatch.undo()
    run(tmp_path, recipe, resume=True)  # mended, it goes on
    assert [step for step, _ in untimed(tmp_path)] == [1, 2, 3]


def test_a_loss_that_is_not_finite_saves_the_batch_and_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[Any] = []
    original = loop.prepare

    def keep(*about: Any) -> Any:
        prepared.append(original(*about))
        return prepared[0]

    monkeypatch.setattr(loop, "prepare", keep)
    with refuses(NonFiniteLoss, "update 1: loss", "not changed", "batch is saved") as caught:
        run(tmp_path, one_layer_recipe("grpo", objective={"name": "small_runs:no_value"}))
    path = tmp_path / "nonfinite-step-000001.safetensors"
    assert str(path) in str(caught.value)
    batch = load_file(path)
    assert batch["tokens"].shape == batch["mask"].shape
    assert bool(batch["mask"].any())
    assert torch.equal(batch["stream.old_logprobs"], batch["stream.sampler_logprobs"])
    initial = AutoModelForCausalLM.from_pretrained(shallow(1)).state_dict()
    assert same_bits(dict(prepared[0].model.state_dict()), dict(initial))
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert untimed(tmp_path) == []


def test_an_objective_that_sums_by_itself_is_refused(tmp_path: Path) -> None:
    with refuses(UsageError, "values of shape", "value per token"):
        run(tmp_path, one_layer_recipe("sft", objective={"name": "small_runs:already_summed"}))


OUTSIDE = '''
from posttrain.registry import register
from posttrain.types import Batch, Loss, Outputs

@register("objective", level="token", needs=("advantages",))
def pushing_from_outside(outputs: Outputs, batch: Batch, *, scale: float = 1.0) -> Loss:
    """REINFORCE with a scale, from a file next to the recipe: values = -scale * A * log pi."""
    return Loss(-scale * batch.field("advantages") * outputs.logprobs)

def unregistered(outputs, batch):
    assert sorted(batch.fields) == ["advantages", "old_logprobs", "sampler_logprobs"]
    return Loss(-batch.field("advantages") * outputs.logprobs)
'''


def test_an_objective_from_outside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_objectives.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)
    ours = {"reinforce": {"name": "reinforce"}, "registered": {"name": "my_objectives:pushing_from_outside"}}
    ours["plain"] = {"name": "my_objectives:unregistered"}
    for name, objective in ours.items():
        run(tmp_path / name, one_layer_recipe("grpo", objective=objective, train={"steps": 2}))
    assert same_bits(saved_tensors(tmp_path / "registered", 2), saved_tensors(tmp_path / "reinforce", 2))
    assert same_bits(saved_tensors(tmp_path / "plain", 2), saved_tensors(tmp_path / "reinforce", 2))
    scaled = one_layer_recipe("grpo", objective={"name": "my_objectives:pushing_from_outside", "scale": 2.0})
    run(tmp_path / "scaled", scaled, stop_after=1)
    once, twice = (steps_of(tmp_path / n)[0]["grad_norm"] for n in ("reinforce", "scaled"))
    assert twice == approx(2 * once, rel=1e-4)


def test_metrics_of_a_step_are_those_of_its_batch(tmp_path: Path) -> None:
    recipe = one_layer_recipe("grpo", train={"steps": 2})
    run(tmp_path, recipe)
    rollouts, rows = recorded(tmp_path)[0], steps_of(tmp_path)
    for step, row in enumerate(rows, start=1):
        mine = [r for r in rollouts if r.step == step]
        assert len(mine) == 16
        assert row["trained_tokens"] == sum(r.num_tokens for r in mine)
        assert row["completion_length"] == approx(row["trained_tokens"] / 16)
        assert row["reward"] == approx(sum(r.reward for r in mine) / 16)
        advantages = torch.tensor([r.advantage for r in mine], dtype=torch.float64)
        assert row["advantage_std"] == approx(float(advantages.std(correction=0)), rel=1e-5)
        assert row["truncated"] == sum(r.finish == "length" for r in mine) / 16
        for group in range(4):
            rewards = torch.tensor([r.reward for r in mine[4 * group : 4 * group + 4]], dtype=torch.float64)
            expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            assert allclose(advantages[4 * group : 4 * group + 4], expected, atol=1e-9)
        weighted = sum(r.mean_sampler_logprob * r.num_tokens for r in mine if r.mean_sampler_logprob is not None)
        assert -weighted / row["trained_tokens"] == approx(row["entropy"], rel=0.5)  # the same quantity, one draw each
    assert all(re.fullmatch(r"[a-z_/:]+", name) for name in rows[0])
    assert math.isfinite(sum(rows[0].values()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"dtype": "bfloat16"}}, "model.dtype"),
        ({"task": {"split": "validation"}, "eval": {"every": 1}}, "task.split"),
        ({"objective": {"name": "grpo"}}, "objective 'grpo' needs"),
        ({"aggregate": {"name": "unit_mean"}}, "'cross_entropy'"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with refuses(UsageError, message):
        prepare(one_layer_recipe("sft", **changes))
