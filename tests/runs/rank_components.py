"""Rewards that go wrong in one of several processes, for the tests of runs in several."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from posttrain.types import Batch, Loss, Outputs

calls = 0


def _is_late(after: int) -> bool:
    """Return True on rank 1 from call number ``after`` on."""
    global calls
    calls += 1
    return os.environ.get("RANK") == "1" and calls > after


def fine(text: str) -> float:
    """A reward that varies in what a model of one layer says."""
    return sum(c in "aeiou" for c in text) / max(1, len(text))


def raises_in_rank_one(text: str, *, after: int = 0) -> float:
    """It raises in rank 1."""
    if _is_late(after):
        raise ValueError("no reward today")
    return fine(text)


def kills_rank_one(text: str, *, after: int = 0) -> float:
    """It ends rank 1 as the system does, where memory runs out."""
    if _is_late(after):
        os.kill(os.getpid(), signal.SIGKILL)
    return fine(text)


def stops_in_rank_one(text: str, *, after: int = 0, note: str = "") -> float:
    """It writes rank 1's process number into a file, and waits for longer than a test does."""
    if _is_late(after):
        Path(note).write_text(str(os.getpid()), encoding="utf-8")
        time.sleep(3600)
    return fine(text)


def dies_while_saving(outputs: Outputs, batch: Batch, *, rank: int = 0, step: int = 2) -> Loss:
    """An objective whose process of one rank ends while that writes its part of a step's checkpoint."""
    from posttrain.training.distributed import HuggingFaceStorageWriter

    write = HuggingFaceStorageWriter.write_data

    def die(self: Any, *arguments: Any) -> Any:
        written = write(self, *arguments)
        if f"step-{step:06d}" in str(self.path) and os.environ.get("RANK", "0") == str(rank):
            os.truncate(next(Path(self.path).glob("*.safetensors")), 100)
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    if write.__name__ != "die":
        HuggingFaceStorageWriter.write_data = die  # type: ignore[method-assign]
    return Loss(-outputs.logprobs)


def asks_to_stop(text: str, *, after: int = 0) -> float:
    """It presses Ctrl-C in rank 0, once."""
    global calls
    calls += 1
    if "RANK" not in os.environ and calls == after:
        os.kill(os.getpid(), signal.SIGINT)
    return fine(text)


def kills_once(text: str, *, rank: int = 1, after: int = 0, note: str = "") -> float:
    """It ends a rank, unless that was done before: its process number is then in a file."""
    global calls
    calls += 1
    if os.environ.get("RANK") == str(rank) and calls > after and not Path(note).exists():
        Path(note).write_text(str(os.getpid()), encoding="utf-8")
        os.kill(os.getpid(), signal.SIGKILL)
    return fine(text)


def waits(text: str, *, after: int = 0, note: str = "", seconds: float = 0.5) -> float:
    """It notes in a file that a rank has paid so many rewards, and then takes its time, until another file is there."""
    global calls
    calls += 1
    if calls == after:
        Path(f"{note}-{os.environ.get('RANK', 0)}").write_text(str(os.getpid()), encoding="utf-8")
    deadline = time.monotonic() + (seconds if calls >= after else 0)
    while not Path(f"{note}-go").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return fine(text)
