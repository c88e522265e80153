"""Contract of every engine (``sampling/base.py``), as tests that run against any of them.

A subclass gives the fixture ``case``; see ``test_contract.py`` and ``tests/vllm``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from closeness import allclose
from posttrain.errors import UsageError
from posttrain.randomness import derive_key
from posttrain.sampling.base import Engine, Sampling, turn_key
from refusing import refuses
from sampling.respondents import Scripted, wordy

LIMIT = 12


@dataclass
class EngineCase:
    """An engine with what is known of it without asking it.

    ``distribution(prompt, ids, temperature)``: log-probabilities ``[len(ids), V]`` of what may stand
    at each id. ``is_model``: it samples, and greedily at temperature 0; otherwise it recites.
    """

    engine: Engine
    prompts: list[list[int]]
    stops: frozenset[int]
    distribution: Callable[[Sequence[int], Sequence[int], float], torch.Tensor]
    is_model: bool = True
    context: int | None = None
    tolerance: float = 1e-4
    num_draws: int = 200
    sampling: Sampling = field(init=False)

    def __post_init__(self) -> None:
        self.sampling = Sampling(max_tokens=LIMIT, stop_ids=self.stops)


TEXTS = ("12 + 7 = ", "Eva starts with 19 shells. She finds", "Tom has 7 apples", "A")


def tiny_case(model: Any, tokenizer: Any, engine: Engine, **info: Any) -> EngineCase:
    """An engine that has the embedded model, or one like it with the same tokenizer."""

    def distribution(prompt: Sequence[int], ids: Sequence[int], temperature: float) -> torch.Tensor:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0].float()
        return (logits / temperature).log_softmax(-1)[len(prompt) - 1 : -1]

    stops = frozenset(tokenizer.encode(".")) | {tokenizer.eos_token_id}
    return EngineCase(engine, [tokenizer.encode(text) for text in TEXTS], stops, distribution, context=1024, **info)


def keys_of(sizes: Sequence[int]) -> list[list[int]]:
    return [[derive_key(7, "contract", i, j) for j in range(size)] for i, size in enumerate(sizes)]


class EngineContract:
    def test_one_completion_per_key_in_the_order_of_the_keys(self, case: EngineCase) -> None:
        keys = keys_of([3, 0, 2, 1])
        groups = case.engine.generate(case.prompts, keys, case.sampling)
        assert [len(group) for group in groups] == [3, 0, 2, 1]
        for prompt, row, group in zip(case.prompts, keys, groups, strict=True):
            for key, completion in zip(row, group, strict=True):
                ((alone,),) = case.engine.generate([prompt], [[key]], case.sampling)
                assert completion.ids == alone.ids, "another completion of the batch changed it"
        assert len({completion.ids for completion in groups[0]}) > 1

    def test_engine_no_prompts_gives_no_completions(self, case: EngineCase) -> None:
        assert case.engine.generate([], [], case.sampling) == []
        assert case.engine.generate(case.prompts[:1], [[]], case.sampling) == [[]]

    def test_a_completion_follows_its_key(self, case: EngineCase) -> None:
        keys = keys_of([6])
        (group,) = case.engine.generate(case.prompts[:1], keys, case.sampling)
        (turned,) = case.engine.generate(case.prompts[:1], [keys[0][::-1]], case.sampling)
        assert [c.ids for c in turned] == [c.ids for c in group][::-1]
        (same,) = case.engine.generate(case.prompts[:1], [[keys[0][0]] * 3], case.sampling)
        assert [c.ids for c in same] == [group[0].ids] * 3

    def test_it_ends_with_a_stop_id_or_at_the_limit(self, case: EngineCase) -> None:
        finishes = set()
        for group in case.engine.generate(case.prompts, keys_of([8] * len(case.prompts)), case.sampling):
            for completion in group:
                finishes.add(completion.finish)
                assert not case.stops & set(completion.ids[:-1])
                assert (completion.ids[-1] in case.stops) == (completion.finish == "stop")
                assert completion.finish == "stop" or len(completion.ids) == LIMIT
        assert finishes == {"stop", "length"}

    def test_a_lower_limit_cuts_the_same_completion(self, case: EngineCase) -> None:
        keys = keys_of([4] * len(case.prompts))
        whole = case.engine.generate(case.prompts, keys, case.sampling)
        for limit in (1, 5):
            cut = case.engine.generate(case.prompts, keys, replace(case.sampling, max_tokens=limit))
            for long, short in zip(_flat(whole), _flat(cut), strict=True):
                assert short.ids == long.ids[:limit]
                assert short.finish == ("stop" if short.ids[-1] in case.stops else "length")

    def test_a_prompt_and_its_completion_share_a_limit(self, case: EngineCase) -> None:
        keys = keys_of([4] * len(case.prompts))
        whole = case.engine.generate(case.prompts, keys, case.sampling)
        total = max(map(len, case.prompts)) + 2
        cut = case.engine.generate(case.prompts, keys, replace(case.sampling, max_total_tokens=total))
        for prompt, long, short in zip(case.prompts, whole, cut, strict=True):
            room = min(LIMIT, total - len(prompt))
            assert [c.ids for c in short] == [c.ids[:room] for c in long]
            assert {c.finish for c in short if c.ids[-1] not in case.stops} <= {"length"}
        assert _flat(cut) != _flat(whole)

    def test_a_stop_id_at_the_limit_is_a_stop(self, case: EngineCase) -> None:
        keys = keys_of([1])
        ((whole,),) = case.engine.generate(case.prompts[:1], keys, Sampling(max_tokens=6))
        place = next(i for i, token in enumerate(whole.ids) if i and token not in whole.ids[:i])
        at_limit = Sampling(max_tokens=place + 1, stop_ids=frozenset({whole.ids[place]}))
        ((completion,),) = case.engine.generate(case.prompts[:1], keys, at_limit)
        assert (completion.ids, completion.finish) == (whole.ids[: place + 1], "stop")

    @pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
    def test_logprobs_are_those_of_the_whole_distribution_at_the_temperature(
        self, case: EngineCase, temperature: float
    ) -> None:
        sampling = replace(case.sampling, temperature=temperature)
        groups = case.engine.generate(case.prompts, keys_of([2] * len(case.prompts)), sampling)
        for prompt, group in zip(case.prompts, groups, strict=True):
            for completion in group:
                assert len(completion.logprobs) == len(completion.ids)
                expected = case.distribution(prompt, completion.ids, temperature or 1.0)
                picked = expected[range(len(completion.ids)), list(completion.ids)]
                assert allclose(torch.tensor(completion.logprobs), picked, rtol=0, atol=case.tolerance)

    def test_greedy_takes_the_likeliest_whatever_the_key(self, case: EngineCase) -> None:
        if not case.is_model:
            pytest.skip("it recites")
        greedy = replace(case.sampling, temperature=0.0)
        for prompt, group in zip(
            case.prompts, case.engine.generate(case.prompts, keys_of([2] * len(case.prompts)), greedy), strict=True
        ):
            assert group[0].ids == group[1].ids
            likeliest = case.distribution(prompt, group[0].ids, 1.0).argmax(-1)
            assert likeliest.tolist() == list(group[0].ids)

    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    def test_tokens_are_drawn_with_their_probabilities(self, case: EngineCase, temperature: float) -> None:
        """Pearson's statistic, over the tokens expected at least five times and all others together."""
        if not case.is_model or not case.num_draws:
            pytest.skip("it recites, or has another engine behind it")
        prompt, n = case.prompts[0], case.num_draws
        (group,) = case.engine.generate([prompt], keys_of([n]), Sampling(max_tokens=1, temperature=temperature))
        expected = n * case.distribution(prompt, [0], temperature)[0].exp().numpy()
        drawn = np.bincount([c.ids[0] for c in group], minlength=len(expected))
        often = expected >= 5
        assert often.sum() >= 3, "the prompt leaves no choice"
        values = [*zip(drawn[often], expected[often], strict=True), (drawn[~often].sum(), expected[~often].sum())]
        statistic = sum((seen - wanted) ** 2 / max(wanted, 1e-9) for seen, wanted in values if wanted >= 1 or seen)
        freedom = len(values) - 1
        assert abs(statistic - freedom) < 6 * math.sqrt(2 * freedom)

    def test_a_conversation_is_a_generation_after_another_over_all_messages(self, case: EngineCase) -> None:
        """Same ids, a key for each turn; the mask says who wrote which, and replies have log-probability 0."""
        keys = keys_of([4, 0, 4, 3])
        sampling = replace(case.sampling, max_tokens=40)
        respondent = Scripted(wordy(sorted({*case.prompts[0], *case.prompts[2]} - case.stops), longest=3))
        groups = case.engine.converse(case.prompts, keys, sampling, respondent)
        assert [len(group) for group in groups] == [4, 0, 4, 3]
        for i, (prompt, group) in enumerate(zip(case.prompts, groups, strict=True)):
            for g, completion in enumerate(group):
                ids, own = respondent.transcript(i, g)
                assert (completion.ids, completion.own) == (ids, own)
                message = 0
                for k, (turn, reply) in enumerate(zip(respondent.turns[i, g], respondent.replies[i, g], strict=True)):
                    rest = replace(sampling, max_tokens=40 - message)
                    ((alone,),) = case.engine.generate([[*prompt, *ids[:message]]], [[turn_key(keys[i][g], k)]], rest)
                    assert (alone.ids, alone.finish) == (turn, respondent.finishes[i, g][k])
                    message += len(turn) + len(reply.ids)
                expected = case.distribution(prompt, ids, 1.0)[range(len(ids)), list(ids)]
                expected[~torch.tensor(own)] = 0.0
                assert allclose(torch.tensor(completion.logprobs), expected, rtol=0, atol=case.tolerance)
        assert max(map(len, respondent.turns.values())) > 1
        assert {c.finish for c in _flat(groups)} >= {"out_of_turns", "ended"}

    def test_what_cannot_be_sampled_is_refused(self, case: EngineCase) -> None:
        with refuses(UsageError, "1 is empty"):
            case.engine.generate([case.prompts[0], []], [[1], [2]], case.sampling)
        if case.is_model:
            with refuses(UsageError, "token id -1"):
                case.engine.generate([[-1]], [[1]], case.sampling)
        if case.context is not None:
            long = [case.prompts[0][0]] * case.context
            with pytest.raises(UsageError, match=f"prompt 0 has {case.context} tokens and the model's context is"):
                case.engine.generate([long], [[1]], case.sampling)

    def test_the_context_ends_a_completion(self, case: EngineCase) -> None:
        if case.context is None:
            pytest.skip("it has no context")
        ids = case.prompts[0]
        prompt = (ids * (case.context // len(ids) + 1))[: case.context - 3]
        ((completion,),) = case.engine.generate([prompt], [[5]], Sampling(max_tokens=LIMIT))
        assert len(completion.ids) == 3
        assert completion.finish == "length"


def _flat(groups):
    return [completion for group in groups for completion in group]
