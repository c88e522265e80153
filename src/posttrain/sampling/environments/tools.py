"""Tools: functions callable by a model. Signatures become schemas, and docstrings become descriptions."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, PydanticUserError, ValidationError, create_model
from pydantic_core import ErrorDetails

from posttrain.errors import UsageError

MAX_RESULT_CHARS = 16_384
_ARGUMENTS = re.compile(r"^Args:\s*$", re.MULTILINE)
_SECTION = re.compile(r"^\w[\w ]*:\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^ {1,8}(\w+)(?: \([^)]*\))?: *(.+)$", re.MULTILINE)


class ArgumentText(str):
    """Argument text not written as JSON; the parameter's type decides how it is parsed."""

    __slots__ = ()


class _Arguments(BaseModel):
    """Call arguments, refusing unknown ones."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class EnvironmentFailed(Exception):
    """Raised by environments for their own faults, such as an unavailable server. The episode is repeated."""


@dataclass(frozen=True)
class Tool:
    """A function callable by a model. Arguments follow ``schema``; ``function`` checks their types.

    ``schema``: OpenAI format, as in the ``tools`` of chat templates. ``method``: call the environment's method of
    this name instead of ``function``.
    """

    name: str
    schema: Mapping[str, Any]
    function: Callable[..., Any]
    method: bool = False

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(properties_of(self.schema))

    def read(self, values: Mapping[str, object] | str) -> dict[str, Any]:
        """Convert call arguments to the function's types. ``values``: a mapping, or raw text.

        Raises:
            ValueError: invalid arguments.
        """
        if isinstance(values, str):
            values = by_name(self.name, {name: self.is_text(name) for name in self.parameters}, values)
        values = {key: read_argument(value, self.is_text(key)) for key, value in values.items()}
        checked, faults = self.check(values)
        if faults:
            raise ValueError(f"{self.name}: {'; '.join(faults)}. It takes: {usage_of(self.schema)}")
        return checked

    def is_text(self, name: str) -> bool:
        """Return True for string parameters and unknown ones."""
        schema = properties_of(self.schema).get(name, {"type": "string"})
        return isinstance(schema, Mapping) and schema.get("type") == "string"

    def check(self, values: dict[str, object]) -> tuple[dict[str, Any], list[str]]:
        """Return the arguments and their faults. Only names are checked here."""
        parameters = self.schema["function"]["parameters"]
        takes_any = parameters.get("additionalProperties") not in (None, False)
        faults = []
        for name in values:
            if name not in self.parameters and not takes_any:
                faults.append(f"there is no argument {name!r}")
        for name in parameters.get("required", ()):
            if name not in values:
                faults.append(f"the argument {name!r} is missing")
        return values, faults


@dataclass(frozen=True)
class SignatureTool(Tool):
    """A tool made from a Python signature; ``arguments`` is its pydantic model."""

    arguments: type[BaseModel] = _Arguments

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(self.arguments.model_fields)

    def is_text(self, name: str) -> bool:
        fields = self.arguments.model_fields
        return name not in fields or fields[name].annotation is str

    def check(self, values: dict[str, object]) -> tuple[dict[str, Any], list[str]]:
        try:
            checked = self.arguments.model_validate(values)
        except ValidationError as error:
            return {}, [_explain(item) for item in error.errors()]
        return {name: getattr(checked, name) for name in self.parameters}, []


def read_argument(value: object, is_text: bool) -> object:
    """Parse an ``ArgumentText`` as JSON unless its parameter is a string."""
    if not isinstance(value, ArgumentText):
        return value
    if is_text:
        return str(value)
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return str(value)  # type validation reports the error


def usage_of(schema: Mapping[str, object]) -> str:
    """Format a tool schema's parameters and types as text."""
    parameters = [f"{name} ({_type_of(one)})" for name, one in properties_of(schema).items()]
    return ", ".join(parameters) or "nothing"


def by_name(tool: str, parameters: Mapping[str, bool], text: str) -> Mapping[str, object]:
    """Parse arguments by name from a JSON object, or from a bare value if there is a single parameter.

    Args:
        tool: tool name for messages.
        parameters: maps each name to True for strings.

    Raises:
        ValueError: invalid JSON, or a bare value without exactly one parameter.
    """
    if text.startswith("{"):
        try:
            return json.loads(text)  # always an object
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{tool}: its arguments are no JSON ({error})") from None
    if not text and not parameters:
        return {}
    if len(parameters) != 1:
        names = ", ".join(f'"{name}": ...' for name in parameters)
        raise ValueError(f"{tool}: give its arguments as {{{names}}}")
    ((name, is_text),) = parameters.items()
    return {name: read_argument(ArgumentText(text), is_text)}


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Extract parameters from a tool schema, which may be untrusted."""
    parameters = schema["function"].get("parameters")
    if isinstance(parameters, Mapping) and isinstance(parameters.get("properties"), Mapping):
        properties: Mapping[str, Any] = parameters["properties"]
        return properties
    return {}


def make_tool(function: Callable[..., Any], place: str, *, method: bool = False) -> SignatureTool:
    """Build a tool from a signature and docstring. ``place`` prefixes messages; ``method`` skips ``self``.

    Raises:
        UsageError: missing docstring, missing type, or a type without a JSON representation.
    """
    name = function.__name__
    place = f"{place}, tool {name!r}"
    doc = inspect.getdoc(function) or ""
    if not doc.strip():
        raise UsageError(f"{place}: docstring missing; describe this tool to the model")
    try:
        signature = inspect.signature(function, eval_str=True)
    except (NameError, SyntaxError, TypeError, ValueError) as error:
        raise UsageError(f"{place}: its types cannot be read ({error}); import them in that module") from None
    parameters = list(signature.parameters.values())
    if method:
        parameters = parameters[1:]
    fields: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            raise UsageError(f"{place}: {parameter} cannot be passed by keyword; use named parameters")
        if parameter.annotation is inspect.Parameter.empty:
            raise UsageError(
                f"{place}: parameter {parameter.name!r} lacks a type; annotate it, for example {parameter.name}: int"
            )
        default = parameter.default
        if default is inspect.Parameter.empty:
            default = ...
        fields[parameter.name] = (parameter.annotation, default)
    try:
        arguments = create_model(name, __base__=_Arguments, **fields)
        schema = arguments.model_json_schema()
    except (PydanticUserError, NameError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{place}: its types cannot be described to a model ({reason}); use plain ones") from None
    description, values = _read_docstring(doc)
    function_schema = {"name": name, "description": description, "parameters": _plain_schema(schema, values)}
    return SignatureTool(name, {"type": "function", "function": function_schema}, function, method, arguments)


def result_text(result: object) -> str:
    """Format a tool's result for a model: strings unchanged, else JSON, else ``str``."""
    if isinstance(result, str):
        text = result
    else:
        try:
            text = json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            text = str(result)
    return shortened(text.encode("utf-8", "backslashreplace").decode(), MAX_RESULT_CHARS)


def shortened(text: str, limit: int) -> str:
    """Truncate text after ``limit`` characters."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]} ... (cut off)"


def _read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Split a Google-style docstring into description and argument descriptions."""
    start = _ARGUMENTS.search(doc)
    description = doc
    arguments = ""
    if start:
        description = doc[: start.start()]
        arguments = doc[start.end() :]
    heading = _SECTION.search(description)
    if heading:
        description = description[: heading.start()]
    end = _SECTION.search(arguments)
    if end:
        arguments = arguments[: end.start()]
    return description.strip(), dict(_ARGUMENT.findall(arguments))


def _plain_schema(schema: Mapping[str, Any], described: Mapping[str, str]) -> dict[str, Any]:
    """Build an argument schema with descriptions, without pydantic titles."""
    plain = {key: value for key, value in schema.items() if key not in ("title", "description", "additionalProperties")}
    properties = {}
    for name, one in schema.get("properties", {}).items():
        kept = {key: value for key, value in one.items() if key != "title"}
        if name in described:
            kept["description"] = described[name]
        properties[name] = kept
    plain["properties"] = properties
    return plain


def _type_of(schema: object) -> str:
    if not isinstance(schema, Mapping):
        return "anything"
    if isinstance(schema.get("enum"), list):
        return "one of " + ", ".join(map(str, schema["enum"]))
    if isinstance(schema.get("anyOf"), list):
        return " or ".join(_type_of(one) for one in schema["anyOf"])
    kind = schema.get("type", "anything")
    if isinstance(kind, list):
        return " or ".join(map(str, kind))
    return str(kind)


def _explain(item: ErrorDetails) -> str:
    name = ".".join(str(part) for part in item["loc"]) or "the arguments"
    if item["type"] == "extra_forbidden":
        return f"there is no argument {name!r}"
    if item["type"] == "missing":
        return f"the argument {name!r} is missing"
    return f"{name}: {item['msg']}"


def describe_tools(schemas: Iterable[Mapping[str, Any]]) -> str:
    """Describe tools and the call format for chat templates without tool support."""
    lines = [
        "You can use tools. To call one, write <tool>name: arguments</tool> and end your turn; its result follows "
        "between <result> and </result>. Arguments are a JSON object, or the plain value of the only one."
    ]
    for schema in schemas:
        name = schema["function"]["name"]
        about = " ".join((schema["function"].get("description") or "").split())
        lines.append(f"- {name}: {about} It takes: {usage_of(schema)}.")
    return "\n".join(lines)
