"""``rollouts.db``: every completion that was sampled, with its rewards.

SQLite in WAL mode. Rows are functions of the recipe alone (no clock), so two runs compare bit for bit."""

from __future__ import annotations

import json
import math
import re
import sqlite3
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from posttrain.errors import DataError, PosttrainError
from posttrain.store.database import check_schema, connect, create_schema, sqlite_errors
from posttrain.store.durable import sync_file, sync_folder
from posttrain.types import Call, Example, Rollout, Turn

Row = tuple[Any, ...]

COLUMNS = (
    "step",
    "epoch",
    "prompt_index",
    "rollout_index",
    "example_id",
    "prompt",
    "completion",
    "answer",
    "parts",
    "reward",
    "advantage",
    "num_tokens",
    "finish",
    "mean_sampler_logprob",
    "extracted",
    "outcome",
    "token_ids",
    "version",
    "spans",
    "turns",
    "failures",
)
# What a column holds where it is no text, and which may be empty.
_TYPES: dict[str, Any] = {
    **dict.fromkeys(("id", "step", "epoch", "prompt_index", "rollout_index", "num_tokens"), int),
    **dict.fromkeys(("reward", "advantage", "mean_sampler_logprob"), float),
    "token_ids": bytes,
    "version": int,
    "spans": bytes,
}
_OPTIONAL = {"answer", "advantage", "mean_sampler_logprob", "extracted", "spans", "turns", "failures"}


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """One row of ``rollouts.db``.

    ``id`` counts the rows of its table from 1. ``parts`` are the unweighted rewards by name.
    ``mean_sampler_logprob`` is the mean over the tokens that the model wrote (None where there are none).
    ``extracted`` and ``outcome``: the answer that was graded and what the grader said. ``token_ids`` are those of the
    prompt and, the last ``num_tokens`` of them, of the completion as sampled. ``version``: number of updates of the
    weights that sampled. Of a completion with an environment ``own`` says which of its tokens the model wrote (None:
    all), ``turns`` what it did in each, and ``failures`` why the environment failed, if it did; ``completion`` is then
    the last turn. ``evaluation`` names the evaluation that sampled it; None for a training rollout.
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
    evaluation: str | None = None

    @property
    def num_own(self) -> int:
        """How many tokens the model wrote."""
        return self.num_tokens if self.own is None else sum(self.own)

    @property
    def transcript(self) -> str:
        """The completion for a reader: of several turns each, with the results of its calls below it."""
        return show_turns(self.turns, self.failures) or self.completion


# A line that looks like one of those that ``show_turns`` adds, whatever begins a line.
_BREAKS = r"\n\r\v\f\x1c-\x1e\x85\u2028\u2029"
_ARROW = re.compile(rf"(^|[{_BREAKS}])([^\S{_BREAKS}]*->)")


def _quote(text: str) -> str:
    """What a model or a tool wrote; arrows at the start of a line get a backslash, for those are the record's own."""
    return _ARROW.sub(r"\1\\\2", text)


def show_turns(turns: Sequence[Turn], failures: Sequence[str] = ()) -> str:
    """Turns for a reader, below each the results of its calls and what it was paid; empty where one turn says all."""
    if len(turns) < 2 and not failures and not any(turn.calls for turn in turns):
        return ""
    lines = []
    for turn in turns:
        lines.append(_quote(turn.text))
        lines += [f"-> {_quote(f'{call.tool} ({call.outcome}): {call.result}')}" for call in turn.calls]
        lines += [] if turn.reward is None else [f"-> paid {turn.reward:g}"]
    return "\n".join([*lines, *(f"-> failed: {failure}" for failure in failures)])


def to_row(rollout: Rollout) -> Row:
    """The columns of a rollout (``COLUMNS``): numbers, texts and bytes."""
    completion = rollout.completion
    logprobs = [x for x, is_own in zip(completion.logprobs, completion.written, strict=True) if is_own]
    return (
        rollout.step,
        rollout.epoch,
        rollout.prompt_index,
        rollout.rollout_index,
        _storable(rollout.example.id),
        _storable(prompt_text(rollout.example)),
        _storable(rollout.text),
        None if rollout.example.answer is None else _storable(rollout.example.answer),
        json.dumps({name: float(value) for name, value in rollout.parts.items()}, allow_nan=False),
        float(rollout.reward),
        None if rollout.advantage is None else float(rollout.advantage),
        len(rollout.completion.ids),
        rollout.completion.finish,
        math.fsum(logprobs) / len(logprobs) if logprobs else None,
        None if rollout.extracted is None else _storable(rollout.extracted),
        rollout.outcome,
        _pack_ids((*rollout.prompt_ids, *rollout.completion.ids)),
        completion.version,
        None if completion.own is None else _pack_ids(spans_of(completion.own)),
        json.dumps(write_turns(rollout.turns)) if rollout.turns else None,
        json.dumps([_storable(failure) for failure in rollout.failures]) if rollout.failures else None,
    )


def spans_of(own: Sequence[bool]) -> list[int]:
    """Lengths of runs in turn, those that the model wrote first (0 where it did not begin)."""
    spans, writes = [0], True
    for is_own in own:
        if is_own != writes:
            spans.append(0)
            writes = is_own
        spans[-1] += 1
    return spans


def write_turns(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Turns as plain data."""
    return [
        {
            "text": _storable(turn.text),
            "calls": [{f.name: _storable(getattr(call, f.name)) for f in fields(Call)} for call in turn.calls],
            **({} if turn.reward is None else {"reward": turn.reward}),
        }
        for turn in turns
    ]


def read_turns(rows: Sequence[Mapping[str, Any]]) -> tuple[Turn, ...]:
    """What ``write_turns`` wrote.

    Raises:
        KeyError, TypeError, ValueError: something else.
    """
    turns = []
    for row in rows:
        calls = tuple(Call(**call) for call in row["calls"])
        texts = [row["text"], *(getattr(call, f.name) for call in calls for f in fields(Call))]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a turn holds something else than text")
        reward = row.get("reward")
        if reward is not None and (not isinstance(reward, float) or not math.isfinite(reward)):
            raise ValueError("the reward of a turn is no finite number")
        turns.append(Turn(row["text"], calls, reward))
    return tuple(turns)


def _pack_ids(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def _unpack_ids(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 4}i", packed)


def read_row(row: Mapping[str, Any], path: Path) -> RecordedRollout:
    """A row as it stands in the file ``path``, which may be a stranger's: SQLite keeps any type in any column.

    Raises:
        DataError: a value is of another type than this package writes.
    """
    for name, value in row.items():
        allowed = _TYPES.get(name, str)
        if not isinstance(value, allowed) and not (value is None and name in _OPTIONAL):
            raise DataError(path, f"damaged: {name} of row {row['id']!r} is {type(value).__name__}; move it away")
    try:
        ids = _unpack_ids(row["token_ids"])
        parts = {str(name): float(value) for name, value in json.loads(row["parts"]).items()}
        several = _read_several(row)
    except (struct.error, ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
        raise DataError(path, f"damaged: row {row['id']} ({type(error).__name__}: {error}); move it away") from None
    plain = {name: value for name, value in row.items() if name not in ("spans", "turns", "failures")}
    return RecordedRollout(**{**plain, "parts": parts, "token_ids": ids, **several})


def _read_several(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row says of several turns.

    Raises:
        KeyError, TypeError, ValueError, struct.error: nothing that ``to_row`` writes.
    """
    own = None
    if row["spans"] is not None:
        spans = _unpack_ids(row["spans"])
        if min(spans, default=0) < 0 or not len(row["token_ids"]) // 4 >= sum(spans) == row["num_tokens"]:
            raise ValueError("the spans of its turns are not those of its tokens")
        own = tuple(place % 2 == 0 for place, length in enumerate(spans) for _ in range(length))
    failures = tuple(json.loads(row["failures"])) if row["failures"] is not None else ()
    if not all(isinstance(failure, str) for failure in failures):
        raise ValueError("a failure is no text")
    turns = read_turns(json.loads(row["turns"])) if row["turns"] is not None else ()
    return {"own": own, "turns": turns, "failures": failures}


def prompt_text(example: Example) -> str:
    """What was asked, for a reader: the message, or all of them with their roles."""
    messages = example.messages
    if len(messages) == 1:
        return messages[0].content
    return "\n\n".join(f"{message.role}: {message.content}" for message in messages)


def _storable(text: str) -> str:
    """``text`` with lone surrogates (which UTF-8 cannot hold) written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


TABLES = ("rollouts", "evaluation_rollouts")


class RolloutStore:
    """The rollouts of one run.

    Args:
        path: the file; made if missing.
        about: facts about the run that travel with the file (seed, recipe fingerprint).
        read_only: read a file that another process may be writing; ``record`` and ``trim`` are not for it.

    Raises:
        DataError: no such file (read only), not a rollout database, or one of another version.
        StorageError: the disk is full or not writable.
    """

    def __init__(self, path: str | Path, *, about: Mapping[str, str] | None = None, read_only: bool = False) -> None:
        self.path = Path(path)
        self.read_only = read_only
        self._opened = ExitStack()
        self._writer: sqlite3.Connection | None = None
        self._prepare(about or {})

    def record(self, rollouts: Sequence[Rollout], *, evaluation: str | None = None) -> None:
        """Write rollouts in one transaction; ``evaluation`` names the evaluation that they belong to.

        They outlive a killed process, and after ``flush`` a power cut.

        Raises:
            StorageError: the disk is full or not writable.
        """
        assert not self.read_only, "opened for reading"
        if not rollouts:
            return
        last = () if evaluation is None else (evaluation,)
        table, columns = ("evaluation_rollouts", (*COLUMNS, "evaluation")) if last else ("rollouts", COLUMNS)
        insertion = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
        with sqlite_errors(self.path):
            if self._writer is None:
                self._writer = self._opened.enter_context(connect(self.path, read_only=False))
                self._writer.execute("PRAGMA synchronous = NORMAL")  # a commit does not wait for the disk; flush does
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                self._writer.executemany(insertion, [(*to_row(rollout), *last) for rollout in rollouts])
                self._writer.execute("COMMIT")
            finally:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")

    def flush(self) -> None:
        """Wait until everything recorded is on the disk.

        Raises:
            StorageError: it could not be written.
        """
        if self._writer is not None:
            with sqlite_errors(self.path):
                for path in (self.path.with_name(f"{self.path.name}-wal"), self.path):
                    if path.exists():
                        sync_file(path)

    def close(self) -> None:
        """Flush and close. The store can be read afterwards, and recorded to again.

        Raises:
            StorageError: something recorded could not be written.
        """
        self.flush()
        self._writer = None
        with sqlite_errors(self.path):
            self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except PosttrainError as failure:
            if failure is not error:  # the first error is the one to show
                error.add_note(str(failure))

    def trim(self, after_step: int, unevaluated: Collection[int] = ()) -> int:
        """Delete rollouts with ``step > after_step``, and those of evaluations of some steps; returns how many.

        ``after_step=-1`` also deletes the evaluation before the first step.

        Raises:
            StorageError: the disk is full or not writable; nothing was deleted.
        """
        assert not self.read_only, "opened for reading"
        with self._connection() as db:
            db.execute("BEGIN IMMEDIATE")
            deleted = db.execute("DELETE FROM rollouts WHERE step > ?", (after_step,)).rowcount
            deleted += db.execute("DELETE FROM evaluation_rollouts WHERE step > ?", (after_step,)).rowcount
            for step in unevaluated:
                deleted += db.execute("DELETE FROM evaluation_rollouts WHERE step = ?", (step,)).rowcount
            db.execute("COMMIT")
        return deleted

    def about(self) -> dict[str, str]:
        """The facts about the run that the file carries."""
        with self._connection() as db:
            return dict(db.execute("SELECT key, value FROM about ORDER BY key").fetchall())

    def training(
        self,
        step: int | None = None,
        *,
        min_reward: float | None = None,
        max_reward: float | None = None,
        text: str | None = None,
        limit: int | None = None,
        newest_first: bool = False,
    ) -> list[RecordedRollout]:
        """Training rollouts in the order in which they were recorded.

        Args:
            step: of this step alone.
            min_reward, max_reward: with a reward in this closed interval.
            text: whose prompt or completion contains this text (case counts).
            limit: at most so many.
            newest_first: in the opposite order (before ``limit``).
        """
        conditions = _conditions(step, min_reward, max_reward, text)
        return self._select("rollouts", conditions, limit, newest_first)

    def evaluations(
        self,
        name: str | None = None,
        step: int | None = None,
        *,
        min_reward: float | None = None,
        max_reward: float | None = None,
        text: str | None = None,
        limit: int | None = None,
        newest_first: bool = False,
    ) -> list[RecordedRollout]:
        """Evaluation rollouts, of the evaluation ``name`` or of all; otherwise as ``training``."""
        conditions = _conditions(step, min_reward, max_reward, text)
        if name is not None:
            conditions.append(("evaluation = ?", (name,)))
        return self._select("evaluation_rollouts", conditions, limit, newest_first)

    def count_training(self) -> dict[int, int]:
        """Number of training rollouts by step."""
        with self._connection() as db:
            counts = dict(db.execute("SELECT step, COUNT(*) FROM rollouts GROUP BY step ORDER BY step").fetchall())
        self._check_steps(counts)
        return counts

    def count_evaluations(self) -> dict[tuple[str, int], int]:
        """Number of evaluation rollouts by (evaluation, step)."""
        query = "SELECT evaluation, step, COUNT(*) FROM evaluation_rollouts GROUP BY 1, 2 ORDER BY 1, 2"
        with self._connection() as db:
            counts = {(name, step): count for name, step, count in db.execute(query).fetchall()}
        self._check_steps(step for _, step in counts)
        if not all(isinstance(name, str) for name, _ in counts):
            raise DataError(self.path, "damaged: the name of an evaluation is no text; move it away")
        return counts

    def num_rows(self, up_to_step: int) -> dict[str, int]:
        """How many rows of steps up to ``up_to_step`` there are, by table."""
        with self._connection() as db:
            query = "SELECT COUNT(*) FROM {} WHERE step <= ?"
            return {table: db.execute(query.format(table), (up_to_step,)).fetchone()[0] for table in TABLES}

    def _check_steps(self, steps: Iterable[Any]) -> None:
        if not all(isinstance(step, int) for step in steps):
            raise DataError(self.path, "damaged: a step is no whole number; move it away")

    def _select(
        self, table: str, conditions: list[tuple[str, tuple[Any, ...]]], limit: int | None, newest_first: bool
    ) -> list[RecordedRollout]:
        columns = ("id", *COLUMNS, *(("evaluation",) if table == "evaluation_rollouts" else ()))
        where = " AND ".join(sql for sql, _ in conditions) or "1"
        values = [value for _, parameters in conditions for value in parameters]
        order = "DESC" if newest_first else "ASC"
        query = f"SELECT {', '.join(columns)} FROM {table} WHERE {where} ORDER BY id {order} LIMIT ?"
        with self._connection() as db:
            rows = db.execute(query, [*values, -1 if limit is None else limit]).fetchall()
        named = (dict(zip(columns, row, strict=True)) for row in rows)
        return [read_row(row, self.path) for row in named]

    def _prepare(self, about: Mapping[str, str]) -> None:
        is_new = not self.path.exists()
        if self.read_only and is_new:
            raise DataError(self.path, "no such rollout database; a run writes it with its first rollouts")
        with self._connection() as db:
            is_made = check_schema(db, self.path)
        if self.read_only:
            if not is_made:
                raise DataError(self.path, "not a rollout database as posttrain writes it (it is empty)")
            return
        with sqlite_errors(self.path), connect(self.path, read_only=False) as db:
            db.execute("PRAGMA journal_mode = WAL")
            create_schema(db)
            db.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", sorted(about.items()))
            if is_new:
                sync_folder(self.path.parent)

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        with sqlite_errors(self.path), connect(self.path, read_only=self.read_only) as db:
            yield db


def _conditions(
    step: int | None, min_reward: float | None, max_reward: float | None, text: str | None
) -> list[tuple[str, tuple[Any, ...]]]:
    conditions: list[tuple[str, tuple[Any, ...]]] = []
    if step is not None:
        conditions.append(("step = ?", (step,)))
    if min_reward is not None:
        conditions.append(("reward >= ?", (min_reward,)))
    if max_reward is not None:
        conditions.append(("reward <= ?", (max_reward,)))
    if text is not None:
        conditions.append(("(instr(prompt, ?) > 0 OR instr(completion, ?) > 0)", (text, text)))
    return conditions
