"""A training run as a Python object: records, checkpoints, report and export."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.api.arguments import check_flag, check_whole, plain_number, plain_path
from posttrain.errors import UsageError
from posttrain.option_types import shorten
from posttrain.recipes.panel_prompts import PANEL
from posttrain.registry import suggest
from posttrain.runs.directory import RunDirectory, RunStatus, find_run
from posttrain.store.checkpoint_files import best_step, checkpoint_steps, step_folder
from posttrain.store.metrics import MetricsLog, evaluation_points, is_evaluation
from posttrain.store.rollouts import RecordedRollout, RolloutStore

if TYPE_CHECKING:
    from posttrain.runs.export import WeightsKind


@dataclass(frozen=True)
class Run:
    """A run created by ``pt.train`` or ``posttrain train``. Can be passed wherever a model is expected.

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
        """The folder name."""
        return self.folder.name

    @property
    def status(self) -> RunStatus:
        """State, step and primary metric.

        Raises:
            DataError: a damaged record.
            UsageError: training was never started.
        """
        status = RunDirectory(self.folder).read_status()
        if status is None:
            raise UsageError(f"{self.folder}: this run was never started. Start it with pt.train")
        return status

    @property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe as plain data."""
        return RunDirectory(self.folder).read_recipe()

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Training metrics and timings, one dict per step, ready for ``pandas.DataFrame(run.metrics)``."""
        rows = MetricsLog(self.folder / "metrics.jsonl").read()
        return [{"step": row.step, **row.metrics, **row.timing} for row in rows if not is_evaluation(row)]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Held-out results ordered by step; each dict has ``step``, ``task`` and all results."""
        points = evaluation_points(MetricsLog(self.folder / "metrics.jsonl").read())
        return [{"step": point.step, "task": point.name, **point.results} for point in points]

    def rollouts(self, step: int | None = None, *, evaluation: str | None = None) -> list[RecordedRollout]:
        """Load sampled completions, from a training step (None: all steps) or from a held-out ``evaluation``.

        The evaluation ``panel`` has the answers to ``eval.prompts``.

        Raises:
            UsageError: unknown evaluation. The message lists known names.

        Examples:
            >>> [(rollout.completion, rollout.reward) for rollout in run.rollouts(step=10)][:1]
            [('7 plus 7 is 14. </think> <answer>14</answer>', 1.2)]
        """
        if step is not None:
            check_whole("step", step)
        if evaluation is not None and not isinstance(evaluation, str):
            raise UsageError(f"evaluation: {shorten(evaluation)} is not a name. Give a string")
        store = RolloutStore(self.folder / "rollouts.db", read_only=True)
        known = {str(point["task"]) for point in self.evaluations}
        if evaluation == PANEL and store.evaluations(PANEL, limit=1):
            known.add(PANEL)
        if evaluation is not None and evaluation not in known:
            there = ", ".join(sorted(known)) or "none"
            hint = suggest(evaluation, known)
            raise UsageError(f"{self.folder}: unknown evaluation {evaluation!r}.{hint} Available: {there}")
        if evaluation is None:
            return store.training(step)
        return store.evaluations(evaluation, step)

    def checkpoint(self, which: str | int = "best") -> Path:
        """Find a checkpoint folder by ``best``, ``last`` or step number.

        If nothing was evaluated, ``best`` is the last checkpoint.

        Raises:
            UsageError: unknown checkpoint.

        Examples:
            >>> transformers.AutoModelForCausalLM.from_pretrained(run.checkpoint("best"))
        """
        which = plain_number(which)
        if type(which) not in (str, int):
            raise UsageError(f"checkpoint: {shorten(which)} is not a checkpoint. Give best, last or a step")
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
                f"{self.folder}: unknown checkpoint {which!r}.{suggest(str(which), map(str, known))} "
                f"Give best, last or a step. Available: {there}"
            )
        return step_folder(folder, step)

    @property
    def report(self) -> Path:
        """Path to ``report.html``, written on first access if missing."""
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
        """Export model, recipe and results to a new folder, like ``posttrain runs export``.

        Args:
            to: a new folder outside the runs folder.
            weights: ``best``, ``last``, ``ema`` (averaged weights) or ``none``. Default: best if available, otherwise
                last.
            merge: merge a LoRA adapter into the base model, for loading without the adapter.
            gguf: also write a GGUF file with the llama.cpp converter: ``f32``, ``f16``, ``bf16`` or ``q8_0``.

        Returns:
            The new folder.

        Examples:
            >>> run.export("out", merge=True)
            PosixPath('out')
        """
        from posttrain.runs.export import export_run  # not needed for training

        _check_export(weights, merge)
        if gguf is not None and not isinstance(gguf, str):
            raise UsageError(f"gguf: {shorten(gguf)} is not a GGUF type. Give f32, f16, bf16 or q8_0")
        target = Path(plain_path("to", to))
        return export_run(self.folder.parent, self.folder, target, weights=weights, merge=merge, gguf=gguf).target

    def push_to_hub(
        self, name: str, *, public: bool = False, weights: WeightsKind | None = None, merge: bool = False
    ) -> str:
        """Upload an export to the Hugging Face Hub, like ``posttrain runs export --push``.

        Args:
            name: repository name, such as ``me/my-model``. Created if missing.
            public: make a new repository public. Default: private.
            weights: ``best``, ``last``, ``ema`` (averaged weights) or ``none``. Default: best if available, otherwise
                last.
            merge: merge a LoRA adapter into the base model, for loading without the adapter.

        Returns:
            The repository URL.

        Raises:
            UsageError: missing token, no network, or an upload refused by the hub.

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
        raise UsageError(f"weights: {shorten(weights)} is invalid. Give best, last, ema or none")


def load_run(name: str | os.PathLike[str], *, runs_dir: str | os.PathLike[str] = "runs") -> Run:
    """Load a run by path, or by name in ``runs_dir``.

    Raises:
        UsageError: unknown run. The message lists known runs.

    Examples:
        >>> pt.load_run("runs/mine").checkpoint("last")
        PosixPath('runs/mine/checkpoints/step-000050')
    """
    return Run(find_run(plain_path("runs_dir", runs_dir), plain_path("run", name)))
