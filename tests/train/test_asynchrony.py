"""Sampling ahead: the schedule, the same bits however fast either side is, and nothing lost or doubled.

Most runs here do in one process what a run does in two (``inline``), since a process takes seconds to start; those with
a real one compare the two.
"""

from __future__ import annotations

import copy
import io
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from inline_sampling import Killed, sample_inline
from posttrain.engines.native.engine import NativeEngine
from posttrain.errors import EngineMismatch, RecipeError, RewardFailure
from posttrain.recipes.recipe import Recipe
from posttrain.store.ledger import DIED, Ledger, LedgerEvent, count, standing
from posttrain.store.metrics import MetricsLog
from posttrain.train import loop, mismatch
from posttrain.train.build import Parts, prepare, prepare_sampling
from posttrain.train.checks import words_of
from posttrain.train.files import RunFiles
from posttrain.train.process import Weights, receive, send, send_weights, weight_sums
from posttrain.train.sources import sampling_process
from posttrain.train.sources.ahead import HELD, Ahead
from posttrain.train.sources.messages import read_drawn, write_drawn
from posttrain.train.sources.rollouts import Drawn
from posttrain.world import ONE, World
from small_runs import (
    Events,
    fail_in_step,
    make_recipe,
    recorded,
    run,
    same_bits,
    saved_tensors,
    shallow,
    steps_of,
    untimed,
    watched,
)

STEPS = 16
# DAPO's dropping and four updates per batch: groups are dropped and replaced
ROLLOUT = {"prompts": 4, "group": 2, "max_tokens": 4, "temperature": 1.3, "drop_uniform_groups": True, "max_rounds": 3}
TRAIN = {"steps": STEPS, "lr": 1e-3, "epochs": 2, "minibatches": 2, "save_every": 3, "keep": 9}


def starts_with_a_digit(text: str) -> float:
    """A reward that two answers often share."""
    return float(text.strip().removeprefix("<think>").strip()[:1].isdigit())


calls: list[str] = []


def fails_at_last(text: str) -> float:
    """A reward that raises in the third batch of 16 answers."""
    calls.append(text)
    if len(calls) > 2 * 16:
        raise ValueError("no more")
    return float(len(calls) % 3)


def stale_recipe(staleness: int, *, rollout: Mapping[str, Any] = ROLLOUT, **changes: Any) -> Recipe:
    usual = {"model": {"name": shallow(1)}, "train": TRAIN, "rewards": ["test_asynchrony:starts_with_a_digit"]}
    changes = usual | changes
    return make_recipe("grpo", rollout=dict(rollout) | {"staleness": staleness}, **changes)


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    sample_inline(monkeypatch)


def without_staleness(folder: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in step.items() if k != "staleness"} for step in steps_of(folder)]


def by_the_definition(staleness: int) -> Callable[..., Parts]:
    """``prepare`` with groups drawn as the words say: a copy of every version is kept, and that of b − S samples."""

    def prepared(recipe: Recipe, folder: Path | None = None, world: World = ONE) -> Parts:
        parts = prepare(recipe, folder, world)
        versions: list[Any] = []
        source = parts.source
        draw = source.draw

        def draw_stale(step: int, cycle: int) -> Drawn:
            versions.append(copy.deepcopy(parts.model))
            assert len(versions) == cycle + 1
            version = max(0, cycle - staleness)
            source.engine = NativeEngine(versions[version])
            source.engine.sync(version * source.updates)
            return draw(step, cycle)

        source.draw = draw_stale
        return parts

    return prepared


@pytest.mark.parametrize("staleness", [1, 2])
def test_every_group_is_sampled_with_the_version_that_the_schedule_says(
    staleness: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline: None
) -> None:
    recipe = stale_recipe(staleness)
    run(tmp_path / "ahead", recipe)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "prepare", by_the_definition(staleness))
        patch.setattr(mismatch, "check_mismatch", lambda *_: None)  # older weights sample there, without a schedule
        run(tmp_path / "defined", stale_recipe(0))
    assert without_staleness(tmp_path / "ahead") == without_staleness(tmp_path / "defined")
    assert recorded(tmp_path / "ahead") == recorded(tmp_path / "defined")
    ours, theirs = (saved_tensors(tmp_path / name, STEPS) for name in ("ahead", "defined"))
    assert same_bits(ours, theirs)
    firsts = [row.metrics["staleness"] for row in MetricsLog(tmp_path / "ahead" / "metrics.jsonl").read()[::4]]
    assert firsts == [min(b, staleness) for b in range(4)]
    groups = standing(Ledger(tmp_path / "ahead" / "ledger.jsonl").read())
    assert all(event.version == max(0, batch - staleness) for (batch, _, _), event in groups.items())
    assert {draw for _, draw, _ in groups} >= {0, 1}, "no group was replaced; choose other numbers"
    reasons = {event.reason for event in groups.values() if event.event == "dropped"}
    assert "uniform" in reasons


def test_a_schedule_of_zero_is_the_synchronous_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline: None
) -> None:
    recipe = stale_recipe(0)
    run(tmp_path / "plain", recipe)
    assert not (tmp_path / "plain" / "ledger.jsonl").exists()
    assert all("staleness" not in step for step in steps_of(tmp_path / "plain"))

    def prepared(recipe: Recipe, folder: Path | None = None, world: World = ONE) -> Parts:
        parts = prepare(recipe, folder, world)
        assert folder is not None
        parts.source.ahead = Ahead(parts.source, recipe, parts.model, Ledger(folder / "ledger.jsonl"))
        return parts

    monkeypatch.setattr(loop, "prepare", prepared)
    run(tmp_path / "ahead", recipe)
    assert {step.get("staleness") for step in steps_of(tmp_path / "ahead")} == {0.0, None}
    assert without_staleness(tmp_path / "ahead") == without_staleness(tmp_path / "plain")
    assert recorded(tmp_path / "ahead") == recorded(tmp_path / "plain")
    assert same_bits(saved_tensors(tmp_path / "ahead", STEPS), saved_tensors(tmp_path / "plain", STEPS))


@pytest.mark.parametrize("staleness", [1, 2])
def test_stopped_anywhere_and_resumed_equals_undisturbed(staleness: int, tmp_path: Path, inline: None) -> None:
    recipe = stale_recipe(staleness)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(whole, recipe)
    run(cut, recipe, stop_after=4)  # at the end of a batch, then inside one, then at an end again
    assert HELD in {name.partition(":")[2] for name in saved_tensors(cut, 4)}
    for number in (1, 3):
        run(cut, recipe, resume=True, stop_after=number)
    run(cut, recipe, resume=True)
    assert untimed(cut) == untimed(whole)
    assert recorded(cut) == recorded(whole)
    for step in (9, 12, STEPS):
        assert same_bits(saved_tensors(whole, step), saved_tensors(cut, step))
    ours, theirs = (Ledger(folder / "ledger.jsonl").read() for folder in (whole, cut))
    assert standing(theirs) == standing(ours)
    assert set(count(ours)) == {"consumed", "dropped"}
    assert sum(event.event == "resumed" for event in theirs) >= 2
    issued = [event.group for event in theirs if event.event == "issued"]
    assert len(issued) == len(set(issued)), "a checkpoint keeps what was sampled; nothing was issued twice"


@pytest.mark.parametrize("staleness", [1, 2])
def test_killed_far_behind_a_checkpoint_and_resumed_equals_undisturbed(
    staleness: int, tmp_path: Path, inline: None
) -> None:
    """Tests of real kills are in ``tests/crash``."""
    recipe = stale_recipe(staleness, train=TRAIN | {"save_every": 6})
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(whole, recipe)

    def deadly_at(step: int) -> Callable[[str, dict[str, Any]], None]:
        def observe(event: str, facts: dict[str, Any]) -> None:
            if event == "step" and facts["step"] == step:
                raise Killed

        return observe

    for last in (5, 11):
        with pytest.raises(Killed):
            loop.train(recipe, RunFiles.within(cut), resume=last != 5, observer=deadly_at(last))
    run(cut, recipe, resume=True)
    assert untimed(cut) == untimed(whole)
    assert recorded(cut) == recorded(whole)
    assert same_bits(saved_tensors(whole, STEPS), saved_tensors(cut, STEPS))
    ours, theirs = (Ledger(folder / "ledger.jsonl").read() for folder in (whole, cut))
    assert standing(theirs) == standing(ours)
    assert [e.step for e in theirs if e.event == "resumed"] == [0, 8]
    used = [event.group for event in standing(theirs).values() if event.event == "consumed"]
    assert len(used) == len(set(used)) == 16


@pytest.mark.parametrize("fails_in_step", [5, 7])
def test_a_run_that_fails_in_an_update_keeps_the_batch_that_it_had_taken(
    fails_in_step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline: None
) -> None:
    """Step 5 is the first update of batch 1, whose version is gone by then."""
    recipe = stale_recipe(1, train=TRAIN | {"save_every": 0})
    run(tmp_path / "whole", recipe)
    with monkeypatch.context() as patch:
        fail_in_step(patch, fails_in_step)
        with pytest.raises(RuntimeError, match="out of luck"):
            run(tmp_path / "cut", recipe)
    events = Events()
    watched(tmp_path / "cut", recipe, events, resume=True)
    assert events.of("start")[0]["resumed_from"] == fails_in_step - 1
    assert untimed(tmp_path / "cut") == untimed(tmp_path / "whole")
    assert recorded(tmp_path / "cut") == recorded(tmp_path / "whole")
    assert same_bits(saved_tensors(tmp_path / "cut", STEPS), saved_tensors(tmp_path / "whole", STEPS))
    standing(Ledger(tmp_path / "cut" / "ledger.jsonl").read())


def test_a_process_beside_it_gives_the_same_bits_also_when_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = stale_recipe(1, train=TRAIN | {"steps": 8})
    with monkeypatch.context() as patch:
        sample_inline(patch)
        run(tmp_path / "inline", recipe)
    seen: list[int] = []

    def prepared(recipe: Recipe, folder: Path | None = None, world: World = ONE) -> Parts:
        parts = prepare(recipe, folder, world)
        process = parts.source.ahead._process
        ask = process._ask

        def ask_and_kill(batch: int, step: int, weights: Weights, begins: Callable[[int], None]) -> Mapping[str, Any]:
            if batch != 1 or seen:
                return ask(batch, step, weights, begins)

            def kill(attempt: int) -> None:
                begins(attempt)
                if not seen:
                    seen.append(process._beside._process.pid)
                    os.kill(seen[0], signal.SIGKILL)

            return ask(batch, step, weights, kill)

        process._ask = ask_and_kill
        return parts

    monkeypatch.setattr(loop, "prepare", prepared)
    run(tmp_path / "beside", recipe)
    assert len(seen) == 1
    assert untimed(tmp_path / "beside") == untimed(tmp_path / "inline")
    assert recorded(tmp_path / "beside") == recorded(tmp_path / "inline")
    assert same_bits(saved_tensors(tmp_path / "beside", 8), saved_tensors(tmp_path / "inline", 8))
    noted = Ledger(tmp_path / "beside" / "ledger.jsonl").read()
    lost = [event.group for event in noted if event.reason == DIED]
    assert lost
    assert {group[0] for group in lost} == {1}
    assert standing(noted) == standing(Ledger(tmp_path / "inline" / "ledger.jsonl").read())
    timing = [row.timing for row in MetricsLog(tmp_path / "beside" / "metrics.jsonl").read()]
    for row in (timing[0], timing[4]):
        assert {"waited_seconds", "generate_seconds", "staleness_in_flight", "staleness_in_queue"} <= set(row)
    assert timing[4]["staleness_in_flight"] + timing[4]["staleness_in_queue"] == 1.0


def test_a_reward_that_fails_beside_it_is_one_message(tmp_path: Path) -> None:
    recipe = stale_recipe(1, rewards=["test_asynchrony:fails_at_last"], train={"steps": 8}, rollout={"max_tokens": 4})
    with pytest.raises(RewardFailure, match=r"while sampling ahead: .*fails_at_last.*no more"):
        run(tmp_path / "run", recipe)
    assert [event.event for event in Ledger(tmp_path / "run" / "ledger.jsonl").read()].count("consumed") >= 4


def test_corrections_see_how_old_the_sampler_was(tmp_path: Path, inline: None) -> None:
    options = {"model": {"name": "tiny"}, "correction": {"name": "token_tis"}, "train": {"steps": 4, "lr": 1e-2}}
    trainer = {"old_logprobs": "trainer", "max_tokens": 8}
    run(tmp_path / "run", stale_recipe(1, rollout=trainer, rewards=["small_runs:digit_share"], **options))
    first, *later = steps_of(tmp_path / "run")
    assert first["correction"] == pytest.approx(1.0, abs=1e-5)
    assert first["mismatch_kl"] < 1e-9
    assert all(abs(step["correction"] - 1.0) > 1e-4 for step in later)
    assert all(step["mismatch_kl"] > 1e-6 for step in later)
    assert all(step["effective_sample_size"] < 1.0 for step in later)


def test_old_logprobs_of_the_trainer_need_a_correction() -> None:
    with pytest.raises(RecipeError, match=r"rollout\.old_logprobs: .*give 'correction'"):
        words_of(stale_recipe(1, rollout={"old_logprobs": "trainer"}))


def test_the_guarantee_is_that_of_the_engine(tmp_path: Path) -> None:
    assert prepare(stale_recipe(0)).guarantee == "L2"
    events = Events()
    watched(tmp_path / "run", make_recipe("sft", train={"steps": 1}), events)
    assert events.of("start")[0]["guarantee"] == "L2"


def test_wrong_weights_are_refused() -> None:
    _, model = prepare_sampling(stale_recipe(1))
    sums = weight_sums(model)
    trained = {name: p.detach().clone() for name, p in model.named_parameters()}
    sampling_process._load({"tensors": trained, "weights": 3, "sums": sums}, model)
    name = max(trained, key=lambda n: float(trained[n].sum().abs()))
    trained[name] *= 1.01
    with pytest.raises(EngineMismatch, match=f"{name}.*version 4"):
        sampling_process._load({"tensors": trained, "weights": 4, "sums": sums}, model)


def test_messages_come_back_bit_for_bit() -> None:
    source, _ = prepare_sampling(stale_recipe(1))
    drawn = source.draw(1, 0)
    pipe = io.BytesIO()
    send(pipe, {"drawn": write_drawn(drawn)})
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).to(torch.bfloat16), "c": torch.tensor(2.0)}
    send_weights(pipe, Weights(5, tensors, [0.1, float("nan")]))
    pipe.seek(0)
    again = read_drawn(receive(pipe)["drawn"], source)
    assert again.sampled == drawn.sampled
    assert [drawn.sampled.index(group) for group in drawn.chosen] == [again.sampled.index(g) for g in again.chosen]
    message = receive(pipe)
    assert message["weights"] == 5
    assert same_bits(message["tensors"], tensors)
    assert receive(pipe) is None


def test_the_ledger_counts_what_counts(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)

    def of(event: str, batch: int, reason: str = "") -> LedgerEvent:
        return LedgerEvent(event, batch, batch + 1, 0, 0, 7, 0, reason)

    ledger.append([of("issued", 0), of("done", 0), of("consumed", 0), of("issued", 1), of("done", 1)])
    with path.open("ab") as file:
        file.write(b'{"event": "consu')
    again = Ledger(path)
    assert len(again.read()) == 5
    again.append([of("consumed", 1), of("issued", 2), of("dropped", 2, DIED), of("issued", 2)])
    assert count(again.read()) == {"consumed": 2, "issued": 1}
    again.append([LedgerEvent("resumed", 2, 1)])  # batches 0 and 1 are kept, and only 0 had been used
    assert count(again.read()) == {"consumed": 1, "done": 1}
    again.append([of("consumed", 1), of("issued", 2)])
    assert count(again.read()) == {"consumed": 2, "issued": 1}
    for wrong in (of("issued", 2), of("consumed", 2), of("consumed", 0), of("done", 5)):
        with pytest.raises(ValueError, match=r"is .* where it was"):
            standing([*again.read(), wrong])
