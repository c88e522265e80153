"""Steps as they are recorded for a CUDA graph, called on a CPU: the completions of the schedule's own steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from posttrain.engines.base import Sampling
from posttrain.engines.conversation import begin
from posttrain.engines.native import graphs
from posttrain.engines.native.graphs import RecordedSteps, rows_of_graph, window_of
from posttrain.engines.native.lean import LeanDecoder
from posttrain.engines.native.schedule import LONGEST_BURST, Schedule
from posttrain.randomness import derive_key

SAMPLINGS = {
    "stops": Sampling(max_tokens=40, stop_ids=frozenset(range(0, 300, 9))),
    "no stops": Sampling(max_tokens=40),
    "growth": Sampling(max_tokens=300, stop_ids=frozenset(range(3))),
    "greedy": Sampling(max_tokens=20, temperature=0.0),
    "truncated": Sampling(max_tokens=20, temperature=0.7, top_k=5, stop_ids=frozenset(range(0, 300, 9))),
}


def completions(model: Any, sampling: Sampling, slots: int, *, as_recorded: bool) -> list[Any]:
    numbers = np.random.default_rng(1)
    prompts = [numbers.integers(8, 300, n).tolist() for n in (5, 1, 140, 3)]
    keys = [[derive_key(0, "test", i, j) for j in range(3)] for i in range(len(prompts))]
    groups = begin(prompts, keys, sampling.max_tokens, 512)
    decoder = LeanDecoder.bind(model, 512)
    assert decoder is not None
    decoder.can_share = False  # as on a GPU
    with torch.inference_mode():
        schedule = Schedule(decoder, prompts, [row for group in groups for row in group], sampling, slots)
        if as_recorded:
            schedule.recorded = RecordedSteps(schedule, decoder, LONGEST_BURST)
        schedule.run()
    return [row.completion(0) for group in groups for row in group]


@pytest.mark.parametrize("slots", [3, 64])
@pytest.mark.parametrize("case", SAMPLINGS)
def test_recorded_steps_sample_what_the_schedule_samples(tiny_random: Any, case: str, slots: int) -> None:
    """Rows of several lengths, more of them than slots or fewer, a cache that grows."""
    model = tiny_random("qwen3")
    expected, found = (completions(model, SAMPLINGS[case], slots, as_recorded=way) for way in (False, True))
    assert [(c.ids, c.finish) for c in found] == [(c.ids, c.finish) for c in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert len({len(c.ids) for c in expected}) > (1 if "stop" in {c.finish for c in expected} else 0)


class External:
    """A tensor that a graph reads and does not own: its address, which says nothing once the memory is given back."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.dtype, self.place = tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())

    def tensor(self) -> torch.Tensor:
        assert not self.storage.expired(), "a graph reads memory that was given back"
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.place)


class Recording(TorchDispatchMode):
    """Calls with what they read and wrote, as a CUDA graph holds them: own memory, and addresses of other memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Any, Any, list[torch.Tensor | External]]] = []
        self.own: set[int] = set()

    def held(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return x if x.untyped_storage().data_ptr() in self.own else External(x)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        held = tree_map(self.held, (args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.own |= {x.untyped_storage().data_ptr() for x in made} - read
        self.calls.append((func, *held, [self.held(x) for x in made]))
        return out

    def replay(self) -> None:
        for func, args, kwargs, outs in self.calls:
            here = tree_map(lambda x: x.tensor() if isinstance(x, External) else x, (args, kwargs))
            made = [x for x in tree_leaves(func(*here[0], **here[1])) if isinstance(x, torch.Tensor)]
            for old, new in zip(outs, made, strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def record(step: Callable[[], None], changed: Sequence[torch.Tensor], memory: Any) -> Callable[[], None]:
    before = [x.clone() for x in changed]
    recording = Recording()
    with recording:
        step()
    for tensor, old in zip(changed, before, strict=True):
        tensor.copy_(old)
    return recording.replay


@pytest.mark.parametrize("slots", [3, 12])
@pytest.mark.parametrize("case", ["stops", "growth", "greedy"])
def test_recorded_steps_keep_all_memory_that_their_graphs_read(
    tiny_random: Any, case: str, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU memory that was given back is another tensor's: there the mask was, and tokens were wrong."""
    model, sampling = tiny_random("qwen3"), SAMPLINGS[case]
    expected = completions(model, sampling, slots, as_recorded=True)
    monkeypatch.setattr(graphs, "recorded", record)
    assert completions(model, sampling, slots, as_recorded=True) == expected


def test_rows_of_graph_halves_the_slots_while_the_rows_fit() -> None:
    assert [rows_of_graph(rows, 64) for rows in (64, 33, 32, 17, 9, 8, 1)] == [64, 64, 32, 32, 16, 8, 8]
    assert [rows_of_graph(rows, 5) for rows in (5, 1)] == [5, 5]
    assert [rows_of_graph(rows, 100) for rows in (51, 50, 25, 12)] == [100, 50, 25, 12]


@pytest.mark.parametrize(
    ("first", "cursor", "capacity", "window"),
    [(0, 127, 400, (0, 128)), (0, 128, 400, (0, 256)), (600, 1000, 2000, (512, 1024)), (0, 3000, 8000, (0, 3072))],
)
def test_window_of_a_step_holds_its_columns(first: int, cursor: int, capacity: int, window: tuple[int, int]) -> None:
    cache: Any = SimpleNamespace(first=first, cursor=cursor, capacity=capacity)
    assert window_of(cache) == window
    assert window[0] <= first <= cursor < window[1] <= capacity
