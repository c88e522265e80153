"""Auxiliary heads and critics: construction, saving, restoring."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from posttrain.errors import CheckpointError
from posttrain.models.forward.actor_critic import ActorCritic
from posttrain.models.forward.forward import Forward, causal_lm
from posttrain.models.forward.packing import Reads
from posttrain.models.heads import ScalarHead, hidden_size
from posttrain.process_group import own_part
from posttrain.recipes.other_models import HeadSection
from posttrain.registry import Entry

NUM_SHOWN = 5
Fill = Callable[[Tensor, Tensor], object]


def forward_with_head(
    entry: Entry, options: Mapping[str, object], section: HeadSection | None, policy: Forward, seed: int
) -> tuple[Forward | ActorCritic, dict[str, Module]]:
    """Build the trainer's forward pass including any head or critic required by the objective.

    ``entry``: registered objective, configured by ``options``. ``section``: head settings, if required.
    """
    kind = entry.traits.get("head")
    if kind is None:
        return policy, {}
    model = policy.model
    assert section is not None, "resolved"
    outputs = 1
    option = entry.traits.get("head_outputs")
    if option is not None and int(str(options[option])) > 2:  # two classes need only a single logit
        outputs = int(str(options[option]))
    head = ScalarHead(hidden_size(model), outputs=outputs, init_std=section.init_std, seed=seed)
    like = next(model.parameters())
    head.to(like.device, torch.promote_types(like.dtype, torch.float32))
    if kind == "score":
        reads: Reads = "at"
        if entry.traits["level"] == "pair":  # ranking needs a single number
            reads = "last"
        return policy.alike(model, head, reads, scores_only=True), {"head": head}
    if section.trunk == "shared":
        return policy.alike(model, head), {"head": head}
    frozen: dict[int, Any] = {id(p): p for p in model.parameters() if not p.requires_grad}
    trunk = copy.deepcopy(model, frozen)  # frozen weights are shared
    base = causal_lm(trunk)
    if base.get_output_embeddings().weight is not base.get_input_embeddings().weight:
        base.get_output_embeddings().requires_grad_(False)  # an LM head computes no values
    return ActorCritic(policy, policy.alike(trunk, head, scores_only=True)), {"head": head, "critic": trunk}


def head_tensors(modules: Mapping[str, Module]) -> dict[str, Tensor]:
    """Collect trained head and critic parameters as ``<module>.<parameter>``; tied ones appear once."""
    named = [(f"{outer}.{name}", p) for outer, module in modules.items() for name, p in module.named_parameters()]
    first_names = {id(p): name for name, p in reversed(named)}
    return {name: p.detach() for name, p in named if p.requires_grad and first_names[id(p)] == name}


def restore_heads(modules: Mapping[str, Module], tensors: Mapping[str, Tensor], fill: Fill = Tensor.copy_) -> None:
    """Copy checkpointed ``heads`` into live modules bit for bit, in place, using ``fill`` per tensor.

    Raises:
        CheckpointError: mismatch with ``head_tensors(modules)``; nothing was copied.
    """
    copy_tensors(tensors, head_tensors(modules), Path("heads.safetensors"), fill)


@torch.no_grad()
def copy_tensors(
    stored: Mapping[str, Tensor], live: Mapping[str, Tensor], place: Path, fill: Fill = Tensor.copy_
) -> None:
    """Copy stored tensors into live tensors by name, refusing unknown names and mismatched shapes."""
    filled = {place_in_memory(live[name]) for name in stored if name in live}
    missing = [name for name in live if name not in stored and place_in_memory(live[name]) not in filled]
    wrong = [f"{name} is not in the checkpoint" for name in missing]
    for name, tensor in stored.items():
        if name not in live:
            wrong.append(f"{name} is not in the model")
        elif (tensor.shape, tensor.dtype) != (live[name].shape, live[name].dtype):
            theirs = f"{tensor.dtype} {list(tensor.shape)}"
            ours = f"{live[name].dtype} {list(live[name].shape)}"
            wrong.append(f"{name} is {theirs} in the checkpoint and {ours} in the model")
    if wrong:
        shown = "; ".join(wrong[:NUM_SHOWN])
        if len(wrong) > NUM_SHOWN:
            shown += f"; and {len(wrong) - NUM_SHOWN} more"
        raise CheckpointError(
            f"{place}: this checkpoint is of another model: {shown}. Resume with the recipe that wrote it "
            "(recipe.yaml in the run's directory)"
        )
    for name, tensor in stored.items():
        fill(live[name], tensor)


def place_in_memory(tensor: Tensor) -> tuple[int, int]:
    """Find a tensor's memory address, or its local shard's: tied weights share it."""
    own = own_part(tensor)
    return own.untyped_storage().data_ptr(), int(own.storage_offset())
