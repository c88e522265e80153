"""Controller that keeps KL to the reference near a target. Pure."""

from __future__ import annotations

import math

MAX_ERROR = 0.2


def adapt_kl_weight(weight: float, observed_kl: float, target: float, *, num_samples: int, horizon: int) -> float:
    """Update the KL penalty weight for the next batch: larger if KL exceeded its target.

    ``e = clip(KL / KL_target − 1, −0.2, 0.2)`` and ``β' = β · (1 + e · n / horizon)``

    Ziegler et al. (2019), "Fine-tuning language models from human preferences" (arXiv 1909.08593), section 2.2: a
    proportional controller in log space. Gain n / horizon, as in the paper's code, makes adaptation per completion
    independent of batch size.

    Args:
        weight: β for the observed batch.
        observed_kl: mean KL per completion in nats; estimates may be negative.
        target: KL_target, in the same unit.
        num_samples: n, completions per batch.
        horizon: completions after which a persistent error of 20 % changes β by a factor of e^0.2.

    Raises:
        ValueError: nonpositive target or horizon, a horizon so short that β could become 0, or non-finite KL.
    """
    if not (target > 0 and math.isfinite(target)):
        raise ValueError(f"the KL target must be positive, not {target}")
    if num_samples < 0 or horizon <= MAX_ERROR * num_samples:
        raise ValueError(
            f"a horizon of {horizon} completions is too short for batches of {num_samples}: "
            f"it must be more than {MAX_ERROR * num_samples:g}"
        )
    if not math.isfinite(observed_kl):
        raise ValueError(f"the observed KL is {observed_kl}; there is nothing to control by")
    error = min(max(observed_kl / target - 1.0, -MAX_ERROR), MAX_ERROR)
    return weight * (1.0 + error * num_samples / horizon)
