"""The text of an assistant is the same tokens in every entry: what was sampled, read as data, is what was sampled."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from model_templates import LAYOUTS, tokenizer_of
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from posttrain import registry
from posttrain.data.jsonl import jsonl
from posttrain.data.preferences import preferences
from posttrain.data.render import Template, decode_response, encode_prompt
from posttrain.data.render.assistant import encode_answer
from posttrain.data.render.encoding import markers_of
from posttrain.data.render.rows import Shape, rows_of
from posttrain.types import Message

QUESTION = "Which river flows through Paris?"
PROMPT = (Message("user", QUESTION),)
CASES = [(name, "chat") for name in LAYOUTS] + [("qwen3", name) for name in ("plain", "dialogue", "boxed", "code")]
CHANNELS = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>")


def template_of(name: str) -> Template:
    return registry.find("template", name).bind({"chat": False} if name == "code" else {})()


def sampled(name: str, template: Template, *, thinks: bool) -> Iterator[list[int]]:
    """Ids as a model samples them behind the prompt: random tokens, the tags of thinking among them."""
    tokenizer = tokenizer_of(name)
    special = markers_of(tokenizer).id_set
    common = [i for i in range(len(tokenizer)) if i not in special and "\ufffd" not in tokenizer.decode([i])]
    prompt = tokenizer.decode(encode_prompt(tokenizer, template, PROMPT))
    is_open = prompt.rstrip().endswith("<think>")
    space = " " if template.name == "dialogue" else ""  # what a model writes behind the name of the assistant
    before, between = CHANNELS if name == "gpt-oss" else ("" if is_open else "<think>", "</think>")
    lead = ("</think>" if is_open else "<|channel|>final<|message|>" if name == "gpt-oss" else "") if not thinks else ""
    draw = random.Random(f"{name} {template.name} {thinks}")
    found = 0
    for _ in range(1000):
        if found == 5:
            return
        words = [tokenizer.decode(draw.choices(common, k=draw.randint(1, 12))) for _ in range(2)]
        text = space + (f"{before}{words[0]}{between}{words[1]}" if thinks else lead + words[1])
        ids = tokenizer.encode(text, add_special_tokens=False)
        if "<" in "".join(words) or not words[1].strip() or tokenizer.decode(ids) != text:
            continue
        found += 1
        yield ids
    raise AssertionError("too few texts are kept by the tokenizer")


def answer_in(row: dict[str, Any], shape: Shape, path: Path, name: str, template: Template) -> list[int]:
    """The ids of the answer of a row, or of the chosen one."""
    file = path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    read: Callable[..., Any] = preferences if "chosen" in row else jsonl
    (example,) = read(path=str(file), split="all").examples
    unit, *_ = rows_of(tokenizer_of(name), template, example, shape)
    assert not isinstance(unit, str), unit
    assert unit[0].ids[: unit[0].prompt_length] == encode_prompt(tokenizer_of(name), template, PROMPT)
    return unit[0].ids[unit[0].prompt_length : -1]


def entries(path: Path, name: str, template: Template, text: str) -> dict[str, list[int]]:
    request, message = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": text}
    pair = {"prompt": QUESTION, "chosen": text, "rejected": "No."}
    rows: dict[str, tuple[dict[str, Any], Shape]] = {
        "response": ({"prompt": QUESTION, "response": text}, "demonstration"),
        "conversation": ({"messages": [request, message]}, "demonstration"),
        "pair": (pair, "pair"),
        "judged": (pair, "judged"),
        "demonstration of a pair": (pair, "demonstration"),
    }
    found = {entry: answer_in(row, shape, path, name, template) for entry, (row, shape) in rows.items()}
    prompt = encode_prompt(tokenizer_of(name), template, PROMPT)
    return found | {"scored": encode_answer(tokenizer_of(name), template, text, prompt, {})}


@pytest.mark.parametrize(("name", "template"), CASES)
@pytest.mark.parametrize("thinks", [False, True])
def test_sampled_ids_read_as_data_are_the_same_ids(tmp_path: Path, name: str, template: str, thinks: bool) -> None:
    made, tokenizer = template_of(template), tokenizer_of(name)
    prompt = encode_prompt(tokenizer, made, PROMPT)
    for ids in sampled(name, made, thinks=thinks):
        for text in (decode_response(tokenizer, made, ids, prompt), tokenizer.decode(ids)):
            found = entries(tmp_path, name, made, text)
            conversation = tokenizer.decode(found.pop("conversation"))
            assert found == dict.fromkeys(found, ids), text
            # in a conversation the chat template may strip a text and writes thinking in its own form
            assert "".join(conversation.split()) == "".join(tokenizer.decode(ids).split()), text


@pytest.mark.parametrize("name", ["chat", "boxed", "as_is"])
def test_answer_within_thinking_that_the_prompt_opened_is_none(name: str) -> None:
    tokenizer = tokenizer_of("qwen3-opens-thinking")
    template = registry.find("template", name).bind({"chat": True} if name == "boxed" else {})()
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    prompt = encode_prompt(tokenizer, template, (Message("user", rendered),) if name == "as_is" else PROMPT)
    for message, answer in (("It may be 41, \\boxed{41}", None), ("41\n</think>\n\nIt is \\boxed{42}", "42")):
        ids = tokenizer.encode(message, add_special_tokens=False)
        text = decode_response(tokenizer, template, ids, prompt)
        assert text == f"<think>\n{message}"
        assert template.extract(text) == answer


def test_user_who_ends_with_the_tag_opens_no_thinking() -> None:
    for name, template in (("qwen3", "plain"), ("chatml", "plain"), ("chatml", "chat"), ("qwen3", "chat")):
        tokenizer, made = tokenizer_of(name), template_of(template)
        prompt = encode_prompt(tokenizer, made, (Message("user", "Say it <think>\n"),))
        assert decode_response(tokenizer, made, tokenizer.encode("42"), prompt) == "42"


def sentencepiece(kind: str, template: str) -> Any:
    """A tokenizer as converted from SentencePiece: a space in front of a text, or of every text behind a marker."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁HeloIt42.", "▁H", "▁I"]
    backend = Tokenizer(
        models.BPE(
            {p: i for i, p in enumerate(pieces)}, [("▁", "H"), ("▁", "I")], byte_fallback=True, unk_token="<unk>"
        )
    )
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in pieces[:3]])
    if kind == "legacy":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )


ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
MISTRAL_7B = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content + eos_token }}{% endfor %}"
)


@pytest.mark.parametrize("kind", ["first", "always", "legacy"])
@pytest.mark.parametrize("chat_template", [ZEPHYR, MISTRAL_7B])
def test_rows_of_a_tokenizer_that_begins_texts_with_a_space_are_the_whole_text_encoded(
    tmp_path: Path, kind: str, chat_template: str
) -> None:
    """A part of a row goes on behind others: Zephyr's ``Hello`` behind a line break was trained as `` Hello``."""
    tokenizer, template = sentencepiece(kind, chat_template), template_of("chat")
    turns = [{"role": "user", "content": "42"}, {"role": "assistant", "content": "Hello"}]
    turns = [*turns, turns[0], turns[1] | {"content": "It"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns}) + "\n", encoding="utf-8")
    (example,) = jsonl(path=str(tmp_path / "rows.jsonl"), split="all").examples
    ((row,),) = rows_of(tokenizer, template, example, "demonstration")
    whole = tokenizer.encode(tokenizer.apply_chat_template(turns, tokenize=False), add_special_tokens=False)
    assert row.ids == whole[: len(row.ids)]
    trained = [id for t, id in enumerate(row.ids) if t >= row.prompt_length and t not in row.heard]
    start = "▁H" if chat_template == MISTRAL_7B else "H"
    assert tokenizer.convert_ids_to_tokens(trained)[:5] == [start, "e", "l", "l", "o"]
    prompt = encode_prompt(tokenizer, template, (Message("user", "42"),))
    assert encode_answer(tokenizer, template, "Hello", prompt, {}) == trained[:5]
