"""The vLLM servers of a run whose processes a cluster places: those that are ordered, from the first order to the end.

A process says which server it wants (``engines/vllm/placed.py``); it is started on a node that has room, and its url,
or why there is none or no longer one, is left in the meeting's store. Whether a lost one is started again is for the
engine to say, which counts them. Servers outlive the processes that ask them: where these start again, they are given
back the ones that live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.runs.cluster.ray import Placed
    from posttrain.train.distributed import Meeting

PROOF = "config.json"  # in the folder of a server's model: what a node must see, too
_ASKED_FOR = ("model", "options")  # of an order: what a server that is given back has to have been started with


@dataclass
class _Server:
    placed: Placed
    order: Mapping[str, Any]
    url: str = ""  # once it is there


class Servers:
    """Those that work or are being started, by name.

    Args:
        names: that an order may have.
        place: starts a server of a name on a node, as an order says (``Room.start_server``).
    """

    def __init__(self, names: Iterable[str], place: Callable[[str, Mapping[str, Any]], Placed]) -> None:
        self._names, self._place = tuple(names), place
        self._there: dict[str, _Server] = {}
        self._marks: dict[str, str] = {}  # of the newest order of each

    def look(self, meeting: Meeting) -> None:
        """Take what was ordered, and say what has become of it, in the store where both look."""
        for name, server in list(self._there.items()):
            told = server.placed.look()
            if told is None:
                continue
            server.url = told.get("url", "")
            meeting.say(f"{'lost' if 'why' in told else 'server'} {name}/{self._marks[name]}", told)
            if not server.url:
                self._there.pop(name).placed.end()
        for name in self._names:
            order = meeting.said(f"order {name}")
            if order is not None and order["mark"] != self._marks.get(name):
                self._marks[name] = order["mark"]
                self._take(meeting, name, order)

    def _take(self, meeting: Meeting, name: str, order: Mapping[str, Any]) -> None:
        there = self._there.get(name)
        if there is not None and not order["anew"] and all(there.order[key] == order[key] for key in _ASKED_FOR):
            if there.url:  # or its url is said when it has one
                meeting.say(f"server {name}/{order['mark']}", {"url": there.url, "is_kept": True})
            return
        if there is not None:
            self._there.pop(name).placed.end()
        self._there[name] = _Server(self._place(name, order), order)
