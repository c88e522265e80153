"""Measures of a reward model: results by hand from given scores, and refusals."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from transformers import AutoTokenizer

from closeness import approx
from posttrain import registry
from posttrain.data.base import Task
from posttrain.errors import UsageError
from posttrain.evaluation.reward_models.measures import (
    RewardEvaluation,
    add_share,
    break_down_verdicts,
    effective_number,
    evaluate_reward_model,
)
from posttrain.evaluation.statistics import area_under_curve, paired_bootstrap, sigmoid, wilson_interval
from posttrain.models.sources import TINY
from posttrain.reports.evaluation_page import difference_tables, shared_verdicts
from posttrain.types import Example, Message, Response
from refusing import refuses


class GivenScores:
    """A reward model whose scores are those in the texts: ``score 1.5``, or of steps ``p 0.8``."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.tokenizer = AutoTokenizer.from_pretrained(TINY)
        self.template = registry.find("template", "r1_zero").bind({"preamble": ""})()
        self.unscored = "too long"

    def score_responses(self, examples: Sequence[Example], responses: Sequence[Response]) -> list[float | None]:
        assert len(examples) == len(responses)
        found = [response.text.split()[1] for response in responses]
        return [None if text == "none" else float(text) for text in found]

    def score_steps(self, examples: Sequence[Example], steps: Sequence[Sequence[str]]) -> list[list[float] | None]:
        assert len(examples) == len(steps)
        return [None if "none" in s[0] else [float(step.split()[1]) for step in s] for s in steps]

    def probability(self, score: float) -> float | None:
        return {"preference": None, "outcome": sigmoid(score), "process": score}[self.kind]


def problem(number: int, *responses: Response, **meta: Any) -> Example:
    return Example(f"p/{number}", (Message("user", "What is it?"),), responses=responses, meta=meta)


def evaluated(kind: str, examples: list[Example], n: int = 100) -> RewardEvaluation:
    return evaluate_reward_model(GivenScores(kind), Task("given", "test", examples), n=n)  # type: ignore[arg-type]


def message(score: float | str, label: float, words: str = "", answer: str | None = None) -> Response:
    return Response(f"score {score} {words}".strip(), label, answer=answer)


def test_pairs_by_hand() -> None:
    found = evaluated(
        "preference",
        [
            problem(0, message(2.0, 1.0, "long long"), message(1.0, 0.0), subset="a", level=1),
            problem(1, message(-1.0, 0.0), message(0.5, 1.0), subset="a", level=1),
            problem(2, message(0.25, 1.0), message(0.75, 0.0, "yes, yes"), subset="b", level=2),
            problem(3, message(1.0, 1.0, "x"), message(1.0, 0.0, "yy"), subset="b", level=1),
            problem(4, message(1.0, 0.5), message(0.0, 0.5)),
            problem(5, message("none", 1.0), message(0.0, 0.0)),
            problem(6),
        ],
    )
    assert found.view == "pairs"
    results = found.results
    assert (results["n"], results["dropped"]) == (4.0, 3.0)
    assert found.dropped == {"all responses have the same score": 1, "too long": 1, "no given responses": 1}
    assert results["pair_accuracy"] == approx(2.5 / 4)
    assert (results["pair_accuracy_low"], results["pair_accuracy_high"]) == wilson_interval(2.5, 4)
    assert results["margin"] == approx((1.0 + 1.5 - 0.5 + 0.0) / 4)
    assert results["chosen_score"] == approx((2.0 + 0.5 + 0.25 + 1.0) / 4)
    assert [item["right"] for item in found.items] == [1.0, 1.0, 0.0, 0.5]
    assert [(item["chosen"], item["rejected"]) for item in found.items][1] == ("score 0.5", "score -1.0")
    assert found.kinds["subset"] == {
        "a": {"n": 2.0, "pair_accuracy": 1.0, "pair_accuracy_low": wilson_interval(2, 2)[0], "pair_accuracy_high": 1.0},
        "b": {
            "n": 2.0,
            "pair_accuracy": 0.25,
            "pair_accuracy_low": approx(wilson_interval(0.5, 2)[0]),
            "pair_accuracy_high": approx(wilson_interval(0.5, 2)[1]),
        },
    }
    assert {value: row["n"] for value, row in found.kinds["level"].items()} == {"1": 3.0, "2": 1.0}
    json.dumps(found.items, allow_nan=False)


def test_ratings_of_a_process_model_are_pairs() -> None:
    found = evaluated("process", [problem(i, message(0.9, 1.0), message(0.2 + i, 2.0)) for i in range(3)])
    assert found.view == "pairs"  # ratings, and no steps
    assert found.results["pair_accuracy"] == approx(2 / 3)


JUDGED = [
    problem(0, message(2.0, 1.0, answer="5"), message(1.0, 0.0, answer="6"), message(-1.0, 0.0, answer="6")),
    problem(1, message(0.5, 0.0, answer="7"), message(0.5, 1.0, answer="8"), message(-2.0, 1.0, answer="8.0")),
    problem(2, message(-3.0, 0.0, answer="1"), message(0.0, 0.0, answer="2"), message("none", 1.0, answer="3")),
]


def test_judged_answers_by_hand() -> None:
    found = evaluated("outcome", JUDGED)
    results = found.results
    assert found.view == "judged answers"
    assert (results["n"], results["num_problems"], found.dropped) == (8.0, 3.0, {"too long": 1})
    correct, wrong = [2.0, 0.5, -2.0], [1.0, -1.0, 0.5, -3.0, 0.0]
    assert results["auc"] == approx(area_under_curve(correct, wrong))
    assert results["auc"] == approx((5 + 3.5 + 1) / 15)
    assert results["correct_share"] == approx(3 / 8)
    # by the sign of the score: right, wrong, right; wrong, right, wrong; right, a tie
    assert [item["right"] for item in found.items] == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.5, None]
    assert results["answer_accuracy"] == approx(4.5 / 8)
    assert results["top_one"] == approx((1.0 + 0.5 + 0.0) / 3)
    assert results["random_one"] == approx((1 / 3 + 2 / 3 + 1 / 3) / 3)
    assert results["oracle"] == 1.0
    assert [item["id"] for item in found.items][:4] == ["p/0#0", "p/0#1", "p/0#2", "p/1#0"]
    json.dumps(found.items, allow_nan=False)


def test_preferences_over_judged_answers_state_no_probability() -> None:
    found = evaluated("preference", JUDGED)
    assert found.view == "judged answers"  # three to a problem
    assert "answer_accuracy" not in found.results
    assert [item["right"] for item in found.items] == [None] * 9
    assert found.results["top_one"] == approx(0.5)


def test_single_answers_are_no_choice() -> None:
    """KTO-style data: one answer to a prompt; nothing can be chosen."""
    found = evaluated("outcome", [problem(i, message(s, z)) for i, (s, z) in enumerate([(1.0, 1.0), (2.0, 0.0)])])
    assert found.results["auc"] == 0.0
    assert "top_one" not in found.results
    assert found.results["answer_accuracy"] == 0.5
    assert (found.results["answer_accuracy_low"], found.results["answer_accuracy_high"]) == wilson_interval(1, 2)


def solution(probabilities: Sequence[float | str], labels: Sequence[int | None], score: float) -> Response:
    steps = tuple(f"p {p}" for p in probabilities)
    return Response("".join(steps), score, steps, tuple(labels))


def test_steps_by_hand() -> None:
    examples = [
        problem(0, solution([0.9, 0.2], [1, 0], 0.0), solution([0.8, 0.7], [1, 1], 1.0), subset="x"),
        problem(1, solution([0.4, 0.9, 0.1], [1, 0, 0], 0.0), solution([0.6, 0.5], [1, 1], 1.0), subset="y"),
        problem(2, solution([0.9, 0.3], [1, None], 1.0), solution(["none"], [1], 1.0), subset="y"),
        problem(3, solution([0.9], [None], 1.0), Response("p 1.0", 1.0), subset="x"),
        problem(4, Response("p 1.0 ", 1.0, ("p 1.0", ""), (1, 1))),
    ]
    found = evaluated("process", examples)
    results = found.results
    assert found.view == "labelled steps"
    assert found.dropped == {"too long": 1, "no labelled steps": 2, "an empty step": 1}
    predicted = [(item["predicted_error"], item["first_error"]) for item in found.items]
    assert predicted == [(1, 1), (None, None), (0, 1), (None, None), (1, None)]
    assert results["solution_accuracy"] == approx(3 / 5)
    assert results["accuracy_erroneous"] == 0.5
    assert results["accuracy_correct"] == approx(2 / 3)
    assert results["error_f1"] == approx(2 * 0.5 * (2 / 3) / (0.5 + 2 / 3))
    probabilities = [0.9, 0.2, 0.8, 0.7, 0.4, 0.9, 0.1, 0.6, 0.5, 0.9]  # the unlabelled step counts nowhere
    good = [1, 0, 1, 1, 1, 0, 0, 1, 1, 1]
    assert results["labelled_steps"] == 10.0
    assert results["step_accuracy"] == approx((1 + 1 + 1 + 1 + 0 + 0 + 1 + 1 + 0.5 + 1) / 10)
    assert results["positive_share"] == approx(0.7)
    pairs = list(zip(probabilities, good, strict=True))
    assert results["step_auc"] == area_under_curve([p for p, z in pairs if z], [p for p, z in pairs if not z])
    assert {value: row["n"] for value, row in found.kinds["subset"].items()} == {"x": 2.0, "y": 3.0}
    json.dumps(found.items, allow_nan=False)


def test_what_cannot_be_measured_is_refused() -> None:
    with refuses(UsageError, "'given'"):
        evaluated("outcome", [problem(0)])
    with refuses(UsageError, "items; dropped: {'too"):
        evaluated("preference", [problem(0, message("none", 1.0), message(0.0, 0.0))])
    with refuses(UsageError, "examples to evaluate"):
        evaluated("outcome", [])


def test_a_share_over_clusters() -> None:
    """Copies of one value say nothing new; opposites within a cluster say more than chance alone would."""
    rng = random.Random(0)
    values = [float(rng.random() < 0.3) for _ in range(40)]
    assert effective_number(values, range(40)) == 40.0
    copies, clusters = [v for v in values for _ in range(3)], [i for i in range(40) for _ in range(3)]
    assert effective_number(copies, clusters) == approx(40.0)
    assert effective_number([1.0] * 6, [0, 0, 0, 1, 1, 1]) == 2.0
    assert effective_number([0.0, 1.0, 0.0, 1.0], ["a", "a", "b", "b"]) == 2.0
    results: dict[str, float] = {}
    add_share(results, "x", copies, clusters)
    share = sum(values) / 40
    low, high = wilson_interval(share * 40, 40)
    assert results == {"x": approx(share), "x_low": approx(low), "x_high": approx(high)}
    add_share(results, "nothing", [])
    assert "nothing" not in results


def test_breakdowns_are_of_few_kinds() -> None:
    items = [{"id": str(i), "right": float(i % 2), "meta": {"row": i, "subset": i % 3, "same": "x"}} for i in range(12)]
    assert set(break_down_verdicts(items, "x")) == {"subset"}
    lacking = [{"id": "x", "right": 1.0, "meta": {}}, *items]
    assert break_down_verdicts(lacking, "x")["subset"]["none"]["n"] == 1.0
    assert break_down_verdicts([{"id": str(i), "right": None, "meta": {"subset": i % 2}} for i in range(8)], "x") == {}


def test_models_are_compared_on_the_problems_that_both_have_scored() -> None:
    pairs = [(1.0, 2.0), (1.0, -1.0), (-1.0, 1.0), ("none", 1.0), (0.0, 1.0)]
    first, second = (
        evaluated(
            "preference", [problem(i, message(both[k], 1.0), message(0.0, 0.0, "no")) for i, both in enumerate(pairs)]
        )
        for k in range(2)
    )
    assert shared_verdicts(first.items, second.items) == [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.5, 1.0)]
    (table,) = difference_tables([("one", first), ("two", second)])
    gap = paired_bootstrap([1.0, 1.0, 0.0, 0.5], [1.0, 0.0, 1.0, 1.0])
    assert table.title == "given/test, pairs: compared with one"
    shown = f"{100 * gap.difference:+.1f} ({100 * gap.low:+.1f} to {100 * gap.high:+.1f})"
    assert table.lines == [["two", "4", shown, f"{gap.p:.2g}"]]
    assert "+12.5" in shown
    assert difference_tables([("one", first)]) == []
    assert difference_tables([("one", first), ("other", evaluated("outcome", JUDGED))]) == []


def test_answers_to_one_problem_are_one_item_of_a_comparison() -> None:
    outcome = evaluated("outcome", JUDGED)
    found = shared_verdicts(outcome.items, outcome.items)
    assert found == [(approx(2 / 3),) * 2, (approx(1 / 3),) * 2, (0.75, 0.75)]
    assert shared_verdicts(outcome.items, evaluated("preference", JUDGED).items) == []  # which says no verdict
