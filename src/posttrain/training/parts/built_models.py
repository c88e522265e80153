"""Build the models for a run: trained model, heads, reference and shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from posttrain.data.base import Task, document_texts
from posttrain.errors import RecipeError
from posttrain.models.config import context_length
from posttrain.models.forward.actor_critic import ActorCritic
from posttrain.models.forward.forward import Forward, causal_lm
from posttrain.models.forward.routing.replay import find_replay
from posttrain.models.load import LoadedModel, choose_device, load_model, quantized_bits
from posttrain.models.lora import apply_adapter, has_adapter, refuse_whole_weights
from posttrain.models.trained_heads import forward_with_head
from posttrain.models.written.untrained import note_untrained
from posttrain.process_group import ProcessGroup
from posttrain.randomness import derive_key
from posttrain.recipes.sections import ModelSection
from posttrain.training.batch_fields import replays_experts, scoring_temperature
from posttrain.training.checks import Components
from posttrain.training.step import same_digest, weights_digest
from posttrain.types import Model, Tokenizer

if TYPE_CHECKING:  # import only modules needed by the recipe
    from posttrain.models.reference import Reference
    from posttrain.training.distributed import Shards


@dataclass(frozen=True, slots=True)
class BuiltModels:
    """Models for one run before the first step."""

    loaded: LoadedModel  # trained model and tokenizer
    policy: Forward  # forward pass as a language model
    forward: Forward | ActorCritic  # forward pass used by the objective
    heads: dict[str, torch.nn.Module]
    reference: Reference | None  # what objectives compare with
    start: Reference | None  # what evaluations and teachers read
    shards: Shards | None

    @property
    def tokenizer(self) -> Tokenizer:
        """Trained model's tokenizer."""
        return self.loaded.tokenizer

    @property
    def context_tokens(self) -> int:
        """Trained model's context length in tokens."""
        return context_length(self.loaded.model.config)


def build_models(
    components: Components, task: Task, process_group: ProcessGroup, eval_tasks: Sequence[Task]
) -> BuiltModels:
    """Load the model and build forward passes, reference and shards.

    If no unsharded copy needs to stay in CPU memory, processes on one machine load one at a time.
    """
    recipe = components.recipe
    device = torch.device("cpu")
    if process_group.size > 1:  # single-process runs choose a device while loading
        device = choose_device(recipe.model.device)
    shards: Shards | None = None
    loads_onto: str | None = None
    if recipe.scale.sharding == "fsdp2" and process_group.size > 1:
        from posttrain.training.distributed import Shards

        shards = Shards(process_group, device, keeps_whole=_samples_answers(components, eval_tasks))
        if not shards.keeps_whole:
            loads_onto = "cpu"  # sharding moves weights from here
    loads_in_turn = loads_onto is not None or device.type == "cuda"
    digest: list[int] = []
    with process_group.in_turn() if loads_in_turn else nullcontext():
        loaded = _load_trained(recipe.model, task, recipe.train.seed, loads_onto)
        _refuse_quantized(loaded.model, recipe.scale.sharding)
        if recipe.train.gradient_checkpointing:
            _recompute_layers(loaded.model)
        policy = _build_policy(components, loaded)
        forward, heads = forward_with_head(
            components.objective, recipe.objective.options, recipe.head, policy, recipe.train.seed
        )
        reference, start = _build_references(components, policy)
        if shards is not None:
            if not shards.keeps_whole:
                modules = [forward.model, *heads.values()]
                digest = weights_digest([p for m in modules for p in m.parameters() if p.requires_grad])
            shards.cut(forward, heads)
            if reference is not None and not shards.keeps_whole:
                reference.shard(shards.part)  # it does not move, so both are one
    if shards is not None:
        same_digest(digest, process_group, "before training")
        shards.choose_paths(policy)
    return BuiltModels(loaded, policy, forward, heads, reference, start, shards)


def _build_references(components: Components, policy: Forward) -> tuple[Reference | None, Reference | None]:
    """Build references for objectives, and for evaluations and teachers (shared unless the first one moves).

    Raises:
        RecipeError: a reference that moves, of a model with an adapter.
    """
    if not components.needs_start:
        return None, None
    from posttrain.models.reference import Reference

    reference = Reference(policy)
    if components.recipe.reference is None:
        return reference, reference
    if has_adapter(policy.model):
        raise RecipeError(
            "reference: adapters use their fixed base as reference, so it cannot move. Train all weights, "
            "or remove 'reference'"
        )
    recipe = components.recipe
    is_taught_by_start = recipe.teacher is not None and recipe.teacher.weights == "start"
    if not is_taught_by_start and not recipe.eval.num_kl_prompts:
        return reference, None
    return reference, Reference(policy)


def _samples_answers(components: Components, eval_tasks: Sequence[Task]) -> bool:
    """Check if training processes sample with the model."""
    if components.recipe.rollout is not None or components.shape == "demonstration" or not eval_tasks:
        return components.samples()
    from posttrain.training.held_out import is_read

    return components.samples(all(is_read(task, components.recipe.eval.num_examples) for task in eval_tasks))


def _build_policy(components: Components, loaded: LoadedModel) -> Forward:
    """Build the language model forward pass with ``train.precision``.

    Raises:
        RecipeError: TF32 without a GPU, or router replay with unsupported routers.
    """
    recipe = components.recipe
    device = next(loaded.model.parameters()).device.type
    coarse = recipe.train.precision != "fp32"
    if recipe.train.precision == "tf32" and device != "cuda":
        raise RecipeError(f"train.precision: tf32 needs an NVIDIA GPU; on {device} use fp32 or bf16")
    # Process-wide: on GPU, matrix products that stay in fp32 (the LM head, with bf16) use TF32.
    torch.set_float32_matmul_precision("high" if coarse and device == "cuda" else "highest")
    policy = _forward(loaded.model, recipe.train.precision, scoring_temperature(recipe.rollout, components.needs))
    if replays_experts(recipe.rollout, components.needs):
        policy.replay = find_replay(causal_lm(loaded.model))
    return policy


def _forward(model: Model, precision: str, temperature: float) -> Forward:
    if precision == "bf16":
        return Forward(model, temperature, precision="bf16")
    return Forward(model, temperature, precision="fp32")  # with tf32, the GPU rounds instead of the forward pass


def _load_trained(section: ModelSection, task: Task, seed: int, device: str | None) -> LoadedModel:
    """Load the model to train, adding an adapter if configured; ``device`` overrides the recipe."""
    placed = section
    if device is not None:
        placed = section.model_copy(update={"device": device})
    texts: Iterator[str] | None = None
    if section.init is not None:  # for a new tokenizer
        texts = document_texts(task.examples, section.init.tokenizer.num_documents)
    loaded = load_model(placed, seed=seed, texts=texts)
    model = loaded.model
    if section.adapter is not None:
        model = apply_adapter(model, section.adapter, derive_key(seed, "adapter") % (1 << 31))
    elif has_adapter(model):
        refuse_whole_weights(model, loaded.source)
    elif section.init is None:
        note_untrained(model, loaded.source)
    model.eval()  # disable dropout; adapter dropout is enabled only for gradients
    return replace(loaded, model=model)


def _refuse_quantized(model: Model, sharding: str) -> None:
    """Reject training or sharding quantized weights."""
    bits = quantized_bits(model)
    if bits is None:
        return
    if not has_adapter(model):
        raise RecipeError(
            f"model.adapter: {bits}-bit weights cannot be trained; add an adapter, such as model.adapter.rank: 16"
        )
    if sharding != "none":
        raise RecipeError(f"scale.sharding: {bits}-bit weights cannot be sharded; use sharding none")


def _recompute_layers(model: Model) -> None:
    from posttrain.models.forward.gradient_checkpointing import checkpointed_layers

    if not checkpointed_layers(model):
        name = type(model).__name__
        raise RecipeError(f"train.gradient_checkpointing: {name} does not support gradient checkpointing")
