"""Models × tasks × templates as single evaluations (trials), and their execution."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from posttrain import registry
from posttrain.data.base import Task, build_task, choose_task
from posttrain.data.reading import HUB
from posttrain.data.render import encode_prompt
from posttrain.data.render.template import build_template
from posttrain.data.rendered import take_rendered
from posttrain.errors import PosttrainError, UsageError
from posttrain.evaluation.files import (
    SUMMARY,
    Finished,
    WritePage,
    finished_before,
    folder_of_its_own,
    read_finished,
    refuse_other,
    settings_replaced,
    weights_mark,
    write_evaluation,
)
from posttrain.evaluation.generation import Advance, Evaluation, Questions, Scorer, evaluate, held_out, task_label
from posttrain.evaluation.items import default_ks, digest_of
from posttrain.evaluation.tables import Row, notes_on
from posttrain.models.sources import resolve_model_name
from posttrain.option_types import Dtype
from posttrain.recipes.sections import TURN_DEFAULTS, Component, task_components
from posttrain.sampling.base import SMALLEST_TEMPERATURE
from posttrain.sampling.models import (
    NATIVE,
    Device,
    ModelSource,
    OpenedModel,
    check_rewards,
    complete_template,
    open_model,
    plays,
)
from posttrain.store.durable import replace_file, storage_errors
from posttrain.untrusted import harmless

EVALUATIONS = "evaluations"
MAX_NAME_CHARS = 100


@dataclass(frozen=True)
class Drawing:
    """Settings of drawing and counting answers, the same for every trial.

    ``max_tokens`` None: each model's own. ``batch`` None: all answers at once.
    """

    n: int
    samples: int = 1
    ks: tuple[int, ...] = ()
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    max_tokens: int | None = None
    seed: int = 0
    batch: int | None = None


def choose_drawing(
    *,
    samples: int = 1,
    k: int | Sequence[int] | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    **others: Any,
) -> Drawing:
    """Return the settings of drawing, with the defaults that depend on one another.

    Raises:
        UsageError: an option that would do nothing, or k answers out of fewer.
    """
    temperature = float(samples > 1) if temperature is None else temperature
    temperature = 0.0 if temperature < SMALLEST_TEMPERATURE else temperature
    if temperature == 0 and samples > 1:
        raise UsageError("--samples: greedy decoding gives the same answer every time; give --temperature above 0")
    for option, value in (("--top-p", top_p), ("--top-k", top_k)):
        if temperature == 0 and value is not None:
            raise UsageError(f"{option}: greedy decoding draws nothing; give --temperature above 0 with it")
    k = [k] if isinstance(k, int) else k
    for wanted in k or ():
        if wanted > samples:
            raise UsageError(
                f"--k {wanted}: that needs at least {wanted} answers to each item; give --samples {wanted} or more"
            )
    ks = tuple(sorted(set(k))) if k else default_ks(samples)
    top_p = 1.0 if top_p is None else top_p
    return Drawing(samples=samples, ks=ks, temperature=temperature, top_k=top_k, top_p=top_p, **others)


@dataclass(frozen=True)
class EvaluationRequest:
    """A request: models, what they are measured on, and how.

    ``tasks``, ``templates``: none is each model's own. ``best_of``: the reward model that chooses among the samples.
    ``out``: where the files go; None: into the run, where there is one alone, else below ``evaluations``. ``alike``:
    models of different lengths of answers are all given the longest.
    """

    models: Sequence[ModelSource]
    drawing: Drawing
    tasks: Sequence[Component] = ()
    templates: Sequence[Component] = ()
    engine: Component = field(default_factory=lambda: NATIVE)
    dtype: Dtype | None = None
    device: Device | None = None
    best_of: ModelSource | None = None
    out: Path | None = None
    alike: bool = False


@dataclass(frozen=True)
class EvaluationTrial:
    """One evaluation: a model on a task under a template. ``data``: digest of the examples (``digest_of``)."""

    source: ModelSource
    task: Task
    task_component: Component
    template: Component
    max_tokens: int
    folder: Path
    data: str

    @property
    def name(self) -> str:
        return task_label(self.task)


@dataclass(frozen=True)
class Plan:
    """All trials, by model and task and template in the order of the request; ``folder`` holds them."""

    trials: list[EvaluationTrial]
    folder: Path
    request: EvaluationRequest
    best_of_weights: str | None = None

    @property
    def is_table(self) -> bool:
        return len(self.trials) > 1

    def settings(self, trial: EvaluationTrial) -> dict[str, Any]:
        """Return all that decides about a trial's answers, as plain data; what is not set is left out."""
        checkpoint = resolve_model_name(trial.source.path)
        request, recipe = self.request, trial.source.recipe
        settings: dict[str, Any] = {
            "model": trial.source.name,
            "label": trial.source.label,
            "checkpoint": checkpoint,
            "weights": weights_mark(checkpoint),
            "task": trial.task_component.model_dump(),
            "data": trial.data,
            "dropped": trial.task.dropped,
            "template": trial.template.model_dump(),
        }
        if recipe is not None and plays(trial.source, trial.template):
            limits = {key: getattr(recipe.rollout, key) for key in (*TURN_DEFAULTS, "max_turn_tokens")}
            environment = recipe.environment.model_dump() if recipe.environment is not None else None
            settings |= {"environment": environment, "tools": recipe.tools, "turns": limits}
        settings |= asdict(request.drawing) | {
            "batch": None,
            "max_tokens": trial.max_tokens,
            "engine": request.engine.model_dump(),
            "dtype": request.dtype,
            "device": request.device,
            "best_of": request.best_of.name if request.best_of is not None else None,
            "best_of_weights": self.best_of_weights,
        }
        return {name: value for name, value in settings.items() if value is not None}


def make_plan(request: EvaluationRequest) -> Plan:
    """Check a request as far as that goes without loading a model.

    Raises:
        UsageError: components, options or combinations that cannot be.
    """
    drawing = request.drawing
    if request.best_of is not None and drawing.samples == 1:
        raise UsageError("--best-of: there is nothing to choose from; give --samples 2 or more")
    sources = tell_apart(request.models)
    for source in sources:
        source.refuse_scorer()
    longest = max(source.max_tokens for source in sources) if request.alike else None
    own: Sequence[Component | None] = [None]
    requested_tasks = request.tasks or (choose_common_task(sources) if request.alike else own)
    combinations = [
        (source, choose_task(task, source.name, source.recipe), complete_template(template, source) or source.template)
        for source in sources
        for task in requested_tasks
        for template in request.templates or own
    ]
    registry.find("engine", request.engine.name, "--engine").options(request.engine.options, "--engine")
    for source, task, template in combinations:  # before a task is read, which may take long
        build_template(template, "--template")
        check_rewards(source, template)
        if (registry.traits_of("task", task.name) or {}).get("played") and not plays(source, template):
            raise UsageError(
                f"--task {task.name}: it asks nothing by itself, and {source.name} has no environment under this "
                "template; name a run that was trained in one, or another task"
            )
    components = {task.model_dump_json(): task for _, task, _ in combinations}
    tasks = {key: build_task(component, "--task") for key, component in components.items()}
    data = {key: digest_of(held_out(task, drawing.n)) for key, task in tasks.items()}
    trials = [
        EvaluationTrial(
            source,
            tasks[component.model_dump_json()],
            component,
            template,
            drawing.max_tokens or longest or source.max_tokens,
            Path(),
            data[component.model_dump_json()],
        )
        for source, component, template in combinations
    ]
    folder, names = _choose_folders(request.out, trials)
    refuse_other(folder)
    best_of_weights = weights_mark(resolve_model_name(request.best_of.path)) if request.best_of is not None else None
    plan = Plan(trials, folder, request, best_of_weights)
    if request.out is None and folder.exists():  # next to evaluations of other questions
        folder = folder_of_its_own(
            folder, {name: plan.settings(trial) for name, trial in zip(names, trials, strict=True)}
        )
    in_folders = [replace(trial, folder=folder / name) for name, trial in zip(names, trials, strict=True)]
    return replace(plan, trials=in_folders, folder=folder)


def choose_common_task(sources: Sequence[ModelSource]) -> list[Component | None]:
    """Return the task on which models are compared where none is named: the own task of the last that is a run.

    None, so that each has its own, where their runs learnt different tasks.
    """
    own = [choose_task(None, source.name, source.recipe) for source in sources if source.recipe is not None]
    return [own[-1]] if own and len({task.name for task in own}) == 1 else [None]


class EvaluationProgress:
    """Shows the progress of an evaluation, trial by trial; this one shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def begin(self, title: str) -> None:
        """Begin a trial."""

    def observe(self, advance: Advance) -> None:
        """Take the progress of ``evaluation.generation.evaluate``."""

    def tell(self, line: str) -> None:
        """Show a message."""

    def close(self) -> None:
        """End after all trials."""


# ``summary.md`` of a table, from its rows, its notes and the pages of its trials.
WriteTablePage = Callable[[Sequence[Row], Sequence[str], Mapping[str, str]], str]


def run_plan(
    plan: Plan,
    write_page: WritePage,
    write_table_page: WriteTablePage,
    open_scorer: Callable[[ModelSource], Scorer],
    progress: EvaluationProgress,
) -> list[Finished]:
    """Run every trial in the plan's order, one model in memory at a time; ``open_scorer`` loads the reward model.

    Trials of an interrupted table with the same settings are kept; a complete table (with ``summary.md``) is made anew.
    """
    finished: dict[Path, Finished] = {}
    if plan.is_table and (plan.folder / SUMMARY).is_file():
        with storage_errors("evaluation", plan.folder):
            (plan.folder / SUMMARY).unlink()
    elif plan.is_table:
        before = {trial.folder: finished_before(trial.folder, plan.settings(trial)) for trial in plan.trials}
        finished = {folder: known for folder, known in before.items() if known is not None}
    left = [trial for trial in plan.trials if trial.folder not in finished]
    best_of = plan.request.best_of
    scorer = open_scorer(best_of) if best_of is not None and left else None
    for name in dict.fromkeys(trial.source.name for trial in left):
        trials = [trial for trial in left if trial.source.name == name]
        finished |= _run_trials(plan, trials, write_page, scorer, progress)
    ordered = [finished[trial.folder] for trial in plan.trials]
    if plan.is_table:
        rows = rows_of(ordered)
        pages = [str(trial.folder.relative_to(plan.folder) / SUMMARY) for trial in plan.trials]
        titles = [" · ".join((row.evaluation, row.model, row.template or "")) for row in rows]
        page = write_table_page(rows, notes_of(ordered), dict(zip(titles, pages, strict=True)))
        replace_file(plan.folder / SUMMARY, harmless(page).encode())
    return ordered


def _run_trials(
    plan: Plan,
    trials: Sequence[EvaluationTrial],
    write_page: WritePage,
    scorer: Scorer | None,
    progress: EvaluationProgress,
) -> dict[Path, Finished]:
    """Run the trials of one model; before the first is sampled, one prompt of each is encoded."""
    request = plan.request
    model = open_model(trials[0].source, engine=request.engine, dtype=request.dtype, device=request.device)
    models = [model.on_stage(trial.template) for trial in trials]
    trials = [
        replace(trial, task=take_rendered(trial.task, own.grader.template, own.tokenizer, "--task"))
        for trial, own in zip(trials, models, strict=True)
    ]
    for trial, own in zip(trials, models, strict=True):
        for example in trial.task.examples[:1]:
            encode_prompt(own.tokenizer, own.grader.template, example.messages, example.variables)
    finished = {}
    for trial, own in zip(trials, models, strict=True):
        settings = plan.settings(trial)
        if names := settings_replaced(trial.folder, settings):
            other = ["data (other questions or gold answers)" if name == "data" else name for name in names]
            progress.tell(f"{trial.folder}: an earlier evaluation differs in {', '.join(other)}; it is replaced")
        drawing = replace(request.drawing, max_tokens=trial.max_tokens)
        for line in trial.task.warnings:
            progress.tell(line)
        evaluation = measure(own, trial.task, drawing, scorer=scorer, progress=progress)
        evaluation.results.update(count_trained(trial.source, trial.task, drawing.n))
        write_evaluation(trial.folder, settings, evaluation, write_page)
        finished[trial.folder] = read_finished(trial.folder)
    return finished


def measure(
    model: OpenedModel,
    task: Task,
    drawing: Drawing,
    *,
    scorer: Scorer | None = None,
    progress: EvaluationProgress | None = None,
) -> Evaluation:
    """Evaluate a model on a task (``evaluation/generation.py``)."""
    progress = progress or EvaluationProgress()
    progress.begin(f"{task_label(task)} · {model.label} · {model.grader.template.name}")
    max_tokens = drawing.max_tokens or model.source.max_tokens
    questions = Questions(
        task,
        model.sampling(max_tokens, drawing.temperature, drawing.top_k, drawing.top_p),
        drawing.n,
        samples=drawing.samples,
        ks=drawing.ks,
        seed=drawing.seed,
        batch=drawing.batch,
    )
    return evaluate(model, questions, scorer=scorer, observe=progress.observe)


def count_trained(source: ModelSource, task: Task, n: int) -> dict[str, float]:
    """Return ``trained_rows``: the evaluated rows whose prompt is in the training data of the model's run.

    The same task is compared where the run read a local file, or the same split; other splits are files of their own.
    Nothing is returned where there is nothing to compare, or the data are gone.
    """
    own = None if source.recipe is None else source.recipe.task
    components = [] if own is None else task_components(own)
    if own is None or task.name not in {own.name, *(component.name for component in components)}:
        return {}
    splits = task.split.split("+")
    paths = [str(component.options.get("path") or HUB) for component in components]
    read = [
        component
        for component, path in zip(components, paths, strict=True)
        if not path.startswith(HUB) or component.options.get("split", "train") in splits
    ]
    try:
        trained = {example.messages for component in read for example in build_task(component).examples}
    except PosttrainError:
        return {}
    return {"trained_rows": float(sum(one.messages in trained for one in held_out(task, n)))} if read else {}


def rows_of(finished: Sequence[Finished]) -> list[Row]:
    """The evaluations as rows of a table."""
    return [Row(done.label, done.template, done.evaluation, done.results) for done in finished]


def notes_of(finished: Sequence[Finished]) -> list[str]:
    """Notes under the table of some evaluations; first the seed and size by which a task draws its problems."""
    drawn: dict[str, None] = {}
    for one in finished:
        task = one.settings.get("task")
        options = task if isinstance(task, Mapping) else {}
        drawn_by = [f"task.{key} {options[key]}" for key in ("seed", "size") if options.get(key) is not None]
        if len(drawn_by) == 2:
            drawn[f"{one.evaluation}: the problems are those of {' and '.join(drawn_by)}"] = None
    return [*drawn, *notes_on(rows_of(finished), {one.evaluation: one.settings.get("dropped", {}) for one in finished})]


def tell_apart(sources: Sequence[ModelSource]) -> list[ModelSource]:
    """The models, those with equal labels renamed to what was typed."""
    labels = [source.label for source in sources]
    return [replace(s, label=s.name) if labels.count(s.label) > 1 else s for s in sources]


def place_of(source: ModelSource, out: Path | None, name: str) -> Path:
    """``out``, or a folder of this name in the model's run, or below ``evaluations`` for a model without a run."""
    return out or (source.run / "evaluation" if source.run else Path(EVALUATIONS)) / slug(name)


def _choose_folders(out: Path | None, trials: Sequence[EvaluationTrial]) -> tuple[Path, list[str]]:
    """Return the folder for everything, and below it the name of each trial's (none for a single trial).

    By default it lies in the run, where there is one run alone, and is named by task and template.
    """
    info = [(trial.source.label, trial.name, trial.template.name) for trial in trials]
    models, labels, templates = (list(dict.fromkeys(column)) for column in zip(*info, strict=True))
    source = trials[0].source if len(models) == 1 else replace(trials[0].source, run=None)
    is_own = len(templates) == 1 and trials[0].template == source.template
    place = "+".join(models)
    if source.run is not None:
        place = Path(source.path).name if source.path != str(source.run) else ""
    parts = [part for part in (place, "+".join(labels), "" if is_own else "+".join(templates)) if part]
    varied = [i for i, column in enumerate((models, labels, templates)) if len(column) > 1]
    names = [slug("-".join(fact[i] for i in varied)) for fact in info] if len(trials) > 1 else [""]
    earlier = [names[:i].count(name) for i, name in enumerate(names)]
    folders = [f"{name}-{count + 1}" if count else name for name, count in zip(names, earlier, strict=True)]
    return place_of(source, out, "-".join(parts)), folders


def slug(text: str) -> str:
    """A text as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9._+@-]+", "-", text)[:MAX_NAME_CHARS].strip("-.") or "evaluation"
