"""Conditions under which options take effect, and facts to evaluate them: ``clip: Annotated[float, IF_RATIO_MOVES]``.

Conditions read other resolved recipe values through dotted keys. Torch and pydantic are not imported here, so
components with conditions can be called without them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

# Maximum distance from 1 for a model's ratio to itself, over any token: in fp32, and with rounding on either side.
FP32_NOISE = 1e-4
BF16_NOISE = 0.1


@dataclass(frozen=True)
class RunFacts:
    """Resolved recipe data for conditions.

    ``settings``: values by dotted key, without keys that are None by default. ``needs``: batch fields used by the run.
    ``scale_free``: advantages do not depend on reward scale. ``scores_only``: reward model training, without generated
    answers.
    """

    settings: Mapping[str, Any]
    needs: Collection[str] = ()
    scale_free: bool = False
    scores_only: bool = False

    def get(self, key: str, default: Any = None) -> Any:
        """Look up a dotted key."""
        return self.settings.get(key, default)

    def next_to(self, key: str, other: str) -> Any:
        """Look up option ``other`` in the same component or section as ``key``."""
        above, _, _ = key.rpartition(".")
        return self.settings.get(f"{above}.{other}")

    @property
    def samples(self) -> bool:
        """True if training uses sampled answers."""
        return "rollout.num_prompts" in self.settings

    @property
    def updates(self) -> int:
        """Updates per rollout batch."""
        return int(self.get("train.ppo_epochs", 1)) * int(self.get("train.num_minibatches", 1))

    @property
    def steps(self) -> int | None:
        """Number of updates; None if passes over the data decide."""
        steps: int | None = self.get("train.steps")
        return steps

    @property
    def has_one_batch(self) -> bool:
        """True if the whole run uses a single rollout batch."""
        return self.samples and self.steps is not None and self.steps <= self.updates

    @property
    def is_on_policy(self) -> bool:
        """True if each rollout batch is sampled with current weights and used for one update."""
        return self.samples and self.updates == 1 and not self.get("rollout.staleness")

    @property
    def drops_inputs(self) -> bool:
        """True if adapter dropout applies in updates but not in sampling."""
        return bool(self.get("model.adapter.dropout"))

    @property
    def rounds(self) -> bool:
        """True if sampler and trainer may round differently than fp32: different engine, or at most 16 bits."""
        is_whole = self.get("model.dtype") in ("fp32", "fp64") and self.get("train.precision") == "fp32"
        return not is_whole or self.get("rollout.engine.name") != "native" or bool(self.get("model.load_bits"))

    @property
    def noise(self) -> float:
        """Maximum rounding distance from 1 for ratios with equal weights."""
        if self.rounds:
            return BF16_NOISE
        return FP32_NOISE


class Rounding(str):
    """Reason why an option affects only weight rounding."""


class SwitchedOff(str):
    """Reason why an option is disabled at its current value."""


@dataclass(frozen=True)
class ActsIf:
    """Condition under which an option takes effect.

    Args:
        when: condition following "acts", e.g. ``if train.schedule is linear or cosine``.
        why_not: takes run facts and the dotted key; returns why the option has no effect (``Rounding``: affects only
            rounding), or an empty string if it has one.
        remedy: change that makes the option take effect, without a full stop.
        by_default: report options without effect even at their default, because they are central to the method, unless
            the default disables them (``SwitchedOff``).
        distance: for bounds on the policy-sampler ratio, converts a value to its distance from 1.
    """

    when: str
    why_not: Callable[[RunFacts, str], str]
    remedy: str = ""
    by_default: bool = False
    distance: Callable[[float], float] | None = None
