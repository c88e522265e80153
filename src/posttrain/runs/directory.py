"""A run is a directory: its lock, recipe, environment, status and log.

``recipe.yaml`` (resolved, reruns the run), ``env.json`` (every start: command, commit, versions, hardware),
``status.json`` (state and step), ``log.txt`` (events, with times). The loop writes the rest (``training/files.py``).
Readers need no lock and import no torch.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import BaseModel, Field

from posttrain.errors import DataError, PosttrainError, RunConflict, UsageError, hide_secrets
from posttrain.option_types import shorten
from posttrain.recipes.document import is_place
from posttrain.recipes.overriding import flatten
from posttrain.recipes.recipe import validate_recipe
from posttrain.registry import suggest
from posttrain.store.durable import refuse_links, replace_file, storage_errors
from posttrain.store.environment import describe_environment
from posttrain.store.locks import Held, hold, holder
from posttrain.store.metric_names import ACCURACY, Metric, metric_of
from posttrain.store.reading import read_declared, read_yaml_file
from posttrain.untrusted import harmless, kind_of_file

State = Literal["running", "finished", "failed", "interrupted", "stopped"]
# The name of a run or a sweep, or of a part of one: a folder with room for what is written aside.
MAX_NAME_CHARS = 200
NAME_RULE = f"letters, digits, '.', '_' and '-', at most {MAX_NAME_CHARS}"
RUN_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{MAX_NAME_CHARS - 1}}}")
LOCK = ".lock"
TIMEOUT_SECONDS = 10.0
NUM_NAMES_SHOWN = 12
# Keys of a recipe that came with a later version, and what a run that was begun without them does when it is resumed.
LATER_KEYS: Mapping[str, object] = {"train.skip_zero_rows": False}


def keys_that_came_later(stored: Mapping[str, object]) -> list[str]:
    """Return those of ``LATER_KEYS`` that a stored recipe does not have."""
    known = flatten(stored)
    return [key for key in LATER_KEYS if key not in known]


@dataclass(frozen=True, slots=True)
class RunStatus:
    """State and step of a run: the content of ``status.json``.

    ``updated`` is in seconds since 1970. ``message``: the reason why a run failed. ``primary_metric``: the name of the
    result that ranks it; ``held_out``: its value in the last held-out evaluation with what is shown with it;
    ``evaluation``: its name.
    """

    state: State
    step: int
    steps: int
    pid: int
    host: str
    updated: float
    message: str | None = None
    primary_metric: Annotated[str, Field(max_length=80)] | None = None
    held_out: dict[str, float] = field(default_factory=dict)
    evaluation: str | None = None


class RunLength(Protocol):
    """The section of a recipe that says how long a run is and when it saves."""

    @property
    def steps(self) -> int | None: ...
    @property
    def schedule(self) -> str: ...
    @property
    def save_every(self) -> int | None: ...


class RunRecipe(Protocol):
    """The part of a recipe that a run needs, for a language model or a sparse autoencoder."""

    @property
    def train(self) -> RunLength: ...
    def resolve(self) -> Self: ...
    def dump(self) -> dict[str, Any]: ...
    def to_yaml(self) -> str: ...
    def fingerprint(self) -> str: ...


class _Hardware(BaseModel, extra="allow"):
    gpus: list[str] = []


class _Start(BaseModel, extra="allow"):
    versions: dict[str, str | None] = {}
    hardware: _Hardware = _Hardware()
    git: dict[str, object] | None = None
    command: list[str] = []


class _Environment(BaseModel, extra="allow"):
    """The content of ``env.json``, as far as it is read."""

    recipe: str = "?"
    created: str | None = None
    starts: list[_Start] = []


def check_run_name(name: str) -> str:
    """Return the name, if it can be that of a folder; raises UsageError otherwise."""
    if not isinstance(name, str) or not RUN_NAME.fullmatch(name):
        raise UsageError(
            f"--run {shorten(name)}: a run's name is made of {NAME_RULE}, "
            "and does not start with '.' or '-'; the folder that holds it is given by --runs-dir"
        )
    return name


def name_of_recipe(recipe_name: str) -> str:
    """Return a run's default name: ``tiny/grpo`` and ``my/tiny-grpo.yaml`` both give ``tiny-grpo``."""
    path = Path(recipe_name)
    if path.suffix in (".yaml", ".yml"):
        plain = path.stem
    else:
        plain = recipe_name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", plain).strip("-.")[:MAX_NAME_CHARS] or "run"


def find_run(root: str | Path, name: str) -> Path:
    """Return the directory of a run, by name under ``root`` or by path; raises UsageError if there is none."""
    if name:
        for path in (Path(root) / name, Path(name)):
            if kind_of_file(path / "recipe.yaml") != "nothing":
                return path
    known = run_names(root)
    raise UsageError(f"there is no run {shorten(name)} in {root}.{suggest(name, known)} {list_names(known)}")


def list_names(known: Sequence[str]) -> str:
    """Return the names of runs for a message: some of them, and the number of the others."""
    more = ""
    if len(known) > NUM_NAMES_SHOWN:
        more = f" and {len(known) - NUM_NAMES_SHOWN} more"
    return f"Runs there: {', '.join(known[:NUM_NAMES_SHOWN]) or 'none'}{more}"


def run_names(root: str | Path) -> list[str]:
    """Return the names of the run directories under ``root``, in alphabetical order; hidden folders are none."""
    return folders_with(root, "recipe.yaml")


def folders_with(root: str | Path, file: str) -> list[str]:
    """Return the names of the folders under ``root`` that have such a file, sorted; hidden folders are none."""
    try:
        names = os.listdir(root)
    except OSError:
        return []
    return sorted(name for name in names if name[0] != "." and os.path.exists(os.path.join(root, name, file)))


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
                stack.enter_context(hold(folder / LOCK))
        except Held as held:
            refuse_live_folder(folder, str(held))
        yield


def is_live(folder: Path) -> bool:
    """Return whether some process holds the run's lock at this moment."""
    return holder(folder / LOCK) is not None


def refuse_live_folder(folder: Path, process: str | None = None) -> None:
    """Raise RunConflict, with the process, if one holds the lock of ``folder`` at this moment, or is named."""
    process = process or holder(folder / LOCK)
    if process is not None:
        raise RunConflict(
            f"{folder}: another process is working in this run ({process}). Nothing was changed; wait for it, stop it "
            "(Ctrl-C saves a checkpoint), or choose another name with --run NAME"
        ) from None


def wait_for_end(folders: Iterable[Path]) -> dict[Path, str]:
    """Return the folders in which a process still works after ``TIMEOUT_SECONDS`` in all, and the process.

    A process whose parent was killed ends by itself a moment later.
    """
    deadline = time.monotonic() + TIMEOUT_SECONDS
    working = {folder: holder(folder / LOCK) for folder in folders}
    while any(working.values()) and time.monotonic() < deadline:
        time.sleep(0.05)
        working = {folder: process and holder(folder / LOCK) for folder, process in working.items()}
    return {folder: process for folder, process in working.items() if process is not None}


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
        return not any(item for item in self.folder.iterdir() if not item.name.startswith((LOCK, ".tmp-")))

    def write_recipe(self, recipe: RunRecipe) -> None:
        """Put the resolved recipe in place; atomic."""
        replace_file(self.recipe_path, recipe.to_yaml().encode())

    def read_recipe(self) -> dict[str, Any]:
        """Return the stored recipe as plain data; raises DataError if it cannot be read."""
        try:
            data = read_yaml_file(self.recipe_path)
        except FileNotFoundError as error:
            raise DataError(self.recipe_path, f"the run's recipe cannot be read ({error.strerror})") from None
        if not isinstance(data, dict):
            raise DataError(self.recipe_path, "the run's recipe is not a mapping of sections")
        return data

    def as_it_began(self, recipe: RunRecipe) -> RunRecipe:
        """Return the recipe for a run that is resumed: keys that came later say what the run has done so far."""
        changed: Any = recipe
        for key in keys_that_came_later(self.read_recipe()):
            section, _, name = key.partition(".")
            settings = getattr(changed, section)
            if name in type(settings).model_fields:  # the sections of `posttrain sae` are others
                settings = settings.model_copy(update={name: LATER_KEYS[key]})
                changed = changed.model_copy(update={section: settings})
        began: RunRecipe = changed
        return began

    def changed_keys(
        self, recipe: RunRecipe, stored: Mapping[str, object] | None = None, *, places: bool = False
    ) -> dict[str, tuple[object, object]]:
        """Return the dotted keys in which ``recipe`` differs from the stored one, as (stored, given).

        A key that one side does not have counts as None there. A key that came with a later version than the stored
        recipe is not compared.

        Args:
            stored: plain data to compare with; by default the run's ``recipe.yaml``.
            places: the keys of place (``document.PLACE_KEYS``), which may change at any time, instead of all others.
        """
        if stored is not None:
            stored = dict(stored)
        else:
            stored = self.read_recipe()
        later = keys_that_came_later(stored)
        # Defaults that came with a later posttrain are filled in before comparing; a recipe that no longer validates is
        # compared as it is.
        with suppress(PosttrainError):
            stored = validate_recipe(stored, is_own=False).resolve(to_read=True).dump()
        old = flatten(stored)
        new = flatten(recipe.dump())
        kept = [key for key in {**old, **new} if is_place(key) == places and key not in later]
        return {key: (old.get(key), new.get(key)) for key in kept if old.get(key) != new.get(key)}

    def write_status(self, status: RunStatus) -> None:
        """Put the status in place; atomic, not waiting for the disk."""
        kept = asdict(status) | {"message": hide_secrets(status.message) if status.message else None}
        replace_file(self.status_path, json.dumps(kept, indent=1).encode() + b"\n", durable=False)

    def read_status(self) -> RunStatus | None:
        """Return the status, or None where there is none yet; raises DataError if it is damaged."""
        try:
            return read_declared(self.status_path, RunStatus)
        except FileNotFoundError:
            return None

    def primary_metric(self) -> Metric:
        """Return the primary metric of the run; the accuracy where nothing is stored."""
        status = self.read_status()
        if status is None or status.primary_metric is None:
            return ACCURACY
        return metric_of(status.primary_metric)

    def write_environment(self, recipe_name: str, fingerprint: str) -> None:
        """Add this start of the run to ``env.json``: command, commit, versions, hardware."""
        environment = self.read_environment()
        now = describe_environment()
        content = {
            "recipe": environment.get("recipe", recipe_name),
            "created": environment.get("created", now["started"]),
            "starts": [*environment.get("starts", []), {"fingerprint": fingerprint, **now}],
        }
        replace_file(self.environment_path, json.dumps(content, indent=1).encode() + b"\n")

    def read_environment(self) -> dict[str, Any]:
        """Return ``env.json`` as plain data: ``recipe``, ``created``, ``starts``; empty where there is none."""
        try:
            return read_declared(self.environment_path, _Environment).model_dump(exclude_unset=True)
        except FileNotFoundError:
            return {}

    def made_by(self) -> str | None:
        """Return the version of posttrain that last worked in it; None where that was not recorded."""
        return (self.read_environment().get("starts") or [{}])[-1].get("versions", {}).get("posttrain")

    def log(self, text: str) -> None:
        """Add a line with the time to ``log.txt``."""
        stamp = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
        with storage_errors("the run's log", self.log_path), self.log_path.open("a", encoding="utf-8") as file:
            file.write(f"{stamp}Z {harmless(hide_secrets(text))}\n")


def new_status(steps: int, before: RunStatus | None) -> RunStatus:
    """Return the status of a run that starts now, or goes on from ``before``."""
    here: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname(), "updated": time.time()}
    return replace(before or RunStatus("running", 0, steps, **here), state="running", steps=steps, message=None, **here)
