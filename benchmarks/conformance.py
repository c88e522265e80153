"""The checks of ``posttrain conformance`` on TRL, on our own functions and on the zoo of wrong ones.

    python benchmarks/conformance.py               # own, the zoo, and TRL where it is installed
    python benchmarks/conformance.py --only zoo    # prints; writes no result

Writes results/conformance.json, and the tables between the marks of docs/how-to/check-a-trainer.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "conformance.json"
PAGE = ROOT / "docs" / "how-to" / "check-a-trainer.md"
sys.path.insert(0, str(ROOT / "tests" / "conformance"))

from test_zoo import ZOO, findings_about  # noqa: E402

from posttrain.conformance.findings import worst  # noqa: E402
from posttrain.conformance.run import ConformanceReport, check_module, largest_of, load_module  # noqa: E402


def record_module(name: str) -> dict[str, Any]:
    """Return the findings about a module and the CPU-seconds of the checks."""
    module = load_module(name)
    before = time.process_time()
    report = check_module(module)
    seconds = time.process_time() - before
    recorded = {"cpu_seconds": round(seconds, 2), "rows": rows_of(report)} | report.as_dict() | {"module": name}
    if name == "own":
        recorded.pop("findings")  # all as in the equations
    return recorded


def rows_of(report: ConformanceReport) -> list[dict[str, Any]]:
    """Return a row for each case: how many checks, the largest gap, and what is no equation."""
    cases: dict[tuple[str, str], list[Any]] = {}
    for one in report.findings:
        cases.setdefault((one.function, one.case), []).append(one)
    rows = []
    for (function, case), findings in cases.items():
        gap, place = largest_of([one for one in findings if one.status == "ok"])
        notes: dict[str, list[str]] = {}
        for one in findings:
            if one.status != "ok":
                notes.setdefault(one.note, []).append(one.check)
        others = [f"{', '.join(checks)}: {note}" for note, checks in notes.items()]
        row = {"function": function, "case": case, "checks": len(findings), "largest_gap": gap, "at": place}
        rows.append(row | {"result": worst(findings), "others": others})
    return rows


def record_zoo() -> list[dict[str, Any]]:
    """Return a row for each wrong function: its report, the check that finds it, and all that do."""
    rows = []
    for bug in ZOO:
        findings = findings_about(bug.kind, bug.function, bug.config)
        found = [one for one in findings if one.status != "ok"]
        (own,) = [one for one in found if one.check == bug.check]
        case = "" if bug.config is None else bug.config.label
        rows.append(
            {
                "name": bug.name,
                "kind": bug.kind,
                "case": case,
                "report": bug.report,
                "check": bug.check,
                "status": own.status,
                "note": own.note,
                "found_by": [one.check for one in found],
            }
        )
    return rows


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def trl_table(recorded: dict[str, Any]) -> str:
    """Return TRL's table: a row for each case."""
    rows = []
    for row in recorded["rows"]:
        others = "; ".join(row["others"]) or "none"
        gap = f"{row['largest_gap']} ({row['at']})"
        rows.append([f"`{row['function']}`", row["case"], str(row["checks"]), gap, others])
    return table(["function", "case", "checks", "largest gap of matching checks", "other results"], rows)


def zoo_table(zoo: Sequence[dict[str, Any]]) -> str:
    """Return the table of the zoo."""
    rows = []
    for row in zoo:
        verdict = row["check"] if row["status"] == "fails" else f"{row['check']} (convention)"
        rows.append([row["name"], f"`{row['kind']}`", row["report"] or "–", verdict, row["note"]])
    return table(["wrong function", "kind", "public report", "found by", "message"], rows)


def with_tables(page: str, results: dict[str, Any]) -> str:
    """Return the page with the tables of the results between its marks."""
    tables = {"trl": trl_table(results["trl"]), "zoo": zoo_table(results["zoo"])}
    for name, text in tables.items():
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(start)
        _, _, after = rest.partition(end)
        page = f"{before}{start}\n\n{text}\n\n{end}{after}"
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("zoo", "own", "trl"), help="one part; prints, and writes no result")
    part = parser.parse_args().only
    results: dict[str, Any] = {"versions": {"torch": version("torch")}}
    if part in (None, "zoo"):
        results["zoo"] = record_zoo()
        print(f"zoo: {len(results['zoo'])} wrong functions, each found by its check")
    for name in ("own", "trl"):
        if part in (None, name) and (name == "own" or find_spec("trl") is not None):
            results[name] = record_module(name)
            print(f"{name}: {results[name]['counts']}, {results[name]['cpu_seconds']} CPU-seconds")
    if part is not None:
        return 0
    if "trl" not in results:
        print("TRL is not installed: nothing is written", file=sys.stderr)
        return 1
    results["versions"]["trl"] = version("trl")
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
