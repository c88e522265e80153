"""Selections of the sampled completions that are trained on, in units. Pure.

Each selection takes the rewards of one rollout batch as ``float64 [N, G]`` (N prompts, G samples each)
and returns units: tuples of places ``(prompt, sample)``, one place per row, or two per pair, the
chosen one first. Units come in order of their prompt. Rejection sampling, expert iteration and
preference data from the model's own samples are such selections.
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
    """Call a selection and check its result: places of these rewards, ``rows_per_unit`` in each unit.

    Raises:
        RunFailure: the function raised.
        UsageError: it returned something else.
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
    """Every completion that was sampled, in order."""
    prompts, group = rewards.shape
    return [((n, g),) for n in range(prompts) for g in range(group)]


@register("selection", level="row")
def best_of(
    rewards: Rewards, *, keep: Annotated[int, Range(ge=1), if_below_share_of_group(1)] = 1, above: float | None = None
) -> Units:
    """The ``keep`` completions of highest reward of each prompt; of equal ones those sampled first.

    Best-of-n, rejection sampling (Touvron et al. 2023, "Llama 2", arXiv 2307.09288, section 3.2.3).

    Args:
        keep: completions per prompt.
        above: if given, only those whose reward is higher than this; a prompt may then give none.
    """
    units: Units = []
    for n, row in enumerate(rewards.tolist()):
        order = sorted(range(len(row)), key=lambda g: (-row[g], g))[:keep]
        units += [((n, g),) for g in sorted(order) if above is None or row[g] > above]
    return units


@register("selection", level="row")
def above(rewards: Rewards, *, threshold: float) -> Units:
    """Every completion whose reward is higher than ``threshold``.

    Expert iteration (Anthony et al. 2017, arXiv 1705.08439; for language models STaR, Zelikman et al. 2022, arXiv
    2203.14465, and ReST-EM, Singh et al. 2023): keep what was right, imitate it, sample again.

    What goes wrong: If no answer passes the threshold, the step trains nothing. Start from a model that is
    sometimes correct.

    Args:
        threshold: in units of the reward.
    """
    return [((n, g),) for n, row in enumerate(rewards.tolist()) for g, r in enumerate(row) if r > threshold]


@register("selection", level="row", labels_by="threshold")
def balanced(
    rewards: Rewards, *, threshold: float = 0.5, keep: Annotated[int, Range(ge=1), if_below_share_of_group(2)] = 1
) -> Units:
    """As many completions with a reward above ``threshold`` as without, at most ``keep`` of each a prompt.

    The rows of ``right_and_wrong``, unpaired: for objectives that read labels, such as ``kto``.

    Args:
        threshold: a reward above it is right; in units of the reward.
        keep: right completions per prompt at most, and as many wrong ones.
    """
    return [(place,) for pair in right_and_wrong(rewards, threshold=threshold, num_pairs=keep) for place in pair]


@register("selection", level="pair")
def best_and_worst(rewards: Rewards) -> Units:
    """One pair per prompt: the completion of highest reward and that of lowest.

    Of equal ones those sampled first. A prompt whose rewards are all equal gives no pair.
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
    """Pairs of a completion with a reward above ``threshold`` and one without, at most ``num_pairs`` a prompt.

    Each completion is in at most one pair; the i-th right one meets the i-th wrong one, in the order
    in which they were sampled.

    Args:
        threshold: a reward above it is right; in units of the reward.
        num_pairs: pairs per prompt at most.
    """
    units: Units = []
    for n, row in enumerate(rewards.tolist()):
        correct = [g for g, r in enumerate(row) if r > threshold]
        wrong = [g for g, r in enumerate(row) if r <= threshold]
        units += [((n, a), (n, b)) for a, b in zip(correct, wrong, strict=False)][:num_pairs]
    return units
