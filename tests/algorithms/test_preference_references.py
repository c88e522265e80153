"""Every pair word against its equation in plain Python, finite differences, masks, metrics, broken rows."""

from __future__ import annotations

import math

import pytest
import torch
from preference_cases import CASES, Pair, make_pairs, one_pair, random_rows

from closeness import approx
from posttrain.algorithms.objectives import preference
from posttrain.registry import entries
from posttrain.types import Outputs

REFERENCE_FREE = {"simpo", "orpo", "cpo", "cpo_sum"}
# f'(u) as a function of log u, up to a constant that is 0 at the reference.
OWN_REWARDS = {
    "forward_kl_dpo": lambda z: 1 - math.exp(-z),
    "alpha_dpo": lambda z: (1 - math.exp(-0.3 * z)) / 0.3,
    "js_dpo": lambda z: math.log(2 / (1 + math.exp(-z))),
}


def test_every_pair_word_has_a_reference():
    words = {
        n
        for n, e in entries("objective").items()
        if e.function.__module__ == preference.__name__ and e.traits["level"] == "pair"
    }
    words.remove("aot")  # needs ranks over the batch; tested in test_optimal_transport.py
    assert words == {word.__name__ for word, _, _ in CASES.values()}
    assert len(words) == 18


@pytest.mark.parametrize("name", CASES)
def test_values_against_plain_python(name: str):
    word, options, expected = CASES[name]
    policy, reference = random_rows(0, num_rows=12, scale=3.0)
    values = word(*make_pairs(policy, reference), **options).values
    assert values.shape == (6,)
    for unit in range(6):
        w, rejected = 2 * unit, 2 * unit + 1
        pair = Pair(policy[w], policy[rejected], reference[w], reference[rejected])
        assert values[unit].item() == approx(expected(pair), rel=1e-11, abs=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_gradient_by_finite_differences(name: str):
    word, options, _ = CASES[name]
    outputs, batch = make_pairs(*random_rows(3, scale=3.0))
    if name == "hinge":  # away from the kink, with pairs on both of its sides
        values = word(outputs, batch, **options).values
        assert values.min() == 0.0
        assert values.max() > 0.0

    def total(logprobs: torch.Tensor) -> torch.Tensor:
        return word(Outputs(logprobs=logprobs), batch, **options).values

    point = outputs.logprobs.detach().requires_grad_()
    assert torch.autograd.gradcheck(total, (point,), eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_what_stands_outside_the_mask_does_not_count(name: str):
    word, options, _ = CASES[name]
    results = []
    for outside in (0.0, math.nan, -math.inf):
        outputs, batch = make_pairs(*random_rows(4), outside=outside)
        loss = word(outputs, batch, **options)
        loss.values.sum().backward()
        results.append((loss, outputs.logprobs.grad))
        assert (outputs.logprobs.grad[~batch.mask] == 0.0).all()
    for loss, gradient in results[1:]:
        assert torch.equal(loss.values, results[0][0].values)
        assert torch.equal(gradient, results[0][1])
        assert all(torch.equal(loss.metrics[k], v) for k, v in results[0][0].metrics.items())


@pytest.mark.parametrize("name", CASES)
def test_metrics(name: str):
    word, options, _ = CASES[name]
    policy, reference = random_rows(6)
    outputs, batch = make_pairs(policy, reference)
    metrics = word(outputs, batch, **options).metrics
    assert all(m.shape == (4,) and not m.requires_grad for m in metrics.values())
    beta = float(options.get("beta", 1.0))
    for unit in range(4):
        rewards = []
        for row in (2 * unit, 2 * unit + 1):
            total, count = sum(policy[row]), len(policy[row])
            ratio = total - sum(reference[row])
            if name == "orpo":
                rewards.append(math.log(math.exp(total / count) / (1 - math.exp(total / count))))
            elif name in OWN_REWARDS:
                rewards.append(beta * OWN_REWARDS[name](ratio))
            elif name == "ld_dpo":
                terms = [new - old for new, old in zip(policy[row], reference[row], strict=True)]
                common = min(len(policy[2 * unit]), len(policy[2 * unit + 1]))
                rewards.append(beta * (sum(terms[:common]) + 0.3 * sum(terms[common:])))
            elif name in REFERENCE_FREE:
                rewards.append(beta * (total / count if name == "simpo" else total))
            else:
                rewards.append(beta * (ratio / count if name in ("dpo_norm", "ipo_means") else ratio))
        got = {k: metrics[k][unit].item() for k in metrics}
        assert got["chosen_reward"] == approx(rewards[0], abs=1e-11)
        assert got["rejected_reward"] == approx(rewards[1], abs=1e-11)
        assert got["margin"] == approx(rewards[0] - rewards[1], abs=1e-11)
        assert got["pair_accuracy"] == float(rewards[0] > rewards[1])
        assert got["chosen_logprob"] == approx(sum(policy[2 * unit]), abs=1e-12)
        assert got["rejected_logprob"] == approx(sum(policy[2 * unit + 1]), abs=1e-12)
        if name in ("orpo", "cpo", "rpo", "mpo"):
            mean = sum(policy[2 * unit]) / len(policy[2 * unit])
            assert got["chosen_nll"] == approx(-mean, abs=1e-12)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("nats", "accuracy"), [(0.05, 1.0), (-0.05, 0.0), (0.004, 0.5), (-0.004, 0.5)])
def test_a_tie_is_one_in_log_probabilities(name: str, nats: float, accuracy: float):
    """Answers of 2,500 nats: a millionth of both is 0.005, whatever β, means or odds make of it."""
    word, options, _ = CASES[name]
    plain = [[-625.0] * 4] * 2
    chosen = [[-625.0 + nats, -625.0, -625.0, -625.0], plain[1]]
    assert word(*make_pairs(chosen, plain), **options).metrics["pair_accuracy"].tolist() == [accuracy]


@pytest.mark.parametrize("name", CASES)
def test_every_word_wants_a_larger_difference_at_the_reference(name: str):
    """Chosen up relative to rejected: the sign of each gradient, at equal answers."""
    word, options, _ = CASES[name]
    outputs, batch = make_pairs([[-1.0], [-1.0]])
    word(outputs, batch, **options).values.sum().backward()
    slope = outputs.logprobs.grad.sum(dim=1)
    assert slope[1] - slope[0] > 0.01
    assert slope[1] >= 0.0  # no word makes the rejected answer more likely
    if name == "apo_down":
        assert slope[0] == approx(0.0, abs=1e-12)  # both forces on the chosen one cancel here
    else:
        assert slope[0] < 0.0


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("name", "whose"),
    [(n, w) for n in CASES for w in ("policy", "reference", "both") if w != "reference" or n not in REFERENCE_FREE],
)
def test_an_impossible_token_is_refused(name: str, place: int, whose: str):
    """A −inf log-probability gives NaN in its pair only, so that the loop names a non-finite loss."""
    word, options, _ = CASES[name]
    policy = [[-1.0, -2.0], [-1.5], [-0.5], [-1.0, -0.3]]
    reference = [list(row) for row in policy]
    if whose != "reference":
        policy[place][0] = -math.inf
    if whose != "policy":
        reference[place][0] = -math.inf
    values = word(*make_pairs(policy, reference), **options).values
    assert math.isnan(values[0].item())
    assert math.isfinite(values[1].item())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ratios", [(1e6, -1e6), (-1e6, 1e6), (0.0, 0.0), (1e6, 1e6), (-1e6, -1e6)])
def test_huge_ratios_are_finite(name: str, ratios: tuple[float, float]):
    word, options, _ = CASES[name]
    for dtype in (torch.float64, torch.float32):
        outputs, batch = one_pair(*ratios)
        if name in REFERENCE_FREE:  # log-probabilities are not positive; orpo's odds at p = 1 are the test here
            outputs.logprobs = (outputs.logprobs.detach() - 1e6 + 5.0).clamp(max=0.0)
        point = outputs.logprobs.detach().to(dtype).requires_grad_()
        batch.fields["ref_logprobs"] = batch.fields["ref_logprobs"].to(dtype)
        values = word(Outputs(logprobs=point), batch, **options).values
        assert values.isfinite().all()
        values.sum().backward()
        assert point.grad.isfinite().all()


@pytest.mark.parametrize("name", ["dpo_norm", "ipo_means", "simpo", "orpo", "cpo", "rpo"])
def test_an_empty_answer_has_no_mean(name: str):
    word, options, _ = CASES[name]
    assert math.isnan(word(*make_pairs([[], [-1.0]]), **options).values.item())
