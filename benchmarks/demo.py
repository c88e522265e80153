"""The demo's claim, measured: held-out accuracy of base, SFT and GRPO for several seeds.

    python benchmarks/demo.py --seeds 0 1 2

Runs ``posttrain demo --seed S`` once per seed in a folder of its own and prints one row each: accuracy
with its 95 % interval, format, share of worked answers, wall time. Writes ``benchmarks/results/demo.json``.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "demo.json"
COMMAND = "import sys; from posttrain.cli import main; sys.exit(main())"


def run_seed(seed: int, folder: Path) -> dict[str, Any]:
    """The facts of one demo (``demo.json``), with the wall time of the whole command."""
    started = time.monotonic()
    arguments = ["demo", "--seed", str(seed), "--runs-dir", str(folder), "--quiet"]
    subprocess.run([sys.executable, "-c", COMMAND, *arguments], check=True, stdout=subprocess.DEVNULL)
    facts: dict[str, Any] = json.loads((folder / "demo-grpo" / "demo.json").read_text())
    return facts | {"command_seconds": time.monotonic() - started}


def show_row(facts: dict[str, Any]) -> str:
    """One line for one seed."""
    parts = [f"seed {facts['seed']}:"]
    for label, r in facts["results"].items():
        interval = f"[{r['accuracy_low']:.1%}, {r['accuracy_high']:.1%}]"
        worked = f", worked {r['worked']:.0%}" if "worked" in r else ""
        parts.append(f"{label} {r['accuracy']:.1%} {interval}, format {r['format']:.1%}{worked};")
    parts.append(f"{facts['command_seconds']:.0f} s")
    return " ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    found = []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            found.append(run_seed(seed, Path(folder)))
        print(show_row(found[-1]), flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    content = {"machine": platform.platform(), "python": platform.python_version(), "demos": found}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
