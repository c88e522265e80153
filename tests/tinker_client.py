"""A client of `posttrain serve --train` that speaks the wire format of Tinker's protocol, without Tinker's package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.commands.serve.tinker import wire
from serving import Served

API = "/api/v1"
SAMPLE_KEYS = (  # of a request for samples, outside of its sampling_params
    "num_samples",
    "prompt_logprobs",
    "prompt_logprobs_last_n",
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
)
Rows = Sequence[tuple[Sequence[int], dict[str, Tensor]]]  # token ids, and the inputs of the loss


@dataclass
class TinkerClient:
    """A session with one model; every request of it has the next number."""

    served: Served
    session: str = ""
    model: str = ""
    number: int = 0
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.session = self.post("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"})[
            "session_id"
        ]

    def ask(self, path: str, body: Any) -> tuple[int, Any]:
        """(status, JSON) of an answer."""
        return self.served.ask(f"{API}/{path}", body, **self.headers)

    def post(self, path: str, body: Any) -> Any:
        """The JSON of an answer that is no error."""
        status, answer = self.ask(path, body)
        assert status == 200, answer
        return answer

    def keep(self, promise: dict[str, Any]) -> Any:
        """The answer to a request: JSON, or bytes."""
        while True:
            status, content = self.served.fetch(
                f"{API}/retrieve_future", {"request_id": promise["request_id"]}, **self.headers
            )
            if status != 408:
                break
        assert status == 200, content
        if content[:1] == b"{":
            return json.loads(content)
        return content

    def create(self, rank: int | None = 4, number: int = 0, **more: Any) -> None:
        """Create the model; ``rank`` None trains all weights."""
        body: dict[str, Any] = {"session_id": self.session, "model_seq_id": number, "base_model": "tiny"}
        if rank is not None:
            body["lora_config"] = {"rank": rank, "seed": 1}
        self.model = self.keep(self.post("create_model", body | more))["model_id"]

    def numbered(self, endpoint: str, /, **body: Any) -> Any:
        """The answer to a request of the model."""
        self.number += 1
        return self.keep(self.post(endpoint, {"model_id": self.model, "seq_id": self.number, **body}))

    def loss(self, rows: Rows, name: str, **options: Any) -> tuple[float, list[Tensor]]:
        """Sum and log-probabilities of a loss."""
        self.number += 1
        content = loss_request(self.model, self.number, rows, name, **options)
        status, answer = self.send(content)
        assert status == 200, answer
        return read_result(self.keep(answer))

    def send(self, content: bytes, kind: str = wire.PROTOBUF, **headers: str) -> tuple[int, Any]:
        """(status, JSON) of a request in protocol buffers."""
        return self.served.ask(f"{API}/forward_backward", content, **{"Content-Type": kind}, **headers, **self.headers)

    def sample(self, session: str, prompt: Sequence[int], number: int = 0, **params: Any) -> Any:
        """The message with samples."""
        chunks = [{"type": "encoded_text", "tokens": list(prompt)}]
        more = {key: params.pop(key) for key in list(params) if key in SAMPLE_KEYS}
        body = {
            "sampling_session_id": session,
            "seq_id": number,
            "prompt": {"chunks": chunks},
            "sampling_params": params,
        }
        answer = self.keep(self.post("asample", body | more))
        assert isinstance(answer, bytes), answer
        message = wire.empty_message("SampleResponse")
        message.ParseFromString(answer)
        return message


SAMPLE_KEYS = (
    "num_samples",
    "prompt_logprobs",
    "prompt_logprobs_last_n",
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
)


def loss_request(
    model: str,
    number: int,
    rows: Rows,
    name: str,
    forward_only: bool = False,
    config: dict[str, float] | None = None,
) -> bytes:
    """The bytes of a request for a loss."""
    message = wire.empty_message("ForwardBackwardRequest")
    message.model_id, message.seq_id, message.loss_fn, message.forward_only = model, number, name, forward_only
    for key, value in (config or {}).items():
        message.loss_fn_config_v2[key].number = value
    for ids, inputs in rows:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(ids, "<i4").tobytes()
        for key, values in inputs.items():
            tensor = datum.loss_fn_inputs[key]
            tensor.dtype = 1 if values.is_floating_point() else 2
            tensor.shape.extend(values.shape)
            tensor.dense = values.numpy().astype("<f4" if values.is_floating_point() else "<i8").tobytes()
    return bytes(message.SerializeToString())


def read_result(content: Any) -> tuple[float, list[Tensor]]:
    """Sum and log-probabilities in an answer."""
    assert isinstance(content, bytes), content
    message = wire.empty_message("ForwardBackwardOutput")
    message.ParseFromString(content)
    logprobs = []
    for record in message.loss_fn_outputs:
        table = record.fields["logprobs"]
        ends = np.frombuffer(table.offsets, "<i8") // 4
        values = torch.from_numpy(np.frombuffer(table.data, "<f4").copy())
        logprobs += [values[a:b].reshape(-1, *table.trailing_shape) for a, b in pairwise(ends)]
    return message.metrics["loss:sum"], logprobs


def tokens_of(sequence: Any) -> tuple[list[int], list[float]]:
    """Ids and log-probabilities of a sampled answer."""
    return np.frombuffer(sequence.tokens, "<i4").tolist(), np.frombuffer(sequence.logprobs, "<f4").tolist()
