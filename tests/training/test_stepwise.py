"""Training by single calls: losses against their formulas in float64, steps against torch's AdamW, exact restore."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from closeness import OF_EMBEDDED, approx, rounding
from posttrain.errors import CheckpointError, NonFiniteLoss, UsageError
from posttrain.recipes.sections import ModelSection
from posttrain.training.stepwise.datums import Datum, check_datum
from posttrain.training.stepwise.losses import LOSSES, check_sequences, choose_loss
from posttrain.training.stepwise.trainee import WHOLE, AdamStep, AdapterChoice, Trainee
from refusing import refuses

TINY = ModelSection(name="tiny")
IDS = tuple(range(40, 60))
LENGTH = len(IDS)
PROMPT = 8  # tokens that are not trained


@pytest.fixture(scope="module")
def trainee() -> Trainee:
    """All weights of ``tiny``, which no test steps."""
    return Trainee(TINY, WHOLE)


def targets() -> Tensor:
    return torch.tensor([*IDS[1:], 77])


def generated(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(advantages, log-probabilities, mask) ``[N]`` of a row whose prompt has 0 in all of them."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(LENGTH) >= PROMPT
    advantages = torch.randn(LENGTH, generator=generator) * mask
    logprobs = (-3 * torch.rand(LENGTH, generator=generator) - 0.1) * mask
    return advantages, logprobs, mask.float()


def reference(trainee: Trainee, chosen: Tensor) -> Tensor:
    """Log-probabilities of ``chosen [N]`` after each token by the model's own forward pass, in float64."""
    with torch.no_grad():
        logits = trainee.model(torch.tensor([IDS])).logits[0].double()
    return logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]


def formula(name: str, policy: Tensor, sampler: Tensor, advantages: Tensor, mask: Tensor) -> float:
    """A loss as Tinker's pages write it: a sum over tokens."""
    ratio = (policy - sampler).exp()
    clipped = ratio.clamp(0.8, 1.2)
    if name == "importance_sampling":
        return float(-(ratio * advantages).sum())
    if name == "ppo":
        return float(-torch.minimum(ratio * advantages, clipped * advantages).sum())
    if name == "cispo":
        return float(-(clipped * policy * advantages).sum())
    if name == "dro":
        return float(-((policy * advantages - 0.5 * 0.05 * (policy - sampler) ** 2) * mask).sum())
    sequence = (policy - sampler)[mask > 0].mean().exp()
    return float(-torch.minimum(sequence * advantages, sequence.clamp(1 - 3e-4, 1 + 4e-4) * advantages).sum())


def rl_datum(name: str, seed: int = 1) -> Datum:
    advantages, logprobs, mask = generated(seed)
    inputs = {"advantages": advantages, "logprobs": logprobs}
    if name == "gspo":
        inputs["sequence_ratio_mask"] = mask
    return Datum(IDS, targets(), inputs)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "cross_entropy"])
def test_losses_are_the_sums_of_their_formulas(trainee: Trainee, name: str) -> None:
    datums = [rl_datum(name, 1), rl_datum(name, 2)]
    expected = 0.0
    moved = 0.0  # by an error of 1 in all log-probabilities, at most
    policy = reference(trainee, targets())
    for seed in (1, 2):
        advantages, logprobs, mask = (one.double() for one in generated(seed))
        expected += formula(name, policy, logprobs, advantages, mask)
        distance = (policy - logprobs).abs() * mask
        moved += float(((distance.exp() * (1 + policy.abs())) * advantages.abs() + 0.05 * distance).sum())
    total, logprobs_of = trainee.evaluate(datums, choose_loss(name, {}), learns=False)
    assert total == approx(expected, abs=OF_EMBEDDED * moved)
    assert logprobs_of[0].tolist() == approx(reference(trainee, targets()).tolist(), abs=OF_EMBEDDED)
    assert all(p.grad is None for p in trainee.parameters), "a forward pass adds no gradients"


def test_cross_entropy_weighs_each_token(trainee: Trainee) -> None:
    weights = torch.linspace(-1.0, 2.0, LENGTH)
    total, _ = trainee.evaluate(
        [Datum(IDS, targets(), {"weights": weights})], choose_loss("cross_entropy", {}), learns=False
    )
    expected = float(-(reference(trainee, targets()) * weights.double()).sum())
    assert total == approx(expected, abs=OF_EMBEDDED * float(weights.abs().sum()))


def test_targets_that_do_not_follow_are_scored_as_given(trainee: Trainee) -> None:
    """The cookbook's RL loop writes 0 for the targets of the prompt; its log-probability is that of token 0."""
    chosen = targets()
    chosen[:PROMPT] = 0
    _, (logprobs,) = trainee.evaluate(
        [Datum(IDS, chosen, {"weights": torch.ones(LENGTH)})], choose_loss("cross_entropy", {}), learns=False
    )
    assert logprobs.tolist() == approx(reference(trainee, chosen).tolist(), abs=OF_EMBEDDED)


def test_several_targets_at_a_token_are_summed_with_their_weights(trainee: Trainee) -> None:
    several = torch.stack([targets(), torch.full((LENGTH,), 5)], dim=1)
    weights = torch.rand(LENGTH, 2, generator=torch.Generator().manual_seed(3))
    both = torch.stack([reference(trainee, several[:, k]) for k in range(2)], dim=1)
    plain = Datum(IDS, targets(), {"weights": torch.ones(LENGTH)})
    total, logprobs = trainee.evaluate(
        [Datum(IDS, several, {"weights": weights}), plain], choose_loss("cross_entropy", {}), learns=False
    )
    expected = float(-(both * weights.double()).sum() - both[:, 0].sum())
    assert total == approx(expected, abs=OF_EMBEDDED * (float(weights.sum()) + LENGTH))
    assert [tuple(one.shape) for one in logprobs] == [(LENGTH, 2), (LENGTH,)]


def test_gradients_add_up_over_calls_and_a_step_is_adamw() -> None:
    settings = AdamStep(learning_rate=3e-3, beta1=0.8, beta2=0.9, eps=1e-10, weight_decay=0.1, grad_clip_norm=50.0)
    one, together = Trainee(TINY, AdapterChoice(rank=4)), Trainee(TINY, AdapterChoice(rank=4))
    loss = choose_loss("ppo", {})
    datums = [rl_datum("ppo", 1), rl_datum("ppo", 2)]
    copies = [p.detach().clone().requires_grad_(True) for p in one.parameters]
    adamw = torch.optim.AdamW(copies, lr=3e-3, betas=(0.8, 0.9), eps=1e-10, weight_decay=0.1)
    together.evaluate(datums, loss, learns=True)
    for number in range(2):
        for datum in datums:
            one.evaluate([datum], loss, learns=True)
        for mine, copy, its in zip(one.parameters, copies, together.parameters, strict=True):
            assert mine.grad is not None
            copy.grad = mine.grad.clone()
            if number == 0:
                assert its.grad is not None
                bound = rounding(torch.float32, size=float(its.grad.abs().max()), terms=2 * LENGTH, condition=20.0)
                assert mine.grad.flatten().tolist() == approx(its.grad.flatten().tolist(), abs=bound)
        norm = torch.nn.utils.clip_grad_norm_(copies, 50.0)
        metrics = one.update(settings)
        assert metrics["grad_norm"] == approx(float(norm), rel=1e-5)
        adamw.step()
        for mine, copy in zip(one.parameters, copies, strict=True):
            assert mine.flatten().tolist() == approx(copy.flatten().tolist(), rel=1e-4, abs=1e-6)
    assert one.step == 2


@pytest.mark.parametrize("rank", [0, 4])
def test_restore_goes_on_to_the_bit(tmp_path: Path, rank: int) -> None:
    loss, settings = choose_loss("cross_entropy", {}), AdamStep(learning_rate=1e-3)
    datum = Datum(IDS, targets(), {"weights": torch.ones(LENGTH)})
    first, second = Trainee(TINY, AdapterChoice(rank=rank)), Trainee(TINY, AdapterChoice(rank=rank))
    first.evaluate([datum], loss, learns=True)
    first.update(settings)
    first.save(tmp_path / "state", with_optimizer=True, note={})
    second.restore(tmp_path / "state", with_optimizer=True)
    assert second.step == 1
    for one in (first, second):
        one.evaluate([datum], loss, learns=True)
        one.update(settings)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters, second.parameters, strict=True))
    second.restore(tmp_path / "state", with_optimizer=False)
    assert second.step == 0
    with refuses(CheckpointError, "saved state"):
        second.restore(tmp_path / "none", with_optimizer=False)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (AdapterChoice(rank=2, train_mlp=False, train_unembed=False), {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (AdapterChoice(rank=2, train_attn=False, train_unembed=False), {"gate_proj", "up_proj", "down_proj"}),
        (AdapterChoice(rank=2, train_attn=False, train_mlp=False), {"lm_head"}),
    ],
)
def test_an_adapter_reaches_the_parts_that_were_chosen(choice: AdapterChoice, names: set[str]) -> None:
    found = {name.partition(".lora_")[0].rpartition(".")[2] for name in Trainee(TINY, choice).names}
    assert found == names


def test_a_step_without_gradients_and_one_that_is_not_finite_are_refused() -> None:
    trainee = Trainee(TINY, AdapterChoice(rank=2))
    with refuses(UsageError, "forward_backward"):
        trainee.update(AdamStep())
    before = [p.detach().clone() for p in trainee.parameters]
    trainee.evaluate(
        [Datum(IDS, targets(), {"weights": torch.ones(LENGTH)})], choose_loss("cross_entropy", {}), learns=True
    )
    trainee.loss = float("nan")
    with refuses(NonFiniteLoss, "loss nan"):
        trainee.update(AdamStep())
    assert all(torch.equal(a, b) for a, b in zip(before, trainee.parameters, strict=True))
    huge = Datum(IDS, targets(), {"weights": torch.full((LENGTH,), 3e38)})
    with refuses(UsageError, "dropped"):
        trainee.evaluate([huge], choose_loss("cross_entropy", {}), learns=True)
    assert all(p.grad is None for p in trainee.parameters)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("nll", {}, "loss_fn"),
        ("custom", {}, "forward_backward_custom"),
        ("stable_reinforce", {}, "importance_sampling"),
        ("ppo", {"clip_low": 0.8}, "clip_low_threshold"),
        ("ppo", {"clip_low_threshold": 1.5}, "invalid ratio bounds"),
        ("dro", {"beta": "much"}, "loss_fn_config.beta"),
        ("dro", {"beta": float("nan")}, "loss_fn_config.beta"),
        ("dro", {"beta": -1.0}, "beta"),
        ("cross_entropy", {"beta": 1.0}, "none"),
    ],
)
def test_a_loss_that_is_not_there_is_refused(name: str, options: dict[str, float | str], said: str) -> None:
    with refuses(UsageError, said):
        choose_loss(name, options)


FULL = torch.ones(LENGTH)


@pytest.mark.parametrize(
    ("datum", "said"),
    [
        (Datum((), torch.zeros(0, dtype=torch.long), {}), "model_input"),
        (Datum((*IDS[:-1], 9_999), targets(), {"weights": FULL}), "9999"),
        (Datum((*IDS[:-1], -1), targets(), {"weights": FULL}), "-1"),
        (Datum(IDS, targets() + 9_999, {"weights": FULL}), "target_tokens"),
        (Datum(IDS, targets()[:-1], {"weights": FULL}), "target_tokens"),
        (Datum(IDS, targets()[:, None, None], {"weights": FULL}), "target_tokens"),
        (Datum(IDS, targets(), {}), "weights: missing"),
        (Datum(IDS, targets(), {"weights": FULL, "mask": FULL}), "mask"),
        (Datum(IDS, targets(), {"weights": FULL[:-1]}), "weights"),
        (Datum(IDS, targets(), {"weights": FULL * float("nan")}), "nan"),
        (Datum(IDS * 60, targets().repeat(60), {"weights": FULL.repeat(60)}), "1024"),
    ],
)
def test_a_row_that_the_loss_cannot_read_is_refused(datum: Datum, said: str) -> None:
    with refuses(UsageError, said):
        check_datum(datum, "data.0", ["weights"], 768, 1024)


def test_an_advantage_outside_of_the_sequence_is_refused() -> None:
    datum = rl_datum("gspo")
    outside = dict(datum.inputs) | {"sequence_ratio_mask": torch.zeros(LENGTH)}
    with refuses(UsageError, "sequence_ratio_mask"):
        check_sequences(Datum(IDS, targets(), outside), "data.0")
