"""The page about the code: the calls that it lists between a command and a formula are those that are made."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import posttrain
from posttrain.algorithms.objectives.supervised import cross_entropy
from posttrain.cli import main
from posttrain.registry import register
from posttrain.types import Batch, Loss, Outputs
from small_runs import one_layer_recipe

PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "code-tour.md"
PACKAGE = Path(posttrain.__file__).parent
CALLS: list[tuple[str, str]] = []  # the file and the function of each call, the outer ones first


@register("objective", level="token")
def watched_cross_entropy(outputs: Outputs, batch: Batch) -> Loss:
    """Cross-entropy, which keeps the calls that have led to it."""
    if not CALLS:
        for frame in traceback.extract_stack()[:-1]:
            path = Path(frame.filename)
            if path.is_relative_to(PACKAGE):
                CALLS.append((path.relative_to(PACKAGE).as_posix(), frame.name))
    return cross_entropy(outputs, batch)


def listed_calls() -> list[tuple[str, str]]:
    block = re.search(r"```text\n(cli\.py.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    calls = []
    for line in block[1].splitlines()[:-1]:
        file, functions, *_ = re.split(r" {2,}", line)
        for name in functions.split(" -> "):
            calls.append((file, name.rpartition(".")[2]))
    return calls


def test_the_calls_of_the_code_tour_are_those_of_a_run(tmp_path: Path) -> None:
    recipe = one_layer_recipe("sft", objective="test_code_tour:watched_cross_entropy", train={"steps": 1, "lr": 1e-3})
    path = tmp_path / "mine.yaml"
    path.write_text(recipe.to_yaml())
    own = ["--allow-code", "test_code_tour:watched_cross_entropy"]
    assert main(["train", str(path), "--run", "it", "--runs-dir", str(tmp_path), "--quiet", *own]) == 0
    assert listed_calls() == CALLS
    assert len(CALLS) + 1 == 14, "the page says how many, with the formula"
    assert len({file for file, _ in CALLS}) + 1 == 6
