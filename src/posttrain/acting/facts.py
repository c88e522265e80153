"""Conditions on which an option acts, and the facts that they read: ``clip: Annotated[float, IF_RATIO_MOVES]``.

A condition reads the rest of a resolved recipe as dotted keys. Torch and pydantic are not imported here, so that a
component that declares one can be called without them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

# The largest distance from 1 of the ratio of a model to itself, over any token: in fp32, and where either side rounds.
FP32_NOISE = 1e-4
BF16_NOISE = 0.1


@dataclass(frozen=True)
class RunFacts:
    """A resolved recipe as far as conditions read it.

    ``settings``: values by dotted key, without keys that are None by default. ``needs``: the batch fields that the run
    fills. ``scale_free``: the advantage does not change if all rewards are multiplied. ``scores_only``: a reward model
    is trained, which writes no answers.
    """

    settings: Mapping[str, Any]
    needs: Collection[str] = ()
    scale_free: bool = False
    scores_only: bool = False

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value at a dotted key."""
        return self.settings.get(key, default)

    def next_to(self, key: str, other: str) -> Any:
        """Return the value of the option ``other`` of the component or section that ``key`` is in."""
        above, _, _ = key.rpartition(".")
        return self.settings.get(f"{above}.{other}")

    @property
    def samples(self) -> bool:
        """True if the model samples the answers that it is trained on."""
        return "rollout.num_prompts" in self.settings

    @property
    def updates(self) -> int:
        """The number of updates that one batch of answers serves."""
        return int(self.get("train.ppo_epochs", 1)) * int(self.get("train.num_minibatches", 1))

    @property
    def steps(self) -> int | None:
        """The number of updates of the run; None if passes over the data decide."""
        steps: int | None = self.get("train.steps")
        return steps

    @property
    def has_one_batch(self) -> bool:
        """True if the whole run trains on one batch of answers."""
        return self.samples and self.steps is not None and self.steps <= self.updates

    @property
    def is_on_policy(self) -> bool:
        """True if every batch of answers is sampled with the weights that it updates, once."""
        return self.samples and self.updates == 1 and not self.get("rollout.staleness")

    @property
    def drops_inputs(self) -> bool:
        """True if an adapter drops inputs in the update and not in the sampler."""
        return bool(self.get("model.adapter.dropout"))

    @property
    def rounds(self) -> bool:
        """True if sampler and trainer may round otherwise than in fp32: another engine, or 16 or fewer bits."""
        is_whole = self.get("model.dtype") in ("fp32", "fp64") and self.get("train.precision") == "fp32"
        return not is_whole or self.get("rollout.engine.name") != "native" or bool(self.get("model.load_bits"))

    @property
    def noise(self) -> float:
        """The distance from 1 up to which ratios of equal weights may come by rounding."""
        if self.rounds:
            return BF16_NOISE
        return FP32_NOISE


class Rounding(str):
    """The reason why an option changes the rounding of the weights, and nothing else."""


class SwitchedOff(str):
    """The reason why an option does nothing at its own value."""


@dataclass(frozen=True)
class ActsIf:
    """A condition on which an option acts.

    Args:
        when: the condition, after "acts": ``if train.schedule is linear or cosine``.
        why_not: takes the facts of a run and the option's dotted key; returns why the option does nothing there
            (``Rounding``: nothing but that), or an empty text if it acts.
        remedy: what makes it act, without a full stop.
        by_default: the option is what the method is about, so that a run says so at the option's default, too, unless
            that switches it off (``SwitchedOff``).
        distance: of a bound of the ratio of the policy to its sampler, how far from 1 it is at a value.
    """

    when: str
    why_not: Callable[[RunFacts, str], str]
    remedy: str = ""
    by_default: bool = False
    distance: Callable[[float], float] | None = None
