"""How long a server waits for one visitor: who holds a connection and asks nothing, or reads nothing, loses it.

Without it a few hundred connections that send a byte now and then are all that a process can have open.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 20.0  # in which the head of a request must have come
STUCK_SECONDS = 60.0  # in which some of an answer must have been read
BACKLOG = 128  # connections that are taken at a time


def most_connections() -> int:
    """How many may be open at a time: three quarters of the files that this process may open."""
    try:
        import resource
    except ImportError:  # Windows
        return 256
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 16 if soft == resource.RLIM_INFINITY else max(1, soft * 3 // 4)


class PatientProtocol(H11Protocol):
    """HTTP as uvicorn speaks it, with the limits above; what is being answered is never cut off."""

    _head: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A visitor has come."""
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.abort()
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """A visitor has gone."""
        for timer in (self._head, self._reading):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """An answer has been written, if not read yet; another request may follow, or has come already."""
        super().on_response_complete()
        self._await_head()

    def pause_writing(self) -> None:
        """The visitor reads more slowly than is written."""
        super().pause_writing()
        if self._reading is None:
            self._reading = self.loop.call_later(STUCK_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """What was written has been read."""
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _await_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
        self._head = self.loop.call_later(HEAD_SECONDS, self._give_up, self.cycle)

    def _give_up(self, last: Any) -> None:
        """Hang up where no request has come since ``last``, which has been answered."""
        if self.cycle is last and (last is None or last.response_complete):
            self.transport.abort()
