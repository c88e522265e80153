"""Credit: the KL in the reward, values and truncation, from rewards to advantages; worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from closeness import approx
from posttrain import registry
from posttrain.algorithms.advantages import gdpo
from posttrain.errors import RecipeError, RunFailure, UsageError
from posttrain.recipes.reference_sections import KLInRewardSection
from posttrain.training.advantages import AdvantageEstimator, pay_at_the_end
from posttrain.training.checks import resolve_components
from posttrain.types import Batch, Completion, Example, Rollout, Sample, collate
from refusing import refuses
from small_runs import one_layer_recipe

# Two answers to one prompt of two tokens: k1 is 0.5, −0.25 at the first one's tokens and 0.5 at the second's.
SAMPLER = [[-1.0, -2.0], [-0.5]]
REFERENCE = [[-1.5, -1.75], [-1.0]]
REWARDS = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
ENDED = torch.tensor([False, False])


def padded(rows: list[list[float]], batch: Batch, outside: float) -> Tensor:
    table = torch.full(batch.mask.shape, outside)
    return table.masked_scatter(batch.mask, torch.tensor([x for row in rows for x in row]))


def two_answers(values: list[list[float]] | None = None, final: list[float] | None = None) -> Batch:
    """The batch as its streams were filled: those of a reference, and of a critic where it has values."""
    samples = []
    for logprobs in SAMPLER:
        n = len(logprobs)
        fields = {"sampler_logprobs": [9.0, 9.0, *logprobs]}  # what stands at the prompt must not count
        samples.append(Sample([3, 4] + [5] * n, [False, False] + [True] * n, 0, 2, fields))
    batch = collate(samples)
    batch.fields["ref_logprobs"] = padded(REFERENCE, batch, outside=math.nan)
    if values is not None:
        batch.fields |= {"old_values": padded(values, batch, outside=0.0), "final_values": torch.tensor(final)}
    return batch


def advantage_estimator(word: str, kl: dict[str, Any] | None = None, **options: Any) -> AdvantageEstimator:
    entry = registry.find("advantage", word)
    section = None if kl is None else KLInRewardSection(**kl)
    per_token, bootstrap = entry.traits.get("level") == "token", bool(options.get("bootstrap"))
    return AdvantageEstimator(entry.bind(options), per_token=per_token, bootstrap=bootstrap, kl=section)


def trained(batch: Batch, name: str = "advantages") -> list[list[float]]:
    """A stream at the trained tokens; it is 0 elsewhere."""
    values = batch.field(name)
    assert values.dtype == torch.float32
    assert not bool(values[~batch.mask].any())
    return [row[mask].tolist() for row, mask in zip(values, batch.mask, strict=True)]


# --- of parts ---


def rollout(**parts: float) -> Rollout:
    answer = Completion((5,), (-1.0,), "stop")
    total = sum(parts.values())
    return Rollout(Example("a", ()), (3,), answer, "", dict(parts), total, 1, 0, 0, 0)


def test_parts_of_rewards_are_normalized_by_themselves_and_a_reward_that_says_nothing_is_no_zero() -> None:
    silent = rollout(right=1.0)
    silent.skipped = ["judged"]
    groups = [
        [rollout(right=1.0, judged=0.0), rollout(right=0.0, judged=1.0), silent],
        [rollout(right=0.0, judged=0.5), rollout(right=0.0, judged=0.25)],
    ]
    estimator = AdvantageEstimator(registry.find("advantage", "gdpo").bind({}), of_parts=True)
    found = estimator.from_parts(groups, [("right", 2.0), ("judged", 1.0)])
    assert found is not None
    parts = [[1.0, 0.0], [0.0, 1.0], [1.0, math.nan], [0.0, 0.5], [0.0, 0.25]]
    table = torch.tensor(parts, dtype=torch.float64)
    weights = torch.tensor([2.0, 1.0], dtype=torch.float64)
    assert torch.equal(torch.cat(found), gdpo(table, weights, torch.tensor([0, 0, 0, 1, 1])))
    assert [len(one) for one in found] == [3, 2]
    # the same as 0 would be another number
    as_zero = gdpo(table.nan_to_num(0.0), weights, torch.tensor([0, 0, 0, 1, 1]))
    assert abs(float(as_zero[2] - found[0][2])) > 0.1
    assert estimator.from_parts([], [("right", 1.0)]) == []


def test_gdpo_refuses_a_penalty_in_the_reward_by_its_key() -> None:
    recipe = one_layer_recipe("grpo", advantage="gdpo", kl_in_reward={"weight": 0.1})
    with refuses(RecipeError, "kl_in_reward", "gdpo", "regularize.kl_coef"):
        resolve_components(recipe)


# --- of whole completions ---


def test_without_a_penalty_the_rewards_suffice() -> None:
    plain = advantage_estimator("centered")
    assert not plain.needs_batch
    found = torch.stack(plain.from_groups(REWARDS))
    assert found is not None
    assert found.tolist() == [[0.5, -0.5]]
    assert AdvantageEstimator(None).from_groups(REWARDS) is None
    assert advantage_estimator("centered", {"weight": 0.1}).needs_batch
    assert advantage_estimator("gae").needs_batch


def estimates(name: str) -> list[float]:
    """The estimator summed over the tokens of each answer."""
    formulas = {"k1": lambda r: r, "k2": lambda r: r * r / 2, "k3": lambda r: math.exp(-r) - 1 + r}
    return [formulas[name](0.5) + formulas[name](-0.25), formulas[name](0.5)]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_completion_pays_for_the_sum_over_its_tokens(estimator: str) -> None:
    batch = two_answers()
    word = advantage_estimator("centered", {"weight": 0.5, "estimator": estimator})
    advantages, metrics = word.from_batch(batch, REWARDS, ENDED, ())
    first, second = estimates(estimator)
    expected = ((1.0 - 0.5 * first) - (0.0 - 0.5 * second)) / 2
    if estimator == "k1":
        assert expected == (0.875 + 0.25) / 2
    assert advantages.dtype == torch.float64
    assert advantages[batch.mask].tolist() == approx([expected, expected, -expected], abs=1e-12)
    assert trained(batch) == [approx([expected] * 2), approx([-expected])]
    assert metrics == {"kl_in_reward": approx((first + second) / 2, abs=1e-12), "kl_weight": 0.5}


def test_groups_stay_groups() -> None:
    """Rows of the batch are [N, G] in order: each prompt is centred by itself."""
    samples = [Sample([3, b], [False, True], b // 2, 1, {"sampler_logprobs": [0.0, -1.0]}) for b in range(4)]
    batch = collate(samples)
    batch.fields["ref_logprobs"] = batch.fields["sampler_logprobs"] - torch.tensor([[0.0], [0.5], [0.0], [2.0]])
    rewards = torch.tensor([[1.0, 3.0], [10.0, 20.0]], dtype=torch.float64)
    word = advantage_estimator("centered", {"weight": 1.0})
    word.from_batch(batch, rewards, torch.zeros(4, dtype=torch.bool), ())
    assert trained(batch) == [[-0.75], [0.75], [-4.0], [4.0]]  # 1, 2.5 and 10, 18


# --- per token ---


def test_return_to_go_pays_the_penalty_where_it_arises() -> None:
    batch = two_answers()
    word = advantage_estimator("return_to_go", {"weight": 0.5}, whiten=False)
    advantages, metrics = word.from_batch(batch, REWARDS, ENDED, ())
    # −0.25, 1 + 0.125 and −0.25, summed from the end
    assert trained(batch) == [[0.875, 1.125], [-0.25]]
    assert advantages[batch.mask].tolist() == [0.875, 1.125, -0.25]
    assert metrics["kl_in_reward"] == 0.375
    assert not {"returns", "old_values"} & batch.fields.keys()


VALUES, FINAL = [[2.0, 1.0], [0.5]], [4.0, 4.0]
GAE = {"gamma": 0.5, "gae_lambda": 0.5, "whiten": False}
CRITIC = {"advantages", "returns", "old_values"}


ALL_ENDED = ([[-1.5, 0.0], [-0.5]], [[0.5, 1.0], [0.0]])


@pytest.mark.parametrize(
    ("truncated", "bootstrap", "advantages", "returns"),
    [
        # δ = 0 + 0.5·1 − 2 = −1.5, then 1 + 0.5·0 − 1 = 0; the second answer 0 − 0.5
        ([False, False], False, *ALL_ENDED),
        ([False, False], True, *ALL_ENDED),
        # an answer that was scored is over, cut off or not
        ([True, False], False, *ALL_ENDED),
        ([True, True], False, *ALL_ENDED),
        # the value behind the cut instead of the score: the last δ is 0.5·4 − 1 = 1, and a quarter of it comes before
        ([True, False], True, [[-1.25, 1.0], [-0.5]], [[0.75, 2.0], [0.0]]),
        ([False, True], True, [[-1.5, 0.0], [1.5]], [[0.5, 1.0], [2.0]]),
    ],
)
def test_gae_pays_a_truncated_answer_once(
    truncated: list[bool], bootstrap: bool, advantages: Any, returns: Any
) -> None:
    batch = two_answers(VALUES, FINAL)
    word = advantage_estimator("gae", bootstrap=bootstrap, **GAE)
    found, metrics = word.from_batch(batch, REWARDS, torch.tensor(truncated), CRITIC)
    assert trained(batch) == advantages
    assert found[batch.mask].tolist() == [x for row in advantages for x in row]
    assert trained(batch, "returns") == returns
    assert trained(batch, "old_values") == VALUES
    assert metrics == {"return_mean": approx(sum(x for row in returns for x in row) / 3)}
    assert "final_values" not in batch.fields  # nobody else reads them, so no checkpoint keeps them


def test_gae_with_the_penalty() -> None:
    batch = two_answers(VALUES, FINAL)
    word = advantage_estimator("gae", {"weight": 0.5}, bootstrap=True, **GAE)
    word.from_batch(batch, REWARDS, torch.tensor([True, False]), CRITIC)
    # δ: −0.25 + 0.5 − 2 = −1.75, then 0.125 + 2 − 1 = 1.125, for the penalty is paid also where the score is not
    assert trained(batch) == [[-1.75 + 0.25 * 1.125, 1.125], [-0.75]]
    assert trained(batch, "returns") == [[0.53125, 2.125], [-0.25]]


# --- the weight that adapts ---


def test_the_weight_adapts_after_it_was_used() -> None:
    """0.375 nats at a target of 0.1: up by 20 % · 2 / 20, and the batch at hand still pays the old price."""
    word = advantage_estimator("raw", {"weight": 0.5, "target": 0.1, "horizon": 20})
    batch = two_answers()
    _, metrics = word.from_batch(batch, REWARDS, ENDED, ())
    assert metrics == {"kl_in_reward": 0.375, "kl_weight": 0.5}
    assert trained(batch) == [[0.875, 0.875], [-0.25]]
    assert word.kl_weight == approx(0.51, abs=1e-12)
    _, metrics = word.from_batch(batch, REWARDS, ENDED, ())
    assert metrics["kl_weight"] == approx(0.51, abs=1e-12)
    assert trained(batch)[1] == approx([-0.255])
    assert word.kl_weight == approx(0.51 * 1.02, abs=1e-12)


def test_a_controller_that_cannot_go_on_fails_by_name() -> None:
    batch = two_answers()
    batch.fields["sampler_logprobs"][0, 2] = math.nan
    with refuses(RunFailure, "kl_in_reward"):
        advantage_estimator("raw", {"weight": 0.5, "target": 0.4}).from_batch(batch, REWARDS, ENDED, ())


# --- pieces ---


def test_pay_at_the_end_by_hand() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]], dtype=torch.bool)
    paid = pay_at_the_end(torch.tensor([1.0, 2.0, 3.0, -4.0], dtype=torch.float64), mask)
    assert paid.tolist() == [[0, 0, 1, 0], [0, 0, 0, 2], [0, 0, 0, 0], [0, -4, 0, 0]]
    assert paid.dtype == torch.float64


@pytest.mark.parametrize("result", [None, 1.0, torch.zeros(2), (torch.zeros(1, 2), torch.zeros(1, 2)), ()])
def test_an_advantage_of_another_shape_is_refused(result: Any) -> None:
    with refuses(UsageError, "advantage"):
        AdvantageEstimator(lambda rewards: result).from_groups(REWARDS)
