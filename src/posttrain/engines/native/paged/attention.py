"""Attention of one query a row over the row's pages, and which kernel of this machine computes it.

``by_table`` is torch's variable-length flash attention in 16 bits, which reads pages where they are. It is taken where
the installed torch knows of pages and a trial against the scores written out is right: of its kernels some refuse them,
and some only take large pages. Elsewhere ``gathered`` copies a row's pages side by side and masks what lies behind.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from posttrain.engines.native.paged.pool import Pool
from posttrain.engines.native.prefixes import LayerShape
from posttrain.models.forward.varlen import COARSE, EXACT, each_query_its_keys, made_up

PAGE_SIZE = 16  # tokens, where the kernel takes any
PAGE_SIZES = (16, 64, 256)  # tried in turn: flash attention 3 takes any, flash attention 2 the last

# (q [R, H, D], keys and values [pages, size, K, D], view, scale) -> [R, H, D]
PagedAttention = Callable[[Tensor, Tensor, Tensor, "PageView", float], Tensor]


class PageView:
    """Where the rows of one step write, and what they look at; nothing in it waits for the device.

    Args:
        table: ``int32 [R, W]``, the pages of each row in order; page 0 where it has none.
        positions: ``int64 [R]``, of the tokens that are fed; a row looks at those before and at its own.
    """

    def __init__(self, pool: Pool, attention: PagedAttention, table: Tensor, positions: Tensor) -> None:
        size = pool.page_size
        self.pool = pool
        self.attention = attention
        self.table = table
        page = table.gather(1, (positions // size)[:, None]).squeeze(1).long()
        self.places = page * size + positions % size
        self.lengths = positions.int() + 1
        self.width = table.shape[1] * size
        self.starts = torch.arange(len(table) + 1, dtype=torch.int32, device=table.device)
        self.bias: Tensor | None = None
        if attention is gathered:
            self.pages = table.long()
            behind = torch.arange(self.width, device=table.device) >= self.lengths[:, None]
            zeros = torch.zeros(behind.shape, dtype=pool.keys[0].dtype, device=table.device)
            self.bias = zeros.masked_fill_(behind, -torch.inf)[:, None, None, :]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Write ``k`` and ``v [R, K, D]`` into the rows' pages; what ``q [R, H, D]`` finds there, ``[R, H * D]``."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        keys.flatten(0, 1).index_copy_(0, self.places, k)
        values.flatten(0, 1).index_copy_(0, self.places, v)
        return self.attention(q, keys, values, self, scale).reshape(len(q), -1)


def gathered(q: Tensor, keys: Tensor, values: Tensor, view: PageView, scale: float) -> Tensor:
    """The pages of a row side by side, and a mask behind its last token."""
    k, v = (x[view.pages].flatten(1, 2).transpose(1, 2) for x in (keys, values))
    # The query heads that share a key head stand as query positions; see ``LeanDecoder``.
    query = q.reshape(len(q), keys.shape[2], -1, q.shape[2])
    return F.scaled_dot_product_attention(query, k, v, attn_mask=view.bias, scale=scale).reshape(q.shape)


def by_table(
    q: Tensor, keys: Tensor, values: Tensor, view: PageView, scale: float, key_starts: Tensor | None = None
) -> Tensor:
    """By ``torch.nn.attention.varlen`` over the pages themselves.

    The keys of a row are never split: its sums are of the same order whoever stands beside it, and where torch may
    choose, flash attention 2 splits pages wrongly (pytorch issue 194167: rows after the first are not written).
    """
    from torch.nn.attention.varlen import varlen_attn

    where: dict[str, Any] = {"seqused_k": view.lengths, "block_table": view.table, "num_splits": 1}
    grouped, starts = keys.shape[2] != q.shape[1], view.starts
    out = varlen_attn(q, keys, values, starts, key_starts, 1, view.width, scale=scale, enable_gqa=grouped, **where)
    assert isinstance(out, Tensor), "log-sums were not asked for"
    return out


def by_table_and_starts(q: Tensor, keys: Tensor, values: Tensor, view: PageView, scale: float) -> Tensor:
    """The same for flash attention 2, which asks where keys begin and does not read it; version 3 refuses that."""
    return by_table(q, keys, values, view, scale, view.starts * view.width)


def written_out(q: Tensor, keys: Tensor, values: Tensor, view: PageView, scale: float) -> Tensor:
    """Row by row with all scores: what the others are compared with."""
    rows = []
    for query, pages, length in zip(q, view.table.long(), view.lengths.tolist(), strict=True):
        k, v = (x[pages].flatten(0, 1)[:length] for x in (keys, values))
        k, v = each_query_its_keys(query[None], k, v, heads=1)
        rows.append(torch.einsum("hk,khd->hd", (torch.einsum("hd,khd->hk", query, k) * scale).softmax(-1), v))
    return torch.stack(rows)


@cache
def attention_for(
    device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, head_dim: int
) -> tuple[PagedAttention, int]:
    """What attends to pages here, and how many tokens a page has for it."""
    if device.type == "cuda" and dtype.itemsize == 2 and torch.backends.cuda.flash_sdp_enabled():
        for size, kernel in product(PAGE_SIZES, (by_table, by_table_and_starts)):
            if is_right(kernel, size, device, dtype, heads, key_heads, head_dim):
                return kernel, size
    return gathered, PAGE_SIZE


def is_right(
    attention: PagedAttention,
    page_size: int,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    key_heads: int,
    head_dim: int,
) -> bool:
    """Whether ``attention`` runs here and computes what the scores written out give, in fp32."""
    table = torch.tensor([[5, 2, 0], [1, 6, 3], [4, 0, 0]], dtype=torch.int32, device=device)
    positions = torch.tensor([page_size + 2, 3 * page_size - 1, 0], device=device)
    q = made_up(3, heads, head_dim, device).to(dtype)
    pool = Pool([LayerShape(key_heads, head_dim, head_dim, dtype)], 6, page_size, device)
    keys, values = pool.keys[0], pool.values[0]
    numbers = made_up(2 * 7 * page_size, key_heads, head_dim, device).view(2, *keys.shape)
    keys.copy_(numbers[0])
    values.copy_(numbers[1])
    view = PageView(pool, attention, table, positions)
    expected = written_out(q.float(), keys.float(), values.float(), view, head_dim**-0.5)
    try:
        computed = attention(q, keys, values, view, head_dim**-0.5).float()
    except (RuntimeError, ValueError, TypeError, AttributeError, ImportError, OSError):
        return False  # this device, this size of heads or of pages has none of it, or this torch knows no pages
    bound = (COARSE if dtype.itemsize < 4 else EXACT) * expected.abs().max()
    return bool(((computed - expected).abs().max() <= bound).item())
