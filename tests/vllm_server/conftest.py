"""Real vLLM servers, started by the very line that ``posttrain serve-command`` prints.

``POSTTRAIN_VLLM`` names the Python of an environment with vLLM (``make test-vllm`` sets it).
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from posttrain.cli import main
from posttrain.models.load import LoadedModel, load_model
from posttrain.recipes.sections import ModelSection
from serving import free_port

START_SECONDS = 300
# One GiB is room enough for the small models here; nothing is asked of a hub.
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class RealServer:
    """``name`` is that of the model there; ``loaded`` is the same model in this process."""

    url: str
    name: str
    checkpoint: str
    loaded: LoadedModel
    process: subprocess.Popen[bytes]


@contextmanager
def serve(checkpoint: str, loaded: LoadedModel, log: Path, *options: str) -> Iterator[RealServer]:
    """A server that ends with the context."""
    python = os.environ.get("POSTTRAIN_VLLM")
    if not python:
        pytest.skip("POSTTRAIN_VLLM names no Python with vLLM; run `make test-vllm`")
    port = free_port()
    printed, hints = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(hints):
        code = main(
            ["serve-command", checkpoint, "--module", str(Path(python).absolute()), "--port", str(port), *options]
        )
    assert code == 0
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["sh", "-c", f"exec {printed.getvalue()}"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT,
            cwd=log.parent,
            start_new_session=True,
        )
    try:
        wait_until_ready(f"http://127.0.0.1:{port}/health", process, log)
        print(f"\nthe server of {checkpoint} was ready after {time.monotonic() - started:.0f} s")
        name = hints.getvalue().split()[2].rstrip(";")
        yield RealServer(f"http://127.0.0.1:{port}", name, checkpoint, loaded, process)
    finally:
        stop(process)


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(2 * START_SECONDS):
        assert process.poll() is None, f"the server ended:\n{log.read_text(errors='replace')[-3000:]}"
        with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.5)
    raise AssertionError(f"no answer in {START_SECONDS} s:\n{log.read_text(errors='replace')[-3000:]}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and the workers that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # workers that outlived it


@pytest.fixture(scope="module")
def own_servers() -> Iterator[None]:
    """A run can start servers."""
    if not os.environ.get("POSTTRAIN_VLLM"):
        pytest.skip("POSTTRAIN_VLLM names no Python with vLLM; run `make test-vllm`")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """The embedded model, log-probabilities processed."""
    loaded = load_model(ModelSection(), seed=0)
    with serve("tiny", loaded, tmp_path_factory.mktemp("server") / "tiny.log") as server:
        yield server
