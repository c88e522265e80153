"""One key at several values, from the command line: a comparison whose rows differ in that key alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.cli import main, parse
from posttrain.commands.sweeps.view import command_of, folder_of
from posttrain.errors import RecipeError, UsageError
from posttrain.sweeps.compare import load_comparison


def test_each_value_is_a_row_with_its_seeds(tmp_path: Path) -> None:
    over = ("train.lr", ["1e-4", "3e-4"])
    plan = load_comparison("tiny/grpo", [("train.steps", "5")], folder=tmp_path, num_seeds=3, over=over)
    assert [method.name for method in plan.methods] == ["lr-1e-4", "lr-3e-4"]
    assert [method.differs for method in plan.methods] == [
        {"train.lr": (3.0e-5, 1.0e-4)},
        {"train.lr": (3.0e-5, 3.0e-4)},
    ]
    cells = [(cell.recipe.train.lr, cell.recipe.train.seed, cell.recipe.train.steps) for cell in plan.cells]
    assert cells == [(lr, seed, 5) for seed in range(3) for lr in (1e-4, 3e-4)]
    assert {cell.recipe.objective.name for cell in plan.cells} == {"grpo"}


def test_a_word_can_be_swept(tmp_path: Path) -> None:
    over = ("objective", ["grpo", "reinforce"])
    plan = load_comparison("tiny/grpo", folder=tmp_path, num_seeds=1, over=over)
    assert [cell.recipe.objective.name for cell in plan.cells] == ["grpo", "reinforce"]


@pytest.mark.parametrize(
    ("over", "error", "message"),
    [
        (("trian.lr", ["1", "2"]), RecipeError, "a recipe has no key 'trian'. Did you mean 'train'"),
        (("train.lr", ["fast", "slow"]), RecipeError, "train.lr"),
        (("train.seed", ["1", "2"]), UsageError, "--seeds says how many"),
        (("train.lr", ["1e-4", "1e-4"]), UsageError, "two values would both be called lr-1e-4"),
    ],
)
def test_what_cannot_be_swept_is_refused(
    over: tuple[str, list[str]], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        load_comparison("tiny/grpo", folder=tmp_path, num_seeds=1, over=over)


def test_the_command_names_its_folder_and_can_be_given_again(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "tiny/grpo", "--over", "train.lr=1e-4,3e-4", "--seeds", "2"]
    arguments = parse(words)
    assert arguments.over == ("train.lr", ["1e-4", "3e-4"])
    assert folder_of(arguments) == Path("runs/compare-tiny-grpo-over-train.lr")
    assert command_of(arguments) == " ".join(["posttrain", *words])
    with pytest.raises(SystemExit):
        main(["compare", "tiny/grpo", "--over", "train.lr=1e-4"])
    assert "KEY=A,B is needed, with two values or more" in capsys.readouterr().err
