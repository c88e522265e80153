"""The loop owns the sum: gradients do not depend on micro-batches, row order or padding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GPT2Config

from posttrain import registry
from posttrain.errors import NonFiniteLoss
from posttrain.models.forward import Forward
from posttrain.recipe import TrainSection
from posttrain.train.micro import split_rows
from posttrain.train.update import accumulate, apply_update, learning_rate
from posttrain.types import Batch, Sample, collate

OBJECTIVES = {
    "cross_entropy": {},
    "reinforce": {"entropy_bonus": 0.1},
    "grpo": {"kl": 0.05, "entropy_bonus": 0.1},
    "gspo": {"clip_low": 0.9, "clip_high": 5.0},
    "gspo_token": {"clip_low": 0.9, "clip_high": 5.0},
    "cispo": {},
    "sapo": {},
    "gmpo": {},
}
AGGREGATIONS = {"token_mean": {}, "sequence_mean": {}, "constant": {"length": 12}}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    # GPT-2's modules compute in the weights' own precision; RMSNorm families drop to fp32 inside.
    config = GPT2Config(
        vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=None, eos_token_id=None
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    return model


def rows(seed: int, groups: int = 3, group: int = 3) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for g in range(groups):
        prompt = torch.randint(0, 61, (2 + 2 * g,), generator=generator).tolist()
        for _ in range(group):
            n = int(torch.randint(1, 8, (1,), generator=generator))
            answer = torch.randint(0, 61, (n,), generator=generator).tolist()
            blank = [0.0] * len(prompt)
            drawn = torch.randn(3, n, generator=generator)
            streams = {
                "advantages": blank + drawn[0].tolist(),
                "old_logprobs": blank + (drawn[1] * 0.2 - 4.0).tolist(),
                "ref_logprobs": blank + (drawn[2] * 0.2 - 4.0).tolist(),
            }
            samples.append(Sample(prompt + answer, [False] * len(prompt) + [True] * n, g, len(prompt), streams))
    return samples


def double(batch: Batch) -> Batch:
    batch.streams = {k: v.double() for k, v in batch.streams.items()}
    return batch


def gradient(model, batch, objective, aggregate, **train) -> tuple[torch.Tensor, float, dict[str, float]]:
    model.zero_grad(set_to_none=True)
    forward = Forward(model)
    bound = registry.find("objective", objective).bind(OBJECTIVES[objective])
    weigh = registry.find("aggregation", aggregate).bind(AGGREGATIONS[aggregate])
    loss, metrics = accumulate(forward, bound, weigh, batch, TrainSection(**train), entropy="differentiable")
    return torch.cat([p.grad.flatten() for p in model.parameters()]), loss, metrics


@pytest.mark.parametrize("aggregate", AGGREGATIONS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gradient_does_not_depend_on_the_split(model, objective: str, aggregate: str):
    samples = rows(5)
    whole, loss, metrics = gradient(model, double(collate(samples)), objective, aggregate)
    scale = float(whole.abs().max())
    assert scale > 1e-4
    shuffled = [samples[i] for i in (4, 0, 8, 2, 7, 1, 5, 3, 6)]
    padded = double(collate([*shuffled, Sample([1] * 30, [False] * 30, group=77)]))  # a wide row without trained tokens
    variants = {
        "one row at a time": (double(collate(samples)), {"rows_per_micro": 1}),
        "small token budget": (double(collate(samples)), {"tokens_per_micro": 17}),
        "another order": (double(collate(shuffled)), {"rows_per_micro": 2}),
        "more padding": (padded, {"tokens_per_micro": 40}),
    }
    for name, (batch, train) in variants.items():
        other, other_loss, other_metrics = gradient(model, batch, objective, aggregate, **train)
        assert float((other - whole).abs().max()) / scale < 1e-9, name
        assert other_loss == pytest.approx(loss, abs=1e-9), name
        for key in set(metrics) - {"padding_share"}:
            assert other_metrics[key] == pytest.approx(metrics[key], abs=1e-9), (name, key)


def test_loss_by_hand(model):
    """Token mean over 3 tokens in rows of 2 and 1: not the mean of the rows' means."""
    batch = double(collate([Sample([1, 2, 3], [False, True, True]), Sample([4, 5], [False, True], group=1)]))
    logits = {row: model(torch.tensor([ids])).logits[0].log_softmax(-1) for row, ids in enumerate(([1, 2, 3], [4, 5]))}
    expected = -float((logits[0][0, 2] + logits[0][1, 3] + logits[1][0, 5]).detach()) / 3
    _, loss, metrics = gradient(model, batch, "cross_entropy", "token_mean", rows_per_micro=1)
    assert loss == pytest.approx(expected, abs=1e-9)
    assert metrics["nll"] == pytest.approx(expected, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), budget=st.integers(1, 80), most=st.one_of(st.none(), st.integers(1, 5)))
def test_every_row_is_in_exactly_one_piece(seed: int, budget: int, most: int | None):
    batch = collate(rows(seed))
    pieces = split_rows(batch, budget, most)
    assert sorted(b for piece in pieces for b in piece) == list(range(batch.num_rows))
    for piece in pieces:
        prompts = {int(batch.group[b]): int(batch.prefix[b]) for b in piece}
        cost = sum(prompts.values()) + sum(int(batch.lengths[b] - batch.prefix[b]) for b in piece)
        assert cost <= budget or len(piece) == 1
        assert most is None or len(piece) <= most


def test_learning_rate_by_hand():
    options = TrainSection(steps=10, lr=1.0, warmup_steps=2, schedule="linear", min_lr_ratio=0.2)
    assert [learning_rate(options, s) for s in (1, 2, 6, 10)] == pytest.approx([0.5, 1.0, 0.6, 0.2])
    cosine = options.model_copy(update={"schedule": "cosine"})
    assert [learning_rate(cosine, s) for s in (1, 2, 6, 10)] == pytest.approx([0.5, 1.0, 0.6, 0.2])
    assert learning_rate(cosine, 4) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert learning_rate(TrainSection(lr=3e-4), 50) == 3e-4


def test_clipping_and_refusal_of_non_finite_updates():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.tensor([3.0, 4.0])
    assert apply_update(optimizer, [weight], 0.5, 1.0, 0.0, 1) == pytest.approx(5.0)
    assert weight.tolist() == pytest.approx([-0.3, -0.4], abs=1e-5)
    assert weight.grad is None
    for loss, grad in ((math.nan, 1.0), (0.0, math.inf)):
        weight.grad = torch.tensor([grad, 0.0])
        before = weight.tolist()
        with pytest.raises(NonFiniteLoss, match="update 7"):
            apply_update(optimizer, [weight], 0.5, None, loss, 7)
        assert weight.tolist() == before
