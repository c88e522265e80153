"""Sampling from pages against sampling from the contiguous cache: the same tokens, whatever the pages are."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from engines.respondents import Scripted, wordy
from looped_attention import looped
from posttrain import registry
from posttrain.engines.base import Sampling
from posttrain.engines.native import schedule
from posttrain.engines.native.engine import NativeEngine
from posttrain.engines.native.lean import LeanDecoder
from posttrain.engines.native.paged import attention, steps
from posttrain.engines.native.paged.attention import PageView, attention_for, gathered, is_right, written_out
from posttrain.engines.native.paged.pool import Pool
from posttrain.engines.native.paged.schedule import PagedSchedule
from posttrain.engines.native.paged.steps import Steps
from posttrain.engines.native.prefixes import LayerShape
from posttrain.engines.native.sampler import uniform_numbers
from posttrain.errors import EngineMismatch, RunFailure, UsageError
from posttrain.models.lora import apply_adapter
from posttrain.randomness import derive_key, uniforms
from posttrain.recipes.sections import AdapterSection
from tiny_random import build_tiny_random

STOPS = frozenset(range(4))
PAGE = attention.PAGE_SIZE
MODEL = build_tiny_random("qwen3").double()  # in fp32 Hypothesis finds draws within 3e-8 of the border of two tokens


def work(lengths: tuple[int, ...] = (5, 1, 40, 17, 33), group: int = 4, seed: int = 1) -> tuple[Any, Any]:
    """Prompts of these lengths and the keys of their rows."""
    numbers = np.random.default_rng(seed)
    prompts = [numbers.integers(8, 300, n).tolist() for n in lengths]
    return prompts, [[derive_key(seed, "test", i, j) for j in range(group)] for i in range(len(prompts))]


def said(completions: Any) -> list[list[tuple[Any, str]]]:
    return [[(c.ids, c.finish) for c in group] for group in completions]


def largest_difference(found: Any, expected: Any) -> float:
    pairs = ((a, b) for f, e in zip(found, expected, strict=True) for a, b in zip(f, e, strict=True))
    return max(abs(x - y) for a, b in pairs for x, y in zip(a.logprobs, b.logprobs, strict=True))


def both(model: Any, sampling: Sampling, *, work: Any, **options: Any) -> tuple[NativeEngine, Any]:
    """The engine over pages and what it said, which is what the one over the contiguous cache says."""
    prompts, keys = work
    expected = NativeEngine(model, slots=options.get("slots", 64)).generate(prompts, keys, sampling)
    engine = NativeEngine(model, cache="paged", **options)
    found = engine.generate(prompts, keys, sampling)
    assert said(found) == said(expected)
    assert largest_difference(found, expected) <= 1e-5
    assert engine.path == "lean"
    return engine, found


def pool_of(engine: NativeEngine) -> Pool:
    assert engine.paging is not None
    assert engine.paging._kept is not None
    return engine.paging._kept.pool


SHAPES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("qwen3", {}),  # norms of queries and keys, four query heads to two key heads
    ("qwen3", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    ("qwen3", {"head_dim": 128, "num_key_value_heads": 1}),
    ("qwen2", {"tie_word_embeddings": False}),  # biases
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
)


@pytest.mark.parametrize(("architecture", "shape"), SHAPES)
def test_tokens_are_those_of_the_contiguous_cache(architecture: str, shape: dict[str, Any]) -> None:
    model, sampling = build_tiny_random(architecture, **shape), Sampling(max_tokens=60, stop_ids=STOPS)
    for slots, tokens, is_tight in ((64, None, False), (3, None, False), (20, 400, True), (7, 112, True)):
        engine, found = both(model, sampling, work=work(), slots=slots, cache_tokens=tokens)
        assert {c.finish for group in found for c in group} == {"stop", "length"}
        assert engine.paging is not None
        assert (engine.paging.num_put_back > 0) == is_tight
        pool = pool_of(engine)
        assert pool.num_free == pool.num_pages
        assert not pool.references.any()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(30, temperature=0.0, stop_ids=STOPS),
        Sampling(30, temperature=0.7),
        Sampling(30, top_k=5, stop_ids=STOPS),
        Sampling(30, temperature=1.3, top_p=0.7, top_k=9),
        Sampling(200, max_total_tokens=60, stop_ids=STOPS),
    ],
)
def test_every_way_to_draw(sampling: Sampling) -> None:
    _, found = both(build_tiny_random("qwen3"), sampling, work=work(), slots=9, cache_tokens=240)
    assert all((len({c.ids for c in group}) == 1) == (sampling.temperature == 0.0) for group in found)


def test_answers_of_more_than_512_tokens_and_rows_of_several_lengths() -> None:
    model = build_tiny_random("qwen2", max_position_embeddings=1024)
    engine, found = both(model, Sampling(max_tokens=600, stop_ids=frozenset({4})), work=work((3, 300), 2), slots=3)
    assert max(len(c.ids) for group in found for c in group) > 512
    assert engine.paging is not None
    assert engine.paging.num_put_back == 0


def test_the_row_that_entered_last_is_put_back_when_pages_run_out() -> None:
    """Prompts of 17 tokens leave one page; by 40 more tokens a row has four. There are five pages for two rows.

    Both enter with two pages (16 tokens, 8 steps). After 16 tokens each needs a third and one is free: the first takes
    it, the second waits, until the first is done.
    """
    engine, _ = both(
        build_tiny_random("qwen3"), Sampling(max_tokens=40), work=work((17, 17), 1), slots=2, cache_tokens=5 * PAGE
    )
    assert engine.paging is not None
    assert engine.paging.num_put_back == 1
    assert pool_of(engine).num_pages == 5
    (notice,) = engine.take_notices()
    assert "1 rows were put back" in notice
    assert "of 80 tokens" in notice
    assert engine.take_notices() == []


@pytest.mark.parametrize(("limit", "pages", "times"), [(8, 3, 3), (40, 5, 2)])
def test_a_prompt_is_not_kept_for_others_where_one_row_needs_all_pages(
    monkeypatch: pytest.MonkeyPatch, limit: int, pages: int, times: int
) -> None:
    """41 tokens, of which 40 are read: two pages and half a third, and in the end as many pages as there are.

    Eight more tokens fill the third, so that none is left for a copy. With 40 more the copy is given up on the way.
    """
    read: list[int] = []
    prefill = LeanDecoder.prefill
    engine = NativeEngine(MODEL, slots=1, cache="paged", cache_tokens=pages * PAGE)
    assert engine.path == "lean"
    monkeypatch.setattr(LeanDecoder, "prefill", lambda self, ids: read.extend(map(len, ids)) or prefill(self, ids))
    prompts, keys = work((41,), times)
    found = engine.generate(prompts, keys, Sampling(limit))
    assert engine.paging is not None
    assert engine.paging.num_put_back == 0
    assert read == [40] * times
    monkeypatch.undo()
    assert said(found) == said(NativeEngine(MODEL).generate(prompts, keys, Sampling(limit)))


def test_a_row_that_enters_again_shares_its_prompt_with_those_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 tokens: two full pages, which are there; what is behind them is read again, up to the last token drawn."""
    read: list[tuple[int, int]] = []
    fill = Pool.fill
    monkeypatch.setattr(
        Pool, "fill", lambda self, p, all_: read.extend((r.start, len(r.ids)) for r in all_) or fill(self, p, all_)
    )
    sampling = Sampling(60, stop_ids=frozenset(range(8)))
    engine, found = both(build_tiny_random("qwen3"), sampling, work=work((40,), 12), slots=8, cache_tokens=12 * PAGE)
    assert engine.paging is not None
    again = [reading for reading in read if reading[1] > 39 and reading[0] > 0]  # the probe reads from 0
    assert len(again) == engine.paging.num_put_back > 0
    assert {start for start, _ in again} == {2 * PAGE}
    assert max(length for _, length in again) < 39 + max(len(c.ids) for c in found[0])


def test_a_prompts_full_pages_are_shared_and_its_last_one_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """41 tokens, the last of which is fed: two pages full and half a third. Three rows, each eight tokens further."""
    seen: list[tuple[list[int], np.ndarray]] = []
    copied: list[int] = []
    run, copy_pages = Steps.run, Pool.copy
    monkeypatch.setattr(
        Steps, "run", lambda self, table, n: seen.append(([*self.pool.references], table.copy())) or run(self, table, n)
    )
    monkeypatch.setattr(Pool, "copy", lambda self, a, b: copied.append(len(a)) or copy_pages(self, a, b))
    both(build_tiny_random("qwen3"), Sampling(max_tokens=8), work=work((41,), 3))
    [(references, table)] = seen
    assert sorted(references, reverse=True)[:6] == [3, 3, 1, 1, 1, 0]  # five pages and not nine
    assert copied == [2]  # the third row has the one that was read
    assert table.shape == (3, 3)
    assert len({tuple(row[:2]) for row in table}) == 1
    assert len({*table[:, 2]}) == 3


def test_a_prompt_is_read_once_for_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (prompts, keys) = build_tiny_random("qwen3"), work((6, 40, 9), 7)
    engine = NativeEngine(model, slots=3, cache="paged")
    assert engine.path == "lean"  # the probe's own prefill comes before the count
    seen: list[list[int]] = []
    prefill = LeanDecoder.prefill
    monkeypatch.setattr(LeanDecoder, "prefill", lambda self, ids: seen.extend(map(list, ids)) or prefill(self, ids))
    engine.generate(prompts, keys, Sampling(max_tokens=5, stop_ids=STOPS))
    assert sorted(seen) == sorted(prompt[:-1] for prompt in prompts)


def test_prompts_are_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of at most 50 tokens, the shorter ones filled up; a longer prompt is one of its own."""
    monkeypatch.setattr(schedule, "PREFILL_TOKENS", 50)
    model, (prompts, keys) = build_tiny_random("llama"), work((6, 4, 9, 30, 2, 60), 3)
    both(model, Sampling(max_tokens=6), work=(prompts, keys))
    engine = NativeEngine(model, cache="paged")
    assert engine.path == "lean"  # the probe's own prefill comes before the count
    chunks: list[list[int]] = []
    prefill = LeanDecoder.prefill
    monkeypatch.setattr(LeanDecoder, "prefill", lambda self, ids: chunks.append([*map(len, ids)]) or prefill(self, ids))
    engine.generate(prompts, keys, Sampling(max_tokens=6))
    assert sorted(n for chunk in chunks for n in chunk) == [1, 3, 5, 8, 29, 59]
    assert all(len(chunk) == 1 or len(chunk) * max(chunk) <= 50 for chunk in chunks)
    assert 1 < len(chunks) < len(prompts)


def test_a_batch_is_filled_up_to_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 slots for 30 rows: 20 rows, of which ten have 99 tokens behind them and feed 40, then ten short ones.

    After 24 steps the longest would have 131: more than the 128 tokens, or 8 pages, that are gathered at least.
    """
    sizes: Counter[tuple[int, int]] = Counter()
    step = Steps.step
    monkeypatch.setattr(Steps, "step", lambda self, *size: sizes.update([size]) or step(self, *size))
    both(build_tiny_random("qwen3"), Sampling(40), work=work((33, 100, 7), 10), slots=20)
    assert sizes == {(32, 8): 24, (32, 16): 16, (16, 8): 40}


def test_looking_every_few_steps_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: rows that end in between stay where they are."""
    init, run = PagedSchedule.__init__, Steps.run
    stopped: list[int] = []

    def watched(self: Steps, table: Any, num_steps: int) -> Any:
        before = self.state[1].clone()
        ids, logprobs = run(self, table, num_steps)
        for r in range(len(table)):
            until_stop = next((i for i, row in enumerate(ids) if row[r] in STOPS), None)
            if until_stop is not None:
                stopped.append(until_stop)
                assert int(self.state[1, r] - before[r]) == until_stop
        return ids, logprobs

    monkeypatch.setattr(Steps, "run", watched)

    def looks_seldom(self: Any, *args: Any) -> None:
        init(self, *args)
        self.look = 8

    monkeypatch.setattr(PagedSchedule, "__init__", looks_seldom)
    model = build_tiny_random("qwen3")
    both(model, Sampling(60, stop_ids=STOPS), work=work(), slots=6)
    engine, _ = both(model, Sampling(60, stop_ids=STOPS), work=work(), slots=20, cache_tokens=400)
    assert engine.paging is not None
    assert engine.paging.num_put_back > 0
    assert min(stopped) == 0 < max(stopped) < 8


@settings(max_examples=25, deadline=None)
@given(case=st.data())
def test_any_batch_in_any_number_of_small_pages(case: st.DataObject) -> None:
    """Pages of 4 tokens: every border of a page, a prompt and a look is met, and all pages come back."""
    lengths = tuple(case.draw(st.lists(st.integers(1, 14), min_size=1, max_size=4)))
    group, limit = case.draw(st.integers(1, 4)), case.draw(st.integers(1, 14))
    slots, look = case.draw(st.integers(1, 9)), case.draw(st.integers(1, 8))
    a_row = -(-(max(lengths) + limit - 1) // 4)
    tokens = 4 * case.draw(st.integers(a_row, 3 * a_row))
    stops = frozenset(range(case.draw(st.sampled_from([0, 4, 40]))))
    init = PagedSchedule.__init__

    def looks_so_often(self: Any, *args: Any) -> None:
        init(self, *args)
        self.look = look

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "PAGE_SIZE", 4)
        patch.setattr(PagedSchedule, "__init__", looks_so_often)
        attention_for.cache_clear()
        sampling = Sampling(limit, stop_ids=stops)
        engine, _ = both(MODEL, sampling, work=work(lengths, group), slots=slots, cache_tokens=tokens)
        pool = pool_of(engine)
        assert (pool.page_size, pool.num_free) == (4, pool.num_pages)
        assert pool.num_pages <= tokens // 4
    attention_for.cache_clear()


# -- fixed shapes: a step recorded once and replayed -------------------------------------------------------------------


class Recording(TorchDispatchMode):
    """The operations of one call with the very tensors that they read: what a CUDA graph keeps, in short."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        """The same operations again; what one made is what the others read."""
        made: dict[int, torch.Tensor] = {}
        for func, args, kwargs, out in self.calls:
            again = func(*_exchanged(args, made), **_exchanged(kwargs, made))
            for old, new in zip(_tensors(out), _tensors(again), strict=True):
                made[id(old)] = new


def _tensors(x: Any) -> list[torch.Tensor]:
    return [t for t in (x if isinstance(x, tuple | list) else [x]) if isinstance(t, torch.Tensor)]


def _exchanged(x: Any, made: dict[int, torch.Tensor]) -> Any:
    if isinstance(x, torch.Tensor):
        return made.get(id(x), x)
    if isinstance(x, list | tuple):
        return type(x)(_exchanged(y, made) for y in x)
    return {k: _exchanged(v, made) for k, v in x.items()} if isinstance(x, dict) else x


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recording]]:
    """Instead of a CUDA graph: the first call is recorded, and only its operations are run again afterwards."""
    made: list[Recording] = []

    def recorded(step: Callable[[], None], changed: Any, memory: Any) -> Callable[[], None]:
        before = [x.clone() for x in changed]
        with Recording() as recording:
            step()
        for tensor, old in zip(changed, before, strict=True):
            tensor.copy_(old)
        made.append(recording)
        return recording.replay

    monkeypatch.setattr(steps, "recorded", recorded)
    yield made
    names = {str(func) for recording in made for func, *_ in recording.calls}
    waits = {
        "aten._local_scalar_dense.default",
        "aten.nonzero.default",
        "aten.masked_select.default",
        "aten.is_nonzero",
    }
    assert names
    assert not names & waits


@pytest.mark.parametrize("sampling", [Sampling(40, stop_ids=STOPS), Sampling(40, temperature=0.8, top_p=0.9, top_k=50)])
def test_a_recorded_step_replayed_gives_the_same_tokens(recordings: list[Recording], sampling: Sampling) -> None:
    model = build_tiny_random("qwen3")
    engine, _ = both(model, sampling, work=work((33, 100, 7), 7), slots=20, cache_tokens=640)
    assert engine.paging is not None
    assert engine.paging.num_put_back > 0
    assert len(recordings) == len(engine.paging._kept._recorded) <= 6  # type: ignore[union-attr]


def test_what_was_recorded_reads_the_weights_of_today(recordings: list[Recording]) -> None:
    """Weights that an optimizer changed in place, norms of heads with them, are read by what stands; others are not."""
    model, (prompts, keys), sampling = build_tiny_random("qwen3"), work((9, 20), 4), Sampling(30, stop_ids=STOPS)
    engine = NativeEngine(model, cache="paged")

    def check() -> int:
        plain = NativeEngine(copy.deepcopy(model)).generate(prompts, keys, sampling)
        assert said(engine.generate(prompts, keys, sampling)) == said(plain)
        return len(recordings)

    first = check()
    assert check() == first
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.sin(torch.arange(parameter.numel(), dtype=torch.float32)).view_as(parameter))
    assert check() == first
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.1
    assert check() == 2 * first
    before = engine.generate(prompts, keys, sampling)
    others = engine.generate(prompts, keys, replace(sampling, temperature=0.5))
    assert said(others) == said(NativeEngine(model).generate(prompts, keys, replace(sampling, temperature=0.5)))
    assert said(others) != said(before)
    longer = replace(sampling, max_tokens=25)  # a limit is of a row and not of a step
    num_recorded = len(recordings)
    engine.generate(prompts, keys, replace(longer, temperature=0.5))
    assert len(recordings) == num_recorded


def test_eager_records_nothing(recordings: list[Recording]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "recorded", lambda *_: pytest.fail("nothing is to be recorded"))
        both(build_tiny_random("qwen3"), Sampling(10), work=work(), eager=True)
    both(build_tiny_random("qwen3"), Sampling(10), work=work())
    assert recordings


# -- parts -------------------------------------------------------------------------------------------------------------


def test_uniform_numbers_are_those_of_the_host_bit_for_bit() -> None:
    keys = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, *(derive_key(i, "bits") for i in range(50))]
    table = uniforms(keys, 300)
    wrapped = torch.from_numpy(np.array(keys, dtype=np.uint64).view(np.int64))
    for at in (0, 1, 17, 299):
        found = uniform_numbers(wrapped, torch.full((len(keys),), at))
        assert found.dtype == torch.float64
        assert found.tolist() == table[:, at].tolist()


@pytest.mark.parametrize(("heads", "key_heads", "head_dim"), [(4, 4, 16), (8, 2, 64), (6, 1, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gathered_attention_against_scores_written_out(
    heads: int, key_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    assert attention_for(torch.device("cpu"), dtype, heads, key_heads, head_dim) == (gathered, PAGE)
    assert is_right(gathered, PAGE, torch.device("cpu"), dtype, heads, key_heads, head_dim)


def test_written_out_scores_by_hand() -> None:
    """One head of size 1, pages of two tokens, three tokens of which the last is in page 1: scores 0, ln 2, ln 3."""
    pool = Pool([LayerShape(1, 1, 1, torch.float32)], 2, 2, torch.device("cpu"))
    pool.keys[0][2, :, 0, 0] = torch.tensor([0.0, 2.0]).log1p()  # ln 1, ln 3; the second is replaced below
    pool.keys[0][2, 1, 0, 0] = float(np.log(2))
    pool.values[0][2, :, 0, 0] = torch.tensor([6.0, 12.0])
    view = PageView(pool, gathered, torch.tensor([[2, 1]], dtype=torch.int32), torch.tensor([2]))
    q, k, v = (torch.tensor([[[x]]]) for x in (1.0, float(np.log(3)), 24.0))
    expected = (6 * 1 + 12 * 2 + 24 * 3) / 6
    assert float(view.attend(0, q, k, v, 1.0)) == pytest.approx(expected)
    assert float(written_out(q, pool.keys[0], pool.values[0], view, 1.0)) == pytest.approx(expected)
    assert float(pool.keys[0][1, 0, 0, 0]) == pytest.approx(np.log(3))


def test_a_kernel_that_is_wrong_or_refuses_is_not_taken() -> None:
    def looks_at_one_less(q: Any, keys: Any, values: Any, view: Any, scale: float) -> torch.Tensor:
        shorter = PageView(view.pool, gathered, view.table, (view.lengths.long() - 2).clamp(min=0))
        return gathered(q, keys, values, shorter, scale)

    def refuses(*_: Any) -> torch.Tensor:
        raise RuntimeError("Paged KV cache block size must be divisible by 256")

    where = (PAGE, torch.device("cpu"), torch.float32, 4, 2, 16)
    assert is_right(gathered, *where)
    assert not is_right(looks_at_one_less, *where)
    assert not is_right(refuses, *where)
    assert not is_right(attention.by_table, *where)  # flash attention is for GPUs


def paged_by_a_loop(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """``varlen_attn`` over pages, written from its documentation: one query a row, all used tokens as keys."""
    assert seqused_k is not None
    assert block_table is not None
    assert {x.dtype for x in (cu_seq_q, seqused_k, block_table)} == {torch.int32}
    assert (max_q, window_size, num_splits) == (1, (-1, -1), 1)
    assert cu_seq_q.tolist() == list(range(len(query) + 1))
    assert block_table.stride(-1) == 1
    assert max_k == block_table.shape[1] * key.shape[1] >= int(seqused_k.max())
    assert enable_gqa == (query.shape[1] != key.shape[2])
    rows = []
    for q, table, used in zip(query, block_table.tolist(), seqused_k.tolist(), strict=True):
        k, v = (torch.cat([x[page] for page in table])[:used] for x in (key, value))
        k, v = (x.repeat_interleave(len(q) // x.shape[1], 1) for x in (k, v))
        weights = (torch.einsum("hd,khd->hk", q, k) * (scale or q.shape[-1] ** -0.5)).softmax(-1)
        rows.append(torch.einsum("hk,khd->hd", weights, v))
    return torch.stack(rows)


@pytest.fixture(params=["flash attention 2", "flash attention 3"])
def a_kernel_of_pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """In the place of flash attention, with what each refuses, and who is to be taken for it."""
    is_second = request.param == "flash attention 2"

    def picky(query: torch.Tensor, key: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if is_second and key.shape[1] % 64:  # of that library 256
            raise RuntimeError("Paged KV cache block size must be divisible by 64")
        if is_second and args[2] is None:
            raise RuntimeError("cu_seqlens_k must have shape (batch_size + 1)")
        if not is_second and args[2] is not None:
            raise RuntimeError("If cu_seqlens_k is passed in, then page table is not supported")
        return paged_by_a_loop(query, key, *args, **options)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", picky)
    return (attention.by_table_and_starts, 64) if is_second else (attention.by_table, 16)


@pytest.mark.parametrize("shape", [{}, {"num_key_value_heads": 4}])
def test_a_kernel_that_reads_pages_is_asked_as_its_documentation_says(
    a_kernel_of_pages: Any, monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]
) -> None:
    """On this CPU, told that it were a GPU with 16 bits."""

    def as_on_a_gpu(device: torch.device, dtype: torch.dtype, *heads: int) -> Any:
        kernels = (attention.by_table, attention.by_table_and_starts)
        pairs = ((kernel, size) for size in attention.PAGE_SIZES for kernel in kernels)
        return next(pair for pair in pairs if is_right(*pair, device, dtype, *heads))

    monkeypatch.setattr("posttrain.engines.native.paged.paging.attention_for", as_on_a_gpu)
    sizes: set[tuple[int, int]] = set()
    step = Steps.step
    monkeypatch.setattr(Steps, "step", lambda self, *size: sizes.add(size) or step(self, *size))
    model, sampling = build_tiny_random("qwen3", **shape), Sampling(100, stop_ids=STOPS)
    tokens = {64: 1024, 16: 512}[a_kernel_of_pages[1]]
    engine, _ = both(model, sampling, work=work((33, 100, 7), 7), slots=20, cache_tokens=tokens)
    assert engine.paging is not None
    assert engine.paging._kept is not None
    assert (engine.paging._kept.attention, pool_of(engine).page_size) == a_kernel_of_pages
    # One size for every number of rows: the kernel reads no more than is used.
    assert {pages for _, pages in sizes} == {256 // pool_of(engine).page_size}
    assert engine.paging.num_put_back > 0


def test_an_older_torch_knows_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", looped)
    for kernel in (attention.by_table, attention.by_table_and_starts):
        assert not is_right(kernel, 256, torch.device("cpu"), torch.float32, 4, 2, 16)


def test_pages_are_counted() -> None:
    pool = Pool([LayerShape(2, 3, 5, torch.float32)], 4, PAGE, torch.device("cpu"))
    assert (pool.keys[0].shape, pool.values[0].shape) == ((5, PAGE, 2, 3), (5, PAGE, 2, 5))
    assert [pool.pages_for(n) for n in (0, 1, PAGE, PAGE + 1)] == [0, 1, 1, 2]
    first = pool.take(3)
    assert 0 not in first
    pool.share(first[:2])
    pool.give_back(first)
    assert pool.num_free == 2
    assert pool.references[first].tolist() == [1, 1, 0]
    pool.give_back(first[:2])
    assert pool.num_free == 4
    with pytest.raises(AssertionError, match="5 pages of 4"):
        pool.take(5)


# -- what is around it -------------------------------------------------------------------------------------------------


def test_adapters_and_copies_of_the_weights() -> None:
    model = apply_adapter(build_tiny_random("qwen3"), AdapterSection(rank=3, alpha=6.0), 0).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.03)
    sampling, (prompts, keys) = Sampling(30, stop_ids=STOPS), work()
    both(model, sampling, work=(prompts, keys))
    copied = registry.find("engine", "native").bind({"cache": "paged", "weights": "copy"})(model, None)
    for version in (0, 1):
        copied.sync(version)
        assert said(copied.generate(prompts, keys, sampling)) == said(
            NativeEngine(model).generate(prompts, keys, sampling)
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.05)
    fill, copied.fill = copied.fill, lambda: None
    with pytest.raises(EngineMismatch, match="is not the trained model after 2 updates"):
        copied.sync(2)
    copied.fill = fill


def test_several_turns_are_read_anew() -> None:
    model, (prompts, keys) = build_tiny_random("qwen3").double(), work((5, 1, 30), 3)
    sampling = Sampling(max_tokens=60, stop_ids=frozenset(range(40)))
    expected = NativeEngine(model).converse(prompts, keys, sampling, Scripted(wordy(range(40, 300))))
    engine = NativeEngine(model, cache="paged", slots=5, cache_tokens=320)
    found = engine.converse(prompts, keys, sampling, Scripted(wordy(range(40, 300))))
    assert [[(c.ids, c.own, c.finish) for c in g] for g in found] == [
        [(c.ids, c.own, c.finish) for c in g] for g in expected
    ]
    assert any(not all(c.own or ()) for g in found for c in g)


def test_what_a_batch_left_that_failed_is_not_used_again() -> None:
    model, (prompts, keys), sampling = build_tiny_random("qwen3"), work(), Sampling(6)
    engine = NativeEngine(model, cache="paged")
    expected = engine.generate(prompts, keys, sampling)
    weight = model.model.layers[0].self_attn.v_proj.weight
    with torch.no_grad():
        good = weight[0, 0].clone()
        weight[0, 0] = float("nan")
    with pytest.raises(RunFailure, match="not finite"):
        engine.generate(prompts, keys, sampling)
    with torch.no_grad():
        weight[0, 0] = good
    assert said(engine.generate(prompts, keys, sampling)) == said(expected)


def test_pages_stay_until_more_are_needed_or_the_engine_is_closed() -> None:
    model, (prompts, keys) = build_tiny_random("qwen3"), work((20, 33), 3)
    engine = NativeEngine(model, cache="paged", cache_tokens=20 * PAGE)
    engine.generate(prompts, keys, Sampling(8))
    small = pool_of(engine)
    assert small.num_pages == 6 * 3 + 2  # six rows of 40 tokens, and a page for each prompt
    engine.generate(prompts[:1], keys[:1], Sampling(20))
    assert pool_of(engine) is small
    roomy = NativeEngine(model, cache="paged")
    roomy.generate(prompts, keys, Sampling(8))
    assert pool_of(roomy).num_pages == 20
    roomy.generate(prompts, keys, Sampling(20))
    assert pool_of(roomy).num_pages == 6 * 4 + 2
    engine.close()
    assert engine.paging is not None
    assert engine.paging._kept is None
    both(model, Sampling(8), work=(prompts, keys))


@pytest.mark.parametrize("tokens", [None, 400])
def test_what_was_sampled_before_changes_no_bit(tokens: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was killed goes on without what it had sampled until then; its log-probabilities are the same bits.

    For that steps have the same sizes and rows the same room, though more is held by then.
    """
    facts: list[Any] = []
    step, run = Steps.step, PagedSchedule.run
    monkeypatch.setattr(Steps, "step", lambda self, *size: facts.append(size) or step(self, *size))
    monkeypatch.setattr(PagedSchedule, "run", lambda self: facts.append(self.num_free) or run(self))
    model, (prompts, keys), sampling = build_tiny_random("qwen3"), work(), Sampling(40, stop_ids=STOPS)

    def observed(engine: NativeEngine) -> Any:
        facts.clear()
        found = engine.generate(prompts, keys, sampling)
        assert engine.paging is not None
        return found, list(facts), engine.paging.num_put_back

    fresh, used = (NativeEngine(model, cache="paged", cache_tokens=tokens, slots=40) for _ in "ab")
    used.generate(*work((100, 50), 20), Sampling(130, stop_ids=STOPS))
    assert used.paging is not None
    used.paging.num_put_back = 0
    expected = observed(fresh)
    assert observed(used) == expected
    assert used.paging._kept is not None
    assert fresh.paging is not None
    assert fresh.paging._kept is not None
    assert used.paging._kept.num_pages > fresh.paging._kept.num_pages
    assert (pool_of(used).num_pages > pool_of(fresh).num_pages) == (tokens is None)
    assert (expected[2] > 0) == (tokens is not None)
    one = NativeEngine(model, cache="paged", cache_tokens=tokens, slots=40)
    one.generate(*work((3,), 1), Sampling(5))
    assert observed(one) == expected


def test_a_path_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = PageView.attend
    monkeypatch.setattr(PageView, "attend", lambda self, i, q, k, v, scale: attend(self, i, q, k, v, scale * 1.05))
    with pytest.raises(UsageError, match=r"engine\.cache: 'paged' cannot serve this model: its log-prob.* differ"):
        NativeEngine(build_tiny_random("qwen3"), cache="paged").generate(*work(), Sampling(2))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cache_tokens": 100}, r"rollout\.engine\.cache_tokens: only 'cache: paged' has pages"),
        ({"gpu_memory": 0.5}, r"rollout\.engine\.gpu_memory: only 'cache: paged'"),
        ({"eager": True}, r"rollout\.engine\.eager: only 'cache: paged'"),
        ({"cache": "paged", "cache_tokens": 0}, r"cache_tokens: 0 tokens; give 1 or more"),
        ({"cache": "paged", "gpu_memory": 0.0}, r"gpu_memory: 0\.0 is no share"),
        ({"cache": "paged", "gpu_memory": 1.5}, r"gpu_memory: 1\.5 is no share"),
        ({"cache": "paged", "path": "modules"}, r"engine\.path: the modules of a model do not read pages"),
        ({"cache": "paged", "wait_steps": 3}, r"engine\.wait_steps: from pages each turn is read anew"),
        ({"cache": "paged", "native_kernel": True}, r"engine\.native_kernel: it reads no pages"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        registry.find("engine", "native").bind(options, "rollout.engine")


def test_a_model_of_other_blocks_and_a_cache_for_less_than_a_row_are_refused() -> None:
    with pytest.raises(UsageError, match=r"'paged' cannot serve this model: its blocks are not those of Qwen3"):
        NativeEngine(build_tiny_random("gpt2"), cache="paged").generate(*work(), Sampling(2))
    # 40 + 30 tokens, of which the last is not fed: five pages
    engine = NativeEngine(build_tiny_random("qwen3"), cache="paged", cache_tokens=5 * PAGE - 1)
    with pytest.raises(UsageError, match=r"cache of 64 tokens does not hold one row .* 5 pages of 16; give 80 or more"):
        engine.generate(*work(), Sampling(30))
    both(build_tiny_random("qwen3"), Sampling(30), work=work(), cache_tokens=5 * PAGE)


def test_no_memory_for_the_pages_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine = NativeEngine(build_tiny_random("qwen3"), cache="paged")
    assert engine.path == "lean"
    monkeypatch.setattr("posttrain.engines.native.paged.paging.Pool", full)
    with pytest.raises(UsageError, match=r"no memory for the \d+ tokens of the cache, 0\.0 GiB; give fewer"):
        engine.generate(*work(), Sampling(2))
