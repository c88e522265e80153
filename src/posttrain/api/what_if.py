"""Exact counterfactual continuations of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.activity import heartbeat
from posttrain.api.arguments import check_flag, check_whole, plain_names, plain_path, reading
from posttrain.api.inputs import Place, check_inputs, without_command_line
from posttrain.api.run import Run
from posttrain.errors import UsageError
from posttrain.registry import stop_import
from posttrain.reports.what_if import PICTURE, write_what_if
from posttrain.runs.directory import check_run_name, find_run
from posttrain.runs.what_if.plan import Planned, plan_futures
from posttrain.runs.what_if.results import WhatIfResults, read_results
from posttrain.runs.what_if.runner import choose_jobs, new_folder, run_futures
from posttrain.terminal.console import open_console, teller


@dataclass(frozen=True)
class WhatIf:
    """Counterfactual futures of a run, saved by ``pt.what_if``.

    ``results``: plan, equality check between the unchanged future and the original run, all futures, and the table.
    """

    folder: Path
    results: WhatIfResults

    @property
    def picture(self) -> Path | None:
        """Path to the plot of all futures; None if nothing was played."""
        path = self.folder / PICTURE
        if path.is_file():
            return path
        return None

    @property
    def is_interrupted(self) -> bool:
        """True if interrupted before all futures ended."""
        return any(one.state == "interrupted" for one in self.results.futures)

    @property
    def runs(self) -> dict[str, Run]:
        """Completed futures as runs with metrics, rollouts and weights, keyed by folder name."""
        return {one.folder.name: Run(one.folder) for one in self.results.futures if self.results.is_whole(one)}

    def run_of(self, change: str, seed: int = 0) -> Run:
        """Look up the run for a change; ``unchanged`` selects the unchanged future.

        Raises:
            UsageError: unknown change, or an unfinished future.

        Examples:
            >>> done.run_of("drop prompt:3").checkpoint("last")
            PosixPath('runs/what-if-mine-at-40/futures/drop-prompt-3/checkpoints/step-000041')
        """
        for one in self.results.of(change):
            if one.future.seed == seed:
                return Run(one.folder)
        known = ", ".join(self.results.labels())
        raise UsageError(f"no finished future {change!r} with seed {seed}. Available: {known}")


def what_if(
    run: Place,
    *,
    at: int,
    changes: str | Sequence[str] = (),
    over: Mapping[str, Sequence[object]] | None = None,
    steps: int | None = None,
    seeds: int = 1,
    jobs: int | None = None,
    name: str | None = None,
    runs_dir: Place = "runs",
    progress: bool = True,
) -> WhatIf:
    """Replay a run with single changes, plus one unchanged future, like ``posttrain what-if``.

    Futures are exact: each continues with the weights, optimizer state and random numbers after step ``at``, so the
    unchanged future matches the run bit for bit. The original run is opened read-only.

    Args:
        run: a run, a folder, or a run name in ``runs_dir``.
        at: the last unchanged step. Replay starts from the newest checkpoint at or before this step.
        changes: ``"train.lr=1e-5,1e-4"`` (one future per value), ``"drop prompt:3"``, ``"reward 3.2=0"``. Prompts in
            the step after ``at`` and answers per prompt are numbered from 0, ordered as in ``run.rollouts(step)``.
        over: more recipe keys with values: ``{"train.lr": [1e-5, 1e-4]}``.
        steps: steps per future. Default: 20, or the remaining steps if fewer.
        seeds: futures per change. The first uses the run's seed; others differ from the second rollout batch on.
        jobs: number of concurrent futures. Default: limited by cores and the run's threads, or one on a GPU.
        name: name of the results folder. Default: ``what-if-RUN-at-STEP``.

    Raises:
        UsageError: an invalid change, or no earlier checkpoint. Checked before anything starts.
        RunFailure: the run could not be replayed.

    Examples:
        >>> done = pt.what_if("runs/mine", at=40, over={"train.lr": [1e-5, 1e-4]})
        >>> done.results.equality.holds, done.results.difference("train.lr=0.0001", "reward").mean
        (True, 0.031)
    """
    stop_import()
    root = plain_path("runs_dir", runs_dir)
    check_flag("progress", progress)
    check_whole("at", at)
    check_inputs({"seeds": seeds}, {"steps": steps, "jobs": jobs})
    words = [*plain_names("changes", changes), *_list_keys(over)]
    with without_command_line():
        planned = plan_futures(find_run(root, plain_path("run", run)), int(at), words, steps, seeds)
    return play_futures(planned, jobs=jobs, name=name, runs_dir=root, quiet=not progress)


def _list_keys(over: object) -> list[str]:
    """Format keys and values in command line syntax."""
    if over is None:
        return []
    problem = 'over: invalid. Give keys with lists of values, such as {"train.lr": [1e-5, 1e-4]}'
    if not isinstance(over, Mapping):
        raise UsageError(problem)
    words = []
    with reading("over"):
        for key, values in over.items():
            if not isinstance(key, str) or not isinstance(values, list | tuple) or not values:
                raise UsageError(problem)
            words += [f"{key}={_value_of(value)}" for value in values]
    return words


def _value_of(value: object) -> str:
    if isinstance(value, str) and "," not in value:
        return value
    return json.dumps(value)


def play_futures(
    planned: Planned, *, jobs: int | None, name: str | None, runs_dir: str | os.PathLike[str], quiet: bool
) -> WhatIf:
    """Run a checked plan in a new folder, and write results. ``quiet``: print failures only.

    Raises:
        RunConflict: the folder exists.
    """
    if name is not None:
        check_run_name(name)
    num_jobs = choose_jobs(planned, jobs)
    folder = new_folder(Path(runs_dir), planned.plan.run, planned.plan.at, name)
    console = open_console()
    tell = teller(console, quiet=quiet)
    with heartbeat("what-if", console.file, is_on=not quiet and not console.is_terminal):
        run_futures(folder, planned, num_jobs, tell)
    return _finish(folder)


def _finish(folder: Path) -> WhatIf:
    results = read_results(folder)
    write_what_if(results, folder)
    return WhatIf(folder, results)


def load_what_if(folder: Place) -> WhatIf:
    """Load results saved by ``pt.what_if`` or ``posttrain what-if``.

    Raises:
        UsageError: no results in this folder.

    Examples:
        >>> pt.load_what_if("runs/what-if-mine-at-40").results.labels()
        ['unchanged', 'train.lr=0.0001']
    """
    path = Path(plain_path("folder", folder))
    return WhatIf(path, read_results(path))
