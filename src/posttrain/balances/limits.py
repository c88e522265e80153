"""Rounding limits: between sampler and trainer, and between two computations of the same number.

In a model with L layers, a log-probability results from about ``n = 10 (L + 1)`` sequential roundings (per layer: two
norms, four matrix products with sums, attention scores and softmax; finally norm, head and exponentials). If each
rounding moves it by ``c u``, where u is the coarsest unit of rounding involved, two computations differ by
``d = c u √n``, and a KL estimated from tokens (k3) by ``d² / 2``.

In fp32, head and softmax round numbers as large as the logits, amplified by sharp attention: c is 256 (measured on
the embedded model: 6 with four layers). With coarser activations or weights, softmax and log-probabilities remain
fp32, and c is 4 (measured: 0.2 in bf16, 0.4 with 8-bit weights; 2.3 in a single layer with a bf16 head and logits up
to 44). Rounding never explains more than 0.02 nats, regardless of depth.
"""

from __future__ import annotations

import math

# Units of rounding: half the distance from 1 to the next number. For b-bit integers scaled by a row's maximum: half a
# step.
UNITS = {
    "fp64": 2.0**-24,  # log-probabilities are always fp32
    "fp32": 2.0**-24,
    "tf32": 2.0**-11,
    "bf16": 2.0**-8,
    "int8": 0.5 / 127,
    "int4": 0.5 / 7,
}
FINE, COARSE = 256.0, 4.0
LARGEST_KL = 0.02
SUM_LIMIT = 1e-5  # error of an fp32 loss relative to the float64 sum of absolute terms
SLOPE_LIMIT = 1e-4
ADVANTAGE_LIMIT = 1e-5  # advantages are kept in fp32
UPDATE_LIMIT = 1e-2
ALIVE = 1e-10  # nats per token: below this, the reference has identical weights
MOVED = 1e-4  # relative weight change beyond which KL to the reference must be visible
LARGE_SURPRISE = 6.0  # standard deviations


def kl_limit(num_layers: int, *kinds: str) -> float:
    """Largest mean KL in nats per token explained by rounding. ``kinds``: number formats, as in ``UNITS``.

    Unknown formats count as bf16.
    """
    unit = max(UNITS.get(kind, UNITS["bf16"]) for kind in kinds)
    condition = COARSE
    if unit == UNITS["fp32"]:
        condition = FINE
    distance = condition * unit * math.sqrt(10 * (num_layers + 1))
    return min(distance**2 / 2, LARGEST_KL)


def ratio_limit(limit: float) -> float:
    """Largest ``|log ρ|`` per token if mean KL may reach ``limit``: eight standard deviations."""
    return 8 * math.sqrt(2 * limit)
