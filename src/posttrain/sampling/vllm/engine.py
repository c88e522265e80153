"""The engine ``vllm``: a vLLM server is asked in an evaluation, and follows the weights in training."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from posttrain.option_types import Dtype, ServerUrl
from posttrain.registry import register
from posttrain.sampling.base import Engine

DEFAULT_URL = "http://127.0.0.1:8000"


@register("engine", needs_model=False, takes_weights=True, keeps_sets="sampling_mask", applies_rules=True)
def vllm(
    model: object,
    tokenizer: object,
    where: str = "engine",
    *,
    url: ServerUrl | None = None,
    checkpoint: str | None = None,
    served_name: str | None = None,
    timeout_seconds: Annotated[float, Field(gt=0)] = 900.0,
    concurrency: Annotated[int, Field(ge=1)] = 64,
    retries: Annotated[int, Field(ge=0)] = 3,
    tolerance: float | None = None,
    gpus: list[Annotated[int, Field(ge=0)]] | None = None,
    gpu_memory_utilization: float | None = None,
    dtype: Dtype = "fp32",
    max_model_len: int | None = None,
    enforce_eager: bool = False,
    sampling_mask: bool = False,
) -> Engine:
    """Ask a vLLM server: in an evaluation one of a model on disk, in training one whose weights follow.

    In an evaluation the server keeps the weights that it was started with (``posttrain serve-command``); one of others
    is refused. With ``top_k``, ``top_p`` or ``min_p`` it has no log-probabilities (NaN); training with them needs
    ``sampling_mask``.

    In training the weights are sent whenever they have changed: over NCCL to a server with a GPU of its own, else
    by a folder in the memory of this machine. Then both sides score a fixed batch, which ends the run if they
    differ. A server that the run starts has the Python of the environment variable POSTTRAIN_VLLM; on the trainer's
    own GPU it sleeps while the trainer computes. A server's key comes from VLLM_API_KEY. Random numbers follow from
    the completion's key; tokens differ from the native engine's, and rounding by the batch may change one.

    Args:
        url: address of a server; without it the run starts one.
        checkpoint: the model that the server must have; an evaluation fills it in.
        served_name: a model of the server by its name there, instead.
        timeout_seconds: time limit of one attempt at a request.
        concurrency: requests that are under way at a time.
        retries: how often a request that fails is repeated.
        tolerance: largest difference of the log-probabilities of both sides in nats (0.001, in bf16 0.2).
        gpus: GPUs of the server that is started (tensor parallel).
        gpu_memory_utilization: share of their memory; on the trainer's own GPU 0.3 by default.
        dtype: type of the server's weights.
        max_model_len: longest prompt and answer together.
        enforce_eager: compile nothing.
        sampling_mask: the server returns the kept tokens of each draw (vLLM 0.32, --return-sampling-mask and
            --enable-scale-out), so that training may truncate. Greedy answers have no log-probabilities then.
    """
    wanted = () if served_name is None else (served_name,)
    asking: dict[str, Any] = {"timeout_seconds": timeout_seconds, "concurrency": concurrency, "retries": retries}
    asking.update(where=where, sampling_mask=sampling_mask)
    if model is None:
        return _ask_server(url or DEFAULT_URL, tokenizer, checkpoint, wanted, asking)
    from posttrain.sampling.vllm.following import TrainingVllmEngine  # needs transformers

    own: dict[str, Any] = {"gpus": tuple(gpus or ()), "gpu_memory_utilization": gpu_memory_utilization, "dtype": dtype}
    own |= {"max_model_len": max_model_len, "enforce_eager": enforce_eager}
    return TrainingVllmEngine(model, tokenizer, url, own, tolerance=tolerance, wanted=wanted, **asking)


def _ask_server(
    url: str, tokenizer: object, checkpoint: str | None, wanted: tuple[str, ...], asking: dict[str, Any]
) -> Engine:
    """Return an engine that asks a server whose weights stay as they are."""
    from posttrain.sampling.vllm.client import VllmEngine

    vocab_size = None
    if checkpoint is not None:  # needs transformers, which a list of components does not
        from posttrain.sampling.vllm.server import absolute_source, config_of, served_names

        wanted = wanted or served_names(checkpoint)
        vocab_size = getattr(config_of(absolute_source(checkpoint)), "vocab_size", None)
    return VllmEngine(url, tokenizer=tokenizer, vocab_size=vocab_size, wanted=wanted, **asking)
