"""Record layer activations from one model, or from two on the same tokens, and collect documents to record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from posttrain.activity import phase
from posttrain.data.base import build_task
from posttrain.data.reading import SUFFIXES, read_file
from posttrain.data.render import encode_plain, encode_prompt
from posttrain.data.render.encoding import markers_of
from posttrain.data.render.template import build_template
from posttrain.data.rendered import take_rendered
from posttrain.errors import DataError, UsageError
from posttrain.interpret.activations.shards import (
    ActivationStore,
    Documents,
    RecordedModel,
    StoreIndex,
    StoreWriter,
    choose_source_names,
    describe_rows,
)
from posttrain.interpret.activations.sites import check_layers, device_of, read_rows, tokenizer_hash, weights_hash
from posttrain.models.config import context_length
from posttrain.models.forward.micro import by_length, split_padded
from posttrain.models.load import LoadedModel, load_model, load_tokenizer
from posttrain.recipes.sections import EMBEDDED_MODELS, Component, ModelSection
from posttrain.store.rollouts import RolloutStore
from posttrain.types import Model, Tokenizer

SHARD_BYTES = 1 << 28
MIN_SHARD_ROWS = 1024
MAX_SHARD_ROWS = 1 << 16
LARGE_BYTES = 1 << 30  # larger recordings need confirmation
# Tokens per batch including padding, unless a number of documents is given.
TOKENS_PER_BATCH = {"cuda": 32768, "cpu": 4096}
OUTLIER_FACTOR = 10.0
MAX_CONTEXT_TOKENS = 8192


def record_activations(
    models: str | ModelSection | Sequence[str | ModelSection],
    documents: Documents | Sequence[Sequence[int]],
    sites: Sequence[str],
    folder: str | Path,
    *,
    dtype: Literal["bf16", "fp32"] = "bf16",
    outliers: float = OUTLIER_FACTOR,
    batch: int | None = None,
    rows_per_shard: int | None = None,
    allow_large: bool = True,
    fewer: str = "the number of documents",
    ready: Callable[[str], object] = lambda size: None,
    observe: Callable[[int, int], object] = lambda done, total: None,
) -> ActivationStore:
    """Record activations on documents (token ids) into a folder, and open it; resumes an interrupted recording.

    Args:
        models: one, or two (``base`` and ``post``) reading the same tokens; names or recipe sections.
        dtype: storage dtype. Norms are computed before rounding.
        outliers: drop rows whose norm, in any site or source, exceeds this multiple of the median in the first shard;
            0 keeps all.
        batch: documents per batch; None: limited by tokens.
        rows_per_shard: None: about 256 MiB.
        allow_large, fewer: allow more than 1 GiB; option suggested in the error message to reduce rows.
        ready: called with a size description after all checks, before writing.
        observe: called with (finished shards, total shards).

    Raises:
        UsageError: incompatible documents, models or sites, too many rows, or a folder containing something else.
    """
    sections = _sections_of(models)
    texts = documents
    if not isinstance(texts, Documents):
        texts = Documents(list(texts))
    if len(sections) not in (1, 2) or not texts.ids or not all(texts.ids):
        raise UsageError("a recording needs 1 or 2 models, and nonempty documents")
    for section in sections:
        check_layers(section.name, sites)
    loaded = [load_model(section, seed=0) for section in sections]
    index = _describe(sections, loaded, texts, list(dict.fromkeys(sites)), dtype)
    device = device_of(loaded[0].model).type
    rows = rows_per_shard or min(MAX_SHARD_ROWS, max(MIN_SHARD_ROWS, SHARD_BYTES // index.row_bytes))
    index.settings = {"outliers": outliers, "batch": batch, "device": device, "rows_per_shard": rows}
    ready(_check_size(Path(folder), texts.num_tokens, index.row_bytes, allow_large, fewer))
    readers = {source.name: each.model for source, each in zip(index.sources, loaded, strict=True)}
    start_id = loaded[0].tokenizer.bos_token_id
    writer = StoreWriter(folder, index, texts)
    plan = plan_shards([len(ids) for ids in texts.ids], rows)
    for number in range(len(writer.index.shards), len(plan)):
        observe(number, len(plan))
        with phase(f"recording shard {number + 1} of {len(plan)}"):
            tensors = _compute(readers, texts.ids, plan[number], list(index.widths), batch, TOKENS_PER_BATCH[device])
        _add_rows(writer, tensors, start_id, outliers)
    observe(len(plan), len(plan))
    return writer.finish()


def _sections_of(models: str | ModelSection | Sequence[str | ModelSection]) -> list[ModelSection]:
    if isinstance(models, str | ModelSection):
        models = [models]
    sections = []
    for model in models:
        if isinstance(model, str):
            sections.append(ModelSection(name=model))
        else:
            sections.append(model)
    return sections


def _add_rows(writer: StoreWriter, tensors: Mapping[str, Tensor], start_id: int | None, outliers: float) -> None:
    """Write a shard, dropping outliers; the first shard sets the norm limits."""
    norms = {}
    for name in writer.index.columns:
        norms[name] = torch.linalg.vector_norm(tensors[name], dim=1, dtype=torch.float32)
    first = tensors["position"] == 0
    if start_id is not None:
        first = first & (tensors["tokens"] != start_id)
    if not writer.index.shards and outliers:
        limits = {}
        for name, values in norms.items():
            finite = values[values.isfinite() & ~first]
            if len(finite):
                limits[name] = float(finite.median()) * outliers
        writer.set_limits(limits)
    kept, dropped = keep_rows(norms, first, writer.index.limits)
    writer.add({name: x[kept] for name, x in tensors.items()}, dropped)


def _describe(
    sections: Sequence[ModelSection],
    loaded: Sequence[LoadedModel],
    texts: Documents,
    sites: list[str],
    dtype: Literal["bf16", "fp32"],
) -> StoreIndex:
    """Check compatibility between models and texts, and build the recording index."""
    tokenizers = [tokenizer_hash(each.tokenizer) for each in loaded]
    both = " and ".join(section.name for section in sections)
    if len(set(tokenizers)) > 1:
        raise UsageError(
            f"{both} have different tokenizers, so token ids do not correspond; pair a model with its own "
            "fine-tuned version"
        )
    longest = max(map(len, texts.ids))
    context = min(context_length(each.model.config) for each in loaded)
    if longest > context:
        raise UsageError(f"a document has {longest} tokens, but the model only {context}; truncate it first")
    widths = []
    for each in loaded:
        rows = read_rows(each.model, sites, [[0, 1]])
        widths.append({site: x.shape[1] for site, x in rows.items()})
    if widths[0] != widths[-1]:
        raise UsageError(f"{both} have different widths")
    sources = []
    for name, section, each in zip(choose_source_names(len(loaded)), sections, loaded, strict=True):
        model = each.source
        if section.name in EMBEDDED_MODELS:
            model = section.name
        info = {"name": name, "model": model, "weights_hash": weights_hash(section.name), "dtype": section.dtype}
        sources.append(RecordedModel.model_validate(info))
    data = dict(texts.data)
    dropped = dict(+texts.dropped)
    return StoreIndex(
        widths=widths[0], sources=sources, dtype=dtype, tokenizer=tokenizers[0], data=data, dropped=dropped
    )


def _check_size(folder: Path, num_tokens: int, row_bytes: int, allow_large: bool, fewer: str) -> str:
    """Refuse large recordings unless allowed; returns a size description."""
    num_bytes = num_tokens * row_bytes
    there = 0
    if folder.is_dir():
        there = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    size = f"{num_tokens:,} tokens x {row_bytes:,} bytes = {num_bytes / 1e6:,.1f} MB at most"
    if num_bytes - there > LARGE_BYTES and not allow_large:
        raise UsageError(f"{size}: add --yes to record anyway, or lower {fewer}")
    return f"{size}, in {folder}"


def _compute(
    readers: Mapping[str, Model],
    documents: Sequence[Sequence[int]],
    numbers: range,
    sites: Sequence[str],
    batch: int | None,
    max_tokens: int,
) -> dict[str, Tensor]:
    """Compute all rows for a shard's documents in order, formatted for ``StoreWriter.add``."""
    lengths = [len(documents[number]) for number in numbers]
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    tensors = describe_rows(documents, numbers)
    for source, model in readers.items():
        for chosen in plan_batches(lengths, batch, max_tokens):
            where = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in chosen])
            texts = [documents[numbers[i]] for i in chosen]
            for site, values in read_rows(model, sites, texts).items():
                column = f"{site}@{source}"
                if column not in tensors:
                    tensors[column] = values.new_empty((sum(lengths), values.shape[1]))
                tensors[column][where] = values
    return tensors


def keep_rows(norms: Mapping[str, Tensor], first: Tensor, limits: Mapping[str, float]) -> tuple[Tensor, dict[str, int]]:
    """Select rows to keep, and count dropped rows by reason; if several apply, only the first counts.

    ``norms``, ``limits``: by ``site@source``. ``first`` bool [n]: tokens starting a document.
    """
    broken = torch.zeros_like(first)
    outlier = torch.zeros_like(first)
    for name, values in norms.items():
        broken |= ~values.isfinite()
        outlier |= values > limits.get(name, float("inf"))
    reasons = {"first_token": first, "not_finite": broken & ~first, "outlier": outlier & ~broken & ~first}
    counts = {}
    for reason, rows in reasons.items():
        count = int(rows.sum())
        if count:
            counts[reason] = count
    return ~(first | broken | outlier), counts


def plan_shards(lengths: Sequence[int], rows: int) -> list[range]:
    """Group consecutive documents until each group reaches ``rows`` tokens (the last can be smaller)."""
    shards: list[range] = []
    start = 0
    total = 0
    for number, length in enumerate(lengths):
        total += length
        if total >= rows:
            shards.append(range(start, number + 1))
            start = number + 1
            total = 0
    if start < len(lengths):
        shards.append(range(start, len(lengths)))
    return shards


def plan_batches(lengths: Sequence[int], batch: int | None, tokens: int) -> list[list[int]]:
    """Group documents by similar length: ``batch`` per group, else up to ``tokens`` with padding (or one)."""
    budget = float("inf")
    if batch is None:
        budget = tokens
    return split_padded(by_length(lengths), lengths, budget, batch)


# Documents to record, as token ids.


def read_documents(
    tokenizer: Tokenizer,
    *,
    task: Component | None = None,
    template: Component | None = None,
    text: str | None = None,
    rollouts: Path | None = None,
    context_tokens: int,
    max_tokens: int | None = None,
    limit: int | None = None,
    where: str = "--",
) -> Documents:
    """Read texts from a file, rollouts from a run, or prompts from a task.

    ``text``: plain text, or rows with a ``text`` field (``.jsonl`` and similar), split into chunks of
    ``context_tokens``, each starting with the tokenizer's leading special tokens. ``rollouts``: run folder; uses
    recorded prompt and completion ids. Longer prompts and rollouts are truncated. ``max_tokens``: total over all
    documents; ``limit``: maximum rows. ``where``: prefix for option names in messages (``--``, ``activations.``).

    Raises:
        UsageError, DataError: unreadable, no tokens, or a run with a different tokenizer.
    """
    limited: dict[str, object] = {}
    if limit is not None:
        limited["limit"] = limit
    if text is not None:
        data = {"source": "text", "file": Path(text).name, **limited}
        pieces = _pieces(Path(text), tokenizer, context_tokens, limit)
        return collect_documents(pieces, data, context_tokens, max_tokens)
    if rollouts is not None:
        if tokenizer_hash(load_tokenizer(str(rollouts))) != tokenizer_hash(tokenizer):
            raise UsageError(f"{where}rollouts: {rollouts}: tokenizer differs from the model's")
        return read_rollouts(rollouts / "rollouts.db", rollouts.name, context_tokens, max_tokens, limit)
    assert task is not None, "callers choose one"
    assert template is not None, "callers choose one"
    form = build_template(template, f"{where}template")
    built_task = take_rendered(build_task(task, f"{where}task"), form, tokenizer, f"{where}task")
    data = {"source": "task", "task": built_task.name, "split": built_task.split, "template": form.name}
    examples = islice(built_task.examples, limit)
    prompts = (encode_prompt(tokenizer, form, example.messages, example.variables) for example in examples)
    return collect_documents(((ids, len(ids)) for ids in prompts), {**data, **limited}, context_tokens, max_tokens)


def read_rollouts(
    path: Path, run: str, context_tokens: int, max_tokens: int | None = None, limit: int | None = None
) -> Documents:
    """Read up to ``limit`` training rollouts from a run; ``DataError``: none recorded."""
    rollouts = RolloutStore(path, read_only=True).training()
    if not rollouts:
        raise DataError(
            path, "no rollouts to read, because this run never sampled; record its task instead, with --task"
        )
    sequences = ((list(r.token_ids), len(r.token_ids) - r.num_tokens) for r in islice(rollouts, limit))
    data: dict[str, object] = {"source": "rollouts", "run": run}
    if limit is not None:
        data["limit"] = limit
    return collect_documents(sequences, data, context_tokens, max_tokens)


def _pieces(
    path: Path, tokenizer: Tokenizer, context_tokens: int, limit: int | None
) -> Iterator[tuple[list[int], int]]:
    leading = list(markers_of(tokenizer).leading)
    size = context_tokens - len(leading)
    if size < 1:
        raise UsageError(f"--context-tokens {context_tokens}: a document needs at least {len(leading) + 1} tokens here")
    if path.name.endswith(SUFFIXES):
        texts: Iterable[str] = (row.text("text") for row in read_file(path))
    elif not path.is_file():
        raise DataError(path, "no such file")
    else:
        try:
            texts = [path.read_text(encoding="utf-8")]
        except UnicodeDecodeError as error:
            raise DataError(path, f"not UTF-8 text ({error.reason} at byte {error.start})") from error
    for text in islice(texts, limit):
        ids = encode_plain(tokenizer, text)  # text never produces special tokens
        for start in range(0, len(ids), size):
            yield leading + ids[start : start + size], 0


def collect_documents(
    sequences: Iterable[tuple[list[int], int]], data: Mapping[str, object], context_tokens: int, max_tokens: int | None
) -> Documents:
    """Collect documents from (ids, prompt length) within both limits; ``UsageError``: no tokens."""
    documents = Documents(data={**data, "context_tokens": context_tokens, "max_rows": max_tokens})
    room: float = float("inf")
    if max_tokens is not None:
        room = max_tokens
    for ids, prompt_length in sequences:
        if room == 0:
            break
        documents.dropped["beyond_context_tokens"] += max(0, len(ids) - context_tokens)
        kept = ids[: int(min(room, context_tokens))]
        if not kept:
            documents.dropped["empty_documents"] += 1
            continue
        documents.ids.append(kept)
        documents.prompt_lengths.append(min(prompt_length, len(kept)))
        room -= len(kept)
    if not documents.ids:
        where = ", ".join(str(value) for value in data.values() if value)
        raise UsageError(f"nothing to record: {where} has no tokens")
    return documents
