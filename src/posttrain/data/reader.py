"""Row-based tasks: shared options, splits, sizes, and data locations."""

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
FileSplit = Literal["train", "validation", "test", "all"]  # for splits within a single file
TestSplit = Literal["test"]
Share = Annotated[float, Field(ge=0, lt=1)]
MIN_HELD_OUT = 50  # rows. Below, the confidence interval's width is reported.
# Default docstrings for shared options and errors.
_ABOUT = {
    "split": (
        "``validation`` is selected from training rows by hashing the prompt; ``train`` is the rest. For local\n"
        "        files, ``test`` uses all rows."
    ),
    "path": (
        "a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file, or a hub dataset (``hf:NAME``,\n"
        "        ``hf:NAME:CONFIG@SPLIT``; append ``#1000`` to stream only its first rows)."
    ),
    "validation_share": "fraction of prompts to hold out for validation.",
    "test_share": "fraction of prompts to hold out for the final test.",
    "ignore_keys": "row and message keys to ignore.",
    "prompt_format": (
        'prompt text with column names in braces: ``"{article}\\n\\n{question}"``. ``{prompt}`` is the question,\n'
        "        regardless of column name."
    ),
    "meta": "keys to keep without a notice, such as text that prompts need not show.",
    "size": (
        "number of examples to sample from the split, using ``seed``; surplus examples are counted as dropped.\n"
        "        Defaults to all. Does not affect the held-out split."
    ),
    "seed": "changes the sample drawn by ``size``.",
}
_ERRORS = {
    "DataError": "a missing or malformed file or row, including the line; or no usable rows.",
    "MissingExtra": "``datasets`` or ``pyarrow`` is required but not installed.",
}


def reads_rows(read: Reader) -> Reader:
    """Decorator adding options ``size`` and ``seed`` to row-based tasks. Place it below ``register``.

    Without a path, files are looked up in the folder POSTTRAIN_DATA (``places.yaml``), then on the hub.
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
                    raise DataNotThere("task.path", "not set")
            return replace(_choose_size(read(**options), size, seed), origin=origin)
        except (DataNotThere, MissingExtra) as error:
            error.args = (f"{error}{_where_to_get(name, place)}",)
            raise

    own |= _options(size=(Annotated[int, Field(ge=1)] | None, None), seed=(Seed, 0))
    if place and needs_path:  # may be found in POSTTRAIN_DATA
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
    """Turn a function reading a ``row`` (and optionally ``split``) into a task with the function's options.

    Args:
        hub: dataset name on the hub, optionally with a configuration: ``openai/gsm8k:main``.
        train, test: split names on the hub. ``validation`` is held out from ``train``.
        share: default for ``validation_share``. None uses each split unchanged.
        splits: allowed values for option ``split``. ``split`` is its default, else ``train`` (``test`` if that is the
            only split).
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
    """Build keyword-only parameters from (type, default)."""
    parameters = {}
    for name, (annotation, default) in options.items():
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters[name] = inspect.Parameter(name, kind, default=default, annotation=annotation)
    return parameters


def _declare(task: Reader, parameters: Mapping[str, inspect.Parameter]) -> None:
    signature = inspect.Signature(list(parameters.values()), return_annotation=Task)
    task.__signature__ = signature  # type: ignore[attr-defined]


def _document(doc: str, options: Mapping[str, inspect.Parameter]) -> str:
    """Complete a docstring with shared options and errors."""
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
            text = "only a test split exists."
        about += f"\n    {name}: {text}"
    about += "\n\nRaises:"
    for name, text in _ERRORS.items():
        if f"\n    {name}:" not in rest:
            about += f"\n    {name}: {text}"
    return about + rest.removeprefix("\n\nRaises:")


def _choose_size(task: Task, size: int | None, seed: int) -> Task:
    """Sample at most ``size`` examples, determined by (seed, size, number of examples) and kept in order."""
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
    """Find the task's files in the folder POSTTRAIN_DATA. Empty if not found."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return {}
    place = _places()[name]
    listed = place.get("files", {})
    source = split
    if split == "validation" and "validation" not in listed:
        source = "train"  # validation is held out from training rows, unless it has a separate file
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
        return f". {name} requires your own file: set task.path, absolute or relative to the folder {FOLDER}"
    return (
        f". Source: {place['url']} (license: {place['licence']}), for example: {place['get']}. Set task.path to the "
        f"file, or save it as {name}/train.jsonl or {name}/test.jsonl in the folder given by {FOLDER}"
    )


class Dropped(Exception):
    """Raised to drop and count a row. The message is the reason, and must be identical for similar rows."""


def drop_if(is_useless: object, reason: str) -> None:
    """Drop and count a row if it is unusable."""
    if is_useless:
        raise Dropped(reason)


@dataclass(slots=True)
class CollectedExamples:
    """Examples in row order, number of dropped rows by reason, and key usage."""

    examples: list[Example] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    keys: Counter[tuple[str, str]] = field(default_factory=Counter)
    unshown: UnshownColumns = field(default_factory=UnshownColumns)

    def settle_keys(self, row: Row, *, carries: bool) -> dict[str, Any]:
        """Count each key by usage, and return unread values for ``meta`` if ``carries`` is set.

        Raises:
            DataError: an unread key would change training, or is probably a typo of such a key.
        """
        of_messages = {key for key in row.used if "[]." in key}
        ignored = {key for key in of_messages if key.rpartition(".")[2] in row.ignored}
        for key in sorted(row.used - ignored):
            if key in of_messages or row.has(key):
                self.keys[key, "read"] += 1
        for key in sorted(ignored):
            self.keys[key, LEFT_OUT] += 1
        use = "kept (meta)" if carries else "not used by this task"
        carried: dict[str, Any] = {}
        for key in row.unused():
            if key not in self.unshown.silenced:
                _refuse_meant(row, key)
            self.keys[key, use] += 1
            if carries:
                carried[key] = row.plain(key)
        return carried

    def require_examples(self, place: str) -> None:
        """Raise a DataError with all reasons if every row was dropped."""
        if not self.examples and self.dropped:
            reasons = ", ".join(f"{n} × {reason}" for reason, n in self.dropped.items())
            what = "Run `posttrain explain` with the task's name for required keys"
            raise DataError(place, f"no usable rows: {reasons}. {what}")

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
        """Build a task for a split (``choose_split``), or from all rows if ``share`` is None. Small splits add a
        warning.

        Raises:
            DataError: no examples, or none in this split.
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
    """Describe a held-out part of a file: size, plus confidence interval if small."""
    if split not in ("validation", "test"):
        return ()
    line = f"{name}/{split}: {size:,} of {total:,} rows, excluded from split train; task.split all uses every row"
    if size >= MIN_HELD_OUT:
        if split == "test":
            return (line,)
        return ()
    half = 98.0 / math.sqrt(size + 3.84)  # Wilson interval for a fraction of one half, in percentage points
    return (f"{line}. With so few rows, 95 % intervals reach ±{half:.0f} points: raise task.{split}_share",)


LEFT_OUT = "ignored (task.ignore_keys)"
# Keys that change training. If a task does not read them, ignoring them would silently train something else.
_OF_INSTRUCTION = ("input", "context")
MEANT = frozenset((
    "system", "tools", "functions", "function_call", "tool_calls", "margin", "weight", "history",
    "chat_template_kwargs", "reasoning_content", "thinking", "image", "images", "video", "videos", "audio", "train",
    "sample_weight", "loss_weight", *_OF_INSTRUCTION, *SYSTEM_KEYS,
))  # fmt: skip


def _refuse_meant(row: Row, key: str) -> None:
    """Refuse unread keys in ``MEANT``, and likely typos of such keys."""
    value = row.plain(key)
    if value in ([], {}) or is_only_space(value):
        return
    if key in _OF_INSTRUCTION and row.has("instruction"):  # already included in the prompt
        return
    way_out = f"Remove {key!r} from the row, or add it to task.ignore_keys if the task supports that"
    if key in _OF_INSTRUCTION:
        way_out += f'. task.prompt_format: "{{{key}}}\\n\\n{{prompt}}" shows it in the prompt'
    row.refuse_if(
        key.strip("\ufeff ").lower() in MEANT,
        f"the key {key!r} is not read here, although it affects training. {way_out}",
    )
    names = sorted(MEANT - {*_OF_INSTRUCTION, "train"})  # many words resemble 'train'
    near = [name for name in names if _may_be_slip(key, name) and not row.has(name)]
    for slip in get_close_matches(key, near, n=1, cutoff=0.83):
        raise row.fail(f"unknown key {key!r}. Did you mean {slip!r}? {way_out}")


def _may_be_slip(key: str, name: str) -> bool:
    """Check if a key may be a typo of a name. Excludes 'height' for 'weight'."""
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
    """Read an example per row. ``read`` raises ``Dropped`` for unusable rows.

    Args:
        dropped: counter already used by ``rows``; this function adds to it.
        name: prefix for ids, followed by the row number if ``read`` sets no id.
        carries: keep unread keys in the example's ``meta``, except ``ignored`` ones.
        silenced: keys to keep without checks (``task.meta``).

    Raises:
        DataError: malformed row, or no usable rows.
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
    """Hash a prompt's text to a number in [0, 1) using BLAKE2b.

    ``by_opening``: hash only through the first user message, so dialogues with a common beginning get equal hashes.
    Raw text is hashed itself.
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
    """Select the examples for a split, in order.

    Prompts with hashes below ``share`` are held out for validation, the next ``test_share`` for test, and the rest is
    ``train``. Equal prompts always share a split, regardless of other rows. ``all`` selects everything, as does
    ``test`` for a separate file (``test_share`` None). If a small file would leave a part empty, it receives the
    prompt with the lowest remaining (or highest) hash. ``by_opening`` keeps dialogues with a common beginning
    together.

    Raises:
        DataError: no examples remain for this split.
    """
    if not examples:
        raise DataError(place, "contains no usable examples; choose a file with rows")
    shares = (share, test_share or 0.0)
    is_whole_test = split == "test" and test_share is None
    is_whole_train = split == "train" and not any(shares)
    if split == "all" or is_whole_test or is_whole_train:
        return list(examples)
    if (split == "validation" and shares[0] == 0) or (split == "test" and shares[1] == 0):
        raise DataError(place, f"no rows are held out for {split}; set task.{split}_share above 0")
    hashes = [prompt_hash(example, by_opening=by_opening) for example in examples]
    if len(set(hashes)) == 1:
        options = "validation_share"
        if test_share is not None:
            options = "validation_share and test_share"
        raise DataError(place, f"only one distinct prompt, which cannot be split; to train on it, set {options} to 0")
    first, second = _ends(sorted(set(hashes)), shares)
    begin, end = {"validation": (0.0, first), "test": (first, second), "train": (second, 1.0)}[split]
    chosen = [example for example, value in zip(examples, hashes, strict=True) if begin <= value < end]
    if not chosen:
        raise DataError(place, f"too few distinct prompts to hold out {split}; add rows, or use split all")
    return chosen


def _ends(hashes: Sequence[float], shares: tuple[float, float]) -> tuple[float, float]:
    """Compute upper hash limits for both held-out parts. Each receives at least one distinct hash if possible."""
    validation, test = shares
    first = 0.0
    if validation and len(hashes) > 1:
        num_kept = 2 if test and len(hashes) > 2 else 1  # reserved for subsequent parts
        first = _end_of_part(hashes, validation, num_kept)
    left = [value for value in hashes if value >= first]
    second = first
    if test and len(left) > 1:
        second = _end_of_part(left, validation + test, 1)
    return first, second


def _end_of_part(hashes: Sequence[float], end: float, num_kept: int) -> float:
    """Limit a part so that it includes the lowest hash and leaves ``num_kept`` hashes for others."""
    behind_lowest = math.nextafter(hashes[0], 1.0)
    return min(max(end, behind_lowest), hashes[-num_kept])


def strip_calculations(text: str) -> str:
    """Strip GSM8K's calculator annotations, ``<<48/2=24>>``."""
    return re.sub(r"<<[^<>]*>>", "", text)
