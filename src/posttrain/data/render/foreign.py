"""Chat templates and tokenizers of others on real texts: first in a process that can be killed, with limits.

A template is a program, and a pattern of a tokenizer can take forever on one text and none on another. So no trial with
texts of ours decides: each real text is rendered, split or decoded by a worker, within seconds of processor time and
bounded memory. What has passed a limit once is refused from then on without another try.

Where the system has no such workers (Windows), templates and patterns run here, after a trial when they are loaded.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from posttrain.data.render.published import PUBLISHED
from posttrain.errors import UsageError
from posttrain.option_types import shorten

if TYPE_CHECKING:
    from posttrain.graders.sandbox.workers import WorkerPool

HAS_WORKERS = sys.platform != "win32"
CPU_SECONDS = 5.0  # for a text
MEMORY_BYTES = 2**30
MAX_RESULT_BYTES = 2**27
_RENDER = "posttrain.data.render.template_worker:render_conversation"
# A template writes its own text and those of the conversation, schemas of tools perhaps at each turn, as JSON in JSON.
_OWN_CHARS = 2**17
_GROWTH = 64
_SPLIT = "posttrain.data.render.tokenizer_worker:run_patterns"
_REFUSED: dict[str, str] = {}  # by the content of a template or of a tokenizer's steps, what happened
_MAY_REPEAT = re.compile(r"[*+?{(|]")


def pool_of(target: str) -> WorkerPool:
    """Return the worker for a function of this package, with these limits."""
    from posttrain.graders.sandbox.workers import Limits, shared_pool  # only where there is something to run

    limits = Limits(
        cpu_seconds=CPU_SECONDS, memory_bytes=MEMORY_BYTES, compiles=True, max_result_bytes=MAX_RESULT_BYTES
    )
    return shared_pool(target, 1, limits)


class TemplateError(Exception):
    """The error that a chat template raised."""


def render_foreign(tokenizer: Any, rows: list[dict[str, Any]], variables: Mapping[str, Any], *, prompt: bool) -> str:
    """Return the conversation as the chat template of others writes it, as ``tokenizer.apply_chat_template`` would.

    Raises:
        TemplateError: with what the template raised.
        UsageError: it took too long, too much memory, or wrote too much.
    """
    name = str(tokenizer.chat_template)
    if name in _REFUSED:
        raise UsageError(_refusal(tokenizer, _REFUSED[name]))
    try:
        given = json.dumps([rows, dict(variables)], default=_as_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateError(str(error)) from error
    item = {
        "template": tokenizer.chat_template,
        "tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "given": given,
        "prompt": prompt,
        "max_chars": _OWN_CHARS + _GROWTH * len(given),
    }
    result = pool_of(_RENDER).run([item])[0]
    reason = result.reason
    if result.kind == "value":
        answer: dict[str, Any] = result.value
        if "text" in answer:
            return str(answer["text"])
        if "error" in answer:
            raise TemplateError(answer["error"])
        if "length" in answer:
            reason = f"it writes {answer['length']:,} characters"
    _REFUSED[name] = reason
    raise UsageError(_refusal(tokenizer, reason))


def _as_plain(value: Any) -> object:
    """Return a value that JSON has no form for as transformers shows it to a template."""
    if hasattr(value, "item"):  # a number of NumPy's
        return value.item()
    return f"<{type(value).__name__}>"


def _refusal(tokenizer: Any, reason: str) -> str:
    return (
        f"model.name: {tokenizer.name_or_path}: the chat template does not come to an end on this conversation within "
        f"{CPU_SECONDS:g} s and {MEMORY_BYTES // 2**30} GB ({reason}); give the tokenizer another one "
        "(chat_template.jinja)"
    )


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a tokenizer that may take forever, without its vocabulary.

    Attributes:
        key: a hash of the rest.
        steps: its normalizer, pre-tokenizer and decoder, as in ``tokenizer.json``.
        added: the tokens at which a text is cut first.
        encode_pattern: one that is run on texts and not known; None if there is none.
        decode_pattern: one that is run on tokens.
    """

    key: str
    steps: dict[str, Any]
    added: list[dict[str, Any]]
    encode_pattern: str | None
    decode_pattern: str | None


_PARTS: WeakKeyDictionary[Any, tuple[int, Parts | None]] = WeakKeyDictionary()


def patterns_in(part: object) -> Iterator[str]:
    """The regular expressions in a part of ``tokenizer.json``; an empty one for what its library divides by zero."""
    inside: list[object] = []
    if isinstance(part, dict):
        pattern = part.get("Regex")
        if isinstance(pattern, str):
            yield pattern
        if part.get("String") == "" or (part.get("type") == "FixedLength" and not part.get("length")):
            yield ""
        inside = list(part.values())
    elif isinstance(part, list):
        inside = part
    for item in inside:
        yield from patterns_in(item)


def unknown_pattern(parts: object) -> str | None:
    """The first pattern that is not a published one and could take longer than its text is long."""
    for pattern in patterns_in(parts):
        if pattern not in PUBLISHED and (not pattern or _MAY_REPEAT.search(pattern)):
            return pattern
    return None


def make_parts(steps: dict[str, Any], added: list[dict[str, Any]]) -> Parts | None:
    """Return the parts of a tokenizer that need a worker; None if all of its patterns are known."""
    encode_pattern = unknown_pattern([steps.get("normalizer"), steps.get("pre_tokenizer")])
    decode_pattern = unknown_pattern(steps.get("decoder"))
    if encode_pattern is None and decode_pattern is None:
        return None
    key = sha256(json.dumps([steps, added]).encode()).hexdigest()
    return Parts(key, steps, added, encode_pattern, decode_pattern)


def _parts_of(tokenizer: Any) -> Parts | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    known = _PARTS.get(tokenizer)
    if known is None or (known[1] is not None and known[0] != len(tokenizer)):
        found = {name: getattr(backend, name) for name in ("normalizer", "pre_tokenizer", "decoder")}
        steps = {name: json.loads(part.__getstate__()) for name, part in found.items() if part is not None}
        flags = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
        tokens = backend.get_added_tokens_decoder().values()
        added = [{flag: getattr(token, flag) for flag in flags} for token in tokens]
        known = (len(tokenizer), make_parts(steps, added))
        _PARTS[tokenizer] = known
    return known[1]


def try_text(tokenizer: Any, text: str, *, split_special: bool) -> None:
    """Split a text by the patterns of a tokenizer of others in a worker; nothing happens if all of them are known.

    Raises:
        UsageError: they do not come to an end on it.
    """
    parts = _parts_of(tokenizer) if HAS_WORKERS else None
    if parts is not None and parts.encode_pattern is not None:
        refusal = try_parts(parts, {"text": text, "split_special": split_special})
        if refusal is not None:
            raise UsageError(_tokenizer_refusal(tokenizer, parts.encode_pattern, refusal))


def try_tokens(tokenizer: Any, ids: Sequence[int]) -> None:
    """The same for ids that are to be decoded.

    Raises:
        UsageError: the patterns of the decoder do not come to an end on them.
    """
    parts = _parts_of(tokenizer) if HAS_WORKERS else None
    if parts is not None and parts.decode_pattern is not None:
        tokens = [token for token in tokenizer.convert_ids_to_tokens(list(ids)) if token is not None]
        refusal = try_parts(parts, {"tokens": tokens})
        if refusal is not None:
            raise UsageError(_tokenizer_refusal(tokenizer, parts.decode_pattern, refusal))


def try_parts(parts: Parts, item: dict[str, Any]) -> str | None:
    """Return why the steps of a tokenizer do not come to an end on a text (or on nothing: when they are made)."""
    if parts.key in _REFUSED:
        return _REFUSED[parts.key]
    pool = pool_of(_SPLIT)
    item = {"key": parts.key, **item}
    result = pool.run([item])[0]
    if result.kind == "value" and "unknown" in result.value:
        result = pool.run([item | {"parts": {"steps": parts.steps, "added": parts.added}}])[0]
    if result.kind != "value":
        _REFUSED[parts.key] = result.reason
        return result.reason
    error: str | None = result.value.get("error")
    return error


def is_failure(error: BaseException) -> bool:
    """Return True for what the tokenizers library raises: a plain ``Exception``, or a panic, which is none."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


@contextmanager
def refuse_panic(tokenizer: Any) -> Iterator[None]:
    """Turn what a tokenizer's library raises for a text into one error.

    Raises:
        UsageError: with the tokenizer's name.
    """
    try:
        yield
    except BaseException as error:
        if not is_failure(error):
            raise
        raise UsageError(
            f"model.name: {tokenizer.name_or_path}: tokenizer.json fails on a text: {shorten(str(error))}; replace it "
            "by that of the published model"
        ) from None


def _tokenizer_refusal(tokenizer: Any, pattern: str, reason: str) -> str:
    return (
        f"model.name: {tokenizer.name_or_path}: tokenizer.json: the pattern {shorten(pattern)} does not come to an end "
        f"on a text ({shorten(reason)}); replace it"
    )
