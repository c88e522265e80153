"""Model files that could hang or grow without bound: adapter patterns, tokenizer steps, chat templates.

Text-dependent parts (templates, tokenizer patterns) are tried on real texts in ``data/render/foreign.py``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from posttrain.data.render.foreign import HAS_WORKERS, make_parts, pool_of, try_parts
from posttrain.errors import UsageError
from posttrain.models.config import MAX_FILE_BYTES, read_object
from posttrain.option_types import shorten
from posttrain.untrusted import entries_of, fields_of, kind_of_file

MAX_ADDED_TOKENS = 2**17  # 65,536 is typical for speech or images
MAX_GROWTH = 64  # growth factor through all replacement steps combined
MAX_TOKEN_CHARS = 4096  # longest token after decoding; 1,000 spaces are typical
MAX_STEPS = 256
MAX_FRAME = 256  # tokens added around a text by the post-processor
MAX_AFFIX_CHARS = 64  # in front of or behind each part of a word
MAX_WORD_CHARS = 1000  # word length when splitting tries everything; 100 is typical
MAX_PATTERN_CHARS = 10_000
# Patterns written as plain module names, typical for most tools. Too many still cost time, once Python's regex cache
# overflows.
_PLAIN_PATTERN = re.compile(r"[\w.-]*")
_MAX_PLAIN_PATTERNS = 256
# Adapter configuration keys: regular expressions (string ``target_modules``), plus names to which peft adds a prefix.
_OF_ADAPTERS = ("target_modules", "exclude_modules", "layers_pattern", "target_parameters", "modules_to_save")
_PATTERN_KEYS = ("rank_pattern", "alpha_pattern")
TRIAL_SECONDS = 5  # of processor time; on the clock ten times as much, for machines that do other things too
_GIVES_UP = 3  # exit code
# Fallback without workers: a subprocess renders conversations from standard input, and is killed on timeout. Only
# finishing within limits counts; output and errors are ignored.
_TEMPLATE_TRIAL = """
import json, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
except (ImportError, ValueError, OSError):
    pass
from datetime import datetime
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
class Generation(Extension):
    tags = {"generation"}
    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)

def refuse(message):
    raise ValueError(message)

what = json.load(sys.stdin)
made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
made.filters["tojson"] = lambda value, ensure_ascii=False, indent=None, separators=None, sort_keys=False: json.dumps(
    value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
made.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
try:
    template = made.from_string(what["template"])
except MemoryError:
    sys.exit(GIVES_UP)
except Exception:  # one that cannot be compiled cannot be rendered either
    sys.exit(0)
for variables in what["conversations"]:
    try:
        length = 0
        for part in template.generate(**variables):
            length += len(part)
            if length > MAX_CHARS:
                sys.exit(GIVES_UP)
    except MemoryError:
        sys.exit(GIVES_UP)
    except Exception:
        pass
"""
MAX_TEMPLATE_CHARS = 2**20
_MAX_TRIAL_CHARS = 2**20


@cache
def check_chat_template(template: str, where: str) -> None:
    """Refuse overlong chat templates. Without workers, also refuse templates that hang on short conversations.

    Raises:
        UsageError: prefixed by ``where``.
    """
    if len(template) > MAX_TEMPLATE_CHARS:
        raise UsageError(f"{where}the chat template has {len(template):,} characters; at most {MAX_TEMPLATE_CHARS:,}")
    if HAS_WORKERS:  # each rendering has limits
        return
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": "b", "n": [1, {}]}}}
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    conversation = [{"role": "system", "content": "s"}, *turns, turns[0]]
    thought = turns[1] | {"content": "<think>\nc\n</think>\n\na", "reasoning_content": "c"}
    calling = [
        turns[0],
        turns[1] | {"tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_call_id": "abcdefghi"},
    ]
    thinking = [turns[0] | {"content": "q " * 1000}, thought, turns[0]]
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "array"}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}
    tokens = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")}
    conversations = [
        {"messages": messages, "add_generation_prompt": messages[-1] is turns[0], **tokens, **more}
        for messages in (turns[:1], turns, conversation, conversation[1:], calling, thinking, [*turns * 32, turns[0]])
        for more in ({}, {"tools": [tool]}, {"enable_thinking": False})
    ]
    if not _ends({"template": template, "conversations": conversations}):
        raise UsageError(
            f"{where}the chat template does not end on a short conversation within {TRIAL_SECONDS} s and 1 GB; "
            "give the tokenizer another one (chat_template.jinja)"
        )


def _adapter_patterns(settings: Mapping[str, object]) -> dict[str, str]:
    """Map each adapter pattern to its configuration key."""
    found: dict[str, str] = {}
    for key in (*_OF_ADAPTERS, *_PATTERN_KEYS):
        value = settings.get(key)
        listed = value if isinstance(value, list | dict) and key != "target_modules" else [value]
        found |= {pattern: key for pattern in listed if isinstance(pattern, str)}
    return found


def check_adapter_patterns(settings: Mapping[str, object], where: str) -> None:
    """Refuse overlong or invalid regular expressions in adapter configurations.

    Raises:
        UsageError: quotes the pattern, prefixed by ``where``.
    """
    for pattern, key in _adapter_patterns(settings).items():
        if len(pattern) > MAX_PATTERN_CHARS:
            raise UsageError(f"{where}{key}: a pattern of {len(pattern):,} characters; at most {MAX_PATTERN_CHARS:,}")
        if _PLAIN_PATTERN.fullmatch(pattern):
            continue
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise UsageError(f"{where}{key}: {shorten(pattern)} is no regular expression: {error}") from None


def check_adapter_matches(settings: Mapping[str, object], names: Sequence[str], where: str) -> None:
    """Refuse adapters whose patterns hang on this model's module and parameter names.

    A worker first matches everything in each form used by peft. Later peft repeats exactly these matches, so it
    finishes too, regardless of results.

    Raises:
        UsageError: lists the keys, prefixed by ``where``.
    """
    patterns = _adapter_patterns(settings)
    odd = [pattern for pattern in patterns if not _PLAIN_PATTERN.fullmatch(pattern)]
    if not HAS_WORKERS or (not odd and len(patterns) <= _MAX_PLAIN_PATTERNS):
        return
    tried = list(patterns) if len(patterns) > _MAX_PLAIN_PATTERNS else odd
    result = pool_of("posttrain.models.pattern_worker:match_all").run([{"patterns": tried, "names": list(names)}])[0]
    if result.kind == "value":
        return
    keys = " or ".join(dict.fromkeys(patterns[pattern] for pattern in tried))
    raise UsageError(
        f"{where}{keys}: {shorten(tried[0])} does not come to an end on the names of this model's modules "
        f"({result.reason}); list the names instead"
    )


def check_tokenizer_config(folder: Path) -> None:
    """Refuse a tokenizer_config.json requesting absurdly many tokens.

    Tokenizer classes create as many tokens as settings such as ``extra_ids`` request. Apart from lengths, legitimate
    numbers stay small.

    Raises:
        UsageError: refused, with path and key.
    """
    place = folder / "tokenizer_config.json"
    for key, value in read_object(place).items():
        number = value if isinstance(value, int) and "len" not in key else 0
        if isinstance(value, dict | list):
            number = len(value)
        if number > MAX_ADDED_TOKENS:
            raise UsageError(f"model.name: {place}: {key}: {number:,}; at most {MAX_ADDED_TOKENS:,}")


def check_tokenizer(folder: Path) -> None:
    """Refuse a tokenizer.json that makes encoding or decoding hang, or makes texts explode in size.

    Checks size, structure, and growth per character. Unless patterns match published models, they are compiled in a
    worker here. Trials on texts follow once texts are available.

    Raises:
        UsageError: refused, with path and key.
    """
    place = folder / "tokenizer.json"
    if kind_of_file(place) == "file":
        about = place.stat()
        _check_tokenizer(place, about.st_mtime_ns, about.st_size)


@cache
def _check_tokenizer(place: Path, changed: int, num_bytes: int) -> None:
    where = f"model.name: {place}: "
    if num_bytes > MAX_FILE_BYTES:
        raise UsageError(f"{where}{num_bytes:,} bytes; a tokenizer has at most {MAX_FILE_BYTES:,}")
    try:
        content = json.loads(place.read_bytes())
    except (ValueError, RecursionError, OSError):  # transformers reports the error
        return
    if not isinstance(content, dict):
        return
    added = content.get("added_tokens")
    if isinstance(added, list) and len(added) > MAX_ADDED_TOKENS:
        raise UsageError(
            f"{where}added_tokens: {len(added):,} tokens, and each text is searched for all of them; "
            f"at most {MAX_ADDED_TOKENS:,} are read"
        )
    steps = {key: content.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")}
    if not all(map(_is_table, _tables_in(steps))):
        raise UsageError(f"{where}normalizer: precompiled_charsmap is no table of SentencePiece's; replace it")
    for key, part in steps.items():
        if (count := _count_steps(part)) > MAX_STEPS:
            raise UsageError(f"{where}{key}: {count:,} steps; at most {MAX_STEPS}")
        if (growth := _growth(part)) > MAX_GROWTH:
            raise UsageError(f"{where}{key}: its steps make a text up to {growth:,.0f} times as long; remove them")
    _check_model(content, _growth(steps["decoder"]), where)
    frame = _count_pieces(content.get("post_processor"))
    if frame > MAX_FRAME:
        raise UsageError(f"{where}post_processor: it puts {frame:,} tokens around each text; at most {MAX_FRAME}")
    if not HAS_WORKERS or (parts := make_parts(steps, [])) is None:
        return
    reason = try_parts(parts, {"tokens": []})
    if reason is not None:
        pattern = shorten(parts.encode_pattern or parts.decode_pattern)
        raise UsageError(f"{where}the pattern {pattern} cannot be used ({shorten(reason)}); replace it")


def _check_model(content: Mapping[str, object], decoder_growth: float, where: str) -> None:
    """Refuse tokenizer model settings that make short texts slow or long."""
    model = fields_of(content.get("model"))
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if isinstance(affix := model.get(key), str) and len(affix) > MAX_AFFIX_CHARS:
            raise UsageError(f"{where}model.{key}: {len(affix):,} characters; at most {MAX_AFFIX_CHARS}")
    length = model.get("max_input_chars_per_word")
    if isinstance(length, int | float) and length > MAX_WORD_CHARS:
        raise UsageError(
            f"{where}model.max_input_chars_per_word: {length:,}, and all parts of such a word are tried; "
            f"at most {MAX_WORD_CHARS:,}"
        )
    longest = max(map(len, _tokens_in(content)), default=0)
    if longest * decoder_growth > MAX_TOKEN_CHARS:
        raise UsageError(
            f"{where}a token is written as up to {longest * decoder_growth:,.0f} characters; at most "
            f"{MAX_TOKEN_CHARS:,} are"
        )


def _tokens_in(content: Mapping[str, object]) -> Iterator[str]:
    vocabulary = fields_of(content.get("model")).get("vocab")
    entries = []
    if isinstance(vocabulary, list | dict):
        entries = list(vocabulary)
    for entry in entries:
        token = entry
        if isinstance(entry, list) and entry:  # (token, score) pair
            token = entry[0]
        if isinstance(token, str):
            yield token
    for entry in entries_of(content.get("added_tokens")):
        if isinstance(entry, dict) and isinstance(entry.get("content"), str):
            yield entry["content"]


def _count_pieces(part: object) -> int:
    """Bound how many tokens a post-processor adds: pieces times ids per special token."""
    if not isinstance(part, dict):
        return 0
    if isinstance(steps := part.get("processors"), list):
        return sum(map(_count_pieces, steps))
    pieces = max((len(one) for one in (part.get("single"), part.get("pair")) if isinstance(one, list)), default=0)
    ids = []
    for token in fields_of(part.get("special_tokens")).values():
        own = fields_of(token).get("ids")
        if isinstance(own, list):
            ids.append(len(own))
    return pieces * max(ids, default=1)


# Growth per step type: ByteLevel writes bytes as letters up to two bytes long, BertNormalizer surrounds characters with
# spaces. Unicode normalization happens once, growing texts at most 18-fold.
_GROWTH_OF_KIND = {"ByteLevel": 2.0, "BertNormalizer": 3.0}
_STEPS_OF = ("normalizers", "pretokenizers", "decoders")
_USUAL_INSERT = 32  # characters a table may write for a single input, or a prepended string may have


def _growth(part: object) -> float:
    """Bound how much a normalizer, pre-tokenizer or decoder can lengthen texts."""
    if not isinstance(part, dict):
        return 1.0
    growth = _GROWTH_OF_KIND.get(str(part.get("type")), 1.0)
    for step in _steps_in(part):
        growth = min(growth * _growth(step), 1e30)
    pattern, content = part.get("pattern"), part.get("content")
    if isinstance(pattern, dict) and isinstance(content, str):
        replaced = pattern.get("String")
        if isinstance(replaced, str) and replaced:
            growth *= max(1.0, len(content) / len(replaced))
        else:  # an expression, which may match between all characters
            growth *= 1.0 + len(content)
    if isinstance(text := part.get("prepend"), str):
        growth *= max(1.0, len(text) / _USUAL_INSERT)
    for key in ("suffix", "word_delimiter_token"):
        if part.get(key) == "":  # a space is put between all characters
            growth *= 2.0
    return growth * max(1.0, _longest_in_table(part.get("precompiled_charsmap")) / _USUAL_INSERT)


def _steps_in(part: Mapping[str, object]) -> list[object]:
    return [step for key in _STEPS_OF if isinstance(steps := part.get(key), list) for step in steps]


def _count_steps(part: object) -> int:
    return 1 + sum(map(_count_steps, _steps_in(part))) if isinstance(part, dict) else 0


def _tables_in(part: object) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(table := part.get("precompiled_charsmap"), str):
            yield table
        part = list(part.values())
    for item in entries_of(part):
        yield from _tables_in(item)


def _is_table(table: str) -> bool:
    """Check if a table's trie fits inside its data; otherwise the library aborts."""
    try:
        data = b64decode(table)
    except ValueError:
        return False
    return 4 <= 4 + int.from_bytes(data[:4], "little") <= len(data)


def _longest_in_table(table: object) -> int:
    """Find the longest replacement in SentencePiece's normalization table, in bytes."""
    if not isinstance(table, str):
        return 0
    try:
        data = b64decode(table)
    except ValueError:
        return 0
    texts = data[4 + int.from_bytes(data[:4], "little") :]  # behind the trie that finds their places
    return max(map(len, texts.split(b"\0")))


def _ends(what: Mapping[str, object]) -> bool:
    """Check if a subprocess finishes rendering within its limits.

    Other failures count as finished.
    """
    program = _TEMPLATE_TRIAL
    for name, value in {"GIVES_UP": _GIVES_UP, "MAX_CHARS": _MAX_TRIAL_CHARS, "SECONDS": TRIAL_SECONDS}.items():
        program = program.replace(name, str(value))
    command, content = [sys.executable, "-I", "-c", program], json.dumps(what).encode()
    try:
        done = subprocess.run(command, input=content, timeout=10 * TRIAL_SECONDS, capture_output=True, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode >= 0 and done.returncode != _GIVES_UP
