"""``posttrain activations``: record layer activations over texts as shards. Heavy imports are deferred."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.commands.options import (
    TEMPLATE,
    CommandOptions,
    dtype_of,
    naturals,
    new_place,
    nonnegative_float,
    option,
    positive,
)
from posttrain.errors import UsageError
from posttrain.folders import folder_name
from posttrain.other_names import short_dtype

if TYPE_CHECKING:
    from posttrain.interpret.activations.shards import ActivationStore, Documents
    from posttrain.sampling.models import ModelSource

EPILOG = """\
layer L is what block number L gives (hidden_states[L] in transformers); the same command continues an interrupted one:
  posttrain activations runs/tiny-grpo --layer 2 --task stories --out activations/stories
  posttrain activations Qwen/Qwen3-0.6B --layer 14 --text corpus.jsonl --context-tokens 1024
  posttrain activations runs/tiny-sft --paired runs/tiny-grpo --layer 2 --rollouts runs/tiny-grpo
  posttrain activations activations/stories --export-pt stories-pt
  posttrain activations stories-pt --import-pt resid.2 --out activations/stories-again
"""


OPTIONS = CommandOptions(
    option(
        "model", metavar="MODEL_OR_RUN",
        help="tiny, a model directory, a run, a checkpoint, or a hub name (for .pt files, a folder)",
    ),
    usage="posttrain activations MODEL_OR_RUN --layer N [options] [--task.key value ...]",
    epilog=EPILOG,
    groups={
        "what is recorded": (
            option("--layer", type=naturals, action="extend", metavar="N", help="layers, such as 20 or 10,20"),
            option("--paired", metavar="OTHER", help="a second model recorded on identical tokens: base, then post"),
            option(
                "--dtype", type=short_dtype, choices=("bf16", "fp32"), default="bf16",
                help="storage dtype (default: bf16)",
            ),
        ),
        "texts (default: prompts from the run's task)": (
            option("--task", metavar="NAME", help="prompts from a task"),
            option("--text", metavar="FILE", help="plain text, or .jsonl with texts under `text`"),
            option("--rollouts", metavar="RUN", help="a run's sampled prompts and completions"),
            TEMPLATE,
            option("--context-tokens", type=positive, metavar="N", help="longest document (default: up to 8192)"),
            option("--limit", type=positive, metavar="N", help="maximum rows to read (default: all)"),
            option("--max-rows", type=positive, metavar="N", help="maximum tokens to record (default: all)"),
            option(
                "--outliers", type=nonnegative_float, default=10.0, metavar="X",
                help="drop rows whose norm is above X times the median; 0 keeps them (default: 10)",
            ),
        ),
        "how": (
            option("--batch", type=positive, metavar="N", help="documents per batch (default: chosen by length)"),
            option("--device", choices=("auto", "cpu", "cuda"), help="default: the run's, or auto"),
            dtype_of("of the model", "--weights"),
            option(
                "--out", type=new_place, metavar="FOLDER", help="output folder (default: activations/<model>)"
            ),
            option("--yes", action="store_true", help="do not ask before large recordings"),
            option("--quiet", action="store_true", help="print only errors"),
        ),
        "external .pt files, each with a tensor [rows, width]": (
            option(
                "--export-pt", type=new_place, metavar="FOLDER",
                help="convert a recorded folder to .pt shards",
            ),
            option("--import-pt", metavar="SITE", help="import a folder of .pt files as this site"),
        ),
    },
)  # fmt: skip


def run_activations(arguments: argparse.Namespace) -> int:
    """Record, or write and read ``.pt`` files."""
    from posttrain.interpret.activations.record import record_activations
    from posttrain.interpret.activations.sites import check_layers
    from posttrain.runs.models import find_source
    from posttrain.terminal.console import open_console

    console = open_console()

    def tell(text: str) -> None:
        if not arguments.quiet:
            console.print(text)

    if arguments.export_pt is not None or arguments.import_pt is not None:
        tell(_convert(arguments))
        return 0
    if not arguments.layer:
        raise UsageError("--layer: missing. Give layers to record, such as --layer 2 or --layer 10,20")
    sites = [f"resid.{layer}" for layer in arguments.layer]
    sources = [find_source(name, arguments.runs_dir) for name in (arguments.model, arguments.paired) if name]
    for source in sources:
        check_layers(source.path, sites)  # before texts are read
    documents = _read_documents(arguments, sources[0])
    options: dict[str, Any] = {key: getattr(arguments, key) for key in ("dtype", "outliers", "batch")}
    store = record_activations(
        [source.section(arguments.weights, arguments.device) for source in sources],
        documents,
        sites,
        arguments.out or _default_out(sources, documents),
        allow_large=arguments.yes,
        fewer="--max-rows",
        ready=tell,
        observe=lambda done, total: tell(f"{done} of {total} shards are recorded"),
        **options,
    )
    for line in _summarize(store):
        tell(line)
    return 0


def _read_documents(arguments: argparse.Namespace, source: ModelSource) -> Documents:
    """Load the requested texts from a task, a file or a run."""
    from posttrain.commands.options import chosen_components
    from posttrain.data.base import choose_task
    from posttrain.interpret.activations.record import MAX_CONTEXT_TOKENS, read_documents
    from posttrain.interpret.activations.sites import read_model_config
    from posttrain.models.config import context_length
    from posttrain.models.load import load_tokenizer
    from posttrain.runs.directory import find_run
    from posttrain.sampling.models import complete_template

    named = [name for name in ("task", "text", "rollouts") if getattr(arguments, name) is not None]
    if len(named) > 1:
        raise UsageError(f"--{named[0]} and --{named[1]}: give only one among --task, --text and --rollouts")
    components = chosen_components(arguments)
    has_task = named in ([], ["task"])
    if not has_task and components:
        raise UsageError(f"--{named[0]}: task and template options have no effect here. Remove them")
    task = None
    if has_task:
        task = choose_task(components.get("task"), source.name, source.task)
    run = None
    if arguments.rollouts is not None:
        run = find_run(arguments.runs_dir, arguments.rollouts)
    context_tokens = arguments.context_tokens
    if not context_tokens:
        context_tokens = min(MAX_CONTEXT_TOKENS, context_length(read_model_config(source.path)))
    return read_documents(
        load_tokenizer(source.path),
        task=task,
        template=complete_template(components.get("template"), source) or source.template,
        text=arguments.text,
        rollouts=run,
        context_tokens=context_tokens,
        max_tokens=arguments.max_rows,
        limit=arguments.limit,
    )


def _default_out(sources: list[ModelSource], documents: Documents) -> Path:
    """Choose a folder name from models and text source, such as ``activations/tiny-grpo-stories``."""
    texts_of = documents.data.get("task") or documents.data.get("file") or documents.data.get("run")
    label = "-".join([*(source.label for source in sources), str(texts_of)])
    return Path("activations") / folder_name(label)


def _summarize(store: ActivationStore) -> list[str]:
    index = store.index
    lines = [f"{index.rows:,} rows of {index.documents:,} documents in {len(index.shards)} shards: {store.folder}"]
    lines += [f"dropped: {count:,} {reason.replace('_', ' ')}" for reason, count in index.dropped.items()]
    widths = ", ".join(f"{site} (width {width})" for site, width in index.widths.items())
    return [*lines, *(f"{source.name}: {source.model}, {widths}" for source in index.sources)]


def _convert(arguments: argparse.Namespace) -> str:
    from posttrain.interpret.activations.shards import ActivationStore, export_pt, import_pt

    if arguments.export_pt is not None and arguments.import_pt is not None:
        raise UsageError("--export-pt and --import-pt: give only one")
    if arguments.export_pt is not None:
        written = export_pt(ActivationStore(arguments.model), arguments.export_pt)
        return f"{len(written)} files in {arguments.export_pt}"
    if not arguments.out:
        raise UsageError("--import-pt: give --out, an output folder for shards")
    store = import_pt(arguments.model, arguments.import_pt, arguments.out)
    return f"{store.num_rows:,} rows of {', '.join(store.sites)} in {store.folder}"
