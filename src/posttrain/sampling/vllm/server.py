"""vLLM server command lines, served model names, and servers tied to a run's lifetime.

Names include a weight fingerprint, so servers with older weights from the same folder are recognized.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from transformers import AutoConfig, PretrainedConfig

from posttrain.errors import RunFailure, UsageError
from posttrain.folders import folder_name
from posttrain.models.config import read_object
from posttrain.models.sources import ADAPTER_CONFIG, TINY, adapter_base, resolve_model_name
from posttrain.option_types import shorten
from posttrain.sampling.http import HttpServer, ServerError
from posttrain.store.checkpoint_files import manifest_digests
from posttrain.store.posix import kill_group
from posttrain.untrusted import harmless

Transfer = Literal["nccl", "files"]
WEIGHTS = ("model*.safetensors", "adapter_model.safetensors")
NUM_BLOCKS = 256
BLOCK_BYTES = 4096
MODULE = "vllm.entrypoints.openai.api_server"
# The ranks that vLLM makes room for; a smaller adapter takes the next one.
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}  # by vLLM's names
PYTHON_VARIABLE = "POSTTRAIN_VLLM"
START_SECONDS = 1200.0  # large weights, and compiled kernels the first time
LOOK_SECONDS = 0.2
END_SECONDS = 20.0
# Below the ports used for outgoing connections (from 32768 or 49152) and for Kubernetes services (from 30000).
OWN_PORTS = range(20_000, 30_000)
TAIL_BYTES = 8192
TAIL_LINES = 12
# Set by launchers per process, and must not be inherited by a server.
_LAUNCHER_PREFIXES = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_")
# Runs a command until standard input closes, which happens even after kill -9. The command then has ten seconds to exit
# before its process group is killed.
_WHILE_OPEN = 'exec 3<&0; "$@" 3<&- & { cat <&3; kill $!; sleep 10; kill -9 0; } & wait %1; kill -9 0'


@dataclass(frozen=True)
class ServerCommand:
    """Server command ``words`` and ``environment``; ``name`` is the served model name."""

    name: str
    words: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    def shell(self) -> str:
        """Format as a quoted shell command with one option per line."""
        words = [f"{key}={shlex.quote(value)}" for key, value in self.environment.items()]
        for word in map(shlex.quote, self.words):
            if word.startswith("--"):
                words.append(f"\\\n    {word}")
            else:
                words.append(word)
        return " ".join(words)


def server_command(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    dtype: str = "fp32",
    max_model_len: int | None = None,
    gpu_memory_utilization: float | None = None,
    gpus: tuple[int, ...] = (),
    seed: int = 0,
    interpreter: str | None = None,
    trust_remote_code: bool = False,
    enforce_eager: bool = False,
    transfer: Transfer | None = None,
    name: str | None = None,
    switches: tuple[str, ...] = (),
) -> ServerCommand:
    """Build a server command for ``model`` (``tiny``, folder, run or hub name), serving adapters on their base model.

    ``--generation-config vllm`` disables a model's sampling defaults, and ``--logprobs-mode processed_logprobs``
    returns log-probabilities at the sampling temperature. Several ``gpus`` enable tensor parallelism.
    ``interpreter``: Python with vLLM, for builds without a ``vllm`` command. ``transfer``: weight transfer in
    training.

    Raises:
        UsageError: unknown model, or an adapter unsupported by vLLM.
    """
    source = absolute_source(model)
    name = name or served_names(model)[0]
    base = adapter_base(source)
    if base is not None and transfer:
        raise UsageError(f"{source} is an adapter; a server whose weights follow training has the whole model: {base}")
    if base is not None and adapter_base(base) is not None:
        raise UsageError(
            f"{source} is an adapter on an adapter ({base}), which vLLM cannot serve; evaluate it with --engine native"
        )
    values = _served_model(name, source, base)
    values["host"] = host
    values["port"] = port
    values["dtype"] = DTYPES.get(dtype, dtype)
    values["max-model-len"] = max_model_len or getattr(config_of(base or source), "max_position_embeddings", None)
    values["generation-config"] = "vllm"
    values["logprobs-mode"] = "processed_logprobs"
    values["seed"] = seed
    values["gpu-memory-utilization"] = gpu_memory_utilization
    if len(gpus) > 1:
        values["tensor-parallel-size"] = len(gpus)
    if transfer == "nccl":
        values["weight-transfer-config"] = '{"backend": "nccl"}'
    flags = {"enable-lora": base is not None, "trust-remote-code": trust_remote_code, "enforce-eager": enforce_eager}
    words = ["vllm", "serve", base or source]
    if interpreter is not None:
        words = [interpreter, "-m", MODULE, "--model", base or source]
    words += _options(values)
    words += [f"--{flag}" for flag, is_on in flags.items() if is_on]
    words += [f"--{switch}" for switch in switches]
    return ServerCommand(name, tuple(words), _environment(gpus, transfer))


def _served_model(name: str, source: str, base: str | None) -> dict[str, object]:
    """Build model options; for adapters, the base model gets a different name."""
    if base is None:
        return {"served-model-name": name}
    return {
        "served-model-name": f"{name}-base",
        "max-lora-rank": _room_for(source),
        "lora-modules": f"{name}={source}",
    }


def _environment(gpus: tuple[int, ...], transfer: Transfer | None) -> dict[str, str]:
    """Build environment variables for a server."""
    environment = {}
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    if transfer:
        environment["VLLM_SERVER_DEV_MODE"] = "1"
    return environment


def _options(values: Mapping[str, object]) -> list[str]:
    """Format options with values as command words."""
    words = []
    for name, value in values.items():
        if value is not None:
            words += [f"--{name}", str(value)]
    return words


def served_names(model: str) -> tuple[str, ...]:
    """List possible served names for ``model``, starting with the one used by ``posttrain serve-command``.

    ``tiny-grpo-step-000120-1f8a09c3``: run, checkpoint and weight fingerprint. Hub models keep their hub name. The
    second name is the folder, which vLLM uses by default.

    Raises:
        UsageError: unknown folder or run.
    """
    source = absolute_source(model)
    folder = Path(source)
    if not folder.is_dir():
        return (source,)
    label = folder.name
    if folder == TINY.resolve():
        label = "tiny"
    if folder.parent.name == "checkpoints":
        label = f"{folder.parent.parent.name}-{label}"
    return f"{folder_name(label) or 'model'}-{weights_fingerprint(folder)}", source


def absolute_source(model: str) -> str:
    """Return a folder as an absolute path, since a server may be started anywhere; or a hub name."""
    source = resolve_model_name(model)
    if Path(source).is_dir():
        return str(Path(source).resolve())
    return source


def weights_fingerprint(folder: Path) -> str:
    """Compute an eight-digit hexadecimal fingerprint of weights in ``folder``.

    Run checkpoints use digests from their manifest. For other folders, which may hold tens of gigabytes, file sizes
    and 256 blocks of 4 KiB per file are hashed: enough to distinguish two trainings.
    """
    digest = hashlib.blake2b(digest_size=4)
    known = manifest_digests(folder)
    files = {file for pattern in WEIGHTS for file in folder.glob(pattern)}
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        if file.name in known:
            digest.update(known[file.name].encode())
            continue
        with file.open("rb") as opened:
            for i in range(NUM_BLOCKS):
                opened.seek(max(0, size - BLOCK_BYTES) * i // (NUM_BLOCKS - 1))
                digest.update(opened.read(BLOCK_BYTES))
    return digest.hexdigest()


def config_of(source: str) -> PretrainedConfig | None:
    """Load a local model's text configuration; None for remote models and custom code."""
    if not Path(source).is_dir():
        return None
    try:
        return AutoConfig.from_pretrained(source).get_text_config()
    except (OSError, ValueError, ImportError, KeyError):
        return None


# Settings of peft that vLLM refuses, or whose tensors it leaves out.
_NOT_SERVED = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
)


def _room_for(adapter: str) -> int:
    settings = read_object(Path(adapter) / ADAPTER_CONFIG)
    unserved = next((key for key in _NOT_SERVED if settings.get(key)), None)
    if unserved is not None:
        raise UsageError(
            f"{adapter}: vLLM serves no adapter with {unserved} ({shorten(settings[unserved])}). Merge it "
            "(posttrain runs export RUN TO --merge), or evaluate it with --engine native"
        )
    ranks = [int(settings["r"])]
    pattern = settings.get("rank_pattern")
    if pattern:
        ranks += map(int, pattern.values())
    rank = max(ranks)
    room = next((known for known in ADAPTER_RANKS if known >= rank), None)
    if room is None:
        raise UsageError(f"{adapter}: an adapter of rank {rank}; vLLM serves ranks up to {ADAPTER_RANKS[-1]}")
    return room


def find_interpreter() -> str:
    """Find the Python with vLLM. Recipes cannot set it, since it is a program to run.

    Raises:
        UsageError: environment variable unset or invalid.
    """
    named = os.environ.get(PYTHON_VARIABLE, "")
    path = None
    state = "is not set"
    if named:
        path = shutil.which(named)
        state = f"is {named!r}, which is no program"
    if path is None:
        raise UsageError(
            f"a run that starts a vLLM server needs the Python that has vLLM, and {PYTHON_VARIABLE} "
            f"{state}. Install it into an environment of its own and set {PYTHON_VARIABLE}=/that/bin/python, or give "
            "the url of a server that runs (docs/how-to/sample-with-vllm.md)"
        )
    return str(Path(path).absolute())  # not resolved: a virtual environment's python is a symbolic link


def free_port() -> int:
    """Find a free local port outside the range assigned automatically."""
    while True:
        port = secrets.choice(OWN_PORTS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class OwnServer:
    """Server process owned by this process. Output goes to ``log``; ``wait`` returns once it responds."""

    def __init__(self, command: ServerCommand, url: str, log: Path) -> None:
        self.url = url
        self.log = log
        environment = {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCHER_PREFIXES)}
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _WHILE_OPEN, "sh", *command.words],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment | {"VLLM_NO_USAGE_STATS": "1"} | command.environment,
                cwd=log.parent,
                start_new_session=True,  # Ctrl-C in the terminal is not sent to it
            )

    def wait(self) -> None:
        """Wait until the server responds.

        Raises:
            RunFailure: it exited, or took longer than ``START_SECONDS``; includes its last log lines.
        """
        deadline = time.monotonic() + START_SECONDS
        server = HttpServer(self.url, timeout_seconds=5.0, retries=0)
        while self._process.poll() is None:
            with contextlib.suppress(ServerError):
                return server.call("GET", "/v1/models", read=lambda answer: None)
            if time.monotonic() > deadline:
                self.stop()
                raise RunFailure(f"the vLLM server was not ready after {START_SECONDS:g} seconds. {self.tail()}")
            time.sleep(LOOK_SECONDS)
        raise RunFailure(f"the vLLM server ended before it was ready. {self.tail()}")

    def stop(self) -> None:
        """Stop the server and all its subprocesses."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        kill_group(self._process.pid)
        self._process.wait()

    def tail(self) -> str:
        """Read the last log lines for a message."""
        try:
            with self.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"Its log {self.log} cannot be read: {error.strerror}"
        text = "\n  ".join([f"Its log {self.log} ends:", *lines[-TAIL_LINES:]])
        return harmless(text)
