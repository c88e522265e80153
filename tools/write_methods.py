"""Write ``docs/methods.md`` from the registry, or check with ``--check`` that it is up to date."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from posttrain.commands import explain as words
from posttrain.registry import Entry

TARGET = Path(__file__).resolve().parent.parent / "docs" / "methods.md"
HEADING = """\
# Methods

Every word that a recipe can name, and every section. Generated from the code by `make docs`; do not
edit. On the command line: `posttrain explain NAME`.
"""


def main() -> int:
    text = methods_text()
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text, encoding="utf-8")
        print(f"wrote docs/{TARGET.name}")
        return 0
    if not TARGET.is_file() or TARGET.read_text(encoding="utf-8") != text:
        print("docs/methods.md does not match the code: run `make docs`", file=sys.stderr)
        return 1
    print("docs/methods.md matches the code")
    return 0


def methods_text() -> str:
    """The whole document."""
    users = words.recipes_by_word()
    parts = [HEADING]
    for kind, group in words.all_words().items():
        key, purpose = words.KINDS[kind]
        parts.append(f"## {kind}\n\nKey `{key}`: {purpose}.\n")
        parts += [entry_text(entry, users.get((kind, name), [])) for name, entry in group.items()]
    parts.append("## Sections of a recipe\n")
    for name, section in words.sections().items():
        doc = words.without_arguments(inspect.getdoc(section) or "")
        parts.append(f"### `{name}`\n\n{doc}\n\n{options_text(words.section_options(section))}")
    return "\n".join(parts)


def entry_text(entry: Entry, users: list[str]) -> str:
    """One word: docstring, options, recipes."""
    used_by = ", ".join(f"`{name}`" for name in users) or "no recipe that ships"
    doc = f"```text\n{words.without_arguments(entry.doc)}\n```" if entry.doc else ""
    return f"### {entry.name}\n\n{doc}\n\n{options_text(words.word_options(entry))}\nUsed by {used_by}.\n"


def options_text(options: list[words.Option]) -> str:
    """A Markdown table of options."""
    if not options:
        return "No options.\n"
    rows = [f"| `{o.name}` | {o.type.replace('|', ' or ')} | `{o.default}` | {_cell(o.meaning)} |" for o in options]
    return "\n".join(["| option | type | default | meaning |", "|---|---|---|---|", *rows, ""])


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
