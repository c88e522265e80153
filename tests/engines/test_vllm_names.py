"""What the engine says of its options, it says by the key under which they stand in the recipe."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

import posttrain.engines.vllm.engine as package
from fake_follower import FakeFollower
from posttrain import registry
from posttrain.cli import main
from posttrain.engines.base import Sampling
from posttrain.errors import EngineMismatch, UsageError
from posttrain.models.load import LoadedModel
from posttrain.world import ONE
from serving import free_port

pytestmark = pytest.mark.usefixtures("no_waiting")
KEYS = ("rollout.engine", "eval.engine")


def built(tiny: LoadedModel | None, where: str, **options: Any) -> Any:
    loaded = (None, None) if tiny is None else (tiny.model, tiny.tokenizer)
    return registry.find("engine", "vllm").bind(options, where)(*loaded)


@pytest.mark.parametrize("where", KEYS)
def test_a_port_that_is_taken(where: str, tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_VLLM", sys.executable)
    monkeypatch.setattr("posttrain.engines.vllm.server.PORT_SECONDS", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for options in ({}, {"servers": 2}):
            if port > 65000 and options:
                continue
            with pytest.raises(UsageError, match=rf"^{re.escape(where)}\.port: {port} cannot be had"):
                built(tiny, where, port=port, **options).settle(tmp_path, ONE)


@pytest.mark.parametrize("where", KEYS)
def test_vllm_in_the_trainers_process(where: str, tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UsageError, match=rf"^{re.escape(where)}\.colocate: vLLM cannot be imported"):
        built(tiny, where, colocate=True)
    with pytest.raises(UsageError, match=rf"^{re.escape(where)}\.max_model_len: 1; this model takes 2 to \d+ tokens"):
        built(tiny, where, colocate=True, max_model_len=1)
    with pytest.raises(
        UsageError, match=rf"^{re.escape(where)}\.colocate: .* asks a server \({re.escape(where)}\.url\)"
    ):
        built(None, where, colocate=True)


@pytest.mark.parametrize("where", KEYS)
def test_a_server_that_is_not_there_or_has_other_weights(where: str, tiny: LoadedModel, server: FakeFollower) -> None:
    with pytest.raises(UsageError, match=rf"or give its place as {re.escape(where)}\.url$"):
        built(tiny, where, url=f"http://127.0.0.1:{free_port()}", retries=0).sync(0)
    with pytest.raises(UsageError, match=rf"or name what is to be asked with {re.escape(where)}\.served_name$"):
        built(tiny, where, url=server.url, served_name="other").sync(0)
    with pytest.raises(EngineMismatch, match=rf"or raise {re.escape(where)}\.tolerance$"):
        built(tiny, where, url=server.url, tolerance=-1.0).sync(0)
    with pytest.raises(UsageError, match=rf"set {re.escape(where)}\.logprobs to false"):
        built(tiny, where, url=server.url).generate([[9]], [[1]], Sampling(2, temperature=0.7, top_k=3))


def test_an_evaluation_names_its_own_option(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["evaluate", "tiny", "--engine", "vllm", "--engine.url", f"http://127.0.0.1:{free_port()}"]
    assert main([*asked, "--n", "1"]) == 2
    assert "or give its place as --engine.url" in capsys.readouterr().err


def test_no_message_names_an_option_by_another_key() -> None:
    """``engine.port`` is the key of no recipe: these stand under ``rollout.engine`` and ``eval.engine``."""
    options = "|".join(registry.find("engine", "vllm").options_model().model_fields)
    for path in sorted(Path(package.__file__).parent.rglob("*.py")):
        said = re.findall(rf"(?<![.\w])engine\.(?:{options})\b", path.read_text())
        assert not said, f"{path.name}: {said}"
