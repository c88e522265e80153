"""Who labels features: a model that is loaded here, or one that a server answers for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from posttrain.engines.judging.asking import RemoteJudge
from posttrain.engines.rollout import Sampler
from posttrain.render import encode_prompt
from posttrain.types import Message

# Asked questions in, an answer to each out, in the same order.
Judge = Callable[[Sequence[str]], Sequence[str]]
MAX_TOKENS = 512  # of an answer, with what a model may think before it


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
    """A model behind a server that knows ``/v1/chat/completions``, asked greedily.

    Args:
        model: its name there; None: the only one that the server has.

    A key, where the server wants one, is read from the environment variable JUDGE_API_KEY; to another machine it goes
    only if JUDGE_API_HOST names that.

    Raises:
        UsageError: no URL of a server, or a key that may not go there. When asked: nobody answers there, the request
            is refused, or which model is meant is not known.
        RunFailure: when asked, an answer without a text.
    """
    return RemoteJudge(url, model, max_tokens=max_tokens, place_key="--judge", model_key="--judge-model").reply
