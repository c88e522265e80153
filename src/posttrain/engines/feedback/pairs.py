"""A file of preference pairs from feedback, made batch by batch: what is done is kept, what is dropped is counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.engines.base import Sampling
from posttrain.engines.feedback.principles import Principle, Way
from posttrain.engines.feedback.revision import Draft, Label, label, refuse_tags, revise
from posttrain.engines.rollout import Sampler
from posttrain.errors import RunFailure, UsageError
from posttrain.models.forward.forward import Forward
from posttrain.randomness import permutation
from posttrain.store.durable import replace_file, storage_errors
from posttrain.tasks.base import Task
from posttrain.tasks.reader import show_counts
from posttrain.types import Example


@dataclass(frozen=True)
class FeedbackRequest:
    """What feedback is asked for: ``n`` prompts of a task, in batches of ``batch`` that change nothing but memory.

    ``way``: ``revise`` (``rounds`` critiques and revisions of each answer) or ``label`` (two answers, of which a
    principle prefers one).
    """

    task: Task
    principles: Sequence[Principle]
    sampling: Sampling
    n: int
    way: Way = "revise"
    rounds: int = 1
    seed: int = 0
    batch: int = 64

    @property
    def asks_preference(self) -> bool:
        """Whether the model's probabilities of which answer is better are needed."""
        return self.way == "label" and any(principle.rule is None for principle in self.principles)

    def slots(self) -> list[int]:
        """The examples that are asked: a sample of the task, in its order; a larger ``n`` adds to it."""
        size = len(self.task.examples)
        return sorted(int(i) for i in permutation(self.seed, "feedback prompts", 0, size)[: self.n])


@dataclass(slots=True)
class Feedback:
    """Rows of the layout ``pair`` of the task ``preferences``, and what there is to know beside them.

    ``num_prompts`` were asked, which gave ``num_answers`` first answers that could be used; ``dropped`` says by reason
    for how many prompts there is no row. ``broken``: by rule, how many of the first answers break it;
    ``broken_chosen``: how many of the chosen ones.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    num_prompts: int = 0
    num_answers: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    broken_chosen: Counter[str] = field(default_factory=Counter)

    def counts(self) -> dict[str, Any]:
        """All but the rows, as plain data."""
        counters = {name: dict(getattr(self, name)) for name in ("dropped", "broken", "broken_chosen")}
        return {"num_prompts": self.num_prompts, "num_answers": self.num_answers, **counters}

    def add(self, part: Mapping[str, Any]) -> None:
        """A batch, as ``_batch`` gives it."""
        self.rows += part["rows"]
        self.num_prompts += part["num_prompts"]
        self.num_answers += part["num_answers"]
        for name in ("dropped", "broken", "broken_chosen"):
            getattr(self, name).update(part[name])


def make_pairs(
    sampler: Sampler,
    asked: FeedbackRequest,
    *,
    forward: Forward | None = None,
    journal: Journal | None = None,
    observe: Callable[[int, int], None] | None = None,
) -> Feedback:
    """Preference pairs from a model's own answers and some principles.

    What is sampled for a prompt is a function of (seed, its place in the task): neither of ``batch`` nor of ``n``.

    Args:
        sampler: the model, with a template whose tags are no tokens of their own.
        forward: reads the model's probabilities where it is asked which answer is better.
        journal: keeps finished batches; those that it has are not asked again.
        observe: told how many prompts are done, of how many.

    Raises:
        UsageError: an empty task, or a template that the texts of a file cannot follow.
        RunFailure: a rule failed.
    """
    if len(asked.task.examples) == 0:
        raise UsageError(f"task {asked.task.name!r}, split {asked.task.split!r}: there is no prompt in it")
    refuse_tags(sampler.tokenizer, sampler.grader.template)
    feedback = Feedback()
    slots = asked.slots()
    done = list(journal.parts()) if journal is not None else []
    for part in done:
        feedback.add(part)
    for start in range(len(done) * asked.batch, len(slots), asked.batch):
        examples = [(slot, asked.task.examples[slot]) for slot in slots[start : start + asked.batch]]
        part = _batch(sampler, asked, examples, forward)
        if journal is not None:
            journal.add(part)
        feedback.add(part)
        if observe is not None:
            observe(feedback.num_prompts, len(slots))
    return feedback


def _batch(
    sampler: Sampler, asked: FeedbackRequest, examples: Sequence[tuple[int, Example]], forward: Forward | None
) -> dict[str, Any]:
    part = Feedback(num_prompts=len(examples))
    rules = [principle for principle in asked.principles if principle.rule is not None]
    if asked.way == "revise":
        drafts = [Draft(slot, example) for slot, example in examples]
        revise(sampler, drafts, asked.principles, asked.sampling, asked.rounds, asked.seed)
        made = [(draft.reason, _revised(draft) if draft.reason is None else {}) for draft in drafts]
    else:
        labels = label(sampler, examples, asked.principles, asked.sampling, asked.seed, forward)
        drafts = [draft for one in labels for draft in (one.first, one.second)]
        made = [(one.reason, _labelled(one) if one.reason is None else {}) for one in labels]
    first = [draft for draft in drafts if draft.first]
    part.num_answers = len(first)
    part.broken = Counter(p.name for p in rules for d in first if p.objection(d.first, d.example) is not None)
    for (reason, row), (_, example) in zip(made, examples, strict=True):
        if reason is not None:
            part.dropped[reason] += 1
        else:
            part.rows.append(row)
            part.broken_chosen.update(p.name for p in rules if p.objection(row["chosen"], example) is not None)
    return {"rows": part.rows, **part.counts()}


def _revised(draft: Draft) -> dict[str, Any]:
    meta = {"principle": ", ".join(draft.principles), "critique": "\n\n".join(draft.critiques)}
    return _row(draft.example, draft.text, draft.first, meta)


def _labelled(one: Label) -> dict[str, Any]:
    assert one.probability is not None, "a label without a reason has a probability"
    better, worse = (one.first, one.second) if one.probability > 0.5 else (one.second, one.first)
    sure = max(one.probability, 1.0 - one.probability)
    row = _row(one.first.example, better.text, worse.text, {"principle": one.principle.name})
    return row | {"score_chosen": sure, "score_rejected": 1.0 - sure}


def _row(example: Example, chosen: str, rejected: str, meta: dict[str, Any]) -> dict[str, Any]:
    messages = example.messages
    is_question = len(messages) == 1 and messages[0].role == "user"
    prompt: Any = messages[0].content if is_question else [{"role": m.role, "content": m.content} for m in messages]
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "meta": {"id": example.id, **meta}}


class Journal:
    """Finished batches beside the file that they will be in, so that a killed command goes on.

    Args:
        path: of the journal.
        mark: of all that decides what is sampled; a journal with another one is begun anew.
    """

    def __init__(self, path: Path, mark: str) -> None:
        self.path, self._head = path, json.dumps({"mark": mark})
        lines = _whole_lines(path)
        self._known = lines[1:] if lines[:1] == [self._head] else []
        self._is_open = False

    def parts(self) -> Iterator[dict[str, Any]]:
        """What an interrupted command has finished, in order."""
        return map(json.loads, self._known)

    def add(self, part: Mapping[str, Any]) -> None:
        """Keep a batch; a kill loses nothing of it when this returns.

        Raises:
            StorageError: the disk is full, or the place cannot be written to.
        """
        if not self._is_open:  # what was cut off at the end, or is of another mark, goes first
            replace_file(self.path, "".join(f"{line}\n" for line in (self._head, *self._known)).encode())
            self._is_open = True
        with storage_errors(self.path.name, self.path), self.path.open("a", encoding="utf-8") as stream:
            stream.write(f"{json.dumps(part)}\n")

    def close(self) -> None:
        """All is done, and the journal is no longer needed."""
        self.path.unlink(missing_ok=True)


def _whole_lines(path: Path) -> list[str]:
    """The lines of a journal; the last one may have been cut off by a kill, and is then left out."""
    if not path.is_file():
        return []
    return path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]


def write_pairs(path: Path, feedback: Feedback, settings: Mapping[str, Any]) -> Path:
    """The rows, and beside them ``NAME.about.json`` with the counts and settings, whose path is returned.

    Raises:
        RunFailure: there is no pair; the message has the reasons.
        StorageError: the disk is full or not writable.
    """
    if not feedback.rows:
        raise RunFailure(f"no pair came of {feedback.num_prompts} prompts: {show_counts(feedback.dropped)}")
    about = path.with_name(f"{path.name.removesuffix('.jsonl')}.about.json")
    replace_file(path, b"".join(json.dumps(row).encode() + b"\n" for row in feedback.rows))
    content = {"num_pairs": len(feedback.rows), **feedback.counts(), "settings": dict(settings)}
    replace_file(about, json.dumps(content, indent=1).encode() + b"\n")
    return about
