"""Hostile models, odd addresses, empty targets, words of one's own that are of the wrong shape."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from fuzz_case import FIFO, FOLDER, RL, SAE, TINY, TINY_MODEL, Case, dump, merged, with_value

CONFIG = json.loads((TINY / "config.json").read_text())
SIZES = (
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
)
WRONG: tuple[Any, ...] = (-5, 0, 1e30, 10**30, 10**12, "many", None, [], {}, True, 1.5, float("nan"), "9" * 5000)


def _asks(random: Random, folder: str) -> list[tuple[tuple[str, ...], dict[str, bytes]]]:
    ways = [
        (("generate", folder, "hello", "--max-tokens", "2"), {}),
        (("evaluate", folder, "--task", "stories", "--n", "2", "--max-tokens", "2", "--quiet"), {}),
        (("train", "mine.yaml", "--quiet"), {"mine.yaml": with_value(RL, "model.name", folder)}),
        (("activations", folder, "--layer", "1", "--task", "stories", "--max-rows", "4", "--yes", "--out", "acts"), {}),
        (("data", "show", "stories", "--n", "2", "--model", folder), {}),
    ]
    return [random.choice(ways[:4])]


def model_cases(random: Random) -> list[Case]:
    """A folder with a model whose files say what cannot be."""
    cases = []
    names = ("m/", "model.name", "'m'", "m:", "config.json", " m ")

    def add(files: dict[str, Any], only: tuple[str, ...] = ()) -> None:
        for words, more in _asks(random, "m"):
            cases.append(Case("model", words, (*names, *only), {"m": TINY_MODEL, **files, **more}))

    for key in SIZES:
        for value in WRONG:
            if key == "head_dim" and value is None:
                continue
            if (key == "max_position_embeddings" and value in (10**12, 1.5, 1e30, 10**30)) or (
                value is True and key in ("num_key_value_heads",)
            ):
                continue
            add({"m/config.json": json.dumps(CONFIG | {key: value}).encode()})
    for content in (
        b"[]",
        b"3",
        b"null",
        b'"x"',
        b"{",
        b"",
        b"{}",
        b"\xff\xfe",
        b"\0" * 100,
        json.dumps([CONFIG]).encode(),
        b'{"a": ' * 10_000 + b"1" + b"}" * 10_000,
        b'{"hidden_size": ' + b"9" * 5000 + b"}",
        "ü".encode("utf-16"),
        json.dumps({"model_type": "nonsense"}).encode(),
        json.dumps({"model_type": 3}).encode(),
        json.dumps({"model_type": ["qwen3"]}).encode(),
        json.dumps({"model_type": None}).encode(),
        json.dumps({"model_type": "bert"}).encode(),
        json.dumps({"model_type": "t5"}).encode(),
        json.dumps({"model_type": "qwen3"}).encode(),
        json.dumps(CONFIG | {"auto_map": {"AutoConfig": "x.Y"}, "model_type": "mine"}).encode(),
        json.dumps(CONFIG | {"quantization_config": 3}).encode(),
        json.dumps(CONFIG | {"hidden_act": "nonsense"}).encode(),
        json.dumps(CONFIG | {"hidden_act": 3}).encode(),
        json.dumps(CONFIG | {"layer_types": ["nonsense"] * 99}).encode(),
        json.dumps(CONFIG | {"rms_norm_eps": "small"}).encode(),
        json.dumps({k: v for k, v in CONFIG.items() if k != "model_type"}).encode(),
    ):
        add({"m/config.json": content})
    for content in (
        b"",
        b"garbage",
        b"\xff" * 200,
        b'{"a":1}',
        (10**12).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
    ):
        add({"m/model.safetensors": content})
    for content in (b"", b"[]", b"{}", b"{", b"3", b"\xff", b'{"version": "1.0"}'):
        add({"m/tokenizer.json": content}, ("tokenizer",))
    for content in (b"[]", b"{", b"3", b'{"tokenizer_class": 3}'):
        add({"m/tokenizer_config.json": content}, ("tokenizer",))
    for content in (
        b"[]",
        b"{",
        b"3",
        b"{}",
        b"null",
        b'{"base_model_name_or_path": 3}',
        b'{"base_model_name_or_path": null}',
        b'{"base_model_name_or_path": "m"}',
        b'{"base_model_name_or_path": "a"}',
        b'{"base_model_name_or_path": "tiny"}',
        b'{"base_model_name_or_path": "tiny", "peft_type": "LORA", "r": -3}',
        b'{"base_model_name_or_path": "tiny", "peft_type": 7}',
        b'{"base_model_name_or_path": "nowhere/x/y"}',
        b"\xff",
        b'{"a": ' * 10_000 + b"1" + b"}" * 10_000,
    ):
        for words, more in _asks(random, "a"):
            cases.append(
                Case(
                    "adapter", words, ("a/", "adapter", "model.name", "'a'"), {"a/adapter_config.json": content, **more}
                )
            )
    return cases + name_cases(random) + init_cases(random) + adapter_cases(random)


def name_cases(random: Random) -> list[Case]:
    """Names that stand for no model."""
    cases = []
    for name, files in (
        ("", {}),
        ("e", {"e": FOLDER}),
        ("./nowhere", {}),
        ("f", {"f": b"x"}),
        ("p", {"p": FIFO}),
        ("x" * 300, {}),
        ("./" + "x" * 300, {}),
        ("a//b", {}),
        ("²/²", {}),
        ("a b", {}),
        ("..", {}),
        ("/", {}),
        ("~nobody", {}),
        ("bad\udcff", {}),
        ("c", {"c->": "c"}),
        ("/dev/zero", {}),
        ("-", {}),
        (" ", {}),
        ("runs", {"runs": FOLDER}),
        ("http://x/y", {}),
        ("a" * 97 + "/" + "b" * 97, {}),
    ):
        for words, more in _asks(random, name):
            shown = (
                (
                    name[:30],
                    repr(name)[1:-1][:30],
                    "model.name",
                    "MODEL_OR_RUN",
                    *(["mine.yaml"] if "\udcff" in name else []),
                )
                if name.strip()
                else ("model", "MODEL")
            )
            cases.append(Case("model name", words, shown, {**files, **more}))
    return cases


def init_cases(random: Random) -> list[Case]:
    """New models that cannot be."""
    good = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    base = merged(
        RL,
        {
            "model": {
                "init": {"architecture": "qwen3", "config": good, "tokenizer": {"vocab_size": 300, "num_documents": 8}}
            }
        },
    )
    cases = []
    for key in SIZES:
        for value in (
            "-5",
            "0",
            "1e30",
            "1" + "0" * 12,
            "1" + "0" * 30,
            "many",
            "[]",
            "{}",
            "1.5",
            ".nan",
            "2024-05-17",
            "1:30",
        ):
            if key == "max_position_embeddings" and value not in ("many", "[]", "{}", ".nan", "2024-05-17", "1:30"):
                continue
            name = f"model.init.config.{key}"
            cases.append(
                Case(
                    "model.init",
                    ("train", "mine.yaml", "--quiet"),
                    (name, "model.init"),
                    {"mine.yaml": with_value(base, name, value)},
                )
            )
    for name in ("nonsense", "bert", "t5", "", "qwen-3", "²", "clip", "whisper"):
        cases.append(
            Case(
                "model.init",
                ("train", "mine.yaml", "--quiet"),
                ("model.init",),
                {"mine.yaml": with_value(base, "model.init.architecture", repr(name))},
            )
        )
    return cases


def adapter_cases(random: Random) -> list[Case]:
    """Adapters without a place."""
    cases = []
    for targets in ("[]", "''", "[nowhere]", "['']", "[q_proj, 3]", "{}", "nonsense", "[[]]", "null", "['(']", "7"):
        name = "model.adapter.targets"
        text = with_value(merged(RL, {"model": {"adapter": {"rank": 2}}}), name, targets)
        cases.append(Case("adapter targets", ("train", "mine.yaml", "--quiet"), (name, "targets"), {"mine.yaml": text}))
    for key, value in (
        ("rank", "1e11"),
        ("rank", "0"),
        ("rank", "100000000000"),
        ("alpha", "0"),
        ("alpha", "-1"),
        ("alpha", ".nan"),
        ("dropout", "1"),
    ):
        name = f"model.adapter.{key}"
        text = with_value(merged(RL, {"model": {"adapter": {"rank": 2}}}), name, value)
        cases.append(Case("adapter targets", ("train", "mine.yaml", "--quiet"), (name,), {"mine.yaml": text}))
    return cases


URLS = (
    "",
    " ",
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
    "//x",
    "://",
    "http://x:99999",
    "http://x:abc",
    "http://x:-1",
    "http://x:0",
    "http://x:²",
    "http://x:٣",
    "http://a b/",
    "http://x?q=1",
    "http://x#f",
    "localhost:8000",
    "127.0.0.1:8000",
    "http://x:80:80",
    "http://\x00x",
    "http://x\r\nHost: y",
    "javascript:alert(1)",
    "http://" + "x" * 5000,
    "http://" + "a." * 200 + "b",
    "http://..",
    "http://.x",
    "http://x..y",
    "http://-",
    "http://%zz",
    "http://\\x",
    "http://:80",
    "http://@",
    "http://u:p@",
    "http://²/\udcff",
    "http:/x",
    "http:x",
    "[]",
    "3",
    "HTTP",
    "http://ｘ：８０",
)


def url_cases(random: Random) -> list[Case]:
    """Addresses of servers that are none."""
    cases = []
    for url in URLS:
        quoted = json.dumps(url) if url not in ("[]", "3") else url
        names = ("rollout.engine.url", "engine.url", "url")
        recipe = merged(RL, {"rollout": {"engine": {"name": "vllm", "url": "x"}}})
        ways = [("train", "mine.yaml"), ("train", "mine.yaml", "--dry-run")]
        text = with_value(recipe, "rollout.engine.url", quoted)
        cases.append(Case("url", random.choice(ways), names, {"mine.yaml": text}))
        if "\x00" not in url:
            ask = (
                "evaluate",
                "tiny",
                "--task",
                "stories",
                "--n",
                "2",
                "--engine",
                "vllm",
                f"--engine.url={url}",
                "--quiet",
            )
            cases.append(Case("url", ask, names))
    return cases


SHAPES = {
    "missing": "",
    "number": "f = 3",
    "none": "f = None",
    "text": "f = 'x'",
    "raises": "1 / 0",
    "exits": "import sys\nsys.exit(0)",
    "does not parse": "def f(:",
    "unknown annotation": "from __future__ import annotations\ndef f(text, *, x: Fraction):\n    return 1.0",
    "no annotation that can be": "def f(text, *, x: 'list[') :\n    return 1.0",
    "wrong default": "def f(text, *, x: int):\n    return 1.0",
    "module": "import os as f",
    "own base": "class E(BaseException):\n    pass\nraise E('x')",
    "null bytes": "x = '\0'",
    "endless name": "from mine import *",
    "recursion": "def g():\n    return g()\ng()",
    "annotation of a value": "def f(text, *, x: 3 = 3):\n    return 1.0",
}
OWN_PLACES = (
    "objective",
    "advantage",
    "aggregate",
    "rewards.0",
    "rollout.select",
    "correction",
    "prompt.template",
    "task",
    "rollout.engine",
    "optimizer",
)


def shape_cases(random: Random) -> list[Case]:
    """Words of one's own that cannot be used; found before the run begins."""
    cases = []
    for place in OWN_PLACES:
        recipe = merged(RL, {"rollout": {"old_logprobs": "trainer"}})
        for body in SHAPES.values():
            files = {"mine.yaml": with_value(recipe, place, "own_word:f"), "own_word.py": body.encode()}
            cases.append(Case("own word", ("train", "mine.yaml"), (place, "own_word"), files))
        for name in (
            ":f",
            "own_word:",
            ":",
            "::",
            "own_word:f:g",
            "own word:f",
            "..:f",
            "own_word:f.g",
            "²:f",
            "os:nothing",
            "a" * 300 + ":f",
            "own_word:" + "f" * 300,
            "/etc/passwd:f",
            "own_word:__name__",
            "\\x1b[2J:f",
        ):
            files = {"mine.yaml": with_value(recipe, place, json.dumps(name)), "own_word.py": b"x = 1\n"}
            cases.append(Case("own word", ("train", "mine.yaml"), (place,), files))
    return cases


__all__ = ["SAE", "dump", "model_cases", "shape_cases", "url_cases"]
