"""The auxiliary loss of routers, over all tokens of an update: transformers' own number and gradient, in any split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from closeness import approx, assert_close, rounding
from posttrain.algorithms.aggregation import token_mean
from posttrain.algorithms.objectives.supervised import cross_entropy
from posttrain.errors import RecipeError
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.packing import pack
from posttrain.models.forward.routing.routers import RouterSums, configured_coefficient, find_routers, rows_of_tokens
from posttrain.recipes.sections import TrainSection
from posttrain.training.parts.balancing import RouterBalancing, build_balancing
from posttrain.training.step import Method, accumulate
from posttrain.types import Batch, Sample, collate
from refusing import refuses
from small_runs import make_recipe, run, same_bits, saved_tensors, steps_of

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "decoder_sparse_step": 1, "max_position_embeddings": 64, "pad_token_id": 0,
    "output_router_logits": True, "router_aux_loss_coef": 0.3,
}  # fmt: skip
# transformers adds up in fp32, whatever the weights are: at most 4 experts times as many terms of size 1.
# (its norms and routers compute in fp32, too, so that two orders of a sum in float64 round differently there)
OF_TRANSFORMERS = rounding(torch.float32, size=4.0, terms=64)


def random_model(kind: str = "qwen3_moe") -> Any:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[kind](**SIZES), dtype=torch.float64, experts_implementation="eager"
    ).eval()  # grouped products have no float64
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate" in name or "router" in name:
                parameter.mul_(40)  # routers that prefer some experts
    return model


def rows(shared: bool = True) -> Batch:
    generator = torch.Generator().manual_seed(1)
    samples = []
    prompt = torch.randint(1, 61, (5,), generator=generator).tolist()
    for index, length in enumerate((7, 4, 9, 2, 6)):
        start = prompt if shared and index < 3 else torch.randint(1, 61, (3,), generator=generator).tolist()
        answer = torch.randint(1, 61, (length,), generator=generator).tolist()
        mask = [False] * len(start) + [True] * length
        samples.append(Sample(start + answer, mask, group=0 if shared and index < 3 else index, prefix=len(start)))
    return collate(samples)


def method_of(model: Any, coefficient: float, path: str = "packed") -> Method:
    forward = Forward(model)
    if path == "padded":
        forward.path = "padded"
    routers = find_routers(model)
    assert routers is not None
    return Method(forward, cross_entropy, token_mean, balancing=RouterBalancing(forward, routers, coefficient))


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def whole_loss(model: Any, batch: Batch) -> Tensor:
    """transformers' own, over the padded rows at once."""
    columns = torch.arange(batch.tokens.shape[1])
    filled = (columns[None, :] < batch.lengths[:, None]).long()
    labels = torch.where(batch.mask, batch.tokens, torch.full_like(batch.tokens, -100))
    model.config._attn_implementation = "sdpa"
    return model(input_ids=batch.tokens, attention_mask=filled, labels=labels, output_router_logits=True).loss


@pytest.mark.parametrize("path", ["packed", "padded"])
def test_loss_and_gradient_are_those_of_transformers(path: str) -> None:
    model = random_model()
    batch = rows()
    expected = whole_loss(model, batch)
    expected.backward()
    theirs = gradients(model)
    loss, metrics = accumulate(method_of(model, 0.3, path), batch, TrainSection(micro_batch_rows=2))
    assert loss == approx(float(expected.detach()), abs=OF_TRANSFORMERS)
    without, _ = accumulate(method_of(model, 0.0, path), batch, TrainSection(), learns=False)
    assert loss - without == approx(0.3 * metrics["router_aux_loss"], abs=2 * OF_TRANSFORMERS)  # two losses
    assert abs(metrics["router_aux_loss"] - 2.0) > 1e-3, "k = 2 is what balanced routers have"
    assert 1.0 < metrics["router_max_load"] <= 2.0
    ours = gradients(model)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert_close(ours[name], gradient, atol=OF_TRANSFORMERS, rtol=0)
    assert float(theirs["model.layers.0.mlp.gate.weight"].abs().max()) > 100 * OF_TRANSFORMERS


def test_no_split_and_no_shared_prompt_changes_the_gradient() -> None:
    model = random_model()
    batch = rows()
    found = []
    for options, path in (({"micro_batch_rows": 1}, "packed"), ({}, "packed"), ({"micro_batch_rows": 2}, "padded")):
        loss, metrics = accumulate(method_of(model, 0.3, path), batch, TrainSection(**options))
        found.append((loss, metrics["router_aux_loss"], gradients(model)))
    for loss, auxiliary, own in found[1:]:
        assert loss == approx(found[0][0], abs=OF_TRANSFORMERS)
        assert auxiliary == approx(found[0][1], abs=OF_TRANSFORMERS)
        for name, gradient in own.items():
            assert_close(gradient, found[0][2][name], atol=OF_TRANSFORMERS, rtol=0)


@pytest.mark.parametrize("kind", ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe"])
def test_every_family_has_the_number_of_its_own_library(kind: str) -> None:
    model = random_model(kind)
    batch = rows(shared=False)
    with torch.no_grad():
        expected = float(whole_loss(model, batch))
    loss, _ = accumulate(method_of(model, 0.3, "padded"), batch, TrainSection())
    assert loss == approx(expected, abs=OF_TRANSFORMERS)
    assert configured_coefficient(model) == 0.3


def test_auxiliary_loss_by_hand() -> None:
    """Two experts, three tokens sent to the first and one to the second, with probabilities 0.75 and 0.25."""
    sums = RouterSums(torch.tensor([3.0, 1.0]), torch.tensor([3.0, 1.0]), torch.tensor(4.0))
    assert float(sums.auxiliary_loss(sums)) == approx(2 * (0.75 * 0.75 + 0.25 * 0.25))
    half = RouterSums(torch.tensor([2.0, 0.0]), torch.tensor([1.5, 0.5]), torch.tensor(2.0))
    rest = RouterSums(torch.tensor([1.0, 1.0]), torch.tensor([1.5, 0.5]), torch.tensor(2.0))
    assert float(half.auxiliary_loss(sums) + rest.auxiliary_loss(sums)) == approx(float(sums.auxiliary_loss(sums)))


def test_a_token_of_a_shared_prompt_stands_for_its_rows() -> None:
    batch = rows()
    counts = rows_of_tokens(pack(batch, keeps_last=True))
    assert int(counts.sum()) == int(batch.lengths.sum())
    assert sorted(set(counts.tolist())) == [0, 1, 3]


def test_a_model_without_routers_is_refused_where_the_recipe_asks() -> None:
    with refuses(RecipeError, "train.router_aux_loss_coef", "Qwen3ForCausalLM"):
        from posttrain.training.build import prepare

        prepare(make_recipe("sft", train={"router_aux_loss_coef": 0.01}))


def test_the_models_configuration_asks_for_it_unless_the_recipe_does() -> None:
    model = random_model()
    forward = Forward(model)
    for given, expected in ((None, 0.3), (0.1, 0.1)):
        balancing = build_balancing(given, forward)
        assert balancing is not None
        assert balancing.coefficient == expected
    assert build_balancing(0.0, forward, sharding="fsdp2") is None
    with refuses(RecipeError, "scale.sharding", "train.router_aux_loss_coef"):
        build_balancing(None, forward, sharding="fsdp2")
    model.config.output_router_logits = False
    assert build_balancing(None, forward) is None


def moe_recipe(**train: Any) -> Any:
    left_out = ("vocab_size", "pad_token_id", "output_router_logits", "head_dim", "num_local_experts")
    config = {key: value for key, value in SIZES.items() if key not in left_out}
    config |= {"max_position_embeddings": 512, "router_aux_loss_coef": 0.001}
    init = {"architecture": "qwen3_moe", "config": config, "tokenizer": {"num_documents": 50, "vocab_size": 280}}
    return make_recipe("sft", model={"init": init}, train={"steps": 3, "lr": 1e-2} | train)


def test_a_run_balances_and_resumes_to_the_bit(tmp_path: Path) -> None:
    recipe = moe_recipe(router_aux_loss_coef=1.0, micro_batch_rows=2)
    run(tmp_path / "whole", recipe)
    run(tmp_path / "cut", recipe, stop_after=1)
    run(tmp_path / "cut", recipe, resume=True)
    run(tmp_path / "without", moe_recipe(micro_batch_rows=2))
    ours = saved_tensors(tmp_path / "whole", 3)
    assert same_bits(ours, saved_tensors(tmp_path / "cut", 3))
    assert not same_bits(ours, saved_tensors(tmp_path / "without", 3))
    steps = steps_of(tmp_path / "whole")
    assert all(1.5 < step["router_aux_loss"] < 4.0 for step in steps), "about k, at most E"
    assert "router_aux_loss" not in steps_of(tmp_path / "without")[0]
    assert steps[0]["loss"] > steps_of(tmp_path / "without")[0]["loss"] + 1.4
