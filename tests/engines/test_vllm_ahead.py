"""A server whose weights follow, asked ahead of training: versions by schedule, nothing lost or doubled (L1)."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_follower import SYNC, FakeFollower
from inline_sampling import sample_inline
from posttrain.errors import EngineMismatch, RecipeError
from posttrain.models.load import LoadedModel, load_model
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import ModelSection
from posttrain.store.ledger import DIED, Ledger, count, standing
from posttrain.train import loop
from posttrain.train.build import Parts, prepare
from posttrain.train.checks import words_of
from posttrain.world import ONE, World
from small_runs import Events, make_recipe, recorded, run, steps_of, watched

pytestmark = pytest.mark.usefixtures("no_waiting")

TRAIN = {"steps": 8, "minibatches": 2, "lr": 1e-3}


def ahead_recipe(url: str | None, staleness: int = 2, **changes: Any) -> Recipe:
    engine = {"name": "vllm", "url": url, "retries": 0, "collectives": "gloo"}
    rollout = {"engine": engine, "staleness": staleness, "max_tokens": 6}
    return make_recipe("grpo", rollout=rollout, **({"train": TRAIN} | changes))


def said(folder: Path) -> list[tuple[int, Any, str]]:
    return [(row.step, row.version, row.completion) for row in recorded(folder)[0]]


@pytest.mark.parametrize("staleness", [1, 2])
def test_each_batch_is_of_the_version_that_the_schedule_says(
    staleness: int, server: FakeFollower, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server had the weights of the version that a row names: log-probabilities are those of its checkpoint."""
    sample_inline(monkeypatch)
    train = TRAIN | {"lr": 1e-2, "save_every": 2, "keep": 9}
    run(tmp_path / "served", ahead_recipe(server.url, staleness, train=train))
    rows = recorded(tmp_path / "served")[0]
    assert [(row.step, row.version) for row in rows] == [
        (2 * batch + 1, 2 * max(0, batch - staleness)) for batch in range(4) for _ in range(16)
    ]
    assert server.said == ["/init_weight_transfer_engine", *SYNC * (4 - staleness)]
    assert [step["staleness"] for step in steps_of(tmp_path / "served")[::2]] == [min(b, staleness) for b in range(4)]
    differences: dict[bool, list[float]] = {True: [], False: []}
    for version in {row.version for row in rows}:
        name = str(tmp_path / "served" / "checkpoints" / f"step-{version:06d}") if version else "tiny"
        model = load_model(ModelSection(name=name), seed=0).model
        for row in rows:
            with torch.no_grad():
                logprobs = (model(torch.tensor([row.token_ids])).logits[0] / 1.5).log_softmax(-1)
            own = range(len(row.token_ids) - row.num_tokens, len(row.token_ids))
            mean = sum(float(logprobs[t - 1, row.token_ids[t]]) for t in own) / row.num_tokens
            differences[row.version == version].append(abs(mean - row.mean_sampler_logprob))
    assert max(differences[True]) < 1e-5
    assert min(differences[False]) > 1e-4
    native = {"engine": "native", "staleness": staleness, "max_tokens": 6}
    run(tmp_path / "native", make_recipe("grpo", rollout=native, train=TRAIN))
    books = [standing(Ledger(tmp_path / name / "ledger.jsonl").read()) for name in ("served", "native")]
    assert books[0] == books[1]


def test_killed_and_resumed_no_prompt_is_left_out_or_doubled(
    tiny: LoadedModel, server: FakeFollower, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that samples is killed as batch 2 begins; later the run is stopped, and another server goes on."""
    with monkeypatch.context() as patch, FakeFollower(tiny.model, tiny.tokenizer) as other:
        sample_inline(patch)
        run(tmp_path / "whole", ahead_recipe(other.url, 1))
    seen: list[int] = []

    def prepared(recipe: Recipe, folder: Path | None = None, world: World = ONE) -> Parts:
        parts = prepare(recipe, folder, world)
        process = parts.source.ahead._process
        drawn = process.draw

        def draw_and_kill(batch: int, step: int, weights: Any, begins: Any, died: Any) -> Any:
            def kill(attempt: int) -> None:
                begins(attempt)
                if batch == 2 and not seen:
                    seen.append(process._beside._process.pid)
                    os.kill(seen[0], signal.SIGKILL)

            return drawn(batch, step, weights, kill, died)

        process.draw = draw_and_kill
        return parts

    monkeypatch.setattr(loop, "prepare", prepared)
    events = Events()
    watched(tmp_path / "cut", ahead_recipe(server.url, 1), events, stop_after=5)
    assert len(seen) == 1
    assert events.of("start")[0]["guarantee"] == "L1"
    with FakeFollower(tiny.model, tiny.tokenizer) as other:
        run(tmp_path / "cut", ahead_recipe(other.url, 1), resume=True)
    assert said(tmp_path / "cut") == said(tmp_path / "whole")
    ours, theirs = (Ledger(tmp_path / name / "ledger.jsonl").read() for name in ("cut", "whole"))
    assert standing(ours) == standing(theirs)
    assert count(ours) == {"consumed": 16}
    assert {event.batch for event in ours if event.reason == DIED} == {2}


def test_weights_that_do_not_arrive_are_caught_before_the_next_update(
    server: FakeFollower, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample_inline(monkeypatch)

    def drop(event: str, facts: dict[str, Any]) -> None:
        if event == "step" and facts["step"] == 1:
            server.drops = ("model.norm.weight", "model.layers.0.mlp.up_proj.weight")

    recipe = ahead_recipe(server.url, 1, train=TRAIN | {"lr": 1e-2})
    with pytest.raises(EngineMismatch, match=r"after 2 updates .*: log-probabilities .* differ"):
        watched(tmp_path / "run", recipe, drop)
    assert len(steps_of(tmp_path / "run")) <= 4, "batch 2 is the first that was to be sampled with them"


def test_a_server_of_its_own_that_dies_is_started_again_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Path(__file__).parent / "fake_server_process.py"
    python = tmp_path / "python"
    path = os.pathsep.join(p for p in sys.path if p)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {sys.executable} {program} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("POSTTRAIN_VLLM", str(python))
    place = tmp_path / "run" / "ahead" / "pid"
    pids: list[int] = []

    class Killing(Events):
        def __call__(self, event: str, facts: dict[str, Any]) -> None:
            super().__call__(event, facts)
            if event == "step" and facts["step"] == 1:
                pids.append(int(place.read_text()))
                os.kill(pids[0], signal.SIGKILL)

    events = Killing()
    train = {"steps": 4, "lr": 1e-3}
    assert watched(tmp_path / "run", ahead_recipe(None, 1, train=train), events).step == 4
    (notice,) = [facts["message"] for facts in events.of("notice")]
    assert notice.startswith("while sampling ahead: the vLLM server failed: ")
    assert [version for _, version, _ in said(tmp_path / "run")[::16]] == [0, 0, 1, 2]
    assert count(Ledger(tmp_path / "run" / "ledger.jsonl").read()) == {"consumed": 16}
    last = int(place.read_text())
    assert last != pids[0]
    deadline = time.monotonic() + 30
    while Path(f"/proc/{last}/cmdline").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{last}/cmdline").exists(), "it ends behind the process that started it"


EVERY = {"every": 2, "n": 2}


@pytest.mark.parametrize(
    ("staleness", "evaluation"),
    [(1, EVERY), (1, EVERY | {"engine": {"name": "vllm", "url": "http://127.0.0.1:9"}})],
)
def test_one_server_for_two_versions_at_a_time_is_refused(staleness: int, evaluation: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=r"eval\.engine: the server of rollout\.engine 'vllm' .* such as native"):
        words_of(ahead_recipe("http://127.0.0.1:9", staleness, eval=evaluation).resolve())


@pytest.mark.parametrize(
    ("staleness", "evaluation"),
    [
        (0, EVERY),
        (1, {}),
        (1, EVERY | {"engine": "native"}),
        (1, EVERY | {"engine": {"name": "vllm", "url": "http://127.0.0.1:8"}}),
    ],
)
def test_one_server_for_each_is_not(staleness: int, evaluation: dict[str, Any]) -> None:
    assert words_of(ahead_recipe("http://127.0.0.1:9", staleness, eval=evaluation).resolve()).guarantee == "L1"
