"""Running the trials of a sweep: each one a process of its own, begun as soon as what it needs is there.

Finished trials are left as they are, unfinished ones go on from where they were, and a trial that fails stops only
those that need it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from posttrain.activity import phase
from posttrain.data.base import Task, build_task
from posttrain.data.render import Template
from posttrain.data.render.template import build_template
from posttrain.errors import DataError, PosttrainError, RunConflict, RunFailure
from posttrain.evaluation.files import ITEMS
from posttrain.evaluation.generation import distinct_indices
from posttrain.evaluation.items import read_items
from posttrain.evaluation.reward_models.scoring import reasoning_of, split_steps
from posttrain.graders.sandbox.workers import count_cpus
from posttrain.runs.children import Child, end_children, start_child, stop_on_signals, threads_per_child
from posttrain.runs.directory import lock_run, refuse_live_folder, wait_for_end
from posttrain.runs.paths import PLAN
from posttrain.store.durable import refuse_links, remove_leftovers, replace_file, storage_errors
from posttrain.sweeps.file import LABELLED
from posttrain.sweeps.plan import Plan, State, Training, Trial
from posttrain.untrusted import allow_code_options


def label_steps(steps: Sequence[str], working: Sequence[str], is_correct: bool) -> list[int]:
    """1 for a good step, 0 for a bad one, of an answer that is right or not.

    A step is good as long as it and all before it are those of the given working, white space aside. The last one
    must also lead to the right answer. Steps of another way that is as good count as bad, so this is for tasks whose
    working leaves no choice.
    """
    labels: list[int] = []
    agrees = True
    for index, step in enumerate(steps):
        agrees = agrees and index < len(working) and step.split() == working[index].split()
        labels.append(int(agrees and (is_correct or index < len(steps) - 1)))
    return labels


def write_labelled(items: Path, task: Task, n: int, template: Template, target: Path) -> None:
    """Write a row of the layout ``steps`` of the task ``preferences`` for each answer that has steps.

    Args:
        items: ``items.jsonl`` of an evaluation of at most ``n`` problems of ``task``.
        template: the one under which the answers were written.

    Raises:
        DataError, RunFailure: answers to other problems, a problem without a given working, or no step at all.
        StorageError: the disk is full or not writable.
    """
    indices = distinct_indices(task.examples, n)
    rows: list[dict[str, object]] = []
    for item in read_items(items):
        example = task.examples[indices[item.index]]
        if example.id != item.id:
            raise DataError("labelled", f"the answers are to {item.id}, and the task has {example.id} in its place")
        if example.solution is None:
            raise RunFailure(f"labelled: {example.id} has no given working, so its steps cannot be labelled")
        working = split_steps(example.solution)
        for sample in item.samples:
            if steps := split_steps(reasoning_of(template, sample.text)):
                labels = label_steps(steps, working, sample.is_correct)
                rows.append({"prompt": item.question, "completions": steps, "labels": labels})
    if not rows:
        raise RunFailure(f"labelled: none of the answers in {items} has a step")
    replace_file(target, b"".join(json.dumps(row).encode() + b"\n" for row in rows))


Command = Callable[[Trial, bool], list[str]]  # (trial, resume) -> the command that makes it
Say = Callable[[str, bool], None]  # a line about the progress, and whether it tells of a failure
POLL_SECONDS = 0.3
NUM_CONFLICTS_SHOWN = 3


@dataclass
class Outcome:
    """The end of a sweep: by name, the last message of each failed trial, or the reason why it was not begun."""

    failures: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False


def read_states(plan: Plan) -> dict[str, State]:
    """The state of each trial, by name.

    Raises:
        RunConflict: some belong to another recipe, or to a process that does not end, or depend on weights that are
            gone; the message says which.
    """
    working = wait_for_end(trial.folder for trial in plan.trials)
    states = {trial.name: trial.state for trial in plan.trials}
    problems = []
    for trial in plan.trials if not working else ():
        if states[trial.name] != "new":
            conflict = trial.conflict()
            problems += [conflict] if conflict is not None else []
            for name in (name for name in trial.needs if states[name] != "finished"):
                problems.append(f"{trial.folder}: made from an earlier {name}, which is gone or not finished")
    problems += [f"{folder}: another process is working in it ({process})" for folder, process in working.items()]
    if problems:
        more = len(problems) - NUM_CONFLICTS_SHOWN
        shown = "\n".join(problems[:NUM_CONFLICTS_SHOWN]) + (f"\nand {more} more." if more > 0 else "")
        remedy = "Wait for it or stop it; the same command then goes on" if working else "Delete these trials first"
        raise RunConflict(f"{shown}\nNothing was changed. {remedy}. Or run it under another name with --run NAME")
    return states


def trial_command(trial: Trial, resume: bool) -> list[str]:
    """The command that makes a trial, or continues it, with the Python that runs now."""
    more = ["--resume"] if resume and isinstance(trial, Training) else []
    return [sys.executable, "-m", "posttrain.cli", *trial.command, *more, *allow_code_options()]


def run_trials(
    plan: Plan,
    *,
    jobs: int | None = None,
    say: Say = lambda line, is_failure: None,
    command: Command = trial_command,
    poll_seconds: float = POLL_SECONDS,
) -> Outcome:
    """Make what is not finished yet, ``jobs`` trials at a time (one per core by default; one where a GPU trains).

    Raises:
        RunConflict: the directory belongs to something else; nothing was changed.
        RunFailure: the start could not be made.
    """
    folder = plan.folder
    is_other = folder.is_dir() and not (folder / PLAN).is_file()
    is_other = is_other and any(not item.name.startswith((".lock", ".tmp-")) for item in folder.iterdir())
    if is_other or (folder.exists() and not folder.is_dir()):
        raise RunConflict(f"{folder}: something else than a sweep is there. Choose another name with --run NAME")
    refuse_live_folder(folder)
    read_states(plan)
    refuse_links(folder)
    with storage_errors("sweep", folder):
        for trial in plan.trials:
            trial.folder.parent.mkdir(parents=True, exist_ok=True)
    with lock_run(folder):
        states = read_states(plan)
        remove_leftovers(folder)
        replace_file(folder / PLAN, plan.to_yaml().encode())
        todo = [trial for trial in plan.trials if states[trial.name] != "finished"]
        num_jobs = max(1, min(jobs if jobs is not None else _default_jobs(plan), len(plan.trials)))
        num_threads = threads_per_child(max(1, count_cpus() // num_jobs))
        done = len(plan.trials) - len(todo)
        line = f"{len(plan.trials)} trials, {num_jobs} at a time, threads of each: {num_threads}"
        say(f"{line}; {done} finished already" if done else line, False)
        return _Runner(plan, states, say, command, num_jobs, num_threads, todo).run(poll_seconds)


def _default_jobs(plan: Plan) -> int:
    """One trial per core; one at a time where a GPU trains."""
    devices = {trial.recipe.model.device for trial in plan.trials if isinstance(trial, Training)}
    if devices <= {"cpu"}:
        return count_cpus()
    import torch

    return 1 if "mps" in devices or torch.cuda.is_available() else count_cpus()


@dataclass
class _Runner:
    """Starts, watches and ends the processes."""

    plan: Plan
    states: dict[str, State]
    say: Say
    command: Command
    num_jobs: int
    num_threads: int
    waiting: list[Trial]
    working: list[tuple[Trial, Child]] = field(default_factory=list)
    outcome: Outcome = field(default_factory=Outcome)

    def run(self, poll_seconds: float) -> Outcome:
        """All trials. After a signal none is begun, and those at work save and end."""
        stop = stop_on_signals("stopping when what is at work has saved what it has")
        with stop as should_stop, phase("sweep", describe=self._describe):
            try:
                while self.waiting or self.working:
                    if should_stop() and not self.outcome.interrupted:
                        self.outcome.interrupted = True
                        self.waiting.clear()
                        for _, child in self.working:
                            child.interrupt()
                    self._begin()
                    time.sleep(poll_seconds if self.working else 0)
                    for trial, child in list(self.working):
                        if (code := child.poll()) is not None:
                            self.working.remove((trial, child))
                            self._end(trial, child, code)
            finally:
                end_children(child for _, child in self.working)  # on the way out by an error or a second signal
        return self.outcome

    def _describe(self) -> str:
        at_work = ", ".join(trial.name for trial, _ in self.working) or "none"
        num_finished = sum(state == "finished" for state in self.states.values())
        return f"{num_finished} of {len(self.states)} trials are finished, at work: {at_work}"

    def _begin(self) -> None:
        """Begin those waiting trials whose needs are finished; those that need a failed one become failures."""
        for trial in list(self.waiting):
            lost = [name for name in trial.needs if name in self.outcome.failures]
            if lost:
                self.waiting.remove(trial)
                self._fail(trial, f"not begun, because {lost[0]} failed")
            elif len(self.working) < self.num_jobs and all(self.states[name] == "finished" for name in trial.needs):
                self.waiting.remove(trial)
                resume = self.states[trial.name] == "unfinished"
                path, settings = trial.settings
                replace_file(path, settings.encode(), durable=False)
                threads = count_cpus() if trial.row == "start" else self.num_threads  # nothing else runs before it
                log = path.with_name(f"{trial.name}.log")
                self.working.append((trial, start_child(self.command(trial, resume), log, "a trial", threads)))
                self.say(f"{trial.name}: {'goes on' if resume else 'started'}", False)

    def _end(self, trial: Trial, child: Child, code: int) -> None:
        message = child.describe_end(code) if code != 0 else self._label(trial)
        if message is None and trial.state == "finished":
            self.states[trial.name] = "finished"
            took, left = timedelta(seconds=round(time.monotonic() - child.started)), self.waiting + self.working
            self.say(f"{trial.name}: finished in {took} {trial.result}".rstrip() + f" ({len(left)} left)", False)
        elif not self.outcome.interrupted:
            if trial.row == "start":
                raise RunFailure(f"the start of the sweep failed: {message}")
            self._fail(trial, message or "its process ended well, and yet it is not finished")

    def _fail(self, trial: Trial, message: str) -> None:
        self.outcome.failures[trial.name] = message
        self.say(f"{trial.name}: failed: {message}", True)

    def _label(self, trial: Trial) -> str | None:
        """Turn the answers of an evaluation for ``labelled`` into steps; returns what went wrong."""
        labelled, start = self.plan.content.labelled, self.plan.start
        if trial.section != LABELLED or labelled is None or start is None:
            return None
        try:
            task, template = build_task(labelled.task, "labelled.task"), build_template(start.recipe.prompt.template)
            write_labelled(trial.folder / ITEMS, task, labelled.n, template, trial.last_file)
            return None
        except PosttrainError as error:
            return str(error)
