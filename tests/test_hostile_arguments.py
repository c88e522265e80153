"""Arguments that no file, name or number can be, and objects whose methods fail, end in one message."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import posttrain as pt
from posttrain.api.training import Callbacks
from posttrain.cli import main
from posttrain.errors import PosttrainError, RecipeError, RewardFailure, UsageError
from posttrain.option_types import shorten
from posttrain.recipes.recipe import load_recipe
from posttrain.training.memory import estimate_memory
from refusing import refuses

NO_PATHS = {
    "nul": "a\0b",
    "nul in a folder": "x/\0",
    "high surrogate": "a\ud800b",
    "low surrogate": "a\udc80b",
    "too long": "x" * 300,
    "too deep": "a/" * 2100 + "b",
}


def boom(*_: object, **__: object) -> Any:
    raise ZeroDivisionError("boom")


def evil(base: type = object, *failing: str) -> Any:
    """An object of a class of the user's whose methods fail."""
    return type("Evil", (base,), dict.fromkeys(failing, boom))


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("POSTTRAIN_TRACEBACK", raising=False)


SHORT: dict[str, Any] = {"steps": 1, "eval__every": 0, "num_prompts": 1, "group_size": 2, "rollout__max_tokens": 4}
SHORT |= {"progress": False}
ROWS = [{"question": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(4)]
# Where Python takes a path, a name or a model.
PLACES: dict[str, Callable[[Any], object]] = {
    "train recipe": lambda x: pt.train(x, **SHORT),
    "train run": lambda x: pt.train("tiny/grpo", run=x, **SHORT),
    "train runs_dir": lambda x: pt.train("tiny/grpo", runs_dir=x, **SHORT),
    "train data": lambda x: pt.train("tiny/grpo", data=x, **SHORT),
    "train eval_data": lambda x: pt.train("tiny/grpo", eval_data=x, **{**SHORT, "eval__every": 1}),
    "train model": lambda x: pt.train("tiny/grpo", model=x, **SHORT),
    "evaluate model": lambda x: pt.evaluate(x, ROWS, progress=False),
    "evaluate data": lambda x: pt.evaluate("tiny", x, progress=False),
    "evaluate out": lambda x: pt.evaluate("tiny", ROWS, n=1, max_tokens=2, out=x, progress=False),
    "evaluate best_of": lambda x: pt.evaluate("tiny", ROWS, n=1, samples=2, max_tokens=2, best_of=x, progress=False),
    "evaluate runs_dir": lambda x: pt.evaluate("tiny", ROWS, n=1, max_tokens=2, runs_dir=x, progress=False),
    "generate model": lambda x: pt.generate(x, "hi"),
    "generate runs_dir": lambda x: pt.generate("tiny", "hi", max_tokens=2, runs_dir=x),
    "load_run": lambda x: pt.load_run(x),
    "load_run runs_dir": lambda x: pt.load_run("r", runs_dir=x),
    "export": lambda x: pt.load_run(x).export(x),
    "sweep": lambda x: pt.sweep(x, progress=False),
    "sweep runs_dir": lambda x: pt.sweep({"recipe": "ppo-grpo-dpo"}, runs_dir=x, progress=False, steps="no number"),
}


@pytest.mark.parametrize("name", PLACES)
def test_python_with_what_no_file_can_be_called_is_refused_in_words(name: str, tmp_path: Path) -> None:
    for kind, bad in NO_PATHS.items():
        with pytest.raises(PosttrainError) as refused:
            PLACES[name](bad)
        assert str(refused.value), (name, kind)


@pytest.mark.parametrize("failing", ["__repr__", "__str__", "__float__"])
def test_reward_that_returns_an_object_whose_methods_fail_names_its_class(failing: str) -> None:
    with pytest.raises(RewardFailure) as failed:
        pt.train("tiny/grpo", rewards=[lambda text: evil(object, failing)()], **SHORT)
    assert "Evil" in str(failed.value)


def test_reward_that_returns_infinity_of_a_class_without_repr_is_refused() -> None:
    with pytest.raises(RewardFailure) as failed:
        pt.train("tiny/grpo", rewards=[lambda text: evil(float, "__repr__", "__str__")("inf")], **SHORT)
    assert "Evil" in str(failed.value)


def test_prompt_with_half_a_surrogate_pair_is_refused() -> None:
    for prompt in ("What is \ud800?", [{"role": "user", "content": "a\udc80"}]):
        with pytest.raises(UsageError) as refused:
            pt.generate("tiny", [prompt], max_tokens=2)
        assert str(refused.value).startswith("prompts.0")


def test_shorten_of_plain_values_is_their_repr_and_runs_no_repr_of_a_user() -> None:
    for value in ("a\n", 1, 1.5, None, True, b"x", [1, "a"], (1,), (), {"a": [1]}, {1, 2}, Path("a")):
        assert shorten(value) == repr(value)
    silent, text = evil(object, "__repr__", "__str__")(), evil(str, "__repr__", "__str__")("no-such-name")
    assert shorten(silent) == "<Evil>"
    assert shorten([silent, {"a": text}]) == "[<Evil>, {'a': <Evil>}]"


def test_explain_and_memory_of_names_that_nothing_can_have_answer_in_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explain", "a\nb"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    message = estimate_memory(load_recipe("tiny/grpo", [("model.name", "x" * 300)]).resolve())
    assert isinstance(message, str)


@pytest.mark.parametrize("name", ["on_step", "on_evaluation", "on_checkpoint"])
@pytest.mark.parametrize(
    "function",
    [lambda: None, lambda event, more: None, lambda *, event: None, evil(object, "__call__", "__getattribute__")],
    ids=["none", "two", "keyword", "class that fails"],
)
def test_callback_that_does_not_take_one_event_is_refused_before_the_run(
    name: str, function: Callable[..., Any], tmp_path: Path
) -> None:
    if isinstance(function, type):
        function = function()
    with pytest.raises(UsageError, match=f"^{name}: "):
        pt.train("tiny/grpo", **SHORT, **{name: function})
    assert not (tmp_path / "runs").exists()


def test_callbacks_that_take_one_argument_are_taken() -> None:
    takes: list[Any] = [lambda event: None, lambda event, more=1: None, lambda *events: None, [].append, print]
    for function in takes:
        Callbacks(lambda *_: None, on_step=function)


@pytest.mark.parametrize(
    ("name", "value"), [("run", 3), ("run", Path("x")), ("accept_changes", "yes"), ("accept_changes", 1)]
)
def test_argument_of_another_type_is_named(name: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"^{name}: "):
        pt.train("tiny/grpo", **SHORT, **{name: value})
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "rows", ["grpo2", ["grpo2"], (name for name in ["grpo2"]), [evil(object, "__str__", "__repr__")()], 3, [None]]
)
def test_rows_of_a_sweep_are_names_in_any_collection(rows: Any) -> None:
    with pytest.raises(UsageError, match=r"rows: (?!.*'g')"):
        pt.sweep("ppo-grpo-dpo", rows=rows, progress=False)


@pytest.mark.parametrize("over", [{3: [1]}, {"train.lr": 1e-5}, {"train.lr": evil()}, [("train.lr", [1e-5])]])
def test_over_of_a_sweep_is_one_key_with_its_values(over: Any) -> None:
    with refuses(RecipeError, "over"):
        pt.sweep("tiny/sft", over=over, progress=False)


def test_numbers_of_other_types_are_used() -> None:
    (answer,) = pt.generate(
        "tiny", "hi", samples=np.int32(1), max_tokens=np.int64(2), temperature=Fraction(1, 2), seed=np.uint8(1)
    )
    (same,) = pt.generate("tiny", "hi", max_tokens=2, temperature=0.5, seed=1)
    assert answer == same
    measured = pt.evaluate("tiny", ROWS, limit=np.int64(1), max_tokens=np.int64(2), progress=False)
    assert measured.results["n"] == 1


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> pt.Trainer:
    small = {"group_size": 2, "num_prompts": 1, "rollout__max_tokens": 4, "runs_dir": tmp_path_factory.mktemp("runs")}
    return pt.Trainer("tiny-sft", data=ROWS, rewards=["correct"], **small)


@pytest.mark.parametrize("advantage", [math.nan, math.inf, "x", evil(object, "__float__", "__repr__")(), [0.5]])
def test_advantage_that_is_no_number_is_refused(trainer: pt.Trainer, advantage: Any) -> None:
    groups = trainer.sample(["What is 1 plus 1?"])
    for rollout in groups[0]:
        rollout.advantage = advantage
    with refuses(UsageError, "batch"):
        trainer.batch(groups)


@pytest.mark.parametrize("advantage", [np.float32(0.5), np.array(0.5), torch.tensor(0.5), Fraction(1, 2)])
def test_advantage_of_another_type_is_its_number(trainer: pt.Trainer, advantage: Any) -> None:
    groups = trainer.sample(["What is 1 plus 1?"])
    for rollout in groups[0]:
        rollout.advantage = advantage
    assert set(trainer.batch(groups).field("advantages").unique().tolist()) <= {0.0, 0.5}


@pytest.mark.parametrize("groups", [3, [[None]], [], [[]], iter([]), "ab", [3]])
def test_batch_of_something_else_than_samples_is_refused(trainer: pt.Trainer, groups: Any) -> None:
    with refuses(UsageError, "batch"):
        trainer.forward_backward(groups)


@pytest.mark.parametrize("path", [*NO_PATHS.values(), 3, evil(object, "__fspath__")(), None])
def test_folder_to_save_in_that_is_none_is_refused(trainer: pt.Trainer, path: Any) -> None:
    with pytest.raises(PosttrainError, match=r"path: |the model"):
        trainer.save(path)


def test_checkpoint_of_a_numpy_step_and_of_no_step(tmp_path: Path) -> None:
    run = pt.train("tiny/grpo", run="one", **SHORT)
    assert run.checkpoint(np.int64(1)) == run.checkpoint(1)
    for which in (math.nan, evil(object, "__repr__", "__eq__")(), "a\0", None):
        with refuses(UsageError, "checkpoint"):
            run.checkpoint(which)
