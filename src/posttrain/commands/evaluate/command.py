"""``posttrain evaluate``: its options. Only the standard library is imported before it runs (see ``cli``)."""

from __future__ import annotations

import argparse

from posttrain.commands.options import (
    MAX_TOKENS,
    RULES,
    CommandOptions,
    dtype_of,
    names_between_commas,
    new_place,
    nonnegative_float,
    option,
    positive,
    positives,
    proportion,
    seed_of,
)
from posttrain.evaluation import DEFAULT_BATCH

EPILOG = """\
several models, tasks and templates make a table, one row for each combination:
  posttrain evaluate tiny --task stories --template r1_zero,xml_reasoning,boxed,plain
  posttrain evaluate runs/tiny-sft runs/tiny-grpo/checkpoints/step-000100 --task stories --samples 8 --k 1,4,8
options of the task and of the template go behind their names; with several tasks, behind the task's name too:
  posttrain evaluate tiny --task gsm8k --task.path data/gsm8k_test.jsonl.gz --task.split test --template boxed
  posttrain evaluate tiny --task gsm8k,math --task.gsm8k.path gsm8k_test.jsonl.gz --task.math.path math_test.jsonl.gz
is one better than the other? two models, or two folders that an evaluation has written:
  posttrain evaluate --compare runs/tiny-sft runs/tiny-grpo
  posttrain evaluate --compare evaluations/a evaluations/b
an answer chosen by a reward model, and how far one model is from another:
  posttrain evaluate runs/tiny-sft --samples 8 --best-of runs/tiny-rm
  posttrain evaluate runs/tiny-grpo --against runs/tiny-sft --judge runs/tiny-rm
the same command goes on with the evaluations of a table that were not finished.
"""


OPTIONS = CommandOptions(
    option(
        "models", metavar="MODEL", nargs="+",
        help="tiny, a model directory, a run, one of its checkpoints, or a hub name; a reward model's run is measured "
        "by the answers that its task gives",
    ),
    usage="posttrain evaluate MODEL [MODEL ...] [options] [--task.key value ...] [--template.key value ...]",
    epilog=EPILOG,
    groups={
        "what is asked": (
            option(
                "--task", type=names_between_commas, action="extend", metavar="A,B",
                help="what to measure on (default for a run: its own)",
            ),
            option(
                "--template", type=names_between_commas, action="extend", metavar="A,B",
                help="prompt template (default: the run's, else the model's chat template, else r1_zero)",
            ),
            option("--limit", type=positive, default=500, metavar="N", help="rows of each task at most (default: 500)"),
        ),
        "how answers are drawn": (
            option("--samples", type=positive, default=1, metavar="N", help="answers to each item (default: 1)"),
            option(
                "--k", type=positives, metavar="1,4,8", help="the k of pass@k and majority@k (default: 1, 2, 4, ...)"
            ),
            option(
                "--temperature", type=nonnegative_float, help="0 is greedy (default: 0 for one answer, 1 for several)"
            ),
            option("--top-p", type=proportion, help="draw from the likeliest tokens of this mass (default: 1)"),
            *RULES,
            option("--top-k", type=positive, help="draw from so many likeliest tokens (default: all)"),
            MAX_TOKENS,
            seed_of(),
            option("--engine", default="native", help="what samples: native, vllm (default: native)"),
            dtype_of("of the weights"),
            option("--device", choices=("auto", "cpu", "cuda", "mps"), help="default: the run's, or auto"),
            option(
                "--batch", type=positive, default=DEFAULT_BATCH,
                help=f"answers sampled at a time (default: {DEFAULT_BATCH})",
            ),
        ),
        "compared with something else": (
            option(
                "--compare", action="store_true",
                help="test the difference of two models, or of two evaluations' folders",
            ),
            option("--best-of", metavar="RUN", help="let this reward model choose among the samples"),
            option("--against", metavar="MODEL", help="KL and win rate between the model and this one"),
            option(
                "--judge", type=names_between_commas, metavar="RUN,FILE",
                help="decides who wins (with --against): a reward model's run, or a judge's YAML file; others are "
                "reported",
            ),
        ),
        "results": (
            option(
                "--out", type=new_place, metavar="DIR",
                help="where results and records go (default: in the run, else evaluations/)",
            ),
            option("--quiet", action="store_true", help="print nothing but errors; the results are in the files"),
        ),
    },
)  # fmt: skip


def run_evaluate(arguments: argparse.Namespace) -> int:
    """Measure models, test a difference, set two against one another, or measure reward models."""
    from posttrain.commands.evaluate import models
    from posttrain.errors import UsageError
    from posttrain.runs.models import find_source

    if arguments.judge is not None and arguments.against is None:
        raise UsageError("--judge: it judges between two models; name the other one with --against MODEL")
    if arguments.against is not None:
        return models.run_against(arguments)
    scorers = [name for name in arguments.models if find_source(name, arguments.runs_dir).is_scorer]
    if not scorers:
        if arguments.compare:
            return models.run_comparison(arguments)
        return models.run_table(arguments)
    if len(scorers) < len(arguments.models):
        others = ", ".join(name for name in arguments.models if name not in scorers)
        raise UsageError(f"{', '.join(scorers)}: a reward model is not measured in one table with models ({others})")
    return models.run_scores(arguments)  # their table tests the differences, with --compare or without
