"""``posttrain evaluate`` and ``posttrain generate``: a model, a template, an engine."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from posttrain import registry
from posttrain.apps.console import open_console
from posttrain.apps.summary import read_run_recipe
from posttrain.engines.base import Engine, Sampling
from posttrain.errors import UsageError
from posttrain.evals.generation import Evaluation, evaluate
from posttrain.models.load import load_model
from posttrain.randomness import derive_key
from posttrain.recipe import ModelSection, Recipe, RewardWord, Word, apply_override
from posttrain.render import decode_response, encode_prompt, stop_ids
from posttrain.rollout import Attempt, Grader, build_grader
from posttrain.runs.directory import find_run, run_names
from posttrain.store.durable import replace_file, storage_errors
from posttrain.store.rollouts import RolloutStore
from posttrain.tasks.base import Task
from posttrain.train.setup import build_task, build_template, context_length, held_out_task
from posttrain.types import Completion, Example, Message

DEFAULT_MAX_TOKENS = 256
ROLLOUTS = "rollouts.db"


@dataclass(frozen=True)
class Sampler:
    """A model that can be asked. ``run`` and ``recipe`` are there when it came out of a run."""

    label: str
    model: Any
    tokenizer: Any
    engine: Engine
    grader: Grader
    max_tokens: int
    run: Path | None = None
    recipe: Recipe | None = None

    def sampling(self, max_tokens: int | None, temperature: float) -> Sampling:
        """How tokens are drawn; None: as long as the run's answers may be."""
        stops = stop_ids(self.tokenizer, self.grader.template)
        return Sampling(max_tokens or self.max_tokens, temperature=temperature, stop_ids=stops)


def open_sampler(name: str, runs_dir: str | Path, template: Word | None = None) -> Sampler:
    """Load a model by name, directory, or run, with the template that it was trained with.

    Raises:
        UsageError: no such model or run, or one that cannot be loaded.
    """
    run = _run_folder(name, runs_dir)
    recipe = read_run_recipe(run) if run is not None else None
    if recipe is not None and not writes_answers(recipe):
        raise UsageError(
            f"{name}: this run trained a reward model ({recipe.objective.name}); it scores answers and writes none. "
            "Its held-out accuracy is in results.json and report.html of the run"
        )
    section = ModelSection(name=str(run) if run is not None else name)
    if recipe is not None:
        section = section.model_copy(update={"dtype": recipe.model.dtype, "device": recipe.model.device})
    loaded = load_model(section, seed=0)
    word = template or (recipe.prompt.template if recipe is not None else Word(name="r1_zero"))
    rewards = recipe.rewards if recipe is not None and template is None else [RewardWord(name="correct")]
    grader = build_grader(rewards, build_template(word, "template"))
    engine = registry.find("engine", "native").bind({}, "engine")(loaded.model, loaded.tokenizer)
    label = run.name if run is not None else name
    return Sampler(label, loaded.model, loaded.tokenizer, engine, grader, _max_tokens(recipe), run, recipe)


def writes_answers(recipe: Recipe) -> bool:
    """Whether what a recipe trains is a policy, and not a reward model."""
    return registry.find("objective", recipe.objective.name).traits.get("head") != "score"


def _run_folder(name: str, runs_dir: str | Path) -> Path | None:
    if (Path(name) / "recipe.yaml").is_file() or name in run_names(runs_dir):
        return find_run(runs_dir, name)
    return None


def _max_tokens(recipe: Recipe | None) -> int:
    if recipe is None:
        return DEFAULT_MAX_TOKENS
    trained = recipe.rollout.max_tokens if recipe.rollout is not None else None
    return recipe.eval.max_tokens or trained or DEFAULT_MAX_TOKENS


def measure(
    sampler: Sampler, task: Task, *, n: int, max_tokens: int | None = None, temperature: float = 0.0, seed: int = 0
) -> Evaluation:
    """Evaluate a sampler on a task (``evals/generation.py``)."""
    return evaluate(
        sampler.engine,
        sampler.tokenizer,
        sampler.grader,
        task,
        n=n,
        sampling=sampler.sampling(max_tokens, temperature),
        context_tokens=context_length(sampler.model),
        seed=seed,
    )


def chosen_words(arguments: argparse.Namespace) -> dict[str, Word]:
    """The words ``task`` and ``template`` of the command line, each with its options."""
    data: dict[str, Any] = {}
    for key in ("task", "template"):
        if getattr(arguments, key, None) is not None:
            apply_override(data, key, json.dumps(getattr(arguments, key)))
    for key, value in arguments.overrides:
        apply_override(data, key, value)
    for value in data.values():
        if isinstance(value, dict):
            value.setdefault("name", "")  # options of a word that is not named here
    return {key: Word.model_validate(value) for key, value in data.items()}


def choose_task(given: Word | None, model: str, recipe: Recipe | None) -> Word:
    """What to measure on: the task named, else the run's own, else stories for ``tiny``.

    The split is ``test`` unless given. Of a run's own local file, which was trained on, it is the
    part that was held out.

    Raises:
        UsageError: a model that is no run, and no task named.
    """
    options: dict[str, Any] = dict(given.options) if given is not None else {}
    split = "test"
    if given is not None and given.name:
        name = given.name
    elif recipe is not None:
        name = recipe.task.name
        own = {key: value for key, value in recipe.task.options.items() if key != "split"}
        if own.get("path") is not None and "path" not in options:
            split = held_out_task(recipe.task).options["split"]
        options = own | options
    elif model == "tiny":
        name = "stories"
    else:
        known = ", ".join(registry.entries("task"))
        raise UsageError(f"--task is needed: {model!r} is no run that would tell its own. Known tasks: {known}")
    if "split" in registry.find("task", name, "--task").options_model().model_fields:
        options.setdefault("split", split)
    return Word(name=name, **options)


def run_evaluate(arguments: argparse.Namespace) -> int:
    """Measure, print a table, write ``results.json`` and every graded answer."""
    words = chosen_words(arguments)
    run = _run_folder(arguments.model, arguments.runs_dir)
    recipe = read_run_recipe(run) if run is not None else None
    word = choose_task(words.get("task"), arguments.model, recipe)
    task = build_task(word, "--task")
    template = words.get("template")
    sampler = open_sampler(arguments.model, arguments.runs_dir, _completed(template, recipe))
    evaluation = measure(
        sampler,
        task,
        n=arguments.n,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
    )
    out = Path(arguments.out) if arguments.out else _default_out(sampler, evaluation.name)
    settings = {
        "model": arguments.model,
        "task": word.model_dump(),
        "template": sampler.grader.template.name,
        "max_tokens": arguments.max_tokens or sampler.max_tokens,
        "temperature": arguments.temperature,
        "seed": arguments.seed,
        "dropped": task.dropped,
    }
    write_evaluation(out, evaluation, settings)
    if not arguments.quiet:
        print_results(open_console(), [(sampler.label, evaluation)])
        _print_dropped(task, evaluation)
        print(f"results and every answer: {out}")
    return 0


def _completed(template: Word | None, recipe: Recipe | None) -> Word | None:
    """Options alone (``--template.preamble``) belong to the run's own template."""
    if template is None or template.name:
        return template
    base = recipe.prompt.template if recipe is not None else Word(name="r1_zero")
    return Word(name=base.name, **(base.options | template.options))


def _default_out(sampler: Sampler, evaluation: str) -> Path:
    leaf = evaluation.replace("/", "-")
    if sampler.run is not None:
        return sampler.run / "evaluation" / leaf
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", sampler.label).strip("-.") or "model"
    return Path("evaluations") / f"{plain}-{leaf}"


def write_evaluation(out: Path, evaluation: Evaluation, settings: dict[str, Any]) -> None:
    """``results.json`` and ``rollouts.db`` in ``out``; those of an earlier evaluation there are replaced.

    Raises:
        StorageError: the disk is full or not writable.
    """
    with storage_errors("evaluation", out):
        out.mkdir(parents=True, exist_ok=True)
    with RolloutStore(out / ROLLOUTS) as store:
        store.trim(-1)
        store.record(evaluation.rollouts, evaluation=evaluation.name)
    content = {"evaluation": evaluation.name, "results": evaluation.results, "settings": settings}
    replace_file(out / "results.json", json.dumps(content, indent=1).encode() + b"\n")


def print_results(console: Console, rows: Sequence[tuple[str, Evaluation]]) -> None:
    """A table with one row per model: accuracy with its 95 % interval, and what surrounds it."""
    title = f"{rows[0][1].name}, n = {rows[0][1].results['n']:.0f}"
    table = Table(title=title, title_justify="left")
    has_worked = any("worked" in e.results for _, e in rows)
    table.add_column("model")
    for column in ("right", "95 % interval", "format", *(["worked"] if has_worked else []), "no answer", "cut off"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("tokens", justify="right")
    for label, evaluation in rows:
        r = evaluation.results
        cells = [f"{r['accuracy']:.1%}", f"{r['accuracy_low']:.1%} – {r['accuracy_high']:.1%}", f"{r['format']:.1%}"]
        if has_worked:
            cells.append(f"{r['worked']:.1%}" if "worked" in r else "–")
        cells += [f"{r['parse_failures']:.1%}", f"{r['truncated']:.1%}", f"{r['num_tokens']:.0f}"]
        table.add_row(Text(label), *cells)
    console.print(table)


def _print_dropped(task: Task, evaluation: Evaluation) -> None:
    dropped = {reason: count for reason, count in task.dropped.items() if count}
    if dropped:
        print("left out of the data: " + ", ".join(f"{count} {reason}" for reason, count in dropped.items()))
    too_long = int(evaluation.results.get("prompts_too_long", 0))
    if too_long:
        print(f"{too_long} prompts do not fit into the model's context; they count as wrong")


def run_generate(arguments: argparse.Namespace) -> int:
    """Sample answers to a prompt, or to a made-up problem, and show what they are worth."""
    words = chosen_words(arguments)
    run = _run_folder(arguments.model, arguments.runs_dir)
    recipe = read_run_recipe(run) if run is not None else None
    if arguments.prompt is not None:
        if not arguments.prompt.strip():
            raise UsageError("PROMPT is empty: give a question, or leave it out for a made-up one")
        example = Example("prompt", (Message("user", arguments.prompt),))
    else:
        task = build_task(choose_task(None, arguments.model, recipe), "task")
        example = task.examples[arguments.seed % len(task.examples)]
    sampler = open_sampler(arguments.model, arguments.runs_dir, _completed(words.get("template"), recipe))
    prompt = encode_prompt(sampler.tokenizer, sampler.grader.template, example.messages)
    keys = [derive_key(arguments.seed, "generate", i) for i in range(arguments.n)]
    sampling = sampler.sampling(arguments.max_tokens, arguments.temperature)
    completions = sampler.engine.generate([prompt], [keys], sampling)[0]
    console = open_console()
    console.print(Text("\n".join(message.content for message in example.messages), style="bold"))
    for completion in completions:
        _print_completion(console, sampler, example, completion)
    return 0


def _print_completion(console: Console, sampler: Sampler, example: Example, completion: Completion) -> None:
    template = sampler.grader.template
    text = decode_response(sampler.tokenizer, template, completion.ids)
    extracted = template.extract(text)
    facts = [f"{len(completion.ids)} tokens", "cut off" if completion.finish == "length" else "ended by itself"]
    if completion.logprobs:
        facts.append(f"mean log-prob {math.fsum(completion.logprobs) / len(completion.logprobs):.3f}")
    facts.append("no answer found" if extracted is None else f"answer {extracted}")
    if example.answer is not None:
        grade = sampler.grader.grade([Attempt(example, "", text, completion)])[0]
        facts.append("right" if grade.outcome == "right" else f"wrong, it is {example.answer}")
    console.print()
    console.print(Text(text))
    console.print(Text(" · ".join(facts), style="dim"))
