"""The section of held-out evaluations."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from posttrain.acting import sections as conditions
from posttrain.option_types import Few, Seed, StopTexts, Tokens
from posttrain.recipes.sections import Component, ComponentList, Every, Section


class EvalSection(Section):
    """Held-out evaluation, before the first step, during training and at the end.

    Args:
        tasks: tasks to evaluate on; by default the validation split of the training task.
        every: steps between evaluations (0 or -1: never, not at the end either).
        num_examples: examples of each task, always the same.
        items: a random ``sample`` of the task, or its ``first`` examples.
        items_seed: draws another sample.
        max_tokens: limit of an answer; by default that of rollouts, else 256.
        samples: answers to each example.
        temperature: of sampling; 0 is greedy decoding.
        top_k: sample from the k likeliest tokens only.
        top_p: sample from the likeliest tokens that have this probability together.
        min_p: sample from the tokens of at least this share of the largest probability.
        min_tokens: an answer does not end before it has so many tokens.
        repetition_penalty: divides the positive logits of tokens that prompt or answer have already, and multiplies the
            negative ones.
        stop: texts, each of which ends an answer where it is complete.
        num_kl_prompts: so many prompts are answered at the temperature of training, for entropy and the KL from
            the initial model; by default 64 where a reward model pays, else none.
        best: the metric that ranks the run and chooses ``checkpoints/best``; by default accuracy, or what there
            is where nothing has a gold answer.
        patience: so many evaluations in a row without a better primary metric end the run; by default it goes on to
            its last step.
        loss: also evaluate the loss of held-out demonstrations; by default where these have no gold answer.
        engine: what samples the answers; by default what samples rollouts, in a supervised run the native
            engine.
    """

    tasks: Annotated[ComponentList, conditions.IF_EVALUATED] = Field(default_factory=list)
    every: Annotated[Every, conditions.IF_WITHIN_RUN] = Field(default=0, ge=0)
    num_examples: Annotated[int, conditions.IF_EVALUATED] = Field(default=256, ge=1)
    items: Annotated[Literal["sample", "first"], conditions.IF_EVALUATED] = "sample"
    items_seed: Annotated[Seed, conditions.IF_EVALUATED] = 0
    max_tokens: Tokens | None = None
    samples: Annotated[Few, conditions.IF_ANSWERS_ARE_EVALUATED] = 1
    temperature: Annotated[float, conditions.IF_ANSWERS_ARE_EVALUATED] = Field(default=0.0, ge=0)
    top_k: Annotated[int | None, conditions.IF_ANSWERS_ARE_EVALUATED] = Field(default=None, ge=1)
    top_p: Annotated[float, conditions.IF_ANSWERS_ARE_EVALUATED] = Field(default=1.0, gt=0, le=1)
    min_p: Annotated[float, conditions.IF_ANSWERS_ARE_EVALUATED] = Field(default=0.0, ge=0, le=1)
    min_tokens: Annotated[int, conditions.IF_ANSWERS_ARE_EVALUATED] = Field(default=0, ge=0)
    repetition_penalty: Annotated[float, conditions.IF_ANSWERS_ARE_EVALUATED] = Field(default=1.0, gt=0, le=10)
    stop: Annotated[StopTexts, conditions.IF_ANSWERS_ARE_EVALUATED] = Field(default_factory=list)
    num_kl_prompts: Annotated[int | None, conditions.IF_EVALUATED] = Field(default=None, ge=0)
    best: Annotated[str | None, conditions.IF_EVALUATED] = None
    patience: Annotated[int | None, conditions.IF_EVALUATED] = Field(default=None, ge=1)
    loss: Annotated[bool | None, conditions.IF_EVALUATED] = None
    engine: Annotated[Component | None, conditions.IF_EVALUATED] = None

    @model_validator(mode="after")
    def _check_drawing(self) -> Self:
        draws = {"samples": self.samples > 1, "top_k": self.top_k is not None, "top_p": self.top_p < 1}
        draws["min_p"] = self.min_p > 0
        for key, is_set in draws.items():
            if is_set and self.temperature == 0:
                raise ValueError(
                    f"greedy decoding gives the same answer every time; give a 'temperature' above 0 with {key!r}"
                )
        if self.patience is not None and self.every == 0:
            raise ValueError("'patience' counts evaluations, and there are none; give 'every' a number of steps")
        if self.items == "first" and self.items_seed:
            raise ValueError("'items_seed' draws a sample, and 'items: first' takes none; leave one of them out")
        return self
