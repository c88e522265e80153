"""Answers that go on across updates (``rollout.partial``): which weights write which token, where they are sampled.

Version v of the weights is what v rollout batches have trained. Token t (from 0) of an answer of batch b, whose round
of sampling began with version w, is written with version ``min(b, w + t // n)``, n = ``rollout.partial_tokens``. Round
0 of batch b begins with ``max(0, b − S)``, a further one with the version that finished the round before. So a token
is at most S batches old when it is trained on, and version b, with which batch b is trained on, finishes what is left
of it. (Kimi k1.5, section 2.6.2, has a budget of tokens per iteration, too; AReaL, section 4.1, cuts by the clock.)

What version v writes is done in this order: what it has to finish; then what earlier versions left unfinished,
in common with the batch that begins. Between two versions nothing stays here: the trainer keeps what is carried over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.engines.base import UNLIMITED_CONTEXT
from posttrain.engines.conversation import Conversation, begin
from posttrain.engines.rollout import RolloutRequest
from posttrain.train.sources.messages import read_groups, write_drawn, write_groups
from posttrain.train.sources.rollouts import Groups, RolloutSource

Tell = Callable[[Mapping[str, Any]], None]
OF_A_ROW = ("ids", "logprobs", "versions", "finish")  # what is carried; the rest follows from the request


@dataclass(slots=True)
class InFlight:
    """A rollout batch on its way.

    version: with which it began; began: with which the round did that is being written. sampled: the groups of earlier
    rounds, graded. rows: of this round, by prompt.
    """

    batch: int
    version: int
    began: int
    request: RolloutRequest
    rows: list[list[Conversation]]
    sampled: Groups = field(default_factory=list)
    timing: dict[str, float] = field(default_factory=lambda: {"generate_seconds": 0.0, "score_seconds": 0.0})

    def reach(self, version: int, tokens: int) -> int:
        """How many tokens an answer may have when ``version`` has written, ``tokens`` for each version."""
        return UNLIMITED_CONTEXT if version >= self.batch else (version - self.began + 1) * tokens

    def goes_on(self, reach: int) -> bool:
        """Whether an answer may be written on."""
        return any(row.finish is None and len(row.ids) < reach for rows in self.rows for row in rows)

    def write(self) -> dict[str, Any]:
        """As plain data, without seconds."""
        rows = [[{name: getattr(row, name) for name in OF_A_ROW} for row in rows] for rows in self.rows]
        versions = {"version": self.version, "began": self.began}
        return {"batch": self.batch, **versions, "sampled": write_groups(self.sampled), "rows": rows}


def check_carried(row: Mapping[str, Any], prompts: int, group: int) -> None:
    """Refuse what ``InFlight.write`` does not write of a round of so many prompts; a checkpoint may be a stranger's.

    Raises:
        ValueError, TypeError, KeyError: as ``row`` is wrong.
    """

    def is_written(said: Mapping[str, Any]) -> bool:
        ids, logprobs, versions = (said[name] for name in OF_A_ROW[:3])
        whole = all(type(number) is int and number >= 0 for number in (*ids, *versions))
        alike = len(ids) == len(logprobs) == len(versions) and all(type(x) is float for x in logprobs)
        return whole and alike and said["finish"] in (None, "stop", "length")

    whole = all(type(row[name]) is int and row[name] >= 0 for name in ("batch", "version", "began"))
    if not whole or [len(rows) for rows in row["rows"]] != [group] * prompts:
        raise ValueError("other rows")
    if not all(is_written(said) for rows in row["rows"] for said in rows):
        raise ValueError("other tokens")


def write_version(
    source: RolloutSource, version: int, new: Sequence[int], carried: Sequence[Mapping[str, Any]], tell: Tell
) -> list[dict[str, Any]]:
    """Write all that ``version`` writes; returns what is carried over to the next.

    Args:
        new: the batches that begin. carried: what the version before returned.
        tell: is told of every round that begins, and of every batch that is there.
    """
    old = [_restored(source, row) for row in carried]
    fresh = [InFlight(batch, version, version, *_asked(source, batch, 0)) for batch in new]
    due = [flight for flight in old if flight.batch <= version]
    alone = [[flight] for flight in due + fresh[:-1]]
    together = [flight for flight in old if flight.batch > version] + fresh[-1:]
    for flight in fresh:
        tell({"begins": [flight.batch, 0]})
    unfinished = [flight for flights in (*alone, together) for flight in _write_on(source, version, flights, tell)]
    return [flight.write() for flight in sorted(unfinished, key=lambda flight: flight.batch)]


def _write_on(source: RolloutSource, version: int, flights: list[InFlight], tell: Tell) -> list[InFlight]:
    """Write on at some batches in common, as far as ``version`` may; returns those that are not at their end."""
    tokens, engine = source.options.tokens_per_version, source.engine
    open_flights = list(flights)
    while going := [flight for flight in open_flights if flight.goes_on(flight.reach(version, tokens))]:
        started = time.perf_counter()
        parts = [
            (prompt, rows, flight.reach(version, tokens))
            for flight in going
            for prompt, rows in zip(flight.request.prompts, flight.rows, strict=True)
        ]
        engine.go_on(parts, source.sampling)  # type: ignore[attr-defined]  # other engines are refused (train/checks)
        seconds = time.perf_counter() - started
        for flight in going:
            flight.timing["generate_seconds"] += seconds / len(going)
            if all(row.finish for rows in flight.rows for row in rows) and _is_there(source, version, flight, tell):
                open_flights.remove(flight)
    return open_flights


def _is_there(source: RolloutSource, version: int, flight: InFlight, tell: Tell) -> bool:
    """Grade a round that is written; whether the batch is there, which else begins a further round."""
    said = [[row.completion(source.engine.version) for row in rows] for rows in flight.rows]
    groups, seconds = source.collect(flight.request, said)
    flight.sampled += groups
    flight.timing["score_seconds"] += seconds
    drawn = source.choose(flight.sampled, flight.batch)
    if drawn is None:
        attempt = len(flight.sampled) // source.options.prompts
        flight.began = version
        flight.request, flight.rows = _asked(source, flight.batch, attempt)
        tell({"begins": [flight.batch, attempt]})
        return False
    drawn.version, drawn.timing = flight.version, flight.timing
    tell({"drawn": {"batch": flight.batch, **write_drawn(drawn)}})
    return True


def _asked(source: RolloutSource, batch: int, attempt: int) -> tuple[RolloutRequest, list[list[Conversation]]]:
    """A round of a batch, and its answers before the first token."""
    request = source.request(batch, batch * source.updates + 1, attempt)
    keys = [request.keys(i) for i in range(len(request.prompts))]
    context = source.sampling.within(source.engine.context_tokens)
    return request, begin(request.prompts, keys, source.sampling.max_tokens, context)


def _restored(source: RolloutSource, row: Mapping[str, Any]) -> InFlight:
    """What ``InFlight.write`` wrote."""
    sampled = read_groups(row["sampled"], source)
    request, rows = _asked(source, row["batch"], len(sampled) // source.options.prompts)
    for answers, stated in zip(rows, row["rows"], strict=True):
        for answer, said in zip(answers, stated, strict=True):
            for name in OF_A_ROW:
                setattr(answer, name, said[name])
    return InFlight(row["batch"], row["version"], row["began"], request, rows, sampled)
