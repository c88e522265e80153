"""``posttrain plan``: what a recipe would take on GPUs that are not here."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.commands.console import Text, open_console, plain_table
from posttrain.commands.options.argument_types import positive
from posttrain.commands.progress import show_duration
from posttrain.commands.runs.show import show_bytes
from posttrain.errors import UsageError
from posttrain.file_kinds import kind_of_file
from posttrain.recipes.document import recipe_names
from posttrain.recipes.recipe import Recipe, load_recipe

if TYPE_CHECKING:  # takes transformers, and a wrong name is refused without it
    from posttrain.train.planning.lengths import Draw
    from posttrain.train.planning.plan import Plan

EPILOG = """\
any key of the recipe is an option:
  posttrain plan grpo-gsm8k --gpus 8xH100 --train.gradient_checkpointing false
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.usage = "posttrain plan RECIPE_OR_RUN --gpus 8xH100 [options] [--section.key value ...]"
    what = "a name that `posttrain recipes` lists, a YAML file, or the name or the folder of a run"
    parser.add_argument("recipe", metavar="RECIPE_OR_RUN", help=what)
    parser.add_argument("--gpus", required=True, metavar="NxKIND", help="how many of which kind, such as 8xH100")
    parser.add_argument(
        "--answer-tokens", type=positive, metavar="N", help="mean length of answers (default: the longest allowed)"
    )
    long = "95 %% of the answers have at most so many tokens: lengths are then lognormal, with the mean --answer-tokens"
    parser.add_argument("--answer-p95", type=positive, metavar="N", help=long)
    parser.add_argument("--answers-of", metavar="RUN", help="lengths as this run has recorded them in training")


def run_plan(arguments: argparse.Namespace) -> int:
    """Print memory and seconds by part, and what to change where it does not fit; 1 where it does not."""
    from posttrain.train.planning.gpus import read_gpus

    count, gpu = read_gpus(arguments.gpus)
    recipe = load_recipe(_recipe_of(arguments.recipe, arguments.runs_dir), arguments.overrides).resolve()
    lengths = _lengths_of(arguments, recipe)
    from posttrain.train.planning.plan import plan_for

    plan = plan_for(recipe, count, gpu, lengths)
    _print_memory(plan)
    _print_seconds(plan, recipe.train.steps)
    if plan.fits:
        return 0
    print("\nit does not fit" + ("; what would make it:" if plan.changes else ""))
    for keys in plan.changes:
        print(f"  {' and '.join(keys)}")
    if not plan.changes:
        print("No change that is known here makes it fit. Larger GPUs do, or more of them with sharding.")
    return 1


def _lengths_of(arguments: argparse.Namespace, recipe: Recipe) -> Draw | None:
    """How long the answers are, by the options; None: as long as they may be."""
    from posttrain.train.planning.lengths import alike, lognormal, recorded

    mean, p95, run = arguments.answer_tokens, arguments.answer_p95, arguments.answers_of
    for option in ("--answer-p95", "--answers-of"):
        if recipe.rollout is None and getattr(arguments, option[2:].replace("-", "_")) is not None:
            raise UsageError(f"{option}: answers are sampled by recipes with 'rollout'; leave it out")
    if run is not None:
        if mean is not None or p95 is not None:
            raise UsageError("--answers-of: the run says how long they are; leave --answer-tokens and --answer-p95 out")
        folders = [Path(run), Path(arguments.runs_dir) / run]
        return recorded(next((f for f in folders if kind_of_file(f / "rollouts.db") == "file"), folders[0]))
    if p95 is not None:
        if mean is None:
            raise UsageError("--answer-p95: give their mean, too, with --answer-tokens")
        return lognormal(mean, p95)
    return None if mean is None else alike(mean)


def _recipe_of(name: str, runs_dir: str) -> str:
    """The file with a run's recipe, by the run's folder or its name, which no shipped recipe has; else ``name``."""
    folders = [Path(name), *([] if name in recipe_names() else [Path(runs_dir) / name])]
    stored = [folder / "recipe.yaml" for folder in folders]
    return next((str(path) for path in stored if kind_of_file(path) == "file"), name)


def _print_memory(plan: Plan) -> None:
    from posttrain.train.planning.plan import most, room

    table = plain_table()
    table.add_column(Text(f"memory of one of {plan.count} {plan.gpu.name}"), no_wrap=True)
    for sharding in plan.memory:
        titles = {"none": "whole model" if plan.count > 1 else "", "fsdp2": "sharded (fsdp2)"}
        table.add_column(titles[sharding], justify="right", no_wrap=True)
    for rows in zip(*(memory.rows() for memory in plan.memory.values()), strict=True):
        if any(num_bytes for _, num_bytes in rows):
            table.add_row(f"  {rows[0][0]}", *(show_bytes(num_bytes) for _, num_bytes in rows))
    table.add_row("  room", *(show_bytes(round(room(plan.gpu))) for _ in plan.memory))
    table.add_row("", *("fits" if most(m) <= room(plan.gpu) else "does not fit" for m in plan.memory.values()))
    open_console().print(table)
    at_a_time = "; as many at a time as the machine's holds" if plan.count > 1 else ""
    print(f"main memory: {show_bytes(plan.loading)} while a process loads the model{at_a_time}")


def _print_seconds(plan: Plan, steps: int | None) -> None:
    what = "step" if plan.updates == 1 else f"rollout batch of {plan.updates} steps"
    print(f"\nseconds of a {what}, from data-sheet rates and assumed shares of them (docs/plan.md):")
    for part in ("generate", "score", "update", "sync"):
        if getattr(plan.seconds, part):
            print(f"  {part:<10}{getattr(plan.seconds, part):10.3g}")
    print(f"  {'in turns':<10}{plan.seconds.total:10.3g}")
    for staleness, seconds in plan.ahead.items():
        if staleness:
            servers = ", as vLLM servers" if plan.count > 1 else ""
            apart = f"where as many GPUs again do nothing but sample{servers}"
            print(f"  {seconds:.3g} with rollout.staleness {staleness}, {apart}")
    for staleness, seconds in plan.partial.items():
        print(f"  {seconds:.3g} with rollout.staleness {staleness} and rollout.partial, where one GPU more samples")
    if steps is not None:
        whole = show_duration(steps / plan.updates * plan.seconds.total)
        print(f"  {steps} steps: {whole} in turns, without evaluations")
