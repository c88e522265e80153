"""Write ``docs/metrics.md`` from the registry of metrics, or check with ``--check`` that it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

from posttrain.store.metric_names import FAMILIES, GROUPS

TARGET = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
HEADING = """\
# Metrics

The same quantity has the same name in `metrics.jsonl`, on the terminal, in results of evaluations, reports, pictures
and trackers. Generated from the code by `make docs`; do not edit. On the command line: `posttrain explain NAME`.

Shares are from 0 to 1 in files, and shown in percent. "Better" is the direction by which runs are ranked, where the
metric is the primary one (`eval.best`).
"""
BEFORE_FAMILIES = "Other names are made from these:\n"


def metrics_text() -> str:
    """Return the whole document."""
    parts = [HEADING]
    for title, metrics in GROUPS.items():
        rows = [f"| `{m.name}` | {m.label} | {m.unit} | {m.better} | {m.meaning} |" for m in metrics]
        parts.append(
            "\n".join(
                [f"## {title}\n", "| name | shown as | unit | better | meaning |", "|---|---|---|---|---|", *rows, ""]
            )
        )
    rows = [
        f"| {', '.join(f'`{name}`' for name in names.split(', '))} | {meaning} |" for names, meaning in FAMILIES.items()
    ]
    parts.append("\n".join(["## Families of names\n", BEFORE_FAMILIES, "| name | meaning |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def main() -> int:
    text = metrics_text()
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text, encoding="utf-8")
        print(f"wrote docs/{TARGET.name}")
        return 0
    if not TARGET.is_file() or TARGET.read_text(encoding="utf-8") != text:
        print("docs/metrics.md does not match the code: run `make docs`", file=sys.stderr)
        return 1
    print("docs/metrics.md matches the code")
    return 0


if __name__ == "__main__":
    sys.exit(main())
