"""Recipe key types: bounded plain values, server addresses, rules for sending keys."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from posttrain.errors import UsageError, hide_secrets
from posttrain.other_names import short_dtype
from posttrain.strict_yaml import OldTruth
from posttrain.untrusted import cut_end

LARGEST_COUNT = 10**9
_SHOWN_CHARS = 100
_SHOWN_CHARS_WITH_TYPE = 80
_MAX_SHOWN_BITS = 128
_WORD = re.compile(r"Input should be a valid dictionary or instance of \w*Component\b")
_SECTION = re.compile(r"Input should be a valid dictionary( or instance of \w+)?")
_LIST = re.compile(r"\ba valid (list|tuple)\b")
_LENGTH = re.compile(r"(?:List|Tuple) (should have at \w+ \d+ items?) after validation")
# pydantic inserts the attempted union member into error locations.
_TRIED = re.compile(r"(?:str|int|float|bool|(?:list|dict|tuple|literal|function-\w+)\[.*)")


class AnySize:
    """Marker: integer without upper bound."""


class Unread:
    """Marker: plain data, read as a recipe later."""


# Random seed; any nonnegative integer works.
Seed = Annotated[int, Field(ge=0), AnySize()]
# Rows, prompts or samples held in memory simultaneously.
Few = Annotated[int, Field(ge=1, le=65_536)]
# How often something is done, each time with another seed.
Repetitions = Annotated[int, Field(ge=1, le=1000)]
# Text length.
Tokens = Annotated[int, Field(ge=1, le=10_000_000)]
# Stop texts; a single string is accepted too.
StopTexts = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=1000)]],
    Field(max_length=16),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]
# Number formats; torch names are accepted too.
Dtype = Annotated[Literal["fp32", "bf16"], BeforeValidator(short_dtype)]


class Options(BaseModel):
    """Strictly typed keys: values JSON cannot express, or of an accidental type, are refused.

    Booleans are not numbers. Texts must be encodable as UTF-8. Integers are limited to ±``LARGEST_COUNT``, unless
    typed ``Seed``.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)

    @field_validator("*", mode="before")
    @classmethod
    def _check_plain(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        field = cls.model_fields[info.field_name]
        held = _types(field.annotation).union(map(type, field.metadata))
        if Unread in held:
            return value
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and not held & {float, str, Any, AnySize} and abs(value) > LARGEST_COUNT:
            raise _too_large()
        if not any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in held):
            check_plain(value)
        if bool not in held and held & {int, float} and Any not in held and _holds(value, bool):
            raise PydanticCustomError("truth", "Input should be a number, and true and false are none")
        if Any in held and _holds(value, OldTruth):
            raise PydanticCustomError("old_truth", "Input should be true or false, or text in quotes, not yes or no")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _check_size(cls, value: object, info: ValidationInfo) -> object:
        assert info.field_name is not None
        field = cls.model_fields[info.field_name]
        marked = any(isinstance(item, AnySize) for item in field.metadata)
        numbers = [value]
        if isinstance(value, list | tuple):
            numbers = list(value)
        if not marked and any(type(number) is int and abs(number) > LARGEST_COUNT for number in numbers):
            raise _too_large()
        return value


def _too_large() -> PydanticCustomError:
    return PydanticCustomError("size", f"Input should be at most {LARGEST_COUNT:,}")


def check_plain(value: object) -> None:
    """Refuse invalid Unicode and non-JSON numbers inside free-form values.

    Raises:
        PydanticCustomError: pydantic adds the key.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise PydanticCustomError(
                "surrogate", "Input should be text; this holds half of a surrogate pair"
            ) from None
    elif isinstance(value, dict | list | tuple):
        inside = list(value)
        if isinstance(value, dict):
            inside += value.values()
        for held in inside:
            check_plain(held)
            if isinstance(held, float) and not math.isfinite(held):
                raise PydanticCustomError("finite", "Input should be a finite number")


def _holds(value: object, kind: type) -> bool:
    if isinstance(value, dict):
        return any(_holds(held, kind) for held in value.values())
    if isinstance(value, list | tuple):
        return any(_holds(held, kind) for held in value)
    return isinstance(value, kind)


def _types(annotation: object) -> set[object]:
    """Collect types used in an annotation."""
    if isinstance(annotation, Unread):
        return {Unread}
    found: set[object] = set()
    if isinstance(annotation, type) or annotation is Any:
        found.add(annotation)
    for item in get_args(annotation):
        found |= _types(item)
    return found


def faults(error: ValidationError) -> Iterator[dict[str, Any]]:
    """Yield pydantic errors (``loc``, ``type``, ``msg``, ``input``), merging attempts at union members.

    For each union, keeps the deepest errors, else lists all allowed types. Missing items are reported on their list.
    """
    tried: dict[Any, list[dict[str, Any]]] = {}
    for fault in map(dict[str, Any], error.errors()):
        loc = fault["loc"]
        if fault["type"] == "missing" and type(loc[-1]) is int:
            items = "item"
            if loc[-1] > 0:
                items = "items"
            few = f"Input should have at least {loc[-1] + 1} {items}"
            fault |= {"loc": loc[:-1], "type": "too_short", "msg": few}
        cut = _place_of_type(loc, fault["type"])
        if cut is None:
            tried[len(tried)] = [fault]
        else:
            fault["loc"] = loc[:cut] + loc[cut + 1 :]
            tried.setdefault(loc[:cut], []).append(fault)
    for same_value in tried.values():
        depth = max(len(fault["loc"]) for fault in same_value)
        deepest = [fault for fault in same_value if len(fault["loc"]) == depth]
        if len({fault["loc"] for fault in deepest}) < len(deepest):
            messages = [_SECTION.sub("Input should be a section of keys", fault["msg"]) for fault in deepest]
            first, *others = dict.fromkeys(messages)
            alternatives = [first, *(other.removeprefix("Input should be ") for other in others)]
            yield deepest[0] | {"msg": " or ".join(alternatives)}
        else:
            yield from deepest


def _place_of_type(loc: Sequence[object], kind: str) -> int | None:
    """Find the index of the attempted union member in an error location; None without unions."""
    places = loc
    if kind == "extra_forbidden":  # such a key may be called as a type is
        places = loc[:-1]
    for at, part in enumerate(places):
        if at and _TRIED.fullmatch(str(part)):
            return at
    return None


def explain_type(message: str, value: object) -> str:
    """Combine pydantic's message with the value, or its kind and size if large.

    Messages from whole-section rules omit the value.
    """
    if message.startswith("Value error, "):
        rule = message.removeprefix("Value error, ")
        if isinstance(value, dict):
            return rule
        return f"{rule}; got {describe_value(value)}"
    message = _WORD.sub("Input should be a name or a section", message)
    message = _SECTION.sub("Input should be a section of keys", message)
    message = _LENGTH.sub(r"Input \1", message)
    message = _LIST.sub("a list ([a, b])", message)
    hint = ""
    if value == "None":
        hint = ". No value is null"
    return f"{message}; got {describe_value(value)}{hint}"


def describe_value(value: object) -> str:
    """Describe ``value`` briefly: mappings by keys, long lists by length."""
    if isinstance(value, dict):
        if not value:
            return "an empty section"
        keys = ", ".join(map(written, value))
        return f"a section with the keys {keys}"[:_SHOWN_CHARS]
    if isinstance(value, list) and len(written(value)) > _SHOWN_CHARS:
        return f"a list of {len(value)} values"
    return shorten(value)


def shorten(value: object) -> str:
    """Format ``value`` like Python, eliding the middle if long.

    Objects from user classes become ``<Name>``, since their ``__repr__`` could fail.
    """
    text = written(value)
    if len(text) <= _SHOWN_CHARS:
        return text
    half = _SHOWN_CHARS // 2
    return f"{text[:half]} ... {text[-half:]}"


def shown_with_type(value: object) -> str:
    """Format ``value`` (at most 80 characters) plus type: ``'seven' (str)``."""
    if type(value) is int and value.bit_length() > _MAX_SHOWN_BITS:  # Python refuses to write thousands of digits
        text = f"an integer of {value.bit_length()} bits"
    else:
        text = written(value)
    return f"{cut_end(text, _SHOWN_CHARS_WITH_TYPE)} ({type(value).__name__})"


def written(value: object) -> str:
    """Compute ``repr(value)`` for plain values, and for standard library, numpy, torch or posttrain objects."""
    kind = type(value)
    if kind is dict and isinstance(value, dict):
        pairs = [f"{written(key)}: {written(held)}" for key, held in value.items()]
        return f"{{{', '.join(pairs)}}}"
    if kind is list and isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    if kind is tuple and isinstance(value, tuple):
        if len(value) == 1:
            return f"({written(value[0])},)"
        return f"({', '.join(map(written, value))})"
    package = kind.__module__.partition(".")[0]
    is_known = package in sys.stdlib_module_names and package != "__main__"
    if is_known or package in ("numpy", "torch", "posttrain"):
        return repr(value)
    return f"<{kind.__name__}>"


LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*\.?")
_PATH = re.compile(r"[!-~]*")


def server_address(
    url: str, where: str = "engine.url", variable: str = "VLLM_API_KEY"
) -> tuple[str, str, int | None, str]:
    """Parse a server URL into (scheme, host, port, path prefix), dropping a trailing ``/v1``.

    Error messages mention ``where`` (the key) and ``variable`` (for secret keys).

    Raises:
        UsageError: not an http or https URL.
    """
    if "@" in url or hide_secrets(url) != url:  # looked for first: a message about the port would show a password
        raise UsageError(
            f"{where}: {shorten(hide_secrets(url))}: a name, password or key in a URL would be written down with "
            f"it; write it like http://127.0.0.1:8000, and put a key into the environment variable {variable}"
        )
    try:
        parts = urlsplit(url.strip())
        scheme = parts.scheme
        host = parts.hostname or ""
        port = parts.port
    except ValueError as error:
        raise _no_url(url, where, variable, f" ({error})") from None
    is_address = ":" in host and parts.netloc.rpartition("@")[2].startswith("[")
    is_server = scheme in ("http", "https") and (is_address or _HOST.fullmatch(host)) and port != 0
    if not is_server or parts.query or parts.fragment or not _PATH.fullmatch(parts.path) or not url.isprintable():
        raise _no_url(url, where, variable)
    return scheme, host, port, parts.path.rstrip("/").removesuffix("/v1")


def key_for(url: str, where: str, variable: str) -> str | None:
    """Read the secret key from ``variable`` if the server at ``url`` may receive it.

    Recipes from strangers can name arbitrary servers, so keys go only to this machine or to hosts listed in the
    environment (``JUDGE_API_HOST`` for ``JUDGE_API_KEY``, comma-separated).

    Raises:
        UsageError: the key is set, but not allowed for this host.
    """
    key = os.environ.get(variable)
    host = server_address(url, where, variable)[1]
    allowed = f"{variable.removesuffix('_KEY')}_HOST"
    allowed_hosts = [name.strip() for name in os.environ.get(allowed, "").split(",")]
    if not key or host in LOOPBACK or host in allowed_hosts:
        return key
    raise UsageError(
        f"{where}: {url}: {variable} holds a key, and a recipe alone sends it to no server; "
        f"if it may go there, set {allowed}={host}, else unset {variable}"
    )


def checked_url(url: str, about: ValidationInfo) -> str:
    """Validate a server URL without secrets, safe to store in recipes, records and results.

    Raises:
        UsageError: not a server URL, or it contains credentials.
    """
    section = "engine"
    if about.context is not None:
        section = about.context.get("where", section)
    server_address(url, f"{section}.{about.field_name}")
    return url


ServerUrl = Annotated[str, AfterValidator(checked_url)]


def _no_url(url: str, where: str, variable: str, reason: str = "") -> UsageError:
    return UsageError(
        f"{where}: {shorten(hide_secrets(url))} is no server's URL{reason}; write it like http://127.0.0.1:8000 "
        f"(a key belongs into the environment variable {variable})"
    )
