"""Figures: panels with lines, points and bars, drawn by matplotlib as inline SVG or PNG."""

from __future__ import annotations

import html
import io
import math
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.evaluation.statistics import Summary
from posttrain.store.durable import storage_errors
from posttrain.untrusted import harmless

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase
    from matplotlib.ticker import Formatter

MAX_POINTS = 400
MAX_DOTS = 40  # of a line whose points are shown
MAX_LABEL = 60  # characters per text in a figure
MAX_NAME = 32  # of a row's name at the axis
LARGEST = 1e100  # larger values cannot be placed on an axis: even differences overflow
# Colors from the style sheet's light theme. In pages they become CSS variables, so figures follow light and dark.
COLORS = {
    "c0": "#2f6fde",
    "c1": "#d9662b",
    "c2": "#2a9d6f",
    "c3": "#9a55c4",
    "c4": "#b8860b",
    "c5": "#00838f",
    "c6": "#ad1457",
    "c7": "#555555",
    "soft": "#626a76",
    "rule": "#e3e1da",
}
INK = "#1d2129"
# matplotlib settings: plain text without formulas, and reproducible output.
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "posttrain", "text.parse_math": False, "font.size": 8,
    "text.color": COLORS["soft"], "xtick.color": COLORS["soft"], "ytick.color": COLORS["soft"],
    "axes.labelcolor": COLORS["soft"], "axes.edgecolor": COLORS["rule"], "axes.axisbelow": True,
    "axes.grid": True, "grid.color": COLORS["rule"], "grid.alpha": 0.6, "grid.linewidth": 0.7,
    "axes.spines.top": False, "axes.spines.right": False, "xtick.major.size": 0, "ytick.major.size": 0,
    "xtick.minor.size": 0, "ytick.minor.size": 0,
}  # fmt: skip
NUM_COLORS = 8  # of lines that look different
Dashes = str | tuple[int, tuple[float, float]]
DASHES: tuple[Dashes, ...] = ("solid", (0, (5, 1.6)), (0, (1.2, 1.3)))
NUM_TOGETHER = 6  # series that stay distinguishable in a panel; with more, each gets a separate panel
PICTURES = (".png", ".svg", ".pdf")
# What one figure says of itself: in a page it would hold for all others, or stand there several times.
_NOISE = re.compile(
    r'<metadata>.*?</metadata>|font-family: [^;]*; |<style type="text/css">.*?</style>| id="[A-Za-z0-9.]+_\d+"',
    re.DOTALL,
)
AxisRange = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A line, or a series of points or bars. ``low`` and ``high`` (95 % intervals) are empty or as long as ``ys``.

    Intervals are drawn as whiskers for points and as bands for lines. ``color``: a key of ``COLORS``, or "" for the
    next unused color. ``mark``: a text at the last point.
    """

    label: str
    xs: list[float]
    ys: list[float]
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    is_points: bool = False
    is_bars: bool = False
    is_dashed: bool = False
    is_thin: bool = False
    color: str = ""
    mark: str = ""

    def drawn(self) -> list[int]:
        """Points to draw: finite ones, thinned out for long series, always including the last."""
        finite = [i for i, value in enumerate(self.ys) if abs(value) < LARGEST]  # NaN is not below it either
        stride = 1
        if not self.is_points and not self.is_bars:
            stride = max(1, math.ceil(len(finite) / MAX_POINTS))
        return sorted({*finite[::stride], *finite[-1:]})


@dataclass(frozen=True)
class Panel:
    """A figure panel: title, caption, series. ``is_share``: values are fractions.

    ``x_label`` adds axis names. Missing ranges and ticks (value, text) are derived from the data; ``log_x`` and
    ``log_y`` select log scales. ``levels``: horizontal reference lines. ``names``: category labels, listed from the
    top; x indexes them.
    """

    title: str
    caption: str
    series: Sequence[Series]
    is_share: bool = False
    x_label: str = ""
    y_label: str = ""
    x_range: AxisRange | None = None
    y_range: AxisRange | None = None
    log_x: bool = False
    log_y: bool = False
    x_ticks: Sequence[tuple[float, str]] = ()
    levels: Sequence[tuple[str, float]] = ()
    has_diagonal: bool = False
    names: Sequence[str] = ()

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in inches, small enough for text to match the page's font size."""
        width = 3.9
        if self.names:
            return width, 0.9 + 0.2 * len(self.names)
        if self.x_label:
            return width, 2.8
        return width, 2.5


def axis_range(panel: Panel) -> AxisRange:
    """Vertical range: 0 to 1 for fractions (less if all are small), otherwise data range plus margin.

    Includes whiskers. Bands widen it at most by the data range: with two seeds they are huge.
    """
    values = [value for _, value in panel.levels]
    bands = []
    for series in panel.series:
        values += series.ys
        bands += [*series.low, *series.high]
        if series.is_points:
            values += [*series.low, *series.high]
        if series.is_bars:
            values.append(0.0)
    values = [value for value in values if abs(value) < LARGEST] or [0.0, 1.0]
    bands = [value for value in bands if abs(value) < LARGEST]
    reach = (max(values) - min(values)) or 1.0
    low = max(min([*values, *bands]), min(values) - reach)
    high = min(max([*values, *bands]), max(values) + reach)
    if panel.is_share and low >= 0:
        if high > 0.25 or high <= 0:
            return 0.0, 1.0
        return 0.0, high * 1.15
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    if 0 <= low < 0.35 * high:
        return 0.0, high + room
    return low - room, high + room


def interval_ends(summaries: Sequence[Summary]) -> tuple[list[float], list[float], list[float]]:
    """Collect means and interval ends, with NaN for missing means. Without any interval, no ends."""
    means = [s.mean for s in summaries]
    halves = [s.half_width or math.nan for s in summaries]
    if all(map(math.isnan, halves)):
        return means, [], []
    low = [mean - half for mean, half in zip(means, halves, strict=True)]
    high = [mean + half for mean, half in zip(means, halves, strict=True)]
    return means, low, high


BACKEND_VARIABLE = "MPLBACKEND"


def _import_matplotlib() -> None:
    """Import matplotlib regardless of ``MPLBACKEND``.

    Notebooks set that variable for child processes that may lack the backend module, and matplotlib then fails to
    import. No backend is required here. A valid setting is restored, so that users' own plots still appear.
    """
    if "matplotlib" in sys.modules:
        return
    backend = os.environ.pop(BACKEND_VARIABLE, "")
    try:
        import matplotlib
    finally:
        if backend:
            os.environ[BACKEND_VARIABLE] = backend
    if backend:
        with suppress(ValueError):
            matplotlib.rcParams["backend"] = backend


@contextmanager
def _settings() -> Iterator[None]:
    """Draw with matplotlib's defaults and ``_SETTINGS``, not with those of the user's own file, and put theirs back."""
    _import_matplotlib()
    from matplotlib import rc_context, rcdefaults, rcParams

    with rc_context():
        rcdefaults()
        rcParams.update(_SETTINGS)
        yield


def draw_svg(panel: Panel) -> str:
    """The panel without title and caption as an ``<svg>`` element of a page; texts are escaped."""
    width, height = panel.size
    target = io.StringIO()
    with _settings():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, height), layout="constrained")
        _draw(figure, panel)
        figure.savefig(target, format="svg", transparent=True, metadata={"Date": None})
    svg = _NOISE.sub("", target.getvalue())
    for name, color in COLORS.items():
        svg = svg.replace(color, f"var(--{name})")
    label = html.escape(harmless(f"{panel.title}: {panel.caption}"))
    inside = svg[svg.index(">", svg.index("<svg")) + 1 :]
    return f'<svg viewBox="0 0 {width * 72:g} {height * 72:g}" role="img" aria-label="{label}">{inside}'


def draw_png(panels: Sequence[Panel], title: str, path: str | Path, columns: int = 3) -> Path:
    """Draw panels in a grid and save them as PNG, or in the format given by the file's suffix.

    Raises:
        StorageError: the file cannot be written.
    """
    assert panels, "nothing to plot: no series has a number"
    columns = min(columns, len(panels))
    heights = []
    for start in range(0, len(panels), columns):
        heights.append(max(0.9 + panel.size[1] for panel in panels[start : start + columns]))
    target = Path(path)
    with _settings():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.6 * columns, sum(heights) + 0.4), layout="constrained")
        figure.suptitle(harmless(title), fontsize=13, fontweight="bold", color=INK)
        grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
        for index, panel in enumerate(panels):
            part = figure.add_subfigure(grid[divmod(index, columns)])
            caption = textwrap.fill(harmless(panel.caption).replace("`", ""), 74)  # a picture has no markup
            _draw(part, panel).set_title(caption, loc="left", fontsize=7.5, color=COLORS["soft"])
            part.suptitle(harmless(panel.title), x=0.02, ha="left", fontsize=10, fontweight="bold", color=INK)
        with storage_errors(target.name, target):
            figure.savefig(target, dpi=130, facecolor="white")
    return target


def nth_color(index: int) -> str:
    """Return a name among ``COLORS`` for the n-th of several lines; after the last the first comes again."""
    return f"c{index % NUM_COLORS}"


def _short(text: str) -> str:
    return harmless(text)[:MAX_LABEL]


def _draw(figure: FigureBase, panel: Panel) -> Axes:
    """Draw a single panel on its own figure, with legend."""
    axes = figure.subplots()
    for index, series in enumerate(panel.series):
        color = COLORS[series.color or nth_color(index)]
        if series.is_dashed:
            dashes = DASHES[1]
        elif series.color:
            dashes = DASHES[0]
        else:
            dashes = DASHES[index // NUM_COLORS % len(DASHES)]
        _draw_series(axes, series, color, dashes, bool(panel.names))
    for label, value in panel.levels:
        look: dict[str, Any] = {"color": COLORS["soft"], "linewidth": 0.9, "linestyle": (0, (3, 4)), "zorder": 1}
        if panel.names:
            axes.axvline(value, **look)
        elif math.isfinite(value):
            axes.axhline(value, **look)
            where: dict[str, Any] = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
            axes.annotate(_short(label), (1, value), xytext=(-2, 3), ha="right", **where).set_in_layout(False)
    _draw_axes(axes, panel)
    named = [series for series in panel.series if series.label]
    if len(named) > 1 or (named and (panel.x_label or named[0].is_points)):
        ncols = 2
        if max(len(series.label) for series in named) < 14:
            ncols = 3
        figure.legend(loc="outside lower left", ncols=ncols, frameon=False, fontsize=7.5)
    return axes


def _draw_series(axes: Axes, series: Series, color: str, dashes: Dashes, is_flat: bool) -> None:
    drawn = series.drawn()
    xs = [series.xs[i] for i in drawn]
    ys = [series.ys[i] for i in drawn]
    low = [series.low[i] for i in drawn if series.low]
    high = [series.high[i] for i in drawn if series.high]
    look: dict[str, Any] = {"color": color, "label": _short(series.label) or "_nolegend_"}
    if series.is_bars:
        width = 0.92 * min((b - a for a, b in pairwise(xs)), default=1.0)
        if is_flat:
            axes.barh(xs, ys, width, alpha=0.6, **look)
        else:
            axes.bar(xs, ys, width, alpha=0.6, **look)
    elif series.is_points or len(drawn) < 2:
        size = 16
        if color == COLORS["soft"]:
            size = 5
        below = [max(0.0, y - end) for y, end in zip(ys, low, strict=False)]
        above = [max(0.0, end - y) for y, end in zip(ys, high, strict=False)]
        whiskers: dict[str, Any] = {"fmt": "none", "ecolor": color, "elinewidth": 1.2, "capsize": 2}
        if is_flat:
            axes.scatter(ys, xs, s=size, zorder=3, clip_on=False, **look)
            if low:
                axes.errorbar(ys, xs, xerr=[below, above], **whiskers)
        else:
            axes.scatter(xs, ys, s=size, zorder=3, clip_on=False, **look)
            if low:
                axes.errorbar(xs, ys, yerr=[below, above], **whiskers)
    else:
        dots = None
        if len(drawn) <= MAX_DOTS and not series.is_thin:
            dots = "o"
        width = 1.6
        alpha = None
        if series.is_thin:
            width = 0.6
            alpha = 0.4
        axes.plot(xs, ys, linestyle=dashes, marker=dots, markersize=2.6, linewidth=width, alpha=alpha, **look)
        if low:
            axes.fill_between(xs, low, high, color=color, alpha=0.14, linewidth=0)
    if series.mark and drawn:
        where: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(_short(series.mark), (xs[-1], ys[-1]), color=color, **where).set_in_layout(False)


def show_tick(value: float) -> str:
    """Format an axis number: ``−1,500``, ``0.25``. Only very large and very small ones use an exponent."""
    is_plain = value == 0 or 1e-4 <= abs(value) < 1e7
    if is_plain:
        text = f"{value:,.10g}"
    else:
        text = re.sub("e[+]?(-?)0*", r"e\1", f"{value:.3g}")
    return text.replace("-", "\N{MINUS SIGN}")


def _draw_axes(axes: Axes, panel: Panel) -> None:
    """Scales, ranges, ticks and labels."""
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    if panel.log_x:
        axes.set_xscale("log")
    if panel.log_y:
        axes.set_yscale("log")
    low, high = panel.y_range or axis_range(panel)
    if panel.is_share and panel.y_range is None:
        high = high * 1.03
    value_format: Formatter = FuncFormatter(lambda value, _: show_tick(value))
    if panel.is_share:
        value_format = PercentFormatter(1.0)
    x_label = panel.x_label
    if not x_label and not panel.names:
        x_label = "step"
    axes.set(xlabel=_short(x_label), ylabel=_short(panel.y_label))
    if panel.names:
        axes.set(xlim=(low, high), ylim=(len(panel.names) - 0.5, -0.5))
        axes.yaxis.set_ticks(range(len(panel.names)), [_short(name)[:MAX_NAME] for name in panel.names])
        axes.xaxis.set_major_formatter(value_format)
        return
    axes.set_ylim(low, high)
    if panel.x_range is not None:
        axes.set_xlim(*panel.x_range)
    if panel.has_diagonal:
        start = max(axes.get_xlim()[0], low)
        end = min(axes.get_xlim()[1], high)
        axes.axline((start, start), (end, end), color=COLORS["soft"], linestyle=(0, (3, 4)))
    axes.yaxis.set_major_formatter(value_format)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: show_tick(value)))
    axes.minorticks_off()
    if panel.x_ticks:
        axes.xaxis.set_ticks([value for value, _ in panel.x_ticks], [_short(label) for _, label in panel.x_ticks])
    elif not panel.log_x and all(float(x).is_integer() for series in panel.series for x in series.xs):
        axes.locator_params("x", integer=True)  # steps are integers
