"""Variable-length attention by a loop: what stands in for a GPU's kernel where there is none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def looped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """The contract of ``torch.nn.attention.varlen.varlen_attn``, written from its documentation: one sequence at a
    time, in the type of its inputs, causal from the end."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert (int(cu_seq_q[-1]), int(cu_seq_k[-1])) == (len(query), len(key)), "a kernel leaves the rest unwritten"
    assert (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max())) == (max_q, max_k)
    assert window_size == (-1, 0)
    assert enable_gqa or query.shape[1] == key.shape[1]
    times = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(times, 1) for x in (key, value))
    outputs = []
    for i in range(len(cu_seq_q) - 1):
        q, (k, v) = (
            query[cu_seq_q[i] : cu_seq_q[i + 1]],
            (x[cu_seq_k[i] : cu_seq_k[i + 1]] for x in (key, value)),
        )
        scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
        hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(outputs)
