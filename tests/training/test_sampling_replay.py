"""Training under top-k, top-p and min-p over the sets that sampling kept: ratios, gradients, splits, resumed runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from balanced_runs import read_run
from closeness import OF_EMBEDDED, OF_TINY_RANDOM, allclose, approx, logprob_rounding, rounding
from posttrain.balances.findings import Reading
from posttrain.balances.of_answers import read_answers
from posttrain.errors import DataError, EngineMismatch, RecipeError
from posttrain.models.forward import predictions
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.predictions import LOG_ZERO
from posttrain.recipes.recipe import load_recipe
from posttrain.store.rollouts import RolloutStore
from posttrain.training.build import prepare
from posttrain.training.records.stored_records import read_run_records
from posttrain.training.sources import stored
from posttrain.training.step import accumulate
from posttrain.types import Batch, KeptSets, Sample, collate
from refusing import refuses
from small_runs import one_layer_recipe, recorded, run, same_bits, save_perturbed, saved_tensors, steps_of, untimed
from tiny_random import build_tiny_random

CUT = {"top_p": 0.8, "top_k": 12}
TEMPERATURE = 1.3


def made_up_rows(seed: int = 0) -> list[Sample]:
    """Rows of a prompt and an answer whose ids have sets of 1 to 9 tokens; a part of the third row was forced."""
    numbers = torch.Generator().manual_seed(seed)
    rows = []
    for n in range(4):
        prompt, answer = [5, 6, 7 + n // 2], torch.randint(0, 300, (6 + n,), generator=numbers).tolist()
        own = [not (n == 2 and 2 <= t < 5) for t in range(len(answer))]
        ids, counts = list[int](), list[int]()
        for token, is_own in zip(answer, own, strict=True):
            others = torch.randint(0, 300, (int(torch.randint(0, 9, (), generator=numbers)),), generator=numbers)
            members = sorted({token, *others.tolist()}) if is_own else []
            ids += members
            counts.append(len(members))
        kept = KeptSets.of_counts(ids, counts)
        weights = torch.randn(len(prompt) + len(answer), generator=numbers).tolist()
        mask = [False] * len(prompt) + own
        rows.append(Sample(prompt + answer, mask, n // 2, len(prompt), {"advantages": weights}, kept))
    return rows


def own_numbers(model: Any, rows: list[Sample], entropy_weight: float) -> tuple[list[Tensor], Tensor]:
    """In float64, row by row, from the definition: log p over each set, and ``sum(w log p) + c sum(H)``."""
    found, total = list[Tensor](), torch.zeros((), dtype=torch.float64)
    for row in rows:
        assert row.kept is not None
        logits = model(input_ids=torch.tensor([list(row.ids)]), use_cache=False).logits[0].double() / TEMPERATURE
        start = len(row.ids) - len(row.kept.offsets) + 1
        for t in range(start, len(row.ids)):
            if not row.mask[t]:
                continue
            members = list(row.kept.at(t - start))
            table = logits[t - 1, members].log_softmax(-1)
            found.append(table[members.index(row.ids[t])])
            total = total + row.fields["advantages"][t] * found[-1] - entropy_weight * (table.exp() * table).sum()
    return found, total


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])  # packed with a shared prompt, and padded
@pytest.mark.parametrize("entropy", ["detached", "differentiable"])
def test_forward_over_kept_sets_logprobs_and_gradient_are_those_of_float64(architecture: str, entropy: Any) -> None:
    model = build_tiny_random(architecture)
    rows = made_up_rows()
    batch = collate(rows)
    weight = 0.3 if entropy == "differentiable" else 0.0
    outputs = Forward(model, TEMPERATURE)(batch, entropy)
    values = (batch.field("advantages") * outputs.logprobs + weight * outputs.entropy)[batch.mask].sum()
    values.backward()
    exact = build_tiny_random(architecture).double()
    expected, total = own_numbers(exact, rows, weight)
    total.backward()
    logprobs = outputs.logprobs[batch.mask].detach().double()
    assert allclose(logprobs, torch.stack(expected).detach(), atol=OF_TINY_RANDOM, rtol=0)
    for (name, mine), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
        size = float(theirs.grad.abs().max())
        assert mine.grad is not None, name
        assert allclose(mine.grad.double(), theirs.grad, atol=max(size, 1.0) * OF_TINY_RANDOM, rtol=0), name


@pytest.mark.parametrize("is_head_fixed", [False, True])
def test_forward_over_kept_sets_in_chunks_equals_whole(monkeypatch: pytest.MonkeyPatch, is_head_fixed: bool) -> None:
    """Chunks of three tokens: kept for the backward pass, computed again, or with slopes under a fixed head."""
    batch = collate(made_up_rows())
    found = []
    for limit in (1 << 24, 900):
        monkeypatch.setattr(predictions, "MAX_LOGIT_ELEMENTS", limit)
        monkeypatch.setattr(predictions, "KEPT_ELEMENTS", 2 * limit)
        model = build_tiny_random("qwen3", tie_word_embeddings=False)
        model.get_output_embeddings().requires_grad_(not is_head_fixed)
        outputs = Forward(model, TEMPERATURE)(batch)
        (batch.field("advantages") * outputs.logprobs).sum().backward()
        gradient = model.get_input_embeddings().weight.grad
        found.append((outputs.logprobs.detach(), outputs.entropy, gradient))
    for one, other in zip(*found, strict=True):
        assert allclose(one, other, atol=OF_TINY_RANDOM * max(1.0, float(one.abs().max())), rtol=0)


def test_forward_token_without_a_set_is_over_the_whole_vocabulary_and_one_outside_of_its_set_impossible() -> None:
    model = build_tiny_random("qwen3")
    row = Sample([5, 6, 7, 8], [False, True, True, True], kept=KeptSets((9, 10, 7, 8), (0, 0, 2, 4)))
    with torch.no_grad():
        logprobs = Forward(model)(collate([row])).logprobs[0]
        table = model(input_ids=torch.tensor([[5, 6, 7, 8]]), use_cache=False).logits[0]
    assert float(logprobs[1]) == approx(float(table[0].log_softmax(-1)[6]), abs=OF_TINY_RANDOM)
    assert float(logprobs[2]) == LOG_ZERO
    assert float(logprobs[3]) == approx(float(table[2, [7, 8]].log_softmax(-1)[1]), abs=OF_TINY_RANDOM)


@pytest.mark.parametrize("options", [CUT, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 5, "temperature": 0.8}])
def test_first_update_under_truncation_has_ratio_one(tmp_path: Path, options: dict[str, Any]) -> None:
    recipe = one_layer_recipe("grpo", rollout=options, regularize={"kl_coef": 0.1}, train={"steps": 2, "lr": 1e-3})
    read = read_run(tmp_path, recipe)
    assert read.violated == {}
    assert {"sampler", "kept_sets", "draws"} <= set(read.worst), "none is left out for truncation"
    first, second = steps_of(tmp_path)
    assert first["ratio_distance"] == approx(0.0, abs=OF_EMBEDDED / 8), "one deviation"
    assert first["kl_ref"] == approx(0.0, abs=1e-10)
    assert second["kl_ref"] > 1e-6
    assert 1.0 < first["kept_tokens"] < 768
    assert ("top_k" in options) <= (first["kept_sets_cut"] == 0.0)


def test_first_update_of_the_packaged_model_has_ratio_one_to_a_millionth(tmp_path: Path) -> None:
    """The recipe's own model, prompts and sampling, as they are used: logits are below 20."""
    changes = {"train.steps": "1", "eval.every": "0", "rollout.num_prompts": "4", "rollout.top_p": "0.95"}
    recipe = load_recipe("tiny/grpo", [*changes.items(), ("rollout.top_k", "20")])
    run(tmp_path, recipe.resolve())
    (only,) = steps_of(tmp_path)
    assert only["ratio_distance"] == approx(0.0, abs=1e-6)
    assert only["kl_sampler"] == approx(0.0, abs=3e-12)


def test_first_update_of_the_packaged_model_differs_at_no_token_by_more_than_rounding() -> None:
    """A millionth holds for the mean. One token may be off by more: a logit of 23 rounds by up to 1e-6 in fp32.

    Decoding and the packed forward pass each round on their own. Both are compared with the model in float64, whose
    distance is half of what two computations in fp32 may differ by.
    """
    parts = prepare(load_recipe("tiny/grpo-top-p", [("rollout.num_prompts", "4")]).resolve())
    batch = parts.source(1).batch
    assert batch is not None
    with torch.no_grad():
        trainer = Forward(parts.model, 1.0)(batch).logprobs[batch.mask].double()
        model = parts.model.double()
        exact, largest = list[float](), 0.0
        for b in range(batch.num_rows):
            row = batch.select([b])
            assert row.kept is not None
            logits = model(row.tokens, use_cache=False).logits[0]
            for t in row.mask[0].nonzero()[:, 0].tolist():
                start, count = int(row.kept.starts[0, t]), int(row.kept.counts[0, t])
                members = row.kept.ids[start : start + count].tolist()
                table = logits[t - 1, members].log_softmax(-1)
                exact.append(float(table[members.index(int(row.tokens[0, t]))]))
                largest = max(largest, float(logits[t - 1].abs().max()))
    sampler = batch.field("sampler_logprobs")[batch.mask].double()
    bound = logprob_rounding(4, size=largest)
    for found in (sampler, trainer):
        assert allclose(found, torch.tensor(exact).double(), atol=bound / 2, rtol=0)
    assert allclose((trainer - sampler).exp(), torch.ones_like(sampler), atol=bound, rtol=0)
    assert float(torch.finfo(torch.float32).eps / 2 * 2 ** math.floor(math.log2(largest))) > 9e-7, "one rounding"
    assert float((trainer - sampler).expm1().abs().mean()) == approx(0.0, abs=1e-6)


def test_trained_logprobs_of_reference_and_old_policy_are_over_the_sets(tmp_path: Path) -> None:
    """Each compared with plain modules in float64, row by row; over the whole vocabulary they would be lower."""
    recipe = one_layer_recipe(
        "grpo", rollout=CUT | {"old_logprobs": "trainer", "temperature": TEMPERATURE}, regularize={"kl_coef": 0.1}
    )
    parts = prepare(recipe)
    batch = parts.source(1).batch
    assert batch is not None
    model = parts.model.double()
    for b in range(batch.num_rows):
        row = batch.select([b])
        with torch.no_grad():
            logits = model(row.tokens, use_cache=False).logits[0].double() / TEMPERATURE
        for t in row.mask[0].nonzero()[:, 0].tolist():
            start, count = int(row.kept.starts[0, t]), int(row.kept.counts[0, t])
            members = row.kept.ids[start : start + count].tolist()
            token = int(row.tokens[0, t])
            expected = float(logits[t - 1, members].log_softmax(-1)[members.index(token)])
            for name in ("sampler_logprobs", "old_logprobs", "ref_logprobs"):
                assert float(row.field(name)[0, t]) == approx(expected, abs=1e-4), name
            assert count == 1 or float(logits[t - 1].log_softmax(-1)[token]) < expected


def test_gradient_under_truncation_does_not_depend_on_the_split_into_micro_batches() -> None:
    found = []
    for tokens in (8192, 40):
        recipe = one_layer_recipe("grpo", rollout=CUT, train={"micro_batch_tokens": tokens}, model={"dtype": "fp32"})
        parts = prepare(recipe)
        accumulate(parts.method, parts.source(1).batch, recipe.train)
        found.append({name: p.grad.clone() for name, p in parts.parameters if p.grad is not None})
    for name, gradient in found[0].items():
        bound = rounding(torch.float32, size=float(gradient.abs().max()), terms=1000, condition=50)
        assert allclose(gradient, found[1][name], atol=bound, rtol=0), name


@pytest.mark.parametrize(
    "changes",
    [
        {"train": {"steps": 4, "num_minibatches": 2, "save_every": 1, "lr": 1e-3}},
        {"train": {"steps": 4, "lr": 1e-3}, "rollout": CUT | {"staleness": 1}},
    ],
    ids=["minibatches", "ahead"],
)
def test_run_under_truncation_stopped_and_resumed_equals_undisturbed(tmp_path: Path, changes: dict[str, Any]) -> None:
    recipe = one_layer_recipe("grpo", **({"rollout": CUT} | changes))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(whole, recipe)
    run(cut, recipe, stop_after=3)
    run(cut, recipe, resume=True)
    assert same_bits(saved_tensors(whole, 4), saved_tensors(cut, 4))
    assert untimed(cut) == untimed(whole)
    assert recorded(cut) == recorded(whole)
    rows = RolloutStore(whole / "rollouts.db", read_only=True).training(1)
    assert all(token in row.kept.at(t) for row in rows for t, token in enumerate(row.token_ids[-row.num_tokens :]))


def sampled_batch() -> tuple[Batch, dict[str, Tensor]]:
    batch = prepare(one_layer_recipe("grpo", rollout=CUT)).source(1).batch
    assert batch is not None
    return batch, stored.write_batch(batch)


@pytest.mark.parametrize(
    "damage",
    [
        {"kept.ids": lambda x: x + 10_000},
        {"kept.ids": lambda x: x.long()},
        {"kept.counts": lambda x: x + 1},
        {"kept.starts": lambda x: x - 1},
        {"kept.starts": lambda x: x[:, 1:]},
    ],
)
def test_rollout_buffer_with_sets_that_do_not_fit_is_refused(damage: dict[str, Any]) -> None:
    batch, tensors = sampled_batch()
    read = stored.read_batch(tensors, 1, 768)
    assert torch.equal(read.kept.ids, batch.kept.ids)
    ((name, change),) = damage.items()
    with pytest.raises(ValueError, match="other sets"):
        stored.read_batch(tensors | {name: change(tensors[name])}, 1, 768)


@pytest.mark.parametrize(
    "damage",
    [{"offsets": [0, 1]}, {"ids": [900] * 3}, {"num_cut": -1}, {"offsets": [0, 3, 2, 3]}, {"offsets": [1, 2, 3, 3]}],
)
def test_batches_ahead_with_sets_that_do_not_fit_are_refused(damage: dict[str, Any]) -> None:
    good = {"ids": [4, 5, 6], "offsets": [0, 1, 2, 3], "num_cut": 0}
    stored._check_kept(good, 3, 768)
    with pytest.raises(ValueError, match="other sets"):
        stored._check_kept(good | damage, 3, 768)


def test_rollouts_file_with_sets_of_another_length_is_damaged(tmp_path: Path) -> None:
    import sqlite3

    run(tmp_path, one_layer_recipe("grpo", rollout=CUT, train={"steps": 1}))
    with sqlite3.connect(tmp_path / "rollouts.db") as db:
        db.execute("UPDATE rollouts SET kept_sets = x'0100000002000000' WHERE id = 1")
    with refuses(DataError, "rollouts.db", "row 1"):
        RolloutStore(tmp_path / "rollouts.db", read_only=True).training()


def kept_reading(folder: Path, **changes: Any) -> Reading:
    record = next(iter(read_run_records(folder)))
    answers = [replace(record.answers[0], **changes), *record.answers[1:]]
    return {one.check: one for one in read_answers(replace(record, answers=answers))}["kept_sets"]


def test_kept_sets_balance_finds_a_token_outside_of_its_set_and_a_set_that_is_too_large(tmp_path: Path) -> None:
    run(tmp_path, one_layer_recipe("grpo", rollout=CUT, train={"steps": 1}))
    answer = next(iter(read_run_records(tmp_path))).answers[0]
    assert kept_reading(tmp_path).holds
    assert not kept_reading(tmp_path, kept=None).holds
    others = KeptSets.of_counts([767] * len(answer.ids), [1] * len(answer.ids))
    assert not kept_reading(tmp_path, kept=others).holds
    wide = KeptSets.of_counts(list(range(768)) * len(answer.ids), [768] * len(answer.ids))
    assert not kept_reading(tmp_path, kept=wide).holds


def test_sampler_of_other_sets_than_it_says_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An engine whose log-probabilities are of the whole distribution, as without replay."""
    from posttrain.sampling.native import schedule

    draw = schedule.draw_kept

    def whole(logits: Tensor, uniforms: Tensor, sampling: Any) -> tuple[Tensor, Tensor, Tensor]:
        ids, _, sets = draw(logits, uniforms, sampling)
        table = (logits.float() / sampling.temperature).softmax(-1)
        return ids, table.gather(1, ids[:, None])[:, 0], sets

    monkeypatch.setattr(schedule, "draw_kept", whole)
    with refuses(EngineMismatch, "sampler and trained model differ", "native"):
        run(tmp_path, one_layer_recipe("grpo", rollout={"top_k": 2}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rollout": {"top_k": 600}}, ["rollout.top_k", "512"]),
        ({"rollout": CUT | {"engine": {"name": "scripted", "texts": ["1"]}}}, ["rollout.top_k", "scripted", "native"]),
    ],
)
def test_truncation_that_cannot_be_followed_is_refused_by_name(changes: dict[str, Any], named: list[str]) -> None:
    with refuses(RecipeError, *named):
        prepare(one_layer_recipe("grpo", **changes))


def test_objective_that_reads_only_the_tokens_learns_the_whole_distribution() -> None:
    """Expert iteration draws from a part and fits the model as it will be used."""
    recipe = one_layer_recipe("grpo", rollout=CUT, objective="cross_entropy", advantage=None, aggregate="token_mean")
    parts = prepare(recipe)
    assert not parts.source.sampling.keeps_sets  # type: ignore[union-attr]
    assert parts.source(1).batch.kept is None


def test_teacher_of_on_policy_distillation_is_read_over_the_sets(tmp_path: Path) -> None:
    name = save_perturbed(tmp_path / "teacher")
    recipe = one_layer_recipe(
        "grpo", rollout=CUT, objective={"name": "on_policy_distillation"}, teacher={"name": name}, advantage=None
    )
    parts = prepare(recipe)
    batch = parts.source(1).batch
    alone = batch.kept.counts.eq(1) & batch.mask
    assert bool(alone.any())
    largest = float(batch.field("teacher_logprobs")[alone].abs().max())
    assert largest == approx(0.0, abs=rounding(torch.float32)), "the only token has probability 1"
    assert float(batch.field("teacher_logprobs")[batch.mask].min()) < -0.1


def test_rows_of_a_buffer_without_sets_are_read_as_before(tmp_path: Path) -> None:
    _, tensors = sampled_batch()
    without = {name: x for name, x in tensors.items() if not name.startswith("kept.")}
    assert stored.read_batch(without, 1, 768).kept is None
    with pytest.raises(KeyError):
        stored.read_batch(without | {"kept.ids": tensors["kept.ids"]}, 1, 768)
