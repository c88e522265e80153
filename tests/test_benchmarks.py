"""Every script in benchmarks/ runs in its smallest form: one that no test runs breaks silently."""

from __future__ import annotations

import ast
import gzip
import importlib.util
import json
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from small_gguf import write_gguf

FOLDER = Path(__file__).parents[1] / "benchmarks"
# By script: its arguments, the package that it needs, and a text of its output.
SMALLEST: dict[str, tuple[list[list[str]], str | None, str]] = {
    "checkpoints.py": ([["--width", "64", "--layers", "2"]], None, "sharded: {'seconds'"),
    "code_tests.py": ([["--only", part, "--size", "smallest"] for part in ("attacks", "seconds")], None, ""),
    "conformance.py": ([["--only", "zoo"]], None, "80 wrong functions"),
    "cpu.py": (
        [["--rows", "sft,ppo,sampling-ragged,grading,help", "--rounds", "1", "--steps", "1"]],
        None,
        "times as fast",
    ),
    "demo.py": ([["--seeds", "0"], ["--seeds", "0", "--story", "tools"]], None, "seed 0: base 0.0%"),
    "saes.py": (
        [["--only", "speed", "--steps", "1", "--repeats", "1"], ["--only", "planted", "--scale", "0.01"]],
        None,
        "wrote ",
    ),
    "differences.py": ([["--rows", "3000", "--steps", "20"]], None, "difference_k1_of_24"),
    "engine.py": ([["--threads", "1", "--pairs", "1"]], None, "1 thread(s)  ragged"),
    "extraction.py": ([["--repeats", "1"]], None, '"bit_equal": true'),
    "game.py": ([["--seeds", "0", "--sft-steps", "2", "--grpo-steps", "2"]], None, "of the best (96 games)"),
    "gpu.py": (
        [["--smallest", "--rows", "decode-64,generate-64,grpo-0.6b,sft-0.6b,rl-8b-lora", "--steps", "1"]],
        None,
        "decode, smallest, 8 rows of 16 tokens",
    ),
    "kill_and_resume.py": ([["--kind", "sft", "--kills", "1", "--steps", "8"]], None, "all equal"),
    "known_model.py": (
        [["--rows", "sft", "sampling-16", "--sides", "ours", "--threads", "1", "--steps", "1", "--model", "tiny"]],
        None,
        "tokens a CPU-second",
    ),
    "method_runs.py": ([["rl/gspo", "--smallest", "--out", "runs.json"]], None, "2 runs recorded"),
    "parity.py": ([["--word", "grpo", "--seeds", "1"]], "trl", "grpo"),
    "processes.py": ([["--rounds", "1", "--steps", "2"]], None, "times the tokens per second of one"),
    "reward_model_hh.py": ([["--data", "pairs", "--seeds", "0"]], None, "over length"),
    "smollm2.py": (
        [
            ["--smallest", "--limit", "4", "--model", "small.gguf", "--data", data, "--part", part]
            for part, data in (
                *(("grpo-sums", "some.jsonl"), ("sft", "some.jsonl"), ("rm", "some.jsonl"), ("dpo", "pairs.jsonl")),
                *(("sae", "some.jsonl"), ("first-answer", "some.jsonl")),
            )
        ],
        "gguf",
        "wrote ",
    ),
    "time_to_accuracy.py": (
        [["--task", "stories", "--side", "ours", "--seeds", "0", "--steps", "1"]],
        None,
        "did not reach the target",
    ),
    "training.py": (
        [["--ours", "--part", part, "--rounds", "1", "--steps", "1"] for part in ("grpo", "sft")],
        None,
        '"our_seconds"',
    ),
    "training_pairs.py": (
        [["--side", "ours", "--part", part, "--steps", "1"] for part in ("rm", "dpo")],
        None,
        "peak_megabytes",
    ),
    "turns.py": ([["--rows", "8", "--turns", "2", "--reply", "4", "--rounds", "1"]], None, "kept_to_one_turn"),
}
ELSEWHERE = {"grading.py": "tests/adversaries/test_benchmark.py", "two_checkouts.py": "tests/test_two_checkouts.py"}
PARTS = {"parity_trl.py", "planted.py", "training_reward.py"}  # of other scripts


@cache
def names_of(path: Path) -> frozenset[str]:
    """What another module can import from a file."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return frozenset(found)


def test_every_script_finds_what_it_imports() -> None:
    """Of this package, of other scripts, and of the folders of tests that a script adds to its path."""
    own = {path.stem: path for path in (*(FOLDER.parent / "tests").rglob("*.py"), *FOLDER.glob("*.py"))}
    found, missing = 0, list[str]()
    for script in FOLDER.glob("*.py"):
        text = script.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module is None or (module.partition(".")[0] != "posttrain" and module not in own):
                continue
            for name in (alias.name for alias in node.names):
                if module in own:
                    is_there = name in names_of(own[module]) and (own[module].parent == FOLDER or "sys.path" in text)
                else:
                    there = importlib.import_module(module)
                    is_there = hasattr(there, name) or (hasattr(there, "__path__") and find_spec(f"{module}.{name}"))
                found += 1
                missing += [] if is_there else [f"{script.name}: {module}.{name}"]
    assert missing == []
    assert found > 100


def test_every_script_has_a_test() -> None:
    scripts = {path.name for path in FOLDER.glob("*.py")}
    assert scripts == {*SMALLEST, *ELSEWHERE, *PARTS}
    for script, test in ELSEWHERE.items():
        assert script in (FOLDER.parent / test).read_text()
    for part in PARTS:
        assert 'if __name__ == "__main__"' not in (FOLDER / part).read_text()


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A script as a module that writes its results into ``tmp_path``."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)

    def load_script(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(Path(name).stem, FOLDER / name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        is_file = module.RESULTS.suffix == ".json"
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results" / module.RESULTS.name if is_file else tmp_path)
        (tmp_path / "results").mkdir()
        return module

    yield load_script
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(FOLDER) in str(sys.modules[name].__file__):
            del sys.modules[name]


def test_flops_of_a_step_on_a_gpu(load: Any) -> None:
    """By hand: two blocks of 2·64·16·6 + 3·64·96 weights, a head of 64·768, 136 pairs of tokens in a row of 16."""
    script = load("gpu.py")
    model = script.make_model("smallest")
    blocks = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2)
    assert blocks == 61_440
    forward = 2 * blocks * 16 + 2 * 64 * 768 * 16 + 4 * 2 * 4 * 16 * 136
    assert script.model_flops(model.config, 1, 1, 0, 16, 2.0) == 3 * forward == 10_825_728
    # Four answers of 3 tokens behind 2: the prompt once, (1 + 2) + 4 · (2·3 + 1 + 2 + 3) pairs, the head at answers.
    shared = 2 * blocks * 14 + 2 * 64 * 768 * 12 + 4 * 2 * 4 * 16 * 51
    assert script.model_flops(model.config, 3, 4, 2, 3, 1.0) == 3 * 2 * shared


def test_a_row_that_fails_is_kept_with_its_error(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("gpu.py")
    monkeypatch.setattr(script, "__file__", str(FOLDER / "no_such_script.py"))
    row = script.measure("sft-0.6b", 1, True)
    assert "no_such_script.py" in row["failed"]
    assert script.line(row).startswith("sft-0.6b: failed: ")


def test_parity_computes_our_side_of_every_row_without_the_other_library(load: Any) -> None:
    script = load("parity.py")
    cases = script.all_cases()
    assert len(cases) > 40
    for case in cases:
        draw = script.make_draw(0, case.prompt_tokens)
        loss = script.our_loss(case, draw)
        assert loss.isfinite(), case.word
        assert loss.dtype == torch.float64
    stored = json.loads((FOLDER / "results" / "parity.json").read_text())["rows"]
    assert [(row["word"], row["options"]) for row in stored] == [(case.word, case.options) for case in cases]
    equal = sum(row["verdict"] == "equal" for row in stored)
    docs = FOLDER.parent / "docs"
    assert f"in {equal} of {len(stored)} comparisons" in (docs / "coming-from" / "trl.md").read_text()
    said = f"{len(stored)} rows, {equal} equal, {len(stored) - equal} other conventions"
    assert said in (docs / "explanation" / "exactness.md").read_text()


def write_pairs(folder: Path) -> None:
    folder.mkdir()
    rows = [
        {
            "chosen": f"\n\nHuman: {i}?\n\nAssistant: It is {i}.",
            "rejected": f"\n\nHuman: {i}?\n\nAssistant: No{'!' * i}",
            "subset": "helpful-base",
        }
        for i in range(60)
    ]
    for split in ("train", "test"):
        with gzip.open(folder / f"{split}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_it_runs(
    name: str, load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands, package, message = SMALLEST[name]
    if package is not None:
        pytest.importorskip(package, reason="what it is compared with is not installed")
    before = {path: path.stat().st_mtime_ns for path in (FOLDER / "results").iterdir()}
    script = load(name)
    if name == "saes.py":
        monkeypatch.setattr(script, "PLANTED_ROWS", 65_536)
    if name == "reward_model_hh.py":
        write_pairs(tmp_path / "pairs")
        train = script.train
        short = ["--train.steps", "1", "--eval.every", "0"]
        monkeypatch.setattr(script, "train", lambda *words: train(*words[:3], [*words[3], *short]))
    if name == "smollm2.py":
        write_pairs(tmp_path / "hh_rlhf")
        write_gguf(tmp_path / "small.gguf")
        rows = [
            {"prompt": f"{i} and 1?", "response": f"{i + 1}", "text": f"{i} and 1 are {i + 1}. " * 8} for i in range(60)
        ]
        (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        pairs = [{"prompt": row["prompt"], "chosen": row["response"], "rejected": "No."} for row in rows]
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
        monkeypatch.setenv("POSTTRAIN_DATA", str(tmp_path))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for words in commands:
        monkeypatch.setattr(sys, "argv", [str(FOLDER / name), *words])
        assert not script.main()
        assert message in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (FOLDER / "results").iterdir()} == before
