"""Modify one batch on purpose: drop prompts or set rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.errors import UsageError
from posttrain.training.sources.stored import Groups


@dataclass(frozen=True, slots=True)
class Intervention:
    """Change the batch at ``step``: drop ``dropped`` prompts and set ``rewards``.

    Prompts are numbered from 0 in sampling order, as in the records, and so are answers per prompt. In supervised
    training, a prompt is one example in the batch.
    """

    step: int
    dropped: tuple[int, ...] = ()
    rewards: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def set_rewards(self, step: int, sampled: Groups) -> None:
        """Set rewards for sampled answers in place, at this step only."""
        if step != self.step:
            return
        for (prompt, answer), reward in self.rewards.items():
            if prompt < len(sampled) and answer < len(sampled[prompt]):
                sampled[prompt][answer].reward = reward
                sampled[prompt][answer].is_scored = True

    def keep(self, step: int, sampled: Groups, chosen: Groups) -> Groups:
        """Filter the groups to train on; other steps keep all.

        Raises:
            UsageError: unknown prompt or answer, prompt not trained on, or no prompts left.
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
                    f"{what}: step {step} did not train on it, so it cannot be dropped. Choose a different prompt"
                )
            gone.add(id(sampled[prompt]))
        kept = [group for group in chosen if id(group) not in gone]
        if not kept:
            raise UsageError(f"drop prompt: step {step} would have no prompts left. Keep at least one")
        return kept

    def keep_units(self, step: int, units: Sequence[int]) -> list[int]:
        """Filter supervised units to train on; other steps keep all.

        Raises:
            UsageError: unknown unit, or no units left.
        """
        if step != self.step:
            return list(units)
        for number in self.dropped:
            self._check_place(f"drop prompt:{number}", number, len(units))
        kept = [unit for number, unit in enumerate(units) if number not in self.dropped]
        if not kept:
            raise UsageError(f"drop prompt: step {step} would have no prompts left. Keep at least one")
        return kept

    def _check_place(self, what: str, prompt: int, count: int) -> None:
        if prompt >= count:
            raise UsageError(f"{what}: step {self.step} has {count} prompts. Give one from 0 to {count - 1}")
