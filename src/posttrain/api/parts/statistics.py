"""The statistics of held-out numbers, ``posttrain.statistics``: intervals, pass@k, paired tests, voting, ranking.

``pass_at_k``, ``wilson_interval``, ``item_interval``, ``standard_error``, ``mcnemar_p``, ``majority_at_k``,
``pair_wins``, ``area_under_curve`` and ``best_of_n`` take the standard library alone; ``paired_bootstrap``,
``half_width`` and ``summarize_seeds`` take numpy, as do those of methods that are compared over seeds and problems
(``interquartile_mean`` to ``detectable_difference``), but for ``mean_height``, ``steps_to`` and ``usable_rates``.

Examples:
    >>> statistics.wilson_interval(30, 100)
    (0.2189..., 0.3958...)
"""

from __future__ import annotations

from posttrain.evaluation.comparisons import (
    CrossedEstimate,
    crossed_difference,
    crossed_mean,
    detectable_difference,
    holm,
    improvement_interval,
    interquartile_interval,
    interquartile_mean,
    mean_height,
    probability_of_improvement,
    seed_difference,
    steps_to,
    usable_rates,
)
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
    "CrossedEstimate",
    "Difference",
    "Summary",
    "area_under_curve",
    "best_of_n",
    "crossed_difference",
    "crossed_mean",
    "detectable_difference",
    "half_width",
    "holm",
    "improvement_interval",
    "interquartile_interval",
    "interquartile_mean",
    "item_interval",
    "majority_at_k",
    "mcnemar_p",
    "mean_height",
    "pair_wins",
    "paired_bootstrap",
    "pass_at_k",
    "probability_of_improvement",
    "seed_difference",
    "standard_error",
    "steps_to",
    "summarize_seeds",
    "usable_rates",
    "wilson_interval",
]
