"""A run as an object: its records, checkpoints, report and export."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.api.arguments import check_flag, check_whole, plain_number, plain_path
from posttrain.errors import UsageError
from posttrain.option_types import shorten
from posttrain.registry import suggest
from posttrain.runs.directory import RunDirectory, RunStatus, find_run
from posttrain.store.checkpoint_files import best_step, checkpoint_steps, step_folder
from posttrain.store.metrics import MetricsLog, evaluation_points, is_evaluation
from posttrain.store.rollouts import RecordedRollout, RolloutStore

if TYPE_CHECKING:
    from posttrain.runs.export import WeightsKind


@dataclass(frozen=True)
class Run:
    """A run of ``pt.train`` or ``posttrain train``. It stands for its model wherever a model is named.

    Examples:
        >>> run = pt.load_run("runs/mine")
        >>> run.status.state, run.metrics[-1]["reward"]
        ('finished', 0.91)
    """

    folder: Path

    def __fspath__(self) -> str:
        return str(self.folder)

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @property
    def status(self) -> RunStatus:
        """State, step and primary metric.

        Raises:
            DataError: the record is damaged.
            UsageError: nothing was started in it.
        """
        status = RunDirectory(self.folder).read_status()
        if status is None:
            raise UsageError(f"{self.folder}: this run was never started. Train it with pt.train")
        return status

    @property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe as plain data."""
        return RunDirectory(self.folder).read_recipe()

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The metrics and times of each step: ``pandas.DataFrame(run.metrics)`` makes a table of them."""
        rows = MetricsLog(self.folder / "metrics.jsonl").read()
        return [{"step": row.step, **row.metrics, **row.timing} for row in rows if not is_evaluation(row)]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The held-out results in the order of their steps: ``step``, ``task`` and the results."""
        points = evaluation_points(MetricsLog(self.folder / "metrics.jsonl").read())
        return [{"step": point.step, "task": point.name, **point.results} for point in points]

    def rollouts(self, step: int | None = None, *, evaluation: str | None = None) -> list[RecordedRollout]:
        """Return the sampled completions of a training step (None: of all), or those of a held-out ``evaluation``.

        Raises:
            UsageError: there is no such evaluation; the message names those that there are.

        Examples:
            >>> [(rollout.completion, rollout.reward) for rollout in run.rollouts(step=10)][:1]
            [('7 plus 7 is 14. </think> <answer>14</answer>', 1.2)]
        """
        if step is not None:
            check_whole("step", step)
        if evaluation is not None and not isinstance(evaluation, str):
            raise UsageError(f"evaluation: {shorten(evaluation)} is no name. Give a text")
        store = RolloutStore(self.folder / "rollouts.db", read_only=True)
        known = {str(point["task"]) for point in self.evaluations}
        if evaluation is not None and evaluation not in known:
            there = ", ".join(sorted(known)) or "none"
            hint = suggest(evaluation, known)
            raise UsageError(f"{self.folder}: there is no evaluation {evaluation!r}.{hint} There: {there}")
        if evaluation is None:
            return store.training(step)
        return store.evaluations(evaluation, step)

    def checkpoint(self, which: str | int = "best") -> Path:
        """Return the folder of a checkpoint: ``best``, ``last``, or that of a step.

        Without a best one (nothing was evaluated), ``best`` is the last.

        Raises:
            UsageError: there is no such checkpoint.

        Examples:
            >>> transformers.AutoModelForCausalLM.from_pretrained(run.checkpoint("best"))
        """
        which = plain_number(which)
        if type(which) not in (str, int):
            raise UsageError(f"checkpoint: {shorten(which)} is none. Give best, last or a step")
        folder = self.folder / "checkpoints"
        steps = checkpoint_steps(folder)
        known: dict[str | int, int] = {step: step for step in steps}
        if steps:
            known["last"] = steps[-1]
            known["best"] = best_step(folder) or steps[-1]
        step = known.get(which)
        if step is None:
            there = ", ".join(map(str, steps)) or "none"
            raise UsageError(
                f"{self.folder}: there is no checkpoint {which!r}.{suggest(str(which), map(str, known))} "
                f"Give best, last or a step. There: {there}"
            )
        return step_folder(folder, step)

    @property
    def report(self) -> Path:
        """The page ``report.html``, which is written now if it is not there."""
        from posttrain.reports.summary import write_summary  # it draws

        page = self.folder / "report.html"
        if page.is_file():
            return page
        return write_summary(self.folder)

    def export(
        self,
        to: str | os.PathLike[str],
        *,
        weights: WeightsKind | None = None,
        merge: bool = False,
        gguf: str | None = None,
    ) -> Path:
        """Copy model, recipe and results to a new folder, as ``posttrain runs export`` does; return it.

        Args:
            to: a new folder outside of the runs.
            weights: ``best``, ``last``, ``ema`` (averaged weights) or ``none``; by default the best, else the last.
            merge: add a LoRA adapter to its base, so that the model stands alone.
            gguf: also write a GGUF file by llama.cpp's converter: ``f32``, ``f16``, ``bf16`` or ``q8_0``.

        Examples:
            >>> run.export("out", merge=True)
            PosixPath('out')
        """
        from posttrain.runs.export import export_run  # which no training needs

        _check_export(weights, merge)
        if gguf is not None and not isinstance(gguf, str):
            raise UsageError(f"gguf: {shorten(gguf)} is none. Give f32, f16, bf16 or q8_0")
        target = Path(plain_path("to", to))
        return export_run(self.folder.parent, self.folder, target, weights=weights, merge=merge, gguf=gguf).target

    def push_to_hub(
        self, name: str, *, public: bool = False, weights: WeightsKind | None = None, merge: bool = False
    ) -> str:
        """Upload the export to a repository of the Hugging Face hub, as ``posttrain runs export --push`` does.

        Args:
            name: of the repository, such as ``me/my-model``; it is made if it does not exist.
            public: of a new repository; by default it is private.
            weights: ``best``, ``last``, ``ema`` (averaged weights) or ``none``; by default the best, else the last.
            merge: add a LoRA adapter to its base, so that the model stands alone.

        Returns:
            The URL of the repository.

        Raises:
            UsageError: there is no token, no network, or the hub refuses.

        Examples:
            >>> run.push_to_hub("me/my-model")
            'https://huggingface.co/me/my-model'
        """
        from posttrain.runs.push import push_run

        _check_export(weights, merge)
        check_flag("public", public)
        url, _ = push_run(self.folder.parent, self.folder, name, weights=weights, merge=merge, public=public)
        return url


def _check_export(weights: object, merge: object) -> None:
    check_flag("merge", merge)
    if weights is not None and not isinstance(weights, str):
        raise UsageError(f"weights: {shorten(weights)} is none. Give best, last, ema or none")


def load_run(name: str | os.PathLike[str], *, runs_dir: str | os.PathLike[str] = "runs") -> Run:
    """Return a run by its path, or by its name below ``runs_dir``.

    Raises:
        UsageError: there is no such run; the message names those that there are.

    Examples:
        >>> pt.load_run("runs/mine").checkpoint("last")
        PosixPath('runs/mine/checkpoints/step-000050')
    """
    return Run(find_run(plain_path("runs_dir", runs_dir), plain_path("run", name)))
