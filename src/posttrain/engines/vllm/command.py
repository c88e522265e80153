"""The command line that starts a vLLM server as the engine needs it, and the name a model has there.

The name ends with a fingerprint of the weights, so a server that was started before a folder's
weights were written again does not pass for one that has them.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from posttrain.errors import UsageError
from posttrain.models.sources import TINY, adapter_base, resolve_model_name
from posttrain.store.checkpoint_files import stated_digests

# What a server needs to take weights over: a back end of its own, and the folder in which Python finds that.
TRANSFER = '{"backend": "posttrain"}'
PLUGIN = Path(__file__).parent / "plugin"
MODULE = "vllm.entrypoints.openai.api_server"
# The ranks that vLLM makes room for; a smaller adapter takes the next one.
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
WEIGHTS = ("model*.safetensors", "adapter_model.safetensors")
SERVED = "policy"  # what a server whose weights follow training calls its model
NUM_BLOCKS, BLOCK_BYTES = 256, 4096


@dataclass(frozen=True)
class ServerOptions:
    """How a server is started. ``None`` leaves it to vLLM, or to what the model's own files say.

    ``interpreter``: a Python that has vLLM; the server is started as a module of it instead of as
    ``vllm serve``, a command that CPU builds lack. ``gpus``: numbers of the GPUs that it may use.
    ``gpu_memory`` is the share (0 to 1) of their memory that it takes. ``eager``: nothing is compiled, which starts
    sooner and samples slower. ``follows``: its weights are replaced by those of a model in training; ``empty``: it
    starts with none that mean anything. ``name``: what the model is called there. ``whole_prompts``: none is read in
    parts, for which 0.32 turns the answer's seed back and ends where that cannot be done, on a CPU.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str = "float32"
    max_model_len: int | None = None
    gpu_memory: float | None = None
    gpus: tuple[int, ...] = ()
    logprobs_mode: str = "processed_logprobs"
    seed: int = 0
    interpreter: str | None = None
    trust_remote_code: bool = False
    eager: bool = False
    follows: bool = False
    empty: bool = False
    name: str | None = None
    whole_prompts: bool = False


@dataclass(frozen=True)
class ServerCommand:
    """``words`` start the server, with ``environment`` set; ``name`` is what to ask it for."""

    name: str
    words: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    def shell(self) -> str:
        """The command for a shell, quoted, one option a line."""
        lines = [" ".join(f"{key}={shlex.quote(value)}" for key, value in self.environment.items())]
        for word in self.words:
            if word.startswith("--"):
                lines.append(f"    {word}")
            else:
                lines[-1] = f"{lines[-1]} {shlex.quote(word)}".lstrip(" " if len(lines) == 1 else "")
        return " \\\n".join(lines)


def server_command(model: str, options: ServerOptions) -> ServerCommand:
    """What starts a server of ``model`` (``tiny``, a folder, a run or a hub name), an adapter on its base.

    ``--generation-config vllm`` keeps a model's own sampling defaults out; ``--logprobs-mode
    processed_logprobs`` gives log-probabilities at the sampling temperature (vLLM's default gives them at 1).

    Raises:
        UsageError: no such model, or an adapter that vLLM cannot serve.
    """
    source = _place_of(model)
    name = options.name or served_names(model)[0]
    base = adapter_base(source)
    if base is not None and options.follows:
        raise UsageError(f"{source} is an adapter; a server whose weights follow training has the whole model: {base}")
    if base is not None and adapter_base(base) is not None:
        raise UsageError(
            f"{source} is an adapter on an adapter ({base}), which vLLM cannot serve; evaluate it with --engine native"
        )
    flags: list[tuple[str, ...]] = []
    if base is None:
        flags.append(("--served-model-name", name))
    else:
        flags += [("--served-model-name", f"{name}-base"), ("--enable-lora",)]
        flags += [("--max-lora-rank", str(_room_for(source))), ("--lora-modules", f"{name}={source}")]
    length = options.max_model_len or _context_of(base or source)
    flags += [("--host", options.host), ("--port", str(options.port)), ("--dtype", options.dtype)]
    flags += [("--max-model-len", str(length))] if length else []
    flags += [
        ("--generation-config", "vllm"),
        ("--logprobs-mode", options.logprobs_mode),
        ("--seed", str(options.seed)),
    ]
    flags += [("--gpu-memory-utilization", f"{options.gpu_memory:g}")] if options.gpu_memory is not None else []
    flags += [("--tensor-parallel-size", str(len(options.gpus)))] if len(options.gpus) > 1 else []
    flags += [("--trust-remote-code",)] if options.trust_remote_code else []
    flags += [("--enforce-eager",)] if options.eager else []
    flags += [("--weight-transfer-config", TRANSFER)] if options.follows else []
    flags += [("--load-format", "dummy")] if options.empty else []
    flags += [("--no-enable-chunked-prefill",)] if options.whole_prompts else []
    start: Sequence[str] = ("vllm", "serve", base or source)
    if options.interpreter is not None:
        start = (options.interpreter, "-m", MODULE, "--model", base or source)
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, options.gpus))} if options.gpus else {}
    environment |= {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(PLUGIN)} if options.follows else {}
    return ServerCommand(name, (*start, *(word for flag in flags for word in flag)), environment)


def served_names(model: str) -> tuple[str, ...]:
    """Under which names a server may have ``model``, the one of ``server_command`` first.

    ``tiny-grpo-step-000120-1f8a09c3``: run, checkpoint, fingerprint of the weights. A model that is
    only a hub name goes by that. The second name is the folder itself, which is what vLLM takes
    when it is given no name.

    Raises:
        UsageError: no such folder or run.
    """
    source = _place_of(model)
    folder = Path(source)
    if not folder.is_dir():
        return (source,)
    label = "tiny" if folder == TINY.resolve() else folder.name
    if folder.parent.name == "checkpoints":
        label = f"{folder.parent.parent.name}-{label}"
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.") or "model"
    return f"{label}-{fingerprint(folder)}", source


def _place_of(model: str) -> str:
    """A folder from the root on, for the server may be started anywhere; or a hub name."""
    source = resolve_model_name(model)
    return str(Path(source).resolve()) if Path(source).is_dir() else source


def fingerprint(folder: Path) -> str:
    """Eight hexadecimal digits of the weights in ``folder``.

    A run's checkpoint has the digest of every file in its manifest. Of another folder, whose files
    may be tens of gigabytes, size and 256 blocks of 4 KiB of each file are read: enough to tell
    two trainings apart, not a proof of equality.
    """
    digest = hashlib.blake2b(digest_size=4)
    files = sorted({file for pattern in WEIGHTS for file in folder.glob(pattern)})
    known = stated_digests(folder)
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
        digest.update(known[file.name].encode() if file.name in known else _sampled(file))
    return digest.hexdigest()


def _sampled(file: Path) -> bytes:
    size = file.stat().st_size
    content = b""
    with file.open("rb") as opened:
        for i in range(NUM_BLOCKS):
            opened.seek(max(0, size - BLOCK_BYTES) * i // (NUM_BLOCKS - 1))
            content += opened.read(BLOCK_BYTES)
    return content


def _room_for(adapter: str) -> int:
    settings: dict[str, Any] = json.loads((Path(adapter) / "adapter_config.json").read_text(encoding="utf-8"))
    rank = max([int(settings["r"]), *map(int, (settings.get("rank_pattern") or {}).values())])
    room = next((known for known in ADAPTER_RANKS if known >= rank), None)
    if room is None:
        raise UsageError(f"{adapter}: an adapter of rank {rank}; vLLM serves ranks up to {ADAPTER_RANKS[-1]}")
    return room


def _context_of(source: str) -> int | None:
    """The positions that a local model's configuration names; None: vLLM finds out itself."""
    if not Path(source).is_dir():
        return None
    try:
        config = AutoConfig.from_pretrained(source).get_text_config()
    except (OSError, ValueError, ImportError, KeyError):
        return None  # an architecture with code of its own
    return getattr(config, "max_position_embeddings", None)
