"""Saved states on a training server: protocol names, folders and notes.

``FOLDER/<model>/model.json`` describes a model. ``weights/<name>/step-NNNNNN/`` holds a state for continued training,
``sampler_weights/<name>/step-NNNNNN/`` weights for sampling. Both use the run checkpoint format (Hugging Face layout,
manifest with SHA-256), so other commands can load them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from posttrain.commands.serve.requests import BadRequest
from posttrain.errors import CheckpointError
from posttrain.models.config import read_object
from posttrain.option_types import Options
from posttrain.store.checkpoint_files import checkpoint_steps, newest_state
from posttrain.store.durable import remove_tree, storage_errors, write_json
from posttrain.training.stepwise.trainee import AdapterChoice
from posttrain.untrusted import cut_end, first_fault

Kind = Literal["weights", "sampler_weights"]
_MODEL = re.compile(r"([0-9a-f]{16}):train:([0-9]{1,9})")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_SHOWN_CHARS = 100
SHORT_LIVED = ".session-"  # prefix for sampling-session weights; client names cannot start with it


class ModelNote(Options):
    """``model.json``: base model, adapter, and client metadata."""

    model_id: str
    base_model: str
    base_digest: str
    adapter: AdapterChoice
    created: float = Field(ge=0)
    user_metadata: dict[str, Any] = Field(default_factory=dict)


class StateNote(Options):
    """The part of ``state.json`` about a saved state."""

    base_model: str
    base_digest: str
    adapter: AdapterChoice
    has_optimizer: bool
    step: int = Field(ge=0)
    user_metadata: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SavedState:
    """A saved state: protocol name, folder and note."""

    path: str
    folder: Path
    note: StateNote


class StateFolder:
    """All saved states under ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def make(self) -> None:
        """Make the folder.

        Raises:
            StorageError: it cannot be made.
        """
        with storage_errors("states", self.root):
            self.root.mkdir(parents=True, exist_ok=True)

    def remove_short_lived(self, session_id: str = "*") -> None:
        """Delete weights saved for sampling sessions and unfinished states, of one session or of all.

        Raises:
            StorageError: deletion failed.
        """
        with storage_errors("states", self.root):
            for left in self.root.glob(f"{session_id}-train-*/*weights/{SHORT_LIVED}*"):
                remove_tree(left)

    def note_model(self, note: ModelNote) -> None:
        """Write a model note.

        Raises:
            StorageError: the disk is full or read-only.
        """
        folder = self._folder_of(note.model_id)
        with storage_errors("model.json", folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "model.json", note.model_dump())

    def read_model(self, model_id: str) -> ModelNote:
        """Load a model note, including models from earlier servers.

        Raises:
            BadRequest: unknown model.
        """
        place = self._folder_of(model_id) / "model.json"
        if not place.is_file():
            raise no_model(model_id)
        try:
            return ModelNote.model_validate(read_object(place))
        except ValidationError as error:
            raise CheckpointError(f"{place}: {first_fault(error)}") from None

    def place(self, model_id: str, kind: Kind, name: str) -> Path:
        """Choose a state folder for a client-supplied name.

        Raises:
            BadRequest: an unsafe name.
        """
        if not _NAME.fullmatch(name):
            raise BadRequest(
                f"path: {_quoted(name)} is not a valid name; use 1 to 128 letters, digits, '_', '-' or '.', and "
                "do not start with '.' or '-'",
                "path",
            )
        return self._folder_of(model_id) / kind / name

    def short_lived(self, model_id: str, number: int) -> Path:
        """Choose a folder for weights in a sampling session."""
        return self._folder_of(model_id) / "sampler_weights" / f"{SHORT_LIVED}{number}"

    def aside(self, folder: Path) -> Path:
        """Choose an empty place to write a state that takes the name of ``folder`` when it is complete.

        Raises:
            StorageError: an earlier one could not be deleted.
        """
        place = folder.with_name(f"{SHORT_LIVED}{folder.name}")
        with storage_errors("a state", place):
            remove_tree(place)
        return place

    def replace(self, folder: Path, complete: Path) -> None:
        """Give a complete state its name, in place of an older one.

        Raises:
            StorageError: the older one could not be deleted.
        """
        with storage_errors("a state", folder):
            remove_tree(folder)
            complete.rename(folder)

    def find(self, path: str) -> SavedState:
        """Load a state by path, ``tinker://MODEL/weights/NAME``.

        Raises:
            BadRequest: an invalid path, or a missing state.
            CheckpointError: a damaged note.
        """
        parts = path.removeprefix("tinker://").split("/")
        if not path.startswith("tinker://") or len(parts) != 3 or parts[1] not in ("weights", "sampler_weights"):
            form = "tinker://MODEL/weights/NAME or tinker://MODEL/sampler_weights/NAME"
            raise BadRequest(f"path: {_quoted(path)} is not a path. Use {form}", "path")
        kind: Kind = "weights"
        if parts[1] == "sampler_weights":
            kind = "sampler_weights"
        return self.read(path, self.place(parts[0], kind, parts[2]))

    def read(self, path: str, folder: Path) -> SavedState:
        """Load a state from a folder.

        Raises:
            BadRequest: a missing state.
            CheckpointError: a damaged note.
        """
        found = None
        if folder.is_dir() and not folder.is_symlink():
            found = newest_state(folder)
        if found is None:
            raise BadRequest(f"path: no saved state {_quoted(path)}", "path", "not_found", 404)
        try:
            note = StateNote.model_validate(found[1].get("served"))
        except ValidationError as error:
            raise CheckpointError(f"{folder}: {first_fault(error)}") from None
        return SavedState(path, folder, note)

    def remove(self, path: str) -> None:
        """Delete a state.

        Raises:
            BadRequest: a missing state.
        """
        state = self.find(path)
        with storage_errors("a state", state.folder):
            remove_tree(state.folder)

    def names(self, model_id: str) -> list[tuple[Kind, str, float]]:
        """List a model's states with kind, name and time, oldest first."""
        kinds: tuple[Kind, ...] = ("weights", "sampler_weights")
        found: list[tuple[Kind, str, float]] = []
        for kind in kinds:
            for folder in (self._folder_of(model_id) / kind).glob("*"):
                if _NAME.fullmatch(folder.name) and not folder.is_symlink() and checkpoint_steps(folder):
                    found.append((kind, folder.name, folder.stat().st_mtime))
        return sorted(found, key=lambda one: (one[2], one[1]))

    def _folder_of(self, model_id: str) -> Path:
        match = _MODEL.fullmatch(model_id)
        if not match:
            raise no_model(model_id)
        return self.root / f"{match[1]}-train-{match[2]}"


def no_model(model_id: str) -> BadRequest:
    """Build an error for an unknown model."""
    return BadRequest(
        f"model_id: unknown model {_quoted(model_id)} (models are released when a server stops); create a model, "
        "or continue from a saved state",
        "model_id",
        "model_not_found",
        404,
    )


def _quoted(text: str) -> str:
    return repr(cut_end(text, _SHOWN_CHARS))
