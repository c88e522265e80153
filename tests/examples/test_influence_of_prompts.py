"""The influence of prompts: the exact one by hand, and the gradient score against a difference quotient."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import posttrain as pt
from closeness import OF_EMBEDDED, approx, rounding
from posttrain.runs.launch import RunStart, launch
from posttrain.untrusted import declare_code
from small_runs import one_layer_recipe

PATH = Path(__file__).parents[2] / "examples" / "influence_of_prompts.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("influence_of_prompts", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["influence_of_prompts"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_it_is_short() -> None:
    assert len(PATH.read_text(encoding="utf-8").splitlines()) <= 200


def test_influences_of_a_small_step(example: ModuleType, tmp_path: Path) -> None:
    recipe = one_layer_recipe(
        "grpo",
        train={"steps": 3, "save_every": 2, "keep_checkpoints": 2},
        eval={"every": 2, "num_examples": 4, "max_tokens": 10},
    )
    declare_code(recipe.dump(), PATH.parents[1] / "tests")
    run = pt.load_run(launch(recipe, RunStart(root=tmp_path, name="run")).folder)
    reruns = ["train.seed=1", "train.seed=2"]
    changes = ["drop prompt:0-3", *reruns]
    done = pt.what_if(run, at=2, steps=1, changes=changes, runs_dir=tmp_path, jobs=1, progress=False)
    held_out = run.rollouts(2, evaluation=run.evaluations[0]["task"])
    influences, figures = example.measure(done, held_out)
    assert (figures["n"], figures["held_out"], figures["equal_to_the_bit"]) == (4, 4, True)

    def after(label: str) -> float:
        return float(example.mean_logprob(example.load(done.run_of(label).checkpoint("last")), held_out))

    assert influences[1].exact == after("unchanged") - after("drop prompt:1")
    assert figures["spread_of_exact"] > 0
    model = example.load(run.checkpoint(2))
    groups = example.prompts_of(run, 3)
    assert [len(group) for group in groups] == [4, 4, 4, 4]
    # its norms round to fp32, wherever a number in fp64 is near the middle of two
    assert example.mean_logprob(model, held_out) == approx(_recomputed(model, held_out), abs=OF_EMBEDDED)
    _check_score(example, model, groups, held_out, influences[1].tracin, recipe.train.lr)


def _recomputed(model: torch.nn.Module, rows: list) -> float:
    """The mean log-probability, a row at a time and without padding."""
    values = []
    for row in rows:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row.token_ids])).logits[0].log_softmax(-1)
        places = range(len(row.token_ids) - row.num_tokens, len(row.token_ids))
        values += [float(logits[place - 1, row.token_ids[place]]) for place in places]
    return sum(values) / len(values)


def _check_score(
    example: ModuleType, model: torch.nn.Module, groups: list, held_out: list, score: float, lr: float
) -> None:
    """The score is the slope of the held-out log-probability along a step of gradient descent on the prompt's loss."""
    num_tokens = sum(row.num_tokens for group in groups for row in group)
    logprobs, owners = example.token_logprobs(model, groups[1])
    advantages = torch.tensor([row.advantage for row in groups[1]], dtype=torch.float64)
    loss = -(advantages[owners] * logprobs).sum() / num_tokens
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    size = 1e-3 / float(torch.cat([g.flatten() for g in gradients]).norm())  # so far the weights move
    means = []
    for step in (size, -2 * size):  # there, and back to the other side
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(step * gradient)
        means.append(example.mean_logprob(model, held_out))
    # A central difference leaves out a term of the square of 1e-3, and divides roundings: transformers computes norms
    # in fp32, whatever the model is in.
    assert score == approx(lr * (means[0] - means[1]) / (2 * size), rel=1e-4, abs=lr * rounding(torch.float32) / size)


def test_correlations_by_hand(example: ModuleType) -> None:
    assert example.ranks([3.0, 1.0, 1.0, 2.0]) == [3.0, 0.5, 0.5, 2.0]
    # deviations -1, 0, 1 and -1, 1, 0: their product 1, both squares 2
    assert example.pearson([1.0, 2.0, 3.0], [1.0, 3.0, 2.0]) == approx(0.5, rel=1e-15)
    low, high = example.fisher_interval(0.5, 28)  # atanh 0.5 = 0.549306, half 1.96 / 5
    assert (low, high) == approx((0.156021, 0.735822), abs=1e-6)
