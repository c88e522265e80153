"""JSON Schema for recipe files, used by editors for completion and validation.

Generated from sections and the registry, so each component lists its options. JSON Schema cannot express conditions
between keys; ``posttrain train FILE --dry-run`` checks those.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.errors import PydanticInvalidForJsonSchema

from posttrain import registry
from posttrain.components import ComponentModules
from posttrain.recipes.recipe import COMPONENT_KINDS, Recipe
from posttrain.recipes.sections import RewardComponent

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_CODE = {"type": "string", "pattern": r"^[^:]+:[^:]+$"}  # module:function
_ANY_OBJECT = {"type": "object", "required": ["name"], "properties": {"name": _CODE}}
Schema = dict[str, Any]


def recipe_schema() -> Schema:
    """Build the schema for ``posttrain train`` files, including options for every component.

    Files may extend another recipe, so no section is required. Any value may be null, which removes an inherited one.
    """
    schema = Recipe.model_json_schema()
    definitions: Schema = dict(schema.pop("$defs", {}))
    for kind in sorted(set(COMPONENT_KINDS.values())):
        definitions[f"component.{kind}"] = _component(kind, definitions)
    for path, kind in COMPONENT_KINDS.items():
        section, _, key = path.rpartition(".")
        where = schema["properties"]
        if section:
            where = definitions[_section_name(section)]["properties"]
        about = {name: where[key][name] for name in ("description", "title") if name in where[key]}
        is_list = any(form.get("type") == "array" for form in (where[key], *where[key].get("anyOf", ())))
        where[key] = about | _of_kind(kind, is_list)
    for part in (schema, *definitions.values()):
        _loosen(part)
    schema["properties"]["extends"] = {"type": "string", "description": "the recipe that this file changes"}
    titles = {"$schema": DRAFT, "title": "recipe of posttrain", "$defs": definitions}
    return titles | {key: value for key, value in schema.items() if key not in ("title", "required")}


@cache
def keys_of_sections() -> Mapping[str, tuple[str, ...]]:
    """List recipe keys with nested keys; empty for plain values."""
    found: dict[str, tuple[str, ...]] = {}
    for name, field in Recipe.model_fields.items():
        section = _model_in(field.annotation)
        found[name] = () if section is None else tuple(section.model_fields)
    return found


def _model_in(annotation: object) -> type[BaseModel] | None:
    for one in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None


def _section_name(section: str) -> str:
    found = _model_in(Recipe.model_fields[section].annotation)
    assert found is not None, "a section of the recipe"
    return found.__name__


def _of_kind(kind: str, is_list: bool) -> Schema:
    one: Schema = {"$ref": f"#/$defs/component.{kind}"}
    if not is_list:
        return one
    names = {"type": "string"}  # multiple values, separated by commas
    return {"anyOf": [{"type": "array", "items": one}, one, names]}


def _component(kind: str, definitions: Schema) -> Schema:
    """Build a component schema: a name, or a mapping with options."""
    names = sorted(ComponentModules()[kind])
    forms: list[Schema] = [{"enum": names}, _CODE, _ANY_OBJECT]
    for name in names:
        options = dict(_options(kind, name, definitions))
        properties = {"name": {"const": name}, **options.get("properties", {})}
        if kind == "reward":
            properties["weight"] = {"type": "number", "default": RewardComponent.model_fields["weight"].default}
        form: Schema = {"type": "object", "properties": properties, "additionalProperties": False, "required": ["name"]}
        if kind == "optimizer" and name == "adamw":
            form["required"] = []  # options without a name belong to adamw
        forms.append(form)
    return {"anyOf": forms}


def _options(kind: str, name: str, definitions: Schema) -> Schema:
    model = registry.find(kind, name, kind).options_model
    try:
        schema = model.model_json_schema(ref_template="#/$defs/{model}")
    except PydanticInvalidForJsonSchema:  # Python-only option type
        return {"properties": {key: {} for key in model.model_fields}}
    definitions.update(schema.pop("$defs", {}))
    return dict(schema)


def _loosen(part: Schema) -> None:
    """Make every key optional and nullable, as in files that extend another recipe."""
    for form in (part, *part.get("anyOf", ())):
        if form.get("type") == "object" and "properties" in form:
            form["required"] = [key for key in form.get("required", ()) if key == "name"]
            for key, value in form["properties"].items():
                if key != "name":
                    form["properties"][key] = _or_null(value)


def _or_null(value: Schema) -> Schema:
    if value == {} or {"type": "null"} in value.get("anyOf", ()):
        return value
    about = {key: value[key] for key in ("description", "title", "default") if key in value}
    rest = {key: one for key, one in value.items() if key not in about}
    return about | {"anyOf": [rest, {"type": "null"}]}
