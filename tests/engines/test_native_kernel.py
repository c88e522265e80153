"""The native kernel of decoding: against float64, row by row, in the engine, and where it cannot be had."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.respondents import Scripted, wordy
from posttrain import registry
from posttrain.engines.base import Sampling
from posttrain.engines.native.attention import NativeAttention
from posttrain.engines.native.engine import NativeEngine
from posttrain.engines.native.lean import LeanDecoder
from posttrain.errors import RunFailure
from posttrain.models.kernel import build
from posttrain.models.load import load_model
from posttrain.randomness import derive_key
from posttrain.recipes.sections import ModelSection
from tiny_random import build_tiny_random

EPS = 1e-6


class Rows:
    """Random rows of one layer in the middle of a generation, laid out as a ``SlotCache`` lays them out."""

    def __init__(
        self,
        heads: tuple[int, int],
        dim: int,
        starts: list[int],
        cursor: int,
        prompts: list[int] | None = None,  # lengths of the shared ones
        entries: list[int] | None = None,
        holes: list[tuple[int, int]] | None = None,
        seed: int = 0,
    ) -> None:
        self.heads, self.dim, self.cursor, self.scale = heads, dim, cursor, dim**-0.5
        generator = torch.Generator().manual_seed(seed)
        queries, keys = heads
        count, capacity = len(starts), cursor + 3

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.x = normal(count, (queries + 2 * keys) * dim)
        self.head_norm: torch.Tensor | None = normal(queries + keys, dim)
        angle = normal(count, 1, dim // 2)
        self.cos = torch.cat([angle.cos()] * 2, -1)
        self.sin = torch.cat([-angle.sin(), angle.sin()], -1)
        self.keys, self.values = (normal(count + 1, keys, capacity, dim) for _ in range(2))
        self.starts = np.array([*starts, 0], dtype=np.int64)
        self.holes = None
        if holes is not None:
            self.holes = np.zeros((count + 1, capacity), dtype=bool)
            for place in holes:
                self.holes[place] = True
        self.prompts, self.entries = prompts, np.array([*(entries or []), 0], dtype=np.int64)
        if prompts is not None:
            self.shared_keys, self.shared_values = (normal(len(prompts), keys, max(prompts), dim) for _ in range(2))

    def attend(self) -> torch.Tensor:
        """The kernel's ``[R, queries * dim]``; the cache is written."""
        shared = None
        if self.prompts is not None:
            keys, values = [self.shared_keys], [self.shared_values]
            shared = SimpleNamespace(axis=2, keys=keys, values=values, lengths=self.prompts, entry_of_row=self.entries)
        cache: Any = SimpleNamespace(
            count=len(self.x), key_axis=2, shared=shared, holes=self.holes, capacity=self.keys.shape[2],
            cursor=self.cursor, starts=self.starts, keys=[self.keys], values=[self.values],
        )  # fmt: skip
        native = NativeAttention.make(*self.heads, self.dim, self.scale)
        assert native is not None
        return native.begin(self.cos, self.sin, cache)(0, self.x, self.head_norm, EPS)

    def rotated(self) -> torch.Tensor:
        """All query and key heads of the step, ``float64 [R, queries + keys, dim]``."""
        x = self.x.double().view(len(self.x), -1, self.dim)[:, : sum(self.heads)]
        if self.head_norm is not None:
            x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.head_norm.double()
        return x * self.cos.double() + x.roll(self.dim // 2, -1) * self.sin.double()

    def expected(self) -> torch.Tensor:
        """The same in float64, one head of one row at a time; the cache has been written."""
        (queries, keys), rotated, rows = self.heads, self.rotated(), []
        for r in range(len(self.x)):
            seen = torch.arange(self.starts[r], self.cursor + 1)
            if self.holes is not None:
                seen = seen[~torch.from_numpy(self.holes[r])[seen]]
            for h in range(queries):
                k = h // (queries // keys)
                key, value = (x[r, k, seen].double() for x in (self.keys, self.values))
                if self.prompts is not None:
                    e = int(self.entries[r])
                    length = self.prompts[e]
                    key = torch.cat([self.shared_keys[e, k, :length].double(), key])
                    value = torch.cat([self.shared_values[e, k, :length].double(), value])
                rows.append((key @ rotated[r, h] * self.scale).softmax(0) @ value)
        return torch.stack(rows).view(len(self.x), -1)


@pytest.mark.parametrize("dim", [2, 6, 8, 12, 20, 32, 40, 64, 80, 128, 256])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (8, 1), (10, 2)])
@pytest.mark.parametrize("layout", ["shared", "copied", "holes", "no head norms"])
def test_against_float64(native_kernel: str, heads: tuple[int, int], dim: int, layout: str) -> None:
    prompts, entries = ([5, 0, 17], [2, 0, 1, 2]) if layout == "shared" else (None, None)
    holes = [(0, 3), (0, 4), (2, 19)] if layout == "holes" else None
    rows = Rows(heads, dim, [0, 20, 11, 4], 20, prompts, entries, holes)
    if layout == "no head norms":
        rows.head_norm = None
    before = rows.keys.clone(), rows.values.clone()
    result = rows.attend()
    assert (result.double() - rows.expected()).abs().max() <= 3e-6
    # its cache: one column of the rows in use, and nothing else
    count, (queries, keys) = len(rows.x), heads
    written = rows.keys[:count, :, rows.cursor].double()
    assert torch.allclose(written, rows.rotated()[:, queries:], atol=3e-6, rtol=1e-6)
    assert torch.equal(rows.values[:count, :, rows.cursor], rows.x.view(count, -1, dim)[:, queries + keys :])
    for now, then in zip((rows.keys, rows.values), before, strict=True):
        now[:count, :, rows.cursor] = then[:count, :, rows.cursor]
        assert torch.equal(now, then)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=st.data())
def test_the_bits_of_a_row_are_its_own(native_kernel: str, case: st.DataObject) -> None:
    """Alone, elsewhere in the cache, behind holes and a prompt in columns of its own, it is what it is in a batch."""
    heads = case.draw(st.sampled_from([(4, 2), (2, 2), (6, 1)]))
    dim = case.draw(st.sampled_from([8, 20, 32, 64]))
    prompts = case.draw(st.lists(st.integers(0, 20), min_size=1, max_size=3).filter(any))
    entries = case.draw(st.lists(st.integers(0, len(prompts) - 1), min_size=1, max_size=5))
    cursor = case.draw(st.integers(0, 30))
    starts = [case.draw(st.integers(0, cursor)) for _ in entries]
    batch = Rows(heads, dim, starts, cursor, prompts, entries, seed=case.draw(st.integers(0, 99)))
    together = batch.attend()

    r = case.draw(st.integers(0, len(entries) - 1))
    length, own = prompts[entries[r]], cursor + 1 - starts[r]
    shift, hidden = case.draw(st.integers(0, 9)), case.draw(st.integers(0, 3))
    columns = length + own + hidden  # some that it does not see stand before its own
    holes = [(0, shift + length + i) for i in range(hidden)]
    alone = Rows(heads, dim, [shift], shift + columns - 1, holes=holes)
    alone.x, alone.head_norm = batch.x[r : r + 1].clone(), batch.head_norm
    alone.cos, alone.sin = batch.cos[r : r + 1], batch.sin[r : r + 1]
    for name in ("keys", "values"):
        into, prompt = getattr(alone, name)[0], getattr(batch, f"shared_{name}")[entries[r]]
        into[:, shift : shift + length] = prompt[:, :length]
        into[:, shift + length + hidden :][:, :own] = getattr(batch, name)[r, :, starts[r] : cursor + 1]
    assert torch.equal(alone.attend()[0], together[r])


LENGTHS = (5, 1, 12, 3)


def make_prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    numbers = np.random.default_rng(1)
    return [numbers.integers(40, 300, n).tolist() for n in lengths]


def make_keys(count: int, group: int) -> list[list[int]]:
    return [[derive_key(0, "test", i, j) for j in range(group)] for i in range(count)]


def attended_natively(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every decode step that the kernel has computed."""
    rows: list[int] = []
    begin = NativeAttention.begin
    monkeypatch.setattr(
        NativeAttention, "begin", lambda self, cos, *rest: rows.append(len(cos)) or begin(self, cos, *rest)
    )
    return rows


@pytest.mark.parametrize("group", [1, 3])  # copied and shared prompts
@pytest.mark.parametrize(
    ("architecture", "shape"),
    [
        ("qwen3", {}),
        ("qwen2", {}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"head_dim": 24}),
    ],
)
def test_logprobs_equal_the_models_forward(
    native_kernel: str, monkeypatch: pytest.MonkeyPatch, architecture: str, shape: dict[str, int], group: int
) -> None:
    """The bound is that of the path without a kernel; rows end, are moved and are admitted on the way."""
    model, prompts, keys = build_tiny_random(architecture, **shape), make_prompts(), make_keys(4, group)
    sampling, rows = Sampling(max_tokens=40, stop_ids=frozenset(range(8))), attended_natively(monkeypatch)
    completions = NativeEngine(model, slots=3, path="lean", native_kernel=True).generate(prompts, keys, sampling)
    assert max(rows) == 3 > min(rows)
    plain = NativeEngine(model, slots=3, path="lean").generate(prompts, keys, sampling)
    assert [[c.ids for c in g] for g in completions] == [[c.ids for c in g] for g in plain]
    for prompt, completed in zip(prompts, completions, strict=True):
        for c in completed:
            tokens = torch.tensor([[*prompt, *c.ids]])
            with torch.no_grad():
                logprobs = model(input_ids=tokens).logits[0].log_softmax(-1)
            picked = logprobs[:-1].gather(1, tokens[0, 1:, None])[len(prompt) - 1 :, 0]
            assert (picked - torch.tensor(c.logprobs)).abs().max() <= 1e-5


@pytest.mark.parametrize("dim", [8, 20, 128])
def test_norms_and_gates_against_float64(native_kernel: str, dim: int) -> None:
    from posttrain.models.kernel import layers

    x, weight, other = torch.randn(5, dim), torch.randn(dim), torch.randn(5, dim)
    normed = x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    torch.testing.assert_close(layers.rms_norm(x, weight, EPS).double(), normed, rtol=1e-6, atol=1e-7)
    gated = x.double() * x.double().sigmoid() * other.double()
    torch.testing.assert_close(layers.swiglu(x.clone(), other).double(), gated, rtol=1e-6, atol=1e-7)
    halves = torch.cat([x, other], 1).chunk(2, dim=1)
    torch.testing.assert_close(layers.swiglu(*halves).double(), gated, rtol=1e-6, atol=1e-7)


def test_greedy_answers_of_the_embedded_model_are_the_same(native_kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(ModelSection(), seed=0)
    texts = ("Eva starts with 19 shells. She finds 12 at the beach.", "Tom has 7 apples", "Mia reads", "A", "12 + 30 =")
    prompts = [loaded.tokenizer(text)["input_ids"] for text in texts]
    sampling, rows = Sampling(max_tokens=60, temperature=0.0), attended_natively(monkeypatch)
    on, off = (
        NativeEngine(loaded.model, native_kernel=kernel).generate(prompts, make_keys(5, 2), sampling)
        for kernel in (True, False)
    )
    assert [[c.ids for c in g] for g in on] == [[c.ids for c in g] for g in off]
    assert len(rows) >= 60
    worst = max(
        abs(a - b)
        for g, h in zip(on, off, strict=True)
        for c, d in zip(g, h, strict=True)
        for a, b in zip(c.logprobs, d.logprobs, strict=True)
    )
    assert 0 < worst <= 1e-4  # a logit of a trained model is of some tens


@pytest.mark.parametrize(("group", "wait_steps"), [(1, 0), (3, 0), (3, 5)])
def test_several_turns_with_holes_are_the_same(native_kernel: str, group: int, wait_steps: int) -> None:
    model, prompts, keys = build_tiny_random("qwen3"), make_prompts(), make_keys(4, group)
    sampling, respond = Sampling(max_tokens=40, stop_ids=frozenset(range(40))), wordy(range(40, 300))
    on, off = (
        NativeEngine(model, slots=5, wait_steps=wait_steps, native_kernel=kernel).converse(
            prompts, keys, sampling, Scripted(respond)
        )
        for kernel in (True, False)
    )
    assert [[(c.ids, c.own) for c in g] for g in on] == [[(c.ids, c.own) for c in g] for g in off]
    pairs = [(c, d) for g, h in zip(on, off, strict=True) for c, d in zip(g, h, strict=True)]
    assert max(abs(a - b) for c, d in pairs for a, b in zip(c.logprobs, d.logprobs, strict=True)) <= 1e-5


def test_diverged_weights_are_still_seen(native_kernel: str) -> None:
    model = build_tiny_random("qwen3")
    engine = NativeEngine(model, native_kernel=True)
    assert engine.path == "lean"
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[0, 0] = float("nan")
    with pytest.raises(RunFailure, match="not finite"):
        engine.generate(make_prompts(), make_keys(4, 1), Sampling(max_tokens=3))


def test_it_is_a_word_of_the_engine_and_only_for_fp32(native_kernel: str) -> None:
    word = registry.find("engine", "native")
    assert not word.bind({})(None, None).native_kernel
    assert word.bind({"native_kernel": True})(None, None).native_kernel
    copied = word.bind({"native_kernel": True, "weights": "copy"})(build_tiny_random("qwen3"), None)
    assert copied.native_kernel
    for dtype, is_native in ((torch.float32, True), (torch.bfloat16, False), (torch.float64, False)):
        decoder = LeanDecoder.bind(build_tiny_random("qwen3").to(dtype), 64)
        assert decoder is not None
        decoder.take_kernel()
        assert (decoder.native is not None, decoder.transposed) == (is_native, False)


def test_a_process_that_has_chosen_none_decodes_without(native_kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = attended_natively(monkeypatch)
    build.use_kernel(build.OFF)
    engine = NativeEngine(build_tiny_random("qwen3"), native_kernel=True)
    engine.generate(make_prompts(), make_keys(4, 1), Sampling(max_tokens=3))
    assert not rows
    with pytest.raises(AssertionError, match="no native kernel"):
        build.use_kernel("0123456789abcdef")
    assert not any(build.has_kernel(name) for name in ("0123456789abcdef", None, 1, ["off"]))
    assert build.has_kernel("off")
    assert build.has_kernel(native_kernel)


@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        ("no-such-compiler", "there is no compiler for C++ (no-such-compiler)"),
        ("false", "cannot compile it"),
        ("true", "No such file"),  # says that it did, and left nothing
        ("'", "No closing quotation"),
        ('sh -c \'echo nonsense > "$(expr "$*" : ".*-o \\([^ ]*\\)")"\' x', "file too short"),
    ],
)
def test_without_a_compiler_that_works_there_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: str, why: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_in_use", None)
    build._find.cache_clear()
    try:
        assert build.usual_kernel() == build.OFF
        assert why in build.why_none()
        assert not list(tmp_path.glob("**/*.so"))
        completions = NativeEngine(build_tiny_random("qwen3"), native_kernel=True).generate(
            make_prompts(), make_keys(4, 2), Sampling(max_tokens=5)
        )
        plain = NativeEngine(build_tiny_random("qwen3")).generate(
            make_prompts(), make_keys(4, 2), Sampling(max_tokens=5)
        )
        assert completions == plain
    finally:
        build._find.cache_clear()


def test_processes_that_start_together_build_it_once(native_kernel: str, tmp_path: Path) -> None:
    """And a later one not at all."""
    counting = tmp_path / "compiler"
    counting.write_text(f'#!/bin/sh\necho once >> "{tmp_path}/count"\nexec c++ "$@"\n')
    counting.chmod(counting.stat().st_mode | stat.S_IXUSR)
    environment = os.environ | {"CXX": str(counting), "XDG_CACHE_HOME": str(tmp_path / "new"), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable, "-c", "from posttrain.models.kernel.build import usual_kernel; print(usual_kernel())"
    ]  # fmt: skip
    together = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    names = [process.communicate(timeout=300)[0].strip() for process in together]
    names.append(subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300).stdout.strip())
    assert names == [native_kernel] * 3
    assert (tmp_path / "count").read_text().split() == ["once"]
    assert [path.suffix for path in sorted((tmp_path / "new" / "posttrain" / "kernels").iterdir())] == [".lock", ".so"]
