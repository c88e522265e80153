"""The layers of an update by the native kernel: against float64 and the plain path, in models, and in runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_models import CONFIGS, SHAPE, add_adapter, gradients, ragged_batch, relative_difference, weighted_backward
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from posttrain.models.forward import fused
from posttrain.models.forward.attention import attend
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.packing import Packing, pack
from posttrain.models.heads import ScalarHead
from posttrain.models.kernel import build
from posttrain.types import Sample, collate
from small_runs import make_recipe, recorded, run, same_bits, saved_tensors

WIDE = SHAPE | {"hidden_size": 128}  # heads of 32
FAMILIES = {
    "qwen3": lambda: Qwen3Config(**WIDE, head_dim=32, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**WIDE),
    "llama": lambda: LlamaConfig(**WIDE),
}
Function = Callable[..., Tensor]


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def passes(function: Function, arguments: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    """The result, and the gradients of all arguments that it depends on."""
    own = [x.detach().clone().to(dtype).requires_grad_() if x.is_floating_point() else x for x in arguments]
    out = function(*own)
    out.backward(numbers(*out.shape, seed=9).to(dtype))
    return [out.detach(), *(x.grad for x in own if x.is_floating_point())]


def assert_close_to_float64(native: Function, plain: Function, *arguments: Tensor) -> None:
    """Both passes are as near to those in float64 as rounding allows, and as the plain path in fp32 is."""
    exact = passes(plain, arguments, torch.float64)
    rounded, ours = passes(plain, arguments, torch.float32), passes(native, arguments, torch.float32)
    for x, theirs, expected in zip(ours, rounded, exact, strict=True):
        size, error = max(1.0, float(expected.abs().max())), float((x - expected).abs().max())
        assert error <= 2e-6 * size
        assert error <= 2 * float((theirs - expected).abs().max()) + 4e-7 * size


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Any:
    own = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(own)


@pytest.mark.parametrize("dim", [1, 7, 16, 40, 128, 500])
def test_rms_norm(native_kernel: str, threads: int, dim: int) -> None:
    from posttrain.models.kernel import layers

    rows = 200_000 // dim if dim > 1 else 4000
    native, plain = (lambda x, w, kind=kind: kind.apply(x, w, 1e-5) for kind in (layers.RmsNorm, fused.RmsNorm))
    assert_close_to_float64(native, plain, numbers(3, rows // 3, dim), numbers(dim, seed=1))
    frozen, x = numbers(dim, seed=1), numbers(5, dim).requires_grad_()
    layers.RmsNorm.apply(x, frozen, 1e-5).sum().backward()
    assert x.grad is not None
    assert frozen.grad is None


@pytest.mark.parametrize(("heads", "dim"), [(1, 2), (4, 32), (3, 20), (2, 128)])
def test_rotary_embedding(native_kernel: str, threads: int, heads: int, dim: int) -> None:
    from posttrain.models.kernel import layers

    tokens = 300_000 // (heads * dim)
    angles = numbers(tokens, dim, seed=2, scale=3.0)
    cos, sin = angles.cos(), angles.sin()

    def rotated(x: Tensor) -> Tensor:
        return fused.Rotate.apply(x, cos[:, None].to(x.dtype), sin[:, None].to(x.dtype))

    x, weight = numbers(tokens, heads, dim), numbers(dim, seed=3)
    assert_close_to_float64(lambda x: layers.Rotate.apply(x, cos, sin, None, 0.0), rotated, x)
    assert_close_to_float64(
        lambda x, w: layers.Rotate.apply(x, cos, sin, w, 1e-5),
        lambda x, w: rotated(fused.RmsNorm.apply(x, w, 1e-5)),
        x,
        weight,
    )


@pytest.mark.parametrize("size", [1, 15, 700_001])
def test_swiglu(native_kernel: str, threads: int, size: int) -> None:
    from posttrain.models.kernel import layers

    gate, up = numbers(size, scale=20.0), numbers(size, seed=1)
    assert_close_to_float64(layers.SwiGlu.apply, fused.SwiGlu.apply, gate, up)
    ends = torch.tensor([-200.0, -87.5, 0.0, 200.0, torch.inf, torch.nan])
    results = layers.SwiGlu.apply(ends, torch.ones(6)).tolist()
    assert results[:5] == [0.0, pytest.approx(0.0, abs=1e-35), 0.0, 200.0, torch.inf]
    assert results[5] != results[5]


@pytest.mark.parametrize("size", [2, 31, 512, 5000])
def test_scores_of_tokens(native_kernel: str, threads: int, size: int) -> None:
    from posttrain.models.kernel import layers

    rows = max(3, 400_000 // size)
    logits = numbers(rows, size, scale=6.0)
    ids = torch.randint(0, size, (rows, 3), generator=torch.Generator().manual_seed(1))
    native, plain = (
        lambda z, kind=kind: kind.apply(z, ids, True)[0] for kind in (layers.TokenScores, fused.TokenScores)
    )
    assert_close_to_float64(native, plain, logits)
    exact = fused.TokenScores.apply(logits.double(), ids, True)[1]
    assert float((layers.TokenScores.apply(logits, ids, True)[1] - exact).abs().max()) < 3e-6
    assert layers.TokenScores.apply(logits, ids, False)[1] is None


def test_scores_at_the_ends(native_kernel: str) -> None:
    """What cannot occur adds nothing to the entropy, what is no number stays none, an id that is none is refused."""
    from posttrain.models.kernel.layers import TokenScores

    logits = torch.tensor([[1000.0, 1000.0, -torch.inf], [0.0, torch.nan, 1.0]])
    logprobs, entropy = TokenScores.apply(logits, torch.tensor([[1, 2], [0, 0]]), True)
    assert logprobs[0].tolist() == [pytest.approx(-0.693147, abs=1e-6), -torch.inf]
    assert entropy[0].item() == pytest.approx(0.693147, abs=1e-6)
    assert logprobs[1].isnan().all()
    assert entropy[1].isnan()
    for wrong in (3, -1):
        with pytest.raises(IndexError, match="of 3 logits each"):
            TokenScores.apply(logits, torch.tensor([[0], [wrong]]), False)


def packing_of(groups: list[tuple[int, list[int]]]) -> Packing:
    """Groups of rows: (tokens of the prompt that they share, tokens of each answer)."""
    rows = [
        Sample([1] * prompt + [2] * n, [False] * prompt + [True] * n, group=g, prefix=prompt)
        for g, (prompt, answers) in enumerate(groups)
        for n in answers
    ]
    return pack(collate(rows))


def assert_attends(packing: Packing, heads: tuple[int, int], dim: int, seed: int) -> None:
    from posttrain.models.kernel.layers import PackedAttention

    n, (queries, keys) = len(packing.tokens), heads
    streams = [numbers(n, h, dim, seed=seed + i) for i, h in enumerate((queries, keys, keys))]
    real = torch.arange(n)[:, None, None] < packing.num_tokens

    def native(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = PackedAttention.apply(q, k, v, packing.table, packing.num_tokens, dim**-0.5)
        assert bool((out[packing.num_tokens :] == 0).all())
        return out * real

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(packing, q, k, v, dim**-0.5, 0.0, None)[0] * real

    assert_close_to_float64(native, plain, *streams)


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 1)])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_packed_attention(native_kernel: str, threads: int, heads: tuple[int, int], dim: int) -> None:
    """Runs below and above a table's rows, of one token, prompts that rows share and that one row has alone."""
    groups = [(3, [1, 7, 48, 49]), (70, [150, 2]), (1, [47, 1, 1]), (9, [130]), (2, [1]), (50, [6, 5, 12, 96])]
    assert_attends(packing_of(groups), heads, dim, seed=0)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(case=st.data())
def test_packed_attention_of_any_runs(native_kernel: str, case: st.DataObject) -> None:
    lengths = st.integers(1, 60)
    groups = case.draw(st.lists(st.tuples(lengths, st.lists(lengths, min_size=1, max_size=4)), min_size=1, max_size=4))
    assert_attends(packing_of(groups), case.draw(st.sampled_from([(2, 1), (4, 4)])), 32, case.draw(st.integers(0, 99)))


def test_bits_of_attention_do_not_depend_on_the_number_of_threads(native_kernel: str) -> None:
    from posttrain.models.kernel.layers import PackedAttention

    packing, own = packing_of([(30, [80, 60, 9]), (4, [120])]), torch.get_num_threads()
    streams = tuple(numbers(len(packing.tokens), h, 32, seed=h) for h in (4, 2, 2))
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(
                passes(
                    lambda *x: PackedAttention.apply(*x, packing.table, packing.num_tokens, 0.2), streams, torch.float32
                )
            )
    finally:
        torch.set_num_threads(own)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def wide_model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]()).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(2.0)
    return model


@pytest.fixture
def calls(native_kernel: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which functions of the kernel are called."""
    from posttrain.models.kernel import layers

    names, call = list[str](), layers._call

    def noted(name: str, *arguments: Any) -> None:
        names.append(name)
        call(name, *arguments)

    monkeypatch.setattr(layers, "_call", noted)
    return names


@pytest.mark.parametrize("kind", ["plain", "lora", "checkpointed", "with a head"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_models_give_what_their_own_modules_give(
    calls: list[str], family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities, entropies, scores and all gradients within 1e-5 of the plain path."""
    seen = {}
    for native in (False, True):
        monkeypatch.setattr(fused, "ENABLED", native)
        model = wide_model(family)
        if kind == "lora":
            model = add_adapter(model)
        head = ScalarHead(128, init_std=0.5) if kind == "with a head" else None
        forward, batch = Forward(model, 0.7, head, native_kernel=native), ragged_batch()
        assert (forward.path, forward.native_kernel) == ("packed", native)
        calls.clear()
        outputs = weighted_backward(forward, batch, [model] if kind == "checkpointed" else [])
        again = 2 if kind == "checkpointed" else 1
        expected = {"rotate": 4 * again, "packed_attention": 2 * again, "swiglu": 2 * again, "token_scores": 1}
        expected |= {f"{name}_backward": 1 if name == "token_scores" else expected[name] // again for name in expected}
        assert {name: calls.count(name) for name in expected} == (expected if native else dict.fromkeys(expected, 0))
        scores = torch.zeros(()) if outputs.scores is None else outputs.scores.detach()
        seen[native] = (outputs.logprobs.detach(), outputs.entropy, scores, gradients(model))
    assert all(float((a - b).abs().max()) < 1e-5 for a, b in zip(seen[True][:3], seen[False][:3], strict=True))
    assert relative_difference(seen[True][3], seen[False][3]) < 1e-5


def test_other_types_and_sizes_run_as_they_are(calls: list[str]) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        model, batch = wide_model("qwen3", dtype), ragged_batch()
        plain, native = (Forward(model, native_kernel=asked)(batch).logprobs.detach() for asked in (False, True))
        assert torch.equal(plain, native) if dtype == torch.float64 else (plain - native).abs().max() < 1e-5
        assert set(calls) <= {"token_scores"}  # of logits, which are fp32 for a model in bfloat16
        calls.clear()
    torch.manual_seed(0)
    heads_of_eight = AutoModelForCausalLM.from_config(CONFIGS["qwen3"]()).eval()
    forward = Forward(heads_of_eight, native_kernel=True)
    forward(ragged_batch())
    assert (forward.path, "rotate" in calls, "packed_attention" in calls) == ("packed", True, False)


@pytest.mark.parametrize("kind", ["grpo", "sft", "judged"])
def test_a_run_with_the_kernel_goes_on_bit_for_bit(native_kernel: str, tmp_path: Path, kind: str) -> None:
    recipe = make_recipe(kind, train={"steps": 3, "native_kernel": True})
    run(tmp_path / "whole", recipe)
    run(tmp_path / "cut", recipe, stop_after=1)
    run(tmp_path / "cut", recipe, resume=True)
    assert same_bits(saved_tensors(tmp_path / "whole", 3), saved_tensors(tmp_path / "cut", 3))
    assert recorded(tmp_path / "whole") == recorded(tmp_path / "cut")
    state = json.loads((tmp_path / "cut" / "checkpoints" / "step-000003" / "state.json").read_text())
    assert state["native_kernel"] == native_kernel
    run(tmp_path / "plain", make_recipe(kind, train={"steps": 3}))
    plain, native = saved_tensors(tmp_path / "plain", 3), saved_tensors(tmp_path / "whole", 3)
    weights = [key for key in plain if key.startswith("model.safetensors:")]
    assert weights
    assert not same_bits(plain, native)
    assert max(float((plain[key] - native[key]).abs().max()) for key in weights) < 2e-4


def test_a_run_that_asks_for_it_and_has_no_compiler_is_as_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(build, "_in_use", None)
    build._find.cache_clear()
    run(tmp_path / "asked", make_recipe("sft", train={"steps": 2, "native_kernel": True}))
    build._find.cache_clear()
    run(tmp_path / "plain", make_recipe("sft", train={"steps": 2}))
    assert same_bits(saved_tensors(tmp_path / "asked", 2), saved_tensors(tmp_path / "plain", 2))
