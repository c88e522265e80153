"""A comparison: one base, several methods, several seeds. What is compared, before anything is run.

A compare file is YAML::

    description: what it is about
    start: tiny/sft            # optional: a recipe that is trained once; every cell starts from its final weights
    base:                      # what is common to all: model, task, prompt, rewards, rollout or data, train, eval
      task: {name: stories, split: train}
      rollout: {prompts: 16, group: 8, max_tokens: 96}
      train: {steps: 120, lr: 3.0e-5}
      eval: {every: 10, n: 500}
    methods:                   # a row of the table each
      grpo: rl/grpo
      dapo: {recipe: rl/dapo, objective: {clip_high: 0.3}}
      plain: {objective: reinforce, advantage: centered}
    seeds: 3                   # each method is trained with seeds 0, 1 and 2

``start`` and ``base`` are the name of a recipe, ``{recipe: name, ...overrides}`` or a recipe written
out; the base needs no objective. A method is one of

* the name of a recipe: of it, only the method is taken (``METHOD_KEYS``: objective, advantage,
  aggregation, correction, KL in the reward, head, teacher, and how rollouts are selected), in place
  of the base's; all else is literally the base's;
* ``{recipe: name, ...overrides}``: the same, with overrides of any key;
* overrides alone: the base with these changes. Nothing (``{}``) is the base as it is.

Overrides are nested as in a recipe: sections are merged key by key, options without a ``name`` are
added to the word that is there, a word with its name replaces it. They may touch any key, but
whatever a cell has other than the base outside of its method is listed beside the table.
``train.seed`` is the cell's seed.

A cell is one method with one seed: an ordinary recipe, checked before the first one trains. Unknown
keys are refused with a suggestion and the line. ``compare.yaml`` in the comparison's directory is
the file with everything resolved; it makes the same cells again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from posttrain.errors import RecipeError, UsageError
from posttrain.option_types import Repetitions, Unread
from posttrain.recipes.document import (
    apply_override,
    interpretation_names,
    parse_yaml,
    recipe_names,
    recipe_text,
    study_names,
)
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import Section
from posttrain.registry import explain_validation, suggest
from posttrain.runs.directory import NAME_RULE, RUN_NAME
from posttrain.strict_yaml import write_yaml
from posttrain.sweeps.compare_merge import belongs_to_method, changes_between, differences, without_method
from posttrain.sweeps.compare_sources import SourceReader

COMPARISONS = "compare/"  # the folder of the shipped recipes that holds compare files


def _as_source(value: Any) -> Any:
    return {"recipe": value} if isinstance(value, str) else {} if value is None else value


Source = Annotated[dict[str, Any], BeforeValidator(_as_source), Unread()]


class CompareFile(Section):
    """The keys of a compare file. A source is a recipe's name, a recipe, or a name with overrides."""

    description: str = ""
    start: Source | None = None
    base: Source
    methods: Annotated[dict[str, Source], Field(min_length=1)]
    seeds: Repetitions = 3


@dataclass(frozen=True)
class Method:
    """A row of the table: its resolved recipe (seed 0), where it came from, and what it changes.

    ``differs``: dotted keys outside of the method in which it differs from the base: (base, here).
    """

    name: str
    recipe: Recipe
    source: str
    differs: dict[str, tuple[Any, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One run of the comparison: a method with a seed, its resolved recipe and its folder."""

    method: str
    seed: int
    recipe: Recipe
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name


@dataclass(frozen=True)
class Plan:
    """A checked comparison: what is trained where. ``start`` is a cell of its own, trained first."""

    folder: Path
    description: str
    start: Cell | None
    start_source: str
    base: Recipe
    methods: list[Method]
    num_seeds: int
    resolved: dict[str, Any]

    @property
    def cells(self) -> list[Cell]:
        """Seed by seed, so that an interrupted comparison has seen every method."""
        return [self._cell(method, seed) for seed in range(self.num_seeds) for method in self.methods]

    def _cell(self, method: Method, seed: int) -> Cell:
        recipe = method.recipe.model_copy(deep=True)
        recipe.train.seed = seed
        recipe.description = f"{method.name} with seed {seed}, a cell of the comparison {self.folder.name}."
        return Cell(method.name, seed, recipe, self.folder / "cells" / f"{method.name}-seed{seed}")

    def to_yaml(self) -> str:
        """The compare file with everything resolved."""
        return write_yaml(self.resolved)


def comparison_names() -> list[str]:
    """Names of the compare files that ship, such as ``compare/ppo-grpo-dpo``."""
    return [name for name in recipe_names() if name.startswith(COMPARISONS)]


def training_recipe_names() -> list[str]:
    """Names of the shipped recipes that `posttrain train` takes."""
    others = {*comparison_names(), *interpretation_names(), *study_names()}
    return [name for name in recipe_names() if name not in others]


def describe_comparison(name: str) -> str:
    """The description of a shipped compare file, with its methods.

    Raises:
        RecipeError: it is not a compare file.
    """
    place, text = recipe_text(name)
    data, lines = parse_yaml(text, place)
    content = _validate_file(data, place, lines, set())
    return f"{content.description.strip()} Methods: {', '.join(content.methods)}.".strip()


def load_comparison(
    name_or_path: str,
    overrides: Sequence[tuple[str, str]] = (),
    *,
    folder: str | Path,
    methods: Sequence[str] | None = None,
    num_seeds: int | None = None,
) -> Plan:
    """Read a compare file and check every cell.

    Args:
        name_or_path: a file, or a shipped one with or without ``compare/``.
        overrides: dotted keys with values: of the compare file (``methods.dapo.objective.clip_high``)
            or else of the base (``train.lr``).
        folder: the comparison's directory; nothing is written here.
        methods: names of the rows wanted; by default all.
        num_seeds: instead of the file's.

    Raises:
        RecipeError, UnknownWord: with file, line, method and key.
    """
    if f"{COMPARISONS}{name_or_path}" in recipe_names() and not Path(name_or_path).is_file():
        name_or_path = f"{COMPARISONS}{name_or_path}"
    place, text = recipe_text(name_or_path)
    data, lines = parse_yaml(text, place)
    own, common = _split_overrides(overrides)
    _apply_own(data, own, place)
    given = {key for key, _ in overrides}
    content = _validate_file(data, place, lines, {key for key, _ in own})
    reader = SourceReader(place, lines, given)
    base, base_data = reader.base(content.base, common)
    names = _choose_methods(list(content.methods), methods, place)
    rows = []
    for name in names:
        recipe = reader.method(name, content.methods[name], base, base_data)
        changes = differences(base.dump(), recipe.dump())
        if content.start is not None and "model.name" in changes:
            changes["model.name"] = ("the start", recipe.model.name)
        rows.append(Method(name, recipe, _label(content.methods[name]), changes))
    if base.eval.every == 0:
        raise RecipeError(
            f"{place}: base.eval.every: 0 switches evaluation off; without it there is nothing to compare"
        )
    target = Path(folder)
    start = None
    if content.start is not None:
        start = _plan_start(reader.source(content.start, "start"), target)
        if base.model.init is not None:
            raise RecipeError(f"{place}: base.model.init makes a new model; it leaves nothing for 'start' to do")
    count = num_seeds if num_seeds is not None else content.seeds
    resolved = _resolve(content, start, base, rows, count)
    if start is not None:
        weights = start.folder / "checkpoints" / f"step-{start.recipe.train.steps:06d}"
        for recipe in (base, *(row.recipe for row in rows if "model.name" not in row.differs)):
            recipe.model.name = str(weights)
    source = _label(content.start) if content.start is not None else base.model.name
    return Plan(target, content.description, start, source, base, rows, count, resolved)


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


def _apply_own(data: dict[str, Any], own: Sequence[tuple[str, str]], place: str) -> None:
    """Apply overrides of the compare file's own keys, in place; a bare name gains overrides beside it."""
    for key, value in own:
        section, _, rest = key.partition(".")
        holder, name = (data, section) if section != "methods" else (data.get("methods"), rest.partition(".")[0])
        if section == "methods" and isinstance(holder, dict) and name not in holder:
            known = ", ".join(map(str, holder))
            hint = suggest(name, map(str, holder))
            raise UsageError(f"--{key}: {place} has no method {name!r}.{hint} Methods: {known}")
        if section in ("start", "base", "methods") and isinstance(holder, dict) and name in holder:
            holder[name] = _as_source(holder[name])
        apply_override(data, key, value)


def _validate_file(data: Mapping[str, Any], place: str, lines: Mapping[str, int], overridden: set[str]) -> CompareFile:
    if "methods" not in data and "objective" in data:
        raise RecipeError(f"{place}: this is a recipe of one run; train it with: posttrain train. {_EXPECTED}")

    def line_of(key: str) -> str:
        if key in overridden:
            return "command line: "
        probe = key
        while probe and probe not in lines:
            probe = probe.rpartition(".")[0]
        return f"{place}:{lines[probe]}: " if probe else f"{place}: "

    try:
        content = CompareFile.model_validate(data)
    except ValidationError as error:
        known = list(CompareFile.model_fields)
        raise RecipeError(explain_validation(error, known, "", "a comparison", line_of)) from None
    for name in content.methods:
        if not RUN_NAME.fullmatch(name):
            raise RecipeError(
                f"{line_of(f'methods.{name}')}methods.{name}: a method's name is made of {NAME_RULE}, "
                "because its runs are called by it"
            )
    return content


_EXPECTED = "A compare file has 'base' and 'methods', and may have 'description', 'start' and 'seeds'"


def _choose_methods(known: list[str], wanted: Sequence[str] | None, place: str) -> list[str]:
    if wanted is None:
        return known
    for name in wanted:
        if name not in known:
            there = ", ".join(known)
            raise UsageError(f"--methods: {place} has no method {name!r}.{suggest(name, known)} Methods: {there}")
    if not wanted:
        raise UsageError(f"--methods: name at least one of {', '.join(known)}")
    return list(dict.fromkeys(wanted))


def _label(source: Mapping[str, Any]) -> str:
    name = source.get("recipe", "a recipe of its own")
    return f"{name} with overrides" if len(source) > 1 and "recipe" in source else str(name)


def _plan_start(recipe: Recipe, folder: Path) -> Cell:
    return Cell("start", recipe.train.seed, recipe, folder / "start")


def _resolve(
    content: CompareFile, start: Cell | None, base: Recipe, rows: Sequence[Method], num_seeds: int
) -> dict[str, Any]:
    common = without_method(base.dump())
    methods = {row.name: changes_between(common, without_cell_keys(row.recipe.dump(), common)) for row in rows}
    begin = {"start": start.recipe.dump()} if start is not None else {}
    about = {"description": content.description} if content.description else {}
    return {**about, **begin, "base": common, "methods": methods, "seeds": num_seeds}


def without_cell_keys(data: dict[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """``data`` with the base's seed and description: what remains is the method's doing."""
    data["train"]["seed"] = base["train"]["seed"]
    return data | {"description": base["description"]}
