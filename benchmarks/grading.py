"""The grader ``math`` measured: agreement, real gold answers, hostile answers, throughput.

    POSTTRAIN_DATA=/path/to/data python benchmarks/grading.py
    POSTTRAIN_DATA=/path/to/data python benchmarks/grading.py --only throughput --repeats 5

cases       (gold, prediction, expected) facts from the test suites of other graders, beside math-verify's
            ``verify(parse(gold), parse(prediction))`` (as they stand, and put between dollars where they have no
            delimiters) and beside a plain string match. Cases with a policy hang on a convention on which suites
            contradict one another; they are counted apart.
golds       every gold answer of the GSM8K and MATH test rows against itself and against that of another problem whose
            gold is written differently.
hostile     the answers of tests/rewards/hostile_answers.py, against each of its gold answers.
throughput  gradings per second with two workers, of numbers (no worker needed) and of pairs of expressions whose
            values must be computed. CPU rates beside wall rates, since the machine may be shared.

Writes results/grading.json.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import os
import platform
import random
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from posttrain.rewards.choice import multiple_choice
from posttrain.rewards.grading import Submission
from posttrain.rewards.math import COMPARE, math
from posttrain.rewards.math_reading import Expression, NotUnderstood, read_answer
from posttrain.rewards.workers import Limits, WorkerPool

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "rewards"))
import hostile_answers

RESULTS = Path(__file__).parent / "results" / "grading.json"
NUM_WORKERS = 2


def read_rows(*parts: str) -> list[dict[str, Any]]:
    folder = os.environ.get("POSTTRAIN_DATA")
    if not folder:
        raise SystemExit("set POSTTRAIN_DATA to the folder with the data sets")
    with gzip.open(Path(folder).joinpath(*parts), "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def ask_math_verify(gold: str, given: str) -> bool:
    from math_verify import parse, verify

    return bool(verify(parse(gold), parse(given)))


def ask_math_verify_in_dollars(gold: str, given: str) -> bool:
    """As its manual asks for LaTeX: in delimiters. Texts with delimiters or boxes of their own stay as they are."""

    def wrap(text: str) -> str:
        return text if "$" in text or "boxed" in text or "\\[" in text or "\\(" in text else f"${text}$"

    return ask_math_verify(wrap(gold), wrap(given))


def ask_math(gold: str, given: str) -> str:
    return math([Submission(given, None, gold)], num_workers=NUM_WORKERS)[0].outcome


def ask_choice(gold: str, given: str) -> str:
    return multiple_choice(Submission(given, None, gold)).outcome


def table(pairs: Sequence[tuple[bool, bool]]) -> dict[str, Any]:
    """Counts of (expected, found)."""
    counts = Counter(pairs)
    agreed = counts[True, True] + counts[False, False]
    return {
        "cases": len(pairs),
        "right_right": counts[True, True],
        "right_called_wrong": counts[True, False],
        "wrong_called_right": counts[False, True],
        "wrong_wrong": counts[False, False],
        "agreement": round(agreed / max(1, len(pairs)), 4),
    }


def measure_cases() -> dict[str, Any]:
    rows = read_rows("grader", "grader_cases.jsonl.gz")
    found: dict[str, list[bool]] = {"posttrain": [], "math-verify": [], "math-verify, $": [], "string match": []}
    outcomes, seconds = [], []
    math([Submission("x+1", None, "1+x")] * 2, num_workers=NUM_WORKERS)  # start the workers
    for row in rows:
        start = time.perf_counter()
        outcomes.append((ask_choice if row["kind"] == "choice" else ask_math)(row["gold"], row["prediction"]))
        seconds.append(time.perf_counter() - start)
        found["posttrain"].append(outcomes[-1] == "right")
        found["math-verify"].append(ask_math_verify(row["gold"], row["prediction"]))
        found["math-verify, $"].append(ask_math_verify_in_dollars(row["gold"], row["prediction"]))
        found["string match"].append(row["gold"].strip() == row["prediction"].strip())
    plain = [place for place, row in enumerate(rows) if row["policy"] is None]
    groups = {"no convention": plain, "hangs on a convention": sorted(set(range(len(rows))) - set(plain))}
    groups |= {
        f"no convention, {kind}": [p for p in plain if rows[p]["kind"] == kind] for kind in ("answer", "text", "choice")
    }
    tables = {
        group: {name: table([(rows[p]["expected"], verdicts[p]) for p in places]) for name, verdicts in found.items()}
        for group, places in groups.items()
    }
    differ = [
        {key: rows[p][key] for key in ("id", "kind", "policy", "gold", "prediction", "expected")}
        | {"outcome": outcomes[p]}
        for p in range(len(rows))
        if found["posttrain"][p] != rows[p]["expected"]
    ]
    for group, rated in tables.items():
        print(f"\n{group}")
        print(f"  {'':14}{'cases':>7}{'right':>8}{'missed':>8}{'FALSE+':>8}{'wrong':>8}{'agree':>9}")
        for name, counts in rated.items():
            *numbers, agreement = counts.values()
            print(f"  {name:14}{numbers[0]:7}" + "".join(f"{number:8}" for number in numbers[1:]) + f"{agreement:9.1%}")
    print(f"\nslowest case: {max(seconds):.2f} s; outcomes: {dict(Counter(outcomes))}")
    return {"tables": tables, "slowest_seconds": round(max(seconds), 3), "differing": differ}


def measure_golds() -> dict[str, Any]:
    results = {}
    for name, parts, key in (
        ("gsm8k test", ("gsm8k", "gsm8k_test.jsonl.gz"), "final_answer"),
        ("math test", ("math", "math_test.jsonl.gz"), "answer"),
    ):
        golds = [row[key] for row in read_rows(*parts)]
        numbers = random.Random(0)
        others = []
        for gold in golds:
            other = numbers.choice(golds)
            while other.strip() == gold.strip():
                other = numbers.choice(golds)
            others.append(other)
        own = grade_pairs([(gold, gold) for gold in golds])
        crossed = grade_pairs(list(zip(golds, others, strict=True)))
        results[name] = {
            "rows": len(golds),
            "own_right": own.count("right"),
            "other_wrong": crossed.count("wrong"),
            "exceptions": [pair for *pair, outcome in zip(golds, golds, own, strict=True) if outcome != "right"]
            + [pair for *pair, outcome in zip(golds, others, crossed, strict=True) if outcome != "wrong"],
        }
        print(f"{name}: {results[name]}")
    return results


def grade_pairs(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Outcomes of (gold, given), each given in a box."""
    submissions = [Submission(f"The answer is $\\boxed{{{given}}}$.", given, gold) for gold, given in pairs]
    return [verdict.outcome for verdict in math(submissions, num_workers=NUM_WORKERS)]


def measure_hostile() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder) / "canary"
        answers, golds = hostile_answers.hostile_answers(canary), hostile_answers.GOLDS
        submissions = [
            Submission(f"<think> hm </think> <answer> {answer} </answer>", answer.strip() or None, gold)
            for answer in answers
            for gold in golds
        ]
        start = time.perf_counter()
        verdicts = math(submissions, timeout_seconds=1.0, num_workers=NUM_WORKERS)
        seconds = time.perf_counter() - start
        results = {
            "answers": len(answers),
            "golds": len(golds),
            "timeout_seconds": 1.0,
            "outcomes": dict(Counter(verdict.outcome for verdict in verdicts)),
            "seconds": round(seconds, 1),
            "code_was_executed": canary.exists(),
            "graded_right_afterwards": grade_pairs([("\\sqrt{12}", "2\\sqrt{3}"), ("x+1", "1+x")]).count("right") == 2,
        }
    print(f"hostile: {results}")
    return results


def symbolic_pairs() -> list[list[Any]]:
    """(gold, given, tolerance) of two expressions that only their values tell apart; half of them are right."""
    latex = []
    for gold in sorted({row["answer"] for row in read_rows("math", "math_test.jsonl.gz")}):
        try:
            form = read_answer(gold)
        except NotUnderstood:
            continue
        if isinstance(form, Expression) and not form.unit and not form.percent:
            latex.append(form.latex)
    others = random.Random(0).sample(latex, len(latex))
    right = [[gold, f"\\frac{{2 ({gold})}}{{2}}", 0.0] for gold in latex]
    return right + [[gold, other, 0.0] for gold, other in zip(latex, others, strict=True) if gold != other]


def rate(work: Callable[[], int], children: Callable[[], None] = lambda: None) -> dict[str, float]:
    """Gradings per second of wall time, and of CPU time including that of the workers (ended by ``children``)."""
    before = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    start = time.perf_counter()
    done = work()
    wall = time.perf_counter() - start
    children()
    after = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(b.ru_utime + b.ru_stime - a.ru_utime - a.ru_stime for a, b in zip(before, after, strict=True))
    return {"gradings": done, "per_second": done / wall, "per_cpu_second": done / cpu}


def measure_throughput(repeats: int) -> dict[str, Any]:
    rows = read_rows("gsm8k", "gsm8k_test.jsonl.gz")
    numeric = [
        Submission(f"{row['question']} Let me see. So the answer is $\\boxed{{{given}}}$.", given, row["final_answer"])
        for row, other in zip(rows, [*rows[1:], rows[0]], strict=True)
        for given in (row["final_answer"], other["final_answer"])
    ]
    pairs = symbolic_pairs()
    runs: dict[str, list[dict[str, float]]] = {"numeric": [], "symbolic": [], "symbolic, with starting the workers": []}
    for _ in range(repeats):
        runs["numeric"].append(rate(lambda: len(math(numeric))))
        pool = WorkerPool(COMPARE, NUM_WORKERS, Limits())
        runs["symbolic, with starting the workers"].append(rate(lambda pool=pool: len(pool.run(pairs)), pool.close))
        pool.run(pairs[:200])
        results = []
        runs["symbolic"].append(
            rate(lambda pool=pool, results=results: len(results.extend(pool.run(pairs)) or results))
        )
        pool.close()
        kinds = Counter(f"{result.kind} {result.value}" for result in results)
    found: dict[str, Any] = {"repeats": repeats, "workers": NUM_WORKERS, "symbolic_outcomes": dict(kinds)}
    for name, rates in runs.items():
        found[name] = {key: round(statistics.median(one[key] for one in rates)) for key in rates[0]}
        found[name]["per_second_of_each_repeat"] = [round(one["per_second"]) for one in rates]
    del found["symbolic"]["per_cpu_second"]  # the workers' time shows only when they end
    for name in runs:
        print(f"{name}: {found[name]}")
    return found


def main() -> None:
    parts = {
        "cases": measure_cases,
        "golds": measure_golds,
        "hostile": measure_hostile,
        "throughput": measure_throughput,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(parts), help="one part; nothing is written")
    parser.add_argument("--repeats", type=int, default=5, help="of the throughput")
    arguments = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    results: dict[str, Any] = {
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("sympy", "latex2sympy2_extended", "math-verify")},
        "load_average_before": round(os.getloadavg()[0], 2),
    }
    for name, measure in parts.items():
        if arguments.only in (None, name):
            print(f"\n== {name}", flush=True)
            results[name] = measure_throughput(arguments.repeats) if name == "throughput" else measure()
    results["load_average_after"] = round(os.getloadavg()[0], 2)
    if arguments.only is None:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=True) + "\n", encoding="utf-8")
        print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
