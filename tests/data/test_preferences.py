"""Preferences from any file: three layouts, what is dropped and why, what is refused and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sample_rows import needs_data, real_file, write_rows

from posttrain import registry
from posttrain.data.base import Task
from posttrain.data.preferences import preferences, ultrafeedback
from posttrain.errors import DataError, RecipeError
from posttrain.types import Message, Response
from refusing import refuses

Read = Callable[..., Task]


def turns(*contents: str, system: str = "") -> list[dict[str, str]]:
    """A conversation that the user begins."""
    roles = ("user", "assistant")
    output = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *output] if system else output


def output(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """``read(rows, **options)``: the task over a file of these rows, all of them unless a split is given."""

    def build(rows: Sequence[Any], **options: Any) -> Task:
        return preferences(path=write_rows(tmp_path / "rows.jsonl", rows), **({"split": "all"} | options))

    return build


PAIR = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
JUDGED = {"prompt": "1+1?", "completion": "2", "label": True}
STEPS = {"prompt": "1+1+1?", "completions": ["1+1=2.", "2+1=4."], "labels": [True, False]}
QUESTION = (Message("user", "1+1?"),)


# --- pairs ---


def test_preferences_rows_of_openai_are_pairs(read: Read) -> None:
    given = {"messages": turns("1+1?"), "tools": [], "parallel_tool_calls": True}
    row = {"input": given, "preferred_output": output("2"), "non_preferred_output": output("3")}
    (example,) = read([row]).examples
    assert (example.messages, [r.text for r in example.responses], example.meta) == (QUESTION, ["2", "3"], {})
    with refuses(DataError, "'input'", "'messages'"):
        read([row | {"input": given | {"temperature": 1}}])
    with refuses(DataError, "'prompt'", "non_preferred_output"):
        read([row | {"prompt": "1+1?"}])
    assert read([row, row | {"non_preferred_output": None}]).dropped == {"'non_preferred_output' is missing": 1}


def test_preferences_rows_of_orca_have_questions_and_other_scores_count(read: Read) -> None:
    row = {"question": "1+1?", "chosen": "2", "rejected": "3", "chosen_reward": 1, "rejected_reward": -1}
    (example,) = read([row]).examples
    assert (example.messages, example.responses) == (QUESTION, (Response("2", 1.0), Response("3", -1.0)))


def test_preferences_whole_dialogues_name_the_task_that_reads_them(read: Read) -> None:
    with refuses(DataError, "use task hh_rlhf"):
        read([{"chosen": "\n\nHuman: 1+1?\n\nAssistant: 2", "rejected": "\n\nHuman: 1+1?\n\nAssistant: 3"}])


@pytest.mark.parametrize(
    "row",
    [
        PAIR,
        {"prompt": turns("1+1?"), "chosen": output("2"), "rejected": output("3")},
        {"prompt": turns("1+1?"), "chosen": "2", "rejected": "3"},
        {"prompt": "1+1?", "chosen": output("2"), "rejected": output("3")},
        {"chosen": turns("1+1?", "2"), "rejected": turns("1+1?", "3")},
        {"prompt": "1+1?", "chosen": turns("1+1?", "2"), "rejected": turns("1+1?", "3")},
        {"prompt": None, "chosen": turns("1+1?", "2"), "rejected": turns("1+1?", "3"), "source": "x"},
    ],
)
def test_the_same_pair_in_every_form(read: Read, row: dict[str, Any]) -> None:
    (example,) = read([row]).examples
    assert (example.id, example.messages) == ("preferences/all/1", QUESTION)
    assert (example.answer, example.solution) == (None, None)
    assert example.responses == (Response("2", 1.0), Response("3", 0.0))


def test_longer_conversations_share_all_turns_but_the_last(read: Read) -> None:
    shared = turns("Hi", "Hello.", "1+1?", system="Be brief.")
    rows = [
        {"chosen": [*shared, *output("2")], "rejected": [*shared, *output("3")]},
        {"prompt": "Hi", "chosen": [*shared, *output("2")], "rejected": [*shared, *output("3")]},  # its first turn
        {"prompt": shared, "chosen": turns("1+1?", "2"), "rejected": turns("1+1?", "3")},  # more than they share
    ]
    expected = tuple(Message(m["role"], m["content"]) for m in shared)
    assert [e.messages for e in read(rows).examples] == [expected] * 3
    # the same first answer does not make it part of the prompt when the last turn is the same word
    same_word = {"chosen": turns("Say no", "no", "Sure?", "yes"), "rejected": turns("Say no", "no", "Sure?", "no")}
    (example,) = read([same_word]).examples
    assert len(example.messages) == 3


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ("score_chosen", "score_rejected"),
        ("chosen_score", "rejected_score"),
        ("rating_chosen", "rating_rejected"),
        ("chosen_rating", "rejected_rating"),
        ("chosen-rating", "rejected-rating"),
    ],
)
def test_scores_give_margins(read: Read, better: str, worse: str) -> None:
    task = read(
        [
            PAIR | {better: 8.5, worse: -2},
            PAIR | {better: 3, worse: 3},
            PAIR | {better: 1, worse: 2},
            PAIR | {better: 4},
            PAIR | {better: 4, worse: None},
        ]
    )
    assert [[r.score for r in e.responses] for e in task.examples] == [[8.5, -2.0]]
    assert task.dropped == {
        "chosen and rejected have equal scores": 1,
        "chosen has a lower score than rejected": 1,
        f"{worse!r} is missing, but every row requires a score": 2,
    }


def test_what_teaches_nothing_is_dropped_and_counted(read: Read) -> None:
    task = read(
        [
            PAIR,
            PAIR | {"chosen": "3"},
            PAIR | {"rejected": " \n"},
            PAIR | {"rejected": ""},
            {"prompt": "1+1?", "chosen": "2"},
            PAIR | {"prompt": None},
            PAIR | {"prompt": []},
            {"chosen": "2", "rejected": "3"},
            PAIR | {"chosen": output(""), "rejected": output("3")},
            JUDGED,
            {"chosen": turns("a", "b", "c", "d"), "rejected": turns("a", "x", "c", "e")},
            {"chosen": turns("a", "b", "c", "d"), "rejected": turns("a", "b")},
            {"prompt": "q", "chosen": turns("a", "b"), "rejected": turns("a", "c")},
            {"chosen": output("2"), "rejected": output("3")},
        ]
    )
    assert len(task.examples) == 1
    assert task.dropped == {
        "'chosen' and 'rejected' are identical": 1,
        "'rejected' is blank": 2,
        "'rejected' is missing": 1,
        "'prompt' is missing": 3,
        "'prompt' is blank": 1,
        "'chosen' contains a blank message": 1,
        "layout differs from the first row": 1,
        "'chosen' and 'rejected' differ before their last message": 2,
        "'prompt' differs from the conversations' beginning": 1,
    }


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (PAIR | {"chosen": 2}, "must both be text, or both message"),
        (PAIR | {"prompt": turns("1+1?", "2")}, "'prompt' ends with an assistant message"),
        ({"chosen": turns("a"), "rejected": turns("b"), "prompt": "q"}, "must end with an assistant message"),
        (
            {"chosen": turns("a", "b") + output("c"), "rejected": turns("a", "b") + output("d")},
            "both from the assistant",
        ),
        (PAIR | {"score_chosen": "good", "score_rejected": 1}, "'score_chosen' must be a finite number; got 'good'"),
        (PAIR | {"score_chosen": 1, "score_rejected": float("nan")}, "'score_rejected' must be a finite number"),
        (STEPS | {"labels": [1]}, "2 'completions' but 1 'labels'"),
        (STEPS | {"labels": [1, -1]}, "'labels' 2 must be .* got -1. To use −1, 0 and 1, set task.num_classes to 3"),
        (STEPS | {"completions": "one two"}, "'completions' must be a list"),
        (STEPS | {"completions": ["a", 3]}, "'completions 2' must be text"),
    ],
)
def test_malformed_rows_are_refused_with_their_line(read: Read, row: dict[str, Any], message: str) -> None:
    good = PAIR | ({"score_chosen": 1.0, "score_rejected": 0.0} if "score_chosen" in row else {})
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{message}"):
        read([STEPS if "labels" in row else good, row])


def sharegpt(*contents: str, system: str = "") -> list[dict[str, str]]:
    output = [{"from": ("human", "gpt")[i % 2], "value": content} for i, content in enumerate(contents)]
    return [{"from": "system", "value": system}, *output] if system else output


@pytest.mark.parametrize("form", ["message", "list", "text", "role and content"])
def test_sharegpt_pairs(read: Read, form: str) -> None:
    """The conversation up to the answer, and two answers as one message, as a list of one, or as text."""
    answers: dict[str, Any] = {"chosen": {"from": "gpt", "value": "2"}, "rejected": {"from": "gpt", "value": "3"}}
    if form == "list":
        answers = {key: [value] for key, value in answers.items()}
    elif form == "text":
        answers = {"chosen": "2", "rejected": "3"}
    elif form == "role and content":
        answers = {"chosen": output("2")[0], "rejected": output("3")[0]}
    (example,) = read([{"conversations": sharegpt("Hi", "Hello.", "1+1?", system="Be brief.")} | answers]).examples
    assert [(m.role, m.content) for m in example.messages] == [
        ("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."), ("user", "1+1?"),
    ]  # fmt: skip
    assert example.responses == (Response("2", 1.0), Response("3", 0.0))


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        ({"instruction": "Add."}, "Add."),
        ({"instruction": "Add.", "input": None}, "Add."),
        ({"instruction": "Add.", "input": " "}, "Add."),
        ({"instruction": "Add.", "input": "1+1"}, "Add.\n\n1+1"),
        ({"instruction": "Add.", "input": "1+1", "prompt": "1+1?"}, "1+1?"),
    ],
)
def test_alpaca_prompts(read: Read, given: dict[str, Any], prompt: str) -> None:
    for row in (PAIR, JUDGED, STEPS):
        (example,) = read([{key: value for key, value in row.items() if key != "prompt"} | given]).examples
        assert example.messages == (Message("user", prompt),)


# --- judged answers ---


def test_judged_conversations(read: Read) -> None:
    """The last message is the answer that is judged."""
    rows = [
        {"messages": turns("Hi", "Hello.", "1+1?", "2"), "label": False},
        {"messages": sharegpt("1+1?", "2"), "label": True},
        {"messages": turns("1+1?"), "label": True},
        {"messages": output("2"), "label": True},
        {"messages": turns("1+1?", ""), "label": True},
        {"messages": turns("1+1?", "2"), "label": None},
        {"messages": [], "label": True},
    ]
    task = read(rows)
    first, second = task.examples
    assert [m.content for m in first.messages] == ["Hi", "Hello.", "1+1?"]
    assert (first.responses, second.responses) == ((Response("2", 0.0),), (Response("2", 1.0),))
    assert second.messages == QUESTION
    assert task.dropped == {
        "'messages' must end with the assistant message to label": 1,
        "'messages' contains only an assistant message": 1,
        "'messages' contains a blank message": 1,
        "'messages' is blank": 1,
        "'label' is missing": 1,
    }


@pytest.mark.parametrize("key", ["rating", "score"])
@pytest.mark.parametrize("answer", [{"prompt": "1+1?", "completion": "2"}, {"messages": turns("1+1?", "2")}])
def test_a_rating_is_read_as_a_score(read: Read, key: str, answer: dict[str, Any]) -> None:
    rows = [answer | {key: 7}, answer | {key: 1.5}, answer | {key: None}]
    task = read(rows)
    assert [e.responses for e in task.examples] == [(Response("2", 7.0),), (Response("2", 1.5),)]
    assert task.dropped == {f"{key!r} is missing, but every row requires a score": 1}


def test_a_completion_may_be_the_conversation(read: Read) -> None:
    task = read([JUDGED | {"completion": turns("1+1?", "2")}, JUDGED | {"completion": turns("a", "b")}])
    assert [(e.messages, e.responses) for e in task.examples] == [(QUESTION, (Response("2", 1.0),))]
    assert task.dropped == {"'prompt' differs from the conversations' beginning": 1}
    with refuses(DataError, "rows.jsonl:1", "'completion'"):
        read([JUDGED | {"completion": turns("a")}])


# --- labelled steps ---


def test_steps_and_their_labels(read: Read) -> None:
    (example,) = read([STEPS]).examples
    (response,) = example.responses
    assert response == Response("1+1=2.\n2+1=4.", 0.0, ("1+1=2.", "\n2+1=4."), (1, 0))
    (example,) = read([STEPS | {"labels": [1, True]}], step_separator=" ").examples
    assert example.responses == (Response("1+1=2. 2+1=4.", 1.0, ("1+1=2.", " 2+1=4."), (1, 1)),)


@pytest.mark.parametrize(
    ("options", "labels", "classes", "score"),
    [
        ({}, [1, 0], (1, 0), 0.0),
        ({}, [True, False], (1, 0), 0.0),
        ({"num_classes": 3}, [1, 0, -1], (2, 1, 0), 0.0),
        ({"num_classes": 3}, [1, 0, 1], (2, 1, 2), 1.0),  # 0 is neutral, not wrong and not missing
        ({"num_classes": 3}, [True, False], (2, 0), 0.0),
    ],
)
def test_labels_to_classes(
    read: Read, options: dict[str, Any], labels: list[Any], classes: tuple[int, ...], score: float
) -> None:
    row = {"prompt": "q", "completions": [f"step {i}" for i in range(len(labels))], "labels": labels}
    (response,) = read([row], **options).examples[0].responses
    assert (response.step_labels, response.score) == (classes, score)


def test_steps_that_cannot_be_used_are_counted(read: Read) -> None:
    task = read(
        [
            STEPS,
            STEPS | {"completions": ["a", " "]},
            STEPS | {"labels": [1, None]},
            STEPS | {"completions": [], "labels": []},
            STEPS | {"labels": None},
        ]
    )
    assert len(task.examples) == 1
    assert task.dropped == {
        "blank step": 1,
        "step without label": 1,
        "'completions' is empty": 1,
        "'labels' is missing": 1,
    }


# --- files and splits ---


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q", "answer": "a"}, r"unknown layout. The row's keys are question, answer\..*prompt, chosen"),
        ({"prompt": "q", "choosen": "a", "rejected": "b"}, "unknown layout.*Did you mean 'chosen'"),
        (PAIR | JUDGED, r"ambiguous layout \(pair, judged\)"),
    ],
)
def test_the_first_row_tells_the_layout(read: Read, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: {message}"):
        read([row])


def test_conversations_that_begin_alike_are_on_one_side(read: Read) -> None:
    rows = [{"messages": turns(f"{i % 60}?", *("a", "b") * (i // 60), "c"), "label": True} for i in range(180)]
    sides = [read(rows, split=split, validation_share=0.3).examples for split in ("train", "validation", "test")]
    request = [{example.messages[0] for example in side} for side in sides]
    assert sum(map(len, request)) == len(set.union(*request)) == 60
    assert [len(side) for side in sides] == [3 * len(side) for side in request]
    entry = registry.find("task", "preferences")
    assert entry.traits["held_out"] == "validation"
    with refuses(RecipeError, "task.path"):
        entry.bind({}, "task")


@needs_data
@pytest.mark.parametrize(
    ("name", "size", "turns", "last"),
    [
        ("dpo_en_demo", 294, {1: 112, 2: 79, 3: 1, 5: 55, 7: 45, 9: 1, 13: 1}, [1.0, 0.0]),
        ("kto_en_demo", 299, {1: 222, 3: 3, 5: 47, 7: 22, 9: 1, 11: 4}, None),
        ("politeness_pairs", 1094, {1: 1094}, [1.0, 0.0]),
    ],
)
def test_real_rows(name: str, size: int, turns: dict[int, int], last: list[float] | None) -> None:
    task = preferences(path=real_file(f"preference/{name}"), split="all")
    assert (len(task.examples), task.dropped) == (size, {})
    assert Counter(len(example.messages) for example in task.examples) == turns
    scores = [[response.score for response in example.responses] for example in task.examples]
    if last is not None:
        assert scores == [last] * size
    else:
        assert Counter(score for (score,) in scores) == {1.0: 150, 0.0: 149}
    assert all(example.messages[-1].role == "user" for example in task.examples)


# --- ultrafeedback ---

RATED = {"prompt": "1+1?", "chosen": "2", "rejected": "3", "score_chosen": 8.5, "score_rejected": 4}


def test_ultrafeedback_both_forms_of_a_row(tmp_path: Path) -> None:
    whole = RATED | {"chosen": turns("1+1?", "2"), "rejected": turns("1+1?", "3"), "messages": turns("1+1?", "2")}
    task = ultrafeedback(path=write_rows(tmp_path / "x.jsonl", [RATED, whole]), split="test")
    first, second = task.examples
    assert (first.id, second.id) == ("ultrafeedback/test/1", "ultrafeedback/test/2")
    for example in task.examples:
        assert example.messages == (Message("user", "1+1?"),)
        assert example.responses == (Response("2", 8.5), Response("3", 4.0))
        assert example.answer is None
    dropped = ultrafeedback(
        path=write_rows(tmp_path / "y.jsonl", [RATED, RATED | {"score_chosen": None}]), split="test"
    ).dropped
    assert dropped == {"'score_chosen' is missing": 1}


@needs_data
def test_ultrafeedback_real_rows() -> None:
    for split, kept, ties in (("train", 811, 99), ("test", 172, 24)):
        task = ultrafeedback(path=real_file(f"ultrafeedback/{split}"), split="test")
        assert (len(task.examples), task.dropped) == (kept, {"chosen and rejected have equal scores": ties})
        margins = [example.responses[0].score - example.responses[1].score for example in task.examples]
        assert min(margins) == 0.5  # the scores are halves


def test_judged_answers_have_truth_values(read: Read) -> None:
    rows = [JUDGED, JUDGED | {"label": 0}, JUDGED | {"label": 1}, JUDGED | {"completion": output("3"), "label": False}]
    responses = [response for example in read(rows).examples for response in example.responses]
    assert responses == [Response("2", 1.0), Response("2", 0.0), Response("2", 1.0), Response("3", 0.0)]
    for label in ("yes", 2, 0.5, [1], -1):
        with refuses(DataError, "rows.jsonl:2", "'label'"):
            read([JUDGED, JUDGED | {"label": label}])
