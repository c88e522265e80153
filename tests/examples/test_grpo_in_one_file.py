"""The one-file example and the library compute the same thing from the same batch."""

from __future__ import annotations

import importlib.util
import random
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from closeness import allclose, approx, assert_close
from posttrain import registry
from posttrain.algorithms.advantages import normalized
from posttrain.algorithms.aggregation import token_mean
from posttrain.models.forward.forward import Forward
from posttrain.recipes.sections import TrainSection
from posttrain.training.step import Method, accumulate
from posttrain.types import Sample, collate

PATH = Path(__file__).parents[2] / "examples" / "grpo_in_one_file.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    import sys

    spec = importlib.util.spec_from_file_location("grpo_in_one_file", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["grpo_in_one_file"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_it_is_short_and_stands_alone():
    text = PATH.read_text()
    assert len(text.splitlines()) <= 250
    assert not re.search(r"^\s*(import|from)\s+posttrain", text, re.MULTILINE)


def test_advantages_agree(example: ModuleType):
    rewards = torch.tensor([[1.0, 0.1, 0.0, 1.0], [0.1, 0.1, 0.1, 0.1]], dtype=torch.float64)
    assert allclose(example.group_advantages(rewards), normalized(rewards), atol=1e-15)


def test_loss_and_gradient_agree_on_the_same_batch(example: ModuleType):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=24, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    rng = random.Random(0)
    samples = []
    for group in range(2):
        prompt = [rng.randrange(61) for _ in range(4 + group)]
        for _ in range(4):
            answer = [rng.randrange(61) for _ in range(rng.randint(1, 7))]
            blank = [0.0] * len(prompt)
            fields = {
                "advantages": blank + [rng.gauss(0, 1)] * len(answer),
                "old_logprobs": blank + [rng.gauss(-4.1, 0.3) for _ in answer],
            }
            samples.append(
                Sample(prompt + answer, [False] * len(prompt) + [True] * len(answer), group, len(prompt), fields)
            )
    batch = collate(samples)

    logprobs = example.token_logprobs(model, batch.tokens, batch.lengths)
    loss = example.grpo_loss(
        logprobs, batch.fields["old_logprobs"], batch.fields["advantages"], batch.mask, clip_high=0.28
    )
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])

    model.zero_grad(set_to_none=True)
    objective = registry.find("objective", "grpo").bind({"clip_high": 0.28})
    ours, metrics = accumulate(Method(Forward(model), objective, token_mean), batch, TrainSection(micro_batch_rows=3))
    got = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert ours == approx(float(loss.detach()), abs=1e-6)
    assert_close(got, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
    assert 0.0 < metrics["clip_fraction"] < 1.0, "the batch must exercise the clip"


def test_rewards_and_problems(example: ModuleType):
    assert example.reward_of(" 3 + 4 = 7. </think> <answer> 7 </answer>", 7) == 1.0
    assert example.reward_of("</think>\n<answer>8</answer>", 7) == 0.1
    assert example.reward_of("<answer> 7 </answer> </think>", 7) == 0.0
    assert example.reward_of("</think> <answer> 7 </answer> or 8", 7) == 0.0
    for seed in range(50):
        text, answer = example.make_problem(random.Random(seed))
        numbers = [int(n) for n in re.findall(r"\d+", text)]
        assert answer == numbers[0] + numbers[1] - (numbers[2] if len(numbers) == 3 else 0)
