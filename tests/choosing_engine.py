"""An engine that says one of some texts, drawn by how likely its model finds each: its turns make sense."""

from __future__ import annotations

from typing import Any

import torch

from posttrain.randomness import uniforms
from posttrain.registry import register
from posttrain.sampling.base import Engine
from posttrain.types import Completion


@register("engine")
def choosing(model: Any, tokenizer: Any, *, texts: list[str]) -> Engine:
    """Each text ends with the tokenizer's end token; its tokens have the model's log-probabilities.

    Args:
        texts: possible answers.
    """
    return Choosing(model, [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts])


@register("engine", samples=False)
def choosing_by_script(model: Any, tokenizer: Any, *, texts: list[str]) -> Engine:
    """``choosing``, declaring that answers are not drawn from the model.

    Args:
        texts: possible answers.
    """
    return choosing(model, tokenizer, texts=texts)


SPREAD = 8.0  # a likely text is not the only one that is said


class Choosing(Engine):
    """See ``choosing``."""

    def __init__(self, model: Any, choices: list[list[int]]) -> None:
        self.model, self.choices = model, choices

    def generate(self, prompts, keys, sampling):
        rows = zip(prompts, keys, strict=True)
        return [[self._choose(list(prompt), key, sampling) for key in row] for prompt, row in rows]

    @torch.no_grad()
    def _choose(self, prompt, key, sampling):
        scored = [self._logprobs(prompt, ids, sampling.temperature or 1.0) for ids in self.choices]
        weights = torch.tensor([sum(one) / len(one) / SPREAD for one in scored]).softmax(0).cumsum(0)
        place = int((weights < float(uniforms([key], 1)[0, 0])).sum())
        ids, logprobs = self.choices[place], scored[place]
        limit = min(sampling.max_tokens, sampling.within(1 << 31) - len(prompt))
        finish = "stop" if len(ids) <= limit else "length"
        return Completion(tuple(ids[:limit]), tuple(logprobs[:limit]), finish, self.version)

    def _logprobs(self, prompt, ids, temperature):
        logits = self.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / temperature
        return logits.log_softmax(-1)[range(len(ids)), ids].tolist()
