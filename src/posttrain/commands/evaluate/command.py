"""Options for ``posttrain evaluate``. Imports only the standard library until executed (see ``cli``)."""

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
multiple models, tasks and templates make a table with a row per combination:
  posttrain evaluate tiny --task stories --template r1_zero,xml_reasoning,boxed,plain
  posttrain evaluate runs/tiny-sft runs/tiny-grpo/checkpoints/step-000100 --task stories --samples 8 --k 1,4,8
prefix options with task or template; for multiple tasks, add the task name:
  posttrain evaluate tiny --task gsm8k --task.path data/gsm8k_test.jsonl.gz --task.split test --template boxed
  posttrain evaluate tiny --task gsm8k,math --task.gsm8k.path gsm8k_test.jsonl.gz --task.math.path math_test.jsonl.gz
test a difference between models or evaluation folders:
  posttrain evaluate --compare runs/tiny-sft runs/tiny-grpo
  posttrain evaluate --compare evaluations/a evaluations/b
best-of-n with a reward model, and KL and win rate between models:
  posttrain evaluate runs/tiny-sft --samples 8 --best-of runs/tiny-rm
  posttrain evaluate runs/tiny-grpo --against runs/tiny-sft --judge runs/tiny-rm
repeat the command to finish an interrupted table.
"""


OPTIONS = CommandOptions(
    option(
        "models", metavar="MODEL", nargs="+",
        help="tiny, a model directory, a run, a checkpoint, or a hub name; reward models are evaluated on answers "
        "given in the task",
    ),
    usage="posttrain evaluate MODEL [MODEL ...] [options] [--task.key value ...] [--template.key value ...]",
    epilog=EPILOG,
    groups={
        "what is asked": (
            option(
                "--task", type=names_between_commas, action="extend", metavar="A,B",
                help="evaluation task (default: the run's task)",
            ),
            option(
                "--template", type=names_between_commas, action="extend", metavar="A,B",
                help="prompt template (default: the run's, else the model's chat template, else r1_zero)",
            ),
            option("--limit", type=positive, default=500, metavar="N", help="maximum rows per task (default: 500)"),
        ),
        "how answers are drawn": (
            option("--samples", type=positive, default=1, metavar="N", help="answers per row (default: 1)"),
            option(
                "--k", type=positives, metavar="1,4,8", help="the k of pass@k and majority@k (default: 1, 2, 4, ...)"
            ),
            option(
                "--temperature", type=nonnegative_float, help="0 is greedy (default: 0 with --samples 1, otherwise 1)"
            ),
            option("--top-p", type=proportion, help="nucleus sampling: cumulative probability (default: 1)"),
            *RULES,
            option("--top-k", type=positive, help="sample only from the top k tokens (default: all)"),
            MAX_TOKENS,
            seed_of(),
            option("--engine", default="native", help="sampling engine: native, vllm (default: native)"),
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
                help="test the difference between models or evaluation folders",
            ),
            option("--best-of", metavar="RUN", help="best-of-n selection with this reward model"),
            option("--against", metavar="MODEL", help="KL and win rate relative to this model"),
            option(
                "--judge", type=names_between_commas, metavar="RUN,FILE",
                help="judge for --against: a reward model run, or an LLM judge's YAML file; additional judges are "
                "reported",
            ),
        ),
        "results": (
            option(
                "--out", type=new_place, metavar="DIR",
                help="output folder (default: inside the run, otherwise evaluations/)",
            ),
            option("--quiet", action="store_true", help="print only errors; results are written to files"),
        ),
    },
)  # fmt: skip


def run_evaluate(arguments: argparse.Namespace) -> int:
    """Measure models, test a difference, set two against one another, or measure reward models."""
    from posttrain.commands.evaluate import models
    from posttrain.errors import UsageError
    from posttrain.runs.models import find_source

    if arguments.judge is not None and arguments.against is None:
        raise UsageError("--judge: needs a model to compare with. Add --against MODEL")
    if arguments.against is not None:
        return models.run_against(arguments)
    scorers = [name for name in arguments.models if find_source(name, arguments.runs_dir).is_scorer]
    if not scorers:
        if arguments.compare:
            return models.run_comparison(arguments)
        return models.run_table(arguments)
    if len(scorers) < len(arguments.models):
        others = ", ".join(name for name in arguments.models if name not in scorers)
        raise UsageError(f"{', '.join(scorers)}: reward models and language models cannot share a table ({others})")
    return models.run_scores(arguments)  # table rows are always tested for differences
