"""A machine for a bug report: versions, hardware, and settings that decide how a run computes."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

from posttrain import __version__
from posttrain.errors import hide_secrets
from posttrain.store import posix
from posttrain.store.environment import git_state
from posttrain.untrusted import harmless

# Optional packages, next to the ones that the core needs.
PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "peft", "accelerate", "numpy", "pydantic", "datasets",
    "huggingface_hub", "vllm", "bitsandbytes", "flash-attn", "ray", "gradio", "starlette", "tensorboard", "wandb",
    "trackio", "mlflow", "mlflow-skinny", "swanlab", "reasoning-gym", "gguf",
)  # fmt: skip
# Variables whose values decide; of every other one that matters only that it is set.
SHOWN = (
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "NCCL_DEBUG", "WANDB_MODE", "POSTTRAIN_OFFLINE", "LANG",
    "WORLD_SIZE", "COLUMNS", "NO_COLOR",
)  # fmt: skip
_PREFIXES = ("POSTTRAIN_", "HF_", "WANDB_", "CUDA_", "NCCL_", "TORCH_", "MLFLOW_", "SWANLAB_", "TRACKIO_", "VLLM_")
_PLAIN = 60  # characters of a value


def describe_machine(*, all_packages: bool = False) -> dict[str, dict[str, str]]:
    """Return plain texts by section: versions, packages, hardware, settings.

    No name of a user, host, folder, process or token is in it; of a variable that may hold one only "set" is said.
    """
    import torch

    commit = git_state(Path(__file__).parent)
    versions = {"posttrain": __version__, "python": platform.python_version(), "system": platform.platform()}
    if commit is not None:
        versions["commit"] = f"{commit['commit']}, {commit['changed_files']} files changed"
    return {
        "versions": versions,
        "packages": _packages(all_packages),
        "hardware": _hardware(torch),
        "settings": _settings(),
    }


def _packages(all_packages: bool) -> dict[str, str]:
    names = set(PACKAGES)
    if all_packages:
        names |= {str(one.metadata["Name"]) for one in metadata.distributions()}
    found = {}
    for name in sorted(names, key=str.lower):
        try:
            found[name] = harmless(metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    return found


def _hardware(torch: object) -> dict[str, str]:
    from torch import backends, cuda, get_num_threads, version

    found = {"machine": platform.machine(), "cpus": str(os.cpu_count()), "threads of torch": str(get_num_threads())}
    memory = posix.memory_bytes()
    if memory is not None:
        found["memory"] = f"{memory / 2**30:.1f} GiB"
    found["cuda of torch"] = str(version.cuda or "none")
    gpus = [f"{cuda.get_device_name(index)}" for index in range(cuda.device_count())]
    found["gpus"] = ", ".join(gpus) or "none"
    found["mps"] = str(backends.mps.is_available()).lower()
    return found


def _settings() -> dict[str, str]:
    found = {}
    for name in sorted(os.environ):
        if name in SHOWN:
            found[name] = harmless(hide_secrets(os.environ[name]))[:_PLAIN]
        elif name.startswith(_PREFIXES):
            found[name] = "set"
    return found
