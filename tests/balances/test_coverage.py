"""Every registered formula has a balance of its own, or says why it has none."""

from __future__ import annotations

import pytest

from posttrain import registry
from posttrain.balances.advantages import formulas_of_advantages
from posttrain.balances.findings import EXPLANATIONS
from posttrain.balances.losses import OF_DISTRIBUTIONS, formulas_of_losses
from posttrain.balances.masks import formulas_of_masks
from posttrain.balances.weights import formulas_of_weights

AGGREGATIONS, CORRECTIONS = formulas_of_weights()
KNOWN = {
    "objective": formulas_of_losses() | OF_DISTRIBUTIONS,
    "advantage": formulas_of_advantages(),
    "aggregation": AGGREGATIONS,
    "correction": CORRECTIONS,
    "mask": formulas_of_masks(),
}


@pytest.mark.parametrize("kind", KNOWN)
def test_balances_of_each_registered_formula_are_there(kind: str) -> None:
    assert KNOWN[kind] == set(registry.built_in(kind))


def test_balances_say_what_causes_a_violation_and_what_decides() -> None:
    assert len(EXPLANATIONS) > 20
    for explanation in EXPLANATIONS.values():
        assert explanation.causes
        assert explanation.decided_by
