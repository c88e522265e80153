"""What both models of a comparison read: prompts, with answers that one of them or both have sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.errors import UsageError
from posttrain.evals.statistics import standard_error
from posttrain.interpret.differences.causal import Subject
from posttrain.interpret.differences.recipe import ChangesSection
from posttrain.randomness import permutation
from posttrain.tasks.base import Task
from posttrain.types import Example, Rollout


@dataclass(slots=True)
class Answered:
    """Documents (prompt and answer, token by token as sampled) with what each answer earned.

    ``by``: who wrote it, ``base`` or ``post``.
    """

    documents: list[list[int]] = field(default_factory=list)
    prompt_lengths: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)
    by: list[str] = field(default_factory=list)

    def add(self, rollouts: Sequence[Rollout], by: str) -> None:
        for rollout in rollouts:
            self.documents.append([*rollout.prompt_ids, *rollout.completion.ids])
            self.prompt_lengths.append(len(rollout.prompt_ids))
            self.rewards.append(rollout.reward)
            self.right.append(float(rollout.parts.get("correct", 0.0) == 1.0))
            self.by.append(by)

    def facts(self) -> dict[str, Any]:
        """How many, how long, what they earned: plain data."""
        answers = sum(map(len, self.documents)) - sum(self.prompt_lengths)
        found: dict[str, Any] = {
            "documents": len(self.documents),
            "tokens": sum(map(len, self.documents)),
            "answer_tokens": answers,
        }
        for who in dict.fromkeys(self.by):
            mine = [i for i, by in enumerate(self.by) if by == who]
            rewards = [self.rewards[i] for i in mine]
            found[who] = {
                "answers": len(mine),
                "reward": sum(rewards) / len(mine),
                "reward_error": standard_error(rewards),
                "accuracy": sum(self.right[i] for i in mine) / len(mine),
                "tokens": sum(len(self.documents[i]) - self.prompt_lengths[i] for i in mine) / len(mine),
            }
        return found


def split_examples(task: Task, changes: ChangesSection) -> tuple[list[Example], list[Example]]:
    """(those whose answers are recorded, those of the causal test): different ones, a fixed draw by the seed.

    Raises:
        UsageError: the task has fewer.
    """
    tested = changes.causal.prompts if changes.causal is not None else 0
    wanted, size = changes.prompts + tested, len(task.examples)
    if wanted > size:
        raise UsageError(
            f"changes.prompts {changes.prompts} and changes.causal.prompts {tested} are {wanted}, but {task.name}/"
            f"{task.split} has {size} examples; set them lower"
        )
    order = permutation(changes.seed, "what changed: examples", 0, size)[:wanted]
    examples = [task.examples[int(i)] for i in order]
    return examples[: changes.prompts], examples[changes.prompts :]


def answer_prompts(subjects: Mapping[str, Subject], examples: Sequence[Example], changes: ChangesSection) -> Answered:
    """Sampled answers of every model given (``base``, ``post``), in the order of the examples."""
    answered = Answered()
    for by, subject in subjects.items():
        rollouts = subject.answer(
            examples,
            samples=changes.samples,
            temperature=changes.temperature,
            seed=changes.seed,
            purpose=f"what changed: answers of {by}",
        )
        answered.add(rollouts, by)
    return answered
