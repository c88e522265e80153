"""What the fuzzer tries: a command line with its files, whether it is bad, and what the message has to name."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

FOLDER, FIFO = "folder", "fifo"  # kinds of files beside those with bytes in them
VALUE = "VALUE-GOES-HERE"

RL: dict[str, Any] = {
    "description": "a small run",
    "model": {"name": "tiny"},
    "task": {"name": "stories", "size": 32, "max_steps": 1},
    "prompt": {"template": {"name": "r1_zero", "preamble": ""}},
    "rewards": [{"name": "is_number"}],
    "rollout": {"num_prompts": 2, "group_size": 4, "max_tokens": 8},
    "objective": {"name": "grpo"},
    "train": {"steps": 1, "lr": 0.001},
}
SFT: dict[str, Any] = {
    "task": {"name": "stories", "size": 32, "max_steps": 1},
    "data": {"batch_size": 2},
    "objective": {"name": "cross_entropy"},
    "train": {"steps": 1, "lr": 0.001},
}
COMPARISON: dict[str, Any] = {
    "description": "two methods",
    "base": {
        "task": {"name": "stories", "size": 32, "max_steps": 1},
        "rollout": {"num_prompts": 2, "group_size": 4, "max_tokens": 8},
        "train": {"steps": 1, "lr": 0.001},
        "eval": {"every": 1, "num_examples": 2},
    },
    "rows": {"one": {"objective": "grpo"}, "two": {"objective": "reinforce"}},
    "seeds": 1,
}
STUDY: dict[str, Any] = {
    "description": "which answer",
    "start": {"recipe": "tiny/sft"},
    "rows": {"plain": {"recipe": "tiny/rm"}},
    "best_of_n": {"task": {"name": "stories"}, "n": 4, "samples": 2, "max_tokens": 8},
    "seeds": 1,
}
SAE: dict[str, Any] = {
    "description": "a dictionary",
    "activations": {"model": {"name": "tiny"}, "site": "resid.1", "task": {"name": "stories", "size": 32}},
    "dictionary": {"name": "topk", "k": 4},
    "train": {"steps": 1, "batch": 8},
}
DIFF: dict[str, Any] = {
    "description": "two models",
    "base": {"name": "tiny"},
    "post": {"name": "tiny"},
    "task": {"name": "stories", "size": 32},
    "changes": {"prompts": 4},
}
# Every way in which a recipe is read: the words in front of its name, and a good one.
LOADERS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "train": (("train",), RL),
    "methods": (("sweep",), COMPARISON),
    "best of n": (("sweep",), STUDY),
    "sae": (("sae", "train"), SAE),
    "diff": (("sae", "diff"), DIFF),
}


@dataclass(frozen=True)
class Case:
    """One command line.

    ``files`` lie in the working directory before: bytes, a function that makes them (few of the cases are tried), or
    one of the kinds above; a name that ends in ``->`` is a link to its contents.
    Bad unless ``good``: the message has to hold one of ``names``.
    """

    kind: str
    words: tuple[str, ...]
    names: tuple[str, ...] = ()
    files: Mapping[str, bytes | str | Callable[[], bytes]] = field(default_factory=dict)
    good: bool = False

    def lay_out(self, folder: Path) -> None:
        """Write the files."""
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name.endswith("->"):
                assert isinstance(content, str)
                (folder / name.removesuffix("->")).symlink_to(content)
            elif content == FOLDER:
                path.mkdir()
            elif content == FIFO:
                os.mkfifo(path)
            else:
                made = content() if callable(content) else content
                assert isinstance(made, bytes)
                if path.is_symlink():
                    path.unlink()
                path.write_bytes(made)


def with_value(recipe: Mapping[str, Any], key: str, text: str) -> bytes:
    """The recipe in which ``text``, as it is, stands behind a dotted key; a line for each section."""
    data: Any = copy.deepcopy(dict(recipe))
    target = data
    *above, last = key.split(".")
    for part in above:
        if isinstance(target, list):
            target = target[int(part)]
        else:
            child = target.get(part)
            if isinstance(child, str):
                target[part] = {"name": child}
            elif child is None:
                target[part] = {}
            target = target[part]
    if isinstance(target, list):
        target[int(last)] = VALUE
    else:
        target[last] = VALUE
    lines = "".join(f"{name}: {json.dumps(held)}\n" for name, held in data.items())
    return lines.replace(f'"{VALUE}"', f"{text} ").encode("utf-8", "surrogatepass")


def dump(recipe: Mapping[str, Any]) -> bytes:
    return yaml.safe_dump(dict(recipe), sort_keys=False).encode()


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Sections laid over one another."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in copy.deepcopy(dict(layer)).items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result
