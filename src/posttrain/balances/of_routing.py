"""Balances of expert routing: routed tokens, choices per token, and the auxiliary loss from sums per expert."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from posttrain.balances.findings import Reading, compared
from posttrain.balances.record import RouterFacts, RoutingRecord, StepRecord

ROUTING_LIMIT = 1e-4  # of fp32 sums over tokens and layers, relative
ROUTED, CHOICES, MASS = "router_tokens", "router_choices", "router_mass"  # names of recorded sums
LOSS, LOAD = "router_aux_loss", "router_max_load"


def summed_routing(routing: RoutingRecord) -> dict[str, float]:
    """Collect sums for the record: tokens times routers, choices, and probability."""
    return {
        ROUTED: routing.num_tokens,
        CHOICES: float(routing.counts.sum()),
        MASS: float(routing.probabilities.sum()),
    }


def read_routing(record: StepRecord) -> Iterator[Reading]:
    """Yield balances of an update under an auxiliary loss. From files, only those of sums."""
    facts = record.facts.routers
    if facts is None or ROUTED not in record.measured:
        return
    yield _routed(record, facts)
    if record.routing is not None:
        yield from _auxiliary(record, record.routing)


def _routed(record: StepRecord, facts: RouterFacts) -> Reading:
    """Each router sees every real token once, chooses ``top_k`` experts for it, and gives probability 1."""
    found = record.measured
    tokens = found[ROUTED]
    sums = {CHOICES: facts.top_k * tokens, MASS: tokens}
    length = _total_length(record)
    if length is not None:
        sums[ROUTED] = float(facts.num_routers * length)
    readings = [compared("routed", found.get(name, math.nan), x, x, ROUTING_LIMIT) for name, x in sums.items()]
    return max(readings, key=lambda one: one.gap)


def _total_length(record: StepRecord) -> int | None:
    """Count tokens of computed rows, from answers or batch lengths; None if unknown."""
    rows = record.rows
    assert rows is not None
    if record.answers:
        answers = [record.answers[int(place)] for place in rows.answers[rows.computed]]
        return sum(len(one.prompt) + len(one.ids) for one in answers)
    if record.tokens is None or record.tokens.lengths is None:
        return None
    return int(record.tokens.lengths[rows.computed].sum())


def _auxiliary(record: StepRecord, routing: RoutingRecord) -> Iterator[Reading]:
    """Loss E Σ_e f_e P_e (Fedus et al. 2022, eq. 4), and load of the busiest expert over the mean."""
    found = record.measured
    shares = routing.counts.to(torch.float64) / routing.num_tokens
    likely = routing.probabilities.to(torch.float64) / routing.num_tokens
    terms = [len(shares) * float(f) * float(p) for f, p in zip(shares, likely, strict=True)]
    expected = math.fsum(terms)
    yield compared("router_loss", found.get(LOSS, math.nan), expected, expected, ROUTING_LIMIT)
    busiest = float(shares.max()) * len(shares) / math.fsum(shares.tolist())
    yield compared("router_loss", found.get(LOAD, math.nan), busiest, busiest, ROUTING_LIMIT)
