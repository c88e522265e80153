"""Refuse words of a private dialect: in documents, messages, docstrings and comments, and in names.

``python tools/plain_words.py [FOLDER ...]`` prints each match; the terms to use are in CONTRIBUTING.md.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("src/posttrain", "tools", "benchmarks", "contrib", "examples")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs")
# Generated, or about what was.
SKIPPED = ("docs/decisions", "CHANGELOG.md", "notes")
PROSE = re.compile(
    r"\b(?:(?:is|are|be) told|beside|comes to|owed|owes|strangers?|kin|whoever|world of one|what becomes of"
    r"|nobody asked|speaks for|stands on|in parts|the house)\b|, for (?:it|they)\b",
    re.IGNORECASE,
)
NAMES = {
    "told", "stated", "said", "says", "asked", "beside", "owed", "headline", "doorway", "speech", "keeper",
    "courier", "placed", "fleet", "standing", "contest", "course", "remark", "kin", "passes", "cell", "donor", "dose",
    "treatment", "homes",
}  # fmt: skip
PHRASES = ("stand_in", "words_of")
OPENINGS = ("What", "Whether", "Who", "Where", "How", "Which", "Why", "When", "Of", "Whoever")
# Whole lines that may hold such a word, because it is a term here or a quotation.
ALLOWED: tuple[str, ...] = (
    '"eval.beside": "eval.engine: vllm, which answers on another device; training waits for it",',
)


def bad_name(name: str) -> bool:
    """Return whether a name of the code has a word of the dialect in it."""
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    words = {word for part in plain.split("_") for word in (part, part.removesuffix("s"))}
    return bool(words & NAMES) or any(phrase in plain for phrase in PHRASES)


def check_python(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, what) for a Python file."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_text = token.type in (tokenize.COMMENT, tokenize.STRING) or tokenize.tok_name[token.type] == "FSTRING_MIDDLE"
        for offset, line in enumerate(token.string.splitlines() if is_text else ()):
            yield from ((token.start[0] + offset, match[0]) for match in PROSE.finditer(line))
    if bad_name(path.stem):
        yield 1, f"module {path.stem}"
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    if path.is_relative_to(ROOT / "src"):
        for node in tree.body:
            if isinstance(node, documented) and not node.name.startswith("_") and ast.get_docstring(node) is None:
                yield node.lineno, f"no docstring: {node.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and bad_name(node.name):
            yield node.lineno, f"name {node.name}"
        if isinstance(node, ast.arg) and bad_name(node.arg):
            yield node.lineno, f"name {node.arg}"
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and bad_name(node.target.id):
            yield node.lineno, f"name {node.target.id}"
        if isinstance(node, documented):
            first = (ast.get_docstring(node) or "").split(" ", 1)[0].split("\n", 1)[0].strip(",.:")
            if first in OPENINGS:
                yield getattr(node, "lineno", 1), f"docstring that opens with {first}"


def check_text(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, what) for a document."""
    if bad_name(path.stem):
        yield 1, f"file {path.stem}"
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        yield from ((number, match[0]) for match in PROSE.finditer(line))


def main(arguments: list[str]) -> int:
    """Print every match; 1 if there are any."""
    places = [ROOT / name for name in arguments or (*SOURCES, *DOCUMENTS)]
    files = sorted(path for place in places for path in ([place] if place.is_file() else place.rglob("*")))
    count = 0
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        if path.suffix not in (".py", ".md", ".yaml", ".jinja") or name.startswith(SKIPPED) or path == Path(__file__):
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        for line, what in (check_python if path.suffix == ".py" else check_text)(path):
            if lines[line - 1].strip() not in ALLOWED:
                count += 1
                print(f"{name}:{line}: {what}")
    print(f"{count} words to replace" if count else "no words of a dialect")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
