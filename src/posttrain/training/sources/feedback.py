"""Feedback for a model that teaches itself: the prompt that the teacher sees and the student does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from posttrain.data.render import Template, encode_prompt
from posttrain.types import Batch, Rollout, Sample, Tokenizer, collate


@dataclass(frozen=True, slots=True)
class Feedback:
    """Puts a right answer of another sample of the group into the prompt.

    A sample is right when its reward is above ``label_above``. Rows for which no other sample is right
    keep their own prompt and count as without feedback.
    """

    tokenizer: Tokenizer
    template: Template
    label_above: float
    context_tokens: int

    def rewrite(self, groups: Sequence[Sequence[Rollout]], rows: Sequence[tuple[int, int]]) -> tuple[Batch, Tensor]:
        """Return the rows as the teacher reads them, and ``has_feedback`` ``float32 [B]``."""
        samples, has_feedback = [], []
        for index, (n, g) in enumerate(rows):
            rollout = groups[n][g]
            correct = [r for i, r in enumerate(groups[n]) if i != g and r.reward > self.label_above]
            prompt = list(rollout.prompt_ids)
            if correct:
                teacher_prompt = self._teacher_prompt(rollout, correct[0].text)
                if len(teacher_prompt) + len(rollout.completion.ids) <= self.context_tokens:
                    prompt = teacher_prompt
            has_feedback.append(float(prompt != list(rollout.prompt_ids)))
            answer = list(rollout.completion.ids)
            mask = [False] * len(prompt) + list(rollout.completion.written)
            samples.append(Sample(prompt + answer, mask, group=index, prefix=len(prompt)))
        return collate(samples), torch.tensor(has_feedback)

    def _teacher_prompt(self, rollout: Rollout, solution: str) -> list[int]:
        messages = list(rollout.example.messages)
        question = messages[-1].content
        text = f"{question}\n\nCorrect solution:\n\n{solution}\n\nCorrectly solve the original question.\n\n{question}"
        messages[-1] = replace(messages[-1], content=text)
        return encode_prompt(self.tokenizer, self.template, messages, rollout.example.variables)
