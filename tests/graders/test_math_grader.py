"""The grader ``math``: what the traps of others were, options, outcomes, and real gold answers."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from grader_tables import math_pairs

from posttrain.errors import RecipeError
from posttrain.graders.grading import Submission, Verdict, grade_submissions
from posttrain.graders.math.grader import compare_quickly, math
from posttrain.registry import find
from refusing import refuses


def outcome(given: str, gold: str, **options: Any) -> str:
    return math([Submission(f"\\boxed{{{given}}}", given, gold)], **options)[0].outcome


@pytest.mark.parametrize("given", ["8", "|(1+i)^6| = 8", "\\left|\\left(1+i\\right)^6\\right|"])
def test_sizes_of_powers_of_complex_numbers_are_computed(given: str) -> None:
    """sympy compiles code for polynomials there, which workers refused: the right answer was a crash."""
    assert outcome(given, "8") == "right"
    assert outcome(given, "9") == "wrong"


def test_outcomes_come_in_order_with_what_was_graded() -> None:
    submissions = [
        Submission("\\boxed{2\\sqrt{3}}", "2\\sqrt{3}", "\\sqrt{12}"),
        Submission("\\boxed{4}", "4", "\\sqrt{12}"),
        Submission("<think> 4", None, "4"),
        Submission("\\boxed{4}", "4", None),
        Submission("\\boxed{\\sum_{i=1}^{1000000000} \\frac{1}{i}}", None, "4"),
        Submission("\\boxed{1} \\boxed{x+1}", "x+1", "1+x"),
        Submission("", None, "4"),
    ]
    verdicts = math(submissions, timeout_seconds=0.4)
    assert verdicts == [
        Verdict("right", "2\\sqrt{3}"),
        Verdict("wrong", "4"),
        Verdict("no_answer"),
        Verdict("ungraded"),
        Verdict("timeout", "\\sum_{i=1}^{1000000000} \\frac{1}{i}"),
        Verdict("right", "x+1"),
        Verdict("no_answer"),
    ]
    assert math([]) == []


def test_the_same_pair_gets_the_same_verdict_wherever_it_stands() -> None:
    correct, wrong = Submission("\\boxed{1+x}", "1+x", "x+1"), Submission("\\boxed{1-x}", "1-x", "x+1")
    slow = Submission("\\boxed{\\sum_{i=1}^{1000000000} \\frac{1}{i}}", None, "4")
    batch = [correct, wrong, slow, correct, correct, wrong] * 20
    expected = ["right", "wrong", "timeout", "right", "right", "wrong"] * 20
    for num_workers in (1, 2):
        verdicts = math(batch, num_workers=num_workers, timeout_seconds=0.4)
        assert [verdict.outcome for verdict in verdicts] == expected


def test_a_gold_answer_may_be_a_solution() -> None:
    assert outcome("4", "We add 2 and 2, so it is $\\boxed{4}$ and not 5.") == "right"
    assert outcome("5", "We add 2 and 2, so it is $\\boxed{4}$ and not 5.") == "wrong"
    long = "We add numbers. " * 20 + "The final answer is $4$. I hope it is correct. Note: 7 is not."
    assert outcome("4", long) == "right"


def test_numbers_and_spelling_need_no_worker() -> None:
    assert compare_quickly("1,000", "1000") is True
    assert compare_quickly("1,000", "1001") is False
    assert compare_quickly("\\text{Evelyn}", "evelyn") is True
    assert compare_quickly("x" * 2000, "x" * 2000) is True
    assert compare_quickly("x" * 2000, "x" * 1999) is False
    assert compare_quickly("5", "9" * 10**6) is False
    assert compare_quickly("x+1", "1+x") is None
    assert compare_quickly("100", "101", relative_tolerance=0.01) is True
    assert compare_quickly("100", "101.01", relative_tolerance=0.01) is False


def test_options() -> None:
    assert outcome("3.1", "3.14") == "wrong"
    assert outcome("3.1", "3.14", relative_tolerance=0.02) == "right"
    assert outcome("(1, 3.1)", "(1, 3.14)", relative_tolerance=0.02) == "right"
    assert outcome("\\gcd(10^{100000000}, 7)", "4", memory_megabytes=64, timeout_seconds=20) == "crash"
    with refuses(RecipeError, "timeout_seconds"):
        find("grader", "math").bind({"timeout_seconds": 0})
    with refuses(RecipeError, "no key 'timeout'"):
        grade_submissions("math", [], {"timeout": 1})


def test_it_is_found_by_its_name_and_works_in_threads() -> None:
    submissions = [Submission("\\boxed{1+x}", "1+x", "x+1"), Submission("\\boxed{2}", "2", "x+1")]
    found: list[list[str]] = []

    def work() -> None:
        found.append([verdict.outcome for verdict in grade_submissions("math", submissions)])

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["right", "wrong"]] * 3


needs_data = pytest.mark.skipif(
    "POSTTRAIN_DATA" not in os.environ, reason="POSTTRAIN_DATA names no folder with real rows"
)


def rows(*parts: str) -> list[dict[str, Any]]:
    with gzip.open(Path(os.environ["POSTTRAIN_DATA"]).joinpath(*parts), "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@needs_data
def test_the_cases_of_other_graders_suites() -> None:
    """Those that hang on no convention: at least 97 % agreement, and no answer is right that should not be."""
    cases = [
        row for row in rows("grader", "grader_cases.jsonl.gz") if row["policy"] is None and row["kind"] != "choice"
    ]
    verdicts = math([Submission(row["prediction"], None, row["gold"]) for row in cases])
    found = [(row["expected"], verdict.outcome == "right") for row, verdict in zip(cases, verdicts, strict=True)]
    assert (False, True) not in found
    assert sum(expected == correct for expected, correct in found) >= 0.97 * len(cases)
    assert {verdict.outcome for verdict in verdicts} <= {"right", "wrong", "no_answer"}


@needs_data
@pytest.mark.parametrize(
    ("parts", "key"), [(("gsm8k", "gsm8k_test.jsonl.gz"), "final_answer"), (("math", "math_test.jsonl.gz"), "answer")]
)
def test_real_gold_answers_are_right_for_themselves_only(parts: tuple[str, ...], key: str) -> None:
    golds = [row[key] for row in rows(*parts)][:300]
    own = math([Submission(f"\\boxed{{{gold}}}", gold, gold) for gold in golds])
    assert {verdict.outcome for verdict in own} == {"right"}
    shifted = [*golds[7:], *golds[:7]]
    pairs = [(gold, other) for gold, other in zip(golds, shifted, strict=True) if gold != other]
    others = math([Submission(f"\\boxed{{{other}}}", other, gold) for gold, other in pairs])
    assert {verdict.outcome for verdict in others} == {"wrong"}


@needs_data
def test_sampled_solutions_are_graded_as_their_labels_say() -> None:
    """One label of 800 is wrong: it takes 10000 for another number than 10{,}000."""
    samples = rows("orm_math", "qwen_math_cot_samples.jsonl.gz")
    verdicts = math([Submission(row["response"], None, row["gold"]) for row in samples])
    differ = [
        row for row, verdict in zip(samples, verdicts, strict=True) if (verdict.outcome == "right") != row["is_correct"]
    ]
    assert [(row["gold"], row["pred"]) for row in differ] == [("10{,}000", "10000")]


def test_the_program_itself_never_loads_the_algebra() -> None:
    heavy = {"sympy", "latex2sympy2_extended", "torch"}
    code = f"import sys, posttrain.graders.math.grader; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(("section", "outcome"), [("same notation", "right"), ("other meaning", "wrong")])
def test_math_escapes_ellipses_and_ratios_mean_what_they_say(section: str, outcome: str) -> None:
    pairs = math_pairs(section)
    verdicts = math([Submission(text, None, gold) for gold, text in pairs])
    differ = [pair for pair, verdict in zip(pairs, verdicts, strict=True) if verdict.outcome != outcome]
    assert differ == []
