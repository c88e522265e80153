"""The file of a sweep: its keys, how it is read, and its rows as resolved recipes (docs/how-to/compare-methods.md).

A source is the name of a recipe, ``{recipe: name, ...overrides}`` or a recipe written out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from posttrain.errors import RecipeError, UnknownComponent, UsageError
from posttrain.option_types import Repetitions, Tokens, Unread
from posttrain.recipes.document import Content, Document, complete_component, interpretation_names, recipe_names
from posttrain.recipes.overriding import apply_override, apply_overrides, flatten, merge
from posttrain.recipes.recipe import Recipe, load_recipe
from posttrain.recipes.sections import Component, Section
from posttrain.registry import suggest
from posttrain.runs.directory import NAME_RULE, RUN_NAME
from posttrain.untrusted import is_stored

SHELF = "sweep/"
LABELLED = "labelled"
# The keys that a row's recipe brings into a sweep with a base. Everything else is the base's.
METHOD_KEYS = (
    "objective",
    "regularize",
    "advantage",
    "aggregate",
    "correction",
    "kl_in_reward",
    "head",
    "teacher",
    "rollout.select",
    "rollout.label_above",
    "data.label_above",
    "rollout.drop_uniform_groups",
    "rollout.uniform_by",
    "rollout.max_rounds",
    "rollout.old_logprobs",
)
# The task of steps that a sweep labels; each step keeps the white space before it.
_TASK_OF_STEPS = {"name": "preferences", "path": "", "step_separator": ""}
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")
Overrides = Sequence[tuple[str, str]]


def _as_source(value: object) -> object:
    """A bare name, alone or with overrides of the command line (which call it ``name``), as ``{recipe: name}``."""
    if isinstance(value, str):
        return {"recipe": value}
    if isinstance(value, dict) and "name" in value and "recipe" not in value:
        overrides = {key: part for key, part in value.items() if key != "name"}
        return {"recipe": value["name"], **overrides}
    if value is None:
        return {}
    return value


RowSource = Annotated[dict[str, Any], BeforeValidator(_as_source), Unread()]


class AnswersSection(Section):
    """A task whose problems some models answer, and how they sample."""

    task: Component
    n: int = Field(default=256, ge=2)
    samples: int = Field(default=1, ge=1)
    max_tokens: Tokens = 128
    temperature: float = Field(default=1.0, gt=0)


class BestOfN(AnswersSection):
    """The held-out problems that the start answers, and how many answers the reward models choose among."""

    samples: int = Field(default=64, ge=2)


class Labelled(BestOfN):
    """The problems whose answers become labelled steps, and how many answers each gets from the start."""

    n: int = Field(default=256, ge=1)
    samples: int = Field(default=8, ge=2)


class HeadToHead(AnswersSection):
    """The prompts on which each policy is compared with the start, and the row whose reward model is the judge."""

    judge: str


class SampledPairs(AnswersSection):
    """Problems that the initial model answers once, before the first run; right and wrong answers become pairs.

    Every row learns from these pairs, ``batch_size`` of them a step, in place of sampling its own.
    """

    samples: int = Field(default=8, ge=2)
    batch_size: int = Field(default=32, ge=1)


class Variants(Section):
    """A key of which every row is compared at several values: ``train.num_minibatches``; ``label``: what these are."""

    key: str
    values: Annotated[list[Any], Field(min_length=1)]
    label: str


class EvaluatedRuns(Section):
    """A part of a comparison. ``split``, ``problems``: what its runs are evaluated on, ``every`` so many steps.

    ``cpu_seconds``: of a run, an estimate for each variant, until runs of it have been measured.
    """

    split: str
    problems: int = Field(ge=2)
    every: int = Field(ge=1)
    cpu_seconds: Annotated[list[float], Field(min_length=1)]


class Tuning(EvaluatedRuns):
    """The runs that choose each row's learning rate; their seeds are 0, 1, ..."""

    seeds: int = Field(default=2, ge=1, le=99)


class Comparison(Section):
    """A comparison that tunes every row in the same way and then trains it with fresh seeds at its own rate.

    ``baseline``: the row that the others are held against. ``rates``: learning rates that are tried. ``threshold``:
    accuracy of the column "steps to". ``recorded``: results of an earlier comparison; runs of it are not made again.
    ``keep_runs``: folders of runs are kept, and not only their records.
    """

    baseline: str
    rates: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)]
    over: Variants | None = None
    pairs: SampledPairs | None = None
    tuning: Tuning
    final: EvaluatedRuns
    threshold: float = Field(default=0.5, gt=0, le=1)
    recorded: str | None = None
    keep_runs: bool = False


class SweepFile(Content):
    """The keys of a sweep's file. ``page``: where to read on; named when the sweep has ended."""

    extensible = False
    label: ClassVar[str] = "a sweep"

    description: str = ""
    page: str = ""
    start: RowSource | None = None
    base: RowSource | None = None
    rows: Annotated[dict[str, RowSource], Field(min_length=1)]
    labelled: Labelled | None = None
    best_of_n: BestOfN | None = None
    head_to_head: HeadToHead | None = None
    comparison: Comparison | None = None
    seeds: Repetitions = 3


@dataclass(frozen=True)
class SweepRow:
    """A row of the sweep: its resolved recipe, where it is from, and what it changes.

    ``differs``: dotted keys outside of the method in which it differs from the base, as (base, here).
    ``needs``: names of rows, or ``labelled``.
    """

    name: str
    recipe: Recipe
    source: str
    differs: dict[str, tuple[object, object]] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


def shipped_sweeps() -> list[str]:
    """Names of the sweeps that ship, such as ``sweep/ppo-grpo-dpo``."""
    return recipe_names(SHELF)


def training_recipe_names() -> list[str]:
    """Names of the shipped recipes that ``posttrain train`` takes."""
    others = {*shipped_sweeps(), *interpretation_names()}
    return [name for name in recipe_names() if name not in others]


# Sweeps of earlier versions, and the comparisons that took their place.
GONE_SWEEPS = {"all-policy-gradient": "methods", "all-preference": "preference-methods"}


def read_sweep(
    name_or_path: str, overrides: Overrides, over: tuple[str, Sequence[str]] | None
) -> tuple[SweepFile, Document[SweepFile]]:
    """The checked file of a sweep, and the document that knows its lines.

    Args:
        name_or_path: a file or a shipped sweep, with or without ``sweep/``; or a recipe of one run.
        overrides: dotted keys of the file with values.
        over: a key and its values: a row of the recipe for each.

    Raises:
        RecipeError: with file, line and key.
        UsageError: an override of a row that the file does not have.
    """
    if f"{SHELF}{name_or_path}" in shipped_sweeps() and not Path(name_or_path).is_file():
        name_or_path = f"{SHELF}{name_or_path}"
    instead = GONE_SWEEPS.get(name_or_path.removeprefix(SHELF))
    if instead is not None and not Path(name_or_path).is_file():
        why = "this sweep is gone, because it had one learning rate for all methods"
        raise UsageError(f"{name_or_path}: {why}. Run: posttrain sweep {instead}")
    document = Document.load(SweepFile, name_or_path, shelf=SHELF)
    if "rows" not in document.content and document.content.keys() & {"objective", "extends"}:
        document = Document(SweepFile, _rows_over(name_or_path, over), "command line")
    elif over is not None:
        raise UsageError(f"--over: {document.place} is a sweep with rows of its own; give a recipe of one run")
    known = []
    rows = document.content.get("rows")
    if isinstance(rows, Mapping):
        known = list(map(str, rows))
    document = document.override(overrides)
    content = document.check()
    for name in content.rows:
        if name not in known:
            hint = suggest(name, known)
            raise UsageError(f"--rows.{name}: {document.place} has no row {name!r}.{hint} There: {', '.join(known)}")
        if not RUN_NAME.fullmatch(name) or name in ("start", LABELLED):
            raise error_at(
                document, f"rows.{name}", f"a row's name is made of {NAME_RULE}, and not start or {LABELLED}"
            )
    for key in (LABELLED, "best_of_n", "head_to_head"):
        section = getattr(content, key)
        if section is not None:
            complete_component(section.task, "task", f"{document.line_of(f'{key}.task')}{key}.task")
            if content.start is None:
                raise error_at(document, key, "the start answers; give 'start'")
    if content.comparison is not None and content.comparison.pairs is not None:
        where = "comparison.pairs.task"
        complete_component(content.comparison.pairs.task, "task", f"{document.line_of(where)}{where}")
    return content, document


def _rows_over(recipe: str, over: tuple[str, Sequence[str]] | None) -> dict[str, Any]:
    """The file of a recipe with one key at several values: ``lr-1e-4``, ``lr-3e-4``; without a key, of it alone."""
    if over is None:
        name = _NO_NAME.sub("-", Path(recipe).stem).strip("-")
        return {"description": f"{recipe} with several seeds.", "base": {"recipe": recipe}, "rows": {name: {}}}
    key, values = over
    last_key = key.rpartition(".")[2]
    rows: dict[str, Any] = {}
    for value in values:
        shown = _NO_NAME.sub("-", value).strip("-") or "empty"
        name = f"{last_key}-{shown}"
        if name in rows:
            raise UsageError(f"--over {key}: two values would both be called {name}; leave one out")
        rows[name] = {}
        apply_override(rows[name], key, value)
    return {"description": f"{recipe} over {key}.", "base": {"recipe": recipe}, "rows": rows}


def read_needs(document: Document[SweepFile], content: SweepFile) -> dict[str, tuple[str, ...]]:
    """The needs of each row, which are taken out of its source, in place.

    Raises:
        RecipeError: with the line of a need that is neither a row nor ``labelled``.
    """
    needs: dict[str, tuple[str, ...]] = {}
    for name, source in content.rows.items():
        value = source.pop("needs", None)
        if isinstance(value, list):
            needs[name] = tuple(value)
        elif value:
            needs[name] = (value,)
        else:
            needs[name] = ()
        known = [other for other in content.rows if other != name]
        if content.labelled is not None:
            known.append(LABELLED)
        for need in needs[name]:
            if need not in known:
                message = f"there is no other row {need!r}.{suggest(str(need), known)} There: {', '.join(known)}"
                raise error_at(document, f"rows.{name}.needs", message)
    return needs


def choose_rows(content: SweepFile, needs: Mapping[str, Sequence[str]], wanted: Sequence[str] | None) -> list[str]:
    """The wanted rows and those that they need, each after what it needs; None or ``["all"]`` for all rows.

    Raises:
        UsageError: the file has no such row, or none is named.
        RecipeError: rows that need one another.
    """
    known = list(content.rows)
    chosen = known
    if wanted is not None and list(wanted) != ["all"]:
        chosen = list(wanted)
    for name in chosen:
        if name not in known:
            raise UsageError(f"--rows: there is no row {name!r}.{suggest(name, known)} There: {', '.join(known)}")
    if not chosen:
        raise UsageError(f"--rows: name at least one of {', '.join(known)}")
    if content.head_to_head is not None:
        chosen = [*chosen, content.head_to_head.judge]
    if content.comparison is not None:
        chosen = [*chosen, content.comparison.baseline]

    ordered: list[str] = []

    def add(name: str, above: tuple[str, ...] = ()) -> None:
        if name in above:
            raise RecipeError(f"rows: {' and '.join(above)} need one another in a circle; leave one need out")
        if name in ordered:
            return
        for need in needs[name]:
            if need != LABELLED:
                add(need, (*above, name))
        ordered.append(name)

    for name in known:
        if name in chosen:
            add(name)
    return ordered


@dataclass
class RowReader:
    """Resolves the sources of a file.

    ``common``: overrides of the command line for every row; ``own``: keys of the file that it sets, which come first.
    ``base``: the resolved base, if there is one.
    """

    document: Document[SweepFile]
    content: SweepFile
    common: Overrides
    own: set[str]
    base: Recipe | None = None
    base_data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.content.base is None:
            return
        with named("base"):
            data = self._data(self.content.base, None)
            names_objective = "objective" in data
            if not names_objective:  # a base need not, and a recipe must
                data["objective"] = "reinforce"
                if "data" in data:
                    data["objective"] = "cross_entropy"
            checked = self._checked("base", data)
            self.base = checked.resolve()
            self.base_data = checked.dump()
            if not names_objective:
                del self.base_data["objective"]

    def start(self) -> Recipe | None:
        """The resolved recipe of the start."""
        if self.content.start is None:
            return None
        with named("start"):
            return self.document.part(Recipe, "start", self._data(self.content.start, None)).check().resolve()

    def row(self, name: str, needs: tuple[str, ...]) -> SweepRow:
        """One row: its recipe, or the base with its method, with its overrides and those of the command line."""
        source = self.content.rows[name]
        where = f"rows.{name}"
        with named(f"row {name!r}"):
            data = self._data(source, self.base)
            if data.get("objective") is None:
                raise error_at(self.document, where, "give a recipe or an objective; the base has none")
            if LABELLED in needs:
                if "task" in source:
                    raise error_at(self.document, f"{where}.task", "the labelled steps are its task; leave this out")
                data["task"] = _TASK_OF_STEPS
            recipe = self._checked(where, data).resolve()
        changes = {}
        if self.base is not None:
            changes = differences(self.base.dump(), recipe.dump())
        return SweepRow(name, recipe, label_of(source), changes, needs)

    def _data(self, source: Mapping[str, object], base: Recipe | None) -> dict[str, object]:
        """The data of a source: of its recipe (with a ``base`` its method alone), with its overrides."""
        data: dict[str, object] = {}
        if base is not None:
            data = dict(self.base_data)
        if "recipe" in source:
            recipe = load_recipe(str(source["recipe"]), is_own=not is_stored(self.document.place))
            if base is not None and (recipe.rollout is None) != (base.rollout is None):
                what = "one of it and the base learns from data, the other from its own answers"
                raise RecipeError(f"{source['recipe']}: {what}; write the rows as whole recipes, without a base")
            if base is None:
                data = recipe.dump()
            else:
                data = with_method_of(data, recipe.dump())
        return merge(data, {key: value for key, value in source.items() if key != "recipe"})

    def _checked(self, where: str, data: dict[str, object]) -> Recipe:
        """The checked recipe of ``data`` with the common overrides."""
        common = []
        for key, value in self.common:
            is_of_method = where == "base" and key.startswith(METHOD_KEYS)
            if f"{where}.{key}" not in self.own and not is_of_method:
                common.append((key, value))
        if common:
            data = self.document.part(Recipe, where, data).check().dump()
            apply_overrides(data, common)
        overridden = {f"{where}.{key}" for key, _ in common}
        return self.document.part(Recipe, where, data, overridden).check()


def with_method_of(data: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``data`` with the method of ``other``; what ``other`` does not have of it is taken away."""
    copy: dict[str, Any] = {}
    for key, value in data.items():
        copy[key] = dict(value) if isinstance(value, Mapping) else value
    for key in METHOD_KEYS:
        section, _, name = key.rpartition(".")
        source: Any = other
        target: Any = copy
        if section:
            source = other.get(section)
            target = copy.get(section)
        if not isinstance(target, dict):
            continue
        target.pop(name, None)
        if source and source.get(name) is not None:
            target[name] = source[name]
    return copy


def differences(base: Mapping[str, object], row: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Dotted keys outside of the method in which a row differs from the base, as (base, row)."""
    old = flatten(base)
    new = flatten(row)
    alike = tuple(f"{key}." for key in (*METHOD_KEYS, "train.seed", "description"))
    apart = [key for key in {**old, **new} if old.get(key) != new.get(key) and not f"{key}.".startswith(alike)]
    return {key: (old.get(key), new.get(key)) for key in apart}


def label_of(source: Mapping[str, object]) -> str:
    """Describe a source for a reader of results."""
    name = source.get("recipe", "a recipe of its own")
    if len(source) > 1 and "recipe" in source:
        return f"{name} with overrides"
    return str(name)


def error_at(document: Document[SweepFile], where: str, message: str) -> RecipeError:
    """The error that what stands at a dotted key cannot be."""
    return RecipeError(f"{document.line_of(where)}{where}: {message}")


@contextmanager
def named(what: str) -> Iterator[None]:
    """Errors in it begin with ``what``."""
    try:
        yield
    except (RecipeError, UnknownComponent) as error:
        raise type(error)(f"{what}: {error}") from None
