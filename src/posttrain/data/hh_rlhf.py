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

# A turn begins at the start of the text or behind a blank line; ``Human:`` anywhere else is part of a turn.
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
    """HH-RLHF from the hub, or from a local file with the keys ``chosen`` and ``rejected`` and maybe ``subset``.

    Both hold a whole dialogue as text; it becomes messages, of which the last, the assistant's, is the answer (chosen
    1, rejected 0) and the others are the prompt. There is no gold answer. A turn begins with ``Human:`` or
    ``Assistant:`` behind a blank line; turns of one role that follow one another are one message. Dropped and counted:
    dialogues that part before their last turn, do not end with the assistant's or begin with it, blank turns, and equal
    answers.

    Args:
        split: ``validation`` is a part of the training dialogues chosen by a hash of their first human turn, so that
            dialogues that begin alike stand on one side; ``train`` is the rest. ``test`` of a local file is all of it.
        subset: one of the four, or all. Kept in meta.
        test_path: the test dialogues of a local ``path``; needed with ``test_share``.
        validation_share: share of the first turns that is held out.
        test_share: for policies that learn from a reward model: this share of the prompts in ``train`` comes from the
            test split, on which the reward model was not trained, without its responses. Prompts beyond the share, and
            test prompts that begin as a held-out dialogue does, are left out and counted.
        half: only the dialogues of one half, by a hash of their first human turn, for a second reward model.
        strip_thinking: leave ``<think>`` … ``</think>`` out of the answers; one whose thinking never closes, or that
            holds nothing else, is dropped and counted.

    Raises:
        UsageError: ``test_share`` with a local file and no ``test_path``.

    Source: Bai et al. 2022 (arXiv 2204.05862).
    """
    source = "test" if split == "test" else "train"
    if test_share > 0 and path is not None and test_path is None:
        raise UsageError("task hh_rlhf: test_share needs the test dialogues as well; name their file as task.test_path")
    collected = _read(path, source, subset, split, strip_thinking)
    examples = choose_split(collected.examples, split, validation_share, path or f"hub:{HUB}/{source}", by_opening=True)
    if split == "train" and test_share > 0:
        test = _read(test_path, "test", subset, "test", strip_thinking)
        examples = _mix_prompts(examples, test, test_share, collected)
    if half is not None:
        kept = [example for example in examples if _half_of(example) == half]
        collected.dropped["of the other half"] += len(examples) - len(kept)
        examples = kept
    return Task("hh_rlhf", split, examples, dict(collected.dropped), keys=dict(collected.keys))


_opening = partial(prompt_hash, by_opening=True)


def _half_of(example: Example) -> Half:
    """The half of a dialogue, by the 40th bit of its hash.

    The split says nothing about this bit, so two models never learn the same prompts.
    """
    if int(_opening(example) * 2**40) & 1:
        return "second"
    return "first"


def _read(path: str | None, source: str, subset: Subset, split: str, strip_thinking: bool) -> CollectedExamples:
    """All dialogues of a file, or of a split on the hub, that can be used."""

    if path is None:
        rows = _hub_rows(source, subset)
    else:
        rows = _file_rows(path, subset)
    read = partial(read_pair, strip_thinking=strip_thinking)
    collected = collect_examples(rows, read, path or f"hub:{HUB}", name=f"hh_rlhf/{split}")
    if not collected.examples and path is not None and subset != "all":
        raise DataError(path, f"no dialogue of the subset {subset!r} in it; set task.subset to all")
    return collected


def _hub_rows(source: str, subset: Subset) -> Iterator[Row]:
    """The rows of a split on the hub, with their subset as a key."""
    names: Sequence[Subset] = (subset,)
    if subset == "all":
        names = SUBSETS
    for name in names:
        for row in read_file(f"hf:{HUB}/{name}/{source}.jsonl.gz"):
            yield Row(row.place, row.line, {**row.data, "subset": name})


def _file_rows(path: str, subset: Subset) -> Iterator[Row]:
    """The rows of a local file that belong to the subset."""
    for row in read_file(path):
        row.refuse_if(
            subset != "all" and not row.has("subset"),
            "the row does not say of which subset it is ('subset'); set task.subset to all",
        )
        if subset in ("all", row.data.get("subset")):
            yield row


def parse_turns(text: str) -> tuple[Message, ...]:
    """The turns as they stand, without white space around them; one may be blank, or follow one of the same role.

    Raises:
        Dropped: no turn, or text before the first one.
    """
    before, *parts = _TURN.split(text)
    drop_if(not parts or before.strip(), "the text does not begin with a turn ('Human:' or 'Assistant:')")
    return tuple(Message(_ROLES[name], texts.strip()) for name, texts in zip(parts[0::2], parts[1::2], strict=True))


def merge_turns(turns: Sequence[Message]) -> tuple[Message, ...]:
    """Turns of one role that follow one another as one message, a blank line between their texts.

    Chat templates ask for roles that alternate. A blank turn next to one of its own role disappears in it.

    Raises:
        Dropped: a blank turn that stands alone.
    """
    merged = []
    for role, same in groupby(turns, key=attrgetter("role")):
        content = "\n\n".join(turn.content for turn in same if turn.content)
        drop_if(not content, "a blank turn")
        merged.append(Message(role, content))
    return tuple(merged)


def read_pair(row: Row, *, strip_thinking: bool = False) -> Example:
    """One row as a pair.

    Raises:
        Dropped: the row cannot be used.
        DataError: a key is missing or of the wrong type.
    """
    chosen = parse_turns(row.text("chosen"))
    rejected = parse_turns(row.text("rejected"))
    ends_with_reply = chosen[-1].role == rejected[-1].role == "assistant"
    drop_if(not ends_with_reply, "the dialogue does not end with the assistant's turn")
    drop_if(chosen[:-1] != rejected[:-1], "'chosen' and 'rejected' part before their last turn")
    chosen = merge_turns(chosen)
    rejected = merge_turns(rejected)
    prompt = chosen[:-1]
    drop_if(chosen[0].role != "user", "the dialogue begins with the assistant's turn")
    better = answer_text(chosen[-1].content, strip_thinking=strip_thinking)
    worse = answer_text(rejected[-1].content, strip_thinking=strip_thinking)
    drop_if(better == worse, "'chosen' and 'rejected' are the same")
    responses = (Response(better, 1.0), Response(worse, 0.0))
    if not row.has("subset"):
        return Example("", prompt, responses=responses)
    subset = row.text("subset")
    return Example(f"{subset}/{row.line}", prompt, responses=responses, meta={"subset": subset})


def _mix_prompts(
    train: Sequence[Example], tests: CollectedExamples, share: float, whole: CollectedExamples
) -> list[Example]:
    """Training examples and test prompts without their responses, of which the latter are ``share`` of all.

    Test dialogues that begin as a held-out one (of ``whole``, not of ``train``) are left out. The side that is too many
    loses those of the highest hash. All are counted in ``whole``. Meta says of which split a prompt is.
    """
    whole.dropped.update(tests.dropped)
    held_out = {_opening(e) for e in whole.examples} - {_opening(e) for e in train}
    test = [e for e in tests.examples if _opening(e) not in held_out]
    if len(test) < len(tests.examples):
        whole.dropped["test prompts that begin as a held-out dialogue does"] += len(tests.examples) - len(test)
    num_train = round(min(len(train), len(test) * (1 - share) / share))
    num_test = round(min(len(test), len(train) * share / (1 - share)))
    if num_train < len(train):
        whole.dropped["training prompts left out to keep task.test_share"] += len(train) - num_train
    if num_test < len(test):
        whole.dropped["test prompts left out to keep task.test_share"] += len(test) - num_test
    kept: list[Example] = []
    for example in _of_lowest_hash(train, num_train):
        kept.append(replace(example, meta={**example.meta, "source": "train"}))
    for example in _of_lowest_hash(test, num_test):
        kept.append(replace(example, responses=(), meta={**example.meta, "source": "test"}))
    return kept


def _of_lowest_hash(examples: Sequence[Example], count: int) -> list[Example]:
    """So many examples whose prompts have the lowest hashes, in their order."""
    by_hash = sorted(range(len(examples)), key=lambda place: prompt_hash(examples[place]))
    return [examples[place] for place in sorted(by_hash[:count])]


def answer_text(text: str, *, strip_thinking: bool) -> str:
    """Return a given answer as it stands, or without its thinking and the white space around what is left.

    Blocks of thinking go with the blocks inside them. A ``</think>`` that closes nothing ends thinking that the prompt
    opened: all before it goes as well.

    Raises:
        Dropped: a ``<think>`` that never closes, or nothing but thinking.
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
    drop_if(depth, "a <think> that never closes")
    drop_if(not kept.strip(), "an answer of nothing but thinking")
    return kept.strip()
