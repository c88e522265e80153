"""Recording of what layers of one model, or of two over the same tokens, compute, and the documents that they read."""

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
LARGE_BYTES = 1 << 30  # a larger recording has to be allowed
# Tokens of a batch, padding included, where no number of documents is given.
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
    """Record activations of documents (token ids) into a folder and open it; an interrupted recording continues.

    Args:
        models: one, or two over the same tokens (``base`` and ``post``); names or sections of a recipe.
        dtype: of what is stored. Norms are taken before rounding.
        outliers: drop rows with a norm above this many times the median of the first shard, in any site and source; 0
            keeps them.
        batch: documents at a time; None: as many as fit into a number of tokens.
        rows_per_shard: None: about 256 MiB.
        allow_large, fewer: allow more than 1 GiB, or name the option for fewer rows in the message.
        ready: gets the size as text when everything is checked and nothing written.
        observe: gets (shards done, shards in all).

    Raises:
        UsageError: documents, models and sites that do not fit, too many rows, or a folder with something else.
    """
    sections = _sections_of(models)
    texts = documents
    if not isinstance(texts, Documents):
        texts = Documents(list(texts))
    if len(sections) not in (1, 2) or not texts.ids or not all(texts.ids):
        raise UsageError("a recording needs one model or two, and documents that are not empty")
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
    """Write the rows of a shard that stay; the first shard sets the norms above which rows are dropped."""
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
    """Check that the models fit the texts and one another; return the index of the recording."""
    tokenizers = [tokenizer_hash(each.tokenizer) for each in loaded]
    both = " and ".join(section.name for section in sections)
    if len(set(tokenizers)) > 1:
        raise UsageError(
            f"{both} have different tokenizers, so no token stands for the same in both; pair a model with one that "
            "was trained from it"
        )
    longest = max(map(len, texts.ids))
    context = min(context_length(each.model.config) for each in loaded)
    if longest > context:
        raise UsageError(f"a document of {longest} tokens does not fit into the model's {context}; cut it before")
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
    """Refuse what is large unless that is allowed; return the size as text."""
    num_bytes = num_tokens * row_bytes
    there = 0
    if folder.is_dir():
        there = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    size = f"{num_tokens:,} tokens x {row_bytes:,} bytes = {num_bytes / 1e6:,.1f} MB at most"
    if num_bytes - there > LARGE_BYTES and not allow_large:
        raise UsageError(f"{size}: add --yes to record them, or set {fewer} lower")
    return f"{size}, in {folder}"


def _compute(
    readers: Mapping[str, Model],
    documents: Sequence[Sequence[int]],
    numbers: range,
    sites: Sequence[str],
    batch: int | None,
    max_tokens: int,
) -> dict[str, Tensor]:
    """Return all rows of a shard's documents in their order, as tensors that ``StoreWriter.add`` takes."""
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
    """Return which rows stay, and how many go for each reason; a row that goes for two is counted under the first.

    ``norms`` of every row and ``limits`` by ``site@source``; ``first`` bool [n]: tokens at the start of a document.
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
    """Return consecutive documents, each group just large enough for ``rows`` tokens (the last may be smaller)."""
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
    """Return documents of like length together: ``batch`` at a time, else up to ``tokens`` when padded (or one)."""
    budget = float("inf")
    if batch is None:
        budget = tokens
    return split_padded(by_length(lengths), lengths, budget, batch)


# Documents to record over, as token ids.


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
    """Return the texts of a file, what a run has sampled, or the prompts of a task.

    ``text``: plain text, or rows with texts under ``text`` (``.jsonl``), cut into pieces of ``context_tokens`` that
    each begin with the tokens that the tokenizer puts in front of a text. ``rollouts``: the folder of a run; prompts
    and completions, token by token. Of a longer prompt or rollout the beginning is taken. ``max_tokens``: of all
    documents together; ``limit``: rows of the task, the file or the run. ``where``: how messages begin the names of
    these (``--``, ``activations.``).

    Raises:
        UsageError, DataError: they cannot be read, have no tokens, or the run has another tokenizer.
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
            raise UsageError(f"{where}rollouts: {rollouts}: its tokenizer is not that of the model")
        return read_rollouts(rollouts / "rollouts.db", rollouts.name, context_tokens, max_tokens, limit)
    assert task is not None, "its callers choose one"
    assert template is not None, "its callers choose one"
    form = build_template(template, f"{where}template")
    built_task = take_rendered(build_task(task, f"{where}task"), form, tokenizer, f"{where}task")
    data = {"source": "task", "task": built_task.name, "split": built_task.split, "template": form.name}
    examples = islice(built_task.examples, limit)
    prompts = (encode_prompt(tokenizer, form, example.messages, example.variables) for example in examples)
    return collect_documents(((ids, len(ids)) for ids in prompts), {**data, **limited}, context_tokens, max_tokens)


def read_rollouts(
    path: Path, run: str, context_tokens: int, max_tokens: int | None = None, limit: int | None = None
) -> Documents:
    """Return what a run has sampled while it trained, ``limit`` answers at most; ``DataError``: nothing."""
    rollouts = RolloutStore(path, read_only=True).training()
    if not rollouts:
        raise DataError(path, "no rollouts to read: this run has sampled nothing; record over its task, with --task")
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
            raise DataError(path, f"this is no UTF-8 text ({error.reason} at byte {error.start})") from error
    for text in islice(texts, limit):
        ids = encode_plain(tokenizer, text)  # nothing in a text becomes a special token
        for start in range(0, len(ids), size):
            yield leading + ids[start : start + size], 0


def collect_documents(
    sequences: Iterable[tuple[list[int], int]], data: Mapping[str, object], context_tokens: int, max_tokens: int | None
) -> Documents:
    """Return documents (ids, length of the prompt) within both limits; ``UsageError``: there are no tokens."""
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
        raise UsageError(f"nothing to record over: {where} has no tokens")
    return documents
