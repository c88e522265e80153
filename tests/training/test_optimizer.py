"""AdamW by hand, Muon's orthogonal steps, state that comes back bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn import Parameter
from transformers.pytorch_utils import Conv1D

from closeness import approx, assert_close
from posttrain.errors import CheckpointError, RecipeError
from posttrain.recipes.sections import Component, TrainSection
from posttrain.training.optimizer import (
    adafactor,
    adamw,
    adamw_8bit,
    build_optimizer,
    lion,
    mark_input_first,
    muon,
    optimizer_tensors,
    orthogonalize,
    restore_optimizer,
)
from refusing import refuses

NAMES = [
    "model.embed_tokens.weight",
    "layers.0.q_proj.weight",
    "layers.0.k_proj.weight",
    "layers.0.down_proj.weight",
    "layers.0.norm.weight",
]
Make = Callable[..., torch.optim.Optimizer]


def parameters(seed: int = 0) -> list[tuple[str, Parameter]]:
    g = torch.Generator().manual_seed(seed)
    shapes = [(20, 8), (12, 8), (12, 8), (8, 24), (8,)]
    return [(name, Parameter(torch.randn(*shape, generator=g))) for name, shape in zip(NAMES, shapes, strict=True)]


def set_gradients(named: list[tuple[str, Parameter]], seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for _, p in named:
        p.grad = torch.randn(p.shape, generator=g)


@pytest.mark.parametrize("make", [adamw, muon])
def test_adamw_step_by_hand(make: Make) -> None:
    """Two steps on one number; Muon leaves embeddings to the same rule."""
    p = Parameter(torch.tensor([[2.0]]))
    optimizer = make([("embed_tokens.weight", p)], 0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.5)
    value, m, v = 2.0, 0.0, 0.0
    for step, gradient in enumerate((4.0, -1.0), start=1):
        p.grad = torch.tensor([[gradient]])
        optimizer.step()
        m = 0.9 * m + 0.1 * gradient
        v = 0.99 * v + 0.01 * gradient**2
        value -= 0.1 * 0.5 * value
        value -= 0.1 * (m / (1 - 0.9**step)) / (math.sqrt(v / (1 - 0.99**step)) + 1e-8)
        assert p.item() == approx(value, abs=2e-6)
    assert value == approx(1.663, abs=1e-3)  # 2 * 0.95 - 0.1 = 1.8; 1.8 * 0.95 - 0.1 * 1.368 / 2.909 = 1.663


@pytest.mark.parametrize("make", [adamw, muon])
def test_weight_decay_spares_norms(make: Make) -> None:
    named = parameters()
    before = {name: p.detach().clone() for name, p in named}
    optimizer = make(named, 0.1, weight_decay=0.5)
    for _, p in named:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in named:
        kept = 1.0 if "norm" in name else 0.95
        assert_close(p.detach(), before[name] * kept, rtol=1e-6, atol=0)


def test_orthogonalize_moves_singular_values_to_one() -> None:
    g = torch.Generator().manual_seed(1)
    for shape in ((16, 48), (48, 16), (3, 32, 32)):
        matrices = torch.randn(*shape, generator=g)
        before = torch.linalg.svdvals(matrices)
        after = torch.linalg.svdvals(orthogonalize(matrices))
        assert before.max() / before.min() > 1.5
        assert after.shape == before.shape
        assert float(after.min()) > 0.3
        assert float(after.max()) < 1.25
    well = torch.randn(24, 96, generator=g)
    after = torch.linalg.svdvals(orthogonalize(well))
    assert float(after.min()) > 0.65
    # The iteration keeps the singular vectors: u v^T of the matrix and of its image agree.
    u, _, vt = torch.linalg.svd(well, full_matrices=False)
    inner = u.T @ orthogonalize(well) @ vt.T
    off_diagonal = inner - torch.diag(torch.diag(inner))
    assert_close(off_diagonal, torch.zeros_like(inner), atol=1e-4, rtol=0)


def test_orthogonalize_is_the_quintic() -> None:
    """On a diagonal matrix every singular value follows a x + b x^3 + c x^5 by itself."""
    values = torch.tensor([0.6, 0.3, 0.1])
    x = values / values.norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    assert_close(orthogonalize(torch.diag(values), 5), torch.diag(x), rtol=1e-4, atol=1e-5)


def test_muon_step_by_hand() -> None:
    """W - lr sqrt(out/in) NS(nesterov), for a tall matrix, two steps, together with a matrix of its shape."""
    g = torch.Generator().manual_seed(2)
    weights = [Parameter(torch.randn(12, 3, generator=g)) for _ in range(2)]
    expected = [w.detach().clone() for w in weights]
    momenta = [torch.zeros(12, 3) for _ in range(2)]
    optimizer = muon([("a.weight", weights[0]), ("b.weight", weights[1])], 0.02, momentum=0.9)
    for _ in range(2):
        for i, w in enumerate(weights):
            w.grad = torch.randn(12, 3, generator=g)
            momenta[i] = 0.9 * momenta[i] + 0.1 * w.grad
            direction = orthogonalize(0.9 * momenta[i] + 0.1 * w.grad)
            expected[i] = expected[i] - 0.02 * 2.0 * direction  # sqrt(12 / 3) = 2
        optimizer.step()
    for w, want in zip(weights, expected, strict=True):
        assert_close(w.detach(), want, rtol=1e-5, atol=1e-6)


def test_muon_scales_by_what_is_out_also_where_a_layer_keeps_in_first() -> None:
    """The same linear map as nn.Linear ([out, in]) and as transformers' Conv1D ([in, out]) takes the same step."""
    g = torch.Generator().manual_seed(3)
    for num_in, num_out in ((4, 16), (16, 4), (8, 8)):
        linear, conv = torch.nn.Linear(num_in, num_out), Conv1D(num_out, num_in)
        gradient = torch.randn(num_out, num_in, generator=g)
        with torch.no_grad():
            conv.weight.copy_(linear.weight.T)
        before = linear.weight.detach().clone()
        module = torch.nn.ModuleDict({"linear": linear, "conv": conv})
        mark_input_first(module)
        linear.weight.grad, conv.weight.grad = gradient.clone(), gradient.T.clone()
        muon([(n, p) for n, p in module.named_parameters() if p.ndim == 2], 0.02).step()
        assert_close(conv.weight.detach().T, linear.weight.detach(), rtol=1e-5, atol=1e-6)
        moved = (linear.weight.detach() - before).norm() / orthogonalize(gradient).norm()
        assert float(moved) == approx(0.02 * max(1.0, num_out / num_in) ** 0.5, rel=1e-4)


def test_muon_takes_hidden_matrices_only_and_rates_follow_lr_ratio() -> None:
    named = parameters()
    optimizer = muon(named, 0.01, adamw_lr_ratio=0.25)
    names = {id(p): name for name, p in named}
    rates = {
        names[id(p)]: (g["orthogonal"], g["lr_ratio"], g["lr"]) for g in optimizer.param_groups for p in g["params"]
    }
    assert rates == {
        "model.embed_tokens.weight": (False, 0.25, 0.0025),
        "layers.0.q_proj.weight": (True, 1.0, 0.01),
        "layers.0.k_proj.weight": (True, 1.0, 0.01),
        "layers.0.down_proj.weight": (True, 1.0, 0.01),
        "layers.0.norm.weight": (False, 0.25, 0.0025),
    }
    assert {g["lr_ratio"] for g in adamw(named, 0.01).param_groups} == {1.0}


def test_lion_step_by_hand() -> None:
    p = Parameter(torch.tensor([[2.0, -1.0, 0.5]]))
    optimizer = lion([("embed_tokens.weight", p)], 0.1, betas=(0.9, 0.5), weight_decay=0.5)
    p.grad = torch.tensor([[4.0, -1.0, 0.0]])
    optimizer.step()  # m = 0: the sign of the gradient; after it m = g / 2
    assert p[0].tolist() == approx([2.0 * 0.95 - 0.1, -1.0 * 0.95 + 0.1, 0.5 * 0.95], abs=3e-7)
    before = p.detach().clone()
    p.grad = torch.tensor([[-10.0, -1.0, 1.0]])
    optimizer.step()  # 0.9 · 2 − 0.1 · 10 = 0.8 is positive: the momentum wins over the gradient
    expected = before * 0.95 - 0.1 * torch.tensor([[1.0, -1.0, 1.0]])
    assert p[0].tolist() == approx(expected[0].tolist(), abs=3e-7)


def test_adafactor_keeps_one_number_a_row_and_one_a_column() -> None:
    """The first step by hand: β2 = 0, so V is R Cᵀ / mean(R) of g²; lr is relative to the weights' size."""
    g = torch.Generator().manual_seed(1)
    p = Parameter(torch.randn(3, 4, generator=g, dtype=torch.float64))
    before, gradient = p.detach().clone(), torch.randn(3, 4, generator=g, dtype=torch.float64)
    p.grad = gradient.clone()
    optimizer = adafactor([("weight", p)], 0.01)
    optimizer.step()
    rows, columns = gradient.square().mean(1, keepdim=True), gradient.square().mean(0, keepdim=True)
    update = gradient / (rows @ columns / rows.mean()).sqrt()
    update = update / max(1.0, update.square().mean().sqrt().item())
    expected = before - 0.01 * before.square().mean().sqrt() * update
    assert_close(p.detach(), expected, rtol=1e-6, atol=0.0)  # torch adds an epsilon of fp32 to the estimate
    state = optimizer_tensors(optimizer, ["weight"])
    assert {key: tuple(x.shape) for key, x in state.items()} == {
        "weight.step": (), "weight.row_var": (3, 1), "weight.col_var": (1, 4),
    }  # fmt: skip


def large_parameters() -> list[tuple[str, Parameter]]:
    """A matrix whose moments bitsandbytes keeps in 8 bits, and one of too few numbers for that."""
    g = torch.Generator().manual_seed(0)
    return [
        ("a.weight", Parameter(torch.randn(64, 72, generator=g))),
        ("b.weight", Parameter(torch.randn(8, generator=g))),
    ]


def test_adamw_8bit_follows_adamw_with_moments_in_bytes() -> None:
    rounded, exact = large_parameters(), large_parameters()
    start = rounded[0][1].detach().clone()
    optimizers = adamw_8bit(rounded, 0.01, weight_decay=0.1), adamw(exact, 0.01, weight_decay=0.1)
    for step in range(5):
        for named, optimizer in zip((rounded, exact), optimizers, strict=True):
            set_gradients(named, step)
            optimizer.step()
    state = optimizer_tensors(optimizers[0], ["a.weight", "b.weight"])
    assert state["a.weight.state1"].dtype == torch.uint8
    assert state["b.weight.state1"].dtype == torch.float32
    moved = (exact[0][1] - start).norm().item()
    apart = (rounded[0][1] - exact[0][1]).norm().item()
    assert 0.0 < apart < 0.2 * moved  # a code is off by up to 1/16 of its value, twice in a step
    assert_close(rounded[1][1].detach(), exact[1][1].detach(), rtol=1e-5, atol=1e-6)


def test_adamw_8bit_state_round_trip_is_bit_exact() -> None:
    names = ["a.weight", "b.weight"]
    named = large_parameters()
    optimizer = adamw_8bit(named, 0.01)
    for step in range(3):
        set_gradients(named, step)
        optimizer.step()
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, names).items()}
    twins = [(name, Parameter(p.detach().clone())) for name, p in named]
    twin = adamw_8bit(twins, 0.01)
    restore_optimizer(twin, names, saved)
    for one, other in ((named, optimizer), (twins, twin)):
        set_gradients(one, 3)
        other.step()
    assert all(torch.equal(p, q) for (_, p), (_, q) in zip(named, twins, strict=True))
    damaged = saved | {"a.weight.absmax1": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=r"a\.weight\.absmax1"):
        restore_optimizer(twin, names, damaged)


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(5, 4)
        self.layer = torch.nn.Linear(4, 4)


ADAMW = Component(name="adamw")


def training_at(ratios: dict[str, float]) -> TrainSection:
    return TrainSection(lr=0.1, lr_ratios=ratios)


def test_lr_ratios_scale_and_freeze_by_name() -> None:
    model, head = Small(), torch.nn.Linear(4, 1)
    ratios = {"layer.bias": 0.0, "layer.*": 0.5, "value.weight": 0.25}
    named, optimizer = build_optimizer(ADAMW, training_at(ratios), model, {"value": head}, 10.0)
    found = {name: group["lr_ratio"] for group in optimizer.param_groups for name in group["param_names"]}
    assert found == {"embed_tokens.weight": 1.0, "layer.weight": 0.5, "value.weight": 2.5, "value.bias": 10.0}
    assert not model.layer.bias.requires_grad
    assert sorted(name for name, _ in named) == sorted(found)


def test_lr_ratios_of_a_name_that_is_not_there_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"train\.lr_ratios") as refused:
        build_optimizer(ADAMW, training_at({"lm_head*": 0.1}), Small(), {})
    assert "embed_tokens.weight" in str(refused.value)
    with pytest.raises(RecipeError, match=r"train\.lr_ratios"):
        build_optimizer(ADAMW, training_at({"*": 0.0}), Small(), {})


@pytest.mark.parametrize("make", [adamw, muon, lion, adafactor])
def test_state_round_trip_is_bit_exact(make: Make) -> None:
    named = parameters()
    optimizer = make(named, 0.01)
    for step in range(3):
        set_gradients(named, step)
        optimizer.step()
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, NAMES).items()}
    twins = [(name, Parameter(p.detach().clone())) for name, p in named]
    twin = make(twins, 0.01)
    restore_optimizer(twin, NAMES, saved)
    for step in range(3, 6):
        set_gradients(named, step)
        set_gradients(twins, step)
        optimizer.step()
        twin.step()
    assert all(torch.equal(p, q) for (_, p), (_, q) in zip(named, twins, strict=True))
    final, final_twin = optimizer_tensors(optimizer, NAMES), optimizer_tensors(twin, NAMES)
    assert final.keys() == final_twin.keys() == saved.keys()
    assert all(torch.equal(final[key], final_twin[key]) for key in final)
    assert not any(torch.equal(final[key], saved[key]) for key in final)  # what was saved is no alias
    for name, p in named:  # each state went to the parameter of its name, though groups reorder them
        own = [x for key, x in final.items() if key.startswith(f"{name}.") and not key.endswith(".step")]
        assert own
        assert all(x.shape in (p.shape, (*p.shape[:-1], 1), (1, p.shape[-1])) for x in own)


def test_state_of_an_optimizer_made_elsewhere_follows_the_order() -> None:
    named = parameters()
    optimizer = torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)
    set_gradients(named, 0)
    optimizer.step()
    state = optimizer_tensors(optimizer, NAMES)
    for name, p in named:
        assert torch.equal(state[f"{name}.momentum_buffer"], p.grad)


def test_state_of_another_model_is_refused() -> None:
    named = parameters()
    optimizer = adamw(named, 0.01)
    assert optimizer_tensors(optimizer, NAMES) == {}
    with refuses(CheckpointError, "'head.weight'"):
        restore_optimizer(optimizer, NAMES, {"head.weight.exp_avg": torch.zeros(2)})
    with refuses(CheckpointError, "shape"):
        restore_optimizer(optimizer, NAMES, {"layers.0.norm.weight.exp_avg": torch.zeros(9)})
