from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.ticker import PercentFormatter
from test_report import Page

from made_up_cells import make_cell, make_comparison, two_methods
from posttrain.reports.charts import comparison
from posttrain.reports.charts.comparison import draw_comparison, make_lines, spread_labels
from posttrain.reports.sweeps import (
    make_notes,
    make_table,
    render_comparison,
    show_count,
    show_seconds,
    to_data,
    to_markdown,
)
from posttrain.store.headline import REWARD, choose_headline
from posttrain.store.metrics import MetricsRow
from posttrain.sweeps.comparison import CellResult, Comparison, find_baseline, rank_methods, read_cell


def test_the_table_by_hand() -> None:
    table = make_table(two_methods())
    assert table.header == [
        *("method", "seeds", "right", "over the run", "gain, points", "reward", "training", "sampled", "trained on"),
        *("KL from start", "entropy", "length", "margin"),
    ]
    assert table.lines[0][:3] == ["b", "2", "70.0% ± 0.0"]
    # t(1) · s / √2 with s = 0.1 · √2: 127 points
    assert table.lines[1] == [
        *("a", "2", "50.0% ± 127.1", "35.0% ± 95.3", "+40.0", "0.600", "8.0 s", "400", "320"),
        *("0.100", "0.800", "30.0", "0.400"),
    ]
    assert table.lines[2][:6] == ["start", "–", "10.0% [2.8%, 30.1%]", "–", "–", "0.200"]


def test_notes_say_how_the_interval_was_made() -> None:
    notes = "\n".join(make_notes(two_methods()))
    assert "95 % Student-t interval of the mean over seeds (t = 12.706 for 2 seeds)" in notes
    assert "start: tiny/sft, before the first update, with Wilson's 95 % interval for 20 problems" in notes
    assert "has no interval" not in notes


def test_one_seed_is_said_to_have_no_interval() -> None:
    table = make_table(make_comparison([make_cell("a", 0, [0.1, 0.4])]))
    assert table.lines[0][2] == "40.0%"
    notes = make_notes(make_comparison([make_cell("a", 0, [0.1, 0.4])]))
    assert "A method with one finished seed has no interval." in notes
    assert not any("Student" in note for note in notes)


def test_failed_and_unfinished_cells_are_shown() -> None:
    cells = [
        make_cell("a", 0, [0.1, 0.4]),
        make_cell("a", 1, [0.1, 0.2], "failed", "it was | too hot"),
        make_cell("b", 0, [0.1, 0.2], "unfinished"),
    ]
    comparison = make_comparison(cells)
    table = make_table(comparison)
    assert table.lines[0][:3] == ["a", "1 of 2", "40.0%"]
    assert table.lines[1][:4] == ["b", "0 of 1", "unfinished", "–"]
    assert "a, seed 1: failed after 2 steps: it was | too hot" in make_notes(comparison)
    assert "b, seed 0: unfinished after 2 steps" in make_notes(comparison)
    assert "it was \\| too hot" in to_markdown(comparison)


def test_markdown_has_one_line_per_method_and_all_that_is_needed_to_repeat_it() -> None:
    text = to_markdown(two_methods())
    assert "| b | 2 | 70.0% ± 0.0 | 47.5% ± 31.8 | +60.0 |" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 5  # header, rule, two methods, start
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert "- b (rl/b) differs from the base in: train.lr = 0.1 (base: 0.2)" in text
    assert "- in the method alone (objective, advantage, " in text
    assert "what belongs to them): a (rl/a)" in text
    assert "```\nposttrain compare test.yaml --seeds 2\n```" in text


def test_results_are_plain_json_with_every_cell() -> None:
    data = json.loads(json.dumps(to_data(two_methods()), allow_nan=False))
    assert list(data["methods"]) == ["b", "a"]
    assert data["methods"]["a"]["summaries"]["accuracy"]["mean"] == 0.5
    assert data["methods"]["a"]["cells"][1]["curve"][2]["value"] == 0.6
    assert data["start"]["results"]["accuracy"] == 0.1
    assert data["common"] == {"model": "tiny", "steps": "4"}


@pytest.mark.parametrize(("value", "text"), [(950, "950"), (12_345, "12.3k"), (4_560_000, "4.56M")])
def test_counts(value: float, text: str) -> None:
    assert show_count(value) == text


def test_seconds() -> None:
    assert (show_seconds(9.96), show_seconds(123.4)) == ("10.0 s", "123 s")


def test_the_page_is_whole_and_loads_nothing() -> None:
    page = Page(render_comparison(two_methods(), b"\x89PNG picture"))
    assert page.open == []
    assert "A <test> of | tables." in page.words
    assert "script" not in page.tags
    links = [value for name, value in page.attributes if name in ("src", "href")]
    assert [value[:22] for value in links if value] == ["data:image/png;base64,"]
    assert page.tags.count("tr") == 1 + 3 + 1 + 4 + 2 + 1  # table, cells, common, environment
    assert page.words.count("50.0% ± 127.1") == 1


def test_a_page_without_a_picture() -> None:
    assert "img" not in Page(render_comparison(make_comparison([make_cell("a", 0, [0.1], "unfinished")]), None)).tags


def test_the_picture_is_drawn_for_one_and_for_twenty_methods(tmp_path: Path) -> None:
    for count in (1, 20):
        cells = [make_cell(f"m{i}", s, [0.1, 0.2 + i / 40, 0.3 + i / 40]) for i in range(count) for s in (0, 1)]
        comparison = make_comparison(cells)
        lines = make_lines(comparison)
        assert [line.rank for line in lines] == list(range(1, count + 1))
        assert lines[0].name == f"m{count - 1}"
        assert len({(line.color, str(line.dashes)) for line in lines}) == count  # no two look alike
        path = draw_comparison(comparison, tmp_path / f"{count}.png")
        assert path.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(("shares", "last"), [([0.0, 0.0, 0.0], 0.05), ([0.0, 0.5, 1.0], 1.0)])
def test_no_tick_stands_where_no_share_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: list[float], last: float
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(comparison, "save_picture", lambda figure, path: drawn.append(figure))
    draw_comparison(make_comparison([make_cell("m", seed, shares) for seed in (0, 1)]), tmp_path / "x.png")
    shown = [axes for axes in drawn[0].axes if isinstance(axes.yaxis.get_major_formatter(), PercentFormatter)]
    assert len(shown) == 2  # curves and pace; the third has rewards
    for axes in shown:
        ticks = list(axes.get_yticks())
        assert (ticks[0], ticks[-1]) == (pytest.approx(0.0), pytest.approx(last))
        assert axes.get_ylim()[0] == pytest.approx(-0.01)  # room for the line at zero


def test_methods_without_a_finished_cell_are_not_drawn() -> None:
    cells = [make_cell("a", 0, [0.1, 0.4]), make_cell("b", 0, [0.1, 0.9], "failed", "boom")]
    assert [line.name for line in make_lines(make_comparison(cells))] == ["a"]


def test_labels_keep_their_distance_and_order() -> None:
    assert spread_labels([0.5], 0.1) == [0.5]
    assert spread_labels([0.9, 0.2], 0.1) == [0.9, 0.2]
    # two at the same height move apart by half the distance each, the first one up
    assert spread_labels([0.5, 0.5], 0.1) == pytest.approx([0.55, 0.45])
    # a block at the top stays inside
    assert spread_labels([1.0, 1.0, 1.0], 0.1) == pytest.approx([1.0, 0.9, 0.8])
    places = spread_labels([0.9 - i / 100 for i in range(20)], 0.04)
    gaps = [a - b for a, b in pairwise(places)]
    assert min(gaps) > 0.04 - 1e-9
    assert max(places) <= 1.0
    assert min(places) >= 0.0


def by_reward() -> Comparison:
    """``a`` ends at reward 0.4 with KL 2, ``b`` at 0.9 with KL 8; both start at −0.1."""

    def rows(last: float, kl: float) -> list[MetricsRow]:
        def told(step: int, **results: float) -> MetricsRow:
            facts = {"n": 20.0, "num_graded": 0.0, "format": 1.0, "num_tokens": 9.0} | results
            return MetricsRow(step, {f"eval/hh/test/{name}": value for name, value in facts.items()})

        steps = [MetricsRow(k, {"loss": 0.5, "tokens": 80.0}, {"step_seconds": 2.0}) for k in (1, 2)]
        start = told(0, reward=-0.1, reward_low=-0.2, reward_high=0.0, kl_from_start=0.0)
        return [start, *steps, told(2, reward=last, kl_from_start=kl)]

    cells = [
        read_cell(rows(*at), name, 0, "finished", headline=REWARD)
        for name, at in (("a", (0.4, 2.0)), ("b", (0.9, 8.0)))
    ]
    return replace(
        make_comparison([]),
        rows=rank_methods(cells, ["a", "b"], REWARD),
        baseline=find_baseline(cells, "sft", REWARD),
        differs={"a": [], "b": []},
        sources={"a": "rl/a", "b": "rl/b"},
        headline=REWARD,
    )


def test_without_gold_answers_methods_are_ranked_by_reward(tmp_path: Path) -> None:
    comparison = by_reward()
    table = make_table(comparison)
    assert table.header[:8] == [
        *("method", "seeds", "reward", "over the run", "gain", "training", "sampled", "trained on"),
    ]
    assert table.header.count("reward") == 1
    assert [line[:5] for line in table.lines] == [
        ["b", "1", "0.900", "0.400", "+1.000"],
        ["a", "1", "0.400", "0.150", "+0.500"],
        ["start", "–", "-0.100 [-0.200, 0.000]", "–", "–"],
    ]
    words = Page(render_comparison(comparison, None)).words
    assert "right" not in words.partition("b1")[0].partition("methodseeds")[2]
    assert "<svg" not in render_comparison(comparison, None)  # no bar of a share
    assert "with the 95 % interval for 20 prompts" in "\n".join(make_notes(comparison))
    data = json.loads(json.dumps(to_data(comparison)))
    assert (data["headline"]["metric"], data["methods"]["b"]["cells"][0]["curve"][1]["value"]) == ("reward", 0.9)
    assert draw_comparison(comparison, tmp_path / "comparison.png").stat().st_size > 10_000


def test_where_lower_is_better_the_lowest_is_first_and_a_fall_is_a_gain() -> None:
    loss = choose_headline({"x": {"loss": 2.0}}, named=None, samples=False)
    assert loss is not None

    def cell(name: str, last: float) -> CellResult:
        told = [MetricsRow(step, {"eval/x/loss": value, "eval/x/n": 5.0}) for step, value in ((0, 3.0), (2, last))]
        return read_cell(told, name, 0, "finished", headline=loss)

    rows = rank_methods([cell("a", 2.5), cell("b", 2.0)], ["a", "b"], loss)
    assert [row.name for row in rows] == ["b", "a"]
    assert rows[0].summaries["gain"].mean == 1.0
    baseline = find_baseline([cell("a", 2.5)], "start", loss)
    assert baseline is not None
    assert baseline.interval is None  # nothing is drawn about a start that has none
