"""Plan and run evaluations: one trial per model, task and template."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
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
    FinishedEvaluation,
    WritePage,
    finished_before,
    folder_of_its_own,
    read_finished,
    refuse_other,
    settings_replaced,
    weights_mark,
    write_evaluation,
)
from posttrain.evaluation.generation import (
    Advance,
    AnswerScorer,
    Evaluation,
    Questions,
    evaluate_sampler,
    held_out,
    task_label,
)
from posttrain.evaluation.items import default_ks, digest_examples
from posttrain.evaluation.tables import ResultsRow, notes_on
from posttrain.models.sources import resolve_model_name
from posttrain.option_types import Dtype
from posttrain.recipes.sections import TURN_DEFAULTS, Component, task_components
from posttrain.recipes.tool_servers import plain_tools
from posttrain.sampling.base import NO_RULES, SMALLEST_TEMPERATURE, DecodingRules, read_rules
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
    """Sampling settings shared by all trials.

    ``max_tokens`` None: each model's default. ``batch`` None: sample all answers at once.
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
    rules: DecodingRules = NO_RULES

    def as_settings(self) -> dict[str, Any]:
        """Convert to plain data, including only decoding rules that were given."""
        settings = {name: value for name, value in asdict(self).items() if name != "rules"}
        return settings | self.rules.given()


def choose_drawing(
    *,
    samples: int = 1,
    k: int | Sequence[int] | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    min_tokens: int | None = None,
    repetition_penalty: float | None = None,
    stop: str | Sequence[str] | None = None,
    **others: Any,
) -> Drawing:
    """Build sampling settings, resolving defaults that depend on other options.

    Raises:
        UsageError: an option without effect, or ``k`` above ``samples``.
    """
    if temperature is None:
        temperature = float(samples > 1)
    if temperature < SMALLEST_TEMPERATURE:
        temperature = 0.0
    if temperature == 0 and samples > 1:
        raise UsageError("--samples: greedy decoding repeats one answer; give --temperature above 0")
    if temperature == 0:
        for option, value in (("--top-p", top_p), ("--top-k", top_k)):
            if value is not None:
                raise UsageError(f"{option}: no effect with greedy decoding; also give --temperature above 0")
    if k is None:
        k = ()
    elif isinstance(k, int):
        k = [k]
    rules = read_rules(min_p, min_tokens, repetition_penalty, stop)
    if temperature == 0 and rules.min_p > 0:
        raise UsageError("--min-p: no effect with greedy decoding; also give --temperature above 0")
    for wanted in k:
        if wanted > samples:
            raise UsageError(f"--k {wanted}: needs at least {wanted} answers per item; give --samples {wanted} or more")
    if k:
        ks = tuple(sorted(set(k)))
    else:
        ks = default_ks(samples)
    if top_p is None:
        top_p = 1.0
    return Drawing(samples=samples, ks=ks, temperature=temperature, top_k=top_k, top_p=top_p, rules=rules, **others)


@dataclass(frozen=True)
class EvaluationRequest:
    """Models to evaluate, and the options.

    ``tasks``, ``templates``: if empty, each model's defaults. ``best_of``: reward model for best-of-n selection.
    ``out``: output folder; by default inside the run if only one is evaluated, else below ``evaluations``. ``alike``:
    give all models the longest default ``max_tokens``.
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
    """One model on one task under one template. ``data``: digest from ``digest_examples``."""

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
class EvaluationPlan:
    """All trials, ordered by model, task and template; ``folder`` contains their results."""

    trials: list[EvaluationTrial]
    folder: Path
    request: EvaluationRequest
    best_of_weights: str | None = None

    @property
    def is_table(self) -> bool:
        return len(self.trials) > 1

    def settings(self, trial: EvaluationTrial) -> dict[str, Any]:
        """Collect all settings affecting a trial's answers as plain data; None values are omitted."""
        checkpoint = resolve_model_name(trial.source.path)
        request = self.request
        recipe = trial.source.recipe
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
            environment = None
            if recipe.environment is not None:
                environment = recipe.environment.model_dump()
            settings["environment"] = environment
            if recipe.tools is not None:
                settings["tools"] = plain_tools(recipe.tools)
            settings["turns"] = {key: getattr(recipe.rollout, key) for key in (*TURN_DEFAULTS, "max_turn_tokens")}
        settings |= request.drawing.as_settings()
        settings["batch"] = None
        settings["max_tokens"] = trial.max_tokens
        settings["engine"] = request.engine.model_dump()
        settings["dtype"] = request.dtype
        settings["device"] = request.device
        if request.best_of is not None:
            settings["best_of"] = request.best_of.name
        settings["best_of_weights"] = self.best_of_weights
        return {name: value for name, value in settings.items() if value is not None}


def make_plan(request: EvaluationRequest) -> EvaluationPlan:
    """Check a request and plan its trials, without loading models.

    Raises:
        UsageError: unusable components, options or combinations.
    """
    drawing = request.drawing
    if request.best_of is not None and drawing.samples == 1:
        raise UsageError("--best-of: nothing to choose from; give --samples 2 or more")
    sources = tell_apart(request.models)
    for source in sources:
        source.refuse_scorer()
    longest = None
    if request.alike:
        longest = max(source.max_tokens for source in sources)
    combinations = _combine(request, sources)
    registry.find("engine", request.engine.name, "--engine").options(request.engine.options, "--engine")
    for source, task, template in combinations:  # before loading tasks, which can be slow
        build_template(template, "--template")
        check_rewards(source, template)
        traits = registry.traits_of("task", task.name)
        is_played = traits is not None and traits.get("played")
        if is_played and not plays(source, template):
            raise UsageError(
                f"--task {task.name}: needs an environment, but {source.name} has none under this template; give a "
                "run trained in an environment, or a different task"
            )
    components = {task.model_dump_json(): task for _, task, _ in combinations}
    tasks = {key: build_task(component, "--task") for key, component in components.items()}
    data = {key: digest_examples(held_out(task, drawing.n)) for key, task in tasks.items()}
    trials = []
    for source, component, template in combinations:
        key = component.model_dump_json()
        max_tokens = drawing.max_tokens or longest or source.max_tokens
        trials.append(EvaluationTrial(source, tasks[key], component, template, max_tokens, Path(), data[key]))
    folder, names = _choose_folders(request.out, trials)
    refuse_other(folder)
    best_of_weights = None
    if request.best_of is not None:
        best_of_weights = weights_mark(resolve_model_name(request.best_of.path))
    plan = EvaluationPlan(trials, folder, request, best_of_weights)
    if request.out is None and folder.exists():  # keep earlier evaluations with different settings
        wanted = {name: plan.settings(trial) for name, trial in zip(names, trials, strict=True)}
        folder = folder_of_its_own(folder, wanted)
    in_folders = [replace(trial, folder=folder / name) for name, trial in zip(names, trials, strict=True)]
    return replace(plan, trials=in_folders, folder=folder)


def _combine(
    request: EvaluationRequest, sources: Sequence[ModelSource]
) -> list[tuple[ModelSource, Component, Component]]:
    """Combine models, tasks and templates; models default to their run's task and template."""
    own: Sequence[Component | None] = [None]
    if request.tasks:
        tasks: Sequence[Component | None] = request.tasks
    elif request.alike:
        tasks = choose_common_task(sources)
    else:
        tasks = own
    combinations = []
    for source in sources:
        for named in tasks:
            task = choose_task(named, source.name, source.task)
            for template in request.templates or own:
                combinations.append((source, task, complete_template(template, source) or source.template))
    return combinations


def choose_common_task(sources: Sequence[ModelSource]) -> list[Component | None]:
    """Choose a common task if none is given: the last run's task.

    None, so each model uses its default, unless all runs share one task.
    """
    own = [choose_task(None, source.name, source.task) for source in sources if source.task is not None]
    names = {task.name for task in own}
    if len(names) == 1:
        return [own[-1]]
    return [None]


class EvaluationProgress:
    """Interface for progress display, trial by trial; this base class shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def begin(self, title: str) -> None:
        """Begin a trial."""

    def observe(self, advance: Advance) -> None:
        """Show progress reported by ``evaluation.generation.evaluate_sampler``."""

    def tell(self, line: str) -> None:
        """Show a message."""

    def close(self) -> None:
        """Finish after all trials."""


# Renders a table's ``summary.md`` from rows, notes and trial pages.
WriteTablePage = Callable[[Sequence[ResultsRow], Sequence[str], Mapping[str, str]], str]


def run_plan(
    plan: EvaluationPlan,
    write_page: WritePage,
    write_table_page: WriteTablePage,
    open_scorer: Callable[[ModelSource], AnswerScorer],
    progress: EvaluationProgress,
) -> list[FinishedEvaluation]:
    """Run all trials, keeping only one model in memory; ``open_scorer`` loads the reward model.

    Resumes an interrupted table, keeping trials with unchanged settings. A complete table (``summary.md``) is rerun.
    """
    finished: dict[Path, FinishedEvaluation] = {}
    if plan.is_table and (plan.folder / SUMMARY).is_file():
        with storage_errors("evaluation", plan.folder):
            (plan.folder / SUMMARY).unlink()
    elif plan.is_table:
        before = {trial.folder: finished_before(trial.folder, plan.settings(trial)) for trial in plan.trials}
        finished = {folder: known for folder, known in before.items() if known is not None}
    left = [trial for trial in plan.trials if trial.folder not in finished]
    best_of = plan.request.best_of
    if best_of is not None and left:
        scorer = open_scorer(best_of)
    else:
        scorer = None
    for name in dict.fromkeys(trial.source.name for trial in left):
        trials = [trial for trial in left if trial.source.name == name]
        finished |= _run_trials(plan, trials, write_page, scorer, progress)
    ordered = [finished[trial.folder] for trial in plan.trials]
    if plan.is_table:
        rows = table_rows(ordered)
        pages = [str(trial.folder.relative_to(plan.folder) / SUMMARY) for trial in plan.trials]
        titles = [" · ".join((row.evaluation, row.model, row.template or "")) for row in rows]
        page = write_table_page(rows, notes_of(ordered), dict(zip(titles, pages, strict=True)))
        replace_file(plan.folder / SUMMARY, harmless(page).encode())
    return ordered


def _run_trials(
    plan: EvaluationPlan,
    trials: Sequence[EvaluationTrial],
    write_page: WritePage,
    scorer: AnswerScorer | None,
    progress: EvaluationProgress,
) -> dict[Path, FinishedEvaluation]:
    """Run one model's trials; first encode a prompt per trial to fail early."""
    request = plan.request
    model = open_model(trials[0].source, engine=request.engine, dtype=request.dtype, device=request.device)
    models = [model.on_stage(trial.template) for trial in trials]
    with ExitStack() as servers:  # of tools, which the stages have started
        for own in models:
            if own.stage is not None:
                servers.callback(own.stage.close)
        rendered = []
        for trial, own in zip(trials, models, strict=True):
            task = take_rendered(trial.task, own.grader.template, own.tokenizer, "--task")
            rendered.append(replace(trial, task=task))
        trials = rendered
        for trial, own in zip(trials, models, strict=True):
            for example in trial.task.examples[:1]:
                encode_prompt(own.tokenizer, own.grader.template, example.messages, example.variables)
        finished = {}
        for trial, own in zip(trials, models, strict=True):
            settings = plan.settings(trial)
            names = settings_replaced(trial.folder, settings)
            if names:
                shown = {"data": "data (questions or gold answers changed)"}
                changed = ", ".join(shown.get(name, name) for name in names)
                progress.tell(f"{trial.folder}: replacing an earlier evaluation that differs in {changed}")
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
    scorer: AnswerScorer | None = None,
    progress: EvaluationProgress | None = None,
) -> Evaluation:
    """Evaluate a model on a task (``evaluation/generation.py``)."""
    progress = progress or EvaluationProgress()
    progress.begin(f"{task_label(task)} · {model.label} · {model.grader.template.name}")
    max_tokens = drawing.max_tokens or model.source.max_tokens
    questions = Questions(
        task,
        model.sampling(max_tokens, drawing.temperature, drawing.top_k, drawing.top_p, drawing.rules),
        drawing.n,
        samples=drawing.samples,
        ks=drawing.ks,
        seed=drawing.seed,
        batch=drawing.batch,
    )
    return evaluate_sampler(model, questions, scorer=scorer, observe=progress.observe)


def count_trained(source: ModelSource, task: Task, n: int) -> dict[str, float]:
    """Count ``trained_rows``: evaluated rows whose prompt occurs in the run's training data.

    Compares if task names match and the run used a local file or an overlapping split; different hub splits are
    assumed disjoint. Empty if not comparable, or if the training data cannot be loaded.
    """
    own = source.task
    if own is None:
        return {}
    components = task_components(own)
    if task.name not in {own.name, *(component.name for component in components)}:
        return {}
    splits = task.split.split("+")
    read = []
    for component in components:
        path = str(component.options.get("path") or HUB)
        if not path.startswith(HUB) or component.options.get("split", "train") in splits:
            read.append(component)
    if not read:
        return {}
    try:
        trained = {example.messages for component in read for example in build_task(component).examples}
    except PosttrainError:
        return {}
    num_trained = sum(one.messages in trained for one in held_out(task, n))
    return {"trained_rows": float(num_trained)}


def table_rows(finished: Sequence[FinishedEvaluation]) -> list[ResultsRow]:
    """Convert evaluations to table rows."""
    return [ResultsRow(done.label, done.template, done.evaluation, done.results) for done in finished]


def notes_of(finished: Sequence[FinishedEvaluation]) -> list[str]:
    """Collect notes for a table, beginning with each task's problem seed and size."""
    drawn: dict[str, None] = {}
    for one in finished:
        task = one.settings.get("task")
        if not isinstance(task, Mapping):
            continue
        drawn_by = [f"task.{key} {task[key]}" for key in ("seed", "size") if task.get(key) is not None]
        if len(drawn_by) == 2:
            drawn[f"{one.evaluation}: problems generated with {' and '.join(drawn_by)}"] = None
    dropped = {one.evaluation: one.settings.get("dropped", {}) for one in finished}
    return [*drawn, *notes_on(table_rows(finished), dropped)]


def tell_apart(sources: Sequence[ModelSource]) -> list[ModelSource]:
    """Replace duplicate labels by model names as given."""
    labels = [source.label for source in sources]
    told = []
    for source in sources:
        if labels.count(source.label) > 1:
            told.append(replace(source, label=source.name))
        else:
            told.append(source)
    return told


def evaluation_folder(source: ModelSource, out: Path | None, name: str) -> Path:
    """Choose ``out``, a named folder inside the model's run, or one below ``evaluations`` if it has no run."""
    if out:
        return out
    if source.run:
        return source.run / "evaluation" / slug(name)
    return Path(EVALUATIONS) / slug(name)


def _choose_folders(out: Path | None, trials: Sequence[EvaluationTrial]) -> tuple[Path, list[str]]:
    """Choose the main folder, and a subfolder name per trial (empty for a single trial).

    By default the folder is inside the run if only one is evaluated, named after task and template.
    """
    info = [(trial.source.label, trial.name, trial.template.name) for trial in trials]
    models = list(dict.fromkeys(label for label, _, _ in info))
    labels = list(dict.fromkeys(name for _, name, _ in info))
    templates = list(dict.fromkeys(name for _, _, name in info))
    if len(models) == 1:
        source = trials[0].source
    else:
        source = replace(trials[0].source, run=None)
    place = "+".join(models)
    if source.run is not None:
        place = ""
        if source.path != str(source.run):
            place = Path(source.path).name
    parts = [place, "+".join(labels)]
    is_own = len(templates) == 1 and trials[0].template == source.template
    if not is_own:
        parts.append("+".join(templates))
    folder = evaluation_folder(source, out, "-".join(part for part in parts if part))
    if len(trials) == 1:
        return folder, [""]
    varied = [i for i, column in enumerate((models, labels, templates)) if len(column) > 1]
    names: list[str] = []
    folders = []
    for facts in info:
        name = slug("-".join(facts[i] for i in varied))
        num_earlier = names.count(name)
        names.append(name)
        if num_earlier:
            folders.append(f"{name}-{num_earlier + 1}")
        else:
            folders.append(name)
    return folder, folders


def slug(text: str) -> str:
    """Convert text to a valid folder name."""
    return re.sub(r"[^A-Za-z0-9._+@-]+", "-", text)[:MAX_NAME_CHARS].strip("-.") or "evaluation"
