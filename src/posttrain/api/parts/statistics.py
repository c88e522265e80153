"""The statistics of held-out numbers, ``posttrain.statistics``: intervals, pass@k, paired tests, voting, ranking.

``pass_at_k``, ``wilson_interval``, ``item_interval``, ``standard_error``, ``mcnemar_p``, ``majority_at_k``,
``pair_wins``, ``area_under_curve`` and ``best_of_n`` take the standard library alone; ``paired_bootstrap``,
``half_width`` and ``summarize_seeds`` take numpy.

Examples:
    >>> statistics.wilson_interval(30, 100)
    (0.2189..., 0.3958...)
"""

from __future__ import annotations

from posttrain.evaluation.statistics import (
    Difference,
    Summary,
    area_under_curve,
    best_of_n,
    half_width,
    item_interval,
    majority_at_k,
    mcnemar_p,
    pair_wins,
    paired_bootstrap,
    pass_at_k,
    standard_error,
    summarize_seeds,
    wilson_interval,
)

__all__ = [
    "Difference",
    "Summary",
    "area_under_curve",
    "best_of_n",
    "half_width",
    "item_interval",
    "majority_at_k",
    "mcnemar_p",
    "pair_wins",
    "paired_bootstrap",
    "pass_at_k",
    "standard_error",
    "summarize_seeds",
    "wilson_interval",
]
