"""A panel: what a chart shows, and where its values lie in a picture (``templates/parts.jinja`` draws it)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_POINTS = 400
LARGEST = 1e100  # a value beyond has no place on an axis: not even its distance to another is a number
NUM_COLORS = 8  # of lines that can be told apart; the style sheet has so many
Range = tuple[float, float]
Ticks = Sequence[tuple[float, str]]


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

    def drawn(self) -> list[int]:
        """The points that are drawn: those with a number, and of a long line every so many and the last."""
        finite = [i for i, value in enumerate(self.ys) if abs(value) < LARGEST]  # NaN is not below it either
        stride = 1 if self.is_points else max(1, -(-len(finite) // MAX_POINTS))
        return sorted({*finite[::stride], *finite[-1:]})

    def note(self, i: int, is_share: bool) -> str:
        """What point ``i`` says: where it lies, and its interval."""
        if self.notes:
            return self.notes[i]
        show = ".1%" if is_share else ".4g"
        interval = f" [{self.low[i]:{show}}, {self.high[i]:{show}}]" if self.low else ""
        return f"{self.label}, {self.xs[i]:g}: {self.ys[i]:{show}}{interval}"


@dataclass(frozen=True)
class Panel:
    """One picture: its title, what to look for, its series. ``is_share``: values are shares of one.

    With ``x_label`` it is larger and its axes are named. Ranges and ticks (value, text) that are not set follow from
    the values; ``log_x`` and ``log_y`` spread powers evenly. ``levels``: values drawn as lines across.
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
    width: float = 0.0

    def frame(self) -> Frame:
        """Where its values lie."""
        return Frame(self)


class Frame:
    """The axes of a panel in a picture of 380 by 220 units, or 460 by 270 where they are named."""

    def __init__(self, panel: Panel) -> None:
        is_named = bool(panel.x_label)
        self.width = panel.width or (460.0 if is_named else 380.0)
        self.height = 270.0 if is_named else 220.0
        self.left, self.right = 56.0 if is_named else 52.0, self.width - 12.0
        self.top, self.bottom = 12.0, self.height - (40.0 if is_named else 26.0)
        xs = [x for s in panel.series for x in s.xs]
        self.x_range = panel.x_range or (min(xs), max(max(xs), min(xs) + 1))
        self.y_range = panel.y_range or axis_range(panel)
        self.log_x, self.log_y = panel.log_x, panel.log_y
        has_halves = not all(float(x).is_integer() for x in xs)  # of steps there are none
        along = [x for x in _ticks(self.x_range, self.log_x) if has_halves or x.is_integer()]
        self.x_ticks = panel.x_ticks or [(tick, f"{tick:g}") for tick in along]
        self.y_ticks = panel.y_ticks or labelled(_ticks(self.y_range, self.log_y), panel.is_share)
        self.levels = [(value, label) for label, value in panel.levels if math.isfinite(value)]
        self.equal = (max(self.x_range[0], self.y_range[0]), min(self.x_range[1], self.y_range[1]))

    def x(self, value: float) -> float:
        """Where a value lies from the left."""
        return round(self.left + _share(value, self.x_range, self.log_x) * (self.right - self.left), 1)

    def y(self, value: float) -> float:
        """Where a value lies from the top."""
        return round(self.bottom - _share(value, self.y_range, self.log_y) * (self.bottom - self.top), 1)


def _share(value: float, limits: Range, is_log: bool) -> float:
    """How far along an axis; a little beyond its ends, but no farther."""
    low, high = limits
    if is_log:
        value, low, high = (math.log(max(v, 1e-12)) for v in (value, low, high))
    return max(-0.02, min(1.02, (value - low) / (high - low))) if high > low else 0.5


def _ticks(limits: Range, is_log: bool) -> list[float]:
    if not is_log:
        return nice_ticks(*limits)
    first, last = math.ceil(math.log10(limits[0]) - 1e-9), math.floor(math.log10(limits[1]) + 1e-9)
    return [10.0**power for power in range(first, last + 1)]


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers (1, 2 or 5 times a power of ten apart) inside [low, high]."""
    assert high > low, "an axis has an extent"
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def axis_range(panel: Panel) -> Range:
    """The vertical extent: 0 to 1 for shares (less where all are small), else the values with a little room.

    Intervals widen it by ``max_band`` of the values' own extent at most.
    """
    values = [v for s in panel.series for v in s.ys]
    values += [value for _, value in panel.levels]
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


def labelled(ticks: list[float], is_share: bool) -> Ticks:
    """Ticks with labels of three digits, or of as many as tell them apart."""
    for digits in range(3, 10):
        labels = [show_tick(tick, is_share, digits) for tick in ticks]
        if len(set(labels)) == len(ticks):
            break
    return list(zip(ticks, labels, strict=True))


def show_tick(value: float, is_share: bool, digits: int = 3) -> str:
    """A tick's label: ``40%``, ``0.02``, ``1e-05``."""
    return f"{value * 100:.{digits}g}%" if is_share else f"{value:.{digits}g}"
