"""Files in a run directory: lock, recipe, environment, status and log.

``recipe.yaml`` (resolved, reruns the run), ``env.json`` (every start: command, commit, versions, hardware),
``status.json`` (state and step), ``log.txt`` (timestamped events). The training loop writes the remaining files
(``training/files.py``). Readers need no lock and do not import torch.
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
from posttrain.folders import folder_name
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
# Names for runs, sweeps and their parts: short enough to leave space for temporary suffixes.
MAX_NAME_CHARS = 200
NAME_RULE = f"letters, digits, '.', '_' and '-', at most {MAX_NAME_CHARS}"
RUN_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{MAX_NAME_CHARS - 1}}}")
LOCK = ".lock"
TIMEOUT_SECONDS = 10.0
NUM_NAMES_SHOWN = 12
# Keys added in later versions, with the value that reproduces older behavior when such a run resumes.
LATER_KEYS: Mapping[str, object] = {"train.skip_zero_rows": False}


def keys_that_came_later(stored: Mapping[str, object]) -> list[str]:
    """List the ``LATER_KEYS`` missing from a stored recipe."""
    known = flatten(stored)
    return [key for key in LATER_KEYS if key not in known]


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Contents of ``status.json``: state and step.

    ``updated``: seconds since 1970. ``message``: why the run failed. ``primary_metric``: name of the metric that
    ranks the run. ``held_out``: its value in the last held-out evaluation, with related numbers. ``evaluation``: name
    of that evaluation.
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
    """Recipe section with the training length and checkpoint interval."""

    @property
    def steps(self) -> int | None: ...
    @property
    def schedule(self) -> str: ...
    @property
    def save_every(self) -> int | None: ...


class RunRecipe(Protocol):
    """Recipe interface used by runs, for language models and sparse autoencoders."""

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
    """The parts of ``env.json`` that are read."""

    recipe: str = "?"
    created: str | None = None
    starts: list[_Start] = []


def check_run_name(name: str) -> str:
    """Check that a name is a valid folder name, and return it. Raises UsageError otherwise."""
    if not isinstance(name, str) or not RUN_NAME.fullmatch(name):
        raise UsageError(
            f"--run {shorten(name)}: a run name may contain {NAME_RULE}, "
            "and must not start with '.' or '-'; use --runs-dir to choose the folder"
        )
    return name


def name_of_recipe(recipe_name: str) -> str:
    """Derive the default run name: ``tiny/grpo`` and ``my/tiny-grpo.yaml`` both give ``tiny-grpo``."""
    path = Path(recipe_name)
    if path.suffix in (".yaml", ".yml"):
        plain = path.stem
    else:
        plain = recipe_name
    return folder_name(plain)[:MAX_NAME_CHARS] or "run"


def find_run(root: str | Path, name: str) -> Path:
    """Find a run directory by path, or by name under ``root``. Raises UsageError if missing."""
    if name:
        for path in (Path(root) / name, Path(name)):
            if kind_of_file(path / "recipe.yaml") != "nothing":
                return path
    known = run_names(root)
    raise UsageError(f"no run {shorten(name)} in {root}.{suggest(name, known)} {list_names(known)}")


def list_names(known: Sequence[str]) -> str:
    """Format run names for a message, truncated to the first ``NUM_NAMES_SHOWN``."""
    more = ""
    if len(known) > NUM_NAMES_SHOWN:
        more = f" and {len(known) - NUM_NAMES_SHOWN} more"
    return f"Runs there: {', '.join(known[:NUM_NAMES_SHOWN]) or 'none'}{more}"


def run_names(root: str | Path) -> list[str]:
    """List run directories under ``root`` alphabetically, except hidden folders."""
    return folders_with(root, "recipe.yaml")


def folders_with(root: str | Path, file: str) -> list[str]:
    """List folders under ``root`` containing ``file``, sorted, except hidden folders."""
    try:
        names = os.listdir(root)
    except OSError:
        return []
    return sorted(name for name in names if name[0] != "." and os.path.exists(os.path.join(root, name, file)))


@contextmanager
def lock_run(folder: Path, *, to_delete: bool = False) -> Iterator[None]:
    """Lock the run for this process. The lock is released when the process ends, even by a crash.

    If writing to the folder would change files elsewhere, it is refused unless ``to_delete``.

    Raises:
        RunConflict: another process holds the lock.
        UsageError: a link leads outside the folder (``store.durable``).
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
    """Check if any process currently holds the run's lock."""
    return holder(folder / LOCK) is not None


def refuse_live_folder(folder: Path, process: str | None = None) -> None:
    """Raise RunConflict if ``process`` is given or currently holds the lock on ``folder``."""
    process = process or holder(folder / LOCK)
    if process is not None:
        raise RunConflict(
            f"{folder}: another process is using this run ({process}). Nothing was changed; wait for it, stop it "
            "(Ctrl-C saves a checkpoint), or choose a different name with --run NAME"
        ) from None


def wait_for_end(folders: Iterable[Path]) -> dict[Path, str]:
    """Wait up to ``TIMEOUT_SECONDS`` for locks to be released; map folders still locked to their process.

    A process whose parent was killed exits shortly afterwards.
    """
    deadline = time.monotonic() + TIMEOUT_SECONDS
    working = {folder: holder(folder / LOCK) for folder in folders}
    while any(working.values()) and time.monotonic() < deadline:
        time.sleep(0.05)
        working = {folder: process and holder(folder / LOCK) for folder, process in working.items()}
    return {folder: process for folder, process in working.items() if process is not None}


class RunDirectory:
    """The run files written by the launcher and read by other commands."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.recipe_path = self.folder / "recipe.yaml"
        self.status_path = self.folder / "status.json"
        self.environment_path = self.folder / "env.json"
        self.log_path = self.folder / "log.txt"

    @property
    def is_empty(self) -> bool:
        """True if the folder is new: only a lock, or temporary files from a killed start."""
        return not any(item for item in self.folder.iterdir() if not item.name.startswith((LOCK, ".tmp-")))

    def write_recipe(self, recipe: RunRecipe) -> None:
        """Write the resolved recipe atomically."""
        replace_file(self.recipe_path, recipe.to_yaml().encode())

    def read_recipe(self) -> dict[str, Any]:
        """Read the stored recipe as plain data. Raises DataError if unreadable."""
        try:
            data = read_yaml_file(self.recipe_path)
        except FileNotFoundError as error:
            raise DataError(self.recipe_path, f"the run's recipe cannot be read ({error.strerror})") from None
        if not isinstance(data, dict):
            raise DataError(self.recipe_path, "the run's recipe is not a mapping of sections")
        return data

    def as_it_began(self, recipe: RunRecipe) -> RunRecipe:
        """Adapt a recipe for resuming: keys added in later versions keep the run's original behavior."""
        changed: Any = recipe
        for key in keys_that_came_later(self.read_recipe()):
            section, _, name = key.partition(".")
            settings = getattr(changed, section)
            if name in type(settings).model_fields:  # `posttrain sae` has different sections
                settings = settings.model_copy(update={name: LATER_KEYS[key]})
                changed = changed.model_copy(update={section: settings})
        began: RunRecipe = changed
        return began

    def changed_keys(
        self, recipe: RunRecipe, stored: Mapping[str, object] | None = None, *, places: bool = False
    ) -> dict[str, tuple[object, object]]:
        """Compare ``recipe`` with the stored one: dotted keys that differ, as (stored, given).

        A key missing on one side counts as None. Keys added after the stored recipe was written are not compared.

        Args:
            stored: plain data to compare with; by default the run's ``recipe.yaml``.
            places: compare only place keys (``document.PLACE_KEYS``), which may always change. Otherwise they are
                skipped.
        """
        if stored is not None:
            stored = dict(stored)
        else:
            stored = self.read_recipe()
        later = keys_that_came_later(stored)
        # Fill in defaults added by later versions before comparing. If a recipe no longer validates, compare it
        # unchanged.
        with suppress(PosttrainError):
            stored = validate_recipe(stored, is_own=False).resolve(to_read=True).dump()
        old = flatten(stored)
        new = flatten(recipe.dump())
        kept = [key for key in {**old, **new} if is_place(key) == places and key not in later]
        return {key: (old.get(key), new.get(key)) for key in kept if old.get(key) != new.get(key)}

    def write_status(self, status: RunStatus) -> None:
        """Write the status atomically, without waiting for the disk."""
        content = asdict(status)
        if status.message is not None:
            content["message"] = hide_secrets(status.message)
        replace_file(self.status_path, json.dumps(content, indent=1).encode() + b"\n", durable=False)

    def read_status(self) -> RunStatus | None:
        """Read the status; None if missing. Raises DataError if damaged."""
        try:
            return read_declared(self.status_path, RunStatus)
        except FileNotFoundError:
            return None

    def primary_metric(self) -> Metric:
        """Look up the run's primary metric; accuracy by default."""
        status = self.read_status()
        if status is None or status.primary_metric is None:
            return ACCURACY
        return metric_of(status.primary_metric)

    def write_environment(self, recipe_name: str, fingerprint: str) -> None:
        """Append this start to ``env.json``: command, commit, versions, hardware."""
        environment = self.read_environment()
        now = describe_environment()
        content = {
            "recipe": environment.get("recipe", recipe_name),
            "created": environment.get("created", now["started"]),
            "starts": [*environment.get("starts", []), {"fingerprint": fingerprint, **now}],
        }
        replace_file(self.environment_path, json.dumps(content, indent=1).encode() + b"\n")

    def read_environment(self) -> dict[str, Any]:
        """Read ``env.json`` as plain data: ``recipe``, ``created``, ``starts``; empty if missing."""
        try:
            return read_declared(self.environment_path, _Environment).model_dump(exclude_unset=True)
        except FileNotFoundError:
            return {}

    def newest_start(self) -> dict[str, Any]:
        """Look up command, versions and hardware of the last start; empty if not recorded."""
        starts = self.read_environment().get("starts", [])
        if not starts:
            return {}
        newest: dict[str, Any] = starts[-1]
        return newest

    def made_by(self) -> str | None:
        """Look up the posttrain version used at the last start; None if not recorded."""
        return self.newest_start().get("versions", {}).get("posttrain")

    def log(self, text: str) -> None:
        """Append a timestamped line to ``log.txt``."""
        stamp = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
        with storage_errors("the run's log", self.log_path), self.log_path.open("a", encoding="utf-8") as file:
            file.write(f"{stamp}Z {harmless(hide_secrets(text))}\n")


def new_status(steps: int, before: RunStatus | None) -> RunStatus:
    """Create the status for a run that starts now, or continues from ``before``."""
    here: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname(), "updated": time.time()}
    return replace(before or RunStatus("running", 0, steps, **here), state="running", steps=steps, message=None, **here)
