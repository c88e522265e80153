from __future__ import annotations

import io
import math
import re
from typing import Any

import pytest
from rich.console import Console

from posttrain.commands.progress import (
    History,
    LiveProgress,
    PlainProgress,
    Progress,
    choose_progress,
    show_duration,
    show_evaluation,
    show_number,
    show_parts,
    sparkline,
)
from posttrain.store.headline import ACCURACY, REWARD


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def start(steps: int = 40, **more: Any) -> dict[str, Any]:
    return {"recipe": None, "steps": steps, "resumed_from": None, "num_examples": 5000, "dropped": {}} | more


def step(k: int, seconds: float = 0.3) -> dict[str, Any]:
    timing = {"generate_seconds": 0.6 * seconds, "update_seconds": 0.4 * seconds, "step_seconds": seconds}
    timing |= {"generate_tokens_per_second": 12000.0, "update_tokens_per_second": 30000.0}
    return {"step": k, "metrics": {"reward": k / 100, "accuracy": k / 200}, "timing": timing}


def drive(progress: Progress, clock: Clock, steps: int = 40) -> None:
    progress("start", start(steps))
    for k in range(1, steps + 1):
        clock.now += 0.5
        progress("step", step(k, seconds=0.5))
    progress("finish", {"step": steps, "reason": "finished"})


def test_sparkline_scales_between_lowest_and_highest() -> None:
    assert sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0, 2.0]) == "▁▁▁"
    assert sparkline([]) == ""


def test_sparkline_largest_floats_are_drawn() -> None:
    assert sparkline([1e308, -1e308, 0.0]) == "█▁▅"
    assert sparkline([1.7e308] * 40, width=2) == "▁▁"
    assert (show_number(1e308, ".3f"), show_number(-1234.5, ".3f")) == ("1e+308", "-1234.500")


def test_sparkline_averages_equal_stretches_and_leaves_out_what_is_not_finite() -> None:
    assert sparkline([0.0, 0.0, 10.0, 10.0], width=2) == "▁█"
    assert sparkline([0.0, math.nan, 8.0, math.inf]) == "▁█"
    assert len(sparkline([float(i) for i in range(1000)])) == 32


@pytest.mark.parametrize(
    ("seconds", "text"), [(6.6, "7s"), (59.4, "59s"), (125, "2m 05s"), (3725, "1h 02m"), (-1, "0s")]
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert show_duration(seconds) == text


def test_remaining_time_counts_only_the_steps_of_this_process() -> None:
    clock = Clock()
    history = History(clock)
    history.start(start(100, resumed_from=60))
    assert history.remaining() is None
    clock.now += 20.0
    history.add(step(70))
    assert history.remaining() == pytest.approx(20.0 / 10 * 30)


def test_remaining_time_leaves_out_what_comes_before_the_first_step() -> None:
    clock = Clock()
    history = History(clock)
    history.start(start(13, resumed_from=2))
    clock.now += 52.0  # an evaluation of the start, or one that a killed run owed
    history.add(step(3, seconds=2.0))
    assert history.remaining() == pytest.approx(20.0)
    assert history.elapsed() == pytest.approx(52.0)
    clock.now += 4.0
    history.add(step(4))
    assert history.remaining() == pytest.approx(6.0 / 2 * 9)


def test_phases_are_shares_of_the_time_so_far() -> None:
    history = History(Clock())
    history.add(step(1) | {"timing": {"generate_seconds": 3.0, "update_seconds": 1.0, "step_seconds": 4.1}})
    history.add(step(2) | {"timing": {"generate_seconds": 3.0, "update_seconds": 1.0, "step_seconds": 4.1}})
    assert history.phases() == "generate 75% · update 25%"


def test_evaluation_line_has_the_interval() -> None:
    results = {
        "n": 256.0,
        "accuracy": 0.5,
        "accuracy_low": 0.439,
        "accuracy_high": 0.561,
        "format": 1.0,
        "num_tokens": 31.6,
    }
    line = show_evaluation({"step": 20, "name": "stories/validation", "headline": ACCURACY, "results": results})
    assert line == (
        "held-out stories/validation after 20 steps: 50.0% right [43.9%, 56.1%] · format 100% · length 32 (n = 256)"
    )


def test_an_evaluation_without_gold_answers_is_told_by_what_is_optimized() -> None:
    results = {"n": 64.0, "reward": 0.731, "reward_low": 0.6, "reward_high": 0.862, "kl_from_start": 2.31}
    results |= {"format": 1.0}
    line = show_evaluation({"step": 20, "name": "hh/test", "headline": REWARD, "results": results})
    assert line == (
        "held-out hh/test after 20 steps: reward 0.731 [0.600, 0.862] · KL from start 2.310 · format 100% (n = 64)"
    )
    line = show_evaluation({"step": 20, "name": "hh/test", "headline": None, "results": {"num_tokens": 9.0}})
    assert line == "held-out hh/test after 20 steps: length 9"
    both = {"accuracy": 0.5, "loss": 1.25}
    line = show_evaluation({"step": 1, "name": "sums/test", "headline": ACCURACY, "results": both})
    assert line == "held-out sums/test after 1 steps: 50.0% right · loss 1.250"


def test_plain_progress_prints_about_twenty_lines() -> None:
    out, clock = io.StringIO(), Clock()
    progress = PlainProgress(Console(file=out, width=80), clock)
    drive(progress, clock, steps=400)
    lines = out.getvalue().splitlines()
    assert len(lines) == 1 + 20 + 1
    assert lines[0] == "400 steps on 5,000 examples"
    assert lines[1] == (
        "step 20/400 | reward 0.200 | accuracy 10.0% | tokens/s: generate 12,000 · update 30,000 | 3m 10s left"
    )
    assert lines[-1] == "finished after step 400, 3m 20s; steps: generate 60% · update 40%"


def test_plain_progress_always_shows_the_last_step() -> None:
    out, clock = io.StringIO(), Clock()
    drive(PlainProgress(Console(file=out, width=80), clock), clock, steps=41)
    assert "step 41/41" in out.getvalue()


def test_what_was_dropped_is_shown() -> None:
    out = io.StringIO()
    progress = PlainProgress(Console(file=out, width=80))
    progress("start", start(dropped={"longer than the context": 7, "without an answer": 0}, resumed_from=12))
    assert out.getvalue() == ("40 steps on 5,000 examples; dropped: 7 longer than the context; resumed after step 12\n")


def test_model_text_in_a_notice_is_no_markup() -> None:
    out = io.StringIO()
    progress = PlainProgress(Console(file=out, width=80))
    progress("notice", {"message": "[bold]x[/bold]"})
    assert out.getvalue() == "note: [bold]x[/bold]\n"


def test_live_progress_shows_numbers_courses_and_where_the_time_goes() -> None:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=100, force_terminal=True, color_system=None)
    progress = LiveProgress(console, "tiny/grpo", clock)
    with progress:
        progress("start", start(40))
        for k in range(1, 21):
            clock.now += 0.5
            progress("step", step(k))
        shown = Console(file=io.StringIO(), width=100, record=True)
        shown.print(progress.render())
        text = shown.export_text()
    assert "step 20/40" in text
    assert "10s left" in text
    assert re.search(r"reward +0\.200  ▁▁▁▂▂▃▃▃▄▄▅▅▆▆▆▇▇███ ", text)
    assert "generate 12,000 · update 30,000 — generate 60% · update 40%" in text
    assert "tiny/grpo" in out.getvalue()


def test_quiet_progress_passes_on_notices_only(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    progress = choose_progress("x", quiet=True)
    drive(progress, clock, steps=3)
    progress("notice", {"message": "checkpoint step 2 does not verify"})
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "note: checkpoint step 2 does not verify\n"
    assert progress.notices == ["checkpoint step 2 does not verify"]


def test_view_follows_the_terminal() -> None:
    assert isinstance(choose_progress("x", False, Console(file=io.StringIO())), PlainProgress)
    assert isinstance(choose_progress("x", False, Console(file=io.StringIO(), force_terminal=True)), LiveProgress)
    assert type(choose_progress("x", True)) is Progress


def test_the_parts_of_a_mixture_stand_in_the_lines() -> None:
    metrics = {"accuracy": 0.5, "easy:accuracy": 0.75, "easy:accuracy_low": 0.6, "hard:pair_accuracy": 0.25}
    assert show_parts(metrics | {"easy:prompts": 3.0, "reward/mine:accuracy": 0.1}) == "easy 75%, hard 25%"
    assert show_parts({"accuracy": 0.5}) == ""
    told = show_evaluation({"name": "mixture/test", "step": 2, "results": metrics | {"n": 9.0}, "headline": None})
    assert told.endswith("steps: by part: easy 75%, hard 25% (n = 9)")
