"""Write notebooks from four tutorials, or check with ``--check`` that they are up to date.

A paragraph is a Markdown cell, a ``bash`` block a cell of ``!`` commands, a ``python`` block a cell of code or, if its
first line names a file, a cell that writes it. A ``text`` block right after a cell of code is its stored output.
Cells without such a block have the output of their last recorded run (``benchmarks/results/notebooks.json``).
``--run NAME ...`` runs notebooks in a kernel and records them; it needs nbclient and ipykernel.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = ("grpo-on-tiny", "a-model-that-people-know", "your-data-and-reward", "what-did-rl-change")
FOLDER = ROOT / "docs" / "learn"
RECORDED = ROOT / "benchmarks" / "results" / "notebooks.json"
WORK = ROOT / "build" / "notebooks"
MAX_LINES, MAX_COLUMNS = 40, 160  # of a stored output
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
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


def notebook_text(text: str, recorded: Mapping[str, str]) -> str:
    """Return a tutorial as a notebook (nbformat 4.5). ``recorded``: output by the source of a cell."""
    blocks: list[dict[str, Any]] = []
    for kind, source in read_blocks(text):
        if kind == "output":
            blocks[-1]["outputs"] = stored_output(source)
            continue
        cell = {"cell_type": kind, "id": f"cell-{len(blocks)}", "metadata": {}}
        cell["source"] = source.splitlines(keepends=True)
        if kind == "code":
            cell |= {"execution_count": None, "outputs": stored_output(recorded.get(source, ""))}
        blocks.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    document = {"cells": blocks, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def stored_output(text: str) -> list[dict[str, Any]]:
    """Return what a cell printed, as its output; nothing for an empty text."""
    if not text:
        return []
    return [{"name": "stdout", "output_type": "stream", "text": f"{text}\n".splitlines(keepends=True)}]


def read_recorded() -> dict[str, dict[str, str]]:
    """Return the recorded outputs: by notebook, by the source of a cell."""
    if not RECORDED.is_file():
        return {}
    content: dict[str, dict[str, str]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return content


def run_notebook(name: str) -> dict[str, str]:
    """Run a notebook in a folder of its own, and return what its cells printed, by their source."""
    import nbclient
    import nbformat

    shutil.rmtree(WORK / name, ignore_errors=True)
    (WORK / name).mkdir(parents=True)
    notebook = nbformat.reads(notebook_text((FOLDER / f"{name}.md").read_text(encoding="utf-8"), {}), as_version=4)
    place = {"metadata": {"path": str(WORK / name)}}
    nbclient.NotebookClient(notebook, timeout=3600, kernel_name="python3", resources=place).execute()
    printed = {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            texts = [output.get("text", "") for output in cell.outputs]
            printed[cell.source] = shown_output("".join(texts))
    return printed


def shown_output(text: str) -> str:
    """Return an output as a reader sees it: the last state of rewritten lines, no colours, a bounded length."""
    lines = []
    for line in _ESCAPE.sub("", text).split("\n"):
        states = [state for state in line.split("\r") if state.strip()]
        shown = "".join(states[-1:]).rstrip().replace(str(WORK), "")
        if len(shown) > MAX_COLUMNS:
            shown = f"{shown[: MAX_COLUMNS - 1]}…"
        lines.append(shown)
    if len(lines) > MAX_LINES:
        half = MAX_LINES // 2
        lines = [*lines[:half], f"… {len(lines) - 2 * half} lines …", *lines[-half:]]
    return "\n".join(lines).strip("\n")


def main() -> int:
    recorded = read_recorded()
    if sys.argv[1:2] == ["--run"]:
        for name in sys.argv[2:]:
            recorded[name] = run_notebook(name)
        RECORDED.write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for name in TUTORIALS:
        path = FOLDER / f"{name}.ipynb"
        text = notebook_text((FOLDER / f"{name}.md").read_text(encoding="utf-8"), recorded.get(name, {}))
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            print(f"docs/learn/{name}.ipynb does not match its tutorial: run `make docs`", file=sys.stderr)
            return 1
    print("the notebooks match their tutorials" if "--check" in sys.argv[1:] else f"wrote {len(TUTORIALS)} notebooks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
