"""A sandbox that is a container, through docker's command line (podman's understands the same words)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from posttrain.errors import RunFailure
from posttrain.graders.sandbox.sandbox import (
    GRACE_SECONDS,
    MAX_FILE_BYTES,
    START_SECONDS,
    Bounds,
    Ended,
    Sandbox,
    path_inside,
)

BOX = "/box"
_NOBODY = "65534:65534"
_KILLED_BY_TIMEOUT = 137  # 128 + SIGKILL, by `timeout -s KILL`
_CPU_TIME = 128 + 24  # SIGXCPU


def docker_refuses() -> str:
    """Why there is no docker; empty where its command is there and its daemon answers."""
    program = shutil.which("docker")
    if program is None:
        return "there is no command docker"
    try:
        asked = subprocess.run(
            [program, "version", "--format", "{{.Server.Version}}"],
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"docker does not answer: {error}"
    return "" if asked.returncode == 0 else f"docker says: {asked.stderr.strip()[-200:]}"


class Container(Sandbox):
    """A container without network, capabilities and writable root, as user nobody, with a folder of limited size.

    It is removed when it is closed. The image needs ``sh``, ``cat``, ``head``, ``timeout`` and ``python3``; docker
    fetches one that is not there.

    Raises:
        RunFailure: docker is not there, or refuses the image.
    """

    level = "docker"
    layers: tuple[str, ...] = ()
    python: tuple[str, ...] = ("python3", "-s", "-S", "-B")

    def __init__(self, image: str, bounds: Bounds) -> None:
        self.bounds = bounds
        program = shutil.which("docker")
        if program is None:
            raise RunFailure("there is no command docker")
        self._docker = program
        self._running: subprocess.Popen[bytes] | None = None
        self._seconds = 0.0
        self.name = ""
        limits = [
            "--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
            "--user", _NOBODY, "--workdir", BOX, "--ipc", "none", "--init",
            "--tmpfs", f"{BOX}:rw,nosuid,nodev,mode=1777,size={bounds.disk_bytes}",
            "--memory", str(bounds.memory_bytes), "--memory-swap", str(bounds.memory_bytes),
            "--pids-limit", str(bounds.processes + 4),  # the container's own first process, sh and timeout
            "--ulimit", f"cpu={bounds.cpu_seconds}", "--ulimit", f"fsize={bounds.file_bytes}",
            "--ulimit", f"nofile={bounds.open_files}", "--ulimit", "core=0",
        ]  # fmt: skip
        self.name = self._call(["run", "--detach", "--rm", *limits, image, "sleep", "infinity"]).decode().strip()

    def start(
        self, argv: Sequence[str], descriptors: tuple[int, int, int], cwd: str, env: Mapping[str, str], seconds: float
    ) -> None:
        named = [part for key, value in env.items() for part in ("--env", f"{key}={value}")]
        place = os.path.normpath(os.path.join(BOX, cwd))
        command = ["exec", "--interactive", "--workdir", place, *named, self.name]
        stdin, stdout, stderr = descriptors
        self._seconds = seconds
        self._running = subprocess.Popen(
            [self._docker, *command, "timeout", "-s", "KILL", f"{seconds:.3f}", *argv],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )

    def wait(self) -> Ended:
        """One that outlives its seconds costs the container its life."""
        assert self._running is not None, "start comes first"
        try:
            code = self._running.wait(self._seconds + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._running.kill()
            self._running.wait()
            self.close()
            return Ended(-9, timed_out=True)
        return Ended(128 - code if code > 128 else code, timed_out=code in (124, _KILLED_BY_TIMEOUT, _CPU_TIME))

    def write_file(self, path: str, content: bytes) -> None:
        inside = f"{BOX}/{path_inside(path)}"
        script = 'mkdir -p "$(dirname "$1")" && cat > "$1"'
        self._call(["exec", "--interactive", self.name, "sh", "-c", script, "sh", inside], content)

    def read_file(self, path: str, limit: int = MAX_FILE_BYTES) -> bytes:
        inside = f"{BOX}/{path_inside(path)}"
        script = '[ -f "$1" ] && [ ! -L "$1" ] && head -c "$2" -- "$1"'
        content = self._call(["exec", self.name, "sh", "-c", script, "sh", inside, str(limit + 1)])
        if len(content) > limit:
            raise RunFailure(f"sandbox: {path} has more than {limit} bytes")
        return content

    def close(self) -> None:
        if self.name:
            name, self.name = self.name, ""
            subprocess.run(
                [self._docker, "rm", "--force", name], capture_output=True, timeout=START_SECONDS, check=False
            )

    def _call(self, arguments: Sequence[str], feed: bytes = b"") -> bytes:
        """One call of docker's command line; its standard output."""
        try:
            done = subprocess.run(
                [self._docker, *arguments], input=feed, capture_output=True, timeout=START_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RunFailure(f"docker does not answer: {error}") from None
        said = done.stderr[-500:].decode(errors="replace").strip()
        if done.returncode != 0:
            raise RunFailure(f"docker {arguments[0]}: {said or f'exit code {done.returncode}'}")
        return done.stdout
