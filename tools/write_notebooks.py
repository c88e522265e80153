"""Write notebooks from four tutorials, or check with ``--check`` that they are up to date.

A paragraph is a Markdown cell, a ``bash`` block a cell of ``!`` commands, a ``python`` block a cell of code or, if its
first line names a file, a cell that writes it. A ``text`` block right after a cell of code is its stored output.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = ("grpo-on-tiny", "a-model-that-people-know", "your-data-and-reward", "what-did-rl-change")
FOLDER = ROOT / "docs" / "learn"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def read_blocks(text: str) -> list[tuple[str, str]]:
    """Return (kind, source) of the cells of a tutorial; kind is ``markdown``, ``code`` or the ``output`` of a cell."""
    blocks, end = [], 0
    for match in _BLOCK.finditer(text):
        language, body = match.groups()
        follows_code = bool(blocks) and blocks[-1][0] == "code" and not text[end : match.start()].strip()
        if language == "text" and follows_code:
            blocks.append(("output", body))
            end = match.end()
            continue
        if language not in ("bash", "python", "yaml", "json"):
            continue
        named = re.match(r"# ([\w./-]+\.(?:py|yaml|jsonl))\n", body)
        if language in ("yaml", "json") and not named:
            continue
        blocks.append(("markdown", text[end : match.start()]))
        end = match.end()
        if named:
            blocks.append(("code", f"%%writefile {named[1]}\n{body}"))
        elif language == "bash":
            blocks.append(("code", "\n".join(shell_line(line) for line in body.splitlines())))
        else:
            blocks.append(("code", body))
    blocks.append(("markdown", text[end:]))
    return [
        (kind, source.strip("\n") if kind == "output" else source.strip()) for kind, source in blocks if source.strip()
    ]


def shell_line(line: str) -> str:
    """Return a command as a notebook runs it."""
    return f"%{line}" if line.startswith("cd ") else f"!{line}"


def notebook_text(text: str) -> str:
    """Return a tutorial as a notebook (nbformat 4.5), with the outputs that it shows."""
    blocks: list[dict[str, Any]] = []
    for kind, source in read_blocks(text):
        if kind == "output":
            output = {"name": "stdout", "output_type": "stream", "text": f"{source}\n".splitlines(keepends=True)}
            blocks[-1]["outputs"].append(output)
            continue
        number = len(blocks)
        block = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source.splitlines(keepends=True)}
        blocks.append(block | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    document = {"cells": blocks, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    for name in TUTORIALS:
        path = FOLDER / f"{name}.ipynb"
        text = notebook_text((FOLDER / f"{name}.md").read_text(encoding="utf-8"))
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            print(f"docs/learn/{name}.ipynb does not match its tutorial: run `make docs`", file=sys.stderr)
            return 1
    print("the notebooks match their tutorials" if "--check" in sys.argv[1:] else f"wrote {len(TUTORIALS)} notebooks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
