"""A comparison: one base, several methods, several seeds. What is compared, before anything is run.

The keys of its file are told in docs/compare.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from posttrain.errors import RecipeError, UsageError
from posttrain.recipes.document import (
    Document,
    apply_override,
    apply_overrides,
    flatten,
    interpretation_names,
    merge,
    recipe_names,
    study_names,
)
from posttrain.recipes.recipe import Recipe
from posttrain.sweeps.plan import Part, Plan, Training, plan_run, plan_start
from posttrain.sweeps.sources import (
    Source,
    SweepFile,
    choose_names,
    label_of,
    lay_over_recipe,
    named,
    named_recipe,
    read_source,
    read_sweep_file,
    refusal,
)
from posttrain.tasks.base import held_out_task

# What of a recipe is the method, and in what two recipes differ. Plain data in, plain data out.

# The keys that a method's recipe brings into a comparison. Everything else is the base's.
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
# What a method brings besides where it learns from the other kind of thing (data, or its own answers): it cannot learn
# from the base's. Everything else is held equal.
SOURCE_KEYS = ("task", "rollout", "data", "rewards", "train.epochs", "train.minibatches")
LEARNS_FROM = "what it learns from"
# What tells the cells of one method apart, or is only said about them.
CELL_KEYS = ("train.seed", "description")


def belongs_to_method(key: str) -> bool:
    """Whether a dotted key is, or lies under, one of ``METHOD_KEYS``."""
    return any(key == known or key.startswith(f"{known}.") for known in METHOD_KEYS)


def without_method(data: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a recipe's data without its method."""
    copy = deepcopy(dict(data))
    for key in METHOD_KEYS:
        section, _, name = key.rpartition(".")
        place = copy.get(section) if section else copy
        if isinstance(place, dict):
            place.pop(name, None)
    return copy


def method_part(data: Mapping[str, Any]) -> dict[str, Any]:
    """The method alone, as nested data; keys that the recipe does not give are not there."""
    part: dict[str, Any] = {}
    for key in METHOD_KEYS:
        section, _, name = key.rpartition(".")
        place = data.get(section) if section else data
        if isinstance(place, Mapping) and place.get(name) is not None:
            target = part.setdefault(section, {}) if section else part
            target[name] = deepcopy(place[name])
    return part


def with_source_of(base: Mapping[str, Any], donor: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the base's data that learns from what the donor learns from."""
    copy = deepcopy(dict(base))
    for key in SOURCE_KEYS:
        section, _, name = key.rpartition(".")
        place, own = (copy.setdefault(section, {}), donor.get(section, {})) if section else (copy, donor)
        place.pop(name, None)
        if own.get(name) is not None:
            place[name] = deepcopy(own[name])
    return copy


def tell_sources(changes: Mapping[str, tuple[Any, Any]], learns: tuple[str, str]) -> dict[str, tuple[Any, Any]]:
    """Differences in which the keys of ``rollout`` and ``data`` are one: what the base and the method learn from."""
    kept = {key: pair for key, pair in changes.items() if key.partition(".")[0] not in ("rollout", "data")}
    return {LEARNS_FROM: learns, **kept}


def changes_between(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """What ``document.merge`` must lay over ``old`` to get ``new``; None takes a key away."""
    changes: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if before == value:
            continue
        is_section = isinstance(value, Mapping) and ("name" not in value or key == "model")  # else a word, or a value
        if is_section and isinstance(before, Mapping):
            changes[key] = changes_between(before, value)
        else:
            changes[key] = deepcopy(value)
    return changes


def differences(base: Mapping[str, Any], cell: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys outside of the method in which a cell differs from the base, as (base, cell)."""
    old, new = flatten(base), flatten(cell)
    return {
        key: (old.get(key), new.get(key))
        for key in {**old, **new}
        if old.get(key) != new.get(key) and not belongs_to_method(key) and key not in CELL_KEYS
    }


_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")
# A base need not name an objective; one of these stands in while the base is checked by itself.
_STAND_IN = {"rollout": "reinforce", "data": "cross_entropy"}


class CompareFile(SweepFile):
    """The keys of a compare file. A source is a recipe's name, a recipe, or a name with overrides."""

    label = "a comparison"
    shelf = "compare/"
    singles = ("start", "base")
    groups: ClassVar[Mapping[str, str]] = {"methods": "method"}

    start: Source | None = None
    base: Source
    methods: Annotated[dict[str, Source], Field(min_length=1)]

    @classmethod
    def check_kind(cls, data: Mapping[str, Any], place: str) -> None:
        if "methods" not in data and "objective" in data:
            raise RecipeError(
                f"{place}: this is a recipe of one run; train it with: posttrain train. A compare file has 'base' and "
                "'methods', and may have 'description', 'start' and 'seeds'"
            )


@dataclass(frozen=True)
class Method:
    """A row of the table: its resolved recipe (seed 0), where it came from, and what it changes.

    ``differs``: dotted keys outside of the method in which it differs from the base: (base, here).
    """

    name: str
    recipe: Recipe
    source: str
    differs: dict[str, tuple[Any, Any]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ComparisonPlan(Plan):
    """A checked comparison. Its start stands alone; its cells follow seed by seed."""

    what = "comparison"
    file_name = "compare.yaml"
    verb = "Compare"
    parts_are = "runs"
    is_even = True

    base: Recipe
    start_source: str
    methods: list[Method]

    @property
    def cells(self) -> list[Training]:
        return self.trainings("methods")


def comparison_names() -> list[str]:
    """Names of the compare files that ship, such as ``compare/ppo-grpo-dpo``."""
    return recipe_names(CompareFile.shelf)


def training_recipe_names() -> list[str]:
    """Names of the shipped recipes that `posttrain train` takes."""
    others = {*comparison_names(), *interpretation_names(), *study_names(), *recipe_names("pipeline/")}
    return [name for name in recipe_names() if name not in others]


def describe_comparison(name: str) -> str:
    """The description of a shipped compare file, with its methods.

    Raises:
        RecipeError: it is not a compare file.
    """
    content, _ = read_sweep_file(CompareFile, name)
    return f"{content.description.strip()} Methods: {', '.join(content.methods)}.".strip()


def load_comparison(
    name_or_path: str,
    overrides: Sequence[tuple[str, str]] = (),
    *,
    folder: str | Path,
    methods: Sequence[str] | None = None,
    num_seeds: int | None = None,
    over: tuple[str, Sequence[str]] | None = None,
) -> ComparisonPlan:
    """Read a compare file and check every cell.

    Args:
        name_or_path: a file, or a shipped one with or without ``compare/``; with ``over``, a recipe of one run.
        overrides: dotted keys with values: of the compare file (``methods.dapo.objective.clip_high``)
            or else of the base (``train.lr``).
        folder: the comparison's directory; nothing is written here.
        methods, num_seeds: names of the rows wanted (None: all), and how many seeds (None: as the file says).
        over: a key and the values that it takes in turn: a row for each, which differs from the recipe in that alone.

    Raises:
        RecipeError, UnknownWord: with file, line, method and key.
        UsageError: an override or a method of something that the file does not have.
    """
    own, common = _split_overrides(overrides)
    made_up = None if over is None else rows_over(name_or_path, *over)
    content, document = read_sweep_file(CompareFile, name_or_path, own, content_of_command=made_up)
    base, base_data = _read_base(document, content.base, common)
    names = choose_names(list(content.methods), methods, document.place, "method")
    rows = [_read_row(document, content, name, base, base_data) for name in names]
    if base.eval.every == 0:
        says = "0 switches evaluation off; without it there is nothing to compare"
        raise refusal(document, "base.eval.every", says)
    start = None
    if content.start is not None:
        recipe = read_source(document, content.start, "start")
        if base.model.init is not None:
            says = "it makes a new model, which leaves nothing for 'start' to do"
            raise refusal(document, "base.model.init", says)
        start = plan_start(Path(folder), recipe, alone=True)
    seeds = range(num_seeds if num_seeds is not None else content.seeds)
    resolved = _resolve(content, start, base, rows, len(seeds))
    if start is not None:
        for recipe in (base, *(row.recipe for row in rows if "model.name" not in row.differs)):
            recipe.model.name = start.weights
    return ComparisonPlan(
        folder=Path(folder),
        description=content.description,
        parts=_parts(Path(folder), start, rows, seeds),
        num_seeds=len(seeds),
        resolved=resolved,
        base=base,
        start_source=label_of(content.start) if content.start is not None else base.model.name,
        methods=rows,
    )


def _parts(folder: Path, start: Training | None, rows: Sequence[Method], seeds: Sequence[int]) -> list[Part]:
    """The start, if there is one, then a cell for each row, seed by seed."""
    parts: list[Part] = [start] if start is not None else []
    for seed in seeds:
        for row in rows:
            needs = ["start"] if start is not None and row.recipe.model.name == start.weights else []
            parts.append(plan_run(folder, "methods", row.name, seed, row.recipe, "cell of the comparison", needs))
    return parts


def rows_over(recipe: str, key: str, values: Sequence[str]) -> dict[str, Any]:
    """What a compare file would say of one recipe with one key at several values: ``lr-1e-4``, ``lr-3e-4``.

    Raises:
        UsageError: the seed, which every row has several of, or values that cannot be told apart.
        RecipeError: a key that cannot be.
    """
    if key == "train.seed":
        raise UsageError("--over train.seed: every row is trained with several seeds; --seeds says how many")
    rows: dict[str, Any] = {}
    for value in values:
        name = f"{key.rpartition('.')[2]}-{_NO_NAME.sub('-', value).strip('-') or 'empty'}"
        if name in rows:
            raise UsageError(f"--over {key}: two values would both be called {name}; leave one out")
        rows[name] = {}
        apply_override(rows[name], key, value)
    return {"description": f"{recipe} over {key}.", "base": {"recipe": recipe}, "methods": rows}


def _split_overrides(overrides: Sequence[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(overrides of the compare file, overrides of the base)."""
    own, common = [], []
    for key, value in overrides:
        if key.partition(".")[0] in CompareFile.model_fields:
            own.append((key, value))
        elif belongs_to_method(key):
            raise UsageError(f"--{key}: this belongs to the methods; give it to one of them: --methods.NAME.{key}")
        elif key == "train.seed":
            raise UsageError("--train.seed: every cell has a seed of its own; --seeds says how many there are")
        else:
            common.append((key, value))
    return own, common


def _read_base(
    document: Document[CompareFile], source: Mapping[str, Any], common: Sequence[tuple[str, str]]
) -> tuple[Recipe, dict[str, Any]]:
    """The resolved base, and its data before that: defaults that follow from the objective are not in them."""
    with named("base"):
        data = lay_over_recipe(document, source)
        apply_overrides(data, common)
        has_objective = data.get("objective") is not None
        if not has_objective:
            data["objective"] = next((word for key, word in _STAND_IN.items() if key in data), "reinforce")
        recipe = document.part(Recipe, "base", data, {f"base.{key}" for key, _ in common}).check()
        checked = recipe.dump()
        if not has_objective:
            del checked["objective"]
        return recipe.resolve(), checked


def _read_row(
    document: Document[CompareFile], content: CompareFile, name: str, base: Recipe, base_data: Mapping[str, Any]
) -> Method:
    """One row: the base with the method's recipe and overrides."""
    where, source = f"methods.{name}", content.methods[name]
    with named(f"method {name!r}"):
        data = dict(base_data)
        if "recipe" in source:
            donor = named_recipe(document, source)
            donor.resolve()
            own = donor.dump()
            data = without_method(data)
            if (donor.rollout is None) != (base.rollout is None):
                tasks = base.eval.tasks or [held_out_task(base.task)]
                data = with_source_of(data, own)
                data["eval"] = data["eval"] | {"tasks": [task.model_dump() for task in tasks]}
            data = merge(data, method_part(own))
        data = merge(data, {key: value for key, value in source.items() if key != "recipe"})
        if data.get("objective") is None:
            raise refusal(document, where, "give a recipe or an objective; the base has none")
        recipe = document.part(Recipe, where, data).check().resolve()
    changes = differences(base.dump(), recipe.dump())
    if (recipe.rollout is None) != (base.rollout is None):
        kinds = {True: "data", False: "its own answers"}
        changes = tell_sources(changes, (kinds[base.rollout is None], kinds[recipe.rollout is None]))
    if content.start is not None and "model.name" in changes:
        changes["model.name"] = ("the start", recipe.model.name)
    return Method(name, recipe, label_of(source), changes)


def _resolve(
    content: CompareFile, start: Training | None, base: Recipe, rows: Sequence[Method], num_seeds: int
) -> dict[str, Any]:
    """The file with everything resolved. Seed and description of a row are the base's: they tell no method apart."""
    common = without_method(base.dump())
    methods = {}
    for row in rows:
        data = row.recipe.dump() | {"description": common["description"]}
        data["train"]["seed"] = common["train"]["seed"]
        methods[row.name] = changes_between(common, data)
    begin = {"start": start.recipe.dump()} if start is not None else {}
    about = {"description": content.description} if content.description else {}
    return {**about, **begin, "base": common, "methods": methods, "seeds": num_seeds}
