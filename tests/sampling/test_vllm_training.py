"""Weights handed over to vLLM servers: the routes in order, the comparison that follows, and what goes wrong."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from balanced_runs import read_run
from closeness import OF_EMBEDDED, approx
from fake_follower import FILES, GROUP, FakeFollower, QueueGroup
from fake_vllm import FakeVllm, model_answer
from posttrain import registry
from posttrain.errors import EngineMismatch, RecipeError, RunFailure, UsageError
from posttrain.models.load import LoadedModel, load_model
from posttrain.process_group import ProcessGroup
from posttrain.recipes.sections import ModelSection
from posttrain.sampling.base import Sampling
from posttrain.sampling.http import HttpServer
from posttrain.sampling.native.engine import NativeEngine
from posttrain.sampling.vllm.following import (
    NcclGroup,
    TrainingVllmEngine,
    checkpoint_weights,
    save_weights,
    save_without_weights,
    untied,
)
from refusing import refuses
from small_runs import Events, make_recipe, one_layer_recipe, recorded, run, shallow, steps_of, watched

pytestmark = pytest.mark.usefixtures("no_waiting")
SAMPLING = Sampling(max_tokens=6)


class ByQueue(TrainingVllmEngine):
    """Sends weights as to a GPU's server."""

    def make_group(self) -> QueueGroup:
        return QueueGroup(self.server, 60.0)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.by_files = False


def follow(
    tiny: LoadedModel, server: Any, *, kind: type[TrainingVllmEngine] = TrainingVllmEngine, **options: Any
) -> TrainingVllmEngine:
    asking: dict[str, Any] = {"timeout_seconds": 60.0, "retries": 1} | options
    QueueGroup.followers[:] = [server]
    return kind(tiny.model, tiny.tokenizer, server.url, {}, **asking)


def update(model: Any, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-4 * torch.randn(parameter.shape, generator=generator)


def ids_of(groups: Any) -> list[list[tuple[int, ...]]]:
    return [[one.ids for one in group] for group in groups]


def has_weights_of(server: FakeFollower, model: Any) -> bool:
    theirs = dict(server.model.named_parameters())
    return all(torch.equal(weight, theirs[name]) for name, weight in checkpoint_weights(model))


@pytest.mark.parametrize(("kind", "routes"), [(TrainingVllmEngine, FILES), (ByQueue, GROUP)])
def test_trained_after_every_update_server_has_weights_and_rows_their_version(
    tiny: LoadedModel, server: FakeFollower, kind: type[TrainingVllmEngine], routes: list[str]
) -> None:
    engine = follow(tiny, server, kind=kind)
    ask = ([[9, 10], [11, 12, 13]], [[1, 2, 3], [4, 5]], SAMPLING)
    for version in (0, 3):
        engine.sync(version)
        groups = engine.generate(*ask)
        assert ids_of(groups) == ids_of(NativeEngine(tiny.model).generate(*ask))
        assert {c.version for g in groups for c in g} == {version}
        assert has_weights_of(server, tiny.model)
        update(tiny.model, version)
    begins = [] if kind is TrainingVllmEngine else ["/pause", "/init_weight_transfer_engine"]
    assert server.said == [*(begins or routes[:1]), *routes[1:], *routes]
    assert server.label.partition(":")[2] == "3"
    num_requested = len(server.said)
    engine.sync(3)
    assert len(server.said) == num_requested, "the same version means the same weights"
    engine.close()


def test_trained_of_several_processes_one_hands_over_and_all_ask(tiny: LoadedModel, server: FakeFollower) -> None:
    output: list[Any] = []

    class Rank(ProcessGroup):
        def __init__(self, rank: int) -> None:
            self.rank, self.size = rank, 2

        def broadcast(self, value: Any, what: str) -> Any:
            if self.is_main:
                output.append(value)
            return output[-1]

    engines = [follow(tiny, server), follow(tiny, server)]
    for rank, engine in enumerate(engines):
        engine.process_group = Rank(rank)
    for version in (0, 1):
        answers = []
        for engine in engines:
            engine.sync(version)
            answers.append(engine.generate([[9, 10]], [[1, 2]], Sampling(max_tokens=4)))
        assert answers[0] == answers[1]
        assert answers[1][0][0].version == version
    assert server.said == FILES * 2


def test_trained_adapter_is_handed_over_merged(tiny: LoadedModel, server: FakeFollower, wrapped: Any) -> None:
    follow(replace(tiny, model=wrapped), server).sync(1)
    assert has_weights_of(server, wrapped)


class OneTensorScaled(TrainingVllmEngine):
    def weights(self) -> Any:
        for name, weight in super().weights():
            yield name, weight * 1.01 if name == "model.layers.1.mlp.up_proj.weight" else weight


def one_layer_left_old(fake: FakeFollower) -> None:
    fake.drops = [name for name, _ in fake.model.named_parameters() if name.startswith("model.layers.1.")]


def tied_head_left_old(fake: FakeFollower) -> None:
    fake.model.lm_head.weight = torch.nn.Parameter(fake.model.lm_head.weight.detach().clone())


def cache_kept(fake: FakeFollower) -> None:
    fake.keeps_cache = True


@pytest.mark.parametrize("fault", [OneTensorScaled, one_layer_left_old, tied_head_left_old, cache_kept])
def test_trained_transfer_with_a_fault_is_refused(tiny: LoadedModel, server: FakeFollower, fault: Any) -> None:
    """After one small update, of which the fault keeps a part from the server."""
    kind = fault if isinstance(fault, type) else TrainingVllmEngine
    engine = follow(tiny, server, kind=kind)
    if kind is TrainingVllmEngine:
        engine.sync(0)
        fault(server)
    update(tiny.model)
    with refuses(EngineMismatch, "after 1 updates"):
        engine.sync(1)


def test_untied_folder_has_a_head_of_its_own(tiny: LoadedModel, tmp_path: Path) -> None:
    """A CPU's vLLM packs a head once, and a tied one not again; so it is given one of its own."""
    save_without_weights(tiny.model, tiny.tokenizer, tmp_path, untie=True)
    save_weights(untied(tiny.model, checkpoint_weights(tiny.model)), tmp_path, torch.float32, bytes_per_file=1 << 18)
    files = sorted(tmp_path.glob("model-*.safetensors"))
    stored = {name: weight for file in files for name, weight in load_file(file).items()}
    assert len(files) > 2
    assert torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])
    assert set(stored) == {name for name, _ in tiny.model.named_parameters(remove_duplicate=False)}
    assert '"tie_word_embeddings": false' in (tmp_path / "config.json").read_text()
    assert tiny.model.config.tie_word_embeddings


def test_trained_ids_without_a_text_are_masked_and_named_once(tiny: LoadedModel, server: FakeFollower) -> None:
    engine = follow(tiny, server)
    engine.num_tokens = 700
    engine.sync(0)
    for _ in range(2):
        engine.generate([[9]], [[1]], SAMPLING)
    assert server.bodies[-1]["logit_bias"] == {str(token): -100.0 for token in range(700, 768)}
    (notice,) = engine.take_warnings()
    assert notice.startswith("the model has 768 ids and its tokenizer text for 700; vLLM never samples the others")


# In a run.


def test_run_records_which_weights_sampled(tmp_path: Path) -> None:
    """With two updates a batch, the weights before the first of them."""
    evaluation = {"every": 3, "num_examples": 2, "max_tokens": 4}
    run(tmp_path / "own", one_layer_recipe("grpo", eval=evaluation, train={"ppo_epochs": 2, "steps": 4}))
    training, evaluations = recorded(tmp_path / "own")
    assert {(row.step, row.version) for row in training} == {(1, 0), (3, 2)}
    assert {(row.step, row.version) for row in evaluations} == {(0, 0), (3, 3), (4, 4)}


def test_run_with_a_server_has_the_versions_of_the_schedule(server: FakeFollower, tmp_path: Path) -> None:
    place = {"engine": {"name": "vllm", "url": server.url}}
    evaluation = {"every": 2, "num_examples": 2, "max_tokens": 4}
    model = {"name": shallow(2)}
    run(tmp_path / "run", make_recipe("grpo", model=model, rollout=place, eval=evaluation, train={"steps": 2}))
    rows, evaluations = recorded(tmp_path / "run")
    assert [row.version for row in rows] == [row.step - 1 for row in rows]
    assert {(row.step, row.version) for row in evaluations} == {(0, 0), (2, 2)}
    for step in steps_of(tmp_path / "run"):
        assert step["kl_sampler"] == approx(0.0, abs=1e-5)


@pytest.mark.slow
def test_run_starts_its_server_and_resumes_after_its_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake runs as a process in vLLM's place; it is killed before step 2 is sampled."""
    program = Path(__file__).parent / "fake_server_process.py"
    python = tmp_path / "python"
    path = os.pathsep.join(p for p in sys.path if p)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {sys.executable} {program} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("POSTTRAIN_VLLM", str(python))
    pids: list[int] = []

    class Killing(Events):
        def __call__(self, event: str, info: dict[str, Any]) -> None:
            super().__call__(event, info)
            if event == "step" and info["step"] == 1:
                pids.append(int((tmp_path / "run" / "pid").read_text()))
                os.kill(pids[0], signal.SIGKILL)

    recipe = make_recipe(
        "grpo", rollout={"engine": {"name": "vllm", "retries": 0, "timeout_seconds": 20}}, train={"steps": 3}
    )
    with refuses(RunFailure, "http://127.0.0.1"):
        watched(tmp_path / "run", recipe, Killing())
    assert len(steps_of(tmp_path / "run")) == 1
    assert run(tmp_path / "run", recipe, resume=True).step == 3
    rows = recorded(tmp_path / "run")[0]
    assert [(row.step, row.version) for row in rows] == [(s, s - 1) for s in (1, 2, 3) for _ in range(16)]
    last = int((tmp_path / "run" / "pid").read_text())
    assert not Path(f"/proc/{last}/cmdline").exists() or last == pids[0], "it ended with the run"


def test_run_without_a_server_for_evaluations_is_refused_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POSTTRAIN_VLLM", raising=False)
    events = Events()
    recipe = one_layer_recipe(
        "sft", eval={"every": 1, "num_examples": 2, "max_tokens": 4, "engine": "vllm"}, train={"steps": 1}
    )
    with refuses(UsageError, "POSTTRAIN_VLLM", "remove eval.engine"):
        watched(tmp_path / "run", recipe, events)
    assert events.of("step") == []


# What goes wrong.


def test_trained_server_without_the_routes_error_explains_how_to_start(tiny: LoadedModel) -> None:
    with (
        FakeVllm(model_answer(tiny.model, "processed")) as plain,
        refuses(RunFailure, "/pause: HTTP 404", "serve-command --follows"),
    ):
        follow(tiny, plain).sync(0)


@pytest.mark.parametrize("route", [FILES[1], FILES[-1]])
def test_trained_route_that_fails_is_named(tiny: LoadedModel, server: FakeFollower, route: str) -> None:
    server.refuses = route
    with pytest.raises(RunFailure, match=f"{server.url}: {route}: .*not today"):
        follow(tiny, server).sync(0)


def test_trained_weight_of_another_shape_is_refused(tiny: LoadedModel, server: FakeFollower) -> None:
    server.model.model.norm.weight = torch.nn.Parameter(torch.ones(3))
    with refuses(RunFailure, "be handed over", "size of tensor"):
        follow(tiny, server, kind=ByQueue).sync(0)


def test_trained_weights_of_somebody_else_are_refused(tiny: LoadedModel, server: FakeFollower) -> None:
    engine = follow(tiny, server)
    engine.sync(0)
    server.label = "another run:7"
    with refuses(RunFailure, "0'"):
        engine.generate([[9]], [[1]], Sampling(max_tokens=2))


def test_run_with_truncated_sampling_is_refused_by_a_server_that_returns_no_sets(tmp_path: Path) -> None:
    for cut in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        with refuses(RecipeError, f"rollout.{next(iter(cut))}", "'grpo'", "rollout.engine.sampling_mask: true"):
            run(tmp_path / "refused", make_recipe("grpo", rollout=cut | {"engine": "vllm"}))


def test_run_with_truncated_sampling_and_masks_of_the_server_follows_its_sets(tmp_path: Path) -> None:
    """Weights go over, greedy evaluations too, and each update begins at ratio 1 over the server's sets."""
    for name, cut in (("top_p", {"top_p": 0.8}), ("all", {"top_k": 9, "min_p": 0.01, "repetition_penalty": 1.1})):
        folder = tmp_path / name
        with FakeFollower(load_model(ModelSection(name=shallow(1)), seed=0).model, masks=True) as fake:
            engine = {"name": "vllm", "url": fake.url, "sampling_mask": True}
            evaluation = {"every": 2, "num_examples": 2, "max_tokens": 6}
            recipe = one_layer_recipe("grpo", rollout=cut | {"engine": engine}, train={"steps": 2}, eval=evaluation)
            read = read_run(folder, recipe)
        assert read.violated == {}
        first, second = steps_of(folder)
        for step in (first, second):
            assert step["ratio_distance"] == approx(0.0, abs=OF_EMBEDDED / 8)
            assert 1.0 < step["kept_tokens"] < 768
        asked = [body["sampling_params"] for body in fake.bodies if "sampling_params" in body]
        assert len(asked) == 2 * 16
        assert {body["top_k"] for body in asked} == {cut.get("top_k", 512)}
        assert {body["top_p"] for body in asked} == {cut.get("top_p", 1.0)}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda choice: choice | {"sampling_mask": None}, "--return-sampling-mask"),
        (lambda choice: choice | {"sampling_mask": choice["sampling_mask"][1:]}, "sets of kept tokens"),
        (lambda choice: choice | {"sampling_mask": [[767] for _ in choice["token_ids"]]}, "outside of its set"),
        (lambda choice: choice | {"sampling_mask": [[*one, one[0]] for one in choice["sampling_mask"]]}, "twice"),
        (lambda choice: choice | {"sampling_mask": [list(range(768))] * len(choice["token_ids"])}, "more than"),
        (lambda choice: choice | {"logprobs": None}, "log-probabilities"),
        (lambda choice: choice | {"sampling_mask": [[*one, 10_000] for one in choice["sampling_mask"]]}, "10000"),
    ],
)
def test_answer_with_sets_that_do_not_fit_is_refused(tiny: LoadedModel, change: Any, named: str) -> None:
    def changed(content: dict[str, Any]) -> dict[str, Any]:
        return content | {"choices": [change(content["choices"][0])]}

    with FakeFollower(tiny.model, masks=True, change_tokens=changed) as fake:
        engine = follow(tiny, fake, where="rollout.engine", sampling_mask=True)
        with refuses((UsageError, RunFailure), named):
            engine.generate([[9]], [[1]], Sampling(4, top_p=0.9, keeps_sets=True))


def test_server_without_the_endpoint_of_masks_says_how_to_start_it(tiny: LoadedModel, server: FakeFollower) -> None:
    engine = follow(tiny, server, where="rollout.engine", sampling_mask=True)
    with refuses(UsageError, "/inference/v1/generate", "--return-sampling-mask", "--enable-scale-out"):
        engine.generate([[9]], [[1]], Sampling(4, top_p=0.9, keeps_sets=True))


def test_server_with_masks_answers_greedily_and_from_the_whole_distribution(tiny: LoadedModel) -> None:
    with FakeFollower(tiny.model, masks=True) as fake:
        engine = follow(tiny, fake, where="eval.engine", sampling_mask=True)
        ((greedy,),) = engine.generate([[9, 10]], [[1]], Sampling(6, temperature=0.0))
        ((drawn,),) = engine.generate([[9, 10]], [[1]], Sampling(6, temperature=1.0))
        ((expected,),) = NativeEngine(tiny.model).generate([[9, 10]], [[1]], Sampling(6, temperature=0.0))
    assert greedy.ids == expected.ids
    assert all(map(math.isnan, greedy.logprobs))
    assert all(-50 < value <= 0 for value in drawn.logprobs)


@pytest.mark.parametrize("rules", [{"min_tokens": 4}, {"repetition_penalty": 1.2}])
def test_run_under_rules_of_sampling_on_a_server_has_ratio_one(tmp_path: Path, rules: dict[str, Any]) -> None:
    with FakeFollower(load_model(ModelSection(name=shallow(1)), seed=0).model) as fake:
        rollout = rules | {"engine": {"name": "vllm", "url": fake.url}}
        read = read_run(tmp_path, one_layer_recipe("grpo", rollout=rollout, train={"steps": 1}))
    assert read.violated == {}
    (only,) = steps_of(tmp_path)
    assert only["ratio_distance"] == approx(0.0, abs=OF_EMBEDDED / 8)


def test_trained_truncated_rollouts_are_refused_and_truncated_evaluations_have_no_logprobs(
    tiny: LoadedModel, server: FakeFollower
) -> None:
    cut = Sampling(4, top_k=5)
    with refuses(UsageError, "top_k", "top_p"):
        follow(tiny, server, where="rollout.engine").generate([[9]], [[1]], cut)
    ((one,),) = follow(tiny, server, where="eval.engine").generate([[9]], [[1]], cut)
    assert all(map(math.isnan, one.logprobs))


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"gpus": [-1]}, "rollout.engine.gpus"),
        ({"timeout_seconds": 0}, "rollout.engine.timeout_seconds"),
        ({"servers": 2}, "rollout.engine.servers"),
    ],
)
def test_engine_options_that_cannot_be_are_refused(engine: dict[str, Any], message: str) -> None:
    with refuses(RecipeError, message):
        registry.find("engine", "vllm").options(engine, "rollout.engine")


class CountingGroup(NcclGroup):
    """A group whose server answers everything, and that counts what it sends."""

    def __init__(self) -> None:
        self.timeout_seconds = 30.0
        self.server = HttpServer("http://127.0.0.1:9", timeout_seconds=1.0, retries=0)
        self.sent = 0

    def broadcast(self, tensors: Iterator[torch.Tensor]) -> None:
        self.sent = len(list(tensors))


@pytest.mark.parametrize("missing", [0, 1])
def test_weights_that_are_fewer_than_announced_are_not_taken_for_all(
    missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.sampling.vllm.following.control", lambda *_words: None)
    group = CountingGroup()
    announced = [("a", torch.Size([2])), ("b", torch.Size([3]))]
    weights = [(name, torch.zeros(size)) for name, size in announced][: 2 - missing]
    if missing:
        with refuses(RunFailure, "a worker was lost"):
            group.send(iter(weights), torch.float32, announced)
    else:
        group.send(iter(weights), torch.float32, announced)
        assert group.sent == 2
