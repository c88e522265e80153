"""Documents to record activations over: prompts of a task, plain texts, or what a run has sampled; as token ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from posttrain.errors import DataError, UsageError
from posttrain.interpret.activations.shards import Documents
from posttrain.interpret.activations.sites import tokenizer_hash
from posttrain.models.load import load_tokenizer
from posttrain.recipes.sections import Word
from posttrain.render import Template, encode_plain, encode_prompt
from posttrain.render.encoding import markers_of
from posttrain.render.template import build_template
from posttrain.store.rollouts import RolloutStore
from posttrain.tasks.base import Task, build_task
from posttrain.tasks.reading import SUFFIXES, read_file

TEXT_KEY = "text"
MAX_CONTEXT_TOKENS = 8192


def read_documents(
    tokenizer: Any,
    *,
    task: Word | None = None,
    template: Word | None = None,
    text: str | None = None,
    rollouts: Path | None = None,
    context_tokens: int,
    max_tokens: int | None = None,
    where: str = "--",
) -> Documents:
    """Return what a model reads: a file of texts, what a run has sampled, or the prompts of a task.

    ``where``: how messages begin the names of these (``--task``, ``activations.task``).

    Raises:
        UsageError, DataError: they cannot be read, or the run has another tokenizer.
    """
    limits: dict[str, Any] = {"context_tokens": context_tokens, "max_tokens": max_tokens}
    if text is not None:
        return texts(text, tokenizer, **limits)
    if rollouts is not None:
        if tokenizer_hash(load_tokenizer(str(rollouts))) != tokenizer_hash(tokenizer):
            raise UsageError(f"{where}rollouts: {rollouts}: its tokenizer is not that of the model")
        return recorded_rollouts(rollouts / "rollouts.db", about=rollouts.name, **limits)
    assert task is not None, "its callers choose one"
    assert template is not None, "its callers choose one"
    prompts_of = build_task(task, f"{where}task")
    return task_prompts(prompts_of, tokenizer, build_template(template, f"{where}template"), **limits)


def task_prompts(
    task: Task, tokenizer: Any, template: Template, *, context_tokens: int, max_tokens: int | None = None
) -> Documents:
    """The prompts of a task's examples, in order.

    Args:
        context_tokens: of a longer prompt the beginning is taken.
        max_tokens: of all documents together; the last one is cut to fit.

    Raises:
        UsageError: the task has no examples.
    """
    data = {"source": "task", "task": task.name, "split": task.split, "template": template.name}
    prompts = (encode_prompt(tokenizer, template, example.messages, example.variables) for example in task.examples)
    return _collect(((ids, len(ids)) for ids in prompts), data, context_tokens, max_tokens)


def recorded_rollouts(
    path: str | Path, *, context_tokens: int, max_tokens: int | None = None, about: str = ""
) -> Documents:
    """What a run has sampled while it trained: prompt and completion, token by token as they were.

    Raises:
        DataError: no such file, or no rollouts in it.
    """
    rollouts = RolloutStore(path, read_only=True).training()
    if not rollouts:
        why = "this run has sampled nothing"
        raise DataError(path, f"no rollouts to read: {why}; record over the prompts of its task instead, with --task")
    return _collect(
        ((list(r.token_ids), len(r.token_ids) - r.num_tokens) for r in rollouts),
        {"source": "rollouts", "run": about},
        context_tokens,
        max_tokens,
    )


def texts(path: str | Path, tokenizer: Any, *, context_tokens: int, max_tokens: int | None = None) -> Documents:
    """A plain text, or the texts under ``text`` in a file of rows (``.jsonl``), cut into pieces of ``context_tokens``.

    What the tokenizer puts in front of a text (BOS) is in front of every piece. Nothing in a text becomes a special
    token.

    Raises:
        DataError: no such file, it is no text, or a row has none.
    """
    place = Path(path)
    leading = list(markers_of(tokenizer).leading)
    size = context_tokens - len(leading)
    if size < 1:
        raise UsageError(f"--context-tokens {context_tokens}: a document needs at least {len(leading) + 1} tokens here")

    def pieces() -> Iterator[tuple[list[int], int]]:
        for text in _read_texts(place):
            ids = encode_plain(tokenizer, text)
            for start in range(0, len(ids), size):
                yield leading + ids[start : start + size], 0

    return _collect(pieces(), {"source": "text", "file": place.name}, context_tokens, max_tokens)


def _read_texts(path: Path) -> Iterator[str]:
    if path.name.endswith(SUFFIXES):
        yield from (row.text(TEXT_KEY) for row in read_file(path))
        return
    if not path.is_file():
        raise DataError(path, "no such file")
    try:
        yield path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(path, f"this is no UTF-8 text ({error.reason} at byte {error.start})") from error


def _collect(
    sequences: Iterable[tuple[list[int], int]],
    data: dict[str, Any],
    context_tokens: int,
    max_tokens: int | None,
) -> Documents:
    """Documents (ids, length of the prompt) within both limits; reads until that is enough."""
    documents = Documents(data=data | {"context_tokens": context_tokens, "max_rows": max_tokens})
    room = max_tokens
    for ids, prompt_length in sequences:
        if room == 0:
            break
        documents.dropped["beyond_context_tokens"] += max(0, len(ids) - context_tokens)
        kept = ids[: context_tokens if room is None else min(room, context_tokens)]
        if not kept:
            documents.dropped["empty_documents"] += 1
            continue
        documents.ids.append(kept)
        documents.prompt_lengths.append(min(prompt_length, len(kept)))
        room = None if room is None else room - len(kept)
    if not documents.ids:
        raise UsageError(f"nothing to record over: {', '.join(str(x) for x in data.values() if x)} has no tokens")
    return documents
