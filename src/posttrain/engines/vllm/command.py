"""The command line that starts a vLLM server as the engine needs it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import AutoConfig, PretrainedConfig

from posttrain.engines.served_names import absolute_source, served_names
from posttrain.errors import UsageError
from posttrain.models.sources import adapter_base

Transfer = Literal["nccl", "files", "gloo"]
MODULE = "vllm.entrypoints.openai.api_server"
# The ranks that vLLM makes room for; a smaller adapter takes the next one.
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class ServerOptions:
    """How a server is started. ``None`` leaves it to vLLM, or to what the model's own files say.

    Args:
        interpreter: a Python that has vLLM; the server is started as a module of it instead of as ``vllm serve``, a
            command that CPU builds lack.
        gpus: numbers of the GPUs that it may use; more than one: tensor parallel.
        transfer: how it will be given the weights of a model in training; None: it keeps its own.
        is_empty: it starts without weights. sleeps: it can give its memory back.
        name: of the model there.
        whole_prompts: none is read in parts, for which 0.32 turns the answer's seed back and ends where that cannot
            be done, on a CPU.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str = "float32"
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    gpus: tuple[int, ...] = ()
    seed: int = 0
    interpreter: str | None = None
    trust_remote_code: bool = False
    enforce_eager: bool = False
    transfer: Transfer | None = None
    is_empty: bool = False
    sleeps: bool = False
    name: str | None = None
    whole_prompts: bool = False


@dataclass(frozen=True)
class ServerCommand:
    """``words`` start the server, with ``environment`` set; ``name`` is the model's name there."""

    name: str
    words: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    def shell(self) -> str:
        """Return the command for a shell, quoted, one option a line."""
        lines = [" ".join(f"{key}={shlex.quote(value)}" for key, value in self.environment.items())]
        for word in self.words:
            if word.startswith("--"):
                lines.append(f"    {word}")
            else:
                lines[-1] = f"{lines[-1]} {shlex.quote(word)}".lstrip(" " if len(lines) == 1 else "")
        return " \\\n".join(lines)


def server_command(model: str, options: ServerOptions) -> ServerCommand:
    """Return what starts a server of ``model`` (``tiny``, a folder, a run or a hub name), an adapter on its base.

    ``--generation-config vllm`` keeps a model's own sampling defaults out; ``--logprobs-mode
    processed_logprobs`` gives log-probabilities at the sampling temperature (vLLM's default gives them at 1).

    Raises:
        UsageError: no such model, or an adapter that vLLM cannot serve.
    """
    source = absolute_source(model)
    name = options.name or served_names(model)[0]
    base = adapter_base(source)
    if base is not None and options.transfer:
        raise UsageError(f"{source} is an adapter; a server whose weights follow training has the whole model: {base}")
    if base is not None and adapter_base(base) is not None:
        raise UsageError(
            f"{source} is an adapter on an adapter ({base}), which vLLM cannot serve; evaluate it with --engine native"
        )
    config = config_of(base or source)
    length = options.max_model_len or getattr(config, "max_position_embeddings", None)
    adapter = {} if base is None else {"max-lora-rank": _room_for(source), "lora-modules": f"{name}={source}"}
    values = {
        "served-model-name": name if base is None else f"{name}-base",
        **adapter,
        "host": options.host,
        "port": options.port,
        "dtype": options.dtype,
        "max-model-len": length,
        "generation-config": "vllm",
        "logprobs-mode": "processed_logprobs",
        "seed": options.seed,
        "gpu-memory-utilization": options.gpu_memory_utilization,
        "tensor-parallel-size": len(options.gpus) if len(options.gpus) > 1 else None,
        "weight-transfer-config": f'{{"backend": "{options.transfer}"}}'
        if options.transfer in ("nccl", "gloo")
        else None,
        "load-format": "dummy" if options.is_empty else None,
    }
    switches = {
        "enable-lora": base is not None,
        "trust-remote-code": options.trust_remote_code,
        "enforce-eager": options.enforce_eager,
        "enable-sleep-mode": options.sleeps,
        "no-enable-chunked-prefill": options.whole_prompts,
    }
    start: Sequence[str] = ("vllm", "serve", base or source)
    if options.interpreter is not None:
        start = (options.interpreter, "-m", MODULE, "--model", base or source)
    given = [word for key, value in values.items() if value is not None for word in (f"--{key}", str(value))]
    given += [f"--{key}" for key, is_on in switches.items() if is_on]
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, options.gpus))} if options.gpus else {}
    environment |= {"VLLM_SERVER_DEV_MODE": "1"} if options.transfer else {}
    return ServerCommand(name, (*start, *given), environment)


def config_of(source: str) -> PretrainedConfig | None:
    """Return the language model's configuration of a local model; None: it has code of its own, or is not here."""
    if not Path(source).is_dir():
        return None
    try:
        return AutoConfig.from_pretrained(source).get_text_config()
    except (OSError, ValueError, ImportError, KeyError):
        return None


def _room_for(adapter: str) -> int:
    settings: dict[str, Any] = json.loads((Path(adapter) / "adapter_config.json").read_text(encoding="utf-8"))
    rank = max([int(settings["r"]), *map(int, (settings.get("rank_pattern") or {}).values())])
    room = next((known for known in ADAPTER_RANKS if known >= rank), None)
    if room is None:
        raise UsageError(f"{adapter}: an adapter of rank {rank}; vLLM serves ranks up to {ADAPTER_RANKS[-1]}")
    return room
