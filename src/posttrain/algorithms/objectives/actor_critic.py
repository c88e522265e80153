"""Actor-critic objectives: a policy and a value function in one loss."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algorithms.objectives.primitives import log_ratio
from posttrain.algorithms.objectives.surrogate import NotNegative, clipped_surrogate
from posttrain.registry import register
from posttrain.types import Batch, Loss, Outputs


@register(
    "objective",
    level="token",
    needs=("advantages", "old_logprobs", "returns", "old_values"),
    policy_term=True,
    head="value",
)
def ppo(
    outputs: Outputs,
    batch: Batch,
    *,
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.2,
    value_weight: NotNegative = 0.5,
    value_clip: NotNegative | None = 0.2,
) -> Loss:
    """Proximal policy optimization: the clipped surrogate and a value function with a clipped loss.

    ``values = −min(ρ A, clip(ρ, 1 − ε_low, 1 + ε_high) A) + c_V · L_V``, with
    ``L_V = ½ max((V − R)², (clip(V, V_old − ε_V, V_old + ε_V) − R)²)``.

    Schulman et al. (2017), "Proximal policy optimization algorithms", eq. 7 (surrogate). The paper has
    a plain squared error; its clip is that of the authors' code. As in RLHF: ``advantage: gae``,
    ``aggregate: token_mean``, and the KL in the reward (``kl_in_reward``), not in the loss (``regularize``).

    Shapes: logprobs, scores (V, the value of the state before token t), advantages, returns and
    old_values ``[B, T]``. The metrics ``value_error`` (R − V), ``value_error_squared``, ``returns`` and
    ``returns_squared`` are for the explained variance ``1 − (E[e²] − E[e]²) / Var(R)`` over the whole
    optimizer batch; V in them is the current value.

    Departures: the ½ is explicit; the log-ratio is clamped to ±20 before the exponential.

    Args:
        clip_low, clip_high: ε_low and ε_high.
        value_weight: c_V.
        value_clip: ε_V, in units of the return; none for the plain squared error.
    """
    assert outputs.scores is not None, "the value head was not asked for"
    log_rho = log_ratio(outputs.logprobs, batch.stream("old_logprobs"), batch.mask)
    loss = clipped_surrogate(log_rho.exp(), batch.stream("advantages"), clip_low, clip_high)
    returns = batch.stream("returns")
    value_loss, is_clipped = _value_loss(outputs.scores, batch.stream("old_values"), returns, value_clip)
    error = returns - outputs.scores.detach()
    metrics = loss.metrics | {
        "value_loss": value_loss.detach(),
        "value_clip_fraction": is_clipped.to(value_loss.dtype),
        "value_error": error,
        "value_error_squared": error.square(),
        "returns": returns,
        "returns_squared": returns.square(),
    }
    return Loss(loss.values + value_weight * value_loss, metrics)


def _value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Half the squared error, the worse of clipped and not; and where the clipped one is the worse."""
    plain = 0.5 * (values - returns).square()
    if clip is None:
        return plain, torch.zeros_like(plain, dtype=torch.bool)
    clipped = 0.5 * (old + (values - old).clamp(-clip, clip) - returns).square()
    # inside the range the two differ by rounding only, which is no clipping
    return torch.maximum(plain, clipped), (clipped > plain) & ((values - old).abs() > clip)
