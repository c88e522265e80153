"""Held-out items with graded answers (``items.jsonl``, one per line), and results computed from them.

All rates are averaged over items. An item without answers (prompt too long) counts as wrong in every rate, so models
with different contexts are compared on the same items.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from posttrain.data.base import Task, percentile
from posttrain.data.render import without_end
from posttrain.data.render.assistant import encode_answer
from posttrain.errors import DataError
from posttrain.evaluation.statistics import (
    best_of_n,
    half_width,
    item_interval,
    majority_at_k,
    pass_at_k,
    standard_error,
)
from posttrain.graders.grading import FAILURES
from posttrain.sampling.rollout import Sampler
from posttrain.store.durable import replace_file
from posttrain.store.metrics import MAX_BYTES
from posttrain.store.reading import read_record
from posttrain.store.rollouts import prompt_text
from posttrain.store.turns import show_turns
from posttrain.types import TRUNCATED, Example, Rollout
from posttrain.untrusted import first_fault

Scalar = str | int | float | bool | None
_OPTIONAL = ("transcript", "response_ids", "is_scored")  # written only if set


@dataclass(frozen=True, slots=True)
class ItemSample:
    """A graded answer.

    ``text``: graded text (``Rollout.text``). ``in_format``: follows the template's format; None if not checked.
    ``parts``: unweighted rewards, and numbers from the grader. ``score``: from a reward model (``--best-of``).
    ``transcript``: all turns, for environments. ``response_ids``: sampled tokens, if re-encoding ``text`` gives
    different tokens. ``is_scored``: False if every reward function returned None.
    """

    text: str
    extracted: str | None
    outcome: str
    num_tokens: Annotated[int, Field(ge=0, lt=1 << 53)]
    finish: str
    reward: FiniteFloat
    in_format: bool | None
    parts: dict[str, float]
    score: FiniteFloat | None = None
    transcript: str | None = None
    response_ids: tuple[int, ...] | None = None
    is_scored: Literal[False] | None = None

    @property
    def is_correct(self) -> bool:
        return self.outcome == "right"


@dataclass(frozen=True, slots=True)
class Item:
    """A held-out example with answers in sampling order.

    ``index``: position within the evaluation. ``meta``: scalar metadata (subject, level, ...). ``samples`` is empty
    if the prompt was too long for the context.
    """

    id: str
    index: int
    question: str
    answer: str | None
    meta: dict[str, Scalar] = field(default_factory=dict)
    samples: tuple[ItemSample, ...] = ()

    @property
    def num_correct(self) -> int:
        return sum(sample.is_correct for sample in self.samples)

    @property
    def share(self) -> float:
        """Fraction of correct samples; 0 without samples."""
        if self.samples:
            return self.num_correct / len(self.samples)
        return 0.0

    @property
    def is_ungraded(self) -> bool:
        """Check if answers exist, but no gold answer to grade them."""
        if not self.samples:
            return False
        return all(sample.outcome == "ungraded" for sample in self.samples)


_ITEM = TypeAdapter(Item)


def item_of(example: Example, index: int, samples: Sequence[ItemSample] = ()) -> Item:
    """Convert an example to an item."""
    return Item(example.id, index, prompt_text(example), example.answer, meta_of(example), tuple(samples))


def meta_of(example: Example) -> dict[str, Scalar]:
    """Select scalar metadata from an example."""
    facts = {}
    for key, value in example.meta.items():
        if value is None or isinstance(value, str | int | float):
            facts[key] = value
    return facts


def digest_examples(examples: Sequence[Example]) -> str:
    """Hash messages, gold answers, graders and metadata (16 hex digits of SHA-256) to detect changed rows."""
    digest = hashlib.sha256()
    for example in examples:
        messages = [[message.role, message.content] for message in example.messages]
        content = [example.id, messages, example.answer, example.grader, example.meta]
        digest.update(json.dumps(content, default=_plain).encode() + b"\n")
    return digest.hexdigest()[:16]


def _plain(value: object) -> object:
    """Convert values unknown to JSON into a form independent of the process."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Set):
        return sorted(map(repr, value))
    return repr(value)


def sample_of(rollout: Rollout, sampler: Sampler) -> ItemSample:
    """Convert a graded rollout to a record."""
    part = sampler.grader.format_part
    tokenizer = sampler.tokenizer
    template = sampler.grader.template
    ids = tuple(without_end(tokenizer, template, rollout.completion.ids))
    encoded = encode_answer(tokenizer, template, rollout.text, rollout.prompt_ids, rollout.example.variables)
    in_format = None
    if part in rollout.parts:
        in_format = rollout.parts[part] > 0
    response_ids = None
    if not rollout.turns and tuple(encoded) != ids:
        response_ids = ids
    is_scored: Literal[False] | None = None
    if not rollout.is_scored:
        is_scored = False
    return ItemSample(
        text=rollout.text,
        extracted=rollout.extracted,
        outcome=rollout.outcome,
        num_tokens=rollout.completion.num_own,
        finish=rollout.completion.finish,
        reward=rollout.reward,
        in_format=in_format,
        parts=dict(rollout.parts),
        transcript=show_turns(rollout.turns, rollout.failures) or None,
        response_ids=response_ids,
        is_scored=is_scored,
    )


def write_items(items: Sequence[Item | Mapping[str, object]], path: Path) -> None:
    """Write ``items.jsonl`` atomically; reward-model and head-to-head items are plain mappings.

    Raises:
        StorageError: writing failed, for example on a full disk.
    """
    lines = []
    for item in items:
        if isinstance(item, Item):
            record: Mapping[str, object] = asdict(item, dict_factory=_without_empty)
        else:
            record = item
        lines.append(json.dumps(record).encode() + b"\n")
    replace_file(path, b"".join(lines))


def _without_empty(fields: list[tuple[str, object]]) -> dict[str, object]:
    """Drop unset optional fields."""
    return {name: value for name, value in fields if value is not None or name not in _OPTIONAL}


def read_items(path: str | Path, samples: int | None = None) -> list[Item]:
    """Read ``items.jsonl`` as written by ``write_items``.

    Args:
        samples: expected answers per item, if any; None: unchecked.

    Raises:
        DataError: missing file, an invalid line, or an unexpected number of answers.
    """
    try:
        lines = read_record(Path(path), MAX_BYTES).decode().splitlines()
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise DataError(path, f"cannot be read ({error}); `posttrain evaluate` writes it") from None
    items = []
    for number, line in enumerate(lines, 1):
        try:
            items.append(_ITEM.validate_json(line, strict=True))
        except ValidationError as error:
            what = f"not an evaluation item ({first_fault(error)}); evaluate again to replace it"
            raise DataError(path, what, number) from None
        if samples is not None and len(items[-1].samples) not in (0, samples):
            what = f"{len(items[-1].samples)} answers, but the evaluation settings say {samples}"
            raise DataError(path, f"{what}; evaluate again to replace it", number)
    return items


MAX_KIND_CHARS = 40  # for keys and values within result names
MAX_KINDS = 60  # ignore a meta key with more values (MMLU has 57 subjects)
LENGTH_PERCENTILES = {"p50": 0.5, "p90": 0.9, "max": 1.0}
# Result names for episode endings (``Completion.finish``): the fraction of such episodes, if any.
OF_EPISODES = {
    "out_of_turns": "out_of_turns",
    "tool_failed": "tool_failed",
    "environment_failed": "environment_failures",
}
NONE = "none"  # items without this key

ANY_TASK = Task("", "", ())
Kinds = dict[str, dict[str, dict[str, float]]]


def default_ks(samples: int) -> tuple[int, ...]:
    """List powers of two below ``samples``, followed by ``samples``; empty for one sample."""
    if samples == 1:
        return ()
    return (*(2**i for i in range(samples.bit_length()) if 2**i < samples), samples)


def summarize(
    items: Sequence[Item],
    task: Task = ANY_TASK,
    *,
    samples: int = 1,
    ks: Sequence[int] = (),
    format_part: str | None = None,
) -> dict[str, float]:
    """Compute evaluation results (``store/metric_names.py``).

    Accuracy averages over items with a gold answer; if none exist, the mean reward gets an interval. Several samples
    per item add the clustered ``standard_error``, ``pass@k``, ``majority@k`` and, if scored, ``best_of@k``. Rates and
    means use all samples, and include ``reward/NAME`` for additional rewards and grader metrics. ``Task.shares`` add
    intervals and ``NAME_n``.

    Args:
        items: each with ``samples`` samples, or none.
        ks: at most ``samples``.
        format_part: name of the format reward, reported separately as ``format``.
    """
    drawn = [sample for item in items for sample in item.samples]
    graded = graded_items(items)
    results = {"n": float(len(items)), "num_graded": float(len(graded)), "samples": float(samples)}
    if graded:
        results |= with_interval("accuracy", item_values(graded, "accuracy"), samples)
    else:
        rewards = []
        for item in items:
            scored = _scored_rewards(item.samples)
            if scored:
                rewards.append(statistics.fmean(scored))
        if len(rewards) > 1:
            results |= mean_interval("reward", rewards)
    if samples > 1 and graded:
        results["standard_error"] = standard_error(item_values(graded, "accuracy"))
        for name in measure_names(graded, ks):
            draws = samples // int(name.partition("@")[2])
            results |= with_interval(name, item_values(graded, name), draws)
    results |= _sample_results(drawn, len(items) * samples, task)
    if task.shares is not None:
        for name, values in task.shares(items).items():
            if values:
                results |= with_interval(name, values, samples)
                results[f"{name}_n"] = float(len(values))
    if has_scores(items):
        results["unscored"] = sum(s.score is None for s in drawn) / (len(items) * samples)
    parts: dict[str, list[float]] = {}
    for sample in drawn:
        for name, value in sample.parts.items():
            if name not in ("correct", format_part):
                parts.setdefault(f"reward/{name}", []).append(value)
    for name, values in parts.items():
        results[name] = statistics.fmean(values)
    return results


def _sample_results(drawn: Sequence[ItemSample], total: int, task: Task) -> dict[str, float]:
    """Compute rates and means over samples; ``total`` includes missing samples of unanswered items."""
    results = {}
    in_format = [s.in_format for s in drawn]
    if None not in in_format:
        results["format"] = sum(map(bool, in_format)) / total
    lengths = [s.num_tokens for s in drawn]
    results["parse_failures"] = sum(s.outcome == "no_answer" for s in drawn) / total
    results["grading_failures"] = sum(s.outcome in FAILURES for s in drawn) / total
    results["truncated"] = sum(s.finish in TRUNCATED for s in drawn) / total
    results["completion_length"] = statistics.fmean(lengths)
    scored = _scored_rewards(drawn)
    if scored:
        results["reward"] = statistics.fmean(scored)
    if len(scored) < len(drawn):
        results["no_reward"] = 1 - len(scored) / len(drawn)
    ends = Counter(s.finish for s in drawn)
    for finish, name in OF_EPISODES.items():
        if ends[finish]:
            results[name] = ends[finish] / total
    for name, share in LENGTH_PERCENTILES.items():
        results[f"completion_length_{name}"] = float(percentile(lengths, share))
    if task.worked is not None:
        results["shows_reasoning"] = sum(task.worked(s.text) for s in drawn) / total
    return results


def _scored_rewards(samples: Iterable[ItemSample]) -> list[float]:
    """Select rewards from answers having one."""
    return [sample.reward for sample in samples if sample.is_scored is None]


def mean_interval(name: str, values: Sequence[float]) -> dict[str, float]:
    """Average one value per item, adding the 95 % Student-t interval (``_low``, ``_high``)."""
    middle = statistics.fmean(values)
    half = half_width(values)
    return {name: middle, f"{name}_low": middle - half, f"{name}_high": middle + half}


def graded_items(items: Sequence[Item]) -> list[Item]:
    """Select items for accuracy, dropping ungraded ones; empty if no answer was graded."""
    if all(item.is_ungraded for item in items if item.samples):
        return []
    return [item for item in items if not item.is_ungraded]


def has_scores(items: Sequence[Item]) -> bool:
    """Check if any sample has a reward-model score."""
    return any(sample.score is not None for item in items for sample in item.samples)


def measure_names(items: Sequence[Item], ks: Sequence[int]) -> list[str]:
    """List measures for several samples per item, for each k."""
    kinds = ["pass", "majority"]
    if has_scores(items):
        kinds.append("best_of")
    return [f"{kind}@{k}" for kind in kinds for k in ks]


def item_values(items: Sequence[Item], name: str) -> list[float]:
    """Compute per-item values for a result: ``accuracy``, ``pass@k``, ``majority@k``, ``best_of@k``."""
    kind, _, k = name.partition("@")

    def value_of(item: Item) -> float:
        if kind == "accuracy" or not item.samples:
            return item.share
        if kind == "pass":
            return pass_at_k(len(item.samples), item.num_correct, int(k))
        correct = [sample.is_correct for sample in item.samples]
        if kind == "majority":
            answers = [sample.extracted for sample in item.samples]
            return majority_at_k(answers, correct, int(k))
        scores = []
        for sample in item.samples:
            if sample.score is None:
                scores.append(-math.inf)
            else:
                scores.append(sample.score)
        return best_of_n(scores, [float(c) for c in correct], int(k))

    return [value_of(item) for item in items]


def with_interval(name: str, values: Sequence[float], draws: float) -> dict[str, float]:
    """Average one value per item, adding the 95 % interval (``_low``, ``_high``); ``draws``: see ``item_interval``."""
    low, high = item_interval(values, draws)
    return {name: statistics.fmean(values), f"{name}_low": low, f"{name}_high": high}


def break_down(items: Sequence[Item], samples: int = 1) -> Kinds:
    """Compute accuracy with interval, and n, by kind of item; ungraded items are excluded."""
    graded = graded_items(items)

    def measure(places: Sequence[int]) -> dict[str, float]:
        values = [graded[place].share for place in places]
        results = {"n": float(len(values))}
        return results | with_interval("accuracy", values, samples)

    return by_kind([item.meta for item in graded], measure)


def kind_results(kinds: Kinds) -> dict[str, float]:
    """Flatten the breakdown to results: ``level=5:accuracy`` with ``_low``, ``_high`` and ``_n``.

    Characters outside ``[\\w.+-]`` become ``_``, so names stay free of additional ``/``, ``:`` or ``=``.
    """
    results: dict[str, float] = {}
    for key, values in kinds.items():
        for value, measured in values.items():
            words = [re.sub(r"[^\w.+-]+", "_", part)[:MAX_KIND_CHARS] for part in (key, value)]
            kind = "=".join(words)
            for one, number in measured.items():
                if one != "n":
                    results[f"{kind}:{one}"] = number
            name = next(name for name in measured if name.endswith("accuracy"))
            results[f"{kind}:{name}_n"] = measured["n"]
    return results


def by_kind(metas: Sequence[Mapping[str, Scalar]], measure: Callable[[Sequence[int]], dict[str, float]]) -> Kinds:
    """Group items by each ``meta`` key, and apply ``measure`` to every group's item indices.

    Values with the same text (5 and ``"5"``, None and ``"none"``) form one group. A key is used if it yields between 2
    and ``MAX_KINDS`` groups, at most half the number of items, and its partition differs from earlier ones.
    """
    kinds: Kinds = {}
    cuts: set[frozenset[tuple[int, ...]]] = set()
    for key in dict.fromkeys(key for meta in metas for key in meta):
        groups: dict[str, list[int]] = {}
        values: dict[Scalar, str] = {}  # 1 and 1.0 are equal; the first spelling names the group
        for place, meta in enumerate(metas):
            value = meta.get(key)
            if value is None:
                text = NONE
            else:
                text = str(value)
            kind = values.setdefault(value, text)
            groups.setdefault(kind, []).append(place)
        cut = frozenset(map(tuple, groups.values()))
        if 2 <= len(groups) <= min(MAX_KINDS, len(metas) // 2) and cut not in cuts:
            cuts.add(cut)
            kinds[key] = {kind: measure(groups[kind]) for kind in _in_order(values)}
    return kinds


def _in_order(values: Mapping[Scalar, str]) -> list[str]:
    """Order group names: numbers ascending, then text, then missing values."""
    numbers = sorted(value for value in values if isinstance(value, int | float))
    texts = sorted(value for value in values if isinstance(value, str))
    ordered: list[Scalar] = [*numbers, *texts]
    if None in values:
        ordered.append(None)
    return list(dict.fromkeys(values[value] for value in ordered))
