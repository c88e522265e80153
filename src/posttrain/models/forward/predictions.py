"""Log-probabilities and entropies at trained positions, applying the LM head in chunks.

Large ``[tokens, V]`` tensors are never materialized. Results are fp32 or float64, regardless of weight dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from posttrain.models.forward.logit_rules import FAR_BELOW, apply_rules, ids_as_mask, tokens_before
from posttrain.models.heads import WithSlopes, score_logits
from posttrain.types import LogitRules

# Maximum logits per chunk: 64 MiB in fp32 on CPUs; on GPUs enough for good utilization.
MAX_LOGIT_ELEMENTS = 1 << 24
MAX_LOGIT_ELEMENTS_ON_GPU = 1 << 28
# CPUs store this many probabilities (512 MiB in fp32) for backward, skipping one in four products for trained heads: a
# 0.1-billion-parameter update at V = 151,936 takes 4.63 s instead of 5.74.
KEPT_ELEMENTS = 1 << 27
# GPU memory fraction for stored probabilities: 5 of 80 GB hold 8,800 tokens at V = 151,936.
KEPT_SHARE_OF_GPU = 1 / 16
LOG_ZERO = -100.0  # log-probability for excluded ids

Entropy = Literal["none", "detached", "differentiable"]


def max_logit_elements(gpu_memory: int | None) -> int:
    """Choose the chunk size in logits, on a CPU (None) or a GPU given its memory in bytes.

    Logits plus temporaries (16 bytes each) use at most a sixteenth of GPU memory.
    """
    if gpu_memory is None:
        return MAX_LOGIT_ELEMENTS
    return max(MAX_LOGIT_ELEMENTS, min(MAX_LOGIT_ELEMENTS_ON_GPU, gpu_memory // (16 * 16)))


def kept_elements(gpu_memory: int | None) -> int:
    """Choose how many trained-head probabilities are stored for backward."""
    if gpu_memory is None:
        return KEPT_ELEMENTS
    return int(gpu_memory * KEPT_SHARE_OF_GPU) // 4


def gpu_memory_of(device: torch.device) -> int | None:
    """GPU memory in bytes; None on CPU."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


@dataclass(frozen=True, slots=True)
class States:
    """States at M trained positions in row-major order, the first ``num_targets`` real.

    predicting: hidden states ``[M, d]`` or logits ``[M, V]`` (None if log-probabilities are not needed); project:
    maps a slice to logits; reading ``[M, d]``: scalar-head inputs; targets ``int64 [M]``; where ``bool [B, T]``;
    num_logits: V; is_head_fixed: ``project`` is a frozen LM head.
    """

    predicting: Tensor | None
    project: Callable[[Tensor], Tensor]
    reading: Tensor | None
    targets: Tensor
    num_targets: int
    where: Tensor
    num_logits: int
    is_head_fixed: bool = False

    def spread(self, values: Tensor) -> Tensor:
        """``[M, ...]`` back to ``[B, T, ...]`` at the trained positions, 0 elsewhere."""
        inner = values.shape[1:]
        out = torch.zeros((*self.where.shape, *inner), dtype=values.dtype, device=self.where.device)
        mask = self.where.view(*self.where.shape, *(1 for _ in inner))
        return out.masked_scatter(mask, values[: self.num_targets])


@dataclass(frozen=True, slots=True)
class Draws:
    """Sampling modifications for M trained tokens, if drawn from anything except the plain distribution.

    sets ``int32 [M, K]``: tokens kept by truncation, padded by -1. rules: require batch tokens ``int64 [B, T]``, plus
    row, column (``int64 [M]``) and ``is_barred`` (``bool [M]``) per trained token.
    """

    sets: Tensor | None = None
    rules: LogitRules | None = None
    tokens: Tensor | None = None
    rows: Tensor | None = None
    columns: Tensor | None = None
    is_barred: Tensor | None = None

    def per_token(self) -> dict[str, tuple[Tensor, int]]:
        """Collect per-token tensors by name, each paired with its filler value."""
        named = {
            "sets": (self.sets, -1),
            "rows": (self.rows, 0),
            "columns": (self.columns, 0),
            "is_barred": (self.is_barred, 0),
        }
        return {name: (values, filler) for name, (values, filler) in named.items() if values is not None}

    def apply(self, logits: Tensor, own: dict[str, Tensor]) -> Tensor:
        """Apply rules to logits ``[m, V]``; ``own``: matching rows from ``per_token``."""
        if self.rules is None:
            return logits
        seen: Tensor | None = None
        if self.rules.repetition_penalty != 1.0:
            assert self.tokens is not None, "a penalty is of the tokens before"
            seen = tokens_before(self.tokens[own["rows"]], own["columns"], logits.shape[1])
        barred: Tensor | None = None
        if self.rules.barred_ids:
            ends = ids_as_mask(self.rules.barred_ids, logits.shape[1], logits.device)
            barred = own["is_barred"].bool()[:, None] & ends
        return apply_rules(self.rules, logits, seen, barred)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Next-token distribution: logits divided by ``temperature``.

    Candidates range over the first ``num_ids`` ids (None: everything). ``restricts_targets``: restrict trained tokens
    likewise; higher ids get ``LOG_ZERO``.
    """

    temperature: float
    num_ids: int | None
    restricts_targets: bool

    def predict(
        self, states: States, entropy: Entropy, candidates: Tensor | None = None, draws: Draws | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute log-probabilities, entropies ``[M]``, and log-probabilities for ``candidates [num_targets, K]``.

        Given ``draws``, these use the actual sampling distributions; candidates then come from the sets, padded by -1.
        """
        assert candidates is None or draws is None or draws.rules is None, "a recipe with both is refused"
        named: dict[str, tuple[Tensor, int]] = {}
        is_whole = False  # some tokens have no set
        if draws is not None:
            named = draws.per_token()
            is_whole = draws.sets is not None and bool((draws.sets < 0).all(dim=1).any())
        if candidates is not None:
            named["candidates"] = (candidates, 0)
        extra = [_filled_up(values, len(states.targets), filler) for values, filler in named.values()]

        def run(part: Tensor, ids: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            own = dict(zip(named, ids[1:], strict=True))
            logits = states.project(part)
            per_token: tuple[Tensor | None, ...]
            if draws is not None:
                logits = draws.apply(logits, own)
            if "sets" in own:
                per_token = self._score_sets(logits, ids[0], own, entropy, is_whole)
            else:
                per_token = self._score(logits, ids[0], entropy, own.get("candidates"))
            return tuple(x for x in per_token if x is not None)

        # Candidates need one gradient each per token; entropy gradients store three tables.
        slopes = states.is_head_fixed and candidates is None
        kept = 0
        if entropy != "differentiable":
            kept = kept_elements(gpu_memory_of(states.targets.device))
        logprobs, *others = _in_chunks(run, states, (states.targets, *extra), slopes, kept)
        entropies = None
        if entropy != "none":
            entropies = others.pop(0)
        of_candidates = None
        if candidates is not None:
            of_candidates = others.pop()
        return logprobs, entropies, of_candidates

    def likeliest(self, states: States, k: int, draws: Draws | None = None) -> tuple[Tensor, Tensor]:
        """Find the k likeliest tokens ``int64 [M, K]`` plus log-probabilities ``float32 [M, K]``; K never exceeds V.

        Given sets in ``draws``, they come from these, padded by -1 with ``LOG_ZERO``.
        """
        if draws is not None and draws.sets is not None:
            sets = _filled_up(draws.sets, len(states.targets), -1)

            def best_of_set(part: Tensor, own: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                table, is_member = self._within(states.project(part), own[0])
                values, places = table.log_softmax(dim=-1).topk(min(k, table.shape[1]), dim=-1)
                missing = ~is_member.gather(1, places)
                ids = own[0].long().gather(1, places).masked_fill(missing, -1)
                room = (0, k - ids.shape[1])
                return pad(ids, room, value=-1), pad(values.masked_fill(missing, LOG_ZERO), room, value=LOG_ZERO)

            ids, logprobs = _in_chunks(best_of_set, states, (sets,))
            return ids, logprobs

        def best(part: Tensor, _: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            logits = states.project(part)[:, : self.num_ids]
            ids = logits.topk(min(k, logits.shape[-1]), dim=-1).indices
            values = score_logits(logits, ids[:, 0], self.temperature, "none", ids)[2]  # as another model's are
            assert values is not None
            return ids, values

        ids, logprobs = _in_chunks(best, states, ())
        return ids, logprobs

    def _score(
        self, logits: Tensor, targets: Tensor, entropy: Entropy, candidates: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """``score_logits`` over allowed ids."""
        n = self.num_ids
        if n is None:
            return score_logits(logits, targets, self.temperature, entropy, candidates)
        inside = logits[:, :n]
        own = targets.clamp(max=n - 1)
        if self.restricts_targets:
            logprobs, entropies, of_candidates = score_logits(inside, own, self.temperature, entropy, candidates)
            return logprobs.masked_fill(targets >= n, LOG_ZERO), entropies, of_candidates
        logprobs, entropies, _ = score_logits(logits, targets, self.temperature, entropy)
        if candidates is None:
            return logprobs, entropies, None
        return logprobs, entropies, score_logits(inside, own, self.temperature, "none", candidates)[2]

    def _within(self, logits: Tensor, sets: Tensor) -> tuple[Tensor, Tensor]:
        """Logits over temperature of ``sets [M, K]``, ``FAR_BELOW`` for padding, and which are members."""
        inside, is_member = self._members(logits, sets)
        if inside.dtype != torch.float64:
            inside = inside.float()
        return inside / self.temperature, is_member

    def _members(self, logits: Tensor, sets: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of ``sets [M, K]``, ``FAR_BELOW`` for padding, and which are members."""
        limit = logits.shape[1]
        if self.restricts_targets and self.num_ids is not None:
            limit = self.num_ids
        is_member = (sets >= 0) & (sets < limit)
        return logits.gather(1, sets.clamp(0, limit - 1).long()).masked_fill(~is_member, FAR_BELOW), is_member

    def _score_sets(
        self, logits: Tensor, targets: Tensor, own: dict[str, Tensor], entropy: Entropy, is_whole: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probabilities and entropies ``[M]`` over sets, and of candidates; ``is_whole``: some tokens have no set.

        own: ``sets [M, K]``, optionally ``candidates [M, C]`` from these.
        """
        sets = own["sets"]
        candidates = own.get("candidates")
        inside, is_member = self._members(logits, sets)
        is_target = is_member & (sets == targets[:, None])
        places = is_target.int().argmax(dim=1)
        logprobs, entropies, _ = score_logits(inside, places, self.temperature, entropy)
        logprobs = logprobs.masked_fill(~is_target.any(dim=1), LOG_ZERO)
        of_candidates: Tensor | None = None
        if candidates is not None:
            chosen, is_chosen = self._within(logits, candidates)
            total = self._within(logits, sets)[0].logsumexp(dim=1, keepdim=True)
            of_candidates = (chosen - total).masked_fill(~is_chosen, LOG_ZERO)
        if not is_whole:
            return logprobs, entropies, of_candidates
        assert candidates is None, "candidates are of drawn tokens, which have sets"
        has_none = (sets < 0).all(dim=1)
        whole, of_whole, _ = self._score(logits, targets, entropy)
        if entropies is not None and of_whole is not None:
            entropies = torch.where(has_none, of_whole, entropies)
        return torch.where(has_none, whole, logprobs), entropies, None


def _filled_up(rows: Tensor, count: int, filler: int) -> Tensor:
    """``[N, ...]`` with a filler behind, ``[count, ...]``; the number of trained tokens is rounded up."""
    return torch.cat([rows, rows.new_full((count - len(rows), *rows.shape[1:]), filler)])


def _in_chunks(
    run: Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]],
    states: States,
    ids: tuple[Tensor, ...],
    with_slopes: bool = False,
    kept: int = 0,
) -> tuple[Tensor, ...]:
    """``run`` over parts of the trained tokens, so that the logits of a part are small.

    Of several parts, gradients are formed at once (``with_slopes``), or those after the first ``kept`` elements are
    recomputed in backward.
    """
    rows = states.predicting
    assert rows is not None
    at_once = max_logit_elements(gpu_memory_of(states.targets.device))
    chunk = max(1, at_once // states.num_logits)
    if len(rows) <= chunk:
        return run(rows, ids)
    with_slopes = with_slopes and rows.requires_grad and torch.is_grad_enabled()
    pieces: list[tuple[Tensor, ...]] = []
    for start in range(0, len(rows), chunk):
        part = rows[start : start + chunk]
        own = tuple(x[start : start + chunk] for x in ids)
        if with_slopes:
            pieces.append(WithSlopes.apply(part, run, own))
        elif (start + len(part)) * states.num_logits <= kept:
            pieces.append(run(part, own))
        else:
            pieces.append(checkpoint(run, part, own, use_reentrant=False))
    return tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))
