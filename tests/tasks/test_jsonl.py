"""Users' own rows: keys by option, conversations, and every refusal with file and line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from posttrain import registry
from posttrain.errors import DataError, RecipeError, UnknownWord, UsageError
from posttrain.tasks.jsonl import jsonl
from posttrain.types import Message


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def chat(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def test_prompts_answers_and_solutions(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1?", "answer": 2}, {"prompt": "2+2?", "answer": "4", "solution": "2+2=4."}]
    first, second = jsonl(path=write(tmp_path / "x.jsonl", rows), split="test").examples
    assert (first.id, first.messages, first.answer, first.solution) == (
        "jsonl/test/1",
        (Message("user", "1+1?"),),
        "2",
        None,
    )
    assert (second.answer, second.solution) == ("4", "2+2=4.")


def test_keys_by_option(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", [{"q": "1+1?", "gold": "2", "why": "because", "answer": "no"}])
    (example,) = jsonl(path=path, split="test", prompt_key="q", answer_key="gold", solution_key="why").examples
    assert (example.messages[0].content, example.answer, example.solution) == ("1+1?", "2", "because")


def test_conversations(tmp_path: Path) -> None:
    asked = chat(("system", "Be brief."), ("user", "1+1?"))
    rows = [
        {"messages": asked, "answer": "2"},
        {"messages": [*asked, *chat(("assistant", "Two."))], "prompt": "unused"},
    ]
    first, second = jsonl(path=write(tmp_path / "x.jsonl", rows), split="test").examples
    assert first.messages == second.messages == (Message("system", "Be brief."), Message("user", "1+1?"))
    assert (first.answer, first.demonstration) == ("2", None)
    assert (second.answer, second.solution, second.demonstration) == (None, None, "Two.")


def test_responses_with_and_without_a_gold_answer(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1+1?", "response": "One and one: \\boxed{2}", "answer": 2},
        {"prompt": "1+1?", "response": "Two."},
        {"prompt": "1+1?", "response": "<think>hm</think>Two."},
    ]
    path = write(tmp_path / "x.jsonl", rows)
    examples = jsonl(path=path, split="test", strip_thinking=True).examples
    assert [(e.answer, e.solution, e.demonstration) for e in examples] == [
        ("2", None, "One and one: \\boxed{2}"),
        (None, None, "Two."),
        (None, None, "Two."),
    ]
    renamed = write(tmp_path / "y.jsonl", [{"prompt": "1+1?", "completion": "Two."}])
    (example,) = jsonl(path=renamed, split="test", response_key="completion").examples
    assert example.demonstration == "Two."


def test_data_without_answers(tmp_path: Path) -> None:
    (example,) = jsonl(path=write(tmp_path / "x.jsonl", [{"prompt": "Tell me."}]), split="test", answer_key="").examples
    assert (example.answer, example.solution) == (None, None)


def test_grader_and_further_keys(tmp_path: Path) -> None:
    row = {"prompt": "1+1?", "answer": "B", "choices": ["1", "2"], "subject": "sums", "noise": 3}
    path = write(tmp_path / "x.jsonl", [row])
    (example,) = jsonl(path=path, split="test", grader="multiple_choice", meta_keys=["subject", "choices"]).examples
    carried = {"choices": ["1", "2"], "subject": "sums", "noise": 3}
    assert (example.grader, example.meta) == ("multiple_choice", carried)
    (plain,) = jsonl(path=path, split="test").examples
    assert (plain.grader, plain.meta) == ("numeric", carried)
    (fewer,) = jsonl(path=path, split="test", ignore_keys=["noise", "choices"]).examples
    assert fewer.meta == {"subject": "sums"}
    with pytest.raises(UnknownWord, match=r"task.grader: there is no grader named 'exct'. Did you mean 'exact'"):
        jsonl(path=path, grader="exct")
    with pytest.raises(
        DataError, match=r"x\.jsonl:1: the key 'subjet' of task.meta_keys is missing. Did you mean 'subject'"
    ):
        jsonl(path=path, split="test", meta_keys=["subjet"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "2"}, "the key 'prompt' is missing. There are: answer. Name the right one as task.prompt_key"),
        ({"promt": "q", "answer": "2"}, "the key 'prompt' is missing. Did you mean 'promt'"),
        ({"prompt": " ", "answer": "2"}, "'prompt' is empty"),
        ({"prompt": ["x"], "answer": "2"}, "'prompt' must be text"),
        ({"prompt": "q"}, "the key 'answer' is missing. There are: prompt.*task.answer_key, or set it to \"\""),
        ({"prompt": "q", "answer": ""}, "'answer' is empty"),
        ({"prompt": "q", "answer": None}, "'answer' must be text; got None"),
        ({"prompt": "q", "answer": "2", "solution": ""}, "'solution' is empty"),
        ({"messages": [], "answer": "2"}, "must be a list of messages"),
        ({"messages": chat(("assistant", "Hi"))}, "nothing but the assistant's message"),
        ({"messages": chat(("user", "q"), ("assistant", "a")), "solution": "b"}, "both 'solution' and an assistant's"),
        ({"prompt": "q", "response": "a", "solution": "b"}, "both 'solution' and 'response': give one"),
        ({"prompt": "q", "response": " "}, "'response' is empty"),
    ],
)
def test_bad_rows(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"x\.jsonl:2: .*{message}"):
        jsonl(path=write(tmp_path / "x.jsonl", [{"prompt": "q", "answer": "2"}, row]))


def test_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"x\.jsonl: no usable examples"):
        jsonl(path=write(tmp_path / "x.jsonl", []))


def test_the_path_is_required() -> None:
    with pytest.raises(RecipeError, match=r"task.path: task 'jsonl' needs this key"):
        registry.find("task", "jsonl").bind({}, "task")


def test_thinking_can_be_left_out_of_solutions(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1 + 1?", "answer": "2", "solution": "<think>hm</think> It is 2."},
        {"prompt": "1 + 2?", "answer": "3", "solution": "<think>hm"},
        {"prompt": "1 + 3?", "answer": "4"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = jsonl(path=str(path), split="test", strip_thinking=True)
    assert [example.solution for example in task.examples] == ["It is 2.", None]
    assert task.dropped == {"a <think> that never closes": 1}
    assert len(jsonl(path=str(path), split="test").examples) == 3


def test_a_conversation_and_its_continuation_stand_on_the_same_side(tmp_path: Path) -> None:
    rows = []
    for i in range(40):
        turns = [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": "a"}]
        rows += [{"messages": turns}, {"messages": [*turns, *turns]}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    held = jsonl(path=str(path), split="validation", validation_share=0.3, answer_key="").examples
    firsts = [example.messages[0].content for example in held]
    assert 0 < len(held) < 80
    assert all(firsts.count(first) == 2 for first in firsts)


def test_only_correct_responses(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a?", "response": "So \\boxed{\\frac{1}{2}}.", "answer": "0.5"},
        {"prompt": "b?", "response": "<think>1 + 1 = 3</think><answer>3</answer>", "answer": "2"},
        {"prompt": "c?", "response": "<think>1 + 1 = 2</think><answer>2</answer>", "answer": "2"},
        {"prompt": "d?", "response": "I do not know.", "answer": "2"},
        {"prompt": "e?", "response": "The answer is 7."},
        {"prompt": "f?", "answer": "2"},
    ]
    path = write(tmp_path / "x.jsonl", rows)
    task = jsonl(path=path, split="test", grader="math", correct_only=True)
    assert [example.messages[0].content for example in task.examples] == ["a?", "c?"]
    assert task.dropped == {
        "correct_only: a wrong answer": 2,
        "correct_only: no response with a gold answer, so nothing to grade": 2,
    }
    by_number = jsonl(path=path, split="test", correct_only=True).dropped
    assert by_number["correct_only: no answer in the response"] == 1, "numeric reads what the response marks, no more"
    assert len(jsonl(path=path, split="test").examples) == 6
    with pytest.raises(DataError, match=r"no row can be used: 1 × correct_only: a wrong answer"):
        jsonl(path=write(tmp_path / "y.jsonl", rows[1:2]), correct_only=True)
    with pytest.raises(UsageError, match=r"z.jsonl: task.correct_only compares responses with gold answers, and no"):
        jsonl(path=write(tmp_path / "z.jsonl", rows[4:5]), correct_only=True)


@pytest.mark.parametrize(
    ("golds", "grader", "why"),
    [
        (["2", 3, "1,234", "1/2", "50%", "$5"], "numeric", "because all 6 gold answers are numbers or words"),
        (["Paris", "B", "a red-hot car", "3:30"], "numeric", "numbers or words"),
        (
            ["7", "\\frac{\\sqrt3}{2}"],
            "math",
            r"because 1 of 2 gold answers are formulas, such as .*sqrt3.* \(jsonl/test/2\)",
        ),
        (["x^2+1"], "math", "1 of 1"),
        (["(1, 2)"], "math", "1 of 1"),
        (["[0, 1)"], "math", "1 of 1"),
        (["x = 3"], "math", "1 of 1"),
        (["2\u221a3"], "math", "1 of 1"),
        (["3n - 1"], "math", "1 of 1"),
        (["sqrt(2)"], "math", "1 of 1"),
    ],
)
def test_grader_follows_the_gold_answers_and_says_why(tmp_path: Path, golds: list[Any], grader: str, why: str) -> None:
    path = write(tmp_path / "x.jsonl", [{"prompt": f"{i}?", "answer": gold} for i, gold in enumerate(golds)])
    task = jsonl(path=path, split="test")
    assert {example.grader for example in task.examples} == {grader}
    (line,) = task.notices
    assert line.startswith(f"task.grader: {grader}, because")
    assert re.search(why, line)
    assert jsonl(path=path, split="test", grader="exact").notices == ()


def test_traces_of_maths_are_kept_by_their_formulas(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a?", "response": "\\boxed{\\sqrt3/2}", "answer": "\\frac{\\sqrt3}{2}"},
        {"prompt": "b?", "response": "\\boxed{3}", "answer": "4"},
    ]
    task = jsonl(path=write(tmp_path / "x.jsonl", rows), split="test", correct_only=True)
    assert [example.messages[0].content for example in task.examples] == ["a?"]
    assert task.dropped == {"correct_only: a wrong answer": 1}
