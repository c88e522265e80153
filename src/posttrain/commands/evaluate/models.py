"""``posttrain evaluate``: models on held-out tasks, item by item (``--compare``), ``--against`` others; scorers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from posttrain.api.measure import evaluate_plan
from posttrain.commands.evaluate import SECTIONS
from posttrain.commands.options import read_components
from posttrain.errors import UsageError
from posttrain.evaluation import DEFAULT_BATCH
from posttrain.evaluation.files import FinishedEvaluation, is_evaluation_folder, read_finished
from posttrain.evaluation.generation import task_label
from posttrain.evaluation.plan import (
    EVALUATIONS,
    EvaluationPlan,
    EvaluationRequest,
    choose_drawing,
    make_plan,
    notes_of,
    slug,
    table_rows,
)
from posttrain.evaluation.reward_models.measures import run_scoring, write_scores
from posttrain.evaluation.reward_models.scoring import open_reward_model
from posttrain.evaluation.tables import (
    COMPARISON,
    TextTable,
    compare_finished,
    differences_table,
    results_table,
    write_comparison,
)
from posttrain.evaluation.win_rate import AnswerJudge, plan_head_to_head, run_head_to_head, write_head_to_head
from posttrain.reports.evaluation_page import (
    NOTES,
    by_evaluation,
    difference_tables,
    head_to_head_table,
    score_tables,
    shown_value,
    write_head_to_head_page,
    write_score_page,
)
from posttrain.runs.models import find_source
from posttrain.sampling.llm_judge import SUFFIXES, read_pair_judge
from posttrain.terminal.console import leaves_out_tables, open_console, print_table, say, say_template
from posttrain.terminal.evaluation_progress import choose_evaluation_progress
from posttrain.types import Rollout

_RULES = ("min_p", "min_tokens", "repetition_penalty", "stop")
DRAWING = ("samples", "k", "temperature", "top_k", "top_p", "max_tokens", "seed", "batch", *_RULES)
# Sampling options with default values; reward models reject them.
SAMPLING = dict.fromkeys(("k", "temperature", "top_p", "top_k", "max_tokens", "best_of", *_RULES)) | {
    "samples": 1, "engine": "native", "seed": 0, "batch": DEFAULT_BATCH,
}  # fmt: skip


def run_table(arguments: argparse.Namespace) -> int:
    """Measure every cell, print a table, write results, records and a summary."""
    _run(make_plan(request_of(arguments)), arguments.quiet)
    return 0


def request_of(
    arguments: argparse.Namespace, others: Sequence[str] = (), temperature: float | None = None
) -> EvaluationRequest:
    """The request of the command line; ``others``: models besides those named first. ``temperature`` by default.

    Raises:
        UsageError: words or options that cannot be.
    """
    components = read_components(arguments, SECTIONS)
    models = [find_source(name, arguments.runs_dir) for name in (*dict.fromkeys(arguments.models), *others)]
    if not components["template"]:
        for source in models:
            say_template(source)
    options = {name: getattr(arguments, name) for name in DRAWING}
    options["n"] = arguments.limit
    if options["temperature"] is None:
        options["temperature"] = temperature
    chooser = None
    if arguments.best_of is not None:
        chooser = find_source(arguments.best_of, arguments.runs_dir)
    folder = None
    if arguments.out:
        folder = Path(arguments.out)
    return EvaluationRequest(
        models=models,
        drawing=choose_drawing(**options),
        tasks=components["task"],
        templates=components["template"],
        engine=components["engine"][0],
        dtype=arguments.dtype,
        device=arguments.device,
        best_of=chooser,
        out=folder,
        alike=arguments.compare,
    )


def _run(plan: EvaluationPlan, quiet: bool) -> list[FinishedEvaluation]:
    """Carry out a plan and print its tables."""
    with choose_evaluation_progress(open_console(), quiet) as progress:
        finished = evaluate_plan(plan, progress)
    tables = [results_table(own) for own in by_evaluation(table_rows(finished))]
    _print(tables, notes_of(finished), f"summary, results and every answer: {plan.folder}", quiet)
    return finished


def _print(tables: Sequence[TextTable], notes: Sequence[str], place: str, quiet: bool) -> None:
    if leaves_out_tables(quiet):
        return
    console = open_console()
    for table in tables:
        print_table(console, table)
    for note in notes:
        say(console, note, "dim")
    say(console, place)


def run_comparison(arguments: argparse.Namespace) -> int:
    """Evaluate both with the same settings, or read two finished evaluations; then test the difference."""
    if len(arguments.models) != 2:
        raise UsageError(f"--compare needs exactly two models or evaluation folders, not {len(arguments.models)}")
    folders = [name for name in arguments.models if is_evaluation_folder(name)]
    if len(folders) == 1:
        other = next(name for name in arguments.models if name not in folders)
        raise UsageError(
            f"--compare: {folders[0]} is an evaluation folder, {other} is not; give either folders or models"
        )
    console = open_console()
    if folders:
        first, second = arguments.models
        a = read_finished(first)
        b = read_finished(second)
        out = Path(arguments.out or Path(EVALUATIONS) / slug(f"compare-{a.folder.name}-{b.folder.name}"))
    else:
        plan = make_plan(request_of(arguments))
        if len(plan.trials) != 2 or plan.trials[0].task_component != plan.trials[1].task_component:
            raise UsageError(
                "--compare needs exactly two models, with one task and template; for tables, compare result folders "
                "afterwards"
            )
        if not arguments.quiet and not plan.request.tasks:
            options = ", ".join(f"{key} {value}" for key, value in plan.trials[0].task_component.options.items())
            say(console, f"both on {plan.trials[0].name} ({options}); --task names another")
        a, b = _run(plan, arguments.quiet)
        out = plan.folder
    paired, apart = compare_finished(a, b, seed=arguments.seed)
    write_comparison(out, a, b, paired, apart)
    if leaves_out_tables(arguments.quiet):
        return 0
    say(console, f"A: {paired.a}   B: {paired.b}")
    for name, (left, right) in apart.items():
        if name not in ("model", "checkpoint"):
            say(console, f"they also differ in {name}: A {shown_value(left)}, B {shown_value(right)}", "dim")
    print_table(console, differences_table(paired))
    say(console, paired.counts())
    say(console, f"\n{paired.in_words()}", "bold")
    for caution in paired.cautions():
        say(console, caution, "dim")
    say(console, f"comparison: {out / COMPARISON}")
    return 0


def run_against(arguments: argparse.Namespace) -> int:
    """Compare two models directly: print a table, write results and records."""
    for option in ("compare", "best_of", "k"):
        if getattr(arguments, option):
            raise UsageError(f"--{option.replace('_', '-')}: no effect with --against. Remove it")
    if len(arguments.models) != 1:
        raise UsageError(f"--against: give exactly one model to compare with, not {len(arguments.models)}")
    judges = []
    if arguments.judge is not None:
        judges = arguments.judge
    # Answers are drawn, unless the command says otherwise: a KL is between distributions.
    plan = plan_head_to_head(request_of(arguments, [arguments.against], temperature=1.0), judges)
    opened = {name: _open_judge(name, arguments, plan.sources[0].run) for name in judges}
    with choose_evaluation_progress(open_console(), arguments.quiet) as progress:
        win_rate, notes = run_head_to_head(plan, opened, progress)
    first, second = (source.label for source in plan.sources)
    table = head_to_head_table(task_label(plan.task), first, second, win_rate.results, win_rate.others)
    write_head_to_head(plan, win_rate, notes, write_head_to_head_page(table, notes, plan.settings, win_rate.items))
    _print([table], notes, f"summary, results and every answer: {plan.folder}", arguments.quiet)
    return 0


def _open_judge(name: str, arguments: argparse.Namespace, folder: Path | None) -> AnswerJudge:
    """Open a judge: a reward model run, or a file describing an LLM judge, with verdicts cached in ``folder``."""
    if name.endswith(SUFFIXES):
        return read_pair_judge(name, folder)
    model = open_reward_model(find_source(name, arguments.runs_dir), device=arguments.device)

    def score(rollouts: Sequence[Rollout]) -> Sequence[float | None]:
        examples = [rollout.example for rollout in rollouts]
        texts = [rollout.text for rollout in rollouts]
        return model.score(examples, texts, [rollout.completion.finish for rollout in rollouts])

    return score


def run_scores(arguments: argparse.Namespace) -> int:
    """Evaluate reward models on the answers given in each task; print tables, write results and pages."""
    for name, default in SAMPLING.items():
        if getattr(arguments, name) != default:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option}: reward models do not sample; they score answers given in the task")
    if arguments.template or any(key.startswith("template") for key, _ in arguments.overrides):
        raise UsageError("--template: reward models always use the training template. Remove it")
    done = []
    for scored in run_scoring(request_of(arguments)):
        write_scores(scored, write_score_page(scored.label, scored.evaluation, scored.settings))
        done.append(scored)
    rows = [(scored.label, scored.evaluation) for scored in done]
    notes = list(dict.fromkeys(note for scored in done for note in scored.notes))
    for label, evaluation in rows:
        if evaluation.dropped:
            counts = ", ".join(f"{count} {reason}" for reason, count in evaluation.dropped.items())
            notes.append(f"{evaluation.name} · {label}: not measured: {counts}")
    for label, evaluation in rows:
        trained = evaluation.results.get("trained_rows")
        if trained:
            what = f"{trained:.0f} rows also occur in this run's training data"
            notes.append(f"{evaluation.name} · {label}: {what}")
    notes += dict.fromkeys(NOTES[evaluation.view] for _, evaluation in rows)
    places = "\n".join(f"summary, results and every score: {scored.folder}" for scored in done)
    _print([*score_tables(rows), *difference_tables(rows)], notes, places, arguments.quiet)
    return 0
