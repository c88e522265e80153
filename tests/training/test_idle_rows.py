"""Rows that cannot change the gradient are left out of the update, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from split_cases import AGGREGATIONS, CASES, Case, CaseRow, blank_row, build_model, collated

from closeness import approx, assert_close, rounding
from posttrain import registry
from posttrain.errors import RecipeError, UsageError
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import TrainSection
from posttrain.training.advantages import AdvantageEstimator
from posttrain.training.batch_fields import Scorer
from posttrain.training.build import prepare
from posttrain.training.idle_rows import IdleRows, check_vanishing, choose_idle_rows, find_idle_rows, split_idle_rows
from posttrain.training.step import Method, accumulate
from posttrain.types import Batch, Loss, Outputs, Sample, collate
from refusing import refuses
from small_runs import one_layer_recipe, run, same_bits, saved_tensors, steps_of, untimed

PLAIN = [Case(case.objective, case.own_options, case.shared) for case in CASES]  # without regularizers
VANISHING = [case for n, case in enumerate(PLAIN) if case.entry.traits["vanishes"] and case not in PLAIN[:n]]
POLICIES = [case for case in VANISHING if case.entry.traits["vanishes"] == ("advantages",)]


@pytest.fixture(scope="module")
def models() -> tuple[torch.nn.Module, torch.nn.Module]:
    return build_model(0), build_model(1)


def gradient_of(
    case: Case, models: Any, aggregate: str, batch: Batch, idle_rows: IdleRows, **train: Any
) -> tuple[torch.Tensor, float, dict[str, float]]:
    forward, modules = case.forward(*models)
    parameters = [p for module in modules for p in module.parameters()]
    for parameter in parameters:
        parameter.grad = None
    method = Method(
        forward,
        case.bind(),
        registry.find("aggregation", aggregate).bind(AGGREGATIONS[aggregate]),
        level=case.entry.traits["level"],
        derive=case.entry.traits.get("derive", dict),
        vanishes=case.entry.traits["vanishes"],
        name=case.objective,
    )
    loss, metrics = accumulate(method, batch, TrainSection(**train), idle_rows=idle_rows)
    assert all(p.grad is not None for p in parameters), "a parameter without a gradient is not stepped"
    return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]), loss, metrics


def silence(rows: list[CaseRow], groups: set[int], names: tuple[str, ...]) -> list[CaseRow]:
    """The rows, with 0 in the fields ``names`` of those of some groups."""
    changed = []
    for row in rows:
        if row.group in groups:
            tokens = {name: [0.0] * len(row.token_fields[name]) for name in names if name in row.token_fields}
            of_row = {name: 0.0 for name in names if name in row.row_fields}
            row = replace(row, token_fields=row.token_fields | tokens, row_fields=row.row_fields | of_row)
        changed.append(row)
    return changed


# --- the trait ---


def random_part(case: Case) -> tuple[Outputs, Batch]:
    """Outputs and rows at random, in float64, with log-ratios that reach both sides of every clip."""
    generator = torch.Generator().manual_seed(11)
    batch = collated(case.rows(), case.rows_per_unit)
    shape = batch.mask.shape

    def draw(*more: int) -> torch.Tensor:
        return torch.randn(*shape, *more, generator=generator, dtype=torch.float64).requires_grad_(True)

    outputs = Outputs((draw() * 1.5 - 4.0).detach().requires_grad_(True), draw(), draw(), draw(3))
    return outputs, batch


@pytest.mark.parametrize("case", [case for n, case in enumerate(PLAIN) if case not in PLAIN[:n]], ids=str)
def test_objective_vanishes_exactly_where_its_registration_says_so(case: Case) -> None:
    """Value and derivatives of every objective, with each of its fields at 0."""
    vanishes = case.entry.traits["vanishes"]
    objective = case.bind()
    outputs, batch = random_part(case)
    if case.options.get("num_classes") == 3:
        pytest.skip("scores of three classes have another shape; two classes are tested")
    assert float(objective(outputs, batch).values.detach().abs().max()) > 1e-3
    for name in set(case.fields()) & {"advantages", "has_feedback", "correction", "returns"}:
        zeros = replace(batch, fields=batch.fields | {name: torch.zeros_like(batch.field(name))})
        values = objective(outputs, zeros).values
        if values.ndim == 2:
            values = torch.where(batch.mask, values, 0.0)
        inputs = [outputs.logprobs, outputs.scores, outputs.candidate_logprobs]
        slopes = torch.autograd.grad(values.sum(), inputs, allow_unused=True) if values.requires_grad else []
        largest = max([float(values.detach().abs().max()), *(float(s.abs().max()) for s in slopes if s is not None)])
        assert (largest == 0.0) == (name in vanishes), name
        if name in vanishes:  # by finite differences, too: the value stays 0 nearby
            for step in (-1e-3, 1e-3, 0.5):
                moved = replace(outputs, logprobs=outputs.logprobs.detach() + step)
                nearby = torch.where(batch.mask, objective(moved, zeros).values.detach(), 0.0)
                assert float(nearby.abs().max()) == 0.0


def test_objectives_that_read_advantages_vanish_with_them_but_for_a_critic_and_a_penalty() -> None:
    reads = {case.objective for case in CASES if "advantages" in case.entry.traits["needs"]}
    assert reads - {case.objective for case in POLICIES} == {"ppo", "dro", "kl_cov"}


def test_every_objective_of_the_package_says_where_it_vanishes() -> None:
    assert all("vanishes" in case.entry.traits for case in CASES)


# --- the gradient ---


@pytest.mark.parametrize("case", VANISHING, ids=str)
def test_gradient_without_idle_rows_is_that_of_the_whole_batch(models, case: Case) -> None:
    """Every objective under every aggregation, in one micro-batch and in many, in float64."""
    rows = silence(case.rows(), {0, 2}, case.entry.traits["vanishes"])
    active = sum(row.group not in {0, 2} for row in rows)
    blank = blank_row(rows[0])
    for aggregate in ("token_mean", "sequence_mean", "constant"):
        for train in ({}, {"micro_batch_rows": 1}, {"micro_batch_tokens": 30}):
            batch = collated([*rows, blank], 1)
            whole, loss, before = gradient_of(case, models, aggregate, batch, "train", **train)
            scale = float(whole.abs().max())
            assert scale > 1e-5
            for idle_rows in ("skip", "measure"):
                batch = collated([*rows, blank], 1)
                ours, our_loss, after = gradient_of(case, models, aggregate, batch, idle_rows, **train)
                assert_close(ours, whole, atol=1e-12 * scale, rtol=0)
                assert our_loss == approx(loss, rel=1e-12, abs=1e-12)
                assert after["computed_rows"] == (len(rows) + 1 if idle_rows == "measure" else active)
            for name in before.keys() - {"padding_share"}:  # of the measured rows, which are all
                assert after[name] == approx(before[name], rel=1e-9, abs=1e-12), name


def test_gradient_of_a_measured_step_has_the_bits_of_a_skipped_one(models) -> None:
    """So that weights do not depend on where checkpoints are."""
    case = Case("grpo", {})
    rows = silence(case.rows(), {1}, ("advantages",))
    both = [gradient_of(case, models, "token_mean", collated(rows, 1), idle, micro_batch_rows=2)[0] for idle in _MODES]
    assert torch.equal(*both)


_MODES: tuple[IdleRows, IdleRows] = ("measure", "skip")


def test_gradient_without_any_idle_row_has_the_bits_of_before(models) -> None:
    case = Case("grpo", {})
    batches = [collated(case.rows(), 1) for _ in range(2)]
    before = gradient_of(case, models, "sequence_mean", batches[0], "train")
    after = gradient_of(case, models, "sequence_mean", batches[1], "skip")
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    assert after[2] == before[2] | {"computed_rows": 9.0}


def test_gradient_of_a_batch_without_advantages_is_zero_and_not_absent(models) -> None:
    """The optimizer then does what it does with zeros: momentum and weight decay go on."""
    case = Case("grpo", {})
    rows = silence(case.rows(), {0, 1, 2}, ("advantages",))
    shortest = min(len(row.ids) for row in rows)
    batch = collated(rows, 1)
    ours, loss, metrics = gradient_of(case, models, "token_mean", batch, "skip")
    assert not ours.any()
    assert loss == 0.0
    assert metrics["computed_rows"] == 1.0
    trained, _ = split_idle_rows(batch, ("advantages",))
    assert [int(batch.lengths[row]) for row in trained] == [shortest]


def test_idle_rows_are_found_by_weight_correction_mask_and_field() -> None:
    samples = [Sample([1, 2, 3], [False, True, True], group=b) for b in range(6)]
    batch = collate(samples)
    batch.fields["advantages"] = torch.tensor([[0.0, 0, 0], [0, 0, 1], [0, 1, 1], [1, 0, 0], [1, 1, 1], [0, 1, 1]])
    batch.fields["correction"] = torch.ones(6, 3)
    batch.fields["correction"][2, 1:] = 0.0
    batch.weights = batch.mask.double() / 12
    batch.weights[4] = 0.0
    batch.mask[5] = False
    assert find_idle_rows(batch, ("advantages",)).tolist() == [True, False, True, True, True, True]
    assert find_idle_rows(batch, ()).tolist() == [False, False, True, False, True, True]
    batch.fields["advantages"][0, 1] = float("nan")  # the loop refuses what is not finite
    assert not find_idle_rows(batch, ("advantages",))[0]


def test_idle_units_stay_whole() -> None:
    """A pair is idle if its weight is 0, or both its rows are."""
    rows = [Sample([1, 2, 3], [False, True, True], group=b // 2) for b in range(6)]
    batch = collate(rows, rows_per_unit=2)
    batch.weights = torch.tensor([0.5, 0.0, 0.5])
    assert find_idle_rows(batch, ()).tolist() == [False, False, True, True, False, False]
    batch.fields["margins"] = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    assert find_idle_rows(batch, ("margins",)).tolist() == [True, True, True, True, False, False]
    assert split_idle_rows(batch, ("margins",)) == ([4, 5], [0, 1, 2, 3])


def test_pair_of_weight_zero_is_left_out(models) -> None:
    case = Case("dpo", {})

    def first_pair_only(mask: torch.Tensor) -> torch.Tensor:
        return torch.tensor([1.0] + [0.0] * (len(mask) - 1), dtype=torch.float64)

    found = {}
    for idle_rows in ("train", "skip"):
        forward, [model] = case.forward(*models)
        model.zero_grad(set_to_none=True)
        method = Method(forward, case.bind(), first_pair_only, "pair", vanishes=())
        batch = collated(case.rows(), 2)
        _, metrics = accumulate(method, batch, TrainSection(), idle_rows=idle_rows)
        found[idle_rows] = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert metrics["computed_rows"] == 2.0
    scale = float(found["train"].abs().max())
    assert scale > 1e-5
    assert_close(found["skip"], found["train"], atol=1e-12 * scale, rtol=0)


# --- which steps ---


def test_choose_idle_rows_follows_the_recipe() -> None:
    options = TrainSection(steps=10, save_every=4)
    modes = [choose_idle_rows(options, step, 10) for step in range(1, 11)]
    assert [step for step, mode in enumerate(modes, 1) if mode == "measure"] == [1, 4, 8, 10]
    assert set(modes) == {"measure", "skip"}
    off = TrainSection(steps=10, save_every=4, skip_zero_rows=False)
    assert {choose_idle_rows(off, step, 10) for step in range(1, 11)} == {"train"}


# --- a trait that lies ---


def offset(outputs: Outputs, batch: Batch) -> Loss:
    return Loss(-(batch.field("advantages") + 0.5) * outputs.logprobs)


def pull(outputs: Outputs, batch: Batch) -> Loss:
    """0 with derivative 0 at the sampler's own probabilities, and nowhere else."""
    ratio = (outputs.logprobs - batch.field("old_logprobs")).exp()
    return Loss(-batch.field("advantages") * ratio + (ratio - 1.0).square())


@pytest.mark.parametrize("objective", [offset, pull])
def test_objective_that_does_not_vanish_as_it_says_is_refused(models, objective: Any) -> None:
    case = Case("grpo", {})
    forward, _ = case.forward(*models)
    weigh = registry.find("aggregation", "token_mean").bind({})
    method = Method(forward, objective, weigh, vanishes=("advantages",), name="mine:objective")
    batch = collated(case.rows(), 1)
    with torch.no_grad():
        batch.fields["old_logprobs"] = forward(batch, "none").logprobs.double()
    with refuses(UsageError, "mine:objective") as caught:
        accumulate(method, batch, TrainSection(), idle_rows="measure")
    assert "advantages" in str(caught.value)
    assert "train.skip_zero_rows: false" in str(caught.value)
    accumulate(method, batch, TrainSection(), idle_rows="train")


def likely(outputs: Outputs, batch: Batch) -> Loss:
    """Bounded, and 0 at impossible tokens: an infinite shift would hide that it does not vanish."""
    return Loss(-(batch.field("advantages") + 0.5) * outputs.logprobs.exp())


@pytest.mark.parametrize("column", [1, 2])
def test_check_with_one_trained_token_sees_a_value_that_does_not_vanish(column: int) -> None:
    mask = tuple(place == column for place in range(3))
    sample = Sample((1, 2, 3), mask, group=0, fields={"advantages": (0.0, 0.0, 0.0)})
    outputs = Outputs(torch.full((1, 3), -0.5))
    with refuses(UsageError, "advantages"):
        check_vanishing("mine:objective", likely, ("advantages",), outputs, collate([sample], 0))


def test_advantages_of_equal_rewards_are_rounding_and_become_zero() -> None:
    rewards = [torch.full((6,), 0.1, dtype=torch.float64), torch.tensor([0.1, 0.2, 0.3, 0.1, 0.1, 0.1]).double()]
    centered = registry.find("advantage", "centered").bind({})
    before = AdvantageEstimator(centered).from_groups(rewards)
    after = AdvantageEstimator(centered, drops_rounding=True).from_groups(rewards)
    assert before is not None
    assert after is not None
    assert 0.0 < float(before[0].abs().max()) < rounding(torch.float64, size=0.1, terms=6)
    assert not after[0].any()
    assert torch.equal(after[1], before[1])
    raw = AdvantageEstimator(registry.find("advantage", "raw").bind({}), drops_rounding=True).from_groups(rewards)
    assert raw is not None
    assert torch.equal(raw[0], rewards[0])


# --- runs ---

# The reward is 1 or 0, so that some groups are uniform; one layer, float64 so that runs may be compared.
UNIFORM: dict[str, Any] = {
    "rewards": ["small_runs:many_vowels"],
    "rollout": {"num_prompts": 6, "group_size": 3, "max_tokens": 6, "temperature": 1.5},
    "advantage": "centered",
}


def uniform_recipe(steps: int = 5, **train: Any) -> Recipe:
    changes = UNIFORM | {"train": {"steps": steps, "lr": 1e-4, "save_every": 3, **train}}
    return one_layer_recipe("grpo", model={"dtype": "fp64"}, **changes)


def test_run_leaves_rows_out_and_its_weights_are_those_of_a_run_that_does_not(tmp_path: Path) -> None:
    run(tmp_path / "skips", uniform_recipe())
    run(tmp_path / "trains", uniform_recipe(skip_zero_rows=False))
    skips, trains = steps_of(tmp_path / "skips"), steps_of(tmp_path / "trains")
    rows = [row["computed_rows"] for row in skips]
    assert [rows[0], rows[2], rows[4]] == [18.0, 18.0, 18.0]  # the first step, a saved one, the last
    assert max(rows[1], rows[3]) < 18.0
    shares = [row["uniform_groups"] for row in skips]
    for step in (1, 3):
        assert rows[step] == approx(18.0 * (1.0 - shares[step]))
    assert not any("computed_rows" in row for row in trains)
    for ours, theirs in zip(skips, trains, strict=True):
        assert ours["loss"] == approx(theirs["loss"], abs=1e-12)
        assert ours["grad_norm"] == approx(theirs["grad_norm"], rel=1e-9)
        assert ours["trained_tokens"] == theirs["trained_tokens"]
    weights = [saved_tensors(tmp_path / name, 5) for name in ("skips", "trains")]
    for name, tensor in weights[0].items():
        assert_close(tensor, weights[1][name], atol=1e-9, rtol=0)


def test_run_that_is_stopped_between_checkpoints_and_resumed_has_the_same_bits(tmp_path: Path) -> None:
    """A checkpoint at a step that the recipe does not name changes nothing, neither does another schedule of them."""
    run(tmp_path / "whole", uniform_recipe())
    run(tmp_path / "cut", uniform_recipe(), stop_after=2)
    run(tmp_path / "cut", uniform_recipe(), resume=True)
    assert untimed(tmp_path / "whole") == untimed(tmp_path / "cut")
    assert same_bits(saved_tensors(tmp_path / "whole", 5), saved_tensors(tmp_path / "cut", 5))
    run(tmp_path / "seldom", uniform_recipe(save_every=0))
    assert same_bits(saved_tensors(tmp_path / "whole", 5), saved_tensors(tmp_path / "seldom", 5))
    rows = [[row["computed_rows"] for row in steps_of(tmp_path / name)] for name in ("whole", "seldom")]
    assert rows[0] != rows[1]


@pytest.mark.parametrize(
    "train", [{}, {"ppo_epochs": 2, "num_minibatches": 2}], ids=["one update", "updates of one batch"]
)
def test_old_logprobs_of_idle_rows_are_not_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: dict[str, Any]
) -> None:
    """With a correction and the trainer's log-probabilities; the weights are those of a run that computes them."""
    scored: list[int] = []

    def count(self: Scorer, batch: Batch) -> torch.Tensor:
        scored.append(batch.num_rows if self.rows is None else len(self.rows))
        return logprobs(self, batch)

    logprobs = Scorer.logprobs
    monkeypatch.setattr(Scorer, "logprobs", count)
    changes: dict[str, Any] = UNIFORM | {"rollout": UNIFORM["rollout"] | {"old_logprobs": "trainer"}}
    changes |= {"correction": "token_tis", "model": {"dtype": "fp64"}}
    steps = 9 if train else 3
    for name, skips in (("skips", True), ("trains", False)):
        section = {"steps": steps, "lr": 1e-4, "skip_zero_rows": skips, **train}
        run(tmp_path / name, one_layer_recipe("grpo", **changes, train=section))
    skips, trains = scored[: len(scored) // 2], scored[len(scored) // 2 :]
    assert trains == [18, 18, 18]
    assert skips[0] == skips[2] == 18
    assert skips[1] < 18
    weights = [saved_tensors(tmp_path / name, steps) for name in ("skips", "trains")]
    for name, tensor in weights[0].items():
        if name.startswith("model"):
            assert_close(tensor, weights[1][name], atol=1e-9, rtol=0)


def test_run_with_weight_decay_and_momentum_steps_without_any_advantage(tmp_path: Path) -> None:
    """A batch of equal rewards has a gradient of 0, which decays weights and moments as before."""
    found = {}
    for name, skips in (("skips", True), ("trains", False)):
        recipe = one_layer_recipe(
            "grpo",
            **(UNIFORM | {"rewards": ["small_runs:always_one"]}),
            optimizer={"name": "adamw", "weight_decay": 0.1},
            model={"dtype": "fp64"},
            train={"steps": 3, "lr": 1e-3, "skip_zero_rows": skips},
        )
        run(tmp_path / name, recipe)
        found[name] = saved_tensors(tmp_path / name, 3)
    assert [row["grad_norm"] for row in steps_of(tmp_path / "skips")] == [0.0, 0.0, 0.0]
    assert [row["computed_rows"] for row in steps_of(tmp_path / "skips")] == [18.0, 1.0, 18.0]
    assert any("exp_avg" in name for name in found["skips"])
    assert same_bits(found["skips"], found["trains"])


def test_run_with_regularizers_computes_every_row(tmp_path: Path) -> None:
    recipe = one_layer_recipe("grpo", **UNIFORM, regularize={"entropy_coef": 0.01}, train={"steps": 3, "lr": 1e-4})
    run(tmp_path, recipe)
    assert max(row["uniform_groups"] for row in steps_of(tmp_path)) > 0
    assert not any("computed_rows" in row for row in steps_of(tmp_path))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"adapter": {"rank": 4, "dropout": 0.1}}},
        {"objective": "small_runs:plain_reinforce"},
        {"train": {"steps": 3, "skip_zero_rows": False}},
    ],
    ids=["dropout", "an objective without the trait", "off"],
)
def test_run_trains_on_every_row_where_leaving_out_is_not_known_to_change_nothing(changes: dict[str, Any]) -> None:
    parts = prepare(one_layer_recipe("grpo", **(UNIFORM | changes)))
    assert parts.method.vanishes is None
    assert prepare(one_layer_recipe("grpo", **UNIFORM)).method.vanishes == ("advantages",)


def test_run_refuses_an_objective_whose_registration_lies(tmp_path: Path) -> None:
    recipe = one_layer_recipe("grpo", **UNIFORM, objective="small_runs:says_that_it_vanishes", train={"steps": 3})
    with refuses(UsageError, "says_that_it_vanishes"):
        run(tmp_path, recipe)
    assert steps_of(tmp_path) == []


@pytest.mark.parametrize("objective", ["text_vanishes", "unread_vanishes"])
def test_objective_that_vanishes_with_no_field_of_its_own_is_refused(objective: str) -> None:
    with pytest.raises(RecipeError, match=f"{objective}.*vanishes"):
        prepare(one_layer_recipe("grpo", **UNIFORM, objective=f"small_runs:{objective}"))


def test_teacher_reads_only_rows_with_feedback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Self-distillation: a row without a right answer in its group has no teacher, and no loss."""
    scored: list[int] = []
    original = Scorer.candidates

    def count(self: Scorer, batch: Batch, k: int) -> Any:
        scored.append(batch.num_rows if self.rows is None else len(self.rows))
        return original(self, batch, k)

    monkeypatch.setattr(Scorer, "candidates", count)
    for name, skips in (("skips", True), ("trains", False)):
        recipe = one_layer_recipe(
            "grpo",
            rewards=UNIFORM["rewards"],
            rollout=UNIFORM["rollout"],
            objective="sdpo",
            teacher={"name": "self", "top_k": 8},
            regularize=None,
            model={"dtype": "fp64"},
            train={"steps": 3, "lr": 1e-4, "skip_zero_rows": skips},
        )
        run(tmp_path / name, recipe)
    rows = [row["computed_rows"] for row in steps_of(tmp_path / "skips")]
    assert scored == [18, rows[1], 18, 18, 18, 18]
    assert rows[0] == rows[2] == 18.0
    assert rows[1] < 18.0
    weights = [saved_tensors(tmp_path / name, 3) for name in ("skips", "trains")]
    for name, tensor in weights[0].items():
        if name.startswith("model"):
            assert_close(tensor, weights[1][name], atol=1e-9, rtol=0)
