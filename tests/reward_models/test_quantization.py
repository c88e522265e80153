"""What is said about a quantized model against slow references: divergences, agreement, intervals, accuracy."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain import registry
from posttrain.engines.base import Sampling
from posttrain.errors import UsageError
from posttrain.evals.generation import held_out_indices
from posttrain.models.forward.forward import Forward
from posttrain.models.heads import ScalarHead, hidden_size
from posttrain.models.sources import TINY
from posttrain.render import encode_prompt, stop_ids
from posttrain.reward_models import quantization
from posttrain.reward_models.quantization import compare_policies, compare_scorers, with_trunk
from posttrain.reward_models.scoring import RewardModel
from posttrain.tasks.base import Task
from posttrain.types import Example, Message, Response


def tiny() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY).eval()


def perturbed(share: float) -> Any:
    """The embedded model with noise on its weights, in units of their own spread."""
    model, generator = tiny(), torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * share * parameter.std())
    return model


def sums(size: int, question: str = "What is {} plus 1?") -> Task:
    examples = []
    for i in range(size):
        responses = (Response(f"It is {i + 1}.", 1.0), Response(f"It is {i + 2}, or so.", 0.0))
        asked = (Message("user", question.format(i)),)
        examples.append(Example(f"s/{i}", asked, str(i + 1), responses=responses))
    return Task("sums", "test", examples)


def compare(tokenizer: Any, template: Any, before: Any, after: Any, n: int = 12, max_tokens: int = 12) -> Any:
    """What is found, and the answers that it was found on."""
    engine = registry.find("engine", "native").bind({})(before, tokenizer)
    answers: list[Any] = []

    class Recorder:
        def generate(self, prompts: Any, keys: Any, sampling: Any) -> Any:
            groups = engine.generate(prompts, keys, sampling)
            answers.extend((p, g[0].ids) for p, g in zip(prompts, groups, strict=True))
            return groups

    found = compare_policies(
        Recorder(),  # type: ignore[arg-type]
        tokenizer,
        template,
        sums(40),
        before=Forward(before),
        after=Forward(after),
        n=n,
        sampling=Sampling(max_tokens=max_tokens, stop_ids=stop_ids(tokenizer, template)),
        context_tokens=200,
    )
    return found, answers


@torch.no_grad()
def slow(answers: list[Any], before: Any, after: Any) -> tuple[list[list[float]], list[list[bool]]]:
    """Each answer alone through transformers' own models in float64: KL and agreement of every token."""
    first, second = (copy.deepcopy(m).double() for m in (before, after))
    divergences, agreements = [], []
    for prompt, ids in answers:
        tokens = torch.tensor([[*prompt, *ids]])
        tables = [m(tokens).logits[0].log_softmax(-1)[len(prompt) - 1 : -1] for m in (first, second)]
        p, q = tables
        divergences.append((p.exp() * (p - q)).sum(-1).tolist())
        agreements.append((p.argmax(-1) == q.argmax(-1)).tolist())
    return divergences, agreements


def test_policies_against_a_slow_reference(tokenizer, template) -> None:
    before, after = tiny(), perturbed(0.1)
    found, answers = compare(tokenizer, template, before, after)
    divergences, agreements = slow(answers, before, after)
    flat = [x for row in divergences for x in row]
    assert found["num_tokens"] == len(flat)
    assert found["num_answers"] == 12
    assert found["kl_per_token"] == pytest.approx(math.fsum(flat) / len(flat), rel=1e-3)
    assert found["kl_max"] == pytest.approx(max(flat), rel=1e-3)
    share = sum(map(sum, agreements)) / len(flat)
    assert found["top1_agreement"] == pytest.approx(share)
    assert 0.2 < share < 1.0
    # the interval: answers are drawn, so resampling them moves the ratio about as much as it says
    generator = torch.Generator().manual_seed(0)
    ratios = []
    for _ in range(2000):
        drawn = torch.randint(0, 12, (12,), generator=generator).tolist()
        total = sum(len(divergences[i]) for i in drawn)
        ratios.append(sum(math.fsum(divergences[i]) for i in drawn) / total)
    spread = float(torch.tensor(ratios).std())
    half = (found["kl_per_token_high"] - found["kl_per_token"]) / 2.200985  # t of 11 degrees of freedom
    assert half == pytest.approx(spread, rel=0.2)
    tasks = [sums(40).examples[i] for i in held_out_indices(40, 12)]
    assert [list(p) for p, _ in answers] == [encode_prompt(tokenizer, template, e.messages) for e in tasks]


def test_the_split_into_pieces_changes_nothing(tokenizer, template, monkeypatch) -> None:
    before, after = tiny(), perturbed(0.1)
    whole, _ = compare(tokenizer, template, before, after)
    monkeypatch.setattr(quantization, "MAX_TOKENS", 60)
    pieces, _ = compare(tokenizer, template, before, after)
    assert pieces == pytest.approx(whole, rel=1e-3)


def test_the_same_model_loses_nothing(tokenizer, template) -> None:
    found, _ = compare(tokenizer, template, tiny(), tiny(), n=3, max_tokens=4)
    assert found["kl_per_token"] == found["kl_max"] == 0.0
    assert (found["top1_agreement"], found["top1_agreement_low"], found["top1_agreement_high"]) == (1.0, 1.0, 1.0)


def test_the_interval_of_a_ratio_by_hand() -> None:
    # sums 1, 3 over lengths 2, 2: ratio 1; residuals -1, 1; variance 2 * 2/1; half 12.7062 * 2 / 4
    found = quantization._mean_per_token("x", [1.0, 3.0], [2.0, 2.0])
    assert found == pytest.approx({"x": 1.0, "x_low": 0.0, "x_high": 7.3531023680})
    assert quantization._mean_per_token("x", [1.0], [4.0]) == {"x": 0.25, "x_low": 0.25, "x_high": 0.25}
    bounded = quantization._mean_per_token("x", [2.0, 1.0], [2.0, 2.0], most=1.0)
    assert bounded["x_high"] == 1.0


def test_prompts_that_do_not_fit(tokenizer, template) -> None:
    with pytest.raises(UsageError, match="none of 2 prompts fits into 10 tokens"):
        compare_policies(
            None,  # type: ignore[arg-type]
            tokenizer,
            template,
            sums(2),
            before=None,  # type: ignore[arg-type]
            after=None,  # type: ignore[arg-type]
            n=2,
            sampling=Sampling(4),
            context_tokens=10,
        )


def scorer(tokenizer: Any, template: Any, model: Any, std: float = 0.5) -> RewardModel:
    head = ScalarHead(hidden_size(model), seed=2, init_std=std)
    forward = Forward(model.requires_grad_(False), head=head, reads="at", scores_only=True)
    return RewardModel("test", "preference", forward, tokenizer, template, 200)


def test_scorers_by_hand(tokenizer, template) -> None:
    before = scorer(tokenizer, template, tiny())
    after = with_trunk(before, perturbed(0.3))
    assert after.forward.head is before.forward.head
    task = sums(30)
    rights = []
    for model in (before, after):
        given = [(e, r) for e in task.examples for r in e.responses]
        scores = model.score_responses([e for e, _ in given], [r for _, r in given])
        rights.append([float(a > b) for a, b in zip(scores[0::2], scores[1::2], strict=True)])
    found = compare_scorers(before, after, task, n=100)
    assert found["num_items"] == 30
    assert found["accuracy_before"] == pytest.approx(sum(rights[0]) / 30)
    assert found["accuracy_after"] == pytest.approx(sum(rights[1]) / 30)
    assert found["change"] == pytest.approx((sum(rights[1]) - sum(rights[0])) / 30)
    assert found["change_low"] <= found["change"] <= found["change_high"]
    same = sum(a == b for a, b in zip(*rights, strict=True)) / 30
    assert found["same_verdict"] == pytest.approx(same)
    assert 0.0 < same < 1.0
    nothing = compare_scorers(before, with_trunk(before, tiny()), task, n=100)
    assert (nothing["change"], nothing["same_verdict"]) == (0.0, 1.0)
