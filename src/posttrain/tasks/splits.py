"""Train and validation parts of data that come without a validation split."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Literal

from posttrain.errors import DataError
from posttrain.types import Example, Message

Split = Literal["train", "validation", "test"]
Half = Literal["first", "second"]


def prompt_hash(example: Example) -> float:
    """A number in [0, 1) that depends on the prompt's text alone (BLAKE2b)."""
    return _hash(example.messages)


def opening_hash(example: Example) -> float:
    """As ``prompt_hash``, of the prompt up to the user's first message.

    It is the same for a dialogue and for every longer dialogue that goes on from it.
    """
    first = next((n for n, message in enumerate(example.messages, start=1) if message.role == "user"), None)
    return _hash(example.messages[:first])


def choose_half(
    examples: Sequence[Example], half: Half | None, hash_of: Callable[[Example], float] = prompt_hash
) -> list[Example]:
    """The examples of one half of all prompts, in order; all where ``half`` is None.

    The halves are told apart by the 40th bit of a prompt's hash, which says nothing of its split: so two models can
    learn from the same file and never see the same prompt, held-out ones included.
    """
    if half is None:
        return list(examples)
    wanted = {"first": 0, "second": 1}[half]
    return [example for example in examples if int(hash_of(example) * 2**40) & 1 == wanted]


def _hash(messages: Sequence[Message]) -> float:
    text = "\x1e".join(f"{message.role}\x1f{message.content}" for message in messages)
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=7).digest()
    return int.from_bytes(digest, "big") / 2.0**56


def choose_split(
    examples: Sequence[Example],
    split: Split,
    share: float,
    place: str,
    hash_of: Callable[[Example], float] = prompt_hash,
) -> list[Example]:
    """The examples of one split, in order.

    ``test`` is everything: the file is taken to be a test file. Otherwise the prompts whose hash is
    below ``share`` are held out as validation, and ``train`` is the rest. So the two are disjoint by prompt
    (equal prompts stand on the same side), and a prompt keeps its side whatever else is in the
    file, with one exception: where a small file would leave a side empty, its lowest (highest) prompt goes
    to validation (train).

    ``hash_of``: ``opening_hash`` keeps dialogues that begin alike on one side.

    Raises:
        DataError: nothing is left for the split.
    """
    if not examples:
        raise DataError(place, "no usable examples in it; give a file with rows")
    if split == "test" or (split == "train" and share == 0):
        return list(examples)
    if share == 0:
        raise DataError(place, "nothing is held out for validation; set task.validation_share above 0")
    hashes = [hash_of(example) for example in examples]
    lowest, highest = min(hashes), max(hashes)
    if lowest == highest:
        raise DataError(
            place, "only one distinct prompt: it cannot be parted into train and validation; set validation_share to 0"
        )
    # Just above the lowest at least, and no further than the highest: neither side is ever empty.
    limit = min(max(share, math.nextafter(lowest, 1.0)), highest)
    return [e for e, h in zip(examples, hashes, strict=True) if (h < limit) == (split == "validation")]
