"""The command line of a vLLM server: what stands in it, and that a shell reads what was meant."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from posttrain.engines.served_names import fingerprint, served_names
from posttrain.engines.vllm.command import ServerOptions, server_command
from posttrain.errors import UsageError
from posttrain.models.lora import apply_adapter
from posttrain.models.sources import TINY
from posttrain.recipes.sections import AdapterSection
from posttrain.store.checkpoint_files import seal


def options_of(words):
    """``--flag value`` pairs of a command."""
    found = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = None if following.startswith("--") else following
    return found


@pytest.fixture
def folder(tiny_random, tmp_path):
    path = tmp_path / "some model's $HOME"
    tiny_random("qwen3", max_position_embeddings=96).save_pretrained(path)
    return path


def test_the_embedded_model():
    command = server_command("tiny", ServerOptions())
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


def test_every_option_is_said(folder):
    options = ServerOptions(
        host="0.0.0.0",
        port=8123,
        dtype="bfloat16",
        max_model_len=80,
        gpu_memory_utilization=0.5,
        gpus=(2, 3),
        transfer="nccl",
        is_empty=True,
        sleeps=True,
        enforce_eager=True,
        seed=7,
        interpreter="/opt/a b/bin/python",
        trust_remote_code=True,
        whole_prompts=True,
    )
    command = server_command(str(folder), options)
    assert command.words[:5] == (
        "/opt/a b/bin/python",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(folder),
    )
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
        "--load-format": "dummy",
        "--trust-remote-code": None,
        "--enforce-eager": None,
        "--enable-sleep-mode": None,
        "--no-enable-chunked-prefill": None,
    }
    assert command.environment == {"CUDA_VISIBLE_DEVICES": "2,3", "VLLM_SERVER_DEV_MODE": "1"}
    assert options_of(server_command(str(folder), ServerOptions()).words)["--max-model-len"] == "96"


@pytest.mark.parametrize("gpus", [(), (1,)])
def test_a_shell_reads_the_very_words(folder, gpus):
    command = server_command(str(folder), ServerOptions(gpus=gpus, interpreter="printf"))
    text = command.shell()
    assert text.count("\n") == sum(word.startswith("--") for word in command.words)
    words = shlex.split(text.replace("\\\n", ""))
    assert words == [f"CUDA_VISIBLE_DEVICES={gpu}" for gpu in gpus] + list(command.words)
    as_lines = text.replace("printf -m", "printf '%s\\n' -m", 1)
    read = subprocess.run(["sh", "-c", as_lines], capture_output=True, text=True, check=True).stdout.splitlines()
    assert read == list(command.words[1:])


def save_adapter(model, path, rank=5):
    wrapped = apply_adapter(model, AdapterSection(rank=rank, targets=["q_proj"]), 0)
    wrapped.save_pretrained(path)
    settings = json.loads((path / "adapter_config.json").read_text())
    return settings


@pytest.fixture
def adapter(tiny_random, folder, tmp_path):
    path = tmp_path / "runs" / "my run" / "checkpoints" / "step-000040"
    settings = save_adapter(tiny_random("qwen3"), path)
    (path / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": str(folder)}))
    return path


def test_an_adapter_is_served_on_its_base(adapter, folder):
    command = server_command(str(adapter), ServerOptions())
    assert command.words[2] == str(folder)
    found = options_of(command.words)
    assert re.fullmatch(r"my-run-step-000040-[0-9a-f]{8}", command.name)
    assert found["--served-model-name"] == f"{command.name}-base"
    assert found["--lora-modules"] == f"{command.name}={adapter}"
    assert found["--enable-lora"] is None
    assert found["--max-model-len"] == "96"


@pytest.mark.parametrize(("rank", "room"), [(2, "8"), (8, "8"), (512, "512")])
def test_room_is_made_for_the_rank(adapter, rank, room):
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"r": rank}))
    assert options_of(server_command(str(adapter), ServerOptions()).words)["--max-lora-rank"] == room


def test_adapters_that_vllm_cannot_serve(adapter, tiny_random, tmp_path):
    other = tmp_path / "other"
    settings = save_adapter(tiny_random("qwen3"), other)
    (other / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": str(adapter)}))
    with pytest.raises(UsageError, match=r"is an adapter on an adapter .*--engine native"):
        server_command(str(other), ServerOptions())
    settings = json.loads((adapter / "adapter_config.json").read_text())
    for change in ({"r": 513}, {"rank_pattern": {"q_proj": 600}}):
        (adapter / "adapter_config.json").write_text(json.dumps(settings | change))
        with pytest.raises(UsageError, match=r"an adapter of rank (513|600); vLLM serves ranks up to 512"):
            server_command(str(adapter), ServerOptions())


def test_a_hub_name_is_its_own_name():
    command = server_command("Qwen/Qwen3-0.6B", ServerOptions())
    assert command.name == "Qwen/Qwen3-0.6B"
    assert command.words[2] == "Qwen/Qwen3-0.6B"
    assert "--max-model-len" not in command.words


def test_what_does_not_exist_is_refused():
    with pytest.raises(UsageError, match="there is no folder"):
        server_command("./nowhere", ServerOptions())


def test_a_run_is_its_checkpoint(folder, tmp_path, monkeypatch):
    run = tmp_path / "runs" / "first"
    for step in (10, 20):
        shutil.copytree(folder, run / "checkpoints" / f"step-{step:06d}")
        seal(run / "checkpoints" / f"step-{step:06d}", step)
    (run / "recipe.yaml").write_text("{}")
    (run / "checkpoints" / "best").symlink_to("step-000010")
    name, place = served_names(str(run))
    assert name.startswith("first-step-000010-")
    assert place == str(run / "checkpoints" / "step-000010")
    monkeypatch.chdir(tmp_path)
    other = run / "checkpoints" / "step-000020"  # the server may be started anywhere
    assert server_command("runs/first/checkpoints/step-000020", ServerOptions()).words[2] == str(other)


def test_the_fingerprint_is_that_of_the_weights(folder, tmp_path):
    before = fingerprint(folder)
    copied = tmp_path / "copy"
    shutil.copytree(folder, copied)
    assert fingerprint(copied) == before
    (copied / "README.md").write_text("not a weight")
    assert fingerprint(copied) == before
    weights = load_file(copied / "model.safetensors")
    changed = weights | {name: tensor * 1.0001 for name, tensor in weights.items()}
    save_file(changed, copied / "model.safetensors")
    assert fingerprint(copied) != before


def test_length_counts_where_the_samples_do_not_tell(tmp_path):
    found = set()
    for size in (5000, 6000):
        (tmp_path / "model.safetensors").write_bytes(bytes(size))
        found.add(fingerprint(tmp_path))
    assert len(found) == 2


@pytest.mark.parametrize("size", [0, 5000, 3_000_000])
def test_files_of_any_size_have_a_fingerprint(tmp_path, size):
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(size))
    zeros = fingerprint(tmp_path)
    file.write_bytes(bytes(size) + b"\1")
    assert fingerprint(tmp_path) != zeros
    if size:
        for place in (0, size - 1):  # the first block and the last are read whole
            content = bytearray(size)
            content[place] = 1
            file.write_bytes(content)
            assert fingerprint(tmp_path) != zeros


def test_a_checkpoint_has_the_digests_of_its_manifest(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    read = fingerprint(tmp_path)

    def manifest(digest: str) -> None:
        files = {"model.safetensors": {"bytes": 100, "sha256": digest}}
        (tmp_path / "manifest.json").write_text(json.dumps({"format": 1, "step": 3, "files": files}))

    manifest("aa")
    first = fingerprint(tmp_path)
    manifest("bb")
    assert len({read, first, fingerprint(tmp_path)}) == 3
    for damaged in ("", "[]", '{"files": {"model.safetensors": 1}}'):
        Path(tmp_path / "manifest.json").write_text(damaged)
        assert fingerprint(tmp_path) == read
