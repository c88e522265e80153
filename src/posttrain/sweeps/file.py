"""Sweep files: their keys, parsing, and rows as resolved recipes (docs/how-to/compare-methods.md).

A source is a recipe name, ``{recipe: name, ...overrides}`` or a complete recipe.
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
# Keys taken from a row's recipe in a sweep with a base. All other keys come from the base.
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
# Task for steps labelled by the sweep. Steps keep their leading whitespace.
_TASK_OF_STEPS = {"name": "preferences", "path": "", "step_separator": ""}
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")
Overrides = Sequence[tuple[str, str]]


def _as_source(value: object) -> object:
    """Convert a bare recipe name, optionally with command line overrides (as ``name``), to ``{recipe: name}``."""
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
    """A task answered by some models, with sampling settings."""

    task: Component
    n: int = Field(default=256, ge=2)
    samples: int = Field(default=1, ge=1)
    max_tokens: Tokens = 128
    temperature: float = Field(default=1.0, gt=0)


class BestOfN(AnswersSection):
    """Held-out problems answered by the initial model, and the number of answers for reward models to choose from."""

    samples: int = Field(default=64, ge=2)


class Labelled(BestOfN):
    """Problems whose answers become labelled steps, and the number of answers to sample for each."""

    n: int = Field(default=256, ge=1)
    samples: int = Field(default=8, ge=2)


class HeadToHead(AnswersSection):
    """Prompts for comparing each policy with the initial model, and the row that trains the judge."""

    judge: str


class SampledPairs(AnswersSection):
    """Problems answered once by the initial model before the first run; correct and incorrect answers form pairs.

    Every row trains on these pairs, ``batch_size`` per step, instead of sampling answers.
    """

    samples: int = Field(default=8, ge=2)
    batch_size: int = Field(default=32, ge=1)


class Variants(Section):
    """A key to vary, such as ``train.num_minibatches``: each row is compared at several values, described by
    ``label``.
    """

    key: str
    values: Annotated[list[Any], Field(min_length=1)]
    label: str


class EvaluatedRuns(Section):
    """A stage of a comparison. ``split``, ``problems``, ``every``: evaluation data and interval in steps.

    ``cpu_seconds``: estimated time per run for each variant, used until runs have been measured.
    """

    split: str
    problems: int = Field(ge=2)
    every: int = Field(ge=1)
    cpu_seconds: Annotated[list[float], Field(min_length=1)]


class Tuning(EvaluatedRuns):
    """The runs that select learning rates, with seeds 0, 1, ..."""

    seeds: int = Field(default=2, ge=1, le=99)


class Comparison(Section):
    """A comparison that tunes every row equally, then retrains with fresh seeds at the best rate.

    ``baseline``: reference row. ``rates``: learning rates to try. ``threshold``: accuracy for the "steps to" column.
    ``recorded``: results from an earlier comparison, whose runs are reused. ``keep_runs``: keep run folders in
    addition to their records.
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
    """Keys in a sweep file. ``page``: documentation shown when the sweep ends."""

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
    """A sweep row: resolved recipe, its source, and changes.

    ``differs``: dotted keys other than method keys whose values differ from the base, as (base, here). ``needs``: row
    names, or ``labelled``.
    """

    name: str
    recipe: Recipe
    source: str
    differs: dict[str, tuple[object, object]] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


def divide_overrides(overrides: Overrides) -> tuple[Overrides, Overrides]:
    """Split overrides into those of the file's own keys, and those of every row's recipe."""
    own = []
    common = []
    for key, value in overrides:
        if key.partition(".")[0] in SweepFile.model_fields:
            own.append((key, value))
        else:
            common.append((key, value))
    return own, common


def shipped_sweeps() -> list[str]:
    """List shipped sweeps, such as ``sweep/ppo-grpo-dpo``."""
    return recipe_names(SHELF)


def training_recipe_names() -> list[str]:
    """List shipped recipes for ``posttrain train``."""
    others = {*shipped_sweeps(), *interpretation_names()}
    return [name for name in recipe_names() if name not in others]


# Removed sweeps, and the comparisons that replace them.
GONE_SWEEPS = {"all-policy-gradient": "methods", "all-preference": "preference-methods"}


def read_sweep(
    name_or_path: str, overrides: Overrides, over: tuple[str, Sequence[str]] | None
) -> tuple[SweepFile, Document[SweepFile]]:
    """Load and check a sweep file; also returns the document, which tracks line numbers.

    Args:
        name_or_path: a file or shipped sweep, with or without ``sweep/``; or a single-run recipe.
        overrides: dotted keys in the file with values.
        over: a key and its values; each value becomes a row.

    Raises:
        RecipeError: names file, line and key.
        UsageError: an override for a row that the file does not have.
    """
    if f"{SHELF}{name_or_path}" in shipped_sweeps() and not Path(name_or_path).is_file():
        name_or_path = f"{SHELF}{name_or_path}"
    instead = GONE_SWEEPS.get(name_or_path.removeprefix(SHELF))
    if instead is not None and not Path(name_or_path).is_file():
        why = "this sweep was removed because it used a single learning rate for all methods"
        raise UsageError(f"{name_or_path}: {why}. Run: posttrain sweep {instead}")
    document = Document.load(SweepFile, name_or_path, shelf=SHELF)
    if "rows" not in document.content and document.content.keys() & {"objective", "extends"}:
        document = Document(SweepFile, _rows_over(name_or_path, over), "command line")
    elif over is not None:
        raise UsageError(f"--over: {document.place} is a sweep that already has rows; give a single-run recipe")
    known = []
    rows = document.content.get("rows")
    if isinstance(rows, Mapping):
        known = list(map(str, rows))
    document = document.override(overrides)
    content = document.check()
    for name in content.rows:
        if name not in known:
            hint = suggest(name, known)
            raise UsageError(f"--rows.{name}: {document.place} has no row {name!r}.{hint} Rows: {', '.join(known)}")
        if not RUN_NAME.fullmatch(name) or name in ("start", LABELLED):
            raise error_at(
                document, f"rows.{name}", f"a row name may contain {NAME_RULE}, but cannot be start or {LABELLED}"
            )
    for key in (LABELLED, "best_of_n", "head_to_head"):
        section = getattr(content, key)
        if section is not None:
            complete_component(section.task, "task", f"{document.line_of(f'{key}.task')}{key}.task")
            if content.start is None:
                raise error_at(document, key, "answers come from the start model; add 'start'")
    if content.comparison is not None and content.comparison.pairs is not None:
        where = "comparison.pairs.task"
        complete_component(content.comparison.pairs.task, "task", f"{document.line_of(where)}{where}")
    return content, document


def _rows_over(recipe: str, over: tuple[str, Sequence[str]] | None) -> dict[str, Any]:
    """Build the file for a recipe and one varied key (rows ``lr-1e-4``, ``lr-3e-4``), else with a single row."""
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
            raise UsageError(f"--over {key}: two values would have the same row name {name}; remove one")
        rows[name] = {}
        apply_override(rows[name], key, value)
    return {"description": f"{recipe} over {key}.", "base": {"recipe": recipe}, "rows": rows}


def read_needs(document: Document[SweepFile], content: SweepFile) -> dict[str, tuple[str, ...]]:
    """Pop the needs of every row from its source.

    Raises:
        RecipeError: a need is neither a row nor ``labelled``; with its line.
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
                message = f"no other row {need!r}.{suggest(str(need), known)} Rows: {', '.join(known)}"
                raise error_at(document, f"rows.{name}.needs", message)
    return needs


def choose_rows(content: SweepFile, needs: Mapping[str, Sequence[str]], wanted: Sequence[str] | None) -> list[str]:
    """Select the wanted rows and their dependencies in dependency order; None or ``["all"]`` selects all rows.

    Raises:
        UsageError: no such row, or no row given.
        RecipeError: circular dependencies.
    """
    known = list(content.rows)
    chosen = known
    if wanted is not None and list(wanted) != ["all"]:
        chosen = list(wanted)
    for name in chosen:
        if name not in known:
            raise UsageError(f"--rows: no row {name!r}.{suggest(name, known)} Rows: {', '.join(known)}")
    if not chosen:
        raise UsageError(f"--rows: name at least one of {', '.join(known)}")
    if content.head_to_head is not None:
        chosen = [*chosen, content.head_to_head.judge]
    if content.comparison is not None:
        chosen = [*chosen, content.comparison.baseline]

    ordered: list[str] = []

    def add(name: str, above: tuple[str, ...] = ()) -> None:
        if name in above:
            raise RecipeError(f"rows: {' and '.join(above)} depend on each other; remove one need")
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
    """Resolves the sources in a file.

    ``common``: command line overrides for every row. ``own``: file keys set on the command line, which take
    precedence. ``base``: the resolved base, if any.
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
            if not names_objective:  # optional in a base, but required in a recipe
                data["objective"] = "reinforce"
                if "data" in data:
                    data["objective"] = "cross_entropy"
            checked = self._checked("base", data)
            self.base = checked.resolve()
            self.base_data = checked.dump()
            if not names_objective:
                del self.base_data["objective"]

    def start(self) -> Recipe | None:
        """Resolve the start recipe."""
        if self.content.start is None:
            return None
        with named("start"):
            return self.document.part(Recipe, "start", self._data(self.content.start, None)).check().resolve()

    def row(self, name: str, needs: tuple[str, ...]) -> SweepRow:
        """Resolve a row: its recipe, or the base with its method, plus overrides from file and command line."""
        source = self.content.rows[name]
        where = f"rows.{name}"
        with named(f"row {name!r}"):
            data = self._data(source, self.base)
            if data.get("objective") is None:
                raise error_at(self.document, where, "give a recipe or an objective, because the base has none")
            if LABELLED in needs:
                if "task" in source:
                    raise error_at(self.document, f"{where}.task", "the labelled steps are the task; omit this key")
                data["task"] = _TASK_OF_STEPS
            recipe = self._checked(where, data).resolve()
        changes = {}
        if self.base is not None:
            changes = differences(self.base.dump(), recipe.dump())
        return SweepRow(name, recipe, label_of(source), changes, needs)

    def _data(self, source: Mapping[str, object], base: Recipe | None) -> dict[str, object]:
        """Merge a source's data: its recipe (only the method if there is a ``base``) and its overrides."""
        data: dict[str, object] = {}
        if base is not None:
            data = dict(self.base_data)
        if "recipe" in source:
            recipe = load_recipe(str(source["recipe"]), is_own=not is_stored(self.document.place))
            if base is not None and (recipe.rollout is None) != (base.rollout is None):
                what = "this recipe and the base do not both train on data or both on sampled answers"
                raise RecipeError(f"{source['recipe']}: {what}; write rows as complete recipes, without a base")
            if base is None:
                data = recipe.dump()
            else:
                data = with_method_of(data, recipe.dump())
        return merge(data, {key: value for key, value in source.items() if key != "recipe"})

    def _checked(self, where: str, data: dict[str, object]) -> Recipe:
        """Check ``data`` as a recipe with the common overrides."""
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
    """Copy ``data`` with the method of ``other``; method keys absent in ``other`` are removed."""
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
    """Find dotted keys other than method keys whose values differ, as (base, row)."""
    old = flatten(base)
    new = flatten(row)
    alike = tuple(f"{key}." for key in (*METHOD_KEYS, "train.seed", "description"))
    apart = [key for key in {**old, **new} if old.get(key) != new.get(key) and not f"{key}.".startswith(alike)]
    return {key: (old.get(key), new.get(key)) for key in apart}


def label_of(source: Mapping[str, object]) -> str:
    """Describe a source for display in results."""
    name = source.get("recipe", "an inline recipe")
    if len(source) > 1 and "recipe" in source:
        return f"{name} with overrides"
    return str(name)


def error_at(document: Document[SweepFile], where: str, message: str) -> RecipeError:
    """Build the error for a dotted key in the file."""
    return RecipeError(f"{document.line_of(where)}{where}: {message}")


@contextmanager
def named(what: str) -> Iterator[None]:
    """Prefix errors raised in the block with ``what``."""
    try:
        yield
    except (RecipeError, UnknownComponent) as error:
        raise type(error)(f"{what}: {error}") from None
