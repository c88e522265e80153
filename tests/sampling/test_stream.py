"""Token by token: what the engine draws for the same key, and what is said of each token."""

from __future__ import annotations

import pytest

from closeness import OF_TINY_RANDOM, approx
from posttrain.errors import UsageError
from posttrain.randomness import derive_key
from posttrain.sampling.base import Sampling
from posttrain.sampling.native.engine import NativeEngine
from posttrain.sampling.native.stream import stream

PROMPT = [9, 31, 87, 40]
STOPS = frozenset(range(8))


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 20}, {"temperature": 1.3, "top_p": 0.8}]
)
def test_the_tokens_are_those_of_the_native_engine(options, tiny_random) -> None:
    model = tiny_random("qwen3")
    sampling = Sampling(24, stop_ids=STOPS, **options)
    keys = [derive_key(0, "stream", i) for i in range(3)]
    bound = OF_TINY_RANDOM / (sampling.temperature or 1.0)
    [whole] = NativeEngine(model).generate([PROMPT], [keys], sampling)
    for key, completion in zip(keys, whole, strict=True):
        tokens = list(stream(model, PROMPT, key, sampling))
        assert tuple(token.id for token in tokens) == completion.ids
        assert tokens[-1].finish == completion.finish
        assert [token.is_last for token in tokens] == [False] * (len(tokens) - 1) + [True]
        assert [token.logprob for token in tokens] == approx(completion.logprobs, abs=bound)


def test_the_first_token_comes_before_the_rest_is_computed(tiny_random) -> None:
    model = tiny_random("qwen3")
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    tokens = stream(model, PROMPT, 1, Sampling(50))
    next(tokens)
    assert len(calls) == 1
    next(tokens)
    tokens.close()
    assert len(calls) == 2
    assert not model.training


def test_it_ends_where_the_context_does_and_leaves_the_mode_alone(tiny_random) -> None:
    model = tiny_random("qwen3", max_position_embeddings=8).train()
    tokens = list(stream(model, PROMPT, 1, Sampling(50)))
    assert (len(tokens), tokens[-1].finish, model.training) == (4, "length", True)
    with pytest.raises(UsageError):
        next(stream(model, [1] * 8, 1, Sampling(5)))
    with pytest.raises(UsageError):
        next(stream(model, [], 1, Sampling(5)))
