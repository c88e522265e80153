"""Two models read one text that one of them writes: the writer, with something of the other put into its activations.

Both keep their own keys and values; at every token the donor computes its activation at a site first, and what is
added to the writer's own may depend on both. Many treatments are decoded side by side, as rows of one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from posttrain.interpret.activations.extract import truncate
from posttrain.interpret.activations.sites import backbone_of, read_site
from posttrain.interpret.features.splice import replaced

# [rows, d] to be added to the writer's activations, given the writer's and the donor's at the same tokens.
Added = Callable[[Tensor, Tensor], Tensor]
COMPACT_EVERY = 4  # tokens between looks at which rows have ended


@dataclass
class _Rows:
    """What is being decoded: one row for each treatment and prompt; ended rows leave the batch."""

    treatment: Tensor  # int64 [R]
    number: Tensor  # int64 [R], the place of the row among all
    tokens: Tensor  # int64 [R, T] to be read next
    mask: Tensor  # int64 [R, so far], 0 where a prompt was padded on the left
    ended: Tensor  # bool [R]
    caches: dict[str, Any] = field(default_factory=lambda: {"writer": DynamicCache(), "donor": DynamicCache()})

    def keep(self, rows: Tensor) -> None:
        self.treatment, self.number, self.tokens = self.treatment[rows], self.number[rows], self.tokens[rows]
        self.mask, self.ended = self.mask[rows], self.ended[rows]
        for cache in self.caches.values():
            cache.batch_select_indices(rows)


@torch.no_grad()
def write_with(
    writer: Any,
    donor: Any,
    site: str,
    prompts: Sequence[Sequence[int]],
    treatments: Sequence[Added],
    *,
    max_tokens: int,
    stop_ids: frozenset[int],
) -> list[list[list[int]]]:
    """Greedy completions of every prompt under every treatment: [treatment][prompt] -> ids, with the stop token.

    Args:
        writer: the causal LM that writes, in eval mode.
        donor: a causal LM over the same tokens, whose activations the treatments see.
        site: where something is added, such as ``resid.2``.
        prompts: token ids, none empty.
        treatments: what is added, one for each group of rows.
        max_tokens: of a completion.
        stop_ids: tokens that end it.
    """
    device = next(writer.parameters()).device
    rows = _start(prompts, len(treatments), device)
    written: list[list[int]] = [[] for _ in range(len(treatments) * len(prompts))]
    # the donor need not go further than the site; its residual stream is what a truncated backbone gives
    short = truncate(donor, read_site(site).layer) if read_site(site).place == "resid" else backbone_of(donor)
    for step in range(max_tokens):
        chosen = _advance(writer, short, site, rows, treatments)
        for number, token, ended in zip(rows.number.tolist(), chosen.tolist(), rows.ended.tolist(), strict=True):
            if not ended:
                written[number].append(token)
        stopped = torch.tensor([token in stop_ids for token in chosen.tolist()], device=device)
        rows.ended = rows.ended | stopped
        rows.tokens = chosen[:, None]
        rows.mask = torch.cat([rows.mask, torch.ones_like(rows.tokens)], dim=1)
        if bool(rows.ended.all()):
            break
        if step % COMPACT_EVERY == 0 and bool(rows.ended.any()):
            rows.keep((~rows.ended).nonzero()[:, 0])
    size = len(prompts)
    return [written[start : start + size] for start in range(0, len(written), size)]


def _start(prompts: Sequence[Sequence[int]], num_treatments: int, device: Any) -> _Rows:
    width = max(map(len, prompts))
    tokens = torch.zeros((len(prompts), width), dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, ids in enumerate(prompts):
        tokens[row, width - len(ids) :] = torch.tensor(list(ids))
        mask[row, width - len(ids) :] = 1
    count = num_treatments * len(prompts)
    return _Rows(
        torch.arange(num_treatments, device=device).repeat_interleave(len(prompts)),
        torch.arange(count, device=device),
        tokens.repeat(num_treatments, 1).to(device),
        mask.repeat(num_treatments, 1).to(device),
        torch.zeros(count, dtype=torch.bool, device=device),
    )


def _advance(writer: Any, donor: Any, site: str, rows: _Rows, treatments: Sequence[Added]) -> Tensor:
    """Read ``rows.tokens`` with both models; the likeliest next token of each row, int64 [R]."""
    positions = (rows.mask.cumsum(1) - 1).clamp_min(0)[:, -rows.tokens.shape[1] :]
    real = rows.mask[:, -rows.tokens.shape[1] :].bool()
    common = {"attention_mask": rows.mask, "position_ids": positions, "use_cache": True}
    seen: list[Tensor] = []

    def look(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    if read_site(site).place == "resid":
        read = donor(input_ids=rows.tokens, past_key_values=rows.caches["donor"], **common)
        seen.append(read.last_hidden_state)
    else:
        with replaced(donor, site, look):
            donor(input_ids=rows.tokens, past_key_values=rows.caches["donor"], **common)
    given = seen[0].float()

    def change(x: Tensor) -> Tensor:
        added = torch.zeros_like(x, dtype=torch.float32)
        for index, treatment in enumerate(treatments):
            where = real & (rows.treatment == index)[:, None]
            if bool(where.any()):
                added[where] = treatment(x[where].float(), given[where])
        return (x.float() + added).to(x.dtype)

    with replaced(writer, site, change):
        output = writer(input_ids=rows.tokens, past_key_values=rows.caches["writer"], **common, logits_to_keep=1)
    likeliest: Tensor = output.logits[:, -1].argmax(-1)
    return likeliest
