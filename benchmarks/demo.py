"""The demo's claim, measured: held-out accuracy of base, SFT and GRPO for several seeds.

    python benchmarks/demo.py --seeds 0 1 2
    python benchmarks/demo.py --seeds 0 1 2 --story tools

Runs ``posttrain demo --seed S`` once per seed in a folder of its own and prints one row each: accuracy with its 95 %
interval, format, what the story is about (the share of worked answers; right answers and calls for small and for large
sums), wall time. Writes ``benchmarks/results/demo.json`` or ``demo-tools.json``.
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

RESULTS = Path(__file__).resolve().parent / "results"
RUNS = {"reasoning": "demo", "tools": "demo-tools"}
EXTRA = ("shows_reasoning", "small:accuracy", "small:called", "large:accuracy", "large:called")
COMMAND = "import sys; from posttrain.cli import main; sys.exit(main())"


def run_seed(seed: int, folder: Path, story: str) -> dict[str, Any]:
    """The facts of one demo (``demo.json``), with the wall time of the whole command."""
    started = time.monotonic()
    arguments = ["demo", "--story", story, "--seed", str(seed), "--runs-dir", str(folder), "--quiet"]
    subprocess.run([sys.executable, "-c", COMMAND, *arguments], check=True, stdout=subprocess.DEVNULL)
    info: dict[str, Any] = json.loads((folder / f"{RUNS[story]}-grpo" / "demo.json").read_text())
    return info | {"command_seconds": time.monotonic() - started}


def show_row(info: dict[str, Any]) -> str:
    """One line for one seed."""
    parts = [f"seed {info['seed']}:"]
    for label, r in info["results"].items():
        interval = f"[{r['accuracy_low']:.1%}, {r['accuracy_high']:.1%}]"
        extra = "".join(f", {name} {r[name]:.0%}" for name in EXTRA if name in r)
        parts.append(f"{label} {r['accuracy']:.1%} {interval}, format {r['format']:.1%}{extra};")
    parts.append(f"{info['command_seconds']:.0f} s")
    return " ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--story", choices=list(RUNS), default="reasoning")
    arguments = parser.parse_args()
    found = []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            found.append(run_seed(seed, Path(folder), arguments.story))
        print(show_row(found[-1]), flush=True)
    RESULTS.mkdir(exist_ok=True)
    content = {"machine": platform.platform(), "python": platform.python_version(), "demos": found}
    (RESULTS / f"{RUNS[arguments.story]}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
