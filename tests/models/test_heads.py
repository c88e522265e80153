"""Scalar heads over the forward pass: what is read where, on every path, with its gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from small_models import gradients, ragged_batch, random_model, relative_difference, unshared

from closeness import allclose, approx, assert_close
from posttrain.models.forward.actor_critic import ActorCritic, state_values
from posttrain.models.forward.forward import Forward
from posttrain.models.heads import ScalarHead
from posttrain.types import Batch, Sample, collate

PATHS = [("qwen3", "packed"), ("gpt2", "padded"), ("granite", "padded")]
# All but GPT-2 compute norms and rotary embeddings in fp32 whatever the weights are.
TOLERANCE = {"gpt2": 1e-12, "qwen3": 1e-5, "granite": 1e-5}


def head_of(outputs: int = 1, seed: int = 5) -> ScalarHead:
    """Large weights, so that a score says where it was read."""
    return ScalarHead(32, outputs, seed=seed, init_std=1.0)


def hidden_alone(model: torch.nn.Module, batch: Batch, row: int) -> torch.Tensor:
    """``[n, d]``: what the LM head of a model reads, one row alone and without padding."""
    n = int(batch.lengths[row])
    found = model(batch.tokens[row : row + 1, :n], use_cache=False, output_hidden_states=True)
    return found.hidden_states[-1][0]


def reference_scores(model: torch.nn.Module, head: ScalarHead, batch: Batch, reads: str) -> torch.Tensor:
    """``[B, T, C]`` by loops over rows, tokens and outputs, in float64."""
    classes = head.weight.shape[0]
    scores = torch.zeros((*batch.tokens.shape, classes), dtype=torch.float64)
    for b in range(batch.num_rows):
        hidden = hidden_alone(model, batch, b).double()
        for t in range(int(batch.lengths[b])):
            for c in range(classes):
                if batch.mask[b, t]:
                    state = hidden[t if reads == "at" else t - 1]
                    scores[b, t, c] = (state * head.weight[c].double()).sum()
    return scores


def test_a_head_is_a_function_of_its_seed_and_leaves_other_randomness_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    heads = [ScalarHead(4096, 3, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(torch.rand(4), expected)
    assert torch.equal(heads[0].weight, heads[1].weight)
    assert not torch.equal(heads[0].weight, heads[2].weight)
    assert heads[0].weight.shape == (3, 4096)
    assert float(heads[0].weight.detach().std()) == approx(0.02, rel=0.03)
    assert [name for name, _ in heads[0].named_parameters()] == ["weight"]
    wide = ScalarHead(4096, 3, seed=1, init_std=0.5)
    assert allclose(wide.weight, heads[0].weight * 25, rtol=1e-6)
    assert not ScalarHead(8, init_std=0.0).weight.any()


def test_a_head_worked_by_hand_in_every_type():
    head = ScalarHead(2, 2)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, -2.0], [0.5, 4.0]]))
    states = torch.tensor([[3.0, 1.0], [0.0, -1.0]])
    expected = [[1.0, 5.5], [2.0, -4.0]]
    for dtype, result in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2):
        scores = head(states.to(dtype))
        assert scores.dtype == result
        assert scores.tolist() == expected
    assert head.weight.dtype == torch.float32
    single = ScalarHead(2)
    with torch.no_grad():
        single.weight.copy_(torch.tensor([[1.0 + 2**-20, 0.0]]))
    coarse = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16)
    assert single(coarse).tolist() == [1.0 + 2**-20], "bf16 would round it to 1"
    assert single(coarse).shape == (1,)
    assert single(coarse[:0]).shape == (0,)


@pytest.mark.parametrize(("reads", "outputs"), [("before", 1), ("at", 3)])
@pytest.mark.parametrize(("family", "path"), PATHS)
@torch.no_grad()
def test_scores_equal_each_row_alone(family: str, path: str, reads: str, outputs: int):
    model, head = random_model(family), head_of(outputs)
    batch = ragged_batch()
    expected = reference_scores(model, head, batch, reads)
    plain = Forward(model)
    assert plain.path == ("padded" if family == "granite" else "packed")
    plain.path = path
    for scores_only in (False, True):
        forward = Forward(model, head=head, reads=reads, scores_only=scores_only)
        assert forward.path == ("padded" if family == "granite" else "packed")
        forward.path = path
        for rows in (batch, unshared(batch)):
            outputs_found = forward(rows)
            scores = outputs_found.scores
            assert scores.dtype == torch.float32
            assert scores.shape == (batch.tokens.shape if outputs == 1 else (*batch.tokens.shape, outputs))
            assert_close(
                scores.view(expected.shape).double(), expected, atol=1e-5 * float(expected.abs().max()), rtol=0
            )
            assert not scores[~batch.mask].any()
            assert torch.equal(forward.read_scores(rows), scores)
            if scores_only:
                assert outputs_found.entropy is None
                assert torch.equal(outputs_found.logprobs, torch.zeros(batch.tokens.shape))
            else:
                assert_close(outputs_found.logprobs, plain(rows).logprobs, atol=1e-5, rtol=0)
                assert outputs_found.entropy is not None
    spread = expected[batch.mask].std(dim=0)
    assert float(spread.min()) > 1, "scores must tell positions apart"


@pytest.mark.parametrize("reads", ["before", "at"])
@pytest.mark.parametrize(("family", "path"), PATHS)
def test_gradients_of_scores_and_of_both_together(family: str, path: str, reads: str):
    """A shared trunk: log-probabilities and scores in one loss, against each row alone through plain modules."""
    model, head = random_model(family, torch.float64), head_of(3).double()
    batch = ragged_batch()
    generator = torch.Generator().manual_seed(2)
    on_scores = torch.randn((*batch.tokens.shape, 3), generator=generator).double()
    on_logprobs = torch.randn(batch.tokens.shape, generator=generator).double()
    for weight in (0.0, 1.0):  # scores alone, then with the log-probabilities
        model.zero_grad()
        head.zero_grad()
        loss = (reference_scores(model, head, batch, reads) * on_scores).sum()
        for b, n in enumerate(batch.lengths.tolist()):
            table = model(batch.tokens[b : b + 1, :n], use_cache=False).logits[0].log_softmax(-1)
            for t in range(1, n):
                if batch.mask[b, t]:
                    loss = loss + weight * on_logprobs[b, t] * table[t - 1, batch.tokens[b, t]]
        loss.backward()
        expected = gradients(model, head)
        for rows in (batch, unshared(batch)):
            forward = Forward(model, head=head, reads=reads, scores_only=weight == 0.0)
            forward.path = path
            model.zero_grad()
            head.zero_grad()
            outputs = forward(rows)
            assert outputs.scores.dtype == torch.float64
            with forward.backward_context():
                ((outputs.scores * on_scores).sum() + weight * (outputs.logprobs * on_logprobs).sum()).backward()
            assert relative_difference(gradients(model, head), expected) == approx(0.0, abs=TOLERANCE[family])


@pytest.mark.parametrize("path", ["packed", "padded"])
@torch.no_grad()
def test_rows_of_one_own_token_and_rows_without_a_trained_one(path: str):
    model, head = random_model("qwen3"), head_of()
    prompt = [4, 5, 6]
    batch = collate(
        [
            Sample([*prompt, 7], [False] * 3 + [True], group=0, prefix=3),
            Sample([*prompt, 8], [False] * 3 + [True], group=0, prefix=3),
            Sample([9, 3], [False, True], group=1, prefix=1),
            Sample([9, 2], [False, True], group=1, prefix=1),
            Sample([1, 2, 3], [False] * 3, group=2, prefix=2),
            Sample([5], [False], group=3),
            Sample(prompt, [False] * 3, group=0, prefix=3),
        ]
    )
    for reads in ("before", "at"):
        forward = Forward(model, head=head, reads=reads)
        forward.path = path
        scores = forward(batch).scores
        expected = reference_scores(model, head, batch, reads)[..., 0]
        assert_close(scores.double(), expected, atol=1e-4, rtol=0)
        assert (scores != 0).sum() == 4
    forward = Forward(model, head=head)
    forward.path = path
    values, final = state_values(forward, batch)
    assert torch.equal(values[0, 3], values[1, 3]), "the same state before two answers"
    assert (values != 0).sum() == 4
    last = torch.stack([hidden_alone(model, batch, b)[-1] for b in range(batch.num_rows)])
    assert_close(final, head(last), atol=1e-4, rtol=0)
    assert float(final[6] - values[0, 3]) == approx(0, abs=1e-4), "after the prompt is before the answer"
    nothing = forward(collate([Sample([1, 2, 3], [False] * 3), Sample([4, 5], [False] * 2, group=1)]))
    assert not nothing.scores.any()
    assert not nothing.logprobs.any()


@pytest.mark.parametrize(("family", "path"), PATHS)
def test_values_of_states_and_of_the_state_after_the_last_token(family: str, path: str):
    model, head = random_model(family), head_of()
    batch = ragged_batch()
    batch.mask[0] = False  # a row in which nothing is trained ends in a state too
    batch.prefix[10] = batch.lengths[10]  # a prompt without an answer
    batch.fields["advantages"] = torch.zeros(batch.tokens.shape)
    expected = reference_scores(model, head, batch, "before")[..., 0].detach()
    last = [hidden_alone(model, batch, b)[-1].double() for b in range(batch.num_rows)]
    finals = torch.stack([(h * head.weight[0]).sum() for h in last]).detach()
    policy = Forward(random_model(family, seed=1))
    for scores_only in (False, True):
        forward = Forward(model, head=head, scores_only=scores_only)
        forward.path = path
        readers = [forward, ActorCritic(policy, forward)] if scores_only else [forward]
        for reader in readers:
            values, final = state_values(reader, batch)
            assert values.shape == batch.tokens.shape
            assert final.shape == (batch.num_rows,)
            assert not values.requires_grad
            assert not final.requires_grad
            assert_close(values.double(), expected, atol=1e-4, rtol=0)
            assert_close(final.double(), finals, atol=1e-4, rtol=0)
            assert not values[~batch.mask].any()
    assert float(finals.std()) > 1


def actor_critic(family: str, path: str = "packed") -> tuple[torch.nn.Module, ActorCritic, torch.nn.Module]:
    actor, trunk = random_model(family, torch.float64), random_model(family, torch.float64, seed=1)
    head = head_of().double()
    policy, critic = Forward(actor, temperature=0.7), Forward(trunk, head=head, scores_only=True)
    policy.path = critic.path = path
    return actor, ActorCritic(policy, critic), torch.nn.ModuleDict({"trunk": trunk, "head": head})


@pytest.mark.parametrize(("family", "path"), PATHS)
def test_actor_and_critic_side_by_side(family: str, path: str):
    actor, both, critic = actor_critic(family, path)
    batch = ragged_batch()
    batch.fields["teacher_ids"] = torch.ones((*batch.tokens.shape, 2), dtype=torch.long)
    assert both.model is actor
    assert (both.temperature, both.path) == (0.7, path)
    outputs = both(batch, "differentiable", with_candidates=True)
    slots, tokens = both.last_slots, both.last_tokens
    with both.backward_context():
        (outputs.logprobs.sum() + 2 * outputs.scores.sum() + outputs.entropy.sum()).backward()
    found = gradients(actor, critic)
    actor.zero_grad()
    critic.zero_grad()
    alone = both.policy(batch, "differentiable", with_candidates=True)
    values = both.critic(batch)
    assert torch.equal(outputs.logprobs, alone.logprobs)
    assert torch.equal(outputs.entropy, alone.entropy)
    assert torch.equal(outputs.candidate_logprobs, alone.candidate_logprobs)
    assert torch.equal(outputs.scores, values.scores)
    assert slots == 2 * both.policy.last_slots
    assert tokens == 2 * both.policy.last_tokens
    (alone.logprobs.sum() + alone.entropy.sum() + 2 * values.scores.sum()).backward()
    assert relative_difference(found, gradients(actor, critic)) == approx(0.0, abs=1e-12)


@pytest.mark.parametrize("paths", [("packed", "packed"), ("packed", "padded")])
def test_recomputed_activations_of_both_models(paths: tuple[str, str]):
    """If one of the two cannot pack, neither does: backward has one context for both."""
    actor, both, critic = actor_critic("gpt2")
    batch = ragged_batch()
    both.policy.path, both.critic.path = paths
    assert both.path == ("packed" if paths == ("packed", "packed") else "padded")

    def run() -> torch.Tensor:
        actor.zero_grad()
        critic.zero_grad()
        outputs = both(batch)
        with both.backward_context():
            (outputs.logprobs.sum() + outputs.scores.sum()).backward()
        return gradients(actor, critic)

    kept = run()
    for side in (both.policy, both.critic):
        assert (side.last_packing is None) == (both.path == "padded")
    for model in (actor, critic["trunk"]):
        for module in model.modules():  # activations are recomputed in training mode alone
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    calls = []
    actor.transformer.h[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    assert relative_difference(run(), kept) == approx(0.0, abs=1e-12)
    assert len(calls) == 2, "once forward, once recomputed"


def test_a_critic_that_began_as_a_copy_of_an_adapted_policy():
    base = random_model("qwen3")
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")).eval()
    trunk, head = copy.deepcopy(model), head_of()
    both = ActorCritic(Forward(model), Forward(trunk, head=head, scores_only=True))
    assert both.path == "packed"
    batch = ragged_batch()
    outputs = both(batch)
    (outputs.logprobs.sum() + outputs.scores.sum()).backward()
    for side in (model, trunk):
        trained = {name: p.grad for name, p in side.named_parameters() if p.requires_grad}
        assert trained
        assert any(grad is not None and bool(grad.any()) for grad in trained.values())
        assert all(p.grad is None for p in side.parameters() if not p.requires_grad)
