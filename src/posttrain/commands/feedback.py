"""``posttrain feedback``: preference pairs from a model's own answers. At first only the standard library is there."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.commands.console import say
from posttrain.commands.options.argument_types import new_place, nonnegative_float, positive, seed, share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from posttrain.engines.feedback.pairs import Feedback, FeedbackRequest
    from posttrain.engines.feedback.principles import Principle
    from posttrain.engines.models import ModelSource, OpenedModel
    from posttrain.evals.tables import TextTable
    from posttrain.recipes.sections import Word

SECTIONS = ("task", "template", "engine")

EPILOG = """\
critique and revision by a file of principles, then preference training on what came of it:
  posttrain feedback runs/sft-hh --task hh_rlhf --task.path train.jsonl.gz --principles mine.yaml --out pairs.jsonl
  posttrain train dpo-preferences --model.name runs/sft-hh --task.path pairs.jsonl
two answers to each prompt, of which the principles prefer one:
  posttrain feedback Qwen/Qwen3-0.6B --template chat --task ultrafeedback --principles mine.yaml --way label
options of the task, the template and the engine go behind their names (--task.path, --engine.url);
docs/data.md shows a file of principles. The same command goes on where it was interrupted.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Who answers what, by which principles, how answers are drawn, where the pairs go."""
    parser.usage = "posttrain feedback MODEL --principles FILE [options] [--task.key value ...]"
    parser.epilog = EPILOG
    parser.add_argument("model", metavar="MODEL", help="tiny, a model directory, a run, or a hub name")
    parser.add_argument("--principles", metavar="FILE", required=True, help="a YAML file of principles")
    parser.add_argument(
        "--way",
        choices=("revise", "label"),
        default="revise",
        help="revise: the answer is rejected, its revision chosen; label: of two answers one is preferred",
    )
    parser.add_argument("--task", help="whose prompts are answered (default for a run: its own)")
    parser.add_argument("--template", help="prompt template (default: the run's, or plain)")
    parser.add_argument("--n", type=positive, default=500, help="prompts at most (default: 500)")
    parser.add_argument("--rounds", type=positive, default=1, help="revisions, each by another principle (default: 1)")
    parser.add_argument("--max-tokens", type=positive, help="longest answer (default: the run's, else 256)")
    parser.add_argument("--temperature", type=nonnegative_float, default=1.0, help="0 is greedy (default: 1)")
    parser.add_argument("--top-p", type=share, default=1.0, help="only the likeliest tokens of this mass (default: 1)")
    parser.add_argument("--seed", type=seed, default=0, help="of prompts, principles and sampling (default: 0)")
    parser.add_argument("--batch", type=positive, default=64, help="prompts at a time (default: 64)")
    parser.add_argument("--engine", default="native", help="what samples: native, vllm (default: native)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the weights (default: the run's)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), help="default: the run's, or auto")
    parser.add_argument(
        "--out", type=new_place, metavar="FILE", default="pairs.jsonl", help="the file of pairs (default: pairs.jsonl)"
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")


def run_feedback(arguments: argparse.Namespace) -> int:
    """Make the pairs, write them and what is known of them, and say what was dropped and which rules were broken.

    Raises:
        UsageError: words, options or combinations that cannot be.
        RunFailure: no pair came of it.
    """
    from posttrain.commands.console import Text, open_console, print_table
    from posttrain.engines.feedback.pairs import Journal, make_pairs, write_pairs
    from posttrain.evals.files import fingerprint
    from posttrain.models.forward.forward import Forward
    from posttrain.store.durable import storage_errors

    out = Path(arguments.out)
    with storage_errors("pairs", out):
        out.parent.mkdir(parents=True, exist_ok=True)
    model, asked, settings = _prepare(arguments, out)
    console = open_console()

    def observe(done: int, total: int) -> None:
        if console.is_terminal and not arguments.quiet:
            console.print(Text(f"{done:,} of {total:,} prompts", style="dim"))

    forward = Forward(model.model.requires_grad_(False)) if asked.asks_preference else None
    journal = Journal(out.with_name(f"{out.name}.part"), fingerprint(settings))
    feedback = make_pairs(model, asked, forward=forward, journal=journal, observe=observe)
    if not arguments.quiet:
        name = f"{asked.task.name}/{asked.task.split}"
        console.print(Text(f"{len(feedback.rows):,} pairs from {feedback.num_prompts:,} prompts of {name}"))
        for reason, count in feedback.dropped.items():
            console.print(Text(f"  left out: {count:,} × {reason}"))
        if any(principle.rule is not None for principle in asked.principles):
            print_table(console, rules_table(feedback, asked.principles))
    if not feedback.rows:  # nothing is kept of what came to nothing
        journal.close()
    about = write_pairs(out, feedback, settings)
    journal.close()
    if not arguments.quiet:
        say(console, f"pairs: {out}; counts and settings: {about}")
    return 0


def _prepare(arguments: argparse.Namespace, out: Path) -> tuple[OpenedModel, FeedbackRequest, dict[str, Any]]:
    """The model, what it is asked, and all that decides what comes of it."""
    from posttrain.commands.options.words import words_of
    from posttrain.engines.feedback.pairs import FeedbackRequest
    from posttrain.engines.feedback.principles import read_principles
    from posttrain.engines.models import complete_template, open_model
    from posttrain.errors import UsageError
    from posttrain.recipes.sections import Word
    from posttrain.runs.models import find_source
    from posttrain.tasks.base import build_task

    words = {section: own[0] for section, own in words_of(arguments, SECTIONS).items() if own}
    if out.suffix != ".jsonl":
        raise UsageError(f"--out {out}: pairs are written as JSON lines; give a name that ends in .jsonl")
    if arguments.way == "label" and (arguments.temperature == 0 or arguments.rounds != 1):
        raise UsageError("--way label: two different answers are compared, not revised; leave out --rounds, and give a "
                         "--temperature above 0")  # fmt: skip
    principles = read_principles(arguments.principles, arguments.way)
    source = find_source(arguments.model, arguments.runs_dir)
    task_word = _choose_task(words.get("task"), source)
    template, engine = words.get("template"), words["engine"]
    if source.recipe is None and (template is None or not template.name):
        template = Word(name="plain", **(template.options if template is not None else {}))
    task = build_task(task_word, "--task")
    template = complete_template(template, source)
    model = open_model(source, template, engine=engine, dtype=arguments.dtype, device=arguments.device)
    max_tokens = arguments.max_tokens or source.max_tokens
    sampling = model.sampling(max_tokens, arguments.temperature, None, arguments.top_p)
    options = {name: getattr(arguments, name) for name in ("n", "way", "rounds", "seed", "batch")}
    asked = FeedbackRequest(task, principles, sampling, **options)
    if asked.asks_preference and model.model is None:
        raise UsageError(f"--engine {engine.name}: 'prefer' reads the model's probabilities; use --engine native")
    named = {"task": task_word, "template": template or source.template, "engine": engine}
    settings = {name: word.model_dump() for name, word in named.items()} | options
    drawn = {"max_tokens": max_tokens, "temperature": arguments.temperature, "top_p": arguments.top_p}
    return model, asked, settings | drawn | _facts(arguments, source, asked)


def _facts(arguments: argparse.Namespace, source: ModelSource, asked: FeedbackRequest) -> dict[str, Any]:
    """Of which model, of which prompts, by which principles."""
    from posttrain.evals.files import weights_mark
    from posttrain.evals.items import digest_of
    from posttrain.models.sources import resolve_model_name

    checkpoint = resolve_model_name(source.path)
    return {
        "model": source.name,
        "checkpoint": checkpoint,
        "weights": weights_mark(checkpoint),
        "data": digest_of([asked.task.examples[slot] for slot in asked.slots()]),
        "left_out_of_the_data": dict(asked.task.dropped),
        "principles": [principle.asked.model_dump(mode="json", exclude_none=True) for principle in asked.principles],
        "dtype": arguments.dtype,
        "device": arguments.device,
    }


def _choose_task(named: Word | None, source: ModelSource) -> Word:
    """The task named, with the training split of a run's own where none is: what is made here is to be trained on."""
    from posttrain.recipes.sections import Word
    from posttrain.tasks.base import choose_task

    chosen = choose_task(named, source.name, source.recipe)
    own = "train" if source.recipe is None or source.recipe.task.name != chosen.name else None
    split = own or (source.recipe.task.options.get("split", "train") if source.recipe is not None else "train")
    if "split" in chosen.options and (named is None or "split" not in named.options):
        return Word(name=chosen.name, **(chosen.options | {"split": split}))
    return chosen


def rules_table(feedback: Feedback, principles: Sequence[Principle]) -> TextTable:
    """How many first answers break each rule, with the interval, and how many of the chosen ones still do."""
    from posttrain.evals.statistics import wilson_interval
    from posttrain.evals.tables import NOTHING, TextTable

    lines = []
    for name in (principle.name for principle in principles if principle.rule is not None):
        broken, chosen = feedback.broken[name], feedback.broken_chosen[name]
        cells = [NOTHING, NOTHING]
        if feedback.num_answers:
            low, high = wilson_interval(broken, feedback.num_answers)
            cells = [f"{broken / feedback.num_answers:.1%}", f"{low:.1%} – {high:.1%}"]
        lines.append([name, str(feedback.num_answers), *cells, f"{chosen} of {len(feedback.rows)}"])
    return TextTable("Rules", ["rule", "answers", "break it", "95 % interval", "chosen that break it"], lines)
