"""Weights handed over to a server: the routes in order, the comparison that follows, and what goes wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_contract import keys_of

from fake_follower import SYNC, FakeFollower
from fake_vllm import FakeVllm, model_answer
from posttrain.engines.base import Sampling
from posttrain.engines.native.engine import NativeEngine
from posttrain.engines.vllm.command import ServerOptions
from posttrain.engines.vllm.fleet import FollowingFleet
from posttrain.engines.vllm.follow import Member
from posttrain.engines.weights import checkpoint_weights
from posttrain.errors import EngineMismatch, RecipeError, RunFailure, UsageError
from posttrain.models.load import LoadedModel
from posttrain.world import World
from serving import free_port
from small_runs import Events, make_recipe, recorded, run, saved_tensors, steps_of, watched

pytestmark = pytest.mark.usefixtures("no_waiting")

ASKING: dict[str, Any] = {"timeout_seconds": 60.0, "retries": 1}


def follow(tiny: LoadedModel, url: str, kind: type[Member] = Member, **options: Any) -> Any:
    own = ServerOptions(dtype="float32")
    return FollowingFleet([kind(tiny.model, tiny.tokenizer, url, own, "gloo", **(ASKING | options))], None, 0)


def update(model: Any, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-4 * torch.randn(parameter.shape, generator=generator)


def test_the_server_follows_and_every_completion_says_which_weights_drew_it(
    tiny: LoadedModel, server: FakeFollower
) -> None:
    engine, ask = follow(tiny, server.url), ([[9, 10], [11, 12, 13]], [[1, 2], [3]], Sampling(max_tokens=8))
    for version in (0, 3):
        engine.sync(version)
        groups, expected = engine.generate(*ask), NativeEngine(tiny.model).generate(*ask)
        assert [[c.ids for c in g] for g in groups] == [[c.ids for c in g] for g in expected]
        assert {c.version for g in groups for c in g} == {version}
        update(tiny.model)
    assert server.said == ["/init_weight_transfer_engine", *SYNC, *SYNC]
    assert server.label.endswith(":3")
    engine.sync(3)
    assert len(server.said) == 13, "the same version means the same weights"
    assert server.model.lm_head.weight is server.model.model.embed_tokens.weight


def test_clean_syncs_raise_no_alarm(tiny: LoadedModel, server: FakeFollower) -> None:
    engine = follow(tiny, server.url)
    for version in range(6):
        engine.sync(version)
        assert server.said.count("/update_weights") == version + 1
        assert server.label.endswith(f":{version}")
        theirs = dict(server.model.named_parameters())
        assert all(torch.equal(weight, theirs[name]) for name, weight in checkpoint_weights(tiny.model))
        update(tiny.model, version)
    assert not torch.equal(theirs["model.norm.weight"], tiny.model.model.norm.weight), "an update is no sync"


def test_an_adapter_is_handed_over_merged(tiny: LoadedModel, server: FakeFollower, wrapped: Any) -> None:
    follow(replace(tiny, model=wrapped), server.url).sync(1)
    theirs = dict(server.model.named_parameters())
    assert all(torch.equal(weight, theirs[name]) for name, weight in checkpoint_weights(wrapped))


class OneTensorScaled(Member):
    def weights(self) -> Any:
        for name, weight in super().weights():
            yield name, weight * 1.01 if name == "model.layers.2.mlp.up_proj.weight" else weight


def one_layer_left_old(fake: FakeFollower) -> None:
    fake.drops = [name for name, _ in fake.model.named_parameters() if name.startswith("model.layers.1.")]


def tied_head_left_old(fake: FakeFollower) -> None:
    fake.model.lm_head.weight = torch.nn.Parameter(fake.model.lm_head.weight.detach().clone())


def cache_kept(fake: FakeFollower) -> None:
    fake.keeps_cache = True


@pytest.mark.parametrize("fault", [OneTensorScaled, one_layer_left_old, tied_head_left_old, cache_kept])
def test_a_sync_with_a_fault_is_caught(tiny: LoadedModel, server: FakeFollower, fault: Any) -> None:
    """After one small update, of which the fault keeps a part from the server."""
    kind = fault if isinstance(fault, type) else Member
    engine = follow(tiny, server.url, kind)
    if kind is Member:
        engine.sync(0)
        fault(server)
    update(tiny.model)
    with pytest.raises(EngineMismatch, match=r"after 1 updates .*: log-probabilities .* differ by [0-9.e-]+ nats"):
        engine.sync(1)


def test_training_from_end_to_end(tiny: LoadedModel, server: FakeFollower, tmp_path: Path) -> None:
    """Two updates a batch; the server's last weights are those that the last evaluation was of."""
    engine = {"name": "vllm", "url": server.url, "retries": 0}
    evaluation = {"every": 2, "n": 2, "max_tokens": 4}
    recipe = make_recipe("grpo", rollout={"engine": engine}, eval=evaluation, train={"epochs": 2, "steps": 4})
    result = run(tmp_path / "run", recipe)
    assert (result.step, result.reason) == (4, "finished")
    training, evaluations = recorded(tmp_path / "run")
    assert {(row.step, row.version) for row in training} == {(1, 0), (3, 2)}
    assert {(row.step, row.version) for row in evaluations} == {(0, 0), (2, 2), (4, 4)}
    saved = saved_tensors(tmp_path / "run", 4)
    theirs = dict(server.model.named_parameters())
    weights = {k.partition(":")[2]: v for k, v in saved.items() if k.startswith("model.safetensors:")}
    assert set(theirs) <= set(weights)
    assert all(torch.equal(weights[name], tensor) for name, tensor in theirs.items())
    assert all(row["grad_norm"] > 0 for row in steps_of(tmp_path / "run"))


def test_of_several_processes_one_hands_over_and_all_ask(tiny: LoadedModel, server: FakeFollower) -> None:
    told: list[Any] = []

    class Rank(World):
        def __init__(self, rank: int) -> None:
            self.rank, self.size = rank, 2

        def tell(self, value: Any, what: str) -> Any:
            if self.is_main:
                told.append(value)
            return told[-1]

    engines = [follow(tiny, server.url), follow(tiny, "http://127.0.0.1:9")]
    for rank, engine in enumerate(engines):
        engine.world = Rank(rank)
    for version in (0, 1):
        answers = []
        for engine in engines:
            engine.sync(version)
            answers.append(engine.generate([[9, 10]], [[1, 2]], Sampling(max_tokens=4)))
        assert answers[0] == answers[1]
        assert answers[1][0][0].version == version
    assert len(server.said) == 1 + 2 * len(SYNC)


def test_supervised_training_is_evaluated_by_a_server(tiny: LoadedModel, server: FakeFollower, tmp_path: Path) -> None:
    recipe = make_recipe(
        "sft", eval={"every": 1, "n": 2, "max_tokens": 4, "engine": {"name": "vllm", "url": server.url}}
    )
    run(tmp_path / "run", recipe, stop_after=1)
    _, evaluations = recorded(tmp_path / "run")
    assert {(row.step, row.version) for row in evaluations} == {(0, 0), (1, 1)}
    assert server.label.endswith(":1")


def test_an_evaluation_server_that_cannot_be_had_is_said_and_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POSTTRAIN_VLLM", raising=False)
    events = Events()
    recipe = make_recipe("sft", eval={"every": 1, "n": 2, "max_tokens": 4, "engine": "vllm"}, train={"steps": 1})
    watched(tmp_path / "run", recipe, events)
    (said,) = [facts["message"] for facts in events.of("notice")]
    assert "POSTTRAIN_VLLM is not set" in said
    assert said.endswith("evaluations are answered by 'native' instead")


# What goes wrong.


def test_a_server_that_is_not_there(tiny: LoadedModel) -> None:
    port = free_port()
    with pytest.raises(UsageError, match=rf"127\.0\.0\.1:{port}: no vLLM server answers there"):
        follow(tiny, f"http://127.0.0.1:{port}").sync(0)


def test_a_server_that_takes_no_weights(tiny: LoadedModel) -> None:
    with (
        FakeVllm(model_answer(tiny.model, "processed")) as plain,
        pytest.raises(RunFailure, match=r"/get_world_size: HTTP 404.*serve-command --follows"),
    ):
        follow(tiny, plain.url).sync(0)


@pytest.mark.parametrize("route", ["/init_weight_transfer_engine", *SYNC])
def test_a_route_that_fails_ends_at_once_and_is_named(tiny: LoadedModel, server: FakeFollower, route: str) -> None:
    server.refuses = route
    with pytest.raises(RunFailure, match=f"could not be handed over: {route}: .*HTTP 500: not today"):
        follow(tiny, server.url).sync(0)


def test_another_model_there(tiny: LoadedModel, server: FakeFollower) -> None:
    """One weight has another shape; all are received, so that neither side waits for the other."""
    server.model.model.norm.weight = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(RunFailure, match=r"/update_weights: .*model\.norm\.weight \[128\]: RuntimeError"):
        follow(tiny, server.url).sync(0)


def test_weights_that_somebody_else_handed_over(tiny: LoadedModel, server: FakeFollower) -> None:
    engine = follow(tiny, server.url)
    engine.sync(0)
    server.label = "another run:7"
    with pytest.raises(RunFailure, match=r"weights called 'another run:7', and was given '[0-9a-f]{8}:0'"):
        engine.generate([[9]], [[1]], Sampling(max_tokens=2))


def test_a_server_that_dies_in_the_middle_loses_no_step(tiny: LoadedModel, tmp_path: Path) -> None:
    """The run ends with what was done, and goes on with another server."""

    def die(count: int, body: dict[str, Any]) -> None:
        if server.label.endswith(":2") and not body.get("logprobs") and "prompt_logprobs" not in body:
            server._server.shutdown()
            raise ConnectionAbortedError

    with FakeFollower(tiny.model, tiny.tokenizer, trouble=die) as server:
        place = {"engine": {"name": "vllm", "url": server.url, "retries": 0, "timeout_seconds": 5}}
        with pytest.raises(RunFailure, match=f"{server.url}: no completion of prompt"):
            run(tmp_path / "run", make_recipe("grpo", rollout=place))
    assert len(steps_of(tmp_path / "run")) == 2
    with FakeFollower(tiny.model, tiny.tokenizer) as other:
        place["engine"]["url"] = other.url
        assert run(tmp_path / "run", make_recipe("grpo", rollout=place), resume=True).step == 4
    assert [row.version for row in recorded(tmp_path / "run")[0][::16]] == [0, 1, 2, 3]


def test_truncated_sampling_is_refused_where_it_would_bias_the_ratio(tmp_path: Path) -> None:
    for cut in ({"top_p": 0.9}, {"top_k": 5}):
        with pytest.raises(RecipeError, match=rf"rollout\.{next(iter(cut))}: objective 'grpo' .* every ratio"):
            run(tmp_path / "refused", make_recipe("grpo", rollout=cut))
    imitation = make_recipe("grpo", objective={"name": "cross_entropy"}, rollout={"top_p": 0.9}, train={"steps": 1})
    assert run(tmp_path / "fine", imitation).step == 1


def test_keys_beyond_63_bits_are_asked_for_as_seeds(tiny: LoadedModel, server: FakeFollower) -> None:
    engine = follow(tiny, server.url)
    engine.sync(0)
    assert [len(group) for group in engine.generate([[9], [10]], keys_of([2, 1]), Sampling(max_tokens=2))] == [2, 1]
