"""``posttrain demo``: a small model learns to reason, to use a tool, or to add, while you watch.

A small version of R1-Zero. Unless the base model can already chat, it first learns an output format from
demonstrations. Then reinforcement learning with right-or-wrong rewards improves it. Every stage is evaluated on the
same problems.
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

from posttrain.api.training import write_run_summary
from posttrain.data.base import Task, build_task
from posttrain.data.render.template import build_template
from posttrain.errors import INTERRUPTED
from posttrain.evaluation.files import write_evaluation
from posttrain.evaluation.generation import Evaluation
from posttrain.evaluation.plan import Drawing, measure
from posttrain.evaluation.tables import ResultsRow, results_table
from posttrain.recipes.recipe import Recipe, load_recipe
from posttrain.recipes.sections import Component, map_tasks
from posttrain.reports.evaluation_page import write_page
from posttrain.reports.page import write_html
from posttrain.reports.run_page import ReportStage, RunReport, Transcript, TranscriptAnswer, render_report
from posttrain.reports.summary import NUM_TRANSCRIPTS, chapter_of, last_start
from posttrain.runs.directory import RunDirectory, is_live
from posttrain.runs.launch import RunResult, RunStart, launch
from posttrain.runs.models import find_source
from posttrain.sampling.models import ModelSource, open_model
from posttrain.store.durable import replace_file
from posttrain.store.turns import show_turns
from posttrain.terminal.console import Text, open_console, print_table
from posttrain.terminal.training_progress import choose_progress, show_duration

NUM_HELD_OUT = 500
NUM_SHOWN = 2
BASE, AFTER_SFT, AFTER_GRPO = "base", "after SFT", "after GRPO"
OTHER_PROBLEMS = (
    "Evaluations during training use the validation split, which also selects the best weights; results may differ "
    "slightly, within the intervals."
)

Results = Mapping[str, float]


@dataclass(frozen=True)
class DemoStory:
    """A demo with up to three stages: base model, supervised fine-tuning, reinforcement learning.

    ``sft``, ``grpo``: recipes, with runs named ``run``-sft and ``run``-grpo. Without ``sft``, reinforcement learning
    starts from the base model. ``texts``: printed before each stage, keyed by label. ``descriptions``: shown in the
    report. ``shares``: extra results to print per stage, with labels. ``outcome``: builds a sentence comparing
    results before and after reinforcement learning. ``options``: command line options for this story.
    """

    run: str
    sft: str | None
    grpo: str
    title: str
    lead: str
    texts: Mapping[str, str]
    descriptions: Mapping[str, str]
    outcome: Callable[[Results, Results], str]
    shares: Mapping[str, str] = field(default_factory=dict)
    options: str = ""

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the models, in order."""
        return tuple(self.texts)

    @property
    def before(self) -> str:
        """Label of the stage before reinforcement learning."""
        return self.labels[-2]


def reasoning_outcome(before: Results, after: Results) -> str:
    """Return a sentence on whether the model learned to work step by step."""
    change = f"right answers went from {before['accuracy']:.0%} to {after['accuracy']:.0%}"
    if "shows_reasoning" in before and "shows_reasoning" in after:
        change += (
            f", answers that show their working from {before['shows_reasoning']:.0%} to {after['shows_reasoning']:.0%}"
        )
    if after["accuracy_low"] > before["accuracy_high"]:
        return f"The model learned to work step by step: {change}."
    return f"In this run the change in accuracy is within the intervals: {change}."


def tools_outcome(before: Results, after: Results) -> str:
    """Return a sentence on whether the model learned when a call pays."""
    large = "large:accuracy"
    small = "small:accuracy"
    change = (
        f"large sums: {before[large]:.0%} correct before and {after[large]:.0%} after, with "
        f"{after['large:called']:.0%} using the tool; small sums: {before[small]:.0%} and "
        f"{after[small]:.0%}, with {after['small:called']:.0%} using the tool"
    )
    if after[f"{large}_low"] > before[f"{large}_high"] and after["small:called_high"] < after["large:called_low"]:
        return f"The model learned when to call the tool: {change}."
    return f"In this run the intervals are too wide to show when the model calls the tool: {change}."


def sums_outcome(before: Results, after: Results) -> str:
    """Return a sentence on whether the model learned to add and to subtract."""
    change = f"right answers went from {before['accuracy']:.0%} to {after['accuracy']:.0%}"
    if after["accuracy_low"] > before["accuracy_high"]:
        return f"The model improved with correctness rewards: {change}."
    return f"In this run the change in accuracy is within the intervals: {change}."


STORIES: Mapping[str, DemoStory] = {
    "reasoning": DemoStory(
        run="demo",
        sft="tiny/sft",
        grpo="tiny/grpo-demo",
        title="A small model learns to reason",
        lead=(
            "A language model with under a million parameters, trained on this machine in minutes. First it copies a "
            "format from demonstrations that mostly guess. Then reinforcement learning only rewards correct answers. "
        ),
        texts={
            BASE: "`tiny` is a language model with under a million parameters, shipped with this package, trained on "
            "little stories and worked sums, nothing else: it completes text and cannot answer questions yet.",
            AFTER_SFT: "It now copies demonstrations of the format <think> ... </think> <answer> ... </answer>. Most "
            "guess right away, and only some show intermediate steps. So the model learns the format, and mostly "
            "to guess.",
            AFTER_GRPO: "No more demonstrations. The model samples several answers per problem. The "
            "correct ones earn a reward, and their tokens become more likely. Watch accuracy, length and how many "
            "answers have intermediate steps: does the model learn to work step by step?",
        },
        descriptions={
            BASE: "was trained on stories and sums, not on questions",
            AFTER_SFT: "knows the format; mostly guesses",
            AFTER_GRPO: "was trained with correctness rewards",
        },
        outcome=reasoning_outcome,
    ),
    "tools": DemoStory(
        run="demo-tools",
        sft="tiny/sft-calculator",
        grpo="tiny/grpo-calculator",
        title="A small model learns when to use a tool",
        lead=(
            "A language model with under a million parameters, trained on this machine in minutes. It can add small "
            "numbers, but not large ones. Demonstrations show how to call a calculator, but not when. Then "
            "reinforcement learning rewards correct answers, minus a small cost per call. "
        ),
        texts={
            BASE: "`tiny` is a language model with under a million parameters, shipped with this package, trained on "
            "sums of numbers below a hundred. It cannot answer questions yet, and has never used a tool.",
            AFTER_SFT: "It now copies demonstrations. Most write down the sum and the result. A quarter, for small "
            "and large numbers alike, call a calculator with <tool>calculator: ...</tool>, read the result, "
            "then answer. So the model learns how to call a tool, but calls it rarely.",
            AFTER_GRPO: "No more demonstrations. A correct answer earns 1, and each call costs 0.1. Watch "
            "calls for small and large sums: does the model learn when a call is worth the cost?",
        },
        descriptions={
            BASE: "was trained on small sums, not on questions",
            AFTER_SFT: "was shown a few calls, whatever the numbers",
            AFTER_GRPO: "was trained with correctness rewards; a call costs a little",
        },
        outcome=tools_outcome,
        shares={
            "small:accuracy": "of the small sums",
            "small:called": "of these by a call",
            "large:accuracy": "of the large ones",
            "large:called": "of these by a call",
        },
        options=" --story tools",
    ),
    "smollm2": DemoStory(
        run="demo-smollm2",
        sft=None,
        grpo="smollm2/grpo-sums",
        title="A well-known chat model learns to add",
        lead=(
            "SmolLM2-135M-Instruct, dequantized from 4 bits, trained on this machine in minutes. It chats, and gets "
            "few sums right. Reinforcement learning only rewards correct answers. "
        ),
        texts={
            BASE: "SmolLM2-135M-Instruct is a chat model with 134.5M parameters, dequantized from 4 bits. It comes "
            "from the Python package index on first use. The task: sums and differences with numbers up to "
            "99.",
            AFTER_GRPO: "No demonstrations. The model samples several answers per question. The correct "
            "ones earn a reward, and their tokens become more likely. Watch accuracy and length: does the model learn "
            "to write down the sum, then stop?",
        },
        descriptions={
            BASE: "a chat model, dequantized from 4 bits",
            AFTER_GRPO: "was trained with correctness rewards (LoRA)",
        },
        outcome=sums_outcome,
        options=" --story smollm2",
    ),
}
TITLES = {BASE: "The base model", AFTER_SFT: "Demonstrations (SFT)", AFTER_GRPO: "Reinforcement learning (GRPO)"}


@dataclass(frozen=True)
class Plan:
    """Run folders and resolved recipes for a demo, keyed by stage label."""

    story: DemoStory
    folders: Mapping[str, Path]
    recipes: Mapping[str, Recipe]

    @property
    def grpo(self) -> Path:
        return self.folders[AFTER_GRPO]

    @property
    def grpo_recipe(self) -> Recipe:
        return self.recipes[AFTER_GRPO]

    @property
    def base(self) -> str:
        """Name of the initial model."""
        return next(iter(self.recipes.values())).model.name

    @property
    def problems(self) -> str:
        """Text with the task seed, empty if the task has none. Different seeds give different problems."""
        seed = self.grpo_recipe.task.options.get("seed")
        if seed is None:
            return ""
        return f" (task.seed {seed})"


def run_demo(arguments: argparse.Namespace) -> int:
    """Measure, train, measure, train, measure, show."""
    started = time.monotonic()
    console = open_console()
    root = Path(arguments.runs_dir)
    story = STORIES[arguments.story]
    plan = plan_demo(root, arguments.seed, story)
    component = plan.grpo_recipe.task
    task = build_task(map_tasks(component, lambda one: Component(name=one.name, **(one.options | {"split": "test"}))))
    stages: dict[str, Evaluation] = {}
    for number, label in enumerate(story.labels, start=1):
        _say(console, f"{number}. {TITLES[label]}", story.texts[label])
        model = plan.base
        if label in plan.folders:
            if _train(plan.recipes[label], plan.folders[label], arguments.quiet).reason != "finished":
                what = f"Stopped; everything so far is saved. `posttrain demo{story.options}` continues from here."
                console.print(Text(what, style="yellow"))
                return INTERRUPTED
            model = str(plan.folders[label])
        source = find_source(model, root)
        stages[label] = _measure(replace(source, recipe=plan.grpo_recipe), task, label)
        console.print(Text(_line(label, stages[label].results, story), style="bold"))
    seconds = time.monotonic() - started
    transcripts = side_by_side(stages, build_template(plan.grpo_recipe.prompt.template).extract)
    report = write_story(plan, stages, transcripts, arguments.seed, seconds)
    _show_end(console, plan, stages, transcripts)
    console.print(Text(f"\n{describe_outcome(story, stages)} {show_duration(seconds)} in all."))
    # Keep paths and commands on a single line even in narrow terminals.
    console.print(Text(f"report: {report}\ncurves: {plan.grpo / 'curves.png'}"), soft_wrap=True)
    console.print(Text("Now ask it yourself:  ").append(f"posttrain generate {plan.grpo}", "bold cyan"), soft_wrap=True)
    return 0


def plan_demo(root: Path, seed: int, story: DemoStory) -> Plan:
    """Choose new run names, or reuse an unfinished demo with the same recipes."""
    suffix = ""
    for count in itertools.count(2):
        plan = _plan_of(root, seed, story, suffix)
        suffix = f"-{count}"
        folders = list(plan.folders.values())
        if not any(folder.exists() for folder in folders):
            break
        status = RunDirectory(plan.grpo).read_status()
        is_open = folders[0].exists() and (status is None or status.state != "finished")
        if is_open and all(_can_continue(plan.folders[label], plan.recipes[label]) for label in plan.folders):
            break
    return plan


def _plan_of(root: Path, seed: int, story: DemoStory, suffix: str) -> Plan:
    """Build a plan with run names ending in this suffix."""
    seeded = ("train.seed", str(seed))
    overrides = [seeded]
    folders: dict[str, Path] = {}
    recipes: dict[str, Recipe] = {}
    if story.sft is not None:
        folders[AFTER_SFT] = root / f"{story.run}-sft{suffix}"
        recipes[AFTER_SFT] = load_recipe(story.sft, [seeded]).resolve()
        overrides.append(("model.name", json.dumps(str(folders[AFTER_SFT]))))
    folders[AFTER_GRPO] = root / f"{story.run}-grpo{suffix}"
    recipes[AFTER_GRPO] = load_recipe(story.grpo, overrides).resolve()
    return Plan(story, folders, recipes)


def _can_continue(folder: Path, recipe: Recipe) -> bool:
    if (folder / "recipe.yaml").is_file():
        return not is_live(folder) and not RunDirectory(folder).changed_keys(recipe)
    return not folder.exists()


def _train(recipe: Recipe, folder: Path, quiet: bool) -> RunResult:
    is_there = (folder / "recipe.yaml").is_file()
    start = RunStart(folder.parent, folder.name, folder.name, resume=is_there)
    with choose_progress(folder.name, quiet) as progress:
        return launch(recipe, start, observer=progress, summarize=write_run_summary)


def _measure(source: ModelSource, task: Task, label: str) -> Evaluation:
    """Evaluate a model on the task with the prompt and environment used in reinforcement learning."""
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


def _line(label: str, r: Results, story: DemoStory) -> str:
    line = (
        f"{label}: {r['accuracy']:.1%} of {r['n']:.0f} problems of the test split right (95 % interval "
        f"{r['accuracy_low']:.1%} to {r['accuracy_high']:.1%})"
    )
    if "shows_reasoning" in r:
        line += f", {r['shows_reasoning']:.0%} show their working"
    parts = [f"{r[key]:.0%} {description}" for key, description in story.shares.items() if key in r]
    if parts:
        line += f": {', '.join(parts)}"
    return f"{line}."


def side_by_side(stages: Mapping[str, Evaluation], extract: Callable[[str], str | None]) -> list[Transcript]:
    """Collect the first held-out problems with all models' answers. ``extract``: finds the answer in a text."""
    by_id = {label: {r.example.id: r for r in evaluation.rollouts} for label, evaluation in stages.items()}
    shared = [key for key in by_id[AFTER_GRPO] if all(key in rollouts for rollouts in by_id.values())]
    transcripts = []
    for key in shared[:NUM_TRANSCRIPTS]:
        answers = []
        for label, rollouts in by_id.items():
            rollout = rollouts[key]
            answer = TranscriptAnswer(
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
    """Write ``report.html`` and ``demo.json`` to the GRPO run folder; return the report path."""
    story = plan.story
    results = {label: evaluation.results for label, evaluation in stages.items()}
    content = {"seed": seed, "seconds": seconds, "evaluation": stages[BASE].name, "results": results}
    replace_file(plan.grpo / "demo.json", json.dumps(content, indent=1).encode() + b"\n", durable=False)
    about = f"{results[BASE]['n']:.0f} problems of the test split{plan.problems}"
    chapters = [chapter_of(plan.grpo, "Reinforcement learning, step by step", story.texts[AFTER_GRPO])]
    start = plan.base
    commands = [("ask the trained model", f"posttrain generate {plan.grpo}")]
    if AFTER_SFT in plan.folders:
        start = str(plan.folders[AFTER_SFT])
        chapters.append(chapter_of(plan.folders[AFTER_SFT], "Demonstrations", story.texts[AFTER_SFT]))
        commands.append(("ask the model before RL", f"posttrain generate {start}"))
    report = RunReport(
        title=story.title,
        lead=story.lead + describe_outcome(story, stages),
        stages=[ReportStage(label, text, results[label]) for label, text in story.descriptions.items()],
        stages_note=f"{about}, identical for all models; greedy decoding. {OTHER_PROBLEMS}",
        transcripts=transcripts,
        transcripts_note="The first problems in the held-out set, not selected.",
        chapters=chapters,
        environment=last_start(RunDirectory(plan.grpo)),
        commands=[
            *commands,
            ("read the equation", "posttrain explain grpo"),
            ("change something", f"posttrain train {story.grpo} --model.name {start} --rollout.group_size 16"),
            ("see all runs", "posttrain runs"),
        ],
    )
    return write_html(render_report(report), plan.grpo / "report.html")


def describe_outcome(story: DemoStory, stages: Mapping[str, Evaluation]) -> str:
    """Summarize the effect of reinforcement learning in a sentence."""
    return story.outcome(stages[story.before].results, stages[AFTER_GRPO].results)


def _say(console: Console, title: str, text: str) -> None:
    console.print()
    console.print(Panel(Text(text), title=title, title_align="left", width=min(100, console.width)))


def _shown_text(answer: TranscriptAnswer) -> Text:
    if answer.is_cut:
        return Text(f"{answer.text} …")
    return Text(answer.text)


def _show_end(
    console: Console, plan: Plan, stages: Mapping[str, Evaluation], transcripts: Sequence[Transcript]
) -> None:
    what = f"The same problems{plan.problems}, held out from training. Greedy decoding. {OTHER_PROBLEMS}"
    _say(console, f"{len(stages) + 1}. All side by side", what)
    for transcript in transcripts[:NUM_SHOWN]:
        title = Text(f"{transcript.question}  (answer: {transcript.gold})")
        table = Table(title=title, title_justify="left", expand=False)
        for answer in transcript.answers:
            color = "red"
            if answer.is_correct:
                color = "green"
            table.add_column(Text(f"{answer.label}: ").append(answer.verdict, color), ratio=1)
        table.add_row(*map(_shown_text, transcript.answers))
        console.print(table)
    rows = [ResultsRow(label, None, evaluation.name, evaluation.results) for label, evaluation in stages.items()]
    print_table(console, results_table(rows))
