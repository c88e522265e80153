"""Aggregations: weights by hand."""

from __future__ import annotations

import torch

from closeness import allclose, approx, rounding
from posttrain.algorithms.aggregation import constant, sequence_mean, token_mean, unit_mean
from refusing import refuses

MASK = torch.tensor([[False, True, True, True], [False, True, False, False]])


def test_by_hand():
    assert token_mean(MASK)[0].tolist() == [0.0, 0.25, 0.25, 0.25]
    assert token_mean(MASK)[1].tolist() == [0.0, 0.25, 0.0, 0.0]
    assert sequence_mean(MASK)[0].tolist() == approx([0.0, 1 / 6, 1 / 6, 1 / 6])
    assert sequence_mean(MASK)[1].tolist() == [0.0, 0.5, 0.0, 0.0]
    assert constant(MASK, length=10)[0].tolist() == [0.0, 0.05, 0.05, 0.05]
    assert unit_mean(MASK).tolist() == [0.5, 0.5]


def test_means_sum_to_one_and_are_equal_where_lengths_are():
    bound = rounding(torch.float64, terms=int(MASK.sum()))
    assert token_mean(MASK).sum().item() == approx(1.0, abs=bound)
    assert sequence_mean(MASK).sum().item() == approx(1.0, abs=bound)
    even = torch.tensor([[False, True, True], [False, True, True]])
    assert torch.equal(token_mean(even), sequence_mean(even))
    assert allclose(constant(even, length=2), sequence_mean(even))


def test_a_row_without_tokens_has_no_weight_and_does_not_count():
    mask = torch.cat([MASK, torch.zeros(1, 4, dtype=torch.bool)])
    assert torch.equal(sequence_mean(mask)[:2], sequence_mean(MASK))
    assert sequence_mean(mask)[2].tolist() == [0.0] * 4
    with refuses(ValueError, "without trained tokens"):
        unit_mean(mask)


def test_nothing_to_train_is_refused():
    for word in (token_mean, sequence_mean, unit_mean):
        with refuses(ValueError, "without trained tokens"):
            word(torch.zeros(2, 3, dtype=torch.bool))
