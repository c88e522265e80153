"""Charts of a comparison as inline SVG, coloured by the page's own light or dark style."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from posttrain.reports.charts.panels import nice_ticks

WIDTH, HEIGHT = 460.0, 270.0
LEFT, RIGHT, TOP, BOTTOM = 56.0, 14.0, 12.0, 40.0


@dataclass(frozen=True)
class Line:
    """One line with a band: ``low`` and ``high`` are empty or as long as ``ys``. ``color``: one of the page's."""

    label: str
    xs: list[float]
    ys: list[float]
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    color: str = "c0"
    dashed: bool = False


@dataclass(frozen=True)
class Dot:
    """A point of a scatter, with a note that shows when it is pointed at."""

    x: float
    y: float
    note: str
    color: str = "soft"


@dataclass(frozen=True)
class Axes:
    """Where values lie. ``log_x``/``log_y``: powers of two or ten are spread evenly. ``percent``: of y."""

    x_label: str
    y_label: str
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    log_x: bool = False
    log_y: bool = False
    percent: bool = False
    x_ticks: tuple[float, ...] = ()

    def x(self, value: float) -> float:
        return LEFT + _share(value, self.x_range, self.log_x) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - _share(value, self.y_range, self.log_y) * (HEIGHT - TOP - BOTTOM)

    def draw(self) -> str:
        parts = []
        for tick in _ticks(self.y_range, self.log_y):
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{LEFT - 6:g}" y="{y + 3.5:.1f}" text-anchor="end">{self._show(tick)}</text>')
        for tick in self.x_ticks or _ticks(self.x_range, self.log_x):
            x = self.x(tick)
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 24:g}" text-anchor="middle">{tick:g}</text>')
        middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
        parts.append(
            f'<text class="axis" x="{middle:.0f}" y="{HEIGHT - 6:g}" text-anchor="middle">{escape(self.x_label)}</text>'
        )
        parts.append(
            f'<text class="axis" transform="translate(11 {(HEIGHT - BOTTOM + TOP) / 2:.0f}) rotate(-90)" '
            f'text-anchor="middle">{escape(self.y_label)}</text>'
        )
        return "".join(parts)

    def _show(self, value: float) -> str:
        return f"{value * 100:g} %" if self.percent else f"{value:g}"


def line_chart(
    title: str, caption: str, axes: Axes, lines: Sequence[Line], flat: Sequence[tuple[str, float]] = ()
) -> str:
    """Lines with bands; ``flat``: named values drawn as level lines across."""
    parts = [axes.draw()]
    for label, value in flat:
        if math.isfinite(value):
            y = axes.y(value)
            parts.append(f'<line class="flat" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{WIDTH - RIGHT:g}" y="{y - 4:.1f}" text-anchor="end">{escape(label)}</text>')
    for line in lines:
        parts.append(_draw_line(axes, line))
    keys = "".join(f'<span class="key {line.color}">{escape(line.label)}</span>' for line in lines)
    return _figure(title, caption, "".join(parts), f'<div class="legend">{keys}</div>')


def scatter_chart(
    title: str, caption: str, axes: Axes, dots: Sequence[Dot], keys: Sequence[tuple[str, str]], diagonal: bool = False
) -> str:
    """Points; ``keys``: (colour, what it means); ``diagonal``: the line of equal values."""
    parts = [axes.draw()]
    if diagonal:
        low, high = max(axes.x_range[0], axes.y_range[0]), min(axes.x_range[1], axes.y_range[1])
        ends = f'x1="{axes.x(low):.1f}" y1="{axes.y(low):.1f}" x2="{axes.x(high):.1f}" y2="{axes.y(high):.1f}"'
        parts.append(f'<line class="flat" {ends}/>')
    for dot in sorted(dots, key=lambda d: d.color != "soft"):
        radius = 2.2 if dot.color == "soft" else 3.4
        parts.append(
            f'<circle class="dot {dot.color}" cx="{axes.x(dot.x):.1f}" cy="{axes.y(dot.y):.1f}" r="{radius}">'
            f"<title>{escape(dot.note)}</title></circle>"
        )
    legend = "".join(f'<span class="key dot {color}">{escape(text)}</span>' for color, text in keys)
    return _figure(title, caption, "".join(parts), f'<div class="legend">{legend}</div>')


def interval_bars(rows: Sequence[tuple[str, float, float, float]], middle: float = 1.0) -> str:
    """Rows (name, value, low, high) on a scale of ratios, spread as powers of two about ``middle``."""
    values = [v for _, *three in rows for v in three if v and math.isfinite(v)]
    reach = max([math.log2(max(v / middle, middle / v)) for v in values if v > 0] + [1.0])
    reach = min(reach, 6.0)
    height, width, left = 22.0, 760.0, 150.0

    def x(value: float) -> float:
        spread = max(-reach, min(reach, math.log2(max(value, 1e-9) / middle)))
        return left + (spread / reach + 1) / 2 * (width - left - 20)

    parts = []
    bottom = height * len(rows) + 8
    for power in range(-int(reach), int(reach) + 1):
        at = x(middle * 2.0**power)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{bottom:.0f}"/>')
        label = f"{2**power:g}x" if power >= 0 else f"1/{2**-power}"
        parts.append(f'<text x="{at:.1f}" y="{bottom + 14:.0f}" text-anchor="middle">{label}</text>')
    for index, (name, value, low, high) in enumerate(rows):
        y = height * index + height / 2 + 4
        color = "c1" if value > middle else "c0"
        parts.append(f'<text x="{left - 10:g}" y="{y + 4:.0f}" text-anchor="end">{escape(name)}</text>')
        if math.isfinite(low) and math.isfinite(high):
            parts.append(f'<line class="whisker {color}" x1="{x(low):.1f}" x2="{x(high):.1f}" y1="{y:g}" y2="{y:g}"/>')
        note = f"{name}: {value:.3g} [{low:.3g}, {high:.3g}]"
        parts.append(
            f'<circle class="dot {color}" cx="{x(value):.1f}" cy="{y:g}" r="4"><title>{escape(note)}</title></circle>'
        )
    return (
        f'<div class="panel"><svg viewBox="0 0 {width:g} {bottom + 20:.0f}" role="img" aria-label="ratios">'
        f"{''.join(parts)}</svg></div>"
    )


def span_of(values: Sequence[float], *, zero: bool = False) -> tuple[float, float]:
    """A range for an axis with a little room, from finite values; ``zero``: it holds 0."""
    finite = [v for v in values if math.isfinite(v)] + ([0.0] if zero else [])
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return low - (0 if zero and low == 0 else room), high + room


def _draw_line(axes: Axes, line: Line) -> str:
    kept = [i for i, y in enumerate(line.ys) if math.isfinite(y)]
    places = [(axes.x(line.xs[i]), axes.y(line.ys[i])) for i in kept]
    parts = []
    if line.low:
        edge = [(axes.x(line.xs[i]), axes.y(line.low[i])) for i in kept]
        edge += [(axes.x(line.xs[i]), axes.y(line.high[i])) for i in reversed(kept)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in edge)
        parts.append(f'<polygon class="band {line.color}" points="{points}"/>')
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dashes = ' stroke-dasharray="5 4"' if line.dashed else ""
    parts.append(f'<polyline class="line {line.color}"{dashes} points="{points}"/>')
    for i, (x, y) in zip(kept, places, strict=True):
        note = f"{line.label}, {line.xs[i]:g}: {line.ys[i]:.4g}"
        parts.append(
            f'<circle class="dot {line.color}" cx="{x:.1f}" cy="{y:.1f}" r="2.8"><title>{escape(note)}</title></circle>'
        )
    return "".join(parts)


def _figure(title: str, caption: str, inner: str, legend: str) -> str:
    head = f"<figcaption><b>{escape(title)}</b> <span>{escape(caption)}</span></figcaption>"
    svg = f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(title)}">{inner}</svg>'
    return f'<figure class="panel">{head}{svg}{legend}</figure>'


def _share(value: float, limits: tuple[float, float], is_log: bool) -> float:
    low, high = limits
    if is_log:
        value, low, high = (math.log(max(v, 1e-12)) for v in (value, low, high))
    return max(-0.02, min(1.02, (value - low) / (high - low))) if high > low else 0.5


def _ticks(limits: tuple[float, float], is_log: bool) -> list[float]:
    if not is_log:
        return list(nice_ticks(*limits, 5))
    first, last = math.ceil(math.log10(limits[0]) - 1e-9), math.floor(math.log10(limits[1]) + 1e-9)
    return [10.0**power for power in range(first, last + 1)]
