"""Hostile models, odd addresses, empty targets, words of one's own that are of the wrong shape."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from fuzz_case import FIFO, FOLDER, RL, TINY, TINY_MODEL, Case, merged, with_value

CONFIG = json.loads((TINY / "config.json").read_text())
SIZES = ["hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"]
WRONG: tuple[Any, ...] = (-5, 0, 1e30, 10**30, 10**12, "many", None, [], {}, True, 1.5, float("nan"), "9" * 5000)
QUIET_TRAIN = ("train", "mine.yaml", "--quiet")
NO_JSON_OBJECT = (b"[]", b"3", b"null", b'"x"', b"{", b"", b"\xff\xfe")
DEEP = b'{"a": ' * 10_000 + b"1" + b"}" * 10_000


def _ask(random: Random, folder: str) -> tuple[tuple[str, ...], dict[str, bytes]]:
    """A command that opens the model in a folder, with its files."""
    short = ("--task", "stories", "--max-rows", "4", "--yes", "--out", "acts")
    return random.choice(
        [
            (("generate", folder, "hello", "--max-tokens", "2"), {}),
            (("evaluate", folder, "--task", "stories", "--n", "2", "--max-tokens", "2", "--quiet"), {}),
            (QUIET_TRAIN, {"mine.yaml": with_value(RL, "model.name", folder)}),
            (("activations", folder, "--layer", "1", *short), {}),
        ]
    )


def model_cases(random: Random) -> list[Case]:
    """A folder with a model whose files say what cannot be."""
    cases = []

    def add(name: str, content: bytes, *only: str) -> None:
        words, more = _ask(random, "m")
        names = ("m/", "model.name", "'m'", "m:", "config.json", " m ", *only)
        cases.append(Case("model", words, names, {"m": TINY_MODEL, f"m/{name}": content, **more}))

    def add_config(**changes: Any) -> None:
        add("config.json", json.dumps(CONFIG | changes).encode())

    for key in SIZES:
        for value in WRONG:
            fits = (key == "head_dim" and value is None) or (key == "num_key_value_heads" and value is True)
            if not fits:
                add_config(**{key: value})
    for content in (*NO_JSON_OBJECT, b"{}", b"\0" * 100, DEEP, b'{"hidden_size": ' + b"9" * 5000 + b"}"):
        add("config.json", content)
    for model_type in ("nonsense", 3, ["qwen3"], None, "bert", "t5", "qwen3"):
        add("config.json", json.dumps({"model_type": model_type}).encode())
    add_config(auto_map={"AutoConfig": "x.Y"}, model_type="mine")
    for changes in (
        {"quantization_config": 3},
        {"hidden_act": "nonsense"},
        {"hidden_act": 3},
        {"rms_norm_eps": "small"},
    ):
        add_config(**changes)
    add_config(layer_types=["nonsense"] * 99)
    add("config.json", json.dumps({k: v for k, v in CONFIG.items() if k != "model_type"}).encode())
    header = [(length).to_bytes(8, "little") + text for length, text in ((10**12, b"{}"), (2, b"{}"), (2, b"[]"))]
    for content in (b"", b"garbage", b"\xff" * 200, b'{"a":1}', *header):
        add("model.safetensors", content)
    for content in (b"", b"[]", b"{}", b"{", b"3", b"\xff", b'{"version": "1.0"}'):
        add("tokenizer.json", content, "tokenizer")
    for content in (b"[]", b"{", b"3", b'{"tokenizer_class": 3}'):
        add("tokenizer_config.json", content, "tokenizer")
    bases = ["3", "null", '"m"', '"a"', '"tiny"', '"no/x/y"', '"tiny", "peft_type": "LORA", "r": -3']
    configs = [f'{{"base_model_name_or_path": {base}}}'.encode() for base in bases]
    for content in (*NO_JSON_OBJECT[:5], b"{}", b"\xff", DEEP, *configs):
        words, more = _ask(random, "a")
        names = ("a/", "adapter", "model.name", "'a'")
        cases.append(Case("adapter", words, names, {"a/adapter_config.json": content, **more}))
    return cases + name_cases(random) + init_cases(random)


NO_MODELS = ["", " ", "./nowhere", "x" * 300, "./" + "x" * 300, "a//b", "²/²", "a b", "..", "/", "~nobody", "bad\udcff"]
NAMES: dict[str, dict[str, Any]] = {
    **{name: {} for name in (*NO_MODELS, "/dev/zero", "-", "http://x/y", "a" * 97 + "/" + "b" * 97)},
    "e": {"e": FOLDER},
    "f": {"f": b"x"},
    "p": {"p": FIFO},
    "c": {"c->": "c"},
    "runs": {"runs": FOLDER},
}


def name_cases(random: Random) -> list[Case]:
    """Names that stand for no model."""
    cases = []
    for name, files in NAMES.items():
        words, more = _ask(random, name)
        shown: tuple[str, ...] = ("model", "MODEL")
        if name.strip():
            shown = (name[:30], repr(name)[1:-1][:30], "model.name", "MODEL_OR_RUN")
            shown += ("mine.yaml",) if "\udcff" in name else ()
        cases.append(Case("model name", words, shown, {**files, **more}))
    return cases


def init_cases(random: Random) -> list[Case]:
    """New models and adapters that cannot be."""
    good = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    good |= {"num_key_value_heads": 1, "head_dim": 16}
    init = {"architecture": "qwen3", "config": good, "tokenizer": {"vocab_size": 300, "num_documents": 8}}
    base = merged(RL, {"model": {"init": init}})
    values = ["-5", "0", "1e30", "many", "[]", "{}", "1.5", ".nan", "2024-05-17", "1:30", "10" * 6, "10" * 15]
    stated = [(base, f"model.init.config.{key}", value) for key in SIZES for value in values]
    architectures = ("nonsense", "bert", "t5", "", "qwen-3", "²", "clip", "whisper")
    stated += [(base, "model.init.architecture", repr(name)) for name in architectures]
    base = merged(RL, {"model": {"adapter": {"rank": 2}}})
    targets = ("[]", "''", "[nowhere]", "['']", "[q_proj, 3]", "{}", "nonsense", "[[]]", "null", "['(']", "7")
    stated += [(base, "model.adapter.targets", value) for value in targets]
    numbers = ("rank 1e11", "rank 0", "rank 100000000000", "alpha 0", "alpha -1", "alpha .nan", "dropout 1")
    stated += [(base, f"model.adapter.{key}", value) for key, value in map(str.split, numbers)]
    return [
        Case("model", QUIET_TRAIN, (key, "model.init", "targets"), {"mine.yaml": with_value(recipe, key, value)})
        for recipe, key, value in stated
    ]


URLS = [
    *[
        "nonsense",
        "http://",
        "https://",
        "http:///x",
        "http://[::1",
        "http://[",
        "http://]",
        "http://[zz]:80",
        "ftp://x",
        "file:///etc/passwd",
    ],
    *[
        "//x",
        "://",
        "http://x:99999",
        "http://x:abc",
        "http://x:-1",
        "http://x:0",
        "http://x:²",
        "http://x:٣",
        "http://x?q=1",
        "http://x#f",
    ],
    *[
        "localhost:8000",
        "127.0.0.1:8000",
        "http://x:80:80",
        "javascript:alert(1)",
        "http://..",
        "http://.x",
        "http://x..y",
        "http://-",
    ],
    *[
        "http://%zz",
        "http://\\x",
        "http://:80",
        "http://@",
        "http://u:p@",
        "http:/x",
        "http:x",
        "[]",
        "3",
        "HTTP",
        "http://ｘ：８０",
    ],
    *("", " ", "http://a b/", "http://\x00x", "http://x\r\nHost: y", "http://" + "x" * 5000, "http://²/\udcff"),
]


def url_cases(random: Random) -> list[Case]:
    """Addresses of servers that are none."""
    cases = []
    recipe = merged(RL, {"rollout": {"engine": {"name": "vllm", "url": "x"}}})
    names = ("rollout.engine.url", "engine.url", "url")
    ask = ("evaluate", "tiny", "--task", "stories", "--n", "2", "--quiet", "--engine", "vllm")
    for url in URLS:
        text = with_value(recipe, "rollout.engine.url", url if url in ("[]", "3") else json.dumps(url))
        words = random.choice([("train", "mine.yaml"), ("train", "mine.yaml", "--dry-run")])
        cases.append(Case("url", words, names, {"mine.yaml": text}))
        if "\x00" not in url:
            cases.append(Case("url", (*ask, f"--engine.url={url}"), names))
    return cases


SHAPES = (
    "",
    "f = 3",
    "f = None",
    "f = 'x'",
    "1 / 0",
    "import sys\nsys.exit(0)",
    "def f(:",
    "from __future__ import annotations\ndef f(text, *, x: Fraction):\n    return 1.0",
    "def f(text, *, x: 'list[') :\n    return 1.0",
    "def f(text, *, x: int):\n    return 1.0",
    "import os as f",
    "class E(BaseException):\n    pass\nraise E('x')",
    "x = '\0'",
    "from mine import *",
    "def g():\n    return g()\ng()",
    "def f(text, *, x: 3 = 3):\n    return 1.0",
)
OWN_PLACES = [
    "objective",
    "advantage",
    "aggregate",
    "rewards.0",
    "rollout.select",
    "correction",
    "prompt.template",
    "task",
    "optimizer",
]
OWN_NAMES = [":f", "own_word:", ":", "::", "own_word:f:g", "own word:f", "..:f", "own_word:f.g", "²:f", "os:nothing"]
OWN_NAMES += ["a" * 300 + ":f", "own_word:" + "f" * 300, "/etc/passwd:f", "own_word:__name__", "\\x1b[2J:f"]


def shape_cases(random: Random) -> list[Case]:
    """Words of one's own that cannot be used; found before the run begins."""
    cases = []
    recipe = merged(RL, {"rollout": {"old_logprobs": "trainer"}})
    for place in (*OWN_PLACES, "rollout.engine"):
        for body in SHAPES:
            files = {"mine.yaml": with_value(recipe, place, "own_word:f"), "own_word.py": body.encode()}
            cases.append(Case("own word", ("train", "mine.yaml"), (place, "own_word"), files))
        for name in OWN_NAMES:
            files = {"mine.yaml": with_value(recipe, place, json.dumps(name)), "own_word.py": b"x = 1\n"}
            cases.append(Case("own word", ("train", "mine.yaml"), (place,), files))
    return cases
