"""``posttrain demo``: a small model learns to reason while you watch.

The R1-Zero story in small. A base model that has read little stories is taught the format by
demonstrations that mostly guess; then reinforcement learning, which only says right or wrong,
finds out that writing the steps pays. All three are measured on the same held-out problems.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from posttrain.commands.console import Text, open_console, print_table
from posttrain.commands.progress import choose_progress, show_duration
from posttrain.commands.summary import chapter_of, last_start, template_of, write_summary
from posttrain.engines.models import OpenedModel, open_model
from posttrain.errors import INTERRUPTED
from posttrain.evals.files import write_evaluation
from posttrain.evals.generation import Evaluation
from posttrain.evals.plan import Drawing, measure
from posttrain.evals.tables import Row, results_table
from posttrain.recipes.recipe import Recipe, load_recipe
from posttrain.recipes.sections import Word
from posttrain.reports.evaluation import write_page
from posttrain.reports.page import write_html
from posttrain.reports.run import Answer, Report, Stage, Transcript, render_report
from posttrain.runs.directory import RunDirectory, is_live
from posttrain.runs.launch import RunResult, launch
from posttrain.runs.models import find_source
from posttrain.store.durable import replace_file
from posttrain.tasks.base import Task, build_task

NUM_HELD_OUT = 500
NUM_TRANSCRIPTS = 6
NUM_SHOWN = 2
SFT, GRPO = "demo-sft", "demo-grpo"
BASE_LABEL, SFT_LABEL, GRPO_LABEL = "base", "after SFT", "after GRPO"


@dataclass(frozen=True)
class Plan:
    """The two runs of one demo: their folders and resolved recipes."""

    sft: Path
    grpo: Path
    sft_recipe: Recipe
    grpo_recipe: Recipe


@dataclass(frozen=True)
class Measured:
    """A model of the story with its held-out evaluation."""

    label: str
    description: str
    evaluation: Evaluation


def run_demo(arguments: argparse.Namespace) -> int:
    """Tell the story: measure, train, train, measure, show."""
    started = time.monotonic()
    console = open_console()
    root = Path(arguments.runs_dir)
    plan = make_plan(root, arguments.seed)
    task = held_out_stories(plan.grpo_recipe)
    _say(console, "1. The base model", BASE_TEXT)
    base = open_model(find_source(plan.sft_recipe.model.name, root), plan.grpo_recipe.prompt.template)
    stages = [_measure(console, base, task, plan, BASE_LABEL, "has read stories and sums; was never asked anything")]

    _say(console, "2. Demonstrations (SFT)", SFT_TEXT)
    result = _train(plan.sft_recipe, plan.sft, arguments.quiet)
    if result.reason != "finished":
        return _interrupted(console)
    sft = open_model(find_source(str(plan.sft), root))
    stages.append(_measure(console, sft, task, plan, SFT_LABEL, "knows the format; mostly guesses"))

    _say(console, "3. Reinforcement learning (GRPO)", GRPO_TEXT)
    result = _train(plan.grpo_recipe, plan.grpo, arguments.quiet)
    if result.reason != "finished":
        return _interrupted(console)
    grpo = open_model(find_source(str(plan.grpo), root))
    stages.append(_measure(console, grpo, task, plan, GRPO_LABEL, "was only ever told right or wrong"))

    seconds = time.monotonic() - started
    transcripts = side_by_side(stages, plan.grpo_recipe)
    report = write_story(plan, stages, transcripts, arguments.seed, seconds)
    _show_end(console, plan, stages, transcripts, report, seconds)
    return 0


BASE_TEXT = (
    "`tiny` is a language model of under a million parameters that ships with this package. It has read little "
    "stories and worked sums, nothing else: it completes text and does not know what a question is."
)
SFT_TEXT = (
    "It now copies demonstrations of the format <think> ... </think> <answer> ... </answer>. Most of them guess the "
    "answer at once, only some write down their steps; so it learns the format, and mostly to guess."
)
GRPO_TEXT = (
    "Nothing is demonstrated any more. For each problem the model writes several answers; those that are right earn a "
    "reward, and whatever made them right becomes likelier. Watch accuracy, length and the share of worked answers: "
    "does it discover that working step by step pays?"
)


def make_plan(root: Path, seed: int) -> Plan:
    """Fresh names, or those of the newest demo of the same recipes that did not finish."""
    count = 1
    while True:
        suffix = "" if count == 1 else f"-{count}"
        plan = _plan_named(root, suffix, seed)
        if not plan.sft.exists() and not plan.grpo.exists():
            return plan
        if _can_continue(plan):
            return plan
        count += 1


def _plan_named(root: Path, suffix: str, seed: int) -> Plan:
    sft, grpo = root / f"{SFT}{suffix}", root / f"{GRPO}{suffix}"
    seeded = ("train.seed", str(seed))
    sft_recipe = load_recipe("tiny/sft", [seeded]).resolve()
    grpo_recipe = load_recipe("tiny/grpo", [seeded, ("model.name", json.dumps(str(sft)))]).resolve()
    return Plan(sft, grpo, sft_recipe, grpo_recipe)


def _can_continue(plan: Plan) -> bool:
    for folder, recipe in ((plan.sft, plan.sft_recipe), (plan.grpo, plan.grpo_recipe)):
        if (folder / "recipe.yaml").is_file():
            if is_live(folder) or RunDirectory(folder).changed_keys(recipe):
                return False
        elif folder.exists():
            return False
    status = RunDirectory(plan.grpo).read_status()
    return plan.sft.exists() and (status is None or status.state != "finished")


def held_out_stories(recipe: Recipe) -> Task:
    """The test split of the task that GRPO trains on."""
    word = recipe.task
    return build_task(Word(name=word.name, **(word.options | {"split": "test"})))


def _train(recipe: Recipe, folder: Path, quiet: bool) -> RunResult:
    is_there = (folder / "recipe.yaml").is_file()
    with choose_progress(folder.name, quiet) as progress:
        result = launch(
            recipe, root=folder.parent, name=folder.name, recipe_name=folder.name, resume=is_there, observer=progress
        )
    write_summary(folder)
    return result


def _measure(console: Console, model: OpenedModel, task: Task, plan: Plan, label: str, description: str) -> Measured:
    max_tokens = plan.grpo_recipe.rollout.max_tokens if plan.grpo_recipe.rollout is not None else None
    evaluation = measure(model, task, Drawing(n=NUM_HELD_OUT, max_tokens=max_tokens))
    about = {"model": model.label, "label": label, "split": task.split}
    settings = about | {"temperature": 0.0, "max_tokens": max_tokens}
    if model.source.run is not None:
        folder = model.source.run / "evaluation" / f"{task.name}-{task.split}"
        write_evaluation(folder, evaluation, settings, write_page)
    r = evaluation.results
    interval = f"95 % interval {r['accuracy_low']:.1%} to {r['accuracy_high']:.1%}"
    worked = f", {r['worked']:.0%} show their working" if "worked" in r else ""
    line = f"{label}: {r['accuracy']:.1%} of {r['n']:.0f} held-out problems right ({interval}){worked}."
    console.print(Text(line, style="bold"))
    return Measured(label, description, evaluation)


def side_by_side(stages: Sequence[Measured], recipe: Recipe) -> list[Transcript]:
    """The first held-out problems, answered by every model; nothing is picked."""
    extract = template_of(recipe).extract
    by_id = [{r.example.id: r for r in stage.evaluation.rollouts} for stage in stages]
    shared = [key for key in by_id[-1] if all(key in rollouts for rollouts in by_id)]
    transcripts = []
    for key in shared[:NUM_TRANSCRIPTS]:
        rollouts = [rows[key] for rows in by_id]
        answers = [
            Answer(
                label=stage.label,
                text=rollout.text,
                is_right=rollout.parts["correct"] == 1.0,
                extracted=extract(rollout.text),
                num_tokens=rollout.completion.num_own,
                is_cut=rollout.completion.finish == "length",
            )
            for stage, rollout in zip(stages, rollouts, strict=True)
        ]
        example = rollouts[0].example
        transcripts.append(Transcript(example.messages[-1].content, example.answer, answers))
    return transcripts


def write_story(
    plan: Plan, stages: Sequence[Measured], transcripts: Sequence[Transcript], seed: int, seconds: float
) -> Path:
    """``report.html`` and ``demo.json`` in the folder of the GRPO run; returns the report's path."""
    results = {stage.label: stage.evaluation.results for stage in stages}
    content = {"seed": seed, "seconds": seconds, "evaluation": stages[0].evaluation.name, "results": results}
    replace_file(plan.grpo / "demo.json", json.dumps(content, indent=1).encode() + b"\n", durable=False)
    n = stages[0].evaluation.results["n"]
    report = Report(
        title="A small model learns to reason",
        lead=(
            "A language model of under a million parameters, trained on this machine in minutes. First it copies a "
            "format from demonstrations that mostly guess. Then reinforcement learning only says right or wrong. "
            + outcome(stages)
        ),
        stages=[Stage(stage.label, stage.description, stage.evaluation.results) for stage in stages],
        stages_note=f"{n:.0f} problems of the test split, the same for all; greedy decoding.",
        transcripts=transcripts,
        transcripts_note="The first problems of the held-out set, as they came.",
        chapters=[
            chapter_of(plan.grpo, "Reinforcement learning, step by step", GRPO_TEXT),
            chapter_of(plan.sft, "The demonstrations before it", SFT_TEXT),
        ],
        environment=last_start(RunDirectory(plan.grpo)),
        commands=[
            ("ask the trained model", f"posttrain generate {plan.grpo}"),
            ("ask the one that guesses", f"posttrain generate {plan.sft}"),
            ("read the equation", "posttrain explain grpo"),
            ("change something", f"posttrain train tiny/grpo --model.name {plan.sft} --rollout.group 16"),
            ("see all runs", "posttrain runs"),
        ],
    )
    return write_html(render_report(report), plan.grpo / "report.html")


def outcome(stages: Sequence[Measured]) -> str:
    """What reinforcement learning changed, in one sentence that follows the figures."""
    before, after = stages[-2].evaluation.results, stages[-1].evaluation.results
    change = f"right answers went from {before['accuracy']:.0%} to {after['accuracy']:.0%}"
    if "worked" in before and "worked" in after:
        change += f", answers that show their working from {before['worked']:.0%} to {after['worked']:.0%}"
    if after["accuracy_low"] > before["accuracy_high"]:
        return f"It discovered that working step by step pays: {change}."
    return f"In this run it found nothing that the intervals could tell from chance: {change}."


def _say(console: Console, title: str, text: str) -> None:
    console.print()
    console.print(Panel(Text(text), title=title, title_align="left", width=min(100, console.width)))


def _interrupted(console: Console) -> int:
    console.print(
        Text("Stopped; everything so far is saved. `posttrain demo` again goes on from here.", style="yellow")
    )
    return INTERRUPTED


def _show_end(
    console: Console,
    plan: Plan,
    stages: Sequence[Measured],
    transcripts: Sequence[Transcript],
    report: Path,
    seconds: float,
) -> None:
    _say(console, "4. The three, side by side", "The same problems, none of which was trained on. Greedy decoding.")
    for transcript in transcripts[:NUM_SHOWN]:
        console.print(_transcript_table(transcript))
    rows = [Row(stage.label, None, stage.evaluation.name, stage.evaluation.results) for stage in stages]
    print_table(console, results_table(rows))
    console.print(Text(f"\n{outcome(stages)} {show_duration(seconds)} in all."))
    # What is to be opened or typed stays on one line, however narrow the terminal.
    console.print(Text(f"report: {report}\ncurves: {plan.grpo / 'curves.png'}"), soft_wrap=True)
    command = (f"posttrain generate {plan.grpo}", "bold cyan")
    console.print(Text.assemble("Now ask it yourself:  ", command), soft_wrap=True)


def _transcript_table(transcript: Transcript) -> Table:
    table = Table(title=Text(f"{transcript.question}  (answer: {transcript.gold})"), title_justify="left", expand=False)
    for answer in transcript.answers:
        verdict = "right" if answer.is_right else "wrong" if answer.extracted is not None else "no answer"
        style = "green" if answer.is_right else "red"
        table.add_column(Text.assemble(f"{answer.label}: ", (verdict, style)), ratio=1)
    table.add_row(*(Text(answer.text + (" …" if answer.is_cut else "")) for answer in transcript.answers))
    return table
