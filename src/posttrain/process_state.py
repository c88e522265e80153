"""What a user's function leaves changed in this process: named, and put back where that can be done."""

from __future__ import annotations

import os
import stat
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from posttrain.errors import RewardFailure

try:
    import fcntl
except ImportError:  # no such descriptors there
    fcntl = None  # type: ignore[assignment]

_DESCRIPTORS = "/proc/self/fd"
_STREAMS = {"stdin": 0, "stdout": 1, "stderr": 2}
_STREAM_NAMES = {"stdin": "standard input", "stdout": "standard output", "stderr": "standard error"}
_theirs: set[tuple[int, int, int]] = set()  # files that were opened during such a call: they may close them


@contextmanager
def process_kept(where: str) -> Iterator[None]:
    """Put back what the body changes: directory, standard streams, and torch's gradients, types and threads.

    Each change is named in a warning, with ``where``. Random numbers are not put back: a reward may draw them, and
    training derives its own.

    Raises:
        RewardFailure: the body closed a file that was open for writing before it.
    """
    directory, files, streams = _directory(), _written_files(), _Streams()  # in this order: streams keeps copies
    settings = [(what, read(), write) for what, read, write in _settings()]
    try:
        yield
    finally:
        changed = streams.put_back()
        if directory is not None and _directory() != directory:
            os.chdir(directory)
            changed.append("the working directory")
        readers = {what: read for what, read, _ in _settings()}
        for what, value, write in settings:
            if readers[what]() != value:
                write(value)
                changed.append(what)
        if changed:
            warnings.warn(f"{where} changed {', '.join(changed)}; it was put back", stacklevel=3)
    after = _written_files()
    _theirs.update(key for key in after if key not in files)
    if closed := sorted(path for key, path in files.items() if key not in after and key not in _theirs):
        raise RewardFailure(
            f"{where} closed {', '.join(closed)}, which it had not opened; what is written there would be lost. "
            "A reward closes only its own files"
        )


def _directory() -> str | None:
    with suppress(OSError):
        return os.getcwd()
    return None


def _settings() -> list[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    """By name, how a setting of torch is read and set; none as long as torch is not there."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_num_threads"):
        return []
    return [
        ("whether gradients are computed", torch.is_grad_enabled, torch.set_grad_enabled),
        ("torch's default type", torch.get_default_dtype, torch.set_default_dtype),
        ("torch's number of threads", torch.get_num_threads, torch.set_num_threads),
        (
            "torch's deterministic algorithms",
            torch.are_deterministic_algorithms_enabled,
            torch.use_deterministic_algorithms,
        ),
    ]


class _Streams:
    """Standard input, output and error: the objects and the descriptors below them."""

    def __init__(self) -> None:
        self.objects = {name: getattr(sys, name) for name in _STREAMS}
        self.closed = {name: getattr(stream, "closed", True) for name, stream in self.objects.items()}
        self.identities = {number: _identity(number) for number in _STREAMS.values()}
        self.copies = {number: os.dup(number) for number, known in self.identities.items() if known is not None}

    def put_back(self) -> list[str]:
        """Open again what was closed or replaced; the names of these."""
        changed = []
        for name, number in _STREAMS.items():
            if number in self.copies:
                if moved := _identity(number) != self.identities[number]:
                    os.dup2(self.copies[number], number)
                os.close(self.copies[number])
            else:
                moved = False
            stream = self.objects[name]
            if getattr(stream, "closed", True) and not self.closed[name]:
                moved = True
                stream = open(number, "r" if number == 0 else "w", errors="replace", closefd=False)  # noqa: SIM115
                setattr(sys, f"__{name}__", stream)
            elif getattr(sys, name) is not stream:
                moved = True
            setattr(sys, name, stream)
            if moved:
                changed.append(_STREAM_NAMES[name])
        return changed


def _identity(number: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _written_files() -> dict[tuple[int, int, int], str]:
    """The regular files that are open for writing: (descriptor, device, inode) and path; empty where nothing tells."""
    paths: dict[tuple[int, int, int], str] = {}
    if fcntl is None or not os.path.isdir(_DESCRIPTORS):
        return paths
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError):  # such as the descriptor of this listing
            status = os.fstat(int(name))
            writable = fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
            if stat.S_ISREG(status.st_mode) and writable:
                paths[int(name), status.st_dev, status.st_ino] = os.readlink(f"{_DESCRIPTORS}/{name}")
    return paths
