from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sample_rows import write_rows

from posttrain.cli import main
from posttrain.data.columns import read_format
from posttrain.data.jsonl import jsonl
from posttrain.data.preferences import preferences
from posttrain.data.reading import Row
from posttrain.errors import DataError, RecipeError
from refusing import refuses

ARTICLE = "Iron is a metal. Wood is not."


def unshown(folder: Path, rows: list[dict[str, Any]], task: Any = jsonl, **options: Any) -> str:
    lines = task(path=write_rows(folder / "x.jsonl", rows), split="all", **options).warnings
    found = [line for line in lines if "does not show" in line]
    assert len(found) <= 1
    return found[0].partition(": ")[2].partition(". ")[0] if found else ""


def rows_with(*values: Any, key: str = "article") -> list[dict[str, Any]]:
    return [{"question": f"{n} + 1?", "answer": str(n + 1), key: value} for n, value in enumerate(values)]


@pytest.mark.parametrize(
    "value",
    [
        ARTICLE,
        "It rained.",
        "one two three four five words",
        ["It rained.", "It poured."],
        "铁是一种金属，木头不是金属。",
    ],
)
def test_text_column_that_the_prompt_does_not_show_is_named(tmp_path: Path, value: Any) -> None:
    assert unshown(tmp_path, rows_with(value)) == "article"


@pytest.mark.parametrize(
    "value",
    [
        7,
        0.5,
        True,
        "train/7",
        "https://example.org/a/b",
        "high school physics",
        "2024-01-01",
        ["algebra", "easy"],
        {"a": 1},
    ],
)
def test_numbers_ids_and_labels_are_carried_along_without_a_word(tmp_path: Path, value: Any) -> None:
    assert unshown(tmp_path, rows_with(value)) == ""
    path = tmp_path / "x.jsonl"
    assert jsonl(path=path, split="all").examples[0].meta == {"article": value}


def test_labels_of_many_words_that_repeat_are_no_text(tmp_path: Path) -> None:
    label = "Harvard and MIT Mathematics Tournament February"
    assert unshown(tmp_path, rows_with(*[label] * 4)) == ""
    assert unshown(tmp_path, rows_with(*[ARTICLE] * 4)) == "article"  # questions about one text


def test_column_whose_text_the_prompt_has_is_shown(tmp_path: Path) -> None:
    row = {"prompt": f"{ARTICLE}\n\nWhich is a metal?", "answer": "iron", "article": ARTICLE}
    assert unshown(tmp_path, [row]) == ""
    assert unshown(tmp_path, [{**row, "prompt": "Which is a metal?"}]) == "article"


@pytest.mark.parametrize("written", ["{article}\n\n{question}", "{article}\\n\\n{prompt}"])
def test_prompt_format_shows_a_column_and_meta_silences_the_line(tmp_path: Path, written: str) -> None:
    rows = rows_with(ARTICLE)
    assert unshown(tmp_path, rows, prompt_format=written) == ""
    (example,) = jsonl(path=tmp_path / "x.jsonl", split="all", prompt_format=written).examples
    assert (example.messages[-1].content, example.meta) == (f"{ARTICLE}\n\n0 + 1?", {})
    assert unshown(tmp_path, rows, meta=["article"]) == ""
    (example,) = jsonl(path=tmp_path / "x.jsonl", split="all", meta=["article"]).examples
    assert (example.messages[-1].content, example.meta) == ("0 + 1?", {"article": ARTICLE})


def test_prompt_format_without_the_question_names_it_as_unshown(tmp_path: Path) -> None:
    assert (
        unshown(
            tmp_path,
            [{"question": "Which one is it?", "answer": "iron", "article": ARTICLE}],
            prompt_format="{article}",
        )
        == "question"
    )


def test_prompt_format_is_the_prompt_of_rows_without_a_question(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.jsonl", [{"article": ARTICLE, "summary": "Iron."}])
    (example,) = jsonl(path=path, split="all", prompt_format="Sum up:\n{article}", answer_key="summary").examples
    assert (example.messages[-1].content, example.answer) == (f"Sum up:\n{ARTICLE}", "Iron.")


def test_prompt_format_reads_a_key_that_is_refused_without_it(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.jsonl", [{"prompt": "When?", "context": "In 1900.", "answer": "1900"}])
    with refuses(DataError, "task.prompt_format"):
        jsonl(path=path, split="all")
    (example,) = jsonl(path=path, split="all", prompt_format="{context}\n\n{prompt}").examples
    assert example.messages[-1].content == "In 1900.\n\nWhen?"


@pytest.mark.parametrize(
    "written", ["{article", "{article.__class__}x{0[1]}", "no column", "{article!r}", "{}", "{a:>9}"]
)
def test_prompt_format_that_is_more_than_names_is_refused(tmp_path: Path, written: str) -> None:
    path = write_rows(tmp_path / "x.jsonl", rows_with(ARTICLE))
    with refuses((RecipeError, DataError), "task.prompt_format"):
        jsonl(path=path, split="all", prompt_format=written)


def test_prompt_format_braces_written_twice_are_text() -> None:
    form = read_format("{{x}} {a}")
    assert form is not None
    assert form.fill(Row("place", 1, {"a": "{b}"}), None) == "{x} {b}"


@pytest.mark.parametrize("option", [{"meta": ["artices"]}, {"prompt_format": "{artices} {question}"}])
def test_name_of_a_column_that_is_not_there_is_refused_with_the_nearest(tmp_path: Path, option: dict[str, Any]) -> None:
    path = write_rows(tmp_path / "x.jsonl", [{"question": "1 + 1?", "answer": "2", "articles": ARTICLE}])
    with refuses((RecipeError, DataError), "'articles'"):
        jsonl(path=path, split="all", **option)


def test_preferences_name_show_and_silence_columns_too(tmp_path: Path) -> None:
    rows = [{"prompt": "Sum up.", "article": ARTICLE, "chosen": "a", "rejected": "b"}]
    assert unshown(tmp_path, rows, preferences) == "article"
    assert unshown(tmp_path, rows, preferences, meta=["article"]) == ""
    path = tmp_path / "x.jsonl"
    (example,) = preferences(path=path, split="all", prompt_format="{article}\n\n{prompt}").examples
    assert example.messages[-1].content == f"{ARTICLE}\n\nSum up."


def test_commands_and_python_name_the_columns_that_no_prompt_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_rows(tmp_path / "x.jsonl", rows_with(*(f"Iron {n} is a metal. Wood is not." for n in range(30))))
    named = ["--task", "jsonl", "--task.path", path]
    for words in (
        ["generate", "tiny", *named, "--max-tokens", "2"],
        ["evaluate", "tiny", *named, "--max-tokens", "2", "--limit", "2"],
        ["train", "tiny/grpo", *named, "--dry-run"],
    ):
        assert main(words) == 0
        output = capsys.readouterr()
        assert (output.out + output.err).count("columns that the prompt does not show: article") == 1, words
        assert main([*words, "--task.meta", "[article]"]) == 0
        output = capsys.readouterr()
        assert "does not show" not in output.out + output.err, words
