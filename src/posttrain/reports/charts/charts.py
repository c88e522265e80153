"""Panels as inline SVG: sharp at any size, and coloured by the page's own light or dark style."""

from __future__ import annotations

from html import escape

from posttrain.reports.charts.panels import Panel, Series, axis_range, nice_ticks, show_tick

WIDTH, HEIGHT = 380.0, 220.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 12.0, 12.0, 26.0
MAX_POINTS = 400


def draw_panel(panel: Panel) -> str:
    """A ``<figure>`` with the panel's chart, legend and caption."""
    axes = _Axes(panel)
    marks = "".join(_draw_series(axes, s, i) for i, s in enumerate(panel.series))
    legend = ""
    if len(panel.series) > 1:
        items = (
            f'<span class="key c{i}{" dot" if s.is_points else ""}">{escape(s.label)}</span>'
            for i, s in enumerate(panel.series)
        )
        legend = f'<div class="legend">{"".join(items)}</div>'
    title, caption = escape(panel.title), escape(panel.caption)
    return (
        f'<figure class="panel"><figcaption><b>{title}</b> <span>{caption}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{title}: {caption}">'
        f"{axes.draw()}{marks}</svg>{legend}</figure>"
    )


class _Axes:
    """Where a step and a value lie on the page."""

    def __init__(self, panel: Panel) -> None:
        self.is_share = panel.is_share
        self.low, self.high = axis_range(panel)
        steps = [step for s in panel.series for step in s.steps]
        self.first = min(steps)
        self.last = max(max(steps), self.first + 1)

    def x(self, step: float) -> float:
        return LEFT + (step - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)

    def draw(self) -> str:
        parts = []
        for tick in nice_ticks(self.low, self.high):
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(
                f'<text x="{LEFT - 6:g}" y="{y + 3.5:.1f}" text-anchor="end">{show_tick(tick, self.is_share)}</text>'
            )
        for tick in nice_ticks(self.first, self.last, 5):
            parts.append(f'<text x="{self.x(tick):.1f}" y="{HEIGHT - 8:g}" text-anchor="middle">{tick:g}</text>')
        return "".join(parts)


def _draw_series(axes: _Axes, series: Series, index: int) -> str:
    if series.is_points:
        return "".join(_draw_point(axes, series, index, i) for i in range(len(series.steps)))
    stride = -(-len(series.steps) // MAX_POINTS)
    kept = sorted({*range(0, len(series.steps), stride), len(series.steps) - 1})
    places = [(axes.x(series.steps[i]), axes.y(series.values[i])) for i in kept]
    if len(places) == 1:
        return f'<circle class="c{index}" cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="3"/>'
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline class="line c{index}" points="{points}"/>'


def _draw_point(axes: _Axes, series: Series, index: int, i: int) -> str:
    x, y = axes.x(series.steps[i]), axes.y(series.values[i])
    note = f"{series.label} after {series.steps[i]:g} steps: {_show(series.values[i], axes.is_share)}"
    whisker = ""
    if series.low:
        low, high = series.low[i], series.high[i]
        note += f" [{_show(low, axes.is_share)}, {_show(high, axes.is_share)}]"
        ends = f'y1="{axes.y(low):.1f}" y2="{axes.y(high):.1f}"'
        whisker = f'<line class="whisker c{index}" x1="{x:.1f}" x2="{x:.1f}" {ends}/>'
    return f'{whisker}<circle class="c{index}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{escape(note)}</title></circle>'


def _show(value: float, is_share: bool) -> str:
    return f"{value:.1%}" if is_share else f"{value:.4g}"


def draw_interval(value: float, low: float, high: float) -> str:
    """A bar from 0 to 1 with its interval, for a table cell."""
    return (
        '<svg class="bar" viewBox="0 0 160 16" preserveAspectRatio="none" role="img" '
        f'aria-label="{value:.1%}, 95 % interval {low:.1%} to {high:.1%}">'
        '<rect class="track" x="0" y="3" width="160" height="10" rx="3"/>'
        f'<rect class="fill" x="0" y="3" width="{160 * value:.1f}" height="10" rx="3"/>'
        f'<line class="whisker" x1="{160 * low:.1f}" x2="{160 * high:.1f}" y1="8" y2="8"/></svg>'
    )
