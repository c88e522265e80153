"""Recipes that are no good YAML, whatever reads them, and files that are no files."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import yaml
from fuzz_case import FIFO, FOLDER, LOADERS, Case, dump

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + below] * 9)}]\n" for below, name in zip("abcdefghi", "bcdefghij", strict=True)
)
MERGE_BOMB = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 40)
)


def broken(text: str) -> Iterator[tuple[str, bytes]]:
    """(what was done, bytes) of a good recipe's text made bad."""
    plain = text.encode()
    yield "empty", b""
    yield "null", b"null\n"
    yield "a list", b"- train\n- 3\n"
    yield "binary", bytes(range(256)) * 4
    yield "NUL", plain + b"more: a\0b\n"
    yield "bell", plain + b"more: a\x07b\n"
    yield "Latin-1", plain + "more: Größe\n".encode("latin-1")
    yield "UTF-16", text.encode("utf-16")
    yield "surrogate", plain + b"more: \xed\xa0\x80\n"
    yield "tab", plain + b"more:\n\ta: 1\n"
    yield "unclosed list", plain + b"more: [1, 2\n"
    yield "unclosed quote", plain + b'more: "a\n'
    yield "colon", plain + b"more: a: b\n"
    yield "percent", b"%YAML 9.9\n---\n" + plain
    yield "at sign", plain + b"more: @x\n"
    yield "duplicate key", plain + b"description: again\n"
    yield "duplicate inner key", plain + b"more: {a: 1, a: 2}\n"
    yield "two documents", plain + b"---\n" + plain
    yield "cycle", plain + b"more: &a [*a]\n"
    yield "whole cycle", b"&a\nmore: *a\n" + plain
    yield "merge cycle", plain + b"more: &a {<<: *a}\n"
    yield "merge of an unknown anchor", plain + b"<<: *nowhere\n"
    yield "alias bomb", plain + BOMB.encode()
    yield "merge bomb", plain + MERGE_BOMB.encode()
    yield "many aliases", plain + b"z: &z [" + b"1, " * 2000 + b"1]\nmore: [" + b"*z, " * 3000 + b"*z]\n"
    yield "deep lists", plain + b"more: " + b"[" * 10_000 + b"]" * 10_000 + b"\n"
    yield "deep mappings", plain + b"more: " + b"{a: " * 5_000 + b"1" + b"}" * 5_000 + b"\n"
    yield "huge", plain + b"more: [" + b"1, " * 3_000_000 + b"1]\n"
    yield "huge integer", plain + b"more: " + b"9" * 5000 + b"\n"
    yield "huge hexadecimal", plain + b"more: 0x" + b"f" * 200_000 + b"\n"
    yield "no such date", plain + b"more: 2024-13-45\n"
    yield "time out of range", plain + b"more: 2001-12-14t99:59:43.10-05:00\n"
    yield "list as key", plain + b"? [1, 2]\n: 3\n"
    yield "null as key", plain + b"~: 3\n"
    yield "number as key", plain + b"7: 3\n"
    yield "empty key", plain + b"'': 3\n"
    yield "equals", plain + b"more: =\n"
    for tag in (
        "!!python/object/apply:os.system [id]",
        "!!python/name:os.system",
        "!!set {a, b}",
        "!!binary aGk=",
        "!own x",
        "!!int x",
        "!!bool maybe",
        "!!map [1]",
        "!!nonsense 1",
        "!!merge x",
    ):
        yield f"tag {tag.split()[0]}", plain + f"more: {tag}\n".encode()


def text_cases(random: Random) -> list[Case]:
    """Bad YAML to everything that reads a recipe."""
    cases = []
    for words, recipe in LOADERS.values():
        text = yaml.safe_dump(recipe, sort_keys=False)
        for what, content in broken(text):
            names = ("mine.yaml",)
            cases.append(Case(f"text: {what}", (*words, "mine.yaml"), names, {"mine.yaml": content}))
    return cases


def file_cases(random: Random) -> list[Case]:
    """Names of recipes that are no recipes."""
    cases = []
    long = "x" * 300
    for words, recipe in LOADERS.values():
        good = dump(recipe)
        for name, files in (
            ("folder.yaml", {"folder.yaml": FOLDER}),
            ("pipe.yaml", {"pipe.yaml": FIFO}),
            ("zero.yaml", {"zero.yaml->": "/dev/zero"}),
            ("/dev/zero", {}),
            ("/proc/self/mem", {}),
            ("circle.yaml", {"circle.yaml->": "circle.yaml"}),
            ("nowhere.yaml", {}),
            (f"{long}.yaml", {}),
            (f"a/{long}/b.yaml", {}),
            ("", {}),
            (".", {}),
            ("/", {}),
            ("mine.yaml/x.yaml", {"mine.yaml": good}),
            ("bad\udcff.yaml", {}),
            ("a\nb.yaml", {}),
            ("\x1b[2J.yaml", {}),
            ("²", {}),
        ):
            shown = (name, name[:40], repr(name)[1:-1][:40], "recipe") if name else ("RECIPE", "recipe", "MODEL", "''")
            cases.append(Case("recipe file", (*words, name), shown, files))
        for below, more in (
            ("nowhere", {}),
            ("mine.yaml", {}),
            ("other.yaml", {"other.yaml": b"extends: mine.yaml\n"}),
            ("3", {}),
            ("pipe.yaml", {"pipe.yaml": FIFO}),
            ("folder.yaml", {"folder.yaml": FOLDER}),
            ("/dev/zero", {}),
            (long, {}),
            (f"{long}.yaml", {}),
            ("''", {}),
            ("../../../../etc/passwd", {}),
            ("other.yaml", {"other.yaml": b"extends: [\n"}),
            ("other.yaml", {"other.yaml": BOMB.encode()}),
            ("c1.yaml", {f"c{i}.yaml": f"extends: c{i + 1}.yaml\n".encode() for i in range(1, 400)}),
        ):
            content = f"extends: {below}\n".encode() + good
            cases.append(Case("extends", (*words, "mine.yaml"), ("extends", below), {"mine.yaml": content, **more}))
    for name in ("pipe", "folder", "", "nowhere", long, "²", "/dev/zero", "bad\udcff"):
        shown = (name[:40], "NAME", "name", repr(name)[1:-1])
        files = {name: FIFO} if name == "pipe" else {name: FOLDER} if name == "folder" else {}
        cases.append(Case("recipe file", ("recipes", "show", name), shown, files))
    return cases
