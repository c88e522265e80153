"""vLLM in the trainer's process: weights by reference, the comparison that follows, and what goes wrong."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import fake_vllm_module
import numpy as np
import pytest
import torch
from engine_contract import EngineCase, EngineContract, tiny_case

from posttrain import registry
from posttrain.engines.base import Sampling
from posttrain.engines.vllm.colocated import ColocatedEngine
from posttrain.engines.vllm.engine import vllm
from posttrain.engines.weights import checkpoint_weights
from posttrain.errors import EngineMismatch, RecipeError, RunFailure, UsageError
from posttrain.models.load import LoadedModel
from posttrain.train.checks import words_of
from posttrain.world import World
from small_runs import Events, make_recipe, recorded, run, same_bits, saved_tensors, steps_of, watched

ENGINE = {"name": "vllm", "colocate": True}
HAND_OVER = ["reload_weights", "pack_tied_heads", "reset_prefix_cache"]
ASK = ([[9, 10], [11, 12, 13]], [[1, 2], [3]], Sampling(max_tokens=8))


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", fake_vllm_module.stand_in())
    monkeypatch.setattr(fake_vllm_module.LLM, "refuses", "")


def build(tiny: LoadedModel, folder: Path, **options: Any) -> ColocatedEngine:
    engine: Any = vllm(tiny.model, tiny.tokenizer, colocate=True, **options)
    engine.folder = folder
    return engine  # type: ignore[no-any-return]


@pytest.fixture
def engine(tiny: LoadedModel, tmp_path: Path) -> ColocatedEngine:
    return build(tiny, tmp_path)


def update(model: Any, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-4 * torch.randn(parameter.shape, generator=generator)


class TestContract(EngineContract):
    @pytest.fixture
    def case(self, tiny: LoadedModel, engine: ColocatedEngine) -> EngineCase:
        return tiny_case(tiny.model, tiny.tokenizer, engine)


def test_vllm_follows_and_every_completion_says_which_weights_drew_it(
    tiny: LoadedModel, engine: ColocatedEngine
) -> None:
    assert engine.version == -1
    for version in (0, 3):
        engine.sync(version)
        groups = engine.generate(*ASK)
        assert {c.version for g in groups for c in g} == {version}
        for prompt, group in zip(ASK[0], groups, strict=True):
            for one in group:
                with torch.no_grad():
                    logits = tiny.model(input_ids=torch.tensor([[*prompt, *one.ids]])).logits[0].float()
                expected = logits.log_softmax(-1)[range(len(prompt) - 1, len(logits) - 1), list(one.ids)]
                assert one.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
        update(tiny.model)
    llm = engine._llm
    assert llm.said == [*HAND_OVER, *HAND_OVER]
    engine.sync(3)
    assert llm.said == [*HAND_OVER, *HAND_OVER], "the same version means the same weights"


def test_seeds_and_options_are_those_that_a_server_is_asked_with(engine: ColocatedEngine) -> None:
    sampling = Sampling(max_tokens=2, temperature=0.7, stop_ids=frozenset({5, 3}))
    engine.generate([[9], [10]], [[(1 << 64) - 1], [7]], sampling)
    asked = [vars(each) for each in engine._llm.asked[-2:]]
    assert [each["seed"] for each in asked] == [(1 << 63) - 1, 7]
    same = {"temperature": 0.7, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}
    same |= {"max_tokens": 2, "stop_token_ids": [3, 5], "logprobs": 0, "prompt_logprobs": None, "detokenize": False}
    assert all(each.items() >= same.items() for each in asked)
    built = {"dtype": "float32", "max_model_len": 1024, "enforce_eager": False, "gpu_memory_utilization": 0.3}
    built |= {"logprobs_mode": "processed_logprobs", "generation_config": "vllm", "enable_sleep_mode": False}
    built |= {"kv_cache_memory_bytes": 1 << 30, "enable_chunked_prefill": False}
    assert engine._llm.options.items() >= built.items()


def test_options_of_the_recipe_reach_vllm(tiny: LoadedModel, tmp_path: Path) -> None:
    options = {"dtype": "bfloat16", "gpu_memory": 0.45, "eager": True, "max_model_len": 64, "tolerance": 9.0}
    engine = build(tiny, tmp_path, **options, logprobs=False)
    assert (engine.context_tokens, engine.tolerance) == (64, 9.0)
    ((one,),) = engine.generate([[9]], [[1]], Sampling(2, temperature=0.5, top_p=0.9))
    assert [str(value) for value in one.logprobs] == ["nan", "nan"]
    built = {"dtype": "bfloat16", "gpu_memory_utilization": 0.45, "enforce_eager": True, "max_model_len": 64}
    built["kv_cache_memory_bytes"] = None
    assert engine._llm.options.items() >= built.items()


def test_an_adapter_is_handed_over_merged(tiny: LoadedModel, wrapped: Any, tmp_path: Path) -> None:
    engine = ColocatedEngine(wrapped, tiny.tokenizer)
    engine.folder = tmp_path
    engine.sync(1)
    theirs = dict(engine._llm.model.named_parameters())
    assert all(torch.equal(weight, theirs[name]) for name, weight in checkpoint_weights(wrapped))


def test_vllm_leaves_the_process_as_it_was(engine: ColocatedEngine) -> None:
    def state() -> list[Any]:
        seeds = [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]
        return [*seeds, dict(os.environ), torch.get_num_threads(), torch.set_num_threads]

    before = state()
    engine.generate(*ASK)
    assert state() == before
    engine.close()
    assert state() == before


# A hand-over that is not sound.


def one_tensor_scaled(engine: Any) -> None:
    sound = engine.weights
    scaled = "model.layers.2.mlp.up_proj.weight"
    engine.weights = lambda: ((name, weight * 1.01 if name == scaled else weight) for name, weight in sound())


def one_layer_left_old(engine: Any) -> None:
    names = [name for name, _ in engine.model.named_parameters()]
    engine._llm.drops = [name for name in names if name.startswith("model.layers.1.")]


def tied_head_left_old(engine: Any) -> None:
    engine._llm.keeps_head = True


def cache_kept(engine: Any) -> None:
    engine._llm.keeps_cache = True


@pytest.mark.parametrize("fault", [one_tensor_scaled, one_layer_left_old, tied_head_left_old, cache_kept])
def test_a_hand_over_with_a_fault_is_caught(tiny: LoadedModel, engine: ColocatedEngine, fault: Any) -> None:
    """After one small update, of which the fault keeps a part from vLLM."""
    engine.sync(0)
    fault(engine)
    update(tiny.model)
    with pytest.raises(EngineMismatch, match=r"after 1 updates .*: log-probabilities .* differ by [0-9.e-]+ nats"):
        engine.sync(1)


def test_clean_hand_overs_raise_no_alarm(tiny: LoadedModel, engine: ColocatedEngine) -> None:
    for version in range(6):
        engine.sync(version)
        theirs = dict(engine._llm.model.named_parameters())
        assert all(torch.equal(weight, theirs[name]) for name, weight in checkpoint_weights(tiny.model))
        assert engine.score() < 5e-5
        update(tiny.model, version)
    assert engine.score() > engine.tolerance, "an update is no hand-over"


# Memory that the trainer needs.


def test_on_a_gpu_vllm_sleeps_while_the_trainer_computes(tiny: LoadedModel, engine: ColocatedEngine) -> None:
    """The order of calls, with a stand-in that has nothing in memory that was given back."""
    engine.sleeps = True
    engine.sync(0)
    llm, woken = engine._llm, ["wake_up weights", *HAND_OVER[:2], "wake_up kv_cache", "reset_prefix_cache"]
    assert llm.said == HAND_OVER
    engine.rest()
    engine.rest()
    update(tiny.model)
    engine.sync(1)
    assert llm.said == [*HAND_OVER, "sleep 2", *woken]
    assert engine.generate(*ASK)[0][0].version == 1
    engine.rest()
    engine.sync(1)
    assert llm.said[-6:] == ["sleep 2", *woken], "the same version, but its weights were given back"
    engine.rest()
    llm.keeps_cache = True  # keys and values whose memory was given back
    update(tiny.model)
    with pytest.raises(EngineMismatch):
        engine.sync(2)


def test_a_run_lets_vllm_sleep_between_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[int] = []
    monkeypatch.setattr(ColocatedEngine, "rest", lambda self: rests.append(self.version))
    recipe = make_recipe("grpo", rollout={"engine": ENGINE}, eval={"every": 2, "n": 2, "max_tokens": 4})
    run(tmp_path / "run", recipe, stop_after=2)
    assert rests == [0, 0, 1, 2], "after the evaluation at the start, two batches, and the evaluation behind them"


def test_on_a_cpu_nothing_sleeps(engine: ColocatedEngine) -> None:
    engine.sync(0)
    engine.rest()
    engine.sync(0)
    assert engine._llm.said == HAND_OVER


# Runs.


def test_training_from_end_to_end(tmp_path: Path) -> None:
    """Two updates a batch; vLLM's last weights are those that the last evaluation was of, and it is ended."""
    evaluation = {"every": 2, "n": 2, "max_tokens": 4}
    changes = {"rollout": {"engine": ENGINE}, "eval": evaluation, "train": {"epochs": 2, "steps": 4}}
    result = run(tmp_path / "run", make_recipe("grpo", **changes))
    assert (result.step, result.reason) == (4, "finished")
    training, evaluations = recorded(tmp_path / "run")
    assert {(row.step, row.version) for row in training} == {(1, 0), (3, 2)}
    assert {(row.step, row.version) for row in evaluations} == {(0, 0), (2, 2), (4, 4)}
    assert all(row["grad_norm"] > 0 for row in steps_of(tmp_path / "run"))
    saved = saved_tensors(tmp_path / "run", 4)
    llm = fake_vllm_module.LLM.last
    theirs = dict(llm.model.named_parameters())
    assert all(torch.equal(saved[f"model.safetensors:{name}"], tensor) for name, tensor in theirs.items())
    assert llm.said == HAND_OVER * 3, "of steps 0, 2 and 4"
    assert llm.folder == str(tmp_path / "run" / "served")
    assert not llm.alive


def test_a_resumed_run_asks_with_the_same_prompts_and_seeds(tmp_path: Path) -> None:
    """Weights and answers of the undisturbed run, bit for bit, as the stand-in computes alike each time."""
    recipe = make_recipe("grpo", rollout={"engine": ENGINE}, train={"steps": 2})
    run(tmp_path / "whole", recipe)
    run(tmp_path / "parts", recipe, stop_after=1)
    assert run(tmp_path / "parts", recipe, resume=True).step == 2
    whole, parts = (recorded(tmp_path / name)[0] for name in ("whole", "parts"))
    assert [(r.step, r.version, r.token_ids) for r in parts] == [(r.step, r.version, r.token_ids) for r in whole]
    assert same_bits(saved_tensors(tmp_path / "whole", 2), saved_tensors(tmp_path / "parts", 2))


def test_supervised_training_is_evaluated_by_it(tmp_path: Path) -> None:
    recipe = make_recipe("sft", eval={"every": 1, "n": 2, "max_tokens": 4, "engine": ENGINE})
    run(tmp_path / "run", recipe, stop_after=1)
    _, evaluations = recorded(tmp_path / "run")
    assert {(row.step, row.version) for row in evaluations} == {(0, 0), (1, 1)}


def test_a_run_that_fails_ends_vllm_and_keeps_its_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = ColocatedEngine.sync

    def sync(self: ColocatedEngine, version: int) -> None:
        sound(self, version)
        self._llm.aborts = {3} if version == 1 else set()

    monkeypatch.setattr(ColocatedEngine, "sync", sync)
    recipe = make_recipe("grpo", rollout={"engine": ENGINE}, train={"steps": 2})
    with pytest.raises(RunFailure, match="a completion that cannot be used: it ended a completion with 'abort'"):
        run(tmp_path / "run", recipe)
    assert not fake_vllm_module.LLM.last.alive
    assert len(steps_of(tmp_path / "run")) == 1
    monkeypatch.setattr(ColocatedEngine, "sync", sound)
    assert run(tmp_path / "run", recipe, resume=True).step == 2


# What goes wrong.


def test_an_answer_that_is_missing(engine: ColocatedEngine, tmp_path: Path) -> None:
    engine.sync(0)
    llm = engine._llm
    llm.loses = {1}
    with pytest.raises(RunFailure, match=r"failed: RuntimeError: 2 answers to 3 requests \(.*vllm.log has the whole"):
        engine.generate(*ASK)
    assert not llm.alive, "what it began would come back with the next requests"
    assert "Traceback" in (tmp_path / "vllm.log").read_text()
    assert engine.generate(*ASK)[0][0].version == 0, "built again"


def test_answers_that_were_put_back_are_told_of(engine: ColocatedEngine) -> None:
    engine.sync(0)
    engine._llm.preemptions = 3
    engine.generate(*ASK)
    engine.generate(*ASK)
    (said,) = engine.take_notices()
    assert said.startswith("vLLM had no room for 3 answers under way")
    assert engine.take_notices() == []


def test_vllm_that_cannot_be_built(engine: ColocatedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_vllm_module.LLM, "refuses", "Free memory on device is less than desired\nand more")
    with pytest.raises(RunFailure, match=r"^vLLM in this process failed: ValueError: Free memory on device [^\n]*$"):
        engine.sync(0)
    monkeypatch.setattr(fake_vllm_module.LLM, "refuses", "")
    engine.sync(0)
    assert engine.version == 0


def test_vllm_that_is_not_installed(tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UsageError, match=r"vLLM cannot be imported by the Python that trains, .*one environment"):
        build(tiny, tmp_path)
    events = Events()
    changes = {"eval": {"every": 1, "n": 2, "max_tokens": 4, "engine": ENGINE}, "train": {"steps": 1}}
    watched(tmp_path / "run", make_recipe("sft", **changes), events)
    (said,) = [facts["message"] for facts in events.of("notice")]
    assert said.endswith("evaluations are answered by 'native' instead")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("url", "http://127.0.0.1:8000"),
        ("served_name", "policy"),
        ("timeout_seconds", 5.0),
        ("concurrency", 8),
        ("retries", 0),
        ("port", 8000),
        ("gpus", [0, 1]),
        ("collectives", "nccl"),
        ("restarts", 0),
    ],
)
def test_options_about_a_server_are_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"^engine\.{option}: .* is about a vLLM server.*dtype, eager, gpu_memory"):
        registry.find("engine", "vllm").bind({"colocate": True, option: value})


def test_what_it_cannot_do_is_refused(tiny: LoadedModel, engine: ColocatedEngine, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="an evaluation asks a server"):
        registry.find("engine", "vllm").bind({"colocate": True, "checkpoint": "tiny"})(None, tiny.tokenizer)
    with pytest.raises(UsageError, match=r"top_p 0\.9 vLLM has no log-probabilities of the whole distribution"):
        engine.generate([[9]], [[1]], Sampling(2, top_p=0.9))
    with pytest.raises(UsageError, match=r"temperature is 0\.001; vLLM takes 0"):
        engine.generate([[9]], [[1]], Sampling(2, temperature=0.001))
    with pytest.raises(UsageError, match=r"engine\.max_model_len: 2048; this model takes 2 to 1024 tokens"):
        build(tiny, tmp_path, max_model_len=2048)
    engine.world = World()
    engine.world.size = 2
    with pytest.raises(UsageError, match=r"engine\.colocate: 2 processes train"):
        engine.sync(0)
    assert engine._llm is None


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        (
            "grpo",
            {"rollout": {"engine": ENGINE}, "scale": {"processes": 2}},
            r"rollout\.engine\.colocate: .* for one, not 2",
        ),
        (
            "sft",
            {"eval": {"every": 1, "engine": ENGINE}, "scale": {"processes": 2}},
            r"eval\.engine\.colocate: .*not 2",
        ),
        ("grpo", {"rollout": {"engine": ENGINE, "staleness": 1}}, r"rollout\.staleness: what runs beside training"),
        ("sft", {"eval": {"every": 1, "engine": ENGINE, "beside": True}}, r"eval\.beside: a process beside training"),
        (
            "grpo",
            {"rollout": {"engine": ENGINE}, "eval": {"every": 1, "engine": ENGINE | {"eager": True}}},
            r"eval\.engine: one process has room for one vLLM",
        ),
    ],
)
def test_recipes_that_colocation_does_not_fit(kind: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        words_of(make_recipe(kind, **changes))
    if kind == "grpo" and "scale" not in changes:
        words_of(make_recipe(kind, rollout={"engine": ENGINE}, eval={"every": 1, "engine": ENGINE}))
