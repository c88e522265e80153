"""What all pictures of matplotlib share: colours, how a panel is dressed, how a file is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.store.durable import storage_errors

# Okabe and Ito ("Color Universal Design", 2008), told apart with any colour vision, and grey.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
DASHES: tuple[Any, ...] = ("solid", (0, (5, 1.6)), (0, (1.2, 1.3)), (0, (6, 1.5, 1.2, 1.5)))


def new_figure(width: float, height: float, **options: Any) -> Any:
    """A figure of so many inches that needs no screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), **options)
    FigureCanvasAgg(figure)
    return figure


def titled_grid(title: str, size: tuple[float, float], num_rows: int, top: float, **options: Any) -> tuple[Any, Any]:
    """A figure with its title above and a grid of two columns below."""
    figure = new_figure(*size)
    figure.text(0.062, 1 - 0.32 / size[1], title, fontsize=14, fontweight="bold")
    return figure, figure.add_gridspec(num_rows, 2, left=0.062, right=0.985, top=top, wspace=0.16, **options)


def label_panel(axes: Any, title: str, subtitle: str, x_label: str, *, is_share: bool = False) -> None:
    """Title, what to look for, and light axes; ``is_share``: values are shares of one."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=20)
    axes.text(0.0, 1.025, subtitle, transform=axes.transAxes, fontsize=8.5, color="#666666")
    axes.set_xlabel(x_label, fontsize=9)
    if is_share:
        show_percent(axes.yaxis)
    axes.tick_params(labelsize=8.5, length=0)
    axes.grid(alpha=0.22)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def plain_frame(axes: Any, *, has_grid: bool = True) -> None:
    """A small panel's frame: two sides, small numbers."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.grid(has_grid, **({"alpha": 0.25} if has_grid else {}))  # options of a grid draw one, whatever is asked


def show_percent(axis: Any, decimals: int | None = None) -> None:
    """Ticks of an axis of shares in percent."""
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, decimals=decimals))


def ticks_of_shares(axes: Any) -> None:
    """No tick below 0 % or above 100 %, where the axis only leaves room for a line; its limits stay."""
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in axes.get_yticks() if max(low, 0.0) <= tick <= min(high, 1.0 + 1e-9)])
    axes.set_ylim(low, high)


def error_bars(values: Sequence[float], low: Sequence[float], high: Sequence[float]) -> list[list[float]]:
    """Intervals as matplotlib's ``errorbar`` reads them: how far they reach below and above."""
    below = [max(0.0, value - end) for value, end in zip(values, low, strict=True)]
    return [below, [max(0.0, end - value) for value, end in zip(values, high, strict=True)]]


def save_picture(figure: Any, path: str | Path, dots_per_inch: int = 150) -> Path:
    """Save as PNG, or as what the name's ending says.

    Raises:
        StorageError: the file cannot be written.
    """
    target = Path(path)
    with storage_errors(target.name, target):
        figure.savefig(target, dpi=dots_per_inch, facecolor="white")
    return target
