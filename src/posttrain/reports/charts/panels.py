"""A panel: what a chart shows, and where everything of it lies in a picture (``templates/parts.jinja`` draws it)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

RIGHT, TOP = 12.0, 12.0
MAX_POINTS = 400
NUM_COLORS = 8
Range = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line or one row of points. ``low`` and ``high`` (95 % intervals) are empty or as long as ``ys``.

    An interval is a whisker at a point and a band about a line. ``has_dots``: the line's points are shown too.
    ``color``: a class of the style sheet; "" for the next one. ``notes``: what points say when they are pointed at;
    empty for their numbers.
    """

    label: str
    xs: list[float]
    ys: list[float]
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    is_points: bool = False
    has_dots: bool = False
    is_dashed: bool = False
    color: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Dot:
    """A point in the picture; ``whisker``: its lower and upper end, where it has an interval."""

    x: float
    y: float
    note: str
    whisker: Range | None = None


@dataclass(frozen=True)
class Marks:
    """A series in the picture: the corners of its line and band as SVG reads them, its dots."""

    label: str
    color: str
    is_dashed: bool
    line: str
    band: str
    dots: list[Dot]

    @property
    def radius(self) -> float:
        return 2.2 if self.color == "soft" else 3.4 if not self.line else 2.8


@dataclass(frozen=True)
class Places:
    """A panel in the picture: its frame, ticks and levels with their texts, series, and the line of equal values."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    levels: list[tuple[float, str]]
    series: list[Marks]
    diagonal: tuple[float, float, float, float] | None


@dataclass(frozen=True)
class Panel:
    """One picture: its title, what to look for, its series. ``is_share``: values are shares of one.

    With ``x_label`` it is larger and its axes are named. Ranges and ticks (value, text) that are not given follow
    from the values; ``log_x`` and ``log_y`` spread powers evenly. ``levels``: values drawn as lines across.
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
    x_ticks: Sequence[tuple[float, str]] = ()
    y_ticks: Sequence[tuple[float, str]] = ()
    levels: Sequence[tuple[str, float]] = ()
    has_diagonal: bool = False
    width: float = 0.0

    def places(self) -> Places:
        """Where everything lies, in units of a picture of 380 by 220, or 460 by 270 where axes are named."""
        size, left, under = ((460.0, 270.0), 56.0, 40.0) if self.x_label else ((380.0, 220.0), 52.0, 26.0)
        width, height = self.width or size[0], size[1]
        right, bottom = width - RIGHT, height - under
        steps = [x for s in self.series for x in s.xs]
        x_range = self.x_range or (min(steps), max(max(steps), min(steps) + 1))
        y_range = self.y_range or axis_range(self)
        x, y = _Axis(x_range, left, right, self.log_x), _Axis(y_range, bottom, TOP, self.log_y)
        diagonal = None
        if self.has_diagonal:
            low, high = max(x_range[0], y_range[0]), min(x_range[1], y_range[1])
            diagonal = (x.at(low), y.at(low), x.at(high), y.at(high))
        x_ticks = self.x_ticks or [(tick, f"{tick:g}") for tick in x.ticks()]
        y_ticks = self.y_ticks or [(tick, show_tick(tick, self.is_share)) for tick in y.ticks()]
        return Places(
            *(width, height, left, right, TOP, bottom),
            [(x.at(tick), text) for tick, text in x_ticks],
            [(y.at(tick), text) for tick, text in y_ticks],
            [(y.at(value), label) for label, value in self.levels if math.isfinite(value)],
            [self._marks(series, x, y, f"c{i % NUM_COLORS}") for i, series in enumerate(self.series)],
            diagonal,
        )

    def _marks(self, series: Series, x: _Axis, y: _Axis, color: str) -> Marks:
        finite = [i for i, value in enumerate(series.ys) if math.isfinite(value)]
        stride = 1 if series.is_points else max(1, -(-len(finite) // MAX_POINTS))
        kept = [i for place, i in enumerate(finite) if place % stride == 0 or i == finite[-1]]
        line = band = ""
        if not series.is_points and len(kept) > 1:
            line = " ".join(f"{x.at(series.xs[i])},{y.at(series.ys[i])}" for i in kept)
            if series.low:
                edge = [(i, series.low) for i in kept] + [(i, series.high) for i in reversed(kept)]
                band = " ".join(f"{x.at(series.xs[i])},{y.at(side[i])}" for i, side in edge)
        dots = [self._dot(series, i, x, y) for i in kept if series.is_points or series.has_dots or not line]
        return Marks(series.label, series.color or color, series.is_dashed, line, band, dots)

    def _dot(self, series: Series, i: int, x: _Axis, y: _Axis) -> Dot:
        show = ".1%" if self.is_share else ".4g"
        note = f"{series.label}, {series.xs[i]:g}: {series.ys[i]:{show}}"
        whisker = None
        if series.low and math.isfinite(series.low[i]) and math.isfinite(series.high[i]):
            note += f" [{series.low[i]:{show}}, {series.high[i]:{show}}]"
            whisker = (y.at(series.low[i]), y.at(series.high[i])) if series.is_points else None
        return Dot(x.at(series.xs[i]), y.at(series.ys[i]), series.notes[i] if series.notes else note, whisker)


@dataclass(frozen=True)
class _Axis:
    """Values from ``low`` to ``high`` lie between two places of the picture; a little beyond them, but no farther."""

    limits: Range
    first: float
    last: float
    is_log: bool

    def at(self, value: float) -> float:
        low, high = self.limits
        if self.is_log:
            value, low, high = (math.log(max(v, 1e-12)) for v in (value, low, high))
        share = max(-0.02, min(1.02, (value - low) / (high - low))) if high > low else 0.5
        return round(self.first + share * (self.last - self.first), 1)

    def ticks(self) -> list[float]:
        low, high = self.limits
        if not self.is_log:
            return nice_ticks(low, high)
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        return [10.0**power for power in range(first, last + 1)]


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers (1, 2 or 5 times a power of ten apart) inside [low, high]."""
    assert high > low, "an axis has an extent"
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def axis_range(panel: Panel) -> Range:
    """The vertical extent: 0 to 1 for shares (less where all are small), else the values with a little room."""
    values = [v for s in panel.series for v in (*s.ys, *s.low, *s.high)]
    low, high = min(values), max(values)
    if panel.is_share:
        return 0.0, 1.0 if high > 0.25 or high <= 0 else high * 1.15
    if low > 0 and low < 0.35 * high:
        low = 0.0
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (low if low == 0 else low - room), high + room


def span_of(values: Sequence[float], *, zero: bool = False) -> Range:
    """A range for an axis with a little room, from finite values; ``zero``: it holds 0."""
    finite = [v for v in values if math.isfinite(v)] + ([0.0] if zero else [])
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return low - (0 if zero and low == 0 else room), high + room


def show_tick(value: float, is_share: bool) -> str:
    """A tick's label: ``40%``, ``0.02``, ``1e-05``."""
    return f"{value * 100:.3g}%" if is_share else f"{value:.3g}"
