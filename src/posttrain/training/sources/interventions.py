"""A change of one batch, on purpose: prompts that are not trained on, rewards that are set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.errors import UsageError
from posttrain.training.sources.stored import Groups


@dataclass(frozen=True, slots=True)
class Intervention:
    """The batch of ``step`` without the ``dropped`` prompts, and with ``rewards`` set.

    Prompts are numbered from 0 in the order in which the step drew them, which is that of its records, and so are the
    answers to each. In supervised training a prompt is an example of the batch.
    """

    step: int
    dropped: tuple[int, ...] = ()
    rewards: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def set_rewards(self, step: int, sampled: Groups) -> None:
        """Set the rewards of the answers that are sampled so far, in place; of another step none."""
        if step != self.step:
            return
        for (prompt, answer), reward in self.rewards.items():
            if prompt < len(sampled) and answer < len(sampled[prompt]):
                sampled[prompt][answer].reward = reward
                sampled[prompt][answer].is_scored = True

    def keep(self, step: int, sampled: Groups, chosen: Groups) -> Groups:
        """Return the chosen groups that are trained on; of another step all.

        Raises:
            UsageError: the step has no such prompt or answer, did not train on it, or has no other.
        """
        if step != self.step:
            return chosen
        for prompt, answer in self.rewards:
            self._check_place(f"reward {prompt}.{answer}", prompt, len(sampled))
            if answer >= len(sampled[prompt]):
                raise UsageError(
                    f"reward {prompt}.{answer}: prompt {prompt} of step {step} has {len(sampled[prompt])} answers. "
                    f"Give one from 0 to {len(sampled[prompt]) - 1}"
                )
        gone = set[int]()
        for prompt in self.dropped:
            what = f"drop prompt:{prompt}"
            self._check_place(what, prompt, len(sampled))
            if not any(group is sampled[prompt] for group in chosen):
                raise UsageError(
                    f"{what}: step {step} did not train on it, so it cannot be dropped. Give another prompt"
                )
            gone.add(id(sampled[prompt]))
        kept = [group for group in chosen if id(group) not in gone]
        if not kept:
            raise UsageError(f"drop prompt: step {step} trains on no other prompt. Keep one")
        return kept

    def keep_units(self, step: int, units: Sequence[int]) -> list[int]:
        """Return the units of a supervised batch that are trained on; of another step all.

        Raises:
            UsageError: the step has no such unit, or no other.
        """
        if step != self.step:
            return list(units)
        for number in self.dropped:
            self._check_place(f"drop prompt:{number}", number, len(units))
        kept = [unit for number, unit in enumerate(units) if number not in self.dropped]
        if not kept:
            raise UsageError(f"drop prompt: step {step} trains on no other prompt. Keep one")
        return kept

    def _check_place(self, what: str, prompt: int, count: int) -> None:
        if prompt >= count:
            raise UsageError(f"{what}: step {self.step} has {count} prompts. Give one from 0 to {count - 1}")
