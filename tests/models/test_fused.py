"""The functions with backward passes of their own: gradients by differences, and against the plain path in models."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from small_models import (
    LOGPROBS,
    add_adapter,
    gradients,
    ragged_batch,
    random_model,
    relative_difference,
    weighted_backward,
)
from torch import Tensor

from closeness import approx, assert_close
from posttrain.models.forward import fused, packing
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.fused import FusedLayers, RmsNorm, Rotate, SwiGlu, TokenScores
from posttrain.types import Batch, Sample, collate


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def test_gradients_are_those_of_differences():
    assert torch.autograd.gradcheck(lambda x, w: RmsNorm.apply(x, w, 1e-5), (numbers(3, 2, 5), numbers(5, seed=1)))
    angles = numbers(4, 1, 6, seed=2).detach()
    assert torch.autograd.gradcheck(lambda x: Rotate.apply(x, angles.cos(), angles.sin()), (numbers(4, 2, 6),))
    assert torch.autograd.gradcheck(SwiGlu.apply, (numbers(4, 6), numbers(4, 6, seed=1)))
    ids = torch.tensor([[3, 1], [0, 0], [6, 2]])
    assert torch.autograd.gradcheck(lambda z: TokenScores.apply(z, ids, True)[0], (numbers(3, 7),))


def test_values_worked_by_hand():
    x = torch.tensor([[3.0, 4.0]])
    assert RmsNorm.apply(x, torch.tensor([1.0, 2.0]), 0.0)[0].tolist() == approx([0.848528, 2.262742])
    turned = Rotate.apply(torch.tensor([[[1.0, 2.0]]]), torch.zeros(1, 1, 2), torch.ones(1, 1, 2))
    assert turned.tolist() == [[[-2.0, 1.0]]], "a quarter turn"
    assert SwiGlu.apply(torch.tensor([2.0]), torch.tensor([3.0])).item() == approx(6 / (1 + 2.718281828**-2))
    logits = torch.tensor([[1000.0, 1000.0, -torch.inf]])
    logprobs, entropy = TokenScores.apply(logits, torch.tensor([[1, 2]]), True)
    assert logprobs.tolist() == [[approx(-0.693147, abs=1e-6), -torch.inf]]
    assert entropy.item() == approx(0.693147, abs=1e-6)


@pytest.mark.parametrize("kind", ["lora", "checkpointed", "weights in bf16", "lora over bf16"])
def test_fused_layers_in_16_bits_round_no_worse_than_the_modules(kind: str, monkeypatch: pytest.MonkeyPatch):
    """As on a GPU, where they are fused, too: gradients of both against those in fp32."""
    model = random_model("qwen3", torch.bfloat16 if "bf16" in kind else torch.float32)
    if "lora" in kind:
        model = add_adapter(model)
    exact, batch = copy.deepcopy(model).float(), ragged_batch()
    weighted_backward(Forward(exact), batch, [])
    truth, errors = gradients(exact), {}
    for fused_on in (set[str](), {"cpu"}):
        monkeypatch.setattr(fused, "HALF_FUSED_ON", fused_on)
        model.zero_grad()
        calls: list[str] = []
        forward = Forward(model, precision="fp32" if kind == "weights in bf16" else "bf16")
        with monkeypatch.context() as patch:
            patch.setattr(fused, "Rotate", Counted(calls))
            weighted_backward(forward, batch, [model] if kind == "checkpointed" else [])
        assert bool(calls) == bool(fused_on)
        errors[bool(fused_on)] = float((gradients(model) - truth).norm() / truth.norm())
    assert 1e-3 < errors[True] < 1.1 * errors[False]


@pytest.mark.parametrize(
    ("family", "kind"), [("qwen3", "plain"), ("qwen3", "checkpointed"), ("qwen2", "lora"), ("llama", "plain")]
)
def test_models_give_what_their_own_modules_give(family: str, kind: str, monkeypatch: pytest.MonkeyPatch):
    """Gradients of all parameters within 1e-5 of the plain path, in fp32; with an adapter, and recomputed."""
    seen = {}
    for enabled in (False, True):
        monkeypatch.setattr(fused, "ENABLED", enabled)
        model = random_model(family)
        if kind == "lora":
            model = add_adapter(model)
        forward, batch = Forward(model), ragged_batch()
        assert forward.path == "packed"
        assert len(forward.layers.replaced) == 2 * (4 + 2 * (family == "qwen3")) + 2
        calls: list[str] = []
        monkeypatch.setattr(fused, "Rotate", Counted(calls))
        outputs = weighted_backward(forward, batch, [model] if kind == "checkpointed" else [])
        assert len(calls) == (0 if not enabled else 8 if kind == "checkpointed" else 4)
        seen[enabled] = (outputs.logprobs.detach(), outputs.entropy, gradients(model))
    assert_close(seen[True][0], seen[False][0], atol=LOGPROBS, rtol=0)
    assert_close(seen[True][1], seen[False][1], atol=LOGPROBS, rtol=0)
    assert relative_difference(seen[True][2], seen[False][2]) == approx(0.0, abs=1e-5)


class Counted:
    """``Rotate``, and a note of each use."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def apply(self, *arguments: Tensor) -> Tensor:
        self.calls.append("rotate")
        return Rotate.apply(*arguments)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_run_as_they_are(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    model, batch = random_model("qwen3", dtype), ragged_batch()
    outputs = {}
    for enabled in (False, True):
        monkeypatch.setattr(fused, "ENABLED", enabled)
        outputs[enabled] = Forward(model)(batch).logprobs.detach()
    assert torch.equal(outputs[False], outputs[True])


def long_prompts() -> Batch:
    """Two prompts of 150 tokens, one of them with two answers of 4 and 9 tokens, the other with one of 6."""
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(0, 97, (2, 150), generator=generator).tolist()
    answers = [torch.randint(0, 97, (n,), generator=generator).tolist() for n in (4, 9, 6)]
    rows = [(prompts[0], answers[0], 0), (prompts[0], answers[1], 0), (prompts[1], answers[2], 1)]
    return collate([Sample(p + a, [False] * 150 + [True] * len(a), group=g, prefix=150) for p, a, g in rows])


@pytest.mark.parametrize(
    ("family", "kind"), [("qwen3", "plain"), ("qwen3", "float64"), ("qwen2", "lora"), ("llama", "checkpointed")]
)
def test_last_layer_of_long_prompts_is_computed_where_it_is_read(
    family: str, kind: str, monkeypatch: pytest.MonkeyPatch
):
    """18 of 316 tokens are read, 128 with those that fill up. Values and gradients are those of a whole layer.

    The norms compute in fp32 whatever the weights are: a last bit in float64 turns one of theirs over.
    """
    seen = {}
    for share in (0.0, packing.MOST_READ):
        monkeypatch.setattr(packing, "MOST_READ", share)
        model = random_model(family, torch.float64 if kind == "float64" else torch.float32)
        sizes: list[int] = []
        for layer in model.model.layers:
            monkeypatch.setattr(layer.mlp.down_proj, "forward", counting(layer.mlp.down_proj, sizes))
        if kind == "lora":
            model = add_adapter(model)
        forward = Forward(model)
        sizes.clear()
        outputs = weighted_backward(forward, long_prompts(), [model] if kind == "checkpointed" else [])
        assert sizes == ([384] * 4 if kind == "checkpointed" else [384, 384 if share == 0.0 else 128])
        seen[share] = (outputs.logprobs.detach(), outputs.entropy, gradients(model))
    whole, part = seen.values()
    assert_close(whole[0], part[0], atol=LOGPROBS, rtol=0)
    assert_close(whole[1], part[1], atol=LOGPROBS, rtol=0)
    assert relative_difference(whole[2], part[2]) == approx(0.0, abs=LOGPROBS)


def counting(module: torch.nn.Module, sizes: list[int]) -> Callable[[Tensor], Tensor]:
    """The module's own forward pass, with a note of the number of tokens."""

    def forward(x: Tensor) -> Tensor:
        sizes.append(x.shape[1])
        return type(module).forward(module, x)

    return forward


def test_what_is_not_known_exactly_is_left_alone():
    for family in ("gpt2", "olmo2"):
        assert FusedLayers(random_model(family)).replaced == []
    model = random_model("llama")
    norms = len(FusedLayers(model).replaced)
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: None)

    class Other(type(model.model.layers[0].mlp)):
        """A class of somebody else's."""

    model.model.layers[1].mlp.__class__ = Other
    assert len(FusedLayers(model).replaced) == norms - 2
    model.model.layers[-1].register_forward_pre_hook(lambda *_: None)
    assert len(FusedLayers(model).replaced) == norms - 3  # a hook of the last layer sees it whole


def test_the_modules_are_as_they_were_outside_of_a_pass():
    model = random_model("qwen3")
    Forward(model)(ragged_batch())
    assert not any("forward" in vars(module) for module in model.modules())
    copy.deepcopy(model)


def test_casts_of_adapters_are_off_inside_of_autocast_and_as_they_were_outside():
    model, batch = add_adapter(random_model("qwen3", torch.bfloat16)), ragged_batch()
    layers = [module for module in model.modules() if hasattr(module, "cast_input_dtype_enabled")]
    forward, inside = Forward(model, precision="bf16"), list[bool]()
    layers[0].cast_input_dtype_enabled = False
    hook = layers[1].register_forward_pre_hook(lambda module, _: inside.append(module.cast_input_dtype_enabled))
    forward(batch)
    hook.remove()
    assert inside == [False]
    assert [layer.cast_input_dtype_enabled for layer in layers] == [False, *[True] * (len(layers) - 1)]


def test_a_model_ends_with_the_last_that_names_it():
    model = random_model("qwen3")
    gone = weakref.ref(model)
    gc.disable()
    try:
        forward = Forward(model)
        forward(ragged_batch())
        del forward, model
        assert gone() is None
    finally:
        gc.enable()
