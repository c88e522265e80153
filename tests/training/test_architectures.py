"""Two steps of GRPO and SFT with every text architecture of transformers that fits when tiny."""

from __future__ import annotations

from pathlib import Path

import pytest
from architectures import ARCHITECTURES, DOCUMENT, row_of, train_two_steps

from closeness import approx

ROWS = dict(
    line.split(" | ", 1) for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| `")
)


def test_architectures_in_the_document_are_those_that_are_tried() -> None:
    assert list(ROWS) == [f"| `{name}`" for name in sorted(ARCHITECTURES)]
    assert len(ROWS) >= 50


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_train_two_steps_of_an_architecture_samples_from_the_model(architecture: str, tmp_path: Path) -> None:
    outcome = train_two_steps(architecture, tmp_path)
    assert outcome.mismatch == approx(0.0, abs=1e-6)
    assert row_of(outcome) == f"| `{architecture}` | {ROWS[f'| `{architecture}`']}"
