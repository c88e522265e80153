"""Preference pairs from a model's own answers, criticized and revised by a file of principles.

    python contrib/constitutional/feedback.py MODEL --principles FILE --task stories --out pairs.jsonl

``contrib/README.md`` shows a file of principles.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from principles import Principle, read_principles
from revision import Draft, refuse_tags, revise

from posttrain.data.base import Task, build_task
from posttrain.errors import PosttrainError, RunFailure, UsageError
from posttrain.evaluation.statistics import wilson_interval
from posttrain.randomness import permutation
from posttrain.recipes.sections import Component
from posttrain.runs.models import find_source
from posttrain.sampling.base import Sampling
from posttrain.sampling.models import complete_template, open_model
from posttrain.sampling.rollout import Sampler
from posttrain.store.durable import replace_file
from posttrain.types import Example


@dataclass(frozen=True)
class Request:
    """``n`` prompts of a task, answered and revised in batches of ``batch``, which change nothing but memory."""

    task: Task
    principles: Sequence[Principle]
    sampling: Sampling
    n: int = 500
    rounds: int = 1
    seed: int = 0
    batch: int = 64


@dataclass(slots=True)
class Feedback:
    """Rows of the layout ``pair`` of the task ``preferences``, and their counts.

    ``num_prompts`` prompts gave ``num_answers`` first answers that could be used; ``dropped`` counts by reason the
    prompts without a row. ``broken`` counts by rule the first answers that break it, ``broken_chosen`` the chosen ones.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    num_prompts: int = 0
    num_answers: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    broken_chosen: Counter[str] = field(default_factory=Counter)

    def counts(self) -> dict[str, Any]:
        """Return all but the rows, as plain data."""
        counters = {name: dict(getattr(self, name)) for name in ("dropped", "broken", "broken_chosen")}
        return {"num_prompts": self.num_prompts, "num_answers": self.num_answers, **counters}


def make_pairs(sampler: Sampler, request: Request) -> Feedback:
    """Make preference pairs from a model's own answers and some principles.

    The samples of a prompt depend on the seed and on its place in the task, not on ``batch`` or ``n``.

    Raises:
        UsageError: an empty task, or a template whose tags are tokens.
    """
    size = len(request.task.examples)
    if size == 0:
        raise UsageError(f"task {request.task.name!r}, split {request.task.split!r}: there is no prompt in it")
    refuse_tags(sampler.tokenizer, sampler.grader.template)
    feedback = Feedback()
    slots = sorted(int(i) for i in permutation(request.seed, "feedback prompts", 0, size)[: request.n])
    for start in range(0, len(slots), request.batch):
        drafts = [Draft(slot, request.task.examples[slot]) for slot in slots[start : start + request.batch]]
        revise(sampler, drafts, request.principles, request.sampling, request.rounds, request.seed)
        for draft in drafts:
            _add(feedback, draft, request.principles)
    return feedback


def _add(feedback: Feedback, draft: Draft, principles: Sequence[Principle]) -> None:
    feedback.num_prompts += 1
    if draft.first:
        feedback.num_answers += 1
        feedback.broken.update(_broken(draft.first, draft.example, principles))
    if draft.reason is not None:
        feedback.dropped[draft.reason] += 1
        return
    feedback.rows.append(_row(draft))
    feedback.broken_chosen.update(_broken(draft.text, draft.example, principles))


def _broken(text: str, example: Example, principles: Sequence[Principle]) -> list[str]:
    """Return the names of the rules that a text breaks."""
    return [p.name for p in principles if p.rule is not None and p.rule(text, example) is not None]


def _row(draft: Draft) -> dict[str, Any]:
    messages = draft.example.messages
    is_question = len(messages) == 1 and messages[0].role == "user"
    prompt: Any = messages[0].content if is_question else [{"role": m.role, "content": m.content} for m in messages]
    meta = {"principle": ", ".join(draft.principles), "critique": "\n\n".join(draft.critiques)}
    return {
        "prompt": prompt,
        "chosen": draft.text,
        "rejected": draft.first,
        "meta": {"id": draft.example.id, **meta},
    }


def write_pairs(path: Path, feedback: Feedback, settings: dict[str, Any]) -> Path:
    """Write the rows, and the counts and settings to ``NAME.about.json``, whose path is returned.

    Raises:
        RunFailure: there is no pair; the message has the reasons.
        StorageError: the disk is full or not writable.
    """
    if not feedback.rows:
        reasons = "; ".join(f"{count} x {reason}" for reason, count in feedback.dropped.items())
        raise RunFailure(f"no pair came of {feedback.num_prompts} prompts: {reasons}")
    path.parent.mkdir(parents=True, exist_ok=True)
    about = path.with_name(f"{path.name.removesuffix('.jsonl')}.about.json")
    replace_file(path, b"".join(json.dumps(row).encode() + b"\n" for row in feedback.rows))
    content = {"num_pairs": len(feedback.rows), **feedback.counts(), "settings": settings}
    replace_file(about, json.dumps(content, indent=1).encode() + b"\n")
    return about


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; errors for the user are printed without a traceback."""
    given = _parser().parse_args(arguments)
    try:
        return _run(given)
    except PosttrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="tiny, a model directory, a run, or a hub name")
    parser.add_argument("--principles", metavar="FILE", required=True, help="a YAML file of principles")
    parser.add_argument("--task", required=True, help="whose prompts are answered")
    parser.add_argument("--task-options", type=json.loads, default={}, metavar="JSON", help="options of the task")
    parser.add_argument("--template", help="prompt template (default: the run's, or plain)")
    parser.add_argument("--limit", type=int, default=500, help="prompts at most (default: 500)")
    parser.add_argument("--rounds", type=int, default=1, help="revisions, each by another principle (default: 1)")
    parser.add_argument("--max-tokens", type=int, help="longest answer (default: the run's, else 256)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, principles and sampling (default: 0)")
    parser.add_argument("--batch", type=int, default=64, help="prompts at a time (default: 64)")
    parser.add_argument("--runs-dir", default="runs", help="where runs are looked for (default: runs)")
    parser.add_argument("--out", type=Path, default=Path("pairs.jsonl"), help="the file of pairs")
    return parser


def _run(given: argparse.Namespace) -> int:
    if given.out.suffix != ".jsonl":
        raise UsageError(f"--out {given.out}: pairs are written as JSON lines; give a name that ends in .jsonl")
    if min(given.limit, given.rounds, given.batch, given.max_tokens or 1) < 1 or given.temperature < 0:
        raise UsageError("--limit, --rounds, --batch and --max-tokens are at least 1, and --temperature at least 0")
    principles = read_principles(given.principles)
    source = find_source(given.model, given.runs_dir)
    name = given.template or (None if source.recipe is not None else "plain")
    template = complete_template(None if name is None else Component(name=name), source)
    task = build_task(Component(name=given.task, **given.task_options), "--task")
    model = open_model(source, template)
    sampling = model.sampling(given.max_tokens or source.max_tokens, given.temperature)
    request = Request(task, principles, sampling, given.limit, given.rounds, given.seed, given.batch)
    feedback = make_pairs(model, request)
    print(f"{len(feedback.rows):,} pairs from {feedback.num_prompts:,} prompts of {task.name}/{task.split}")
    for reason, count in feedback.dropped.items():
        print(f"  left out: {count:,} x {reason}")
    for principle in principles:
        if principle.rule is not None and feedback.num_answers:
            broken, low, high = feedback.broken[principle.name], *_interval(feedback, principle.name)
            print(f"  {principle.name}: {broken} of {feedback.num_answers} answers break it ({low:.1%} - {high:.1%})")
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(given).items()}
    about = write_pairs(given.out, feedback, settings | {"checkpoint": source.path})
    print(f"pairs: {given.out}; counts and settings: {about}")
    return 0


def _interval(feedback: Feedback, name: str) -> tuple[float, float]:
    low, high = wilson_interval(feedback.broken[name], feedback.num_answers)
    return low, high


if __name__ == "__main__":
    sys.exit(main())
