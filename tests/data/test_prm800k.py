"""PRM800K: every rated step is learnt once, at the end of the steps that it followed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sample_rows import fake_hub, needs_data, real_file, write_rows

from posttrain.data.steps import prm800k
from posttrain.errors import DataError, UsageError
from posttrain.types import Example, Message, Response
from refusing import refuses

PROBLEM = "What is 2 + 3 + 4?"


def rated(text: str, rating: int | None, **more: Any) -> dict[str, Any]:
    return {"text": text, "rating": rating, "flagged": False} | more


def step(*completions: dict[str, Any], chosen: int | None = None, human: Any = None) -> dict[str, Any]:
    return {"completions": list(completions), "chosen_completion": chosen, "human_completion": human}


def published(*steps: dict[str, Any], finish: str = "solution", **more: Any) -> dict[str, Any]:
    """A row as in the published files."""
    return {
        "generation": None,
        "is_quality_control_question": False,
        "is_initial_screening_question": False,
        "question": {"problem": PROBLEM, "ground_truth_answer": "9"},
        "label": {"steps": list(steps), "finish_reason": finish},
    } | more


HUMAN = {"text": "by hand", "rating": None, "source": "human"}
TREE = published(
    step(rated("a", 1), rated("x", -1), rated("a2", 0), chosen=0),
    step(rated("y", -1), rated("z", None), human=HUMAN),
    step(rated("b", 0), chosen=0),
    step(rated("c", -1), rated("d", 1)),
    finish="found_error",
)


def read(tmp_path: Path, rows: list[dict[str, Any]], **options: Any) -> Any:
    return prm800k(path=write_rows(tmp_path / "x.jsonl", rows), **({"split": "test"} | options))


def paths(example: Example) -> list[tuple[str, tuple[int | None, ...]]]:
    return [(response.text.replace("\n", " "), response.step_labels) for response in example.responses]


def test_a_solution_and_the_candidates_next_to_it(tmp_path: Path) -> None:
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
    assert example.responses[3] == Response("a\ny", 0.0, ("a", "\ny"), (None, 0))
    assert example.meta == {"first_error": 3, "finish": "found_error"}
    assert example.answer is None
    assert task.dropped == {"candidate step without rating": 1}
    assert task.keys["question", "read"] == task.keys["label", "read"] == 1
    with refuses(UsageError, "num_classes"):
        read(tmp_path, [TREE], num_classes=3, neutral="good")


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
        "candidate step without rating": 1,
        "previously rated candidate step": 5,  # a, x, the second b, y behind a, and a once more
        "previously rated candidate step, with a different rating": 1,  # a2
        "solution without newly rated steps": 1,
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
    assert task.dropped == {"candidate step after the solution's last step": 2}
    with refuses(DataError, "quality control solution"):
        read(tmp_path, [published(is_quality_control_question=True)])


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
    fake_hub(monkeypatch, tmp_path, {})
    with refuses(DataError, "phase1_train.jsonl"):
        prm800k()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "q", "completions": []}, "'question' must be an object, like in the published files; got None"),
        (published(step(rated("a", 2), chosen=0)), "'rating' must be −1, 0, 1 or null; got 2"),
        (published(step(rated("a", 1), chosen=1)), "step 1: 'chosen_completion' is 1, but 'completions' has length 1"),
        (published(step("a", chosen=0)), "step 1: completions must be objects"),  # type: ignore[arg-type]
        (published(label={"steps": 3}), "'label' must contain a list 'steps'"),
        (published("a"), "'label.steps' 1 must be an object"),  # type: ignore[arg-type]
        (published(step(rated(5, 1), chosen=0)), "'step 1' must be text"),  # type: ignore[arg-type]
    ],
)
def test_malformed_rows_are_refused_with_their_line(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"x\.jsonl:1: {message}"):
        read(tmp_path, [row])


def test_solutions_that_are_left_out(tmp_path: Path) -> None:
    good = step(rated("a", 1), chosen=0)
    empty = {"completions": None, "human_completion": None, "chosen_completion": None}
    rows = [
        published(good),
        published(good, is_quality_control_question=True),
        published(good, is_initial_screening_question=True, is_quality_control_question=None),
        published(good, finish="bad_problem"),
        published(good, step(rated(" ", 1), chosen=0)),
        published(step(rated("b", 0), rated("c", -1, flagged=True), chosen=0), empty, finish="give_up"),
    ]
    task = read(tmp_path, rows)
    assert [example.id for example in task.examples] == ["prm800k/test/1", "prm800k/test/6"]
    assert paths(task.examples[1]) == [("b", (1,))]
    assert task.dropped == {
        "quality control solution, shown to every labeler": 1,
        "screening solution, shown to every labeler": 1,
        "problem reported as broken by the labeler": 1,
        "blank step": 1,
        "candidate step without rating": 1,
    }


def check_every_step_is_learnt_once(examples: Sequence[Example]) -> None:
    seen: set[tuple[str, str]] = set()
    for example in examples:
        for response in example.responses:
            for index, label in enumerate(response.step_labels):
                key = example.messages[0].content, "".join(response.steps[: index + 1])
                assert label is None or key not in seen, "a rated step is learnt once"
                seen |= {key} if label is not None else set()


@needs_data
def test_real_rows() -> None:
    task = prm800k(path=real_file("prm_format_samples/prm800k"), split="test")
    assert task.dropped["screening solution, shown to every labeler"] == 1
    assert len(task.examples) == 5
    assert {"first_error": 6, "finish": "found_error"} in [example.meta for example in task.examples]
    check_every_step_is_learnt_once(task.examples)


@needs_data
def test_real_rows_of_single_steps() -> None:
    task = prm800k(path=real_file("prm800k/phase1_test"), split="test")
    assert len(task.examples) == 78
    assert task.dropped == {
        "solution without newly rated steps": 5,
        "candidate step without rating": 64,
        "previously rated candidate step": 215,
    }
    labels = Counter(label for e in task.examples for r in e.responses for label in r.step_labels)
    # 1,759 + 663 + 1,552 rated rows, less those that repeat another
    assert labels[1] + labels[0] == 1759 + 663 + 1552 - 215
    three = prm800k(path=real_file("prm800k/phase1_test"), split="test", num_classes=3)
    counts = Counter(label for e in three.examples for r in e.responses for label in r.step_labels)
    assert counts[0] == labels[0]
    assert counts[1] + counts[2] == labels[1]
    check_every_step_is_learnt_once(task.examples)


@pytest.mark.slow
@needs_data
def test_real_rows_of_both_layouts_agree() -> None:
    """The published rows of phase 1 that are at hand are also in the files of one row per step."""
    files = [real_file(f"prm800k/{name}") for name in ("phase1_test", "phase1_train_plus")]
    by_rows = [example for path in files for example in prm800k(path=path, split="test").examples]
    raw = prm800k(path=real_file("prm_format_samples/prm800k"), split="test")
    assert raw.dropped["screening solution, shown to every labeler"] == 1
    found = [(example, other) for example in raw.examples for other in by_rows if other.messages == example.messages]
    assert len(found) == 4
    for example, other in found:
        assert example.responses == other.responses
        assert example.meta["first_error"] == other.meta["first_error"]
    assert [e.meta for e in raw.examples if e not in [pair[0] for pair in found]] == [
        {"first_error": 6, "finish": "found_error"}
    ]


def test_rows_of_single_steps_give_the_same_solution(tmp_path: Path) -> None:
    def candidate(before: list[str], text: str, rating: int | None, **more: Any) -> dict[str, Any]:
        return {"instruction": PROBLEM, "responses": before, "next_response": text, "rating": rating} | more

    first, second = "2+3=5.", "5+4=9, by hand."
    whole = published(
        step(rated(first, 1), rated("2+3=6.", -1), chosen=0),
        step(rated("Hm.", 0), human={"text": second, "rating": None, "source": "human"}),
        step(rated("Nine.\n\n# Answer\n\n9", 1), chosen=0),
    )
    single = [
        candidate([], first, 1, is_preferred_response=True),
        candidate([], "2+3=6.", -1, is_preferred_response=False),
        candidate([first], "Hm.", 0),
        candidate([first], second, None, is_human_response=True, is_preferred_response=True),
        candidate([first, second], "Nine.", 1, is_preferred_response=True, is_solution=True, answer="9"),
        candidate([], "2+3=7.", -1),  # another solution of the same problem
    ]
    (expected,) = read(tmp_path, [whole]).examples
    found, other = read(tmp_path, single).examples
    assert found.responses == expected.responses
    assert found.meta == {"first_error": None}
    assert [response.text for response in other.responses] == ["2+3=7."]
    for wrong, message in ({"rating": 2}, "'rating' must be"), ({"responses": "a"}, "'responses'"):
        with refuses(DataError, message):
            read(tmp_path, [single[0] | wrong])
