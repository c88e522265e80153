"""One chart maker: what is in a panel's SVG, what a PNG is, and the panels of a sweep."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_report import NASTY, Page

from made_up_items import make_sample
from made_up_trials import make_sweep, make_trial, two_rows
from posttrain.evaluation.items import Item
from posttrain.reports.charts import COLORS, Panel, Series, draw_png, draw_svg
from posttrain.reports.curves import choose_panels
from posttrain.reports.page import render
from posttrain.reports.sweeps import (
    best_of_n_panels,
    head_to_head_panels,
    overoptimization_panels,
    render_sweep,
    sweep_panels,
)
from posttrain.store.metrics import MetricsRow
from posttrain.sweeps.best_of_n import choose
from posttrain.sweeps.learning import TrialResult
from posttrain.sweeps.overoptimization import Point, describe_method


def path_of(svg: str, color: str) -> list[tuple[float, float]]:
    """The points of the line of a colour."""
    lines = re.findall(r'<path d="([^"]+)"[^>]*style="fill: none; stroke: ([^;"]+)', svg)
    (found,) = (points for points, stroke in lines if stroke == color and points.count("L") > 0 and "1.6" not in stroke)
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] ([\d.]+) ([\d.]+)", found)]


def test_draw_svg_line_is_to_scale_and_in_the_colours_of_the_page() -> None:
    panel = Panel("Share", "", [Series("a", [0.0, 5.0, 10.0], [0.0, 0.5, 1.0])], is_share=True, x_range=(0.0, 10.0),
                  y_range=(0.0, 1.0))  # fmt: skip
    svg = draw_svg(panel)
    (x0, y0), (x1, y1), (x2, y2) = path_of(svg, "var(--c0)")
    assert (x1, y1) == (pytest.approx((x0 + x2) / 2), pytest.approx((y0 + y2) / 2))
    assert x2 > x0
    assert y0 > y2  # up is more
    assert [color for color in COLORS.values() if color in svg] == []  # variables of the style sheet, light and dark
    assert "font-family" not in svg


def test_colors_are_those_of_the_style_sheet_in_its_light_form() -> None:
    light = dict(re.findall(r"--(\w+): (#\w{6})", render("style.css").partition("@media")[0]))
    assert {name: light[name] for name in COLORS} == COLORS


def test_draw_svg_texts_are_escaped_and_no_formulas() -> None:
    points = Series(NASTY, [1.0, 2.0], [0.1, 0.2], mark="$x^2$ \x1b[2J", is_points=True)
    svg = draw_svg(Panel(NASTY, NASTY, [points], x_label=NASTY, levels=[(NASTY, 0.15)]))
    page = Page(svg)
    assert "script" not in page.tags
    assert page.words.count("<script>alert('x')</script>") == 3  # series, axis, level
    assert "$x^2$ \\x1b[2J" in page.words


def test_draw_svg_long_lines_are_thinned_but_keep_their_last_point() -> None:
    steps = [float(k) for k in range(10_001)]
    series = Series("a", steps, steps)
    assert len(series.drawn()) <= 402
    assert series.drawn()[-1] == 10_000


def test_draw_png_is_as_large_as_its_panels_and_the_largest_floats_have_no_place(tmp_path: Path) -> None:
    steps = [MetricsRow(k, {"reward": (-1) ** k * 1e308, "loss": 1e308, "entropy": float(k)}) for k in (1, 2, 3)]
    panels = choose_panels(steps)
    assert [series.ys for panel in panels for series in panel.series] == [[1.0, 2.0, 3.0]]
    content = draw_png(panels * 4, "a run", tmp_path / "curves.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")
    assert (width, height) == (round(4.6 * 3 * 130), round((3.3 * 2 + 0.4) * 130))


def panels_of(trials: list[TrialResult]) -> list[Panel]:
    return sweep_panels(make_sweep(trials))


def test_learning_panels_are_numbered_by_rank_and_leave_out_what_did_not_finish() -> None:
    trials = [
        make_trial("a", 0, [0.1, 0.3]),
        make_trial("a", 1, [0.2, 0.5, 0.6]),
        make_trial("b", 0, [0.1, 0.9], "failed"),
        make_trial("c", 0, [0.1, 0.7]),
    ]
    curves, drift = panels_of(trials)
    assert [series.label for series in curves.series] == ["1 c", "2 a"]
    assert (curves.series[0].xs, curves.series[0].ys) == ([0.0, 2.0], [0.1, 0.7])
    band = curves.series[1]  # at the steps that all seeds have
    assert (band.xs, band.ys) == ([0.0, 2.0], pytest.approx([0.15, 0.4]))
    assert (band.low, band.high) == ([0.1, 0.3], [0.2, 0.5])
    assert (drift.series[1].xs, drift.series[1].ys) == ([0.0, 0.05], pytest.approx([0.15, 0.4]))
    assert curves.levels == [("start", 0.1)]
    assert panels_of([make_trial("a", 0, [0.1], "unfinished")]) == []


def test_the_picture_is_drawn_for_twenty_rows(tmp_path: Path) -> None:
    trials = [make_trial(f"m{i}", s, [0.1, 0.2 + i / 40, 0.3 + i / 40]) for i in range(20) for s in (0, 1)]
    panels = panels_of(trials)
    assert draw_png(panels, "many", tmp_path / "sweep.png", columns=2).read_bytes()[:4] == b"\x89PNG"
    svg = draw_svg(panels[0])
    looks = re.findall(r'style="fill: none; (?:stroke-dasharray: ([^;]+); [^"]*?)?stroke: var\(--(c\d)\)', svg)
    assert len(set(looks)) == 20  # no two look alike


def test_overoptimization_panels_have_bands_and_single_seeds() -> None:
    def curve(seed: int) -> list[Point]:
        return [Point(0, 0.0, 0.1, 0.0), Point(5, 1.0, 0.7 + 0.01 * seed, 1.0)]

    best = [Point(1, 0.0, 0.1, 0.0), Point(2, 0.25, 0.3, 0.5)]
    methods = [describe_method("best of n", {0: best}), describe_method("grpo", {0: curve(0), 1: curve(1)})]
    gold, proxy, plane = overoptimization_panels(methods)
    assert [(s.label, s.is_thin) for s in gold.series] == [
        ("best of n", False), ("", True), ("grpo", False), ("", True), ("", True),
    ]  # fmt: skip
    assert gold.series[0].low == []  # one seed has no interval
    assert gold.series[2].ys == pytest.approx([0.1, 0.705])
    assert gold.series[2].high[1] - 0.705 == pytest.approx(12.7062 * 0.005, rel=1e-4)
    assert (plane.series[1].xs, plane.series[1].ys) == ([0.0, 1.0], pytest.approx([0.1, 0.705]))
    assert proxy.series[2].ys == [0.0, 1.0]


def test_best_of_n_and_head_to_head_panels_hold_what_was_measured() -> None:
    samples = tuple(make_sample(o, score=float(i)) for i, o in enumerate("wrrw"))
    choices = choose({"orm": [[Item("made/0", 0, "?", "1", {}, samples)]]})
    (shares,) = best_of_n_panels(choices, 1)
    assert [s.label for s in shares.series] == ["orm", "", "majority", "random pick", "oracle"]
    assert shares.series[3].ys == [0.5, 0.5, 0.5]
    rate, kl = (0.6, 0.5, 0.7), (4.0, 3.0, 5.0)
    rates, plane = head_to_head_panels({"a": {"win_rate": rate, "win_rate_proxy": kl, "reward_judge": rate, "kl": kl}})
    first = rates.series[0]
    assert (first.label, first.ys, first.low, first.high) == ("by the judge", [0.6], [0.5], [0.7])
    assert (plane.series[1].label, plane.series[1].xs, plane.series[1].ys) == ("a", [2.0], [0.6])


def test_the_page_of_a_sweep_is_whole_and_loads_nothing() -> None:
    sweep = two_rows()
    text = render_sweep(sweep, sweep_panels(sweep))
    page = Page(text)
    assert page.open == []
    assert "A <test> of | tables." in page.words
    assert {"script", "img", "a"}.isdisjoint(page.tags)
    assert [value for name, value in page.attributes if name in ("src", "href")] == []
    assert text.count("<svg viewBox=") == 2
    assert page.tags.count("tr") == 1 + 3
    assert page.words.count("50.0 ± 127.1 %") == 1
