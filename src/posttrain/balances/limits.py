"""Limits of what rounding explains: between a sampler and a trainer, and between two computations of one number.

A log-probability of a model of L layers is the result of about ``n = 10 (L + 1)`` roundings one behind the other (two
norms, four products with their sums, scores and softmax of each layer; norm, head and exponents behind the last). If
each moves it by ``c u``, u being the unit of rounding of the coarsest number on the way, two computations differ by
``d = c u √n``, and a KL estimated from tokens (k3) by ``d² / 2``.

In fp32 the head and the softmax round numbers of the size of the logits, which sharp attention multiplies: c is 256
(measured on the embedded model: 6 with four layers). Where activations or weights are coarser, softmax and
log-probabilities are fp32 still, and c is 4 (measured: 0.2 in bf16, 0.4 with weights in 8 bits; 2.3 in one layer with a
head in bf16 and logits up to 44). More than 0.02 nats no rounding explains, however deep a model is.
"""

from __future__ import annotations

import math

# Units of rounding: half of the distance of 1 from the next number. Of whole numbers of b bits that are scaled by the
# largest of a row: half a step.
UNITS = {
    "fp64": 2.0**-24,  # log-probabilities are fp32 whatever the weights are
    "fp32": 2.0**-24,
    "tf32": 2.0**-11,
    "bf16": 2.0**-8,
    "int8": 0.5 / 127,
    "int4": 0.5 / 7,
}
FINE, COARSE = 256.0, 4.0
LARGEST_KL = 0.02
SUM_LIMIT = 1e-5  # of a loss in fp32 next to the sum of its sizes in float64
SLOPE_LIMIT = 1e-4
ADVANTAGE_LIMIT = 1e-5  # advantages are kept in fp32
UPDATE_LIMIT = 1e-2
ALIVE = 1e-10  # nats per token: a KL to the reference below is that of the same weights
MOVED = 1e-4  # the share of their size by which weights have moved before the KL to the reference must show it
LARGE_SURPRISE = 6.0  # standard deviations


def kl_limit(num_layers: int, *kinds: str) -> float:
    """Return the largest mean KL in nats per token that rounding explains; ``kinds``: of numbers, as in ``UNITS``.

    An unknown kind counts as bf16.
    """
    unit = max(UNITS.get(kind, UNITS["bf16"]) for kind in kinds)
    condition = COARSE
    if unit == UNITS["fp32"]:
        condition = FINE
    distance = condition * unit * math.sqrt(10 * (num_layers + 1))
    return min(distance**2 / 2, LARGEST_KL)


def ratio_limit(limit: float) -> float:
    """Return the largest ``|log ρ|`` of a token where the mean KL may be ``limit``: eight standard deviations."""
    return 8 * math.sqrt(2 * limit)
