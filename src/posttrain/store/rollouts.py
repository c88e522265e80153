"""``rollouts.db``: every completion that was sampled, with its rewards.

SQLite in WAL mode. Rows are functions of the recipe alone (no clock), so two runs compare bit for bit. The file may be
from an untrusted source: nothing in it can run, and reading it has limits.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
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
from posttrain.store.updates import RecordedUpdate, pack_update, unpack_update
from posttrain.types import Call, Example, KeptSets, Rollout, Turn

NUM_PENDING = 32  # records of updates that wait for the next commit, which waits for the disk

_KINDS: dict[str, type] = {"INTEGER": int, "REAL": float, "TEXT": str, "BLOB": bytes}
# A line that looks like one of those that ``show_turns`` adds, whatever begins a line.
_BREAKS = r"\n\r\v\f\x1c-\x1e\x85\u2028\u2029"
_ARROW = re.compile(rf"(^|[{_BREAKS}])([^\S{_BREAKS}]*->)")


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """One row of ``rollouts.db``.

    ``id`` counts the rows of its table from 1. ``parts`` are the unweighted rewards by name.
    ``mean_sampler_logprob`` is the mean over the tokens that the model wrote (None where there are none).
    ``extracted`` and ``outcome``: the answer that was graded and the grader's verdict. ``token_ids`` are those of the
    prompt and, the last ``num_tokens`` of them, of the completion as sampled. ``version``: number of updates of the
    weights that sampled. Of a completion with an environment, ``own`` marks the tokens that the model wrote (None:
    all), ``turns`` are its turns, and ``failures`` the reasons why the environment failed; ``completion`` is then
    the last turn. ``sampler_logprobs``: one for each token of the completion; None in files before version 7. ``kept``:
    the sets of tokens that they are over, where sampling was truncated and an objective followed it.
    ``skipped``, ``is_scored`` and ``extra`` are as in ``Rollout``.
    ``evaluation`` names the evaluation that sampled it; None for a training rollout.
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
    evaluation: str | None = None

    @property
    def num_own(self) -> int:
        """Number of tokens that the model wrote."""
        if self.own is None:
            return self.num_tokens
        return sum(self.own)

    @property
    def transcript(self) -> str:
        """The completion for a reader: each of several turns, with the results of its calls below it."""
        return show_turns(self.turns, self.failures) or self.completion


def show_turns(turns: Sequence[Turn], failures: Sequence[str] = ()) -> str:
    """Turns for a reader, each with the results of its calls and its reward below; empty for one turn without calls.

    Arrows at the start of a line of the model or a tool get a backslash, since those are the record's own.
    """
    if len(turns) < 2 and not failures and not any(turn.calls for turn in turns):
        return ""
    lines = []
    for turn in turns:
        lines.append(_quote(turn.text))
        for call in turn.calls:
            result = _quote(f"{call.tool} ({call.outcome}): {call.result}")
            lines.append(f"-> {result}")
        if turn.reward is not None:
            lines.append(f"-> paid {turn.reward:g}")
    lines += [f"-> failed: {failure}" for failure in failures]
    return "\n".join(lines)


def _quote(text: str) -> str:
    return _ARROW.sub(r"\1\\\2", text)


def spans_of(own: Sequence[bool]) -> list[int]:
    """Return the lengths of alternating runs of tokens, those that the model wrote first (0 if it did not begin)."""
    spans = [len(list(run)) for _, run in groupby(own)]
    if own and own[0]:
        return spans
    return [0, *spans]


def write_turns(turns: Sequence[Turn]) -> list[dict[str, object]]:
    """Return turns as plain data."""
    rows = []
    for turn in turns:
        calls = []
        for call in turn.calls:
            calls.append({f.name: _storable(getattr(call, f.name)) for f in fields(Call)})
        row: dict[str, object] = {"text": _storable(turn.text), "calls": calls}
        if turn.reward is not None:
            row["reward"] = turn.reward
        rows.append(row)
    return rows


def read_turns(rows: Sequence[Mapping[str, Any]]) -> tuple[Turn, ...]:
    """Return the turns that ``write_turns`` wrote.

    Raises:
        KeyError, TypeError, ValueError: something else.
    """
    turns = []
    for row in rows:
        calls = tuple(_read_call(call) for call in row["calls"])
        texts = [row["text"]]
        for call in calls:
            texts += [getattr(call, f.name) for f in fields(Call)]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a turn holds something else than text")
        reward = row.get("reward")
        if reward is not None and (not isinstance(reward, float) or not math.isfinite(reward)):
            raise ValueError("the reward of a turn is no finite number")
        turns.append(Turn(row["text"], calls, reward))
    return tuple(turns)


def _read_call(stored: Mapping[str, Any]) -> Call:
    known = {name: stored[name] for name in (f.name for f in fields(Call)) if name in stored}
    return Call(**known)


def prompt_text(example: Example) -> str:
    """Return the prompt for a reader: the message, or all of them with their roles."""
    texts = [f"{message.role}: {message.content}" for message in example.messages]
    if len(texts) != 1:
        return "\n\n".join(texts)
    return example.messages[0].content


class RolloutStore:
    """The rollouts of one run.

    Args:
        path: the file; created if missing.
        about: facts about the run that travel with the file (seed, recipe fingerprint).
        read_only: read a file that another process may be writing.

    Raises:
        DataError: no such file (read only), not a rollout database, or one of another version.
        StorageError: the disk is full or not writable.
    """

    def __init__(self, path: str | Path, *, about: Mapping[str, str] | None = None, read_only: bool = False) -> None:
        self.path = Path(path)
        self.read_only = read_only
        self._opened = ExitStack()
        self._writer: sqlite3.Connection | None = None
        self._columns: Columns = {}  # of the file that the writer writes to
        self._pending: list[RecordedUpdate] = []
        is_new = not self.path.exists()
        if read_only and is_new:
            raise DataError(self.path, "no such rollout database; a run writes it with its first rollouts")
        with sqlite_errors(self.path), connect(self.path, read_only=read_only) as db:
            columns = check_schema(db, self.path)
            if read_only and not columns:
                raise DataError(self.path, "not a rollout database as posttrain writes it (it is empty)")
            if not read_only:
                self._prepare(db, about or {})
            if is_new:
                sync_folder(self.path.parent)

    def _prepare(self, db: sqlite3.Connection, about: Mapping[str, str]) -> None:
        """Bring the tables up to date, if no other process was faster, and write ``about``."""
        db.execute("PRAGMA journal_mode = WAL")
        with transaction(db):
            bring_up_to_date(db, self.path)
            facts = {**about, "posttrain": __version__}
            db.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", sorted(facts.items()))

    def record(self, rollouts: Sequence[Rollout], *, evaluation: str | None = None) -> None:
        """Write rollouts in one transaction; ``evaluation`` names the evaluation that they belong to.

        They outlive a killed process and a power cut: a commit waits for the disk.
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
        """Keep the record of an update; it is written with the next rollouts, by ``flush``, or after ``NUM_PENDING``.

        A run that is killed repeats the updates after its last checkpoint, before which ``flush`` is called.
        """
        assert not self.read_only, "opened for reading"
        self._pending.append(update)
        if len(self._pending) >= NUM_PENDING:
            self.flush()

    def flush(self) -> None:
        """Write the records of updates that wait."""
        if self._pending:
            with self._writing():
                pass

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Yield the writer inside a transaction, which has the waiting records of updates, too."""
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
        """Close the file. The store can be read afterwards, and recorded to again."""
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
            if failure is not error:  # the first error is the one to show
                error.add_note(str(failure))

    def trim(self, after_step: int, unevaluated: Collection[int] = ()) -> int:
        """Delete rollouts with ``step > after_step``, and those of evaluations of some steps; returns how many.

        ``after_step=-1`` also deletes the evaluation before the first step. All are deleted, or after an error none.
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
        """Return training rollouts in the order in which they were recorded.

        Args:
            step: of this step alone.
            options: ``text`` that prompt or completion contains (case counts), ``limit`` of their number, and
                ``newest_first`` for the opposite order (before ``limit``).
        """
        return self._select("rollouts", {"step": step}, **options)

    def evaluations(self, name: str | None = None, step: int | None = None, **options: Any) -> list[RecordedRollout]:
        """Return evaluation rollouts, of the evaluation ``name`` or of all; otherwise as ``training``."""
        return self._select("evaluation_rollouts", {"step": step, "evaluation": name}, **options)

    def count_training(self) -> dict[int, int]:
        """Return the number of training rollouts by step."""
        with self._connection() as db:
            counts = dict(db.execute("SELECT step, COUNT(*) FROM rollouts GROUP BY step ORDER BY step").fetchall())
        if not all(isinstance(step, int) for step in counts):
            raise DataError(self.path, "damaged: a step is no whole number; move it away")
        return counts

    def about(self, key: str) -> str | None:
        """Return a fact about the run that travels with the file."""
        with self._connection() as db:
            row = db.execute("SELECT value FROM about WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        return str(row[0])

    def updates(self, since: int = 0) -> list[RecordedUpdate]:
        """Return the records of updates from step ``since`` on, in order; none in files before version 7."""
        return self._updates("WHERE step >= ? ORDER BY id", (since,))

    def last_update(self) -> RecordedUpdate | None:
        """Return the record of the last update, if there is one."""
        for update in self._updates("ORDER BY id DESC LIMIT 1", ()):
            return update
        return None

    def count_updates(self) -> tuple[int, dict[str, list[int]]]:
        """Return the number of records of updates, and by balance the steps that violate it."""
        self.flush()
        with self._connection() as db:
            (count,) = db.execute("SELECT COUNT(*) FROM updates").fetchone()
            rows = db.execute("SELECT step, violated FROM updates WHERE violated != '' ORDER BY id").fetchall()
        steps: dict[str, list[int]] = {}
        for step, violated in rows:
            if not isinstance(step, int) or not isinstance(violated, str):
                raise DataError(self.path, "damaged: a record of an update is no text; move it away")
            for name in violated.split(","):
                steps.setdefault(name, []).append(step)
        return count, steps

    def epochs_of_prompts(self) -> dict[int, tuple[int, int]]:
        """Return by index the last pass over the prompts in which each was sampled, and the last step."""
        with self._connection() as db:
            rows = db.execute(
                "SELECT prompt_index, MAX(epoch), MAX(step) FROM rollouts GROUP BY prompt_index"
            ).fetchall()
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
                raise DataError(self.path, "damaged: a record of an update is of another kind; move it away")
            try:
                found.append(unpack_update(*row))
            except (struct.error, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
                raise DataError(
                    self.path, f"damaged: the record of update {row[0]} ({type(error).__name__}: {error}); move it away"
                ) from None
        return found

    def num_rows(self, up_to_step: int) -> dict[str, int]:
        """Return the number of rows of steps up to ``up_to_step``, by table."""
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
        if not math.isfinite(value):  # SQLite would take NaN for a missing value
            raise RewardFailure(
                f"reward {name!r}, example {example.id!r}, step {rollout.step}: it is {value}, which is not finite; "
                "have the reward function return a number there"
            )
    row: dict[str, object] = {
        "step": rollout.step,
        "epoch": rollout.epoch,
        "prompt_index": rollout.prompt_index,
        "rollout_index": rollout.rollout_index,
        "example_id": _storable(example.id),
        "prompt": _storable(prompt_text(example)),
        "completion": _storable(rollout.text),
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
        row["answer"] = _storable(example.answer)
    if rollout.advantage is not None:
        row["advantage"] = float(rollout.advantage)
    logprobs = [x for x, is_own in zip(completion.logprobs, completion.written, strict=True) if is_own]
    if logprobs:
        row["mean_sampler_logprob"] = math.fsum(logprobs) / len(logprobs)
    if rollout.extracted is not None:
        row["extracted"] = _storable(rollout.extracted)
    if completion.own is not None:
        row["spans"] = _pack_ids(spans_of(completion.own))
    if rollout.turns:
        row["turns"] = json.dumps(write_turns(rollout.turns))
    if rollout.failures:
        row["failures"] = json.dumps([_storable(failure) for failure in rollout.failures])
    return row


def _write_notes(rollout: Rollout) -> str | None:
    """Return what rewards said of an answer besides numbers, or None."""
    notes: dict[str, object] = {}
    if rollout.skipped:
        notes["skipped"] = rollout.skipped
    if not rollout.is_scored:
        notes["is_scored"] = False
    if rollout.extra:
        notes["extra"] = rollout.extra
    if not notes:
        return None
    return json.dumps(notes)


def _read_notes(text: str | None) -> dict[str, Any]:
    """Return the fields that ``_write_notes`` wrote.

    Raises:
        ValueError: something else.
    """
    if text is None:
        return {}
    notes = json.loads(text)
    skipped = notes.get("skipped", [])
    extra = notes.get("extra", {})
    is_scored = notes.get("is_scored", True)
    is_plain = isinstance(skipped, list) and all(isinstance(name, str) for name in skipped)
    if not is_plain or not isinstance(extra, dict) or not isinstance(is_scored, bool):
        raise ValueError("the notes of its rewards are of another kind")
    return {"skipped": tuple(skipped), "is_scored": is_scored, "extra": extra}


def _read_row(row: dict[str, Any], table: str, path: Path) -> RecordedRollout:
    """Check the types in a row of a file that may be untrusted: SQLite keeps any type in any column."""
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
            raise ValueError("a failure is no text")
        row |= _read_notes(row.pop("notes"))
    except (struct.error, ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
        raise DataError(path, f"damaged: row {row['id']} ({type(error).__name__}: {error}); move it away") from None
    return RecordedRollout(**row)


def _own_of(packed: bytes | None, ids: Sequence[int], num_tokens: int) -> tuple[bool, ...] | None:
    if packed is None:
        return None
    spans = _unpack_ids(packed)
    if min(spans, default=0) < 0 or not len(ids) >= sum(spans) == num_tokens:
        raise ValueError("the spans of its turns are not those of its tokens")
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
        raise ValueError("the sets that were kept are not those of its tokens")
    return KeptSets.of_counts(ids, counts)


def _pack_ids(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def _unpack_ids(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 4}i", packed)


def _pack_floats(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def _unpack_floats(packed: bytes, number: int) -> tuple[float, ...]:
    if len(packed) != 4 * number:
        raise ValueError("its log-probabilities are not those of its tokens")
    return struct.unpack(f"<{number}f", packed)


def _storable(text: str) -> str:
    """``text`` with lone surrogates (which UTF-8 cannot hold) written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()
