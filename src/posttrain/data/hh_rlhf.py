"""Helpful and harmless dialogues: HH-RLHF (Bai et al. 2022)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Literal

from posttrain.data.base import Split, Task
from posttrain.data.reader import (
    CollectedExamples,
    Share,
    choose_split,
    collect_examples,
    drop_if,
    prompt_hash,
    reads_rows,
)
from posttrain.data.reading import Row, read_file
from posttrain.errors import DataError, UsageError
from posttrain.registry import register
from posttrain.types import Example, Message, Response

# Turns begin at the start of the text or after a blank line; elsewhere, ``Human:`` is part of a turn.
_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}
Half = Literal["first", "second"]
Subset = Literal["all", "helpful-base", "helpful-online", "helpful-rejection-sampled", "harmless-base"]
HUB = "Anthropic/hh-rlhf"  # with a folder for each subset
SUBSETS: tuple[Subset, ...] = ("helpful-base", "helpful-online", "helpful-rejection-sampled", "harmless-base")


@register("task", held_out="validation", learns_from_test="test_share")
@reads_rows
def hh_rlhf(
    *,
    split: Split = "train",
    subset: Subset = "all",
    path: str | None = None,
    test_path: str | None = None,
    validation_share: Share = 0.02,
    test_share: Share = 0.0,
    half: Half | None = None,
    strip_thinking: bool = False,
) -> Task:
    """HH-RLHF from the hub, or a local file with keys ``chosen``, ``rejected`` and optionally ``subset``.

    Each key holds a complete dialogue as text. The final assistant turn is the response (chosen 1, rejected 0), and
    all previous turns form the prompt, without gold answers. Turns begin with ``Human:`` or ``Assistant:`` after a
    blank line. Consecutive turns by the same role are merged. Dropped and counted: pairs whose prompts differ,
    dialogues that begin with the assistant or do not end with it, blank turns, and identical responses.

    Args:
        split: ``validation`` is selected from training dialogues by hashing the first human turn, so dialogues with a
            common beginning stay together; ``train`` is the rest. For local files, ``test`` uses all rows.
        subset: one of the four subsets, or all. Kept in meta.
        test_path: test dialogues for a local ``path``, required by ``test_share``.
        validation_share: fraction of first turns to hold out.
        test_share: for policies trained against a reward model. This fraction of ``train`` prompts comes from the
            test split, unseen by the reward model, without responses. Surplus prompts are dropped and counted, as are
            test prompts whose first turn also occurs in the held-out part.
        half: use only one half of all dialogues, selected by hashing the first human turn, to train a second reward
            model.
        strip_thinking: remove ``<think>`` … ``</think>`` from responses. Responses with unclosed thinking, or nothing
            else, are dropped and counted.

    Raises:
        UsageError: ``test_share`` with a local file but without ``test_path``.

    Source: Bai et al. 2022 (arXiv 2204.05862).
    """
    source = "test" if split == "test" else "train"
    if test_share > 0 and path is not None and test_path is None:
        raise UsageError("task hh_rlhf: test_share also requires test dialogues; set task.test_path")
    collected = _read(path, source, subset, split, strip_thinking)
    examples = choose_split(collected.examples, split, validation_share, path or f"hub:{HUB}/{source}", by_opening=True)
    if split == "train" and test_share > 0:
        test = _read(test_path, "test", subset, "test", strip_thinking)
        examples = _mix_prompts(examples, test, test_share, collected)
    if half is not None:
        kept = [example for example in examples if _half_of(example) == half]
        collected.dropped["in the other half"] += len(examples) - len(kept)
        examples = kept
    return Task("hh_rlhf", split, examples, dict(collected.dropped), keys=dict(collected.keys))


_opening = partial(prompt_hash, by_opening=True)


def _half_of(example: Example) -> Half:
    """Assign a dialogue to a half, using the 40th bit of its hash.

    This bit is independent of the split, so two models never train on the same prompts.
    """
    if int(_opening(example) * 2**40) & 1:
        return "second"
    return "first"


def _read(path: str | None, source: str, subset: Subset, split: str, strip_thinking: bool) -> CollectedExamples:
    """Read all usable dialogues from a file or hub split."""

    if path is None:
        rows = _hub_rows(source, subset)
    else:
        rows = _file_rows(path, subset)
    read = partial(read_pair, strip_thinking=strip_thinking)
    collected = collect_examples(rows, read, path or f"hub:{HUB}", name=f"hh_rlhf/{split}")
    if not collected.examples and path is not None and subset != "all":
        raise DataError(path, f"contains no dialogue from subset {subset!r}; set task.subset to all")
    return collected


def _hub_rows(source: str, subset: Subset) -> Iterator[Row]:
    """Read rows from a hub split, adding their subset as a key."""
    names: Sequence[Subset] = (subset,)
    if subset == "all":
        names = SUBSETS
    for name in names:
        for row in read_file(f"hf:{HUB}/{name}/{source}.jsonl.gz"):
            yield Row(row.place, row.line, {**row.data, "subset": name})


def _file_rows(path: str, subset: Subset) -> Iterator[Row]:
    """Read a subset's rows from a local file."""
    for row in read_file(path):
        row.refuse_if(
            subset != "all" and not row.has("subset"),
            "missing key 'subset'; set task.subset to all",
        )
        if subset in ("all", row.data.get("subset")):
            yield row


def parse_turns(text: str) -> tuple[Message, ...]:
    """Parse turns, stripping whitespace. Turns may be blank or repeat the previous role.

    Raises:
        Dropped: no turns, or text before the first.
    """
    before, *parts = _TURN.split(text)
    drop_if(not parts or before.strip(), "does not begin with a turn ('Human:' or 'Assistant:')")
    return tuple(Message(_ROLES[name], texts.strip()) for name, texts in zip(parts[0::2], parts[1::2], strict=True))


def merge_turns(turns: Sequence[Message]) -> tuple[Message, ...]:
    """Merge consecutive turns by the same role, separated by blank lines.

    Chat templates require alternating roles. Blank turns disappear when merged with neighbors.

    Raises:
        Dropped: an isolated blank turn.
    """
    merged = []
    for role, same in groupby(turns, key=attrgetter("role")):
        content = "\n\n".join(turn.content for turn in same if turn.content)
        drop_if(not content, "blank turn")
        merged.append(Message(role, content))
    return tuple(merged)


def read_pair(row: Row, *, strip_thinking: bool = False) -> Example:
    """Read a row as a preference pair.

    Raises:
        Dropped: unusable row.
        DataError: missing key or wrong type.
    """
    chosen = parse_turns(row.text("chosen"))
    rejected = parse_turns(row.text("rejected"))
    ends_with_reply = chosen[-1].role == rejected[-1].role == "assistant"
    drop_if(not ends_with_reply, "last turn is not the assistant's")
    drop_if(chosen[:-1] != rejected[:-1], "'chosen' and 'rejected' differ before their last turn")
    chosen = merge_turns(chosen)
    rejected = merge_turns(rejected)
    prompt = chosen[:-1]
    drop_if(chosen[0].role != "user", "first turn is the assistant's")
    better = answer_text(chosen[-1].content, strip_thinking=strip_thinking)
    worse = answer_text(rejected[-1].content, strip_thinking=strip_thinking)
    drop_if(better == worse, "'chosen' and 'rejected' are identical")
    responses = (Response(better, 1.0), Response(worse, 0.0))
    if not row.has("subset"):
        return Example("", prompt, responses=responses)
    subset = row.text("subset")
    return Example(f"{subset}/{row.line}", prompt, responses=responses, meta={"subset": subset})


def _mix_prompts(
    train: Sequence[Example], tests: CollectedExamples, share: float, whole: CollectedExamples
) -> list[Example]:
    """Combine training examples with test prompts, which make up a fraction ``share`` and lose their responses.

    Test dialogues beginning like a held-out one (in ``whole`` but not in ``train``) are dropped. Whichever side is
    too large loses the examples with the highest hashes. Dropped examples are counted in ``whole``. meta records the
    original split.
    """
    whole.dropped.update(tests.dropped)
    held_out = {_opening(e) for e in whole.examples} - {_opening(e) for e in train}
    test = [e for e in tests.examples if _opening(e) not in held_out]
    if len(test) < len(tests.examples):
        whole.dropped["test prompts beginning like a held-out dialogue"] += len(tests.examples) - len(test)
    num_train = round(min(len(train), len(test) * (1 - share) / share))
    num_test = round(min(len(test), len(train) * share / (1 - share)))
    if num_train < len(train):
        whole.dropped["training prompts beyond task.test_share"] += len(train) - num_train
    if num_test < len(test):
        whole.dropped["test prompts beyond task.test_share"] += len(test) - num_test
    kept: list[Example] = []
    for example in _of_lowest_hash(train, num_train):
        kept.append(replace(example, meta={**example.meta, "source": "train"}))
    for example in _of_lowest_hash(test, num_test):
        kept.append(replace(example, responses=(), meta={**example.meta, "source": "test"}))
    return kept


def _of_lowest_hash(examples: Sequence[Example], count: int) -> list[Example]:
    """Select the ``count`` examples with the lowest prompt hashes, preserving order."""
    by_hash = sorted(range(len(examples)), key=lambda place: prompt_hash(examples[place]))
    return [examples[place] for place in sorted(by_hash[:count])]


def answer_text(text: str, *, strip_thinking: bool) -> str:
    """Optionally strip thinking and surrounding whitespace from a response.

    Thinking blocks may be nested. An unmatched ``</think>`` closes a block opened by the prompt, so everything before
    it is removed too.

    Raises:
        Dropped: an unclosed ``<think>``, or nothing but thinking.
    """
    if not strip_thinking:
        return text
    kept = ""
    depth = 0
    for part in re.split(r"(</?think>)", text):
        if part == "<think>":
            depth += 1
        elif part == "</think>" and depth:
            depth -= 1
        elif part == "</think>":
            kept = ""
        elif depth == 0:
            kept += part
    drop_if(depth, "unclosed <think>")
    drop_if(not kept.strip(), "response contains only thinking")
    return kept.strip()
