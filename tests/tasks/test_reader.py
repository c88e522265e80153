"""What every task that reads rows has: how many examples, where its file may lie, where it is to be had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain import registry
from posttrain.errors import DataNotThere, RecipeError
from posttrain.recipes.sections import Word
from posttrain.tasks.base import build_task, held_out_task
from posttrain.tasks.jsonl import jsonl
from posttrain.tasks.reader import _places
from posttrain.tasks.verifiable.mathematics import gsm8k

MAKERS = {"stories", "reasoning_gym", "episodes", "sums"}  # these make as many examples as ``size`` says


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}?", "answer": i}) + "\n" for i in range(1000)))
    return str(file)


def test_every_task_says_how_many_examples() -> None:
    for name, entry in registry.entries("task").items():
        fields = entry.options_model.model_fields
        assert {"size", "seed"} <= fields.keys(), name
        assert "size: " in entry.doc.partition("Args:")[2].partition("Raises:")[0], name
        assert (fields["size"].default is None) == (name not in MAKERS), name


def test_size_is_a_function_of_the_seed_and_nests(path: str) -> None:
    def chosen(size: int, seed: int = 0) -> list[str]:
        return [e.id for e in jsonl(path=path, split="test", size=size, seed=seed).examples]

    first = chosen(100)
    assert first == chosen(100), "the same again"
    assert len(set(first)) == 100
    assert first == sorted(first, key=lambda name: int(name.rpartition("/")[2])), "in the order of the file"
    assert set(first) < set(chosen(300))
    assert len(set(first) & set(chosen(100, seed=1))) < 30, "about ten of a hundred"
    assert first != [f"jsonl/test/{n}" for n in range(1, 101)]


def test_what_is_left_out_is_counted_and_what_is_held_out_stays(path: str) -> None:
    whole = jsonl(path=path)
    few = jsonl(path=path, size=10)
    assert few.dropped == {"beyond task.size=10": len(whole.examples) - 10}
    assert jsonl(path=path, size=5000).examples == whole.examples
    word = Word(name="jsonl", path=path, size=10, seed=3)
    held_out = build_task(held_out_task(word))
    assert held_out.examples == jsonl(path=path, split="validation").examples
    assert len(held_out.examples) > 10
    with pytest.raises(RecipeError, match="names no held-out split"):
        held_out_task(Word(name="refusals"))
    stories = held_out_task(Word(name="stories", size=64, seed=3))
    assert (stories.options["size"], stories.options["seed"]) == (64, 3), "a maker's size is what it makes"


def test_sizes_that_are_none(path: str) -> None:
    with pytest.raises(RecipeError, match=r"task.size: .*greater than or equal to 1; got 0"):
        build_task(Word(name="jsonl", path=path, size=0))


OWN_FILES = {"jsonl", "preferences"}
MADE_OF_TASKS = {"mixture"}
BUNDLED = {"refusals"}  # their prompts come with the package


def test_every_task_says_where_its_rows_are_to_be_had() -> None:
    assert set(_places()) == set(registry.names("task")) - MAKERS - OWN_FILES - BUNDLED - MADE_OF_TASKS
    for name, place in _places().items():
        assert place.keys() <= {"files", "also", "url", "licence", "get"}, name
        assert place["url"].startswith("https://"), name
        assert place["licence"], name
        assert place["get"].split()[0] in ("curl", "hf", "git", "posttrain"), name
        hub = registry.find("task", name).options_model.model_fields.get("hub")
        assert hub is None or hub.default in f"{place['url']} {place['get']}", name
        for option in place.get("also", {}):
            assert option in registry.find("task", name).options_model.model_fields, name


def write_gsm8k(file: Path, n: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"question": f"{i} + 1?", "answer": f"Count.\n#### {i + 1}"} for i in range(n)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


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


def test_a_second_file_comes_from_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_DATA", str(tmp_path))
    (tmp_path / "hh_rlhf").mkdir()
    for split in ("train", "test"):
        dialogues = [f"\n\nHuman: {split} {i}?\n\nAssistant: " for i in range(20)]
        rows = [{"chosen": f"{d}Yes.", "rejected": f"{d}No."} for d in dialogues]
        (tmp_path / "hh_rlhf" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mixed = build_task(Word(name="hh_rlhf", test_share=0.5))
    assert {example.meta["source"] for example in mixed.examples} == {"train", "test"}


def test_what_is_not_there_is_refused_with_where_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("POSTTRAIN_DATA", raising=False)
    with pytest.raises(
        DataNotThere, match=r"no such file.*Where to get it: https://.*gsm8k \(licence: MIT\).*by: curl"
    ):
        gsm8k(path=str(tmp_path / "nothere.jsonl"))
    with pytest.raises(DataNotThere, match=r"task.path: no file is named. .*grade-school-math \(licence: MIT\)"):
        build_task(Word(name="gsm8k_solutions"))
    with pytest.raises(DataNotThere, match=r"no such file.*jsonl reads a file of yours: name it as task.path, or by"):
        jsonl(path=str(tmp_path / "nothere.jsonl"))
