"""Tools: functions that a model may call. The signature is the schema, the docstring the description."""

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
    """The text of an argument that was not written as JSON: its type is that of the parameter."""

    __slots__ = ()


class _Arguments(BaseModel):
    """The arguments of a call; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class EnvironmentFailed(Exception):
    """Raised by an environment that is itself at fault (its server is down): the episode is played again."""


@dataclass(frozen=True)
class Tool:
    """A tool that a model may call; its arguments are those in its ``schema``, whose types ``function`` checks.

    ``schema``: in the form of OpenAI's and the chat templates' ``tools``. ``method``: the environment's method of this
    name is called, otherwise ``function`` itself.
    """

    name: str
    schema: Mapping[str, Any]
    function: Callable[..., Any]
    method: bool = False

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(properties_of(self.schema))

    def read(self, values: Mapping[str, object] | str) -> dict[str, Any]:
        """Return the arguments of a call in the function's types; ``values``: by name, or the text of the only one.

        Raises:
            ValueError: they do not fit.
        """
        if isinstance(values, str):
            values = by_name(self.name, {name: self.is_text(name) for name in self.parameters}, values)
        values = {key: read_argument(value, self.is_text(key)) for key, value in values.items()}
        checked, faults = self.check(values)
        if faults:
            raise ValueError(f"{self.name}: {'; '.join(faults)}. It takes: {usage_of(self.schema)}")
        return checked

    def is_text(self, name: str) -> bool:
        """Return True for a parameter that is a text, and for one that the tool does not have."""
        schema = properties_of(self.schema).get(name, {"type": "string"})
        return isinstance(schema, Mapping) and schema.get("type") == "string"

    def check(self, values: dict[str, object]) -> tuple[dict[str, Any], list[str]]:
        """Return the arguments and what is wrong with them: here only their names are looked at."""
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
    """A tool whose ``arguments`` are those of a Python function."""

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
    """Return the value of an argument: an ``ArgumentText`` of a parameter that is no text is read as JSON."""
    if not isinstance(value, ArgumentText):
        return value
    if is_text:
        return str(value)
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return str(value)  # the check of types says what is wrong with it


def usage_of(schema: Mapping[str, object]) -> str:
    """Return the parameters in a tool's schema with their types, for a reader."""
    parameters = [f"{name} ({_type_of(one)})" for name, one in properties_of(schema).items()]
    return ", ".join(parameters) or "nothing"


def by_name(tool: str, parameters: Mapping[str, bool], text: str) -> Mapping[str, object]:
    """Return arguments by name, from a JSON object, or from the bare value of the only one.

    Args:
        tool: its name, for messages.
        parameters: True for each that is a text.

    Raises:
        ValueError: no JSON, or a bare value for a tool that takes another number of arguments.
    """
    if text.startswith("{"):
        try:
            return json.loads(text)  # what begins so is an object
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
    """Return the parameters in a tool's schema, which may be of any origin."""
    parameters = schema["function"].get("parameters") or {}
    properties = parameters.get("properties")
    if isinstance(properties, Mapping):
        return properties
    return {}


def make_tool(function: Callable[..., Any], place: str, *, method: bool = False) -> SignatureTool:
    """Make a tool from a signature and docstring; ``place`` begins messages. A ``method`` has ``self`` first.

    Raises:
        UsageError: a parameter without a type, or of one that JSON has no value for; no docstring.
    """
    name = function.__name__
    place = f"{place}, tool {name!r}"
    doc = inspect.getdoc(function) or ""
    if not doc.strip():
        raise UsageError(f"{place}: it has no docstring, which the model reads; write what the tool does")
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
            raise UsageError(f"{place}: {parameter} cannot be given by name; name each parameter")
        if parameter.annotation is inspect.Parameter.empty:
            raise UsageError(
                f"{place}: parameter {parameter.name!r} has no type; annotate it, as in {parameter.name}: int"
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
    """Return a tool's result for the model: text as it is, anything else as JSON or as Python prints it."""
    if isinstance(result, str):
        text = result
    else:
        try:
            text = json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            text = str(result)
    return shortened(text.encode("utf-8", "backslashreplace").decode(), MAX_RESULT_CHARS)


def shortened(text: str, limit: int) -> str:
    """Return the text, cut off after ``limit`` characters."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]} ... (cut off)"


def _read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Return (description, descriptions of the arguments) of a docstring in Google's form."""
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
    """Return the JSON schema of the arguments, with their descriptions and without pydantic's titles."""
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
    """Describe the tools, and how to call them, to a model whose chat template has no tools."""
    lines = [
        "You can use tools. To call one, write <tool>name: arguments</tool> and end your turn; its result follows "
        "between <result> and </result>. Arguments are a JSON object, or the plain value of the only one."
    ]
    for schema in schemas:
        name = schema["function"]["name"]
        about = " ".join((schema["function"].get("description") or "").split())
        lines.append(f"- {name}: {about} It takes: {usage_of(schema)}.")
    return "\n".join(lines)
