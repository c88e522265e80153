"""Tables and pages of evaluations: every cell by hand."""

from __future__ import annotations

from made_up_items import make_items
from posttrain.evaluation.generation import Evaluation
from posttrain.evaluation.items import Item, break_down, summarize
from posttrain.evaluation.tables import ResultsRow, kind_tables, notes_on, results_table, to_markdown
from posttrain.reports.evaluation_page import write_page

RESULTS = {
    "n": 50.0, "num_graded": 50.0, "samples": 1.0, "accuracy": 0.21, "accuracy_low": 0.1, "accuracy_high": 0.333,
    "format": 0.5, "parse_failures": 0.25, "truncated": 0.04, "completion_length": 17.6,
}  # fmt: skip
BETTER = RESULTS | {"accuracy": 0.62, "accuracy_low": 0.5, "accuracy_high": 0.71}
UNGRADED = RESULTS | {"num_graded": 0.0, "accuracy": 0.0, "accuracy_low": 0.0, "accuracy_high": 1.0}


def test_one_line_for_each_template() -> None:
    table = results_table(
        [ResultsRow("m", "plain", "math/test", RESULTS), ResultsRow("m", "boxed", "math/test", BETTER)]
    )
    assert table.title == "math/test, n = 50"
    assert table.header == [
        "model", "template", "accuracy", "95 % interval", "format", "no answer", "truncated", "completion length"
    ]  # fmt: skip
    assert table.lines == [
        ["m", "plain", "21.0%", "10.0% – 33.3%", "50.0%", "25.0%", "4.0%", "18"],
        ["m", "boxed", "62.0%", "50.0% – 71.0%", "50.0%", "25.0%", "4.0%", "18"],
    ]


def test_what_one_row_lacks_is_a_dash_and_what_all_lack_no_column() -> None:
    several = RESULTS | {"samples": 4.0, "shows_reasoning": 0.1, "pass@1": 0.3, "pass@4": 0.6, "majority@4": 0.25}
    table = results_table([ResultsRow("a", None, "x", several), ResultsRow("b", None, "x", RESULTS)])
    assert table.title == "x, n = 50, 4 answers to each"
    assert table.header[:6] == ["model", "accuracy", "95 % interval", "pass@4", "majority@4", "format"]
    assert table.lines[0][3:5] == ["60.0%", "25.0%"]
    assert table.lines[1][3:5] == ["–", "–"]


def test_nothing_graded_is_no_accuracy_of_zero() -> None:
    row = ResultsRow("m", "plain", "free/test", UNGRADED)
    assert results_table([row]).lines == [["m", "plain", "–", "–", "50.0%", "–", "4.0%", "18"]]
    assert "not graded" in notes_on([row], {})[0]


def test_what_a_reader_must_know() -> None:
    bad = RESULTS | {
        "num_graded": 40.0, "prompts_too_long": 3.0, "grading_failures": 0.02, "truncated": 0.31, "unscored": 0.1
    }  # fmt: skip
    notes = notes_on([ResultsRow("m", None, "x/test", bad)], {"x/test": {"no answer": 2, "too long": 0}})
    assert notes == [
        "x/test · m: 10 items without a gold answer are excluded from accuracy",
        "x/test · m: 3 prompts exceed the model's context and count as wrong",
        "x/test · m: 2.0% of answers: grading timed out or crashed",
        "x/test · m: 31.0% of answers were truncated; raise --max-tokens",
        "x/test · m: 10.0% of answers could not be scored and rank last",
        "x/test: dropped rows: 2 no answer",
    ]


def test_each_limit_is_reported_with_what_moves_it() -> None:
    played = RESULTS | {"truncated": 0.5, "out_of_turns": 0.25, "tool_failed": 0.125}
    assert notes_on([ResultsRow("m", None, "x/test", played)], {}) == [
        "x/test · m: 12.5% of answers were truncated; raise --max-tokens",
        "x/test · m: 25.0% of answers reached the turn limit (rollout.max_turns)",
        "x/test · m: 12.5% of answers ended by a tool timeout (rollout.tool_seconds)",
    ]


def make_evaluation() -> Evaluation:
    items = make_items(["r", "w", "n", "r"])
    for index, item in enumerate(items):
        item.meta["level"] = index % 2
    items.append(Item("made/4", 4, "Long | one\nwith ``` in it", "9", {"level": 0}))
    results = summarize(items) | {"prompts_too_long": 1.0, "seconds": 2.0}
    timing = {"generate_seconds": 2.0, "score_seconds": 0.5, "generated_tokens": 40.0}
    return Evaluation("made/test", results, [], items[2:], break_down(items), timing)


def test_the_page_of_one_evaluation() -> None:
    settings = {"model": "tiny", "template": {"name": "boxed", "preamble": "x"}, "ks": [], "dropped": {"bad": 2}}
    page = write_page(make_evaluation(), settings, {"versions": {"python": "3.11", "peft": None}})
    assert page.startswith("# made/test: tiny\n")
    assert "| tiny | boxed | 40.0% |" in page
    assert "- made/test · tiny · boxed: 1 prompts exceed the model's context" in page
    assert "- made/test: dropped rows: 2 bad" in page
    assert "## By level" in page
    assert "| 1 | 2 | 50.0% |" in page
    assert "- template: name boxed, preamble x" in page
    assert "ks:" not in page
    assert "- timing: generate_seconds 2.0" in page
    assert "- versions: python 3.11" in page
    assert "````\nLong | one\nwith ``` in it\n````" in page  # no text of the data ends its block
    assert "The prompt does not fit" in page


def test_markdown_keeps_its_columns() -> None:
    (table,) = kind_tables(
        {"sub|ject": {"a\nb": {"n": 2.0, "accuracy": 0.5, "accuracy_low": 0.1, "accuracy_high": 0.9}}}
    )
    assert to_markdown(table).splitlines() == [
        r"## By sub\|ject",
        "",
        "| sub\\|ject | n | accuracy | 95 % interval |",
        "| --- | ---: | ---: | ---: |",
        "| a b | 2 | 50.0% | 10.0% – 90.0% |",
    ]
