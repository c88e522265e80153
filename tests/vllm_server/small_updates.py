"""What happens to a server: an update as small as those of training, to be seen or missed, and its death."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from small_runs import Events

RECOVERY_SECONDS = 60.0  # and one start, in which a run of which a server is killed trains again


def update(model: Any, seed: int) -> None:
    """Every number by 1e-5, up or down."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-5 * torch.randn(parameter.shape, generator=generator).sign()


class KillsAServer(Events):
    """An observer of a run that kills the server that has its files in ``place``, once, after the first step."""

    def __init__(self, place: Path) -> None:
        super().__init__()
        self.served, self.seconds = str(place / "served").encode(), [time.monotonic()]
        self.is_done = False

    def __call__(self, event: str, facts: dict[str, Any]) -> None:
        super().__call__(event, facts)
        if event != "step":
            return
        self.seconds.append(time.monotonic())
        for stat in Path("/proc").glob("[0-9]*/cmdline"):
            words: list[bytes] = []
            with contextlib.suppress(OSError):  # it ended since it was listed
                words = stat.read_bytes().split(b"\0")
            if not self.is_done and b"-m" in words[1:2] and self.served in words:
                os.kill(int(stat.parent.name), signal.SIGKILL)
                self.is_done = True

    def check_recovery(self) -> None:
        """The second step comes within ``RECOVERY_SECONDS`` and what the first took, which is the start of a server."""
        begun, first, second = self.seconds[:3]
        print(
            f"\na server was killed: the next step came {second - first:.1f} s later, the first {first - begun:.1f} s"
        )
        assert self.is_done
        assert second - first < RECOVERY_SECONDS + first - begun
