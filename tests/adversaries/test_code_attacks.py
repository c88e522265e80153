"""No program passes tests that it does not solve, and none gets out: every attack of ``code_attacks``, by level."""

from __future__ import annotations

import re
from pathlib import Path

import code_targets
import pytest
from code_attacks import ATTACKS, Attack

from posttrain.graders.sandbox.levels import refusal

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "code.md"
needs_namespaces = pytest.mark.skipif(bool(refusal("namespaces")), reason=f"no namespaces: {refusal('namespaces')}")


def documented() -> dict[str, tuple[str, ...]]:
    """Of each attack in the table of the document, who lets it pass: in one process, process, namespaces."""
    rows = re.findall(r"^\| ([^|]+) \| (passes|–) \| (passes|–) \| (passes|–) \|$", DOCUMENT.read_text(), re.MULTILINE)
    return {name.strip(): cells for name, *cells in rows}  # type: ignore[misc]


def check(level: str, attacks: list[Attack], folder: Path, allowed: set[str]) -> None:
    with code_targets.targets(folder) as aims:
        assert code_targets.honest(level) == "right"  # type: ignore[arg-type]
        outcomes = code_targets.outcomes(level, aims, attacks)  # type: ignore[arg-type]
        assert {name for name, outcome in outcomes.items() if outcome == "right"} <= allowed
        assert "ungraded" not in outcomes.values(), "every attack is a program with tests"
        if level == "namespaces":
            assert not aims.was_written
            assert aims.survivors() == []


def test_the_table_names_every_attack() -> None:
    assert len(ATTACKS) >= 60
    assert list(documented()) == [one.name for one in ATTACKS]
    assert {cells[2] for cells in documented().values()} == {"–"}


@needs_namespaces
def test_one_attack_of_five_does_not_pass(tmp_path: Path) -> None:
    check("namespaces", [one for one in ATTACKS if one.seconds == 20.0][::5], tmp_path, set())


@needs_namespaces
@pytest.mark.slow
def test_no_attack_passes_in_namespaces(tmp_path: Path) -> None:
    check("namespaces", ATTACKS, tmp_path, set())


@pytest.mark.slow
def test_what_passes_in_a_process_is_documented(tmp_path: Path) -> None:
    allowed = {name for name, cells in documented().items() if cells[1] == "passes"}
    check("process", ATTACKS, tmp_path, allowed)
