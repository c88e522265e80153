"""Rows from files and from the hub: the one reader of jsonl, json, csv, parquet and data sets of the hub.

Every row has its place, so that whatever is wrong with it is reported as file and line.
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

FOLDER = "POSTTRAIN_DATA"  # of the environment: where files are looked for by their names
HUB = "hf:"
_HUB_NAME = re.compile(r"(?P<name>[^:@#]+)(:(?P<config>[^:@#]+))?(@(?P<split>[^:@#]+))?(#(?P<rows>[1-9][0-9]*))?")
SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".json", ".csv", ".tsv", ".parquet")
# pyarrow's own errors derive from these; dates, durations and zones that Python has not raise the last three.
_NOT_PARQUET = (OSError, TypeError, NotImplementedError, ValueError, LookupError, ArithmeticError)
MAX_LINE_BYTES = 1 << 28
MAX_DIGITS = 300  # a number of more is beyond floating point
_NO_CHARACTER = "holds half of a surrogate pair, which is no character; write it whole"
_REPR = re.compile(r"\s*\[\s*\{'(?:role|content|from|value)':")  # of a list of messages, as pandas writes it to csv
ROLES = ("system", "user", "assistant", "tool")
# Other names of roles, by the key of the role: of chat templates and of ShareGPT.
OTHER_ROLES = {
    "role": {"developer": "system"},
    "from": {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"}
    | {"function_call": "assistant"},
}


class RowData(dict[str, Any]):
    """The keys and values of a row; ``used`` notes whose values were taken."""

    __slots__ = ("used",)

    def __init__(self, values: Mapping[str, object], used: set[str]) -> None:
        super().__init__(values)
        self.used = used

    def __getitem__(self, key: str) -> object:
        self.used.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value as a dict does; the key counts as used."""
        self.used.add(key)
        return super().get(key, default)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of data.

    Its methods raise a DataError where a key is missing, or its value of another type, blank or not encodable.

    Attributes:
        line: its 1-based line (jsonl, csv) or row number (json, parquet, hub).
        part: the number among the rows that were made of one line; 0 where the line is the row.
        is_arrow: the file is a table, in which null stands for a key that an object does not have.
        ignored: ``task.ignore_keys``.
        used: the keys whose values were taken, those inside of messages too (``messages[].name``).
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
        """The row's name among the file's others: ``7``, or ``7.2`` for the second of line 7."""
        if self.part:
            return f"{self.line}.{self.part}"
        return str(self.line)

    def fail(self, what: str) -> DataError:
        """The error to raise about this row."""
        return DataError(self.place, what, self.line)

    def refuse_if(self, is_wrong: object, what: str) -> None:
        """Raise the error about this row if something is wrong with it."""
        if is_wrong:
            raise self.fail(what)

    def has(self, key: str) -> bool:
        """Return True if the key is there and not null; it does not count as used."""
        return any(name == key and value is not None for name, value in self.data.items())

    def unused(self) -> list[str]:
        """The keys that have a value and were not used, in order."""
        return [key for key, value in self.data.items() if value is not None and key not in self.used]

    def nested(self, key: str) -> Any:
        """A list or object under ``key``, which may stand there as its JSON text, as in a table of texts."""
        value = self.data[key]
        if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
            with suppress(ValueError, RecursionError):
                return _JSON.decode(value)
        return self.as_written(value)

    def peek(self, key: str) -> Any:
        """The value as ``nested`` gives it, which does not count as used; None if there is none."""
        if not self.has(key):
            return None
        was_used = key in self.used
        value = self.nested(key)
        if not was_used:
            self.used.discard(key)
        return value

    def is_text(self, key: str) -> bool:
        """Return True if a text stands under ``key`` that is not the JSON text of messages."""
        value = self.data.get(key)
        is_repr = isinstance(value, str) and _REPR.match(value)
        self.refuse_if(is_repr, f"{key!r} holds messages as Python prints them; write them by json.dumps")
        return isinstance(value, str) and not are_messages(self.nested(key))

    def as_written(self, value: object) -> object:
        """A nested value as the file has it: of a table without the nulls that stand for missing keys."""
        if self.is_arrow and isinstance(value, Mapping):
            return {key: self.as_written(one) for key, one in value.items() if one is not None}
        if self.is_arrow and isinstance(value, list):
            return [self.as_written(one) for one in value]
        return value

    def text(self, key: str) -> str:
        """The text under ``key``."""
        self.need(key)
        return self.checked(self.data[key], key)

    def need(self, key: str, way_out: str = "") -> None:
        """Refuse a row without ``key``; ``way_out`` ends the message."""
        if key not in self.data:
            there = ", ".join(self.data) or "no keys"
            raise self.fail(f"the key {key!r} is missing.{suggest(key, self.data)} There are: {there}{way_out}")

    def answer(self, key: str) -> str:
        """The text under ``key``, where a number may stand for its text (``145.0``)."""
        value = self.data.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not math.isfinite(value):
                raise self.fail(f"{key!r} must be a finite number or text; got {value!r}")
            return repr(value)
        return self.text(key)

    def checked(self, value: object, name: str) -> str:
        """``value`` if it is text that can be used."""
        if not isinstance(value, str):
            raise self.fail(f"{name!r} must be text; got {shown_with_type(value)}")
        if not value.strip():
            raise self.fail(f"{name!r} is empty; give a text, or leave the row out")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise self.fail(f"{name!r} {_NO_CHARACTER}") from None
        return value

    def plain(self, key: str) -> Any:
        """Whatever is under ``key``, to be kept as it is; None where nothing is."""
        value = self.as_written(self.data.get(key))
        try:
            json.dumps(value, ensure_ascii=False, default=repr).encode("utf-8")
        except UnicodeEncodeError:
            raise self.fail(f"{key!r} {_NO_CHARACTER}") from None
        return value

    def meta(self) -> dict[str, Any]:
        """The object under ``meta``, or another value there under this name; empty where there is none."""
        if not self.has("meta"):
            return {}
        value = self.plain("meta")
        if isinstance(value, Mapping):
            return dict(value)
        return {"meta": value}

    def entries(self, key: str, what: str) -> list[object]:
        """The list under ``key``, of at least one entry; ``what`` describes it in messages: ``of two texts``."""
        self.need(key)
        value = self.data[key]
        if not isinstance(value, list | tuple) or not value:
            raise self.fail(f"{key!r} must be a list {what}; got {shown_with_type(value)}")
        return list(value)


def are_messages(value: object) -> bool:
    """Return True if a value is a list of messages, each with a known role."""
    known = {*ROLES, *OTHER_ROLES["role"], *OTHER_ROLES["from"]}
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, Mapping) and str(one.get("role", one.get("from"))) in known for one in value)
    )


def is_only_space(value: object) -> bool:
    """Return True if a value is a text of nothing but white space."""
    return isinstance(value, str) and not value.strip()


def read_file(path: str | Path) -> Iterator[Row]:
    """Read the rows of a file with one of ``SUFFIXES``, in order.

    Blank lines of a jsonl file are no rows. A json file is a list of rows (or has one to a line); a csv or tsv file has
    the keys in its first line, and an empty cell is a missing key. A relative path that is not there is looked for in
    the folder POSTTRAIN_DATA. ``hf:NAME[:CONFIG][@SPLIT]`` is a data set on the hub or a local folder of one; with
    ``#N`` its first N rows are streamed. ``hf:NAME/FILE`` is one file of it.

    Raises:
        DataNotThere: no such file or data set.
        DataError: another kind of file, damaged, or a line that is no JSON object.
        MissingExtra: ``pyarrow`` or ``datasets`` is needed and not installed.
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
        raise DataNotThere(path, f"no such file.{near} Give one that is there")
    if kind != "file":
        raise DataError(path, f"this is a {kind}; give one file ({', '.join(SUFFIXES)})")
    if not path.name.lower().endswith(SUFFIXES):
        raise DataError(path, f"unknown kind of file; known are {', '.join(SUFFIXES)}")
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
                    raise DataError(path, f"{size}; write one object to a line, and shorter texts", number)
                encoding = "utf-8"
                if number == 1:
                    encoding = "utf-8-sig"
                text = line.decode(encoding).strip()
                if text:
                    yield Row(str(path), number, _parse_object(text, path, number))
    except UnicodeDecodeError as error:
        remedy = "save it as UTF-8"
        if not is_gzip and _begins_as_gzip(path):
            remedy = f"it is gzip, so name it {path.name}.gz"
        raise DataError(path, f"not UTF-8 text ({error.reason}); {remedy}", number) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            path, f"the gzip file is damaged or cut off ({error}); get it again, or compress it again", number + 1
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
        raise ValueError(f"the key {twice!r} stands twice in an object")
    return dict(pairs)


def _first_twice(names: Sequence[str]) -> str | None:
    """The first name that comes again."""
    if len(set(names)) == len(names):
        return None
    return next(name for name in names if names.count(name) > 1)


_JSON = json.JSONDecoder(parse_int=_integer, object_pairs_hook=_without_twice)


def _parse_object(text: str, path: Path, number: int) -> dict[str, object]:
    try:
        value = _JSON.decode(text)
    except json.JSONDecodeError as error:
        where = f"column {error.colno}: {text[:60]!r}"
        raise DataError(path, f"not JSON: {error.msg} at {where}; write one object to a line", number) from None
    except (ValueError, RecursionError) as error:  # a number of hundreds of digits, a key twice, very deep nesting
        what = f"not usable JSON: {error}; give a flatter object with shorter numbers, and each key once"
        raise DataError(path, what, number) from None
    if not isinstance(value, dict):
        raise DataError(path, f"a line must be one JSON object; got {shown_with_type(value)}", number)
    return value


def _read_json(path: Path) -> Iterator[Row]:
    """Read the objects of a list, by their number; a file of one object to a line is read by lines."""
    text = _whole_text(path)
    try:
        values = _JSON.decode(text)
    except (ValueError, RecursionError) as error:
        if not text.lstrip().startswith("["):
            yield from _read_lines(path)
            return
        raise DataError(path, f"not usable JSON: {error}; write a list of objects") from None
    if not isinstance(values, list):
        what = f"the file is one {type(values).__name__}, and a .json file is a list of rows: [{{...}}, {{...}}]"
        raise DataError(path, f"{what}. Take the list out of it, or write one object to a line (.jsonl)")
    for number, value in enumerate(values, start=1):
        if not isinstance(value, dict):
            raise DataError(path, f"row {number} must be one JSON object; got {shown_with_type(value)}", number)
        yield Row(str(path), number, value)


def _whole_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_LINE_BYTES:
            size = f"a file of more than {MAX_LINE_BYTES >> 20} MiB"
            raise DataError(path, f"{size}, which is read whole; write one object to a line (.jsonl)")
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(path, f"not UTF-8 text ({error.reason}); save it as UTF-8") from None
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror or error})") from None


def _read_table(path: Path) -> Iterator[Row]:
    """The rows of a csv or tsv file: texts by the names in the first line, without empty cells."""
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
                    what = "a space stands between a comma and a quoted cell, so that its quotes are text; take it out"
                    raise DataError(path, what, line)
            if len(values) != len(names):
                what = f"{len(values)} cells, and the first line names {len(names)} keys; quote cells with commas"
                raise DataError(path, what, line)
            cells = {name: value for name, value in zip(names, values, strict=True) if value != ""}
            yield Row(str(path), line, cells)
    except csv.Error as error:
        what = f"not a readable table ({error}); quote cells that hold quotes or line ends"
        raise DataError(path, what, next_line) from None


def _table_keys(values: Sequence[str], path: Path, line: int) -> list[str]:
    """The keys in the first line of a table; one without a name, as pandas writes its index, is called by its place."""
    names = [name.strip() or f"column {number}" for number, name in enumerate(values, start=1)]
    if len(names) == 1 and ";" in names[0]:
        raise DataError(path, "its cells are parted by ';'; write commas, or tabs in a .tsv file", line)
    twice = _first_twice(names)
    if twice is not None:
        raise DataError(path, f"the first line names the keys, and {twice!r} stands there twice", line)
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
            raise DataError(path, f"the column {twice!r} is there twice; give each column its own name")
        for batch in file.iter_batches():
            for data in batch.to_pylist(maps_as_pydicts="strict"):
                number += 1
                yield Row(str(path), number, data, is_arrow=True)
    except _NOT_PARQUET as error:
        raise DataError(path, f"not a readable parquet file ({error}); give a whole one") from None


def _read_hub(path: str) -> Iterator[Row]:
    """The rows of ``hf:NAME[:CONFIG][@SPLIT][#N]`` by ``datasets``, or of ``hf:NAME/FILE``, which needs no more."""
    parts = _HUB_NAME.fullmatch(path.removeprefix(HUB))
    if parts is None:
        raise DataError(path, "a data set of the hub is written hf:NAME, hf:NAME:CONFIG@SPLIT or hf:NAME@SPLIT#1000")
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
        way_out = "Without the hub, give a local file in the same layout as task.path"
        raise DataNotThere(place, f"cannot be loaded ({error}). {way_out}") from error
