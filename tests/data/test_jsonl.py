"""Users' own rows: keys by option, conversations, and every refusal with file and line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from sample_rows import write_rows

from posttrain.cli import main
from posttrain.data.jsonl import jsonl
from posttrain.data.preferences import preferences
from posttrain.errors import DataError, UnknownComponent, UsageError
from posttrain.types import Call, Message, Turn
from refusing import refuses


def chat(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def test_prompts_answers_and_solutions(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1?", "answer": 2}, {"prompt": "2+2?", "answer": "4", "solution": "2+2=4."}]
    first, second = jsonl(path=write_rows(tmp_path / "x.jsonl", rows), split="all").examples
    assert (first.id, first.messages, first.answer, first.solution) == (
        "jsonl/all/1",
        (Message("user", "1+1?"),),
        "2",
        None,
    )
    assert (second.answer, second.solution) == ("4", "2+2=4.")


def test_responses_with_and_without_a_gold_answer(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1+1?", "response": "One and one: \\boxed{2}", "answer": 2},
        {"prompt": "1+1?", "response": "Two."},
    ]
    path = write_rows(tmp_path / "x.jsonl", rows)
    examples = jsonl(path=path, split="all").examples
    assert [(e.answer, e.solution, e.demonstration) for e in examples] == [
        ("2", None, "One and one: \\boxed{2}"),
        (None, None, "Two."),
    ]
    renamed = write_rows(tmp_path / "y.jsonl", [{"prompt": "1+1?", "completion": "Two."}])
    (example,) = jsonl(path=renamed, split="all", response_key="completion").examples
    assert example.demonstration == "Two."


def test_jsonl_rows_of_verl_have_the_ground_truth_as_answer(tmp_path: Path) -> None:
    reward_model = {"style": "rule", "ground_truth": "2"}
    row = {"data_source": "sums", "prompt": chat(("user", "1+1?")), "reward_model": reward_model}
    path = write_rows(tmp_path / "x.jsonl", [row])
    (example,) = jsonl(path=path, split="all").examples
    assert (example.messages, example.answer, example.meta) == (
        (Message("user", "1+1?"),),
        "2",
        {"data_source": "sums"},
    )
    other = {"prompt": "1+1?", "response": "2", "reward_model": {"name": "armorm"}}
    (carried,) = jsonl(path=write_rows(tmp_path / "y.jsonl", [other]), split="all").examples
    assert (carried.answer, carried.meta) == (None, {"reward_model": {"name": "armorm"}})
    with refuses(DataError, "duplicate 'ground_truth'"):
        jsonl(path=write_rows(tmp_path / "z.jsonl", [row | {"ground_truth": "3"}]), split="all")


@pytest.mark.parametrize("key", ["question", "problem", "query"])
def test_jsonl_reads_the_usual_names_of_a_question(tmp_path: Path, key: str) -> None:
    row = {key: "1+1?", "answer": "2"}
    (example,) = jsonl(path=write_rows(tmp_path / "x.jsonl", [row]), split="all").examples
    assert (example.messages, example.answer) == ((Message("user", "1+1?"),), "2")
    pair = {key: "1+1?", "chosen": "2", "rejected": "3"}
    (example,) = preferences(path=write_rows(tmp_path / "y.jsonl", [pair]), split="all").examples
    assert (example.messages, example.meta) == ((Message("user", "1+1?"),), {})


def test_jsonl_rows_of_text_alone_are_read_and_parted_by_their_text(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.jsonl", [{"text": f"Ada has {n} shells."} for n in range(40)])
    parts = [jsonl(path=path, split=split).examples for split in ("train", "validation", "test")]
    assert len({e.demonstration for part in parts for e in part}) == sum(map(len, parts)) == 40
    assert all(e.messages == () and e.answer is None for part in parts for e in part)
    with refuses(DataError, "'prompt' is missing"):  # the text is a question here
        jsonl(path=write_rows(tmp_path / "y.jsonl", [{"text": "1+1?", "answer": "2"}]), split="all")


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"messages": [*chat(("user", "q"), ("assistant", "bad"))], "label": False}, "a scored response"),
        ({"prompt": "q", "response": "bad", "label": False}, "a scored response"),
        ({"instruction": "q", "output": "bad", "kto_tag": False}, "a scored response"),
        ({"instruction": "Answer.", "question": "1+1?", "answer": "2"}, "'instruction'"),
        ({"prompt": "[{'role': 'user', 'content': 'q'}]", "completion": "2"}, "printed by Python"),
        ({"messages": chat(("user", "q"), ("assistant", "a"), ("assistant", "b"))}, "2 and 3"),
        ({"messages": [{"role": "assistant", "content": None, "function_call": {}}]}, "instead of 'function_call'"),
        ({"prompt": chat(("user", "q"), ("assistant", "a")), "completion": "b"}, "'prompt'"),
    ],
)
def test_jsonl_rows_that_would_train_something_else_are_refused(tmp_path: Path, row: dict[str, Any], what: str) -> None:
    with pytest.raises(DataError) as refusal:
        jsonl(path=write_rows(tmp_path / "x.jsonl", [row]), split="all")
    assert what in str(refusal.value)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("So 5 #### 5", "5"),
        ("#### 5", "5"),
        ("2+3\n#### 5\nThe answer is: 5", "5"),
        ("see #### the end", None),
        ("#### " + " " * 10**6 + "x", None),
        ("A.\n#### B\nC.", "B\nC."),
    ],
)
def test_jsonl_results_behind_hashes_are_the_answer(tmp_path: Path, answer: str, gold: str | None) -> None:
    path = write_rows(tmp_path / "x.jsonl", [{"prompt": "2+3?", "answer": answer}])
    assert jsonl(path=path, split="all").examples[0].answer == (gold or answer)


def test_jsonl_tool_calls_may_be_json_text(tmp_path: Path) -> None:
    calls = json.dumps([{"function": {"name": "f", "arguments": {"a": 1}}}])
    turns = [
        *chat(("user", "q")),
        {"role": "assistant", "content": None, "tool_calls": calls},
        *chat(("tool", "2"), ("assistant", "2")),
    ]
    (example,) = jsonl(path=write_rows(tmp_path / "x.jsonl", [{"messages": turns}]), split="all").examples
    assert example.turns[0].calls[0].tool == "f"


def test_jsonl_pairs_name_the_task_that_reads_them(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.jsonl", [{"prompt": "1+1?", "chosen": "2", "rejected": "3"}])
    with refuses(DataError, "for pairs, task preferences"):
        jsonl(path=path, split="all")


def test_grader_and_further_keys(tmp_path: Path) -> None:
    row = {"prompt": "1+1?", "answer": "B", "choices": ["1", "2"], "subject": "sums", "noise": 3}
    path = write_rows(tmp_path / "x.jsonl", [row])
    (example,) = jsonl(path=path, split="all", grader="multiple_choice").examples
    carried = {"choices": ["1", "2"], "subject": "sums", "noise": 3}
    assert (example.grader, example.meta) == ("multiple_choice", carried)
    (plain,) = jsonl(path=path, split="all").examples
    assert (plain.grader, plain.meta) == ("multiple_choice", carried)
    (fewer,) = jsonl(path=path, split="all", ignore_keys=["noise", "choices"]).examples
    assert fewer.meta == {"subject": "sums"}
    with refuses(UnknownComponent, "task.grader", "'exct'", "'exact'"):
        jsonl(path=path, grader="exct")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "2"}, "the key 'prompt' is missing. Available: answer. Set task.prompt_key"),
        ({"promt": "q", "answer": "2"}, "the key 'prompt' is missing. Did you mean 'promt'"),
        ({"prompt": " ", "answer": "2"}, "'prompt' is empty"),
        ({"prompt": "q"}, "the key 'answer' is missing. Available: prompt.*task.answer_key, or set it to \"\""),
        ({"prompt": "q", "answer": None}, "'answer' must be text; got None"),
        ({"messages": chat(("assistant", "Hi"))}, "only an assistant message"),
        ({"messages": chat(("user", "q"), ("assistant", "a")), "solution": "b"}, "both 'solution' and a final"),
        ({"prompt": "q", "response": "a", "solution": "b"}, "both 'solution' and 'response'; remove one"),
    ],
)
def test_bad_rows(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"x\.jsonl:2: .*{message}"):
        jsonl(path=write_rows(tmp_path / "x.jsonl", [{"prompt": "q", "answer": "2"}, row]))


def test_only_correct_responses(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a?", "response": "So \\boxed{\\frac{1}{2}}.", "answer": "0.5"},
        {"prompt": "b?", "response": "<think>1 + 1 = 3</think><answer>3</answer>", "answer": "2"},
        {"prompt": "c?", "response": "<think>1 + 1 = 2</think><answer>2</answer>", "answer": "2"},
        {"prompt": "d?", "response": "I do not know.", "answer": "2"},
        {"prompt": "e?", "response": "The answer is 7."},
        {"prompt": "f?", "answer": "2"},
    ]
    path = write_rows(tmp_path / "x.jsonl", rows)
    task = jsonl(path=path, split="all", grader="math", correct_only=True)
    assert [example.messages[0].content for example in task.examples] == ["a?", "c?"]
    assert task.dropped == {
        "correct_only: incorrect answer": 2,
        "correct_only: missing response or gold answer": 2,
    }
    by_number = jsonl(path=path, split="all", correct_only=True).dropped
    assert by_number["correct_only: no answer found"] == 1, "numeric reads what the response marks, no more"
    assert len(jsonl(path=path, split="all").examples) == 6
    with refuses(DataError, "correct_only"):
        jsonl(path=write_rows(tmp_path / "y.jsonl", rows[1:2]), correct_only=True)
    with refuses(UsageError, "z.jsonl", "task.correct_only"):
        jsonl(path=write_rows(tmp_path / "z.jsonl", rows[4:5]), correct_only=True)


@pytest.mark.parametrize(
    ("golds", "grader", "why"),
    [
        (["2", 3, "1,234", "1/2", "50%", "$5"], "numeric", "because all 6 gold answers are numbers$"),
        (["Paris", "B", "a red-hot car", "3:30"], "numeric", r"numbers or words \(4, such as 'Paris'\)"),
        (
            ["7", "\\frac{\\sqrt3}{2}"],
            "math",
            r"because 1 of 2 gold answers are formulas, such as .*sqrt3.* \(jsonl/all/2\)",
        ),
        (["x^2+1"], "math", "1 of 1"),
        (["(1, 2)"], "math", "1 of 1"),
        (["x = 3"], "math", "1 of 1"),
        (["3n - 1"], "math", "1 of 1"),
    ],
)
def test_grader_follows_the_gold_answers_and_states_why(
    tmp_path: Path, golds: list[Any], grader: str, why: str
) -> None:
    path = write_rows(tmp_path / "x.jsonl", [{"prompt": f"{i}?", "answer": gold} for i, gold in enumerate(golds)])
    task = jsonl(path=path, split="all")
    assert {example.grader for example in task.examples} == {grader}
    (line,) = task.warnings
    assert line.startswith(f"task.grader: {grader}, because")
    assert re.search(why, line)
    assert jsonl(path=path, split="all", grader="exact").warnings == ()


def test_dry_run_of_conversations_without_a_trained_message_is_refused(tmp_path: Path, capsys: Any) -> None:
    answer = {"role": "assistant", "content": "Ho", "weight": 0}
    rows = [{"messages": [{"role": "user", "content": f"Hi {i}"}, answer]} for i in range(30)]
    path = write_rows(tmp_path / "x.jsonl", rows)
    assert main(["train", "tiny/sft", "--task", "jsonl", "--task.path", path, "--dry-run"]) == 2
    assert "left to train" in capsys.readouterr().err


# --- conversations with tools ---

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 20 plus 22?"}]
ANSWER = {"role": "assistant", "content": "It is 42."}
ONE = {"function": {"name": "f", "arguments": {}}}


def calling(*expressions: str, content: str | None = None, as_text: bool = True) -> dict[str, Any]:
    given_arguments = [{"expression": one} for one in expressions]
    calls = [
        {
            "id": "c",
            "type": "function",
            "function": {"name": "calculator", "arguments": json.dumps(a) if as_text else a},
        }
        for a in given_arguments
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def output(content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c", "content": content}


def read_messages(path: Path, *messages: dict[str, Any], **fields: Any) -> Any:
    file = write_rows(path / "rows.jsonl", [{"messages": list(messages), **fields}])
    (example,) = jsonl(path=file, split="all").examples
    return example


@pytest.mark.parametrize("as_text", [True, False])
def test_calls_and_results_become_turns(tmp_path: Path, as_text: bool) -> None:
    example = read_messages(
        tmp_path,
        *QUESTION,
        calling("20 + 2", "2 + 20", content="Two ways.", as_text=as_text),
        output("22"),
        output("22"),
        calling("22 + 20", as_text=as_text),
        output("42"),
        ANSWER,
        answer="42",
    )
    assert example.messages == (Message("system", "Be brief."), Message("user", "What is 20 plus 22?"))
    assert (example.demonstration, example.answer) == ("It is 42.", "42")

    def call(expression: str, result: str) -> Call:
        return Call("calculator", json.dumps({"expression": expression}), result, "ok")

    first = Turn("Two ways.", (call("20 + 2", "22"), call("2 + 20", "22")))
    assert example.turns == (first, Turn("", (call("22 + 20", "42"),)))


def test_conversation_that_ends_with_a_call_demonstrates_it(tmp_path: Path) -> None:
    example = read_messages(tmp_path, *QUESTION, calling("1"), output("1"), calling("2", content="Again."))
    assert [len(message.calls) for message in example.conversation] == [0, 0, 1, 0, 1]
    assert example.messages == (Message("system", "Be brief."), Message("user", "What is 20 plus 22?"))
    assert [turn.calls[0].result for turn in example.turns] == ["1"]
    assert (example.demonstration, example.answer) == ('Again.\ncalculator {"expression": "2"}', None)
    file = write_rows(
        tmp_path / "pairs.jsonl",
        [{"prompt": "q", "chosen": [*QUESTION, calling("1")], "rejected": [*QUESTION, ANSWER]}],
    )
    with refuses(DataError, "message 3"):
        preferences(path=file)
    file = write_rows(tmp_path / "parts.jsonl", [{"prompt": QUESTION, "completion": [calling("1")]}])
    (example,) = jsonl(path=file, split="all").examples
    assert [len(message.calls) for message in example.conversation] == [0, 0, 1]


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([*QUESTION, calling("1"), ANSWER], "message 3"),
        ([*QUESTION, calling("1", "2"), output("1")], "message 4"),
        ([*QUESTION, output("1"), ANSWER], "message 3"),
        ([*QUESTION, calling("1"), output("1"), output("2"), ANSWER], "message 5"),
        ([*QUESTION, calling("1"), output("1")], "'answer'"),  # with one it is a prompt
        ([calling("1"), output("1"), ANSWER], "message 1"),
        ([*QUESTION, {**calling("1"), "tool_calls": "calculator"}, output("1"), ANSWER], "message 3"),
        ([*QUESTION, calling("\ud800"), output("1"), ANSWER], "tool_calls"),
        ([*QUESTION, calling(float("nan")), output("1"), ANSWER], "number that JSON"),  # type: ignore[arg-type]
        (
            [
                *QUESTION,
                {**calling(), "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
                output("1"),
                ANSWER,
            ],
            "tool_calls",
        ),
        ([*QUESTION, {**calling(), "tool_calls": [{"function": {}}]}, output("1"), ANSWER], "1 name' must"),
        ([*QUESTION, calling("1", content=3), output("1"), ANSWER], "messages 3 content'"),  # type: ignore[arg-type]
        (
            [*QUESTION, {**calling(), "tool_calls": [{"name": "f", "parameters": {"x": 1}}]}, output("1"), ANSWER],
            "'parameters'",
        ),
        (
            [
                *QUESTION,
                {**calling(), "tool_calls": [{"function": {"name": "f", "strict": True}}]},
                output("1"),
                ANSWER,
            ],
            "'strict'",
        ),
        (
            [*QUESTION, {**calling(), "tool_calls": [{"name": "f", "type": "retrieval"}]}, output("1"), ANSWER],
            "only function calls",
        ),
        (
            [*QUESTION, {**calling(), "tool_calls": [{**ONE, "id": "a"}, ONE]}, output("1"), output("2"), ANSWER],
            "message 4",
        ),
        ([*QUESTION, {**calling(), "tool_calls": [{**ONE, "id": [1]}]}, output("1"), ANSWER], "ids for calls"),
    ],
)
def test_what_cannot_be_learnt_is_refused(tmp_path: Path, messages: list[Any], what: str) -> None:
    with pytest.raises(DataError) as refusal:
        read_messages(tmp_path, *messages)
    assert what in str(refusal.value)
    assert "line 1" in str(refusal.value) or ":1" in str(refusal.value)
