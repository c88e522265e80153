"""Parts of a model's files that may never end: patterns of adapters and tokenizers, chat templates."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from posttrain.errors import UsageError
from posttrain.option_types import shorten
from posttrain.untrusted import kind_of_file

MAX_ADDED_TOKENS = 2**17  # 65,536 tokens of speech or of images are usual
MAX_TOKENIZER_BYTES = 2**27
MAX_GROWTH = 64  # of a text by all replacements of a normalizer, one after the other
MAX_PATTERN_CHARS = 10_000
TRIAL_SECONDS = 5  # of processor time; on the clock ten times as much, for machines that do other things too
# Of an adapter's configuration: regular expressions (``target_modules`` where it is a text), and names in front of
# which peft puts one.
_OF_ADAPTERS = ("target_modules", "exclude_modules", "layers_pattern", "target_parameters")
_PATTERN_KEYS = ("rank_pattern", "alpha_pattern")
_REPEATED = re.compile(r"[*+{]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_NAMES = ("model.layers.10.self_attn.q_proj", "base_model.model.transformer.h.0.attn.c_attn", "lm_head")
_GIVES_UP = 3  # exit code
# In front of both programs: limits of the process in processor time and memory, where the system has them.
_LIMITS = """
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
except (ImportError, ValueError, OSError):
    pass
"""
# Run in a process that is ended when it takes too long: sys.argv[1] is the kind, standard input the JSON to try.
_TRIAL = """
import json, sys
what = json.load(sys.stdin)
if sys.argv[1] == "tokenizer":
    from tokenizers import Tokenizer
    tokenizer = Tokenizer.from_file(what["file"])
    for text in what["texts"]:
        try:
            tokenizer.encode(text)
        except BaseException as error:  # its library gives up a search after millions of steps
            sys.exit(GIVES_UP if "limit" in str(error) else 0)
else:
    import re
    for pattern in what["patterns"]:
        for text in what["texts"]:
            re.fullmatch(pattern, text)
            re.match(rf"(.*\\.)?({pattern})$", text)
"""
# The same for a chat template: its text and conversations for it on standard input. Only an end within the limits
# counts; what it writes or refuses does not.
_TEMPLATE_TRIAL = """
import json, sys
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
    """Refuse a chat template that does not end on short conversations within seconds and bounded memory.

    Raises:
        UsageError: ``where`` stands in front.
    """
    if len(template) > MAX_TEMPLATE_CHARS:
        raise UsageError(f"{where}the chat template has {len(template):,} characters; at most {MAX_TEMPLATE_CHARS:,}")
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
    if not _ends(_TEMPLATE_TRIAL, {"template": template, "conversations": conversations}, most_bytes=2**30):
        raise UsageError(
            f"{where}the chat template does not end on a short conversation within {TRIAL_SECONDS} s and 1 GB; "
            "give the tokenizer another one (chat_template.jinja)"
        )


def check_adapter_patterns(settings: Mapping[str, object], where: str) -> None:
    """Refuse regular expressions of an adapter's configuration that take forever, or are none.

    Raises:
        UsageError: with the pattern; ``where`` stands in front.
    """
    found: dict[str, str] = {}
    for key in (*_OF_ADAPTERS, *_PATTERN_KEYS):
        value = settings.get(key)
        listed = value if isinstance(value, list | dict) and key != "target_modules" else [value]
        found |= {pattern: key for pattern in listed if isinstance(pattern, str)}
    for pattern, key in found.items():
        if len(pattern) > MAX_PATTERN_CHARS:
            raise UsageError(f"{where}{key}: a pattern of {len(pattern):,} characters; at most {MAX_PATTERN_CHARS:,}")
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            if key == "target_modules" and pattern.isascii() and pattern.replace("-", "").isalnum():
                continue
            raise UsageError(f"{where}{key}: {shorten(pattern)} is no regular expression: {error}") from None
    repeated = [pattern for pattern in found if _REPEATED.search(pattern)]
    texts = [*_NAMES, *_trial_texts(repeated)]
    if repeated and not _ends(_TRIAL, {"patterns": repeated, "texts": texts}, "adapter"):
        keys = " or ".join(dict.fromkeys(found[pattern] for pattern in repeated))
        raise UsageError(
            f"{where}{keys}: {shorten(repeated[0])} does not come to an end on names of modules; list the names instead"
        )


def check_tokenizer(folder: Path) -> None:
    """Refuse a tokenizer.json that makes reading any text take forever, by its size, its form, or a trial.

    Raises:
        UsageError: with the file and the key.
    """
    place = folder / "tokenizer.json"
    if kind_of_file(place) != "file":
        return
    where = f"model.name: {place}: "
    if place.stat().st_size > MAX_TOKENIZER_BYTES:
        raise UsageError(f"{where}{place.stat().st_size:,} bytes; a tokenizer has at most {MAX_TOKENIZER_BYTES:,}")
    try:
        content = json.loads(place.read_bytes())
    except (ValueError, RecursionError, OSError):  # transformers says what is wrong with it
        return
    if not isinstance(content, dict):
        return
    added = content.get("added_tokens")
    if isinstance(added, list) and len(added) > MAX_ADDED_TOKENS:
        raise UsageError(
            f"{where}added_tokens: {len(added):,} tokens, and each text is searched for all of them; "
            f"at most {MAX_ADDED_TOKENS:,} are read"
        )
    if (growth := _growth(content.get("normalizer"))) > MAX_GROWTH:
        raise UsageError(
            f"{where}normalizer: its replacements make a text up to {growth:,.0f} times as long; remove them"
        )
    parts = [content.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")]
    patterns = [pattern for pattern in _regexes(parts) if _REPEATED_GROUP.search(pattern)]
    what = {"file": str(place), "texts": list(_trial_texts(patterns))}
    if patterns and not _ends(_TRIAL, what, "tokenizer", isolated=False):
        raise UsageError(f"{where}{shorten(patterns[0])} does not come to an end on short texts; replace this pattern")


def _growth(part: object) -> float:
    """Return the factor by which the replacements of a normalizer may lengthen a text."""
    if not isinstance(part, dict):
        return 1.0
    growth = 1.0
    for step in part.get("normalizers") or ():
        growth = min(growth * _growth(step), 1e30)
    pattern, content = part.get("pattern"), part.get("content")
    if isinstance(pattern, dict) and isinstance(content, str):
        replaced = pattern.get("String")
        growth *= max(1.0, len(content) / max(1, len(replaced) if isinstance(replaced, str) else 1))
    return growth


def _regexes(part: object) -> Iterable[str]:
    if isinstance(part, dict):
        if isinstance(pattern := part.get("Regex"), str):
            yield pattern
        part = list(part.values())
    for item in part if isinstance(part, list) else ():
        yield from _regexes(item)


def _trial_texts(patterns: Iterable[str]) -> Iterable[str]:
    """Texts on which a pattern that matches in many ways tries them all: one letter again and again, then an end."""
    letters = dict.fromkeys(letter for pattern in patterns for letter in pattern if letter.isalnum())
    for letter in [*list(letters)[:40], " ", "\n", "."]:
        yield letter * 40 + "!"


def _ends(
    program: str, what: Mapping[str, object], *arguments: str, isolated: bool = True, most_bytes: int = -1
) -> bool:
    """Return True if a process of its own ran the program to an end within the limits, and did not give up.

    One that failed for another reason counts as ended.
    """
    numbers = {"GIVES_UP": _GIVES_UP, "MAX_CHARS": _MAX_TRIAL_CHARS, "SECONDS": TRIAL_SECONDS, "MAX_BYTES": most_bytes}
    program = _LIMITS + program
    for name, value in numbers.items():
        program = program.replace(name, str(value))
    command = [sys.executable, *(["-I"] if isolated else []), "-c", program, *arguments]
    content = json.dumps(what).encode()
    try:
        done = subprocess.run(command, input=content, timeout=10 * TRIAL_SECONDS, capture_output=True, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode >= 0 and done.returncode != _GIVES_UP
