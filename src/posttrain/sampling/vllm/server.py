"""The command line of a vLLM server, the name of a model there, and a server that a run starts and that ends with it.

The name has a fingerprint of the weights: a server with older weights of the same folder has another name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
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
# Below what systems give connections that go out (from 32768 or 49152 on), and Kubernetes its services (from 30000 on).
OWN_PORTS = range(20_000, 30_000)
TAIL_BYTES = 8192
TAIL_LINES = 12
# Set by a launcher for each of its processes; a server would take them for its own.
_LAUNCHER_PREFIXES = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_")
# Runs a command for as long as the other end of standard input is open, which the system closes even after kill -9;
# then the command has ten seconds to end, and the whole group of processes ends with it.
_WHILE_OPEN = 'exec 3<&0; "$@" 3<&- & { cat <&3; kill $!; sleep 10; kill -9 0; } & wait %1; kill -9 0'


@dataclass(frozen=True)
class ServerCommand:
    """``words`` start the server, with ``environment`` set; ``name`` is the model's name there."""

    name: str
    words: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    def shell(self) -> str:
        """Return the command for a shell, quoted, one option a line."""
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
    """Return the command for a server of ``model`` (``tiny``, a folder, a run or a hub name), an adapter on its base.

    ``--generation-config vllm`` keeps a model's own sampling defaults out; ``--logprobs-mode processed_logprobs`` gives
    log-probabilities at the sampling temperature. More than one of ``gpus``: tensor parallel. ``interpreter``: a Python
    that has vLLM, for builds without the command ``vllm``. ``transfer``: of the weights of a model in training.

    Raises:
        UsageError: no such model, or an adapter that vLLM cannot serve.
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
    """Return the options that name the model: an adapter has the name, and its base another."""
    if base is None:
        return {"served-model-name": name}
    return {
        "served-model-name": f"{name}-base",
        "max-lora-rank": _room_for(source),
        "lora-modules": f"{name}={source}",
    }


def _environment(gpus: tuple[int, ...], transfer: Transfer | None) -> dict[str, str]:
    """Return the environment variables of a server."""
    environment = {}
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    if transfer:
        environment["VLLM_SERVER_DEV_MODE"] = "1"
    return environment


def _options(values: Mapping[str, object]) -> list[str]:
    """Return the options that have a value, as words of a command."""
    words = []
    for name, value in values.items():
        if value is not None:
            words += [f"--{name}", str(value)]
    return words


def served_names(model: str) -> tuple[str, ...]:
    """Return the names under which a server may have ``model``, the one of ``posttrain serve-command`` first.

    ``tiny-grpo-step-000120-1f8a09c3``: run, checkpoint, fingerprint of the weights. A model that is only a hub name
    has that name. The second name is the folder itself, which vLLM takes when it is given no name.

    Raises:
        UsageError: no such folder or run.
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
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.") or "model"
    return f"{label}-{weights_fingerprint(folder)}", source


def absolute_source(model: str) -> str:
    """Return a folder as an absolute path, since a server may be started anywhere; or a hub name."""
    source = resolve_model_name(model)
    if Path(source).is_dir():
        return str(Path(source).resolve())
    return source


def weights_fingerprint(folder: Path) -> str:
    """Return eight hexadecimal digits of the weights in ``folder``.

    A run's checkpoint has the digest of every file in its manifest. Of another folder, whose files may be tens of
    gigabytes, size and 256 blocks of 4 KiB of each file are read: enough to tell two trainings apart.
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
    """Return the language model's configuration of a local model; None: it has code of its own, or is not here."""
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
    """Return the Python of the environment that has vLLM. A recipe cannot name it: it would be a program to run.

    Raises:
        UsageError: the environment variable is not set, or names none.
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
    return str(Path(path).absolute())  # not resolved: a virtual environment's python is a link out of it


def free_port() -> int:
    """Return a port of this machine at which nothing listens and that the system gives no connection by itself."""
    while True:
        port = secrets.choice(OWN_PORTS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class OwnServer:
    """A server process of this one. ``log`` gets its output. ``wait`` returns when it answers."""

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
        """Wait until the server answers.

        Raises:
            RunFailure: it ended, or took longer than ``START_SECONDS``; with the end of its log.
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
        """End the server and everything that it started."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        kill_group(self._process.pid)
        self._process.wait()

    def tail(self) -> str:
        """Return the log's last lines, for a message."""
        try:
            with self.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"Its log {self.log} cannot be read: {error.strerror}"
        text = "\n  ".join([f"Its log {self.log} ends:", *lines[-TAIL_LINES:]])
        return harmless(text)
