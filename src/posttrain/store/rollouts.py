"""``rollouts.db``: all sampled completions with rewards.

SQLite in WAL mode. Rows depend only on the recipe, not on time, so runs can be compared bit for bit. Databases may be
untrusted: they cannot execute anything, and reading is limited.
"""

from __future__ import annotations

import json
import math
import sqlite3
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from posttrain import __version__
from posttrain.errors import DataError, PosttrainError, RewardFailure
from posttrain.store.database import connect, migrated_copy, sqlite_errors, transaction
from posttrain.store.durable import sync_folder
from posttrain.store.schema import (
    SCHEMA_VERSION,
    TABLES,
    Columns,
    all_tables,
    bring_up_to_date,
    check_schema,
    insertion,
    selection,
    version_of,
)
from posttrain.store.turns import read_turns, show_turns, storable, write_turns
from posttrain.store.updates import RecordedUpdate, pack_update, unpack_update
from posttrain.types import Example, KeptSets, Rollout, Turn

NUM_PENDING = 32  # update records buffered before a commit, since each commit syncs to disk

_KINDS: dict[str, type] = {"INTEGER": int, "REAL": float, "TEXT": str, "BLOB": bytes}


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """One row of ``rollouts.db``. Fields not described here match ``Rollout``.

    ``id``: row number within its table, from 1. ``parts``: unweighted rewards by name. ``extracted``, ``outcome``:
    graded answer and verdict. ``token_ids``: prompt, then ``num_tokens`` completion tokens as sampled. ``version``:
    number of updates applied to the sampling weights. ``own``: True for sampled tokens, False for environment output;
    None means all sampled. ``turns``: conversation turns, if an environment was used; ``completion`` is then the last
    turn. ``failures``: reasons for environment failures. ``sampler_logprobs``: one per completion token; None before
    schema version 7 and for evaluations. ``mean_sampler_logprob``: mean over sampled tokens; None without any.
    ``kept``: token sets after truncation, if an objective renormalizes over them. ``evaluation``: evaluation name;
    None for training rollouts.
    """

    id: int
    step: int
    epoch: int
    prompt_index: int
    rollout_index: int
    example_id: str
    prompt: str
    completion: str
    answer: str | None
    parts: dict[str, float]
    reward: float
    advantage: float | None
    num_tokens: int
    finish: str
    mean_sampler_logprob: float | None
    extracted: str | None
    outcome: str
    token_ids: tuple[int, ...]
    version: int
    own: tuple[bool, ...] | None = None
    turns: tuple[Turn, ...] = ()
    failures: tuple[str, ...] = ()
    sampler_logprobs: tuple[float, ...] | None = None
    skipped: tuple[str, ...] = ()
    is_scored: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    kept: KeptSets | None = None
    replaced: int | None = None
    evaluation: str | None = None

    @property
    def num_own(self) -> int:
        """Number of sampled tokens."""
        if self.own is None:
            return self.num_tokens
        return sum(self.own)

    @property
    def transcript(self) -> str:
        """Completion as readable text, including turns and tool results."""
        return show_turns(self.turns, self.failures) or self.completion


def spans_of(own: Sequence[bool]) -> list[int]:
    """Run-length encode ``own``: alternating span lengths, starting with sampled tokens (0 if none come first)."""
    spans = [len(list(run)) for _, run in groupby(own)]
    if own and own[0]:
        return spans
    return [0, *spans]


def prompt_text(example: Example) -> str:
    """Format a prompt for display: a single message, or several with roles."""
    texts = [f"{message.role}: {message.content}" for message in example.messages]
    if len(texts) != 1:
        return "\n\n".join(texts)
    return example.messages[0].content


class RolloutStore:
    """Rollout database for one run.

    Args:
        path: database path; created if missing.
        about: run facts stored in the database (seed, recipe fingerprint).
        read_only: allow another process to keep writing.

    Raises:
        DataError: missing (read only), not a rollout database, or an unsupported version.
        StorageError: disk full or not writable.
    """

    def __init__(self, path: str | Path, *, about: Mapping[str, str] | None = None, read_only: bool = False) -> None:
        self.path = Path(path)
        self.read_only = read_only
        self._opened = ExitStack()
        self._writer: sqlite3.Connection | None = None
        self._columns: Columns = {}  # schema of the writer's database
        self._pending: list[RecordedUpdate] = []
        is_new = not self.path.exists()
        if read_only and is_new:
            raise DataError(self.path, "no such rollout database; training creates it once rollouts are sampled")
        with sqlite_errors(self.path), connect(self.path, read_only=read_only) as db:
            columns = check_schema(db, self.path)
            if read_only and not columns:
                raise DataError(self.path, "not a rollout database as posttrain writes it (it is empty)")
            if not read_only:
                self._prepare(db, about or {})
            if is_new:
                sync_folder(self.path.parent)

    def _prepare(self, db: sqlite3.Connection, about: Mapping[str, str]) -> None:
        """Migrate tables unless another process already did, then write ``about``."""
        db.execute("PRAGMA journal_mode = WAL")
        with transaction(db):
            bring_up_to_date(db, self.path)
            facts = {**about, "posttrain": __version__}
            db.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", sorted(facts.items()))

    def record(self, rollouts: Sequence[Rollout], *, evaluation: str | None = None) -> None:
        """Write rollouts in one transaction, as training or, if ``evaluation`` is given, evaluation rollouts.

        Each commit syncs to disk, so rollouts survive kills and power cuts.
        """
        assert not self.read_only, "opened for reading"
        if not rollouts:
            return
        if evaluation is None:
            table = "rollouts"
        else:
            table = "evaluation_rollouts"
        rows = [_to_row(rollout) | {"evaluation": evaluation} for rollout in rollouts]
        if evaluation is None:
            for row, rollout in zip(rows, rollouts, strict=True):
                row["sampler_logprobs"] = _pack_floats(rollout.completion.logprobs)
                kept = rollout.completion.kept
                if kept is not None:
                    row["kept_sets"] = _pack_ids((*kept.counts, *kept.ids))
        with self._writing() as db:
            db.executemany(insertion(table, self._columns[table]), rows)

    def record_update(self, update: RecordedUpdate) -> None:
        """Buffer an update record until more rollouts arrive, ``flush`` is called, or ``NUM_PENDING`` is reached.

        Buffered records may be lost in a kill: every checkpoint flushes first, and resuming repeats later updates.
        """
        assert not self.read_only, "opened for reading"
        self._pending.append(update)
        if len(self._pending) >= NUM_PENDING:
            self.flush()

    def flush(self) -> None:
        """Write buffered update records."""
        if self._pending:
            with self._writing():
                pass

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Yield a writer within a transaction that also writes buffered update records."""
        with sqlite_errors(self.path):
            if self._writer is None:
                self._writer = self._opened.enter_context(connect(self.path, read_only=False))
                self._columns = check_schema(self._writer, self.path)
            with transaction(self._writer):
                updates = [pack_update(update) for update in self._pending]
                self._writer.executemany(insertion("updates", self._columns["updates"]), updates)
                yield self._writer
        self._pending.clear()

    def close(self) -> None:
        """Close all connections. Reading and recording remain possible, and reopen them."""
        try:
            self.flush()
        finally:
            self._writer = None
            with sqlite_errors(self.path):
                self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except PosttrainError as failure:
            if error is None:
                raise
            if failure is not error:  # raise the original error
                error.add_note(str(failure))

    def trim(self, after_step: int, unevaluated: Collection[int] = ()) -> int:
        """Delete rollouts and updates with ``step > after_step``, and evaluations at ``unevaluated`` steps.

        ``after_step=-1`` also deletes evaluations before training. Runs as one transaction. Returns the number
        deleted.
        """
        assert not self.read_only, "opened for reading"
        self.flush()
        deletions = [(f"DELETE FROM {table} WHERE step > ?", after_step) for table in all_tables()]
        deletions += [("DELETE FROM evaluation_rollouts WHERE step = ?", step) for step in unevaluated]
        with self._connection() as db, transaction(db):
            num_deleted = 0
            for query, step in deletions:
                num_deleted += db.execute(query, (step,)).rowcount
            return num_deleted

    def training(self, step: int | None = None, **options: Any) -> list[RecordedRollout]:
        """Select training rollouts in recording order.

        Args:
            step: only this step.
            options: ``text`` to find in prompts or completions (case-sensitive), ``limit`` for the number of rows, and
                ``newest_first``, applied before ``limit``.
        """
        return self._select("rollouts", {"step": step}, **options)

    def evaluations(self, name: str | None = None, step: int | None = None, **options: Any) -> list[RecordedRollout]:
        """Select evaluation rollouts, optionally by ``name``; otherwise like ``training``."""
        return self._select("evaluation_rollouts", {"step": step, "evaluation": name}, **options)

    def count_training(self) -> dict[int, int]:
        """Count training rollouts by step."""
        with self._connection() as db:
            counts = dict(db.execute("SELECT step, COUNT(*) FROM rollouts GROUP BY step ORDER BY step").fetchall())
        if not all(isinstance(step, int) for step in counts):
            raise DataError(self.path, "damaged: a step is not an integer; move it away")
        return counts

    def about(self, key: str) -> str | None:
        """Look up a stored run fact, or None."""
        with self._connection() as db:
            row = db.execute("SELECT value FROM about WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        return str(row[0])

    def updates(self, since: int = 0) -> list[RecordedUpdate]:
        """List update records from step ``since`` in order; empty before schema version 7."""
        return self._updates("WHERE step >= ? ORDER BY id", (since,))

    def last_update(self) -> RecordedUpdate | None:
        """Load the most recent update record, or None."""
        for update in self._updates("ORDER BY id DESC LIMIT 1", ()):
            return update
        return None

    def count_updates(self) -> tuple[int, dict[str, list[int]]]:
        """Count update records, and list violating steps by balance."""
        self.flush()
        with self._connection() as db:
            (count,) = db.execute("SELECT COUNT(*) FROM updates").fetchone()
            rows = db.execute("SELECT step, violated FROM updates WHERE violated != '' ORDER BY id").fetchall()
        steps: dict[str, list[int]] = {}
        for step, violated in rows:
            if not isinstance(step, int) or not isinstance(violated, str):
                raise DataError(self.path, "damaged: an update's record is not text; move it away")
            for name in violated.split(","):
                steps.setdefault(name, []).append(step)
        return count, steps

    def epochs_of_prompts(self) -> dict[int, tuple[int, int]]:
        """Map each visited prompt index to its latest epoch and step: a long prompt's own, if it was replaced."""
        visited = "COALESCE(CASE WHEN json_valid(notes) THEN json_extract(notes, '$.replaced') END, prompt_index)"
        with self._connection() as db:
            rows = db.execute(f"SELECT {visited}, MAX(epoch), MAX(step) FROM rollouts GROUP BY {visited}").fetchall()
        return {
            index: (epoch, step) for index, epoch, step in rows if isinstance(index, int) and isinstance(epoch, int)
        }

    def _updates(self, condition: str, values: tuple[int, ...]) -> list[RecordedUpdate]:
        if self._pending:
            self.flush()
        with self._connection() as db:
            rows = db.execute(f"SELECT step, violated, facts, rows FROM updates {condition}", values).fetchall()
        found = []
        for row in rows:
            kinds = (int, str, str, bytes)
            if not all(isinstance(value, kind) for value, kind in zip(row, kinds, strict=True)):
                raise DataError(self.path, "damaged: an update's record has the wrong type; move it away")
            try:
                found.append(unpack_update(*row))
            except (struct.error, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
                raise DataError(
                    self.path,
                    f"damaged: update record at step {row[0]} ({type(error).__name__}: {error}); move it away",
                ) from None
        return found

    def num_rows(self, up_to_step: int) -> dict[str, int]:
        """Count rows by table, up to and including ``up_to_step``."""
        with self._connection() as db:
            query = "SELECT COUNT(*) FROM {} WHERE step <= ?"
            counts = {}
            for table in TABLES:
                (counts[table],) = db.execute(query.format(table), (up_to_step,)).fetchone()
            return counts

    def _select(
        self,
        table: str,
        equal: Mapping[str, object],
        *,
        text: str | None = None,
        limit: int | None = None,
        newest_first: bool = False,
    ) -> list[RecordedRollout]:
        columns = ("id", *TABLES[table])
        values = {name: value for name, value in equal.items() if value is not None}
        conditions = ["1", *(f"{name} = :{name}" for name in values)]
        if text is not None:
            conditions.append("(instr(prompt, :text) > 0 OR instr(completion, :text) > 0)")
            values["text"] = text
        order = "ASC"
        if newest_first:
            order = "DESC"
        if limit is None:
            values["limit"] = -1
        else:
            values["limit"] = limit
        with self._connection() as db:
            selected = selection(table, check_schema(db, self.path)[table])
            query = f"SELECT {selected} FROM {table} WHERE {' AND '.join(conditions)} ORDER BY id {order} LIMIT :limit"
            rows = db.execute(query, values).fetchall()
        return [_read_row(dict(zip(columns, row, strict=True)), table, self.path) for row in rows]

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        with sqlite_errors(self.path), connect(self.path, read_only=self.read_only) as db:
            if version_of(db) == SCHEMA_VERSION:
                yield db
            else:
                with migrated_copy(db, self.path) as copy:
                    yield copy


def _to_row(rollout: Rollout) -> dict[str, object]:
    example = rollout.example
    completion = rollout.completion
    for name, value in {**rollout.parts, "reward": rollout.reward}.items():
        if not math.isfinite(value):  # SQLite stores NaN as NULL
            raise RewardFailure(
                f"reward {name!r}, example {example.id!r}, step {rollout.step}: it is {value}, which is not finite; "
                "have the reward function return a number there"
            )
    row: dict[str, object] = {
        "step": rollout.step,
        "epoch": rollout.epoch,
        "prompt_index": rollout.prompt_index,
        "rollout_index": rollout.rollout_index,
        "example_id": storable(example.id),
        "prompt": storable(prompt_text(example)),
        "completion": storable(rollout.text),
        "answer": None,
        "parts": json.dumps({name: float(value) for name, value in rollout.parts.items()}, allow_nan=False),
        "reward": float(rollout.reward),
        "advantage": None,
        "num_tokens": len(completion.ids),
        "finish": completion.finish,
        "mean_sampler_logprob": None,
        "extracted": None,
        "outcome": rollout.outcome,
        "token_ids": _pack_ids((*rollout.prompt_ids, *completion.ids)),
        "version": completion.version,
        "spans": None,
        "turns": None,
        "failures": None,
        "sampler_logprobs": None,
        "notes": _write_notes(rollout),
        "kept_sets": None,
    }
    if example.answer is not None:
        row["answer"] = storable(example.answer)
    if rollout.advantage is not None:
        row["advantage"] = float(rollout.advantage)
    logprobs = [x for x, is_own in zip(completion.logprobs, completion.written, strict=True) if is_own]
    if logprobs:
        row["mean_sampler_logprob"] = math.fsum(logprobs) / len(logprobs)
    if rollout.extracted is not None:
        row["extracted"] = storable(rollout.extracted)
    if completion.own is not None:
        row["spans"] = _pack_ids(spans_of(completion.own))
    if rollout.turns:
        row["turns"] = json.dumps(write_turns(rollout.turns))
    if rollout.failures:
        row["failures"] = json.dumps([storable(failure) for failure in rollout.failures])
    return row


def _write_notes(rollout: Rollout) -> str | None:
    """Serialize what few rollouts have: non-numeric reward output and replaced prompts; None without any."""
    notes: dict[str, object] = {}
    if rollout.skipped:
        notes["skipped"] = rollout.skipped
    if not rollout.is_scored:
        notes["is_scored"] = False
    if rollout.extra:
        notes["extra"] = rollout.extra
    if rollout.replaced is not None:
        notes["replaced"] = rollout.replaced
    if not notes:
        return None
    return json.dumps(notes)


def _read_notes(text: str | None) -> dict[str, Any]:
    """Parse ``_write_notes`` output.

    Raises:
        ValueError: invalid data.
    """
    if text is None:
        return {}
    notes = json.loads(text)
    skipped = notes.get("skipped", [])
    extra = notes.get("extra", {})
    is_scored = notes.get("is_scored", True)
    replaced = notes.get("replaced")
    is_plain = isinstance(skipped, list) and all(isinstance(name, str) for name in skipped)
    is_plain &= replaced is None or type(replaced) is int
    if not is_plain or not isinstance(extra, dict) or not isinstance(is_scored, bool):
        raise ValueError("reward notes have the wrong type")
    return {"skipped": tuple(skipped), "is_scored": is_scored, "extra": extra, "replaced": replaced}


def _read_row(row: dict[str, Any], table: str, path: Path) -> RecordedRollout:
    """Validate value types and build a record. SQLite allows any type in any column, so untrusted files need this."""
    for name, kind in {"id": "INTEGER", **TABLES[table]}.items():
        value = row[name]
        expected = _KINDS[kind.split()[0]]
        if not isinstance(value, expected) and (value is not None or "NOT NULL" in kind):
            raise DataError(path, f"damaged: {name} of row {row['id']!r} is {type(value).__name__}; move it away")
    try:
        row["token_ids"] = _unpack_ids(row["token_ids"])
        row["parts"] = {str(name): float(value) for name, value in json.loads(row["parts"]).items()}
        row["own"] = _own_of(row.pop("spans"), row["token_ids"], row["num_tokens"])
        if row["sampler_logprobs"] is not None:
            row["sampler_logprobs"] = _unpack_floats(row["sampler_logprobs"], row["num_tokens"])
        row["kept"] = _kept_of(row.pop("kept_sets"), row["num_tokens"])
        turns = row["turns"]
        row["turns"] = ()
        if turns is not None:
            row["turns"] = read_turns(json.loads(turns))
        failures = row["failures"]
        row["failures"] = ()
        if failures is not None:
            row["failures"] = tuple(json.loads(failures))
        if not all(isinstance(failure, str) for failure in row["failures"]):
            raise ValueError("a failure is not text")
        row |= _read_notes(row.pop("notes"))
    except (struct.error, ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
        raise DataError(path, f"damaged: row {row['id']} ({type(error).__name__}: {error}); move it away") from None
    return RecordedRollout(**row)


def _own_of(packed: bytes | None, ids: Sequence[int], num_tokens: int) -> tuple[bool, ...] | None:
    if packed is None:
        return None
    spans = _unpack_ids(packed)
    if min(spans, default=0) < 0 or not len(ids) >= sum(spans) == num_tokens:
        raise ValueError("turn spans do not match token counts")
    own: list[bool] = []
    for place, length in enumerate(spans):
        own += [place % 2 == 0] * length
    return tuple(own)


def _kept_of(packed: bytes | None, num_tokens: int) -> KeptSets | None:
    if packed is None:
        return None
    numbers = _unpack_ids(packed)
    counts, ids = numbers[:num_tokens], numbers[num_tokens:]
    if len(counts) != num_tokens or min(counts, default=0) < 0 or sum(counts) != len(ids):
        raise ValueError("kept sets do not match token counts")
    return KeptSets.of_counts(ids, counts)


def _pack_ids(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def _unpack_ids(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 4}i", packed)


def _pack_floats(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def _unpack_floats(packed: bytes, number: int) -> tuple[float, ...]:
    if len(packed) != 4 * number:
        raise ValueError("log-probabilities do not match token counts")
    return struct.unpack(f"<{number}f", packed)
