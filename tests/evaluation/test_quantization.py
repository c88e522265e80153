"""Measures of a quantized model against slow references: divergences, agreement, intervals, accuracy."""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from closeness import approx
from posttrain import registry
from posttrain.data.base import Task
from posttrain.data.render import encode_prompt
from posttrain.errors import UsageError
from posttrain.evaluation.generation import held_out_indices
from posttrain.evaluation.quantization import compare_policies, compare_scorers, with_trunk
from posttrain.evaluation.reward_models.scoring import RewardModel
from posttrain.models.forward.forward import Forward
from posttrain.models.heads import ScalarHead, hidden_size
from posttrain.models.sources import TINY
from posttrain.recipes.sections import RewardComponent
from posttrain.sampling.rollout import Sampler, build_grader
from posttrain.types import Example, Message, Response
from refusing import refuses


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
        request = (Message("user", question.format(i)),)
        examples.append(Example(f"s/{i}", request, str(i + 1), responses=responses))
    return Task("sums", "test", examples)


def compare(tokenizer: Any, template: Any, before: Any, after: Any, n: int = 12, context: int = 200) -> Any:
    """Return the measures, and the answers that were compared."""
    engine = registry.find("engine", "native").bind({})(before, tokenizer)
    answers: list[Any] = []

    class Recorder:
        def generate(self, prompts: Any, keys: Any, sampling: Any) -> Any:
            groups = engine.generate(prompts, keys, sampling)
            answers.extend((p, g[0].ids) for p, g in zip(prompts, groups, strict=True))
            return groups

    sampler = Sampler(Recorder(), tokenizer, build_grader([RewardComponent(name="correct")], template), context)  # type: ignore[arg-type]
    models = {"before": Forward(before), "after": Forward(after)}
    return compare_policies(sampler, sums(40), **models, n=n, sampling=sampler.sampling(12, 1.0)), answers


def test_policies_are_compared_on_the_answers_of_the_first(tokenizer, template) -> None:
    """``test_kl_from_initial`` holds the KL of a token against a slow reference."""
    before, after = tiny(), perturbed(0.1)
    found, answers = compare(tokenizer, template, before, after)
    kl, num_tokens = [], sum(len(ids) for _, ids in answers)
    with torch.no_grad():
        for prompt, ids in answers:  # each alone through transformers' own models
            tokens = torch.tensor([[*prompt, *ids]])
            p, q = (m(tokens).logits[0].double().log_softmax(-1)[len(prompt) - 1 : -1] for m in (before, after))
            kl.append(float((p.exp() * (p - q)).sum()))
    assert (found["num_tokens"], found["num_answers"]) == (num_tokens, 12)
    assert found["kl_per_token"] == approx(math.fsum(kl) / num_tokens, rel=1e-3)
    assert found["kl"] == approx(math.fsum(kl) / 12, rel=1e-3)
    # the interval: 2.200985 is t of 11 degrees of freedom
    assert found["kl_high"] - found["kl"] == approx(2.200985 * statistics.stdev(kl) / math.sqrt(12), rel=1e-2)
    tasks = [sums(40).examples[i] for i in held_out_indices(40, 12)]
    assert [list(p) for p, _ in answers] == [encode_prompt(tokenizer, template, e.messages) for e in tasks]


def test_the_same_model_loses_nothing(tokenizer, template) -> None:
    found, _ = compare(tokenizer, template, tiny(), tiny(), n=3)
    assert found["kl"] == found["kl_per_token"] == 0.0


def test_prompts_that_do_not_fit(tokenizer, template) -> None:
    with refuses(UsageError, "model's 10 tokens"):
        compare(tokenizer, template, tiny(), tiny(), n=2, context=10)


def scorer(tokenizer: Any, template: Any, model: Any, std: float = 0.5) -> RewardModel:
    head = ScalarHead(hidden_size(model), seed=2, init_std=std)
    forward = Forward(model.requires_grad_(False), head=head, reads="at", scores_only=True)
    return RewardModel("test", "preference", forward, tokenizer, template, 200)


def test_scorers_by_hand(tokenizer, template) -> None:
    before = scorer(tokenizer, template, tiny())
    after = with_trunk(before, perturbed(0.3))
    assert after.forward.head is before.forward.head
    task = sums(30)
    correct = []
    for model in (before, after):
        given = [(e, r) for e in task.examples for r in e.responses]
        scores = model.score_responses([e for e, _ in given], [r for _, r in given])
        correct.append([float(a > b) for a, b in zip(scores[0::2], scores[1::2], strict=True)])
    found = compare_scorers(before, after, task, n=100)
    assert found["num_items"] == 30
    assert found["accuracy_before"] == approx(sum(correct[0]) / 30)
    assert found["accuracy_after"] == approx(sum(correct[1]) / 30)
    assert found["change"] == approx((sum(correct[1]) - sum(correct[0])) / 30)
    assert found["change_low"] <= found["change"] <= found["change_high"]
    same = sum(a == b for a, b in zip(*correct, strict=True)) / 30
    assert found["same_verdict"] == approx(same)
    assert 0.0 < same < 1.0
    nothing = compare_scorers(before, with_trunk(before, tiny()), task, n=100)
    assert (nothing["change"], nothing["same_verdict"]) == (0.0, 1.0)
