"""Rewards for the shape of an answer pay for nothing that cannot be seen."""

from __future__ import annotations

import empty_answers
import grader_answers
import pytest

from posttrain import registry
from posttrain.graders.rewards import bind_reward

TAGS = ("think", "answer")
FORMATS = ("xml_format", "xml_soft")
# Not for contents: what counts marks, numbers and lengths, the graders' verdicts, and a model's own scores.
OTHERS = (
    "boxed_format",
    "xml_count",
    "correct",
    "environment",
    "is_number",
    "judge",
    "judge_ranking",
    "overlong",
    "reward_model",
    "rubric",
    "task_score",
    "tool_calls",
    "truncated",
    "turn_rewards",
)


def pay(name: str, text: str, extracted: str | None = None) -> float:
    reward = bind_reward(registry.find("reward", name, "reward"))
    return reward({"text": text, "tags": TAGS, "extracted": extracted})


def write(answer: str) -> str:
    return f"<think> 9 and 8 make 17. </think> <answer> {answer} </answer>"


def test_every_reward_has_its_adversary() -> None:
    assert set(registry.entries("reward")) == {*FORMATS, *OTHERS}


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_that_cannot_be_seen_is_not_paid_as_one(name: str) -> None:
    full = pay(name, write("17"))
    assert full == 1.0
    paid = [answer for answer in empty_answers.invisible_texts() if pay(name, write(answer)) >= full]
    assert paid == []


@pytest.mark.parametrize("name", ["xml_format", "xml_soft"])
@pytest.mark.parametrize("answer", ["17", "答案", "∅", "\u200b17", "\u202b17\u202c"])
def test_an_answer_that_can_be_seen_is_paid(name: str, answer: str) -> None:
    assert pay(name, write(answer)) == 1.0


def test_only_a_number_is_a_number() -> None:
    answers = [*empty_answers.invisible_texts(), *empty_answers.empty_marks(), *grader_answers.tricks()]
    paid = [answer for answer in answers if pay("is_number", "", answer.strip() or None)]
    assert [answer for answer in paid if not any(character.isdigit() for character in answer)] == []
    hedged = [answer for answer in grader_answers.hedges("17", "18") if pay("is_number", "", answer)]
    assert sorted(answer for answer in hedged if "boxed" not in answer) == ["17/18", "18/17"]
