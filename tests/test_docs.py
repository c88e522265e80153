"""Documents say what is true: commands parse, recipes resolve, code blocks run, generated pages match."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import posttrain
from page_commands import BLOCK, PAGES, ROOT, check, commands, is_recipe_key, write_files
from page_python import faults_of_python, python_of
from posttrain.errors import PosttrainError
from posttrain.evaluation.plan import EVALUATIONS
from posttrain.interpret.saes.sae_recipe import load_sae_recipe
from posttrain.recipes.document import known_keys
from posttrain.recipes.recipe import Recipe, load_recipe
from posttrain.sweeps.plan import load_sweep


@cache
def blocks(language: str) -> tuple[tuple[str, str], ...]:
    """(page, text) of the code blocks in a language, without their indentation."""
    return tuple(
        (page.name, "\n".join(line.removeprefix(indent) for line in text.splitlines()))
        for page in PAGES
        for indent, name, text in BLOCK.findall(page.read_text(encoding="utf-8"))
        if name == language
    )


@pytest.fixture(autouse=True)
def _folder_with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in a folder with the Python blocks that begin with the name of their file."""
    for _, text in blocks("python"):
        if named := re.match(r"# (\w+\.py)\n", text):
            (tmp_path / named[1]).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("my_rewards", None)


COMMANDS = commands()
PLACES = {command: place for place, command in reversed(COMMANDS)}  # each command once


def test_commands_are_found_wherever_a_page_or_a_help_has_one() -> None:
    found = set(COMMANDS)
    assert {
        ("README.md", "make demo"),
        ("docs/how-to/manage-runs.md", "posttrain runs delete 'test-*'"),  # of a console
        ("docs/troubleshooting.md", "posttrain train grpo-gsm8k --dry-run --memory"),  # of a table or a sentence
        ("docs/explanation/exactness.md", "python benchmarks/parity.py"),
        ("docs/coming-from/trl.md", "python benchmarks/parity.py"),
        ("help", "posttrain runs delete tiny-grpo --step 100"),
        ("benchmarks/parity.py", "python benchmarks/parity.py --word grpo"),
    } <= found
    assert len(PLACES) > 550


@pytest.mark.parametrize("command", PLACES)
def test_command_in_the_documents_can_be_typed(command: str, tmp_path: Path) -> None:
    write_files(PLACES[command], tmp_path)
    check(command, tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        "python benchmarks/parity_trl.py",  # of another script: it prints nothing
        "python benchmarks/parity.py --words grpo",
        "posttrain train tiny/grpo --objective.no_such_key 3",
        "posttrain runs resume mine --scale.processes 1",
        "posttrain evaluate tiny --task stories --task.no_such_key 1",
        "make no-such-target",
        "pip install -e '.[no-such-extra]'",
    ],
)
def test_check_of_a_dead_command_fails(command: str, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, PosttrainError, SystemExit)):
        check(command, tmp_path)


KEY = re.compile(r"(?<!`)`(?:--)?((?:" + "|".join(known_keys(Recipe, [])) + r")\.[a-z_][\w.]*)(?::? [^`\n]*)?`(?!`)")
NO_KEYS = {"reward.py", "prompt.txt", "model.safetensors", "eval.jsonl"}  # files


def test_keys_of_recipes_in_prose_and_tables_are_known() -> None:
    keys = [
        (page.relative_to(ROOT).as_posix(), key)
        for page in PAGES
        if page.parent.name != "coming-from"  # whose tables name keys of others
        for key in KEY.findall(BLOCK.sub("", page.read_text(encoding="utf-8")))
    ]
    assert len(keys) > 100
    unknown = [(place, key) for place, key in keys if not is_recipe_key(key)]
    assert unknown == []


def test_python_in_the_documents_compiles_and_its_names_and_arguments_exist() -> None:
    faults = [f"{page.name}: {fault}" for page in PAGES for fault in faults_of_python(python_of(page))]
    assert faults == []
    assert sum(len(python_of(page)) for page in PAGES) > 30


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("import posttrain as pt\npt.trian('tiny/grpo')", "trian"),
        ("import posttrain as pt\npt.train('tiny/grpo', no_such_key_of_all=1)", "no_such_key_of_all"),
        ("from posttrain.types import NoSuchName", "NoSuchName"),
        ("print(nobody_made_this)", "nobody_made_this"),
        ("def f(:", "invalid syntax"),
    ],
)
def test_faults_of_python_of_a_dead_snippet_are_named(text: str, named: str) -> None:
    (fault,) = faults_of_python([text])
    assert named in fault


def test_runs_that_pages_make_have_names_of_their_own() -> None:
    """A reader goes through them in one folder, and a name that is there is refused."""
    read = [
        page for folder in ("start", "learn", "book", "coming-from") for page in (ROOT / "docs" / folder).rglob("*.md")
    ]
    texts = [
        text for page in read for _, language, text in BLOCK.findall(page.read_text("utf-8")) if language == "bash"
    ]
    names = re.findall(r"^posttrain train .*--run (\S+)", "\n".join(texts), re.MULTILINE)
    assert len(names) > 10
    assert sorted(names) == sorted(set(names))


def test_recipes_in_the_documents_resolve(tmp_path: Path) -> None:
    written = blocks("yaml")
    assert len(written) >= 1
    for number, (page, text) in enumerate(written):
        if page == "CONTRIBUTING.md":  # its recipes use a toy word: ``test_custom_components``
            continue
        path = tmp_path / f"{page}-{number}.yaml"
        path.write_text(text, encoding="utf-8")
        if re.search("^rows:", text, re.MULTILINE):
            assert len(load_sweep(str(path), folder=tmp_path / "unused").trainings) == 9
            continue
        load = load_sae_recipe if "dictionary:" in text else load_recipe
        train = load(str(path)).resolve().train
        assert train.steps or train.num_epochs


def test_the_reference_has_a_table_of_each_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool = importlib.import_module("write_reference")
    monkeypatch.setattr(tool, "RESULTS", tmp_path)
    assert tool.gpu_texts() == []
    update = {"work": "sft", "tokens_per_second": 26_001.4, "model_flops_per_second": 1.25e14, "peak_gib": 30.04}
    update |= {"planned_gib": 31.0}
    decode = {"work": "decode", "tokens_per_second": 9_000, "peak_gib": 5, "launches_per_step": 1.5}
    rows = {
        "sft": update | {"share_of_measured_rate": 0.251, "share_of_data_sheet": 0.126},
        "decode": decode | {"vllm_tokens_per_second": 12_000, "ratio": 0.75, "remark": "at first"},
        "rl": {"work": "rl", "failed": "OutOfMemoryError"},
    }
    (tmp_path / "gpu-x.json").write_text(json.dumps({"gpu": "X", "versions": {"torch": "2.11"}, "rows": rows}))
    (text,) = tool.gpu_texts()
    assert text.splitlines()[-3:] == [
        "| sft | 26,001 | 125.0 | 25% | 13% | 30.0 | 31.0 | – | – |",
        "| decode (at first) | 9,000 | – | – | – | 5.0 | – | 2 | 12,000 (0.75 of it) |",
        "| rl | failed: OutOfMemoryError | – | – | – | – | – | – | – |",
    ]
    assert text.startswith("## Speed on one X\n")


def test_the_reference_has_the_recipes_of_a_published_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool = importlib.import_module("write_reference")
    monkeypatch.setattr(tool, "RESULTS", tmp_path)
    assert tool.published_model_text() == ""
    about = {"cpu": "X, AVX2"}
    share = {"accuracy": 0.5, "accuracy_low": 0.444, "accuracy_high": 0.556, "n": 300.0}
    spent = {"seed": 0, "cpu_seconds": 600.0, "peak_bytes": 3 * 2**30}
    answer = {"question": "What is 1 + 2 < 4?", "answer": "3"}
    answer |= {"base": {"text": "The\nsum", "right": False}, "trained": {"text": "1 + 2 = 3", "right": True}}
    trained = {"trained": share, "gained": 140, "lost": 2, "curve": [[0, 0.0], [5, 0.5]], "answers": [answer]}
    base = share | {"accuracy": 0.0, "accuracy_low": 0.0, "accuracy_high": 0.013}
    wins = {"win_rate": 0.6, "win_rate_low": 0.5, "win_rate_high": 0.7, "n": 100.0}
    pairs = {"pair_accuracy": 0.57, "pair_accuracy_low": 0.53, "pair_accuracy_high": 0.61, "n": 600.0}
    curves = {name: [[0, 0.0], [24, value]] for name, value in pairs.items()}
    for name, content in {
        "grpo-sums": {"base": base, "seeds": [spent | trained]},
        "rm": {"seeds": [spent | {"trained": pairs}]},
        "dpo": {"judge": spent | pairs, "seeds": [spent | {"against_base": wins, "curves": curves}]},
        "sft": {"seeds": [spent | {"curves": {"loss": [[0, 1.25], [16, 1.05]]}}]},
    }.items():
        (tmp_path / f"smollm2-{name}.json").write_text(json.dumps(about | content))
    text = tool.published_model_text()
    assert "dequantized from 4 bits" in text
    assert [line for line in text.splitlines() if line.startswith("| `")] == [
        "| `smollm2/grpo-sums` | 0 | 0.0 [0.0, 1.3] % | 50.0 [44.4, 55.6] % | 140 / 2 | 300 | 10.0 | 3.0 |",
        "| `smollm2/rm` | 0 | agrees with held-out pairs | 57.0 [53.0, 61.0] % | 600 | 10.0 |",
        "| `smollm2/rm` on the pairs below | 0 | agrees with held-out pairs | 57.0 [53.0, 61.0] % | 600 | 10.0 |",
        "| `smollm2/dpo` | 0 | held-out pair accuracy | 57.0 [53.0, 61.0] % | 600 | 10.0 |",
        "| `smollm2/dpo` | 0 | wins against the base | 60.0 [50.0, 70.0] % | 100 | 10.0 |",
        "| `smollm2/sft` | held-out loss | 1.250 → 1.050 after 16 steps | 10.0 |",
    ]
    picture = tool.known_model_picture(tool.read("smollm2-grpo-sums.json"))
    assert "What is 1 + 2 &lt; 4?" in picture
    assert "before: The sum" in picture
    assert "dequantized from 4 bits" in picture
    assert picture.count("<polyline") == 2  # the seed and the mean


@pytest.mark.parametrize("page", ["README.md", "docs/learn/a-model-that-people-know.md"])
def test_pages_show_the_recorded_figures_of_the_published_model(page: str) -> None:
    recorded = json.loads((ROOT / "benchmarks" / "results" / "smollm2-grpo-sums.json").read_text())
    text = (ROOT / page).read_text(encoding="utf-8")
    base = f"{100 * recorded['base']['accuracy']:.1f} %"
    for seed in recorded["seeds"]:
        share, low, high = (100 * seed["trained"][f"accuracy{bound}"] for bound in ("", "_low", "_high"))
        row = f"| {seed['seed']} | {base} | {share:.1f} % ({low:.1f} – {high:.1f}) | {seed['cpu_seconds'] / 60:.0f} |"
        assert row in text
    assert "dequantized from 4 bits" in text


def test_the_reference_runs_are_those_of_the_results() -> None:
    """By hand, from the files: a row of each kind."""
    page = (ROOT / "docs" / "reference" / "results.md").read_text(encoding="utf-8")
    demo = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text())["demos"][0]["results"]
    after = 100 * demo["after GRPO"]["accuracy"]
    assert next(line for line in page.splitlines() if line.startswith("| 0 | ")).split(" | ")[3] == f"{after:.1f} %"


def test_the_comparison_of_the_page_is_that_of_the_results() -> None:
    """The power, and a row of each table, by hand from the records of single runs."""
    page = (ROOT / "docs" / "how-to" / "compare-methods.md").read_text(encoding="utf-8")
    recorded = json.loads((ROOT / "benchmarks" / "results" / "compare-methods.json").read_text())
    final = [trial for trial in recorded["trials"] if trial["stage"] == "final" and trial["row"] == "gspo"]
    shares = [trial["outcomes"].count("1") / len(trial["outcomes"]) for trial in final]
    row = next(line for line in page.splitlines() if line.startswith("| gspo | ")).split(" | ")
    assert row[3].startswith(f"{100 * sum(shares) / len(shares):.1f}% [")
    assert row[7] == f"{100 * min(shares):.1f}%"
    assert f"{recorded['design']['final']['problems']} test problems" in page
    assert "with 80% power" in page
    assert recorded["command"] in page


def test_the_page_on_python_calls_every_public_function() -> None:
    written = [text for page, text in blocks("python") if page == "python.md"]
    calls = {ast.unparse(n.func) for text in written for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)}
    parts = {name for name, module in posttrain._PUBLIC.items() if module.startswith("parts.")}
    assert {f"pt.{name}" for name in posttrain._PUBLIC if name not in parts} <= calls
    in_loops = "\n".join(text for page, text in blocks("python") if page == "in-your-own-loop.md")
    assert parts == {name for name in parts if re.search(rf"\b{name}\b[.(]", in_loops)}


def test_links_between_documents_lead_somewhere() -> None:
    written = [page for page in PAGES if "components" not in page.parts and "keys" not in page.parts]
    links = [(p, target) for p in written for target in re.findall(r"\]\(([^)#:]+)\)", p.read_text(encoding="utf-8"))]
    assert len(links) >= 5
    for page, target in links:
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def headings_of(page: Path) -> set[str]:
    """The anchors that a page's headings get: words in lower case with hyphens between them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        words = re.sub(r"[^\w\s-]", "", plain).strip().lower()
        found.add(re.sub(r"[\s-]+", "-", words))
    return found


def test_links_to_sections_lead_to_a_heading() -> None:
    links = [(p, *link) for p in PAGES for link in re.findall(r"\]\(([^)#:]*\.md)?#([^)]+)\)", p.read_text("utf-8"))]
    assert len(links) >= 20
    for page, target, anchor in links:
        assert anchor in headings_of(page.parent / (target or page.name)), f"{page.name} links to {target}#{anchor}"


def test_the_files_of_the_book_path_are_there() -> None:
    """Files of the package that a page names by their folder exist."""
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "book").glob("*.md"))
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", pages))
    assert len(named) >= 30
    missing = {path for path in named if not (ROOT / "src" / "posttrain" / path).is_file()}
    assert not missing


def test_pinned_versions_satisfy_the_ranges() -> None:
    import tomllib

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            pins[canonicalize_name(name)] = version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    assert len(wanted) > 15
    for text in wanted:
        requirement = Requirement(text)
        if (
            requirement.name == "mcp"
        ):  # pinned to 1 for fastmcp of openenv; `make test-adapters` has an environment for each
            continue
        pinned = pins.get(canonicalize_name(requirement.name))
        assert pinned is not None, f"{requirement.name} is not in constraints.txt"
        assert requirement.specifier.contains(pinned), f"{text} does not allow {pinned}"


def test_no_registry_is_named() -> None:
    for name in ("constraints.txt", "Makefile", "pyproject.toml", ".ci/run"):
        text = (ROOT / name).read_text()
        assert re.search(r"https?://|--index-url|--extra-index-url|--find-links", text) is None, name


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no checkout")
@pytest.mark.parametrize(
    "made",
    ["runs/tiny-grpo/metrics.jsonl", f"{EVALUATIONS}/a/results.json", "activations/tiny/0.bin", "data-stories.png"],
)
def test_what_the_commands_of_the_readme_make_is_ignored(made: str) -> None:
    assert subprocess.run(["git", "check-ignore", "-q", made], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    "name", ["grpo-on-tiny", "a-model-that-people-know", "your-data-and-reward", "what-did-rl-change"]
)
def test_notebook_has_the_commands_and_code_of_its_page_in_order(name: str) -> None:
    page = (ROOT / "docs" / "learn" / f"{name}.md").read_text(encoding="utf-8")
    blocks = [(language, body.strip()) for _, language, body in BLOCK.findall(page) if language in ("bash", "python")]
    notebook = json.loads((ROOT / "docs" / "learn" / f"{name}.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    typed = [line[1:] for cell in cells if cell[0] in "!%" and cell[1] != "%" for line in cell.splitlines()]
    written = [cell.partition("\n")[2] if cell.startswith("%%") else cell for cell in cells if cell[0] not in "!"]
    assert typed == [line for language, body in blocks if language == "bash" for line in body.splitlines()]
    assert [body for language, body in blocks if language == "python" and body not in written] == []
    assert len(typed) >= 3
