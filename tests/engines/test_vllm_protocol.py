"""What is said to a vLLM server and how answers are read, as plain data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.engines.base import Sampling
from posttrain.engines.http import Unreadable, read_error
from posttrain.engines.vllm.protocol import (
    CompletionRequest,
    ServedModel,
    mode_request,
    read_completion,
    read_models,
    seed_of,
)
from posttrain.types import Completion

# As vLLM 0.32 answered a greedy request for five tokens after [5, 6, 7], the fields that are not read left out.
REAL_ANSWER = {
    "id": "cmpl-bd3c5cc452ded724",
    "object": "text_completion",
    "model": "tiny",
    "choices": [
        {
            "index": 0,
            "text": " 7 - 7 = ",
            "logprobs": {
                "text_offset": [0, 12, 23, 35, 46],
                "token_logprobs": [-1.0255, -1.8881, -0.175, -0.0494, -8.8e-06],
                "tokens": ["token_id:229", "token_id:31", "token_id:288", "token_id:31", "token_id:266"],
                "top_logprobs": [{"token_id:229": -1.0255}, {}, {}, {}, {}],
            },
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": [229, 31, 288, 31, 266],
            "prompt_logprobs": None,
            "prompt_token_ids": [5, 6, 7],
        }
    ],
    "usage": {"prompt_tokens": 3, "total_tokens": 8, "completion_tokens": 5},
}
REAL_MODELS = {
    "object": "list",
    "data": [
        {"id": "base", "object": "model", "root": "/models/tiny", "parent": None, "max_model_len": 1024},
        {"id": "tuned", "object": "model", "root": "/adapter", "parent": "base", "max_model_len": None},
    ],
}


def request(**sampling):
    options = {"max_tokens": 5, "temperature": 0.0} | sampling
    return CompletionRequest("tiny", (5, 6, 7), options["max_tokens"], Sampling(**options), seed=3)


def test_a_real_answer_is_read():
    completion = read_completion(REAL_ANSWER, request(), 768)
    assert completion == Completion((229, 31, 288, 31, 266), (-1.0255, -1.8881, -0.175, -0.0494, -8.8e-06), "length")
    assert read_models(REAL_MODELS) == [
        ServedModel("base", "/models/tiny", 1024),
        ServedModel("tuned", "/adapter", 1024),
    ]


def test_a_stop_id_at_the_limit_counts_as_a_stop_whatever_the_server_says():
    completion = read_completion(REAL_ANSWER, request(stop_ids=frozenset({266})), 768)
    assert completion.finish == "stop"


@pytest.mark.parametrize("answer", [{}, {"data": 3}, {"data": [3]}, [], None, {"data": [{"root": "x"}]}])
def test_lists_of_models_that_are_none(answer):
    with pytest.raises(Unreadable, match="/v1/models lists no models"):
        read_models(answer)


def test_a_server_that_does_not_tell_its_context():
    assert read_models({"data": [{"id": "m"}]}) == [ServedModel("m", "m", None)]


@given(st.integers(0, 2**64 - 1))
def test_a_seed_is_the_lower_63_bits_of_the_key(key):
    seed = seed_of(key)
    assert 0 <= seed < 2**63
    assert (key - seed) in (0, 2**63)


def test_mode_request_continues_the_last_id_and_leaves_one_token():
    asked = mode_request(ServedModel("m", "m", 20), [4, 5])
    assert (asked.prompt, asked.limit, asked.sampling.top_k, asked.sampling.temperature) == ((5,), 8, 1, 1.0)
    assert mode_request(ServedModel("m", "m", 4), [4, 5, 6]).limit == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"error": {"message": "no such\\n model", "code": 404}}', "no such model"),
        (b'{"object": "error", "message": "older form"}', "older form"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"error": "Unauthorized"}', '{"error": "Unauthorized"}'),
        (b"<html>\n <b>Bad Gateway</b>", "<html> <b>Bad Gateway</b>"),
        (b"[1, 2]", "[1, 2]"),
        (b"", "no explanation"),
        (b"\xff\xfe", "��"),
        (b"x" * 600, "x" * 500),
    ],
)
def test_what_an_error_says(content, message):
    assert read_error(content) == message
