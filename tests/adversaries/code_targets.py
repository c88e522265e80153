"""What attacking programs aim at, and how many of them reach it: listeners, a file, and the runs of all attacks."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import code_attacks
from code_attacks import Attack

from posttrain.graders.code.judging import Checks, Walls, judge_all
from posttrain.graders.grading import Outcome
from posttrain.graders.sandbox.sandbox import Bounds, SandboxKind, run

# Far below what the attacks on resources ask for, and enough for an honest program.
BOUNDS = Bounds(cpu_seconds=2, memory_bytes=256 << 20, processes=6, file_bytes=4 << 20, disk_bytes=8 << 20)
NUM_AT_A_TIME = 4


@dataclass(frozen=True)
class Targets:
    """What is to be had outside of the sandbox."""

    token: str
    folder: Path
    port: int
    abstract: str

    def fill(self, text: str) -> str:
        """The text of an attack with its words in capitals filled in."""
        words = {
            "TOKEN": self.token,
            "CANARY": str(self.folder / "canary"),
            "OUTSIDE": str(self.folder),
            "PORT": str(self.port),
            "ABSTRACT": self.abstract,
            "OWNER": str(os.getpid()),
            "HOST": socket.gethostname(),
        }
        for word, value in words.items():
            text = text.replace(word, value)
        return text

    @property
    def was_written(self) -> bool:
        return (self.folder / "written").exists()

    def survivors(self) -> list[int]:
        """Processes whose command line holds the token."""
        pids = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    if self.token.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                        pids.append(int(name))
        return pids


@contextlib.contextmanager
def targets(folder: Path) -> Iterator[Targets]:
    """Listeners that say the token, on TCP, an abstract and a named socket; a file and a variable that hold it."""
    token = secrets.token_hex(16)
    (folder / "canary").write_text(token)
    abstract = f"posttrain-{token[:8]}"
    listeners = [socket.create_server(("127.0.0.1", 0))]
    for address in ("\0" + abstract, str(folder / "socket")):
        listeners.append(socket.socket(socket.AF_UNIX))
        listeners[-1].bind(address)
        listeners[-1].listen()
    os.environ["POSTTRAIN_SECRET"] = token
    # What /proc shows of an environment is what a process was started with.
    holder = subprocess.Popen(["sleep", "3600"], env={"POSTTRAIN_SECRET": token})
    for listener in listeners:
        threading.Thread(target=_say, args=(listener, token), daemon=True).start()
    try:
        yield Targets(token, folder, listeners[0].getsockname()[1], abstract)
    finally:
        del os.environ["POSTTRAIN_SECRET"]
        holder.kill()
        holder.wait()
        for listener in listeners:
            listener.close()


def _say(listener: socket.socket, token: str) -> None:
    with contextlib.suppress(OSError):
        while True:
            caller, _ = listener.accept()
            with caller:
                caller.sendall(token.encode())


def outcomes(kind: SandboxKind, aims: Targets, attacks: list[Attack]) -> dict[str, Outcome]:
    """The verdict on each attack in a sandbox."""
    verdicts: dict[str, Outcome] = {}
    for seconds in sorted({one.seconds for one in attacks}):
        some = [one for one in attacks if one.seconds == seconds]
        request = [(aims.fill(one.program), Checks(("solve",), aims.fill(one.tests))) for one in some]
        judged = judge_all(request, Walls(kind, BOUNDS, seconds), NUM_AT_A_TIME)
        verdicts.update((one.name, outcome) for one, outcome in zip(some, judged, strict=True))
    return verdicts


def succeeds_in_one_process(aims: Targets, attack: Attack) -> bool:
    """Whether the program passes where it and its tests are one text and the exit code 0 is the verdict."""
    text = f"{aims.fill(attack.program)}\n{aims.fill(attack.tests)}".encode()
    bounds = replace(BOUNDS, processes=1000, memory_bytes=1000 * (256 << 20))
    done = run(["all.py"], {"all.py": text}, kind="process", bounds=bounds, seconds=attack.seconds)
    return done.code == 0 and not done.timed_out


def honest(kind: SandboxKind) -> Outcome:
    """The verdict on a program that solves the problem which the attacks do not."""
    request = [(code_attacks.HONEST, Checks(("solve",), code_attacks.SOLVE))]
    return judge_all(request, Walls(kind, replace(BOUNDS, cpu_seconds=20), 120.0), 1)[0]
