"""Attention without masks: the layout that kernels of a GPU are given, computed here by a loop that stands in for them.

The kernels themselves are asked in ``tests/gpu``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import gradients, ragged_batch, random_model, relative_difference, weighted_backward
from test_buckets import RAGGED, attention_of_each_run, very_ragged_batch
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM

from closeness import allclose, approx, assert_close
from looped_attention import looped
from posttrain.models.forward import attention
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.packing import PackedRun, Packing, plan_spans
from posttrain.types import Batch
from refusing import refuses


@pytest.fixture
def fake_kernel(monkeypatch: pytest.MonkeyPatch) -> list[Packing]:
    """Packed attention as on a GPU, with the loop for a kernel. The packings that it was asked for, call by call."""
    calls = []

    def varlen(packing: Packing, *sides: Any) -> Tensor:
        calls.append(packing)
        return attention.varlen(packing, *sides)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", looped)
    monkeypatch.setattr(attention, "unmasked_kernel", lambda *_: varlen)
    return calls


def packing_of(runs: list[PackedRun], num_tokens: int) -> Packing:
    stream = torch.zeros(-(-num_tokens // 128) * 128, dtype=torch.long)
    return Packing(stream, stream, num_tokens, tuple(runs), stream, None, stream, 0, stream)


def sides_of(length: int, heads: int, key_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    sizes = (heads, key_heads, key_heads)
    return [torch.randn(length, n, 8, dtype=dtype, generator=rng).requires_grad_() for n in sizes]


def test_spans_worked_by_hand():
    """A prompt of two tokens, answers of two, none and one behind it, and a row alone."""
    runs = [PackedRun(0, 2), PackedRun(2, 2, 0, 2), PackedRun(4, 0, 0, 2), PackedRun(4, 1, 0, 2), PackedRun(5, 3)]
    spans = plan_spans(runs)
    assert spans.query_starts.tolist() == [0, 2, 4, 5, 8]
    assert spans.key_starts.tolist() == [0, 2, 6, 9, 12]
    assert spans.keys is not None
    assert spans.keys.tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 4, 5, 6, 7]
    assert (spans.most_queries, spans.most_keys) == (3, 4)
    alone = plan_spans([PackedRun(0, 2), PackedRun(2, 5)])
    assert alone.keys is None
    assert torch.equal(alone.query_starts, alone.key_starts)


@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention_and_gradients_are_those_of_each_run(key_heads: int, fake_kernel: list[Packing]):
    total = sum(r.length for r in RAGGED)
    packing = packing_of(RAGGED, total)
    found = []
    for work in ("runs", "spans"):
        q, k, v = sides_of(len(packing.tokens), 4, key_heads)
        if work == "runs":
            k4, v4 = (x.repeat_interleave(4 // key_heads, 1) for x in (k, v))
            out = attention_of_each_run(RAGGED, q, k4, v4)
        else:
            out = attention.attend(packing, q, k, v, None, 0.0, None)[0]
        (out[:total] * torch.linspace(0.5, 1.5, total)[:, None, None]).sum().backward()
        found.append([out[:total].detach(), q.grad, k.grad, v.grad])
    assert len(fake_kernel) == 1
    for one, other in zip(*found, strict=True):
        assert allclose(one, other, rtol=0, atol=1e-11)


def both_ways(
    family: str, batch: Batch, switch: Callable[[], None], dtype: torch.dtype = torch.float64
) -> list[tuple[Tensor, Tensor]]:
    """Log-probabilities and gradients, under masks, and after ``switch``."""
    model = random_model(family, dtype)
    found = []
    for ask in (lambda: None, switch):
        ask()
        forward = Forward(model)
        assert forward.path == "packed"
        model.zero_grad()
        logprobs = forward(batch).logprobs
        (logprobs * torch.linspace(0.5, 1.5, batch.mask.shape[1])).sum().backward()
        found.append((logprobs.detach(), gradients(model)))
    return found


@pytest.mark.parametrize(("family", "long"), [("qwen3", True), ("gpt2", False), ("olmo2", False)])
def test_the_forward_pass_is_that_of_the_masks(
    family: str, long: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    """Prompts shared and not, key heads shared (all but gpt2); in float64, where only gpt2's norms compute throughout:
    in the others' fp32 norms a last bit may become one of fp32."""
    batch = ragged_batch() if long is False or family == "gpt2" else very_ragged_batch()
    masked, spans = both_ways(family, batch, lambda: request.getfixturevalue("fake_kernel"))
    tolerance = 1e-10 if family == "gpt2" else 1e-6
    assert_close(masked[0], spans[0], atol=tolerance, rtol=0)
    assert relative_difference(spans[1], masked[1]) == approx(0.0, abs=tolerance)
    assert len(request.getfixturevalue("fake_kernel")) > 0


def test_activations_computed_again_take_the_same_way(fake_kernel: list[Packing]):
    model, batch = random_model("qwen3"), ragged_batch()
    forward = Forward(model)
    found = []
    for recomputed in ([], [model]):
        model.zero_grad()
        fake_kernel.clear()
        weighted_backward(forward, batch, recomputed)
        found.append((len(fake_kernel), gradients(model)))
    assert [calls for calls, _ in found] == [2, 4]
    assert torch.equal(found[0][1], found[1][1])


def test_a_window_that_rows_outgrow_takes_the_padded_path(fake_kernel: list[Packing]):
    """The one window of attention that the layout does not know; up to its width it hides nothing."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**sizes, num_key_value_heads=2, intermediate_size=48, sliding_window=14))
    forward = Forward(model.eval())
    short, long = ragged_batch(groups=1), ragged_batch()
    assert forward.path == "packed"
    assert (forward.packs(short), forward.packs(long)) == (True, False)
    fake_kernel.clear()
    forward(long)
    assert fake_kernel == []
    forward(short)
    assert len(fake_kernel) == 1
    q, k, v = sides_of(128, 4, 2)
    with refuses(AssertionError, "than the attention"):
        attention.attend(packing_of([PackedRun(0, 4), PackedRun(4, 11, 0, 4)], 15), q, k, v, None, 0.0, 14)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_products_in_bfloat16_attend_in_bfloat16(precision: Any, fake_kernel: list[Packing], monkeypatch: Any):
    seen = set()
    plain = attention.varlen
    monkeypatch.setattr(attention, "varlen", lambda p, *x: seen.update(y.dtype for y in x[:3]) or plain(p, *x))
    forward = Forward(random_model("qwen3"), precision=precision)
    seen.clear()
    forward(ragged_batch()).logprobs.sum().backward()
    assert seen == {torch.float32 if precision == "fp32" else torch.bfloat16}


def test_gradients_of_shared_keys_are_added_in_fp32():
    """512 runs see one key: in bfloat16 a sum of ones stops at 256."""
    stream = torch.zeros(3, 1, 2, dtype=torch.bfloat16, requires_grad=True)
    at = torch.tensor([1] * 512 + [2])
    attention.SharedKeys.apply(stream, at).sum().backward()
    assert stream.grad is not None
    assert stream.grad.dtype == torch.bfloat16
    assert stream.grad[:, 0, 0].tolist() == [0.0, 512.0, 1.0]


# -- which kernel ------------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")
SIZES = (torch.float32, 4, 2, 8)


def from_the_start(query: Tensor, key: Tensor, value: Tensor, *cu: Any, **options: Any) -> Tensor:
    """Causal from the start of queries and keys: a token behind a prompt would not see itself."""
    outputs = []
    for i in range(len(cu[0]) - 1):
        q, k, v = query[cu[0][i] : cu[0][i + 1]], *(x[cu[1][i] : cu[1][i + 1]] for x in (key, value))
        k, v = attention.each_query_its_keys(q, k, v)
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(1)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(outputs)


def without_gradient_of_values(
    query: Tensor, key: Tensor, value: Tensor, *cu: Any, enable_gqa: bool = False, **options: Any
) -> Tensor:
    return looped(query, key, value + (value.detach() - value) * 0.5, *cu, enable_gqa=enable_gqa, **options)


def ampere_only(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


@pytest.mark.parametrize(
    ("kernel", "correct"),
    [(looped, True), (from_the_start, False), (without_gradient_of_values, False), (ampere_only, False)],
)
def test_a_kernel_is_tried_before_it_is_used(kernel: Any, correct: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    assert attention.is_correct(attention.varlen, CPU, *SIZES) is correct


def test_varlen_torch_without_enable_gqa_repeats_key_heads(monkeypatch: pytest.MonkeyPatch):
    def older(query: Any, key: Any, value: Any, *cu: Any, scale: Any = None, window_size: Any = None) -> Tensor:
        assert key.shape[1] == query.shape[1]
        return looped(query, key, value, *cu, scale=scale, window_size=window_size, enable_gqa=False)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", older)
    attention.kernel_for.cache_clear()
    assert attention.kernel_for(CPU, *SIZES) is attention.varlen
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", ampere_only)
    assert attention.kernel_for(CPU, *SIZES) is attention.varlen, "it is tried once"
    attention.kernel_for.cache_clear()
    assert attention.kernel_for(CPU, *SIZES) is None
    attention.kernel_for.cache_clear()


def test_the_cpu_attends_under_masks_and_imports_no_kernel(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "kernel_for", ampere_only)
    monkeypatch.setattr(attention, "_computed_in", lambda q: q.dtype)
    q, k, v = sides_of(8, 4, 2)
    assert attention.unmasked_kernel(q, k, v, 0.0) is None
    on_gpu = [x.detach().to("meta") for x in (q, k, v)]
    assert attention.unmasked_kernel(*on_gpu, 0.1) is None, "no kernel has dropout"
    with refuses(RuntimeError, "Ampere"):
        attention.unmasked_kernel(*on_gpu, 0.0)


def test_a_mask_on_a_gpu_meets_no_shared_heads(monkeypatch: pytest.MonkeyPatch):
    """A mask together with ``enable_gqa`` would leave what writes the scores out, or cuDNN."""
    request = []
    plain = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        attention.F, "scaled_dot_product_attention", lambda *x, **o: request.append((x, o)) or plain(*x)
    )
    q, k = torch.zeros(2, 4, 3, 8, device="meta"), torch.zeros(2, 2, 5, 8, device="meta")
    mask = torch.ones(2, 1, 3, 5, dtype=torch.bool, device="meta")
    attention._sdpa(q, k, k, mask, None, 0.0)
    (((_, keys, values), options),) = request
    assert keys.shape == values.shape == (2, 4, 5, 8)
    assert options["enable_gqa"] is False
