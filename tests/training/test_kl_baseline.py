"""The baseline of KTO: the KL to the reference on answers to other prompts, under the weights of the step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_batch_fields import TEMPERATURE, plain_logprobs, update
from transformers import AutoModelForCausalLM

from closeness import approx
from posttrain.models.forward.forward import Forward
from posttrain.recipes.recipe import validate_recipe
from posttrain.training.batch_fields import BatchFields, mismatch_answers
from posttrain.training.build import prepare
from posttrain.types import Batch, Sample, collate
from small_runs import Events, one_layer_recipe, shallow, steps_of, watched

KTO = {
    "objective": {"name": "kto"},
    "rollout": {
        "num_prompts": 6,
        "group_size": 6,
        "select": {"name": "balanced", "threshold": 0.25},
        "label_above": 0.25,
    },
    "train": {"ppo_epochs": 3},
}


def initial_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(shallow(1)).eval()


def kl_of_mismatched(batch: Batch, policy: Any, reference: Any, temperature: float = TEMPERATURE) -> float:
    """Row by row: its prompt with the answer of the next row that has another prompt."""
    rows = [batch.tokens[b, : int(batch.lengths[b])].tolist() for b in range(batch.num_rows)]
    prompts = [row[: int(n)] for row, n in zip(rows, batch.prefix, strict=True)]
    total, count = 0.0, 0
    for b, prompt in enumerate(prompts):
        following = [*range(b + 1, len(rows)), *range(b)]
        others = [c for c in following if prompts[c] != prompt]
        if others:
            answer = rows[others[0]][len(prompts[others[0]]) :]
            samples = [Sample(prompt + answer, [False] * len(prompt) + [True] * len(answer))]
            one = collate(samples)
            log_ratio = plain_logprobs(policy, one, temperature) - plain_logprobs(reference, one, temperature)
            total += float(log_ratio.sum())
            count += 1
    return total / count if count else 0.0


def test_the_kl_baseline_is_that_of_mismatched_prompts_under_the_weights_of_the_step() -> None:
    recipe = one_layer_recipe("grpo", **KTO)
    parts = prepare(recipe)
    found = []
    for step in (1, 2, 3):  # three updates on one rollout batch
        batch = parts.source(step).batch
        assert batch is not None
        assert batch.num_rows >= 6
        assert batch.fields["kl_baseline"].shape == (batch.num_rows,)
        assert len(set(batch.fields["kl_baseline"].tolist())) == 1
        expected = kl_of_mismatched(batch, parts.model, initial_model(), temperature=1.0)  # a likelihood
        found.append(float(batch.fields["kl_baseline"][0]))
        assert found[-1] == approx(max(0.0, expected), abs=1e-4)
        rollout_buffer = parts.source.rollout_buffer(step)
        assert rollout_buffer is None if step == 3 else "stream.kl_baseline" not in rollout_buffer
        update(parts, recipe, step, lr=2e-3)
    assert found[0] == approx(0.0, abs=1e-4)
    assert max(found[1:]) > 0.01
    assert found[1] != found[2]


def test_the_kl_baseline_is_never_negative() -> None:
    """One of the KLs in both directions over the same answers is below 0 before the clamp."""
    batch = prepare(one_layer_recipe("grpo", **KTO)).source(1).batch
    assert batch is not None
    one, other = Forward(initial_model(), TEMPERATURE), Forward(perturbed(initial_model()), TEMPERATURE)
    raw = kl_of_mismatched(batch, one.model, other.model)
    assert abs(raw) > 0.01
    for policy, reference, expected in ((one, other, max(0.0, raw)), (other, one, max(0.0, -raw))):
        fixed = Fixed(reference)
        recipe = one_layer_recipe("grpo", **KTO)
        recipe.train.micro_batch_tokens = 500
        fields = BatchFields(frozenset({"kl_baseline"}), recipe, policy, 1 << 20, reference=fixed)  # type: ignore[arg-type]
        given = replace(batch, fields={})
        rows = fields.before_step(given).fields["kl_baseline"]
        assert rows[0].item() == approx(expected, abs=1e-4)
        assert given.fields == {}


@dataclass
class Fixed:
    """A reference that is a given forward pass."""

    forward: Forward

    def open(self) -> AbstractContextManager[Forward]:
        return nullcontext(self.forward)


def perturbed(model: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.4 * parameter.std())
    return model


def test_mismatched_answers_by_hand() -> None:
    """Prompts a, a, b; the answer to a first prompt is that of the next row that has another one and fits."""
    a, b = [1, 2], [3]
    rows = [([*a, 10], 2), ([*a, 11, 12], 2), ([*b, 13, 14, 15], 1)]
    samples = [Sample(ids, [False] * n + [True] * (len(ids) - n), group=n, prefix=n) for ids, n in rows]
    mixed = mismatch_answers(collate(samples), limit=5)  # the longest has just that length
    assert mixed is not None
    tokens = [mixed.tokens[i, : int(mixed.lengths[i])].tolist() for i in range(3)]
    assert tokens == [[*a, 13, 14, 15], [*a, 13, 14, 15], [*b, 10]]
    assert [row.nonzero()[:, 0].tolist() for row in mixed.mask] == [[2, 3, 4], [2, 3, 4], [1]]
    assert len(set(mixed.group.tolist())) == 3
    short = mismatch_answers(collate(samples), limit=4)  # the answer of three tokens does not fit behind a
    assert short is not None
    assert short.tokens.tolist() == [[*b, 10]]
    assert mismatch_answers(collate(samples), limit=1) is None
    assert mismatch_answers(collate(samples[:2]), limit=9) is None


@pytest.mark.parametrize(("batch", "text"), [(1, True), (4, False)])
def test_kto_one_prompt_a_batch_is_reported_once(tmp_path: Path, batch: int, text: bool) -> None:
    recipe = validate_recipe(
        {
            "task": {"name": "stories", "size": 24, "max_steps": 3, "responses": "judged"},
            "prompt": {"template": {"name": "r1_zero", "preamble": ""}},
            "data": {"batch_size": batch, "max_length": 256},
            "objective": {"name": "kto"},
            "model": {"name": shallow(1)},
            "train": {"steps": 2, "lr": 1e-4, "save_every": 0},
            "eval": {"every": 0},
        }
    )
    events = Events()
    watched(tmp_path, recipe.resolve(), events)
    messages = [info["message"] for info in events.of("notice")]
    found = [message for message in messages if message.startswith("kl_baseline: all answers in step 1 share")]
    assert len(found) == text
    for row in steps_of(tmp_path):  # the rewards of the kinds that there are
        assert ("desirable_reward" in row) == (row["desirable"] > 0)
        assert ("undesirable_reward" in row) == (row["desirable"] < 1)
