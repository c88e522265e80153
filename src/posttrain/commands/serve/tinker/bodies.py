"""JSON requests in the Tinker protocol. Unsupported features are rejected by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from posttrain.commands.serve.requests import MAX_ANSWERS, BadRequest, check_request
from posttrain.option_types import AnySize, Options, Tokens
from posttrain.training.stepwise.trainee import WHOLE, AdamStep, AdapterChoice

MAX_TOP = 128  # maximum top tokens per position
MAX_METADATA_CHARS = 20_000
Count = Annotated[int, Field(ge=0), AnySize()]  # order within a request
ShortText = Annotated[str, Field(max_length=1_000)]
UserNotes = Annotated[dict[str, Any], Field(max_length=100)]


class TinkerBody(Options):
    """Base class for requests. ``type`` repeats the endpoint and is ignored."""

    type: ShortText | None = None
    user_metadata: UserNotes | None = None

    @field_validator("user_metadata")
    @classmethod
    def _check_metadata(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and len(repr(value)) > MAX_METADATA_CHARS:
            raise PydanticCustomError("metadata", f"has more than {MAX_METADATA_CHARS:,} characters")
        return value


class OptimizerChoice(Options):
    """The optimizer of a new model."""

    type: Literal["adamw"] = "adamw"


class CreateSession(TinkerBody):
    """``POST /api/v1/create_session``. Client information is ignored."""

    tags: list[ShortText] = Field(default_factory=list, max_length=100)
    sdk_version: ShortText = ""
    project_id: ShortText | None = None
    display_name: ShortText | None = None


class OfSession(TinkerBody):
    """``POST /api/v1/session_heartbeat``."""

    session_id: ShortText


class CreateModel(OfSession):
    """``POST /api/v1/create_model``; without ``lora_config``, all weights are trainable."""

    model_seq_id: Count
    base_model: ShortText
    lora_config: AdapterChoice | None = None
    optimizer_config: OptimizerChoice = OptimizerChoice()

    @property
    def choice(self) -> AdapterChoice:
        """The adapter of the model, or none."""
        return self.lora_config or WHOLE


class OfModel(TinkerBody):
    """``POST /api/v1/get_info`` and ``unload_model``; others are executed in the order of ``seq_id``."""

    model_id: ShortText
    seq_id: Count | None = None


class OptimStep(OfModel):
    """``POST /api/v1/optim_step``."""

    adam_params: AdamStep


class SaveWeights(OfModel):
    """``POST /api/v1/save_weights``. ``ttl_seconds`` is ignored: saved states never expire."""

    path: ShortText | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False


class SaveForSampler(SaveWeights):
    """``POST /api/v1/save_weights_for_sampler``. Without a path, it starts a sampling session.

    ``kind``: "in flight" allows newer weights than saved; here they are identical.
    """

    sampling_session_seq_id: Count | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class LoadWeights(TinkerBody):
    """``POST /api/v1/load_weights``: into an existing or new model."""

    path: ShortText
    optimizer: bool
    model_id: ShortText | None = None
    seq_id: Count | None = None
    session_id: ShortText | None = None
    model_seq_id: Count | None = None
    base_model: ShortText | None = None
    optimizer_config: OptimizerChoice | None = None
    weights_access_token: None = None

    @model_validator(mode="after")
    def _check_target(self) -> LoadWeights:
        is_new = self.session_id is not None and self.model_seq_id is not None
        if is_new == (self.model_id is not None):
            raise PydanticCustomError("target", "give model_id, or session_id with model_seq_id")
        return self


class CreateSamplingSession(OfSession):
    """``POST /api/v1/create_sampling_session``: from base or saved weights."""

    sampling_session_seq_id: Count = 0
    base_model: ShortText | None = None
    model_path: ShortText | None = None


class OfPath(Options):
    """``POST /api/v1/weights_info``."""

    tinker_path: ShortText


class OfRequest(Options):
    """``POST /api/v1/retrieve_future`` and ``cancel_future``."""

    request_id: ShortText
    allow_metadata_only: bool = False


class PromptChunk(Options):
    """Prompt tokens."""

    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"


class TokenPrompt(Options):
    """A prompt split into chunks."""

    chunks: list[PromptChunk] = Field(max_length=10_000)

    @property
    def ids(self) -> tuple[int, ...]:
        """Concatenated tokens."""
        return tuple(token for chunk in self.chunks for token in chunk.tokens)


class TinkerSampling(Options):
    """Sampling options. ``stop`` None: stop at end tokens; empty list: only at ``max_tokens``."""

    max_tokens: Tokens | None = None
    seed: Annotated[int | None, Field(ge=0), AnySize()] = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(1.0, ge=0)
    top_k: int = Field(-1, ge=-1)
    top_p: float = Field(1.0, gt=0, le=1)

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, value: str | list[str] | list[int] | None) -> list[str] | list[int] | None:
        if isinstance(value, str):
            value = [value]
        if value is None:
            return None
        if len(value) > 64 or any(isinstance(one, str) and not 0 < len(one) <= 1_000 for one in value):
            raise PydanticCustomError("stop", "give up to 64 stop texts with 1 to 1000 characters, or ids")
        return value

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Stop texts."""
        return tuple(one for one in self.stop or () if isinstance(one, str))

    def stop_ids(self, ends: frozenset[int]) -> frozenset[int]:
        """Collect stop token ids; ``ends``: the model's end tokens."""
        if self.stop is None:
            return ends
        if not self.stop:
            return frozenset()
        return ends | {one for one in self.stop if isinstance(one, int)}


class SampleRequest(TinkerBody):
    """``POST /api/v1/asample``."""

    prompt: TokenPrompt
    sampling_params: TinkerSampling
    num_samples: int = Field(1, ge=1, le=MAX_ANSWERS)
    sampling_session_id: ShortText
    seq_id: Count = 0
    base_model: None = None
    model_path: None = None
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    topk_prompt_logprobs: int = Field(0, ge=0, le=MAX_TOP)
    topk_sample_logprobs: int = Field(0, ge=0, le=MAX_TOP)
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] | None = None


BodyT = TypeVar("BodyT", bound=Options)


def read_body(kind: type[BodyT], body: object) -> BodyT:
    """Parse a request from a JSON body.

    Raises:
        BadRequest: an unknown key or invalid value.
    """
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, not {type(body).__name__}")
    if kind is OptimStep and "optimizer_params" in body:
        raise BadRequest("optimizer_params: only AdamW is supported; give adam_params", "optimizer_params")
    return check_request(kind, body)
