"""How the parts of a study are run: with small stand-ins for `posttrain train` and `posttrain evaluate`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RunConflict, RunFailure
from posttrain.reports.study import write_study
from posttrain.sweeps.parts import folder_of, part_command, read_failures, run_parts, standings, unfinished
from posttrain.sweeps.study import Part, StudyPlan, Training, load_study
from posttrain.sweeps.study_files import collect_study

TEXT = """\
study: overoptimization
start: {recipe: tiny/sft, train: {steps: 2, warmup_steps: 0}}
reward_models:
  proxy: {task: {name: stories, size: 40}, rollout: {prompts: 8, group: 4, select: best_and_worst},
          objective: bradley_terry, train: {steps: 2}, eval: {every: 0}}
policies: {grpo: {recipe: rl/grpo, train: {steps: 2}, eval: {drift_prompts: 4}}}
best_of_n: {task: stories, n: 5, samples: 4}
seeds: 2
"""

# What a part does to its folder, without doing it. argv: folder, recipe (or nothing), what to do.
STAND_IN = """\
import json, pathlib, signal, sys, time
folder, recipe, what = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
folder.mkdir(exist_ok=True, parents=True)

def status(state):
    facts = {"state": state, "step": 2, "steps": 2, "pid": 1, "host": "here", "updated": 0, "message": "it broke"}
    (folder / "status.json").write_text(json.dumps(facts))

def stop(number, frame):
    status("interrupted")
    sys.exit(130)

signal.signal(signal.SIGINT, stop)
with open(folder.parent / "order.txt", "a") as file:
    file.write(f"{folder.name} {what}\\n")

if recipe:
    (folder / "recipe.yaml").write_text(open(recipe).read())
if what == "fail":
    status("failed")
    print("posttrain: it broke", file=sys.stderr)
    sys.exit(1)
if what == "wait":
    time.sleep(60)
if recipe:
    for step, gold in ((0, 0.1), (1, 0.8), (2, 0.3)):
        facts = {"accuracy": 0.5, "kl_from_start": step**2, "sampled_accuracy": gold, "sampled_reward": step + 1.0}
        line = {"step": step, "metrics": {f"eval/x/{k}": v for k, v in facts.items()}, "timing": {}}
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\\n")
    status("finished")
else:
    samples = [
        {"text": "", "extracted": "1", "outcome": o, "num_tokens": 3, "finish": "stop", "reward": 0.0,
         "in_format": True, "parts": {}, "score": s}
        for o, s in (("right", 1.0), ("wrong", 2.0), ("wrong", 0.0), ("right", 0.5))
    ]
    item = {"id": "a", "index": 0, "question": "?", "answer": "1", "meta": {}, "samples": samples}
    (folder / "items.jsonl").write_text(json.dumps(item) + "\\n")
    (folder / "results.json").write_text("{}")
"""


@pytest.fixture
def make_plan(tmp_path: Path) -> Callable[..., StudyPlan]:
    def make(*overrides: tuple[str, str], **wanted: Any) -> StudyPlan:
        (tmp_path / "mine.yaml").write_text(TEXT)
        return load_study(str(tmp_path / "mine.yaml"), overrides, folder=tmp_path / "out", **wanted)

    return make


def stand_in(behaviour: dict[str, str]) -> Callable[[Part, bool], list[str]]:
    def command(part: Part, resume: bool) -> list[str]:
        recipe = str(part.cell.folder.with_name(f"{part.name}.yaml")) if isinstance(part, Training) else ""
        what = behaviour.get(part.name, "resume" if resume else "work")
        return [sys.executable, "-S", "-c", STAND_IN, str(folder_of(part)), recipe, what]

    return command


def run(plan: StudyPlan, jobs: int = 2, **behaviour: str) -> tuple[Any, list[tuple[str, dict[str, Any]]]]:
    events: list[tuple[str, dict[str, Any]]] = []
    named = {name.replace("_", "-"): what for name, what in behaviour.items()}
    outcome = run_parts(
        plan, jobs=jobs, observer=lambda e, f: events.append((e, f)), command=stand_in(named), poll_seconds=0.01
    )
    return outcome, events


def names_of(events: list[tuple[str, dict[str, Any]]], wanted: str) -> list[str]:
    return [facts["part"].name for event, facts in events if event == wanted]


def test_every_part_begins_after_what_it_needs(make_plan) -> None:
    plan = make_plan()
    outcome, events = run(plan, jobs=3)
    assert (outcome.failures, outcome.interrupted, unfinished(plan)) == ({}, False, [])
    assert events[0][1] == {"num_parts": 7, "num_finished": 0, "num_jobs": 3}
    order = [(event, facts["part"].name) for event, facts in events if event in ("begin", "end")]
    for part in plan.parts:
        for name in part.needs:
            assert order.index(("end", name)) < order.index(("begin", part.name))
    assert (plan.folder / "study.yaml").read_text() == plan.to_yaml()
    words = json.loads((plan.folder / "chosen" / "proxy-seed1.command.json").read_text())
    assert words == list(plan.choosing[1].words)


def test_finished_parts_are_left_and_unfinished_ones_go_on(make_plan) -> None:
    plan = make_plan()
    run(plan)
    before = (plan.folder / "cells" / "order.txt").read_text()
    status = plan.folder / "cells" / "grpo-seed1" / "status.json"
    status.write_text(status.read_text().replace("finished", "running"))
    outcome, events = run(plan)
    assert names_of(events, "begin") == ["grpo-seed1"]
    assert (plan.folder / "cells" / "order.txt").read_text() == before + "grpo-seed1 resume\n"
    assert outcome.failures == {}


def test_a_failure_stops_only_what_needs_it(make_plan) -> None:
    plan = make_plan()
    outcome, events = run(plan, proxy_seed0="fail")
    assert outcome.failures == {
        "proxy-seed0": "it broke",
        "grpo-seed0": "not begun, for proxy-seed0 failed",
        "proxy-seed0-best-of-4": "not begun, for proxy-seed0 failed",
    }
    assert set(names_of(events, "dropped")) == {"grpo-seed0", "proxy-seed0-best-of-4"}
    assert set(unfinished(plan)) == set(outcome.failures)
    found = collect_study(plan, set(standings(plan)) - set(unfinished(plan)), read_failures(plan, outcome), "again")
    assert found.report.problems[0] == "proxy-seed0: it broke"
    assert found.report.data["methods"]["grpo"]["seeds"].keys() == {"1"}


def test_without_a_start_there_is_nothing(make_plan) -> None:
    plan = make_plan()
    outcome, _ = run(plan, start="fail")
    assert len(outcome.failures) == 7
    with pytest.raises(RunFailure, match="nothing to report yet"):
        collect_study(plan, set(), outcome.failures, "again")


def test_ctrl_c_reaches_what_works_and_begins_nothing(make_plan) -> None:
    plan = make_plan()

    def interrupt() -> None:
        order = plan.folder / "cells" / "order.txt"
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not (order.is_file() and order.read_text().count("wait") == 2):
            time.sleep(0.02)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    command = stand_in({"proxy-seed0": "wait", "proxy-seed1": "wait"})
    threading.Thread(target=interrupt).start()
    outcome = run_parts(plan, jobs=2, command=command, poll_seconds=0.01)
    assert (outcome.interrupted, outcome.failures) == (True, {})
    assert standings(plan)["proxy-seed0"] == "unfinished"
    assert standings(plan)["grpo-seed0"] == "new"


def test_what_belongs_to_something_else_is_refused(make_plan, tmp_path: Path) -> None:
    plan = make_plan()
    run(plan)
    for override, message in (
        (("policies.grpo.train.lr", "1"), "made by another recipe; it differs in train.lr"),
        (("best_of_n.n", "6"), "made with other settings of best_of_n"),
    ):
        with pytest.raises(RunConflict, match=message):
            run_parts(make_plan(override))
    (plan.folder / "start" / "status.json").unlink()
    with pytest.raises(RunConflict, match="made from an earlier start, which is gone or not finished"):
        run_parts(plan)
    other = load_study(str(tmp_path / "mine.yaml"), folder=tmp_path)
    with pytest.raises(RunConflict, match="holds something else than a study"):
        run_parts(other)
    with pytest.raises(RunConflict, match="this is a file"):
        run_parts(load_study(str(tmp_path / "mine.yaml"), folder=tmp_path / "mine.yaml"))


def test_from_records_to_files(make_plan) -> None:
    plan = make_plan()
    run(plan)
    found = collect_study(plan, {part.name for part in plan.parts}, {}, "posttrain study x")
    report = write_study(found, plan.folder)
    data = json.loads((plan.folder / "results.json").read_text())
    assert list(data["methods"]) == ["best of n", "grpo"]
    grpo = data["methods"]["grpo"]
    assert [p["gold"]["mean"] for p in grpo["mean"]] == [0.1, 0.8, 0.3]
    # scores 1, 2, 0, 0.5: mean 0.875; the proxy is told in their standard deviations
    deviation = (sum((s - 0.875) ** 2 for s in (1.0, 2.0, 0.0, 0.5)) / 4) ** 0.5
    assert grpo["mean"][2]["proxy"]["mean"] == pytest.approx((3.0 - 0.875) / deviation)
    assert [p["gold"]["mean"] for p in data["methods"]["best of n"]["mean"]] == [0.5, pytest.approx(0.5), 0.0]
    assert grpo["turn_over"]["peak_at"] == 1
    assert "| grpo | 2 |" in (plan.folder / "table.md").read_text()
    assert (plan.folder / "study.png").read_bytes()[:4] == b"\x89PNG"
    page = report.read_text()
    assert "data:image/png;base64," in page
    assert "posttrain study x" in page


def test_the_commands_of_parts(make_plan) -> None:
    plan = make_plan()
    train = part_command(plan.policies[0], True)
    assert train[1:4] == ["-m", "posttrain.cli", "train"]
    assert train[-1] == "--resume"
    assert part_command(plan.choosing[0], True)[3:] == list(plan.choosing[0].words)
