"""Engine with scripted completions, for tests and for trying recipes without sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.errors import UsageError
from posttrain.randomness import uniforms
from posttrain.registry import register
from posttrain.sampling.base import Engine, Groups, Sampling, check_prompts
from posttrain.types import Completion, Finish

Ids = Sequence[int]


@register("engine", samples=False)
def scripted(model: Any, tokenizer: Any, *, texts: list[str], logprob: float = 0.0) -> Engine:
    """Answer every prompt with an entry of ``texts`` chosen by completion key, without sampling.

    Each text ends with the tokenizer's end-of-sequence token, if it has one.

    Args:
        texts: possible answers.
        logprob: log-probability assigned to every token.
    """
    if not texts:
        raise UsageError("rollout.engine.texts: empty. Give at least one text")
    end = []
    if tokenizer.eos_token_id is not None:
        end = [int(tokenizer.eos_token_id)]
    choices = [[*tokenizer.encode(text, add_special_tokens=False), *end] for text in texts]
    return FakeEngine(choices, logprob=logprob)


class FakeEngine(Engine):
    """Completions from a script.

    ``choices``: token id sequences, a mapping from prompt ids to such sequences, or a function (prompt, key) -> ids.
    ``logprob``: assigned to every token. ``calls`` records arguments for tests.

    If u is a key's first uniform number, choice ``floor(u * len(choices))`` is taken. Completions are cut after the
    first ``sampling.stop_ids`` token (finish ``stop``) or at ``sampling.max_tokens`` (finish ``length``). A choice
    that ends earlier counts as stopped.
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
            UsageError: empty prompt, or not in the script.
        """
        assert len(prompts) == len(keys), f"{len(prompts)} prompts but keys for {len(keys)}"
        self.calls.append(([tuple(p) for p in prompts], [tuple(k) for k in keys], sampling))
        check_prompts(prompts, self.context_tokens, None)
        groups = []
        for prompt, row in zip(prompts, keys, strict=True):
            groups.append([self._complete(tuple(prompt), key, sampling) for key in row])
        return groups

    def _complete(self, prompt: tuple[int, ...], key: int, sampling: Sampling) -> Completion:
        if callable(self.choices):
            ids = self.choices(prompt, key)
        else:
            choices = self.choices
            if isinstance(choices, Mapping):
                if prompt not in choices:
                    raise UsageError(f"the script lacks prompt {list(prompt)}")
                choices = choices[prompt]
            drawn = uniforms([key], 1)[0, 0]
            ids = choices[int(drawn * len(choices))]
        limit = min(sampling.max_tokens, sampling.within(self.context_tokens) - len(prompt))
        stop = len(ids)
        for index, token in enumerate(ids):
            if token in sampling.stop_ids:
                stop = index + 1
                break
        finish: Finish = "length"
        if stop <= limit:
            finish = "stop"
        taken = tuple(map(int, ids[: min(stop, limit)]))
        return Completion(taken, (self.logprob,) * len(taken), finish, self.version)
