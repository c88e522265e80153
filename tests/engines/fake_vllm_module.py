"""A stand-in for the package ``vllm`` in this process: what an engine calls of it, over a plain transformers model."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM


class SamplingParams:
    """Takes the names that vLLM's has, and no others."""

    def __init__(
        self,
        *,
        seed: int,
        max_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        min_p: float,
        repetition_penalty: float,
        presence_penalty: float,
        frequency_penalty: float,
        stop_token_ids: list[int],
        ignore_eos: bool,
        skip_special_tokens: bool,
        detokenize: bool,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> None:
        vars(self).update({name: value for name, value in locals().items() if name != "self"})


class PackedHead:
    """How vLLM multiplies with a head on a CPU: by a copy that is made when it is told to."""

    @staticmethod
    def process_weights_after_loading(module: Any) -> None:
        module.packed = module.weight.detach().clone()
        module.forward = lambda hidden: torch.nn.functional.linear(hidden, module.packed)


class LLM:
    """Answers one request after the other, each from its own seed, with a cache of prompts.

    ``said``: what was asked of it. ``drops``: names of weights that stay as they are; ``keeps_head``, ``keeps_cache``:
    what stays, too. ``aborts`` and ``loses``: numbers of requests that are given up, or have no answer. Like vLLM it
    sets seeds, variables and torch's threads of its process.
    """

    last: LLM
    refuses = ""

    def __init__(self, model: str, **options: Any) -> None:
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        assert options["load_format"] == "dummy"
        if self.refuses:
            raise ValueError(self.refuses)
        LLM.last, self.options, self.folder = self, options, model
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        os.environ |= {"LD_PRELOAD": "libgomp.so", "LOCAL_WORLD_SIZE": "1", "VLLM_OF_ITS_OWN": "1"}
        torch.set_num_threads = lambda number: None
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).eval()
        for module in (self.model.get_input_embeddings(), self.model.get_output_embeddings()):
            module.quant_method = PackedHead()
        PackedHead.process_weights_after_loading(self.model.get_output_embeddings())
        self.said: list[str] = []
        self.asked: list[Any] = []
        self.drops: Sequence[str] = ()
        self.keeps_cache = self.keeps_head = False
        self.aborts: set[int] = set()
        self.loses: set[int] = set()
        self.asleep: set[str] = set()
        self.preemptions = 0
        self.alive = True
        self.cache: dict[tuple[int, ...], Any] = {}
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=self.shutdown))

    def shutdown(self) -> None:
        self.alive = False

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        assert method == "reload_weights"
        assert "weights" not in self.asleep, "loaded into memory that is given back"
        self.said.append(method)
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, weight in kwargs["weights_iterator"]:
                if name not in self.drops:
                    own[name].copy_(weight)

    def apply_model(self, work: Any) -> list[Any]:
        self.said.append(work.__name__)
        return [] if self.keeps_head else [work(self.model)]

    def reset_prefix_cache(self) -> bool:
        self.said.append("reset_prefix_cache")
        if not self.keeps_cache:
            self.cache.clear()
        return True

    def sleep(self, level: int) -> None:
        self.said.append(f"sleep {level}")
        assert self.options["enable_sleep_mode"]
        self.asleep = {"weights", "kv_cache"}
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(float("nan"))

    def wake_up(self, tags: list[str]) -> None:
        self.said.append(f"wake_up {' '.join(tags)}")
        self.asleep -= set(tags)

    def get_metrics(self) -> list[Any]:
        others = SimpleNamespace(name="vllm:something", values=[1, 2])  # a histogram has no value
        return [others, SimpleNamespace(name="vllm:num_preemptions", value=self.preemptions)]

    @torch.no_grad()
    def generate(self, prompts: list[dict[str, Any]], params: list[SamplingParams], use_tqdm: bool) -> list[Any]:
        assert not self.asleep
        assert self.alive
        assert not use_tqdm
        assert os.environ["VLLM_OF_ITS_OWN"] == "1"
        self.asked += params
        pairs = enumerate(zip(prompts, params, strict=True))
        return [self.answer(i, p["prompt_token_ids"], options) for i, (p, options) in pairs if i not in self.loses]

    def answer(self, number: int, prompt: list[int], options: SamplingParams) -> Any:
        draw, ids, scores = torch.Generator().manual_seed(options.seed), list[int](), list[Any]()
        logits, past = self.read(prompt, cached=options.prompt_logprobs is None)
        prompt_scores = None
        if options.prompt_logprobs is not None:
            read = self.model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
            prompt_scores = [None, *({t: score(read[i, t])} for i, t in enumerate(prompt[1:]))]
        while True:
            logprobs = (logits / (options.temperature or 1.0)).log_softmax(-1)
            noise = torch.empty_like(logprobs).exponential_(generator=draw)
            token = int((logprobs.exp() / noise if options.temperature else logprobs).argmax())
            ids.append(token)
            tops = logprobs.topk(options.logprobs).indices.tolist() if options.logprobs else []
            scores.append({each: score(logprobs[each]) for each in {token, *tops}})
            if token in options.stop_token_ids or len(ids) == options.max_tokens:
                break
            out = self.model(input_ids=torch.tensor([[token]]), past_key_values=past, use_cache=True)
            logits, past = out.logits[0, -1], out.past_key_values
        finish = "abort" if number in self.aborts else "stop" if ids[-1] in options.stop_token_ids else "length"
        logprobs = None if options.logprobs is None else scores
        done = SimpleNamespace(token_ids=ids, finish_reason=finish, logprobs=logprobs)
        return SimpleNamespace(prompt_token_ids=prompt, prompt_logprobs=prompt_scores, outputs=[done])

    def read(self, prompt: list[int], *, cached: bool) -> tuple[torch.Tensor, Any]:
        """The logits behind a prompt, and its keys and values."""
        if not cached or tuple(prompt) not in self.cache:
            out = self.model(input_ids=torch.tensor([prompt]), use_cache=True)
            self.cache[tuple(prompt)] = out.logits[0, -1], out.past_key_values
        return copy.deepcopy(self.cache[tuple(prompt)])


def score(value: torch.Tensor) -> Any:
    return SimpleNamespace(logprob=float(value))


def stand_in() -> ModuleType:
    """The package."""
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SamplingParams  # type: ignore[attr-defined]
    return module
