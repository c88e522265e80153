"""Run untrusted chat templates and tokenizers in workers with time and memory limits.

Templates are programs, and a tokenizer's regular expression may hang on one input while handling others quickly.
Testing them on sample inputs therefore proves nothing. Instead, workers render, split, or decode each real input
within a few seconds of CPU time and bounded memory. Anything that exceeds a limit is refused from then on.

On systems without such workers (Windows), templates and patterns run in this process, after a trial at load time.
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
CPU_SECONDS = 5.0  # per input
MEMORY_BYTES = 2**30
MAX_RESULT_BYTES = 2**27
_RENDER = "posttrain.data.render.template_worker:render_conversation"
# Output limit: template text plus the conversation, whose tool schemas may be repeated each turn as nested JSON.
_OWN_CHARS = 2**17
_GROWTH = 64
_SPLIT = "posttrain.data.render.tokenizer_worker:run_patterns"
_REFUSED: dict[str, str] = {}  # refusal reason, by template or hash of tokenizer steps
_MAY_REPEAT = re.compile(r"[*+?{(|]")


def pool_of(target: str) -> WorkerPool:
    """Find the shared worker for a function, with this module's limits."""
    from posttrain.graders.sandbox.workers import Limits, shared_pool  # imported on first use

    limits = Limits(
        cpu_seconds=CPU_SECONDS, memory_bytes=MEMORY_BYTES, compiles=True, max_result_bytes=MAX_RESULT_BYTES
    )
    return shared_pool(target, 1, limits)


class TemplateError(Exception):
    """Raised if a chat template fails."""


def render_foreign(tokenizer: Any, rows: list[dict[str, Any]], variables: Mapping[str, Any], *, prompt: bool) -> str:
    """Render a conversation in a worker, equivalent to ``tokenizer.apply_chat_template``.

    Raises:
        TemplateError: raised by the template.
        UsageError: time, memory or output limit exceeded.
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
    """Convert values that JSON cannot represent."""
    if hasattr(value, "item"):  # NumPy scalar
        return value.item()
    return f"<{type(value).__name__}>"


def _refusal(tokenizer: Any, reason: str) -> str:
    return (
        f"model.name: {tokenizer.name_or_path}: the chat template exceeds {CPU_SECONDS:g} s or "
        f"{MEMORY_BYTES // 2**30} GB on this conversation ({reason}). Replace chat_template.jinja"
    )


@dataclass(frozen=True, slots=True)
class Parts:
    """Tokenizer parts that may hang, without vocabulary.

    Attributes:
        key: hash over ``steps`` and ``added``.
        steps: normalizer, pre-tokenizer and decoder, as in ``tokenizer.json``.
        added: added tokens, which split text first.
        encode_pattern: unknown pattern applied to text, or None.
        decode_pattern: unknown pattern applied to tokens, or None.
    """

    key: str
    steps: dict[str, Any]
    added: list[dict[str, Any]]
    encode_pattern: str | None
    decode_pattern: str | None


_PARTS: WeakKeyDictionary[Any, tuple[int, Parts | None]] = WeakKeyDictionary()


def patterns_in(part: object) -> Iterator[str]:
    """Yield regular expressions in ``tokenizer.json`` parts. Empty for settings that cause a division by zero."""
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
    """Find the first unpublished pattern that may take superlinear time."""
    for pattern in patterns_in(parts):
        if pattern not in PUBLISHED and (not pattern or _MAY_REPEAT.search(pattern)):
            return pattern
    return None


def make_parts(steps: dict[str, Any], added: list[dict[str, Any]]) -> Parts | None:
    """Collect tokenizer parts that need a worker. None if all patterns are known."""
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
    """Split text in a worker first, if the tokenizer has unknown patterns.

    Raises:
        UsageError: limits exceeded.
    """
    parts = _parts_of(tokenizer) if HAS_WORKERS else None
    if parts is not None and parts.encode_pattern is not None:
        refusal = try_parts(parts, {"text": text, "split_special": split_special})
        if refusal is not None:
            raise UsageError(_tokenizer_refusal(tokenizer, parts.encode_pattern, refusal))


def try_tokens(tokenizer: Any, ids: Sequence[int]) -> None:
    """Decode ids in a worker first, if the decoder has unknown patterns.

    Raises:
        UsageError: limits exceeded.
    """
    parts = _parts_of(tokenizer) if HAS_WORKERS else None
    if parts is not None and parts.decode_pattern is not None:
        tokens = [token for token in tokenizer.convert_ids_to_tokens(list(ids)) if token is not None]
        refusal = try_parts(parts, {"tokens": tokens})
        if refusal is not None:
            raise UsageError(_tokenizer_refusal(tokenizer, parts.decode_pattern, refusal))


def try_parts(parts: Parts, item: dict[str, Any]) -> str | None:
    """Run tokenizer steps on an input, or only build them, and return why they failed, or None."""
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
    """Check if the tokenizers library raised this: a plain ``Exception``, or a panic, which is only a
    ``BaseException``.
    """
    return type(error) is Exception or type(error).__name__ == "PanicException"


@contextmanager
def refuse_panic(tokenizer: Any) -> Iterator[None]:
    """Convert errors raised by the tokenizers library.

    Raises:
        UsageError: the message includes the tokenizer's name.
    """
    try:
        yield
    except BaseException as error:
        if not is_failure(error):
            raise
        raise UsageError(
            f"model.name: {tokenizer.name_or_path}: tokenizer.json fails on an input: {shorten(str(error))}. Replace "
            "it with the published model's"
        ) from None


def _tokenizer_refusal(tokenizer: Any, pattern: str, reason: str) -> str:
    return (
        f"model.name: {tokenizer.name_or_path}: tokenizer.json: the pattern {shorten(pattern)} exceeds its limits "
        f"on an input ({shorten(reason)}). Replace it"
    )
