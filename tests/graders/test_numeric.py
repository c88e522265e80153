"""Rewards for answers, their length and the task's own score, by hand."""

from __future__ import annotations

import pytest

from posttrain import registry
from posttrain.data.render.templates import plain
from posttrain.errors import RecipeError, UnknownComponent, UsageError
from posttrain.graders.grading import Submission
from posttrain.graders.numeric import exact, is_number, numeric
from posttrain.graders.rewards import bind_reward, correct, overlong
from posttrain.graders.scored import task_score
from posttrain.recipes.recipe import load_recipe
from refusing import refuses


def outcome(extracted: str | None, answer: str | None, **options: float) -> str:
    return numeric(Submission("", extracted, answer), **options).outcome


def test_numeric_compares_values_not_spelling() -> None:
    assert outcome("$1,000", "1000") == "right"
    assert outcome("999", "1000") == "wrong"
    assert outcome("999", "1000", tolerance=1.0) == "right"
    assert outcome("998.9", "1000", tolerance=1.0) == "wrong"
    assert outcome("Yes", "yes") == "right"


@pytest.mark.parametrize("text", ["**17**", "`17`", '"17"', "__17__.", "17th", "17 °C", "'17 dollars'"])
def test_marks_around_a_number_are_no_part_of_it(text: str) -> None:
    assert outcome(text, "17") == "right"
    assert outcome(text, "16") == "wrong"
    assert outcome(text[:-1] + " or 16" + text[-1], "17") == "wrong"


@pytest.mark.parametrize(
    "text", ["x = 12", "$x = 12$", "\\(x=12\\)", "The answer is x = 12", "f(x) = 12", "x_1 = 12 apples"]
)
def test_numeric_number_with_a_name_is_read(text: str) -> None:
    assert outcome(text, "12") == "right"
    assert outcome(text, "13") == "wrong"
    assert outcome(text.replace("= 12", "= 12 = 13").replace("=12", "> 12"), "12") == "wrong"
    assert outcome("12", text) == "wrong"


@pytest.mark.parametrize(
    ("text", "value"),
    [("7e3", "7000"), ("10^3", "1000"), ("1.5 x 10^3", "1500"), ("10 000", "10000"), ("1 1/2", "1.5"),
     ("3 million", "3000000")],
)  # fmt: skip
def test_numeric_plain_number_is_read_whole(text: str, value: str) -> None:
    extracted = plain().extract(f"So we get {text}.")
    assert outcome(extracted, value) == "right"
    for part in ("3", "0.5", "0", "7", "10"):
        assert outcome(extracted, part) == "wrong"


@pytest.mark.parametrize(
    "text",
    ["The answer is 17", "the answer is: 17.", "Answer: 17", "So, the final answer is $17$", "My answer is 17 dollars",
     "The result = 17", "Thus the correct answer is 34/2"],
)  # fmt: skip
def test_what_introduces_an_answer_is_no_part_of_it(text: str) -> None:
    assert outcome(text, "17") == "right"
    assert outcome(text, "16") == "wrong"
    assert outcome(text.replace("17", "blue").replace("34/2", "blue").replace("$", ""), "Blue") == (
        "wrong" if "dollars" in text else "right"
    )


@pytest.mark.parametrize(
    "text",
    ["The answer is not 17", "The answer is 17 or 16", "The answer is 16, no, 17", "The answer is", "16. Answer: 17",
     "The answer is the answer is 17", "answers 17", "The answer is 17 and the answer is 16"],
)  # fmt: skip
def test_what_is_more_than_an_introduction_stays_wrong(text: str) -> None:
    assert outcome(text, "17") == "wrong"


def test_without_an_extracted_or_gold_answer_nothing_is_right() -> None:
    assert outcome(None, "3") == "no_answer"
    assert outcome("3", None) == "ungraded"
    assert outcome("", "3") == "no_answer"


def test_exact_compares_spelling_not_values() -> None:
    assert exact(Submission("", "1.0", "1")).outcome == "wrong"
    assert exact(Submission("", " $Blue  Whale$.", "blue whale")).outcome == "right"
    assert exact(Submission("", None, "1")).outcome == "no_answer"
    assert exact(Submission("", "1", None)).outcome == "ungraded"


def test_correct_asks_the_grader_of_each_example_and_keeps_the_order() -> None:
    full = {"score": lambda text: len(text) / 4}
    columns = {
        "text": ["", "", "", ""],
        "extracted": ["1.0", "1.0", "abcd", "abc"],
        "answer": ["1", "1", None, None],
        "grader": ["numeric", "exact", "scored", "scored"],
        "meta": [{}, {}, full, full],
    }
    verdicts = correct(**columns)
    assert [v.outcome for v in verdicts] == ["right", "wrong", "right", "wrong"]
    assert [dict(v.info) for v in verdicts[2:]] == [{"task_score": 1.0}, {"task_score": 0.75}]
    assert [v.outcome for v in correct(**columns, mode="numeric")] == ["right", "right", "ungraded", "ungraded"]
    assert correct(**columns, mode={"name": "numeric", "tolerance": 1.0})[0].value == 1.0
    near = {key: values[:1] for key, values in columns.items()} | {"extracted": ["2.5"]}
    assert [correct(**near, tolerance=t)[0].outcome for t in (0.0, 1.0, 1.5)] == ["wrong", "wrong", "right"]
    with refuses(RecipeError, "grader.tolerance", "'exact'"):
        correct(**near, mode="exact", tolerance=1.0)


def test_a_grader_that_is_not_there_is_refused_before_anything_is_sampled() -> None:
    entry = registry.find("reward", "correct")
    with refuses(UnknownComponent, "rewards.0.mode", "'numerc'", "'numeric'"):
        bind_reward(entry, {"mode": "numerc"}, "rewards.0")
    with refuses(RecipeError, "rewards.0.mode.tolerence"):
        bind_reward(entry, {"mode": {"name": "numeric", "tolerence": 1}}, "rewards.0")
    with refuses(UsageError, "rewards.0.mode"):
        bind_reward(entry, {"mode": {"tolerance": 1}}, "rewards.0")
    recipe = load_recipe("tiny/grpo", [("rewards", '[{"name": "correct", "mode": "numerc"}]')])
    with refuses(UnknownComponent, "rewards.0.mode", "'numerc'"):
        recipe.resolve()  # so that a dry run refuses it, too


def test_is_number() -> None:
    assert is_number("12 apples") == 1.0
    assert is_number("twelve") == 0.0
    assert is_number("1e999999999") == 0.0
    assert is_number(None) == 0.0


def test_overlong_falls_linearly_over_the_cache() -> None:
    """DAPO, equation 13, with L_max = 100 and L_cache = 20."""
    values = [overlong(n, limit=100, cache=20) for n in (1, 80, 81, 90, 100, 101, 1000)]
    assert values == [0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0]


def test_overlong_refuses_a_margin_wider_than_the_limit() -> None:
    with refuses(UsageError, "than limit (20)"):
        overlong(5, limit=20, cache=30)


def test_task_score_asks_the_task() -> None:
    meta = {"score": lambda text: 0.25 * len(text)}
    assert task_score(["ab", None, "abcd", "\u200b"], [meta] * 4) == [0.5, 0.0, 1.0, 0.0]
    with refuses(UsageError, "'correct'"):
        task_score(["ab", "ab"], [meta, {}])
