"""Refusal of chat templates that do not come to an end."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

from posttrain.errors import UsageError

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


@cache
def check_chat_template(template: str, where: str) -> None:
    """Refuse a chat template that does not end on short conversations within seconds and bounded memory.

    Raises:
        UsageError: its message begins with ``where``.
    """
    if len(template) > MAX_TEMPLATE_CHARS:
        raise UsageError(f"{where}the chat template has {len(template):,} characters; at most {MAX_TEMPLATE_CHARS:,}")
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": "b", "n": [1, {}]}}}
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    asked = [{"role": "system", "content": "s"}, *turns, turns[0]]
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
        for messages in (turns[:1], turns, asked, asked[1:], calling, thinking, [*turns * 32, turns[0]])
        for more in ({}, {"tools": [tool]}, {"enable_thinking": False})
    ]
    program = _TRIAL.replace("SECONDS", str(TRIAL_SECONDS)).replace("GIVES_UP", str(_GIVES_UP))
    content = json.dumps({"template": template, "conversations": conversations}).encode()
    try:
        command = [sys.executable, "-I", "-c", program]
        code = subprocess.run(
            command, input=content, timeout=10 * TRIAL_SECONDS, capture_output=True, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        code = _GIVES_UP
    if code < 0 or code == _GIVES_UP:
        raise UsageError(
            f"{where}the chat template does not end on a short conversation within {TRIAL_SECONDS} s and 1 GB; "
            "give the tokenizer another one (chat_template.jinja)"
        )
