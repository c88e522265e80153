"""``posttrain runs export``: export a run as a folder, a GGUF file, or a hub repository."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from posttrain.errors import UsageError
from posttrain.runs.export import export_run
from posttrain.runs.paths import locate_run
from posttrain.terminal.console import open_console, say, show_bytes


def _check_places(arguments: argparse.Namespace) -> None:
    """Reject an export without destination, or upload options without an upload."""
    if arguments.to is None and arguments.push is None:
        raise UsageError("missing destination: give --to FOLDER, or --push REPOSITORY")
    if arguments.public and arguments.push is None:
        raise UsageError("--public needs an upload; give --push REPOSITORY, or remove it")


def run_export(arguments: argparse.Namespace) -> int:
    """Copy a run to a place outside."""
    root = arguments.runs_dir
    console = open_console()
    place = locate_run(root, arguments.name)
    name = arguments.push
    _check_places(arguments)
    if name is not None:
        from posttrain.runs.push import check_hub, check_repository, message_of, push_folder

        check_hub(check_repository(name))
    with ExitStack() as stack:
        target = arguments.to
        if target is None:
            target = Path(stack.enter_context(TemporaryDirectory(prefix="posttrain-"))) / place.path.name
        done = export_run(
            root, place.path, target, weights=arguments.weights, merge=arguments.merge, gguf=arguments.gguf
        )
        where = str(done.target)
        if name is not None:
            message = message_of(done, place.path.name)
            where = push_folder(done.target, name, public=arguments.public, message=message)
    what = "no weights"
    if done.step is not None:
        what = f"the weights after step {done.step}"
    say(console, f"{where}: {what}, {done.num_files} files, {show_bytes(done.num_bytes)}")
    for notice in done.warnings:
        say(console, f"note: {notice}", "yellow")
    return 0
