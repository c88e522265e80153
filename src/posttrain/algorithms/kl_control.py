"""A controller that keeps the KL to the reference near a target. Pure."""

from __future__ import annotations

import math

MAX_ERROR = 0.2


def adapt_kl_weight(weight: float, observed_kl: float, target: float, *, num_samples: int, horizon: int) -> float:
    """The weight of the KL penalty for the next batch: larger where the KL was above its target.

    ``e = clip(KL / KL_target − 1, −0.2, 0.2)`` and ``β' = β · (1 + e · n / horizon)``

    Ziegler et al. (2019), "Fine-tuning language models from human preferences" (arXiv 1909.08593), section 2.2: a
    proportional controller in log space. With gain n / horizon, as in the code that the paper came with,
    the speed of adaptation per completion does not depend on the batch size.

    Args:
        weight: β of the batch that was observed.
        observed_kl: its mean KL per completion in nats; an estimate may be negative.
        target: KL_target, in the same unit.
        num_samples: n, completions in the batch.
        horizon: completions after which a lasting error of 20 % has changed β by a factor of e^0.2.

    Raises:
        ValueError: a target or horizon that is not positive, a horizon so short that β could become 0, or a
            KL that is not finite.
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
