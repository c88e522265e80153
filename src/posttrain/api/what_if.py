"""Exact futures of a run with one thing changed."""

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
from posttrain.terminal.console import open_console, say


@dataclass(frozen=True)
class WhatIf:
    """Futures of a run, as ``pt.what_if`` leaves them in a folder.

    ``results``: the plan, the equality of the unchanged future with the run, every future, and the table.
    """

    folder: Path
    results: WhatIfResults

    @property
    def picture(self) -> Path | None:
        """The picture of all futures; None where nothing was played."""
        path = self.folder / PICTURE
        if path.is_file():
            return path
        return None

    @property
    def is_interrupted(self) -> bool:
        """True if it was stopped before every future ended."""
        return any(one.state == "interrupted" for one in self.results.futures)

    @property
    def runs(self) -> dict[str, Run]:
        """The futures that were played to the end, as runs, by the name of their folder: metrics, rollouts, weights."""
        return {one.folder.name: Run(one.folder) for one in self.results.futures if self.results.is_whole(one)}

    def run_of(self, change: str, seed: int = 0) -> Run:
        """Return the future of a change as a run; ``unchanged`` is one.

        Raises:
            UsageError: there is none, or it was not played to the end.

        Examples:
            >>> done.run_of("drop prompt:3").checkpoint("last")
            PosixPath('runs/what-if-mine-at-40/futures/drop-prompt-3/checkpoints/step-000041')
        """
        for one in self.results.of(change):
            if one.future.seed == seed:
                return Run(one.folder)
        known = ", ".join(self.results.labels())
        raise UsageError(
            f"there is no future {change!r} with seed {seed} that was played to the end. There are: {known}"
        )


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
    """Play futures of a run with one thing changed, and the unchanged one, as ``posttrain what-if`` does.

    A future is exact: it goes on from the weights, the optimizer and the random numbers after step ``at``, so that the
    unchanged one equals the run to the bit. The run is only read.

    Args:
        run: a run, its folder, or its name below ``runs_dir``.
        at: the step after which something changes. It starts from the newest checkpoint of it or before, and replays.
        changes: ``"train.lr=1e-5,1e-4"`` (a future for each value), ``"drop prompt:3"``, ``"reward 3.2=0"``: prompts of
            the step after ``at`` and answers to each are numbered from 0, in the order of ``run.rollouts(step)``.
        over: further keys of the recipe with their values: ``{"train.lr": [1e-5, 1e-4]}``.
        steps: of each future; by default 20, or as many as the run has left.
        seeds: futures of each change: that of the run's seed, and others from the second rollout batch on.
        jobs: futures at a time; by default as many as the cores allow with the run's threads, one on a GPU.
        name: of the results' folder; by default ``what-if-RUN-at-STEP``.

    Raises:
        UsageError: something cannot be changed, or there is no checkpoint before; nothing was begun.
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
    """Return keys with their values as the command line writes them."""
    if over is None:
        return []
    problem = 'over: keys with lists of values are needed, such as {"train.lr": [1e-5, 1e-4]}'
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
    """Play a checked plan in a new folder, and write its results; ``quiet``: print failures alone.

    Raises:
        RunConflict: the name is taken.
    """
    if name is not None:
        check_run_name(name)
    num_jobs = choose_jobs(planned, jobs)
    folder = new_folder(Path(runs_dir), planned.plan.run, planned.plan.at, name)
    console = open_console()

    def tell(line: str, is_failure: bool) -> None:
        if is_failure:
            say(console, line, "red")
        elif not quiet:
            say(console, line, "dim")

    with heartbeat("what-if", console.file, is_on=not quiet and not console.is_terminal):
        run_futures(folder, planned, num_jobs, tell)
    return _finish(folder)


def _finish(folder: Path) -> WhatIf:
    results = read_results(folder)
    write_what_if(results, folder)
    return WhatIf(folder, results)


def load_what_if(folder: Place) -> WhatIf:
    """Return the results that ``pt.what_if`` or ``posttrain what-if`` has left in a folder.

    Raises:
        UsageError: it has none.

    Examples:
        >>> pt.load_what_if("runs/what-if-mine-at-40").results.labels()
        ['unchanged', 'train.lr=0.0001']
    """
    path = Path(plain_path("folder", folder))
    return WhatIf(path, read_results(path))
