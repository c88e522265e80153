"""The sources of a compare file (start, base, methods) as recipes, checked one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from posttrain.consent import is_stored
from posttrain.errors import RecipeError, UnknownWord
from posttrain.recipes.document import apply_override, merge
from posttrain.recipes.recipe import Recipe, load_recipe, validate_recipe
from posttrain.sweeps.compare_merge import method_part, without_method

# A base need not name an objective; one of these stands in while the base is checked by itself.
_STAND_IN = {"rollout": "reinforce", "data": "cross_entropy"}


@dataclass(frozen=True)
class SourceReader:
    """Turns the sources of one compare file into recipes; errors say where they stand in it."""

    place: str
    lines: Mapping[str, int]
    overridden: set[str]

    def source(self, source: Mapping[str, Any], where: str) -> Recipe:
        """A resolved recipe from a name, a name with overrides, or a recipe written out."""
        with self._named(where):
            return self._recipe(self._lay_over_recipe(source), where).resolve()

    def base(self, source: Mapping[str, Any], common: Sequence[tuple[str, str]]) -> tuple[Recipe, dict[str, Any]]:
        """The resolved base, and its data before that: defaults that follow from the objective are not in them."""
        with self._named("base"):
            data = self._lay_over_recipe(source)
            for key, value in common:
                apply_override(data, key, value)
            has_objective = data.get("objective") is not None
            if not has_objective:
                data["objective"] = next((word for key, word in _STAND_IN.items() if key in data), "reinforce")
            recipe = self._recipe(data, "base", {f"base.{key}" for key, _ in common})
            checked = recipe.dump()
            return recipe.resolve(), checked if has_objective else {
                k: v for k, v in checked.items() if k != "objective"
            }

    def method(self, name: str, source: Mapping[str, Any], base: Recipe, base_data: Mapping[str, Any]) -> Recipe:
        """One row, resolved: the base with the method's recipe and overrides."""
        where = f"methods.{name}"
        with self._named(f"method {name!r}"):
            data = dict(base_data)
            if "recipe" in source:
                donor = load_recipe(str(source["recipe"]), is_own=not is_stored(self.place))
                donor.resolve()
                _check_kind(str(source["recipe"]), donor, base)
                data = merge(without_method(data), method_part(donor.dump()))
            data = merge(data, {key: value for key, value in source.items() if key != "recipe"})
            if data.get("objective") is None:
                raise RecipeError(f"{self._line(where)}{where}: give a recipe or an objective; the base has none")
            return self._recipe(data, where).resolve()

    def _lay_over_recipe(self, source: Mapping[str, Any]) -> dict[str, Any]:
        overrides = {key: value for key, value in source.items() if key != "recipe"}
        if "recipe" not in source:
            return overrides
        return merge(load_recipe(str(source["recipe"]), is_own=not is_stored(self.place)).dump(), overrides)

    def _recipe(self, data: Mapping[str, Any], where: str, more: set[str] | None = None) -> Recipe:
        prefix = f"{where}."
        lines = {key.removeprefix(prefix): n for key, n in self.lines.items() if key.startswith(prefix)}
        given = {key.removeprefix(prefix) for key in self.overridden | (more or set()) if key.startswith(prefix)}
        return validate_recipe(data, self.place, lines, given, is_own=False)

    def _line(self, key: str) -> str:
        return f"{self.place}:{self.lines[key]}: " if key in self.lines else f"{self.place}: "

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except (RecipeError, UnknownWord) as error:
            raise type(error)(f"{what}: {error}") from None


def _check_kind(name: str, donor: Recipe, base: Recipe) -> None:
    if (donor.rollout is None) != (base.rollout is None):
        kinds = ("trains on data", "samples (rollout)")
        raise RecipeError(
            f"the recipe {name} {kinds[donor.rollout is not None]}, but the base {kinds[base.rollout is not None]}; "
            "give the method as overrides alone"
        )
