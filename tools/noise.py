"""Measure how far the comparisons of the tests move on other CPUs, and whether their bounds have room for it.

The fast suite runs on this machine as it is, and writes down every comparison of floats (``tests/closeness.py``). The
tests that compare run again as on other machines: kernels that round by one ulp differently (``tests/other_cpu``, two
seeds), two threads, and the instructions of older CPUs. A comparison falls short if its bound is less than four times
what its difference moves; a test that fails on one of them falls short too. Exempt is only what asserts equality to the
bit (``@pytest.mark.exact``), and only from moved kernels.

    python tools/noise.py [PATH ...]      tests or folders; everything without
    python tools/noise.py --read          the report of what ran last
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "noise"
MARGIN = 4.0  # a bound over what the difference moves
PLAIN = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
MACHINES: dict[str, dict[str, str]] = {
    "this machine": {},
    "moved by an ulp, seed 1": {"POSTTRAIN_NOISE": "1"},
    "moved by an ulp, seed 2": {"POSTTRAIN_NOISE": "2"},
    "two threads": {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "SSE4.1": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}
Key = tuple[str, str, int]  # a test, its line, the how-manieth time there


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", help="tests or folders; everything without")
    parser.add_argument("--read", action="store_true", help="report what ran last, and run nothing")
    parser.add_argument("--processes", type=int, default=2, help="test processes at a time")
    parser.add_argument("--machines", nargs="*", choices=list(MACHINES), default=list(MACHINES))
    given = parser.parse_args()
    if not given.read:
        run_all(given.machines, given.paths, given.processes)
    return report()


def run_all(machines: list[str], paths: list[str], processes: int) -> None:
    """Run the tests on every machine: on the first all, on the others those that compare floats."""
    chosen = paths
    for machine in machines:
        start = time.monotonic()
        run(machine, chosen, processes)
        print(f"{machine}: {time.monotonic() - start:.0f} s", flush=True)
        if machine == "this machine":
            chosen = [f"@{write_tests(machine)}"]


def write_tests(machine: str) -> Path:
    """Write the tests that compare floats, in the order in which they ran, to a file of arguments for pytest.

    Returns the path of the file.
    """
    tests = dict.fromkeys(test for test, _, _ in read(machine))
    path = BUILD / "tests.txt"
    path.write_text("\n".join(tests) + "\n", encoding="utf-8")
    return path


def run(machine: str, paths: list[str], processes: int) -> None:
    """One run of the tests; what they compare and what fails is in the machine's folder."""
    folder = folder_of(machine)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    environment = {**os.environ, **PLAIN, **MACHINES[machine], "POSTTRAIN_NOISE_RECORD": str(folder)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rfE", "--tb=short", *paths]
    if processes > 1:
        command += ["-n", str(processes), "--dist", "worksteal"]
    if "POSTTRAIN_NOISE" in MACHINES[machine]:
        before = environment.get("PYTHONPATH")
        folders = [str(ROOT / "tests" / "other_cpu"), *([before] if before else [])]
        environment["PYTHONPATH"] = os.pathsep.join(folders)
        command += ["-m", f"{usual_marks()} and not exact"]
    with (folder / "output.txt").open("w", encoding="utf-8") as output:
        subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False)


def usual_marks() -> str:
    """Return the markers that the fast suite leaves out, as pyproject.toml says it."""
    found = re.search(r"^addopts = .*-m '([^']+)'", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found.group(1)


def folder_of(machine: str) -> Path:
    return BUILD / re.sub(r"\W+", "-", machine)


def read(machine: str) -> dict[Key, dict[str, Any]]:
    """Every comparison that was written down on a machine."""
    rows = {}
    for path in sorted(folder_of(machine).glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            rows[row["test"], row["site"], row["time"]] = row
    return rows


def failures(machine: str) -> list[str]:
    path = folder_of(machine) / "output.txt"
    if not path.is_file():
        return []
    return re.findall(
        r"^(?:FAILED|ERROR) (\S+(?: [^-].*?)?)(?: - .*)?$", path.read_text(encoding="utf-8"), re.MULTILINE
    )


def shares(here: dict[str, Any], there: dict[str, Any]) -> Iterator[float]:
    """Return what each difference of a comparison moves, as a share of its bound."""
    if len(here["differences"]) == len(there["differences"]):
        for one, other, bound in zip(here["differences"], there["differences"], here["bounds"], strict=True):
            yield abs(one - other) / bound if bound else math.inf * (one != other)
    yield abs(here["worst"] - there["worst"])


def report() -> int:
    """Print what falls short; returns how much."""
    here = read("this machine")
    moved: dict[str, tuple[float, str, str]] = defaultdict(lambda: (0.0, "", ""))
    for machine in MACHINES:
        for key, row in read(machine).items():
            if key in here:
                test, site, _ = key
                share = max(shares(here[key], row))
                moved[site] = max(moved[site], (share, machine, test))
    short = {site: found for site, found in moved.items() if found[0] * MARGIN > 1}
    for site, (share, machine, test) in sorted(short.items(), key=lambda item: -item[1][0]):
        print(f"{site}: the bound is {1 / share:.2g} times what {machine} moves ({test})")
    num_failed = 0
    for machine in MACHINES:
        for test in failures(machine):
            num_failed += 1
            print(f"failed on {machine}: {test}")
    print(f"{len(here)} comparisons of floats in {len(moved)} places; {count_exact()} tests are exempt (to the bit)")
    print(f"{len(short)} bounds less than {MARGIN:g} times the noise, {num_failed} failures")
    return int(bool(short or num_failed))


def count_exact() -> int:
    """Return the number of tests that assert what only one order of rounding keeps."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", f"{usual_marks()} and exact"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return sum("::" in line for line in done.stdout.splitlines())


if __name__ == "__main__":
    sys.exit(main())
