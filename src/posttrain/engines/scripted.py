"""An engine that says what it is told: for tests, and for trying a recipe without sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.engines.base import Engine, Sampling
from posttrain.engines.conversation import Groups
from posttrain.errors import UsageError
from posttrain.randomness import uniforms
from posttrain.registry import register
from posttrain.types import Completion

Ids = Sequence[int]


@register("engine", samples=False)
def scripted(model: Any, tokenizer: Any, *, texts: list[str], logprob: float = 0.0) -> Engine:
    """Answer every prompt with one of ``texts``, drawn by the completion's key; nothing is sampled.

    Each text ends with the tokenizer's end token. Every token gets the log-probability ``logprob``.
    """
    if not texts:
        raise UsageError("rollout.engine.texts: give at least one text to answer with")
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    choices = [[*tokenizer.encode(text, add_special_tokens=False), *end] for text in texts]
    return ScriptedEngine(choices, logprob=logprob)


class ScriptedEngine(Engine):
    """Completions from a script.

    Args:
        choices: token ids to choose from; or a mapping from a prompt's ids (a tuple) to its own
            choices; or a function of (prompt, key) that gives the ids themselves.
        logprob: the log-probability of every token.

    A completion whose key's first uniform number is u takes choice ``floor(u * len(choices))``, so
    it depends on its key alone. It is cut after the first of ``sampling.stop_ids`` (finish
    ``stop``) or at ``sampling.max_tokens`` (finish ``length``); one that ends without either counts
    as stopped. ``calls`` keeps what was asked, for a test to look at.
    """

    def __init__(
        self,
        choices: Sequence[Ids] | Mapping[tuple[int, ...], Sequence[Ids]] | Callable[[tuple[int, ...], int], Ids],
        *,
        logprob: float = 0.0,
    ) -> None:
        self.choices = choices
        self.logprob = logprob
        self.calls: list[tuple[list[tuple[int, ...]], list[tuple[int, ...]], Sampling]] = []

    def generate(self, prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], sampling: Sampling) -> Groups:
        """See ``Engine.generate``.

        Raises:
            UsageError: an empty prompt, or one that the script does not know.
        """
        assert len(prompts) == len(keys), f"{len(prompts)} prompts but keys for {len(keys)}"
        self.calls.append(([tuple(p) for p in prompts], [tuple(k) for k in keys], sampling))
        for i, prompt in enumerate(prompts):
            if not len(prompt):
                raise UsageError(f"prompt {i} is empty: a model needs at least one token to continue from")
        return [
            [self._cut(self._choose(tuple(prompt), key), sampling, len(prompt)) for key in row]
            for prompt, row in zip(prompts, keys, strict=True)
        ]

    def _choose(self, prompt: tuple[int, ...], key: int) -> Ids:
        if callable(self.choices):
            return self.choices(prompt, key)
        choices = self.choices
        if isinstance(choices, Mapping):
            if prompt not in choices:
                raise UsageError(f"the script has no completions for the prompt {list(prompt)}")
            choices = choices[prompt]
        return choices[int(uniforms([key], 1)[0, 0] * len(choices))]

    def _cut(self, ids: Ids, sampling: Sampling, prompt_tokens: int) -> Completion:
        taken: list[int] = []
        limit = min(sampling.max_tokens, sampling.within(self.context_tokens) - prompt_tokens)
        for token in ids:
            if len(taken) == limit:
                return self._completion(taken, "length")
            taken.append(int(token))
            if token in sampling.stop_ids:
                break
        return self._completion(taken, "stop")

    def _completion(self, ids: list[int], finish: Any) -> Completion:
        return Completion(tuple(ids), (self.logprob,) * len(ids), finish, self.version)
