"""Selections: which sampled completions to train on, in units. Pure.

Selections map rewards of one rollout batch, ``float64 [N, G]`` (N prompts, G samples each), to units: tuples of places
``(prompt, sample)``. Rows have one place; pairs have two, chosen first. Units are in prompt order. Examples: rejection
sampling, expert iteration, preference data from model samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from torch import Tensor

from posttrain import registry
from posttrain.acting.methods import if_below_share_of_group
from posttrain.errors import UsageError
from posttrain.registry import register
from posttrain.signatures import Float64, Range

Rewards = Float64[Tensor, "N G"]
Place = tuple[int, int]
Units = list[tuple[Place, ...]]


def choose_units(select: Callable[[Tensor], Any], rewards: Rewards, rows_per_unit: int) -> Units:
    """Call a selection, and check that it returns ``rows_per_unit`` valid places per unit.

    Raises:
        RunFailure: the function failed.
        UsageError: invalid result.
    """
    units = registry.call("rollout.select", select, rewards)
    prompts, group = rewards.shape
    known = {(n, g) for n in range(prompts) for g in range(group)}
    if not isinstance(units, list) or not all(
        isinstance(unit, tuple)
        and len(unit) == rows_per_unit
        and all(isinstance(place, tuple) and place in known for place in unit)
        for unit in units
    ):
        raise UsageError(
            f"rollout.select: the function returned {str(units)[:80]!r} for rewards of shape {(prompts, group)}; it "
            f"must give a list of units, each a tuple of {rows_per_unit} place(s) (prompt, sample)"
        )
    return units


@register("selection", level="row", takes_all=True)
def every(rewards: Rewards) -> Units:
    """Select every sampled completion, in order."""
    prompts, group = rewards.shape
    return [((n, g),) for n in range(prompts) for g in range(group)]


@register("selection", level="row")
def best_of(
    rewards: Rewards, *, keep: Annotated[int, Range(ge=1), if_below_share_of_group(1)] = 1, above: float | None = None
) -> Units:
    """Select the ``keep`` highest-reward completions per prompt; earlier samples win ties.

    Best-of-n, rejection sampling (Touvron et al. 2023, "Llama 2", arXiv 2307.09288, section 3.2.3).

    Args:
        keep: completions per prompt.
        above: require rewards above this value, so that some prompts may contribute none; null accepts any.
    """
    units: Units = []
    for n, row in enumerate(rewards.tolist()):
        order = sorted(range(len(row)), key=lambda g: (-row[g], g))[:keep]
        units += [((n, g),) for g in sorted(order) if above is None or row[g] > above]
    return units


@register("selection", level="row")
def above(rewards: Rewards, *, threshold: float) -> Units:
    """Select every completion with reward above ``threshold``.

    Expert iteration (Anthony et al. 2017, arXiv 1705.08439; for language models STaR, Zelikman et al. 2022, arXiv
    2203.14465, and ReST-EM, Singh et al. 2023): keep correct answers, imitate them, and sample again.

    What goes wrong: If no answer passes the threshold, the step trains on nothing. Start from a model that is sometimes
    correct.

    Args:
        threshold: in reward units.
    """
    return [((n, g),) for n, row in enumerate(rewards.tolist()) for g, r in enumerate(row) if r > threshold]


@register("selection", level="row", labels_by="threshold")
def balanced(
    rewards: Rewards, *, threshold: float = 0.5, keep: Annotated[int, Range(ge=1), if_below_share_of_group(2)] = 1
) -> Units:
    """Select equal numbers of completions above and below ``threshold``, up to ``keep`` of each per prompt.

    Gives the rows of ``right_and_wrong`` unpaired, for objectives with labels such as ``kto``.

    Args:
        threshold: rewards above it count as correct.
        keep: maximum correct completions per prompt, with as many wrong completions.
    """
    return [(place,) for pair in right_and_wrong(rewards, threshold=threshold, num_pairs=keep) for place in pair]


@register("selection", level="pair")
def best_and_worst(rewards: Rewards) -> Units:
    """Pair each prompt's highest-reward completion with its lowest.

    Earlier samples win ties. Prompts with equal rewards give no pair.
    """
    units: Units = []
    for n, row in enumerate(rewards.tolist()):
        best, worst = row.index(max(row)), row.index(min(row))
        if row[best] > row[worst]:
            units.append(((n, best), (n, worst)))
    return units


@register("selection", level="pair")
def right_and_wrong(
    rewards: Rewards, *, threshold: float = 0.5, num_pairs: Annotated[int, Range(ge=1), if_below_share_of_group(2)] = 1
) -> Units:
    """Pair completions above ``threshold`` with others, up to ``num_pairs`` per prompt.

    Each completion is used at most once: the i-th correct sample is paired with the i-th wrong sample.

    Args:
        threshold: rewards above it count as correct.
        num_pairs: maximum pairs per prompt.
    """
    units: Units = []
    for n, row in enumerate(rewards.tolist()):
        correct = [g for g, r in enumerate(row) if r > threshold]
        wrong = [g for g, r in enumerate(row) if r <= threshold]
        units += [((n, a), (n, b)) for a, b in zip(correct, wrong, strict=False)][:num_pairs]
    return units
