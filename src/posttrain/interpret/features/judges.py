"""Who labels features: a model that is loaded here, or one that a server answers for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from posttrain.addresses import checked_url, key_for
from posttrain.engines.rollout import Sampler
from posttrain.engines.vllm.http import HttpServer, Refused, Unanswered
from posttrain.engines.vllm.protocol import Unreadable, read_models
from posttrain.errors import RunFailure, UsageError
from posttrain.render import encode_prompt
from posttrain.types import Message

# Asked questions in, an answer to each out, in the same order.
Judge = Callable[[Sequence[str]], Sequence[str]]
KEY_VARIABLE = "JUDGE_API_KEY"
MAX_TOKENS = 512  # of an answer, with what a model may think before it
TIMEOUT_SECONDS, RETRIES = 120.0, 4


def model_judge(sampler: Sampler, max_tokens: int = MAX_TOKENS) -> Judge:
    """A model that is loaded here, asked greedily under its template.

    Raises, when asked:
        UsageError: a question that leaves no room in the model's context.
    """

    def ask(questions: Sequence[str]) -> list[str]:
        template = sampler.grader.template
        prompts = [encode_prompt(sampler.tokenizer, template, [Message("user", text)]) for text in questions]
        keys = [[0]] * len(prompts)
        answers = sampler.engine.generate(prompts, keys, sampler.sampling(max_tokens, temperature=0.0))
        return [sampler.tokenizer.decode(answer.ids, skip_special_tokens=True) for (answer,) in answers]

    return ask


def remote_judge(url: str, model: str | None = None, max_tokens: int = MAX_TOKENS) -> Judge:
    """A model behind a server that knows ``/v1/chat/completions``, asked greedily, one question after the other.

    Args:
        model: its name there; None: the only one that the server has.

    A key, where the server wants one, is read from the environment variable JUDGE_API_KEY; to another machine it goes
    only if JUDGE_API_HOST names that.

    Raises:
        UsageError: no URL of a server. When asked: a key that may not go there, nobody answers there, the request is
            refused, or which model is meant is not known.
        RunFailure: when asked, an answer without a text.
    """
    place = checked_url(url)

    def ask(questions: Sequence[str]) -> list[str]:
        key = key_for(place, "--judge", KEY_VARIABLE)
        try:
            with HttpServer(place, timeout_seconds=TIMEOUT_SECONDS, retries=RETRIES, token=key) as server:
                name = model or _only_model(server, place)
                return [server.call("POST", "/v1/chat/completions", body(name, text), read=_read) for text in questions]
        except Unanswered as error:
            raise UsageError(f"{place}: no judge answers there ({error})") from None
        except Refused as error:
            hint = f"; put a key into {KEY_VARIABLE}" if error.status in (401, 403) else ""
            raise UsageError(f"{place}: the judge refuses ({error}){hint}") from None
        except Unreadable as error:
            raise RunFailure(f"{place}: {error}") from None

    def body(name: str, text: str) -> dict[str, Any]:
        turns = [{"role": "user", "content": text}]
        return {"model": name, "messages": turns, "temperature": 0, "max_tokens": max_tokens}

    return ask


def _only_model(server: HttpServer, place: str) -> str:
    names = [served.name for served in server.call("GET", "/v1/models", read=read_models, retries=0)]
    if len(names) != 1:
        raise UsageError(f"{place}: --judge-model is needed; the server has: {', '.join(names) or 'none'}")
    return names[0]


def _read(answer: Any) -> str:
    try:
        return str(answer["choices"][0]["message"]["content"] or "")
    except (KeyError, IndexError, TypeError) as error:
        raise Unreadable(f"an answer without a text ({type(error).__name__})") from None
