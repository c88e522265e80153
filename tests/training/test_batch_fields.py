"""Batch fields: how they are filled, with which weights, and one of a user; against plain modules."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from closeness import OF_EMBEDDED, allclose, approx
from posttrain import registry
from posttrain.errors import RecipeError, RunFailure, UsageError
from posttrain.recipes.recipe import Recipe
from posttrain.registry import register
from posttrain.training.batch_fields import Scorer, needed_fields
from posttrain.training.build import TrainerState, prepare
from posttrain.training.step import accumulate, apply_update
from posttrain.types import Batch, Completion, Loss, Outputs
from posttrain.untrusted import declare_code
from refusing import refuses
from small_runs import BASE, one_layer_recipe, run, save_perturbed, shallow

LORA = {"adapter": {"rank": 4, "dropout": 0.3}}
TEMPERATURE = BASE["grpo"]["rollout"]["temperature"]
# Two fp32 forwards of a trained model: transformers' own lies up to 2e-5 from a float64 one.
CLOSE = OF_EMBEDDED


def reference_recipe(**changes: Any) -> Recipe:
    return one_layer_recipe("grpo", objective="grpo", regularize={"kl_coef": 0.1}, **changes)


def update(parts: TrainerState, recipe: Recipe, step: int, lr: float = 1e-2) -> Batch:
    """One optimizer step; returns its batch."""
    batch = parts.source(step).batch
    torch.manual_seed(step)  # an adapter's dropout draws from it
    loss, _ = accumulate(parts.method, batch, recipe.train)
    apply_update(parts.optimizer, [p for _, p in parts.parameters], lr, 1.0, loss, step)
    return batch


@torch.no_grad()
def plain_logprobs(model: Any, batch: Batch, temperature: float = TEMPERATURE) -> Tensor:
    """Each row alone through a model; 0 where nothing is trained."""
    found = torch.zeros(batch.tokens.shape)
    for b in range(batch.num_rows):
        ids = batch.tokens[b : b + 1, : int(batch.lengths[b])]
        table = (model(ids).logits[0].float() / temperature).log_softmax(-1)
        found[b, 1 : ids.shape[1]] = table[:-1].gather(1, ids[0, 1:, None])[:, 0]
    return torch.where(batch.mask, found, torch.zeros_like(found))


def initial_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(shallow(1)).eval()


def difference(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max())


@pytest.mark.parametrize(("model", "temperature"), [({}, 1.6), (LORA, 1.0)], ids=["full", "lora"])
def test_sampler_and_trainer_agree_about_the_old_logprobs(model: dict[str, Any], temperature: float) -> None:
    rollout = {"temperature": temperature, "old_logprobs": "trainer", "max_tokens": 24}
    recipe = one_layer_recipe("grpo", model=model, rollout=rollout)
    parts = prepare(recipe)
    update(parts, recipe, 1, lr=1e-4)
    batch = parts.source(2).batch
    sampler, trainer = batch.fields["sampler_logprobs"], batch.fields["old_logprobs"]
    assert not torch.equal(sampler, trainer)  # computed anew
    assert not trainer.requires_grad
    assert difference(sampler, trainer) == approx(0.0, abs=CLOSE)
    assert float((sampler - trainer).abs()[batch.mask].mean()) == approx(0.0, abs=CLOSE / 8), "one deviation"
    expected = plain_logprobs(parts.model, batch, temperature)
    assert difference(trainer, expected) == approx(0.0, abs=CLOSE)
    assert float(expected.min()) < -1  # the model is sure of some tokens and not of others


def test_the_reference_is_the_initial_model_also_after_updates() -> None:
    recipe = reference_recipe()
    parts = prepare(recipe)
    for step in (1, 2, 3):
        batch = update(parts, recipe, step)
        expected = plain_logprobs(initial_model(), batch)
        assert difference(batch.fields["ref_logprobs"], expected) == approx(0.0, abs=CLOSE), step
    moved = difference(batch.fields["ref_logprobs"], plain_logprobs(parts.model, batch))
    assert moved > 0.1
    assert not any(p is q for p in parts.model.parameters() for _, q in parts.parameters if not q.requires_grad)


def test_the_reference_of_a_loaded_adapter_is_the_model_with_that_adapter(tmp_path: Path) -> None:
    first = one_layer_recipe("sft", model=LORA, train={"steps": 3, "lr": 1e-2})
    run(tmp_path / "first", first)
    saved = str(tmp_path / "first" / "checkpoints" / "step-000003")
    recipe = reference_recipe(model={"name": saved})
    parts = prepare(recipe)
    assert sum(p.numel() for _, p in parts.parameters) < sum(p.numel() for p in parts.model.parameters()) / 2
    start = prepare(recipe).model
    for step in (1, 2, 3):
        batch = update(parts, recipe, step)
        assert difference(batch.fields["ref_logprobs"], plain_logprobs(start, batch)) == approx(0.0, abs=CLOSE), step
    assert difference(batch.fields["ref_logprobs"], plain_logprobs(initial_model(), batch)) > 0.05
    assert difference(batch.fields["ref_logprobs"], plain_logprobs(parts.model, batch)) > 0.05
    assert all(p.grad is None and p.requires_grad for _, p in parts.parameters)


@pytest.mark.parametrize(
    ("name", "options", "needs"),
    [
        ("reinforce", {}, {"advantages"}),
        ("grpo", {}, {"advantages", "old_logprobs"}),
        ("grpo", {"kl": 0.0}, {"advantages", "old_logprobs"}),
        ("grpo", {"kl": 1e-6}, {"advantages", "old_logprobs", "ref_logprobs"}),
    ],
)
def test_needed_fields_follow_from_the_options(name: str, options: dict[str, float], needs: set[str]) -> None:
    assert needed_fields(registry.find("objective", name), {}, True, **options) == needs


def test_needed_fields_that_nothing_fills_are_refused() -> None:
    entry = registry.Entry("objective", "mine", lambda outputs, batch: None, {"needs": ("weather",)})
    with refuses(RecipeError, "'mine'", "'weather'"):
        needed_fields(entry, {}, True)
    supervised = registry.find("objective", "cross_entropy")
    assert needed_fields(supervised, {}, False) == frozenset()
    with refuses(RecipeError, "'rollout'", "'data'"):
        needed_fields(registry.find("objective", "reinforce"), {}, False)


# --- batch fields of a user, which this file alone knows ---


@register("batch_field", needs=("ref_logprobs",), each_step=True)
def distance(batch: Batch, policy: Scorer) -> Tensor:
    """``[B]``: how far the answer's log-probability has moved from the reference, at the weights of this step."""
    return (policy.logprobs(batch) - batch.field("ref_logprobs")).sum(dim=1)


@register("batch_field", needs=("advantages",))
def praise(batch: Batch) -> Tensor:
    """``[B, T]``: advantages without blame; they may come late, from rewards per token."""
    return batch.field("advantages").clamp(min=0)


@register("objective", level="token", needs=("advantages", "distance", "praise"))
def held_back(outputs: Outputs, batch: Batch) -> Loss:
    """An objective for this test: it believes in praise, and less where an answer has moved."""
    moved = batch.field("distance")[:, None].expand_as(outputs.logprobs)
    return Loss(-(batch.field("praise") - 0.1 * moved) * outputs.logprobs, {"moved": moved})


@register("objective", level="token", needs=("distance",))
def stays_near(outputs: Outputs, batch: Batch) -> Loss:
    """An objective for this test: supervised, with the same batch field."""
    return Loss(batch.field("distance")[:, None] * outputs.logprobs)


@pytest.mark.parametrize("advantage", ["normalized", "return_to_go"])
def test_batch_field_of_a_user_is_filled_and_read(advantage: str) -> None:
    """Bit for bit what its formula gives, at both updates on one rollout batch; the reference is built for it."""
    declare_code("test_batch_fields:held_back")
    settings, rollout = {"ppo_epochs": 2, "micro_batch_rows": 1}, {"num_prompts": 2, "group_size": 3}
    objective = "test_batch_fields:held_back"
    recipe = one_layer_recipe("grpo", objective=objective, advantage=advantage, train=settings, rollout=rollout)
    parts = prepare(recipe)
    assert parts.reference is not None
    for step in (1, 2):
        batch = parts.source(step).batch
        assert batch is not None
        assert set(batch.fields) == {"sampler_logprobs", "advantages", "praise", "ref_logprobs", "distance"}
        assert torch.equal(batch.fields["praise"], batch.fields["advantages"].clamp(min=0))
        with torch.no_grad():
            now = [parts.policy(batch.select([b]), "none").logprobs[0] for b in range(batch.num_rows)]
        table = torch.zeros(batch.mask.shape)
        for b, logprobs in enumerate(now):
            table[b, : len(logprobs)] = logprobs
        expected = (table - batch.fields["ref_logprobs"]).sum(dim=1)
        assert torch.equal(batch.fields["distance"], expected)
        assert bool(expected.any()) == (step == 2)  # the weights have moved
        _, metrics = accumulate(parts.method, batch, recipe.train)
        mean = float((expected.double()[:, None] * batch.mask).sum()) / int(batch.mask.sum())
        assert metrics["moved"] == approx(mean, rel=1e-12)
        apply_update(parts.optimizer, [p for _, p in parts.parameters], 1e-2, 1.0, 0.0, step)
        rollout_buffer = parts.source.rollout_buffer(step)
        assert rollout_buffer is None if step == 2 else "stream.distance" not in rollout_buffer


def test_batch_field_of_a_user_serves_supervised_training_and_needs_its_rollouts() -> None:
    declare_code(["test_batch_fields:held_back", "test_batch_fields:stays_near"])
    parts = prepare(one_layer_recipe("sft", objective="test_batch_fields:stays_near"))
    assert set(parts.source(1).batch.fields) == {"ref_logprobs", "distance"}
    message = r"'held_back' needs \['advantages', 'praise'\], which come from rollouts; give 'rollout', not 'data'"
    with pytest.raises(RecipeError, match=message):
        prepare(one_layer_recipe("sft", objective="test_batch_fields:held_back"))


def no_components(batch: Batch) -> Tensor:
    """A batch field that a test registers."""
    return torch.zeros(batch.num_rows, batch.tokens.shape[1] + 1)


def raises(batch: Batch) -> Tensor:
    """A batch field that fails."""
    raise ValueError("no weather today")


def sees(seen: Batch) -> Tensor:
    """A batch field of what the teacher sees, which is not known before each step."""
    raise AssertionError("never called")


def asks_for_too_much(batch: Batch, refernce: Scorer) -> Tensor:
    """A batch field with a typing error in its argument."""
    raise AssertionError("never called")


@pytest.mark.parametrize(
    ("function", "traits", "error", "message"),
    [
        (no_components, {}, UsageError, "batch field 'mine'"),
        (raises, {}, RunFailure, "'mine'"),
        (asks_for_too_much, {}, RecipeError, "'reference'"),
        (no_components, {"needs": ("label",)}, RecipeError, "'labels'"),
        (no_components, {"fills": ("mine", "labels")}, RecipeError, "'labels'"),
    ],
)
def test_batch_field_that_cannot_work_is_reported(
    function: Any, traits: dict[str, Any], error: type, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        registry._ENTRIES["batch_field"], "mine", registry.Entry("batch_field", "mine", function, traits)
    )
    declare_code("test_batch_fields:reads_mine")
    recipe = one_layer_recipe("sft", objective="test_batch_fields:reads_mine")
    with refuses(error, message):
        prepare(recipe).source(1)


def test_what_a_teacher_saw_is_not_known_before_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        registry._ENTRIES["batch_field"], "mine", registry.Entry("batch_field", "mine", sees, {"each_step": True})
    )
    declare_code("test_batch_fields:reads_mine")
    recipe = one_layer_recipe("sft", objective="test_batch_fields:reads_mine", teacher={"name": "tiny"})
    with refuses(RecipeError, "'mine'", "'batch'", "'seen'"):
        prepare(recipe)


@register("objective", level="token", needs=("mine",))
def reads_mine(outputs: Outputs, batch: Batch) -> Loss:
    """An objective for the tests above, whose batch field cannot work."""
    raise AssertionError("never called")


def test_batch_fields_do_not_depend_on_micro_batches() -> None:
    whole = prepare(reference_recipe(rollout={"old_logprobs": "trainer"})).source(1).batch
    pieces = prepare(reference_recipe(rollout={"old_logprobs": "trainer"}, train={"micro_batch_rows": 3}))
    batch = pieces.source(1).batch
    assert torch.equal(batch.tokens, whole.tokens)
    for name in ("old_logprobs", "ref_logprobs"):
        assert difference(batch.fields[name], whole.fields[name]) == approx(0.0, abs=CLOSE)
        assert bool((batch.fields[name][batch.mask] < 0).all())
        assert not bool(batch.fields[name][~batch.mask].any())


# --- corrections ---


def test_a_correction_is_its_component_applied_to_trainer_minus_sampler() -> None:
    """Answers truncated by top-k have the log-probabilities of the full distribution; here the sampler lies."""
    correction = {"name": "icepop", "low": 0.9, "high": 1.1}
    recipe = one_layer_recipe("grpo", correction=correction, rollout={"old_logprobs": "trainer"})
    parts = prepare(recipe)
    lie_a_little(parts)
    batch = parts.source(1).batch
    assert batch is not None
    trainer = plain_logprobs(parts.model, batch)
    assert difference(batch.fields["old_logprobs"], trainer) == approx(0.0, abs=CLOSE)
    mismatch = trainer - batch.fields["sampler_logprobs"]
    assert 0.05 < float(mismatch.abs().max()) < 0.5
    expected = registry.find("correction", "icepop").bind({"low": 0.9, "high": 1.1})(mismatch, batch.mask)
    assert difference(batch.fields["correction"], expected) == approx(0.0, abs=1e-3)
    weights = batch.fields["correction"]
    assert weights[~batch.mask].tolist() == [1.0] * int((~batch.mask).sum())
    assert len({round(w, 2) for w in weights[batch.mask].tolist()}) > 3


def lie_a_little(parts: TrainerState) -> None:
    """Let the engine report log-probabilities that are off, by an amount that differs from token to token."""
    generate = parts.engine.generate

    def off(completion: Completion) -> Completion:
        shifted = (x + 0.3 * ((i % 3) - 1) * min(1.0, -x) for i, x in enumerate(completion.logprobs))
        return replace(completion, logprobs=tuple(shifted))

    def lying(*given: Any) -> list[list[Completion]]:
        return [[off(completion) for completion in group] for group in generate(*given)]

    fake_methods = {"generate": staticmethod(lying), "sync": lambda self, version: None, "rest": lambda self: None}
    engine = type("Lying", (), fake_methods)()
    parts.source.sampler = replace(parts.source.sampler, engine=engine)  # type: ignore[union-attr]


# --- teachers ---


def test_the_streams_of_another_model_are_its_own_top_candidates(tmp_path: Path) -> None:
    name = save_perturbed(tmp_path / "teacher")
    recipe = one_layer_recipe("grpo", objective={"name": "distillation"}, teacher={"name": name, "top_k": 7})
    parts = prepare(recipe)
    teacher = AutoModelForCausalLM.from_pretrained(name).eval()
    batch = parts.source(1).batch
    assert batch is not None
    ids, logprobs = batch.fields["teacher_ids"], batch.fields["teacher_candidate_logprobs"]
    assert ids.shape == logprobs.shape == (*batch.mask.shape, 7)
    for b in range(batch.num_rows):
        with torch.no_grad():
            logits = teacher(batch.tokens[b : b + 1, : int(batch.lengths[b])]).logits[0]
        table = logits.log_softmax(-1)  # at temperature 1
        for t in batch.mask[b].nonzero()[:, 0].tolist():
            best = table[t - 1].topk(7)
            assert difference(logprobs[b, t], best.values) == approx(0.0, abs=CLOSE)
            given = table[t - 1][ids[b, t]]  # ties may come in another order
            assert difference(given, best.values) == approx(0.0, abs=CLOSE)
    assert not bool(ids[~batch.mask].any())
    assert not bool(logprobs[~batch.mask].any())
    assert not any(p is q for p in teacher.parameters() for _, q in parts.parameters)


def test_a_teacher_scores_the_tokens_that_were_sampled(tmp_path: Path) -> None:
    name = save_perturbed(tmp_path / "teacher")
    objective = {"name": "on_policy_distillation"}
    recipe = one_layer_recipe("grpo", objective=objective, teacher={"name": name}, train={"micro_batch_rows": 3})
    parts = prepare(recipe)
    update(parts, recipe, 1, lr=1e-3)
    batch = parts.source(2).batch
    assert batch is not None
    teacher = AutoModelForCausalLM.from_pretrained(name).eval()
    assert difference(batch.fields["teacher_logprobs"], plain_logprobs(teacher, batch)) == approx(0.0, abs=CLOSE)
    assert difference(batch.fields["teacher_logprobs"], batch.fields["old_logprobs"]) > 0.05


def save_padded(folder: Path, num_added: int, noise: float = 0.05) -> str:
    """The perturbed model with more rows in its embeddings than the tokenizer has ids, which repeat the first."""
    save_perturbed(folder, noise)
    model = AutoModelForCausalLM.from_pretrained(folder)
    size = model.config.vocab_size
    model.resize_token_embeddings(size + num_added, mean_resizing=False)
    with torch.no_grad():
        for table in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            table[size:] = table[:num_added]
    model.save_pretrained(folder)
    return str(folder)


def exact_divergence(student: Any, teacher: Any, batch: Batch, n: int, divergence: str) -> Tensor:
    """In float64 over the first n ids, each distribution renormalized over them; ``[B, T]``."""
    found = torch.zeros(batch.tokens.shape, dtype=torch.float64)
    for b in range(batch.num_rows):
        ids = batch.tokens[b : b + 1, : int(batch.lengths[b])]
        with torch.no_grad():
            q, p = (model(ids).logits[0, :-1, :n].double().log_softmax(-1) for model in (student, teacher))
        kl = p.exp() * (p - q) if divergence == "forward_kl" else q.exp() * (q - p)
        found[b, 1 : ids.shape[1]] = kl.sum(-1)
    return torch.where(batch.mask, found, torch.zeros_like(found))


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
@pytest.mark.parametrize("larger", ["teacher", "student", "both"])
def test_teacher_and_student_with_padded_embeddings_are_compared_over_the_tokenizers_ids(
    tmp_path: Path, divergence: str, larger: str
) -> None:
    added = {"teacher": (0, 64), "student": (64, 0), "both": (128, 64)}[larger]
    student_name = save_padded(tmp_path / "student", added[0], noise=0.02)
    teacher_name = save_padded(tmp_path / "teacher", added[1])
    recipe = one_layer_recipe(
        "grpo",
        model={"name": student_name},
        objective={"name": "distillation", "divergence": divergence},
        teacher={"name": teacher_name, "top_k": 100_000},
        rollout={"temperature": 1.0, "max_tokens": 6},
    )
    parts = prepare(recipe)
    batch = parts.source(1).batch
    assert batch is not None
    n = len(parts.tokenizer)
    student, teacher = (AutoModelForCausalLM.from_pretrained(name).eval() for name in (student_name, teacher_name))
    sizes = [model.get_output_embeddings().weight.shape[0] for model in (student, teacher)]
    assert sizes == [n + extra for extra in added]
    assert batch.fields["teacher_ids"].shape[-1] == n
    outputs = parts.method.forward(batch, "none", with_candidates=True)
    found = parts.method.objective(outputs, batch).values.detach()
    expected = exact_divergence(student, teacher, batch, n, divergence)
    assert difference(found.double(), expected) < 2e-4
    for field in (outputs.candidate_logprobs, batch.fields["teacher_candidate_logprobs"]):
        masses = field.exp().sum(-1)[batch.mask]
        assert allclose(masses, torch.ones_like(masses), rtol=0, atol=1e-4)  # no mass on padding
    whole = exact_divergence(student, teacher, batch, min(sizes), divergence)
    if larger == "both":
        assert difference(whole, expected) > 2e-3  # padding counted, too
    loss, _ = accumulate(parts.method, batch, recipe.train)
    assert math.isfinite(loss)


def test_teacher_logprobs_of_padded_embeddings_are_over_the_tokenizers_ids(tmp_path: Path) -> None:
    name = save_padded(tmp_path / "teacher", 64)
    recipe = one_layer_recipe("grpo", objective={"name": "on_policy_distillation"}, teacher={"name": name})
    parts = prepare(recipe)
    batch = parts.source(1).batch
    assert batch is not None
    teacher = AutoModelForCausalLM.from_pretrained(name).eval()
    over_all = plain_logprobs(teacher, batch)
    teacher.resize_token_embeddings(len(parts.tokenizer))
    assert difference(batch.fields["teacher_logprobs"], plain_logprobs(teacher, batch)) < CLOSE
    assert difference(over_all, plain_logprobs(teacher, batch)) > 1e-3


def test_a_teacher_of_another_vocabulary_is_refused_by_name(tmp_path: Path, tiny_random, small_tokenizer) -> None:
    folder = tmp_path / "unrelated"
    tiny_random("qwen3", vocab_size=len(small_tokenizer)).save_pretrained(folder)
    small_tokenizer.save_pretrained(folder)
    recipe = one_layer_recipe("grpo", objective={"name": "on_policy_distillation"}, teacher={"name": str(folder)})
    with refuses(UsageError, "teacher.name: '"):
        prepare(recipe)


# --- values ---


@pytest.mark.parametrize(("trunk", "bootstrap", "adapter"), [("separate", True, LORA), ("shared", False, {})])
def test_values_and_returns_of_ppo(trunk: str, bootstrap: bool, adapter: dict[str, Any]) -> None:
    """GAE by its definition, from values and log-probabilities of plain modules."""
    declare_code("choosing_engine:choosing")
    engine = {"name": "choosing_engine:choosing", "texts": [" 7 </answer>", " 9", " 4567890123456789012"]}
    recipe = one_layer_recipe(
        "grpo",
        model=adapter,
        objective={"name": "ppo"},
        advantage={"name": "gae", "gamma": 0.9, "gae_lambda": 0.8, "whiten": False, "bootstrap": bootstrap},
        kl_in_reward={"weight": 0.2},
        head={"trunk": trunk, "init_std": 0.05, "lr_ratio": 2.0},
        rollout={"old_logprobs": "trainer", "max_tokens": 12, "engine": engine},
        train={"ppo_epochs": 2, "micro_batch_rows": 5},
    )
    parts = prepare(recipe)
    update(parts, recipe, 1, lr=1e-3)
    update(parts, recipe, 2, lr=1e-3)
    draw = parts.source(3)
    batch = draw.batch
    assert batch is not None
    head = parts.heads["head"]
    scorer = parts.heads["critic"] if trunk == "separate" else parts.model
    kl = 0.2 * (batch.fields["sampler_logprobs"] - plain_logprobs(initial_model(), batch)).double()
    assert {r.completion.finish for r in draw.rollouts} == {"stop", "length"}
    for b, rollout in enumerate(draw.rollouts):
        values, after = plain_values(scorer, head, batch, b)
        trained = batch.mask[b].nonzero()[:, 0].tolist()
        assert difference(batch.fields["old_values"][b, trained], values) == approx(0.0, abs=CLOSE)
        rewards = [-float(kl[b, t]) for t in trained]
        unpaid = bootstrap and rollout.completion.finish == "length"
        rewards[-1] += 0.0 if unpaid else rollout.reward
        following = [*values[1:].tolist(), float(after) if unpaid else 0.0]
        errors = [r + 0.9 * nxt - float(v) for r, nxt, v in zip(rewards, following, values, strict=True)]
        for i, t in enumerate(trained):
            advantage = sum(e * (0.9 * 0.8) ** k for k, e in enumerate(errors[i:]))
            assert float(batch.fields["advantages"][b, t]) == approx(advantage, abs=2e-4)
            assert float(batch.fields["returns"][b, t]) == approx(advantage + float(values[i]), abs=2e-4)
    assert float(batch.fields["old_values"].abs().max()) > 0.05
    if trunk == "separate":
        policy, critic = (dict(m.named_parameters()) for m in (parts.model, scorer))
        moved = [name for name, p in policy.items() if p.requires_grad and not torch.equal(p, critic[name])]
        assert moved  # two models by now


@torch.no_grad()
def plain_values(scorer: Any, head: Any, batch: Batch, b: int) -> tuple[Tensor, Tensor]:
    """Values of the states before row b's trained tokens, and of the one after its last."""
    base = scorer.get_base_model() if hasattr(scorer, "get_base_model") else scorer
    hidden = base.model(batch.tokens[b : b + 1, : int(batch.lengths[b])]).last_hidden_state[0]
    values = hidden @ head.weight[0]
    trained = batch.mask[b].nonzero()[:, 0]
    return values[trained - 1], values[-1]
