"""The native kernel's library: compiled once on a machine, kept in the user's cache, and the one that is in use.

What a run computes with is chosen at its start (``train/machine.py``), as the library of its matrix products is, and
for the same reason: other bits. So a library is named by its content. Another compiler, or another kind of CPU, makes
another one, and a run resumed there does not go on with it unasked.

The kernel is off unless a recipe asks for it (``rollout.engine.native_kernel``, ``train.native_kernel``). It was faster
wherever it was measured (``benchmarks/results``), but by itself it would let a recipe's numbers depend on whether a
compiler stands on the machine, and change those that were published.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import TypeGuard

import torch

from posttrain.store import posix
from posttrain.store.locks import Held, hold
from posttrain.store.reading import cache_folder

OFF = "off"
FOLDER = Path(__file__).parent
SOURCES = tuple(FOLDER / name for name in ("attention.cpp", "layers.cpp", "packed.cpp"))
# -fno-ident: the compiler's name in the library is no difference. A product may be fused with a sum.
FLAGS = (
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-ident", "-Wno-psabi"),
)
VECTORS = {
    "AVX2": ("-mavx2", "-mfma"),
    "AVX512": ("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
}
BUILD_SECONDS = 120.0

_in_use: str | None = None  # nothing was chosen yet


class Unavailable(Exception):
    """The kernel cannot be had here; the text says why."""


def usual_kernel() -> str:
    """The name of the kernel that this machine builds; ``off`` where it cannot be had."""
    return _find()[0]


def why_none() -> str:
    """Why this machine has no kernel; empty where it has one."""
    return _find()[2]


def has_kernel(name: object) -> TypeGuard[str]:
    """Whether this machine has the kernel of that name, ``off`` among them; a checkpoint's word is a stranger's."""
    return name == OFF or (isinstance(name, str) and name == usual_kernel())


def kernel() -> str | None:
    """The name of the kernel that this process uses; None where nothing was chosen yet."""
    return _in_use


def use_kernel(name: str) -> None:
    """Let engines of this process that are asked for a kernel take the one of this ``name``, which ``has_kernel``."""
    assert has_kernel(name), f"there is no native kernel {name} here"
    global _in_use
    _in_use = name


def is_kernel_used() -> bool:
    """Whether this process has a kernel for who is asked to use it; where none was chosen yet, it is the usual one."""
    if _in_use is None:
        use_kernel(usual_kernel())
    return _in_use != OFF


def library() -> ctypes.CDLL:
    """The library of the usual kernel, which must not be ``off``."""
    loaded = _find()[1]
    assert loaded is not None, why_none()
    return loaded


@cache
def _find() -> tuple[str, ctypes.CDLL | None, str]:
    """The kernel of this machine: its name, its library (built where it was not yet), or why there is none."""
    folder = cache_folder()
    try:
        if folder is None:
            raise Unavailable("there is no folder for the library: the user has no home, and XDG_CACHE_HOME is not set")
        command = [*_compiler(), *FLAGS, *VECTORS.get(torch.backends.cpu.get_cpu_capability(), ())]
        made_of = "\0".join([platform.machine(), *command]).encode()
        made_of += b"\0".join(path.read_bytes() for path in (*SOURCES, *sorted(FOLDER.glob("*.h"))))
        path = folder / "kernels" / f"kernel-{hashlib.sha256(made_of).hexdigest()[:16]}.so"
        if not path.exists():
            _build(command, path)
        if path.stat().st_uid != posix.user_id():
            raise Unavailable(f"{path} is another user's")
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16], ctypes.CDLL(str(path)), ""
    except (Unavailable, OSError, ValueError) as error:  # ValueError: a quote in CXX that does not end
        return OFF, None, str(error)


def _compiler() -> list[str]:
    """What compiles C++: the environment's CXX, else the first that is there.

    Raises:
        Unavailable: nothing is.
    """
    stated = shlex.split(os.environ.get("CXX", ""))
    for name in [stated[0]] if stated else ("c++", "g++", "clang++"):
        path = shutil.which(name)
        if path is not None:
            return [path, *stated[1:]]
    raise Unavailable(f"there is no compiler for C++ ({stated[0] if stated else 'c++, g++ or clang++'})")


def _build(command: list[str], path: Path) -> None:
    """Compile the library ``path``, by one process alone; it stands under its name only when it is whole.

    Raises:
        Unavailable: the compiler fails, or another process builds for too long.
        OSError: the library cannot be kept.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with hold(path.with_suffix(".lock"), patience_seconds=BUILD_SECONDS):
            if path.exists():
                return
            aside = path.with_suffix(f".{os.getpid()}")
            try:
                subprocess.run(
                    [*command, "-o", str(aside), *map(str, SOURCES)],
                    check=True,
                    capture_output=True,
                    timeout=BUILD_SECONDS,
                )
                ctypes.CDLL(str(aside))  # what cannot be loaded must not stay
                os.replace(aside, path)
            finally:
                aside.unlink(missing_ok=True)
    except Held as error:
        raise Unavailable(f"another process is building it: {error}") from error
    except subprocess.SubprocessError as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
        raise Unavailable(f"{command[0]} cannot compile it: {said[0] if said else error}") from error
