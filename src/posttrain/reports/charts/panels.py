"""Which curves of a run are worth a picture: the same panels for ``curves.png`` and ``report.html``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from posttrain.store.metrics import EvaluationPoint, MetricsRow, evaluation_points


@dataclass(frozen=True)
class Series:
    """One line or one row of points. ``low`` and ``high`` (95 % intervals) are empty or as long as ``values``."""

    label: str
    steps: list[float]
    values: list[float]
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    is_points: bool = False


@dataclass(frozen=True)
class Panel:
    """One picture: its title, what to look for, its series. ``is_share``: values are shares of one."""

    title: str
    caption: str
    series: list[Series]
    is_share: bool = False


# title, caption, is_share, ((metric, label), ...), ((evaluation result, label), ...)
_Plan = tuple[str, str, bool, tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]
_PLANS: tuple[_Plan, ...] = (
    (
        "Accuracy",
        "sampled in training, and greedy on held-out problems",
        True,
        (("accuracy", "training"),),
        (("accuracy", "held-out"),),
    ),
    ("Reward", "mean over all sampled answers", False, (("reward", "training"),), ()),
    (
        "Length of answers",
        "tokens; does it pay to write more?",
        False,
        (("num_tokens", "all"), ("num_tokens_right", "right"), ("num_tokens_wrong", "wrong")),
        (),
    ),
    ("Worked answers", "share that writes its steps", True, (("worked", "training"),), (("worked", "held-out"),)),
    (
        "Format",
        "share in the asked format; cut off at the limit",
        True,
        (("format", "in format"), ("truncated", "cut off")),
        (("format", "held-out"),),
    ),
    ("Entropy", "nats per token; near 0 nothing new is tried", False, (("entropy", "training"),), ()),
    ("Loss", "per trained token", False, (("nll", "training"),), ()),
    ("Margin", "implicit reward of the better answer less that of the worse", False, (("margin", "training"),), ()),
    (
        "Pairs in the right order",
        "share of pairs; a tie counts half",
        True,
        (("pair_accuracy", "training"),),
        (("pair_accuracy", "held-out"),),
    ),
    (
        "Log-probability of the answers of a pair",
        "nats per answer",
        False,
        (("chosen_logprob", "chosen"), ("rejected_logprob", "rejected")),
        (),
    ),
    ("Divergence from the teacher", "nats per token", False, (("divergence", "training"),), ()),
    (
        "What the critic explains",
        "share of the variance of returns",
        False,
        (("value_explained_variance", "training"),),
        (),
    ),
    (
        "KL from the start",
        "nats per answer, sampled on held-out prompts",
        False,
        (("kl_in_reward", "in the reward"),),
        (("kl_from_start", "held-out"),),
    ),
    ("KL to the reference", "nats per token", False, (("kl_ref", "training"),), ()),
    (
        "KL from sampler to trainer",
        "nats per token; rounding alone, unless samples are reused",
        False,
        (("kl_sampler", "training"),),
        (),
    ),
    (
        "Effective sample size",
        "share that importance weights between sampler and trainer leave",
        True,
        (("effective_sample_size", "training"),),
        (),
    ),
    ("Clipped tokens", "share whose ratio left the trust region", True, (("clip_share", "training"),), ()),
    (
        "Uniform groups",
        "share of prompts whose answers all earn the same: no signal",
        True,
        (("uniform_groups", "training"),),
        (),
    ),
    ("Gradient norm", "before clipping", False, (("grad_norm", "training"),), ()),
)


def choose_panels(rows: Sequence[MetricsRow]) -> list[Panel]:
    """The panels for which a run has numbers. Non-finite values are left out of the lines."""
    evaluations = evaluation_points(rows)
    panels = []
    for title, caption, is_share, metrics, results in _PLANS:
        series = [s for name, label in metrics if (s := _metric_series(rows, name, label)) is not None]
        for name, label in results:
            series += _evaluation_series(evaluations, name, label)
        if series:
            panels.append(Panel(title, caption, series, is_share))
    return panels


def _metric_series(rows: Sequence[MetricsRow], name: str, label: str) -> Series | None:
    points = [(row.step, row.metrics[name]) for row in rows if math.isfinite(row.metrics.get(name, math.nan))]
    if not points:
        return None
    return Series(label, [float(step) for step, _ in points], [value for _, value in points])


def _evaluation_series(evaluations: Sequence[EvaluationPoint], name: str, label: str) -> list[Series]:
    tasks = list(dict.fromkeys(e.name for e in evaluations if name in e.results))
    found = []
    for task in tasks:
        points = sorted((e for e in evaluations if e.name == task and name in e.results), key=lambda e: e.step)
        has_interval = all(f"{name}_low" in e.results for e in points)
        found.append(
            Series(
                label if len(tasks) == 1 else f"{label} {task}",
                [float(e.step) for e in points],
                [e.results[name] for e in points],
                [e.results[f"{name}_low"] for e in points] if has_interval else [],
                [e.results[f"{name}_high"] for e in points] if has_interval else [],
                is_points=True,
            )
        )
    return found


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers (1, 2 or 5 times a power of ten apart) inside [low, high]."""
    assert high > low, "an axis has an extent"
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def axis_range(panel: Panel) -> tuple[float, float]:
    """The vertical extent: 0 to 1 for shares (less where all are small), else the values with a little room."""
    values = [v for s in panel.series for v in (*s.values, *s.low, *s.high)]
    low, high = min(values), max(values)
    if panel.is_share:
        return 0.0, 1.0 if high > 0.25 or high <= 0 else high * 1.15
    if low > 0 and low < 0.35 * high:
        low = 0.0
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (low if low == 0 else low - room), high + room


def show_tick(value: float, is_share: bool) -> str:
    """A tick's label: ``40%``, ``0.02``, ``1e-05``."""
    return f"{value * 100:.3g}%" if is_share else f"{value:.3g}"
