"""No program passes tests that it does not solve, and none gets out: every attack of ``code_attacks``, by level."""

from __future__ import annotations

import re
from pathlib import Path

import code_targets
import pytest
from code_attacks import ATTACKS, Attack

from posttrain.graders.sandbox.sandbox import refusal

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "code-rewards.md"
needs_bubblewrap = pytest.mark.skipif(bool(refusal("bubblewrap")), reason=f"no bubblewrap: {refusal('bubblewrap')}")


def documented() -> set[str]:
    """Return the attacks that pass at ``process``, as the document lists them."""
    return set(re.findall(r"^- (.+)$", DOCUMENT.read_text().partition("## Attacks")[2], re.MULTILINE))


def check(level: str, attacks: list[Attack], folder: Path, allowed: set[str]) -> None:
    with code_targets.targets(folder) as aims:
        assert code_targets.honest(level) == "right"  # type: ignore[arg-type]
        outcomes = code_targets.outcomes(level, aims, attacks)  # type: ignore[arg-type]
        assert {name for name, outcome in outcomes.items() if outcome == "right"} <= allowed
        assert "ungraded" not in outcomes.values(), "every attack is a program with tests"
        if level == "bubblewrap":
            assert not aims.was_written
            assert aims.survivors() == []


def test_attacks_that_are_documented_exist() -> None:
    assert len(ATTACKS) >= 60
    assert documented() < {one.name for one in ATTACKS}
    learns_the_tests = {one.name for one in ATTACKS if "tests of the neighbour" in one.name or "memory of" in one.name}
    assert not documented() & learns_the_tests


@needs_bubblewrap
def test_one_attack_of_ten_does_not_pass(tmp_path: Path) -> None:
    check("bubblewrap", [one for one in ATTACKS if one.seconds == 20.0][::10], tmp_path, set())


@needs_bubblewrap
@pytest.mark.slow
def test_no_attack_succeeds_in_bubblewrap(tmp_path: Path) -> None:
    check("bubblewrap", ATTACKS, tmp_path, set())


@pytest.mark.slow
def test_what_is_passed_in_a_process_is_documented(tmp_path: Path) -> None:
    check("process", ATTACKS, tmp_path, documented())
