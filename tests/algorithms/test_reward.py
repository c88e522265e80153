"""Reward models: Bradley–Terry, outcome, process; by hand, against plain Python, finite differences, masks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch

from closeness import approx
from posttrain.algorithms.aggregation import sequence_mean
from posttrain.algorithms.objectives.reward import bradley_terry, outcome, process
from posttrain.errors import UsageError
from posttrain.types import Batch, Outputs


def make(
    scores: torch.Tensor, mask: torch.Tensor, rows_per_unit: int = 1, **fields: torch.Tensor | Sequence[float]
) -> tuple[Outputs, Batch]:
    rows, width = mask.shape
    batch = Batch(
        tokens=torch.zeros(rows, width, dtype=torch.long),
        lengths=torch.full((rows,), width),
        mask=mask,
        group=torch.arange(rows),
        prefix=torch.ones(rows, dtype=torch.long),
        fields={name: torch.as_tensor(x, dtype=torch.float64) for name, x in fields.items()},
        rows_per_unit=rows_per_unit,
    )
    return Outputs(logprobs=torch.zeros(rows, width), scores=scores), batch


def random_case(seed: int, rows: int = 6, classes: int = 0, rows_per_unit: int = 1, **fields: Sequence[float]):
    """Ragged answers from position 2 on, or with ``classes`` scattered step ends; scores with a gradient."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, 8) if classes in (0, 2) else (rows, 8, classes)
    scores = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    if classes:
        mask = torch.rand(rows, 8, generator=generator) > 0.6
        mask[:, 4] = True
        mask[:, 0] = False
        labels = torch.randint(0, classes, (rows, 8), generator=generator).to(torch.float64)
        return make(scores.requires_grad_(), mask, step_labels=labels)
    ends = torch.randint(3, 9, (rows, 1), generator=generator)
    positions = torch.arange(8)[None]
    return make(scores.requires_grad_(), (positions >= 2) & (positions < ends), rows_per_unit, **fields)


def pair_scores(chosen: float, rejected: float, **fields: Sequence[float]) -> tuple[Outputs, Batch]:
    """The scores are read at different positions; elsewhere stand others."""
    scores = torch.tensor([[9.0, 8.0, chosen, 7.0], [9.0, rejected, -6.0, -7.0]], dtype=torch.float64)
    mask = torch.tensor([[False, True, True, False], [False, True, False, False]])
    return make(scores.requires_grad_(), mask, rows_per_unit=2, **fields)


# --- Bradley–Terry


def test_bradley_terry_at_equal_scores():
    for score in (-3.0, 0.0, 50.0):
        outputs, batch = pair_scores(score, score)
        loss = bradley_terry(outputs, batch)
        assert loss.values.item() == approx(math.log(2.0), abs=1e-15)
        assert loss.metrics["pair_accuracy"].item() == 0.5
        loss.values.sum().backward()
        expected = [0.0, 0.0, -0.5, 0.0, 0.0, 0.5, 0.0, 0.0]  # at the last trained token of each row only
        assert outputs.scores.grad.flatten().tolist() == approx(expected, abs=1e-15)


def test_bradley_terry_by_hand():
    case = pair_scores(1.5, 0.5, margins=[0.75, 0.75])
    assert bradley_terry(*case).values.item() == approx(math.log(1 + math.exp(-1.0)), abs=1e-15)
    with_margin = bradley_terry(*case, margin=True)
    assert with_margin.values.item() == approx(math.log(1 + math.exp(-0.25)), abs=1e-15)
    assert with_margin.metrics["margin"].item() == 1.0
    centred = bradley_terry(*case, centering=0.1).values.item()
    assert centred == approx(math.log(1 + math.exp(-1.0)) + 0.1 * 4.0, abs=1e-15)
    metrics = bradley_terry(*case).metrics
    assert {k: v.tolist() for k, v in metrics.items()} == {
        "margin": [1.0],
        "pair_accuracy": [1.0],
        "chosen_score": [1.5],
        "rejected_score": [0.5],
    }


def test_centering_is_what_fixes_the_level():
    """Without it a constant added to all scores changes nothing; with it the best level is mean zero."""
    plain = [bradley_terry(*pair_scores(1.0 + c, c)).values.item() for c in (-2.0, -0.5, 3.0)]
    assert plain == approx([plain[0]] * 3, abs=1e-14)
    centred = [bradley_terry(*pair_scores(1.0 + c, c), centering=0.01).values.item() for c in (-2.0, -0.5, 3.0)]
    assert centred[1] == approx(plain[0], abs=1e-14)
    assert min(centred[0], centred[2]) > centred[1] + 0.05


@pytest.mark.parametrize("seed", [0, 1])
def test_bradley_terry_against_plain_python(seed: int):
    outputs, batch = random_case(seed, rows_per_unit=2, margins=[0.5, 0.5, 1.0, 1.0, 2.0, 2.0])
    values = bradley_terry(outputs, batch, margin=True, centering=0.2).values
    for unit, margin in enumerate((0.5, 1.0, 2.0)):
        r = []
        for row in (2 * unit, 2 * unit + 1):
            trained = [t for t in range(8) if batch.mask[row, t]]
            r.append(outputs.scores[row, trained[-1]].item())
        p = math.exp(r[0]) / (math.exp(r[0]) + math.exp(r[1] + margin))
        assert values[unit].item() == approx(-math.log(p) + 0.2 * (r[0] + r[1]) ** 2, abs=1e-11)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 1])
def test_bradley_terry_refuses_scores_that_are_not_finite(bad: float, place: int):
    scores = [0.5, 0.5]
    scores[place] = bad
    assert math.isnan(bradley_terry(*pair_scores(*scores)).values.item())


def test_bradley_terry_without_a_trained_token_and_with_huge_scores():
    outputs, batch = pair_scores(1.0, 0.0)
    batch.mask[1] = False
    assert math.isnan(bradley_terry(outputs, batch).values.item())
    assert bradley_terry(*pair_scores(-1e6, 1e6)).values.item() == 2e6
    assert bradley_terry(*pair_scores(1e6, -1e6)).values.item() == 0.0


# --- outcome


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("positions", ["all", "last"])
def test_outcome_against_plain_python(seed: int, positions: str):
    labels = [1.0, 0.0, 0.3, 1.0, 0.0, 1.0]
    outputs, batch = random_case(seed, labels=labels)
    loss = outcome(outputs, batch, positions=positions)
    rows = []
    for b, label in enumerate(labels):
        trained = [t for t in range(8) if batch.mask[b, t]]
        p = [1 / (1 + math.exp(-outputs.scores[b, t].item())) for t in trained]
        nll = [-label * math.log(x) - (1 - label) * math.log(1 - x) for x in p]
        if positions == "last":
            nll = [0.0] * (len(nll) - 1) + [len(nll) * nll[-1]]
        assert loss.values[b, trained].tolist() == approx(nll, abs=1e-11)
        rows.append(sum(nll) / len(nll))
        correct = [float((x > 0.5) == (label > 0.5)) for x in p]
        assert loss.metrics["outcome_accuracy"][b, trained].tolist() == correct
        assert loss.metrics["final_token"][b].tolist() == [float(t == trained[-1]) for t in range(8)]
        assert loss.metrics["final_token_right"][b, trained].tolist() == [0.0] * (len(p) - 1) + correct[-1:]
    total = (loss.values * sequence_mean(batch.mask)).sum().item()
    assert total == approx(sum(rows) / 6, abs=1e-11)


def test_outcome_at_zero_is_ln_2_and_a_half():
    outputs, batch = random_case(2, labels=[1.0, 0.0] * 3)
    outputs.scores = torch.zeros_like(outputs.scores, requires_grad=True)
    loss = outcome(outputs, batch)
    assert loss.values[batch.mask].tolist() == approx([math.log(2.0)] * int(batch.mask.sum()), abs=1e-15)
    assert set(loss.metrics["outcome_accuracy"][batch.mask].tolist()) == {0.5}
    loss.values[batch.mask].sum().backward()
    expected = torch.where(batch.field("labels")[:, None] == 1.0, -0.5, 0.5) * batch.mask
    assert torch.equal(outputs.scores.grad, expected.to(torch.float64))


# --- process


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("classes", [2, 3])
def test_process_against_plain_python(seed: int, classes: int):
    outputs, batch = random_case(seed, classes=classes)
    loss = process(outputs, batch, num_classes=classes)
    assert loss.values.shape == batch.mask.shape
    for b, t in batch.mask.nonzero().tolist():
        label = int(batch.field("step_labels")[b, t])
        if classes == 2:
            logits = [0.0, outputs.scores[b, t].item()]
        else:
            logits = outputs.scores[b, t].tolist()
        total = sum(math.exp(x) for x in logits)
        assert loss.values[b, t].item() == approx(-math.log(math.exp(logits[label]) / total), abs=1e-11)
        assert loss.metrics["step_accuracy"][b, t].item() == float(logits.index(max(logits)) == label)
        assert loss.metrics["positive_share"][b, t].item() == float(label == classes - 1)


def test_process_takes_soft_labels_with_two_classes():
    mask = torch.tensor([[False, True]])
    case = make(torch.tensor([[0.0, math.log(3.0)]], dtype=torch.float64), mask, step_labels=[[0.0, 0.25]])
    assert process(*case).values[0, 1].item() == approx(-0.25 * math.log(0.75) - 0.75 * math.log(0.25))


def test_positive_share_of_soft_labels_is_the_accuracy_of_always_calling_steps_good():
    labels = [0.0, 0.2, 0.5, 0.7, 1.0]
    mask = torch.tensor([[False, True, True, True, True]])
    case = make(torch.full((1, 5), 3.0, dtype=torch.float64), mask, step_labels=[labels])
    metrics = process(*case).metrics
    assert metrics["positive_share"][mask].tolist() == [0.0, 0.5, 1.0, 1.0]
    assert torch.equal(metrics["positive_share"][mask], metrics["step_accuracy"][mask])


@pytest.mark.parametrize(("classes", "label"), [(2, 2.0), (2, -1.0), (3, 3.0), (3, 0.5), (2, math.nan)])
def test_labels_that_are_no_class_are_refused_by_value(classes: int, label: float):
    outputs, batch = random_case(6, classes=classes)
    batch.field("step_labels")[0, 4] = label
    with pytest.raises(UsageError, match=rf"step_labels hold \[{label}\]; with num_classes: {classes}"):
        process(outputs, batch, num_classes=classes)


# --- all of them

WORDS: dict[str, tuple[Callable[..., object], dict[str, object]]] = {
    "bradley_terry": (bradley_terry, {"margin": True, "centering": 0.1}),
    "outcome": (outcome, {}),
    "outcome_last": (outcome, {"positions": "last"}),
    "process_2": (process, {"num_classes": 2}),
    "process_3": (process, {"num_classes": 3}),
}


def case_for(name: str, seed: int) -> tuple[Outputs, Batch]:
    if name.startswith("process"):
        return random_case(seed, classes=int(name[-1]))
    fields = {"labels": [1.0, 0.0] * 3, "margins": [0.5, 0.5, 0.0, 0.0, 1.0, 1.0]}
    return random_case(seed, rows_per_unit=2 if name == "bradley_terry" else 1, **fields)


@pytest.mark.parametrize("name", WORDS)
def test_gradient_by_finite_differences(name: str):
    word, options = WORDS[name]
    outputs, batch = case_for(name, 7)

    def values(scores: torch.Tensor) -> torch.Tensor:
        found = word(Outputs(logprobs=outputs.logprobs, scores=scores), batch, **options).values
        return found if found.ndim == 1 else found[batch.mask]

    assert torch.autograd.gradcheck(values, (outputs.scores.detach().requires_grad_(),), eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", WORDS)
def test_what_stands_outside_the_mask_does_not_count(name: str):
    word, options = WORDS[name]
    results = []
    for outside in (None, math.nan, math.inf):
        outputs, batch = case_for(name, 8)
        if outside is not None:
            outputs.scores = outputs.scores.detach().clone()
            outputs.scores[~batch.mask] = outside
            outputs.scores.requires_grad_()
            if "step_labels" in batch.fields:
                batch.fields["step_labels"][~batch.mask] = outside
        loss = word(outputs, batch, **options)
        kept = loss.values if loss.values.ndim == 1 else torch.where(batch.mask, loss.values, 0.0)
        kept.sum().backward()
        assert (outputs.scores.grad[~batch.mask] == 0.0).all()
        results.append((kept.detach(), outputs.scores.grad))
        assert all(m.shape == loss.values.shape and not m.requires_grad for m in loss.metrics.values())
    for values, gradient in results[1:]:
        assert torch.equal(values, results[0][0])
        assert torch.equal(gradient, results[0][1])
