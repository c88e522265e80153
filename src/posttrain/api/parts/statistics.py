"""Statistics for held-out results, ``posttrain.statistics``: intervals, pass@k, paired tests, voting, ranking.

``pass_at_k``, ``wilson_interval``, ``item_interval``, ``standard_error``, ``mcnemar_p``, ``majority_at_k``,
``pair_wins``, ``area_under_curve``, ``best_of_n``, ``mean_height`` and ``steps_to`` need only the standard library.
``paired_bootstrap``, ``half_width``, ``summarize_seeds`` and method comparisons over seeds and problems
(``interquartile_mean``, ``crossed_mean``, ``holm``, ...) need numpy.

Examples:
    >>> statistics.wilson_interval(30, 100)
    (0.2189..., 0.3958...)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from numbers import Integral
from typing import ParamSpec, TypeVar

from posttrain.api.parts.part_arguments import bind_arguments, check_part_options
from posttrain.errors import UsageError
from posttrain.evaluation import comparisons, statistics
from posttrain.evaluation.comparisons import CrossedEstimate
from posttrain.evaluation.statistics import Difference, Summary

P = ParamSpec("P")
R = TypeVar("R")


def _checked(function: Callable[P, R], shares: str = "") -> Callable[P, R]:
    """Wrap a function with argument type checks; arrays and tensors are converted to lists.

    ``shares``: argument whose numbers must be between 0 and 1.
    """
    signature = inspect.signature(function)
    where = f"statistics.{function.__name__}"

    @wraps(function)
    def checked(*given: P.args, **named: P.kwargs) -> R:
        arguments = {}
        for name, value in bind_arguments(where, signature, given, named).items():
            arguments[name] = value.tolist() if hasattr(value, "tolist") else value
        check_part_options(where, function, arguments)
        for share in arguments.get(shares, ()):
            if not 0 <= share <= 1:
                raise UsageError(f"{where}: {shares}: {share} is out of range. Give numbers from 0 to 1")
        try:
            return function(**arguments)  # type: ignore[call-arg]
        except (TypeError, ValueError, IndexError) as error:
            raise UsageError(f"{where}: {error}") from None

    return checked


def _checked_arrays(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function with checks for integer counts; array conversion errors become UsageErrors."""
    signature = inspect.signature(function)
    where = f"statistics.{function.__name__}"

    @wraps(function)
    def checked(*given: P.args, **named: P.kwargs) -> R:
        arguments = bind_arguments(where, signature, given, named)
        for count in ("seed", "num_resamples"):
            value = arguments.get(count, 0)
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise UsageError(
                    f"{where}: {count}: {type(value).__name__} is not an integer. Give an integer, such as 0"
                )
        try:
            return function(**arguments)  # type: ignore[call-arg]
        except (TypeError, ValueError) as error:
            raise UsageError(f"{where}: {error}. Give arrays or lists of numbers") from None

    return checked


area_under_curve = _checked(statistics.area_under_curve)
best_of_n = _checked(statistics.best_of_n)
half_width = _checked(statistics.half_width)
item_interval = _checked(statistics.item_interval, shares="values")
majority_at_k = _checked(statistics.majority_at_k)
mcnemar_p = _checked(statistics.mcnemar_p)
pair_wins = _checked(statistics.pair_wins)
paired_bootstrap = _checked(statistics.paired_bootstrap)
pass_at_k = _checked(statistics.pass_at_k)
standard_error = _checked(statistics.standard_error)
summarize_seeds = _checked(statistics.summarize_seeds)
wilson_interval = _checked(statistics.wilson_interval)

crossed_difference = _checked_arrays(comparisons.crossed_difference)
crossed_mean = _checked_arrays(comparisons.crossed_mean)
detectable_difference = _checked(comparisons.detectable_difference)
holm = _checked_arrays(comparisons.holm)
improvement_interval = _checked_arrays(comparisons.improvement_interval)
interquartile_interval = _checked_arrays(comparisons.interquartile_interval)
interquartile_mean = _checked_arrays(comparisons.interquartile_mean)
mean_height = _checked(comparisons.mean_height)
probability_of_improvement = _checked_arrays(comparisons.probability_of_improvement)
seed_difference = _checked(comparisons.seed_difference)
steps_to = _checked(comparisons.steps_to)

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
    "wilson_interval",
]
