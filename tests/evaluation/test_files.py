"""The files of an evaluation: what is known again, what is refused, what a hash tells."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from made_up_items import make_item, make_items
from posttrain.errors import DataError, UsageError
from posttrain.evaluation.files import (
    finished_before,
    folder_of_its_own,
    read_finished,
    refuse_other,
    settings_replaced,
    weights_mark,
    write_evaluation,
)
from posttrain.evaluation.generation import Evaluation
from posttrain.evaluation.items import Item, write_items
from refusing import refuses

SETTINGS = {"model": "tiny", "samples": 2, "ks": (1, 2)}


def write(folder: Path, items: list[Item], settings: dict[str, Any] = SETTINGS) -> None:
    evaluation = Evaluation("sums/test", {"n": 2.0}, [], items, {"level": {}}, {"generate_seconds": 0.5})
    write_evaluation(folder, settings, evaluation, lambda one, settings, environment: f"{one.name} {settings['ks']}")


def test_a_finished_evaluation_leaves_three_files(tmp_path: Path) -> None:
    items = make_items(["rw", "rr"])
    write(tmp_path, items)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["items.jsonl", "results.json", "summary.md"]
    assert (tmp_path / "summary.md").read_text() == "sums/test (1, 2)"
    finished = read_finished(tmp_path)
    assert (finished.evaluation, finished.results, finished.items()) == ("sums/test", {"n": 2.0}, items)
    assert (finished.label, finished.kinds, finished.timing) == ("tiny", {"level": {}}, {"generate_seconds": 0.5})


def test_a_trial_counts_as_finished_with_the_same_settings_alone(tmp_path: Path) -> None:
    assert finished_before(tmp_path, SETTINGS) is None
    (tmp_path / "results.json").write_text(
        '{"evaluation": "sums/test", "results": {"n": 1.0}, "settings": {"samples": 2, "model": "tiny", "ks": [1, 2]}}'
    )
    assert finished_before(tmp_path, SETTINGS) is not None
    assert finished_before(tmp_path, SETTINGS | {"samples": 3}) is None


def test_runs_and_models_are_not_overwritten(tmp_path: Path) -> None:
    refuse_other(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with refuses(UsageError, "already contains"):
        refuse_other(tmp_path)


def test_the_mark_of_weights_follows_the_files(tmp_path: Path) -> None:
    assert weights_mark("some/hub-name") is None
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    first = weights_mark(str(tmp_path))
    assert first == weights_mark(str(tmp_path))
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    assert weights_mark(str(tmp_path)) != first


def test_the_place_of_a_server_does_not_decide_about_answers(tmp_path: Path) -> None:
    here, there, other = (
        SETTINGS | {"engine": {"name": "vllm", "url": url, "checkpoint": model}}
        for url, model in (("http://a:1", "m"), ("http://b:2", "m"), ("http://a:1", "n"))
    )
    write(tmp_path, make_items(["rw"]), settings=here)
    assert settings_replaced(tmp_path, there) == []
    assert settings_replaced(tmp_path, other) == ["engine"]


def test_what_is_replaced_is_named(tmp_path: Path) -> None:
    assert settings_replaced(tmp_path / "nothing", SETTINGS) == []
    write(tmp_path, make_items(["rw"]))
    assert settings_replaced(tmp_path, SETTINGS) == []
    assert settings_replaced(tmp_path, {"model": "tiny", "samples": 3, "ks": (1, 3)}) == ["samples", "ks"]
    finished = '{"evaluation": "sums/test", "results": {"n": 1.0}, "settings": {"samples": 2, "ks": [1, 3]}}'
    (tmp_path / "results.json").write_text(finished)
    assert settings_replaced(tmp_path, {"samples": 2, "ks": (1, 3)}) == []
    assert settings_replaced(tmp_path, {"samples": 2, "ks": (1, 2)}) == ["ks"]
    (tmp_path / "results.json").write_text("[]")  # does not tell
    assert settings_replaced(tmp_path, SETTINGS) == []


def test_files_other_settings_keep_their_folder(tmp_path: Path) -> None:
    wanted = tmp_path / "sums-test"
    own = SETTINGS | {"weights": "aa"}
    assert folder_of_its_own(wanted, {"": own}) == wanted
    for name, left in (("", {"samples": 3}), ("-2", {"samples": 4}), ("-3", own)):
        folder = tmp_path / f"sums-test{name}"
        folder.mkdir()
        (folder / "results.json").write_text(json.dumps({"measured": "pairs", "settings": SETTINGS | left}))
    assert folder_of_its_own(wanted, {"": own}) == tmp_path / "sums-test-3"
    newer = own | {"weights": "bb", "checkpoint": "c", "model": "runs/tiny"}
    assert folder_of_its_own(wanted, {"": newer}) == tmp_path / "sums-test-3"  # the same question
    assert folder_of_its_own(wanted, {"": own | {"n": 5}}) == tmp_path / "sums-test-4"
    (wanted / "one").mkdir()
    (wanted / "one" / "results.json").write_text(json.dumps({"settings": own}))
    assert folder_of_its_own(wanted, {"one": own, "two": own}) == wanted  # a table, interrupted or made again
    assert folder_of_its_own(wanted, {"one": own | {"n": 5}, "two": own}) == tmp_path / "sums-test-2"


def test_other_kinds_of_results_are_named(tmp_path: Path) -> None:
    kinds = (
        ({"measured": "pairs"}, r"reward-model results \(pairs\).*`posttrain evaluate RM_A RM_B`"),
        ({"a": "sft", "b": "tiny"}, r"\(--against\) already compare sft and tiny.*`posttrain evaluate --compare A B`"),
    )
    for own, message in kinds:
        content = {"evaluation": "sums/test", "results": {"n": 1.0}, "settings": {}} | own
        (tmp_path / "results.json").write_text(json.dumps(content))
        with pytest.raises(DataError, match=message):
            read_finished(tmp_path)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"results": "good"}, "results"),
        ({"settings": {"template": {}}}, r"settings\.template\._Template\.name"),
        ({"settings": {"samples": 0}}, r"settings\.samples"),
        ({"settings": {"label": ["\x1b[31m"]}}, r"settings\.label"),
        ({"kinds": []}, "kinds"),
        ({"timing": {"seconds": "many"}}, r"timing\.seconds"),
    ],
)
def test_results_that_no_evaluation_writes(changes: dict[str, Any], where: str, tmp_path: Path) -> None:
    content = {"evaluation": "sums/test", "results": {"n": 1.0}, "settings": {"label": "a", "ks": [1]}}
    (tmp_path / "results.json").write_text(json.dumps(content))
    assert read_finished(tmp_path).label == "a"
    (tmp_path / "results.json").write_text(json.dumps(content | changes))
    with pytest.raises(DataError, match=rf"invalid evaluation results \({where}: "):
        read_finished(tmp_path)


def test_items_have_as_many_answers_as_the_settings_say(tmp_path: Path) -> None:
    content = {"evaluation": "sums/test", "results": {"n": 2.0}, "settings": {"samples": 2}}
    (tmp_path / "results.json").write_text(json.dumps(content))
    write_items([make_item(0, "rw"), Item("x/1", 1, "long", None)], tmp_path / "items.jsonl")
    assert [len(item.samples) for item in read_finished(tmp_path).items()] == [2, 0]
    write_items([make_item(0, "rw"), make_item(1, "rwr")], tmp_path / "items.jsonl")
    with refuses(DataError, "items.jsonl:2"):
        read_finished(tmp_path).items()


@pytest.mark.parametrize("name", ["results.json", "items.jsonl"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(name: str, tmp_path: Path) -> None:
    content = {"evaluation": "sums/test", "results": {"n": 1.0}, "settings": {}}
    (tmp_path / "results.json").write_text(json.dumps(content))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with refuses(DataError, "not a regular file"):
        read_finished(tmp_path).items()
