"""HH-RLHF: pairs of dialogues, what is left out, splits by first turn, and prompts of the test split for policies."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sample_rows import fake_hub, needs_data, real_file, write_rows

from posttrain import registry
from posttrain.data.hh_rlhf import answer_text, hh_rlhf, merge_turns, parse_turns
from posttrain.data.reader import Dropped, prompt_hash
from posttrain.errors import DataError, RecipeError, UsageError
from posttrain.types import Example, Message, Response
from refusing import refuses


def talk(*turns: str) -> str:
    """A dialogue that the human begins."""
    return "".join(f"\n\n{('Human', 'Assistant')[i % 2]}: {turn}" for i, turn in enumerate(turns))


def pair(*shared: str, chosen: str = "yes", rejected: str = "no", **more: Any) -> dict[str, Any]:
    return {"chosen": talk(*shared, chosen), "rejected": talk(*shared, rejected), **more}


def test_a_pair(tmp_path: Path) -> None:
    rows = [pair("Is it raining?", "Where?", "Here.", chosen="Yes, it is.", rejected="No idea.", subset="helpful-base")]
    task = hh_rlhf(path=write_rows(tmp_path / "x.jsonl", rows), split="test")
    (example,) = task.examples
    assert example.id == "hh_rlhf/test/helpful-base/1"
    assert example.messages == (
        Message("user", "Is it raining?"),
        Message("assistant", "Where?"),
        Message("user", "Here."),
    )
    assert example.responses == (Response("Yes, it is.", 1.0), Response("No idea.", 0.0))
    assert (example.answer, example.solution, example.meta) == (None, None, {"subset": "helpful-base"})
    assert (task.name, task.split, task.dropped) == ("hh_rlhf", "test", {})
    assert task.keys == {("chosen", "read"): 1, ("rejected", "read"): 1, ("subset", "read"): 1}
    (bare,) = hh_rlhf(path=write_rows(tmp_path / "y.jsonl", [pair("a")]), split="test").examples
    assert (bare.id, bare.meta) == ("hh_rlhf/test/1", {})


def test_what_is_dropped(tmp_path: Path) -> None:
    thought = {"chosen": talk("a", "<think>x</think>b"), "rejected": talk("a", "<think>y</think>b")}
    rows = [
        pair("a"),
        {"chosen": talk("a", "b", "c", "d"), "rejected": talk("a", "x", "c", "e")},
        {"chosen": talk("a", "b", "c", "d"), "rejected": talk("a", "e")},
        {"chosen": talk("a", "b", "c"), "rejected": talk("a", "b", "d")},
        {"chosen": talk("a", "b"), "rejected": talk("a", "b", "d")},
        pair("a", chosen="same ", rejected="same"),
        pair("a", "", "c"),
        pair("a", chosen=" "),
        {"chosen": "\n\nAssistant: hm?" + talk("a", "b"), "rejected": "\n\nAssistant: hm?" + talk("a", "c")},
        {"chosen": "b", "rejected": "c"},
        thought,
    ]
    path = write_rows(tmp_path / "x.jsonl", rows)
    task = hh_rlhf(path=path, split="test")
    assert [example.id for example in task.examples] == ["hh_rlhf/test/1", "hh_rlhf/test/11"]
    expected = {
        "'chosen' and 'rejected' differ before their last turn": 2,
        "last turn is not the assistant's": 2,
        "'chosen' and 'rejected' are identical": 1,
        "blank turn": 2,
        "first turn is the assistant's": 1,
        "does not begin with a turn ('Human:' or 'Assistant:')": 1,
    }
    assert task.dropped == expected
    stripped = hh_rlhf(path=path, split="test", strip_thinking=True)
    assert stripped.dropped == expected | {"'chosen' and 'rejected' are identical": 2}


def test_subsets_of_a_file(tmp_path: Path) -> None:
    rows = [pair(f"q{i}", subset=("harmless-base", "helpful-base")[i % 2]) for i in range(6)]
    path = write_rows(tmp_path / "x.jsonl", rows)
    assert len(hh_rlhf(path=path, split="test").examples) == 6
    chosen = hh_rlhf(path=path, split="test", subset="harmless-base").examples
    assert [example.id for example in chosen] == [f"hh_rlhf/test/harmless-base/{line}" for line in (1, 3, 5)]
    with refuses(DataError, "x.jsonl", "'helpful-online'"):
        hh_rlhf(path=path, split="test", subset="helpful-online")
    with refuses(DataError, "y.jsonl:1"):
        hh_rlhf(path=write_rows(tmp_path / "y.jsonl", [pair("a")]), subset="helpful-base")
    with refuses(RecipeError, "'harmless-base'"):
        registry.find("task", "hh_rlhf").bind({"subset": "helpful"}, "task")


def test_dialogues_that_begin_alike_are_on_one_side(tmp_path: Path) -> None:
    """One that goes on from another would otherwise show its beginning to the other split."""
    rows = [pair(f"q{i % 100}", *("b", "c", "d", "e")[: 2 * (i // 100)], rejected=f"no {i}") for i in range(300)]
    path = write_rows(tmp_path / "x.jsonl", rows)
    train, validation = (hh_rlhf(path=path, split=s, validation_share=0.3).examples for s in ("train", "validation"))
    assert len(train) + len(validation) == 300
    first = [{example.messages[0].content for example in side} for side in (train, validation)]
    assert not first[0] & first[1]
    assert len(first[0] | first[1]) == 100
    assert len(validation) == 3 * len(first[1])
    assert 10 <= len(first[1]) <= 50
    assert {prompt_hash(e, by_opening=True) < 0.3 for e in validation} == {True}
    assert registry.find("task", "hh_rlhf").traits["held_out"] == "validation"


def files(tmp_path: Path, num_train: int, num_test: int) -> dict[str, Any]:
    return {
        "path": write_rows(tmp_path / "train.jsonl", [pair(f"train {i}") for i in range(num_train)]),
        "test_path": write_rows(tmp_path / "test.jsonl", [pair(f"test {i}") for i in range(num_test)]),
        "validation_share": 0.0,
    }


@pytest.mark.parametrize(
    ("sizes", "share", "expected", "dropped"),
    [
        ((70, 50), 0.3, (70, 30), {"test prompts beyond task.test_share": 20}),
        ((70, 30), 0.3, (70, 30), {}),
        ((70, 15), 0.3, (35, 15), {"training prompts beyond task.test_share": 35}),
        ((10, 50), 0.3, (10, 4), {"test prompts beyond task.test_share": 46}),
        ((20, 20), 0.5, (20, 20), {}),
    ],
)
def test_prompts_of_the_test_split(
    tmp_path: Path, sizes: tuple[int, int], share: float, expected: tuple[int, int], dropped: dict[str, int]
) -> None:
    given = files(tmp_path, *sizes)
    task = hh_rlhf(**given, test_share=share)
    of_test = [e for e in task.examples if e.meta["source"] == "test"]
    assert (len(task.examples) - len(of_test), len(of_test)) == expected
    assert task.dropped == dropped
    for example in task.examples:  # a test prompt teaches no preference
        assert len(example.responses) == (0 if example.meta["source"] == "test" else 2)
        assert example.messages[0].content.startswith(str(example.meta["source"]))
    assert len({example.id for example in task.examples}) == len(task.examples)
    every = [f"test {i}" for i in range(sizes[1])]
    lowest = sorted(every, key=lambda text: prompt_hash(Example("", (Message("user", text),))))[: expected[1]]
    assert [e.messages[0].content for e in of_test] == [text for text in every if text in lowest]
    assert [e.id for e in hh_rlhf(**given, test_share=share).examples] == [e.id for e in task.examples]


def test_only_training_prompts_are_mixed(tmp_path: Path) -> None:
    given = files(tmp_path, 40, 40)
    assert {e.meta.get("source") for e in hh_rlhf(**given).examples} == {None}
    given["validation_share"] = 0.2
    for split in ("validation", "test"):
        plain, mixed = (hh_rlhf(**given, split=split, test_share=s).examples for s in (0.0, 0.5))  # type: ignore[arg-type]
        assert plain == mixed
    validation = {e.messages for e in hh_rlhf(**given, split="validation").examples}
    assert validation.isdisjoint(e.messages for e in hh_rlhf(**given, test_share=0.5).examples)
    with refuses(UsageError, "test_share", "task.test_path"):
        hh_rlhf(path=given["path"], test_share=0.1)


def test_a_test_prompt_that_begins_as_a_held_out_dialogue_does_is_left_out(tmp_path: Path) -> None:
    given = files(tmp_path, 40, 10) | {"validation_share": 0.2}
    held_out = [e.messages[0].content for e in hh_rlhf(**given, split="validation").examples]
    longer = [pair(text, "Tell me.", "Go on.") for text in held_out]
    given["test_path"] = write_rows(tmp_path / "more.jsonl", [*(pair(f"test {i}") for i in range(10)), *longer])
    task = hh_rlhf(**given, test_share=0.3)
    assert {e.messages[0].content for e in task.examples}.isdisjoint(held_out)
    assert task.dropped["test prompts beginning like a held-out dialogue"] == len(held_out) > 0


def test_from_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("POSTTRAIN_DATA", raising=False)
    names = ("helpful-base", "helpful-online", "helpful-rejection-sampled", "harmless-base")
    hub = {
        f"Anthropic/hh-rlhf/{name}/{split}.jsonl.gz": [pair(f"{name} {split} {i}") for i in range(3)]
        for name in names
        for split in ("train", "test")
    }
    fake_hub(monkeypatch, tmp_path, hub)
    task = hh_rlhf(validation_share=0.0)
    assert [e.id for e in task.examples] == [f"hh_rlhf/train/{name}/{line}" for name in names for line in (1, 2, 3)]
    assert Counter(e.meta["subset"] for e in task.examples) == dict.fromkeys(names, 3)
    test = hh_rlhf(split="test", subset="harmless-base").examples
    assert [e.messages[0].content for e in test] == [f"harmless-base test {i}" for i in range(3)]
    mixed = hh_rlhf(subset="helpful-base", validation_share=0.0, test_share=0.5).examples
    assert [e.messages[0].content for e in mixed] == [
        f"helpful-base {s} {i}" for s in ("train", "test") for i in range(3)
    ]
    fake_hub(monkeypatch, tmp_path, {})
    with refuses(DataError, "hub:Anthropic/hh-rlhf/helpful-base/train.jsonl.gz: cannot be", "task.path"):
        hh_rlhf()


@needs_data
def test_real_rows() -> None:
    train, test = real_file("hh_rlhf/train"), real_file("hh_rlhf/test")
    tasks = {s: hh_rlhf(path=train, split=s) for s in ("train", "validation")}  # type: ignore[arg-type]
    tasks["test"] = hh_rlhf(path=test, split="test")
    assert {split: len(task.examples) for split, task in tasks.items()} == {
        "train": 7018,
        "validation": 123,
        "test": 1075,
    }
    assert tasks["train"].dropped == {
        "'chosen' and 'rejected' differ before their last turn": 16,
        "last turn is not the assistant's": 2,
        "blank turn": 1,
    }
    first = [{e.messages[0].content for e in task.examples} for task in tasks.values()]
    assert not first[0] & first[1]
    for task in tasks.values():
        for example in task.examples:
            roles = [message.role for message in example.messages]
            assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
            assert all(message.content == message.content.strip() != "" for message in example.messages)


def test_halves_are_disjoint_by_first_turn_in_every_split_and_the_others_are_counted(tmp_path: Path) -> None:
    rows = [pair(f"question {n}", *(["more?", "yes"] if n % 3 else [])) for n in range(120)]
    rows += [pair(f"question {n}", "more?", "again") for n in range(120)]  # dialogues that begin as another does
    path = write_rows(tmp_path / "x.jsonl", rows)
    for split in ("train", "validation", "test"):
        whole = hh_rlhf(path=path, split=split, validation_share=0.3)
        parts = [hh_rlhf(path=path, split=split, validation_share=0.3, half=half) for half in ("first", "second")]
        hashes = [{prompt_hash(example, by_opening=True) for example in part.examples} for part in parts]
        assert not hashes[0] & hashes[1]
        assert sum(len(part.examples) for part in parts) == len(whole.examples)
        assert all(len(part.examples) > 0.25 * len(whole.examples) for part in parts)
        assert [part.dropped["in the other half"] for part in parts] == [len(p.examples) for p in parts[::-1]]


def output(*turns: tuple[str, str]) -> tuple[Message, ...]:
    return tuple(Message({"H": "user", "A": "assistant"}[who], text) for who, text in turns)


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        ("\n\nHuman: Hi\n\nAssistant: Hello.", output(("H", "Hi"), ("A", "Hello."))),
        ("Human: Hi\n\nAssistant:Hello. ", output(("H", "Hi"), ("A", "Hello."))),
        ("\n\nAssistant: Yes?\n\nHuman: Hi", output(("A", "Yes?"), ("H", "Hi"))),
        # paragraphs belong to their turn, and so does everything that only looks like a marker
        ("\n\nHuman: a\n\nb\n\nAssistant: c\n\n\n\nd", output(("H", "a\n\nb"), ("A", "c\n\n\n\nd"))),
        ("\n\nHuman: Who is Human: he?\n\nAssistant: x", output(("H", "Who is Human: he?"), ("A", "x"))),
        ("\n\nHuman: a\nAssistant: b\n\nAssistant: c", output(("H", "a\nAssistant: b"), ("A", "c"))),
        ("\n\nHuman: a\n\nAssistant: Human: b", output(("H", "a"), ("A", "Human: b"))),
        ("\n\nHuman: a\n\nhuman: b", output(("H", "a\n\nhuman: b"))),
        # turns are kept as they stand: blank ones, and those of one role that follow one another
        ("\n\nHuman: a\n\nAssistant: \n\nAssistant: b", output(("H", "a"), ("A", ""), ("A", "b"))),
        ("\n\nHuman:\n\nAssistant:", output(("H", ""), ("A", ""))),
    ],
)
def test_parse_turns(text: str, turns: tuple[Message, ...]) -> None:
    assert parse_turns(text) == turns


def test_turns_of_one_role_become_one_message() -> None:
    turns = output(("H", "a"), ("H", "b"), ("A", "c"), ("A", ""), ("A", "d"), ("H", "e"))
    assert merge_turns(turns) == output(("H", "a\n\nb"), ("A", "c\n\nd"), ("H", "e"))
    assert merge_turns(output(("H", ""), ("H", "a"))) == output(("H", "a"))
    with refuses(Dropped, "blank turn"):
        merge_turns(output(("H", "a"), ("A", ""), ("A", ""), ("H", "b")))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It is 5.", "It is 5."),
        ("  It is 5.\n", "It is 5."),
        ("<think>2 + 3</think>It is 5.", "It is 5."),
        ("<think>\n2 + 3\n</think>\n\nIt is 5.\n", "It is 5."),
        ("<think></think>5", "5"),
        ("<think>a <think>b</think> c</think>5", "5"),  # what stands behind an inner block is thinking as well
        ("2 + 3 it is</think>5", "5"),  # opened in the prompt
        ("a</think>b <think>c</think>5", "b 5"),
        ("<think>all of it</think>", ""),
        ("<think>cut off", None),
        ("<think>a<think>b</think>5", None),
        ("<thinking>a</thinking>5", "<thinking>a</thinking>5"),
    ],
)
def test_thinking_is_removed_whole_or_the_answer_is_left_out(text: str, answer: str | None) -> None:
    assert answer_text(f"{text} ", strip_thinking=False) == f"{text} "
    if answer:
        assert answer_text(text, strip_thinking=True) == answer
        return
    reason = "unclosed <think>" if answer is None else "response contains only thinking"
    with pytest.raises(Dropped, match=f"^{reason}$"):
        answer_text(text, strip_thinking=True)
