"""A strict document: YAML with ``extends`` and dotted overrides, whose errors name file, line and key.

Recipes, recipes of dictionaries (``sae train``) and of comparisons of models (``sae diff``) are documents.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from posttrain import registry
from posttrain.consent import refuse_remote_code
from posttrain.errors import RecipeError
from posttrain.option_types import shorten
from posttrain.recipes.files import apply_override, extend, parse_yaml, recipe_text
from posttrain.recipes.sections import Section
from posttrain.strict_yaml import write_yaml

D = TypeVar("D", bound="Document")

# Where a run works, who watches it and what it is called: no part of the fingerprint, and free to change when it is
# resumed (the change is written into its log). Everything else decides what comes out.
PLACE_KEYS = (
    "description",
    "track",
    "model.device",
    "train.device",
    "activations.model.device",
    "rollout.engine.url",
    "rollout.engine.served_name",
    "rollout.engine.timeout_seconds",
    "rollout.engine.retries",
)


class Document(Section):
    """A document with a section that tells it from others."""

    def dump(self) -> dict[str, Any]:
        """Plain data, without keys that are None by default; a None that was asked for stays."""
        return dict(_plain(self))

    def to_yaml(self) -> str:
        return write_yaml(self.dump())

    def fingerprint(self) -> str:
        """``fingerprint_of`` the resolved document."""
        return fingerprint_of(self.dump())


def load_document(
    kind: type[D], name_or_path: str, section: str, overrides: Sequence[tuple[str, str]], label: str, other: str
) -> D:
    """Read a document, apply dotted overrides, validate. Words are checked by its ``resolve``.

    Args:
        section: what tells it from others; ``other`` is said of a file without it.
        label: what it is called in messages.

    Raises:
        RecipeError: with file, line and key.
    """
    place, text = recipe_text(name_or_path)
    data, lines = parse_yaml(text, place)
    data, inherited = extend(data, place, lines)
    if section not in data:
        raise RecipeError(f"{place}: {other}")
    places = inherited | {key: f"{place}:{line}" for key, line in lines.items()}
    return validate_document(kind, data, overrides, label, place, places)


def validate_document(
    kind: type[D],
    data: dict[str, Any],
    overrides: Sequence[tuple[str, str]],
    label: str,
    place: str = "command line",
    places: Mapping[str, str] | None = None,
) -> D:
    """Plain data with overrides as a document; ``places``: ``file:line`` by key.

    Raises:
        RecipeError: with place and key.
    """
    for key, value in overrides:
        apply_override(data, key, value)
    overridden = {key for key, _ in overrides}
    line_of = line_finder(place, places or {}, overridden)
    refuse_remote_code(data, overridden, line_of)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise RecipeError("\n".join(_explain(kind, item, label, line_of) for item in error.errors())) from None


def _explain(kind: type[Document], item: Any, label: str, line_of: Callable[[str], str]) -> str:
    path = [str(part) for part in item["loc"]]
    key = ".".join(path)
    if item["type"] == "missing":
        return f"{line_of(key)}{key}: this key is needed"
    if item["type"] == "extra_forbidden":
        known = known_keys(kind, path[:-1])
        section = f"section {'.'.join(path[:-1])!r}" if path[:-1] else label
        hint = f"{registry.suggest(path[-1], known)} Known keys: {', '.join(known)}"
        return f"{line_of(key)}{key}: {section} has no key {path[-1]!r}.{hint}"
    shown = "" if item["type"] == "value_error" else f"; got {shorten(item['input'])}"
    return f"{line_of(key)}{key}: {item['msg'].removeprefix('Value error, ')}{shown}"


def line_finder(place: str, places: Mapping[str, str], overridden: Collection[str]) -> Callable[[str], str]:
    """Tells where a key stands, for the beginning of a message: that of the nearest section, else the file alone."""

    def line_of(key: str) -> str:
        if key in overridden:
            return "command line: "
        probe = key
        while probe:
            if probe in places:
                return f"{places[probe]}: "
            probe = probe.rpartition(".")[0]
        return f"{place}: "

    return line_of


def fingerprint_of(dump: Mapping[str, Any]) -> str:
    """SHA-256 (16 hex digits) of what decides the result in a resolved recipe's plain data."""
    return hashlib.sha256(json.dumps(decisive(dump), sort_keys=True).encode()).hexdigest()[:16]


def decisive(dump: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """A recipe's plain data without the ``PLACE_KEYS``."""
    kept = {key: value for key, value in dump.items() if f"{above}{key}" not in PLACE_KEYS}
    return {k: decisive(v, f"{above}{k}.") if isinstance(v, Mapping) else v for k, v in kept.items()}


def is_place(key: str) -> bool:
    """Whether a dotted key is one of ``PLACE_KEYS``, or lies below one."""
    return any(key == place or key.startswith(f"{place}.") for place in PLACE_KEYS)


def complete_word(word: Any, kind: str, where: str) -> Any:
    """A word with all of its options, which are checked."""
    entry = registry.find(kind, word.name, where)
    options = entry.options(word.options, where)
    fields = entry.options_model().model_fields
    options = {k: v for k, v in options.items() if v is not None or fields[k].default is not None}
    fixed = {name: getattr(word, name) for name in type(word).model_fields}
    return type(word)(**fixed, **json.loads(json.dumps(options)))


def _plain(value: Any) -> Any:
    """A section, word or value as plain data; see ``Document.dump``."""
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        shown = {name: getattr(value, name) for name in fields}
        kept = {k: _plain(v) for k, v in shown.items() if v is not None or fields[k].default is not None}
        if value.model_extra:  # the options of a word, which were sorted out when it was resolved
            kept |= {k: v for k, v in value.model_dump(mode="json").items() if k not in fields}
        return kept
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def known_keys(kind: type[BaseModel], path: Sequence[str]) -> list[str]:
    """The keys of the section of a document that a path leads to; none where it leads to no section."""
    model: Any = kind
    for part in path:
        field = getattr(model, "model_fields", {}).get(part)
        if field is None:
            return []
        candidates = [field.annotation, *get_args(field.annotation)]
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
    return list(model.model_fields) if model is not None else []
