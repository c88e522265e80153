"""``posttrain activations``: what layers of a model compute over texts, as shards. Imports little at first."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.commands.options import naturals, new_place, nonnegative_float, positive
from posttrain.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from posttrain.engines.models import ModelSource
    from posttrain.interpret.activations.record import Recorder
    from posttrain.interpret.activations.shards import ActivationStore, Documents

# Reasons to drop rows; all else that is counted was left out of the texts.
ROW_REASONS = ("first_token", "outlier", "not_finite")

EPILOG = """\
layer L is what block number L gives (hidden_states[L] in transformers); layer 0 are the embeddings:
  posttrain activations runs/tiny-grpo --layer 2 --task stories --out activations/stories
  posttrain activations Qwen/Qwen3-0.6B --layer 14 --text corpus.jsonl --context-tokens 1024
  posttrain activations runs/tiny-grpo --layer 2 --rollouts runs/tiny-grpo
two models over the same tokens, for what training changed:
  posttrain activations runs/tiny-sft --paired runs/tiny-grpo --layer 2 --task stories
the same command goes on where it was interrupted; .pt files of others are written and read with:
  posttrain activations activations/stories --export-pt stories-pt
  posttrain activations stories-pt --import-pt resid.2 --out activations/stories-again
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which model, what of it, over which texts, and where to."""
    parser.epilog = EPILOG
    parser.usage = "posttrain activations MODEL_OR_RUN --layer N [options] [--task.key value ...]"
    parser.add_argument(
        "model",
        metavar="MODEL_OR_RUN",
        help="tiny, a model directory, a run, one of its checkpoints, or a hub name (a folder, with .pt files)",
    )
    what = parser.add_argument_group("what is recorded")
    what.add_argument("--layer", type=naturals, action="extend", metavar="N", help="layers, such as 20 or 10,20")
    what.add_argument("--paired", metavar="OTHER", help="a second model over the same tokens: base, then post")
    what.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of what is stored (default: bf16)")
    over = parser.add_argument_group("over which texts (default: the prompts of the run's task)")
    over.add_argument("--task", metavar="NAME", help="the prompts of a task")
    over.add_argument("--text", metavar="FILE", help="plain text, or .jsonl with texts under `text`")
    over.add_argument("--rollouts", metavar="RUN", help="what a run has sampled: prompts with their completions")
    over.add_argument("--template", help="prompt template (default: the run's, else r1_zero)")
    over.add_argument("--context-tokens", type=positive, metavar="N", help="longest document (default: 8192 at most)")
    over.add_argument("--max-rows", type=positive, metavar="N", help="tokens to record at most (default: all)")
    over.add_argument(
        "--outliers",
        type=nonnegative_float,
        default=10.0,
        metavar="X",
        help="drop rows whose norm is above X times the median; 0 keeps them (default: 10)",
    )
    how = parser.add_argument_group("how")
    how.add_argument("--batch", type=positive, metavar="N", help="documents at a time (default: by their length)")
    how.add_argument("--device", choices=("auto", "cpu", "cuda"), help="default: the run's, or auto")
    how.add_argument("--weights", choices=("float32", "bfloat16"), help="of the model (default: the run's, or float32)")
    how.add_argument(
        "--out", type=new_place, metavar="FOLDER", help="where the shards go (default: activations/<model>)"
    )
    how.add_argument("--yes", action="store_true", help="record however much it is")
    how.add_argument("--quiet", action="store_true", help="print nothing but errors")
    files = parser.add_argument_group(".pt files of others, one tensor [rows, width] each")
    files.add_argument("--export-pt", metavar="FOLDER", help="write the recorded folder MODEL_OR_RUN as .pt shards")
    files.add_argument("--import-pt", metavar="SITE", help="read the .pt files in the folder MODEL_OR_RUN as this site")


def run_activations(arguments: argparse.Namespace) -> int:
    """Record, or write and read ``.pt`` files."""
    from posttrain.commands.console import open_console
    from posttrain.interpret.activations.record import Recorder
    from posttrain.interpret.activations.sites import check_layers
    from posttrain.runs.models import find_source

    console = open_console()
    if arguments.export_pt is not None or arguments.import_pt is not None:
        return _convert(arguments, console)
    if not arguments.layer:
        raise UsageError("--layer is needed: the layers to record, such as --layer 2 or --layer 10,20")
    sites = [f"resid.{layer}" for layer in arguments.layer]
    sources = [find_source(name, arguments.runs_dir) for name in (arguments.model, arguments.paired) if name]
    for source in sources:
        check_layers(source.path, sites)  # before texts are read
    sections = [source.section(arguments.weights, arguments.device) for source in sources]
    documents = _read_documents(arguments, sources[0])
    recorder = Recorder(
        sections,
        documents,
        sites,
        dtype=arguments.dtype,
        outliers=arguments.outliers,
        batch=arguments.batch,
    )
    out = Path(arguments.out) if arguments.out else _default_out(sources, documents)
    size = recorder.check_room(out, allow_large=arguments.yes, fewer="--max-rows")
    if not arguments.quiet:
        console.print(size)
    store = _record(recorder, out, console, arguments.quiet)
    if not arguments.quiet:
        _print_summary(console, store)
    return 0


def _read_documents(arguments: argparse.Namespace, source: ModelSource) -> Documents:
    """The texts that the command line names: of a task, a file, or a run.

    Raises:
        UsageError: more than one of them, or one that cannot be read.
    """
    from posttrain.commands.options import chosen_words
    from posttrain.engines.models import complete_template
    from posttrain.interpret.activations.documents import MAX_CONTEXT_TOKENS, read_documents
    from posttrain.interpret.activations.sites import read_config
    from posttrain.models.load import load_tokenizer
    from posttrain.models.stated_sizes import context_length
    from posttrain.runs.directory import find_run
    from posttrain.tasks.base import choose_task

    named = [name for name in ("task", "text", "rollouts") if getattr(arguments, name) is not None]
    if len(named) > 1:
        raise UsageError(f"--{named[0]} and --{named[1]}: give one of --task, --text and --rollouts")
    words = chosen_words(arguments)
    has_task = named in ([], ["task"])
    if not has_task and words:
        raise UsageError(f"--{named[0]}: options of a task or template have no place here")
    return read_documents(
        load_tokenizer(source.path),
        task=choose_task(words.get("task"), source.name, source.recipe) if has_task else None,
        template=complete_template(words.get("template"), source) or source.template,
        text=arguments.text,
        rollouts=find_run(arguments.runs_dir, arguments.rollouts) if arguments.rollouts is not None else None,
        context_tokens=arguments.context_tokens or min(MAX_CONTEXT_TOKENS, context_length(read_config(source.path))),
        max_tokens=arguments.max_rows,
    )


def _default_out(sources: list[ModelSource], documents: Documents) -> Path:
    """``activations/tiny-grpo-stories``: the models, and the task, file or run."""
    texts_of = documents.data.get("task") or documents.data.get("file") or documents.data.get("run")
    label = "-".join([*(source.label for source in sources), str(texts_of)])
    return Path("activations") / re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.")


def _record(recorder: Recorder, out: Path, console: Console, quiet: bool) -> ActivationStore:
    from rich.progress import Progress

    from posttrain.untrusted import guard_output

    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        guard_output()
        bar = progress.add_task("recording", total=None)
        return recorder.write(out, lambda done, total: progress.update(bar, completed=done, total=total))


def _print_summary(console: Console, store: ActivationStore) -> None:
    from rich.table import Table

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


def _convert(arguments: argparse.Namespace, console: Console) -> int:
    from posttrain.interpret.activations.pt_shards import export_pt, import_pt
    from posttrain.interpret.activations.shards import ActivationStore

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
