"""Extend prompts for self-teaching with a solution, a correct answer, or feedback."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from posttrain.data.render import Template, encode_prompt
from posttrain.types import Batch, Example, Rollout, Sample, Tokenizer, collate

Sees = Literal["right_sample", "solution", "response", "environment"]
# Wording written for this project.
SOLUTION = "{question}\n\nCorrect solution:\n\n{shown}\n\nCorrectly solve the original question.\n\n{question}"
RESPONSE = (
    "{question}\n\nAn example of a response:\n\n{shown}\n\n"
    "Answer the original question with a response of your own.\n\n{question}"
)
ENVIRONMENT = (
    "{question}\n\nFeedback on an earlier attempt:\n\n{shown}\n\nCorrectly solve the original question.\n\n{question}"
)
_PLACES = re.compile(r"\{(question|shown)\}")
_SHOWN: dict[Sees, str] = {
    "right_sample": SOLUTION,
    "solution": SOLUTION,
    "response": RESPONSE,
    "environment": ENVIRONMENT,
}


@dataclass(frozen=True, slots=True)
class Feedback:
    """Insert information for the teacher (``sees``) into prompts, using ``prompt_format`` (``teacher.prompt_format``).

    ``right_sample``: first other answer in the group with a reward above ``label_above``. ``solution`` and
    ``response``: from the dataset (``solution_of``, ``response_of``). ``environment``: feedback on this answer. Rows
    without such information, or without enough room, keep their prompt and count as having no feedback.

    Sources: Hübotter et al. (2026, SDPO) for samples and environments, Shenfeld et al. (2026, SDFT) for responses,
    Zhao et al. (2026, OPSD) for solutions.
    """

    tokenizer: Tokenizer
    template: Template
    label_above: float
    context_tokens: int
    sees: Sees = "right_sample"
    prompt_format: str | None = None

    def rewrite(self, groups: Sequence[Sequence[Rollout]], rows: Sequence[tuple[int, int]]) -> tuple[Batch, Tensor]:
        """Build teacher rows and ``has_feedback`` ``float32 [B]``."""
        samples, has_feedback = [], []
        for index, (n, g) in enumerate(rows):
            rollout = groups[n][g]
            shown = self._shown_to(groups[n], g)
            prompt = list(rollout.prompt_ids)
            if shown is not None:
                teacher_prompt = self._teacher_prompt(rollout, shown)
                if len(teacher_prompt) + len(rollout.completion.ids) <= self.context_tokens:
                    prompt = teacher_prompt
            has_feedback.append(float(prompt != list(rollout.prompt_ids)))
            answer = list(rollout.completion.ids)
            mask = [False] * len(prompt) + list(rollout.completion.written)
            samples.append(Sample(prompt + answer, mask, group=index, prefix=len(prompt)))
        return collate(samples), torch.tensor(has_feedback)

    def _shown_to(self, group: Sequence[Rollout], place: int) -> str | None:
        """Find the information shown to the teacher for one answer; None if unavailable."""
        rollout = group[place]
        if self.sees == "solution":
            return solution_of(rollout.example)
        if self.sees == "response":
            return response_of(rollout.example)
        if self.sees == "environment":
            return rollout.feedback
        for index, other in enumerate(group):
            if index != place and other.reward > self.label_above:
                return other.text
        return None

    def _teacher_prompt(self, rollout: Rollout, shown: str) -> list[int]:
        messages = list(rollout.example.messages)
        question = messages[-1].content
        texts = {"question": question, "shown": shown}
        wanted = self.prompt_format
        if wanted is None:
            wanted = _SHOWN[self.sees]
        # single pass, because inserted text may contain a placeholder
        text = _PLACES.sub(lambda place: texts[place[1]], wanted)
        messages[-1] = replace(messages[-1], content=text)
        return encode_prompt(self.tokenizer, self.template, messages, rollout.example.variables)


def solution_of(example: Example) -> str | None:
    """Combine a row's worked solution and gold answer, if present; None without either."""
    parts = []
    if example.solution is not None:
        parts.append(example.solution)
    if example.answer is not None:
        parts.append(f"Answer: {example.answer}")
    if not parts:
        return None
    return "\n".join(parts)


def response_of(example: Example) -> str | None:
    """Find a row's response: its demonstration, or its best response; None without either."""
    if example.demonstration is not None:
        return example.demonstration
    if not example.responses:
        return None
    best = max(example.responses, key=lambda response: response.score)
    if best.answer is None:
        return best.text
    return f"{best.text}\nAnswer: {best.answer}"
