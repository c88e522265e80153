"""Request formats for ``posttrain serve``, compatible with OpenAI and vLLM.

Unsupported options are rejected unless set to a neutral value. Unknown keys are rejected with a suggestion.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from posttrain.errors import UsageError
from posttrain.option_types import AnySize, Options, Tokens, check_plain
from posttrain.registry import suggest
from posttrain.untrusted import first_fault

MAX_BODY_BYTES = 1_000_000
MAX_ANSWERS = 256  # answers per request, over all prompts
MAX_MESSAGES = 1000
# Unsupported options with neutral values; null is neutral too.
NEUTRAL: dict[str, object] = (
    dict.fromkeys(("presence_penalty", "frequency_penalty", "top_logprobs"), 0)
    | dict.fromkeys(("length_penalty", "best_of"), 1)
    | dict.fromkeys(("use_beam_search", "skip_special_tokens", "include_stop_str_in_output", "echo"), False)
    | {"tools": [], "functions": [], "bad_words": [], "logit_bias": {}, "extra_args": {}, "suffix": ""}
    | {"modalities": ["text"], "response_format": {"type": "text"}, "parallel_tool_calls": True}
    | {"add_generation_prompt": True, "tool_choice": "none", "prompt_logprobs": None, "truncate_prompt_tokens": None}
)
# Options for accounts, queues and caches, which do not affect answers.
UNREAD = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "cache_salt"} | {
    "priority", "request_id", "spaces_between_special_tokens", "detokenize", "flat_logprobs"
}  # fmt: skip


class BadRequest(UsageError):
    """An invalid request. ``param``: offending key. ``code`` and ``status``: machine-readable error codes."""

    def __init__(
        self, message: str, param: str | None = None, code: str = "invalid_request", status: int = 400
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class FunctionTool(Options):
    """A tool. The model is not held to ``parameters``, a JSON schema, so ``strict`` is refused."""

    name: str = Field(pattern="^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class ToolOffer(Options):
    """A tool available to the model."""

    type: Literal["function"]
    function: FunctionTool


class ToolOptions(Options):
    """The tools of a request."""

    tools: list[ToolOffer] | None = None
    tool_choice: Literal["none", "auto"] | None = None

    @field_validator("tools")
    @classmethod
    def _check_names(cls, value: list[ToolOffer] | None) -> list[ToolOffer] | None:
        if value is None:
            return value
        names = [tool.function.name for tool in value]
        if len(set(names)) < len(names):
            raise PydanticCustomError("tools", f"two tools are named {max(names, key=names.count)!r}")
        return value

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Offered tools, exactly as sent by the client."""
        if self.tool_choice == "none" or self.tools is None:
            return []
        return [tool.model_dump(exclude_unset=True) for tool in self.tools]


class SamplingOptions(Options):
    """Sampling options shared by all endpoints. ``top_k`` 0 or −1: all tokens."""

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    min_tokens: int = Field(0, ge=0)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    n: int = Field(1, ge=1, le=MAX_ANSWERS)
    max_tokens: Tokens | None = None
    seed: Annotated[int | None, Field(ge=0), AnySize()] = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, value: str | list[str] | None) -> list[str]:
        texts: list[str] = []
        if isinstance(value, str):
            texts = [value]
        elif value is not None:
            texts = value
        if "" in texts:
            raise PydanticCustomError("stop", "an empty stop text would end answers immediately")
        if len(texts) > 16 or any(len(text) > 1000 for text in texts):
            raise PydanticCustomError("stop", "give up to 16 stop texts with up to 1000 characters")
        return texts


class OpenAIOptions(SamplingOptions):
    """Options of OpenAI's two endpoints."""

    model: str | None = None
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


class ChatRequest(OpenAIOptions, ToolOptions):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]] = Field(max_length=MAX_MESSAGES)  # read by ``Conversations``
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None


class CompletionRequest(OpenAIOptions):
    """``POST /v1/completions``: texts or token ids to continue."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: Literal[0] | None = None  # of the sampled tokens; the likeliest are not offered
    add_special_tokens: bool = True


class SamplingParams(SamplingOptions):
    """Sampling options of ``/inference/v1/generate``."""

    logprobs: Literal[0, 1] | None = None
    stream_options: ClassVar[None] = None
    return_token_ids: ClassVar[bool] = True
    return_tokens_as_token_ids: ClassVar[bool] = True


class GenerateRequest(Options):
    """``POST /inference/v1/generate``: token ids in, token ids out."""

    token_ids: list[int]
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    model: str | None = None
    stream: bool = False


class TokenizeRequest(ToolOptions):
    """``POST /tokenize``: raw text, or a conversation rendered with this server's template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, max_length=MAX_MESSAGES)
    add_special_tokens: bool = True


RequestT = TypeVar("RequestT", bound=Options)
Sampled = ChatRequest | CompletionRequest | SamplingParams


def read_request(kind: type[RequestT], body: object) -> RequestT:
    """Parse a request from a JSON body.

    Raises:
        BadRequest: an unknown key or invalid value.
    """
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, not {type(body).__name__}")
    _refuse_no_text(body)
    own = kind.model_fields
    for key in body.keys() - own.keys() - UNREAD:
        if key not in NEUTRAL:
            hint = suggest(key, [*own, *NEUTRAL])
            raise BadRequest(f"{key}: unknown key.{hint} Known: {', '.join(own)}", key, "unknown_key")
        if body[key] not in (None, NEUTRAL[key]):
            problem = f"{key}: not supported; remove it, or give {NEUTRAL[key]!r}"
            raise BadRequest(problem, key, "not_offered")
    return check_request(kind, {key: value for key, value in body.items() if key in own})


def check_request(kind: type[RequestT], content: object) -> RequestT:
    """Validate a request.

    Raises:
        BadRequest: the first invalid value, with key.
    """
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        key = None
        place = error.errors(include_url=False)[0]["loc"]
        if place:
            key = str(place[0])
        raise BadRequest(first_fault(error), key) from None


def _refuse_no_text(body: dict[str, object]) -> None:
    """Reject values that cannot be represented in a response.

    Raises:
        BadRequest: an unpaired surrogate, or a non-JSON number.
    """
    for key, value in body.items():
        try:
            check_plain(key)
        except PydanticCustomError as error:
            raise BadRequest(f"a key of the body, {key!r}: {error}") from None
        try:
            check_plain([value])
        except PydanticCustomError as error:
            raise BadRequest(f"{key}: {error}") from None
