"""``posttrain evaluate RUN`` of a reward model: the given answers of held-out tasks are scored."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console

from posttrain.commands.console import Text, open_console, print_table, say
from posttrain.commands.evaluate.command import DEFAULT_BATCH
from posttrain.commands.evaluate.models import request_of
from posttrain.errors import UsageError
from posttrain.reports.charts.calibration import draw_calibration
from posttrain.reports.reward_model import NOTES, difference_tables, score_tables, ways_table, write_score_page
from posttrain.reward_models.evaluation import Scored, run_scoring, write_scores

PICTURE = "calibration.png"


def run_scores(arguments: argparse.Namespace) -> int:
    """Score the answers of every task with every reward model; print tables, write results, records and pages."""
    _refuse_sampling(arguments)
    done = []
    for scored in run_scoring(request_of(arguments), probes=arguments.probes):
        write_scores(scored, write_page)
        done.append(scored)
    if not arguments.quiet:
        show_scores(open_console(), done)
    return 0


def write_page(scored: Scored) -> str:
    """The page, and beside it the picture of the calibration where a score states a probability."""
    one, path, picture = scored.evaluation, scored.folder / PICTURE, None
    if one.bins:
        what = "is the chosen answer" if one.view == "pairs" else "turns out right"
        picture = draw_calibration(one.bins, f"{scored.label} on {one.name}", path, what=what).name
    else:
        path.unlink(missing_ok=True)
    return write_score_page(scored.label, one, scored.settings, picture)


def _refuse_sampling(arguments: argparse.Namespace) -> None:
    """Refuse options that would do nothing."""
    sampling_options = {
        "--samples": arguments.samples != 1,
        "--k": bool(arguments.k),
        "--temperature": arguments.temperature is not None,
        "--top-p": arguments.top_p is not None,
        "--top-k": arguments.top_k is not None,
        "--max-tokens": arguments.max_tokens is not None,
        "--best-of": arguments.best_of is not None,
        "--engine": arguments.engine != "native",
        "--seed": arguments.seed != 0,
        "--batch": arguments.batch != DEFAULT_BATCH,
    }
    for option, is_given in sampling_options.items():
        if is_given:
            raise UsageError(f"{option}: a reward model writes no answers; it scores those that the task gives")
    if arguments.template or any(key.startswith("template") for key, _ in arguments.overrides):
        raise UsageError("--template: a reward model is asked under the template that it was trained with")


def show_scores(console: Console, done: Sequence[Scored]) -> None:
    """A table for each task, what must be known beside it, and where the files are."""
    rows = [(scored.label, scored.evaluation) for scored in done]
    for table in [*score_tables(rows), *difference_tables(rows)]:
        print_table(console, table)
    for label, one in rows:
        ways = ways_table(one.results)
        if ways is not None:
            print_table(console, ways)
        if one.dropped:
            reasons = ", ".join(f"{count} {reason}" for reason, count in one.dropped.items())
            say(console, f"{one.name} · {label}: not measured: {reasons}", "dim")
    for view in dict.fromkeys(one.view for _, one in rows):
        console.print(Text(NOTES[view], style="dim"))
    for scored in done:
        say(console, f"summary, results and every score: {scored.folder}")
