"""What trainer and sampling process say to each other: JSON with its length in front, weights as raw bytes behind it.

Nothing is pickled. A drawn batch is written the same way into a checkpoint; numbers come back bit for bit.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import IO, Any

import torch
from torch import Tensor

from posttrain.store.rollouts import read_turns, write_turns
from posttrain.train.sources.rollouts import Drawn, Groups, RolloutSource
from posttrain.types import Completion, Message, Rollout

_HEADER = struct.Struct(">Q")
# Known where it is read, or made there; of an episode the prompt is what its environment opened it with.
_OF_THE_TASK = ("example", "prompt_ids", "completion", "advantage", "turns", "failures")


@dataclass(frozen=True, slots=True)
class Weights:
    """The trained weights of one version, on the CPU, and what all weights of that model add up to."""

    version: int
    tensors: Mapping[str, Tensor]
    sums: list[float]


def send(pipe: IO[bytes], message: Mapping[str, Any]) -> None:
    """Write one message."""
    content = json.dumps(message).encode()
    pipe.write(_HEADER.pack(len(content)) + content)
    pipe.flush()


def send_weights(pipe: IO[bytes], weights: Weights) -> None:
    """Write a message that announces the weights, and their bytes."""
    shapes = [[name, str(x.dtype).removeprefix("torch."), list(x.shape)] for name, x in weights.tensors.items()]
    send(pipe, {"weights": weights.version, "shapes": shapes, "sums": weights.sums})
    for tensor in weights.tensors.values():
        pipe.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    pipe.flush()


def receive(pipe: IO[bytes]) -> dict[str, Any] | None:
    """The next message, under ``tensors`` the weights that it announces; None where the other side is gone."""
    header = pipe.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (size,) = _HEADER.unpack(header)
    content = pipe.read(size)
    if len(content) < size:
        return None
    message: dict[str, Any] = json.loads(content)
    if "shapes" in message:
        message["tensors"] = {}
        for name, kind, shape in message["shapes"]:
            tensor = torch.empty(shape, dtype=getattr(torch, kind))
            if tensor.numel() and pipe.readinto(tensor.view(-1).view(torch.uint8).numpy().data) != tensor.nbytes:  # type: ignore[attr-defined]
                return None
            message["tensors"][name] = tensor
    return message


def weight_sums(model: Any) -> list[float]:
    """The sum of every parameter, trained or not: what tells one version of a model from another."""
    with torch.no_grad():
        return [float(p.detach().sum(dtype=torch.float64)) for p in model.parameters()]


def write_drawn(drawn: Drawn) -> dict[str, Any]:
    """A drawn batch as plain data; examples and prompts are named by their indices."""
    places = {id(group): place for place, group in enumerate(drawn.sampled)}
    return {
        "sampled": [[_write_rollout(rollout) for rollout in group] for group in drawn.sampled],
        "chosen": [places[id(group)] for group in drawn.chosen],
        "accepted": drawn.accepted,
        "version": drawn.version,
        "timing": drawn.timing,
    }


def read_drawn(stated: Mapping[str, Any], source: RolloutSource) -> Drawn:
    """What ``write_drawn`` wrote, with the examples and prompts of ``source``."""
    position = {index: place for place, index in enumerate(source.kept)}

    def read(row: Mapping[str, Any]) -> Rollout:
        index = row["prompt_index"]
        sampled: dict[str, Any] = {
            name: tuple(x) if isinstance(x, list) else x for name, x in row["completion"].items()
        }
        known = {name: x for name, x in row.items() if name not in ("completion", "episode")}
        prompt = tuple(source.prompts[position[index]])
        example = source.task.examples[index]
        if "episode" in row:
            episode = row["episode"]
            example = replace(example, messages=tuple(Message(*message) for message in episode["messages"]))
            prompt, known["turns"] = tuple(episode["prompt_ids"]), read_turns(episode["turns"])
            known["failures"] = tuple(episode["failures"])
        return Rollout(example=example, prompt_ids=prompt, completion=Completion(**sampled), **known)

    sampled: Groups = [[read(row) for row in group] for group in stated["sampled"]]
    chosen = [sampled[place] for place in stated["chosen"]]
    return Drawn(sampled, chosen, stated["accepted"], stated["version"], dict(stated["timing"]))


def _write_rollout(rollout: Rollout) -> dict[str, Any]:
    plain = {f.name: getattr(rollout, f.name) for f in fields(rollout) if f.name not in _OF_THE_TASK}
    plain["completion"] = {f.name: getattr(rollout.completion, f.name) for f in fields(Completion)}
    if rollout.turns or rollout.failures:
        plain["episode"] = {
            "messages": [[message.role, message.content] for message in rollout.example.messages],
            "prompt_ids": rollout.prompt_ids,
            "turns": write_turns(rollout.turns),
            "failures": rollout.failures,
        }
    return plain
