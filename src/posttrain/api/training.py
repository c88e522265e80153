"""Training by a recipe, with data, rewards and callbacks of Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain import registry
from posttrain.api.arguments import check_flag, plain_path, plain_text, reading
from posttrain.api.config_objects import adapter_options, read_config_objects
from posttrain.api.inputs import (
    Data,
    Model,
    Override,
    Place,
    Rewards,
    data_word,
    model_name,
    overrides_of,
    plain_recipe,
    refuse_repeats,
    reward_words,
    without_command_line,
)
from posttrain.api.run import Run
from posttrain.errors import UsageError
from posttrain.option_types import shorten
from posttrain.recipes.inert import option_notes
from posttrain.recipes.recipe import Recipe, load_recipe, lost_options
from posttrain.recipes.sections import Component, ScaleSection, task_components
from posttrain.registry import find, stop_import
from posttrain.runs.launch import RunStart, launch
from posttrain.runs.processes import follow, is_follower
from posttrain.terminal.training_progress import choose_progress
from posttrain.training.checks import resolve_components
from posttrain.training.files import Observer


@dataclass
class Event:
    """A run event passed to callbacks. Call ``event.stop()`` to end the run after this step.

    ``metrics``: step metrics, or evaluation results on ``task``. ``path``: checkpoint path. ``is_best``: the
    checkpoint has the best weights so far.
    """

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    task: str | None = None
    path: Path | None = None
    is_best: bool = False
    is_stopped: bool = False

    def stop(self) -> None:
        """Stop the run cleanly: it saves a checkpoint, writes a report, and ends in state ``stopped``."""
        self.is_stopped = True


Callback = Callable[[Event], object]
Callables = Callback | Sequence[Callback]  # one, or several, which are called in their order


def callbacks_of(given: object) -> list[Any]:
    """Convert None, a function or a list of functions to a list."""
    if given is None:
        return []
    if issubclass(type(given), list | tuple):  # isinstance would ask the object itself
        return list(given)  # type: ignore[call-overload]
    return [given]


def _check_callback(name: str, callback: object) -> None:
    """Check that a callback accepts an event.

    Raises:
        UsageError: includes the argument name.
    """
    is_class = issubclass(type(callback), type)  # isinstance would ask the object itself
    if is_class or not callable(callback):
        what = type(callback).__name__
        if is_class:
            what = f"the class {getattr(callback, '__name__', '?')}"
        raise UsageError(
            f"{name}: {what} is not a function. Give a function, or a list of functions: def {name}(event)"
        )
    with reading(name):
        if not registry.takes_one(callback):
            raise UsageError(f"{name}: the function must take one argument, the event. Give def {name}(event)")


@dataclass
class Callbacks:
    """An observer that updates the progress display, then calls user callbacks."""

    view: Observer
    on_step: Callables | None = None
    on_evaluation: Callables | None = None
    on_checkpoint: Callables | None = None
    is_stopped: bool = False

    def __post_init__(self) -> None:
        for name in ("on_step", "on_evaluation", "on_checkpoint"):
            for callback in callbacks_of(getattr(self, name)):
                _check_callback(name, callback)

    def __call__(self, event: str, info: dict[str, Any]) -> None:
        self.view(event, info)
        if event == "step":
            callback = self.on_step
            metrics = info["metrics"]
        elif event == "evaluation":
            callback = self.on_evaluation
            metrics = info["results"]
        elif event == "checkpoint":
            callback = self.on_checkpoint
            metrics = {}
        else:
            return
        called = callbacks_of(callback)
        if not called:
            return
        happened = Event(int(info["step"]), dict(metrics), info.get("name"))
        if "path" in info:
            happened.path = Path(info["path"])
            happened.is_best = bool(info.get("best"))
        for one in called:
            one(happened)
        self.is_stopped = self.is_stopped or happened.is_stopped

    def should_stop(self) -> bool:
        """Check if a callback requested a stop."""
        return self.is_stopped


def train(
    recipe: str | os.PathLike[str] | Mapping[str, object],
    *,
    data: Data | None = None,
    eval_data: Data | None = None,
    rewards: Rewards | None = None,
    model: Model | Mapping[str, object] | None = None,
    run: str | None = None,
    runs_dir: Place = "runs",
    resume: bool = False,
    accept_changes: bool = False,
    progress: bool = True,
    on_step: Callables | None = None,
    on_evaluation: Callables | None = None,
    on_checkpoint: Callables | None = None,
    **keys: object,
) -> Run:
    """Train from a recipe, like ``posttrain train``, write curves and report, and return the run.

    Args:
        recipe: a name listed by ``posttrain recipes``, a YAML file, or a mapping (``{"extends": "tiny/grpo", ...}``).
        data: rows, a Dataset, a DataFrame, a file, a task name, or a task with options. Default: the recipe's task.
        eval_data: evaluation data. Default: the recipe's evaluation tasks, or a held-out split if ``data`` is given.
        rewards: names or functions, optionally with weights: ``["correct", (short, 0.1)]``. Functions take any of
            ``text``, ``answer``, ``meta``, ... by name, or use the TRL signature ``(completions, **columns)``.
        model: a name, a folder, a run, a loaded ``(model, tokenizer)`` (training uses a copy), or ``model`` keys.
        run: folder name in ``runs_dir``. Default: the recipe name, plus a number if already taken.
        resume: continue from the newest checkpoint. All other arguments must match the original call.
        accept_changes: resume even if recipe or records changed since the checkpoint.
        progress: show progress. If False, only notes are printed.
        on_step: a function or a list of functions, called with an ``Event`` after each step. ``event.stop()`` ends the
            run. ``on_evaluation`` and ``on_checkpoint`` work the same way.
        keys: recipe keys. ``lr=1e-5`` works if only one section has this key. Otherwise write
            ``rollout__max_tokens=96`` or ``rollout={"max_tokens": 96}``. A function can replace a component:
            ``objective=mine``. ``peft_config=LoraConfig(...)`` and TRL's ``args=`` are translated.

    Raises:
        UsageError: an invalid recipe or argument; nothing was changed.
        RunConflict: a run with this name exists.
        RunFailure: training failed. Saved work can be resumed.

    Examples:
        >>> pt.train("tiny/grpo", data=rows, rewards=["correct", (short, 0.1)], steps=50, run="mine").status.state
        'finished'
    """
    stop_import()
    if is_follower():  # torchrun started multiple copies; rank 0 continues
        raise SystemExit(follow())
    runs_dir, run = _check_places(runs_dir, run, resume, progress=progress, accept_changes=accept_changes)
    name = plain_recipe(recipe)
    called = _called(name)
    with without_command_line():
        keys, read = read_config_objects(keys)
        checked, notes = read_recipe(name, overrides_of(keys), given(runs_dir, data, eval_data, rewards, model))
    notes += read + session_notes(registry.session_functions(checked.to_yaml()), checked.scale)
    start = RunStart(runs_dir, run, called, resume, accept_changes, notes)
    with choose_progress(called, not progress) as view:
        calls = Callbacks(view, on_step, on_evaluation, on_checkpoint)
        result = launch(checked, start, observer=calls, should_stop=calls.should_stop, summarize=write_run_summary)
    return Run(result.folder)


def _called(name: str | dict[str, Any]) -> str:
    """Choose a recipe name for display; ``run`` for mappings."""
    if isinstance(name, str):
        return name
    return "run"


def _check_places(runs_dir: Place, run: str | None, resume: object, **flags: bool) -> tuple[str, str | None]:
    """Convert ``runs_dir`` and ``run`` to plain text, and check boolean arguments."""
    if not isinstance(resume, bool):
        raise UsageError(
            f"resume: {shorten(resume)} is not a boolean. To continue a run, pass run='mine' and resume=True"
        )
    for name, flag in flags.items():
        check_flag(name, flag)
    if run is not None and not isinstance(run, str):
        raise UsageError(f"run: {type(run).__name__} is not a name. Give a string, and the parent folder as runs_dir")
    if run is not None:
        run = plain_text("run", run)
    return plain_path("runs_dir", runs_dir), run


def given(
    runs_dir: Place,
    data: Data | None,
    eval_data: Data | None,
    rewards: Rewards | None,
    model: Model | Mapping[str, object] | None,
) -> list[Override]:
    """Convert Python arguments to recipe keys."""
    keys: dict[str, Any] = {}
    if model is not None:
        if isinstance(model, Mapping):
            section = {key: adapter_options(f"model.{key}", value) for key, value in model.items()}
        else:
            section = {"name": model_name(model, runs_dir)}
        with reading("model"):
            keys |= {f"model.{key}": value for key, value in section.items()}
    if data is not None:
        keys["task"] = data_word(data, runs_dir)
    if eval_data is not None:
        word = data_word(eval_data, runs_dir)
        if "path" in word:
            word = {"split": "all"} | word
        keys["eval.tasks"] = [word]
        if "path" in keys.get("task", {}):  # evaluation has separate data, so train on all rows
            keys["task"] = {"split": "all"} | keys["task"]
    if rewards is not None:
        keys["rewards"] = reward_words(rewards)
    return overrides_of(keys)


def read_recipe(
    name: str | dict[str, Any], overrides: Sequence[Override], given: Sequence[Override] = ()
) -> tuple[Recipe, list[str]]:
    """Load and resolve a recipe.

    Args:
        name: recipe name, file or content.
        overrides: keys that override the recipe.
        given: keys applied before ``overrides``, which replace components on purpose.

    Returns:
        The recipe, with a note for each component whose options an override dropped.

    Raises:
        UsageError: an invalid recipe; nothing was built.
    """
    recipe = load_recipe(name, refuse_repeats([*given, *overrides])).resolve()
    if not recipe.eval.every and any(key == "eval.tasks" for key, _ in given):
        raise UsageError("eval_data: not used, because eval.every is 0. Set it too, such as eval__every=10")
    refuse_tasks([recipe.task, *recipe.eval.tasks])
    resolve_components(recipe)
    return recipe, lost_options(name, overrides)


def inert_lines(recipe: Recipe) -> list[str]:
    """List options without effect in this run, or with effects below rounding."""
    return option_notes(recipe, resolve_components(recipe).needs)


def refuse_tasks(named: Iterable[Component]) -> None:
    """Call each task's ``refuse`` trait, which rejects invalid options without reading data.

    Raises:
        UsageError: raised by the trait.
    """
    for component in named:
        for task in task_components(component):
            refuse = find("task", task.name).traits.get("refuse")
            if refuse is not None:
                refuse(**task.options)


def session_notes(names: Sequence[str], scale: ScaleSection | None) -> list[str]:
    """Describe notebook functions and lambdas in a recipe, since other processes cannot import them.

    Raises:
        UsageError: multiple processes are configured, or (``scale`` None) training runs in a different process.
    """
    is_alone = scale is not None and scale.processes == 1 and scale.launcher == "local"
    if names and not is_alone:
        raise UsageError(
            f"{', '.join(names)}: lambdas and notebook functions are not in a file, so other "
            "processes cannot import them. Move the function to a file (mine.py) and import it"
        )
    what = "lambdas and notebook functions are not in a file, so no other process can resume this run"
    return [f"{name}: {what}" for name in names]


def write_run_summary(folder: Path) -> None:
    """Plot curves for an ended run, and write results and report."""
    from posttrain.reports.summary import write_summary  # imports matplotlib, which training does not need

    write_summary(folder)
