"""Running the parts of a study: each one a process of its own, begun as soon as what it needs is there.

A part is what `posttrain train` or `posttrain evaluate` makes of it. Finished parts are left as they are,
unfinished ones go on from where they were, and a part that fails stops only those that need it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from posttrain.consent import consent_options
from posttrain.errors import PosttrainError, RunConflict
from posttrain.render.template import build_template
from posttrain.runs.children import Child, end_children, start_child
from posttrain.runs.directory import RunDirectory, lock_run, refuse_live_folder, wait_for_end
from posttrain.runs.launch import stop_on_signals
from posttrain.store.durable import remove_leftovers, replace_file, storage_errors
from posttrain.store.links import refuse_links
from posttrain.sweeps.cells import last_error, num_cores, recipe_file, refuse_conflicts, train_command
from posttrain.sweeps.study import STUDY_FILE, Choosing, Labelling, Part, StudyPlan, Training
from posttrain.sweeps.study_steps import write_labelled
from posttrain.tasks.base import build_task
from posttrain.train.files import Observer

Command = Callable[[Part, bool], list[str]]
Standing = Literal["new", "unfinished", "finished"]
POLL_SECONDS = 0.3
TELL_SECONDS = 20.0
ITEMS, RESULTS = "items.jsonl", "results.json"  # of an evaluation; the latter is written last


@dataclass(frozen=True)
class StudyOutcome:
    """How a study went: by name, what each failed part said last, or what was missing to begin it."""

    failures: dict[str, str]
    interrupted: bool
    num_jobs: int


@dataclass
class _Work:
    part: Part
    child: Child


@dataclass
class _Board:
    """Which parts wait, work, are done or have failed."""

    waiting: list[Part]
    done: set[str]
    working: list[_Work] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def next_ready(self) -> Part | None:
        """The first waiting part whose needs are done; it waits no longer."""
        for index, part in enumerate(self.waiting):
            if all(name in self.done for name in part.needs):
                return self.waiting.pop(index)
        return None

    def drop_hopeless(self) -> list[Part]:
        """Waiting parts that need a failed one, taken out and entered as failures themselves."""
        dropped = []
        for part in list(self.waiting):
            lost = [name for name in part.needs if name in self.failures]
            if lost:
                self.waiting.remove(part)
                self.failures[part.name] = f"not begun, for {lost[0]} failed"
                dropped.append(part)
        return dropped


def part_command(part: Part, resume: bool) -> list[str]:
    """The command that makes a part, with the Python that runs now."""
    if isinstance(part, Training):
        return train_command(part.cell, resume)
    return [sys.executable, "-m", "posttrain.cli", *part.words, *consent_options()]


def folder_of(part: Part) -> Path:
    return part.cell.folder if isinstance(part, Training) else part.folder


def words_file(part: Choosing) -> Path:
    """Where the command of an evaluation is kept: beside its folder."""
    return part.folder.with_name(f"{part.folder.name}.command.json")


def standings(plan: StudyPlan) -> dict[str, Standing]:
    """Where each part stands, by name.

    Raises:
        RunConflict: some belong to another recipe or process, or stand on weights that are gone.
    """
    found: dict[str, Standing] = {}
    conflicts: list[str] = []
    working = wait_for_end(folder_of(part) for part in plan.parts)
    for part in plan.parts:
        found[part.name], problem = _stand_of_run(part) if isinstance(part, Training) else _stand_of_choosing(part)
        conflicts += [problem] if problem else []
    for part in plan.parts:
        lost = [name for name in part.needs if found[name] != "finished"]
        if lost and found[part.name] != "new":
            conflicts.append(f"{folder_of(part)}: made from an earlier {lost[0]}, which is gone or not finished")
    refuse_conflicts(working, conflicts, "Study under another name with --run NAME", "parts")
    return found


def _stand_of_run(part: Training) -> tuple[Standing, str | None]:
    run = RunDirectory(part.cell.folder)
    if not run.recipe_path.is_file():
        return "new", None
    problem = None
    changed = run.changed_keys(part.cell.recipe)
    if changed:
        shown = ", ".join(f"{key} ({old!r} there, {new!r} now)" for key, (old, new) in sorted(changed.items()))
        problem = f"{part.cell.folder}: made by another recipe; it differs in {shown}"
    status = run.read_status()
    return "finished" if status is not None and status.state == "finished" else "unfinished", problem


def _stand_of_choosing(part: Choosing) -> tuple[Standing, str | None]:
    if not part.folder.exists():
        return "new", None
    try:
        words = json.loads(words_file(part).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        words = None
    key = "labelled" if isinstance(part, Labelling) else "best_of_n"
    problem = None if words == list(part.words) else f"{part.folder}: made with other settings of {key}"
    last = part.target if isinstance(part, Labelling) else part.folder / RESULTS
    return "finished" if last.is_file() else "unfinished", problem


def complete(part: Part) -> None:
    """What remains to be done when the process of a part has ended well: labels for the steps that it sampled.

    Raises:
        PosttrainError: the steps cannot be labelled.
    """
    if isinstance(part, Labelling):
        task, template = build_task(part.asked.task, "labelled.task"), build_template(part.template)
        write_labelled(part.folder / ITEMS, task, part.asked.n, template, part.target)


def prepare_folder(plan: StudyPlan) -> None:
    """Make the study's directory, or accept the one that is there.

    Raises:
        RunConflict: the folder holds something else, or a part of another study; nothing was changed.
    """
    folder = plan.folder
    if folder.exists() and not folder.is_dir():
        raise RunConflict(f"{folder}: this is a file, not a folder. Choose another name with --run NAME")
    if folder.is_dir() and not (folder / STUDY_FILE).is_file():
        others = [item.name for item in folder.iterdir() if not item.name.startswith((".lock", ".tmp-"))]
        if others:
            raise RunConflict(
                f"{folder}: this folder holds something else than a study. Nothing was changed; choose another name "
                "with --run NAME"
            )
    refuse_live_folder(folder)
    standings(plan)
    refuse_links(folder)
    with storage_errors("study", folder):
        for name in ("cells", "chosen", *(["labelled"] if plan.labelling else [])):
            (folder / name).mkdir(parents=True, exist_ok=True)


def run_parts(
    plan: StudyPlan,
    *,
    jobs: int | None = None,
    observer: Observer = lambda event, facts: None,
    command: Command = part_command,
    poll_seconds: float = POLL_SECONDS,
) -> StudyOutcome:
    """Make what is not finished yet, ``jobs`` parts at a time (one per core by default; one where a GPU trains).

    ``observer`` is told ``plan`` (num_parts, num_finished, num_jobs), per part ``begin`` (resumed), ``end``
    (seconds), ``failure`` (message, log) or ``dropped`` (message); now and then ``progress`` (a line per part at
    work), and ``stop``.

    Raises:
        RunConflict: the directory belongs to something else; nothing was changed.
    """
    prepare_folder(plan)
    with lock_run(plan.folder):
        standing = standings(plan)
        remove_leftovers(plan.folder)
        num_jobs = jobs if jobs is not None else 1 if _trains_on_gpu(plan) else num_cores()
        replace_file(plan.folder / STUDY_FILE, plan.to_yaml().encode())
        done = {name for name, stand in standing.items() if stand == "finished"}
        board = _Board([part for part in plan.parts if part.name not in done], done)
        observer("plan", {"num_parts": len(plan.parts), "num_finished": len(done), "num_jobs": num_jobs})
        runner = _Runner(board, num_jobs, observer, command, standing)
        runner.run(poll_seconds)
        return StudyOutcome(board.failures, runner.interrupted, num_jobs)


def _trains_on_gpu(plan: StudyPlan) -> bool:
    if plan.start.cell.recipe.model.device == "cpu":
        return False
    import torch

    return torch.cuda.is_available()


class _Runner:
    """Starts, watches and ends the processes."""

    def __init__(
        self, board: _Board, num_jobs: int, observer: Observer, command: Command, standing: dict[str, Standing]
    ) -> None:
        self.board, self.num_jobs, self.observer = board, num_jobs, observer
        self.command, self.standing = command, standing
        self.num_threads = max(1, num_cores() // num_jobs)
        self.interrupted = False

    def run(self, poll_seconds: float) -> None:
        """Until nothing waits or works. After a signal nothing is begun, and what works saves and ends."""
        told = time.monotonic()
        with stop_on_signals() as should_stop:
            try:
                while self.board.waiting or self.board.working:
                    if should_stop() and not self.interrupted:
                        self._stop()
                    for part in self.board.drop_hopeless():
                        self.observer("dropped", {"part": part, "message": self.board.failures[part.name]})
                    while len(self.board.working) < self.num_jobs and (ready := self.board.next_ready()) is not None:
                        self.board.working.append(self._begin(ready))
                    if not self.board.working:
                        continue
                    time.sleep(poll_seconds)
                    self._look()
                    if time.monotonic() - told > TELL_SECONDS:
                        told = time.monotonic()
                        self.observer("progress", {"lines": [_where(work.part) for work in self.board.working]})
            finally:
                self._abandon()

    def _stop(self) -> None:
        self.interrupted = True
        self.board.waiting.clear()
        for work in self.board.working:
            work.child.interrupt()
        self.observer("stop", {"num_working": len(self.board.working)})

    def _begin(self, part: Part) -> _Work:
        resume = self.standing[part.name] == "unfinished"
        if isinstance(part, Training):
            path = recipe_file(part.cell)
            content = part.cell.recipe.to_yaml()
        else:
            path = words_file(part)
            content = json.dumps(list(part.words), indent=1) + "\n"
        replace_file(path, content.encode(), durable=False)
        log = path.with_name(f"{part.name}.log")
        child = start_child(self.command(part, resume), log, "a part", self.num_threads)
        self.observer("begin", {"part": part, "resumed": resume})
        return _Work(part, child)

    def _look(self) -> None:
        for work in list(self.board.working):
            code = work.child.poll()
            if code is None:
                continue
            self.board.working.remove(work)
            message = last_error(work.child.log, work.child.log_start, code) if code != 0 else _complete(work.part)
            if message is None and _is_finished(work.part):
                self.board.done.add(work.part.name)
                self.observer("end", {"part": work.part, "seconds": time.monotonic() - work.child.started})
            elif not self.interrupted:
                message = message or "its process ended well, and yet it is not finished"
                self.board.failures[work.part.name] = message
                self.observer("failure", {"part": work.part, "message": message, "log": work.child.log})

    def _abandon(self) -> None:
        """On the way out by an error or a second signal: end what still runs."""
        end_children(work.child for work in self.board.working)
        self.board.working.clear()


def _complete(part: Part) -> str | None:
    """``complete``; what went wrong, if anything did."""
    try:
        complete(part)
    except PosttrainError as error:
        return str(error)
    return None


def _is_finished(part: Part) -> bool:
    stand, _ = _stand_of_run(part) if isinstance(part, Training) else _stand_of_choosing(part)
    return stand == "finished"


def _where(part: Part) -> str:
    if isinstance(part, Choosing):
        return f"{part.name} samples and scores"
    status = RunDirectory(part.cell.folder).read_status()
    return f"{part.name} at step {status.step if status is not None else 0}/{part.cell.recipe.train.steps}"


def read_failures(plan: StudyPlan, outcome: StudyOutcome) -> dict[str, str]:
    """What is known of parts that are not finished: now, or from an earlier attempt."""
    found = dict(outcome.failures)
    for part in plan.parts:
        if part.name not in found and isinstance(part, Training):
            status = RunDirectory(part.cell.folder).read_status()
            if status is not None and status.state == "failed":
                found[part.name] = status.message or "no reason was recorded"
    return found


def unfinished(plan: StudyPlan) -> Sequence[str]:
    """Names of the parts that are not finished."""
    return [part.name for part in plan.parts if not _is_finished(part)]
