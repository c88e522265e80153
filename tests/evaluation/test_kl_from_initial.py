"""Drift from the start: exact zero, a slow reference row by row, adapters, an exact KL."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from closeness import approx
from posttrain import registry
from posttrain.data.base import Task
from posttrain.data.render import encode_prompt, stop_ids
from posttrain.evaluation.generation import Questions, held_out_indices
from posttrain.evaluation.kl_from_initial import measure_kl
from posttrain.models.forward.forward import Forward
from posttrain.models.lora import apply_adapter
from posttrain.models.reference import Reference
from posttrain.models.sources import TINY
from posttrain.recipes.sections import AdapterSection, RewardComponent
from posttrain.sampling.base import Engine, Sampling
from posttrain.sampling.fake_engine import FakeEngine
from posttrain.sampling.rollout import Sampler, build_grader
from posttrain.types import Completion, Example, Message
from posttrain.untrusted import declare_code

TEMPERATURE = 1.4


@pytest.fixture(scope="module")
def grader() -> Any:
    template = registry.find("template", "r1_zero").bind({"preamble": ""})()
    return build_grader([RewardComponent(name="correct")], template)


def tiny() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY).eval()


def sums(size: int, question: str = "What is {} plus 1?") -> Task:
    return Task(
        "sums", "test", [Example(f"s/{i}", (Message("user", question.format(i)),), str(i + 1)) for i in range(size)]
    )


def perturb(model: Any, share: float = 0.03) -> None:
    """Noise on the trained weights, in units of their own spread (an adapter's B has none: 0.02)."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            spread = float(parameter.std()) or 0.02 / share
            parameter.add_(torch.randn(parameter.shape, generator=generator) * share * spread)


class Recorder:
    """An engine that keeps what it was asked for and what it gave."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.rows: list[tuple[tuple[int, ...], Completion]] = []

    def generate(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Completion]]:
        groups = self.engine.generate(prompts, keys, sampling)
        self.rows += [(tuple(p), c) for p, group in zip(prompts, groups, strict=True) for c in group]
        return groups


def native(model: Any, tokenizer: Any) -> Engine:
    return registry.find("engine", "native").bind({})(model, tokenizer)


def measure(
    engine: Engine, tokenizer: Any, grader: Any, task: Task, policy: Any, start: Reference, **changes: Any
) -> dict[str, float]:
    sampling = {"max_tokens": 12, "temperature": TEMPERATURE, "stop_ids": stop_ids(tokenizer, grader.template)}
    settings = {"n": 8, "context_tokens": 200, "seed": 0, "tokens_per_micro": 1 << 14} | changes
    sampling |= {"max_tokens": settings.pop("max_tokens", 12)}
    return measure_kl(
        Sampler(engine, tokenizer, grader, settings["context_tokens"]),
        Questions(task, Sampling(**sampling), settings["n"], seed=settings["seed"]),
        policy=Forward(policy, TEMPERATURE),
        start=start,
        tokens_per_micro=settings["tokens_per_micro"],
    )


@torch.no_grad()
def slow_kl(rows: list[tuple[tuple[int, ...], Completion]], policy: Any, start: Any) -> tuple[float, float]:
    """Each answer alone through transformers' own models in float64: (KL of an answer, entropy of a token)."""
    now, then = (copy.deepcopy(m).double() for m in (policy, start))
    kl, entropy, tokens = 0.0, 0.0, 0
    for prompt, completion in rows:
        ids = torch.tensor([[*prompt, *completion.ids]])
        tables = [(m(ids).logits[0].double() / TEMPERATURE).log_softmax(-1) for m in (now, then)]
        for t in range(len(prompt), ids.shape[1]):
            p, q = (table[t - 1] for table in tables)
            kl += float((p.exp() * (p - q)).sum())
            entropy -= float((p.exp() * p).sum())
            tokens += 1
    return kl / len(rows), entropy / tokens


def test_drift_against_a_slow_reference_whatever_the_split(tokenizer, grader) -> None:
    model = tiny()
    start = Reference(Forward(model, TEMPERATURE))
    perturb(model)
    engine = Recorder(native(model, tokenizer))
    task = sums(40)
    found = measure(engine, tokenizer, grader, task, model, start)
    kl, entropy = slow_kl(engine.rows, model, tiny())
    assert kl > 0.01
    # fp32 against float64
    assert found["kl_initial"] == approx(kl, rel=1e-3)
    assert found["entropy"] == approx(entropy, rel=1e-4)
    assert found["sampled_completion_length"] == sum(len(c.ids) for _, c in engine.rows) / 8
    items = [task.examples[i] for i in held_out_indices(40, 8)]
    prompts = [tuple(encode_prompt(tokenizer, grader.template, item.messages)) for item in items]
    assert [p for p, _ in engine.rows] == prompts
    pieces = measure(engine, tokenizer, grader, task, model, start, tokens_per_micro=60)
    assert engine.rows[8:] == engine.rows[:8]
    assert pieces == approx(found, rel=1e-4)
    measure(engine, tokenizer, grader, task, model, start, seed=1)
    assert [c for _, c in engine.rows[16:]] != [c for _, c in engine.rows[:8]]


def test_an_adapter_is_on_where_the_policy_speaks_and_off_at_the_start(tokenizer, grader) -> None:
    """The reference of a fresh adapter is the same module with the adapter off."""
    model = apply_adapter(tiny(), AdapterSection(rank=4), 0).eval()
    start = Reference(Forward(model, TEMPERATURE))
    engine = Recorder(native(model, tokenizer))
    assert measure(engine, tokenizer, grader, sums(40), model, start)["kl_initial"] == 0.0
    before = [c.ids for _, c in engine.rows]
    perturb(model, 0.5)
    engine = Recorder(native(model, tokenizer))
    found = measure(engine, tokenizer, grader, sums(40), model, start)
    kl, entropy = slow_kl(engine.rows, model, tiny())
    assert kl > 0.01
    assert found["kl_initial"] == approx(kl, rel=1e-3)
    assert found["entropy"] == approx(entropy, rel=1e-4)
    assert [c.ids for _, c in engine.rows] != before  # the policy's answers, not the base's


@pytest.mark.parametrize("num_candidates", [1024, 50])
def test_of_one_token_it_is_the_exact_divergence(tokenizer, grader, monkeypatch, num_candidates: int) -> None:
    """One-token answers to one prompt: Σ p log(p/q) over the vocabulary, whatever was sampled."""
    monkeypatch.setattr("posttrain.evaluation.kl_from_initial.NUM_CANDIDATES", num_candidates)
    model = tiny()
    start = Reference(Forward(model, TEMPERATURE))
    perturb(model, 0.1)
    task = sums(3, question="Tom has 7 apples. What is 7 plus 1?")
    engine = Recorder(native(model, tokenizer))
    found = measure(engine, tokenizer, grader, task, model, start, n=3, max_tokens=1)
    prompt = torch.tensor([engine.rows[0][0]])
    with torch.no_grad():
        p, q = ((m(prompt).logits[0, -1].double() / TEMPERATURE).log_softmax(-1) for m in (model, tiny()))
    exact = float((p.exp() * (p - q)).sum())
    if num_candidates == 50:  # the rest counts as one token
        likely = p.argsort(descending=True)[:50]
        rest = [1.0 - float(x[likely].exp().sum()) for x in (p, q)]
        coarse = float((p[likely].exp() * (p - q)[likely]).sum()) + rest[0] * math.log(rest[0] / rest[1])
        assert 0 < coarse < exact  # merging tokens hides differences
        exact = coarse
    assert found["kl_initial"] == approx(exact, rel=1e-3)
    assert found["entropy"] == approx(-float((p.exp() * p).sum()), rel=1e-4)
    assert found["sampled_completion_length"] == 1.0


def digits(text: str) -> float:
    """A reward of its own: how many characters of an answer are digits."""
    return float(sum(c.isdigit() for c in text))


def test_parts_of_the_reward_are_means_over_the_same_answers(tokenizer) -> None:
    """Two parts and their weighted sum, by hand: gold and proxy of the very answers whose KL is measured."""
    task, model = sums(5), tiny()
    task.examples[4] = Example("s/4", (Message("user", "word " * 200),), "5")  # without room: it is left out
    scripts, lengths = {}, []
    template = registry.find("template", "r1_zero").bind({"preamble": ""})()
    words = [RewardComponent(name="correct", weight=0.0), RewardComponent(name=f"{__name__}:digits", weight=2.0)]
    declare_code(words[1].name)
    own = build_grader(words, template)
    for i, item in enumerate(task.examples):
        text = f" so. </think> <answer> {i + 1 if i < 3 else 77} </answer>"
        ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
        scripts[tuple(encode_prompt(tokenizer, template, item.messages))] = [ids]
        lengths.append(len(ids))
    start = Reference(Forward(model, TEMPERATURE))
    found = measure(FakeEngine(scripts, logprob=-1.0), tokenizer, own, task, model, start, n=5, max_tokens=40)
    assert found["kl_initial"] == 0.0  # whatever the engine says about its tokens
    assert found["sampled_completion_length"] == sum(lengths[:4]) / 4
    assert found["sampled_accuracy"] == 0.75
    assert found[f"sampled_reward/{__name__}:digits"] == (1 + 1 + 1 + 2) / 4
    assert found["sampled_reward"] == 2 * (1 + 1 + 1 + 2) / 4
    assert found["sampled_reward/xml_format"] == 1.0
    assert "sampled_reward/correct" not in found  # it is sampled_accuracy
