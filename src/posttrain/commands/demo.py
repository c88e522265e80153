"""``posttrain demo``: a small model learns to reason, or to use a tool, while you watch.

The R1-Zero story in small. A base model is taught a form by demonstrations; then reinforcement learning, which only
says right or wrong, finds out what pays. All three are measured on the same held-out problems.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from posttrain.api.training import carry_out
from posttrain.data.base import Task, build_task
from posttrain.data.render.template import build_template
from posttrain.errors import INTERRUPTED
from posttrain.evaluation.files import write_evaluation
from posttrain.evaluation.generation import Evaluation
from posttrain.evaluation.plan import Drawing, measure
from posttrain.evaluation.tables import ResultsRow, results_table
from posttrain.recipes.recipe import Recipe, load_recipe
from posttrain.recipes.sections import Component, map_tasks
from posttrain.reports.evaluation import write_page
from posttrain.reports.page import write_html
from posttrain.reports.run import Answer, Report, Stage, Transcript, render_report
from posttrain.reports.summary import NUM_TRANSCRIPTS, chapter_of, last_start
from posttrain.runs.directory import RunDirectory, is_live
from posttrain.runs.launch import RunResult
from posttrain.runs.models import find_source
from posttrain.sampling.models import ModelSource, open_model
from posttrain.store.durable import replace_file
from posttrain.store.rollouts import show_turns
from posttrain.terminal.console import Text, open_console, print_table
from posttrain.terminal.training import choose_progress, show_duration

NUM_HELD_OUT = 500
NUM_SHOWN = 2
LABELS = ("base", "after SFT", "after GRPO")
OTHER_PROBLEMS = (
    "The evaluations during training are of the validation split, by which the best weights are chosen; of the same "
    "model they may differ from these within the intervals."
)

Results = Mapping[str, float]


@dataclass(frozen=True)
class Story:
    """Three models of one story: ``tiny``, the same after demonstrations, and that after reinforcement learning.

    ``sft``, ``grpo``: recipes; their runs are called ``run``-sft and ``run``-grpo. ``texts`` are printed before each
    of the three, ``descriptions`` stand in the report. ``shares``: results that the line of a model names,
    with words for each. ``outcome``: one sentence from the figures before and after reinforcement learning.
    """

    run: str
    sft: str
    grpo: str
    title: str
    lead: str
    texts: tuple[str, str, str]
    descriptions: tuple[str, str, str]
    outcome: Callable[[Results, Results], str]
    shares: Mapping[str, str] = field(default_factory=dict)


def reasoning_outcome(before: Results, after: Results) -> str:
    """Return a sentence on whether the model learned to work step by step."""
    change = f"right answers went from {before['accuracy']:.0%} to {after['accuracy']:.0%}"
    if "shows_reasoning" in before and "shows_reasoning" in after:
        change += (
            f", answers that show their working from {before['shows_reasoning']:.0%} to {after['shows_reasoning']:.0%}"
        )
    if after["accuracy_low"] > before["accuracy_high"]:
        return f"The model learned to work step by step: {change}."
    return f"In this run accuracy did not change by more than its intervals: {change}."


def tools_outcome(before: Results, after: Results) -> str:
    """Return a sentence on whether the model learned when a call pays."""
    large, small = (f"{size}:accuracy" for size in ("large", "small"))
    change = (
        f"of the large sums {before[large]:.0%} were right before and {after[large]:.0%} after, with "
        f"{after['large:called']:.0%} of them computed by the tool; of the small ones {before[small]:.0%} and "
        f"{after[small]:.0%}, with {after['small:called']:.0%} computed by the tool"
    )
    if after[f"{large}_low"] > before[f"{large}_high"] and after["small:called_high"] < after["large:called_low"]:
        return f"The model learned when to call the tool: {change}."
    return f"In this run the intervals do not show that the model learned when to call the tool: {change}."


STORIES: Mapping[str, Story] = {
    "reasoning": Story(
        run="demo",
        sft="tiny/sft",
        grpo="tiny/grpo-demo",
        title="A small model learns to reason",
        lead=(
            "A language model of under a million parameters, trained on this machine in minutes. First it copies a "
            "format from demonstrations that mostly guess. Then reinforcement learning only says right or wrong. "
        ),
        texts=(
            "`tiny` is a language model of under a million parameters that ships with this package. It has read "
            "little stories and worked sums, nothing else: it completes text and does not know what a question is.",
            "It now copies demonstrations of the format <think> ... </think> <answer> ... </answer>. Most of them "
            "guess the answer at once, only some write down their steps; so it learns the format, and mostly to guess.",
            "There are no demonstrations any more. The model writes several answers to each problem; the right ones "
            "earn a reward, and their tokens become more likely. Watch accuracy, length and the share of answers that "
            "show their steps: does the model learn to work step by step?",
        ),
        descriptions=(
            "was trained on stories and sums, not on questions",
            "knows the format; mostly guesses",
            "was trained on right-or-wrong rewards",
        ),
        outcome=reasoning_outcome,
    ),
    "tools": Story(
        run="demo-tools",
        sft="tiny/sft-calculator",
        grpo="tiny/grpo-calculator",
        title="A small model learns when to use a tool",
        lead=(
            "A language model of under a million parameters, trained on this machine in minutes. It can do small sums "
            "in its head and no large ones. Demonstrations show how a calculator is called, and not when. Then "
            "reinforcement learning says right or wrong, and a call costs a little. "
        ),
        texts=(
            "`tiny` is a language model of under a million parameters that ships with this package. It has read sums "
            "of numbers below a hundred. It does not know what a question is, and has never met a tool.",
            "It now copies demonstrations. Most write the sum down and answer; one in four, of small numbers and "
            "large ones alike, calls a calculator with <tool>calculator: ...</tool>, reads its result, and answers. "
            "So it learns how a tool is called, and calls it rarely.",
            "There are no demonstrations any more. A right answer earns 1, and a call costs 0.1. Watch the calls for "
            "small sums and for large ones: does the model learn when a call is worth its price?",
        ),
        descriptions=(
            "was trained on small sums, not on questions",
            "was shown a few calls, whatever the numbers",
            "was trained on right-or-wrong rewards; a call costs a little",
        ),
        outcome=tools_outcome,
        shares={
            "small:accuracy": "of the small sums",
            "small:called": "of these by a call",
            "large:accuracy": "of the large ones",
            "large:called": "of these by a call",
        },
    ),
}


@dataclass(frozen=True)
class Plan:
    """The two runs of one demo: their folders and resolved recipes."""

    story: Story
    sft: Path
    grpo: Path
    sft_recipe: Recipe
    grpo_recipe: Recipe

    @property
    def problems(self) -> str:
        """The seed of the problems in brackets, where their task has one: under another they are other problems."""
        seed = self.grpo_recipe.task.options.get("seed")
        return "" if seed is None else f" (task.seed {seed})"


def run_demo(arguments: argparse.Namespace) -> int:
    """Measure, train, measure, train, measure, show."""
    started, console = time.monotonic(), open_console()
    root, story = Path(arguments.runs_dir), STORIES[arguments.story]
    plan = make_plan(root, arguments.seed, story)
    component = plan.grpo_recipe.task
    task = build_task(map_tasks(component, lambda one: Component(name=one.name, **(one.options | {"split": "test"}))))
    stages: dict[str, Evaluation] = {}
    for label, title, text, folder, recipe in (
        (LABELS[0], "1. The base model", story.texts[0], None, plan.sft_recipe),
        (LABELS[1], "2. Demonstrations (SFT)", story.texts[1], plan.sft, plan.sft_recipe),
        (LABELS[2], "3. Reinforcement learning (GRPO)", story.texts[2], plan.grpo, plan.grpo_recipe),
    ):
        _say(console, title, text)
        if folder is not None and _train(recipe, folder, arguments.quiet).reason != "finished":
            again = "posttrain demo" + ("" if arguments.story == "reasoning" else f" --story {arguments.story}")
            what = f"Stopped; everything so far is saved. `{again}` again goes on from here."
            console.print(Text(what, style="yellow"))
            return INTERRUPTED
        source = find_source(recipe.model.name if folder is None else str(folder), root)
        stages[label] = _measure(replace(source, recipe=plan.grpo_recipe), task, label)
        console.print(Text(_line(label, stages[label].results, story), style="bold"))
    seconds = time.monotonic() - started
    transcripts = side_by_side(stages, plan.grpo_recipe)
    report = write_story(plan, stages, transcripts, arguments.seed, seconds)
    _show_end(console, plan, stages, transcripts)
    console.print(Text(f"\n{outcome(story, stages)} {show_duration(seconds)} in all."))
    # What is to be opened or typed stays on one line, however narrow the terminal.
    console.print(Text(f"report: {report}\ncurves: {plan.grpo / 'curves.png'}"), soft_wrap=True)
    console.print(Text("Now ask it yourself:  ").append(f"posttrain generate {plan.grpo}", "bold cyan"), soft_wrap=True)
    return 0


def make_plan(root: Path, seed: int, story: Story) -> Plan:
    """Choose fresh names, or those of the newest demo of the same recipes that did not finish."""
    for count in itertools.count(1):
        suffix = "" if count == 1 else f"-{count}"
        sft, grpo = root / f"{story.run}-sft{suffix}", root / f"{story.run}-grpo{suffix}"
        seeded = ("train.seed", str(seed))
        sft_recipe = load_recipe(story.sft, [seeded]).resolve()
        grpo_recipe = load_recipe(story.grpo, [seeded, ("model.name", json.dumps(str(sft)))]).resolve()
        if not sft.exists() and not grpo.exists():
            break
        status = RunDirectory(grpo).read_status()
        is_open = sft.exists() and (status is None or status.state != "finished")
        if is_open and _can_continue(sft, sft_recipe) and _can_continue(grpo, grpo_recipe):
            break
    return Plan(story, sft, grpo, sft_recipe, grpo_recipe)


def _can_continue(folder: Path, recipe: Recipe) -> bool:
    if (folder / "recipe.yaml").is_file():
        return not is_live(folder) and not RunDirectory(folder).changed_keys(recipe)
    return not folder.exists()


def _train(recipe: Recipe, folder: Path, quiet: bool) -> RunResult:
    is_there = (folder / "recipe.yaml").is_file()
    with choose_progress(folder.name, quiet) as progress:
        return carry_out(recipe, folder.name, folder.parent, folder.name, progress, resume=is_there)[0]


def _measure(source: ModelSource, task: Task, label: str) -> Evaluation:
    """Evaluate a model on the task as reinforcement learning asks it, with its environment where it has one."""
    assert source.recipe is not None
    assert source.recipe.rollout is not None
    max_tokens = source.recipe.rollout.max_tokens
    model = open_model(source).on_stage(None)
    evaluation = measure(model, task, Drawing(n=NUM_HELD_OUT, max_tokens=max_tokens))
    if source.run is not None:
        settings: dict[str, object] = {"model": model.label, "label": label, "split": task.split}
        settings |= {"temperature": 0.0, "max_tokens": max_tokens}
        folder = source.run / "evaluation" / f"{task.name}-{task.split}"
        write_evaluation(folder, settings, evaluation, write_page)
    return evaluation


def _line(label: str, r: Results, story: Story) -> str:
    parts = [f"{r[key]:.0%} {description}" for key, description in story.shares.items() if key in r]
    worked = f", {r['shows_reasoning']:.0%} show their working" if "shows_reasoning" in r else ""
    return (
        f"{label}: {r['accuracy']:.1%} of {r['n']:.0f} problems of the test split right (95 % interval "
        f"{r['accuracy_low']:.1%} to {r['accuracy_high']:.1%}){worked}{': ' * bool(parts)}{', '.join(parts)}."
    )


def side_by_side(stages: Mapping[str, Evaluation], recipe: Recipe) -> list[Transcript]:
    """Return the first held-out problems with the answers of every model."""
    extract = build_template(recipe.prompt.template).extract
    by_id = {label: {r.example.id: r for r in evaluation.rollouts} for label, evaluation in stages.items()}
    shared = [key for key in by_id[LABELS[-1]] if all(key in rollouts for rollouts in by_id.values())]
    transcripts = []
    for key in shared[:NUM_TRANSCRIPTS]:
        answers = []
        for label, rollouts in by_id.items():
            rollout = rollouts[key]
            answer = Answer(
                label=label,
                text=show_turns(rollout.turns, rollout.failures) or rollout.text,
                is_correct=rollout.parts["correct"] == 1.0,
                extracted=extract(rollout.text),
                num_tokens=rollout.completion.num_own,
                is_cut=rollout.completion.finish == "length",
            )
            answers.append(answer)
        transcripts.append(Transcript(rollout.example.messages[-1].content, rollout.example.answer, answers))
    return transcripts


def write_story(
    plan: Plan, stages: Mapping[str, Evaluation], transcripts: Sequence[Transcript], seed: int, seconds: float
) -> Path:
    """Write ``report.html`` and ``demo.json`` into the folder of the GRPO run; return the report's path."""
    story, name = plan.story, stages[LABELS[0]].name
    results = {label: evaluation.results for label, evaluation in stages.items()}
    content = {"seed": seed, "seconds": seconds, "evaluation": name, "results": results}
    replace_file(plan.grpo / "demo.json", json.dumps(content, indent=1).encode() + b"\n", durable=False)
    about = f"{results[LABELS[0]]['n']:.0f} problems of the test split{plan.problems}"
    report = Report(
        title=story.title,
        lead=story.lead + outcome(story, stages),
        stages=[Stage(label, text, results[label]) for label, text in zip(LABELS, story.descriptions, strict=True)],
        stages_note=f"{about}, the same for all; greedy decoding. {OTHER_PROBLEMS}",
        transcripts=transcripts,
        transcripts_note="The first problems of the held-out set, as they came.",
        chapters=[
            chapter_of(plan.grpo, "Reinforcement learning, step by step", story.texts[2]),
            chapter_of(plan.sft, "The demonstrations before it", story.texts[1]),
        ],
        environment=last_start(RunDirectory(plan.grpo)),
        commands=[
            ("ask the trained model", f"posttrain generate {plan.grpo}"),
            ("ask the one that guesses", f"posttrain generate {plan.sft}"),
            ("read the equation", "posttrain explain grpo"),
            ("change something", f"posttrain train {story.grpo} --model.name {plan.sft} --rollout.group_size 16"),
            ("see all runs", "posttrain runs"),
        ],
    )
    return write_html(render_report(report), plan.grpo / "report.html")


def outcome(story: Story, stages: Mapping[str, Evaluation]) -> str:
    """Return the effect of reinforcement learning in one sentence that follows the figures."""
    return story.outcome(stages[LABELS[1]].results, stages[LABELS[2]].results)


def _say(console: Console, title: str, text: str) -> None:
    console.print()
    console.print(Panel(Text(text), title=title, title_align="left", width=min(100, console.width)))


def _show_end(
    console: Console, plan: Plan, stages: Mapping[str, Evaluation], transcripts: Sequence[Transcript]
) -> None:
    what = f"The same problems{plan.problems}, none of which was trained on. Greedy decoding. {OTHER_PROBLEMS}"
    _say(console, "4. The three, side by side", what)
    for transcript in transcripts[:NUM_SHOWN]:
        title = Text(f"{transcript.question}  (answer: {transcript.gold})")
        table = Table(title=title, title_justify="left", expand=False)
        for answer in transcript.answers:
            verdict = (answer.verdict, "green" if answer.is_correct else "red")
            table.add_column(Text.assemble(f"{answer.label}: ", verdict), ratio=1)
        table.add_row(*(Text(answer.text + (" …" if answer.is_cut else "")) for answer in transcript.answers))
        console.print(table)
    rows = [ResultsRow(label, None, evaluation.name, evaluation.results) for label, evaluation in stages.items()]
    print_table(console, results_table(rows))
