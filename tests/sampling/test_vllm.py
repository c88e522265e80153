"""The client of a vLLM server: what it sends, what it refuses, and what happens when the server fails."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from fake_vllm import FakeVllm, Reply, Reset, model_answer
from posttrain import registry
from posttrain.errors import RecipeError, RunFailure, UsageError
from posttrain.recipes.recipe import load_recipe
from posttrain.sampling.base import Engine, Sampling
from posttrain.sampling.http import Unreadable, read_error
from posttrain.sampling.vllm.client import ServedModel, VllmEngine, VllmRequest, read_completion, read_models
from posttrain.sampling.vllm.server import served_names
from posttrain.training.build import prepare
from posttrain.types import Completion
from posttrain.untrusted import declare_code
from refusing import refuses
from serving import free_port

pytestmark = pytest.mark.usefixtures("no_waiting")

GREEDY = Sampling(max_tokens=4, temperature=0.0)


def counting(body):
    """Completion number ``seed``: the seed's digits as ids; half a nat each."""
    ids = [int(digit) for digit in str(body["seed"])][: body["max_tokens"]]
    ids += [9] * (body["max_tokens"] - len(ids))
    return Completion(tuple(ids), (-0.5,) * len(ids), "length")


def ask(server, prompts=([1, 2],), keys=None, sampling=GREEDY, **options):
    keys = keys or [[1234]] * len(prompts)
    return VllmEngine(server.url, **options).generate(prompts, keys, sampling)


def test_vllm_request_has_what_sampling_needs():
    with FakeVllm(counting) as server:
        (group,) = ask(
            server, [[5, 6, 7]], [[77, 2**63 + 78]], Sampling(30, temperature=0.5, top_k=7, stop_ids=frozenset({3, 1}))
        )
    assert len(group) == 2
    first, second = sorted(server.bodies, key=lambda body: body["seed"])
    assert (first["seed"], second["seed"]) == (77, 78)
    assert {key: first[key] for key in ("model", "prompt", "max_tokens", "temperature", "top_p", "top_k")} == {
        "model": "small",
        "prompt": [5, 6, 7],
        "max_tokens": 30,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 7,
    }
    assert first["stop_token_ids"] == [1, 3]
    assert first["ignore_eos"] is True
    neutral = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert {key: first[key] for key in neutral} == neutral
    assert "logprobs" not in first
    assert all(math.isnan(value) for c in group for value in c.logprobs)


def test_many_at_a_time_and_every_one_in_its_place():
    def slowly(count, body):
        time.sleep(0.002 * (body["seed"] % 7))

    keys = [[1000 + 10 * i + j for j in range(3)] for i in range(20)]
    with FakeVllm(counting, trouble=slowly) as server:
        groups = ask(server, [[i] for i in range(20)], keys, concurrency=8)
        assert 2 <= server.most_in_flight <= 8
    assert [[c.ids for c in g] for g in groups] == [[tuple(map(int, str(key))) for key in row] for row in keys]


# What passes when it is tried again; each comes once for every body.


def busy(count, body):
    if count <= 2:
        raise Reply(503, b"<html>try later</html>")


def breaks_off(count, body):
    if count == 1:
        raise Reset


def garbled(count, body):
    if count == 1:
        raise Reply(200, b'{"choices": [{"tok')


def too_slow(count, body):
    if count == 1:
        time.sleep(0.6)


@pytest.mark.parametrize("trouble", [busy, breaks_off, garbled, too_slow])
def test_trouble_that_ends_loses_no_row(trouble):
    keys = [[1111, 2222], [3333]]
    with FakeVllm(counting, trouble=trouble) as server:
        groups = ask(server, [[1], [2]], keys, timeout_seconds=0.4)
    assert [[c.ids for c in g] for g in groups] == [[(1,) * 4, (2,) * 4], [(3,) * 4]]
    assert len(server.bodies) >= 6


def test_vllm_aborted_request_is_retried():
    answers = iter(["abort", "length", "length"])

    def change(content):
        content["choices"][0]["finish_reason"] = answer = next(answers)
        if answer == "abort":
            content["choices"][0]["token_ids"] = []
        return content

    with FakeVllm(counting, change=change) as server:
        assert ask(server)[0][0].ids == (1, 2, 3, 4)
    assert len(server.bodies) == 2


def always(reply):
    def trouble(count, body):
        raise reply

    return trouble


@pytest.mark.parametrize(
    ("trouble", "seconds", "message"),
    [
        (always(Reply(500, {"error": {"message": "out of luck"}})), 60.0, "3 attempts failed.*HTTP 500: out of luck"),
        (always(Reset()), 60.0, "the connection broke off"),
        (lambda count, body: time.sleep(0.5), 0.2, "no answer within 0.2 seconds"),
    ],
)
def test_trouble_that_stays_ends_the_call_and_names_the_server(trouble, seconds, message):
    with FakeVllm(counting, trouble=trouble) as server:
        with pytest.raises(RunFailure, match=f"(?s){server.url}: no completion of prompt 0: .*{message}"):
            ask(server, retries=2, timeout_seconds=seconds)
        assert len(server.bodies) == 3


def test_one_failure_ends_the_waiting_of_all_others():
    def trouble(count, body):
        if body["seed"] == 13:
            raise Reply(500, {"error": "no"})
        time.sleep(20)

    with FakeVllm(counting, trouble=trouble) as server:
        started = time.monotonic()
        with refuses(RunFailure, "HTTP 500"):
            ask(server, [[1]], [[10, 11, 12, 13, 14, 15]], concurrency=4, retries=0)
        assert time.monotonic() - started < 3
        assert len(server.bodies) <= 5, "those that waited are not asked any more"


def test_vllm_refused_request_is_not_retried():
    trouble = always(Reply(400, {"error": {"message": "Token id 800 is out of vocabulary", "code": 400}}))
    with FakeVllm(counting, trouble=trouble) as server:
        with refuses(UsageError, "refused: HTTP 400"):
            ask(server)
        assert len(server.bodies) == 1


# Answers that no other attempt would change.


def with_choice(**changes):
    def change(content):
        content["choices"][0] |= changes
        return content

    return change


def with_logprobs(*values):
    def change(content):
        content["choices"][0]["logprobs"]["token_logprobs"] = list(values)
        return content

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_choice(token_ids=[]), r"no token ids; they come with vLLM 0\.10\.2"),
        (with_choice(token_ids=[1, 2, 3, -4]), r"token_ids\.3: Input should be greater than or equal to 0; got -4"),
        (with_choice(prompt_token_ids=[1]), "a prompt of 1 tokens that is not the one sent, of 2"),
        (with_choice(logprobs=None), "log-probabilities of other tokens than those .*, or none"),
        (with_logprobs(-0.5, -0.5, -0.5), "3 log-probabilities for 4 tokens"),
        (with_logprobs(-0.5, -0.5, -math.inf, -0.5), r"token_logprobs\.2: Input should be greater"),
        (with_choice(token_ids=[4, 3, 2, 1]), "log-probabilities of other tokens"),
        (with_choice(token_ids=[1, 2, 3]), r"3 tokens that ends with id 3 \(length\), where 4 tokens"),
        (with_choice(finish_reason="stop"), r"ends with id 4 \(stop\).*--generation-config vllm"),
    ],
)
def test_an_answer_that_cannot_be_used_is_refused(change, message):
    with FakeVllm(counting, change=change) as server:
        with pytest.raises(RunFailure, match=f"{server.url}: an answer that cannot be used, to prompt 0: .*{message}"):
            ask(server)
        assert len(server.bodies) == 1


def test_a_completion_that_goes_on_after_a_stop_id_is_refused():
    with FakeVllm(counting) as server, refuses(RunFailure, "goes on after"):
        ask(server, sampling=Sampling(4, temperature=0.0, stop_ids=frozenset({2})))


# Which server, which model.


def test_no_server_there_states_how_to_start_one():
    port = free_port()
    started = time.monotonic()
    with pytest.raises(
        UsageError, match=rf"127\.0\.0\.1:{port}: no vLLM server answers there \(no connection to 127.*serve-command"
    ):
        VllmEngine(f"http://127.0.0.1:{port}").generate([[1]], [[1]], GREEDY)
    assert time.monotonic() - started < 1


def test_a_key_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with FakeVllm(counting, key="secret") as server:
        with refuses(UsageError, "VLLM_API_KEY"):
            ask(server)
        monkeypatch.setenv("VLLM_API_KEY", "secret")
        assert ask(server)[0][0].ids == (1, 2, 3, 4)
    with refuses(UsageError, "engine.url", "VLLM_API_KEY", "set VLLM_API_HOST=far.example"):
        VllmEngine("https://far.example").generate([[1]], [[1]], GREEDY)


CARDS = [
    {"id": "base", "root": "/base", "max_model_len": 20},
    {"id": "tuned", "root": "/adapter", "parent": "base", "max_model_len": None},
]


def test_the_model_is_found_by_name():
    with FakeVllm(counting, cards=CARDS) as server:
        engine = VllmEngine(server.url, wanted=("other", "tuned"))
        engine.generate([[1]], [[1]], GREEDY)
        assert server.bodies[0]["model"] == "tuned"
        assert engine.context_tokens == 20  # that of the base
        with refuses(UsageError, "'base'", "'tuned'", "'other'"):
            ask(server, wanted=("other",))
        with refuses(UsageError, "'base'", "'tuned'", "engine.served_name"):
            ask(server)


def test_a_server_that_was_replaced_is_noticed():
    with FakeVllm(counting) as server:
        engine = VllmEngine(server.url)
        engine.generate([[1]], [[1]], GREEDY)
        server.cards[0] = server.cards[0] | {"root": "/models/other"}
        with refuses(RunFailure, "server was replaced", "from /models/small, now", "/models/other"):
            engine.generate([[1]], [[1]], GREEDY)
    with refuses(RunFailure, "server is gone", "no connection to"):
        engine.generate([[1]], [[1]], GREEDY)


# Weights and log-probabilities.


def test_logprobs_that_the_server_would_get_wrong_are_refused_or_not_requested(tiny_random):
    sampling = Sampling(4, temperature=0.7)
    model = tiny_random("qwen3")
    with FakeVllm(model_answer(model, "raw"), context=256) as server:
        with refuses(UsageError, "--logprobs-mode"):
            ask(server, [[9, 10]], sampling=sampling)
        assert ask(server, [[9, 10]], sampling=Sampling(4))[0][0].logprobs[0] < 0
        assert math.isnan(ask(server, [[9, 10]], sampling=Sampling(4, top_p=0.9))[0][0].logprobs[0])
    with FakeVllm(model_answer(model, "processed"), context=256) as server:
        ask(server, [[9, 10]], sampling=sampling)
        modes = [body for body in server.bodies if body["top_k"] == 1]
    assert [(body["prompt"], body["max_tokens"], body["temperature"]) for body in modes] == [([10], 8, 1.0)]


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_temperatures_that_vllm_would_change_or_refuse(temperature):
    with FakeVllm(counting) as server, refuses(UsageError, "takes 0 (greedy)"):
        ask(server, sampling=Sampling(4, temperature=temperature))


def test_the_word_in_a_recipe(small_tokenizer):
    entry = registry.find("engine", "vllm")
    assert entry.traits["needs_model"] is False
    cards = [{"id": served_names("tiny")[0], "root": "/tiny", "max_model_len": 1024}]
    with FakeVllm(counting, cards=cards) as server:
        engine = entry.bind({"url": server.url, "checkpoint": "tiny"})(None, None)
        assert isinstance(engine, Engine)
        assert engine.generate([[1]], [[1234]], GREEDY)[0][0].ids == (1, 2, 3, 4)
        with refuses(UsageError, "not 'mine'"):
            entry.bind({"url": server.url, "checkpoint": "tiny", "served_name": "mine"})(None, None).generate(
                [[1]], [[1]], GREEDY
            )
    with FakeVllm(counting) as server:  # another model, or these weights before they were written again
        engine = entry.bind({"url": server.url, "checkpoint": "tiny"})(None, None)
        with refuses(UsageError, "'small'"):
            engine.generate([[1]], [[1]], GREEDY)


@registry.register("engine", follows_training=False)
def frozen(model, tokenizer):
    """An engine whose weights are its own, whatever becomes of the model."""
    raise AssertionError("never built")


@pytest.mark.parametrize("key", ["rollout.engine", "eval.engine"])
def test_training_with_weights_that_it_never_sees_is_refused(key):
    declare_code(f"{__name__}:frozen", Path(__file__).parent)
    recipe = load_recipe("tiny/grpo", [(key, f"{__name__}:frozen")]).resolve()
    with pytest.raises(RecipeError, match=rf"{key}: 'frozen' samples with fixed weights.*use native"):
        prepare(recipe)


# Real answers.

REAL_ANSWER = {  # as vLLM 0.32 answered a greedy request for five tokens; fields that are not read are left out
    "object": "text_completion",
    "choices": [
        {
            "logprobs": {
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
}


def test_read_completion_of_a_real_answer() -> None:
    def read(stops: frozenset[int]) -> Completion:
        sampling = Sampling(5, temperature=0.0, stop_ids=stops)
        return read_completion(REAL_ANSWER, VllmRequest("tiny", (5, 6, 7), 5, sampling, seed=3), 768)

    logprobs = (-1.0255, -1.8881, -0.175, -0.0494, -8.8e-06)
    assert read(frozenset()) == Completion((229, 31, 288, 31, 266), logprobs, "length")
    assert read(frozenset({266})).finish == "stop", "at the limit, whatever the server says"


def test_read_models() -> None:
    base = {"id": "base", "object": "model", "root": "/models/tiny", "parent": None, "max_model_len": 1024}
    tuned = {"id": "tuned", "root": "/adapter", "parent": "base", "max_model_len": None}
    names = [ServedModel("base", "/models/tiny", 1024), ServedModel("tuned", "/adapter", 1024)]
    assert read_models({"object": "list", "data": [base, tuned]}) == names
    assert read_models({"data": [{"id": "m"}]}) == [ServedModel("m", "m", None)], "the context is not known"
    for answer in ({}, {"data": 3}, {"data": [3]}, [], None, {"data": [{"root": "x"}]}):
        with refuses(Unreadable, "/v1/models lists no"):
            read_models(answer)


def test_read_error() -> None:
    assert read_error(b'{"error": {"message": "no such\\n model", "code": 404}}') == "no such model"
    assert read_error(b"<html>\n <b>Bad Gateway</b>") == "<html> <b>Bad Gateway</b>"
    assert read_error(b"") == "no explanation"
