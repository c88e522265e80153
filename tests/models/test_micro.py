"""Texts in padded pieces: the largest that fit, in their order."""

from __future__ import annotations

from posttrain.models.forward.micro import by_length, split_padded


def test_pieces_are_as_large_as_the_padded_budget_lets_them_be() -> None:
    lengths = [5, 1, 9, 2]
    assert by_length(lengths) == [1, 3, 0, 2]
    assert split_padded(by_length(lengths), lengths, 10) == [[1, 3], [0], [2]]  # 2 x 2, then 3 x 5 would be 15
    assert split_padded(range(4), lengths, 10) == [[0, 1], [2], [3]]  # the longest so far is what all are padded to
    assert split_padded(range(4), lengths, float("inf"), 3) == [[0, 1, 2], [3]]
    assert split_padded([2], {2: 50}, 10) == [[2]]  # a text alone may have more
    assert split_padded([], [], 10) == []
