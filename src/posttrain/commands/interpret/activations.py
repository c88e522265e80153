"""``posttrain activations``: what layers of a model compute over texts, as shards on the disk."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.prompt import Confirm
from rich.table import Table

from posttrain.commands.console import open_console
from posttrain.commands.options.words import chosen_words
from posttrain.engines.models import ModelSource, complete_template
from posttrain.errors import UsageError
from posttrain.interpret.activations.documents import Documents, recorded_rollouts, task_prompts, texts
from posttrain.interpret.activations.loading import check_layers, read_config, tokenizer_hash
from posttrain.interpret.activations.pt_shards import export_pt, import_pt
from posttrain.interpret.activations.record import Recorder
from posttrain.interpret.activations.shards import ActivationStore
from posttrain.models.load import context_length, load_tokenizer
from posttrain.render.template import build_template
from posttrain.runs.directory import find_run
from posttrain.runs.models import find_source
from posttrain.tasks.base import build_task, choose_task
from posttrain.untrusted import guard_output

MAX_CONTEXT_TOKENS = 8192
# A recording above this is begun only with --yes, or after asking.
LARGE_BYTES = 1 << 30
# What rows are dropped for; all else that is counted was left out of the texts.
ROW_REASONS = ("first_token", "outlier", "not_finite")


def run_activations(arguments: argparse.Namespace) -> int:
    """Record, or write and read ``.pt`` files."""
    console = open_console()
    if arguments.export_pt is not None or arguments.import_pt is not None:
        return _convert(arguments, console)
    if not arguments.layer:
        raise UsageError("--layer is needed: the layers to record, such as --layer 2 or --layer 10,20")
    sites = [f"{place}.{layer}" for layer in arguments.layer for place in arguments.site or ["resid"]]
    sources = [find_source(name, arguments.runs_dir) for name in (arguments.model, arguments.paired) if name]
    for source in sources:
        check_layers(source.path, sites)  # before texts are read
    sections = [source.section(arguments.weights, arguments.device) for source in sources]
    documents = read_documents(arguments, sources[0])
    recorder = Recorder(
        sections,
        documents.ids,
        sites,
        dtype=arguments.dtype,
        outliers=arguments.outliers,
        batch=arguments.batch,
        data=documents.data,
        dropped=documents.dropped,
        prompt_lengths=documents.prompt_lengths,
    )
    out = Path(arguments.out) if arguments.out else _default_out(sources, documents)
    announce = console.print if not arguments.quiet else lambda *_: None
    _announce_size(recorder, out, arguments.yes, announce)
    store = _record(recorder, out, console, arguments.quiet)
    if not arguments.quiet:
        _print_summary(console, store)
    return 0


def read_documents(arguments: argparse.Namespace, source: ModelSource) -> Documents:
    """The texts that the command line names: of a task, a file, or a run.

    Raises:
        UsageError: more than one of them, or one that cannot be read.
    """
    given = [name for name in ("task", "text", "rollouts") if getattr(arguments, name) is not None]
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]}: give one of --task, --text and --rollouts")
    words = chosen_words(arguments)
    if given and given[0] != "task" and words:
        raise UsageError(f"--{given[0]}: options of a task or template have no place here")
    tokenizer = load_tokenizer(source.path)
    limits: dict[str, Any] = {
        "context_tokens": arguments.context_tokens or min(MAX_CONTEXT_TOKENS, context_length(read_config(source.path))),
        "max_tokens": arguments.max_rows,
    }
    if arguments.text is not None:
        return texts(arguments.text, tokenizer, **limits)
    if arguments.rollouts is not None:
        run = find_run(arguments.runs_dir, arguments.rollouts)
        if tokenizer_hash(load_tokenizer(str(run))) != tokenizer_hash(tokenizer):
            raise UsageError(f"--rollouts {arguments.rollouts}: its tokenizer is another than that of {source.name}")
        return recorded_rollouts(run / "rollouts.db", about=run.name, **limits)
    task = build_task(choose_task(words.get("task"), source.name, source.recipe), "--task")
    template = build_template(complete_template(words.get("template"), source) or source.template, "--template")
    return task_prompts(task, tokenizer, template, **limits)


def _default_out(sources: list[ModelSource], documents: Documents) -> Path:
    """``activations/tiny-grpo-stories``: the models, and the task, file or run."""
    texts_of = documents.data.get("task") or documents.data.get("file") or documents.data.get("run")
    label = "-".join([*(source.label for source in sources), str(texts_of)])
    return Path("activations") / re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.")


def _announce_size(recorder: Recorder, out: Path, yes: bool, announce: Callable[[str], Any]) -> None:
    """Say what will be written; refuse what does not fit, and ask before what is large.

    Raises:
        UsageError: the disk has not that much, or nobody can be asked and ``--yes`` was not given.
    """
    size, index = recorder.size, recorder.index
    announce(
        f"{size.rows:,} tokens x {size.row_bytes:,} bytes ({', '.join(index.columns)}, {index.dtype}) = "
        f"{show_bytes(size.num_bytes)} at most, in {out}"
    )
    place = out
    while not place.exists():
        place = place.parent
    there = sum(file.stat().st_size for file in out.glob("*.safetensors")) if out.is_dir() else 0
    free = shutil.disk_usage(place).free
    if size.num_bytes - there > free:
        raise UsageError(f"{out}: {show_bytes(free)} are free, which is too little; record fewer with --max-rows")
    if size.num_bytes - there <= LARGE_BYTES or yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"{show_bytes(size.num_bytes)} are a lot: add --yes to write them, or --max-rows for fewer")
    if not Confirm.ask("Go on?", default=False):
        raise UsageError("nothing was written")


def _record(recorder: Recorder, out: Path, console: Console, quiet: bool) -> ActivationStore:
    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        guard_output()
        bar = progress.add_task("recording", total=None)
        return recorder.write(out, lambda done, total: progress.update(bar, completed=done, total=total))


def _print_summary(console: Console, store: ActivationStore) -> None:
    index = store.index
    console.print(f"{index.rows:,} rows of {index.documents:,} documents in {len(index.shards)} shards: {store.folder}")
    everything = index.rows + sum(count for reason, count in index.dropped.items() if reason in ROW_REASONS)
    for reason, count in index.dropped.items():
        share = f" ({count / everything:.2%} of the rows)" if reason in ROW_REASONS else ""
        console.print(f"left out: {count:,} {reason.replace('_', ' ')}{share}")
    table = Table("site", "model", "width", "norm: median", "mean", "rms", box=None)
    for site in index.sites:
        for source in index.sources:
            norms = index.norms[f"{site}@{source.name}"]
            numbers = (f"{value:.4g}" for value in (norms.median, norms.mean, norms.rms))
            label = source.model if source.name == "model" else f"{source.name}: {source.model}"
            table.add_row(site, label, str(index.widths[site]), *numbers)
    console.print(table)


def show_bytes(count: float) -> str:
    """``10.2 MB``: with the prefix that leaves at most three digits before the point."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def _convert(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.export_pt is not None and arguments.import_pt is not None:
        raise UsageError("--export-pt and --import-pt: give one of them")
    if arguments.export_pt is not None:
        written = export_pt(ActivationStore.open(arguments.model), arguments.export_pt)
        message = f"{len(written)} files in {arguments.export_pt}"
    else:
        if not arguments.out:
            raise UsageError("--import-pt: give --out, the folder that the shards are written to")
        store = import_pt(arguments.model, arguments.import_pt, arguments.out)
        message = f"{store.num_rows:,} rows of {', '.join(store.sites)} in {store.folder}"
    if not arguments.quiet:
        console.print(message)
    return 0
