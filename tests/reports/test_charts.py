"""One chart maker: what is in a panel's SVG, what a PNG is, and the panels of a sweep."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_report import NASTY, Page

from closeness import approx
from made_up_items import make_sample
from made_up_trials import make_sweep, make_trial, two_rows
from posttrain.evaluation.items import Item
from posttrain.reports.charts import COLORS, Panel, Series, axis_range, draw_png, draw_svg, show_tick
from posttrain.reports.curves import choose_panels
from posttrain.reports.page import render
from posttrain.reports.sweep_page import (
    best_of_n_panels,
    head_to_head_panels,
    learning_panels,
    overoptimization_panels,
    render_sweep,
    sweep_panels,
)
from posttrain.store.metrics import MetricsRow
from posttrain.sweeps.best_of_n import CurvePoint, choose, describe_method
from posttrain.sweeps.learning import TrialResult


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
    assert (x1, y1) == (approx((x0 + x2) / 2), approx((y0 + y2) / 2))
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
    assert (width, height) == (round(4.6 * 3 * 130), round((3.4 * 2 + 0.4) * 130))


@pytest.mark.parametrize(
    ("judged", "unit"),
    [
        ({"pair_accuracy": 0.5, "margin": 0.1}, "pairs"),
        ({"step_accuracy": 0.5}, "labelled steps"),
        ({"outcome_accuracy": 0.5, "answer_accuracy": 0.5}, "scored tokens"),
        ({"answer_accuracy": 0.5}, "answers"),
    ],
)
def test_caption_of_a_loss_names_what_its_objective_judges(judged: dict[str, float], unit: str) -> None:
    def caption(metrics: dict[str, float]) -> str:
        panels = choose_panels([MetricsRow(step, {"loss": 0.7, **metrics}) for step in (1, 2)])
        return next(panel.caption for panel in panels if panel.title == "Loss")

    assert f"over {unit}" in caption(judged)
    assert "log π" not in caption(judged)
    assert "log π" in caption({"nll": 0.7})


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
    assert (band.xs, band.ys) == ([0.0, 2.0], approx([0.15, 0.4]))
    assert (band.low, band.high) == ([0.1, 0.3], [0.2, 0.5])
    assert (drift.series[1].xs, drift.series[1].ys) == ([0.0, 0.05], approx([0.15, 0.4]))
    assert curves.levels == [("start", 0.1)]
    assert panels_of([make_trial("a", 0, [0.1], "unfinished")]) == []


def test_learning_panels_of_many_rows_are_ranked_intervals_and_small_multiples(tmp_path: Path) -> None:
    trials = [make_trial(f"m{i}", s, [0.1, 0.2 + i / 40, 0.3 + i / 40 + s / 50]) for i in range(8) for s in (0, 1)]
    ranked, *alone, drift = panels_of(trials)
    assert ranked.names[:2] == ["1 m7", "2 m6"]
    means = ranked.series[1]
    assert (means.xs[0], means.ys[0]) == (0.0, approx(0.485))
    assert means.high[0] - means.ys[0] == approx(12.7062 * 0.01, rel=1e-4)  # t of one degree, s / √2
    assert [panel.title for panel in alone] == ranked.names
    assert {panel.y_range for panel in alone} == {axis_range(alone[0])}  # one axis for all
    assert [(s.color, s.is_thin) for s in alone[0].series] == [("soft", True)] * 8 + [("c0", False)]
    assert [(len(s.xs), s.mark) for s in drift.series] == [(1, str(n)) for n in range(1, 9)]
    svg = draw_svg(ranked)
    assert all(f">{name}</text>" in svg for name in ranked.names)
    assert draw_png([ranked, *alone], "many", tmp_path / "sweep.png", columns=2).read_bytes()[:4] == b"\x89PNG"


def test_learning_panels_over_a_number_draw_the_result_over_it() -> None:
    trials = [make_trial(name, s, [0.1, last + s / 10]) for name, last in (("b", 0.2), ("a", 0.6)) for s in (0, 1)]
    rows, start, headline, _ = make_sweep(trials).parts["rows"].drawn
    first, *_ = learning_panels(rows, start, headline, ("train.lr", {"a": 1e-4, "b": 1e-2}))
    assert (first.title, first.x_label, first.log_x) == ("Accuracy over train.lr", "train.lr", True)
    assert [label for _, label in first.x_ticks] == ["0.0001", "0.01"]
    seeds, means, line = first.series
    assert sorted(zip(seeds.xs, seeds.ys, strict=True)) == [
        (1e-4, 0.6), (1e-4, approx(0.7)), (1e-2, 0.2), (1e-2, approx(0.3)),
    ]  # fmt: skip
    assert (means.xs, means.ys, line.ys) == ([1e-4, 1e-2], approx([0.65, 0.25]), approx([0.65, 0.25]))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (-1500.0, "−1,500"),
        (1e6, "1,000,000"),
        (0.1 + 0.2, "0.3"),
        (0.0, "0"),
        (-2e-13, "−2e−13"),
        (1e9, "1e9"),
        (1e-5, "1e−5"),
    ],
)
def test_show_tick_has_a_minus_sign_and_no_exponent_for_what_people_read(value: float, shown: str) -> None:
    assert show_tick(value) == shown


def test_draw_svg_bars_begin_at_zero() -> None:
    bars = Panel("x", "", [Series("", [0.0, 1.0], [90.0, 100.0], is_bars=True)], names=["a", "b"])
    assert axis_range(bars)[0] == 0.0


def test_overoptimization_panels_have_bands_and_single_seeds() -> None:
    def curve(seed: int) -> list[CurvePoint]:
        return [CurvePoint(0, 0.0, 0.1, 0.0), CurvePoint(5, 1.0, 0.7 + 0.01 * seed, 1.0)]

    best = [CurvePoint(1, 0.0, 0.1, 0.0), CurvePoint(2, 0.25, 0.3, 0.5)]
    methods = [describe_method("best of n", {0: best}), describe_method("grpo", {0: curve(0), 1: curve(1)})]
    gold, proxy, plane = overoptimization_panels(methods)
    assert [(s.label, s.is_thin) for s in gold.series] == [
        ("best of n", False), ("", True), ("grpo", False), ("", True), ("", True),
    ]  # fmt: skip
    assert gold.series[0].low == []  # one seed has no interval
    assert gold.series[2].ys == approx([0.1, 0.705])
    assert gold.series[2].high[1] - 0.705 == approx(12.7062 * 0.005, rel=1e-4)
    assert (plane.series[1].xs, plane.series[1].ys) == ([0.0, 1.0], approx([0.1, 0.705]))
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
    assert (plane.series[1].mark, plane.series[1].xs, plane.series[1].ys) == ("1", [2.0], [0.6])
    assert rates.names == ["1 a"]


def test_panels_of_more_methods_than_colors_are_drawn() -> None:
    rate = (0.6, 0.5, 0.7)
    rows = {f"m{i}": {"win_rate": rate, "win_rate_proxy": rate, "reward_judge": rate, "kl": rate} for i in range(9)}
    curve = [CurvePoint(0, 0.0, 0.1, 0.0), CurvePoint(5, 1.0, 0.7, 1.0)]
    methods = [describe_method(f"m{i}", {0: curve}) for i in range(9)]
    assert all("<text" in draw_svg(panel) for panel in (*head_to_head_panels(rows), *overoptimization_panels(methods)))


def test_the_page_of_a_sweep_is_whole_and_loads_nothing() -> None:
    sweep = two_rows()
    text = render_sweep(sweep)
    page = Page(text)
    assert page.open == []
    assert "A <test> of | tables." in page.words
    assert {"script", "img", "a"}.isdisjoint(page.tags)
    assert [value for name, value in page.attributes if name in ("src", "href")] == []
    assert text.count("<svg viewBox=") == 2
    assert page.tags.count("tr") == 1 + 3
    assert page.words.count("50.0 ± 127.1%") == 1


def test_the_page_of_a_sweep_follows_the_theme_scrolls_tables_and_ends_with_answers_and_runs() -> None:
    sweep = two_rows()
    talk = "user: Hello.\n\nassistant: Good day.\n\nuser: <b>?"
    samples = [(talk, [("start", "No.", -1500.0), ("grpo", "Yes.", None)])]
    parts = {"rows": replace(sweep.parts["rows"], samples=samples)}
    runs = [("b-seed0", "finished", "70.0% right", "cells/b-seed0/report.html"), ("b-seed1", "failed", "", "")]
    text = render_sweep(replace(sweep, parts=parts, runs=runs))
    body = text.partition("<body")[2]
    assert re.findall(r"(?:fill|stroke): #\w+", body) == []  # every colour is a variable of the style sheet
    assert body.count("<table") == body.count('scroll" tabindex="0"><table') == 2
    assert '<td class="label">b</td>' in body  # a name is not broken
    assert "± 0.0" not in body
    assert body.index("<figure") < body.index("Answers to the first prompts") < body.index("Its runs")
    assert re.findall(r'question turn"><b>(\w+)</b>', body) == ["user", "assistant", "user"]
    assert '<a href="cells/b-seed0/report.html">b-seed0</a>' in body
    assert Page(text).open == []


DRAW_AND_TELL = """
import os, sys
from pathlib import Path
from posttrain.reports.charts import Panel, Series, draw_png, draw_svg
panel = Panel("a", "b", [Series("x", [1.0, 2.0], [1.0, 2.0])])
assert draw_svg(panel).startswith("<svg")
assert draw_png([panel], "title", "a.png").stat().st_size > 1000
assert os.environ.get("MPLBACKEND", "") == sys.argv[1]
import matplotlib
print(matplotlib.get_backend(auto_select=False), matplotlib.rcParams["text.usetex"], matplotlib.rcParams["font.size"])
"""


@pytest.mark.parametrize(
    ("backend", "kept"),
    [
        ("module://matplotlib_inline.backend_inline", "None"),
        ("module://no_such_package.backend", "module://no_such_package.backend"),
        ("no such backend", "None"),
        ("agg", "agg"),
        ("", "None"),
    ],
)
def test_draw_with_any_backend_of_the_surroundings_draws_and_keeps_the_users_own(
    backend: str, kept: str, tmp_path: Path
) -> None:
    """The settings of the user's own file do not matter either: with LaTeX for texts nothing would be drawn."""
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nfont.size: 31\n")
    environment = os.environ | {"MPLBACKEND": backend, "PYTHONPATH": os.pathsep.join(sys.path), "PATH": ""}
    command = [sys.executable, "-c", DRAW_AND_TELL, backend]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [kept, "True", "31.0"]
