"""Models × tasks × templates as single evaluations (trials), and their execution."""

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
    rules: DecodingRules = NO_RULES

    def as_settings(self) -> dict[str, Any]:
        """Return all as plain data; of the rules those that are given."""
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
    """Return the settings of drawing, with the defaults that depend on one another.

    Raises:
        UsageError: an option that would do nothing, or k answers out of fewer.
    """
    if temperature is None:
        temperature = float(samples > 1)
    if temperature < SMALLEST_TEMPERATURE:
        temperature = 0.0
    if temperature == 0 and samples > 1:
        raise UsageError("--samples: greedy decoding gives the same answer every time; give --temperature above 0")
    if temperature == 0:
        for option, value in (("--top-p", top_p), ("--top-k", top_k)):
            if value is not None:
                raise UsageError(f"{option}: greedy decoding draws nothing; give --temperature above 0 with it")
    if k is None:
        k = ()
    elif isinstance(k, int):
        k = [k]
    rules = read_rules(min_p, min_tokens, repetition_penalty, stop)
    if temperature == 0 and rules.min_p > 0:
        raise UsageError("--min-p: greedy decoding draws nothing; give --temperature above 0 with it")
    for wanted in k:
        if wanted > samples:
            raise UsageError(
                f"--k {wanted}: that needs at least {wanted} answers to each item; give --samples {wanted} or more"
            )
    if k:
        ks = tuple(sorted(set(k)))
    else:
        ks = default_ks(samples)
    if top_p is None:
        top_p = 1.0
    return Drawing(samples=samples, ks=ks, temperature=temperature, top_k=top_k, top_p=top_p, rules=rules, **others)


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
    """One evaluation: a model on a task under a template. ``data``: digest of the examples (``digest_examples``)."""

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
    """Check a request as far as that goes without loading a model.

    Raises:
        UsageError: components, options or combinations that cannot be used.
    """
    drawing = request.drawing
    if request.best_of is not None and drawing.samples == 1:
        raise UsageError("--best-of: there is nothing to choose from; give --samples 2 or more")
    sources = tell_apart(request.models)
    for source in sources:
        source.refuse_scorer()
    longest = None
    if request.alike:
        longest = max(source.max_tokens for source in sources)
    combinations = _combine(request, sources)
    registry.find("engine", request.engine.name, "--engine").options(request.engine.options, "--engine")
    for source, task, template in combinations:  # before a task is read, which may take long
        build_template(template, "--template")
        check_rewards(source, template)
        traits = registry.traits_of("task", task.name)
        is_played = traits is not None and traits.get("played")
        if is_played and not plays(source, template):
            raise UsageError(
                f"--task {task.name}: it asks nothing by itself, and {source.name} has no environment under this "
                "template; name a run that was trained in one, or another task"
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
    if request.out is None and folder.exists():  # next to evaluations of other questions
        wanted = {name: plan.settings(trial) for name, trial in zip(names, trials, strict=True)}
        folder = folder_of_its_own(folder, wanted)
    in_folders = [replace(trial, folder=folder / name) for name, trial in zip(names, trials, strict=True)]
    return replace(plan, trials=in_folders, folder=folder)


def _combine(
    request: EvaluationRequest, sources: Sequence[ModelSource]
) -> list[tuple[ModelSource, Component, Component]]:
    """Every model on every task under every template; by default each model has its own task and template."""
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
    """Return the task on which models are compared where none is named: the own task of the last that is a run.

    None, so that each has its own, where their runs learnt different tasks.
    """
    own = [choose_task(None, source.name, source.task) for source in sources if source.task is not None]
    names = {task.name for task in own}
    if len(names) == 1:
        return [own[-1]]
    return [None]


class EvaluationProgress:
    """Shows the progress of an evaluation, trial by trial; this one shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def begin(self, title: str) -> None:
        """Begin a trial."""

    def observe(self, advance: Advance) -> None:
        """Take the progress of ``evaluation.generation.evaluate_sampler``."""

    def tell(self, line: str) -> None:
        """Show a message."""

    def close(self) -> None:
        """End after all trials."""


# ``summary.md`` of a table, from its rows, its notes and the pages of its trials.
WriteTablePage = Callable[[Sequence[ResultsRow], Sequence[str], Mapping[str, str]], str]


def run_plan(
    plan: EvaluationPlan,
    write_page: WritePage,
    write_table_page: WriteTablePage,
    open_scorer: Callable[[ModelSource], AnswerScorer],
    progress: EvaluationProgress,
) -> list[FinishedEvaluation]:
    """Run every trial in the plan's order, one model in memory at a time; ``open_scorer`` loads the reward model.

    Trials of an interrupted table with the same settings are kept; a complete table (with ``summary.md``) is made anew.
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
    """Run the trials of one model; before the first is sampled, one prompt of each is encoded."""
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
                shown = {"data": "data (other questions or gold answers)"}
                changed = ", ".join(shown.get(name, name) for name in names)
                progress.tell(f"{trial.folder}: an earlier evaluation differs in {changed}; it is replaced")
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
    """Return ``trained_rows``: the evaluated rows whose prompt is in the training data of the model's run.

    The same task is compared where the run read a local file, or the same split; other splits are files of their own.
    Nothing is returned where there is nothing to compare, or the data are gone.
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
    """The evaluations as rows of a table."""
    return [ResultsRow(done.label, done.template, done.evaluation, done.results) for done in finished]


def notes_of(finished: Sequence[FinishedEvaluation]) -> list[str]:
    """Notes under the table of some evaluations; first the seed and size by which a task draws its problems."""
    drawn: dict[str, None] = {}
    for one in finished:
        task = one.settings.get("task")
        if not isinstance(task, Mapping):
            continue
        drawn_by = [f"task.{key} {task[key]}" for key in ("seed", "size") if task.get(key) is not None]
        if len(drawn_by) == 2:
            drawn[f"{one.evaluation}: the problems are those of {' and '.join(drawn_by)}"] = None
    dropped = {one.evaluation: one.settings.get("dropped", {}) for one in finished}
    return [*drawn, *notes_on(table_rows(finished), dropped)]


def tell_apart(sources: Sequence[ModelSource]) -> list[ModelSource]:
    """The models, those with equal labels renamed to what was typed."""
    labels = [source.label for source in sources]
    told = []
    for source in sources:
        if labels.count(source.label) > 1:
            told.append(replace(source, label=source.name))
        else:
            told.append(source)
    return told


def evaluation_folder(source: ModelSource, out: Path | None, name: str) -> Path:
    """``out``, or a folder of this name in the model's run, or below ``evaluations`` for a model without a run."""
    if out:
        return out
    if source.run:
        return source.run / "evaluation" / slug(name)
    return Path(EVALUATIONS) / slug(name)


def _choose_folders(out: Path | None, trials: Sequence[EvaluationTrial]) -> tuple[Path, list[str]]:
    """Return the folder for everything, and below it the name of each trial's (none for a single trial).

    By default it lies in the run, where there is one run alone, and is named by task and template.
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
    """A text as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9._+@-]+", "-", text)[:MAX_NAME_CHARS].strip("-.") or "evaluation"
