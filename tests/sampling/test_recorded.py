"""Steps as a CUDA graph has them, called on a CPU: they draw what the schedule's own steps draw."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from closeness import OF_TINY_RANDOM, approx
from posttrain.randomness import derive_key
from posttrain.sampling.base import Completion, Sampling, begin
from posttrain.sampling.native import recorded
from posttrain.sampling.native.fast_path import FastDecoder
from posttrain.sampling.native.recorded import RecordedSteps, rows_of_graph, window_of
from posttrain.sampling.native.schedule import LONGEST_BURST, Schedule
from sampling.respondents import Scripted, wordy

SAMPLINGS = {
    "stops": Sampling(max_tokens=40, stop_ids=frozenset(range(0, 300, 9))),
    "growth": Sampling(max_tokens=300, stop_ids=frozenset(range(3))),
    "long": Sampling(max_tokens=300),
    "greedy": Sampling(max_tokens=20, temperature=0.0),
    "truncated": Sampling(max_tokens=20, temperature=0.7, top_k=5, stop_ids=frozenset(range(0, 300, 9))),
    "turns": Sampling(max_tokens=60, stop_ids=frozenset(range(40))),
}


def completions(
    model: Any, case: str, slots: int, *, as_recorded: bool, told: list[str] | None = None
) -> list[Completion]:
    """Those of four prompts, three of each. ``told``: what a GPU says, on which steps are recorded."""
    numbers, sampling = np.random.default_rng(1), SAMPLINGS[case]
    prompts = [numbers.integers(8, 300, n).tolist() for n in (5, 1, 140, 3)]
    keys = [[derive_key(0, "test", i, j) for j in range(3)] for i in range(len(prompts))]
    groups = begin(prompts, keys, sampling.max_tokens, 512)
    decoder = FastDecoder.bind(model, 512)
    assert decoder is not None
    decoder.can_share = False  # as on a GPU
    respondent = Scripted(wordy(range(40, 300))) if case == "turns" else None
    rows = [row for group in groups for row in group]
    with torch.inference_mode():
        schedule = Schedule(decoder, prompts, rows, sampling, slots, respondent, 512)
        if as_recorded:
            say = [].append if told is None else told.append
            schedule.recorded = RecordedSteps(decoder, schedule.num_slots, schedule.limit, LONGEST_BURST, say)
            schedule.recorded.can_record = told is not None
        schedule.run()
    return [row.completion(0) for row in rows]


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: None)


class Addresses(TorchDispatchMode):
    """Notes the memory that a step reads or writes and did not make: a graph goes there again."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: dict[int, StorageWeakRef] = {}
        self.made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self.made:
                self.outside[x.untyped_storage()._cdata] = StorageWeakRef(x.untyped_storage())
        out = func(*args, **(kwargs or {}))
        known = self.outside.keys()
        self.made |= {
            x.untyped_storage()._cdata
            for x in tree_leaves(out)
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in known
        }
        return out


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize(("slots", "most"), [(3, 64), (12, 2)])
@pytest.mark.parametrize("case", ["long", "turns"])
def test_recorded_steps_replay_where_all_that_was_read_is_still_there(
    tiny_random: Any, case: str, slots: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU memory that was given back is another tensor's, and a cache that grew is elsewhere."""
    replays = []

    def record(step: Any, *_: Any) -> Any:
        seen = Addresses()
        before = [x.clone() for x in (*state, *schedules[-1].cache.keys, *schedules[-1].cache.values)]
        with seen:
            step()
        for x, old in zip((*state, *schedules[-1].cache.keys, *schedules[-1].cache.values), before, strict=True):
            x.copy_(old)
        cache = [x.data_ptr() for x in schedules[-1].cache.keys]

        def replay() -> None:
            assert not [ref for ref in seen.outside.values() if ref.expired()], "memory was given back"
            assert [x.data_ptr() for x in schedules[-1].cache.keys] == cache, "the cache is elsewhere"
            replays.append(1)
            step()

        return replay

    schedules: list[Any] = []
    state: list[Any] = []
    run = RecordedSteps.run

    def noted(self: Any, schedule: Any, rows: int, steps: int) -> Any:
        schedules.append(schedule)
        state[:] = schedule.tokens, schedule.counters, self.column, self.num_steps, self.ids, self.probabilities
        return run(self, schedule, rows, steps)

    expected = completions(tiny_random("qwen3"), case, slots, as_recorded=True)
    monkeypatch.setattr(RecordedSteps, "run", noted)
    monkeypatch.setattr(recorded, "record", record)
    monkeypatch.setattr(recorded, "MOST_GRAPHS", most)
    assert completions(tiny_random("qwen3"), case, slots, as_recorded=True, told=[]) == expected
    assert len(replays) > 40


@pytest.mark.parametrize(("case", "slots"), [*((case, 3) for case in SAMPLINGS), ("growth", 12), ("turns", 12)])
def test_recorded_steps_sample_what_the_schedule_samples(tiny_random: Any, case: str, slots: int) -> None:
    """Rows of several lengths, more of them than slots, a cache that grows, turns."""
    model = tiny_random("qwen3")
    expected, found = (completions(model, case, slots, as_recorded=way) for way in (False, True))
    assert [(c.ids, c.own, c.finish) for c in found] == [(c.ids, c.own, c.finish) for c in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == approx(other.logprobs, abs=OF_TINY_RANDOM)
    assert len({len(c.ids) for c in expected}) > (1 if "stop" in {c.finish for c in expected} else 0)


@pytest.mark.usefixtures("a_gpu")
def test_recorded_steps_that_cannot_be_recorded_are_launched_one_by_one(
    tiny_random: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(recorded, "record", refuse)
    told: list[str] = []
    found = completions(tiny_random("qwen3"), "stops", 12, as_recorded=True, told=told)
    assert found == completions(tiny_random("qwen3"), "stops", 12, as_recorded=True)
    assert told == [
        "decode steps are launched one by one, for no CUDA graph can be made: operation not permitted when stream is "
        "capturing"
    ]


def test_rows_of_graph_halves_the_slots_while_the_rows_fit() -> None:
    assert [rows_of_graph(rows, 64) for rows in (64, 33, 32, 17, 9, 8, 1)] == [64, 64, 32, 32, 16, 8, 8]
    assert [rows_of_graph(rows, 5) for rows in (5, 1)] == [5, 5]


@pytest.mark.parametrize(
    ("first", "cursor", "capacity", "window"),
    [
        (0, 127, 400, (0, 128)),
        (0, 128, 400, (0, 256)),
        (0, 390, 400, (0, 400)),
        (600, 1000, 2000, (512, 1024)),
        (0, 3000, 8000, (0, 3072)),  # from 2,048 on the grain is 512
    ],
)
def test_window_of_a_step_holds_its_columns(first: int, cursor: int, capacity: int, window: tuple[int, int]) -> None:
    cache: Any = SimpleNamespace(first=first, cursor=cursor, capacity=capacity)
    assert window_of(cache) == window
