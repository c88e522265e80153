"""A model asked in conversations: texts, or the reason why one cannot be used; and which of two words it would say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from posttrain.engines.base import Sampling
from posttrain.engines.rollout import Sampler
from posttrain.errors import UsageError
from posttrain.models.forward.forward import Forward
from posttrain.render import Template, decode_response, encode_plain, encode_prompt
from posttrain.render.encoding import markers_of
from posttrain.tasks.reader import Dropped
from posttrain.tasks.thinking import answer_text
from posttrain.types import Message, Sample, collate, with_float64

TOO_LONG = "the prompt does not fit into the model's context"
Conversation = Sequence[Message]


class Unusable(str):
    """Why there is no text: counted by its words."""


def refuse_tags(tokenizer: Any, template: Template) -> None:
    """Refuse a template whose tags are tokens of their own: text of a file can never become these.

    Raises:
        UsageError: it is one.
    """
    known = markers_of(tokenizer).ids
    tags = [f"<{tag}>" for tag in template.tags if f"<{tag}>" in known]
    if tags:
        raise UsageError(
            f"--template {template.name}: it writes {' and '.join(tags)} as tokens of their own, which the texts of a "
            "file cannot hold; use one without tags, such as chat, dialogue or plain"
        )


def ask(
    sampler: Sampler, conversations: Sequence[Conversation], keys: Sequence[int], sampling: Sampling
) -> list[str | Unusable]:
    """One answer to each conversation, without its thinking; or why it cannot be used.

    A text that was cut off is not used: in training it would end where it never did. Nor is one with a marker of
    the tokenizer in it, which would be other tokens there.
    """
    template, tokenizer = sampler.grader.template, sampler.tokenizer
    prompts = [encode_prompt(tokenizer, template, messages) for messages in conversations]
    fitting = [i for i, prompt in enumerate(prompts) if len(prompt) < sampler.context_tokens]
    texts: list[str | Unusable] = [Unusable(TOO_LONG)] * len(prompts)
    if fitting:
        sampled = sampler.engine.generate([prompts[i] for i in fitting], [[keys[i]] for i in fitting], sampling)
        for i, (completion,) in zip(fitting, sampled, strict=True):
            text = decode_response(tokenizer, template, completion.ids).removeprefix(template.opening)
            texts[i] = Unusable("cut off at --max-tokens") if completion.finish == "length" else _usable(sampler, text)
    return texts


def _usable(sampler: Sampler, text: str) -> str | Unusable:
    if "</think>" in text or "<think>" in text:
        try:
            text = answer_text(text, strip_thinking=not sampler.grader.template.tags)
        except Dropped as reason:
            return Unusable(reason)
    if not text.strip():
        return Unusable("blank")
    if next(markers_of(sampler.tokenizer).find(text), None) is not None:
        return Unusable("with a special token in it")
    return text


def with_edges_of(first: str, text: str) -> str:
    """``text`` between the white space of ``first``, so that the two differ in what they say alone."""
    inner = first.strip()
    start = first.index(inner)
    return f"{first[:start]}{text.strip()}{first[start + len(inner) :]}"


@torch.no_grad()
def preference(forward: Forward, tokenizer: Any, prompt: Sequence[int], words: tuple[str, str]) -> float:
    """``P(first) / (P(first) + P(second))`` of two continuations of a prompt, by the sums of log-probabilities."""
    samples = []
    for word in words:
        ids = encode_plain(tokenizer, word)
        samples.append(Sample([*prompt, *ids], [False] * len(prompt) + [True] * len(ids), prefix=len(prompt)))
    first, second = with_float64(forward(collate(samples), "none").logprobs).double().sum(dim=1).tolist()
    return 1.0 / (1.0 + math.exp(min(700.0, second - first)))
