"""The command line of a vLLM server, and a server process that a run starts and that ends with it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from other_processes import is_alive, wait_until
from posttrain.errors import RunFailure, UsageError
from posttrain.models.lora import apply_adapter
from posttrain.models.sources import TINY
from posttrain.recipes.sections import AdapterSection
from posttrain.sampling.vllm.server import OwnServer, ServerCommand, served_names, server_command, weights_fingerprint
from posttrain.store.checkpoint_files import seal
from refusing import refuses


def options_of(words: Any) -> dict[str, str | None]:
    """``--flag value`` pairs of a command."""
    pairs = zip(words, [*words[1:], "--"], strict=True)
    return {word: None if next_.startswith("--") else next_ for word, next_ in pairs if word.startswith("--")}


@pytest.fixture
def folder(tiny_random: Any, tmp_path: Path) -> Path:
    path = tmp_path / "some model's $HOME"
    tiny_random("qwen3", max_position_embeddings=96).save_pretrained(path)
    return path


def test_server_command_of_the_embedded_model() -> None:
    command = server_command("tiny")
    assert command.words[:3] == ("vllm", "serve", str(TINY.resolve()))
    assert options_of(command.words) == {
        "--served-model-name": command.name,
        "--host": "127.0.0.1",
        "--port": "8000",
        "--dtype": "float32",
        "--max-model-len": "1024",
        "--generation-config": "vllm",
        "--logprobs-mode": "processed_logprobs",
        "--seed": "0",
    }
    assert command.environment == {}
    assert re.fullmatch(r"tiny-[0-9a-f]{8}", command.name)


def test_server_command_with_every_option(folder: Path) -> None:
    command = server_command(
        str(folder),
        host="0.0.0.0",
        port=8123,
        dtype="bfloat16",
        max_model_len=80,
        gpu_memory_utilization=0.5,
        gpus=(2, 3),
        transfer="nccl",
        enforce_eager=True,
        seed=7,
        interpreter="/opt/a b/bin/python",
        trust_remote_code=True,
        switches=("load-format=dummy", "enable-sleep-mode"),
    )
    start = ("/opt/a b/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder))
    assert command.words[:5] == start
    assert options_of(command.words[5:]) == {
        "--served-model-name": command.name,
        "--host": "0.0.0.0",
        "--port": "8123",
        "--dtype": "bfloat16",
        "--max-model-len": "80",
        "--generation-config": "vllm",
        "--logprobs-mode": "processed_logprobs",
        "--seed": "7",
        "--gpu-memory-utilization": "0.5",
        "--tensor-parallel-size": "2",
        "--weight-transfer-config": '{"backend": "nccl"}',
        "--trust-remote-code": None,
        "--enforce-eager": None,
        "--load-format=dummy": None,
        "--enable-sleep-mode": None,
    }
    assert command.environment == {"CUDA_VISIBLE_DEVICES": "2,3", "VLLM_SERVER_DEV_MODE": "1"}
    assert options_of(server_command(str(folder)).words)["--max-model-len"] == "96"


def test_server_command_is_read_by_a_shell_as_the_very_words(folder: Path) -> None:
    command = server_command(str(folder), gpus=(1,), interpreter="printf")
    text = command.shell()
    assert text.count("\n") == sum(word.startswith("--") for word in command.words)
    words = shlex.split(text.replace("\\\n", ""))
    assert words == ["CUDA_VISIBLE_DEVICES=1", *command.words]
    as_lines = text.replace("printf -m", "printf '%s\\n' -m", 1)
    read = subprocess.run(["sh", "-c", as_lines], capture_output=True, text=True, check=True).stdout.splitlines()
    assert read == list(command.words[1:])


def save_adapter(model: Any, path: Path, base: Path) -> dict[str, Any]:
    apply_adapter(model, AdapterSection(rank=5, targets=["q_proj"]), 0).save_pretrained(path)
    settings = json.loads((path / "adapter_config.json").read_text()) | {"base_model_name_or_path": str(base)}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return settings


def test_server_command_of_an_adapter_serves_it_on_its_base(folder: Path, tiny_random: Any, tmp_path: Path) -> None:
    adapter = tmp_path / "runs" / "my run" / "checkpoints" / "step-000040"
    settings = save_adapter(tiny_random("qwen3"), adapter, folder)
    command = server_command(str(adapter))
    found = options_of(command.words)
    assert command.words[2] == str(folder)
    assert re.fullmatch(r"my-run-step-000040-[0-9a-f]{8}", command.name)
    assert found["--served-model-name"] == f"{command.name}-base"
    assert found["--lora-modules"] == f"{command.name}={adapter}"
    assert (found["--enable-lora"], found["--max-model-len"], found["--max-lora-rank"]) == (None, "96", "8")
    for change in ({"r": 513}, {"rank_pattern": {"q_proj": 600}}):
        (adapter / "adapter_config.json").write_text(json.dumps(settings | change))
        with pytest.raises(UsageError, match=r"an adapter of rank (513|600); vLLM serves ranks up to 512"):
            server_command(str(adapter))
    for change in ({"use_dora": True}, {"lora_bias": True}, {"modules_to_save": ["lm_head"]}):
        (adapter / "adapter_config.json").write_text(json.dumps(settings | change))
        with pytest.raises(UsageError, match=rf"with {next(iter(change))} .*--engine native"):
            server_command(str(adapter))
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"use_rslora": True}))
    assert "--enable-lora" in server_command(str(adapter)).words
    save_adapter(tiny_random("qwen3"), tmp_path / "other", adapter)
    with refuses(UsageError, "--engine native"):
        server_command(str(tmp_path / "other"))
    with refuses(UsageError, "weights follow training"):
        server_command(str(adapter), transfer="files")


def test_server_command_of_a_hub_name_keeps_it_and_a_missing_folder_is_refused() -> None:
    command = server_command("Qwen/Qwen3-0.6B")
    assert (command.name, command.words[2]) == ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")
    assert "--max-model-len" not in command.words
    with refuses(UsageError, "is no folder"):
        server_command("./nowhere")


# The name has a fingerprint of the weights.


def test_a_run_is_its_checkpoint(tiny_random, tmp_path):
    run = tmp_path / "runs" / "first"
    for step in (10, 20):
        tiny_random("qwen3").save_pretrained(run / "checkpoints" / f"step-{step:06d}")
        seal(run / "checkpoints" / f"step-{step:06d}", step)
    (run / "recipe.yaml").write_text("{}")
    (run / "checkpoints" / "best").symlink_to("step-000010")
    name, place = served_names(str(run))
    assert name.startswith("first-step-000010-")
    assert place == str(run / "checkpoints" / "step-000010")


def test_the_fingerprint_is_that_of_the_weights(tiny_random, tmp_path):
    folder, copied = tmp_path / "model", tmp_path / "copy"
    tiny_random("qwen3").save_pretrained(folder)
    before = weights_fingerprint(folder)
    shutil.copytree(folder, copied)
    (copied / "README.md").write_text("not a weight")
    assert weights_fingerprint(copied) == before
    weights = load_file(copied / "model.safetensors")
    save_file({name: tensor * 1.0001 for name, tensor in weights.items()}, copied / "model.safetensors")
    assert weights_fingerprint(copied) != before


@pytest.mark.parametrize("size", [0, 3_000_000])
def test_files_of_any_size_have_a_fingerprint(tmp_path, size):
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(size))
    zeros = weights_fingerprint(tmp_path)
    file.write_bytes(bytes(size) + b"\1")
    assert weights_fingerprint(tmp_path) != zeros
    if size:
        for place in (0, size - 1):  # the first block and the last are read whole
            content = bytearray(size)
            content[place] = 1
            file.write_bytes(content)
            assert weights_fingerprint(tmp_path) != zeros


def test_a_checkpoint_has_the_digests_of_its_manifest(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    read = weights_fingerprint(tmp_path)

    def manifest(digest: str) -> None:
        files = {"model.safetensors": {"bytes": 100, "sha256": digest}}
        (tmp_path / "manifest.json").write_text(json.dumps({"format": 1, "step": 3, "files": files}))

    manifest("aa")
    first = weights_fingerprint(tmp_path)
    manifest("bb")
    assert len({read, first, weights_fingerprint(tmp_path)}) == 3
    for damaged in ("", "[]", '{"files": {"model.safetensors": 1}}'):
        Path(tmp_path / "manifest.json").write_text(damaged)
        assert weights_fingerprint(tmp_path) == read


# The process.


def shell(text: str, tmp_path: Path) -> OwnServer:
    return OwnServer(ServerCommand("policy", ("sh", "-c", text)), "http://127.0.0.1:9", tmp_path / "vllm.log")


def test_own_server_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    server = shell("echo no such model; printf '\\033[31mred\\n'; exit 3", tmp_path)
    with refuses(RunFailure, "vllm.log") as output:
        server.wait()
    assert "\\x1b[31mred" in str(output.value), "what a log holds reaches no terminal raw"
    server.stop()


def test_own_server_when_stopped_ends_with_what_it_started(tmp_path: Path) -> None:
    server = shell("sleep 600 & echo $! $$; wait", tmp_path)
    wait_until(lambda: len((tmp_path / "vllm.log").read_text().split()) == 2)
    pids = list(map(int, (tmp_path / "vllm.log").read_text().split()))
    assert all(map(is_alive, pids))
    server.stop()
    wait_until(lambda: not any(map(is_alive, pids)))


def test_own_server_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    """SIGKILL, which nobody can answer."""
    program = (
        "import time; from pathlib import Path; from posttrain.sampling.vllm.server import OwnServer, ServerCommand; "
        f"OwnServer(ServerCommand('p', ('sh', '-c', 'echo $$; exec sleep 600')), '', Path({str(tmp_path / 'log')!r})); "
        "time.sleep(600)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment)
    wait_until(lambda: (tmp_path / "log").is_file() and (tmp_path / "log").read_text().split())
    server = int((tmp_path / "log").read_text())
    assert is_alive(server)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not is_alive(server))
