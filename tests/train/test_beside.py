"""Evaluation beside training: the trainer's own results, training that does not wait, nothing lost and nothing doubled.

Most runs here do in one process what a run does in two; those with a real process compare the two.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest

from posttrain.errors import PosttrainError, RecipeError, RunFailure, UsageError
from posttrain.recipes.recipe import Recipe
from posttrain.train import process
from posttrain.train.evaluating import beside
from posttrain.train.evaluating.beside import only_gpu
from small_runs import Events, one_layer_recipe, recorded, run, same_bits, saved_tensors, untimed, watched

Result = TypeVar("Result")
EVAL = {"every": 2, "n": 6, "max_tokens": 4}
TRAIN = {"steps": 6, "lr": 1e-3, "keep": 1}
DRIFT = {"drift_prompts": 4, "samples": 2, "temperature": 1.2}
KINDS: dict[str, dict[str, Any]] = {
    "grpo": {"eval": EVAL | DRIFT},  # answers, and how far the policy is from the model that the run began with
    "sft": {"eval": EVAL | {"loss": True}},  # answers and the loss
    "judged": {"eval": EVAL | {"tasks": [{"name": "small_runs:judged_sums", "size": 7}]}},  # by the objective
}


def recipe_of(kind: str, *, is_beside: bool, **changes: Any) -> Recipe:
    options = KINDS[kind]["eval"] | ({"beside": True} if is_beside else {})
    return one_layer_recipe(kind, **({"train": TRAIN, "eval": options} | changes))


class Inline:
    """A ``BesideProcess`` that is none: another model in this process, told the same in the same words."""

    def __init__(self, module: str, recipe: Recipe, settings: Mapping[str, Any], environment: Any = None) -> None:
        assert module == beside.__name__
        self.recipe, self.settings = recipe, dict(settings)
        self.answer: process.Answer | None = None
        self.replies = io.BytesIO()

    def repeat(self, ask: Callable[[], Result], work: str, instead: str) -> Result:
        return ask()

    def started(self) -> tuple[Any, bool]:
        is_new = self.answer is None
        self.answer = self.answer or beside._prepare(self.recipe, self.settings)
        self.asked = io.BytesIO()
        return self.asked, is_new

    def receive(self) -> dict[str, Any]:
        self.asked.seek(0)
        message, replies = process.receive(self.asked), io.BytesIO()
        assert message is not None
        assert self.answer is not None
        self.answer(message, replies)
        replies.seek(0)
        reply = process.receive(replies)
        assert reply is not None
        return reply

    def close(self) -> None:
        pass


class Courier:
    """Does what it is given when it is asked for the result, or when ``after`` further questions whether it is done."""

    after = 10**9

    def __init__(self, *_: Any) -> None:
        pass

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return Late(self.after, lambda: function(*arguments))

    def shutdown(self, **_: Any) -> None:
        pass


class Late(Future[Any]):
    def __init__(self, after: int, work: Callable[[], Any]) -> None:
        super().__init__()
        self.after, self.work = after, work

    def done(self) -> bool:
        self.after -= 1
        return self.after < 0

    def result(self, timeout: float | None = None) -> Any:
        return self.work()


def do_inline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(beside, "BesideProcess", Inline)
    patch.setattr(beside, "ThreadPoolExecutor", Courier)


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    do_inline(monkeypatch)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of undisturbed runs by kind, evaluated by the trainer."""
    folder = tmp_path_factory.mktemp("here")
    for kind in KINDS:
        run(folder / kind, recipe_of(kind, is_beside=False))
    return folder


@pytest.fixture(scope="module")
def aside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, evaluated beside."""
    folder = tmp_path_factory.mktemp("aside")
    with pytest.MonkeyPatch.context() as patch:
        do_inline(patch)
        for kind in KINDS:
            run(folder / kind, recipe_of(kind, is_beside=True))
    return folder


def assert_same_run(own: Path, other: Path, last: int) -> None:
    """Equal but for the order in which evaluations are written down, and for the checkpoints that are kept."""
    assert sorted(untimed(own)) == sorted(untimed(other))
    (trained, evaluated), (trained_there, evaluated_there) = recorded(own), recorded(other)
    assert _without_ids(trained) == _without_ids(trained_there)
    assert _without_ids(evaluated) == _without_ids(evaluated_there)
    assert same_bits(saved_tensors(own, last), saved_tensors(other, last))
    assert os.readlink(own / "checkpoints" / "best") == os.readlink(other / "checkpoints" / "best")
    states = [json.loads((f / "checkpoints" / f"step-{last:06d}" / "state.json").read_text()) for f in (own, other)]
    assert states[0]["best"] == states[1]["best"]
    assert states[0]["evaluations"] == states[1]["evaluations"]
    assert not any("owed_evaluations" in state for state in states)


def _without_ids(rows: list[Any]) -> list[str]:
    return [repr({name: getattr(row, name) for name in row.__slots__ if name != "id"}) for row in rows]


@pytest.mark.parametrize("kind", list(KINDS))
def test_its_results_are_those_of_the_trainer(kind: str, here: Path, aside: Path) -> None:
    assert_same_run(here / kind, aside / kind, 6)


def test_a_process_that_is_killed_is_started_again(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With real processes; the first is killed when it is asked for its second evaluation."""
    pids: list[int] = []
    receive = process.BesideProcess.receive

    def receive_and_kill(self: process.BesideProcess) -> dict[str, Any]:
        assert self._process is not None
        pids.append(self._process.pid)
        if len(pids) == 3:  # it was ready, it evaluated step 0, and is at step 2
            os.kill(self._process.pid, signal.SIGKILL)
        return receive(self)

    monkeypatch.setattr(process.BesideProcess, "receive", receive_and_kill)
    run(tmp_path / "beside", recipe_of("grpo", is_beside=True))
    assert len(pids) == 7  # two more: the second process was ready, and asked for step 2 again
    assert len(set(pids)) == 2
    assert_same_run(here / "grpo", tmp_path / "beside", 6)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[-1], 0)


@pytest.mark.usefixtures("inline")
def test_training_goes_on_until_the_next_evaluation_is_due(tmp_path: Path) -> None:
    events = Events()
    watched(tmp_path, recipe_of("sft", is_beside=True), events)
    told = [(name, facts["step"]) for name, facts in events if name in ("step", "evaluation")]
    steps = [("step", 1), ("step", 2), ("evaluation", 0), ("step", 3), ("step", 4), ("evaluation", 2)]
    assert told == [*steps, ("step", 5), ("step", 6), ("evaluation", 4), ("evaluation", 6)]


@pytest.mark.usefixtures("inline")
def test_what_is_done_is_told_after_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Courier, "after", 1)
    events = Events()
    watched(
        tmp_path,
        recipe_of("sft", is_beside=True, train={**TRAIN, "steps": 8}, eval={**EVAL, "every": 4, "beside": True}),
        events,
    )
    told = [(name, facts["step"]) for name, facts in events if name in ("step", "evaluation")]
    assert told.index(("evaluation", 0)) == told.index(("step", 2)) + 1
    assert told.index(("evaluation", 4)) == told.index(("step", 5)) + 1


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
@pytest.mark.usefixtures("inline")
def test_a_run_that_stops_owes_the_evaluation(stop: int, aside: Path, tmp_path: Path) -> None:
    """Checkpoint 2 stays although only the newest one is kept, until what is owed of it is recorded."""
    recipe = recipe_of("grpo", is_beside=True)
    events = Events()
    watched(tmp_path / "parts", recipe, events, stop_after=stop)
    assert [e["message"].partition(" is still")[0] for e in events.of("notice")] == [f"step {stop - stop % 2}"]
    owed = stop - stop % 2
    state = json.loads((tmp_path / "parts" / "checkpoints" / f"step-{stop:06d}" / "state.json").read_text())
    assert state["owed_evaluations"] == [owed]
    assert owed == 0 or (tmp_path / "parts" / "checkpoints" / f"step-{owed:06d}").is_dir()
    run(tmp_path / "parts", recipe, resume=True)
    assert_same_run(aside / "grpo", tmp_path / "parts", 6)


@pytest.mark.usefixtures("inline")
def test_an_evaluation_that_was_recorded_since_is_not_there_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Courier, "after", 0)
    recipe = recipe_of("grpo", is_beside=True, train={**TRAIN, "keep": 9})
    run(tmp_path / "whole", recipe)
    shutil.copytree(tmp_path / "whole", tmp_path / "killed", symlinks=True)
    shutil.rmtree(tmp_path / "killed" / "checkpoints" / "step-000006")  # as if it had been killed before it was written
    rows = [step for step, metrics in untimed(tmp_path / "killed") if "eval/" in metrics]
    assert rows == [0, 2, 4, 6]
    run(tmp_path / "killed", recipe, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "killed", 6)


@pytest.mark.usefixtures("inline")
def test_an_evaluation_that_fails_ends_the_run_and_is_owed(
    aside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of("sft", is_beside=True)
    answer = beside._answer

    def broken(evaluator: Any, base: Any, checkpoints: Path, notices: Any, message: Any, replies: Any) -> None:
        if message["step"] == 2:
            raise RunFailure("the judge is down")
        answer(evaluator, base, checkpoints, notices, message, replies)

    with monkeypatch.context() as patch:
        patch.setattr(beside, "_answer", broken)
        with pytest.raises(PosttrainError, match="the judge is down"):
            run(tmp_path / "parts", recipe)
    state = json.loads((tmp_path / "parts" / "checkpoints" / "step-000004" / "state.json").read_text())
    assert state["owed_evaluations"] == [2, 4]
    run(tmp_path / "parts", recipe, resume=True)
    assert_same_run(aside / "sft", tmp_path / "parts", 6)


def test_what_the_process_refuses_ends_the_run_with_its_words(tmp_path: Path) -> None:
    recipe = recipe_of("sft", is_beside=True)
    settings = {"folder": str(tmp_path / "run"), "servers": False}
    own = recipe.model_copy(deep=True)
    own.model.name = str(tmp_path / "nothing")
    asked = process.BesideProcess(beside.__name__, own, settings)
    with pytest.raises(UsageError, match=r"while evaluating beside training: .*nothing"):
        asked.repeat(asked.started, "evaluates step 0", "eval.beside: false evaluates without such a process")
    asked.close()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"every": 2, "device": "cpu"}, "beside: true"),
        ({"beside": True}, "every"),
        ({"every": 2, "beside": True, "device": "gpu0"}, "eval.device"),
    ],
)
def test_what_does_not_fit(section: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        one_layer_recipe("sft", eval=section)


def test_a_rollout_engine_of_other_kind_is_not_shared(tmp_path: Path) -> None:
    rollout = {"prompts": 4, "group": 4, "max_tokens": 10, "engine": {"name": "vllm"}}
    recipe = one_layer_recipe("grpo", rollout=rollout, eval={"every": 2, "n": 4, "beside": True})
    with pytest.raises(RecipeError, match=r"eval\.engine: .*rollouts have 'vllm'"):
        run(tmp_path, recipe)


def test_a_gpu_is_counted_among_those_that_there_are() -> None:
    assert only_gpu("1", "4,7") == {"CUDA_VISIBLE_DEVICES": "7"}
    assert only_gpu("0", " GPU-ab , GPU-cd") == {"CUDA_VISIBLE_DEVICES": "GPU-ab"}
    with pytest.raises(UsageError, match="cuda:2 is one more"):
        only_gpu("2", "4,7")


def test_the_recipe_that_the_process_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    recipe = recipe_of("sft", is_beside=True, eval=EVAL | {"beside": True, "device": "cuda:3"})
    made = beside.Beside(recipe, tmp_path)
    assert made._process.environment == {"CUDA_VISIBLE_DEVICES": "3"}
    assert (made._process.recipe.model.device, made._process.recipe.eval.beside) == ("cuda", False)
    assert (recipe.model.device, recipe.eval.beside) == ("auto", True)
    assert made._process.recipe.fingerprint() != recipe.fingerprint()
    elsewhere = recipe_of("sft", is_beside=True, eval=EVAL | {"beside": True, "device": "cpu"})
    assert elsewhere.fingerprint() == recipe.fingerprint()  # a key of place
    made.close()
