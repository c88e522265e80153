"""``posttrain evaluate A --against B``: whose answers win, and how far apart two models are."""

from __future__ import annotations

import argparse

from posttrain.commands.console import Text, open_console, print_table
from posttrain.commands.evaluate.models import request_of
from posttrain.commands.evaluate.progress import choose_evaluation_progress
from posttrain.errors import UsageError
from posttrain.evals.generation import task_label
from posttrain.evals.win_rate import Judge, plan_contest, run_contest, write_contest
from posttrain.reports.win_rate import contest_table, write_contest_page
from posttrain.reward_models.scoring import open_reward_model
from posttrain.runs.models import find_source


def run_against(arguments: argparse.Namespace) -> int:
    """Set two models against one another, print a table, write results and records."""
    for option in ("compare", "best_of", "k"):
        if getattr(arguments, option):
            raise UsageError(f"--{option.replace('_', '-')}: leave it out with --against, which it says nothing to")
    if len(arguments.models) != 1:
        raise UsageError(f"--against: one model stands against it, not {len(arguments.models)}")
    # Answers are drawn, unless asked otherwise: a KL is between distributions.
    plan = plan_contest(request_of(arguments, [arguments.against], temperature=1.0), arguments.judge)
    judge = _open_judge(arguments)
    console = open_console()
    with choose_evaluation_progress(console, arguments.quiet) as progress:
        found, notes = run_contest(plan, judge, progress)
    table = contest_table(task_label(plan.task), plan.a.label, plan.b.label, found.results)
    write_contest(plan, found, notes, write_contest_page(table, notes, plan.settings, found.items))
    if not arguments.quiet:
        print_table(console, table)
        for note in notes:
            console.print(Text(note, style="dim"), soft_wrap=True)
        console.print(Text(f"summary, results and every answer: {plan.folder}"), soft_wrap=True)
    return 0


def _open_judge(arguments: argparse.Namespace) -> Judge | None:
    if arguments.judge is None:
        return None
    model = open_reward_model(find_source(arguments.judge, arguments.runs_dir), device=arguments.device)
    return lambda rollouts: model.score(
        [r.example for r in rollouts], [r.text for r in rollouts], [r.completion.finish for r in rollouts]
    )
