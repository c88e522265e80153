"""Strict YAML documents: read, extend, override, validate and write. Does not import torch.

Recipes, dictionaries, model comparisons and sweeps are ``Document`` objects, each with a ``Content`` type. Every
message names the file, line and key. Unknown keys are rejected with a suggestion.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from posttrain import registry
from posttrain.errors import GONE, RecipeError, nearest
from posttrain.option_types import faults, shorten
from posttrain.other_names import answer_other_name, answer_spelling
from posttrain.recipes.older import Older
from posttrain.recipes.overriding import apply_overrides, merge
from posttrain.recipes.sections import Component, Section
from posttrain.strict_yaml import MAX_CHARS, read_yaml, write_yaml
from posttrain.untrusted import declare_code, is_stored, kind_of_file, refuse_remote_code

# Devices, processes, trackers and descriptions. These are excluded from the fingerprint and may change on resume (the
# run log records any change). All other keys affect results.
PLACE_KEYS = (
    "description",
    "track",
    "scale",
    "model.device",
    "train.device",
    "eval.device",
    "activations.model.device",
    *(
        f"{section}.engine.{key}"
        for section in ("rollout", "eval")
        for key in ("url", "served_name", "timeout_seconds", "retries", "gpus", "gpu_memory_utilization")
    ),
)
# Sections for `posttrain sae` recipes: training a dictionary, or comparing models.
INTERPRETATION = ("dictionary", "changes")
_MAX_BELOW = 20
_SHIPPED = Path(__file__).parent
Rule = tuple[object, str, str]  # (True if violated, key, message after the key)


class Content(Section):
    """Document content type.

    ``label``: name in messages; ``extensible``: may extend another document; ``older``: key changes from earlier
    versions.
    """

    label: ClassVar[str] = "a recipe"
    extensible: ClassVar[bool] = True
    older: ClassVar[Older] = Older()

    def dump(self) -> dict[str, Any]:
        """Convert to plain data, omitting keys that are None by default; other None values stay."""
        return dict(_plain(self))

    def to_yaml(self) -> str:
        return write_yaml(self.dump())

    def rules(self) -> Iterator[Rule]:
        """Yield rules across sections that need no other information."""
        yield from ()

    def fingerprint(self) -> str:
        """Compute a SHA-256 (16 hex digits) over all keys that affect results. Equal hashes mean equal experiments."""
        return hashlib.sha256(json.dumps(decisive(self.dump()), sort_keys=True).encode()).hexdigest()[:16]


T = TypeVar("T", bound=Content)
C = TypeVar("C", bound=Content)


@dataclass(frozen=True)
class Document(Generic[T]):
    """Unvalidated ``model`` data with key locations.

    ``place`` prefixes messages for keys without a line; ``places``: ``file:line`` by dotted key; ``overridden``: keys
    from the command line; ``is_own``: written by the user, so custom code is allowed.
    """

    model: type[T]
    content: dict[str, Any]
    place: str = "recipe"
    places: Mapping[str, str] = field(default_factory=dict)
    overridden: Collection[str] = ()
    is_own: bool = True

    @classmethod
    def load(
        cls, model: type[T], name_or_path: str | Mapping[str, object], *, is_own: bool = True, shelf: str = ""
    ) -> Document[T]:
        """Load a file or shipped recipe without merging parents. ``shelf`` picks which names to suggest first.

        A mapping is treated as content written by the caller.

        Raises:
            RecipeError: unknown file or name, invalid YAML, or unsupported values (``strict_yaml``).
        """
        if isinstance(name_or_path, Mapping):
            declare_code(name_or_path)
            return cls(model, model.older.bring_up_to_date(copy.deepcopy(dict(name_or_path))))
        place, text = recipe_text(name_or_path, shelf)
        return cls.read(model, place, text, is_own=is_own)

    @classmethod
    def read(cls, model: type[T], place: str, text: str, *, is_own: bool = True) -> Document[T]:
        """Parse ``text`` read from file ``place``. See ``load``."""
        content, lines = parse_yaml(text, place, is_own=is_own)
        content = model.older.bring_up_to_date(content)
        return cls(model, content, place, {key: f"{place}:{line}" for key, line in lines.items()}, is_own=is_own)

    def extend(self, above: Sequence[str] = ()) -> Document[T]:
        """Merge with the parent recipe named by ``extends``. Paths are resolved relative to this file, then the
        current folder.

        Sections merge key by key. Components replace inherited components with all options, and ``null`` removes them.
        Descriptions are not inherited.

        Raises:
            RecipeError: parent not found, or circular inheritance.
        """
        own = dict(self.content)
        name = own.pop("extends", None)
        if name is None:
            return replace(self, content=own)
        where = f"{self.places.get('extends', self.place)}: extends"
        if not isinstance(name, str):
            raise RecipeError(f"{where}: give a recipe's name or file; got {shorten(name)}")
        if len(above) == _MAX_BELOW:
            raise RecipeError(f"{where}: inheritance is deeper than {_MAX_BELOW} recipes; merge some")
        if name in above:
            what = " and ".join(map(repr, above))
            how = "extend each other in a circle"
            if len(above) == 1:
                how = "extends itself"
            raise RecipeError(f"{where}: {what} {how}; remove an 'extends'")
        file = name
        sibling = Path(self.place).parent / name
        if name and kind_of_file(sibling) != "nothing":
            file = str(sibling)
        try:
            place, text = recipe_text(file)
        except RecipeError as error:
            raise RecipeError(f"{where}: {error}") from None
        # Parents named by a stored recipe were not written by the user.
        is_own = self.is_own and not is_stored(self.place)
        below = Document.read(self.model, place, text, is_own=is_own).extend((*above, name))
        below.content.pop("description", None)
        return replace(self, content=merge(below.content, own), places={**below.places, **self.places})

    def override(self, overrides: Sequence[tuple[str, str]]) -> Document[T]:
        """Apply dotted keys from the command line. See ``apply_override``."""
        content = copy.deepcopy(self.content)
        named = {key.replace("-", "_") for key, _ in overrides}
        for key in sorted(named):
            other = f"{key.removesuffix('.num_epochs')}.steps"
            if key.endswith(".num_epochs") and other in named:
                raise RecipeError(
                    f"command line: {key}: this and {other} both set the training length; give exactly one"
                )
        if self.model.extensible and "extends" in named:
            raise RecipeError("command line: extends: 'extends' works only in files; start from that recipe instead")
        keys = apply_overrides(content, [(_whole_component(self.model, key), value) for key, value in overrides])
        return replace(self, content=content, overridden={*self.overridden, *keys})

    def part(
        self, model: type[C], key: str, content: Mapping[str, object], overridden: Collection[str] = ()
    ) -> Document[C]:
        """Create a document for nested content, keeping key locations for messages.

        ``overridden``: additional command line keys, named as in this document.
        """
        above = f"{key}."
        places = {name.removeprefix(above): line for name, line in self.places.items() if name.startswith(above)}
        set_there = {name.removeprefix(above) for name in {*self.overridden, *overridden} if name.startswith(above)}
        return Document(model, dict(content), self.place, places, set_there, is_own=False)

    def line_of(self, key: str) -> str:
        """Format the location prefix for a dotted key: ``file:line: `` (or the nearest parent's), or
        ``command line: ``.

        Sections created by command line overrides count as ``command line: `` with all their keys.
        """
        if any(f"{key}.".startswith(f"{name}.") for name in self.overridden):
            return "command line: "
        is_begun_there = any(name.startswith(f"{key}.") for name in self.overridden)
        if key and key not in self.places and is_begun_there:
            return "command line: "
        around = key
        while around and around not in self.places:
            around = around.rpartition(".")[0]
        if around:
            return f"{self.places[around]}: "
        return f"{self.place}: "

    def check(self) -> T:
        """Validate content. Component options are validated by ``resolve``.

        Raises:
            RecipeError: with file, line and key.
        """
        refuse_remote_code(self.content, self.overridden, self.line_of)
        try:
            content = self.model.model_validate(self.content)
        except ValidationError as error:
            raise RecipeError("\n".join(self._explain(item) for item in faults(error))) from None
        for broken, key, message in content.rules():
            if broken:
                raise RecipeError(f"{self.line_of(key)}{key}{message}")
        return content

    def _explain(self, item: Any) -> str:
        path = [str(part) for part in item["loc"]]
        key = ".".join(path)
        where = self.line_of(key)
        if key:
            where = f"{where}{key}: "
        what = self.model.label
        if path[:-1]:
            what = f"section {'.'.join(path[:-1])!r}"
        if item["type"] != "extra_forbidden":
            return f"{where}{registry.explain_fault(item, key, what, (), self._form_hint(item, path))}"
        known = known_keys(self.model, path[:-1])
        inner = next((name for name in self.overridden if name.startswith(f"{key}.")), key)  # trainer.total_epochs
        if inner != key and key not in GONE:
            meant = nearest(path[0], known)
            is_slip = meant is not None and inner.partition(".")[2] in known_keys(self.model, [meant])
            answer = ""
            if not is_slip:
                answer = answer_other_name(inner) or answer_spelling(inner)
            if answer:
                return f"{where}{what} has no key {inner!r}.{answer}"
        if len(path) == 1 and self.model.extensible and path != ["extends"]:
            known.append("extends")  # removed key in a file, reported by the time a recipe is validated
        inside = []
        if len(path) == 1:
            inside = [f"{name}.{key}" for name in known if key in known_keys(self.model, [name])]
        hint = ""
        if inside:
            hint = f" Did you mean {' or '.join(inside)}?"
        section, _, rest = path[0].partition(".")
        if rest and section in known:
            hint = f" Dotted keys work only on the command line; in a file write {section}: {{{rest}: ...}}."
        return f"{where}{registry.explain_fault(item, key, what, known, hint)}"

    def _form_hint(self, item: Any, path: Sequence[str]) -> str:
        """Suggest a key when text was given instead of a section."""
        if not isinstance(item["input"], str):
            return ""
        key = ".".join(path)
        if key == "data":
            return ". A file of rows is task.path (task jsonl or preferences)"
        own = known_keys(self.model, path)
        for word in ("name", "kind"):
            if word in own:
                return f". Did you mean {key}.{word}?"
        return ""


def _whole_component(model: type[BaseModel], key: str) -> str:
    """Map component names (``task.name``) to the whole component (``task``), so earlier options are replaced."""
    above = key.removesuffix(".name")
    if above == key:
        return key
    kind: type[BaseModel] | None = model
    for part in above.split("."):
        field = getattr(kind, "model_fields", {}).get(part.replace("-", "_"))
        kind = None
        if field is not None and get_origin(field.annotation) is not list:
            kind = _section_of(field)
    if kind is Component:
        return above
    return key


def known_keys(model: Any, path: Sequence[str]) -> list[str]:
    """List known keys for the section at ``path``; empty for anything else."""
    for part in path:
        if part.isdigit():  # list entries share the same keys
            continue
        field = getattr(model, "model_fields", {}).get(part)
        if field is None:
            return []
        model = _section_of(field)
    if model is None:
        return []
    return list(model.model_fields)


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Find a field's section type, including list and optional types; None for plain values."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _plain(value: object) -> Any:
    """Convert a section, component or value to plain data. See ``Content.dump``."""
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        if isinstance(value, Component):  # options were filled in by resolve
            values = value.model_dump(mode="json")
        else:
            values = {key: _plain(getattr(value, key)) for key in fields}
        return {k: v for k, v in values.items() if v is not None or k not in fields or fields[k].default is not None}
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def complete_component(component: Any, kind: str, where: str) -> Any:
    """Validate component options and fill in defaults."""
    entry = registry.find(kind, component.name, where)
    options = entry.options(component.options, where)
    fields = entry.options_model.model_fields
    options = {k: v for k, v in options.items() if v is not None or fields[k].default is not None}
    fixed = {name: getattr(component, name) for name in type(component).model_fields}
    return type(component)(**fixed, **json.loads(json.dumps(options)))


def decisive(dump: Mapping[str, object], above: str = "") -> dict[str, object]:
    """Drop ``PLACE_KEYS`` from plain recipe data."""
    kept = {key: value for key, value in dump.items() if f"{above}{key}" not in PLACE_KEYS}
    return {k: decisive(v, f"{above}{k}.") if isinstance(v, Mapping) else v for k, v in kept.items()}


def is_place(key: str) -> bool:
    """Check if a dotted key equals, or is nested under, an entry in ``PLACE_KEYS``."""
    return any(key == place or key.startswith(f"{place}.") for place in PLACE_KEYS)


def recipe_names(shelf: str = "") -> list[str]:
    """List shipped recipe names, such as ``tiny/grpo``, optionally within one ``shelf/``."""
    return [name for name in _shipped_names() if name.startswith(shelf)]


@cache
def _shipped_names() -> tuple[str, ...]:
    return tuple(sorted(path.relative_to(_SHIPPED).with_suffix("").as_posix() for path in _SHIPPED.rglob("*.yaml")))


def interpretation_names(section: str | None = None) -> list[str]:
    """List shipped `posttrain sae` recipes, optionally limited to recipes with ``section``."""
    sections: tuple[str, ...] = INTERPRETATION
    if section is not None:
        sections = (section,)
    wanted = tuple(f"{key}:" for key in sections)
    names = []
    for name in recipe_names():
        _, text = recipe_text(name)
        # text search, because parsing every recipe is slow
        if any(line.startswith(wanted) for line in text.splitlines()):
            names.append(name)
    return names


def recipe_text(name_or_path: str, shelf: str = "") -> tuple[str, str]:
    """Load (place, text) for a recipe file or shipped recipe. Names on the ``shelf`` are suggested first.

    Raises:
        RecipeError: unknown file or name.
    """
    path = Path(name_or_path)
    kind = kind_of_file(path)
    if kind == "file":
        if path.suffix in (".jsonl", ".csv", ".parquet", ".gz"):
            raise RecipeError(f"{path}: this is a data file, not a recipe; use it as task.path in a recipe")
        return str(path), _read_file(path)
    known = recipe_names()
    if path.suffix in (".yaml", ".yml") or (kind != "nothing" and name_or_path not in known):
        if kind == "nothing":
            what = "no such recipe file"
        elif kind_of_file(path / "recipe.yaml") == "file":
            what = f"this is a run folder; `posttrain runs resume {path.name}` continues it, and "
            what += f"{path / 'recipe.yaml'} is its recipe"
        else:
            what = f"this is a {kind}; give a recipe's YAML file, or a name"
        hint = ""
        if path.suffix and str(path.with_suffix("")) in known:
            hint = recipe_hint(str(path.with_suffix("")))
        raise RecipeError(f"{name_or_path}: {what}.{hint} `posttrain recipes` lists shipped recipes")
    if name_or_path in GONE:
        raise RecipeError(f"the recipe {name_or_path!r} was removed. Use {GONE[name_or_path]}.")
    if name_or_path not in known:
        near = []
        if shelf:
            near = [name.removeprefix(shelf) for name in known if name.startswith(shelf)]
        sweep = ""
        if f"sweep/{name_or_path}" in known:
            sweep = f" Did you mean `posttrain sweep {name_or_path}`?"
        elsewhere = answer_other_name(name_or_path.rpartition("/")[2])
        hint = sweep or registry.suggest(name_or_path, near) or recipe_hint(name_or_path) or elsewhere
        raise RecipeError(f"no recipe file or shipped recipe {name_or_path!r}.{hint} `posttrain recipes` lists them")
    return f"{name_or_path}.yaml", (_SHIPPED / f"{name_or_path}.yaml").read_text(encoding="utf-8")


def recipe_hint(name: str, before: str = "") -> str:
    """Suggest full names for a recipe name without its folder, or for a typo: `` Did you mean tiny/grpo or rl/grpo?``.

    ``before``: command to print before each name.
    """
    known = [one for one in recipe_names() if not one.startswith("sweep/")]
    plain = name.lower().replace("_", "-")
    last = {one: one.rpartition("/")[2] for one in known}
    found = [one for one in known if last[one] == plain or one.startswith(f"{plain}/")]
    if not found:
        near = nearest(name, recipe_names())
        found = [one for one in known if one == near]
    if not found:
        near = nearest(name, last.values())
        found = [one for one in known if last[one] == near]
    if not found:
        return ""
    found.sort(key=lambda one: (not one.startswith("tiny/"), len(one)))
    shown = [repr(one) for one in found[:4]]
    if before:
        shown = [f"`{before}{one}`" for one in found[:4]]
    *others, final = shown
    if others:
        return f" Did you mean {', '.join(others)} or {final}?"
    return f" Did you mean {final}?"


def _read_file(path: Path) -> str:
    try:
        if path.stat().st_size > 4 * MAX_CHARS:
            raise RecipeError(f"{path}: larger than any recipe; give a file of at most {MAX_CHARS:,} characters")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: not a UTF-8 text file; save it as UTF-8") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}); give a readable file") from None


# Listing recipes and loading parents reads the same files repeatedly within a command.
_read_once = lru_cache(maxsize=128)(read_yaml)


def parse_yaml(text: str, place: str, *, is_own: bool = True) -> tuple[dict[str, Any], dict[str, int]]:
    """Parse a YAML mapping and record 1-based line numbers by dotted key.

    Code named in user files (``is_own``) is allowed, except for files stored in runs (``untrusted``).

    Raises:
        RecipeError: invalid YAML, not a mapping, duplicate keys, or unsupported values (``strict_yaml``).
    """
    data, lines = copy.deepcopy(_read_once(text, place))
    if not isinstance(data, dict):
        raise RecipeError(f"{place}: a recipe is a mapping of sections (model, task, objective, ...); write it as one")
    if is_own and kind_of_file(place) == "file" and not is_stored(place):
        declare_code(data, Path(place).parent, Path.cwd())
    return data, lines
