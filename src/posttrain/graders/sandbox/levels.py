"""The ladder of sandboxes, from weak to strong walls, and which of them this machine has.

``process``: limits of the kernel, a group of processes that is killed, an empty folder, no environment. It stops what
hangs, and what eats memory; it hides nothing. ``namespaces``: another world (``supervisor.py``), of the same kernel.
``docker``: a container of an image that is named.
"""

from __future__ import annotations

import sys
import threading
import warnings
from typing import Literal

from posttrain.errors import RunFailure, UsageError
from posttrain.graders.sandbox.docker import Container, docker_refuses
from posttrain.graders.sandbox.sandbox import Bounds, Sandbox, Supervised

Level = Literal["process", "namespaces", "docker"]
_PROBE = Bounds(cpu_seconds=10)
_REASONS: dict[str, str] = {}
_LOCK = threading.Lock()
_WEAK = (
    "code runs at the level 'process', for this machine refuses namespaces ({reason}): it is stopped when it hangs or "
    "eats memory, but it can read the files of this user, use the network, and look for its tests. In a container, "
    "allow namespaces (for docker: --security-opt seccomp=unconfined --security-opt apparmor=unconfined), or name an "
    "image for the level 'docker'; 'level: process' says that this is meant"
)


def refusal(level: Level) -> str:
    """Why this machine has no sandbox of a level; empty where it has. Tried once."""
    with _LOCK:
        if level not in _REASONS:
            _REASONS[level] = docker_refuses() if level == "docker" else _try(level)
        return _REASONS[level]


def _try(level: str) -> str:
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    try:
        with Supervised(level, _PROBE) as sandbox:
            done = sandbox.exec([*sandbox.python, "-c", "print(6 * 7)"], seconds=120.0)
    except RunFailure as error:
        return str(error).removeprefix(f"no sandbox of the level {level}: ")
    return (
        "" if done.stdout == b"42\n" else f"Python does not start inside: {done.stderr.decode(errors='replace')[-200:]}"
    )


def choose_level(level: Level | None, image: str | None) -> Level:
    """The level that is asked for; else ``docker`` for an image, ``namespaces`` where the kernel allows it, ``process``
    otherwise, with a warning.

    Raises:
        UsageError: this machine has no such level, or an image goes with another level; the message names what works.
    """
    if level == "docker" and not image:
        raise UsageError("the level docker needs an image, such as image: python:3.11-slim")
    if image and level not in (None, "docker"):
        raise UsageError(f"an image is for the level docker, not {level}; leave one of both out")
    wanted: Level = level or ("docker" if image else "namespaces")
    reason = refusal(wanted)
    if not reason:
        return wanted
    if level is None and not image and not refusal("process"):
        warnings.warn(_WEAK.format(reason=reason), stacklevel=3)
        return "process"
    rungs: tuple[Level, ...] = ("namespaces", "process", "docker")
    others = [one for one in rungs if one != wanted and not refusal(one)]
    works = " or ".join(f"{one} (with an image)" if one == "docker" else one for one in others)
    raise UsageError(f"this machine has no sandbox of the level {wanted}: {reason}; what works here: {works or 'none'}")


def open_sandbox(level: Level, bounds: Bounds, image: str | None = None) -> Sandbox:
    """A new sandbox of a level that ``choose_level`` gave; the caller closes it.

    Raises:
        RunFailure: it cannot be set up.
    """
    if level == "docker":
        assert image is not None, "choose_level asked for it"
        return Container(image, bounds)
    return Supervised(level, bounds)
