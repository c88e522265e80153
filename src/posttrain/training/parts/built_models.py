"""The models of a run before its first step: the trained one, its heads, the reference and the shards."""

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
from posttrain.models.forward.forward import Forward
from posttrain.models.load import LoadedModel, choose_device, load_model, quantized_bits
from posttrain.models.lora import apply_adapter, has_adapter, refuse_whole_weights
from posttrain.models.trained_heads import forward_with_head
from posttrain.models.written.untrained import note_untrained
from posttrain.process_group import ProcessGroup
from posttrain.randomness import derive_key
from posttrain.recipes.sections import ModelSection
from posttrain.training.batch_fields import scoring_temperature
from posttrain.training.checks import Components
from posttrain.training.step import same_digest, weights_digest
from posttrain.types import Model, Tokenizer

if TYPE_CHECKING:  # a run imports only what its recipe asks for
    from posttrain.models.reference import Reference
    from posttrain.training.distributed import Shards


@dataclass(frozen=True, slots=True)
class BuiltModels:
    """The models of one run, as they are before the first step."""

    loaded: LoadedModel  # the model that is trained, with its tokenizer
    policy: Forward  # its forward pass as a language model
    forward: Forward | ActorCritic  # the forward pass that the objective reads
    heads: dict[str, torch.nn.Module]
    reference: Reference | None  # what objectives compare with
    start: Reference | None  # what evaluations and teachers read
    shards: Shards | None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the trained model."""
        return self.loaded.tokenizer

    @property
    def context_tokens(self) -> int:
        """The number of tokens that the trained model reads at once."""
        return context_length(self.loaded.model.config)


def build_models(
    components: Components, task: Task, process_group: ProcessGroup, eval_tasks: Sequence[Task]
) -> BuiltModels:
    """Load the model and build its forward passes, the reference and the shards.

    Where no unsharded model is to stay in main memory, the processes of a machine load one after the other.
    """
    recipe = components.recipe
    device = torch.device("cpu")
    if process_group.size > 1:  # a single process asks for its device when it loads
        device = choose_device(recipe.model.device)
    shards: Shards | None = None
    loads_onto: str | None = None
    if recipe.scale.sharding == "fsdp2" and process_group.size > 1:
        from posttrain.training.distributed import Shards

        shards = Shards(process_group, device, keeps_whole=_samples_answers(components, eval_tasks))
        if not shards.keeps_whole:
            loads_onto = "cpu"  # from where it is sharded
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
    """Return the reference of objectives, and that of evaluations and teachers: one object, unless the first moves.

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
            "reference: the model has an adapter, and the base is its reference, which cannot move. Train all weights, "
            "or leave 'reference' out"
        )
    recipe = components.recipe
    is_taught_by_start = recipe.teacher is not None and recipe.teacher.weights == "start"
    if not is_taught_by_start and not recipe.eval.num_kl_prompts:
        return reference, None
    return reference, Reference(policy)


def _samples_answers(components: Components, eval_tasks: Sequence[Task]) -> bool:
    """Return whether the trainer's processes sample with the model itself."""
    if components.recipe.rollout is not None or components.shape == "demonstration" or not eval_tasks:
        return components.samples()
    from posttrain.training.held_out import is_read

    return components.samples(all(is_read(task, components.recipe.eval.num_examples) for task in eval_tasks))


def _build_policy(components: Components, loaded: LoadedModel) -> Forward:
    """Return the language model's forward pass, in ``train.precision``.

    Raises:
        RecipeError: TF32 where no GPU multiplies.
    """
    recipe = components.recipe
    device = next(loaded.model.parameters()).device.type
    coarse = recipe.train.precision != "fp32"
    if recipe.train.precision == "tf32" and device != "cuda":
        raise RecipeError(f"train.precision: tf32 is how a GPU of NVIDIA multiplies; on {device} use fp32 or bf16")
    # of this process: products that stay in fp32 (the LM head's, with bf16) take TF32 on a GPU then, and no others
    torch.set_float32_matmul_precision("high" if coarse and device == "cuda" else "highest")
    return _forward(loaded.model, recipe.train.precision, scoring_temperature(recipe.rollout, components.needs))


def _forward(model: Model, precision: str, temperature: float) -> Forward:
    if precision == "bf16":
        return Forward(model, temperature, precision="bf16")
    return Forward(model, temperature, precision="fp32")  # with tf32 the GPU rounds, not the pass


def _load_trained(section: ModelSection, task: Task, seed: int, device: str | None) -> LoadedModel:
    """Return the model to train, with a new adapter if the section has one; ``device``: in place of the section's."""
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
    model.eval()  # no dropout; that of an adapter is switched on where gradients are computed
    return replace(loaded, model=model)


def _refuse_quantized(model: Model, sharding: str) -> None:
    """Refuse quantized weights that would be trained or sharded."""
    bits = quantized_bits(model)
    if bits is None:
        return
    if not has_adapter(model):
        raise RecipeError(
            f"model.adapter: weights in {bits} bits cannot be trained; give an adapter to train on top of them, "
            "such as model.adapter.rank: 16"
        )
    if sharding != "none":
        raise RecipeError(f"scale.sharding: weights in {bits} bits cannot be sharded; use sharding none")


def _recompute_layers(model: Model) -> None:
    from posttrain.models.forward.gradient_checkpointing import checkpointed_layers

    if not checkpointed_layers(model):
        name = type(model).__name__
        raise RecipeError(f"train.gradient_checkpointing: {name} has no layers that can be recomputed")
