"""The steps of CONTRIBUTING.md, executed in a copy of the package as a newcomer types them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from old_runs import copy_old_run
from test_custom_components import IMPORTS, SMALL, TABLE, TEXT, YAML_BLOCKS, block_of

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tools", "docs", "benchmarks/results", "Makefile", "pyproject.toml", "mkdocs.yml", "README.md")
PLACES = dict(re.findall(r"^\| \w+ \| `(\w+)` \|.*\| `([\w/.]+)` \|$", TEXT, re.MULTILINE))
# Runs commands one after the other in one process, and prints their exit codes.
DRIVER = """
import json, sys
from posttrain.cli import main
codes = [main(words) for words in json.loads(sys.argv[1])]
print("codes", json.dumps(codes))
"""
ALL_AT_ONCE = {
    "task": "{name: doubles, size: 6}",
    "rewards": "[brief, {name: correct, mode: brackets}]",
    "prompt.template": "{name: question, mark: 'B:'}",
    "advantage": "{name: ranked, width: 0.5}",
    "rollout.engine": "plain",
    "rollout.old_logprobs": "trainer",
}


def imports_for(block: str) -> str:
    """The lines of the page's imports that a component needs, and no more."""
    lines = []
    for module, names in re.findall(r"^from (\S+) import (.+)$", IMPORTS, re.MULTILINE):
        used = [name for name in names.split(", ") if re.search(rf"\b{name}\b", block)]
        if used:
            lines.append(f"from {module} import {', '.join(used)}")
    for module in re.findall(r"^import (\w+)$", IMPORTS, re.MULTILINE):
        if f"{module}." in block:
            lines.append(f"import {module}")
    return "\n".join(lines)


def insert_after(path: Path, anchor: str, line: str) -> None:
    """Add a line after the first one that begins with ``anchor``."""
    lines = path.read_text(encoding="utf-8").splitlines()
    place = next(i for i, text in enumerate(lines) if text.startswith(anchor))
    lines.insert(place + 1, line)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def add_column(package: Path) -> None:
    declared, written, read = re.findall(r"^```text\n(.*num_characters.*)\n```", TEXT, re.MULTILINE)
    insert_after(package / "store/schema.py", '    "failures": "TEXT"', declared)
    insert_after(package / "store/rollouts.py", '        "failures": None', written)
    insert_after(package / "store/rollouts.py", "    failures: tuple[str, ...] = ()", read)


class Copy:
    """A copy of the repository with every component and the column of the page, outside of any lists."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.package = folder / "src/posttrain"
        for name in COPIED:
            source = ROOT / name
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            else:
                shutil.copy(source, folder / name)
        for _, word, _ in TABLE:
            path = self.package / PLACES[word]
            if path.exists():
                before = path.read_text(encoding="utf-8").rstrip("\n")
            else:
                before = imports_for(block_of(word))
            path.write_text(f"{before}\n\n\n{block_of(word)}\n", encoding="utf-8")
        (self.package / "recipes/rl/surprised.yaml").write_text(YAML_BLOCKS[0])
        add_column(self.package)

    def run(self, command: list[str]) -> str:
        """Run a command of the copy; returns what it printed."""
        environment = os.environ | {"PYTHONPATH": f"{self.folder / 'src'}{os.pathsep}{ROOT / 'tests'}"}
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
        return done.stdout

    def main(self, *commands: list[str]) -> str:
        printed = self.run([sys.executable, "-c", DRIVER, json.dumps(commands)])
        assert f"codes {json.dumps([0] * len(commands))}" in printed, printed[-3000:]
        return printed

    def evaluate(self, program: str) -> Any:
        return json.loads(self.run([sys.executable, "-c", f"import json, posttrain as pt; {program}"]))


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    folder = tmp_path_factory.mktemp("copy")
    yield Copy(folder)
    shutil.rmtree(folder)


def train(recipe: str, name: str, values: dict[str, str]) -> list[str]:
    """The command that trains two small steps with some options."""
    options = [word for key, value in (SMALL | values).items() for word in (f"--{key}", value)]
    return ["train", recipe, "--run", name, "--quiet", *options]


def test_components_of_the_page_train_in_the_package_by_their_names(copy: Copy) -> None:
    copy_old_run(copy.folder / "runs")
    printed = copy.main(
        train("rl/surprised", "mine", ALL_AT_ONCE),
        ["explain", "surprised"],
        ["explain", "distance"],
        ["runs", "show", "old"],
        ["runs", "show", "mine"],
    )
    assert "power" in printed
    assert "What goes wrong" in printed
    read = "[(r.num_characters, len(r.completion), r.outcome, r.parts, r.prompt) for r in pt.load_run('{}').rollouts()]"
    rows = copy.evaluate(f"print(json.dumps([{read.format('mine')}, {read.format('old')}]))")
    new, old = rows
    assert len(new) == len(old) == 32
    for characters, length, outcome, parts, prompt in new:
        assert characters == length
        assert outcome in ("wrong", "no_answer")
        assert "brief" in parts
        assert prompt.startswith("What is ")
    assert {row[0] for row in old} == {None}
    named = copy.evaluate("print(json.dumps(pt.load_run('mine').recipe))")
    assert ":" not in str([named[key] for key in ("objective", "advantage", "task", "rewards")]).replace("': ", "")


@pytest.mark.slow
def test_environment_column_and_chat_template_of_the_page_work_in_the_package(copy: Copy) -> None:
    """With an environment; and a run of version 0.2.0, which is resumed and gets the column."""
    copy_old_run(copy.folder / "runs", "older")
    model = shutil.copytree(copy.package / "models/tiny", copy.folder / "model")
    (template,) = re.findall(r"^```jinja\n(.*?)\n```", TEXT, re.MULTILINE | re.DOTALL)
    (model / "chat_template.jinja").write_text(template)
    in_turns = {"environment": "{name: countdown, start: 3}", "rewards": "[environment, brief]"}
    chat = {"model.name": str(model), "prompt.template": "chat", "rewards": "[brief]"}
    copy.main(
        train("tiny/grpo", "turns", in_turns),
        train("tiny/grpo", "chat", chat),
        ["runs", "resume", "older", "--steps", "4", "--quiet"],
    )
    read = "[(r.num_characters, len(r.completion), r.parts, r.prompt) for r in pt.load_run('{}').rollouts()]"
    program = ", ".join(read.format(name) for name in ("turns", "chat", "older"))
    turns, chats, older = copy.evaluate(f"print(json.dumps([{program}]))")
    assert all(row[3].endswith("Count down from 3.") and "environment" in row[2] for row in turns)
    assert all(row[0] == row[1] for row in chats)
    assert [row[0] is None for row in older] == [True] * 32 + [False] * 32


@pytest.mark.slow
def test_make_docs_writes_the_pages_of_the_components(copy: Copy) -> None:
    """Without the virtual environment that ``make`` would make first: this one is there."""
    binaries = str(Path(sys.executable).parent)
    copy.run(["make", "docs", f"BIN={binaries}", "-o", ".venv/installed-dev"])
    page = (copy.folder / "docs/reference/methods/surprised.md").read_text(encoding="utf-8")
    assert "sg(−log π)^p" in page
    assert page.count("Rare tokens dominate the gradient.") == 1
    for kind, word, _ in TABLE:
        assert f"## {word}\n" in (copy.folder / f"docs/reference/components/{kind}.md").read_text(encoding="utf-8")
