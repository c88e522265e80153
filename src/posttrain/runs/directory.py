"""A run is a directory: its lock, recipe, environment, status and log.

``recipe.yaml`` (resolved, reruns the run), ``env.json`` (every start: command, commit, versions,
hardware), ``status.json`` (where it stands), ``log.txt`` (what happened, with times), ``notes.json`` (tags). The loop
writes the rest (``train/files.py``). Readers need no lock and import no torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from posttrain.errors import DataError, PosttrainError, RunConflict, UsageError, hide_secrets
from posttrain.option_types import shorten
from posttrain.recipes.document import flatten, is_place
from posttrain.recipes.recipe import Recipe, validate_recipe
from posttrain.registry import suggest
from posttrain.store.durable import refuse_links, replace_file, storage_errors
from posttrain.store.environment import describe_environment
from posttrain.store.headline import ACCURACY, Headline
from posttrain.store.locks import Held, hold, holder
from posttrain.store.reading import read_json, read_stated, read_yaml
from posttrain.untrusted import harmless, harmless_json, kind_of_file

State = Literal["running", "finished", "failed", "interrupted"]
# What a run, a comparison, or a part of one may be called: a folder with room for what is written beside it.
MAX_NAME_CHARS = 200
NAME_RULE = f"letters, digits, '.', '_' and '-', at most {MAX_NAME_CHARS}"
RUN_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{MAX_NAME_CHARS - 1}}}")
_LOCK = ".lock"
_RECORDS = ("metrics.jsonl", "rollouts.db*", "*.safetensors", "log-*.txt", "vllm.log")
_BEGUN = ("served", "server-*", "tensorboard", "wandb")  # folders of servers and trackers that a start began
PATIENCE_SECONDS = 10.0
TAGS = "notes.json"
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
NUM_NAMES_SHOWN = 12


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Where a run stands: what ``status.json`` holds.

    ``updated`` is in seconds since 1970. ``message`` says why a run failed. ``headline`` is what the run is told by,
    ``held_out`` its value in the last held-out evaluation with what stands beside it, ``evaluation`` the name of that.
    ``guarantee``: what it is after being killed and resumed to the undisturbed run, L0, L1 or L2 (docs/asynchrony.md).
    """

    state: State
    step: int
    steps: int
    pid: int
    host: str
    updated: float
    message: str | None = None
    headline: Headline | None = None
    held_out: dict[str, float] = field(default_factory=dict)
    evaluation: str | None = None
    guarantee: str | None = None


def check_run_name(name: str) -> str:
    """The name, if it can be that of a folder.

    Raises:
        UsageError: characters other than letters, digits, ``.``, ``_`` and ``-``.
    """
    if not RUN_NAME.fullmatch(name):
        raise UsageError(
            f"--run {shorten(name)}: a run's name is made of {NAME_RULE}, "
            "and does not start with '.' or '-'; the folder that holds it is given by --runs-dir"
        )
    return name


def name_of_recipe(recipe_name: str) -> str:
    """A run's default name: ``tiny/grpo`` and ``my/tiny-grpo.yaml`` both give ``tiny-grpo``."""
    path = Path(recipe_name)
    plain = path.stem if path.suffix in (".yaml", ".yml") else recipe_name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", plain).strip("-.")[:MAX_NAME_CHARS] or "run"


def find_run(root: str | Path, name: str) -> Path:
    """The directory of a run, by name under ``root`` or by path.

    Raises:
        UsageError: there is none; the message suggests the nearest name.
    """
    for path in (Path(root) / name, Path(name)) if name else ():
        if kind_of_file(path / "recipe.yaml") != "nothing":
            return path
    known = run_names(root)
    raise UsageError(f"there is no run {shorten(name)} in {root}.{suggest(name, known)} {list_names(known)}")


def list_names(known: Sequence[str]) -> str:
    """The runs that there are, for a message: some of them by name, and how many more."""
    more = f" and {len(known) - NUM_NAMES_SHOWN} more" if len(known) > NUM_NAMES_SHOWN else ""
    return f"Runs there: {', '.join(known[:NUM_NAMES_SHOWN]) or 'none'}{more}"


def run_names(root: str | Path) -> list[str]:
    """Names of the run directories under ``root``, in alphabetical order; hidden folders are none."""
    return folders_with(root, "recipe.yaml")


def folders_with(root: str | Path, file: str) -> list[str]:
    """Names of the folders under ``root`` that have such a file, in alphabetical order; hidden folders are none."""
    try:
        with os.scandir(root) as items:
            names = [(item.name, item.path) for item in items if not item.name.startswith(".")]
    except OSError:
        return []
    return sorted(name for name, path in names if os.path.exists(os.path.join(path, file)))


@contextmanager
def lock_run(folder: Path, *, to_delete: bool = False) -> Iterator[None]:
    """Hold the run for this process; the lock ends with the process, however it ends.

    A folder in which writing would change something elsewhere is refused, unless it is only to be deleted from.

    Raises:
        RunConflict: another process holds it.
        UsageError: a link in it leads out of it (``store.durable``).
        StorageError: the folder is not writable.
    """
    if not to_delete:
        refuse_links(folder)
    with ExitStack() as stack:
        try:
            with storage_errors("the run's lock", folder):
                stack.enter_context(hold(folder / _LOCK))
        except Held as held:
            raise _in_use(folder, str(held)) from None
        yield


def _in_use(folder: Path, process: str) -> RunConflict:
    return RunConflict(
        f"{folder}: another process is working in this run ({process}). "
        "Wait for it, stop it, or choose another name with --run NAME"
    )


def is_live(folder: Path) -> bool:
    """Whether some process holds the run's lock at this moment."""
    return holder(folder / _LOCK) is not None


def refuse_live_folder(folder: Path) -> None:
    """Raises RunConflict, with the process, if one holds the lock of ``folder`` at this moment."""
    process = holder(folder / _LOCK)
    if process is not None:
        raise _in_use(folder, process)


def wait_for_end(folders: Iterable[Path]) -> dict[Path, str]:
    """Those folders in which a process still works after ``PATIENCE_SECONDS`` in all, with which that is.

    A process whose parent was killed ends by itself, but not before it is given up by device and disk.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    working: dict[Path, str] = {}
    for folder in folders:
        while (process := holder(folder / _LOCK)) is not None:
            if time.monotonic() > deadline:
                working[folder] = process
                break
            time.sleep(0.05)
    return working


class RunDirectory:
    """The files of one run that its launcher writes and its readers read."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.recipe_path = self.folder / "recipe.yaml"
        self.status_path = self.folder / "status.json"
        self.environment_path = self.folder / "env.json"
        self.log_path = self.folder / "log.txt"

    @property
    def is_empty(self) -> bool:
        """Nothing there yet but a lock, or what a killed start left."""
        return not any(item for item in self.folder.iterdir() if not item.name.startswith((_LOCK, ".tmp-")))

    def discard(self) -> None:
        """Take back a start that came to nothing: our own files, and the folder if that empties it."""
        own = (self.recipe_path, self.status_path, self.environment_path, self.log_path, self.folder / _LOCK)
        records = [path for pattern in _RECORDS for path in self.folder.glob(pattern)]  # of the start's evaluation
        with storage_errors("run", self.folder):
            for path in (*own, *records):
                path.unlink(missing_ok=True)
            for folder in (folder for pattern in _BEGUN for folder in self.folder.glob(pattern)):
                shutil.rmtree(folder, ignore_errors=True)  # they may still write their last words
            for folder in (self.folder / "checkpoints", self.folder / "evaluation", self.folder):
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()

    def write_recipe(self, recipe: Recipe) -> None:
        """Put the resolved recipe in place; atomic."""
        replace_file(self.recipe_path, recipe.to_yaml().encode())

    def read_recipe(self) -> dict[str, Any]:
        """The stored recipe as plain data.

        Raises:
            DataError: it cannot be read.
        """
        try:
            data = read_yaml(self.recipe_path)
        except FileNotFoundError:
            raise DataError(self.recipe_path, "the run's recipe cannot be read (it is gone)") from None
        if not isinstance(data, dict):
            raise DataError(self.recipe_path, "the run's recipe is not a mapping of sections")
        return data

    def changed_keys(
        self, recipe: Recipe, stored: Mapping[str, Any] | None = None, *, places: bool = False
    ) -> dict[str, tuple[Any, Any]]:
        """Dotted keys in which ``recipe`` differs from the stored one, as (stored, given).

        A key that one side does not have counts as None there.

        Args:
            stored: plain data to compare with; by default what the run's ``recipe.yaml`` says.
            places: the keys of place (``document.PLACE_KEYS``), which may change at any time, instead of all others.
        """
        stored = dict(stored) if stored is not None else self.read_recipe()
        # Defaults that came with a later posttrain are filled in before comparing; a recipe that no
        # longer validates is compared as it stands.
        with suppress(PosttrainError):
            stored = validate_recipe(stored, is_own=False).resolve(to_read=True).dump()
        old, new = flatten(stored), flatten(recipe.dump())
        kept = [key for key in {**old, **new} if is_place(key) == places]
        return {key: (old.get(key), new.get(key)) for key in kept if old.get(key) != new.get(key)}

    def write_status(self, status: RunStatus) -> None:
        """Put the status in place; atomic, not waiting for the disk."""
        kept = asdict(status) | {"message": hide_secrets(status.message) if status.message else None}
        replace_file(self.status_path, json.dumps(kept, indent=1).encode() + b"\n", durable=False)

    def read_status(self) -> RunStatus | None:
        """The status, or None where there is none yet.

        Raises:
            DataError: the file is damaged.
        """
        try:
            return read_stated(self.status_path, RunStatus)
        except FileNotFoundError:
            return None

    def headline(self) -> Headline:
        """What the run is told by; the share of right answers where nothing is stored.

        Raises:
            DataError: the status is damaged.
        """
        status = self.read_status()
        return ACCURACY if status is None or status.headline is None else status.headline

    def write_environment(self, recipe_name: str, fingerprint: str) -> None:
        """Add this start of the run to ``env.json``: command, commit, versions, hardware."""
        environment = self.read_environment()
        now = describe_environment()
        starts = [*environment.get("starts", []), {"fingerprint": fingerprint, **now}]
        created = environment.get("created", now["started"])
        content = {"recipe": environment.get("recipe", recipe_name), "created": created, "starts": starts}
        replace_file(self.environment_path, json.dumps(content, indent=1).encode() + b"\n")

    def read_environment(self) -> dict[str, Any]:
        """``env.json`` as plain data: ``recipe``, ``created``, ``starts``; empty where there is none.

        Raises:
            DataError: the file is damaged.
        """
        try:
            data = read_json(self.environment_path)
        except FileNotFoundError:
            return {}
        problem = _environment_problem(data)
        if problem:
            raise DataError(self.environment_path, f"damaged: {problem}; delete it")
        return dict(data)

    def made_by(self) -> str | None:
        """The version of posttrain that last worked in it; None where that was not recorded.

        Raises:
            DataError: the record is damaged.
        """
        starts = self.read_environment().get("starts") or [{}]
        version = (starts[-1].get("versions") or {}).get("posttrain")
        return None if version is None else str(version)

    def log(self, text: str) -> None:
        """Add a line with the time to ``log.txt``.

        Raises:
            StorageError: the disk is full or not writable.
        """
        stamp = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
        with storage_errors("the run's log", self.log_path), self.log_path.open("a", encoding="utf-8") as file:
            file.write(f"{stamp}Z {harmless(hide_secrets(text))}\n")


def _environment_problem(data: Any) -> str:
    """What is wrong with the content of ``env.json``; empty if nothing is."""
    if not isinstance(data, dict):
        return "not a mapping"
    if not all(isinstance(data.get(key, ""), str) for key in ("recipe", "created")):
        return "'recipe' or 'created' is no text"
    starts = data.get("starts", [])
    if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
        return "'starts' is no list of mappings"
    sections = [start.get(key) or {} for start in starts for key in ("versions", "hardware", "git")]
    gpus = [section.get("gpus") or [] for section in sections if isinstance(section, dict)]
    commands = [start.get("command") or [] for start in starts]
    if len(gpus) < len(sections) or not all(isinstance(words, list) for words in (*gpus, *commands)):
        return "a start says nothing of versions, hardware, commit and command"
    return ""


def new_status(steps: int, before: RunStatus | None) -> RunStatus:
    """The status of a run that starts now, or goes on from ``before``."""
    here: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname(), "updated": time.time()}
    if before is None:
        return RunStatus("running", 0, steps, **here)
    return replace(before, state="running", steps=steps, message=None, **here)


@dataclass(frozen=True, slots=True)
class _Notes:
    tags: tuple[str, ...]


def read_tags(folder: str | Path) -> tuple[str, ...]:
    """The tags of a run, in the order in which they were given.

    Raises:
        DataError: the file is damaged.
    """
    try:
        return read_stated(Path(folder) / TAGS, _Notes).tags
    except FileNotFoundError:
        return ()


def change_tags(folder: str | Path, changes: Sequence[str]) -> tuple[str, ...]:
    """Add and take away tags: ``good`` and ``+good`` add, ``-good`` takes away. Returns the new tags.

    A tag that is there is not added again, and one that is not there need not be taken away. It takes a lock of its
    own, since a run that is training may be tagged as well.

    Raises:
        UsageError: a malformed tag; nothing was changed.
    """
    path = Path(folder) / TAGS
    plain = [change[1:] if change[:1] in ("+", "-") else change for change in changes]
    for change, tag in zip(changes, plain, strict=True):
        if not _TAG.fullmatch(tag):
            raise UsageError(f"{change!r}: a tag is made of letters, digits, '.', '_' and '-', such as +good or -good")
    with ExitStack() as stack:
        try:
            with storage_errors(TAGS, path.parent):
                stack.enter_context(hold(path.parent / ".lock-notes", PATIENCE_SECONDS))
        except Held as held:
            raise RunConflict(f"{path}: another process is changing it ({held}). Nothing was changed") from None
        tags = list(read_tags(folder))
        for change, tag in zip(changes, plain, strict=True):
            if change.startswith("-"):
                tags = [kept for kept in tags if kept != tag]
            elif tag not in tags:
                tags.append(tag)
        others = read_json(path) if path.exists() else {}  # such as remarks of earlier versions
        content = harmless_json(json.dumps(others | {"tags": tags}, indent=1, ensure_ascii=False))
        replace_file(path, content.encode() + b"\n")
        return tuple(tags)
