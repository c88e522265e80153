"""Recipe section for held-out evaluation."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from posttrain.acting import sections as conditions
from posttrain.option_types import Few, Seed, StopTexts, Tokens
from posttrain.recipes.panel_prompts import check_panel
from posttrain.recipes.sections import Component, ComponentList, Every, Section


class EvalSection(Section):
    """Held-out evaluation before the first step, during training and at the end.

    Args:
        tasks: evaluation tasks. Defaults to the training task's validation split.
        every: steps between evaluations. 0 or -1 disables all evaluations, including the final one.
        num_examples: examples per task, the same set each time.
        items: use a random ``sample`` of examples or the ``first`` ones.
        items_seed: seed for the random sample.
        max_tokens: maximum answer length in tokens. Defaults to the rollout limit, or 256 without rollouts.
        samples: answers per example.
        temperature: sampling temperature; 0 means greedy decoding.
        top_k: sample only from the k most likely tokens.
        top_p: sample only from the most likely tokens whose probabilities add up to this value.
        min_p: sample only tokens with at least this fraction of the highest probability.
        min_tokens: minimum tokens per answer.
        repetition_penalty: divide positive logits, and multiply negative logits, for tokens already in the prompt or
            answer.
        stop: strings that end an answer.
        prompts: fixed prompts, answered at every evaluation with its sampling settings and not graded: a list, or a
            file (``.txt``: one per line, ``.json``, ``.jsonl``). The report shows the answers by step.
        num_kl_prompts: number of prompts answered at the training temperature to measure entropy and KL from the
            initial model. Defaults to 64 if a reward model scores completions, otherwise 0.
        best: metric for ranking runs and selecting ``checkpoints/best``. Defaults to accuracy, or to another available
            metric without gold answers.
        patience: stop training after this many consecutive evaluations without a better primary metric. By default,
            train until the last step.
        loss: also compute loss on held-out demonstrations. Enabled by default for demonstrations without gold answers.
        engine: sampling engine. Defaults to the rollout engine, or to native in supervised runs.
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
    prompts: Annotated[list[str] | str, conditions.IF_ANSWERS_ARE_EVALUATED] = Field(default_factory=list)
    num_kl_prompts: Annotated[int | None, conditions.IF_EVALUATED] = Field(default=None, ge=0)
    best: Annotated[str | None, conditions.IF_EVALUATED] = None
    patience: Annotated[int | None, conditions.IF_EVALUATED] = Field(default=None, ge=1)
    loss: Annotated[bool | None, conditions.IF_EVALUATED] = None
    engine: Annotated[Component | None, conditions.IF_EVALUATED] = None

    @field_validator("prompts")
    @classmethod
    def _check_prompts(cls, value: list[str] | str) -> list[str] | str:
        if isinstance(value, list):
            check_panel(value)
        return value

    @model_validator(mode="after")
    def _check_drawing(self) -> Self:
        draws = {"samples": self.samples > 1, "top_k": self.top_k is not None, "top_p": self.top_p < 1}
        draws["min_p"] = self.min_p > 0
        for key, is_set in draws.items():
            if is_set and self.temperature == 0:
                raise ValueError(
                    f"greedy decoding always gives the same answer; set 'temperature' above 0 to use {key!r}"
                )
        if self.prompts and self.every == 0:
            raise ValueError("'prompts' needs evaluations; set 'every' to a number of steps")
        if self.patience is not None and self.every == 0:
            raise ValueError("'patience' needs evaluations; set 'every' to a number of steps")
        if self.items == "first" and self.items_seed:
            raise ValueError("'items_seed' has no effect with 'items: first'; remove one key")
        return self
