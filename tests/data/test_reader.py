"""Tasks that read rows: how many examples, where its file may lie, where it is to be had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_rows import write_rows

from closeness import approx
from posttrain import registry
from posttrain.data.base import build_task, held_out_task
from posttrain.data.jsonl import jsonl
from posttrain.data.reader import (
    CollectedExamples,
    Dropped,
    FileSplit,
    _places,
    choose_split,
    collect_examples,
    prompt_hash,
)
from posttrain.data.reading import Row
from posttrain.data.verifiable.suites import gsm8k
from posttrain.errors import DataError, DataNotThere, RecipeError
from posttrain.evaluation.statistics import wilson_interval
from posttrain.recipes.sections import Component
from posttrain.types import Example, Message
from refusing import refuses

MAKERS = {"stories", "reasoning_gym", "episodes", "sums"}  # these make as many examples as ``size`` says


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{i}?", "answer": i} for i in range(1000)])


def tasks_of_the_package() -> dict[str, registry.Entry]:
    """Tasks that no other test registered in this process."""
    entries = registry.entries("task")
    return {name: entry for name, entry in entries.items() if entry.function.__module__.startswith("posttrain.")}


def test_every_task_states_how_many_examples() -> None:
    for name, entry in tasks_of_the_package().items():
        fields = entry.options_model.model_fields
        if name in MADE_OF_TASKS:
            continue
        assert {"size", "seed"} <= fields.keys(), name
        assert "size: " in entry.doc.partition("Args:")[2].partition("Raises:")[0], name
        assert (fields["size"].default is None) == (name not in MAKERS), name


def test_size_is_a_function_of_the_seed_and_nests(path: str) -> None:
    def chosen(size: int, seed: int = 0) -> list[str]:
        return [e.id for e in jsonl(path=path, split="all", size=size, seed=seed).examples]

    first = chosen(100)
    assert first == chosen(100), "the same again"
    assert len(set(first)) == 100
    assert first == sorted(first, key=lambda name: int(name.rpartition("/")[2])), "in the order of the file"
    assert set(first) < set(chosen(300))
    assert len(set(first) & set(chosen(100, seed=1))) < 30, "about ten of a hundred"
    assert first != [f"jsonl/all/{n}" for n in range(1, 101)]
    with refuses(RecipeError, "task.size"):
        build_task(Component(name="jsonl", path=path, size=0))


def test_what_is_left_out_is_counted_and_what_is_held_out_stays(path: str) -> None:
    whole = jsonl(path=path)
    few = jsonl(path=path, size=10)
    assert few.dropped == {"beyond task.size=10": len(whole.examples) - 10}
    assert jsonl(path=path, size=5000).examples == whole.examples
    word = Component(name="jsonl", path=path, size=10, seed=3)
    held_out = build_task(held_out_task(word))
    assert held_out.examples == jsonl(path=path, split="validation").examples
    assert len(held_out.examples) > 10
    with refuses(RecipeError, "defines no held-out"):
        held_out_task(Component(name="refusals"))
    stories = held_out_task(Component(name="stories", size=64, seed=3))
    assert (stories.options["size"], stories.options["seed"]) == (64, 3), "a maker's size is what it makes"


OWN_FILES = {"jsonl", "preferences"}
MADE_OF_TASKS = {"mixture"}
BUNDLED = {"refusals"}  # their prompts come with the package


def test_every_task_states_where_its_rows_are_to_be_had() -> None:
    assert set(_places()) == set(tasks_of_the_package()) - MAKERS - OWN_FILES - BUNDLED - MADE_OF_TASKS
    for name, place in _places().items():
        assert place.keys() <= {"files", "also", "url", "licence", "get"}, name
        assert place["url"].startswith("https://"), name
        assert place["licence"], name
        assert place["get"].split()[0] in ("curl", "hf", "git", "posttrain"), name
        for option in place.get("also", {}):
            assert option in registry.find("task", name).options_model.model_fields, name


def write_gsm8k(file: Path, n: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_rows(file, [{"question": f"{i} + 1?", "answer": f"Count.\n#### {i + 1}"} for i in range(n)])


def test_files_are_looked_for_by_name_in_the_folder_of_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_DATA", str(tmp_path))
    write_gsm8k(tmp_path / "gsm8k" / "gsm8k_train.jsonl", 40)
    write_gsm8k(tmp_path / "gsm8k" / "test.jsonl", 7)
    train, held_out = gsm8k(), gsm8k(split="validation")
    assert len(train.examples) + len(held_out.examples) == 40
    assert train.origin == held_out.origin == str(tmp_path / "gsm8k" / "gsm8k_train.jsonl")
    assert len(gsm8k(split="test").examples) == 7
    write_gsm8k(tmp_path / "gsm8k" / "train.jsonl", 50)
    assert len(gsm8k(validation_share=0.0).examples) == 50, "TASK/SPLIT comes first"
    other = tmp_path / "other.jsonl"
    write_gsm8k(other, 3)
    named = gsm8k(path=str(other), split="test")
    assert (len(named.examples), named.origin) == (3, None), "a path that is named is taken"
    assert len(gsm8k(path="other.jsonl", split="test").examples) == 3, "and may be a name in the folder"


def test_what_is_not_there_is_refused_with_where_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("POSTTRAIN_DATA", raising=False)
    with refuses(DataNotThere, "gsm8k (license: MIT)", "example: curl"):
        gsm8k(path=str(tmp_path / "nothere.jsonl"))
    with refuses(DataNotThere, "task.path"):
        build_task(Component(name="judged_solutions"))
    with refuses(DataNotThere, "task.path"):
        jsonl(path=str(tmp_path / "nothere.jsonl"))


# --- rows that are left out ---


def rows(*numbers: int) -> Iterator[Row]:
    return (Row("f", line, {"x": number}) for line, number in enumerate(numbers, start=1))


def read(row: Row) -> Example:
    if row.data["x"] < 0:
        raise Dropped("negative")
    if row.data["x"] == 0:
        raise Dropped("zero")
    return Example("", (Message("user", str(row.data["x"])),))


def test_what_is_left_keeps_its_order_and_the_rest_is_counted() -> None:
    found = collect_examples(rows(3, -1, 2, 0, -5), read, "f", name="e")
    assert [example.id for example in found.examples] == ["e/1", "e/3"]
    assert found.dropped == {"negative": 2, "zero": 1}


def test_nothing_left_is_refused_with_the_reasons() -> None:
    with refuses(DataError, "f:", "`posttrain explain`"):
        collect_examples(rows(-1, 0, -2), read, "f")
    assert collect_examples(rows(), read, "f").examples == []  # an empty file is for the splits to refuse
    CollectedExamples(dropped=Counter()).require_examples("f")
    with refuses(DataError, "f:"):  # a task without splits
        collect_examples(rows(), read, "f").as_task("x", "f")


# --- splits: disjoint by prompt, chosen by its text alone ---


def ask(text: str, number: int = 0) -> Example:
    return Example(f"x/{number}", (Message("user", text),), answer="1")


def test_the_hash_is_fixed_for_all_time() -> None:
    """A changed hash would leak yesterday's training questions into today's validation set."""
    assert prompt_hash(ask("How many shells?")) == approx(0.5487432984527636, abs=1e-12)
    assert prompt_hash(ask("a")) != prompt_hash(Example("x", (Message("system", "a"),)))
    assert prompt_hash(ask("a", 1)) == prompt_hash(ask("a", 2))


def test_shares_and_order() -> None:
    examples = [ask(f"question {i}", i) for i in range(4000)]
    train, validation = (choose_split(examples, split, 0.05, "f") for split in ("train", "validation"))
    assert len(train) + len(validation) == 4000
    assert 160 <= len(validation) <= 240, "four standard deviations around 200"
    assert {e.id for e in train}.isdisjoint(e.id for e in validation)
    assert [e.id for e in validation] == sorted((e.id for e in validation), key=lambda i: int(i[2:]))
    assert choose_split(examples, "test", 0.05, "f") == examples


def test_choose_split_of_one_file_parts_it_in_three() -> None:
    examples = [ask(f"question {i}", i) for i in range(2000)]
    parts = {
        split: choose_split(examples, split, 0.05, "f", test_share=0.1) for split in ("train", "validation", "test")
    }
    assert sorted(e.id for part in parts.values() for e in part) == sorted(e.id for e in examples)
    assert parts["validation"] == choose_split(examples, "validation", 0.05, "f")  # what it was without a test part
    assert all(0.05 <= prompt_hash(e) < 0.15 for e in parts["test"])
    assert 150 <= len(parts["test"]) <= 250
    assert choose_split(examples, "all", 0.05, "f", test_share=0.1) == examples
    for split in ("validation", "test"):  # a prompt keeps its side when rows come or go
        fewer = choose_split(examples[::2], split, 0.05, "f", test_share=0.1)
        assert fewer == [e for e in parts[split] if int(e.id[2:]) % 2 == 0]


SHARES = [(0.001, None), (0.05, None), (0.5, None), (0.999, None), (0.001, 0.001), (0.5, 0.6)]


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=12), st.sampled_from(SHARES))
def test_choose_split_small_file_fills_every_part(prompts: list[str], shares: tuple[float, float | None]) -> None:
    examples = [ask(text, i) for i, text in enumerate(prompts)]
    splits: tuple[FileSplit, ...] = ("train", "validation", "test") if shares[1] else ("train", "validation")
    if len(set(prompts)) < len(splits):
        with refuses(DataError, "distinct prompt"):
            choose_split(examples, splits[-1], shares[0], "f", test_share=shares[1])
        return
    parts = [choose_split(examples, split, shares[0], "f", test_share=shares[1]) for split in splits]
    assert all(parts)
    assert sorted(e.id for part in parts for e in part) == sorted(e.id for e in examples)
    prompts_of = [{e.messages for e in part} for part in parts]
    assert sum(map(len, prompts_of)) == len(set.union(*prompts_of))


def test_jsonl_small_part_comes_with_the_width_of_its_interval(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {i}", "answer": str(i)} for i in range(1000)]
    path = write_rows(tmp_path / "x.jsonl", rows)
    few, many, train = (jsonl(path=path, split=split, grader="exact") for split in ("validation", "test", "train"))
    n = len(few.examples)
    assert few.warnings == (
        f"jsonl/validation: {n} of 1,000 rows, excluded from split train; task.split all uses every row. With so "
        f"few rows, 95 % intervals reach ±{98 / (n + 3.84) ** 0.5:.0f} points: raise task.validation_share",
    )
    assert many.warnings == (
        f"jsonl/test: {len(many.examples)} of 1,000 rows, excluded from split train; task.split all uses every row",
    )
    assert train.warnings == ()
    low, high = wilson_interval(n / 2, n)
    assert 50 * (high - low) == approx(98 / (n + 3.84) ** 0.5, rel=1e-3)


def test_nothing_held_out() -> None:
    examples = [ask("a"), ask("b")]
    assert choose_split(examples, "train", 0.0, "f") == examples
    with refuses(DataError, "task.validation_share"):
        choose_split(examples, "validation", 0.0, "f")
    with refuses(DataError, "f:"):
        choose_split([], "train", 0.05, "f")


def test_the_opening_is_all_up_to_the_first_user_message() -> None:
    def talk(*turns: tuple[str, str]) -> Example:
        return Example("x", tuple(Message(role, content) for role, content in turns))

    def opening(*turns: tuple[str, str]) -> float:
        return prompt_hash(talk(*turns), by_opening=True)

    system, first, answer, second = ("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c")
    assert opening(first) == opening(first, answer, second) == prompt_hash(talk(first))
    assert opening(system, first) == opening(system, first, answer, second)
    assert len({opening(first), opening(system, first), opening(second), opening(system)}) == 4
    examples = [talk(("user", f"{i % 50}?"), *(answer, second) * (i // 50)) for i in range(150)]
    sides = [choose_split(examples, split, 0.2, "f", by_opening=True) for split in ("train", "validation")]
    openings = [{example.messages[0] for example in side} for side in sides]
    assert not openings[0] & openings[1]
    assert [len(side) for side in sides] == [3 * len(side) for side in openings]
