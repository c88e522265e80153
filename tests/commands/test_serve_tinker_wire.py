"""The bytes of Tinker's protocol, as its client (tinker 0.38) wrote them."""

from __future__ import annotations

import pytest
import torch

from refusing import refuses

pytest.importorskip("starlette", reason="the extra `tinker` is not installed")
pytest.importorskip("google.protobuf", reason="the extra `tinker` is not installed")

from posttrain.commands.serve.requests import BadRequest
from posttrain.commands.serve.tinker import wire

# Three tokens, their targets, advantages 0, 0.5, -1 and log-probabilities 0, -1.5, -0.25; loss ppo with a threshold.
PPO_REQUEST = bytes.fromhex(
    "0a18303030303030303030303030303061613a747261696e3a3010031a88010a100a0e0a0c05000000060000000700000012210a0a61647661"
    "6e746167657312130a0c000000000000003f000080bf1801220103121f0a086c6f6770726f627312130a0c000000000000c0bf000080be18012"
    "2010312300a0d7461726765745f746f6b656e73121f0a1806000000000000000700000000000000080000000000000018022201032203707"
    "06f2a1d0a12636c69705f6c6f775f7468726573686f6c6411000000000000e03f3a1f0a12636c69705f6c6f775f7468726573686f6c64120909"
    "000000000000e03f"
)
# Three tokens with eight targets each, all 0 but one, which is written sparsely; the forward pass alone.
SPARSE_REQUEST = bytes.fromhex(
    "0a016d10011aaa010a100a0e0a0c050000000600000007000000124f0a0d7461726765745f746f6b656e73123e12360a0807000000000000001"
    "22000000000000000000000000000000000010000000000000001000000000000001a08020000000000000018022202030812450a0777656967"
    "687473123a12320a040000c03f122000000000000000000000000000000000010000000000000001000000000000001a08020000000000000018"
    "0122020308220d63726f73735f656e74726f70793001"
)
# What the client reads as [-1, -2], [-0.5] and a loss of 2.5.
LOSS_RESULT = bytes.fromhex(
    "0a0b41727261795265636f726412470a0b41727261795265636f726412360a086c6f6770726f6273122a0a0c000080bf000000c0000000bf1218"
    "000000000000000008000000000000000c00000000000000180118021a130a086c6f73733a73756d110000000000000440"
)
# What it reads as one answer [3, 4] that was cut off, and the log-probabilities of a prompt of two tokens.
SAMPLES = bytes.fromhex(
    "0a160801120803000000040000001a08000000bf000080be12080000c07f000080bf1a180a0800000000090000001208804fc3c7000080bf18"
    "012002"
)


def test_a_request_of_the_client_is_read() -> None:
    request = wire.read_loss_request(PPO_REQUEST)
    assert (request.model_id, request.seq_id, request.loss) == ("00000000000000aa:train:0", 3, "ppo")
    assert (request.options, request.learns) == ({"clip_low_threshold": 0.5}, True)
    (datum,) = request.datums
    assert (datum.ids, datum.targets.tolist(), datum.follows) == ((5, 6, 7), [6, 7, 8], True)
    inputs = {name: values.tolist() for name, values in datum.inputs.items()}
    assert inputs == {"advantages": [0.0, 0.5, -1.0], "logprobs": [0.0, -1.5, -0.25]}


def test_sparse_targets_are_read_whole() -> None:
    request = wire.read_loss_request(SPARSE_REQUEST)
    (datum,) = request.datums
    expected = torch.zeros(3, 8)
    expected[1, 2] = 1.0
    assert torch.equal(datum.targets, (7 * expected).long())
    assert torch.equal(datum.inputs["weights"], 1.5 * expected)
    assert (request.learns, datum.follows) == (False, False)


def test_answers_are_the_bytes_that_the_client_reads() -> None:
    logprobs = [torch.tensor([-1.0, -2.0]), torch.tensor([-0.5])]
    assert wire.write_loss_result(logprobs, {"loss:sum": 2.5}) == LOSS_RESULT
    top = wire.TopTokens(torch.tensor([[9]]), torch.tensor([[-1.0]])).behind(1)
    answer = wire.SampledTokens([3, 4], [-0.5, -0.25], "length")
    assert wire.write_samples(wire.SampleResult([answer], torch.tensor([float("nan"), -1.0]), top)) == SAMPLES


def test_rows_of_several_widths_are_written_in_several_records() -> None:
    content = wire.write_loss_result([torch.ones(2), torch.ones(3, 4), torch.ones(1, 4)], {})
    message = wire.empty_message("ForwardBackwardOutput")
    message.ParseFromString(content)
    records = message.loss_fn_outputs
    assert [record.num_datums for record in records] == [1, 2]
    assert [list(record.fields["logprobs"].trailing_shape) for record in records] == [[], [4]]


def changed(name: str, value: object) -> bytes:
    """The request of the client with one thing wrong."""
    message = wire.empty_message("ForwardBackwardRequest")
    message.ParseFromString(SPARSE_REQUEST if name.startswith("sparse") else PPO_REQUEST)
    datum = message.data[0]
    if name == "sparse":
        datum.loss_fn_inputs["target_tokens"].sparse_csr.col_indices = value
    elif name == "sparse shape":
        datum.loss_fn_inputs["target_tokens"].ClearField("shape")
        datum.loss_fn_inputs["target_tokens"].shape.extend(value)  # type: ignore[arg-type]
    elif name == "tokens":
        datum.model_input[0].encoded_text.tokens = value
    elif name == "image":
        datum.model_input[0].image.SetInParent()
    elif name == "missing":
        del datum.loss_fn_inputs["target_tokens"]
    elif name == "shape":
        datum.loss_fn_inputs["advantages"].ClearField("shape")
        datum.loss_fn_inputs["advantages"].shape.extend(value)  # type: ignore[arg-type]
    else:
        datum.loss_fn_inputs["target_tokens"].dtype = value
    return bytes(message.SerializeToString())


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("tokens", b"123", "model_input"),
        ("image", None, "images"),
        ("missing", None, "target_tokens"),
        ("shape", [4], "advantages"),
        ("shape", [-1], "advantages"),
        ("shape", [1 << 40, 1 << 40], "advantages"),
        ("shape", [1, 1, 3], "advantages"),
        ("type", 4, "target_tokens"),
        ("type", 1, "target_tokens"),
        ("sparse", (8).to_bytes(8, "little"), "target_tokens"),
        ("sparse", b"", "target_tokens"),
        ("sparse shape", [3, 1 << 40], "cells"),
        ("sparse shape", [9, 8], "target_tokens"),
    ],
)
def test_a_message_that_is_wrong_is_refused(name: str, value: object, said: str) -> None:
    with refuses(BadRequest, said):
        wire.read_loss_request(changed(name, value))


def sparse_rows(number: int) -> bytes:
    """Rows whose sparse tensors take a few bytes here and four million cells when read."""
    message = wire.empty_message("ForwardBackwardRequest")
    for _ in range(number):
        datum = message.data.add()
        tensor = datum.loss_fn_inputs["target_tokens"]
        tensor.dtype = 2
        tensor.shape.extend([1, wire.MAX_CELLS])
        tensor.sparse_csr.crow_indices = bytes(16)
    return bytes(message.SerializeToString())


def test_sparse_tensors_of_a_request_have_a_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read before the size of all is known: 400 such rows are 40 kB sent and 13 GB read."""
    most = wire.MAX_ALL_CELLS // wire.MAX_CELLS
    monkeypatch.setattr(wire, "_read_datum", lambda datum, where: where)
    assert len(wire.read_loss_request(sparse_rows(most)).datums) == most
    with refuses(BadRequest, f"data.{most}.target_tokens", "cells"):
        wire.read_loss_request(sparse_rows(most + 1))
    with refuses(BadRequest, "data", "4,097 rows"):
        wire.read_loss_request(b"\x1a\x00" * 4_097)


@pytest.mark.parametrize("content", [b"no message", PPO_REQUEST[:-3], b"\x0a\xff\xff\xff\xff\x0f"])
def test_bytes_that_are_no_message_are_refused(content: bytes) -> None:
    with refuses(BadRequest, "ForwardBackwardRequest"):
        wire.read_loss_request(content)
