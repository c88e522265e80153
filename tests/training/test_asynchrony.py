"""Batches that are sampled before they are trained on: the schedule, the same bits after a resume, nothing lost."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from closeness import approx
from posttrain.errors import RunFailure
from posttrain.process_group import SINGLE_PROCESS, ProcessGroup
from posttrain.recipes.recipe import Recipe
from posttrain.registry import register
from posttrain.sampling.base import Engine, Groups, Sampling
from posttrain.sampling.native.engine import NativeEngine
from posttrain.training import loop
from posttrain.training.build import TrainerState, prepare
from posttrain.training.files import RunFiles
from posttrain.training.sources.prefetch import HELD
from posttrain.training.sources.rollouts import Drawn
from refusing import refuses
from small_runs import make_recipe, recorded, run, same_bits, saved_tensors, shallow, steps_of, untimed, watched

STEPS = 8
# DAPO's dropping and two updates per batch: groups are dropped and replaced
ROLLOUT = {
    "num_prompts": 4,
    "group_size": 2,
    "max_tokens": 4,
    "temperature": 1.3,
    "drop_uniform_groups": True,
    "max_rounds": 3,
}
TRAIN = {"steps": STEPS, "lr": 1e-3, "num_minibatches": 2, "save_every": 3, "keep_checkpoints": 9}


class Killed(BaseException):
    """Error that nothing catches, as if the process was killed."""


def starts_with_a_digit(text: str) -> float:
    """A reward that two answers often share."""
    return float(text.strip().removeprefix("<think>").strip()[:1].isdigit())


def stale_recipe(staleness: int, *, rollout: Mapping[str, Any] = ROLLOUT, **changes: Any) -> Recipe:
    usual = {"model": {"name": shallow(1)}, "train": TRAIN, "rewards": ["test_asynchrony:starts_with_a_digit"]}
    changes = usual | changes
    return make_recipe("grpo", rollout=dict(rollout) | {"staleness": staleness}, **changes)


def without_staleness(folder: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in step.items() if k != "staleness"} for step in steps_of(folder)]


def killed_at(step: int) -> Callable[[str, dict[str, Any]], None]:
    def observe(event: str, info: dict[str, Any]) -> None:
        if event == "step" and info["step"] == step:
            raise Killed

    return observe


def by_the_definition(staleness: int) -> Callable[..., TrainerState]:
    """``prepare`` with groups drawn as the words say: a copy of every version is kept, and that of b − S samples."""

    def prepared(
        recipe: Recipe, folder: Path | None = None, process_group: ProcessGroup = SINGLE_PROCESS
    ) -> TrainerState:
        parts = prepare(recipe, folder, process_group)
        versions: list[Any] = []
        source = parts.source
        draw = source.draw

        def draw_stale(step: int, cycle: int) -> Drawn:
            versions.append(copy.deepcopy(parts.model))
            assert len(versions) == cycle + 1
            version = max(0, cycle - staleness)
            source.sampler = replace(source.sampler, engine=NativeEngine(versions[version]))
            source.engine.sync(version * source.updates)
            return draw(step, cycle)

        source.draw = draw_stale
        return parts

    return prepared


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run of staleness 2."""
    folder = tmp_path_factory.mktemp("ahead")
    run(folder, stale_recipe(2))
    return folder


def test_every_group_is_sampled_with_the_version_that_the_schedule_states(
    ahead: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(loop, "prepare", by_the_definition(2))
        patch.setattr(loop, "check_mismatch", lambda *arguments: arguments[3])  # older weights sample there
        run(tmp_path, stale_recipe(0))
    assert without_staleness(ahead) == without_staleness(tmp_path)
    assert recorded(ahead) == recorded(tmp_path)
    assert same_bits(*(saved_tensors(folder, STEPS) for folder in (ahead, tmp_path)))
    assert [step["staleness"] for step in steps_of(ahead)[::2]] == [0, 1, 2, 2]
    rows = recorded(ahead)[0]
    assert {(row.step, row.version) for row in rows} == {(2 * b + 1, 2 * max(0, b - 2)) for b in range(4)}
    assert len(rows) > 4 * 8, "no group was replaced; choose other numbers"


def test_stopped_anywhere_and_resumed_equals_undisturbed(ahead: Path, tmp_path: Path) -> None:
    recipe, cut = stale_recipe(2), tmp_path
    run(cut, recipe, stop_after=2)  # at the end of a batch, then inside one, then at an end again
    assert HELD in {name.partition(":")[2] for name in saved_tensors(cut, 2)}
    for number in (1, 1):
        run(cut, recipe, resume=True, stop_after=number)
    run(cut, recipe, resume=True)
    assert untimed(cut) == untimed(ahead)
    assert recorded(cut) == recorded(ahead)
    for step in (6, STEPS):
        assert same_bits(saved_tensors(ahead, step), saved_tensors(cut, step))


class Remote(Engine):
    """A server: samples with a copy of the model that ``sync`` fills. ``fails`` is how often a batch is lost."""

    fails = 0
    seconds = 0.0
    calls: ClassVar[list[tuple[str, int]]] = []  # thread, version

    def __init__(self, model: Any) -> None:
        self.model, self.version = model, -1

    def sync(self, version: int) -> None:
        if version != self.version:
            self.own, self.version = NativeEngine(copy.deepcopy(self.model)), version
            self.own.sync(version)

    def generate(self, prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], sampling: Sampling) -> Groups:
        Remote.calls.append((threading.current_thread().name, self.version))
        time.sleep(Remote.seconds)
        if Remote.fails and threading.current_thread() is not threading.main_thread():
            Remote.fails -= 1
            raise RunFailure("the server is gone")
        return self.own.generate(prompts, keys, sampling)


@register("engine", takes_weights=True)
def remote(model: Any, tokenizer: Any) -> Engine:
    """Build an engine that samples in a thread, as one that asks a server does."""
    return Remote(model)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> type[Remote]:
    for name, value in {"fails": 0, "seconds": 0.0, "calls": []}.items():
        monkeypatch.setattr(Remote, name, value)
    return Remote


def served_recipe(staleness: int, **changes: Any) -> Recipe:
    rollout = {"num_prompts": 4, "group_size": 2, "max_tokens": 4, "engine": "test_asynchrony:remote"}
    usual = {"train": {"steps": 8, "num_minibatches": 2, "lr": 1e-3, "save_every": 3, "keep_checkpoints": 9}}
    return stale_recipe(staleness, rollout=rollout, **(usual | changes))


def test_a_server_samples_in_a_thread_with_the_same_versions_as_the_native_engine(
    tmp_path: Path, served: type[Remote]
) -> None:
    served.seconds = 0.02
    recipe = served_recipe(2, eval={"every": 4, "num_examples": 2, "max_tokens": 4})
    run(tmp_path / "served", recipe)
    recipe.rollout.engine = make_recipe("grpo").rollout.engine
    run(tmp_path / "native", recipe)
    assert untimed(tmp_path / "served") == untimed(tmp_path / "native")
    assert recorded(tmp_path / "served") == recorded(tmp_path / "native")
    batches = [call for call in served.calls if call[0].startswith("sampling")]
    assert [version for _, version in batches] == [2 * max(0, b - 2) for b in range(4)]
    assert [version for name, version in served.calls if name == "MainThread"] == [0, 4, 8]  # evaluations


def test_asynchrony_failing_server_is_retried_once(tmp_path: Path, served: type[Remote]) -> None:
    """One that is waited for ends the run; one in flight comes again with the weights of then."""
    served.fails = 1
    with refuses(RunFailure, "server is gone"):
        run(tmp_path / "first", served_recipe(1))

    def lose_a_batch(event: str, info: dict[str, Any]) -> None:
        if event == "step" and info["step"] == 2:
            served.fails = 1

    watched(tmp_path / "later", served_recipe(1), lose_a_batch)
    rows = recorded(tmp_path / "later")[0]
    assert sorted({(row.step, row.version) for row in rows}) == [(1, 0), (3, 0), (5, 4), (7, 4)]
    assert len(rows) == 4 * 8


def test_killed_with_a_batch_in_flight_every_prompt_is_trained_on_once(tmp_path: Path, served: type[Remote]) -> None:
    served.seconds = 0.3  # the checkpoint of step 3 is saved while batch 2 is in flight
    run(tmp_path / "whole", served_recipe(1))
    undisturbed = [(row.step, row.prompt_index, row.rollout_index) for row in recorded(tmp_path / "whole")[0]]
    for last in (3, 4):
        cut = tmp_path / f"killed at {last}"
        with pytest.raises(Killed):
            loop.run_training(served_recipe(1), RunFiles.within(cut), observer=killed_at(last))
        run(cut, served_recipe(1), resume=True)
        rows = recorded(cut)[0]
        assert [(row.step, row.prompt_index, row.rollout_index) for row in rows] == undisturbed
        assert len(set(undisturbed)) == len(rows) == 4 * 8
        assert [row.version for row in rows[::8]] == [0, 0, 4 if last > 3 else 2, 4]


def test_corrections_see_how_old_the_sampler_was(tmp_path: Path) -> None:
    options = {"correction": {"name": "token_tis"}, "train": {"steps": 4, "lr": 1e-2}}
    trainer = {"old_logprobs": "trainer", "max_tokens": 8}
    run(tmp_path / "run", stale_recipe(1, rollout=trainer, rewards=["small_runs:vowel_share"], **options))
    first, *later = steps_of(tmp_path / "run")
    assert first["correction"] == approx(1.0, abs=1e-5)
    assert first["kl_sampler"] == approx(0.0, abs=1e-9)
    assert all(abs(step["correction"] - 1.0) > 1e-4 for step in later)
    assert all(step["kl_sampler"] > 1e-6 for step in later)
    assert all(step["effective_sample_size"] < 1.0 for step in later)
