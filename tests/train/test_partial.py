"""Answers that go on across updates: which version writes which token, the same bits after a kill, nothing doubled.

As in ``test_asynchrony`` most runs do in one process what a run does in two.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inline_sampling import Killed, sample_inline
from posttrain.engines.base import Sampling
from posttrain.engines.conversation import Conversation
from posttrain.engines.native.engine import NativeEngine
from posttrain.engines.native.sampler import draw
from posttrain.engines.rollout import RolloutRequest
from posttrain.errors import CheckpointError, RecipeError, RewardFailure
from posttrain.models.load import load_model
from posttrain.models.sources import TINY
from posttrain.randomness import uniforms
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import ModelSection
from posttrain.store import checkpoint_files
from posttrain.store.ledger import DIED, Ledger, count, standing
from posttrain.train import loop
from posttrain.train.build import Parts, prepare
from posttrain.train.checks import words_of
from posttrain.train.files import RunFiles
from posttrain.train.process import Weights
from posttrain.train.sources import rollouts
from posttrain.train.sources.ahead import HELD
from posttrain.train.sources.in_flight import InFlight
from posttrain.train.sources.partial import PartialAhead
from posttrain.train.sources.rollouts import Drawn
from posttrain.types import Completion
from posttrain.world import ONE, World
from small_runs import fail_in_step, make_recipe, recorded, run, same_bits, saved_tensors, shallow, steps_of, untimed

# Two tokens of an answer by each version; two updates for each, and groups that are dropped and replaced.
ROLLOUT = {"prompts": 4, "group": 2, "max_tokens": 7, "temperature": 1.3, "partial": True, "partial_tokens": 2}
DROPPING = {"drop_uniform_groups": True, "max_rounds": 3}
TRAIN = {"steps": 12, "lr": 1e-3, "minibatches": 2, "save_every": 3, "keep": 9}
OF_PARTIAL = ("token_staleness", "continued")


def partial_recipe(staleness: int, *, rollout: Mapping[str, Any] = ROLLOUT | DROPPING, **changes: Any) -> Recipe:
    usual = {"model": {"name": shallow(1)}, "train": TRAIN, "rewards": ["test_partial:starts_with_a_digit"]}
    changes = usual | changes
    return make_recipe("grpo", rollout=dict(rollout) | {"staleness": staleness}, **changes)


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    sample_inline(monkeypatch)


def starts_with_a_digit(text: str) -> float:
    """A reward that two answers often share."""
    return float(text.strip().removeprefix("<think>").strip()[:1].isdigit())


def no_two_equal(text: str) -> float:
    """A reward that two answers rarely share."""
    return float(sum(map(ord, text)) % 1009)


class Watch:
    """What a run drew, by batch, and the model of every version that sampled."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.drawn: list[Drawn] = []
        self.versions: dict[int, Any] = {}
        self.asked: dict[tuple[int, int], RolloutRequest] = {}
        self.sampling: Sampling | None = None
        patch.setattr(loop, "prepare", self._prepared)

    def _prepared(self, recipe: Recipe, folder: Path | None = None, world: World = ONE) -> Parts:
        parts = prepare(recipe, folder, world)
        taker = parts.source.ahead
        assert isinstance(taker, PartialAhead)
        taken, copied = taker.draw, taker._copied

        def draw_watched(step: int, cycle: int) -> Drawn:
            drawn = taken(step, cycle)
            self.drawn.append(drawn)
            for attempt in range(len(drawn.sampled) // parts.source.options.prompts):
                self.asked[cycle, attempt] = parts.source.request(cycle, step, attempt)
            return drawn

        def copied_watched(cycle: int) -> Weights:
            self.versions[cycle] = copy.deepcopy(parts.model)
            return copied(cycle)

        taker.draw, taker._copied, self.sampling = draw_watched, copied_watched, parts.source.sampling
        return parts


@torch.no_grad()
def token_by_token(
    model_of: Callable[[int], Any], prompt: tuple[int, ...], key: int, limit: int, sampling: Sampling
) -> tuple[list[int], list[float]]:
    """An answer by whole forward passes, each of the version that is to write the next token."""
    ids: list[int] = []
    logprobs: list[float] = []
    for t, uniform in enumerate(torch.from_numpy(uniforms([key], limit)[0])):
        logits = model_of(t)(torch.tensor([[*prompt, *ids]])).logits[:, -1]
        token, probability = draw(logits, uniform.view(1, 1), sampling)
        ids.append(int(token))
        logprobs.append(float(probability.log()))
        if ids[-1] in sampling.stop_ids:
            break
    return ids, logprobs


def test_the_schedule_worked_by_hand() -> None:
    """Two versions of staleness, three tokens each, batch 5: version 3 writes tokens 0 to 2, 4 the next, 5 the rest."""
    request: Any = None
    flight = InFlight(5, 3, 3, request, [])
    assert [flight.reach(version, 3) for version in (3, 4)] == [3, 6]
    assert flight.reach(5, 3) > 10**9
    assert not InFlight(5, 3, 3, request, [[Conversation(0, 0, 0, 9, ids=[1, 2, 3])]]).goes_on(3)
    assert InFlight(5, 3, 3, request, [[Conversation(0, 0, 0, 9, ids=[1, 2, 3])]]).goes_on(6)
    assert not InFlight(5, 3, 3, request, [[Conversation(0, 0, 0, 9, ids=[1], finish="stop")]]).goes_on(6)
    first, further = InFlight(0, 0, 0, request, []), InFlight(5, 3, 4, request, [])
    assert first.reach(0, 3) > 10**9, "batch 0 is trained on with version 0"
    assert further.reach(4, 3) == 3, "a round that began with version 4"


# version of each of seven tokens, by batch, two of them by each version
BY_HAND = {
    1: [[0, 0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1], [1, 1, 2, 2, 2, 2, 2], [2, 2, 3, 3, 3, 3, 3]],
    2: [[0, 0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 2, 2, 2], [1, 1, 2, 2, 3, 3, 3]],
    3: [[0, 0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 2, 2, 2], [0, 0, 1, 1, 2, 2, 3]],
}


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_each_token_is_of_the_version_that_the_schedule_says(
    staleness: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    inline: None,
) -> None:
    """Versions as worked by hand; ids and log-probabilities those of whole forward passes of these very weights."""
    changes = {"steps": 8, "lr": 1e-2, "save_every": 0}
    whole = {"model": {"name": "tiny"}, "train": TRAIN | changes}  # one layer soon ends its answers
    recipe = partial_recipe(staleness, rollout=ROLLOUT, rewards=["test_partial:no_two_equal"], **whole)
    watch = Watch(monkeypatch)
    run(tmp_path / "run", recipe)
    updates, num_continued = 2, 0
    for batch, drawn in enumerate(watch.drawn):
        plan = BY_HAND[staleness][batch]
        asked = watch.asked[batch, 0]
        for slot, group in enumerate(drawn.sampled):
            for rollout, key in zip(group, asked.keys(slot), strict=True):
                said = rollout.completion
                versions = (said.version,) * len(said.ids) if isinstance(said.version, int) else said.version
                assert list(versions) == [updates * v for v in plan[: len(said.ids)]]
                num_continued += len(set(versions)) > 1
                ids, logprobs = token_by_token(
                    lambda t, plan=plan: watch.versions[plan[t]], rollout.prompt_ids, key, 7, watch.sampling
                )
                assert list(said.ids) == ids
                assert said.logprobs == pytest.approx(logprobs, abs=1e-5)
    assert num_continued >= 20
    metrics = steps_of(tmp_path / "run")[::updates]
    assert [step["staleness"] for step in metrics] == [min(batch, staleness) for batch in range(4)]
    for batch, (step, drawn) in enumerate(zip(metrics, watch.drawn, strict=True)):
        lengths = [len(r.completion.ids) for group in drawn.sampled for r in group]
        ages = [batch - v for n in lengths for v in BY_HAND[staleness][batch][:n]]
        assert step["token_staleness"] == pytest.approx(sum(ages) / len(ages))
        last = BY_HAND[staleness][batch]
        assert step["continued"] == pytest.approx(sum(last[n - 1] != last[0] for n in lengths) / len(lengths))


def test_other_weights_would_be_seen(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    inline: None,
) -> None:
    """That the comparison above could fail: log-probabilities of one version too old are further off than 1e-5."""
    recipe = partial_recipe(1, rollout=ROLLOUT, train=TRAIN | {"lr": 1e-2}, rewards=["test_partial:no_two_equal"])
    watch = Watch(monkeypatch)
    run(tmp_path / "run", recipe)
    differences = []
    for slot, group in enumerate(watch.drawn[2].sampled):
        for rollout, key in zip(group, watch.asked[2, 0].keys(slot), strict=True):
            old = token_by_token(lambda t: watch.versions[1], rollout.prompt_ids, key, 7, watch.sampling)[1]
            said = rollout.completion.logprobs
            differences += [abs(a - b) for a, b in list(zip(said, old, strict=False))[2:3]]
    assert min(differences) > 1e-4


def test_a_further_round_begins_with_the_version_that_finished_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline: None
) -> None:
    watch = Watch(monkeypatch)
    rollout = ROLLOUT | DROPPING | {"partial_tokens": 3}
    run(tmp_path / "run", partial_recipe(3, rollout=rollout, train=TRAIN | {"steps": 16, "save_every": 0}))
    begins = []
    for batch, drawn in enumerate(watch.drawn):
        began = max(0, batch - 3)
        for attempt in range(len(drawn.sampled) // 4):
            said = [r.completion for group in drawn.sampled[4 * attempt : 4 * attempt + 4] for r in group]
            versions = [(c.version,) * len(c.ids) if isinstance(c.version, int) else c.version for c in said]
            for of in versions:
                assert of == tuple(2 * min(batch, began + t // 3) for t in range(len(of)))
            begins.append((attempt, batch - began))
            began = max(of[-1] for of in versions) // 2
    assert {(0, 3), (1, 1), (2, 0)} <= set(begins), "too few groups were replaced; choose other numbers"


def mostly_stops(tokenizer: Any, template: Any) -> frozenset[int]:
    """Every other token ends an answer."""
    return frozenset(range(0, len(tokenizer), 2))


@pytest.mark.parametrize("staleness", [1, 2])
def test_where_no_answer_is_long_it_is_the_run_without_it(
    staleness: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    inline: None,
) -> None:
    monkeypatch.setattr(rollouts, "stop_ids", mostly_stops)
    whole = ROLLOUT | DROPPING | {"max_tokens": 60, "partial": False, "partial_tokens": None}
    cut = whole | {"partial": True, "partial_tokens": 25}
    run(tmp_path / "whole", partial_recipe(staleness, rollout=whole))
    run(tmp_path / "partial", partial_recipe(staleness, rollout=cut))
    ours = steps_of(tmp_path / "partial")
    assert all(step["continued"] == 0 for step in ours[::2])
    assert [{k: v for k, v in step.items() if k not in OF_PARTIAL} for step in ours] == steps_of(tmp_path / "whole")
    assert recorded(tmp_path / "partial") == recorded(tmp_path / "whole")
    assert same_bits(saved_tensors(tmp_path / "partial", 12), saved_tensors(tmp_path / "whole", 12))
    books = [standing(Ledger(tmp_path / name / "ledger.jsonl").read()) for name in ("partial", "whole")]
    assert books[0] == books[1]
    assert {draw for _, draw, _ in books[0]} >= {0, 1}, "no group was replaced; choose other numbers"


def check_equal(cut: Path, whole: Path, steps: tuple[int, ...], num_used: int = 24) -> None:
    assert untimed(cut) == untimed(whole)
    assert recorded(cut) == recorded(whole)
    for step in steps:
        assert same_bits(saved_tensors(whole, step), saved_tensors(cut, step))
    ours, theirs = (Ledger(folder / "ledger.jsonl").read() for folder in (whole, cut))
    assert standing(theirs) == standing(ours)
    assert set(count(ours)) <= {"consumed", "dropped"}
    used = [event.group for event in standing(theirs).values() if event.event == "consumed"]
    assert len(used) == len(set(used)) == num_used


def held_rows(folder: Path, step: int) -> list[dict[str, Any]]:
    tensors: Mapping[str, Tensor] = saved_tensors(folder, step)
    (kept,) = [x for name, x in tensors.items() if name.partition(":")[2] == HELD]
    return json.loads(kept.numpy().tobytes())


@pytest.mark.parametrize("staleness", [1, 3])
def test_stopped_anywhere_and_resumed_equals_undisturbed(
    staleness: int,
    tmp_path: Path,
    inline: None,
) -> None:
    recipe = partial_recipe(staleness)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(whole, recipe)
    run(cut, recipe, stop_after=4)  # at the end of a batch, then inside one, then at an end again
    unfinished = [row for row in held_rows(cut, 4) if "rows" in row]
    assert {row["batch"] for row in unfinished} == set(range(2, 2 + staleness))
    assert {len(a["ids"]) for row in unfinished for group in row["rows"] for a in group if not a["finish"]} <= {2, 4, 6}
    for number in (1, 3):
        run(cut, recipe, resume=True, stop_after=number)
    run(cut, recipe, resume=True)
    check_equal(cut, whole, (6, 9, 12))


def test_a_batch_that_is_there_before_an_older_one_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline: None
) -> None:
    """A checkpoint with an unfinished batch and, behind it, one whose answers were all short."""
    monkeypatch.setattr(rollouts, "stop_ids", mostly_stops)
    few = ROLLOUT | {"prompts": 1, "partial_tokens": 1}
    train = TRAIN | {"minibatches": 1, "keep": 12}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(whole, partial_recipe(3, rollout=few, train=train | {"save_every": 1}))

    def overtakes(step: int) -> bool:
        unfinished = [row["batch"] for row in held_rows(whole, step) if "rows" in row]
        return any(row["batch"] > min(unfinished) for row in held_rows(whole, step) if "rows" not in row)

    step = next(step for step in range(1, 11) if overtakes(step))
    recipe = partial_recipe(3, rollout=few, train=train | {"save_every": step})
    with pytest.raises(Killed):  # when it was trained on
        loop.train(recipe, RunFiles.within(cut), resume=False, observer=deadly_at(step + 2))
    run(cut, recipe, resume=True)
    check_equal(cut, whole, (12,), num_used=12)


def deadly_at(step: int) -> Callable[[str, dict[str, Any]], None]:
    def observe(event: str, facts: dict[str, Any]) -> None:
        if event == "step" and facts["step"] == step:
            raise Killed

    return observe


@pytest.mark.parametrize("staleness", [1, 2])
def test_killed_far_behind_a_checkpoint_and_resumed_equals_undisturbed(
    staleness: int,
    tmp_path: Path,
    inline: None,
) -> None:
    recipe = partial_recipe(staleness, train=TRAIN | {"save_every": 5})
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(whole, recipe)

    for last in (3, 8, 11):
        with pytest.raises(Killed):
            loop.train(recipe, RunFiles.within(cut), resume=last != 3, observer=deadly_at(last))
    run(cut, recipe, resume=True)
    check_equal(cut, whole, (12,))
    events = Ledger(cut / "ledger.jsonl").read()
    assert [e.step for e in events if e.event == "resumed"] == [0, 6, 10]


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: {"batch": 1},
        lambda rows: [row | {"batch": row["batch"] + 1} for row in rows],
        lambda rows: [row | {"rows": row["rows"][1:]} for row in rows],
        lambda rows: [row | {"sampled": [[{}]]} for row in rows],
        *(
            lambda rows, name=name, value=value: [
                row | {"rows": [[said | {name: value} for said in group] for group in row["rows"]]} for row in rows
            ]
            for name, value in (("ids", "abc"), ("ids", [-1]), ("versions", []), ("logprobs", [None]), ("finish", 3))
        ),
    ],
)
def test_unfinished_answers_of_a_stranger_are_refused(tmp_path: Path, inline: None, change: Any) -> None:
    """A checkpoint whose hashes fit, and whose answers on their way no run has written."""
    recipe = partial_recipe(2, train=TRAIN | {"save_every": 2})
    run(tmp_path / "run", recipe, stop_after=2)
    path = tmp_path / "run" / "checkpoints" / "step-000002"
    rows = json.loads(load_file(path / "rollout_buffer.safetensors")[HELD].numpy().tobytes())
    assert all(len(row["rows"]) == ROLLOUT["prompts"] for row in rows)
    content = torch.frombuffer(bytearray(json.dumps(change(rows)).encode()), dtype=torch.uint8)
    save_file({HELD: content}, path / "rollout_buffer.safetensors")
    whole = (path / "rollout_buffer.safetensors").read_bytes()
    files = json.loads((path / "manifest.json").read_text())["files"]
    files["rollout_buffer.safetensors"] = {"bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}
    (path / "manifest.json").write_bytes(checkpoint_files._manifest_bytes(2, files))
    with pytest.raises(CheckpointError, match=r"rollout_buffer\.safetensors does not hold the batches .* --run NAME"):
        run(tmp_path / "run", recipe, resume=True)


@pytest.mark.parametrize("fails_in_step", [5, 6])
def test_a_run_that_fails_in_an_update_writes_nothing_twice(
    fails_in_step: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    inline: None,
) -> None:
    """Step 5 is the first update of batch 2: version 2 has written on before the checkpoint of step 4 is saved."""
    recipe = partial_recipe(2, train=TRAIN | {"save_every": 0})
    run(tmp_path / "whole", recipe)
    with monkeypatch.context() as patch:
        fail_in_step(patch, fails_in_step)
        with pytest.raises(RuntimeError, match="out of luck"):
            run(tmp_path / "cut", recipe)
    run(tmp_path / "cut", recipe, resume=True)
    check_equal(tmp_path / "cut", tmp_path / "whole", (12,))


def test_a_process_beside_it_gives_the_same_bits_also_when_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed as a further round of batch 2 begins, with answers of later batches under way."""
    recipe = partial_recipe(2)
    with monkeypatch.context() as patch:
        sample_inline(patch)
        run(tmp_path / "inline", recipe)
    seen: list[int] = []

    def prepared(recipe: Recipe, folder: Path | None = None, world: World = ONE) -> Parts:
        parts = prepare(recipe, folder, world)
        process = parts.source.ahead._process
        write = process.write

        def write_and_kill(new: Any, weights: Any, carried: Any, begins: Any, ends: Any, died: Any) -> Any:
            def kill(batch: int, attempt: int) -> None:
                begins(batch, attempt)
                if not seen and batch >= 2 and attempt >= 1:
                    seen.append(process._beside._process.pid)
                    os.kill(seen[0], signal.SIGKILL)

            return write(new, weights, carried, kill, ends, died)

        process.write = write_and_kill
        return parts

    monkeypatch.setattr(loop, "prepare", prepared)
    run(tmp_path / "beside", recipe)
    assert len(seen) == 1
    check_equal(tmp_path / "beside", tmp_path / "inline", (3, 12))
    assert {e.draw for e in Ledger(tmp_path / "beside" / "ledger.jsonl").read() if e.reason == DIED} >= {1}


calls: list[str] = []


def fails_in_the_third_batch(text: str) -> float:
    """A reward that raises behind two batches of eight answers."""
    calls.append(text)
    if len(calls) > 2 * 8:
        raise ValueError("no more")
    return float(len(calls) % 3)


def test_a_reward_that_fails_beside_it_is_one_message(tmp_path: Path) -> None:
    """The trainer has what was there before, and does not wait for ever for what was not."""
    recipe = partial_recipe(1, rollout=ROLLOUT, rewards=["test_partial:fails_in_the_third_batch"])
    with pytest.raises(RewardFailure, match=r"while sampling ahead: .*fails_in_the_third_batch.*no more"):
        run(tmp_path / "run", recipe)
    assert count(Ledger(tmp_path / "run" / "ledger.jsonl").read()) == {"consumed": 8, "issued": 8}


@pytest.mark.parametrize("options", [{"path": "lean"}, {"path": "modules"}])
@pytest.mark.parametrize("slots", [3, 64])
def test_an_answer_in_pieces_is_the_answer(options: dict[str, Any], slots: int) -> None:
    """With the same weights: rows of several lengths, some at their end, more of them than slots, continued thrice."""
    model = load_model(ModelSection(name=str(TINY)), seed=0).model
    engine = NativeEngine(model, slots=slots, **options)
    engine.sync(5)
    prompts, keys = [[5, 6, 7], [9], [11, 12]], [[1, 2, 3], [4, 5], [6]]
    sampling = Sampling(12, temperature=1.3, stop_ids=frozenset(range(0, 200, 7)))
    whole = engine.generate(prompts, keys, sampling)
    rows = [[Conversation(i, g, key, 12) for g, key in enumerate(of)] for i, of in enumerate(keys)]
    for version, reach in ((5, 2), (6, 3), (7, 8), (8, 99)):
        engine.sync(version)
        engine.go_on([(p, r, reach) for p, r in zip(prompts, rows, strict=True)], sampling)
        assert all(row.finish or len(row.ids) == reach for of in rows for row in of)
    plan = (5, 5, 6, 7, 7, 7, 7, 7, 8, 8, 8, 8)
    for of, expected in zip(rows, whole, strict=True):
        for row, one in zip(of, expected, strict=True):
            said = row.completion(0)
            assert (said.ids, said.finish) == (one.ids, one.finish)
            assert said.logprobs == pytest.approx(one.logprobs, abs=1e-5)
            versions = plan[: len(one.ids)]
            assert said.version == (versions if len(set(versions)) > 1 else 5)
    finishes = {one.finish for of in whole for one in of}
    assert finishes == {"stop", "length"}, "choose other stop ids"
    assert isinstance(whole[0][0], Completion)


@pytest.mark.parametrize(
    ("rollout", "changes", "says"),
    [
        ({"staleness": 0}, {}, r"'partial' goes on with answers across updates.*'staleness: 1'"),
        ({"partial": False}, {}, r"'partial_tokens' is what one version.*give 'partial: true'"),
        ({"partial_tokens": 8}, {}, r"'partial_tokens' is above 'max_tokens'"),
        ({"engine": "vllm"}, {}, r"rollout\.partial: 'vllm' writes answers to their end.*use native"),
        ({}, {"tools": ["calculator"]}, r"rollout\.partial: with 'environment' or 'tools'"),
    ],
)
def test_what_does_not_go_with_it_is_refused(rollout: dict[str, Any], changes: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        words_of(make_recipe("grpo", rollout=ROLLOUT | {"staleness": 1} | rollout, **changes).resolve())


def test_a_longest_answer_is_spread_evenly_unless_the_recipe_says() -> None:
    def tokens(**rollout: Any) -> int:
        section = make_recipe("grpo", rollout={"partial": True, **rollout}).rollout
        assert section is not None
        return section.tokens_per_version

    assert tokens(staleness=1, max_tokens=10) == 5
    assert tokens(staleness=2, max_tokens=10) == 4
    assert tokens(staleness=2, max_tokens=10, partial_tokens=7) == 7
