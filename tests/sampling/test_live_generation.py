"""Generations that go on step by step: rows join, leave, and are what a whole generation gives."""

from __future__ import annotations

import pytest

from posttrain.sampling.base import Conversation, Sampling
from posttrain.sampling.native.engine import NativeEngine
from tiny_random import build_tiny_random

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
SAMPLING = Sampling(12)
# By path: an architecture that takes it.
MODELS = {"lean": ("llama", {}), "modules": ("gpt2", {}), "plain": ("mamba", {"state_size": 4})}


def rows_of(prompt: int, count: int = 2, limit: int = 12) -> list[Conversation]:
    return [Conversation(prompt, sample, 100 * prompt + sample, limit) for sample in range(count)]


@pytest.fixture(scope="module", params=MODELS)
def engine(request: pytest.FixtureRequest) -> NativeEngine:
    architecture, options = MODELS[request.param]
    engine = NativeEngine(build_tiny_random(architecture, **options))
    assert engine.path == request.param
    return engine


def whole(engine: NativeEngine, prompts: list[list[int]], rows: list[Conversation]) -> list[tuple[int, ...]]:
    keys = [[row.key for row in rows if row.prompt == number] for number in range(len(prompts))]
    return [one.ids for group in engine.generate(prompts, keys, SAMPLING) for one in group]


def test_generation_of_steps_equals_a_whole_one(engine: NativeEngine) -> None:
    rows = [row for number in range(3) for row in rows_of(number)]
    generation = engine.begin_generation(PROMPTS, rows, SAMPLING, slots=4)
    steps = 0
    while not generation.is_done:
        generation.run(lambda: True)
        steps += 1
    assert steps >= 24, "four slots for six rows of 12 tokens"
    assert [tuple(row.ids) for row in rows] == whole(engine, PROMPTS, rows)
    assert len({tuple(row.ids) for row in rows}) == 6


def test_generation_that_rows_join_gives_them_what_they_get_alone(engine: NativeEngine) -> None:
    first, second = rows_of(0), rows_of(0)
    second[0].key, second[1].key = 7, 8
    generation = engine.begin_generation(PROMPTS[:1], first, SAMPLING, slots=4)
    for _ in range(5):
        generation.run(lambda: True)
    has_joined = generation.join(PROMPTS[1:2], second)
    assert has_joined == (engine.path != "plain")
    assert not generation.join(PROMPTS[1:2], rows_of(0, 3)), "more rows than free slots"
    generation.run(lambda: False)
    assert [tuple(row.ids) for row in first] == whole(engine, PROMPTS[:1], rows_of(0))
    if has_joined:
        expected = engine.generate(PROMPTS[1:2], [[7, 8]], SAMPLING)[0]
        assert [tuple(row.ids) for row in second] == [one.ids for one in expected]


def test_generation_without_room_for_a_longer_row_refuses_it(engine: NativeEngine) -> None:
    generation = engine.begin_generation(PROMPTS[:1], rows_of(0), SAMPLING, slots=8)
    assert generation.reach == 256
    assert not generation.join([[5] * 250], rows_of(0, 1))


def test_generation_whose_rows_the_caller_ends_leaves_them(engine: NativeEngine) -> None:
    rows = [row for number in range(3) for row in rows_of(number)]
    generation = engine.begin_generation(PROMPTS, rows, SAMPLING, slots=2)
    generation.run(lambda: True)
    ended = [rows[0], rows[2], rows[5]]  # one at work, and two that wait
    for row in ended:
        row.finish = "length"
    generation.run(lambda: False)
    assert sorted(len(row.ids) for row in ended) == [0, 0, 1]
    expected = whole(engine, PROMPTS, [row for number in range(3) for row in rows_of(number)])
    assert [tuple(rows[place].ids) for place in (1, 3, 4)] == [expected[place] for place in (1, 3, 4)]


def test_bytes_per_token_count_keys_and_values(engine: NativeEngine) -> None:
    heads = {"lean": 2, "modules": 4, "plain": 4}[engine.path]  # mamba keeps no keys: an upper bound
    assert engine.bytes_per_token == 2 * 2 * heads * 16 * 4
