"""``posttrain compare``, ``study`` and ``pipeline``: many runs as one question, with one table or picture.

Only the standard library is imported here until one of them runs (see ``cli``).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from posttrain.commands.options.argument_types import names, positive, repetitions, shown

COMPARE_EPILOG = """\
the same command again goes on where it stopped; finished runs are kept:
  posttrain compare compare/ppo-grpo-dpo --seeds 3
  posttrain compare tiny/grpo --over train.lr=1e-4,3e-4,1e-3 --seeds 3
  posttrain compare mine.yaml --methods grpo,dapo --train.steps 60 --methods.dapo.objective.clip_high 0.3
"""
STUDY_EPILOG = """\
the same command again goes on where it stopped; finished parts are kept:
  posttrain study overoptimization
  posttrain study prm-vs-orm --seeds 1 --best_of_n.samples 16
  posttrain study overoptimization --run more-pairs --reward_models.proxy.rollout.prompts 512
"""
PIPELINE_EPILOG = """\
the same command again goes on where it stopped; finished parts are kept:
  posttrain pipeline tiny
  posttrain pipeline tiny-hh --methods ppo,dpo --seeds 1
  posttrain pipeline tiny --run gentler --policies.grpo.regularize.kl 0.1
"""
EPILOGS = {"compare": COMPARE_EPILOG, "study": STUDY_EPILOG, "pipeline": PIPELINE_EPILOG}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of each command: which sweep, how many seeds, where."""
    kind = parser.prog.rpartition(" ")[2]
    parser.epilog = EPILOGS[kind]
    group, parts, seeds = ("policies", "parts", "how often all is done")
    if kind == "compare":
        group, parts, seeds = ("methods", "runs", "runs of each method")
        help_line = "a row for each value of one key, on a recipe of one run: train.lr=1e-4,3e-4"
        parser.add_argument("--over", type=read_over, metavar="KEY=A,B", help=help_line)
    if kind != "study":
        help_line = "only these rows" if kind == "compare" else "only these policies"
        parser.add_argument("--methods", type=names, metavar="A,B", help=f"{help_line} (default: all of the recipe)")
    parser.usage = f"posttrain {kind} RECIPE [options] [--section.key value ...] [--{group}.NAME.key value ...]"
    parser.add_argument("recipe", metavar="RECIPE", help=f"a {kind}/ name that `posttrain recipes` lists, or a file")
    parser.add_argument("--seeds", type=repetitions, metavar="N", help=f"{seeds} (default: the recipe's)")
    parser.add_argument("--jobs", type=positive, metavar="N", help=f"{parts} at a time (default: cores; 1 on a GPU)")
    parser.add_argument("--run", metavar="NAME", help="name of the directory (default: the recipe's name)")
    parser.add_argument("--dry-run", action="store_true", help="check everything and print it resolved; run nothing")
    parser.add_argument("--quiet", action="store_true", help="no progress and no table, only where the files are")


# A value as YAML has it: a comma in quotes or brackets is its own.
_VALUE = re.compile(r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|\[[^][]*\]|\{[^{}]*\}|[^,])+""")


def read_over(text: str) -> tuple[str, list[str]]:
    """``train.lr=1e-4,3e-4``: the key and its values."""
    key, _, listed = text.partition("=")
    values = [value.strip() for value in _VALUE.findall(listed)]
    if not key.strip() or len(values) < 2 or not all(values):
        raise argparse.ArgumentTypeError(f"KEY=A,B is needed, with two values or more, not {shown(text)}")
    return key.strip().removeprefix("--"), values


def run_compare(arguments: argparse.Namespace) -> int:
    """Check every cell, train those that are not finished, and write table, picture and report."""
    from posttrain.commands.sweeps.view import print_comparison, run_sweep_command
    from posttrain.sweeps.compare import load_comparison
    from posttrain.sweeps.comparison import collect_comparison

    plan = load_comparison(arguments.recipe, **_asked(arguments), methods=arguments.methods, over=arguments.over)
    seeds = f"seeds 0 to {plan.num_seeds - 1}"
    about = [f"{plan.folder}: {len(plan.cells)} runs of {plan.base.train.steps} steps, {seeds}"]
    if plan.start is not None:
        about.append(f"start: {plan.start_source}, {plan.start.recipe.train.steps} steps")
    for method in plan.methods:
        changes = ", ".join(sorted(method.differs)) or "nothing but the method"
        about.append(f"{method.name} ({method.source}) differs from the base in {changes}")

    def report(*outcome_and_command: Any) -> Any:
        from posttrain.reports.sweeps import write_comparison

        comparison = collect_comparison(plan, *outcome_and_command)
        return write_comparison(comparison, plan.folder), partial(print_comparison, comparison)

    return run_sweep_command(arguments, plan, about, report)


def run_study(arguments: argparse.Namespace) -> int:
    """Check every part, make those that are not finished, and write tables, picture and report."""
    from posttrain.sweeps.study import collect_study, load_study

    plan = load_study(arguments.recipe, **_asked(arguments))
    return _run_study_like(arguments, plan, collect_study)


def run_pipeline(arguments: argparse.Namespace) -> int:
    """Check every part, make those that are not finished, and write tables, picture and report."""
    from posttrain.sweeps.pipeline import load_pipeline
    from posttrain.sweeps.pipeline_results import collect_pipeline

    plan = load_pipeline(arguments.recipe, **_asked(arguments), methods=arguments.methods)
    return _run_study_like(arguments, plan, collect_pipeline)


def _asked(arguments: argparse.Namespace) -> dict[str, Any]:
    """What is asked of every kind of sweep."""
    from posttrain.commands.sweeps.view import folder_of

    return {"overrides": arguments.overrides, "folder": folder_of(arguments), "num_seeds": arguments.seeds}


def _run_study_like(arguments: argparse.Namespace, plan: Any, collect: Callable[..., Any]) -> int:
    """Make what is not finished, and write the page of a study."""
    from posttrain.commands.sweeps.view import describe_parts, print_study, run_sweep_command

    def report(*outcome_and_command: Any) -> Any:
        from posttrain.reports.sweeps import write_study

        study = collect(plan, *outcome_and_command)
        return write_study(study, plan.folder), partial(print_study, study)

    return run_sweep_command(arguments, plan, describe_parts(plan), report)
