"""A panel: the same few prompts, answered at every evaluation, to read what training changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.data.render import decode_response
from posttrain.errors import RecipeError
from posttrain.option_types import shorten
from posttrain.randomness import derive_key
from posttrain.recipes.panel_prompts import PANEL
from posttrain.sampling.base import Sampling
from posttrain.sampling.rollout import Sampler, encode_prompts
from posttrain.types import Example, Message, Rollout


@dataclass(frozen=True, slots=True)
class PromptPanel:
    """The prompts of ``eval.prompts``, encoded; nothing grades their answers.

    Args:
        sampler: of the evaluation; its engine has the weights of the step.
        examples: one user message each.
        prompts: their token ids.
        seed: of the random numbers, which are the same at every step.
    """

    sampler: Sampler
    examples: Sequence[Example]
    prompts: Sequence[Sequence[int]]
    seed: int

    def answer(self, step: int, sampling: Sampling) -> list[Rollout]:
        """Return one answer to each prompt; each process samples its share, and has all."""
        sampler = self.sampler
        template = sampler.grader.template
        mine = sampler.process_group.share(range(len(self.prompts)))
        keys = [[derive_key(self.seed, PANEL, 0, i, 0)] for i in mine]
        completions = sampler.engine.generate([self.prompts[i] for i in mine], keys, sampling)
        own = []
        for i, (completion,) in zip(mine, completions, strict=True):
            own.append((completion, decode_response(sampler.tokenizer, template, completion.ids, self.prompts[i])))
        rollouts = []
        for i, (completion, text) in enumerate(sampler.process_group.gather(own, PANEL)):
            rollouts.append(
                Rollout(
                    example=self.examples[i],
                    prompt_ids=tuple(self.prompts[i]),
                    completion=completion,
                    text=text,
                    parts={},
                    reward=0.0,
                    step=step,
                    epoch=0,
                    prompt_index=i,
                    rollout_index=0,
                    extracted=template.extract(text),
                )
            )
        return rollouts


def build_panel(sampler: Sampler, texts: Sequence[str] | str, seed: int) -> PromptPanel | None:
    """Return the panel of a recipe; None if it has no prompts.

    Raises:
        RecipeError: a prompt that leaves no room for an answer.
    """
    assert not isinstance(texts, str), "a resolved recipe has the prompts of a file"
    if not texts:
        return None
    examples = []
    for number, text in enumerate(texts):
        examples.append(Example(f"{PANEL}/{number}", (Message("user", text),)))
    room = sampler.context_tokens - 1
    kept, prompts, dropped = encode_prompts(sampler.tokenizer, sampler.grader.template, examples, room)
    if dropped:
        number = next(number for number in range(len(texts)) if number not in kept)
        raise RecipeError(
            f"eval.prompts.{number}: {shorten(texts[number])} has more than the {room:,} tokens that the context has "
            "room for. Shorten it"
        )
    return PromptPanel(sampler, examples, prompts, seed)
