"""Tasks of rows: the rows that are examples, their number, their split, and the places where rows are found."""

from __future__ import annotations

import hashlib
import inspect
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache, partial, wraps
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from posttrain.data.base import Split, Task
from posttrain.data.columns import UnshownColumns
from posttrain.data.messages import SYSTEM_KEYS
from posttrain.data.reading import FOLDER, HUB, SUFFIXES, Row, is_only_space, read_file
from posttrain.errors import DataError, DataNotThere, MissingExtra
from posttrain.option_types import Seed
from posttrain.randomness import permutation
from posttrain.strict_yaml import read_yaml
from posttrain.types import Example
from posttrain.untrusted import kind_of_file

Reader = Callable[..., Task]
FileSplit = Literal["train", "validation", "test", "all"]  # of one file that holds all of them
TestSplit = Literal["test"]
Share = Annotated[float, Field(ge=0, lt=1)]
MIN_HELD_OUT = 50  # rows; of fewer the width of the interval is noted
# What the docstring of every task of rows says of these options, and of errors, where it does not say more itself.
_ABOUT = {
    "split": (
        "``validation`` is a part of the training rows chosen by a hash of the prompt, and ``train`` is the rest;\n"
        "        ``test`` of a local file is the whole file."
    ),
    "path": (
        "a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file, or a data set of the hub (``hf:NAME``,\n"
        "        ``hf:NAME:CONFIG@SPLIT``; ``#1000`` after it streams its first rows and downloads no more)."
    ),
    "validation_share": "share of the prompts that is held out.",
    "test_share": "share of the prompts that is held out for the last measurement.",
    "ignore_keys": "keys of rows and messages that are left out.",
    "prompt_format": (
        'the prompt, with names of columns in braces: ``"{article}\\n\\n{question}"``. ``{prompt}`` is the question,\n'
        "        whatever its column is called."
    ),
    "meta": "keys that are carried along without a word: texts that the prompt need not show.",
    "size": (
        "of the split, so many examples, drawn by ``seed``; the others are counted as left out. Without it, and where\n"
        "        there are fewer, all of them. The size of a training split does not cut what is held out."
    ),
    "seed": "another seed, other examples.",
}
_ERRORS = {
    "DataError": "a missing or malformed file or row, with its line; or no row that can be used.",
    "MissingExtra": "``datasets`` or ``pyarrow`` is needed and not installed.",
}


def reads_rows(read: Reader) -> Reader:
    """Give a task that reads rows the options ``size`` and ``seed``; stands below ``register``.

    Without a path its file is looked for in the folder POSTTRAIN_DATA (``places.yaml``), then on the hub.
    """
    name = read.__name__
    own = dict(inspect.signature(read, eval_str=True).parameters)
    place = _places().get(name, {})
    needs_path = own["path"].default is inspect.Parameter.empty
    default_split = own["split"].default if "split" in own else "test"

    @wraps(read)
    def sized(*, size: int | None = None, seed: int = 0, **options: Any) -> Task:
        try:
            origin = None
            if place and options.get("path") is None:
                split = options.get("split", default_split)
                options |= _local_files(name, split, options)
                origin = options.get("path")
                if origin is None and needs_path:
                    raise DataNotThere("task.path", "no file is named")
            return replace(_choose_size(read(**options), size, seed), origin=origin)
        except (DataNotThere, MissingExtra) as error:
            error.args = (f"{error}{_where_to_get(name, place)}",)
            raise

    own |= _options(size=(Annotated[int, Field(ge=1)] | None, None), seed=(Seed, 0))
    if place and needs_path:  # it may be left to POSTTRAIN_DATA
        own |= _options(path=(str | None, None))
    _declare(sized, own)
    sized.__doc__ = _document(inspect.getdoc(read) or "", own)
    return sized


def row_task(
    hub: str,
    *,
    train: str = "train",
    test: str = "test",
    share: float | None = 0.05,
    splits: Any = Split,
    split: str | None = None,
) -> Callable[[Callable[..., Example]], Reader]:
    """Make a task of a function that reads a ``row`` (and maybe ``split``) as one example; its options are the task's.

    Args:
        hub: name of the data set on the hub, maybe with a configuration: ``openai/gsm8k:main``.
        train, test: names of its splits there; ``validation`` is a part of ``train``.
        share: default of ``validation_share``; None: every split is taken as it is.
        splits: type of the option ``split``, and ``split`` its default, else ``train`` (``test`` where that is all).
    """

    def make(read: Callable[..., Example]) -> Reader:
        name = read.__name__
        parameters = dict(inspect.signature(read, eval_str=True).parameters)
        default = split
        if default is None:
            default = "test" if splits is TestSplit else "train"
        there = {"train": train, "validation": train, "test": test}
        if share is None:
            there["validation"] = "validation"
        takes_split = parameters.pop("split", None) is not None
        del parameters["row"]

        def task(
            *, path: str | None = None, split: Any = default, validation_share: Any = share, **options: Any
        ) -> Task:
            place = path or f"{HUB}{hub}@{there[split]}"
            if takes_split:
                options["split"] = split
            collected = collect_examples(read_file(place), partial(read, **options), place, name=f"{name}/{split}")
            return collected.as_task(name, place, split, validation_share)

        shared = _options(split=(splits, default), path=(str | None, None))
        if share is not None:
            shared |= _options(validation_share=(Share, share))
        task.__name__ = name
        task.__qualname__ = name
        task.__module__ = read.__module__
        task.__doc__ = read.__doc__
        _declare(task, shared | parameters)
        return reads_rows(task)

    return make


def _options(**options: tuple[Any, Any]) -> dict[str, inspect.Parameter]:
    """Keyword-only parameters from (type, default) by name."""
    parameters = {}
    for name, (annotation, default) in options.items():
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters[name] = inspect.Parameter(name, kind, default=default, annotation=annotation)
    return parameters


def _declare(task: Reader, parameters: Mapping[str, inspect.Parameter]) -> None:
    signature = inspect.Signature(list(parameters.values()), return_annotation=Task)
    task.__signature__ = signature  # type: ignore[attr-defined]


def _document(doc: str, options: Mapping[str, inspect.Parameter]) -> str:
    """A reader's docstring with what it has in common with all others."""
    ends = [doc.find(part) for part in ("\n\nRaises:", "\n\nSource:") if part in doc]
    end = min(ends, default=len(doc))
    about = doc[:end]
    rest = doc[end:]
    if "\n\nArgs:" not in about:
        about += "\n\nArgs:"
    for name, text in _ABOUT.items():
        if name not in options or f"\n    {name}:" in about:
            continue
        if name == "split" and options[name].annotation is TestSplit:
            text = "there is nothing but a test split."
        about += f"\n    {name}: {text}"
    about += "\n\nRaises:"
    for name, text in _ERRORS.items():
        if f"\n    {name}:" not in rest:
            about += f"\n    {name}: {text}"
    return about + rest.removeprefix("\n\nRaises:")


def _choose_size(task: Task, size: int | None, seed: int) -> Task:
    """The task with at most ``size`` examples, a function of (seed, size, number of examples), in their own order."""
    there = len(task.examples)
    if size is None or size >= there:
        return task
    chosen = sorted(int(i) for i in permutation(seed, "size", 0, there)[:size])
    dropped = task.dropped | {f"beyond task.size={size}": there - size}
    return replace(task, examples=[task.examples[i] for i in chosen], dropped=dropped)


@cache
def _places() -> Mapping[str, Mapping[str, Any]]:
    text = (resources.files("posttrain") / "data" / "places.yaml").read_text(encoding="utf-8")
    return read_yaml(text, "places.yaml")[0]


def _local_files(name: str, split: str, options: Mapping[str, Any]) -> dict[str, str]:
    """The options that name the task's files in the folder POSTTRAIN_DATA; none where there are no such files."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return {}
    place = _places()[name]
    listed = place.get("files", {})
    source = split
    if split == "validation" and "validation" not in listed:
        source = "train"  # a validation split is a part of the training rows, unless it has a file of its own
    wanted = {"path": [f"{name}/{source}", *listed.get(source, ())]}
    for key, other in place.get("also", {}).items():
        if options.get(key) is None:
            wanted[key] = [f"{name}/{other}"]
    found: dict[str, str] = {}
    for key, names in wanted.items():
        files = (Path(folder) / f"{stem}{suffix}" for stem in names for suffix in SUFFIXES)
        file = next((file for file in files if kind_of_file(file) == "file"), None)
        if file is not None:
            found[key] = str(file)
    if "path" in found:
        return found
    return {}


def _where_to_get(name: str, place: Mapping[str, object]) -> str:
    if not place:
        return f". {name} reads a file of yours: name it as task.path, or by its name in the folder {FOLDER}"
    return (
        f". Where to get it: {place['url']} (licence: {place['licence']}), for instance by: {place['get']}. Name the "
        f"file as task.path, or put it as {name}/train.jsonl or {name}/test.jsonl into a folder that {FOLDER} names"
    )


class Dropped(Exception):
    """A row that is left out and counted; the text is the reason, the same for all such rows."""


def drop_if(is_useless: object, reason: str) -> None:
    """Leave the row out, and count it, if it cannot be used."""
    if is_useless:
        raise Dropped(reason)


@dataclass(slots=True)
class CollectedExamples:
    """Examples in the order of their rows, the number of rows left out, by reason, and the use of their keys."""

    examples: list[Example] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    keys: Counter[tuple[str, str]] = field(default_factory=Counter)
    unshown: UnshownColumns = field(default_factory=UnshownColumns)

    def settle_keys(self, row: Row, *, carries: bool) -> dict[str, Any]:
        """Count each key by its use; with ``carries`` return the values of those that nothing has read, for ``meta``.

        Raises:
            DataError: a key that nothing has read would change what is trained, or is a slip of one that would.
        """
        of_messages = {key for key in row.used if "[]." in key}
        ignored = {key for key in of_messages if key.rpartition(".")[2] in row.ignored}
        for key in sorted(row.used - ignored):
            if key in of_messages or row.has(key):
                self.keys[key, "read"] += 1
        for key in sorted(ignored):
            self.keys[key, LEFT_OUT] += 1
        use = "carried along (meta)" if carries else "no part of this task"
        carried: dict[str, Any] = {}
        for key in row.unused():
            if key not in self.unshown.silenced:
                _refuse_meant(row, key)
            self.keys[key, use] += 1
            if carries:
                carried[key] = row.plain(key)
        return carried

    def require_examples(self, place: str) -> None:
        """Raise a DataError with the reasons where there were rows and all of them were dropped."""
        if not self.examples and self.dropped:
            reasons = ", ".join(f"{n} × {reason}" for reason, n in self.dropped.items())
            what = "`posttrain explain` with the task's name says what a row must have"
            raise DataError(place, f"no row can be used: {reasons}. {what}")

    def as_task(
        self,
        name: str,
        place: str,
        split: FileSplit = "test",
        share: float | None = None,
        *,
        by_opening: bool = False,
        test_share: float | None = None,
    ) -> Task:
        """A split of it (``choose_split``); all of it where no ``share`` is given. Small parts come with a notice.

        Raises:
            DataError: there is nothing, or nothing is left for the split.
        """
        self.require_examples(place)
        part: FileSplit = split
        if share is None:
            part = "all"
        chosen = choose_split(self.examples, part, share or 0, place, by_opening=by_opening, test_share=test_share)
        warnings: tuple[str, ...] = ()
        if test_share is not None:
            warnings = _describe_part(name, split, len(chosen), len(self.examples))
        return Task(name, split, chosen, dict(self.dropped), keys=dict(self.keys), warnings=warnings)


def _describe_part(name: str, split: FileSplit, size: int, total: int) -> tuple[str, ...]:
    """Return a line about a part of a file that is measured on: its size, and its interval where it is small."""
    if split not in ("validation", "test"):
        return ()
    line = f"{name}/{split}: {size:,} of {total:,} rows, which split train leaves out; task.split all takes every row"
    if size >= MIN_HELD_OUT:
        if split == "test":
            return (line,)
        return ()
    half = 98.0 / math.sqrt(size + 3.84)  # of Wilson's interval at a share of one half, in points
    return (f"{line}. A share of so few has a 95 % interval of up to ±{half:.0f} points: raise task.{split}_share",)


LEFT_OUT = "left out (task.ignore_keys)"
# Keys that change what is trained. Where a task does not read them, leaving them out would train something else.
_OF_INSTRUCTION = ("input", "context")
MEANT = frozenset((
    "system", "tools", "functions", "function_call", "tool_calls", "margin", "weight", "history",
    "chat_template_kwargs", "reasoning_content", "thinking", "image", "images", "video", "videos", "audio", "train",
    "sample_weight", "loss_weight", *_OF_INSTRUCTION, *SYSTEM_KEYS,
))  # fmt: skip


def _refuse_meant(row: Row, key: str) -> None:
    """Refuse a key of ``MEANT`` that was not read, and one that is a slip of such a key."""
    value = row.plain(key)
    if value in ([], {}) or is_only_space(value):
        return
    if key in _OF_INSTRUCTION and row.has("instruction"):  # the prompt was written from both
        return
    way_out = f"Take {key!r} out of the row, or name it in task.ignore_keys where the task has that key"
    if key in _OF_INSTRUCTION:
        way_out += f'. task.prompt_format: "{{{key}}}\\n\\n{{prompt}}" shows it in the prompt'
    row.refuse_if(
        key.strip("\ufeff ").lower() in MEANT,
        f"the key {key!r} is not read here, and without it something else would be trained. {way_out}",
    )
    names = sorted(MEANT - {*_OF_INSTRUCTION, "train"})  # many words are like 'train'
    near = [name for name in names if _may_be_slip(key, name) and not row.has(name)]
    for slip in get_close_matches(key, near, n=1, cutoff=0.83):
        raise row.fail(f"unknown key {key!r}. Did you mean {slip!r}? {way_out}")


def _may_be_slip(key: str, name: str) -> bool:
    """Return whether a key may be a slip of a name; 'height' is none of 'weight'."""
    return name[0] == key[0] and len(key) > 4 and abs(len(name) - len(key)) < 2


def collect_examples(
    rows: Iterable[Row],
    read: Callable[[Row], Example],
    place: str,
    dropped: Counter[str] | None = None,
    *,
    name: str = "",
    carries: bool = False,
    ignored: Sequence[str] = (),
    silenced: Sequence[str] = (),
) -> CollectedExamples:
    """One example per row, where ``read`` raises ``Dropped`` for a row that is left out.

    Args:
        dropped: where ``rows`` itself counts what it leaves out; the rows that ``read`` leaves out are added.
        name: beginning of each id; the row's number follows where ``read`` gives no id.
        carries: keys that ``read`` does not read go into the example's ``meta``; but for those that are ``ignored``.
        silenced: keys that are carried along whatever they hold (``task.meta``).

    Raises:
        DataError: a malformed row, or rows of which none can be used.
    """
    collected = CollectedExamples()
    if dropped is not None:
        collected.dropped = dropped
    collected.unshown.silenced = frozenset(silenced)
    for row in rows:
        if ignored:
            collected.keys.update((key, LEFT_OUT) for key in ignored if row.has(key))
            kept = {key: value for key, value in row.data.items() if key not in ignored}
            row = replace(row, data=kept, ignored=frozenset(ignored))
        try:
            example = read(row)
        except Dropped as reason:
            collected.dropped[str(reason)] += 1
            continue
        carried = collected.settle_keys(row, carries=carries)
        collected.unshown.count(carried, example)
        meta = {**carried, **example.meta}
        id = "/".join(filter(None, (name, example.id or row.number)))
        collected.examples.append(replace(example, id=id, meta=meta))
    collected.require_examples(place)
    return collected


def prompt_hash(example: Example, *, by_opening: bool = False) -> float:
    """Hash the prompt's text to a number in [0, 1) (BLAKE2b).

    ``by_opening``: the prompt up to the user's first message, so that a dialogue and a longer one that goes on from it
    have the same. A text without a prompt has its own.
    """
    parts = []
    for message in example.messages:
        parts.append(f"{message.role}\x1f{message.content}")
        if by_opening and message.role == "user":
            break
    text = "\x1e".join(parts)
    if not parts:
        text = example.demonstration or ""
    return int(hashlib.blake2b(text.encode("utf-8"), digest_size=7).hexdigest(), 16) / 2.0**56


def choose_split(
    examples: Sequence[Example],
    split: FileSplit,
    share: float,
    place: str,
    *,
    by_opening: bool = False,
    test_share: float | None = None,
) -> list[Example]:
    """Return the examples of one split, in order.

    The prompts whose hash is below ``share`` are held out as validation, the next ``test_share`` as test, and ``train``
    is the rest; equal prompts stand on the same side, whatever else is in the file. ``all`` is everything, as is
    ``test`` of a file of its own (``test_share`` None). Where a small file would leave a part empty, its lowest
    (highest) prompt goes there. ``by_opening`` keeps dialogues that begin alike on one side.

    Raises:
        DataError: nothing is left for the split.
    """
    if not examples:
        raise DataError(place, "no usable examples in it; give a file with rows")
    shares = (share, test_share or 0.0)
    is_whole_test = split == "test" and test_share is None
    is_whole_train = split == "train" and not any(shares)
    if split == "all" or is_whole_test or is_whole_train:
        return list(examples)
    if (split == "validation" and shares[0] == 0) or (split == "test" and shares[1] == 0):
        raise DataError(place, f"nothing is held out for {split}; set task.{split}_share above 0")
    hashes = [prompt_hash(example, by_opening=by_opening) for example in examples]
    if len(set(hashes)) == 1:
        options = "validation_share"
        if test_share is not None:
            options = "validation_share and test_share"
        raise DataError(place, f"only one distinct prompt: it cannot be parted; to train on it, set {options} to 0")
    first, second = _ends(sorted(set(hashes)), shares)
    begin, end = {"validation": (0.0, first), "test": (first, second), "train": (second, 1.0)}[split]
    chosen = [example for example, value in zip(examples, hashes, strict=True) if begin <= value < end]
    if not chosen:
        raise DataError(place, f"too few distinct prompts to hold some out for {split}; give more rows, or split all")
    return chosen


def _ends(hashes: Sequence[float], shares: tuple[float, float]) -> tuple[float, float]:
    """Return where the two held-out parts end among distinct hashes: each with one at least, as far as there are."""
    validation, test = shares
    first = 0.0
    if validation and len(hashes) > 1:
        num_kept = 2 if test and len(hashes) > 2 else 1  # for the parts that follow
        first = _end_of_part(hashes, validation, num_kept)
    left = [value for value in hashes if value >= first]
    second = first
    if test and len(left) > 1:
        second = _end_of_part(left, validation + test, 1)
    return first, second


def _end_of_part(hashes: Sequence[float], end: float, num_kept: int) -> float:
    """The end of a part that begins with the lowest of these hashes and leaves ``num_kept`` of them to others."""
    behind_lowest = math.nextafter(hashes[0], 1.0)
    return min(max(end, behind_lowest), hashes[-num_kept])


def strip_calculations(text: str) -> str:
    """The text without GSM8K's calculator notes, ``<<48/2=24>>``."""
    return re.sub(r"<<[^<>]*>>", "", text)
