from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sample_rows import write_rows

from posttrain.data.base import Task
from posttrain.data.jsonl import jsonl
from posttrain.errors import DataError, UsageError
from refusing import refuses

METALS = ["wood", "iron", "air", "salt"]


def read(folder: Path, rows: list[dict[str, Any]], **options: Any) -> Task:
    return jsonl(path=write_rows(folder / "x.jsonl", rows), split="all", **options)


def golds(task: Task) -> list[str | None]:
    return [example.answer for example in task.examples]


def prompts(task: Task) -> list[str]:
    return [example.messages[-1].content for example in task.examples]


def ask(**parts: Any) -> dict[str, Any]:
    return {"question": "Which is a metal?", **parts}


@pytest.mark.parametrize(
    ("rows", "options", "letters"),
    [
        pytest.param([ask(choices=METALS, answer=1), ask(choices=METALS, answer=0)], {}, "BA", id="index from 0"),
        pytest.param([ask(choices=METALS, answer=2), ask(choices=METALS, answer=4)], {}, "BD", id="index from 1"),
        pytest.param([ask(choices=METALS, answer=2)], {"first_index": 1}, "B", id="named first index"),
        pytest.param([ask(choices=METALS, answer="1"), ask(choices=METALS, answer="0")], {}, "BA", id="index as text"),
        pytest.param([ask(options=METALS, answer="B")], {}, "B", id="letter"),
        pytest.param([ask(options=METALS, answer="(c)")], {}, "C", id="letter in brackets"),
        pytest.param([ask(anything=METALS, answer="iron")], {}, "B", id="text"),
        pytest.param([ask(anything=METALS, answer="Iron.")], {}, "B", id="text in another case"),
        pytest.param([ask(options=["2", "3", "1"], answer="3")], {}, "B", id="text before index"),
        pytest.param([ask(options=[10, 20], answer=20)], {}, "B", id="numbers"),
        pytest.param([ask(options='["wood", "iron"]', answer="iron")], {}, "B", id="JSON text of a list"),
        pytest.param(
            [
                ask(choices={"text": METALS, "label": ["A", "B", "C", "D"]}, answerKey="B"),
                ask(choices={"text": METALS[:3], "label": ["1", "2", "3"]}, answerKey="3"),
            ],
            {},
            "BC",
            id="labels of ARC",
        ),
        pytest.param(
            [ask(choices={"text": ["b", "a"], "label": ["A", "B"]}, answerKey="B")], {}, "B", id="texts like labels"
        ),
        pytest.param(
            [ask(options=METALS, reward_model={"ground_truth": "iron", "style": "rule"})], {}, "B", id="ground truth"
        ),
        pytest.param([ask(A="wood", B="iron", C="air", answer="B")], {}, "B", id="columns A to C"),
        pytest.param([ask(opa="wood", opb="iron", cop=n) for n in (0, 1)], {}, "AB", id="columns opa and opb"),
        pytest.param([ask(option_a="wood", option_b="iron", answer="b")], {}, "B", id="columns option_a"),
        pytest.param(
            [{"goal": "Open it.", "sol1": "twist", "sol2": "smash", "label": n} for n in (0, 1)],
            {"prompt_key": "goal"},
            "AB",
            id="PIQA",
        ),
        pytest.param(
            [{"sentence": "The _ is big.", "option1": "cat", "option2": "dog", "answer": n} for n in ("1", "2")],
            {"prompt_key": "sentence"},
            "AB",
            id="WinoGrande",
        ),
        pytest.param(
            [{"ind": 4 + i, "ctx": "A man", "endings": METALS, "label": n} for i, n in enumerate(("3", "0"))],
            {"prompt_key": "ctx"},
            "DA",
            id="HellaSwag",
        ),
        pytest.param([ask(answer=True), ask(answer=False)], {}, "AB", id="true and false"),
        pytest.param([ask(options=["A)21", "B)22"], correct="B")], {}, "B", id="options with their labels"),
    ],
)
def test_jsonl_multiple_choice_has_options_in_the_prompt_and_a_letter_as_gold(
    tmp_path: Path, rows: list[dict[str, Any]], options: dict[str, Any], letters: str
) -> None:
    task = read(tmp_path, rows, **options)
    assert golds(task) == list(letters)
    for example, prompt in zip(task.examples, prompts(task), strict=True):
        choices = example.meta["choices"]
        assert prompt.splitlines()[-len(choices) :] == [f"{m}. {c}" for m, c in zip("ABCD", choices, strict=False)]
        assert ")" not in "".join(choices)
        assert example.grader == "multiple_choice"
    assert sum("multiple choice" in line for line in task.warnings) == 1


def test_jsonl_index_that_counts_from_0_or_1_is_refused_with_the_option(tmp_path: Path) -> None:
    rows = [ask(choices=METALS, answer=1), ask(choices=METALS, answer=3)]
    with refuses(DataError, "task.first_index"):
        read(tmp_path, rows)
    assert golds(read(tmp_path, rows, first_index=0)) == ["B", "D"]
    assert golds(read(tmp_path, rows, first_index=1)) == ["A", "C"]
    with refuses(DataError, "task.first_index=1"):
        read(tmp_path, [*rows, ask(choices=METALS, answer=0)], first_index=1)


@pytest.mark.parametrize(
    "row",
    [
        {"question": "How many?", "answer": "1", "tags": ["algebra", "easy"]},
        {"prompt": "Same?", "sentence1": "It rains.", "sentence2": "It pours.", "answer": "1"},
        {"prompt": "Hi", "response": "Ho", "languages": ["en", "de"], "answer_language": "en"},
        {"prompt": "Which?", "parts": ["x", "y"], "answer": "z"},
    ],
)
def test_jsonl_lists_that_are_no_options_stay_columns(tmp_path: Path, row: dict[str, Any]) -> None:
    (example,) = read(tmp_path, [row]).examples
    assert example.messages[-1].content == row.get("prompt", row.get("question"))
    assert example.answer == row.get("answer")


def test_jsonl_choices_key_chooses_the_options_or_none(tmp_path: Path) -> None:
    rows = [ask(good=METALS, other=["iron", "zinc"], answer="iron")]
    with refuses(DataError, "task.choices_key"):
        read(tmp_path, rows)
    assert golds(read(tmp_path, rows, choices_key="good")) == ["B"]
    assert golds(read(tmp_path, rows, meta=["good"])) == ["A"]
    plain = read(tmp_path, rows, choices_key="")
    assert (golds(plain), prompts(plain)) == (["iron"], ["Which is a metal?"])


def test_jsonl_prompt_that_shows_its_options_is_left_as_it_is(tmp_path: Path) -> None:
    shown = "Which is a metal?\nA. wood\nB. iron"
    task = read(tmp_path, [{"prompt": shown, "choices": ["wood", "iron"], "answer": "iron"}])
    assert (prompts(task), golds(task)) == ([shown], ["B"])


def test_jsonl_options_of_a_conversation_follow_its_last_question(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which?"}]
    task = read(tmp_path, [{"messages": messages, "choices": ["wood", "iron"], "answer": "B"}])
    assert [message.content for message in task.examples[0].messages] == ["Be brief.", "Which?\nA. wood\nB. iron"]


def test_jsonl_gold_that_is_no_option_of_its_row_is_told(tmp_path: Path) -> None:
    rows = [ask(options=["iron", "wood"], answer=gold) for gold in ("iron", "wood", "zinc")]
    task = read(tmp_path, rows)
    assert golds(task) == ["iron", "wood", "zinc"]
    assert any("'options'" in line and "row 3" in line and "'zinc'" in line for line in task.warnings)


def test_jsonl_first_index_without_options_is_refused(tmp_path: Path) -> None:
    with refuses(UsageError, "task.first_index"):
        read(tmp_path, [ask(answer="iron")], first_index=0)


def test_jsonl_wrong_options_next_to_the_right_one_are_told(tmp_path: Path) -> None:
    rows = [ask(answer="iron", distractor1="wood", distractor2="air")]
    assert any("distractor1, distractor2" in line for line in read(tmp_path, rows).warnings)
    assert not any("distractor" in line for line in read(tmp_path, rows, meta=["distractor1", "distractor2"]).warnings)
