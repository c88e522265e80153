"""A panel of fixed prompts: asked at every evaluation, recorded, shown, and the same after a resume."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import posttrain as pt
from posttrain.errors import RecipeError, UsageError
from posttrain.recipes.panel_prompts import MAX_PROMPT_CHARS, MAX_PROMPTS, PANEL, read_panel
from posttrain.recipes.recipe import Recipe, validate_recipe
from posttrain.reports.summary import spread_steps
from posttrain.store.rollouts import RolloutStore
from refusing import refuses
from small_runs import BASE, make_recipe, run

PROMPTS = ["What is 3 plus 4?", "Tom has 2 apples and finds 5. How many has he?"]


def recipe_of(kind: str = "sft", **changes: Any) -> Recipe:
    evaluation = {"every": 2, "num_examples": 2, "max_tokens": 8, "prompts": PROMPTS} | changes
    train = {"steps": 4, "lr": 1e-2, "save_every": 1, "keep_checkpoints": 9}
    return make_recipe(kind, train=train, eval=evaluation)


def answers_of(folder: Path) -> list[tuple[int, str, str, tuple[int, ...]]]:
    rows = RolloutStore(folder / "rollouts.db", read_only=True).evaluations(PANEL)
    return [(row.step, row.example_id, row.completion, row.token_ids) for row in rows]


def others_of(folder: Path) -> list[tuple[object, ...]]:
    """Everything else that is recorded of sampled answers, and the trained weights."""
    store = RolloutStore(folder / "rollouts.db", read_only=True)
    rows = [row for row in [*store.training(), *store.evaluations()] if row.evaluation != PANEL]
    recorded: list[tuple[object, ...]] = [(row.step, row.token_ids, row.mean_sampler_logprob) for row in rows]
    for step in range(1, 5):
        recorded.append(((folder / f"checkpoints/step-{step:06}/model.safetensors").read_bytes(),))
    return recorded


@pytest.mark.parametrize(("kind", "temperature"), [("sft", 0.0), ("grpo", 1.0)])
def test_panel_is_answered_at_every_evaluation_and_changes_nothing_else(
    tmp_path: Path, kind: str, temperature: float
) -> None:
    options = {"temperature": temperature}
    run(tmp_path / "whole", recipe_of(kind, **options))
    answers = answers_of(tmp_path / "whole")
    expected = [(step, f"panel/{number}") for step in (0, 2, 4) for number in range(2)]
    assert [(step, name) for step, name, _, _ in answers] == expected
    assert len({ids for _, name, _, ids in answers if name == "panel/0"}) > 1  # training changes the answer
    run(tmp_path / "without", recipe_of(kind, prompts=[], **options))
    assert answers_of(tmp_path / "without") == []
    assert others_of(tmp_path / "whole") == others_of(tmp_path / "without")
    for stop in (1, 2, 3):
        folder = tmp_path / f"stopped-{stop}"
        run(folder, recipe_of(kind, **options), stop_after=stop)
        run(folder, recipe_of(kind, **options), resume=True)
        assert answers_of(folder) == answers


def test_report_shows_the_panel_by_step_and_no_raw_text(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"steps": 2, "eval__every": 1, "eval__num_examples": 2, "eval__max_tokens": 8}
    file = tmp_path / "prompts.txt"
    hostile = "<script>alert(1)</script> {{ 7 * 7 }}"
    file.write_text(f"{PROMPTS[0]}\n{hostile}\n", encoding="utf-8")
    keys |= {"data__batch_size": 2, "eval__prompts": str(file)}
    done = pt.train("tiny/sft", runs_dir=tmp_path / "runs", progress=False, **keys)
    assert done.recipe["eval"]["prompts"] == [PROMPTS[0], hostile]  # the run has the prompts, not the file
    page = done.report.read_text(encoding="utf-8")
    part = page[page.index("The same prompts over training") :]
    part = part[: part.index("<h2>", 10)]
    assert part.count(PROMPTS[0]) == 1
    for label in ("before training", "after 1 steps", "after 2 steps"):
        assert part.count(label) == 2
    assert "&lt;script&gt;" in part
    assert "<script>alert" not in page
    assert "{{ 7 * 7 }}" in part
    assert [row.step for row in done.rollouts(evaluation=PANEL)] == [0, 0, 1, 1, 2, 2]
    assert [row.example_id for row in done.rollouts(2, evaluation=PANEL)] == ["panel/0", "panel/1"]
    without = pt.train("tiny/sft", runs_dir=tmp_path / "runs", progress=False, **keys | {"eval__prompts": []})
    assert "The same prompts over training" not in without.report.read_text(encoding="utf-8")
    with refuses(UsageError, PANEL):
        without.rollouts(evaluation=PANEL)


def test_shown_steps_include_the_first_and_the_last() -> None:
    assert spread_steps(set()) == []
    assert spread_steps({4, 0, 2}) == [0, 2, 4]
    assert spread_steps(range(0, 101, 10)) == [0, 20, 40, 60, 80, 100]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"every": 0}, ["'every'"]),
        ({"prompts": ["What?", " \n"]}, ["eval.prompts", "prompt 1", "blank"]),
        ({"prompts": ["x"] * (MAX_PROMPTS + 1)}, ["eval.prompts", f"{MAX_PROMPTS + 1}", f"{MAX_PROMPTS}"]),
        ({"prompts": ["x" * (MAX_PROMPT_CHARS + 1)]}, ["eval.prompts", "prompt 0", f"{MAX_PROMPT_CHARS + 1:,}"]),
        ({"prompts": "What is 3 plus 4?"}, ["eval.prompts", "What is 3 plus 4?", "file"]),
        ({"prompts": "[What is 3 plus 4?]"}, ["eval.prompts", "quotes"]),
        ({"prompts": "."}, ["eval.prompts", "folder"]),
        ({"prompts": 7}, ["eval.prompts", "7"]),
        ({"prompts": [7]}, ["eval.prompts", "7"]),
        ({"prompts": [{"role": "user", "content": "Hi"}]}, ["eval.prompts"]),
    ],
)
def test_panel_that_cannot_be_asked_is_refused_by_name(change: Mapping[str, Any], named: list[str]) -> None:
    with refuses(RecipeError, "eval", *named):
        recipe_of(**change)


@pytest.mark.parametrize(
    ("name", "text", "prompts"),
    [
        ("p.txt", "\ufeffWhat is 1 plus 1?\nAnd 2 plus 2?\n", ["What is 1 plus 1?", "And 2 plus 2?"]),
        ("p.json", json.dumps(["a\nb", {"prompt": "c"}]), ["a\nb", "c"]),
        ("p.jsonl", '{"prompt": "a", "answer": 1}\n"b"\n', ["a", "b"]),
        ("p.jsonl", '\n{"prompt": "a\u2028b"}\r\n\n"c\x85d"\n', ["a\u2028b", "c\x85d"]),
        ("p.txt", "one\x0ctwo\u2028three\r\nfour\n\n", ["one\x0ctwo\u2028three", "four"]),
    ],
)
def test_prompts_of_a_file_are_its_lines_or_rows(tmp_path: Path, name: str, text: str, prompts: list[str]) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert read_panel(str(tmp_path / name)) == prompts


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("p.txt", b"", "empty"),
        ("p.txt", b"one\n\ntwo\n", "prompt 1"),
        ("p.txt", b"\xff\xfe\x00", "UTF-8"),
        ("p.txt", b"x\n" * (MAX_PROMPTS + 1), str(MAX_PROMPTS)),
        ("p.txt", b"x" * 20_000_000, "larger"),
        ("p.json", b'{"prompt": "a"}', "list"),
        ("p.json", b"[" * 100_000, "p.json"),
        ("p.json", b'["\\ud800"]', "prompt 0"),
        ("p.jsonl", b'{"prompt": "a"}\n{"question": "b"}\n', "prompt 1"),
        ("p.jsonl", b"not json", "line 1"),
        ("p.jsonl", b'"a"\n\nnot json', "line 3"),
        ("p.jsonl", b'{"prompt": "a", "prompt": "b"}', "'prompt' twice"),
        ("p.jsonl", b'{"prompt": "a", "id": ' + b"9" * 5_000 + b"}", "5,000 digits"),
        ("p.jsonl", b'{"prompt": "a", "system": "Be brief."}', "'system'"),
        ("p.json", b'[{"prompt": "a", "tools": [{"name": "f"}]}]', "'tools'"),
        ("p.txt", b"\n\n", "empty"),
        ("p.csv", b"prompt\na\n", ".csv"),
    ],
)
def test_file_that_holds_no_panel_is_refused_by_name(tmp_path: Path, name: str, content: bytes, named: str) -> None:
    (tmp_path / name).write_bytes(content)
    with refuses(RecipeError, "eval.prompts", name, named):
        read_panel(str(tmp_path / name))


def test_stored_recipe_opens_no_file_of_prompts(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a\n", encoding="utf-8")
    stored = BASE["sft"] | {"eval": {"every": 1, "prompts": str(tmp_path / "p.txt")}}
    recipe = validate_recipe(stored, is_own=False)
    assert recipe.resolve(to_read=True).eval.prompts == str(tmp_path / "p.txt")
    assert recipe.resolve().eval.prompts == ["a"]


def test_prompt_longer_than_the_context_is_refused_by_its_number(tmp_path: Path) -> None:
    with refuses(RecipeError, "eval.prompts.1", "tokens"):
        run(tmp_path, recipe_of(prompts=["What is 1 plus 1?", "word " * 3000]))


def test_panel_of_a_run_that_plays_or_scores_is_refused() -> None:
    with refuses(RecipeError, "eval.prompts", "environment"):
        make_recipe("grpo", environment="calculator", eval={"every": 1, "prompts": PROMPTS})
    with refuses(UsageError, "eval.prompts", "reward model"):
        pt.train("tiny/rm", eval__prompts=PROMPTS, progress=False)
