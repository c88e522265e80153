"""Truncation and inverse-CDF sampling on distributions small enough to work by hand."""

from __future__ import annotations

import pytest
import torch

from closeness import assert_close
from posttrain.sampling.base import Sampling
from posttrain.sampling.native.sampler import draw, first_beyond, truncate

P = torch.tensor([[0.1, 0.4, 0.2, 0.3]])


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (None, 1.0, [0.1, 0.4, 0.2, 0.3]),
        (2, 1.0, [0.0, 0.4, 0.0, 0.3]),
        (9, 1.0, [0.1, 0.4, 0.2, 0.3]),
        (None, 0.39, [0.0, 0.4, 0.0, 0.0]),
        (None, 0.65, [0.0, 0.4, 0.0, 0.3]),
        (None, 0.85, [0.0, 0.4, 0.2, 0.3]),
        (2, 0.5, [0.0, 0.4, 0.0, 0.0]),  # the nucleus of (4/7, 3/7)
        (2, 0.6, [0.0, 0.4, 0.0, 0.3]),
    ],
)
def test_truncation(top_k, top_p, kept):
    assert_close(truncate(P, top_k, top_p), torch.tensor([kept]))


@pytest.mark.parametrize(
    ("u", "token"), [(0.0, 0), (0.0999, 0), (0.1001, 1), (0.4999, 1), (0.5001, 2), (0.7001, 3), (1 - 2**-53, 3)]
)
def test_the_token_whose_interval_holds_u(u, token):
    ids, probability = draw(P.log(), torch.tensor([[u]], dtype=torch.float64), Sampling(max_tokens=1))
    assert ids.tolist() == [token]
    assert_close(probability, P[0, token : token + 1])


def test_u_is_stretched_over_what_truncation_keeps_and_the_probability_is_the_full_one():
    u = torch.tensor([[0.5]], dtype=torch.float64)  # below 4/7
    ids, probability = draw(P.log(), u, Sampling(max_tokens=1, top_k=2))
    assert ids.tolist() == [1]
    assert_close(probability, torch.tensor([0.4]))
    ids, _ = draw(P.log(), u + 0.08, Sampling(max_tokens=1, top_k=2))  # above it
    assert ids.tolist() == [3]


def test_a_token_without_probability_is_never_drawn():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    for u in (0.0, 0.5, 1 - 2**-53):
        ids, _ = draw(logits, torch.tensor([[u]], dtype=torch.float64), Sampling(max_tokens=1))
        assert ids.item() == (1 if u < 0.5 else 3)


def test_temperature_scales_the_logits_and_greedy_does_not():
    logits, zero = torch.tensor([[0.0, 2.0, 1.0]]), torch.zeros((1, 1), dtype=torch.float64)
    _, at_half = draw(logits, zero, Sampling(max_tokens=1, temperature=0.5))
    assert_close(at_half, (logits / 0.5).softmax(-1)[:, 0])
    ids, greedy = draw(logits, None, Sampling(max_tokens=1, temperature=0.0))
    assert ids.tolist() == [1]
    assert_close(greedy, logits.softmax(-1)[:, 1])


@pytest.mark.parametrize("size", [8192, 8193, 12_000])
def test_first_beyond_of_a_large_vocabulary_is_that_of_all_cumulative_sums(size):
    """Bit for bit, with long stretches of zero and numbers at both ends of the row."""
    noise = torch.Generator().manual_seed(0)
    units = torch.randint(0, 2**40 // size, (64, size), generator=noise)
    units[:32, 100:-3] = 0
    units[0], units[1] = 0, 0
    units[0, -1] = units[1, 0] = 7
    uniforms = torch.rand(64, 1, generator=noise, dtype=torch.float64)
    uniforms[2], uniforms[3] = 0.0, 1 - 2**-53
    cumulative = units.cumsum(-1)
    threshold = (uniforms * cumulative[:, -1:]).long()
    expected = (cumulative <= threshold).sum(-1, keepdim=True)
    assert torch.equal(first_beyond(units, uniforms), expected)
    assert expected[0].item() == size - 1
    assert expected[1].item() == 0


def test_first_beyond_threshold_at_a_cumulative_sum_is_the_next_column():
    """Units of 1: the share j / 8192 lands exactly on a sum, within a block and at its end."""
    columns = torch.tensor([0, 1, 126, 127, 128, 129, 4095, 4096, 8191])
    units = torch.ones((len(columns), 8192), dtype=torch.long)
    assert first_beyond(units, columns[:, None].double() / 8192)[:, 0].tolist() == columns.tolist()


def test_first_beyond_threshold_before_a_block_of_zeros_skips_the_block():
    units = torch.ones((1, 8192), dtype=torch.long)
    units[:, 128:256] = 0
    units[:, 256] += 128  # the total stays a power of two
    assert first_beyond(units, torch.tensor([[128 / 8192]], dtype=torch.float64)).item() == 256
