"""The grader ``math`` measured: agreement, real gold answers, hostile answers, throughput.

    POSTTRAIN_DATA=/path/to/data python benchmarks/grading.py
    POSTTRAIN_DATA=/path/to/data python benchmarks/grading.py --only throughput --repeats 5
    POSTTRAIN_DATA=/path/to/data python benchmarks/grading.py --only adversary --size smallest

cases       (gold, prediction, expected) facts from the test suites of other graders, next to math-verify's
            ``verify(parse(gold), parse(prediction))`` (as they stand, and put between dollars where they have no
            delimiters) and next to a plain string match. Cases with a policy hang on a convention on which suites
            contradict one another; they are counted apart.
golds       every gold answer of the GSM8K and MATH test rows against itself and against that of another problem whose
            gold is written differently.
hostile     the answers of tests/graders/hostile_answers.py, against each of its gold answers.
adversary   the answers of tests/adversaries against all golds of the mathematics suites and of GSM8K and SVAMP: those
            that are right for two golds that an independent table of equivalents calls different, or for one that
            means another thing; mutated golds and hedges; golds against others of the same digits; the spellings that
            must stay right; and the best constant answer of tasks without one gold.
throughput  gradings per second with two workers, of numbers (no worker needed) and of pairs of expressions whose
            values must be computed. CPU rates next to wall rates, since the machine may be shared.

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

from posttrain.graders.choice import multiple_choice
from posttrain.graders.grading import Submission, grade_submissions
from posttrain.graders.math.forms import Expression, NotUnderstood, read_form, undress
from posttrain.graders.math.grader import COMPARE, math
from posttrain.graders.math.notation import unify
from posttrain.graders.sandbox.workers import Limits, WorkerPool

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / "graders"), str(TESTS / "adversaries")]
import adversary  # noqa: E402
import correct_answers  # noqa: E402
import grader_answers  # noqa: E402
import hostile_answers  # noqa: E402
import real_golds  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "grading.json"
NUM_WORKERS = 2
# Of the adversary: golds and constant answers that meet one another (None: all), golds that are mutated and hedged,
# pairs of golds that look alike, rows of a task without golds.
SIZES: dict[str, dict[str, int | None]] = {
    "smallest": {"golds": 12, "constants": 30, "mutated": 4, "near": 50, "rows": 5},
    "whole": {"golds": None, "constants": 120, "mutated": 1500, "near": 40_000, "rows": 200},
}


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


def measure_adversary(size: str) -> dict[str, Any]:
    """Constant answers meet one gold of each kind first; the ones that are most often right, and a sample, meet all."""
    results: dict[str, Any] = {"size": size}
    sizes = SIZES[size]
    for name, tasks in (("math", real_golds.MATH_TASKS), ("numeric", real_golds.NUMBER_TASKS)):
        rng, started = random.Random(0), time.perf_counter()
        golds = real_golds.real_golds(tasks)
        grade_pairs = adversary.with_grader(name)
        constants = grader_answers.constant_answers()
        panel = [*real_golds.PANEL, *rng.sample(golds, 10)][: sizes["golds"]]
        first = constants if size == "whole" else rng.sample(constants, sizes["constants"] or 0)
        report = adversary.attack_with_constants(grade_pairs, first, panel)
        suspects = dict.fromkeys(failure.answer for failure in report.failures)
        chosen = [*list(suspects)[:40], *rng.sample(constants, sizes["constants"] or len(constants))]
        met = golds if sizes["golds"] is None else rng.sample(golds, sizes["golds"])
        report.add(adversary.attack_with_constants(grade_pairs, list(dict.fromkeys(chosen)), met))
        report.add(adversary.attack_with_own(grade_pairs, golds, rng, sizes["mutated"] or len(golds)))
        report.add(adversary.attack_with_near_golds(grade_pairs, golds, rng, sizes["near"] or 0))
        pairs = [
            pair[-2:] for pair in (correct_answers.math_pairs() if name == "math" else correct_answers.numeric_pairs())
        ]
        refused = [pair for pair, correct in zip(pairs, grade_pairs(pairs), strict=True) if not correct]
        results[name] = {
            "distinct_golds": len(golds),
            "counts": dict(report.counts),
            "failures_by_reason": dict(Counter(failure.why for failure in report.failures)),
            "failures": [[one.why, one.answer, list(one.golds)] for one in report.failures[:300]],
            "undecided": report.undecided[:100],
            "spellings": len(pairs),
            "spellings_refused": refused,
            "seconds": round(time.perf_counter() - started, 1),
        }
        print(f"{name}: {report.summary(8)}; spellings refused: {len(refused)} of {len(pairs)}", flush=True)
    results["best_constants"] = best_constants(sizes["rows"] or 0)
    print(f"best constant answers: {results['best_constants']}")
    return results


def best_constants(num_rows: int) -> dict[str, list[Any]]:
    """Return the constant answer that is correct most often, and its share of rows, for ifeval and mmlu."""
    found = {}
    for task in ("ifeval", "mmlu"):
        examples = real_golds.load(task).examples[:num_rows]
        rates: Counter[str] = Counter()
        answers = grader_answers.constant_answers()
        submissions = [
            adversary.submission(a, e.answer, **e.meta) for a in answers[:: 1 + 60 // num_rows] for e in examples
        ]
        for submission, verdict in zip(submissions, grade_submissions(examples[0].grader, submissions), strict=True):
            rates[submission.extracted or ""] += verdict.outcome == "right"
        ((answer, count),) = rates.most_common(1)
        found[task] = [answer, round(count / len(examples), 4)]
    return found


def symbolic_pairs() -> list[list[Any]]:
    """(gold, given, tolerance) of two expressions that only their values tell apart; half of them are right."""
    latex = []
    for gold in sorted({row["answer"] for row in read_rows("math", "math_test.jsonl.gz")}):
        try:
            form = read_form(undress(unify(gold)))
        except NotUnderstood:
            continue
        if isinstance(form, Expression) and not form.unit and not form.percent:
            latex.append(form.latex)
    others = random.Random(0).sample(latex, len(latex))
    correct = [[gold, f"\\frac{{2 ({gold})}}{{2}}", 0.0] for gold in latex]
    return correct + [[gold, other, 0.0] for gold, other in zip(latex, others, strict=True) if gold != other]


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
    parts: dict[str, Callable[..., dict[str, Any]]] = {
        "cases": measure_cases,
        "golds": measure_golds,
        "hostile": measure_hostile,
        "adversary": measure_adversary,
        "throughput": measure_throughput,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(parts), help="one part; nothing is written")
    parser.add_argument("--repeats", type=int, default=5, help="of the throughput")
    parser.add_argument("--size", choices=list(SIZES), default="whole", help="of the adversary")
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
            given = {"throughput": (arguments.repeats,), "adversary": (arguments.size,)}.get(name, ())
            results[name] = measure(*given)
    results["load_average_after"] = round(os.getloadavg()[0], 2)
    if arguments.only is None:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=True) + "\n", encoding="utf-8")
        print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
