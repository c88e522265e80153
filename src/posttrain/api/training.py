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
    """An event of a run, which a callback is given; ``event.stop()`` ends the run after this step.

    ``metrics``: of a step, or the results of an evaluation on ``task``. ``path``: of a checkpoint; ``is_best``: it has
    the best weights so far.
    """

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    task: str | None = None
    path: Path | None = None
    is_best: bool = False
    is_stopped: bool = False

    def stop(self) -> None:
        """End the run cleanly: it saves a checkpoint, writes its report, and its state is ``stopped``."""
        self.is_stopped = True


Callback = Callable[[Event], object]
Callables = Callback | Sequence[Callback]  # one, or several, which are called in their order


def callbacks_of(given: object) -> list[Any]:
    """Return the functions of an argument that takes none, one or a list."""
    if given is None:
        return []
    if issubclass(type(given), list | tuple):  # isinstance would ask the object itself
        return list(given)  # type: ignore[call-overload]
    return [given]


def _check_callback(name: str, callback: object) -> None:
    """Refuse what cannot be called with an event.

    Raises:
        UsageError: with the name of the argument.
    """
    is_class = issubclass(type(callback), type)  # isinstance would ask the object itself
    if is_class or not callable(callback):
        what = type(callback).__name__
        if is_class:
            what = f"the class {getattr(callback, '__name__', '?')}"
        raise UsageError(f"{name}: {what} is no function. Give one of an event, or a list of them: def {name}(event)")
    with reading(name):
        if not registry.takes_one(callback):
            raise UsageError(f"{name}: the function must take one argument, the event. Give def {name}(event)")


@dataclass
class Callbacks:
    """An observer that calls functions of the user after a view of the progress."""

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
        """Return whether a callback has ended the run."""
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
    """Train by a recipe, as ``posttrain train`` does, and return the run; curves and report are written.

    Args:
        recipe: a name that ``posttrain recipes`` lists, a YAML file, or a mapping (``{"extends": "tiny/grpo", ...}``).
        data: rows, a Dataset, a DataFrame, a file, a task's name, or a task with options. By default the recipe's task.
        eval_data: what is evaluated on; by default the recipe's tasks, and with ``data`` a part of it that is held out.
        rewards: names, functions, or either with a weight: ``["correct", (short, 0.1)]``. A function takes any of
            ``text``, ``answer``, ``meta``, ... by name, or has TRL's form, ``(completions, **columns)``.
        model: a name, a folder, a run, a loaded ``(model, tokenizer)``, of which a copy is trained, or its keys.
        run: the name of its folder below ``runs_dir``; by default the recipe's name, with a number where that is taken.
        resume: continue the run from its newest checkpoint; all other arguments are the same as when it began.
        accept_changes: continue although recipe or records are others than those of the checkpoint.
        progress: show the progress; without it, nothing but notes.
        on_step: a function, or a list of them, called with an ``Event`` after each step; its ``stop()`` ends the run.
            So are ``on_evaluation`` and ``on_checkpoint`` after these.
        keys: keys of the recipe: ``lr=1e-5`` where one section alone has the key, else ``rollout__max_tokens=96``,
            ``rollout={"max_tokens": 96}``. A function may stand for a component: ``objective=mine``. A
            ``LoraConfig`` (``peft_config=``) and training arguments of TRL (``args=``) are read as keys.

    Raises:
        UsageError: the recipe, or what is given with it, cannot be used; nothing was changed.
        RunConflict: there is a run of this name.
        RunFailure: the work failed; what was saved can be resumed.

    Examples:
        >>> pt.train("tiny/grpo", data=rows, rewards=["correct", (short, 0.1)], steps=50, run="mine").status.state
        'finished'
    """
    stop_import()
    if is_follower():  # torchrun has started several of this script; the first one goes on with the run
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
    """Return what a recipe is called; one that is given as a mapping is ``run``."""
    if isinstance(name, str):
        return name
    return "run"


def _check_places(runs_dir: Place, run: str | None, resume: object, **flags: bool) -> tuple[str, str | None]:
    """Return both as plain text; refuse what is neither, and ``flags`` that are none."""
    if not isinstance(resume, bool):
        raise UsageError(
            f"resume: {shorten(resume)} is neither True nor False. The run to continue is named as run='mine'"
        )
    for name, flag in flags.items():
        check_flag(name, flag)
    if run is not None and not isinstance(run, str):
        raise UsageError(f"run: {type(run).__name__} is no name. Give a text; the folder of the runs is runs_dir")
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
    """Return what was given in Python as keys of a recipe."""
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
        if "path" in keys.get("task", {}):  # nothing of it need be held out
            keys["task"] = {"split": "all"} | keys["task"]
    if rewards is not None:
        keys["rewards"] = reward_words(rewards)
    return overrides_of(keys)


def read_recipe(
    name: str | dict[str, Any], overrides: Sequence[Override], given: Sequence[Override] = ()
) -> tuple[Recipe, list[str]]:
    """Return the checked and resolved recipe, and a line for each component whose options an override replaces.

    ``given``: what comes before the overrides and replaces components on purpose.

    Raises:
        UsageError: it cannot be used; nothing was built.
    """
    recipe = load_recipe(name, refuse_repeats([*given, *overrides])).resolve()
    if not recipe.eval.every and any(key == "eval.tasks" for key, _ in given):
        raise UsageError("eval_data: nothing is evaluated, as eval.every is 0. Give both, such as eval__every=10")
    refuse_tasks([recipe.task, *recipe.eval.tasks])
    resolve_components(recipe)
    return recipe, lost_options(name, overrides)


def inert_lines(recipe: Recipe) -> list[str]:
    """Return a line for each reason why options of a resolved recipe do nothing in its run, or act on rounding."""
    return option_notes(recipe, resolve_components(recipe).needs)


def refuse_tasks(named: Iterable[Component]) -> None:
    """Call the trait ``refuse`` of tasks, which knows options that cannot be used; nothing is read for that.

    Raises:
        UsageError: from the trait.
    """
    for component in named:
        for task in task_components(component):
            refuse = find("task", task.name).traits.get("refuse")
            if refuse is not None:
                refuse(**task.options)


def session_notes(names: Sequence[str], scale: ScaleSection | None) -> list[str]:
    """Return a line for each of the functions of this session that a recipe names; no other process can import them.

    Raises:
        UsageError: the run has several processes, or (``scale`` None) another process trains by the recipe.
    """
    is_alone = scale is not None and scale.processes == 1 and scale.launcher == "local"
    if names and not is_alone:
        raise UsageError(
            f"{', '.join(names)}: a lambda or a function of a notebook is in no file, so other "
            "processes cannot import it. Put it into a file (mine.py) and import it from there"
        )
    what = "a lambda or a function of a notebook is in no file, so the run cannot be resumed by another process"
    return [f"{name}: {what}" for name in names]


def write_run_summary(folder: Path) -> None:
    """Draw the curves of a run that has ended, and write its results and report."""
    from posttrain.reports.summary import write_summary  # it draws, which training does not need

    write_summary(folder)
