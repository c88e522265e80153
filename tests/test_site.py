"""The site: it builds without a warning, and what its pages say to type runs (``make test-docs``)."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.errors import PosttrainError
from posttrain.recipes.recipe import load_recipe

pytestmark = pytest.mark.docs
ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
DOCS_PYTHON = os.environ.get("POSTTRAIN_DOCS_PYTHON", sys.executable)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# In the order in which a reader goes: later pages use runs that earlier ones made.
ORDER = ("start", "learn", "how-to", "book", "coming-from", "explanation", "reference")
AS_THEY_STAND = ("start", "learn", "book")  # elsewhere a training makes two steps and a sweep shows its plan
# What a block of Python takes from the hub, from the reader's disk, or from a package that is not ours.
NOT_HERE = ("load_dataset(", '"my-model"', "import pandas")
PUBLISHED = "smollm2"
INTERACTIVE = ("studio", "serve", "chat")
MINUTES = 15


def page_rank(page: Path) -> tuple[int, str]:
    """Return the place of a page in the order of reading."""
    folder = page.relative_to(DOCS).parts[0]
    return ORDER.index(folder) if folder in ORDER else len(ORDER), page.as_posix()


PAGES = sorted((page for page in DOCS.rglob("*.md") if page.relative_to(DOCS).parts[0] != "decisions"), key=page_rank)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One working directory for all pages."""
    return tmp_path_factory.mktemp("reader")


@pytest.fixture(scope="module")
def finished() -> set[tuple[Path, str]]:
    """Folders and commands that succeeded: a reader does not type again what an earlier page said."""
    return set()


def is_embedded(recipe: str) -> bool:
    """Return whether a recipe trains a model that ships with the package."""
    try:
        return load_recipe(recipe).model.name.startswith(("tiny", "runs/"))
    except PosttrainError:
        return False


def as_tested(page: Path, command: str) -> str:
    """Return a command as it is run here: shorter where it takes long, dry where it needs a hub."""
    words = shlex.split(command)
    if words[0] != "posttrain" or len(words) < 3:
        return command
    stands = page.relative_to(DOCS).parts[0] in AS_THEY_STAND
    if "script:short" in words:  # of a script of the reader's
        return "posttrain runs resume --help"
    if words[1] in INTERACTIVE or PUBLISHED in command:  # whose model would be fetched
        return f"posttrain {words[1]} --help"
    is_reference = "reference" in page.relative_to(DOCS).parts  # each method's recipe is trained in ``test_recipes``
    if words[1] == "train" and (is_reference or not is_embedded(words[2])):
        return f"{command} --dry-run"
    if words[1] == "train" and not stands and not {"--train.steps", "--train.num_epochs"} & set(words):
        return f"{command} --train.steps 2"
    if words[1] == "sweep" and "--dry-run" not in words and not (stands and "--train.steps" in words):
        return f"{command} --dry-run"  # whole sweeps take up to hours
    if words[1:3] == ["sae", "diff"] and not stands:  # the tutorial runs a shorter one
        return f"{command} --dry-run"
    if words[1] == "demo" and not stands:
        return "posttrain demo --help"
    return command


def run(command: str, folder: Path) -> None:
    """Run a command of a page with this Python, and assert that it succeeds."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1", "COLUMNS": "120"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60 * MINUTES,
        check=False,
    )
    is_unwritten = command.startswith("posttrain exercise check") and "not yet" in done.stdout  # the reader's part
    assert done.returncode == is_unwritten, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_site_is_built_without_a_warning_or_a_dead_link(tmp_path: Path) -> None:
    done = subprocess.run(
        [DOCS_PYTHON, ROOT / "tools" / "build_site.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    site = ROOT / "build" / "site"
    assert (site / "index.html").is_file()
    page = (site / "reference" / "methods" / "dapo" / "index.html").read_text(encoding="utf-8")
    assert page.count("<math") >= 3
    assert "https://arxiv.org/abs/2503.14476" in page
    searched = (site / "search.json").read_text(encoding="utf-8").lower()
    assert all(text in searched for text in ("learning rate", "early stopping", "push to hub"))


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(DOCS).as_posix() for page in PAGES])
def test_blocks_of_a_page_run_in_order(
    page: Path, folder: Path, finished: set[tuple[Path, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    names: dict[str, object] = {"__name__": "__main__"}
    for language, body in BLOCK.findall(page.read_text(encoding="utf-8")):
        if named := re.match(r"# ([\w./-]+\.(?:py|yaml|jsonl))\b.*\n", body):
            (folder / named[1]).write_text(body, encoding="utf-8")
        elif language == "python":
            if not any(text in body for text in NOT_HERE):
                exec(compile(body, str(page), "exec"), names)
        elif language == "bash":
            for line in body.replace("\\\n", " ").splitlines():
                command = re.split(r"\s+#", line.strip())[0]
                if command.startswith("cd "):
                    monkeypatch.chdir(folder := (folder / command[3:]).resolve())
                elif command and not command.startswith(("make ", "source ", "pip ", "export ", "git ")):
                    tested = as_tested(page, command)
                    if (folder, tested) not in finished:
                        run(tested, folder)
                        finished.add((folder, tested))


@pytest.mark.parametrize(
    "name", ["grpo-on-tiny", "a-model-that-people-know", "your-data-and-reward", "what-did-rl-change"]
)
def test_notebook_runs_from_first_block_to_last(
    name: str, folder: Path, finished: set[tuple[Path, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commands are those of the page that it is made from, which ran before; without that page they run here."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    written = importlib.import_module("write_notebooks").read_blocks((DOCS / "learn" / f"{name}.md").read_text("utf-8"))
    names: dict[str, object] = {}
    place = folder
    for kind, source in written:
        monkeypatch.chdir(place)
        if kind in ("markdown", "output"):
            continue
        if source.startswith("%%writefile "):
            first, _, body = source.partition("\n")
            (place / first.split()[1]).write_text(body, encoding="utf-8")
        elif source.startswith(("!", "%")):
            for line in source.splitlines():
                if line.startswith("%cd "):
                    place = (place / line[4:]).resolve()
                elif (place, line[1:]) not in finished:
                    run(line[1:], place)
        else:
            exec(source, names)
