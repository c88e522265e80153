"""From examples to graded completions: one function, used by training and by evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain import registry
from posttrain.engines.base import Engine, Sampling
from posttrain.errors import UsageError
from posttrain.randomness import derive_key
from posttrain.recipe import RewardWord
from posttrain.render import Template, decode_response, encode_prompt
from posttrain.rewards.calling import BoundReward, bind_reward
from posttrain.types import Completion, Example, Rollout


@dataclass(frozen=True)
class Grader:
    """The rewards of a recipe with their weights, bound to a template's extraction rule.

    Two facts are always measured, at weight 0 unless the recipe rewards them: ``correct`` (where
    an example has an answer) and the template's format.
    """

    template: Template
    rewards: tuple[tuple[str, float, BoundReward], ...]
    format_part: str

    def grade(self, example: Example, prompt: str, text: str, completion: Completion) -> tuple[dict[str, float], float]:
        """Every part unweighted, and the weighted sum.

        Raises:
            RewardFailure: a reward raised or returned no finite number.
        """
        available = {
            "prompt": prompt,
            "text": text,
            "extracted": self.template.extract(text),
            "answer": example.answer,
            "num_tokens": len(completion.ids),
            "finish": completion.finish,
            "tags": self.template.tags,
            "meta": example.meta,
        }
        parts: dict[str, float] = {}
        total = 0.0
        for name, weight, reward in self.rewards:
            value = reward(available, example.id)
            parts[name] = value
            total += weight * value
        return parts, total


def build_grader(words: Sequence[RewardWord], template: Template) -> Grader:
    """Bind the rewards of a recipe; a name that stands twice gets a number behind it.

    Raises:
        UsageError: a reward that cannot be computed from what there is, before anything is sampled.
    """
    bound: list[tuple[str, float, BoundReward]] = []
    for index, word in enumerate(words):
        entry = registry.find("reward", word.name, f"rewards.{index}")
        name = entry.name if all(n != entry.name for n, _, _ in bound) else f"{entry.name}_{index}"
        reward = bind_reward(entry, word.options, f"rewards.{index}")
        if not template.tags and ":" not in word.name and "tags" in reward.parameters:
            raise UsageError(
                f"rewards.{index}: {name} looks at the tags of the prompt template, and {template.name!r} has none; "
                "set prompt.template to r1_zero or xml_reasoning, or leave this reward out"
            )
        bound.append((name, word.weight, reward))
    format_part = "xml_format" if template.tags else "is_number"
    for name in ("correct", format_part):
        if all(n != name for n, _, _ in bound):
            bound.append((name, 0.0, bind_reward(registry.find("reward", name), {}, name)))
    return Grader(template, tuple(bound), format_part)


def collect(
    engine: Engine,
    tokenizer: Any,
    grader: Grader,
    examples: Sequence[Example],
    prompts: Sequence[Sequence[int]],
    group: int,
    sampling: Sampling,
    *,
    key: tuple[int, str, int],
    step: int,
    epoch: int = 0,
    prompt_indices: Sequence[int] | None = None,
) -> tuple[list[list[Rollout]], float]:
    """Sample ``group`` completions of every prompt and grade them.

    ``key``: (seed, purpose, counter) from which every completion's random numbers derive, together
    with its place (prompt slot, sample). Returns the rollouts grouped by prompt, and the seconds
    spent in grading.
    """
    import time

    seed, purpose, counter = key
    keys = [[derive_key(seed, purpose, counter, slot, g) for g in range(group)] for slot in range(len(prompts))]
    completions = engine.generate(prompts, keys, sampling)
    started = time.perf_counter()
    groups = []
    for slot, (example, ids, sampled) in enumerate(zip(examples, prompts, completions, strict=True)):
        prompt_text = tokenizer.decode(list(ids), skip_special_tokens=False)
        rollouts = []
        for g, completion in enumerate(sampled):
            text = decode_response(tokenizer, grader.template, completion.ids)
            parts, reward = grader.grade(example, prompt_text, text, completion)
            rollouts.append(
                Rollout(
                    example=example,
                    prompt_ids=tuple(ids),
                    completion=completion,
                    text=text,
                    parts=parts,
                    reward=reward,
                    step=step,
                    epoch=epoch,
                    prompt_index=prompt_indices[slot] if prompt_indices is not None else slot,
                    rollout_index=g,
                )
            )
        groups.append(rollouts)
    return groups, time.perf_counter() - started


def encode_prompts(
    tokenizer: Any, template: Template, examples: Sequence[Example], limit: int
) -> tuple[list[int], list[list[int]], int]:
    """Token ids of every prompt that fits into ``limit`` tokens.

    Returns the indices kept, their ids, and how many were dropped as too long.
    """
    kept, encoded, dropped = [], [], 0
    for index, example in enumerate(examples):
        ids = encode_prompt(tokenizer, template, example.messages)
        if len(ids) > limit:
            dropped += 1
        else:
            kept.append(index)
            encoded.append(ids)
    return kept, encoded, dropped
