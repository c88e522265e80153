"""Every picture: panels of lines, points and bars, drawn by matplotlib as SVG within a page or as a PNG file."""

from __future__ import annotations

import html
import io
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from posttrain.store.durable import storage_errors
from posttrain.untrusted import harmless

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_POINTS = 400
LARGEST = 1e100  # a value beyond has no place on an axis: not even its distance to another is a number
# The colours of the style sheet in its light form. In a page they become its variables, so they follow light and dark.
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
NUM_COLORS = 8  # of lines that can be told apart
DASHES: tuple[str | tuple[float, tuple[float, ...]], ...] = ("solid", (0, (5, 1.6)), (0, (1.2, 1.3)))
LEGEND_COLUMNS = 3
DPI = 100
NUM_BELOW = 6  # of series whose legend lies below the panel; of more it lies on the right
COLUMNS = 3
PICTURES = (".png", ".svg", ".pdf")
_NOISE = re.compile(
    r"<metadata>.*?</metadata>|font-family: [^;]*; |<style type=\"text/css\">.*?</style>|"
    r" id=\"(?:figure|axes|patch|line2d|text|legend|"
    r"matplotlib\.axis|[xy]tick|PathCollection|FillBetweenPolyCollection|LineCollection)_?\d*\"",
    re.DOTALL,
)
Range = tuple[float, float]
Ticks = Sequence[tuple[float, str]]


@dataclass(frozen=True)
class Series:
    """One line, one row of points or of bars. ``low`` and ``high`` (95 % intervals) are empty or as long as ``ys``.

    An interval is a whisker at a point and a band about a line. ``has_dots``: the line's points are shown too.
    ``color``: one of ``COLORS``; "" for the next one. ``notes``: what a page says of points that are pointed at; empty
    for their numbers. ``mark``: a text at the last point.
    """

    label: str
    xs: list[float]
    ys: list[float]
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    is_points: bool = False
    is_bars: bool = False
    has_dots: bool = False
    is_dashed: bool = False
    is_thin: bool = False
    color: str = ""
    notes: list[str] = field(default_factory=list)
    mark: str = ""

    def drawn(self) -> list[int]:
        """The points that are drawn: those with a number, and of a long line every so many and the last."""
        finite = [i for i, value in enumerate(self.ys) if abs(value) < LARGEST]  # NaN is not below it either
        stride = 1 if self.is_points or self.is_bars else max(1, -(-len(finite) // MAX_POINTS))
        return sorted({*finite[::stride], *finite[-1:]})

    def note(self, i: int, is_share: bool) -> str:
        """The text of point ``i``: where it lies, and its interval."""
        if self.notes:
            return self.notes[i]
        show = ".1%" if is_share else ".4g"
        interval = f" [{self.low[i]:{show}}, {self.high[i]:{show}}]" if self.low else ""
        return f"{self.label}, {self.xs[i]:g}: {self.ys[i]:{show}}{interval}"


@dataclass(frozen=True)
class Panel:
    """One picture: its title, what to look for, its series. ``is_share``: values are shares of one.

    With ``x_label`` it is larger and its axes are named. Ranges and ticks (value, text) that are not set follow from
    the values; ``log_x`` and ``log_y`` spread powers evenly. ``levels``: values drawn as lines across. ``max_band``:
    how far intervals may widen the axis, in extents of the values. ``size``: ``wide`` takes a row of its own.
    """

    title: str
    caption: str
    series: Sequence[Series]
    is_share: bool = False
    x_label: str = ""
    y_label: str = ""
    x_range: Range | None = None
    y_range: Range | None = None
    log_x: bool = False
    log_y: bool = False
    x_ticks: Ticks = ()
    y_ticks: Ticks = ()
    levels: Sequence[tuple[str, float]] = ()
    has_diagonal: bool = False
    max_band: float = math.inf
    size: Literal["", "wide"] = ""


def axis_range(panel: Panel) -> Range:
    """The vertical extent: 0 to 1 for shares (less where all are small), else the values with a little room.

    Intervals widen it by ``max_band`` of the values' own extent at most.
    """
    values = [v for s in panel.series for v in s.ys] + [value for _, value in panel.levels]
    values = [value for value in values if abs(value) < LARGEST]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    bands = [v for s in panel.series for v in (*s.low, *s.high) if abs(v) < LARGEST]
    reach = panel.max_band * ((high - low) or 1.0)
    low = min([low, *(max(value, low - reach) for value in bands)])
    high = max([high, *(min(value, high + reach) for value in bands)])
    if panel.is_share and low >= 0:
        return 0.0, 1.0 if high > 0.25 or high <= 0 else high * 1.15
    if low > 0 and low < 0.35 * high:
        low = 0.0
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (low if low == 0 else low - room), high + room


def draw_svg(panel: Panel) -> str:
    """The panel without title and caption as an ``<svg>`` element of a page; texts are escaped."""
    from matplotlib.figure import Figure

    width, height = (9.4, 4.4) if panel.size == "wide" else (5.2, 3.1) if panel.x_label else (4.4, 2.4)
    num_labels = len(_labelled(panel))
    rows = -(-num_labels // LEGEND_COLUMNS) if num_labels <= NUM_BELOW else 0
    height += 0.17 * rows
    below = 0.43 + 0.17 * rows + (0.45 if _is_crowded(panel) else 0.0)
    notes: list[str] = []
    target = io.StringIO()
    with _settings():
        figure = Figure(figsize=(width, height))
        left, right = (0.7 if panel.y_label else 0.5), (1.7 if num_labels > NUM_BELOW else 0.12)
        figure.subplots_adjust(left / width, below / height, 1 - right / width, 1 - 0.1 / height)
        _draw(figure.subplots(), panel, notes)
        figure.savefig(target, format="svg", transparent=True, metadata={"Date": None})
    svg = _NOISE.sub("", target.getvalue()[target.getvalue().index("<svg") :])
    svg = re.sub(
        r'<a xlink:href="note:(\d+)"[^>]*>', lambda m: f"<g><title>{html.escape(notes[int(m[1])])}</title>", svg
    )
    svg = svg.replace("</a>", "</g>")
    for name, color in COLORS.items():
        svg = svg.replace(color, f"var(--{name})")
    label = html.escape(harmless(f"{panel.title}: {panel.caption}"))
    return (
        f'<svg viewBox="0 0 {width * 72:g} {height * 72:g}" role="img" aria-label="{label}">{svg[svg.index(">") + 1 :]}'
    )


def _labelled(panel: Panel) -> list[Series]:
    """The series of the legend; none where one line says it all."""
    named = [series for series in panel.series if series.label]
    return named if len(named) > 1 or (named and (panel.x_label or named[0].is_points)) else []


def _is_crowded(panel: Panel) -> bool:
    return len(panel.x_ticks) > 4 and max(len(label) for _, label in panel.x_ticks) > 8


def draw_png(panels: Sequence[Panel], title: str, path: str | Path, columns: int = COLUMNS) -> Path:
    """Draw the panels in a grid and save them as PNG, or as what the name's ending says.

    Raises:
        StorageError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    assert panels, "without numbers there is no picture"
    columns = min(columns, len(panels))
    places, row, column = [], 0, 0
    for panel in panels:
        span = columns if panel.size == "wide" else 1
        row, column = (row + 1, 0) if column + span > columns else (row, column)
        places.append((row, slice(column, column + span)))
        column += span
    target = Path(path)
    with _settings():
        wide, high = 4.6 * columns, 3.3 * (row + 1) + 0.4
        has_list = any(len(_labelled(panel)) > NUM_BELOW for panel in panels)  # beside a panel, as wide as its names
        figure = Figure(figsize=(wide, high), layout="constrained" if has_list else None)
        figure.suptitle(harmless(title), y=1 - 0.12 / high, va="top", fontsize=13, fontweight="bold", color=INK)
        grid = figure.add_gridspec(row + 1, columns, wspace=0.19, hspace=0.7)
        if not has_list:
            figure.subplots_adjust(0.6 / wide, 0.75 / high, 1 - 0.15 / wide, 1 - 1.05 / high)
        for panel, place in zip(panels, places, strict=True):
            axes = figure.add_subplot(grid[place])
            caption = textwrap.fill(harmless(panel.caption), 74 if panel.size != "wide" else 180)
            axes.set_title(
                harmless(panel.title),
                loc="left",
                fontsize=10,
                fontweight="bold",
                color=INK,
                pad=16 + 9.5 * caption.count("\n"),
            )
            above: dict[str, Any] = {
                "xytext": (0, 4),
                "textcoords": "offset points",
                "fontsize": 7.5,
                "color": COLORS["soft"],
            }
            axes.annotate(caption, (0, 1), xycoords="axes fraction", va="bottom", **above)
            _draw(axes, panel, [])
        with storage_errors(target.name, target):
            figure.savefig(target, dpi=130, facecolor="white")
    return target


@contextmanager
def _settings() -> Iterator[None]:
    """Settings of matplotlib: text stays text without formulas, and the same numbers give the same picture."""
    import matplotlib as mpl

    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "posttrain", "text.parse_math": False}
    settings |= {f"{what}.color": COLORS["soft"] for what in ("text", "xtick", "ytick")}
    settings |= {"axes.labelcolor": COLORS["soft"], "axes.edgecolor": COLORS["rule"], "font.size": 8}
    with mpl.rc_context({**settings, "figure.dpi": DPI}):
        yield


def _draw(axes: Axes, panel: Panel, notes: list[str]) -> None:
    """Draw a panel. ``notes`` gains the text of each point, which its link names by number."""
    for index, series in enumerate(panel.series):
        color = COLORS[series.color or f"c{index % NUM_COLORS}"]
        _draw_series(
            axes, panel, series, color, DASHES[1 if series.is_dashed else index // NUM_COLORS % len(DASHES)], notes
        )
    for label, value in panel.levels:
        if math.isfinite(value):
            axes.axhline(value, color=COLORS["soft"], linewidth=0.9, linestyle=(0, (3, 4)), zorder=1)
            where = axes.get_yaxis_transform()
            axes.annotate(
                harmless(label), (1, value), xycoords=where, xytext=(-2, 3), textcoords="offset points", ha="right"
            )
    if panel.log_x:
        axes.set_xscale("log")
    if panel.log_y:
        axes.set_yscale("log")
    low, high = panel.y_range or axis_range(panel)
    axes.set_ylim(low, high * 1.03 if panel.is_share and panel.y_range is None else high)
    if panel.x_range is not None:
        axes.set_xlim(*panel.x_range)
    if panel.has_diagonal:
        axes.axline(
            (max(axes.get_xlim()[0], low),) * 2,
            (min(axes.get_xlim()[1], high),) * 2,
            color=COLORS["soft"],
            linestyle=(0, (3, 4)),
        )
    _draw_frame(axes, panel)
    num_labels = len(_labelled(panel))
    if num_labels:
        inches = axes.bbox.height / DPI
        is_below = num_labels <= NUM_BELOW
        place = (0.0, -0.43 / inches) if is_below else (1.01, 1.02)
        axes.legend(
            loc="upper left",
            bbox_to_anchor=place,
            ncols=LEGEND_COLUMNS if is_below else 1,
            frameon=False,
            fontsize=7.5,
            borderpad=0.0,
            borderaxespad=0.0,
        )


def _draw_series(
    axes: Axes,
    panel: Panel,
    series: Series,
    color: str,
    dashes: str | tuple[float, tuple[float, ...]],
    notes: list[str],
) -> None:
    drawn = series.drawn()
    xs, ys = [series.xs[i] for i in drawn], [series.ys[i] for i in drawn]
    label = harmless(series.label) or "_nolegend_"
    low, high = ([bound[i] for i in drawn] if bound else [] for bound in (series.low, series.high))
    if series.is_bars:
        width = min((right - left for left, right in pairwise(xs)), default=1.0)
        axes.bar(xs, ys, width=width * 0.92, align="center", color=color, alpha=0.6, label=label)
        return
    has_line = not series.is_points and len(drawn) > 1
    if has_line:
        width = 0.6 if series.is_thin else 1.6
        axes.plot(
            xs, ys, color=color, linewidth=width, linestyle=dashes, alpha=0.4 if series.is_thin else 1, label=label
        )
        if low:
            axes.fill_between(xs, low, high, color=color, alpha=0.14, linewidth=0)
    if not has_line or series.has_dots:
        if not has_line and low:
            reach = [
                [max(0.0, y - a) for y, a in zip(ys, low, strict=True)],
                [max(0.0, b - y) for y, b in zip(ys, high, strict=True)],
            ]
            axes.errorbar(xs, ys, reach, fmt="none", ecolor=color, elinewidth=1.2, capsize=2)
        urls = [f"note:{len(notes) + place}" for place in range(len(drawn))]
        notes += [harmless(series.note(i, panel.is_share)) for i in drawn]
        size = 5 if color == COLORS["soft"] else 9 if has_line else 16
        axes.scatter(xs, ys, s=size, color=color, zorder=3, clip_on=False, urls=urls, label=None if has_line else label)
    if series.mark and drawn:
        axes.annotate(
            harmless(series.mark), (xs[-1], ys[-1]), xytext=(4, 0), textcoords="offset points", va="center", color=color
        )


def _draw_frame(axes: Axes, panel: Panel) -> None:
    """Ticks, labels and light axes."""
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    axes.yaxis.set_major_formatter(
        PercentFormatter(1.0) if panel.is_share else FuncFormatter(lambda value, _: f"{value:g}")
    )
    if all(float(x).is_integer() for series in panel.series for x in series.xs) and not panel.log_x:
        axes.locator_params("x", integer=True)  # there are no halves of steps
    for axis, ticks in ((axes.xaxis, panel.x_ticks), (axes.yaxis, panel.y_ticks)):
        if ticks:
            axis.set_ticks([value for value, _ in ticks], [harmless(label) for _, label in ticks])
            axis.minorticks_off()
    if _is_crowded(panel):
        axes.tick_params("x", labelrotation=30)
    axes.set(xlabel=harmless(panel.x_label or "step"), ylabel=harmless(panel.y_label))
    axes.grid(alpha=0.6, color=COLORS["rule"], linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines[["top", "right"]].set_visible(False)
