"""How the parts of a study are run: with small stand-ins for `posttrain train` and `posttrain evaluate`."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_runner import STUDIED, FakeRunner, doings

from posttrain.errors import DataError, RecipeError, RunConflict, RunFailure
from posttrain.graders.sandbox.workers import count_cpus
from posttrain.reports.sweeps import write_study
from posttrain.sweeps.plan import standings
from posttrain.sweeps.runner import Outcome, part_command, run_sweep
from posttrain.sweeps.study import StudyPlan, collect_study, load_study

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


@pytest.fixture
def make_plan(tmp_path: Path) -> Callable[..., StudyPlan]:
    def make(*overrides: tuple[str, str], **wanted: Any) -> StudyPlan:
        (tmp_path / "mine.yaml").write_text(TEXT)
        return load_study(str(tmp_path / "mine.yaml"), overrides, folder=tmp_path / "out", **wanted)

    return make


def run(plan: StudyPlan, jobs: int = 2, doing: dict[str, str] | None = None) -> tuple[Outcome, FakeRunner]:
    fake = FakeRunner(doing, STUDIED)
    return fake.run(plan, jobs=jobs), fake


def unfinished_parts(plan: StudyPlan) -> list[str]:
    return [name for name, standing in standings(plan).items() if standing != "finished"]


def test_every_part_begins_after_what_it_needs(make_plan) -> None:
    plan = make_plan()
    outcome, fake = run(plan, jobs=3)
    assert (outcome.failures, outcome.interrupted, unfinished_parts(plan)) == ({}, False, [])
    threads = max(1, count_cpus() // 3)
    assert fake.plan_facts == {"num_parts": 7, "num_finished": 0, "num_jobs": 3, "num_threads": threads}
    order = [told for told in fake.told if told[0] in ("begin", "end")]
    for part in plan.parts:
        for name in part.needs:
            assert order.index(("end", name)) < order.index(("begin", part.name))
    assert (plan.folder / "study.yaml").read_text() == plan.to_yaml()
    words = json.loads((plan.folder / "chosen" / "proxy-seed1.command.json").read_text())
    assert words == list(plan.choosing[1].command)


def test_finished_parts_are_left_and_unfinished_ones_go_on(make_plan) -> None:
    plan = make_plan()
    run(plan)
    status = plan.folder / "cells" / "grpo-seed1" / "status.json"
    status.write_text(status.read_text().replace("finished", "running"))
    outcome, fake = run(plan)
    assert fake.names("begin") == ["grpo-seed1"]
    assert doings(plan, "grpo-seed1") == ["finish", "resume"]
    assert [doings(plan, part.name) for part in plan.parts if part.name != "grpo-seed1"] == [["finish"]] * 6
    assert outcome.failures == {}


def test_a_failure_stops_only_what_needs_it(make_plan) -> None:
    plan = make_plan()
    outcome, fake = run(plan, doing={"proxy-seed0": "fail"})
    assert outcome.failures == {
        "proxy-seed0": "it broke at",
        "grpo-seed0": "not begun, for proxy-seed0 failed",
        "proxy-seed0-best-of-4": "not begun, for proxy-seed0 failed",
    }
    assert set(fake.names("dropped")) == {"grpo-seed0", "proxy-seed0-best-of-4"}
    assert set(unfinished_parts(plan)) == set(outcome.failures)
    found = collect_study(plan, outcome, "again")
    assert found.report.problems[0] == "proxy-seed0: it broke at"
    assert found.report.data["methods"]["grpo"]["seeds"].keys() == {"1"}


def test_without_a_start_there_is_nothing(make_plan) -> None:
    plan = make_plan()
    outcome, _ = run(plan, doing={"start": "fail"})
    assert len(outcome.failures) == 7
    with pytest.raises(RunFailure, match="nothing to report yet"):
        collect_study(plan, outcome, "again")


def test_ctrl_c_reaches_what_works_and_begins_nothing(make_plan) -> None:
    plan = make_plan()

    def interrupt() -> None:
        waiting = [f"proxy-seed{seed}" for seed in (0, 1)]
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and any(doings(plan, name) != ["wait"] for name in waiting):
            time.sleep(0.02)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    outcome, _ = run(plan, doing={"proxy": "wait"})
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
            run_sweep(make_plan(override))
    (plan.folder / "start" / "status.json").unlink()
    with pytest.raises(RunConflict, match="made from an earlier start, which is gone or not finished"):
        run_sweep(plan)
    other = load_study(str(tmp_path / "mine.yaml"), folder=tmp_path)
    with pytest.raises(RunConflict, match="holds something else than a study"):
        run_sweep(other)
    with pytest.raises(RunConflict, match="this is a file"):
        run_sweep(load_study(str(tmp_path / "mine.yaml"), folder=tmp_path / "mine.yaml"))


def test_from_records_to_files(make_plan) -> None:
    plan = make_plan()
    outcome, _ = run(plan)
    found = collect_study(plan, outcome, "posttrain study x")
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
    train = part_command(plan.trainings("policies")[0], True)
    assert train[1:4] == ["-m", "posttrain.cli", "train"]
    assert train[-1] == "--resume"
    assert part_command(plan.choosing[0], True)[3:] == list(plan.choosing[0].command)


def test_answers_that_are_not_those_of_the_study_are_refused(make_plan) -> None:
    plan = make_plan()
    outcome, _ = run(plan)
    collect_study(plan, outcome, "posttrain study mine")
    path = plan.folder / "chosen" / "proxy-seed1" / "items.jsonl"
    item = json.loads(path.read_text())
    for samples, message in (
        (item["samples"][:2], r"items\.jsonl:1: 2 answers, where"),
        ([], "not answers to"),
    ):
        path.write_text(json.dumps(item | {"samples": samples}) + "\n")
        with pytest.raises(DataError, match=message):
            collect_study(plan, outcome, "posttrain study mine")
    path.write_text(f"{json.dumps(item)}\n{json.dumps(item | {'id': 'b'})}\n")
    with pytest.raises(DataError, match="not answers to the problems of this study"):
        collect_study(plan, outcome, "posttrain study mine")


def test_no_two_parts_have_one_name(make_plan, tmp_path: Path) -> None:
    sampled = "proxy: {task: {name: stories, size: 40}, rollout: {prompts: 8, group: 4, select: best_and_worst},"
    text = TEXT.replace(sampled, "labelled: {data: {batch: 4},").replace("bradley_terry", "process")
    text = text.replace("best_of_n:", "labelled: {task: stories, n: 4, samples: 2}\nbest_of_n:")
    (tmp_path / "twice.yaml").write_text(text)
    with pytest.raises(
        RecipeError, match="study: two parts would be called labelled-seed0; give what they are made by"
    ):
        load_study(str(tmp_path / "twice.yaml"), folder=tmp_path / "out")


def changed(name: str, before: str, after: str) -> Callable[[Path], None]:
    """A file of the study with other text in it."""

    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert before in text
        (folder / name).write_text(text.replace(before, after, 1))

    return change


def cut_line(name: str) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        lines = (folder / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:-1]))

    return cut


def double(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text((folder / name).read_text() * 2) and None


METRICS = "cells/grpo-seed1/metrics.jsonl"
ITEMS, RESULTS = "chosen/proxy-seed1/items.jsonl", "chosen/proxy-seed1/results.json"
DAMAGES = {
    "metrics cut": (cut_line(METRICS), "metrics.jsonl: 2 lines, and 3 stood there when the run ended"),
    "metrics doubled": (double(METRICS), "metrics.jsonl: 6 lines, and 3 stood there when the run ended"),
    "no metrics": (lambda folder: (folder / METRICS).unlink(), "metrics.jsonl: 0 lines, and 3 stood there"),
    "another run's metrics": (
        changed("cells/grpo-seed1/status.json", '"accuracy": 0.5', '"accuracy": 0.25'),
        "its last evaluation is not that of status.json; they differ in accuracy",
    ),
    "answers cut": (cut_line(ITEMS), "of 1 items, and items.jsonl beside it has 0"),
    "answers doubled": (double(ITEMS), "of 1 items, and items.jsonl beside it has 2"),
    "no answers": (lambda folder: (folder / ITEMS).unlink(), "results.json: damaged (FileNotFoundError"),
    "cut results": (changed(RESULTS, "}}", "}"), "results.json: damaged (JSONDecodeError"),
    "no count": (changed(RESULTS, '"n"', '"m"'), "results.json: damaged (KeyError: 'n')"),
    "a list": (lambda folder: (folder / RESULTS).write_text("[]") and None, "results.json: damaged (AttributeError"),
    "of another seed": (changed(RESULTS, '"seed": 1', '"seed": 0'), "of 0, where 1 was asked for"),
    "of other weights": (changed(RESULTS, "out/start", "out/other"), "/other/checkpoints/step-000002, where "),
    "by another scorer": (changed(RESULTS, "cells/proxy-seed1", "cells/proxy-seed0"), "/proxy-seed0, where "),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_finished_parts_whose_records_are_not_all_there_are_refused(name: str, make_plan) -> None:
    """Else they would give other figures without a word."""
    plan = make_plan()
    run(plan)
    run_folder, choice = plan.folder / "cells" / "grpo-seed1", plan.choosing[1]
    state = run_folder / "checkpoints" / "step-000002" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text(json.dumps({"records": {"metrics": 3}, "best": math.nan}))
    told = json.loads((run_folder / "status.json").read_text())
    (run_folder / "status.json").write_text(json.dumps(told | {"evaluation": "x"}))
    settings = {"checkpoint": plan.start.weights, "seed": 1, "best_of": str(plan.folder / "cells" / "proxy-seed1")}
    (choice.folder / "results.json").write_text(json.dumps({"results": {"n": 1, "kl": math.nan}, "settings": settings}))
    assert unfinished_parts(plan) == []
    change, words = DAMAGES[name]
    change(plan.folder)
    before = {path: path.read_bytes() for path in plan.folder.rglob("*") if path.is_file()}
    with pytest.raises(RunConflict) as refusal:
        run(plan)
    assert words in str(refusal.value)
    assert str(refusal.value).endswith("under another name with --run NAME, or delete these parts first")
    assert {path: path.read_bytes() for path in plan.folder.rglob("*") if path.is_file()} == before
