"""Row readers for jsonl, json, csv, parquet and hub datasets.

Rows remember their location, so errors can name file and line.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from posttrain.errors import DataError, DataNotThere, MissingExtra
from posttrain.option_types import shown_with_type
from posttrain.registry import suggest
from posttrain.untrusted import kind_of_file

FOLDER = "POSTTRAIN_DATA"  # environment variable naming a folder with data files
HUB = "hf:"
_HUB_NAME = re.compile(r"(?P<name>[^:@#]+)(:(?P<config>[^:@#]+))?(@(?P<split>[^:@#]+))?(#(?P<rows>[1-9][0-9]*))?")
SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".json", ".csv", ".tsv", ".parquet")
# pyarrow errors derive from these. Unsupported dates, durations and time zones raise the last three.
_NOT_PARQUET = (OSError, TypeError, NotImplementedError, ValueError, LookupError, ArithmeticError)
MAX_LINE_BYTES = 1 << 28
MAX_DIGITS = 300  # larger numbers exceed floating point
_NO_CHARACTER = "contains an unpaired surrogate, which is not a valid character; fix the encoding"
_REPR = re.compile(r"\s*\[\s*\{'(?:role|content|from|value)':")  # a message list printed by pandas to csv
ROLES = ("system", "user", "assistant", "tool")
# Alternative role names, by role key: chat templates and ShareGPT.
OTHER_ROLES = {
    "role": {"developer": "system"},
    "from": {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"}
    | {"function_call": "assistant"},
}


class RowData(dict[str, Any]):
    """A row's values. Access is tracked in ``used``."""

    __slots__ = ("used",)

    def __init__(self, values: Mapping[str, object], used: set[str]) -> None:
        super().__init__(values)
        self.used = used

    def __getitem__(self, key: str) -> object:
        self.used.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Like ``dict.get``, but mark the key as used."""
        self.used.add(key)
        return super().get(key, default)


@dataclass(frozen=True, slots=True)
class Row:
    """A data row.

    Methods raise DataError if a key is missing, or its value has the wrong type, is blank, or cannot be encoded.

    Attributes:
        line: 1-based line (jsonl, csv) or row number (json, parquet, hub).
        part: position among rows generated from the same line, or 0.
        is_arrow: rows come from a typed table, so null means a missing key.
        ignored: ``task.ignore_keys``.
        used: keys that were accessed, including message keys (``messages[].name``).
    """

    place: str
    line: int
    data: Mapping[str, Any]
    part: int = 0
    is_arrow: bool = False
    ignored: frozenset[str] = frozenset()
    used: set[str] = field(default_factory=set, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", RowData(self.data, self.used))

    @property
    def number(self) -> str:
        """Row label within the file: ``7``, or ``7.2`` for the second row generated from line 7."""
        if self.part:
            return f"{self.line}.{self.part}"
        return str(self.line)

    def fail(self, what: str) -> DataError:
        """Build an error for this row."""
        return DataError(self.place, what, self.line)

    def refuse_if(self, is_wrong: object, what: str) -> None:
        """Raise an error for this row if ``is_wrong``."""
        if is_wrong:
            raise self.fail(what)

    def has(self, key: str) -> bool:
        """Check if the key exists and is not null, without marking it as used."""
        return any(name == key and value is not None for name, value in self.data.items())

    def unused(self) -> list[str]:
        """List non-null keys that were not used, in order."""
        return [key for key, value in self.data.items() if value is not None and key not in self.used]

    def nested(self, key: str) -> Any:
        """Get a list or object, decoding JSON text if necessary."""
        value = self.data[key]
        if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
            with suppress(ValueError, RecursionError):
                return _JSON.decode(value)
        return self.as_written(value)

    def peek(self, key: str) -> Any:
        """Like ``nested``, without marking the key as used. None if missing."""
        if not self.has(key):
            return None
        was_used = key in self.used
        value = self.nested(key)
        if not was_used:
            self.used.discard(key)
        return value

    def is_text(self, key: str) -> bool:
        """Check if the value is text, excluding JSON text containing messages."""
        value = self.data.get(key)
        is_repr = isinstance(value, str) and _REPR.match(value)
        self.refuse_if(is_repr, f"{key!r} contains messages as printed by Python; write them using json.dumps")
        return isinstance(value, str) and not are_messages(self.nested(key))

    def as_written(self, value: object) -> object:
        """Remove nulls that typed tables insert for missing keys."""
        if self.is_arrow and isinstance(value, Mapping):
            return {key: self.as_written(one) for key, one in value.items() if one is not None}
        if self.is_arrow and isinstance(value, list):
            return [self.as_written(one) for one in value]
        return value

    def text(self, key: str) -> str:
        """Get text."""
        self.need(key)
        return self.checked(self.data[key], key)

    def need(self, key: str, way_out: str = "") -> None:
        """Require a key. ``way_out`` is appended to the message."""
        if key not in self.data:
            there = ", ".join(self.data) or "no keys"
            raise self.fail(f"the key {key!r} is missing.{suggest(key, self.data)} Available: {there}{way_out}")

    def answer(self, key: str) -> str:
        """Get text, converting numbers (``145.0``)."""
        value = self.data.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not math.isfinite(value):
                raise self.fail(f"{key!r} must be a finite number or text; got {value!r}")
            return repr(value)
        return self.text(key)

    def checked(self, value: object, name: str) -> str:
        """Validate text."""
        if not isinstance(value, str):
            raise self.fail(f"{name!r} must be text; got {shown_with_type(value)}")
        if not value.strip():
            raise self.fail(f"{name!r} is empty; add text, or remove the row")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise self.fail(f"{name!r} {_NO_CHARACTER}") from None
        return value

    def plain(self, key: str) -> Any:
        """Get any value unchanged. None if missing."""
        value = self.as_written(self.data.get(key))
        try:
            json.dumps(value, ensure_ascii=False, default=repr).encode("utf-8")
        except UnicodeEncodeError:
            raise self.fail(f"{key!r} {_NO_CHARACTER}") from None
        return value

    def meta(self) -> dict[str, Any]:
        """Get the object ``meta``; any other value is wrapped as ``{"meta": value}``. Empty if missing."""
        if not self.has("meta"):
            return {}
        value = self.plain("meta")
        if isinstance(value, Mapping):
            return dict(value)
        return {"meta": value}

    def entries(self, key: str, what: str) -> list[object]:
        """Get a non-empty list. ``what`` describes entries in errors: ``of two texts``."""
        self.need(key)
        value = self.data[key]
        if not isinstance(value, list | tuple) or not value:
            raise self.fail(f"{key!r} must be a list {what}; got {shown_with_type(value)}")
        return list(value)


def are_messages(value: object) -> bool:
    """Check if a value is a list of messages with known roles."""
    known = {*ROLES, *OTHER_ROLES["role"], *OTHER_ROLES["from"]}
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, Mapping) and str(one.get("role", one.get("from"))) in known for one in value)
    )


def is_only_space(value: object) -> bool:
    """Check if a value is blank text."""
    return isinstance(value, str) and not value.strip()


def read_file(path: str | Path) -> Iterator[Row]:
    """Read rows from a file with any of ``SUFFIXES``, in order.

    Blank jsonl lines are skipped. json files contain a list of rows, or one row per line. csv and tsv files begin
    with a line of keys; empty cells are missing keys. Relative paths are also looked up in the folder POSTTRAIN_DATA.
    ``hf:NAME[:CONFIG][@SPLIT]`` is a dataset on the hub or in a local folder; ``#N`` streams only its first N rows.
    ``hf:NAME/FILE`` is a single file from a hub dataset.

    Raises:
        DataNotThere: file or dataset not found.
        DataError: unsupported or damaged file, or a line that is not a JSON object.
        MissingExtra: ``pyarrow`` or ``datasets`` is required but not installed.
    """
    if str(path).startswith(HUB):
        yield from _read_hub(str(path))
        return
    path = Path(path)
    kind = kind_of_file(path)
    if kind == "nothing" and not path.is_absolute() and os.environ.get(FOLDER):
        there = Path(os.environ[FOLDER]) / path
        if kind_of_file(there) != "nothing":
            path = there
            kind = kind_of_file(there)
    if kind == "nothing":
        near = ""
        if kind_of_file(path.parent) == "folder":
            near = suggest(path.name, (p.name for p in path.parent.iterdir()))
        raise DataNotThere(path, f"no such file.{near} Check the path")
    if kind != "file":
        raise DataError(path, f"this is a {kind}, but must be a file ({', '.join(SUFFIXES)})")
    if not path.name.lower().endswith(SUFFIXES):
        raise DataError(path, f"unknown file type; supported: {', '.join(SUFFIXES)}")
    readers = {".parquet": _read_parquet, ".json": _read_json, ".csv": _read_table, ".tsv": _read_table}
    yield from readers.get(path.suffix.lower(), _read_lines)(path)


def _read_lines(path: Path) -> Iterator[Row]:
    number = 0
    is_gzip = path.suffix.lower() == ".gz"
    try:
        with gzip.open(path, "rb") if is_gzip else path.open("rb") as stream:
            for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE_BYTES + 1), b""), start=1):
                if len(line) > MAX_LINE_BYTES:
                    size = f"a line of more than {MAX_LINE_BYTES >> 20} MiB"
                    raise DataError(path, f"{size}; write one object per line, with shorter text", number)
                encoding = "utf-8"
                if number == 1:
                    encoding = "utf-8-sig"
                text = line.decode(encoding).strip()
                if text:
                    yield Row(str(path), number, _parse_object(text, path, number))
    except UnicodeDecodeError as error:
        remedy = "save it as UTF-8"
        if not is_gzip and _begins_as_gzip(path):
            remedy = f"gzip data, so rename it to {path.name}.gz"
        raise DataError(path, f"not UTF-8 text ({error.reason}); {remedy}", number) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            path, f"damaged or truncated gzip file ({error}); download or compress it again", number + 1
        ) from None
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror or error})") from None


def _begins_as_gzip(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(2) == b"\x1f\x8b"


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _without_twice(pairs: list[tuple[str, object]]) -> dict[str, object]:
    twice = _first_twice([name for name, _ in pairs])
    if twice is not None:
        raise ValueError(f"duplicate key {twice!r} in an object")
    return dict(pairs)


def _first_twice(names: Sequence[str]) -> str | None:
    """Find the first duplicate name."""
    if len(set(names)) == len(names):
        return None
    return next(name for name in names if names.count(name) > 1)


_JSON = json.JSONDecoder(parse_int=_integer, object_pairs_hook=_without_twice)


def _parse_object(text: str, path: Path, number: int) -> dict[str, object]:
    try:
        value = _JSON.decode(text)
    except json.JSONDecodeError as error:
        where = f"column {error.colno}: {text[:60]!r}"
        raise DataError(path, f"not JSON: {error.msg} at {where}; write one object per line", number) from None
    except (ValueError, RecursionError) as error:  # numbers with hundreds of digits, duplicate keys, very deep nesting
        what = f"not usable JSON: {error}; use shorter numbers, unique keys and less nesting"
        raise DataError(path, what, number) from None
    if not isinstance(value, dict):
        raise DataError(path, f"each line must be a JSON object; got {shown_with_type(value)}", number)
    return value


def _read_json(path: Path) -> Iterator[Row]:
    """Read a list of objects, numbered from 1. Falls back to one object per line."""
    text = _whole_text(path)
    try:
        values = _JSON.decode(text)
    except (ValueError, RecursionError) as error:
        if not text.lstrip().startswith("["):
            yield from _read_lines(path)
            return
        raise DataError(path, f"not usable JSON: {error}; write a list of objects") from None
    if not isinstance(values, list):
        what = f"expected a list of rows in .json ([{{...}}, {{...}}]), got {type(values).__name__}"
        raise DataError(path, f"{what}. Extract the list, or write one object per line (.jsonl)")
    for number, value in enumerate(values, start=1):
        if not isinstance(value, dict):
            raise DataError(path, f"row {number} must be a JSON object; got {shown_with_type(value)}", number)
        yield Row(str(path), number, value)


def _whole_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_LINE_BYTES:
            size = f"a file of more than {MAX_LINE_BYTES >> 20} MiB"
            raise DataError(path, f"{size}, which would be read at once; write one object per line (.jsonl)")
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(path, f"not UTF-8 text ({error.reason}); save it as UTF-8") from None
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror or error})") from None


def _read_table(path: Path) -> Iterator[Row]:
    """Read csv or tsv rows as strings, using keys from the first line and skipping empty cells."""
    csv.field_size_limit(MAX_LINE_BYTES)
    stream = io.StringIO(_whole_text(path), newline="")
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    reader = csv.reader(stream, delimiter=delimiter, strict=True)
    names = list[str]()
    next_line = 1
    try:
        for values in reader:
            line = next_line
            next_line = reader.line_num + 1
            if not any(values):
                continue
            if not names:
                names = _table_keys(values, path, line)
                continue
            for value in values:
                bare = value.strip()
                if value[:1] == " " and bare[:1] == bare[-1:] == '"':
                    what = "space between a comma and a quoted cell, so the quotes become text; remove the space"
                    raise DataError(path, what, line)
            if len(values) != len(names):
                what = f"{len(values)} cells, but {len(names)} keys in the first line; quote cells containing commas"
                raise DataError(path, what, line)
            cells = {name: value for name, value in zip(names, values, strict=True) if value != ""}
            yield Row(str(path), line, cells)
    except csv.Error as error:
        what = f"not a readable table ({error}); quote cells containing quotes or line breaks"
        raise DataError(path, what, next_line) from None


def _table_keys(values: Sequence[str], path: Path, line: int) -> list[str]:
    """Read keys from a table's first line. Unnamed columns, such as a pandas index, are named by position."""
    names = [name.strip() or f"column {number}" for number, name in enumerate(values, start=1)]
    if len(names) == 1 and ";" in names[0]:
        raise DataError(path, "cells are separated by ';'; use commas, or tabs in a .tsv file", line)
    twice = _first_twice(names)
    if twice is not None:
        raise DataError(path, f"duplicate key {twice!r} in the first line", line)
    return names


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise MissingExtra("pyarrow", "tasks", f"reading {path.name}") from None
    number = 0
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        twice = _first_twice(names)
        if twice is not None:
            raise DataError(path, f"duplicate column {twice!r}; rename one")
        for batch in file.iter_batches():
            for data in batch.to_pylist(maps_as_pydicts="strict"):
                number += 1
                yield Row(str(path), number, data, is_arrow=True)
    except _NOT_PARQUET as error:
        raise DataError(path, f"not a readable parquet file ({error}); replace it") from None


def _read_hub(path: str) -> Iterator[Row]:
    """Read ``hf:NAME[:CONFIG][@SPLIT][#N]`` using ``datasets``, or ``hf:NAME/FILE`` without it."""
    parts = _HUB_NAME.fullmatch(path.removeprefix(HUB))
    if parts is None:
        raise DataError(path, "write hub datasets as hf:NAME, hf:NAME:CONFIG@SPLIT or hf:NAME@SPLIT#1000")
    name = parts["name"]
    config = parts["config"]
    split = parts["split"] or "train"
    is_file = name.endswith(SUFFIXES)
    place = f"hub:{name}"
    if not is_file:
        place = f"hub:{'/'.join(filter(None, (name, config, split)))}"
    failures: tuple[type[Exception], ...] = (OSError, ValueError, KeyError, RuntimeError)
    try:
        if is_file:
            from huggingface_hub import errors, hf_hub_download

            failures += (errors.EntryNotFoundError,)
            owner, repository, file = name.split("/", 2)
            for row in read_file(hf_hub_download(f"{owner}/{repository}", file, repo_type="dataset")):
                yield replace(row, place=place)
            return
        try:
            import datasets
        except ImportError:
            raise MissingExtra("datasets", "tasks", f"reading {name!r} from the hub") from None
        failures += (getattr(getattr(datasets, "exceptions", None), "DatasetsError", OSError),)
        num_rows = None
        options: dict[str, Any] = {"split": split}
        if parts["rows"]:
            num_rows = int(parts["rows"])
            options["streaming"] = True
        rows: Iterable[Any] = datasets.load_dataset(name, config, **options)
        for number, row in enumerate(islice(rows, num_rows), start=1):
            yield Row(place, number, row, is_arrow=True)
    except failures as error:
        way_out = "Without hub access, set task.path to a local file with the same layout"
        raise DataNotThere(place, f"cannot be loaded ({error}). {way_out}") from error
