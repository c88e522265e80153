"""What clients say to ``posttrain serve`` and are answered: requests and answers of OpenAI and of vLLM, as plain data.

An option that would change an answer and that this server does not have is refused by its name, unless it is given the
value at which it changes nothing; a key that is not known is refused with a suggestion."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from posttrain.commands.serve.speech import Scored, Speech
from posttrain.errors import PosttrainError, UsageError
from posttrain.option_types import AnySize, Options, Tokens, check_plain
from posttrain.registry import suggest
from posttrain.types import Message

MOST_ANSWERS = 256  # of one request, over all its prompts
Answers = Annotated[int, Field(ge=1, le=MOST_ANSWERS)]
TokenIds = list[int]
# What this server does not do, with the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "length_penalty": (None, 1),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "logit_bias": (None, {}),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "use_beam_search": (None, False),
    "skip_special_tokens": (None, False),
    "include_stop_str_in_output": (None, False),
    "prompt_logprobs": (None,),
    "truncate_prompt_tokens": (None,),
    "bad_words": (None, []),
    "extra_args": (None, {}),
    "add_generation_prompt": (None, True),
}
# What concerns someone else: accounts, queues, the memory of a server.
UNREAD = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "cache_salt",
    "priority",
    "request_id",
    "parallel_tool_calls",
    "spaces_between_special_tokens",
    "detokenize",
    "flat_logprobs",
)


class BadRequest(UsageError):
    """A request that cannot be answered. ``param``: its key; ``code`` and ``status``: for programs."""

    def __init__(
        self, message: str, param: str | None = None, code: str = "invalid_request", status: int = 400
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


class Text(Options):
    """A part of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(Options):
    """What is called: ``arguments`` is the text of a JSON object; OpenAI's client may add what it read in it."""

    name: str
    arguments: str
    parsed_arguments: Any = None


class ToolCall(Options):
    """A call in a message of the assistant; ``index`` is there where it came in a stream."""

    id: str = Field(min_length=1)
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


class Turn(Options):
    """A message; ``developer`` is what OpenAI calls the system. Answers that come back hold keys that are null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Text] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: None = None
    parsed: None = None

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("role", "tool_calls stand in messages of the assistant")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise PydanticCustomError("role", "a message of the role tool, and no other, has a tool_call_id")
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("content", "content is required where nothing is called")
        return self

    @property
    def is_about_tools(self) -> bool:
        """Whether it calls a tool, or says what came of that."""
        return self.role == "tool" or bool(self.tool_calls)

    @property
    def text(self) -> str:
        """Its content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())

    def message(self) -> Message:
        """The same as a message of ours."""
        return Message("system" if self.role == "developer" else self.role, self.text)


class Function(Options):
    """A tool by its name; ``parameters`` is a JSON schema. The model is not held to it, so ``strict`` is refused."""

    name: str = Field(pattern="^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class ToolOffer(Options):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class Offering(Options):
    """Which tools there are, and whether they may be called."""

    tools: list[ToolOffer] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that may be called, as the client wrote them.

        Raises:
            BadRequest: two of one name, or one call at most.
        """
        if self.tools and self.parallel_tool_calls is False:
            raise BadRequest("parallel_tool_calls: a turn may hold several calls; leave it out", "parallel_tool_calls")
        functions = [tool.function for tool in self.tools or ()]
        names: set[str] = set()
        for n, function in enumerate(functions):
            if function.name in names:
                raise BadRequest(f"tools.{n}: there is a tool named {function.name!r} already", "tools")
            names.add(function.name)
        schemas = [
            {key: getattr(function, key) for key in Function.model_fields if key in function.model_fields_set}
            for function in functions
        ]
        return [] if self.tool_choice == "none" else [{"type": "function", "function": schema} for schema in schemas]


class StreamOptions(Options):
    """``include_usage``: the last event counts the tokens."""

    include_usage: bool = False


class Drawing(Options):
    """How tokens are drawn: what every endpoint shares. ``top_k`` 0 or −1: all tokens."""

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    n: Answers = 1
    seed: Annotated[int | None, Field(ge=0), AnySize()] = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool = False

    @property
    def stops(self) -> list[str]:
        """The texts that end an answer."""
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if "" in texts:
            raise BadRequest("stop: an empty text would end every answer at once", "stop")
        return texts


class Asking(Drawing):
    """What the two endpoints of OpenAI share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


class ChatRequest(Asking, Offering):
    """``POST /v1/chat/completions``."""

    messages: list[Turn]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)


class CompletionRequest(Asking):
    """``POST /v1/completions``: text or token ids to continue, one or several."""

    prompt: str | TokenIds | list[str] | list[TokenIds]
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    add_special_tokens: bool = True


class SamplingParams(Drawing):
    """How ``/inference/v1/generate`` is told to draw."""

    max_tokens: Tokens | None = None
    logprobs: int | None = Field(None, ge=0, le=20)


class GenerateRequest(Options):
    """``POST /inference/v1/generate``: token ids in, token ids out."""

    token_ids: TokenIds
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    model: str | None = None
    stream: bool = False


class TokenizeRequest(Offering):
    """``POST /tokenize``: a text as it is, or a conversation as this server's template writes it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Turn] | None = None
    add_special_tokens: bool = True


Request = TypeVar("Request", bound=Options)


def read_request(kind: type[Request], body: Any) -> Request:
    """The request in the JSON of a body.

    Raises:
        BadRequest: a key that is not known, or a value that this server cannot take.
    """
    if not isinstance(body, dict):
        raise BadRequest(f"the body is JSON, but {type(body).__name__} and not an object")
    try:
        check_plain(body)
    except (PydanticCustomError, RecursionError) as error:
        raise BadRequest(f"the body holds what is no plain text or number ({error})") from None
    own = kind.model_fields
    for key, value in body.items():
        if key in own or key in UNREAD:
            continue
        if key not in NEUTRAL:
            hint = suggest(key, [*own, *NEUTRAL])
            raise BadRequest(f"{key}: there is no such key here.{hint} Known: {', '.join(own)}", key, "unknown_key")
        if value not in NEUTRAL[key]:
            neutral = " or ".join(repr(one) for one in NEUTRAL[key][1:]) or "null"
            raise BadRequest(
                f"{key}: this server does not do that; leave it out, or give {neutral}", key, "not_offered"
            )
    try:
        return kind.model_validate({key: value for key, value in body.items() if key in own})
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise BadRequest(f"{place}: {first['msg']}", str(first["loc"][0]) if first["loc"] else None) from None


def error_body(error: PosttrainError) -> tuple[int, dict[str, Any]]:
    """(HTTP status, the error as OpenAI writes it)."""
    status, param, code = 500, None, None
    if isinstance(error, BadRequest):
        status, param, code = error.status, error.param, error.code
    elif isinstance(error, UsageError):
        status, code = 400, "invalid_request"
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


# How answers are written down: the forms of OpenAI's two endpoints and of vLLM's ``/inference/v1/generate``.


@dataclass(frozen=True)
class Names:
    """How tokens are called in an answer: by their text, or ``token_id:5``."""

    tokenizer: Any
    as_ids: bool = False

    def __call__(self, token: int) -> str:
        return f"token_id:{token}" if self.as_ids else str(self.tokenizer.decode([token]))


@dataclass(frozen=True)
class Form(ABC):
    """One endpoint's form; ``names`` None: no log-probabilities were asked for. ``with_ids``: token ids were.

    ``kind`` and ``part_kind`` are what the whole answer and an event of a stream are called, ``prefix`` begins an id.
    """

    request_id: str
    created: int
    model: str
    names: Names | None = None
    with_ids: bool = False
    kind: ClassVar[str] = ""
    part_kind: ClassVar[str] = ""
    prefix: ClassVar[str] = ""

    @abstractmethod
    def choice(self, speech: Speech, scored: Sequence[Scored | None], prompt: Sequence[int]) -> dict[str, Any]:
        """A whole answer."""

    @abstractmethod
    def event(self, text: str, token: Scored | None) -> dict[str, Any]:
        """What a token adds to an answer; without a token, how it begins."""

    def around(self, choices: Sequence[Mapping[str, Any]], *, is_part: bool = False) -> dict[str, Any]:
        """What stands around choices."""
        kind = self.part_kind if is_part else self.kind
        head = {"id": self.request_id, "object": kind, "created": self.created, "model": self.model}
        return head | {"choices": list(choices)}

    def _chat_logprobs(self, scored: Sequence[Scored | None]) -> dict[str, Any] | None:
        if self.names is None:
            return None
        return {"content": [_entry(self.names, token) for token in scored if token is not None]}


class ChatForm(Form):
    """``/v1/chat/completions``."""

    kind, part_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def choice(self, speech: Speech, scored: Sequence[Scored | None], prompt: Sequence[int]) -> dict[str, Any]:
        """A message."""
        message = {"role": "assistant", "content": speech.text, "refusal": None}
        ids = {"token_ids": speech.ids, "prompt_token_ids": list(prompt)} if self.with_ids else {}
        return {"message": message, "logprobs": self._chat_logprobs(scored), **ids}

    def event(self, text: str, token: Scored | None) -> dict[str, Any]:
        """A piece of a message; its role at first."""
        role = {"role": "assistant"} if token is None else {}
        ids = {"token_ids": [token.id]} if self.with_ids and token is not None else {}
        logprobs = None if token is None else self._chat_logprobs([token])
        return {"delta": {**role, "content": text}, "logprobs": logprobs, **ids}


class CompletionForm(Form):
    """``/v1/completions``."""

    kind, part_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def choice(self, speech: Speech, scored: Sequence[Scored | None], prompt: Sequence[int]) -> dict[str, Any]:
        """A text; ``scored`` holds the tokens of an echoed prompt too."""
        echoed = [*prompt, *speech.ids][-len(scored) :] if scored else []
        ids = {"token_ids": speech.ids, "prompt_token_ids": list(prompt)} if self.with_ids else {}
        return {"text": speech.text, "logprobs": self._logprobs(scored, echoed), **ids}

    def event(self, text: str, token: Scored | None) -> dict[str, Any]:
        """A piece of a text."""
        ids = {"token_ids": [token.id]} if self.with_ids and token is not None else {}
        logprobs = None if token is None else self._logprobs([token], [token.id])
        return {"text": text, "logprobs": logprobs, **ids}

    def _logprobs(self, scored: Sequence[Scored | None], ids: Sequence[int]) -> dict[str, Any] | None:
        name = self.names
        if name is None:
            return None
        names = [name(token) for token in ids]
        offsets = list(accumulate(map(len, names), initial=0))[:-1]
        likely = [None if token is None else {name(i): number for i, number in token.likely} for token in scored]
        return {
            "tokens": names,
            "token_logprobs": [None if token is None else token.logprob for token in scored],
            "top_logprobs": likely if any(likely) else None,
            "text_offset": offsets,
        }


class GenerateForm(Form):
    """``/inference/v1/generate``: token ids, always with what is known of them."""

    prefix = "generate-"

    def choice(self, speech: Speech, scored: Sequence[Scored | None], prompt: Sequence[int]) -> dict[str, Any]:
        """Ids."""
        return {"token_ids": speech.ids, "logprobs": self._chat_logprobs(scored)}

    def event(self, text: str, token: Scored | None) -> dict[str, Any]:
        """An id."""
        if token is None:
            return {"token_ids": [], "logprobs": None}
        return {"token_ids": [token.id], "logprobs": self._chat_logprobs([token])}

    def around(self, choices: Sequence[Mapping[str, Any]], *, is_part: bool = False) -> dict[str, Any]:
        """What stands around choices."""
        return {"request_id": self.request_id, "choices": list(choices), "prompt_logprobs": None}


def _entry(name: Names, token: Scored) -> dict[str, Any]:
    def one(index: int, logprob: float) -> dict[str, Any]:
        return {"token": name(index), "logprob": logprob, "bytes": None}

    return one(token.id, token.logprob) | {"top_logprobs": [one(*pair) for pair in token.likely]}


def usage(prompts: Sequence[Sequence[int]], num_sampled: int) -> dict[str, int]:
    """How many tokens were read and written."""
    read = sum(len(prompt) for prompt in prompts)
    return {"prompt_tokens": read, "completion_tokens": num_sampled, "total_tokens": read + num_sampled}
