"""How many processes of a machine load a whole model at a time: as many as its main memory holds."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain import world
from posttrain.errors import PeerFailure
from posttrain.train import distributed
from posttrain.train.distributed import Meeting, Processes
from posttrain.world import ONE, free_memory_bytes, peak_resident_bytes
from small_runs import end_of, make_recipe, start, train_command

GIB = 1 << 30
KILLER = f"""
import os
if os.environ.get("RANK") == "1":
    from posttrain.train import build
    build._load_trained = lambda *arguments: os.kill(os.getpid(), {int(signal.SIGKILL)})
"""


class Watched:
    """Processes of one machine, as threads: who is inside at a time, in which order, and how each ended."""

    def __init__(self, size: int, timeout_seconds: float = 20.0) -> None:
        here = Meeting.open(size)
        self.worlds = [Processes(Meeting(rank, size, here.store), timeout_seconds) for rank in range(size)]
        self.inside, self.entered, self.most = 0, list[int](), list[int]()
        self.left = 0
        self.errors: dict[int, BaseException] = {}
        self._lock = threading.Lock()

    def load(self, rank: int, body: Callable[[int], None]) -> None:
        try:
            with self.worlds[rank].in_turn():
                with self._lock:
                    self.inside += 1
                    self.entered.append(rank)
                    self.most.append(self.inside)
                try:
                    body(rank)
                finally:
                    with self._lock:
                        self.inside -= 1
                        self.left += 1
            assert self.left == len(self.worlds), "it ends behind the last one"
        except (PeerFailure, ValueError, AssertionError) as error:
            self.errors[rank] = error

    def run(self, body: Callable[[int], None]) -> Watched:
        self.inside, self.left = 0, 0
        self.entered.clear()
        self.most.clear()
        threads = [threading.Thread(target=self.load, args=(rank, body)) for rank in range(len(self.worlds))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return self


@pytest.mark.parametrize(("free", "width"), [(0, 1), (3.9, 1), (4.5, 2), (7.0, 3), (1000.0, 5)])
def test_the_first_goes_alone_and_others_as_memory_is_left(
    free: float, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 GiB are what one took: of 4.5 free ones nine tenths hold two of them."""
    monkeypatch.setattr(distributed, "peak_resident_bytes", lambda: 2 * GIB)
    monkeypatch.setattr(distributed, "free_memory_bytes", lambda: int(free * GIB))
    watched = Watched(6)
    full = threading.Event()

    def body(rank: int) -> None:
        if len(watched.entered) > 1:  # as long as others could still come
            if watched.inside == width:
                full.set()
            assert full.wait(10)
            time.sleep(0.1)
        else:
            time.sleep(0.2)

    for _ in range(2):  # and again, as behind a restart of the run in the same processes
        watched.run(body)
        assert not watched.errors
        assert sorted(watched.entered) == list(range(6))
        assert watched.most[:2] == [1, 1], "the second waits for the first"
        assert max(watched.most) == width
        full.clear()


def test_what_one_fails_of_the_others_may_say_themselves() -> None:
    def body(rank: int) -> None:
        raise ValueError(f"{rank}: no such model")

    watched = Watched(3).run(body)
    assert {rank: str(error) for rank, error in watched.errors.items()} == {r: f"{r}: no such model" for r in range(3)}


def test_a_failure_elsewhere_ends_who_waits() -> None:
    watched = Watched(3)

    def body(rank: int) -> None:
        watched.worlds[rank]._meeting.fail(7, "its process was ended by SIGKILL", 1)
        time.sleep(1)  # and this one hangs

    started = time.monotonic()
    watched.run(body)
    first = watched.entered[0]
    assert [str(watched.errors[r]) for r in range(3) if r != first] == [
        "rank 7 of 3: its process was ended by SIGKILL"
    ] * 2
    assert time.monotonic() - started < 10


def test_one_that_takes_too_long_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "PATIENCE_SECONDS", 0.2)
    watched = Watched(3, timeout_seconds=1.0)
    watched.run(lambda rank: time.sleep(2.5))
    first = watched.entered[0]
    others = [str(error) for rank, error in watched.errors.items() if rank != first]
    assert any(
        f"the exchange of turns to load did not come about in 1 s; not there: rank {first}." in o for o in others
    )


def test_as_long_as_one_after_another_comes_all_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "free_memory_bytes", lambda: 0)
    watched = Watched(4, timeout_seconds=1.0).run(lambda rank: time.sleep(0.6))
    assert not watched.errors, "2.4 s in all"


def test_alone_there_is_no_turn() -> None:
    with ONE.in_turn():
        assert ONE.size == 1


def test_memory_is_the_machines_and_what_a_group_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_resident_bytes() > 100 << 20, "torch alone"
    lines = {"/proc/meminfo": ["MemTotal: 99 kB", "MemAvailable: 4096 kB"], "/proc/self/cgroup": ["0::/job"]}
    read = world._lines
    monkeypatch.setattr(world, "_lines", lambda path: lines.get(str(path)) or read(path))
    monkeypatch.setattr(world, "_MEMORY", str(tmp_path))
    assert free_memory_bytes() == 4 << 20
    (tmp_path / "job").mkdir()
    for name, text in (("memory.max", "max"), ("memory.current", "5"), ("memory.stat", "anon 1\ninactive_file 2048\n")):
        (tmp_path / "job" / name).write_text(text)
    assert free_memory_bytes() == 4 << 20
    (tmp_path / "job" / "memory.max").write_text("1048576")
    assert free_memory_bytes() == (1 << 20) - 5 + 2048
    (tmp_path / "job" / "memory.max").write_text("4")
    (tmp_path / "job" / "memory.stat").write_text("")
    assert free_memory_bytes() == 0
    lines["/proc/self/cgroup"] = ["4:memory:/old", "0::/"]
    (tmp_path / "memory" / "old").mkdir(parents=True)
    for name, text in (("memory.limit_in_bytes", "3000"), ("memory.usage_in_bytes", "2500")):
        (tmp_path / "memory" / "old" / name).write_text(text)
    (tmp_path / "memory" / "old" / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 100\n")
    assert free_memory_bytes() == 600


def test_a_process_that_is_killed_in_its_turn_is_named(tmp_path: Path) -> None:
    """With weights in parts alone: SFT without answers."""
    recipe = make_recipe(
        "sft", eval={"every": 0}, scale={"processes": 2, "sharding": "fsdp2"}, train={"steps": 2, "lr": 1e-4}
    )
    (tmp_path / "sitecustomize.py").write_text(KILLER)  # which Python imports at its start
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *(p for p in sys.path if p)])}
    started = time.monotonic()
    code, error = end_of(start(train_command(tmp_path, recipe), environment))
    assert code == 1
    assert "rank 1 of 2: its process was ended by SIGKILL" in error
    assert time.monotonic() - started < 60
