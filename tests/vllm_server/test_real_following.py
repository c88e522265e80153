"""A real vLLM server whose weights follow: clean syncs, syncs with a fault, and training from end to end."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_updates import KillsAServer, update

from engines.engine_contract import keys_of
from posttrain.engines.base import Sampling
from posttrain.engines.native.engine import NativeEngine
from posttrain.engines.vllm import command
from posttrain.engines.vllm.engine import vllm
from posttrain.engines.vllm.fleet import FollowingFleet
from posttrain.engines.vllm.probe import TOLERANCE
from posttrain.engines.vllm.transfer import WeightSender
from posttrain.errors import EngineMismatch
from posttrain.models.load import LoadedModel, load_model
from posttrain.recipes.sections import ModelSection
from posttrain.world import ONE
from small_runs import end_of, make_recipe, recorded, start, steps_of, watched

pytestmark = pytest.mark.vllm

NUM_SYNCS = 200
PLUGIN_WITH_FAULT = """
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("real_plugin", {real!r})
real = sys.modules["real_plugin"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(real)
pack, left_old, kept = real.pack_tied_heads, pathlib.Path(__file__).with_name("tied-heads-left-old"), {{}}

def pack_unless_left_old(model):
    # a head that multiplies with a packed copy stays old when nobody packs it; any other is given the old weight
    if left_old.exists():
        model.lm_head.weight = kept["head"]
        return
    model.lm_head.weight = model.model.embed_tokens.weight
    pack(model)
    kept["head"] = type(model.lm_head.weight)(model.lm_head.weight.detach().clone(), requires_grad=False)

real.pack_tied_heads = pack_unless_left_old
register = real.register
"""


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model(ModelSection(), seed=0)


@pytest.fixture(scope="module")
def engine(tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory, own_servers: None) -> Iterator[FollowingFleet]:
    """With a plug-in that leaves tied heads old while a file lies beside it."""
    folder = tmp_path_factory.mktemp("following")
    real = command.PLUGIN / "posttrain_vllm.py"
    (folder / "posttrain_vllm.py").write_text(PLUGIN_WITH_FAULT.format(real=str(real)))
    shutil.copytree(command.PLUGIN / "posttrain_vllm-1.dist-info", folder / "posttrain_vllm-1.dist-info")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "PLUGIN", folder)
        engine = vllm(tiny.model, tiny.tokenizer, eager=True, timeout_seconds=300.0)
        assert isinstance(engine, FollowingFleet)
        engine.settle(folder, ONE)
        try:
            engine.sync(0)
            yield engine
        finally:
            engine.close()


def follow(engine: FollowingFleet, versions: range) -> None:
    """An update and a sync for each version."""
    for version in versions:
        update(engine.members[0].model, version)
        engine.sync(version)


def difference(engine: FollowingFleet) -> float:
    (member,) = engine.members
    with member._open() as server:
        return member.score(server, member._connect(server))


def test_clean_syncs_raise_no_alarm_and_an_update_that_did_not_arrive_would(engine: FollowingFleet) -> None:
    seconds, worst, least = [], 0.0, 1.0
    for version in range(1, NUM_SYNCS + 1):
        update(engine.members[0].model, version)
        if version % 50 == 0:
            least = min(least, difference(engine))
        started = time.perf_counter()
        engine.sync(version)
        seconds.append(time.perf_counter() - started)
        if version % 50 == 0:
            worst = max(worst, difference(engine))
    print(f"\n{NUM_SYNCS} syncs, {sorted(seconds)[len(seconds) // 2]:.2f} s in the middle, none refused;")
    print(f"the same weights differ by at most {worst:.1e} nats, one update that is missing by at least {least:.1e}")
    assert worst < TOLERANCE / 10 < TOLERANCE < least


def test_answers_are_the_models(engine: FollowingFleet, tiny: LoadedModel) -> None:
    prompts = [tiny.tokenizer.encode(f"Eva starts with {n} shells. She finds {n // 2 + 1}") for n in range(10, 26)]
    greedy, keys = Sampling(24, temperature=0.0, stop_ids=frozenset({0})), [[1]] * 16
    found = engine.generate(prompts, keys, greedy)
    expected = NativeEngine(tiny.model).generate(prompts, keys, greedy)
    assert [g[0].ids for g in found] == [g[0].ids for g in expected]
    assert {c.version for g in found for c in g} == {engine.version}


def test_more_prompts_than_are_read_at_once(engine: FollowingFleet, tiny: LoadedModel) -> None:
    """With seeds of their own: vLLM 0.32 on a CPU ends at a seeded prompt that it reads in parts."""
    prompts = [tiny.tokenizer.encode(f"Eva starts with {n} shells. She finds {n // 2}") * 24 for n in range(64)]
    assert sum(map(len, prompts)) > 4 * 4096
    groups = engine.generate(prompts, keys_of([2] * 64), Sampling(4))
    assert [len(c.ids) for group in groups for c in group] == [4] * 128
    assert engine.restarts == 0


def one_tensor_scaled(member: Any, patch: pytest.MonkeyPatch) -> None:
    sound = member.weights

    def weights() -> Any:
        for name, weight in sound():
            yield name, weight * 1.01 if name == "model.layers.2.mlp.up_proj.weight" else weight

    patch.setattr(member, "weights", weights)


def one_layer_left_old(member: Any, patch: pytest.MonkeyPatch) -> None:
    sound = member.weights
    patch.setattr(member, "weights", lambda: ((n, w) for n, w in sound() if not n.startswith("model.layers.1.")))


def tied_head_left_old(member: Any, patch: pytest.MonkeyPatch) -> None:
    left_old = member.folder / "tied-heads-left-old"
    left_old.touch()
    patch.callback = left_old.unlink  # type: ignore[attr-defined]


def prefix_cache_kept(member: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightSender, "pause", "/pause?mode=abort&clear_cache=false")
    patch.setattr(WeightSender, "reset_caches", lambda self, server: None)


@pytest.mark.parametrize(
    ("fault", "updates"),
    [(one_tensor_scaled, 1), (one_layer_left_old, 1), (tied_head_left_old, 4), (prefix_cache_kept, 1)],
)
def test_a_sync_with_a_fault_is_caught(engine: FollowingFleet, fault: Any, updates: int) -> None:
    """After one update of 1e-5 at every weight; the next sync is sound again, and accepted.

    A head alone that is one such update old is about as far off as the tolerance: it is caught a few updates later.
    """
    last = engine.version + updates
    with pytest.MonkeyPatch.context() as patch:
        fault(engine.members[0], patch)
        try:
            with pytest.raises(EngineMismatch, match=r"log-probabilities of a fixed batch differ by") as caught:
                follow(engine, range(engine.version + 1, last + 1))
        finally:
            getattr(patch, "callback", lambda: None)()
    print(f"\n{fault.__name__}: {str(caught.value).partition('differ by ')[2].partition(' nats')[0]} nats")
    engine.sync(last)


def test_training_from_end_to_end_with_a_server_that_is_killed(tmp_path: Path, own_servers: None) -> None:
    """Started by the recipe, killed after the first step, started again; no answer is lost or comes twice."""
    engine = {"name": "vllm", "eager": True, "timeout_seconds": 300}
    recipe = make_recipe("grpo", rollout={"engine": engine}, train={"steps": 3})
    events = KillsAServer(tmp_path / "run")
    result = watched(tmp_path / "run", recipe, events)
    assert (result.step, result.reason) == (3, "finished")
    assert len(events.of("notice")) == 1
    rows = recorded(tmp_path / "run")[0]
    assert [(row.step, row.version) for row in rows] == [(s, s - 1) for s in (1, 2, 3) for _ in range(16)]
    events.check_recovery()


@pytest.mark.parametrize("staleness", [0, 1])
def test_two_processes_train_with_a_server_by_one_command(staleness: int, tmp_path: Path, own_servers: None) -> None:
    """The line of docs/serving.md, in small: every answer is there once, by the version that its batch is due."""
    changes = {"scale.processes": 2, "rollout.engine.name": "vllm", "rollout.engine.eager": "true"}
    changes |= {"rollout.staleness": staleness, "rollout.prompts": 4, "rollout.max_tokens": 32, "train.steps": 4}
    changes |= {"train.warmup_steps": 1, "train.save_every": 0, "eval.every": 4, "eval.n": 8, "eval.max_tokens": 32}
    words = [word for key, value in changes.items() for word in (f"--{key}", str(value))]
    where = ["--runs-dir", str(tmp_path), "--run", "it", "--quiet"]
    code, error = end_of(start([sys.executable, "-m", "posttrain", "train", "tiny/grpo", *words, *where], os.environ))
    assert code == 0, error
    assert "failed" not in error
    training, evaluated = recorded(tmp_path / "it")
    due = [(step, max(0, step - 1 - staleness)) for step in range(1, 5)]
    assert sorted((row.step, row.version) for row in training) == [pair for pair in due for _ in range(32)]
    assert Counter(row.step for row in evaluated) == {0: 8, 4: 8}
    assert max(step["mismatch_kl"] for step in steps_of(tmp_path / "it")) < 1e-3
    assert len(training) == 4 * 32
