"""Every wrong function is found by the check that it should be found by, and the right ones pass."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from zoo import RIGHT, Bug
from zoo_losses import LOSSES
from zoo_others import OTHERS

from posttrain.conformance.cases import Config, all_configs
from posttrain.conformance.findings import Finding
from posttrain.conformance.losses import check_loss
from posttrain.conformance.run import KINDS

ZOO = [*LOSSES, *OTHERS]


def findings_about(kind: str, function: object, config: Config | None) -> list[Finding]:
    if config is not None:
        return list(check_loss(function, config))  # type: ignore[arg-type]
    return list(KINDS[kind][1](function))


def test_the_page_shows_the_recorded_tables():
    root = Path(__file__).resolve().parents[2]
    recorded = json.loads((root / "benchmarks" / "results" / "conformance.json").read_text(encoding="utf-8"))
    page = (root / "docs" / "how-to" / "check-a-trainer.md").read_text(encoding="utf-8")
    of_zoo = page.partition("<!-- zoo -->")[2].partition("<!-- end of zoo -->")[0].strip().splitlines()[2:]
    assert [line.split(" | ")[0].removeprefix("| ") for line in of_zoo] == [bug.name for bug in ZOO]
    assert [row["name"] for row in recorded["zoo"]] == [bug.name for bug in ZOO]
    of_trl = page.partition("<!-- trl -->")[2].partition("<!-- end of trl -->")[0].strip().splitlines()[2:]
    assert len(of_trl) == len(recorded["trl"]["rows"]) == 12
    for line, row in zip(of_trl, recorded["trl"]["rows"], strict=True):
        assert line.split(" | ")[1] == row["case"]
        assert all(note in line for note in row["others"])
    assert recorded["versions"]["trl"].startswith("1.16")


def statuses(findings: Sequence[Finding]) -> dict[str, str]:
    return {one.check: one.status for one in findings}


@pytest.mark.parametrize("bug", ZOO, ids=lambda bug: bug.name)
def test_a_wrong_function_is_found_by_its_check(bug: Bug):
    found = statuses(findings_about(bug.kind, bug.function, bug.config))
    assert found[bug.check] == bug.status
    right = "pairs" if bug.config is not None and bug.config.aggregation == "pair_mean" else bug.kind
    beside = findings_about(bug.kind, RIGHT[right], bug.config)
    assert {one.status for one in beside} == {"ok"}
    assert [one.check for one in beside if one.check == bug.check] == [bug.check]


def test_the_zoo_is_as_large_as_it_says():
    assert len(ZOO) >= 80
    assert len({bug.name for bug in ZOO}) == len(ZOO)
    assert sum(bool(bug.report) for bug in ZOO) >= 50


OF_THE_ZOO = [one for one in all_configs() if one.objective not in ("reinforce", "sapo", "ipo", "simpo")]


@pytest.mark.parametrize("config", OF_THE_ZOO, ids=lambda one: one.label)
def test_a_right_loss_passes_in_every_configuration(config: Config):
    right = RIGHT["pairs" if config.aggregation == "pair_mean" else "loss"]
    found = findings_about("loss", right, config)
    assert {one.status for one in found} == {"ok"}, [one for one in found if one.status != "ok"]
    assert len(found) >= 15
