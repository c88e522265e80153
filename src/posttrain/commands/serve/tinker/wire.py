"""Protobuf messages in the Tinker protocol: rows and losses in, log-probabilities out.

Field numbers and types match client ``tinker`` 0.38. Tensors are little-endian bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.commands.serve.requests import BadRequest
from posttrain.training.stepwise.datums import TARGETS, Datum
from posttrain.types import Finish

PROTOBUF = "application/x-protobuf"
# Descriptor type numbers for scalar types used in the table below.
_SCALARS = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "message": 11, "bytes": 12, "uint32": 13}
_OPTIONAL, _REPEATED = 1, 3
# Message fields as (name, number, type, repeated). A message name can serve as type; ``map:`` is a map with text keys.
# A suffix after a slash names the field's oneof.
_MESSAGES: dict[str, tuple[tuple[str, int, str, bool], ...]] = {
    "SparseCsr": (
        ("values", 1, "bytes", False),
        ("crow_indices", 2, "bytes", False),
        ("col_indices", 3, "bytes", False),
    ),
    "Tensor": (
        ("dense/encoding", 1, "bytes", False),
        ("sparse_csr/encoding", 2, "SparseCsr", False),
        ("dtype", 3, "int32", False),
        ("shape", 4, "int64", True),
    ),
    "EncodedTextChunk": (("tokens", 1, "bytes", False),),
    "OtherChunk": (),
    "Chunk": (
        ("encoded_text/chunk", 1, "EncodedTextChunk", False),
        ("image/chunk", 2, "OtherChunk", False),
        ("dmel/chunk", 3, "OtherChunk", False),
    ),
    "Datum": (("model_input", 1, "Chunk", True), ("loss_fn_inputs", 2, "map:Tensor", True)),
    "LossConfigValue": (("number/value", 1, "double", False), ("text/value", 2, "string", False)),
    "ForwardBackwardRequest": (
        ("model_id", 1, "string", False),
        ("seq_id", 2, "int32", False),
        ("data", 3, "Datum", True),
        ("loss_fn", 4, "string", False),
        ("loss_fn_config", 5, "map:double", True),
        ("forward_only", 6, "bool", False),
        ("loss_fn_config_v2", 7, "map:LossConfigValue", True),
    ),
    "BatchedTensor": (
        ("data", 1, "bytes", False),
        ("offsets", 2, "bytes", False),
        ("dtype", 3, "int32", False),
        ("trailing_shape", 4, "int64", True),
    ),
    "ArrayRecord": (
        ("type_tag", 1, "string", False),
        ("fields", 2, "map:BatchedTensor", True),
        ("num_datums", 3, "int64", False),
    ),
    "ForwardBackwardOutput": (
        ("loss_fn_output_type", 1, "string", False),
        ("loss_fn_outputs", 2, "ArrayRecord", True),
        ("metrics", 3, "map:double", True),
    ),
    "TopkLogprobs": (
        ("token_ids", 1, "bytes", False),
        ("logprobs", 2, "bytes", False),
        ("k", 3, "uint32", False),
        ("length", 4, "uint32", False),
    ),
    "SampledSequence": (
        ("stop_reason", 1, "int32", False),
        ("tokens", 2, "bytes", False),
        ("logprobs", 3, "bytes", False),
        ("topk_sampled_logprobs", 4, "TopkLogprobs", False),
    ),
    "SampleResponse": (
        ("sequences", 1, "SampledSequence", True),
        ("prompt_logprobs", 2, "bytes", False),
        ("topk_prompt_logprobs", 3, "TopkLogprobs", False),
        ("prompt_cache_hit_tokens", 4, "int32", False),
    ),
}
_FLOAT32, _INT64 = 1, 2
_NUMPY: dict[int, np.dtype[Any]] = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8")}
_STOP_REASONS = {"stop": 0, "length": 1}
_MASKED = -99999.0  # padding in a top-token table
MAX_CELLS = 1 << 22  # elements in a sparse tensor
MAX_ALL_CELLS = 1 << 24  # elements in all sparse tensors of a request, which take few bytes until read
MAX_DATUMS = 4_096  # rows in a request


@dataclass(frozen=True, slots=True)
class LossRequest:
    """``POST /api/v1/forward_backward``: rows, a loss name and loss options."""

    model_id: str
    seq_id: int
    loss: str
    options: Mapping[str, float | str]
    datums: Sequence[Datum]
    learns: bool


@dataclass(frozen=True, slots=True)
class TopTokens:
    """Top-K tokens at each of T positions: ids ``int64 [T, K]``, log-probabilities ``float32 [T, K]``."""

    ids: Tensor
    logprobs: Tensor

    def behind(self, places: int) -> TopTokens:
        """Prepend empty positions."""
        width = self.ids.shape[1]
        none = torch.full((places, width), _MASKED)
        return TopTokens(
            torch.cat([torch.zeros(places, width, dtype=torch.long), self.ids]), torch.cat([none, self.logprobs])
        )


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One sampled answer."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    finish: Finish
    top: TopTokens | None = None


@dataclass(frozen=True, slots=True)
class SampleResult:
    """Answers to a prompt; prompt_logprobs ``float32 [N]``, NaN if unavailable."""

    sequences: Sequence[SampledTokens]
    prompt_logprobs: Tensor | None = None
    top_of_prompt: TopTokens | None = field(default=None)


def read_loss_request(content: bytes) -> LossRequest:
    """Parse a request from bytes.

    Raises:
        BadRequest: a malformed message, or a row without text.
    """
    from google.protobuf.message import DecodeError

    message = empty_message("ForwardBackwardRequest")
    try:
        message.ParseFromString(content)
    except (DecodeError, RecursionError):
        raise BadRequest("the body is not a ForwardBackwardRequest in protocol buffers", code="no_protobuf") from None
    if not 1 <= len(message.data) <= MAX_DATUMS:
        raise BadRequest(f"data: {len(message.data):,} rows; give 1 to {MAX_DATUMS:,}", "data")
    _check_sparse_size(message)
    options: dict[str, float | str] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        options[key] = value.number
        if value.WhichOneof("value") == "text":
            options[key] = value.text
    datums = [_read_datum(datum, f"data.{number}") for number, datum in enumerate(message.data)]
    learns = not message.forward_only
    return LossRequest(message.model_id, message.seq_id, message.loss_fn, options, datums, learns)


def _check_sparse_size(message: Any) -> None:
    """Bound the memory of all sparse tensors in a request before any is read.

    Raises:
        BadRequest: too many elements.
    """
    cells = 0
    for number, datum in enumerate(message.data):
        for name in sorted(datum.loss_fn_inputs):
            tensor = datum.loss_fn_inputs[name]
            if tensor.WhichOneof("encoding") == "sparse_csr":
                cells += math.prod(abs(size) for size in tensor.shape)
            if cells > MAX_ALL_CELLS:
                where = f"data.{number}.{name}"
                raise BadRequest(
                    f"{where}: sparse tensors up to here have {cells:,} cells; a request may have {MAX_ALL_CELLS:,}. "
                    "Send fewer rows in a request",
                    "data",
                )


def _read_datum(datum: Any, where: str) -> Datum:
    ids: list[int] = []
    for chunk in datum.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise BadRequest(f"{where}.model_input: only tokens are supported, not images or audio", "data")
        ids += _numbers(chunk.encoded_text.tokens, np.dtype("<i4"), f"{where}.model_input").tolist()
    inputs: dict[str, Tensor] = {}
    for name in sorted(datum.loss_fn_inputs):
        inputs[name] = _read_tensor(datum.loss_fn_inputs[name], f"{where}.{name}")
    if TARGETS not in inputs:
        raise BadRequest(f"{where}.{TARGETS}: missing", "data")
    targets = inputs.pop(TARGETS)
    if targets.is_floating_point():
        raise BadRequest(f"{where}.{TARGETS}: token ids are int64, not float32", "data")
    return Datum(tuple(ids), targets, {name: values.float() for name, values in inputs.items()})


def _read_tensor(tensor: Any, where: str) -> Tensor:
    """Return a tensor, dense; what a sparse one does not name is 0."""
    if tensor.dtype not in _NUMPY:
        raise BadRequest(f"{where}: type number {tensor.dtype}; give float32 ({_FLOAT32}) or int64 ({_INT64})", "data")
    kind = _NUMPY[tensor.dtype]
    shape = tuple(tensor.shape)
    if any(size < 0 for size in shape) or len(shape) > 2:
        raise BadRequest(f"{where}: shape {shape}; give one or two non-negative sizes", "data")
    if tensor.WhichOneof("encoding") == "sparse_csr":
        return _read_sparse(tensor.sparse_csr, kind, shape, where)
    values = _numbers(tensor.dense, kind, where)
    if not shape:
        shape = values.shape
    if int(np.prod(shape, dtype=object)) != values.size:
        raise BadRequest(f"{where}: {values.size} numbers do not have the shape {shape}", "data")
    return torch.from_numpy(values.reshape(shape).copy())


def _read_sparse(sparse: Any, kind: np.dtype[Any], shape: tuple[int, ...], where: str) -> Tensor:
    values = _numbers(sparse.values, kind, where)
    ends = _numbers(sparse.crow_indices, _NUMPY[_INT64], where)
    columns = _numbers(sparse.col_indices, _NUMPY[_INT64], where)
    if len(shape) != 2 or shape[0] * shape[1] > MAX_CELLS:
        raise BadRequest(f"{where}: sparse tensors must be 2D with up to {MAX_CELLS:,} cells, not {shape}", "data")
    counts = np.diff(ends)
    fits = len(ends) == shape[0] + 1 and len(values) == len(columns)
    fits = fits and ends[0] == 0 and ends[-1] == len(values) and bool((counts >= 0).all())
    if not fits or bool((columns < 0).any() | (columns >= shape[1]).any()):
        raise BadRequest(f"{where}: row and column indices do not match values and shape {shape}", "data")
    dense = np.zeros(shape, kind)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return torch.from_numpy(dense)


def _numbers(content: bytes, kind: np.dtype[Any], where: str) -> Any:
    if len(content) % kind.itemsize:
        raise BadRequest(f"{where}: {len(content)} bytes is not a multiple of {kind.itemsize} bytes per value", "data")
    return np.frombuffer(content, kind)


def write_loss_result(logprobs: Sequence[Tensor], metrics: Mapping[str, float]) -> bytes:
    """Encode a loss response: target ``logprobs`` ``[N]`` or ``[N, K]`` per row."""
    message = empty_message("ForwardBackwardOutput")
    message.loss_fn_output_type = "ArrayRecord"
    message.metrics.update(metrics)
    start = 0
    while start < len(logprobs):  # rows in a record have equal width
        end = start + 1
        while end < len(logprobs) and logprobs[end].shape[1:] == logprobs[start].shape[1:]:
            end += 1
        record = message.loss_fn_outputs.add()
        record.type_tag = "ArrayRecord"
        record.num_datums = end - start
        own = [one.numpy().astype(_NUMPY[_FLOAT32]) for one in logprobs[start:end]]
        table = record.fields["logprobs"]
        table.data = b"".join(one.tobytes() for one in own)
        table.offsets = np.cumsum([0, *(one.nbytes for one in own)]).astype(_NUMPY[_INT64]).tobytes()
        table.dtype = _FLOAT32
        table.trailing_shape.extend(own[0].shape[1:])
        start = end
    return bytes(message.SerializeToString())


def write_samples(drawn: SampleResult) -> bytes:
    """Encode a sampling response."""
    message = empty_message("SampleResponse")
    for sequence in drawn.sequences:
        written = message.sequences.add()
        written.stop_reason = _STOP_REASONS[sequence.finish]
        written.tokens = np.asarray(sequence.ids, "<i4").tobytes()
        written.logprobs = np.asarray(sequence.logprobs, "<f4").tobytes()
        if sequence.top is not None:
            _write_top(written.topk_sampled_logprobs, sequence.top)
    if drawn.prompt_logprobs is not None:
        message.prompt_logprobs = drawn.prompt_logprobs.numpy().astype("<f4").tobytes()
    if drawn.top_of_prompt is not None:
        _write_top(message.topk_prompt_logprobs, drawn.top_of_prompt)
    return bytes(message.SerializeToString())


def _write_top(message: Any, top: TopTokens) -> None:
    message.length, message.k = top.ids.shape
    message.token_ids = top.ids.numpy().astype("<i4").tobytes()
    message.logprobs = top.logprobs.numpy().astype("<f4").tobytes()


def empty_message(name: str) -> Any:
    """Create an empty message."""
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"tinker.{name}"))()


@cache
def _pool() -> Any:
    """Build descriptors for all messages, isolated from an installed client's protobuf package."""
    from google.protobuf import descriptor_pb2, descriptor_pool

    file = descriptor_pb2.FileDescriptorProto(name="tinker_wire.proto", package="tinker", syntax="proto3")
    for name, fields in _MESSAGES.items():
        described = file.message_type.add(name=name)
        for label, number, kind, several in fields:
            _describe_field(described, label, number, kind, several)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def _describe_field(described: Any, label: str, number: int, kind: str, several: bool) -> None:
    name, _, group = label.partition("/")
    added = described.field.add(name=name, number=number, label=_REPEATED if several else _OPTIONAL)
    if kind.startswith("map:"):
        entry = described.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _describe_field(entry, "key", 1, "string", several=False)
        _describe_field(entry, "value", 2, kind.removeprefix("map:"), several=False)
        kind = f"{described.name}.{entry.name}"
    added.type = _SCALARS.get(kind, _SCALARS["message"])
    if added.type == _SCALARS["message"]:
        added.type_name = f".tinker.{kind}"
    if group:
        groups = [one.name for one in described.oneof_decl]
        if group not in groups:
            described.oneof_decl.add(name=group)
            groups.append(group)
        added.oneof_index = groups.index(group)
