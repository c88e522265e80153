"""vLLM in the trainer's own process, on its device: weights are handed over by reference, and no server is started.

A copy of the weights can be stale here as behind a server, so the same holds: both sides score a fixed batch after
every hand-over. On a GPU vLLM sleeps while the trainer computes: weights and cache give their memory back, and weights
come anew before the next batch. vLLM is made for a process of its own and sets seeds, variables and threads of the one
that it is in, so the trainer's are put back behind every call.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from posttrain.engines.base import Engine, Sampling, check_prompts, check_sampling
from posttrain.engines.conversation import Groups
from posttrain.engines.vllm.engine import COLOCATED
from posttrain.engines.vllm.plugin.posttrain_vllm import pack_tied_heads
from posttrain.engines.vllm.probe import (
    TOP,
    default_tolerance,
    largest_difference,
    probe_bodies,
    probe_prompts,
    read_scores,
)
from posttrain.engines.vllm.protocol import (
    CompletionRequest,
    Interrupted,
    ServedModel,
    Unreadable,
    check_temperature,
    exact_modes,
    read_completion,
    seed_of,
)
from posttrain.engines.weights import checkpoint_weights, save_without_weights
from posttrain.errors import EngineMismatch, RunFailure, UsageError, first_line
from posttrain.models.stated_sizes import context_length
from posttrain.types import Completion

NAME = "policy"
# What vLLM takes by default: a share of a GPU; of a CPU's memory bytes for its cache, as a share would be much there.
GPU_MEMORY, CACHE_BYTES = 0.3, 1 << 30
VARIABLES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_CONFIGURE_LOGGING": "0"}
PREEMPTIONS = "vllm:num_preemptions"
# What vLLM and a model's loader raise; nothing of ours is among them.
_ERRORS = (AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)


def colocated(model: Any, tokenizer: Any, where: str, **options: Any) -> ColocatedEngine:
    """The engine for all ``options`` of ``vllm`` (see ``check_vllm``), those that nobody set included.

    Raises:
        UsageError: there is no model to follow; vLLM is not installed here.
    """
    if model is None:
        raise UsageError(
            f"{where}.colocate: vLLM in this process is given its weights by training; an evaluation asks a server "
            f"({where}.url), or use --engine native"
        )
    return ColocatedEngine(model, tokenizer, where=where, **{name: options[name] for name in COLOCATED})


class ColocatedEngine(Engine):
    """See ``vllm``. The first ``sync`` builds vLLM from the model's configuration, without weights."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        logprobs: bool = True,
        tolerance: float | None = None,
        gpu_memory: float | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        max_model_len: int | None = None,
        eager: bool = False,
        where: str = "engine",
    ) -> None:
        self.where = where
        self.model, self.tokenizer, self.logprobs, self.dtype, self.eager = model, tokenizer, logprobs, dtype, eager
        self.tolerance = default_tolerance(model, dtype) if tolerance is None else tolerance
        self.gpu_memory = gpu_memory
        own = context_length(model.config)
        if max_model_len is not None and not 1 < max_model_len <= own:
            raise UsageError(f"{where}.max_model_len: {max_model_len}; this model takes 2 to {own} tokens")
        self.context = own if max_model_len is None else max_model_len
        device = next(model.parameters()).device.type
        if device not in ("cpu", "cuda"):
            raise UsageError(
                f"{where}.colocate: vLLM computes on cuda or cpu, and the model is on {device}; use native"
            )
        self.sleeps = device == "cuda"
        self.version = -1  # vLLM has been given nothing yet
        self._variables = dict(VARIABLES)
        self._llm: Any = None
        self._asleep = False
        self._preempted = 0
        self._handler: logging.FileHandler | None = None
        with self._inside():
            self._vllm = _import_vllm(where)  # missed before anything is trained

    @property
    def context_tokens(self) -> int:
        """See ``Engine.context_tokens``."""
        return self.context

    def sync(self, version: int) -> None:
        """See ``Engine.sync``. The first one builds vLLM; one after ``rest`` wakes it."""
        if version == self.version and not self._asleep:
            return
        if self.world.size > 1:
            raise UsageError(
                f"{self.where}.colocate: {self.world.size} processes train, and vLLM in one of them would take their "
                "connections for its own; leave it out (a server answers all of them), or train in one process"
            )
        if self._llm is None:
            self._build()
        elif not self._asleep:
            self._ask(self._probes())  # what a cache keeps of the weights before will show below
        self._hand_over()
        difference = self.score()
        if difference > self.tolerance:
            raise EngineMismatch(
                f"vLLM in this process: after {version} updates the weights were handed over, and it still computes "
                f"something else: log-probabilities of a fixed batch differ by {difference:.2g} nats (at most "
                f"{self.tolerance:g} is allowed). The last step is saved; if vLLM computes in another precision, give "
                f"its {self.where}.dtype, or raise {self.where}.tolerance"
            )
        self.version = version

    def rest(self) -> None:
        """See ``Engine.rest``: on a GPU, weights and cache give their memory back."""
        if self._llm is None or self._asleep or not self.sleeps:
            return
        self._ask(self._probes())  # as in ``sync``: nothing can be asked of a sleeper
        with self._inside():
            self._llm.sleep(level=2)
        self._asleep = True

    def generate(self, prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], sampling: Sampling) -> Groups:
        """See ``Engine.generate``. Every completion is a request of its own, all of them at once.

        Raises:
            UsageError: prompts or sampling options that vLLM cannot serve, or not with log-probabilities.
            RunFailure: vLLM failed, or gave up a request.
        """
        assert len(prompts) == len(keys), f"{len(prompts)} prompts but keys for {len(keys)}"
        check_sampling(sampling)
        check_temperature(sampling.temperature)
        if self.logprobs and "processed" not in exact_modes(sampling):
            raise UsageError(
                f"{self.where}.colocate: at top_k {sampling.top_k}, top_p {sampling.top_p:g} vLLM has no "
                "log-probabilities of the whole distribution. An evaluation needs none: set "
                f"{self.where}.logprobs to false"
            )
        context = sampling.within(self.context)
        check_prompts(prompts, context, self._vocab_size)
        if self._llm is None or self._asleep:
            self.sync(max(self.version, 0))
        requests = [
            CompletionRequest(
                NAME,
                tuple(map(int, prompt)),
                min(sampling.max_tokens, context - len(prompt)),
                sampling,
                seed_of(key),
                self.logprobs,
            )
            for prompt, row in zip(prompts, keys, strict=True)
            for key in row
        ]
        answers = self._ask([request.body() for request in requests])
        self._note_preemptions()
        done = iter([self._read(*pair) for pair in zip(answers, requests, strict=True)])
        return [[next(done) for _ in row] for row in keys]

    def score(self) -> float:
        """By how much vLLM's log-probabilities of a fixed batch differ from the model's own, in nats."""
        bodies = self._probes()
        answers = zip(self._ask(bodies), bodies, strict=True)
        try:
            scores = [read_scores(answer, body["prompt"], self._vocab_size) for answer, body in answers]
        except Unreadable as error:
            raise RunFailure(f"vLLM in this process: an answer that cannot be used, to the probe: {error}") from None
        return largest_difference(self.model, lambda compute: compute(), scores)

    def close(self) -> None:
        """End vLLM and free its memory; a later ``sync`` builds it again."""
        llm, self._llm, self._asleep, self.version = self._llm, None, False, -1
        if llm is not None:
            with self._inside():
                llm.llm_engine.engine_core.shutdown()
                del llm
                gc.collect()  # it refers to itself
                _empty_cache()
        if self._handler is not None:
            logging.getLogger("vllm").removeHandler(self._handler)
            self._handler.close()
            self._handler = None

    def weights(self) -> Any:
        """What is handed over (see ``checkpoint_weights``)."""
        return checkpoint_weights(self.model)

    @property
    def _vocab_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    def _build(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="posttrain-vllm-")) if self.folder is None else self.folder
        save_without_weights(self.model, self.tokenizer, folder / "served")
        self._handler = logging.FileHandler(folder / "vllm.log")
        logger = logging.getLogger("vllm")
        logger.addHandler(self._handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False  # the terminal is the run's
        _empty_cache()  # it looks at what is free
        self._preempted = 0
        with self._inside():
            self._llm = self._vllm.LLM(
                model=str(folder / "served"),
                load_format="dummy",
                dtype=self.dtype,
                max_model_len=self.context,
                enforce_eager=self.eager,
                gpu_memory_utilization=GPU_MEMORY if self.gpu_memory is None else self.gpu_memory,
                kv_cache_memory_bytes=None if self.sleeps or self.gpu_memory is not None else CACHE_BYTES,
                enable_sleep_mode=self.sleeps,
                # 0.32 turns back the seed of a prompt that is read in parts, which fails on a CPU
                enable_chunked_prefill=None if self.sleeps else False,
                generation_config="vllm",
                logprobs_mode="processed_logprobs",
                max_logprobs=TOP,
                seed=0,
                disable_log_stats=False,  # preemptions are counted by these
            )

    def _hand_over(self) -> None:
        """New weights, and nothing left that was computed by those before."""
        with self._inside():
            if self._asleep:
                _empty_cache()  # what the trainer keeps for later is needed now
                self._llm.wake_up(tags=["weights"])  # before weights come: they would be written to where nobody reads
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self.weights()})
            self._llm.apply_model(pack_tied_heads)
            if self._asleep:
                self._llm.wake_up(tags=["kv_cache"])
                self._asleep = False
            self._reset_caches()

    def _reset_caches(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the cache of prompts is in use and was not emptied")

    def _probes(self) -> list[dict[str, Any]]:
        prompts = probe_prompts(self._vocab_size, self.context)
        return probe_bodies(ServedModel(NAME, "", self.context), prompts, self.context)

    def _ask(self, bodies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """What a server would answer to each of ``bodies``."""
        if not bodies:
            return []
        prompts = [{"prompt_token_ids": list(body["prompt"])} for body in bodies]
        ours = ("model", "prompt", "return_token_ids", "return_tokens_as_token_ids")
        options = [{name: value for name, value in body.items() if name not in ours} for body in bodies]
        with self._inside():
            wanted = [self._vllm.SamplingParams(detokenize=False, **each) for each in options]
            outputs = self._llm.generate(prompts, wanted, use_tqdm=False)
            if len(outputs) != len(bodies):
                raise RuntimeError(f"{len(outputs)} answers to {len(bodies)} requests")
            return [_as_answer(output) for output in outputs]

    def _read(self, answer: dict[str, Any], request: CompletionRequest) -> Completion:
        try:
            read = read_completion(answer, request, self._vocab_size)
        except (Unreadable, Interrupted) as error:
            what = str(error).replace("the server", "it")
            raise RunFailure(f"vLLM in this process: a completion that cannot be used: {what}") from None
        return Completion(read.ids, read.logprobs, read.finish, version=self.version)

    def _note_preemptions(self) -> None:
        """Say that answers were put back and begun over; they are the same ones, for each has its own seed."""
        count = sum(int(metric.value) for metric in self._llm.get_metrics() if metric.name == PREEMPTIONS)
        if count > self._preempted:
            self._notices += (
                f"vLLM had no room for {count - self._preempted} answers under way and computed what they had again; "
                f"more memory ({self.where}.gpu_memory, on a CPU VLLM_CPU_KVCACHE_SPACE) saves that time",
            )
        self._preempted = count

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Calls of vLLM: it has its variables, and leaves no others, no seeds and no number of threads behind.

        Whatever fails ends vLLM, for requests that it has begun would come back with the next ones.

        Raises:
            RunFailure: vLLM raised something.
        """
        before, threads, set_threads = dict(os.environ), torch.get_num_threads(), torch.set_num_threads
        seeds, numpy_seeds = random.getstate(), np.random.get_state()
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        os.environ.update(self._variables)
        try:
            with torch.random.fork_rng(devices), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of torch, to those who write vLLM
                yield
        except _ERRORS as error:
            where = ""
            if self._handler is not None:
                logging.getLogger("vllm").error("this ends vLLM here", exc_info=error)
                where = f" ({self._handler.baseFilename} has the whole of it)"
            self.close()
            what = f"{type(error).__name__}: {first_line(error)}"
            raise RunFailure(f"vLLM in this process failed: {what}{where}") from None
        except BaseException:
            self.close()
            raise
        finally:
            self._variables |= {k: v for k, v in os.environ.items() if k.startswith("VLLM_") and before.get(k) != v}
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)
            random.setstate(seeds)
            np.random.set_state(numpy_seeds)
            torch.set_num_threads = set_threads
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


def _import_vllm(where: str) -> Any:
    try:
        import vllm
    except ImportError as error:
        raise UsageError(
            f"{where}.colocate: vLLM cannot be imported by the Python that trains, {sys.executable} "
            f"({first_line(error)}). Install it and posttrain into one environment, or leave colocate out: a server "
            "has an environment of its own (docs/serving.md)"
        ) from None
    return vllm


def _as_answer(output: Any) -> dict[str, Any]:
    """vLLM's ``RequestOutput`` as its server writes it down, for the same readers."""
    (done,) = output.outputs
    choice: dict[str, Any] = {
        "finish_reason": done.finish_reason,
        "token_ids": list(done.token_ids),
        "prompt_token_ids": list(output.prompt_token_ids),
    }
    if done.logprobs is not None:
        places = list(zip(done.token_ids, done.logprobs, strict=True))
        choice["logprobs"] = {
            "tokens": [f"token_id:{token}" for token, _ in places],
            "token_logprobs": [scores[token].logprob for token, scores in places],
            "top_logprobs": [{f"token_id:{token}": s.logprob for token, s in scores.items()} for _, scores in places],
        }
    if output.prompt_logprobs is not None:
        scored = output.prompt_logprobs
        choice["prompt_logprobs"] = [each and {k: {"logprob": s.logprob} for k, s in each.items()} for each in scored]
    return {"choices": [choice]}


def _empty_cache() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
