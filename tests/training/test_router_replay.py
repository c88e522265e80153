"""Router replay: the trainer routes as the sampler did, with gate weights and gradients of its own routers."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from closeness import allclose, approx, rounding
from posttrain.algorithms.aggregation import token_mean
from posttrain.algorithms.objectives.policy_gradient import reinforce
from posttrain.errors import CheckpointError, RecipeError
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.packing import pack
from posttrain.models.forward.routing.replay import ExpertRecorder, find_replay, sigmoid_gate
from posttrain.models.forward.routing.routers import find_routers
from posttrain.recipes.sections import TrainSection
from posttrain.sampling.base import Reply, Sampling
from posttrain.sampling.native.engine import NativeEngine
from posttrain.training.build import prepare
from posttrain.training.parts.balancing import RouterBalancing
from posttrain.training.sources import stored
from posttrain.training.step import Method, accumulate
from posttrain.types import Batch, Completion, ExpertChoices, Sample, collate
from refusing import refuses
from small_runs import make_recipe, run, same_bits, saved_tensors, steps_of, untimed

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 6, "num_local_experts": 6,
    "num_experts_per_tok": 2, "decoder_sparse_step": 1, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
OF_SIGMOIDS = {
    "n_routed_experts": 6, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 0,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
# Routers compute probabilities in fp32 whatever the weights are; two layers and a sum of 12 x 16 products follow.
OF_ROUTERS = rounding(torch.float32, size=4.0, terms=200)


def random_model(kind: str = "qwen3_moe", dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    sizes = SIZES | options
    if kind in ("deepseek_v3", "glm4_moe"):
        sizes |= OF_SIGMOIDS
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[kind](**sizes), dtype=dtype, experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3
            if "gate.weight" in name or "router" in name:
                spread = 1.0
            parameter.add_(spread * torch.randn_like(parameter))
    return model


def rows(experts: str = "none", shared: bool = True, model: Any = None) -> Batch:
    """Five rows, of which three share a prompt. Experts: ``random``, ``own`` (the model's), or ``none``."""
    numbers = torch.Generator().manual_seed(1)
    samples = []
    prompt = torch.randint(1, 61, (5,), generator=numbers).tolist()
    prompt_ids = distinct((len(prompt), 2), numbers)
    for index, length in enumerate((7, 4, 9, 2, 6)):
        in_group = shared and index < 3
        start = prompt if in_group else torch.randint(1, 61, (3,), generator=numbers).tolist()
        ids = start + torch.randint(1, 61, (length,), generator=numbers).tolist()
        mask = [False] * len(start) + [True] * length
        advantages = torch.randn(len(ids), generator=numbers).tolist()
        chosen = distinct((len(ids) - 1, 2), numbers)
        if in_group:
            chosen[: len(prompt)] = prompt_ids
        if experts == "own":
            chosen = own_choices(model, ids)[:-1]
        given = ExpertChoices.of(chosen) if experts != "none" else None
        group = 0 if in_group else index
        samples.append(Sample(ids, mask, group, len(start), {"advantages": advantages}, experts=given))
    return collate(samples)


def distinct(shape: tuple[int, int], numbers: torch.Generator) -> Tensor:
    """Two different experts of six for each position and router, ``int16 [positions, routers, 2]``."""
    return torch.rand((*shape, 6), generator=numbers).argsort(dim=-1)[..., :2].to(torch.int16)


def own_choices(model: Any, ids: list[int]) -> Tensor:
    """What the model chooses for a row, by its plain forward pass: ``int16 [len(ids), routers, k]``."""
    recorder = ExpertRecorder(find_replay(model).routers)
    with torch.no_grad(), recorder.recording():
        model(input_ids=torch.tensor([ids]), use_cache=False)
    return recorder.take()


def replaying(model: Any, path: str = "packed") -> Forward:
    forward = Forward(model)
    assert forward.path == "packed"
    if path == "padded":
        forward.path = "padded"
    forward.replay = find_replay(model)
    return forward


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def trained(forward: Forward, batch: Batch, **options: Any) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    method = Method(forward, reinforce, token_mean)
    loss, metrics = accumulate(method, batch, TrainSection(**options))
    return loss, metrics, gradients(forward.model)


KINDS = ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "granitemoe", "deepseek_v3", "glm4_moe"]
PATHS = ["packed", "padded"]


@pytest.mark.parametrize(("kind", "path"), [("gpt_oss", "padded"), *((kind, path) for kind in KINDS for path in PATHS)])
def test_replay_of_the_models_own_choice_is_the_plain_pass_to_the_bit(kind: str, path: str) -> None:
    model = random_model(kind)
    forward = Forward(model)
    assert forward.path == "packed" or kind == "gpt_oss"
    forward.path = path  # type: ignore[assignment]
    batch = rows("own", model=model)
    expected = trained(forward, replace(batch, experts=None))
    forward.replay = find_replay(model)
    loss, metrics, found = trained(forward, batch)
    assert loss == expected[0]
    assert metrics["routing_mismatch"] == 0.0
    assert found.keys() == expected[2].keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[2][name]), name


def moe_layer(block: Any, states: Tensor, ids: Tensor, renormalizes: bool) -> Tensor:
    """A layer of experts, token by token and from its definition; no part of the library's own forward pass."""
    outputs = []
    for state, chosen in zip(states, ids.tolist(), strict=True):
        logits = block.gate.weight @ state
        likely = logits.exp() / logits.exp().sum()
        whole = sum(likely[expert] for expert in chosen) if renormalizes else 1.0
        total = torch.zeros_like(state)
        for expert in chosen:
            gate, up = (block.experts.gate_up_proj[expert] @ state).chunk(2)
            hidden = F.silu(gate) * up
            total = total + likely[expert] / whole * (block.experts.down_proj[expert] @ hidden)
        outputs.append(total)
    return torch.stack(outputs)


def reference(model: Any, batch: Batch, renormalizes: bool) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients row by row, with every layer of experts computed by ``moe_layer``."""
    assert batch.experts is not None
    model.config._attn_implementation = "sdpa"
    total = torch.zeros((), dtype=torch.float64)
    count = int(batch.mask.sum())
    for row in range(batch.num_rows):
        length = int(batch.lengths[row])
        tokens = batch.tokens[row : row + 1, : length - 1]
        for place, layer in enumerate(model.model.layers):
            ids = batch.experts[row, : length - 1, place]
            layer.mlp.forward = lambda states, block=layer.mlp, ids=ids: moe_layer(block, states[0], ids, renormalizes)[
                None
            ]
        logprobs = model(input_ids=tokens, use_cache=False).logits[0].log_softmax(-1)
        for layer in model.model.layers:
            del layer.mlp.forward
        for t in range(1, length):
            if batch.mask[row, t]:
                weight = batch.field("advantages")[row, t].double()
                total = total - weight * logprobs[t - 1, batch.tokens[row, t]] / count
    total.backward()
    return float(total.detach()), gradients(model)


@pytest.mark.parametrize("path", ["packed", "padded"])
@pytest.mark.parametrize("renormalizes", [True, False])
def test_replay_of_other_experts_has_the_gradient_of_a_float64_reference(path: str, renormalizes: bool) -> None:
    model = random_model(norm_topk_prob=renormalizes)
    batch = rows("random")
    expected, slopes = reference(model, batch, renormalizes)
    loss, metrics, found = trained(replaying(model, path), batch, micro_batch_rows=2)
    assert loss == approx(expected, abs=OF_ROUTERS)
    assert metrics["routing_mismatch"] > 0.7, "14 of 15 pairs differ by chance"
    assert found.keys() == slopes.keys()
    for name, gradient in slopes.items():
        size = max(1.0, float(gradient.abs().max()))
        assert allclose(found[name], gradient, atol=size * OF_ROUTERS, rtol=0), name
    assert float(slopes["model.layers.0.mlp.gate.weight"].abs().max()) > 1e-3, "no zeros for experts outside of top-k"


def test_no_split_and_no_shared_prompt_changes_the_gradient() -> None:
    model = random_model()
    batch = rows("random")
    assert batch.experts is not None
    batch.experts[1, 2] = batch.experts[1, 2].flip(-1) + 1  # a row whose prompt was routed otherwise in its group
    batch.experts %= 6
    assert len(pack(batch).runs) == 6, "a shared prompt of two rows, and five rows"
    found = []
    for options, path in (({"micro_batch_rows": 1}, "packed"), ({}, "packed"), ({"micro_batch_rows": 2}, "padded")):
        found.append(trained(replaying(model, path), batch, **options))
    for loss, metrics, own in found[1:]:
        assert loss == approx(found[0][0], abs=OF_ROUTERS)
        assert metrics["routing_mismatch"] == approx(found[0][1]["routing_mismatch"])
        for name, gradient in own.items():
            assert allclose(gradient, found[0][2][name], atol=OF_ROUTERS, rtol=0), name


@pytest.mark.parametrize("path", ["packed", "padded"])
def test_recomputed_layers_are_routed_alike(path: str) -> None:
    model = random_model()
    batch = rows("random")
    plain = trained(replaying(model, path), batch)
    again = trained(replaying(model, path), batch, gradient_checkpointing=True)
    assert again[0] == plain[0]
    assert again[1]["routing_mismatch"] == plain[1]["routing_mismatch"]
    for name, gradient in plain[2].items():
        assert torch.equal(again[2][name], gradient), name


def test_sigmoid_gates_by_hand() -> None:
    """Logits 0 and log 3 have sigmoids 1/2 and 3/4; renormalized 2/5 and 3/5, times 2.5."""
    logits = torch.tensor([[0.0, 3.0, torch.tensor(3.0).log()]])

    class Router:
        norm_topk_prob = True
        routed_scaling_factor = 2.5

    weights = sigmoid_gate(Router(), logits, torch.tensor([[0, 2]]))
    assert weights[0].tolist() == approx([1.0, 1.5])


def test_balancing_counts_the_experts_that_were_used() -> None:
    model = random_model(output_router_logits=True)
    batch = rows("random", shared=False)
    assert batch.experts is not None
    batch.experts[batch.experts >= 0] = 0
    batch.experts[..., 1][batch.experts[..., 1] >= 0] = 1
    forward = replaying(model)
    routers = find_routers(model)
    assert routers is not None
    method = Method(forward, reinforce, token_mean, balancing=RouterBalancing(forward, routers, 0.1))
    _, metrics = accumulate(method, batch, TrainSection())
    # 5 last tokens of 43 choose by themselves; the others use two experts of six, so these have 3 times the mean load.
    assert metrics["router_max_load"] == approx(3.0, abs=3.0 * 5 / 43)
    assert metrics["router_max_load"] > 2.6


class EchoesTwice:
    """Replies with two tokens to each of three turns."""

    def __init__(self) -> None:
        self.turns: dict[tuple[int, int], int] = {}

    def hear(self, prompt: int, sample: int, turn: Any, finish: Any) -> None:
        self.turns[prompt, sample] = self.turns.get((prompt, sample), 0) + 1

    def reply(self, prompt: int, sample: int) -> Reply:
        if self.turns[prompt, sample] == 3:
            return Reply(finish="ended")
        return Reply((7 + prompt, 9))


@pytest.mark.parametrize("slots", [2, 64])
@pytest.mark.parametrize("takes_turns", [False, True])
def test_sampler_records_the_experts_of_prompts_and_answers(slots: int, takes_turns: bool) -> None:
    model = random_model(dtype=torch.float32)
    engine = NativeEngine(model, slots=slots)
    prompts = [[5, 6, 7, 8], [9], [3, 2, 4, 4, 5, 6]]
    keys = [[11, 12, 13], [21, 22], [31, 32, 33]]
    sampling = Sampling(9, stop_ids=frozenset(range(20)), keeps_experts=True)
    if takes_turns:
        limits = replace(sampling, max_tokens=30, max_turn_tokens=6)
        groups = engine.converse(prompts, keys, limits, EchoesTwice())
    else:
        groups = engine.generate(prompts, keys, sampling)
    lengths = set()
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            assert completion.experts is not None
            expected = own_choices(model, [*prompt, *completion.ids])[:-1]
            assert torch.equal(completion.experts.tensor(), expected)
            lengths.add(len(completion.ids))
    assert len(lengths) > 2, "rows that end at different steps"
    without = engine.generate(prompts, keys, replace(sampling, keeps_experts=False))
    assert without[0][0].experts is None


def moe_recipe(kind: str = "qwen3_moe", **changes: Any) -> Any:
    left_out = ("vocab_size", "pad_token_id", "num_local_experts")
    config = {key: value for key, value in SIZES.items() if key not in left_out}
    config |= {"max_position_embeddings": 512, "initializer_range": 0.3}
    if kind == "qwen3":
        config = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    init = {"architecture": kind, "config": config, "tokenizer": {"num_documents": 50, "vocab_size": 280}}
    rollout = {"router_replay": True} | changes.pop("rollout", {})
    usual = {"rewards": ["small_runs:vowel_share"], "model": {"init": init}, "rollout": rollout}
    return make_recipe("grpo", **(usual | changes))


def with_other_sampler(parts: Any, noise: float = 0.05) -> Any:
    """Let the engine sample with noise on its routers alone, as a sampler that rounds otherwise."""
    model = copy.deepcopy(parts.model)
    numbers = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for router in find_replay(model).routers:
            weight: Any = router.weight
            weight.add_(noise * torch.randn(weight.shape, generator=numbers))
    parts.engine.model = model
    return parts


def test_old_policy_replays_a_samplers_routing_and_the_reference_does_not() -> None:
    recipe = moe_recipe(rollout={"old_logprobs": "trainer"}, regularize={"kl_coef": 0.1})
    parts = with_other_sampler(prepare(recipe))
    batch = parts.source(1).batch
    forward = parts.method.forward
    with torch.no_grad():
        replayed = forward(batch)
        plain = forward(replace(batch, experts=None))
    bound = rounding(torch.float32, size=10.0, terms=100)
    mask = batch.mask
    assert float((replayed.logprobs - plain.logprobs)[mask].abs().max()) > 100 * bound
    assert allclose(batch.field("old_logprobs"), replayed.logprobs, atol=bound, rtol=0)
    assert allclose(batch.field("ref_logprobs"), plain.logprobs, atol=bound, rtol=0)
    assert 0.0 < float(replayed.rerouted[mask].mean()) < 1.0
    assert plain.rerouted is None
    _, metrics = accumulate(parts.method, batch, recipe.train)
    assert metrics["ratio_distance"] == approx(0.0, abs=bound)


def test_replay_brings_the_trainer_nearer_to_a_sampler_that_routes_otherwise() -> None:
    """Gate weights still differ by the noise; the choice of experts does not."""
    gaps = []
    for replays in (True, False):
        recipe = moe_recipe(rollout={"router_replay": replays, "num_prompts": 8})
        parts = with_other_sampler(prepare(recipe))
        batch = parts.source(1).batch
        assert (batch.experts is not None) == replays
        _, metrics = accumulate(parts.method, batch, recipe.train)
        gaps.append(metrics["kl_sampler"])
        assert ("routing_mismatch" in metrics) == replays
    assert gaps[0] < gaps[1] / 2


@pytest.mark.parametrize(
    "changes",
    [
        {"train": {"steps": 4, "num_minibatches": 2, "save_every": 1, "lr": 1e-2}},
        {"train": {"steps": 4, "lr": 1e-2}, "rollout": {"staleness": 1}},
    ],
    ids=["minibatches", "ahead"],
)
def test_run_with_replay_stopped_and_resumed_equals_undisturbed(tmp_path: Path, changes: dict[str, Any]) -> None:
    recipe = moe_recipe(**changes)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(whole, recipe)
    run(cut, recipe, stop_after=3)
    run(cut, recipe, resume=True)
    assert same_bits(saved_tensors(whole, 4), saved_tensors(cut, 4))
    assert untimed(cut) == untimed(whole)
    steps = steps_of(whole)
    assert steps[0]["routing_mismatch"] == 0.0
    assert steps[1]["routing_mismatch"] > 0.0, "weights moved, so their own choice differs"
    rollout = {"router_replay": False} | changes.get("rollout", {})
    run(tmp_path / "without", moe_recipe(**(changes | {"rollout": rollout})))
    assert not same_bits(saved_tensors(whole, 4), saved_tensors(tmp_path / "without", 4))


def test_critic_of_ppo_runs_with_replay(tmp_path: Path) -> None:
    for trunk in ("shared", "separate"):
        recipe = moe_recipe(
            objective={"name": "ppo"},
            advantage={"name": "gae"},
            head={"trunk": trunk},
            train={"steps": 2, "lr": 1e-2, "num_minibatches": 2},
        )
        run(tmp_path / trunk, recipe)
        first, second = steps_of(tmp_path / trunk)
        assert first["ratio_distance"] == approx(0.0, abs=1e-5)
        assert second["routing_mismatch"] > 0.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rollout": {"engine": {"name": "scripted", "texts": ["1"]}}}, ["rollout.router_replay", "scripted"]),
        ({"rollout": {"engine": {"name": "vllm"}}}, ["rollout.router_replay", "vllm"]),
        ({"kind": "qwen3"}, ["rollout.router_replay", "qwen3"]),
        ({"scale": {"processes": 2, "sharding": "fsdp2"}}, ["rollout.router_replay", "sharded"]),
    ],
)
def test_replay_that_cannot_be_done_is_refused_by_name(
    changes: dict[str, Any], named: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any) -> Any:
        raise AssertionError("no model is loaded")

    monkeypatch.setattr("posttrain.training.build.build_models", never)
    with refuses(RecipeError, *named):
        prepare(moe_recipe(**changes))


def test_unknown_routers_are_refused_by_their_class(monkeypatch: pytest.MonkeyPatch) -> None:
    with refuses(RecipeError, "rollout.router_replay", "PhimoeTopKRouter"):
        find_replay(random_model("phimoe", hidden_act="silu"))
    with refuses(RecipeError, "rollout.router_replay", "Qwen3ForCausalLM"):
        find_replay(random_model("qwen3"))
    model = random_model()
    router = find_replay(model).routers[0]
    plain = router.forward
    monkeypatch.setattr(router, "forward", lambda states: (plain(states)[0], 2 * plain(states)[1], plain(states)[2]))
    with refuses(RecipeError, "rollout.router_replay", "Qwen3MoeTopKRouter"):
        find_replay(model)


def test_objective_that_does_not_follow_the_sampler_routes_by_itself() -> None:
    parts = prepare(moe_recipe(objective="cross_entropy", advantage=None, aggregate="token_mean"))
    assert parts.source(1).batch.experts is None
    assert any("rollout.router_replay" in line for line in parts.warnings)


@pytest.mark.parametrize(
    "damage", [lambda x: x + 6, lambda x: x.long(), lambda x: x[:, 1:], lambda x: x[..., :1], lambda x: x - 5, None]
)
def test_rollout_buffer_with_experts_that_do_not_fit_is_refused(damage: Any) -> None:
    source: Any = prepare(moe_recipe(train={"num_minibatches": 2, "steps": 2})).source
    source(1)
    tensors = source.rollout_buffer(1)
    source.restore(tensors, {}, 768)
    if damage is None:
        del tensors["experts"]
    else:
        tensors["experts"] = damage(tensors["experts"])
    with refuses(CheckpointError, "rollout_buffer.safetensors"):
        source.restore(tensors, {}, 768)


@pytest.mark.parametrize(
    "damage", [{"ids": "AAA="}, {"ids": "no base64"}, {"num_positions": 3}, {"top_k": 1}, {"num_routers": -2}, None]
)
def test_batches_ahead_with_experts_that_do_not_fit_are_refused(damage: Any) -> None:
    source: Any = prepare(moe_recipe(rollout={"staleness": 1})).source
    drawn = source.draw(1, 0)
    good = stored.write_drawn(drawn) | {"batch": 0}
    stored.check_written(good, source, 768)
    again = stored.read_drawn(good, source)
    assert again.sampled[0][0].completion == drawn.sampled[0][0].completion
    completion = good["sampled"][0][0]["completion"]  # type: ignore[index]
    completion["experts"] = None if damage is None else completion["experts"] | damage
    with pytest.raises((ValueError, TypeError)):
        read_checked(good, source)


def test_batch_ahead_with_an_answer_that_failed_before_it_began_is_read() -> None:
    source: Any = prepare(moe_recipe(rollout={"staleness": 1})).source
    drawn = source.draw(1, 0)
    drawn.sampled[0][0].completion = Completion((), (), "environment_failed", 0, ())
    again = read_checked(stored.write_drawn(drawn) | {"batch": 0}, source)
    assert again.sampled[0][0].completion.experts is None
    assert again.sampled[0][1].completion == drawn.sampled[0][1].completion


def read_checked(written: Any, source: Any) -> Any:
    stored.check_written(written, source, 768)
    return stored.read_drawn(written, source)
