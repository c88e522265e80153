"""A small byte-level BPE tokenizer (Sennrich et al. 2016; bytes as in GPT-2), and refusal of endless chat templates.

Every digit is a token of its own, with which arithmetic is learnt many times faster.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from posttrain.errors import UsageError

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (
    END_OF_TEXT,
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "<reasoning>",
    "</reasoning>",
)

# One digit; an operator with its spaces; a word with the space before it; other signs; white space.
_WORDS = Regex(r"\p{N}| ?[-+*/=] (?=\p{N})| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer on ``texts``; equal texts give an equal tokenizer.

    The vocabulary holds the ``SPECIAL_TOKENS``, all 256 bytes, and the most frequent merges up to ``vocab_size``.
    Padding, end and beginning are ``<|endoftext|>``; the chat template writes ChatML turns.

    Raises:
        UsageError: ``vocab_size`` leaves no room for the bytes and the special tokens.
    """
    least = 256 + len(SPECIAL_TOKENS)
    if vocab_size < least:
        raise UsageError(
            f"a byte-level tokenizer needs vocab_size >= {least} "
            f"(256 bytes and {len(SPECIAL_TOKENS)} special tokens), got {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_WORDS, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


TRIAL_SECONDS = 5  # of processor time; on the clock ten times as much
MAX_TEMPLATE_CHARS = 2**20
_GIVES_UP = 3  # exit code
# Run in a process of its own, with limits of processor time and memory where the system has them: the template and
# conversations are on standard input. Only an end within the limits counts; its result does not.
_TRIAL = """
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
except (ImportError, ValueError, OSError):
    pass
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
            if length > 2**20:
                sys.exit(GIVES_UP)
    except MemoryError:
        sys.exit(GIVES_UP)
    except Exception:
        pass
"""


def _conversations() -> list[dict[str, Any]]:
    """Return variables of a chat template: short turns, long ones, many, thinking, calls and their results."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": "b", "n": [1, {}]}}}
    user, assistant = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    asked = [{"role": "system", "content": "s"}, user, assistant, user]
    thought = {"role": "assistant", "content": "<think>\nc\n</think>\n\na", "reasoning_content": "c"}
    result = {"role": "tool", "content": "r", "tool_call_id": "abcdefghi"}
    calling = [user, assistant | {"tool_calls": [call]}, result]
    thinking = [user | {"content": "q " * 1000}, thought, user]
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "array"}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}
    tokens = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")}
    return [
        {"messages": messages, "add_generation_prompt": messages[-1] is user, **tokens, **more}
        for messages in ([user], [user, assistant], asked, calling, thinking, [*[user, assistant] * 32, user])
        for more in ({}, {"tools": [tool]}, {"enable_thinking": False})
    ]


@cache
def check_chat_template(template: str, where: str) -> None:
    """Refuse a chat template that does not end on short conversations within seconds and bounded memory.

    Raises:
        UsageError: its message begins with ``where``.
    """
    if len(template) > MAX_TEMPLATE_CHARS:
        raise UsageError(f"{where}the chat template has {len(template):,} characters; at most {MAX_TEMPLATE_CHARS:,}")
    program = _TRIAL.replace("SECONDS", str(TRIAL_SECONDS)).replace("GIVES_UP", str(_GIVES_UP))
    content = json.dumps({"template": template, "conversations": _conversations()}).encode()
    command, limit = [sys.executable, "-I", "-c", program], 10 * TRIAL_SECONDS
    try:
        code = subprocess.run(command, input=content, timeout=limit, capture_output=True, check=False).returncode
    except subprocess.TimeoutExpired:
        code = _GIVES_UP
    if code < 0 or code == _GIVES_UP:
        raise UsageError(
            f"{where}the chat template does not end on a short conversation within {TRIAL_SECONDS} s and 1 GB; "
            "give the tokenizer another one (chat_template.jinja)"
        )
