"""The grader ``code_tests`` measured: attacks, the solutions of HumanEval and MBPP, seconds of a grading.

    POSTTRAIN_DATA=/path/to/data python benchmarks/code_tests.py
    POSTTRAIN_DATA=/path/to/data python benchmarks/code_tests.py --only attacks --size smallest

attacks    the programs of tests/adversaries/code_attacks.txt: which of them pass where program and tests are one
           process whose exit code 0 is the verdict (as most harnesses have it), in the sandbox ``process``, and in
           ``bubblewrap``.
solutions  the data sets' own solutions, each against its tests, through prompt, answer and extraction; and an empty
           answer, an answer without code, and an empty function of the right name, of which none may pass.
seconds    of one grading of a small program, one at a time and two at a time.

Writes results/code_tests.json, and prints a table of the attacks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.data.verifiable.suites import humaneval, mbpp
from posttrain.graders.code.judging import Checks, Walls, judge_all
from posttrain.graders.grading import Submission, grade_submissions
from posttrain.graders.sandbox.sandbox import Bounds, refusal
from posttrain.types import Example

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "adversaries"))

import code_targets  # noqa: E402
from code_attacks import ATTACKS  # noqa: E402

RESULTS = HERE / "results" / "code_tests.json"
PARTS = ("attacks", "solutions", "seconds")
NUM_TIMED = 40


def measure_attacks(smallest: bool) -> dict[str, Any]:
    chosen = ATTACKS[::40] if smallest else ATTACKS
    with tempfile.TemporaryDirectory() as folder, code_targets.targets(Path(folder)) as aims:
        one = {attack.name: code_targets.succeeds_in_one_process(aims, attack) for attack in chosen}
        ways = {"one process": one}
        for kind in ("process", "bubblewrap"):
            outcomes = code_targets.outcomes(kind, aims, chosen)  # type: ignore[arg-type]
            ways[kind] = {name: outcome == "right" for name, outcome in outcomes.items()}
    rows = {attack.name: [ways[way][attack.name] for way in ways] for attack in chosen}
    for name, verdicts in rows.items():
        print(f"| {name} | {' | '.join('passes' if one else '–' for one in verdicts)} |")
    return {"num": len(chosen), "pass": {way: sum(verdicts.values()) for way, verdicts in ways.items()}, "rows": rows}


def measure_solutions(smallest: bool) -> dict[str, Any]:
    tasks: dict[str, Sequence[Example]] = {
        "humaneval": humaneval().examples,
        "mbpp": [e for split in ("train", "validation", "test") for e in mbpp(split=split).examples],  # type: ignore[arg-type]
    }
    results: dict[str, Any] = {}
    for name, examples in tasks.items():
        chosen = examples[::60] if smallest else examples
        started = time.perf_counter()
        counted = Counter(one.outcome for one in graded(chosen, [e.demonstration or "" for e in chosen]))
        seconds = time.perf_counter() - started
        empty = {
            what: Counter(one.outcome for one in graded(chosen, texts))
            for what, texts in {
                "nothing": [""] * len(chosen),
                "no code": ["I cannot do that."] * len(chosen),
                "an empty function": [empty_function(e) for e in chosen],
            }.items()
        }
        results[name] = {"num": len(chosen), "solutions": counted, "seconds_each": seconds / len(chosen), **empty}
        print(name, json.dumps(results[name]))
    return results


def graded(examples: Sequence[Example], texts: Sequence[str]) -> list[Any]:
    return grade_submissions(
        "code_tests", [Submission(t, None, None, e.meta) for e, t in zip(examples, texts, strict=True)]
    )


def empty_function(example: Example) -> str:
    return "\n".join(f"def {name}(*a, **k): pass" for name in example.meta["tests"]["names"])


def measure_seconds(smallest: bool) -> dict[str, float]:
    num = 4 if smallest else NUM_TIMED
    programs = [(f"def f(x): return x + {n} - {n} + 1", Checks(("f",), "assert f(1) == 2")) for n in range(num)]
    seconds = {}
    for kind in ("process", "bubblewrap"):
        walls = Walls(kind, Bounds(cpu_seconds=60), 120.0)  # type: ignore[arg-type]
        for workers in (1, 2):
            started = time.perf_counter()
            assert set(judge_all(programs, walls, workers)) == {"right"}
            seconds[f"{kind}, {workers} at a time"] = (time.perf_counter() - started) / num
    print(json.dumps(seconds))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--size", choices=("full", "smallest"), default="full")
    arguments = parser.parse_args()
    if refusal("bubblewrap"):
        sys.exit(f"this machine has no bubblewrap: {refusal('bubblewrap')}")
    smallest = arguments.size == "smallest"
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if arguments.only and RESULTS.exists() else {}
    results |= {
        "machine": {
            "kernel": platform.release(), "python": platform.python_version(),
            "user": os.getuid(), "processors": os.cpu_count(), "load": os.getloadavg()[0],
        }
    }  # fmt: skip
    measures = {"attacks": measure_attacks, "solutions": measure_solutions, "seconds": measure_seconds}
    RESULTS.parent.mkdir(exist_ok=True)
    for part in PARTS:
        if arguments.only in (None, part):
            results[part] = measures[part](smallest)
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
