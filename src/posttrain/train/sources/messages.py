"""A drawn batch as plain data: for the pipe from the process that samples ahead, and for a checkpoint.

Numbers come back bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from posttrain.store.rollouts import read_turns, write_turns
from posttrain.train.sources.rollouts import Drawn, Groups, RolloutSource
from posttrain.types import Completion, Message, Rollout

# Known where it is read, or made there; of an episode the prompt is what its environment opened it with.
_OF_THE_TASK = ("example", "prompt_ids", "completion", "advantage", "turns", "failures")


def write_drawn(drawn: Drawn) -> dict[str, Any]:
    """A drawn batch as plain data; examples and prompts are named by their indices."""
    places = {id(group): place for place, group in enumerate(drawn.sampled)}
    return {
        "sampled": write_groups(drawn.sampled),
        "chosen": [places[id(group)] for group in drawn.chosen],
        "accepted": drawn.accepted,
        "version": drawn.version,
        "timing": drawn.timing,
    }


def read_drawn(stated: Mapping[str, Any], source: RolloutSource) -> Drawn:
    """What ``write_drawn`` wrote, with the examples and prompts of ``source``."""
    sampled = read_groups(stated["sampled"], source)
    chosen = [sampled[place] for place in stated["chosen"]]
    return Drawn(sampled, chosen, stated["accepted"], stated["version"], dict(stated["timing"]))


def write_groups(groups: Groups) -> list[list[dict[str, Any]]]:
    """Groups as plain data."""
    return [[_write_rollout(rollout) for rollout in group] for group in groups]


def read_groups(stated: Sequence[Sequence[Mapping[str, Any]]], source: RolloutSource) -> Groups:
    """What ``write_groups`` wrote."""
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

    return [[read(row) for row in group] for group in stated]


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
