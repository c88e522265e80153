"""A model of ours as the lm-evaluation-harness asks for one: likelihoods of texts, and what it goes on with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from posttrain.engines.base import Sampling
from posttrain.engines.models import OpenedModel
from posttrain.errors import UsageError
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.micro import split_rows
from posttrain.randomness import derive_key
from posttrain.render import encode_plain, encode_prompt, stop_ids
from posttrain.types import Message, Sample, collate

MAX_NEW_TOKENS = 256  # the harness's own default (``max_gen_toks``)
TOKENS_PER_MICRO = 16_384
# What a task may say of how its answers are drawn; of the rest nothing is known here.
KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}


class HarnessModel(TemplateLM):
    """Asks the engine of an opened model, whose weights it also takes likelihoods by.

    A context is the task's own text as it stands; with ``templated`` it is what a user says in the model's template.
    """

    def __init__(self, opened: OpenedModel, *, seed: int = 0, templated: bool = False) -> None:
        super().__init__()
        self.opened, self.seed, self.templated = opened, seed, templated
        self.forward = Forward(opened.model)

    @property
    def eot_token_id(self) -> int:
        """What stands before a text that has nothing before it."""
        return int(self.opened.tokenizer.eos_token_id)

    @property
    def max_length(self) -> int:
        """Tokens of a text together with what stands before it."""
        return self.opened.context_tokens

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids, with what the tokenizer puts in front unless it is told not to, or stands there already."""
        tokenizer = self.opened.tokenizer
        begins = bool(tokenizer.bos_token) and string.startswith(tokenizer.bos_token)
        adds = not begins if add_special_tokens is None else add_special_tokens
        return list(tokenizer.encode(string, add_special_tokens=adds))

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if not self.templated:
            pair: tuple[list[int], list[int]] = super()._encode_pair(context, continuation)
            return pair
        return self._prompt(context), encode_plain(self.opened.tokenizer, continuation)

    def _prompt(self, context: str) -> list[int]:
        if not self.templated:
            return self.tok_encode(context)
        return encode_prompt(self.opened.tokenizer, self.opened.grader.template, [Message("user", context)])

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Of each continuation: its log-probability in nats behind its context, and whether it is the greedy one."""
        samples: list[Sample] = []
        for _texts, context, continuation in requests:
            ids = [*context, *continuation]
            if len(ids) > self.max_length:
                raise UsageError(f"a text of {len(ids)} tokens, and the model's context has {self.max_length}")
            samples.append(Sample(ids, [i >= len(context) for i in range(len(ids))], group=len(samples)))
        said: list[tuple[float, bool]] = [(0.0, True)] * len(samples)
        batch = collate(samples)
        with torch.no_grad():
            for rows in split_rows(batch, TOKENS_PER_MICRO):
                part = batch.select(rows)
                logprobs = self.forward(part, "none").logprobs.cpu().double()
                likeliest = self.forward.top_candidates(part, 1)[0][..., 0].cpu()
                for place, row in enumerate(rows):
                    mask = part.mask[place]
                    is_greedy = bool((likeliest[place] == part.tokens[place])[mask].all())
                    said[row] = float(logprobs[place][mask].sum()), is_greedy
        return said

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each whole text in nats; a long one in windows that predict each token once."""
        totals = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(logprob for logprob, _ in self._loglikelihood_tokens(parts)))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What the engine continues each context with, up to the first of its stop texts.

        Raises:
            UsageError: a task asks for a way of drawing that is not known here, or a context leaves no room.
        """
        texts = [""] * len(requests)
        alike: dict[Sampling, list[int]] = {}  # requests that are drawn in the same way are drawn together
        stops = []
        for number, request in enumerate(requests):
            sampling, until = self._drawing(request.args[1])
            alike.setdefault(sampling, []).append(number)
            stops.append(until)
        for sampling, numbers in alike.items():
            prompts = [self._prompt(requests[number].args[0]) for number in numbers]
            keys = [[derive_key(self.seed, "lm-eval", 0, number)] for number in numbers]
            said = self.opened.engine.generate(prompts, keys, sampling)
            for number, [completion] in zip(numbers, said, strict=True):
                kept = [token for token in completion.ids if token not in sampling.stop_ids]
                text = str(self.opened.tokenizer.decode(kept, skip_special_tokens=True))
                ends = [place for stop in stops[number] if (place := text.find(stop)) >= 0]
                texts[number] = text[: min(ends, default=len(text))]
        return texts

    def _drawing(self, asked: Mapping[str, Any]) -> tuple[Sampling, list[str]]:
        """(how to draw; the texts that end it)."""
        unknown = sorted(asked.keys() - KNOWN)
        if unknown:
            raise UsageError(f"--with lm-eval: generation_kwargs {unknown} are not known here; {sorted(KNOWN)} are")
        until = asked.get("until") or []
        temperature = float(asked.get("temperature", 1.0)) if asked.get("do_sample") else 0.0
        top_k = asked.get("top_k") if temperature else None
        sampling = Sampling(
            min(int(asked.get("max_gen_toks", MAX_NEW_TOKENS)), self.max_length - 1),
            temperature=temperature,
            top_k=top_k,
            top_p=float(asked.get("top_p", 1.0)) if temperature else 1.0,
            stop_ids=stop_ids(self.opened.tokenizer, self.opened.grader.template),
        )
        return sampling, [until] if isinstance(until, str) else [stop for stop in until if stop]
