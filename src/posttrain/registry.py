"""Component registry: signatures are schemas.

Decorators register functions by name under a kind (objective, reward, task, ...). The trainer passes positional
parameters; keyword-only parameters become recipe keys, with their types and defaults. Names like ``module:function``
are imported if written by the user (``untrusted``). Component modules are imported on first use; torch is never
imported here.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from posttrain.components import ComponentModules
from posttrain.errors import (
    GONE,
    PosttrainError,
    RecipeError,
    RunFailure,
    UnallowedCode,
    UnknownComponent,
    UsageError,
    nearest,
)
from posttrain.other_names import OTHER_NAMES, answer_component, answer_other_name, answer_spelling, answer_value
from posttrain.untrusted import declare_code, is_declared, prepare_import

# pydantic is imported only for reading recipe options; component functions work without it.
if TYPE_CHECKING:
    from pydantic import ValidationError

    from posttrain.option_types import Options

# Kinds are declared here; ``components`` finds definitions.
ALL_KINDS = (
    "objective",
    "advantage",
    "aggregation",
    "selection",
    "correction",
    "mask",
    "environment",
    "reward",
    "grader",
    "template",
    "task",
    "engine",
    "optimizer",
    "batch_field",
    "tracker",
    "dictionary",
)
_MODULES = ComponentModules()
_KEYS_OF_LISTED = {"rewards": "weight", "masks": "divisor"}  # component lists, given beside their options


LEAST_LETTERS_OF_SLIP = 6  # limit for names checked against other libraries


Made = TypeVar("Made")


@dataclass(frozen=True)
class Entry:
    """Registered function. ``traits`` are declared during registration, such as ``needs`` (batch fields it reads)."""

    kind: str
    name: str
    function: Callable[..., Any]
    traits: Mapping[str, Any]

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.function) or ""

    @property
    def provided(self) -> tuple[str, ...]:
        """Names of the positional parameters."""
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return tuple(p.name for p in inspect.signature(self.function).parameters.values() if p.kind in kinds)

    @cached_property  # pydantic takes milliseconds
    def options_model(self) -> type[Options]:
        """Build a pydantic model from keyword-only parameters, forbidding unknown keys.

        Raises:
            RecipeError: an annotation is invalid or cannot be evaluated.
        """
        from pydantic import PydanticUserError, create_model

        from posttrain.option_types import Options

        try:
            signature = inspect.signature(self.function, eval_str=True)
        except (NameError, SyntaxError, TypeError, ValueError) as error:
            raise RecipeError(
                f"{self.kind} {self.name!r}: an annotation cannot be evaluated ({error}); import the type in that "
                "module, outside of `if TYPE_CHECKING`"
            ) from error
        fields: dict[str, Any] = {}
        for parameter in signature.parameters.values():
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                continue
            annotation = parameter.annotation
            if annotation is inspect.Parameter.empty:
                annotation = Any
            default = parameter.default
            if default is inspect.Parameter.empty:
                default = ...
            fields[parameter.name] = (annotation, default)
        try:
            return create_model(f"{self.kind}_{self.name}", __base__=Options, **fields)
        except (PydanticUserError, NameError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise RecipeError(
                f"{self.kind} {self.name!r}: its options cannot be read; give them types ({reason})"
            ) from error

    def options(self, options: Mapping[str, object], where: str = "") -> dict[str, Any]:
        """Validate options and fill in defaults.

        Raises:
            RecipeError: an unknown key (with a suggestion), a wrong type or a missing option.
            UnknownComponent: an option (trait ``components``) names a nonexistent component.
        """
        from pydantic import ValidationError

        model = self.options_model
        place = where or self.kind
        for key in options:
            gone = GONE.get(f"{self.name}.{key}") or GONE.get(f"{self.kind}.{key}")
            if gone and key not in model.model_fields:
                raise RecipeError(f"{place}.{key}: this key was removed. Use {gone}.")
        try:
            checked = model.model_validate(dict(options), context={"where": place})
        except ValidationError as error:
            label = f"{self.kind} {self.name!r}"
            own = ["name"]
            own += [key for above, key in _KEYS_OF_LISTED.items() if where.startswith(above)]
            known = [*(key for key in own if key not in options), *model.model_fields]
            raise RecipeError(explain_validation(error, known, place, label)) from None
        filled = {name: getattr(checked, name) for name in model.model_fields}
        above = ""
        if where:
            above = f"{where}."
        for key, kind in self.traits.get("components", {}).items():
            _check_component(filled[key], kind, f"{above}{key}")
        complete = self.traits.get("complete")
        if complete is None:
            return filled
        return complete(filled, place)

    def bind(self, options: Mapping[str, object], where: str = "") -> partial[Any]:
        """Bind options to the function; parameters called ``where`` receive the recipe key."""
        place = {}
        if "where" in self.provided:
            place = {"where": where or self.kind}
        return partial(self.function, **self.options(options, where), **place)


def _check_component(value: str | Mapping[str, object], kind: str, where: str) -> None:
    """Refuse values other than ``auto`` or known components."""
    if value == "auto":
        return
    component: dict[str, object] = {}
    if isinstance(value, str):
        component["name"] = value
    else:
        component.update(value)
    if "name" not in component:
        raise RecipeError(f"{where}: a {kind} has a name and maybe options; got {value!r}")
    find(kind, str(component.pop("name")), where).options(component, where)


_ENTRIES: dict[str, dict[str, Entry]] = {kind: {} for kind in ALL_KINDS}


def register(
    kind: str, *, name: str | None = None, **traits: object
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function by name under ``kind``.

    Raises:
        RecipeError: another module already uses this name.
    """
    assert kind in ALL_KINDS, f"unknown kind {kind!r}"

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        entry = Entry(kind, name or function.__name__, function, traits)
        known = _ENTRIES[kind].get(entry.name)
        home = _MODULES[kind].get(entry.name, function.__module__)
        if known is not None:
            home = known.function.__module__
        if home != function.__module__:
            raise RecipeError(
                f"{function.__module__}: {kind} {entry.name!r} is a component of {home}; give yours another name"
            )
        _ENTRIES[kind][entry.name] = entry
        return function

    return add


def entries(kind: str) -> dict[str, Entry]:
    """List a kind's entries alphabetically, importing their modules."""
    for module in dict.fromkeys(_MODULES[kind].values()):
        importlib.import_module(module)
    return dict(sorted(_ENTRIES[kind].items()))


def built_in(kind: str) -> list[str]:
    """List the package's component names for a kind in source order, without imports."""
    return list(_MODULES[kind])


def names(kind: str) -> list[str]:
    """List all component names for a kind alphabetically, without imports."""
    return sorted({*_MODULES[kind], *_ENTRIES[kind]})


def is_built_in(entry: Entry) -> bool:
    """Check if a component belongs to the package."""
    return entry.name in _MODULES[entry.kind]


def find(kind: str, name: str, where: str = "") -> Entry:
    """Look up ``name`` under ``kind``, importing only its module.

    Raises:
        UnknownComponent: no such name; the message lists known names and the nearest.
        UnallowedCode: a ``module:function`` that was not allowed.
    """
    if ":" in name:
        return import_component(kind, name, where)
    if name not in _ENTRIES[kind] and name in _MODULES[kind]:
        importlib.import_module(_MODULES[kind][name])
    if name not in _ENTRIES[kind]:
        place = ""
        if where:
            place = f"{where}: "
        if name in GONE:
            raise UnknownComponent(f"{place}the {kind} {name!r} was removed. Use {GONE[name]}.")
        known = names(kind)
        hint = answer_component(kind, name) or suggest(name, known)
        if kind == "task" and name.endswith((".jsonl", ".jsonl.gz")):
            hint = f" Rows of your own are {where or 'task'} jsonl, with the file as {where or 'task'}.path."
        raise UnknownComponent(
            f"{place}there is no {kind} named {name!r}.{hint} "
            f"Known: {', '.join(known)}; or give module:function to use your own."
        )
    return _ENTRIES[kind][name]


def takes_one(function: Callable[..., object]) -> bool:
    """Check if a function accepts a single argument. Without a signature, assume True, except for classes."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return not isinstance(function, type)
    try:
        signature.bind(None)
    except TypeError:
        return False
    return True


def traits_of(kind: str, name: str) -> Mapping[str, object] | None:
    """Look up traits; None for unallowed code.

    Raises:
        UnknownComponent: no such name.
    """
    if not is_declared(name):
        return None
    return find(kind, name).traits


def kinds_of(name: str) -> list[Entry]:
    """Find entries called ``name`` under any kind."""
    return [find(kind, name) for kind in ALL_KINDS if name in names(kind)]


def import_component(kind: str, path: str, where: str) -> Entry:
    """Import ``module:function`` as a component.

    Raises:
        UnallowedCode: not allowed.
        UnknownComponent: import failed.
    """
    module_name, _, attribute = path.partition(":")
    place = ""
    if where:
        place = f"{where}: "
    if is_lost(path):
        what = "this function was given by a Python session and is in no file"
        raise UnallowedCode(f"{place}{kind} {path!r}: {what}. Put it into a file, and train with that")
    prepare_import(path, f"{place}{kind} ")
    if path in _FUNCTIONS:
        given = _FUNCTIONS[path]
        for entry in _ENTRIES.get(kind, {}).values():
            if entry.function is given:
                return entry
        return Entry(kind, path, given, {})
    try:
        module = _import_until_call(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's module may raise anything, SystemExit too; the cause is kept
        if isinstance(error, ImportError):
            reason = str(error)
        else:
            reason = f"{type(error).__name__}: {error}"
        what = f"module {module_name!r} cannot be imported ({reason}); give one that can"
        raise UnknownComponent(f"{place}{kind} {path!r}: {what}") from error
    for entry in _ENTRIES.get(kind, {}).values():
        if entry.function.__module__ == module.__name__ and entry.function.__name__ == attribute:
            return entry  # already registered, including traits
    named = getattr(module, attribute, None)
    if not callable(named):
        from posttrain.option_types import shorten

        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise UnknownComponent(
            f"{place}{kind} {path!r}: {module_name} has no function {shorten(attribute)}.{suggest(attribute, names)} "
            "Give one that is there"
        )
    return Entry(kind, path, named, {})


SESSION = "python_session"  # placeholder module for functions without a file
_FUNCTIONS: dict[str, Callable[..., Any]] = {}  # functions passed by Python code
_IS_IMPORTING: ContextVar[bool] = ContextVar("is_importing", default=False)


class CalledWhileImported(BaseException):
    """Stops an import: the module called a ``posttrain.api`` function, having defined everything above that call."""


def stop_import() -> None:
    """Raise ``CalledWhileImported`` while importing a module for its functions."""
    if _IS_IMPORTING.get():
        raise CalledWhileImported


def _import_until_call(name: str) -> ModuleType:
    """Import a module; a script that trains when it runs is read up to there."""
    spec = None
    if name not in sys.modules:
        spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        return importlib.import_module(name)
    token = _IS_IMPORTING.set(True)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except CalledWhileImported:
        pass
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        _IS_IMPORTING.reset(token)
    return module


def session_functions(text: str) -> list[str]:
    """Find session functions named in recipe YAML."""
    return sorted(set(re.findall(rf"{SESSION}:\w+", text)))


def is_lost(path: str) -> bool:
    """Check if a name refers to another Python session's function."""
    return path.startswith(f"{SESSION}:") and path not in _FUNCTIONS


def name_function(function: Callable[..., Any]) -> str:
    """Name a function ``module:function`` and allow it; from now on this name means this function.

    Other processes import its file. Functions without a file (notebooks, lambdas, nested functions) become
    ``python_session:NAME``, known only to this process.
    """
    for path, known in _FUNCTIONS.items():
        if known is function:
            return path
    name = getattr(function, "__name__", "")
    module = sys.modules.get(getattr(function, "__module__", ""))
    file = getattr(module, "__file__", None)
    code = getattr(inspect.unwrap(function), "__code__", None)
    called = getattr(module, "__name__", "")
    spec = getattr(module, "__spec__", None)
    if called == "__main__":
        called = Path(file or "").stem
        if spec is not None:
            called = spec.name
        is_other = getattr(sys.modules.get(called), "__file__", file) != file
        if is_other or code is None or not Path(code.co_filename).is_file():
            file = None  # this name means another module, or the code comes from a notebook
    if file is None or getattr(module, name, None) is not function or not called.replace(".", "").isidentifier():
        plain = f"function_{len(_FUNCTIONS) + 1}"
        if name.isidentifier():
            plain = name
        path = f"{SESSION}:{plain}"
        declare_code(path)
    else:
        path = f"{called}:{name}"
        levels = called.count(".")
        if Path(file).stem == "__init__":
            levels += 1
        declare_code(path, Path(file).resolve().parents[levels])
    _FUNCTIONS[path] = function
    return path


def call(where: str, function: Callable[..., Any], *arguments: object) -> Any:
    """Call a component; ``where`` is its recipe key.

    Raises:
        RunFailure: it raised anything except a posttrain error.
    """
    with failures_of(where):
        return function(*arguments)


@contextmanager
def failures_of(where: str) -> Iterator[None]:
    """Name the failing component for errors raised in this block; ``where`` is its recipe key.

    Raises:
        RunFailure: it raised anything except a posttrain error.
    """
    try:
        yield
    except PosttrainError:
        raise
    except (Exception, SystemExit) as error:  # a user's function may raise anything; the cause is kept
        raise RunFailure(f"{where}: the function raised {type(error).__name__}: {error}") from error


def construct(where: str, function: Callable[..., Any], kind: type[Made], *arguments: object) -> Made:
    """Call a component constructing a ``kind`` object; ``where`` is its recipe key.

    Raises:
        RunFailure: it raised anything except a posttrain error.
        UsageError: it returned another type.
    """
    made = call(where, function, *arguments)
    if isinstance(made, kind):
        return made
    raise UsageError(
        f"{where}: the function returned {describe_result(made)}. Return an object of {kind.__module__}.{kind.__name__}"
    )


def describe_result(value: object) -> str:
    """Describe a tensor like ``shape (2, 4)``, anything else by type name."""
    if hasattr(value, "shape"):
        return f"shape {tuple(value.shape)}"
    return type(value).__name__


def suggest(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?``, or nothing."""
    near = nearest(name, known)
    if not near:
        return ""
    return f" Did you mean {near!r}?"


def suggest_key(name: str, known: Iterable[str]) -> str:
    """Suggest a replacement for an unknown key, option or argument; empty if nothing fits.

    Priority: exact names from other libraries, similar posttrain names, similar names from other libraries.
    """
    answer = answer_other_name(name) or suggest(name, known) or answer_spelling(name)
    if answer or len(name) < LEAST_LETTERS_OF_SLIP:
        return answer
    slip = nearest(name, OTHER_NAMES)
    if not slip:
        return ""
    if set(name.split("_")) < set(slip.split("_")):  # strict_async_level, for strict
        return ""
    return f" Did you mean {slip!r}?{answer_other_name(slip)}"


def explain_validation(error: ValidationError, known: Iterable[str], where: str, label: str) -> str:
    """Format a pydantic error, one line per problem: place, cause, remedy."""
    from posttrain.option_types import faults

    lines = []
    for item in faults(error):
        location = ".".join(str(part) for part in item["loc"])
        if where and location:
            key = f"{where}.{location}"
        else:
            key = where or location
        lines.append(f"{key}: {explain_fault(item, key, label, list(known))}")
    return "\n".join(lines)


def explain_fault(item: Mapping[str, Any], key: str, label: str, known: Sequence[str], hint: str = "") -> str:
    """Explain an invalid key in section ``label``, given its ``known`` keys."""
    from posttrain.option_types import explain_type

    if item["type"] == "missing":
        return f"{label} needs this key"
    if item["type"] != "extra_forbidden":
        return f"{explain_type(item['msg'], item['input'])}{hint or answer_value(key, item['input'])}"
    if key in GONE:
        return f"this key was removed. Use {GONE[key]}."
    last = str(item["loc"][-1])
    answer = answer_other_name(key)
    if answer:
        return f"{label} has no key {last!r}.{answer}"
    return f"{label} has no key {last!r}.{hint or suggest_key(last, known)} Known keys: {', '.join(known)}"
