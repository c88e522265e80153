"""Additions to the prompt of a model that teaches itself: a solution, a right answer or feedback."""

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
# The wording is ours.
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
    """Puts what the teacher ``sees`` into the prompt, by ``prompt_format`` (``teacher.prompt_format``).

    ``right_sample``: the first other answer of the group whose reward is above ``label_above``. ``solution`` and
    ``response``: of the row (``solution_of``, ``response_of``). ``environment``: its feedback on this very answer. Rows
    for which there is nothing, or no room, keep their own prompt and count as without feedback.

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
        """Return the rows as the teacher reads them, and ``has_feedback`` ``float32 [B]``."""
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
        """Return what the teacher of one answer of a group sees; None if there is nothing."""
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
        text = _PLACES.sub(lambda place: texts[place[1]], wanted)  # once: a text may hold a place's name
        messages[-1] = replace(messages[-1], content=text)
        return encode_prompt(self.tokenizer, self.template, messages, rollout.example.variables)


def solution_of(example: Example) -> str | None:
    """Return the worked solution of a row and its gold answer, whichever it has; None without either."""
    parts = []
    if example.solution is not None:
        parts.append(example.solution)
    if example.answer is not None:
        parts.append(f"Answer: {example.answer}")
    if not parts:
        return None
    return "\n".join(parts)


def response_of(example: Example) -> str | None:
    """Return the response that a row gives: its demonstration, else its best response; None without either."""
    if example.demonstration is not None:
        return example.demonstration
    if not example.responses:
        return None
    best = max(example.responses, key=lambda response: response.score)
    if best.answer is None:
        return best.text
    return f"{best.text}\nAnswer: {best.answer}"
