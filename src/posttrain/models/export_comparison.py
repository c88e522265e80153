"""Compare exported models with trained models on probe inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.errors import RunFailure
from posttrain.models.config import context_length
from posttrain.randomness import generator
from posttrain.types import Model

MAX_GAP = 1e-4  # nats, for fp32 weights
_WIDE = 5.0  # nats: above this log-probability spread, rounding errors grow proportionally
_ROWS, _TOKENS, _LAST_IDS = 4, 32, 16


@torch.no_grad()
def read_probe(model: Model, chosen: Sequence[int] = ()) -> Tensor:
    """Compute log-probabilities ``[rows, tokens, V]`` on fixed ids.

    Args:
        model: causal language model, possibly peft-wrapped.
        chosen: ids to include, for example trained embedding rows. The highest vocabulary ids are always included.
    """
    table = model.get_input_embeddings().weight
    size = int(table.shape[0])
    width = min(_TOKENS, context_length(model.config))
    ids = generator(0, "export probe").integers(0, size, (_ROWS, width))
    wanted = [*range(max(0, size - _LAST_IDS), size), *chosen][: ids.size]
    ids.reshape(-1)[: len(wanted)] = wanted
    tokens = torch.from_numpy(ids).to(table.device)
    logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1).cpu()


def check_same(trained: Tensor, exported: Tensor, what: str, *, exact: bool = True) -> float:
    """Compare two probes (``read_probe``); returns their largest gap in nats.

    Args:
        exact: fp32 weights. In half precision, merging rounds, so the tolerance is wider.

    Raises:
        RunFailure: different models.
    """
    spread = float(trained.std(-1).max())
    allowed = 1e-2 + 0.1 * spread
    if exact:
        allowed = MAX_GAP * max(1.0, spread / _WIDE)
    size = min(trained.shape[-1], exported.shape[-1])
    gap = float(torch.nan_to_num((trained[..., :size] - exported[..., :size]).abs(), nan=torch.inf).max())
    if trained.shape != exported.shape:
        gap = torch.inf
    if gap > allowed:
        raise RunFailure(
            f"{what}: its log-probabilities differ from the trained model's by {gap:.1e} nats (at most {allowed:.1e} "
            "is allowed), so it was not written. Please report this, with the architecture and the adapter's settings"
        )
    return gap
