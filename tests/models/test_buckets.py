"""Buckets of runs: every token once, little padding, and the attention of each run alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from small_models import gradients, random_model, relative_difference
from torch import Tensor

from closeness import allclose, approx, assert_close
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.packing import MIN_TOKENS, PackedRun, pack, plan_buckets
from posttrain.types import Batch, Sample, collate


def stream_of(prefixes: list[int], rows: list[tuple[int, int]]) -> list[PackedRun]:
    """Prefixes of these lengths, then rows (own length, index of the prefix or -1), one behind the other."""
    runs, at = [], 0
    for n in prefixes:
        runs.append(PackedRun(at, n))
        at += n
    for n, parent in rows:
        runs.append(PackedRun(at, n) if parent < 0 else PackedRun(at, n, runs[parent].start, runs[parent].length))
        at += n
    return runs


RAGGED = stream_of([3, 400, 40], [(900, -1), (5, 0), (300, 1), (2, 1), (0, 1), (700, -1), (31, 2), (30, 2), (1, -1)])


def test_worked_by_hand():
    """A prefix of two tokens, and behind it a run of two and a run of one: small, so one rectangle for both."""
    buckets, order = plan_buckets([PackedRun(0, 2), PackedRun(2, 2, 0, 2), PackedRun(4, 1, 0, 2)])
    assert order is None
    prompt, behind = buckets
    assert (prompt.num_runs, prompt.queries.tolist(), prompt.keys.tolist()) == (1, [0, 1], [0, 1])
    assert prompt.allowed is None
    assert behind.queries.tolist() == [2, 3, 4, 4]
    assert behind.keys is not None
    assert behind.keys.tolist() == [0, 1, 2, 3, 0, 1, 4, 4]
    assert behind.filled.tolist() == [0, 1, 2]
    assert behind.allowed is not None
    assert behind.allowed[0, 0].tolist() == [[True, True, True, False], [True, True, True, True]]
    assert behind.allowed[1, 0].tolist() == [[True, True, True, False], [True, True, True, True]]


def test_long_and_short_runs_part_and_the_waste_is_bounded():
    lengths = [2000, 1900, *[100] * 40, *[10] * 100]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    buckets, _ = plan_buckets([PackedRun(s, n) for s, n in zip(starts, lengths, strict=True)])
    # ten of the short ones fill up what the forty may waste: 50 * 100^2 <= 1.25 * (40 * 100^2 + 10 * 10^2)
    assert [b.num_runs for b in buckets] == [2, 50, 90]
    worst = stream_of([], [(n, -1) for n in range(1, 300)])
    padded = sum(b.num_runs * (b.queries.numel() // b.num_runs) ** 2 for b in plan_buckets(worst)[0])
    needed = sum(r.work for r in worst)
    assert needed < padded < 1.25 * needed + 4 * MIN_TOKENS * 30, "the last bucket may be small and ragged"


def attention_of_each_run(runs: list[PackedRun], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``[N, H, D]``, one run at a time, with a mask written out."""
    out = torch.zeros_like(q)
    for r in runs:
        before = torch.arange(r.prefix_start, r.prefix_start + r.prefix_length)
        own = torch.arange(r.start, r.start + r.length)
        keys = torch.cat([before, own])
        hidden = torch.arange(len(keys)) > r.prefix_length + torch.arange(r.length)[:, None]
        scores = torch.einsum("qhd,khd->hqk", q[own], k[keys]) / q.shape[-1] ** 0.5
        out[own] = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v[keys])
    return out


def test_attention_in_buckets_is_that_of_each_run():
    total = sum(r.length for r in RAGGED)
    q, k, v = torch.randn(3, total, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    buckets, order = plan_buckets(RAGGED)
    parts = []
    for b in buckets:
        keys = b.keys
        picked = ((q, b.queries), (k, keys), (v, keys))
        views = [x[at].unflatten(0, (b.num_runs, -1)).transpose(1, 2) for x, at in picked]
        own = F.scaled_dot_product_attention(*views, attn_mask=b.allowed, is_causal=b.allowed is None)
        parts.append(own.transpose(1, 2).flatten(0, 1)[b.filled])
    assert order is not None
    assert allclose(torch.cat(parts)[order], attention_of_each_run(RAGGED, q, k, v), atol=1e-12)


LONG = stream_of([3, 40], [(90, 0), (61, 1), (77, 1), (90, 0), (64, 1)])


def very_ragged_batch() -> Batch:
    """Answers of 2 to 90 tokens to shared prompts of 3 to 60, enough tokens for several buckets of either kind."""
    rng = torch.Generator().manual_seed(1)
    samples = []
    for group in range(24):
        prompt = torch.randint(5, 60, (3 + 57 * (group % 4) // 3,), generator=rng).tolist()
        for row in range(2):
            answer = torch.randint(5, 60, (2 + (11 * group + 40 * row) % 89,), generator=rng).tolist()
            mask = [False] * len(prompt) + [True] * len(answer)
            samples.append(Sample(prompt + answer, mask, group=group, prefix=len(prompt)))
    return collate(samples)


def test_the_forward_pass_and_its_gradients_do_not_notice():
    model = random_model("qwen3")
    batch = very_ragged_batch()
    packing = pack(batch)
    assert len(packing.rectangles[0]) >= 4
    assert packing.rectangles[1] is not None
    found = {}
    for path in ("packed", "padded"):
        forward = Forward(model)
        assert forward.path == "packed"
        forward.path = path
        model.zero_grad()
        outputs = forward(batch)
        (outputs.logprobs * torch.linspace(0.5, 1.5, batch.mask.shape[1])).sum().backward()
        found[path] = (outputs.logprobs.detach(), gradients(model), forward.last_slots / forward.last_tokens)
    assert_close(found["packed"][0], found["padded"][0], atol=1e-5, rtol=0)
    assert relative_difference(found["packed"][1], found["padded"][1]) == approx(0.0, abs=1e-5)
    assert found["packed"][2] < 1.35 < 1.75 < found["padded"][2], "slots of attention for each token"
