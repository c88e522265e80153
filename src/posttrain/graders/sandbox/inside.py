"""Entry point inside a sandbox: sets limits, then becomes the program.

Sent as text to a bare Python, hence imports only its standard library. The single argument is JSON: ``argv``;
``limits`` (name, soft, hard); ``user`` to switch to if running as root (0: keep); ``watch``, a time limit in seconds
(0: none), and ``overdue``, the exit code to report once it expires.
"""

from __future__ import annotations

import json
import os
import signal
import sys

_PDEATHSIG, _DUMPABLE, _DROP, _SECUREBITS, _SUBREAPER = 1, 4, 24, 28, 36  # prctl(2)
_NO_ROOT_LOCKED = 0b11  # user 0 gets no capabilities by starting a program
_LAST_CAPABILITY = 63
MAX_KILL_ROUNDS = 500


def main() -> None:
    """Become the program, or watch it until it ends. Never returns."""
    import resource  # missing on Windows, where this file is parsed but never run

    spec = json.loads(sys.argv[1])
    if spec["watch"]:
        _fork_watched(spec["watch"], spec["overdue"])
    if spec["user"]:
        os.setgroups([])
        os.setresgid(spec["user"], spec["user"], spec["user"])
        os.setresuid(spec["user"], spec["user"], spec["user"])  # no capability survives this
    for name, soft, hard in spec["limits"]:
        number = getattr(resource, name)
        present = resource.getrlimit(number)[1]
        if present != resource.RLIM_INFINITY:
            soft = min(soft, present)
            hard = min(hard, present)
        resource.setrlimit(number, (soft, hard))
    os.execv(spec["argv"][0], spec["argv"])


def _fork_watched(seconds: float, overdue_code: int) -> None:
    """Fork: returns in the child. The parent waits for all descendants, then exits with the child's code.

    The program has no capabilities and cannot read the parent's memory. Both die with the process that started them.
    """
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    prctl(_PDEATHSIG, signal.SIGKILL)
    prctl(_SUBREAPER, 1)
    prctl(_DUMPABLE, 0)
    with open("/proc/self/status", encoding="ascii") as file:
        if "TracerPid:\t0\n" not in file.read():  # another process attached before
            os._exit(1)
    child = os.fork()
    if child == 0:
        prctl(_PDEATHSIG, signal.SIGKILL)
        prctl(_SECUREBITS, _NO_ROOT_LOCKED)
        for number in range(_LAST_CAPABILITY + 1):
            prctl(_DROP, number)
        return
    overdue = []

    def end(number: int, frame: object) -> None:
        overdue.append(number)
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.setitimer(signal.ITIMER_REAL, 0)
    me = os.getpid()
    for _ in range(MAX_KILL_ROUNDS):  # left-over subprocesses: orphans are reparented to this process
        with open(f"/proc/{me}/task/{me}/children", encoding="ascii") as file:
            children = [int(pid) for pid in file.read().split()]
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)
        if not children:
            break
    if overdue:
        os._exit(overdue_code)
    if code < 0:  # killed by this signal
        os._exit(128 - code)
    os._exit(code)


if __name__ == "__main__":
    main()
