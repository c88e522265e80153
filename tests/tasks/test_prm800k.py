"""PRM800K: every rated step is learnt once, at the end of the steps that it followed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from given_rows import fake_hub, needs_data, real_file, write_rows
from test_prm800k_layouts import candidate, published, rated, step

from posttrain.errors import DataError, UsageError
from posttrain.tasks.steps.prm800k import prm800k
from posttrain.types import Example, Message, Response

HUMAN = {"text": "by hand", "rating": None, "source": "human"}
TREE = published(
    step(rated("a", 1), rated("x", -1), rated("a2", 0), chosen=0),
    step(rated("y", -1), rated("z", None), human=HUMAN),
    step(rated("b", 0), chosen=0),
    step(rated("c", -1), rated("d", 1)),
    finish="found_error",
)


def read(tmp_path: Path, rows: list[dict[str, Any]], **options: Any) -> Any:
    return prm800k(path=write_rows(tmp_path / "x.jsonl", rows), **({"split": "test", "step_separator": " "} | options))


def paths(example: Example) -> list[tuple[str, tuple[int | None, ...]]]:
    return [(response.text, response.step_labels) for response in example.responses]


def test_a_solution_and_the_candidates_beside_it(tmp_path: Path) -> None:
    task = read(tmp_path, [TREE])
    (example,) = task.examples
    assert (example.id, example.messages) == ("prm800k/test/1", (Message("user", "What is 2 + 3 + 4?"),))
    assert paths(example) == [
        ("a by hand b c", (1, None, 1, 0)),  # chosen, written by the labeller, chosen, the first error
        ("x", (0,)),
        ("a2", (1,)),
        ("a y", (None, 0)),
        ("a by hand b d", (None, None, None, 1)),
    ]
    assert [response.score for response in example.responses] == [0.0, 0.0, 1.0, 0.0, 1.0]
    assert example.responses[3] == Response("a y", 0.0, ("a", " y"), (None, 0))
    assert example.meta == {"first_error": 3, "finish": "found_error"}
    assert example.answer is None
    assert task.dropped == {"a candidate step without a rating": 1}


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({}, [1, None, 1, 0]),
        ({"neutral": "good"}, [1, None, 1, 0]),
        ({"neutral": "bad"}, [1, None, 0, 0]),
        ({"num_classes": 3}, [2, None, 1, 0]),
    ],
)
def test_classes(tmp_path: Path, options: dict[str, Any], labels: list[int | None]) -> None:
    (example,) = read(tmp_path, [TREE], **options).examples
    assert list(example.responses[0].step_labels) == labels
    assert example.meta["first_error"] == 3  # of the ratings, whatever the classes


def test_without_alternatives(tmp_path: Path) -> None:
    task = read(tmp_path, [TREE], alternatives=False)
    assert [len(example.responses) for example in task.examples] == [1]
    assert task.dropped == {}
    with pytest.raises(UsageError, match="with num_classes 3 leave it out"):
        read(tmp_path, [TREE], num_classes=3, neutral="good")


def test_a_step_that_was_rated_before_has_no_label_again(tmp_path: Path) -> None:
    """Labellers continued the same beginnings; a step behind other steps is another step."""
    again = published(
        step(rated("a", 1), rated("x", -1), rated("a2", 1), chosen=0),
        step(rated("b", 1), rated("b", 1), rated("y", -1), rated("x", -1), chosen=0),
    )
    nothing_new = published(step(rated("a", 1), chosen=0))
    task = read(tmp_path, [TREE, again, nothing_new])
    assert [example.id for example in task.examples] == ["prm800k/test/1", "prm800k/test/2"]
    assert paths(task.examples[1]) == [("a b", (None, 1)), ("a x", (None, 0))]
    assert task.examples[1].meta == {"first_error": None, "finish": "solution"}
    assert task.dropped == {
        "a candidate step without a rating": 1,
        "a candidate step that was rated before": 5,  # a, x, the second b, y behind a, and a once more
        "a candidate step that was rated before, with another rating": 1,  # a2
        "a solution that adds no rated step": 1,
    }
    # another problem's steps are other steps
    other = published(step(rated("a", 1), chosen=0), question={"problem": "Other?"})
    assert len(read(tmp_path, [TREE, other]).examples) == 2


def test_an_error_in_the_middle_keeps_its_label(tmp_path: Path) -> None:
    """Else the solution behind it would pass for one without an error."""
    wrong = published(step(rated("x", -1), chosen=0), step(rated("b", 1), chosen=0))
    (_, second) = read(tmp_path, [published(step(rated("a", 1), rated("x", -1), chosen=0)), wrong]).examples
    assert paths(second) == [("x b", (0, 1))]
    assert second.meta["first_error"] == 0


def test_the_end_of_a_solution(tmp_path: Path) -> None:
    unrated = published(step(rated("a", 1), chosen=0), step(rated("b", None), rated("c", 1)), finish="give_up")
    (example,) = read(tmp_path, [unrated]).examples
    assert paths(example) == [("a", (1,)), ("a c", (None, 1))]
    behind = published(step(rated("a", -1)), step(rated("b", 1), rated("c", 1), chosen=0))
    task = read(tmp_path, [behind])
    assert paths(task.examples[0]) == [("a", (0,))]
    assert task.dropped == {"a candidate step behind one that nothing goes on from": 2}
    with pytest.raises(DataError, match="no row can be used: 1 × a quality-control solution"):
        read(tmp_path, [published(is_quality_control_question=True)])


def test_splits_by_problem(tmp_path: Path) -> None:
    rows = [candidate([], f"step {i}", 1) | {"instruction": f"problem {i % 20}"} for i in range(60)]
    train, validation = (read(tmp_path, rows, split=s, validation_share=0.3).examples for s in ("train", "validation"))
    sides = [{example.messages for example in side} for side in (train, validation)]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 20
    assert len(train) + len(validation) == 60


def test_from_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("POSTTRAIN_DATA", raising=False)

    def asking(problem: str) -> dict[str, Any]:
        return published(step(rated("a", 1), chosen=0), question={"problem": problem})

    files = {
        f"tasksource/PRM800K/phase{phase}_{split}.jsonl": [asking(f"{phase} {split} {i}") for i in range(2)]
        for phase in (1, 2)
        for split in ("train", "test")
    }
    fake_hub(monkeypatch, tmp_path, files)
    for split in ("train", "test"):
        examples = prm800k(split=split, validation_share=0.0).examples  # type: ignore[arg-type]
        expected = {f"prm800k/{split}/phase{p}/{i + 1}": f"{p} {split} {i}" for p in (1, 2) for i in range(2)}
        assert {example.id: example.messages[0].content for example in examples} == expected
    with pytest.raises(DataError, match=r"hub:no/such/phase1_train.jsonl: cannot be loaded"):
        prm800k(hub="no/such")


@needs_data
def test_real_rows() -> None:
    task = prm800k(path=real_file("prm800k/phase1_test"), split="test")
    assert len(task.examples) == 78
    assert task.dropped == {
        "a solution that adds no rated step": 5,
        "a candidate step without a rating": 64,
        "a candidate step that was rated before": 215,
    }
    labels = Counter(label for e in task.examples for r in e.responses for label in r.step_labels)
    # 1,759 + 663 + 1,552 rated rows, less those that repeat another
    assert labels[1] + labels[0] == 1759 + 663 + 1552 - 215
    three = prm800k(path=real_file("prm800k/phase1_test"), split="test", num_classes=3)
    counts = Counter(label for e in three.examples for r in e.responses for label in r.step_labels)
    assert counts[0] == labels[0]
    assert counts[1] + counts[2] == labels[1]
    seen: set[tuple[str, str]] = set()
    for example in task.examples:
        for response in example.responses:
            for index, label in enumerate(response.step_labels):
                key = example.messages[0].content, "".join(response.steps[: index + 1])
                assert label is None or key not in seen, "a rated step is learnt once"
                if label is not None:
                    seen.add(key)


@needs_data
def test_real_rows_of_both_layouts_agree() -> None:
    """The published rows of phase 1 that are at hand are also in the files of one row per step."""
    files = [real_file(f"prm800k/{name}") for name in ("phase1_test", "phase1_train_plus")]
    by_rows = [example for path in files for example in prm800k(path=path, split="test").examples]
    raw = prm800k(path=real_file("prm_format_samples/prm800k"), split="test")
    assert raw.dropped["a screening solution, given to every labeller"] == 1
    found = [(example, other) for example in raw.examples for other in by_rows if other.messages == example.messages]
    assert len(found) == 4
    for example, other in found:
        assert example.responses == other.responses
        assert example.meta["first_error"] == other.meta["first_error"]
    assert [e.meta for e in raw.examples if e not in [pair[0] for pair in found]] == [
        {"first_error": 6, "finish": "found_error"}
    ]
