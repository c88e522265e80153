"""Several real vLLM servers of a run's own: answers, processes that come back to them, and one that is killed."""

from __future__ import annotations

import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from small_updates import KillsAServer, update

from engines.engine_contract import keys_of
from posttrain.engines.base import Sampling
from posttrain.engines.native.engine import NativeEngine
from posttrain.engines.vllm.engine import vllm
from posttrain.engines.vllm.fleet import FollowingFleet
from posttrain.engines.vllm.placed import _is_in_order
from posttrain.models.load import LoadedModel, load_model
from posttrain.recipes.sections import ModelSection
from posttrain.world import ONE
from small_runs import make_recipe, recorded, watched

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("own_servers")]

ASKING: dict[str, Any] = {"timeout_seconds": 300.0, "collectives": "gloo"}
GREEDY = Sampling(16, temperature=0.0, stop_ids=frozenset({0}))


@pytest.fixture
def tiny() -> LoadedModel:
    return load_model(ModelSection(), seed=0)


def answers(engine: Any, loaded: LoadedModel) -> list[Any]:
    prompts = [loaded.tokenizer.encode(f"Eva starts with {n} shells. She finds {n // 2 + 1}") for n in range(10, 18)]
    return [one.ids for group in engine.generate(prompts, keys_of([1] * 8), GREEDY) for one in group]


def test_two_servers_and_a_process_that_comes_back_to_them(tiny: LoadedModel, tmp_path: Path) -> None:
    """Servers that live are kept for a process that was started again: it forms new groups with them."""
    first = vllm(tiny.model, tiny.tokenizer, servers=2, eager=True, **ASKING).settle(tmp_path, ONE)
    assert isinstance(first, FollowingFleet)
    try:
        first.sync(0)
        assert answers(first, tiny) == answers(NativeEngine(tiny.model), tiny)
        urls = [member.url for member in first.members]
        assert all(map(_is_in_order, urls))
        second = vllm(tiny.model, tiny.tokenizer, url=urls, **ASKING).settle(tmp_path, ONE)
        started = time.perf_counter()
        for version in (1, 2):
            update(tiny.model, version)
            second.sync(version)
            assert answers(second, tiny) == answers(NativeEngine(tiny.model), tiny)
        print(f"\ntwo versions to two servers that lived, and answers: {time.perf_counter() - started:.1f} s")
        for route, is_in_order in (("pause?mode=abort", False), ("resume", True)):
            urllib.request.urlopen(urllib.request.Request(f"{urls[0]}/{route}", method="POST"), timeout=60).close()
            assert _is_in_order(urls[0]) is is_in_order
    finally:
        first.close()
    assert not any(map(_is_in_order, urls))


def test_training_with_two_servers_of_which_one_is_killed(tmp_path: Path) -> None:
    """It is started again, elsewhere, and asked for what it had not answered; no answer is lost or comes twice."""
    engine = {"name": "vllm", "eager": True, "timeout_seconds": 300, "servers": 2}
    recipe = make_recipe("grpo", rollout={"engine": engine}, train={"steps": 3})
    events = KillsAServer(tmp_path / "run" / "server-2")
    result = watched(tmp_path / "run", recipe, events)
    assert (result.step, result.reason) == (3, "finished")
    (said,) = [facts["message"] for facts in events.of("notice")]
    assert said.startswith("vLLM server 2 of 2 failed: ")
    rows = recorded(tmp_path / "run")[0]
    assert [(row.step, row.version) for row in rows] == [(s, s - 1) for s in (1, 2, 3) for _ in range(16)]
    events.check_recovery()
