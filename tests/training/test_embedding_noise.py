"""NEFTune: noise of a row on its embeddings, in updates alone, whatever the split and the packing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from closeness import approx, assert_close, rounding
from posttrain.cli import main
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.noise import EmbeddingNoise, NoisyRows, added_to
from posttrain.training.build import prepare
from posttrain.training.step import accumulate, noise_of
from posttrain.types import Batch
from small_runs import make_recipe, run, same_bits, saved_tensors, shallow

ALPHA = 5.0
# The model's norms compute in fp32 whatever its weights are; sums of them in float64 have other orders.
OF_NORMS = rounding(torch.float32, size=7.0)


def test_noise_is_uniform_of_the_size_of_the_paper() -> None:
    """``α / √(L d)``: of 40 tokens and 25 dimensions 5 / √1000, with the variance of a uniform distribution."""
    noise = EmbeddingNoise(ALPHA, seed=1, step=2).of_row(3, 40, 25)
    limit = ALPHA / math.sqrt(1000)
    assert noise.shape == (40, 25)
    assert float(noise.abs().max()) < limit
    assert float(noise.abs().max()) > 0.99 * limit  # of 1000 draws the largest
    # the mean of the squares is limit²/3, with a standard deviation of limit² √(4/45/1000)
    assert float(noise.square().mean()) == approx(limit**2 / 3, abs=4 * limit**2 * math.sqrt(4 / 45 / 1000))


def test_noise_is_that_of_transformers_hook_but_for_the_draws() -> None:
    """The same bound from ``neftune_post_forward_hook``, for one row without padding."""
    from transformers.integrations.neftune import neftune_post_forward_hook

    embedding = torch.nn.Embedding(50, 25)
    embedding.neftune_noise_alpha = ALPHA
    embedding.train()
    ids = torch.arange(40)[None]
    plain = embedding(ids)
    theirs = neftune_post_forward_hook(embedding, (ids,), plain.clone()) - plain
    ours = EmbeddingNoise(ALPHA, 0, 1).of_row(0, 40, 25)
    limit = ALPHA / math.sqrt(1000)
    for noise in (theirs.detach(), ours):
        assert 0.99 * limit < float(noise.abs().max()) <= limit * (1 + 1e-5)


def test_noise_is_a_function_of_seed_step_and_row() -> None:
    one = EmbeddingNoise(ALPHA, 7, 3)
    assert torch.equal(one.of_row(2, 5, 4), EmbeddingNoise(ALPHA, 7, 3).of_row(2, 5, 4))
    for other in (EmbeddingNoise(ALPHA, 8, 3), EmbeddingNoise(ALPHA, 7, 4)):
        assert not torch.equal(one.of_row(2, 5, 4), other.of_row(2, 5, 4))
    assert not torch.equal(one.of_row(1, 5, 4), one.of_row(2, 5, 4))
    with_double = EmbeddingNoise(2 * ALPHA, 7, 3).of_row(2, 5, 4)
    assert_close(with_double, 2 * one.of_row(2, 5, 4))


def sft(**train: Any) -> Any:
    return make_recipe("sft", model={"name": shallow(1), "dtype": "fp64"}, train=train)


def gradient_of(recipe: Any, path: str = "packed") -> tuple[float, dict[str, Tensor], Batch]:
    from dataclasses import replace

    parts = prepare(recipe)
    assert isinstance(parts.method.forward, Forward)
    parts.method.forward.path = path  # type: ignore[assignment]
    batch = parts.source(1).batch
    assert batch is not None
    loss, _ = accumulate(replace(parts.method, noise=noise_of(recipe.train, 1)), batch, recipe.train)
    return loss, {name: p.grad.clone() for name, p in parts.parameters if p.grad is not None}, batch


def test_loss_and_gradient_are_those_of_a_plain_model_whose_embeddings_are_moved() -> None:
    """Row by row in float64; and no split, packing or padding changes them."""
    loss, ours, batch = gradient_of(sft(neftune_noise_alpha=ALPHA, seed=4))
    model = AutoModelForCausalLM.from_pretrained(shallow(1), dtype=torch.float64).eval()
    table = model.get_input_embeddings()
    total = torch.zeros((), dtype=torch.float64)
    for row in range(batch.num_rows):
        ids = batch.tokens[row, : int(batch.lengths[row])]
        noise = EmbeddingNoise(ALPHA, 4, 1).of_row(row, len(ids), table.weight.shape[1]).double()
        logits = model(inputs_embeds=(table(ids) + noise)[None]).logits[0].log_softmax(-1)
        own = logits[:-1].gather(1, ids[1:, None])[:, 0]
        total = total - own[batch.mask[row, 1 : len(ids)]].sum()
    expected = total / int(batch.mask.sum())
    expected.backward()
    assert loss == approx(float(expected.detach()), abs=OF_NORMS)
    named = dict(model.named_parameters())
    splits = [gradient_of(sft(neftune_noise_alpha=ALPHA, seed=4, micro_batch_rows=1))]
    splits.append(gradient_of(sft(neftune_noise_alpha=ALPHA, seed=4, micro_batch_rows=3), "padded"))
    for name, gradient in ours.items():
        assert_close(gradient, named[name].grad, rtol=1e-4, atol=OF_NORMS)
        for _, other, _ in splits:
            assert_close(other[name], gradient, rtol=1e-4, atol=OF_NORMS)
    without, plain, _ = gradient_of(sft(seed=4))
    assert abs(without - loss) > 1e-4
    assert not torch.equal(plain["model.norm.weight"], ours["model.norm.weight"])


def test_pairs_that_share_a_prompt_have_noise_of_their_own() -> None:
    recipe = make_recipe("judged", objective={"name": "dpo"}, model={"name": shallow(1), "dtype": "fp64"},
                         train={"neftune_noise_alpha": ALPHA})  # fmt: skip
    packed, _, _ = gradient_of(recipe)
    padded, _, _ = gradient_of(recipe, "padded")
    assert packed == approx(padded, abs=OF_NORMS)


def test_nothing_is_added_outside_of_the_update() -> None:
    parts = prepare(sft(neftune_noise_alpha=ALPHA))
    batch = parts.source(1).batch
    assert batch is not None
    forward = parts.policy
    before = forward(batch).logprobs
    with added_to(parts.model.get_input_embeddings(), torch.ones(1)):
        pass
    gradient_free, _ = accumulate(parts.method, batch, make_recipe("sft").train, learns=False)
    assert torch.equal(forward(batch).logprobs, before)
    assert not parts.model.get_input_embeddings()._forward_hooks
    assert gradient_free > 0
    assert NoisyRows(EmbeddingNoise(1.0, 0, 1), [0], [3]).rectangle(2, 4).shape == (1, 2, 4)


def test_a_noisy_run_differs_and_resumes_to_the_bit(tmp_path: Path) -> None:
    recipe = make_recipe("sft", model={"name": shallow(1)}, train={"neftune_noise_alpha": ALPHA, "steps": 3})
    run(tmp_path / "whole", recipe)
    run(tmp_path / "cut", recipe, stop_after=2)
    run(tmp_path / "cut", recipe, resume=True)
    run(tmp_path / "plain", make_recipe("sft", model={"name": shallow(1)}, train={"steps": 3}))
    ours = saved_tensors(tmp_path / "whole", 3)
    assert same_bits(ours, saved_tensors(tmp_path / "cut", 3))
    assert not same_bits(ours, saved_tensors(tmp_path / "plain", 3))


@pytest.mark.parametrize(
    ("recipe", "value", "named"),
    [("tiny/grpo", "5", "train.neftune_noise_alpha"), ("tiny/sft", "0", "neftune_noise_alpha"),
     ("tiny/sft", "inf", "neftune_noise_alpha"), ("tiny/sft", "loud", "neftune_noise_alpha")],
)  # fmt: skip
def test_noise_that_means_nothing_is_refused(
    recipe: str, value: str, named: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["train", recipe, "--train.neftune_noise_alpha", value, "--runs-dir", str(tmp_path), "--quiet"]
    assert main(words) == 2
    text = capsys.readouterr().err
    assert named in text
    assert "Traceback" not in text
