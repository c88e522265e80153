"""Run the trials in a comparison, sequentially or in several processes.

Each process takes the next trial without a record or lock. Running the same command in a second terminal shares the
work; running it after an interruption continues.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from posttrain.errors import PosttrainError, RunConflict, RunFailure
from posttrain.evaluation.files import RESULTS
from posttrain.runs.children import Child, end_children, start_child, stop_on_signals, threads_per_child
from posttrain.runs.directory import RunDirectory, refuse_live_folder
from posttrain.runs.launch import RunResult, RunStart, launch
from posttrain.runs.paths import PLAN
from posttrain.store.durable import refuse_links, remove_tree, replace_file, storage_errors
from posttrain.store.locks import Held, hold
from posttrain.store.metrics import MetricsLog
from posttrain.sweeps.comparison.plan import ComparisonPlan, ComparisonTrial, choose_rates
from posttrain.sweeps.comparison.records import (
    TrialRecord,
    facts_of_run,
    read_recorded,
    read_trial_record,
    record_path,
    write_trial_record,
)
from posttrain.sweeps.runner import Say, SweepOutcome, refuse_other_folder
from posttrain.untrusted import allow_code_options

Launch = Callable[..., RunResult]
POLL_SECONDS = 1.0
SHARED = "POSTTRAIN_SHARED_COMPARISON"  # set in the environment of helper processes started by a comparison


def load_records(plan: ComparisonPlan) -> list[TrialRecord]:
    """Load records for all completed trials, including ``comparison.recorded``.

    Raises:
        RunConflict: a record belongs to a different recipe.
        DataError: a record is damaged.
    """
    earlier = _earlier(plan)
    records = _find_all(plan, plan.tuning(), earlier)
    return records + _find_all(plan, plan.final(choose_rates(plan, records)), earlier)


def _earlier(plan: ComparisonPlan) -> dict[str, TrialRecord]:
    """Load records from an earlier comparison, by fingerprint."""
    if plan.design.recorded is None:
        return {}
    return {record.fingerprint: record for record in read_recorded(Path(plan.design.recorded))}


def _find_all(
    plan: ComparisonPlan, trials: Sequence[ComparisonTrial], earlier: Mapping[str, TrialRecord]
) -> list[TrialRecord]:
    found = []
    for trial in trials:
        record = _find(plan, trial, earlier)
        if record is not None:
            found.append(record)
    return found


def _find(plan: ComparisonPlan, trial: ComparisonTrial, earlier: Mapping[str, TrialRecord]) -> TrialRecord | None:
    """Find a trial's record, from this comparison or an earlier one."""
    fingerprint = trial.fingerprint
    record = read_trial_record(record_path(plan.folder, trial.name))
    if record is None:
        record = earlier.get(fingerprint)
        if record is None:
            return None
        return replace(record, stage=trial.stage, row=trial.row, variant=trial.variant)
    if record.fingerprint != fingerprint:
        raise RunConflict(
            f"{record_path(plan.folder, trial.name)}: created by a different recipe. Nothing was changed. Delete "
            "it, or run the comparison under a different name with --run NAME"
        )
    return record


def make_comparison(
    plan: ComparisonPlan,
    *,
    jobs: int | None = None,
    say: Say = lambda line, is_failure: None,
    train: Launch = launch,
    poll_seconds: float = POLL_SECONDS,
) -> SweepOutcome:
    """Run all trials without a record: first those that select the rates, then those at the selected rates.

    Args:
        jobs: number of processes; default: 1.
        train: launches a run (``runs.launch.launch``).

    Raises:
        RunConflict: the folder or a record belongs to something else. Nothing was changed.
        DataError: a record is damaged.
    """
    _claim(plan)
    load_records(plan)
    stop = stop_on_signals("stopping after active trials have saved")
    _sample_pairs(plan, say)
    with _helpers(plan, jobs), stop as should_stop:
        worker = _Worker(plan, say, train, poll_seconds, _earlier(plan), should_stop)
        worker.make(plan.tuning())
        if not worker.outcome.interrupted:
            rates = choose_rates(plan, _find_all(plan, plan.tuning(), worker.earlier))
            for line in _describe_rates(plan, rates):
                say(line, False)
            worker.make(plan.final(rates))
    return worker.outcome


def _claim(plan: ComparisonPlan) -> None:
    """Write the plan to its folder; refuse a folder with other contents."""
    folder = plan.folder
    refuse_other_folder(folder)
    refuse_live_folder(folder)  # a regular sweep may be running there
    if folder.exists():
        refuse_links(folder)
    with storage_errors("comparison", folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.environ.get(SHARED):
            replace_file(folder / PLAN, plan.to_yaml().encode())


def _sample_pairs(plan: ComparisonPlan, say: Say) -> None:
    """Sample the answers shared by all rows, once. If another process is sampling, wait for it.

    Raises:
        RunConflict: they were sampled with different settings.
        RunFailure: the evaluation failed.
    """
    words = plan.pairs_command()
    if not words:
        return
    settings = plan.folder / "pairs.command.json"
    text = (json.dumps(words, indent=1) + "\n").encode()
    with hold(plan.folder / ".pairs.lock", math.inf):
        if (plan.pairs_folder / RESULTS).is_file():
            if settings.is_file() and settings.read_bytes() == text:
                return
            raise RunConflict(
                f"{plan.pairs_folder}: sampled with different settings. Delete it, or give a different --run NAME"
            )
        replace_file(settings, text)
        say("pairs: sampling answers from the initial model", False)
        log = plan.folder / "pairs.log"
        command = [sys.executable, "-m", "posttrain.cli", *words, *allow_code_options()]
        child = start_child(command, log, "the sampling of pairs", threads_per_child(1))
        try:
            code = child.process.wait()
        finally:
            end_children([child])
        if code != 0:
            raise RunFailure(f"pairs: {child.describe_end(code)}")


@contextmanager
def _helpers(plan: ComparisonPlan, jobs: int | None) -> Iterator[None]:
    """Start helper processes that also take trials; they end with this one."""
    children: list[Child] = []
    words = ["sweep", str(plan.folder / PLAN), "--run", plan.folder.name, "--runs-dir", str(plan.folder.parent)]
    command = [sys.executable, "-m", "posttrain.cli", *words, "--jobs", "1", "--quiet", *allow_code_options()]
    threads = threads_per_child(1)
    try:
        for number in range(1, jobs or 1):
            log = plan.folder / f"helper-{number}.log"
            children.append(start_child(command, log, "a helper", threads, {SHARED: "1"}))
        yield
    finally:
        end_children(children)


def _describe_rates(plan: ComparisonPlan, rates: Mapping[tuple[str, int], float]) -> list[str]:
    lines = []
    for variant, name in enumerate(plan.variants):
        chosen = ", ".join(f"{row} {rate:g}" for (row, own), rate in rates.items() if own == variant)
        if chosen:
            lines.append(f"learning rates chosen ({name or 'all'}): {chosen}")
    return lines


@dataclass
class _Clock:
    """Run observer that measures CPU-seconds in this process: in updates, and in total."""

    started: float = field(default_factory=time.process_time)
    last: float = field(default_factory=time.process_time)
    of_updates: float = 0.0

    def __call__(self, event: str, info: dict[str, Any]) -> None:
        now = time.process_time()
        if event == "step":
            self.of_updates += now - self.last
        self.last = now


@dataclass
class _Worker:
    """Runs trials not claimed by other processes."""

    plan: ComparisonPlan
    say: Say
    train: Launch
    poll_seconds: float
    earlier: Mapping[str, TrialRecord]
    should_stop: Callable[[], bool]
    outcome: SweepOutcome = field(default_factory=SweepOutcome)

    def find(self, trial: ComparisonTrial) -> TrialRecord | None:
        return _find(self.plan, trial, self.earlier)

    def make(self, trials: Sequence[ComparisonTrial]) -> None:
        """Run each trial, or wait until another process has finished it."""
        waiting = [trial for trial in trials if self.find(trial) is None]
        while waiting and not self.outcome.interrupted:
            num_before = len(waiting)
            for trial in list(waiting):
                if self.outcome.interrupted or self.should_stop():
                    self.outcome.interrupted = True
                    break
                if self.find(trial) is not None or self._take(trial):
                    waiting.remove(trial)
                    self._tell(trial, len(waiting))
            if len(waiting) == num_before and not self.outcome.interrupted:
                time.sleep(self.poll_seconds)

    def _tell(self, trial: ComparisonTrial, num_left: int) -> None:
        record = self.find(trial)
        if record is not None:
            self.say(f"{trial.name}: final accuracy {record.accuracy:.1%} ({num_left} left)", False)

    def _take(self, trial: ComparisonTrial) -> bool:
        """Run a trial. Returns True when done, False if another process holds it."""
        place = trial.folder.parent
        with storage_errors("comparison", place):
            place.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                stack.enter_context(hold(place / f".{trial.name}.lock", 0.05))
            except Held:
                return False
            if self.find(trial) is not None:
                return True
            try:
                return self._make(trial)
            except PosttrainError as error:
                self.outcome.failures[trial.name] = str(error)
                self.say(f"{trial.name}: failed: {error}", True)
                return True

    def _make(self, trial: ComparisonTrial) -> bool:
        run = RunDirectory(trial.folder)
        is_begun = run.recipe_path.is_file()
        status = None
        if is_begun:
            status = run.read_status()
            changed = run.changed_keys(trial.recipe)
            if changed:
                what = ", ".join(sorted(changed))
                raise RunConflict(f"{trial.folder}: created by a different recipe, which differs in {what}. Delete it")
        clock = _Clock()
        if status is None or status.state != "finished":
            start = RunStart(trial.folder.parent, trial.name, trial.name, resume=is_begun)
            result = self.train(trial.recipe, start, observer=clock)
            if result.reason != "finished":
                self.outcome.interrupted = True  # the loop ends before taking another trial
                return False
        seconds = None
        whole = None
        if not is_begun:
            seconds = clock.of_updates
            whole = time.process_time() - clock.started
        facts = facts_of_run(trial.folder, MetricsLog(trial.folder / "metrics.jsonl").read())
        record = TrialRecord(
            fingerprint=trial.fingerprint,
            stage=trial.stage,
            row=trial.row,
            variant=trial.variant,
            rate=trial.rate,
            seed=trial.seed,
            cpu_seconds=seconds,
            whole_seconds=whole,
            **facts,
        )
        write_trial_record(record_path(self.plan.folder, trial.name), record)
        if not self.plan.design.keep_runs:
            remove_tree(trial.folder)
        return True
