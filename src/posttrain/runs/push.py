"""An export in a repository of the Hugging Face hub: its model, card, recipe and results in one commit."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory

from posttrain.errors import UsageError, first_line, hide_secrets
from posttrain.option_types import shorten
from posttrain.runs.export import Export, WeightsKind, export_run

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_HTTP = ("httpx", "httpx2", "requests")
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"


def check_repository(name: object) -> str:
    """Return the name of a repository, if it can be one.

    Raises:
        UsageError: it cannot.
    """
    if not isinstance(name, str) or REPOSITORY.fullmatch(name) is None or ".." in name or "--" in name:
        raise UsageError(f"--push {shorten(name)}: give a repository of the hub, such as me/my-model")
    return name


def check_hub(name: str) -> None:
    """Refuse to push without a network or a token, before anything is written.

    Raises:
        UsageError: with the remedy.
    """
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise UsageError(
            f"--push {name}: HF_HUB_OFFLINE is set, so nothing can be uploaded. Unset it, or export with --to "
            f"FOLDER and upload it later: hf upload {name} FOLDER"
        )
    if get_token() is None:
        raise UsageError(f"--push {name}: there is no token of {constants.ENDPOINT}; {_LOGIN}")


def push_folder(folder: Path, name: str, *, public: bool, message: str) -> str:
    """Upload an exported folder to the model repository ``name``, which is made if it does not exist; return its URL.

    Args:
        folder: of ``export_run``.
        name: ``owner/name``, or a name below the account.
        public: of a new repository; one that exists stays as it is.
        message: of the commit.

    Raises:
        UsageError: the hub refused, or could not be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    hub = HfApi(library_name="posttrain")
    try:
        made = hub.create_repo(name, private=not public, exist_ok=True, repo_type="model")
        hub.upload_folder(repo_id=made.repo_id, folder_path=folder, repo_type="model", commit_message=message)
    except HfHubHTTPError as error:
        raise UsageError(f"--push {name}: {hub.endpoint} refused: {hide_secrets(first_line(error))} {_LOGIN}") from None
    except Exception as error:  # the errors of its HTTP library, which is another one in each version
        package = type(error).__module__.partition(".")[0]
        if not isinstance(error, OSError | ValueError) and package not in _HTTP:
            raise
        raise UsageError(
            f"--push {name}: {hub.endpoint} could not be reached: {hide_secrets(first_line(error))}. Export with --to "
            f"FOLDER and upload it later: hf upload {name} FOLDER"
        ) from None
    return str(made)


def push_run(
    root: Path, run: Path, name: str, *, weights: WeightsKind | None, merge: bool, public: bool
) -> tuple[str, Export]:
    """Export a run to a temporary folder and upload it; return the repository's URL and the export.

    Raises:
        UsageError, CheckpointError, StorageError: as ``export_run``, ``check_hub`` and ``push_folder`` do.
    """
    check_hub(check_repository(name))
    with TemporaryDirectory(prefix="posttrain-") as place:
        done = export_run(root, run, Path(place) / run.name, weights=weights, merge=merge)
        return push_folder(done.target, name, public=public, message=message_of(done, run.name)), done


def message_of(done: Export, run: str) -> str:
    """Return the message of a commit."""
    if done.step is None:
        return f"{run}: recipe and results"
    return f"{run} after step {done.step}"
