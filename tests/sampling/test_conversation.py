"""Several turns: the native engine keeps what it read, and says what an engine says that reads everything again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from closeness import OF_TINY_RANDOM, approx
from posttrain.sampling.base import Engine, Reply, Sampling, begin
from posttrain.sampling.native import schedule
from posttrain.sampling.native.cache import aligned
from posttrain.sampling.native.engine import NativeEngine
from posttrain.sampling.native.fast_path import FastDecoder
from posttrain.types import Completion
from sampling.reference import LENGTHS, make_keys, make_prompts, worst_difference
from sampling.respondents import Scripted, wordy
from tiny_random import build_tiny_random

VOCAB = 300
STOPS = frozenset(range(40))  # a turn is some 8 tokens long
SAMPLING = Sampling(max_tokens=40, stop_ids=STOPS)
SCRIPT = wordy(range(40, VOCAB))
# The lean path copies the prompt of a lone row, and shares that of several.
PATHS = [("qwen3", "lean", 1), ("qwen3", "lean", 3), ("gpt2", "modules", 2)]


@pytest.fixture(autouse=True)
def the_products_of_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lean path takes its plain products, and shares prompts, in fp64 too."""
    bind = FastDecoder.bind

    def bind_plainly(model: Any, max_positions: int) -> FastDecoder | None:
        decoder = bind(model, max_positions)
        if decoder is not None:
            decoder.transposed = decoder.can_share = True
        return decoder

    monkeypatch.setattr(FastDecoder, "bind", staticmethod(bind_plainly))


def exact(architecture: str, **config: Any) -> Any:
    """A model in fp64: in fp32 one token of 100,000 falls otherwise where two ways to compute round differently."""
    return build_tiny_random(architecture, **config).double()


def message(completions: list[list[Completion]]) -> list[list[tuple[Any, ...]]]:
    return [[(c.ids, c.own, c.finish) for c in group] for group in completions]


def by_reading_again(
    engine: Engine, prompts: list[list[int]], keys: list[list[int]], sampling: Sampling, respondent: Scripted
) -> list[list[Completion]]:
    """``Engine.converse`` with a generation of ``engine`` for every turn."""
    groups = begin(prompts, keys, sampling.max_tokens, sampling.within(engine.context_tokens))
    rows = [row for group in groups for row in group]
    version = Engine._converse(engine, prompts, rows, sampling, respondent)
    return [[row.completion(version) for row in group] for group in groups]


@pytest.mark.parametrize(
    ("architecture", "path", "group", "temperature"), [("gpt2", "modules", 2, 1.0), ("qwen3", "lean", 3, 0.0)]
)
def test_it_states_what_an_engine_states_that_reads_everything_again(
    architecture: str, path: Any, group: int, temperature: float
) -> None:
    model = exact(architecture)
    prompts, keys = make_prompts(), make_keys(len(LENGTHS), group)
    often = frozenset(range(0, VOCAB, 3))  # what is likeliest soon repeats itself
    sampling = replace(SAMPLING, temperature=temperature, stop_ids=STOPS if temperature else often)
    expected = by_reading_again(NativeEngine(model, path=path), prompts, keys, sampling, Scripted(SCRIPT))
    for slots in (64, 5):
        engine = NativeEngine(model, slots=slots, path=path)
        completions = engine.converse(prompts, keys, sampling, Scripted(SCRIPT))
        assert engine.path == path
        assert message(completions) == message(expected)
    assert {c.finish for g in expected for c in g} >= {"out_of_turns"}
    assert {sum(c.own) < len(c.ids) for g in expected for c in g} == {True, False}


@pytest.mark.parametrize(("architecture", "path", "group"), [*PATHS, ("qwen3", "modules", 2)])
def test_logprobs_equal_those_of_one_forward_pass_over_the_rollout(architecture: str, path: Any, group: int) -> None:
    model, prompts, keys = build_tiny_random(architecture), make_prompts(), make_keys(len(LENGTHS), group)
    sampling = replace(SAMPLING, temperature=0.7)
    for slots in (64, 5):
        engine = NativeEngine(model, slots=slots, path=path)
        completions = engine.converse(prompts, keys, sampling, Scripted(SCRIPT))
        assert worst_difference(model, prompts, completions, 0.7) == approx(0.0, abs=OF_TINY_RANDOM)


def test_a_cache_that_grows_and_shifts_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts, keys = exact("qwen3"), make_prompts((5, 30, 3)), make_keys(3, 3)
    sampling, script = Sampling(max_tokens=50, stop_ids=frozenset(range(12))), wordy(range(40, VOCAB), 9, 6)
    roomy = NativeEngine(model).converse(prompts, keys, sampling, Scripted(script))
    monkeypatch.setattr(schedule, "FIRST_COLUMNS", 1)
    tight = NativeEngine(model, slots=2).converse(prompts, keys, sampling, Scripted(script))
    assert message(tight) == message(roomy)
    assert worst_difference(model, prompts, tight) == approx(0.0, abs=OF_TINY_RANDOM)


CASES = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(1, 9), min_size=1, max_size=3),
        "group": st.integers(1, 3),
        "slots": st.integers(1, 7),
        "max_tokens": st.integers(1, 30),
        "max_turn_tokens": st.none() | st.integers(1, 12),
        "longest": st.integers(0, 8),
        "turns": st.integers(1, 6),
        "seed": st.integers(0, 999),
    }
)
MODEL = exact("qwen3")


@settings(max_examples=12)
@given(case=CASES)
def test_the_mask_states_who_wrote_each_token(case: dict[str, Any]) -> None:
    prompts = make_prompts(case["lengths"], case["seed"])
    keys = make_keys(len(prompts), case["group"], case["seed"])
    sampling = replace(SAMPLING, max_tokens=case["max_tokens"], max_turn_tokens=case["max_turn_tokens"])
    script = wordy(range(40, VOCAB), case["longest"], case["turns"])
    engine = NativeEngine(MODEL, slots=case["slots"])
    respondent, again = Scripted(script), Scripted(script)
    completions = engine.converse(prompts, keys, sampling, respondent)
    for i, group in enumerate(completions):
        for g, c in enumerate(group):
            assert (c.ids, c.own) == respondent.transcript(i, g)
            assert len(c.ids) <= case["max_tokens"]
            assert all(len(turn) <= (case["max_turn_tokens"] or 99) for turn in respondent.turns[i, g])
            assert all((p == 0.0) == (not own) for p, own in zip(c.logprobs, c.own, strict=True))
            assert c.num_own == sum(map(len, respondent.turns[i, g]))
    assert message(completions) == message(by_reading_again(engine, prompts, keys, sampling, again))
    assert (respondent.turns, respondent.replies) == (again.turns, again.replies)
    assert respondent.finishes == again.finishes


def test_nothing_is_read_twice(tiny_random: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts, keys = tiny_random("qwen3"), make_prompts((6, 4, 9)), make_keys(3, 5)
    engine = NativeEngine(model, slots=64)
    assert engine.path == "lean"
    read: list[list[int]] = []
    prefill, decode = FastDecoder.prefill, FastDecoder.decode
    monkeypatch.setattr(FastDecoder, "prefill", lambda self, p: read.extend(map(list, p)) or prefill(self, p))
    fed: list[int] = []
    monkeypatch.setattr(FastDecoder, "decode", lambda self, t, *rest: fed.append(len(t)) or decode(self, t, *rest))
    completions = engine.converse(prompts, keys, SAMPLING, Scripted(SCRIPT))
    assert sorted(read) == sorted(prompt[:-1] for prompt in prompts)
    # A step for the last id of each prompt and for every id but the last; finished rows stay for a step or two.
    needed = sum(len(c.ids) for g in completions for c in g)
    assert needed <= sum(fed) <= 1.1 * needed


def test_limits() -> None:
    """Limits of a turn, of all turns, and of the context; a reply that leaves no room is left out."""
    model = exact("qwen3", max_position_embeddings=50)
    engine = NativeEngine(model)
    prompts, keys = make_prompts((4, 40)), make_keys(2, 4)

    def converse(reply: Reply, **limits: int) -> list[list[Completion]]:
        respondent = Scripted(lambda *_: reply)
        completions = engine.converse(prompts, keys, replace(SAMPLING, **limits), respondent)
        again = by_reading_again(engine, prompts, keys, replace(SAMPLING, **limits), Scripted(lambda *_: reply))
        assert message(completions) == message(again)
        for i, group in enumerate(completions):
            for g, c in enumerate(group):
                assert (c.ids, c.own) == respondent.transcript(i, g)
        return completions

    for c in (c for g in converse(Reply((50, 51, 52)), max_tokens=1000) for c in g):
        assert c.finish == "length"
    full = converse(Reply((50,)), max_tokens=1000)
    assert {len(c.ids) for c in full[0] if c.own[-1] and c.ids[-1] not in STOPS} == {46}
    assert {len(c.ids) for c in full[1] if c.ids[-1] not in STOPS} <= {10}
    short = converse(Reply((50,)), max_tokens=1000, max_turn_tokens=3)
    assert {c.finish for g in short for c in g} == {"length"}
    assert all(not set(c.ids[-3:]) & STOPS or c.ids[-1] in STOPS for g in short for c in g)
    never = converse(Reply(tuple(range(40, 87))), max_tokens=46)
    assert all(all(c.own) and c.finish == "length" for g in never for c in g)
    prompts = prompts[:1] * 2
    together = converse(Reply((50,)), max_tokens=1000, max_total_tokens=20)
    assert max(len(c.ids) for g in together for c in g) == 16


def test_a_mask_for_a_gpu_is_aligned_wherever_it_begins() -> None:
    whole = torch.arange(3 * 48, dtype=torch.bfloat16).view(3, 48)
    for first, width in ((1, 16), (3, 7), (0, 17)):
        part = whole.narrow(1, first, width)[:, None, None, :]
        mask = aligned(part)
        assert torch.equal(mask, part)
        assert mask.storage_offset() == 0
        assert mask.stride(-1) == 1
        assert [stride % 16 for stride in mask.stride()[:-1]] == [0, 0, 0]
