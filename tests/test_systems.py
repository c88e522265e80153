"""Every row of notes/five-systems.md is there, and every command in it works: as it is written, on small models.

A command keeps its own words. Behind them stand words that make it small: a random model of the family that its recipe
names, few rows, two steps; a sweep is only planned (``--dry-run``), as the tests of sweeps run them whole. What the hub
would give lies in folders here.
"""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from posttrain.cli import main, parse
from posttrain.commands import demo
from posttrain.recipes.recipe import load_recipe
from serving import free_port
from test_recipes import local_data, random_models, small_changes  # the fixtures of the recipes' test

__all__ = ["local_data", "random_models"]

PAGE = Path(__file__).resolve().parent.parent / "notes" / "five-systems.md"
NUM_ROWS = {"S0": 17, "S1": 23, "S2": 23, "S3": 14, "S4": 16}
NO_COMMAND = {"S1.23", "S2.10", "S2.13", "S2.16", "S2.21"}
# Words behind a command, by its first words; the longest that fits.
SMALLER: dict[str, str] = {
    "sweep": "--dry-run",
    "evaluate": "--limit 3 --max-tokens 4 --quiet",
    "quantize": "--limit 2 --max-tokens 4 --quiet",
    "activations": "--max-rows 200 --quiet",
    "data show": "--limit 20",
    "demo": "--quiet",
    "runs prune": "--yes",
    "sae diff": "--dry-run",
    "sae features": "--features 1,2 --contexts 2 --no-lens --quiet",
    "sae train sae-qwen3-14b-layer20": "--activations.model.name models/deep --activations.model.dtype float32 "
    "--activations.max_rows 2000 --train.steps 2 --train.batch 64 --train.precision fp32 --eval.rows 64 --quiet",
    "sae train": "--train.steps 2 --train.batch 32 --activations.task.size 60 --eval.rows 64 "
    "--eval.documents 2 --quiet",
}
# What the hub would give, by its name there.
INSTEAD = {"Qwen/Qwen3-0.6B": "models/qwen3"}
LITTLE = [
    ("train.steps", "2"),
    ("task.size", "60"),
    ("eval.num_examples", "4"),
    ("eval.every", "2"),
    ("eval.max_tokens", "6"),
]
DEMO = {
    "tiny/sft": LITTLE,
    "tiny/grpo-demo": [*LITTLE, ("rollout.num_prompts", "2"), ("rollout.group_size", "2"), ("rollout.max_tokens", "6")],
}


def rows() -> list[tuple[str, list[str], str]]:
    """(id, commands, state) of every row."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| S\d", line)]
    values = [line.strip("|").split("|") for line in lines]
    return [(row[0].strip(), re.findall(r"`((?:posttrain|python) [^`]+)`", row[2]), row[-1].strip()) for row in values]


# Once each, under the first row that names it.
COMMANDS: dict[str, str] = {}
for _row, _commands, _ in rows():
    for _command in _commands:
        COMMANDS.setdefault(_command, _row)


def test_every_row_is_there_and_names_a_command() -> None:
    expected = [f"{system}.{number + 1}" for system, count in NUM_ROWS.items() for number in range(count)]
    assert [place for place, _, _ in rows()] == expected
    assert {place for place, commands, _ in rows() if not commands} <= NO_COMMAND | {"S4.15"}
    assert all(state for _, _, state in rows())


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory, random_models: dict[str, Path], local_data: dict[str, Path]
) -> Iterator[Path]:
    """A working directory with what the rows name: models, data, and runs that earlier commands have made."""
    folder = tmp_path_factory.mktemp("systems")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("POSTTRAIN_DATA", str(folder / "data"))
        patch.setenv("WANDB_MODE", "offline")
        patch.setattr(demo, "load_recipe", lambda name, more=(): load_recipe(name, [*DEMO[name], *more]))
        patch.setattr(demo, "NUM_HELD_OUT", 5)
        (folder / "models").mkdir()
        for name, path in (*random_models.items(), ("Qwen2.5-Math-1.5B", random_models["qwen2"])):
            (folder / "models" / name).symlink_to(path)
        write_deep(folder / "models" / "deep", random_models["qwen3"])
        for name, path in local_data.items():
            (folder / "data" / name).mkdir(parents=True)
            for split in ("train", "test"):
                (folder / "data" / name / f"{split}.jsonl").write_bytes(path.read_bytes())
        problems = [
            {"problem": f"Find ${a}+1$.", "answer": str(a + 1), "solution": f"It is ${a + 1}$."} for a in range(9)
        ]
        (folder / "data" / "math500").mkdir()
        (folder / "data" / "math500" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
        traces = [{"prompt": f"What is {a} + 1?", "response": f"#### {a + 1}", "answer": str(a + 1)} for a in range(40)]
        (folder / "traces.jsonl").write_text("".join(json.dumps(row) + "\n" for row in traces))
        texts = [{"text": f"Eva has {a} shells and finds {a + 1} more. " * 6} for a in range(60)]
        (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
        for recipe in ("tiny/grpo", "tiny/rm", "rm-hh-gpt2", "dpo-hh-gpt2"):
            run_small(f"posttrain train {recipe}", random_models, local_data)
        assert main(["sae", "train", "tiny/sae", *SMALLER["sae train"].split()]) == 0
        yield folder


def write_deep(folder: Path, start: Path) -> None:
    """As many layers, and as long texts, as the recipe of the dictionary asks for."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    same = AutoConfig.from_pretrained(start).to_diff_dict()
    kept = {key: same[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "head_dim") if key in same}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    config = AutoConfig.for_model("qwen3", num_hidden_layers=22, max_position_embeddings=8192, **heads, **kept)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(start).save_pretrained(folder)


def terms_of(command: str, models: dict[str, Path], data: dict[str, Path]) -> list[str]:
    """The words behind ``posttrain``: the command's own, and those that make it small."""
    words = [INSTEAD.get(word, word) for word in shlex.split(command)[1:]]
    first = next(
        (key for key in sorted(SMALLER, key=len, reverse=True) if f"{' '.join(words)} ".startswith(f"{key} ")), ""
    )
    words += shlex.split(SMALLER.get(first, ""))
    if words[0] != "train":
        return words
    given = parse(words)
    if given.dry_run:
        return words
    request = {key for key, _ in given.overrides}
    for key, value in small_changes(load_recipe(given.recipe, given.overrides), models, data):
        if key not in request and not (key == "train.steps" and "train.num_epochs" in request):
            words += [f"--{key}", value]
    return [*words, "--quiet"]


def run_small(command: str, models: dict[str, Path], data: dict[str, Path]) -> None:
    words = terms_of(command, models, data)
    assert main(words) == 0, f"posttrain {shlex.join(words)}"


def serve(words: list[str]) -> None:
    """A page that stays until it is stopped: it comes up."""
    port = free_port()
    command = [sys.executable, "-u", "-m", "posttrain.cli", *words, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            shown = next((line for line in process.stdout if f"http://127.0.0.1:{port}" in line), None)
        finally:
            process.terminate()
    assert shown is not None


def manage(words: list[str]) -> None:
    """The menu of runs asks in a terminal."""
    ours, theirs = pty.openpty()
    os.write(ours, b"q\n")
    command = [sys.executable, "-m", "posttrain.cli", *words]
    process = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        shown, errors = process.communicate(timeout=300)
    finally:
        process.kill()
        os.close(ours)
        os.close(theirs)
    assert process.returncode == 0, errors
    assert "tiny-grpo" in shown


OF_THEIR_OWN: dict[str, Callable[[list[str]], None]] = {"studio": serve, "runs manage": manage}


@pytest.mark.slow
@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("command", "row"), COMMANDS.items(), ids=[f"{row} {command}" for command, row in COMMANDS.items()]
)
def test_the_command_of_a_row_works(
    command: str,
    row: str,
    random_models: dict[str, Path],
    local_data: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    if command.startswith("python "):
        script = shlex.split(command.replace("contrib/", f"{PAGE.parents[1]}/contrib/"))[1:]
        done = subprocess.run([sys.executable, *script, "--limit", "8"], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{row}: {command}\n{done.stderr[-2000:]}"
        return
    words = terms_of(command, random_models, local_data)
    alone = OF_THEIR_OWN.get(words[0]) or OF_THEIR_OWN.get(" ".join(words[:2]))
    if alone is not None:
        alone(words)
        return
    code = main(words)
    shown = capsys.readouterr()
    assert code == 0, f"{row}: posttrain {shlex.join(words)}\n{shown.err[-2000:]}"
    assert "Traceback" not in shown.err
