"""Engine ``vllm``: samples from a fixed server in evaluations, and from synchronized weights in training."""

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
    """Sample from a vLLM server, either with fixed weights (evaluation) or synchronized weights (training).

    In evaluations, the server keeps its initial weights (``posttrain serve-command``), and other weights are refused.
    With ``top_k``, ``top_p`` or ``min_p``, log-probabilities are unavailable (NaN); training then requires
    ``sampling_mask``.

    In training, changed weights are sent over NCCL to a server on separate GPUs, else through a folder in shared
    memory. Both sides then score a fixed batch, and training stops if they differ. A server started by the run uses
    the Python in POSTTRAIN_VLLM; if it shares the trainer's GPU, it sleeps during training steps. VLLM_API_KEY
    provides the server's key. Random numbers derive from completion keys. Tokens differ from the native engine, and
    batch-dependent rounding may change one.

    Args:
        url: server address; if omitted, a run starts a server.
        checkpoint: model that the server must have; set automatically in evaluations.
        served_name: select a served model by name instead.
        timeout_seconds: timeout per attempt.
        concurrency: maximum concurrent requests.
        retries: retries per failed request.
        tolerance: maximum log-probability difference in nats (0.001, in bf16 0.2).
        gpus: GPUs for a started server (tensor parallel).
        gpu_memory_utilization: GPU memory fraction; defaults to 0.3 on the trainer's GPU.
        dtype: server weight dtype.
        max_model_len: maximum tokens for prompt plus answer.
        enforce_eager: disable compilation.
        sampling_mask: request kept tokens for each draw (vLLM 0.32, --return-sampling-mask and --enable-scale-out),
            which allows truncation in training. Greedy answers then lack log-probabilities.
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
    """Build an engine for a server with fixed weights."""
    from posttrain.sampling.vllm.client import VllmEngine

    vocab_size = None
    if checkpoint is not None:  # needs transformers, which a list of components does not
        from posttrain.sampling.vllm.server import absolute_source, config_of, served_names

        wanted = wanted or served_names(checkpoint)
        vocab_size = getattr(config_of(absolute_source(checkpoint)), "vocab_size", None)
    return VllmEngine(url, tokenizer=tokenizer, vocab_size=vocab_size, wanted=wanted, **asking)
