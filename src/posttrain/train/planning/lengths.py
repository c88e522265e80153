"""How long answers are, for a plan: all alike, lognormal, or as a run has recorded them; drawn by the batch alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from random import Random

from posttrain.errors import UsageError
from posttrain.store.rollouts import RolloutStore

Draw = Callable[[Random, int], list[int]]  # the lengths of so many answers to one prompt
NORMAL_95 = 1.6448536269514722  # 95 % of a standard normal distribution is below


def alike(tokens: int) -> Draw:
    """Every answer has ``tokens`` tokens."""
    return lambda chance, num: [tokens] * num


def lognormal(mean: int, p95: int) -> Draw:
    """Lognormal lengths of this mean, of which 95 % are at most ``p95``.

    With ``ln(p95 / mean) = 1.645 σ − σ² / 2``, of which σ is the smaller solution.

    Raises:
        UsageError: no lognormal distribution has both.
    """
    above = NORMAL_95**2 - 2 * math.log(p95 / mean)
    if p95 <= mean or above < 0:
        most = mean * math.exp(NORMAL_95**2 / 2)
        raise UsageError(
            f"--answer-p95: {p95}, with a mean of {mean}: of lognormal lengths with that mean it is from {mean + 1} to "
            f"{int(most)}; or give the lengths of a run with --answers-of"
        )
    sigma = NORMAL_95 - math.sqrt(above)
    return lambda chance, num: [
        max(1, round(chance.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))) for _ in range(num)
    ]


def recorded(folder: Path) -> Draw:
    """The lengths that a run sampled in training: each prompt is like one of its prompts, drawn at random.

    Raises:
        UsageError: the folder has no rollouts. DataError: its file is damaged.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    if (path := folder / "rollouts.db").is_file():
        for rollout in RolloutStore(path, read_only=True).training():
            groups.setdefault((rollout.step, rollout.prompt_index), []).append(max(1, rollout.num_own))
    if not groups:
        raise UsageError(f"--answers-of: {folder} holds no rollouts of training; give the name or the folder of a run")
    told = list(groups.values())

    def draw(chance: Random, num: int) -> list[int]:
        group = chance.choice(told)
        return (
            [group[i] for i in chance.sample(range(len(group)), num)]
            if num <= len(group)
            else chance.choices(group, k=num)
        )

    return draw


def batch_of(draw: Draw, batch: int, prompts: int, group: int, longest: int) -> list[list[int]]:
    """The lengths of a rollout batch, by prompt, none above ``longest``."""
    chance = Random(batch)
    return [[min(longest, tokens) for tokens in draw(chance, group)] for _ in range(prompts)]
