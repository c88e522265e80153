"""Evaluation by the objective: the same numbers as by hand, no trace on the model, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from closeness import approx
from posttrain.data.base import Task
from posttrain.data.render import encode_plain, encode_prompt, encode_response, end_id
from posttrain.data.render.templates import r1_zero
from posttrain.errors import NonFiniteLoss, RecipeError, UsageError
from posttrain.evaluation.generation import held_out_indices
from posttrain.evaluation.statistics import wilson_interval
from posttrain.recipes.recipe import Recipe, validate_recipe
from posttrain.store.metrics import MetricsLog
from posttrain.training.build import TrainerState, prepare
from posttrain.training.checks import resolve_components
from posttrain.training.files import RunFiles
from posttrain.training.held_out import HeldOut, choose_held_out, evaluate_objective
from posttrain.training.loop import run_training
from posttrain.training.sources.units import TaskUnits
from posttrain.types import Batch, Example, Loss, Message, Outputs, Response
from refusing import refuses
from small_runs import shallow
from supervised_sources import encoder_of

pytestmark = pytest.mark.usefixtures("quick_stories")


def recipe_of(objective: Any, responses: str, **sections: Any) -> Recipe:
    task = {"name": "stories", "size": 24, "max_steps": 3, "responses": responses}
    data = {
        "task": task,
        "model": {"name": shallow(1)},
        "prompt": {"template": {"name": "r1_zero", "preamble": ""}},
        "data": {"batch_size": 2, "max_length": 256},
        "objective": objective,
        "train": {"steps": 2, "lr": 1e-3, "save_every": 0},
        "eval": {"every": 1, "num_examples": 7, "tasks": [task | {"split": "validation"}]},
    }
    for name, value in sections.items():
        data[name] = data.get(name, {}) | value
    return validate_recipe(data).resolve()


def evaluated(parts: TrainerState, recipe: Recipe) -> dict[str, float]:
    (task,) = parts.evaluator.tasks
    (held_out,) = parts.evaluator.held_out.values()
    evaluation = evaluate_objective(held_out, task, parts.method, recipe.train)
    assert (evaluation.name, evaluation.rollouts) == ("stories/validation", [])
    return evaluation.results


def score_at(parts: TrainerState, ids: list[int], position: int) -> float:
    """The head's score by the model's own forward pass, without anything of the trainer's."""
    with torch.no_grad():
        hidden = parts.model.get_decoder()(input_ids=torch.tensor([ids])).last_hidden_state[0, position]
        return float(parts.heads["head"].weight[0].double() @ hidden.double())


def written(parts: TrainerState, example: Example, response: Response) -> list[int]:
    """A response as r1_zero shows it, put together by hand."""
    template = r1_zero(preamble="")
    shown = replace(example, solution=response.text, answer=response.answer)
    return encode_prompt(parts.tokenizer, template, example.messages) + encode_response(
        parts.tokenizer, template, shown
    )


def test_pairs_equal_a_loop_over_the_models_own_forward_pass() -> None:
    recipe = recipe_of("bradley_terry", "pair", train={"micro_batch_rows": 4})
    parts = prepare(recipe)
    results = evaluated(parts, recipe)
    losses, wins, margins = [], [], []
    for index in held_out_indices(24, 7):
        example = parts.evaluator.tasks[0].examples[index]
        chosen, rejected = (score_at(parts, ids, -1) for ids in (written(parts, example, r) for r in example.responses))
        margins.append(chosen - rejected)
        losses.append(math.log1p(math.exp(rejected - chosen)))
        wins.append(float(chosen > rejected))
    assert results["n"] == 7.0
    assert results["loss"] == approx(sum(losses) / 7, rel=1e-4)
    assert results["margin"] == approx(sum(margins) / 7, abs=1e-4)
    assert results["pair_accuracy"] == approx(sum(wins) / 7)
    assert (results["pair_accuracy_low"], results["pair_accuracy_high"]) == wilson_interval(sum(wins), 7)
    assert "accuracy" not in results  # nobody was asked for a right answer
    assert results["rows_dropped"] == 0.0
    assert results["seconds"] > 0
    assert "padding_share" not in results


def test_judged_answers_are_counted_one_by_one() -> None:
    """Seven units are drawn from those of seven examples, which have two each; the score is that of the last token."""
    recipe = recipe_of("outcome", "judged")
    parts = prepare(recipe)
    results = evaluated(parts, recipe)
    chosen = [parts.evaluator.tasks[0].examples[i] for i in held_out_indices(24, 7)]
    every = [(e, r) for e in chosen for r in e.responses]
    units = [every[i] for i in held_out_indices(14, 7)]
    correct = [(score_at(parts, written(parts, e, r), -1) > 0) == (r.score == 1.0) for e, r in units]
    assert results["answer_accuracy"] == approx(sum(correct) / 7)
    assert results["n"] == 7.0


def test_steps_are_averaged_over_steps_and_the_interval_over_solutions() -> None:
    recipe = recipe_of("process", "steps")
    parts = prepare(recipe)
    results = evaluated(parts, recipe)
    template = r1_zero(preamble="")
    chosen = [parts.evaluator.tasks[0].examples[i] for i in held_out_indices(24, 7)]
    every = [(e, r) for e in chosen for r in e.responses]
    correct, positive = [], []
    for example, response in [every[i] for i in held_out_indices(14, 7)]:
        ids = encode_prompt(parts.tokenizer, template, example.messages)
        for step, label in zip(response.steps, response.step_labels, strict=True):
            ids = ids + encode_plain(parts.tokenizer, step)
            correct.append((score_at(parts, ids, -1) > 0) == (label == 1))
            positive.append(label)
        assert end_id(parts.tokenizer, template) not in ids
    assert len(correct) > 7
    assert results["step_accuracy"] == approx(sum(correct) / len(correct))
    assert results["positive_share"] == approx(sum(positive) / len(positive))
    assert (results["step_accuracy_low"], results["step_accuracy_high"]) == approx(
        wilson_interval(results["step_accuracy"] * 7, 7)
    )


def test_a_policy_is_its_own_reference_at_the_start_and_not_after() -> None:
    """Reference log-probabilities of held-out pairs are those of the beginning: DPO starts at ln 2 and a tie."""
    recipe = recipe_of({"name": "dpo", "beta": 0.1}, "pair")
    parts = prepare(recipe)
    before = evaluated(parts, recipe)
    assert before["loss"] == approx(math.log(2.0), rel=1e-5)
    assert (before["pair_accuracy"], before["margin"]) == (0.5, approx(0.0, abs=1e-5))
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in parts.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.02)
    after = evaluated(parts, recipe)
    assert abs(after["margin"]) > 1e-3
    assert after["loss"] != approx(before["loss"], rel=1e-4)


def test_kto_reads_its_baseline_at_the_moment() -> None:
    recipe = recipe_of({"name": "kto", "beta": 0.1}, "judged")
    parts = prepare(recipe)
    before = evaluated(parts, recipe)
    assert (before["kl_baseline"], before["answer_accuracy"]) == (0.0, 0.5)
    with torch.no_grad(), parts.reference.open() as start:
        for parameter in start.model.parameters():  # answers to other prompts become less likely under it
            parameter.mul_(1.3)
    assert evaluated(parts, recipe)["kl_baseline"] > 0.0


def test_it_leaves_no_trace() -> None:
    recipe = recipe_of("bradley_terry", "pair", model={"adapter": {"rank": 4, "dropout": 0.5}})
    parts = prepare(recipe)
    before = {n: p.detach().clone() for n, p in parts.parameters}
    first, second = evaluated(parts, recipe), evaluated(parts, recipe)
    first.pop("seconds"), second.pop("seconds")
    assert first == second  # an adapter's dropout is off
    assert all(p.grad is None for _, p in parts.parameters)
    assert all(torch.equal(before[n], p) for n, p in parts.parameters)


def test_a_run_records_it_and_keeps_the_best(tmp_path: Path) -> None:
    recipe, metric = recipe_of("bradley_terry", "pair"), "pair_accuracy"
    events: list[tuple[str, dict[str, Any]]] = []
    result = run_training(recipe, RunFiles.within(tmp_path), observer=lambda name, info: events.append((name, info)))
    evaluations = [info for name, info in events if name == "evaluation"]
    assert [info["step"] for info in evaluations] == [0, 1, 2]
    assert {info["name"] for info in evaluations} == {"stories/validation"}
    rows = [row for row in MetricsLog(tmp_path / "metrics.jsonl").read() if "loss" not in row.metrics]
    assert [row.metrics[f"eval/stories/validation/{metric}"] for row in rows] == [
        info["results"][metric] for info in evaluations
    ]
    assert all(row.timing["evaluation_seconds"] > 0 for row in rows)
    assert "seconds" not in result.evaluations["stories/validation"]
    accuracies = [info["results"][metric] for info in evaluations[1:]]
    best = 1 + max(range(2), key=lambda i: (accuracies[i], i))
    assert (tmp_path / "checkpoints" / "best").resolve().name == f"step-{best:06d}"
    state = json.loads((tmp_path / "checkpoints" / "best" / "state.json").read_text())
    assert state["best"] == {"step": float(best), metric: max(accuracies)}
    assert {info["primary_metric"].name for info in evaluations} == {metric}


def test_a_reward_model_has_nothing_to_generate() -> None:
    plain = {"name": "stories", "split": "validation", "size": 8}
    with refuses(RecipeError, "eval.tasks", "'stories'"):
        prepare(recipe_of("bradley_terry", "pair", eval={"tasks": [plain]}))
    with refuses(RecipeError, "eval.num_kl_prompts", "'outcome'"):
        prepare(recipe_of("outcome", "judged", eval={"num_kl_prompts": 2}))


def test_what_was_dropped_is_counted() -> None:
    pairs = [
        Example(str(i), (Message("user", f"{i}?"),), responses=(Response("yes" * (40 if i == 1 else 1), 1.0), last))
        for i, last in enumerate([Response("no", 0.0), Response("no", 0.0), Response("yes", 1.0), Response("no", 0.0)])
    ]
    parts = prepare(recipe_of("bradley_terry", "pair"))
    short = recipe_of("bradley_terry", "pair", data={"max_length": 30})

    encoder = encoder_of(short, r1_zero(preamble=""), parts.tokenizer, 1024, "pair")

    def read(task: Task) -> TaskUnits:
        return TaskUnits(task, encoder)

    task = Task("pairs", "test", pairs, dropped={"elsewhere": 5})
    words = resolve_components(recipe_of("bradley_terry", "pair", eval={"num_examples": 10}))
    fields = parts.source.batches.batch_fields  # type: ignore[union-attr]
    chosen = choose_held_out(read, fields, [task], words)["pairs/test"]
    assert (len(chosen.units), chosen.num_dropped) == (2, 2)
    with refuses(UsageError, "examples to evaluate"):
        choose_held_out(read, fields, [Task("pairs", "test", [])], words)


def silent(outputs: Outputs, batch: Batch) -> Loss:
    """An objective over pairs that says nothing about its accuracy."""
    return Loss(outputs.logprobs.sum(dim=1)[0::2])


def broken(outputs: Outputs, batch: Batch) -> Loss:
    values = outputs.scores.sum(dim=1)[0::2] * float("nan")
    return Loss(values, {"pair_accuracy": values.detach()})


@pytest.mark.parametrize(
    ("objective", "error", "message"),
    [
        (silent, UsageError, "answer_accuracy"),
        (broken, NonFiniteLoss, "held-out stories/validation: loss"),
    ],
)
def test_an_objective_that_gives_no_accuracy(objective: Any, error: type[Exception], message: str) -> None:
    recipe = recipe_of("bradley_terry", "pair")
    parts = prepare(recipe)
    (held_out,) = parts.evaluator.held_out.values()
    assert isinstance(held_out, HeldOut)
    with refuses(error, message):
        evaluate_objective(held_out, parts.evaluator.tasks[0], replace(parts.method, objective=objective), recipe.train)
