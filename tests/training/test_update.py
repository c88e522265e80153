"""The loop owns the sum: gradients do not depend on micro-batches, row order or padding."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from split_cases import (
    AGGREGATIONS,
    CASES,
    OPTIONS,
    Case,
    blank_row,
    build_model,
    collated,
    shipped_objectives,
    shuffled,
    widened,
)

from closeness import approx, assert_close
from posttrain import registry
from posttrain.algorithms.objectives.policy_gradient import explain_variance
from posttrain.algorithms.objectives.reward import accuracy_at_the_end
from posttrain.algorithms.objectives.unpaired import divide_rewards
from posttrain.errors import NonFiniteLoss
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.micro import split_rows
from posttrain.models.forward.packing import Packing
from posttrain.recipes.sections import TrainSection
from posttrain.training.build import prepare
from posttrain.training.step import MeanOverBatch, Method, accumulate, apply_update, learning_rate
from posttrain.types import Batch, Loss, Outputs, Sample, collate
from refusing import refuses
from small_runs import make_recipe

# Sums of the same float64 numbers in another order.
CLOSE = 1e-9


@pytest.fixture(scope="module")
def models() -> tuple[torch.nn.Module, torch.nn.Module]:
    return build_model(0), build_model(1)


@pytest.fixture(scope="module")
def model(models) -> torch.nn.Module:
    return models[0]


def test_only_micro_batches_go_to_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts, streams and optimizer batches stay in main memory: at a time, what is computed on is elsewhere."""
    moved: list[tuple[str, int]] = []
    for kind in (Batch, Packing):

        def move(self: Any, device: Any, was: Any = kind.to, name: str = kind.__name__) -> Any:
            moved.append((name, int(self.lengths.sum()) if name == "Batch" else self.num_tokens))
            return was(self, device)

        monkeypatch.setattr(kind, "to", move)
    recipe = make_recipe("grpo", regularize={"kl_coef": 0.1}, train={"micro_batch_tokens": 60})
    parts = prepare(recipe)
    moved.clear()
    batch = parts.source(1).batch  # the reference's log-probabilities are filled
    assert batch is not None
    pieces = [batch.select(rows) for rows in split_rows(batch, 60)]
    assert len(pieces) > 2
    assert batch.field("ref_logprobs").abs().sum() > 0
    assert max(tokens for _, tokens in moved) <= 60
    moved.clear()
    accumulate(parts.method, batch, recipe.train)
    assert [tokens for name, tokens in moved if name == "Batch"] == [int(piece.lengths.sum()) for piece in pieces]
    assert [name for name, _ in moved].count("Packing") == len(pieces)
    tensors = [batch.tokens, batch.mask, batch.weights, *batch.fields.values()]
    assert {str(x.device) for x in tensors if x is not None} == {"cpu"}


class Trainer:
    """One objective over its forward pass; gives gradients."""

    def __init__(self, case: Case, models: Any) -> None:
        self.case = case
        self.forward, modules = case.forward(*models)
        self.parameters = [p for module in modules for p in module.parameters()]

    def gradient(self, aggregate: str, batch: Batch, **train: Any) -> tuple[torch.Tensor, float, dict[str, float]]:
        for parameter in self.parameters:
            parameter.grad = None
        method = Method(
            self.forward,
            self.case.bind(),
            registry.find("aggregation", aggregate).bind(AGGREGATIONS[aggregate]),
            level=self.case.entry.traits["level"],
            entropy="differentiable" if self.case.options.get("entropy_coef") else "detached",
            derive=self.case.entry.traits.get("derive", dict),
        )
        loss, metrics = accumulate(method, batch, TrainSection(**train))
        flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        return torch.cat([x.flatten() for x in flat]), loss, metrics


def assert_same_for_every_split(case: Case, aggregations: list[str], models: Any) -> dict[str, float]:
    """One unit at a time; and in another order, with more padding and (per token) a row without a trained token."""
    rows, each, trainer = case.rows(), case.rows_per_unit, Trainer(case, models)
    blank = [blank_row(rows[0])] if case.level == "token" else []
    mixed = collated([*shuffled(rows, each), *blank], each)
    variants: dict[str, tuple[Batch, dict[str, int]]] = {
        "other rows": (widened(mixed, 11), {"micro_batch_tokens": 40}),
        "one unit at a time": (collated(rows, each), {"micro_batch_rows": 1}),
    }
    for aggregate in aggregations:
        whole, loss, metrics = trainer.gradient(aggregate, collated(rows, each))
        scale = float(whole.abs().max())
        assert scale > 1e-5
        for name, (batch, train) in variants.items():
            pieces = split_rows(batch, train.get("micro_batch_tokens", 1 << 20), train.get("micro_batch_rows"))
            assert len(pieces) > 1
            other, other_loss, other_metrics = trainer.gradient(aggregate, batch, **train)
            assert_close(other, whole, atol=CLOSE * scale, rtol=0)
            assert other_loss == approx(loss, rel=CLOSE, abs=CLOSE), name
            assert other_metrics.keys() == metrics.keys(), name
            for key in set(metrics) - {"padding_share"}:
                assert other_metrics[key] == approx(metrics[key], rel=CLOSE, abs=CLOSE), (name, key)
        variants.pop("one unit at a time", None)  # with the first aggregation alone
    return metrics


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_depends_on_the_split(models, case: Case) -> None:
    """Every registered objective, under every aggregation that fits it."""
    aggregations = [a for a in AGGREGATIONS if (a == "unit_mean") == (case.level != "token")]
    metrics = assert_same_for_every_split(case, aggregations, models)
    expected = {
        "kto": {"margin", "desirable_reward", "undesirable_reward"},
        "ppo": {"value_explained_variance", "effective_sample_size"},
        "grpo": {"effective_sample_size", "kl_sampler", "entropy"},
        "outcome": {"answer_accuracy"},
    }
    assert expected.get(case.objective, set()) <= metrics.keys()


def test_nor_with_a_correction(models) -> None:
    metrics = assert_same_for_every_split(Case("grpo", {}).corrected(), ["sequence_mean"], models)
    assert 0.0 < metrics["correction"] < 2.0


def test_options_are_of_objectives_that_exist() -> None:
    assert set(OPTIONS) <= set(shipped_objectives()) == {case.objective for case in CASES}


def test_loss_by_hand(model) -> None:
    """Token mean over 3 tokens in rows of 2 and 1: not the mean of the rows' means."""
    batch = collate([Sample([1, 2, 3], [False, True, True]), Sample([4, 5], [False, True], group=1)])
    rows = ([1, 2, 3], [4, 5])
    logits = [model(torch.tensor([ids])).logits[0].log_softmax(-1).detach() for ids in rows]
    nll = [-float(x) for x in (logits[0][0, 2], logits[0][1, 3], logits[1][0, 5])]
    case = Case("cross_entropy", {})
    _, loss, metrics = Trainer(case, (model, model)).gradient("token_mean", batch, micro_batch_rows=1)
    assert loss == approx(sum(nll) / 3, abs=1e-9)
    assert metrics["nll"] == approx(sum(nll) / 3, abs=1e-9)
    # a correction weighs the values and leaves the denominator alone
    batch.fields["correction"] = torch.tensor([[1.0, 0.5, 2.0], [1.0, 0.0, 1.0]], dtype=torch.float64)
    _, loss, metrics = Trainer(case, (model, model)).gradient("token_mean", batch, micro_batch_rows=1)
    assert loss == approx((0.5 * nll[0] + 2.0 * nll[1]) / 3, abs=1e-9)
    assert metrics["nll"] == approx(sum(nll) / 3, abs=1e-9)
    assert metrics["correction"] == approx(2.5 / 3, abs=1e-12)


def test_unit_mean_by_hand(model) -> None:
    """Values per pair reach the loss as their mean, whatever the rows' lengths."""

    def first_minus_second(outputs: Outputs, batch: Batch) -> Loss:
        sums = outputs.logprobs.sum(dim=1)
        return Loss(sums[1::2] - 2.0 * sums[0::2], {"sum": sums[0::2].detach()})

    rows = [[1, 2, 3], [1, 4], [5, 6], [5, 7, 8, 9]]
    sums = []
    for ids in rows:
        table = model(torch.tensor([ids])).logits[0].log_softmax(-1).detach()
        sums.append(sum(float(table[t - 1, ids[t]]) for t in range(1, len(ids))))
    batch = collate(
        [Sample(ids, [False] + [True] * (len(ids) - 1), b // 2, 1) for b, ids in enumerate(rows)], rows_per_unit=2
    )
    weigh = registry.find("aggregation", "unit_mean").bind({})
    model.zero_grad(set_to_none=True)
    train = TrainSection(micro_batch_rows=2)
    loss, metrics = accumulate(Method(Forward(model), first_minus_second, weigh, "pair"), batch, train)
    assert loss == approx((sums[1] - 2 * sums[0] + sums[3] - 2 * sums[2]) / 2, abs=1e-9)
    assert metrics["sum"] == approx((sums[0] + sums[2]) / 2, abs=1e-9)


# --- metrics that are no means ---


def means_of(derive: Any = dict, **values: list[float]) -> dict[str, float]:
    """The means of metrics that come in two micro-batches."""
    means = MeanOverBatch()
    for part in (slice(0, 1), slice(1, None)):
        for name, numbers in values.items():
            here = torch.tensor(numbers[part], dtype=torch.float64)
            means.add(name, here, None, float(len(here)))
    return means.means(derive=derive)


def test_effective_sample_size_by_hand() -> None:
    """Weights 1, 3, 0: (4/3)² / (10/3) = 16/30 of the sample is left."""
    assert means_of(weight=[1, 3, 0], weight_squared=[1, 9, 0]) == {"effective_sample_size": approx(16 / 30)}
    assert means_of(weight=[2, 2], weight_squared=[4, 4]) == {"effective_sample_size": 1.0}


def test_explained_variance_by_hand() -> None:
    """Returns 1, 2, 6 (variance 14/3), errors 1, 1, 4 (variance 2): 1 − 6/14. A constant error explains all."""
    returns = {"returns": [1, 2, 6], "returns_squared": [1, 4, 36]}
    found = means_of(explain_variance, value_error=[1, 1, 4], value_error_squared=[1, 1, 16], **returns)
    assert found == {"value_explained_variance": approx(1 - 6 / 14)}
    found = means_of(explain_variance, value_error=[3, 3, 3], value_error_squared=[9, 9, 9], **returns)
    assert found == {"value_explained_variance": approx(1.0)}
    equal = {"returns": [2, 2, 2], "returns_squared": [4, 4, 4]}
    assert (
        means_of(explain_variance, value_error=[1, 0, 0], value_error_squared=[1, 0, 0], **equal) == {}
    )  # nothing to explain


def test_rewards_of_either_kind_by_hand() -> None:
    """Desirable 1 and 2, undesirable −3: means over the rows of each kind, not over all."""
    parts = {"desirable_reward_part": [1, 0, 2], "undesirable_reward_part": [0, -3, 0]}
    found = means_of(divide_rewards, desirable=[1, 0, 1], **parts)
    expected = {"desirable": 2 / 3, "desirable_reward": 1.5, "undesirable_reward": -3.0, "margin": 4.5}
    assert found == approx(expected, abs=1e-12)
    one_kind = {"desirable_reward_part": [1, 1, 2], "undesirable_reward_part": [0, 0, 0]}
    assert means_of(divide_rewards, desirable=[1, 1, 1], **one_kind) == {
        "desirable": 1.0,
        "desirable_reward": approx(4 / 3),
    }
    other_kind = {"desirable_reward_part": [0, 0], "undesirable_reward_part": [-1, -2]}
    assert means_of(divide_rewards, desirable=[0, 0], **other_kind) == {"desirable": 0.0, "undesirable_reward": -1.5}


def test_final_accuracy_by_hand() -> None:
    """Two answers of three tokens in all, one of them right at its end."""
    assert means_of(accuracy_at_the_end, final_token=[0, 1, 1], final_token_right=[0, 1, 0]) == {
        "answer_accuracy": approx(0.5)
    }


def test_the_samplers_divergence_by_hand(model) -> None:
    """kl_sampler is k3 of KL(μ‖π) on samples from μ; the weights are π/μ."""
    sampler = [-2.0, -3.0, -4.0]
    fields = {"sampler_logprobs": [0.0, *sampler]}
    batch = collate([Sample([1, 2, 3, 4], [False, True, True, True], fields=fields)])
    table = model(torch.tensor([[1, 2, 3, 4]])).logits[0].log_softmax(-1).detach()
    ratios = [math.exp(float(table[t, t + 2]) - mu) for t, mu in enumerate(sampler)]
    _, _, metrics = Trainer(Case("cross_entropy", {}), (model, model)).gradient("token_mean", batch)
    assert metrics["kl_sampler"] == approx(sum(r - 1 - math.log(r) for r in ratios) / 3, abs=1e-9)
    expected = (sum(ratios) / 3) ** 2 / (sum(r * r for r in ratios) / 3)
    assert metrics["effective_sample_size"] == approx(expected, rel=1e-9)


def test_accumulate_log_ratios_beyond_20_are_counted(model) -> None:
    """The first token is 1e3 nats from the sampler, the third has a teacher at −inf; a prompt token does not count."""
    fields = {"old_logprobs": [-1e3, -1e3, -3.0, -4.0], "teacher_logprobs": [0.0, -1e3, -3.0, -math.inf]}
    batch = collate([Sample([1, 2, 3, 4], [False, True, True, True], fields=fields)])
    _, _, metrics = Trainer(Case("on_policy_distillation", {}), (model, model)).gradient("token_mean", batch)
    assert metrics["clamped_log_ratios"] == approx(2 / 3)
    fields["teacher_logprobs"][3], fields["old_logprobs"][1], fields["teacher_logprobs"][1] = -5.0, -2.0, -2.0
    batch = collate([Sample([1, 2, 3, 4], [False, True, True, True], fields=fields)])
    _, _, metrics = Trainer(Case("on_policy_distillation", {}), (model, model)).gradient("token_mean", batch)
    assert metrics["clamped_log_ratios"] == 0.0


# --- pieces ---


def ragged(seed: int, groups: int, group: int, rows_per_unit: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for g in range(groups):
        prompt = list(range(2 + 2 * g))
        for _ in range(group * rows_per_unit):
            n = int(torch.randint(1, 8, (1,), generator=generator))
            samples.append(Sample(prompt + [0] * n, [False] * len(prompt) + [True] * n, g, len(prompt)))
    order = torch.randperm(groups * group, generator=generator).tolist()
    rows = [unit * rows_per_unit + k for unit in order for k in range(rows_per_unit)]
    return collate([samples[b] for b in rows], rows_per_unit=rows_per_unit)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    budget=st.integers(1, 80),
    most=st.one_of(st.none(), st.integers(1, 5)),
    rows_per_unit=st.sampled_from([1, 2]),
)
def test_every_row_is_in_exactly_one_piece(seed: int, budget: int, most: int | None, rows_per_unit: int) -> None:
    batch = ragged(seed, groups=3, group=3, rows_per_unit=rows_per_unit)
    pieces = split_rows(batch, budget, most)
    assert sorted(b for piece in pieces for b in piece) == list(range(batch.num_rows))
    for piece in pieces:
        assert [b % rows_per_unit for b in piece] == list(range(rows_per_unit)) * (len(piece) // rows_per_unit)
        assert all(b == piece[i - 1] + 1 for i, b in enumerate(piece) if b % rows_per_unit)  # whole, chosen first
        prompts = {int(batch.group[b]): int(batch.prefix[b]) for b in piece}
        cost = sum(prompts.values()) + sum(int(batch.lengths[b] - batch.prefix[b]) for b in piece)
        assert cost <= budget or len(piece) == rows_per_unit
        assert most is None or len(piece) <= max(most, rows_per_unit)


def test_pieces_by_hand() -> None:
    """Pairs share a prompt of 4; rows cost 6, 5 | 7, 8 | 5, 5, and the prompt counts once in a piece."""
    lengths = [6, 5, 7, 8, 5, 5]
    samples = [
        Sample([0] * n, [False] * 4 + [True] * (n - 4), group, 4)
        for n, group in zip(lengths, (1, 1, 0, 0, 1, 1), strict=True)
    ]
    batch = collate(samples, rows_per_unit=2)
    assert split_rows(batch, 100) == [[2, 3, 0, 1, 4, 5]]  # groups together
    assert split_rows(batch, 11) == [[2, 3], [0, 1, 4, 5]]  # 4 + 3 + 4 and 4 + 2 + 1 + 1 + 1
    assert split_rows(batch, 8) == [[2, 3], [0, 1], [4, 5]]  # the first pair is larger than the budget
    assert split_rows(batch, 100, 1) == [[2, 3], [0, 1], [4, 5]]  # a unit is the least
    assert split_rows(batch, 100, 5) == [[2, 3, 0, 1], [4, 5]]


def test_units_are_selected_whole_with_their_weights() -> None:
    samples = [Sample([b] * (3 + b), [False] * 2 + [True] * (1 + b), b // 2, 2) for b in range(6)]
    batch = collate(samples, rows_per_unit=2)
    batch.fields = {
        "ref_logprobs": batch.tokens.double(),
        "labels": torch.arange(6.0),
        "teacher_ids": batch.tokens[:, :, None].expand(-1, -1, 2).clone(),
    }
    batch.weights = torch.tensor([0.1, 0.2, 0.3])
    part = batch.select([4, 5, 0, 1])
    assert part.weights is not None
    assert part.weights.tolist() == approx([0.3, 0.1])
    assert part.rows_per_unit == 2
    assert part.tokens[:, 0].tolist() == part.fields["labels"].tolist() == [4, 5, 0, 1]
    assert part.lengths.tolist() == [7, 8, 3, 4]
    assert part.fields["ref_logprobs"].shape == part.tokens.shape == (4, 8)
    assert part.fields["teacher_ids"].shape == (4, 8, 2)
    short = batch.select([2, 3])
    assert short.tokens.shape == short.mask.shape == short.fields["ref_logprobs"].shape == (2, 6)
    assert short.unit_mask.tolist() == [[False, False, True, True, True, True]]
    batch.weights = batch.mask.double()  # of tokens: each row keeps its own
    chosen = batch.select([2, 3]).weights
    assert chosen is not None
    assert chosen.tolist() == batch.mask[2:4, :6].double().tolist()
    for broken in ([1, 0], [0, 2], [1, 2], [0, 1, 2]):
        with refuses(AssertionError, "unit stay together"):
            batch.select(broken)


# --- the step ---


def test_learning_rate_by_hand() -> None:
    options = TrainSection(steps=10, lr=1.0, warmup_steps=2, schedule="linear", min_lr_ratio=0.2)
    assert [learning_rate(options, s) for s in (1, 2, 3, 7, 10)] == approx([0.5, 1.0, 1.0, 0.6, 0.3])
    cosine = options.model_copy(update={"schedule": "cosine"})
    assert [learning_rate(cosine, s) for s in (1, 2, 3, 7)] == approx([0.5, 1.0, 1.0, 0.6])
    assert learning_rate(cosine, 5) == approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert learning_rate(TrainSection(lr=3e-4), 50) == 3e-4


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_every_update_has_a_learning_rate_above_zero(schedule: Any) -> None:
    for steps in (1, 2, 3, 100):
        for warmup in (0, 1, steps):
            options = TrainSection(steps=steps, lr=1.0, warmup_steps=warmup, schedule=schedule)
            rates = [learning_rate(options, step) for step in range(1, steps + 1)]
            assert min(rates) > 0
            assert max(rates) == 1.0
    # the fall of torch.optim.lr_scheduler.LinearLR and of transformers' schedules: (N − k) / N for k = 0, 1, ...
    falling = [learning_rate(TrainSection(steps=4, lr=1.0, schedule="linear"), step) for step in range(1, 5)]
    assert falling == [1.0, 0.75, 0.5, 0.25]


def test_clipping_and_refusal_of_non_finite_updates() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.tensor([3.0, 4.0])
    assert apply_update(optimizer, [weight], 0.5, 1.0, 0.0, 1) == approx(5.0)
    assert weight.tolist() == approx([-0.3, -0.4], abs=1e-5)
    assert weight.grad is None
    for loss, grad in ((math.nan, 1.0), (0.0, math.inf)):
        weight.grad = torch.tensor([grad, 0.0])
        before = weight.tolist()
        with refuses(NonFiniteLoss, "update 7"):
            apply_update(optimizer, [weight], 0.5, None, loss, 7)
        assert weight.tolist() == before


def test_a_critic_apart_is_clipped_by_its_own_norm():
    """Gradients (3, 4) of the policy and 20 of the critic, at most 1 each."""
    policy, critic = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([policy, critic], lr=1.0)
    policy.grad, critic.grad = torch.tensor([3.0, 4.0]), torch.tensor([20.0])
    assert apply_update(optimizer, [policy], 1.0, 1.0, 0.0, 1, apart=[critic]) == approx(5.0)
    assert policy.tolist() == approx([-0.6, -0.8], abs=1e-6)
    assert critic.tolist() == approx([-1.0], abs=1e-6)
    policy.grad, critic.grad = torch.tensor([0.3, 0.4]), torch.tensor([float("inf")])
    with refuses(NonFiniteLoss, "the critic inf") as raised:
        apply_update(optimizer, [policy], 1.0, 1.0, 0.0, 2, apart=[critic])
    norm = re.search(r"gradient norm ([\d.]+)", str(raised.value))
    assert norm is not None
    assert float(norm[1]) == approx(0.5)
    assert policy.tolist() == approx([-0.6, -0.8], abs=1e-6)
