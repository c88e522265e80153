# ruff: noqa: E501 (a line of a template is a line here)
"""Chat templates after the documented layouts of known models, and small tokenizers that have their special tokens.

Written anew: turn markers, roles, and what is done with system messages, tools and thinking are those of the models;
the texts are our own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = ["The weather in Oslo is cold today.", "What is 12 plus 30? It is 42.", '{"city": "Oslo", "days": 3}'] * 3
HERMES_TOOLS = (
    "{{- 'You may call functions:\n<tools>' }}{% for tool in tools %}{{- '\n' }}{{- tool | tojson }}{% endfor %}"
    "{{- '\n</tools>' }}"
)
# Tools in the system turn; results in turns of the user; thinking is kept behind the last question alone, and the last
# turn always has a block of thinking.
QWEN3 = (
    "{%- if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{% endif %}"
    + HERMES_TOOLS
    + "<|im_end|>\n{% elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{% endif %}"
    "{%- set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}{% set said = m.content %}"
    "{%- if not thought and '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}"
    "{%- endif %}{{- said.lstrip('\n') }}"
    "{%- for call in m.tool_calls or [] %}{{- '\n' if said or not loop.first else '' }}"
    '{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "{{- '}\n</tool_call>' }}{% endfor %}{{- '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}"
    "{% endif %}{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}"
    "{%- endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# As Qwen3, and the prompt itself opens the thinking.
QWEN3_OPENS = QWEN3.replace(
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}",
    "{{- '<think>\n' }}",
)
# Contents are stripped; a message calls one tool; results have a role of their own; tools stand in the first question.
LLAMA3 = (
    "{{- bos_token }}"
    "{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set rest = messages[1:] %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\n' + system + '<|eot_id|>' }}{% else %}{% set rest = messages %}{% endif %}"
    "{%- for m in rest %}"
    "{%- if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call a message') }}{% endif %}"
    "{%- set call = m.tool_calls[0].function %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}"
    "{%- elif m.role == 'tool' %}{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}"
    "{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{%- if tools and loop.first %}{{- 'Functions:\n' }}{% for tool in tools %}{{- tool | tojson + '\n\n' }}{% endfor %}{% endif %}"
    "{{- m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# The assistant is "model"; a system message stands before the first question; roles alternate; no tools.
GEMMA3 = (
    "{{- bos_token }}"
    "{%- if messages[0].role == 'system' %}{% set before = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set before = '' %}{% set rest = messages %}{% endif %}"
    "{%- for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (before if loop.first else '') }}"
    "{{- m.content | trim }}{{- '<end_of_turn>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{% endif %}"
)
# Calls as XML, each argument on lines of its own.
QWEN3_CODER = (
    "{%- if messages[0].role == 'system' or tools %}{{- '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content }}{% else %}{{- 'You can call functions.' }}{% endif %}"
    "{%- for tool in tools or [] %}{% set f = tool.function if tool.function is defined else tool %}"
    "{{- '\n<function>\n<name>' + f.name + '</name>' }}{{- '\n' + f.parameters | tojson }}{{- '\n</function>' }}{% endfor %}"
    "{{- '<|im_end|>\n' }}{% endif %}"
    "{%- for m in messages %}{% if m.role == 'system' %}"
    "{%- elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user\n' }}{% endif %}"
    "{{- '<tool_response>\n' + m.content + '\n</tool_response>\n' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content | trim }}"
    "{%- for call in m.tool_calls or [] %}{{- '\n\n' if m.content and loop.first else ('' if loop.first else '\n') }}"
    "{{- '<tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{%- for key, value in call.function.arguments | items %}{{- '<parameter=' + key + '>\n' }}"
    "{{- value if value is string else value | tojson }}{{- '\n</parameter>\n' }}{% endfor %}"
    "{{- '</function>\n</tool_call>' }}{% endfor %}{{- '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"
)
# Calls as functions in Python between two tags, tools and results in turns of their own.
OLMO3 = (
    "{%- if tools or messages[0].role != 'system' %}{{- '<|im_start|>system\nYou can call functions.' }}"
    "{%- if tools %}{{- ' <functions>' + tools | tojson + '</functions>' }}{% endif %}{{- '<|im_end|>\n' }}{% endif %}"
    "{%- for m in messages %}{% if m.role == 'tool' %}{{- '<|im_start|>environment\n' + m.content + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content }}{% if m.tool_calls %}{{- '<function_calls>' }}"
    "{%- for call in m.tool_calls %}{{- call.function.name + '(' }}{% for key, value in call.function.arguments | items %}"
    "{{- key + '=' + value | tojson }}{{- ', ' if not loop.last else '' }}{% endfor %}{{- ')' }}"
    "{{- '\n' if not loop.last else '' }}{% endfor %}{{- '</function_calls>' }}{% endif %}"
    "{{- '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3-Coder, and the prompt opens the thinking, or closes it at once; turns before the last question lose theirs.
QWEN35 = (
    "{%- set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    + QWEN3_CODER.replace(
        "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content | trim }}",
        "{%- else %}{% set thought = m.reasoning_content if m.reasoning_content is string else '' %}{% set said = m.content | trim %}"
        "{%- if not thought and '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
        "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}{{- '<|im_start|>' + m.role + '\n' }}"
        "{%- if m.role == 'assistant' and loop.index0 > ns.last %}"
        "{{- '<think>\n' + thought | trim + '\n</think>\n\n' }}{% endif %}{{- said }}",
    ).removesuffix("{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}")
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '\n</think>\n\n' }}{% endif %}{% endif %}"
)
# A block above the system message; a mode that writes empty thinking before every answer; contents keep their thinking.
SMOLLM3 = (
    "{%- set mode = '/think' if enable_thinking is not defined or enable_thinking else '/no_think' %}"
    "{{- '<|im_start|>system\n## Metadata\n\nReasoning Mode: ' + mode + '\n\n## Custom Instructions\n\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content }}{% else %}{{- 'You are a helper.' }}{% endif %}"
    "{%- if tools %}{{- '\n\n## Tools\n' }}{% for tool in tools %}{{- '\n' + tool | string }}{% endfor %}{% endif %}"
    "{{- '<|im_end|>\n' }}"
    "{%- for m in messages %}{% if m.role == 'user' %}{{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\n' + ('<think>\n\n</think>\n' if mode == '/no_think' else '') + m.content.lstrip('\n') + '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}{{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' + ('<think>\n\n</think>\n' if mode == '/no_think' else '') }}"
    "{% endif %}"
)
# Channels: what is thought, said and called; earlier thinking goes, the last answer ends otherwise; results are JSON.
GPT_OSS = (
    "{{- '<|start|>system<|message|>You are a model.<|end|>' }}{% set ns = namespace(call='') %}"
    "{%- if messages[0].role == 'system' or tools %}{{- '<|start|>developer<|message|>' }}"
    "{%- if messages[0].role == 'system' %}{{- '# Instructions\n\n' + messages[0].content + '\n\n' }}{% endif %}"
    "{%- for tool in tools or [] %}{{- '// ' + (tool.function.description or '') + '\ntype ' + tool.function.name + '\n' }}"
    "{% endfor %}{{- '<|end|>' }}{% endif %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}"
    "{%- elif m.role == 'tool' %}{{- '<|start|>functions.' + ns.call + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{- m.content | tojson + '<|end|>' }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('content and thinking beside a call') }}{% endif %}"
    "{%- set thought = m.content or m.thinking %}"
    "{%- if thought %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}{% endif %}"
    "{%- set ns.call = m.tool_calls[0].function.name %}"
    "{{- '<|start|>assistant<|channel|>commentary to=functions.' + ns.call + ' <|constrain|>json<|message|>' }}"
    "{{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}"
    "{%- elif loop.last and not add_generation_prompt %}"
    "{%- if m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}"
    "{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{%- endif %}{% endfor %}{% if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"
)
# The plainest: every turn alike.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Forms of calls alone: one list of objects; a name and then JSON between marks; keys and values in tags of their own.
MISTRAL = (
    "{{- bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{%- if tools and loop.last %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{- '[INST] ' + m.content + '[/INST]' }}"
    "{%- elif m.tool_calls %}{{- '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}"
    "{{- '{\"name\": \"' + call.function.name + '\", \"arguments\": ' + call.function.arguments | tojson + '}' }}"
    "{{- ', ' if not loop.last else '' }}{% endfor %}{{- ']' + eos_token }}"
    "{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}"
    "{%- else %}{{- ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
)
DEEPSEEK = (
    "{{- bos_token }}{% if tools %}{{- 'Tools: ' + tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'user' %}{{- '<|User|>' + m.content }}"
    "{%- elif m.role == 'tool' %}{{- '<|output_begin|>' + m.content + '<|output_end|>' }}"
    "{%- else %}{{- '<|Assistant|>' + m.content }}{% if m.tool_calls %}{{- '<|calls_begin|>' }}"
    "{%- for call in m.tool_calls %}{{- '\n' if not loop.first else '' }}{{- '<|call_begin|>function<|sep|>' + call.function.name + '\n```json\n' }}"
    "{{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) + '\n```<|call_end|>' }}"
    "{%- endfor %}{{- '<|calls_end|>' }}{% endif %}{{- '<|end_of_sentence|>' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|Assistant|>' }}{% endif %}"
)
GLM = (
    "{{- '[gMASK]<sop>' }}{% if tools %}{{- '<|system|>\n' + tools | tojson }}{% endif %}{% for m in messages %}"
    "{%- if m.role == 'tool' %}{{- '<|observation|>\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- else %}{{- '<|' + m.role + '|>\n' + m.content }}{% for call in m.tool_calls or [] %}"
    "{{- '\n<tool_call>' + call.function.name + '\n' }}{% for key, value in call.function.arguments | items %}"
    "{{- '<arg_key>' + key + '</arg_key>\n<arg_value>' + (value if value is string else value | tojson) + '</arg_value>\n' }}"
    "{%- endfor %}{{- '</tool_call>' }}{% endfor %}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Layout:
    """A chat template with the tokens of its tokenizer. ``end``: what ends a turn of the assistant."""

    template: str
    specials: tuple[str, ...]
    end: str
    added: tuple[str, ...] = ()  # tokens that are not flagged as special
    bos: str | None = None


_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
LAYOUTS = {
    "qwen3": Layout(QWEN3, _IM, "<|im_end|>", _THINK),
    "qwen3-opens-thinking": Layout(QWEN3_OPENS, _IM, "<|im_end|>", _THINK),
    "llama3": Layout(
        LLAMA3,
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        bos="<|begin_of_text|>",
    ),
    "gemma3": Layout(
        GEMMA3,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
        ("\n\n", "[multimodal]"),
        "<bos>",
    ),
    "qwen3-coder": Layout(QWEN3_CODER, _IM, "<|im_end|>", _THINK),
    "qwen3.5": Layout(QWEN35, _IM, "<|im_end|>", _THINK),
    "olmo3": Layout(OLMO3, _IM, "<|im_end|>"),
    "smollm3": Layout(SMOLLM3, _IM, "<|im_end|>", _THINK[:2]),
    "gpt-oss": Layout(
        GPT_OSS,
        (
            *("<|endoftext|>", "<|start|>", "<|message|>", "<|channel|>", "<|constrain|>"),
            *("<|end|>", "<|call|>", "<|return|>"),
        ),
        "<|return|>",
    ),
    "chatml": Layout(CHATML, _IM, "<|im_end|>"),
}
CALL_LAYOUTS = {
    "mistral": Layout(MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"), "</s>", bos="<s>"),
    "deepseek": Layout(
        DEEPSEEK,
        ("<|begin|>", "<|end_of_sentence|>", "<|User|>", "<|Assistant|>", "<|calls_begin|>", "<|calls_end|>"),
        "<|end_of_sentence|>",
        bos="<|begin|>",
    ),
    "glm": Layout(GLM, ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>"), "<|user|>", _THINK),
}


@cache
def tokenizer_of(name: str) -> Any:
    """The small tokenizer of a layout: bytes, a few merges, its special tokens."""
    layout = (LAYOUTS | CALL_LAYOUTS)[name]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=list(layout.specials), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in layout.added])
    eos = next(token for token in layout.specials if "end" in token or token in ("<eos>", "</s>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos, pad_token=eos, bos_token=layout.bos, chat_template=layout.template
    )
