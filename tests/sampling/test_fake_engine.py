"""The engine with given answers draws them by key."""

from __future__ import annotations

import pytest

from posttrain.errors import UsageError
from posttrain.randomness import uniforms
from posttrain.sampling.base import Sampling
from posttrain.sampling.fake_engine import FakeEngine
from posttrain.types import Completion


def test_the_choice_is_the_keys_first_uniform_number():
    choices = [[1], [2, 3], [4]]
    keys = list(range(40))
    (group,) = FakeEngine(choices, logprob=-0.5).generate([[9]], [keys], Sampling(max_tokens=5))
    for key, completion in zip(keys, group, strict=True):
        u = uniforms([key], 1)[0, 0]
        ids = [1] if u < 1 / 3 else [2, 3] if u < 2 / 3 else [4]
        assert completion == Completion(tuple(ids), (-0.5,) * len(ids), "stop")
    assert len({c.ids for c in group}) == 3
    (turned,) = FakeEngine(choices, logprob=-0.5).generate([[9]], [keys[::-1]], Sampling(max_tokens=5))
    assert turned == group[::-1]


def test_choices_by_prompt_and_by_function():
    by_prompt = FakeEngine({(1, 2): [[7]], (3,): [[8]]})
    assert by_prompt.generate([[3], [1, 2]], [[0], [0, 1]], Sampling(max_tokens=4)) == [
        [Completion((8,), (0.0,), "stop")],
        [Completion((7,), (0.0,), "stop")] * 2,
    ]
    assert by_prompt.calls == [([(3,), (1, 2)], [(0,), (0, 1)], Sampling(max_tokens=4))]
    with pytest.raises(UsageError, match=r"no completions for the prompt \[4\]"):
        by_prompt.generate([[4]], [[0]], Sampling(max_tokens=4))
    by_key = FakeEngine(lambda prompt, key: [*prompt, key])
    assert by_key.generate([[3]], [[11]], Sampling(max_tokens=4))[0][0].ids == (3, 11)
