"""Estimate memory for one training process from the recipe and model config.

Nothing is loaded. Shapes come from a single layer on the meta device, and the estimate assumes the longest rows
allowed by the recipe (see docs/how-to/fit-in-memory.md for limits). ``models/forward/kept.py`` lists tensors kept for
backward.

With P processes (``scale.processes``), each computes 1/P of the rows. With ``scale.sharding: fsdp2``, each holds 1/P
of every tensor, gradient and moment (rounded up for the first process). During computation, processes also hold
tensors outside the layers, two layers, and one layer's gradients. If processes sample with the model, each also keeps
a full model and reference copy.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, fields

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from posttrain.errors import PosttrainError
from posttrain.models.forward.kept import (
    BYTES,
    QK_NORMS,
    Micro,
    Weight,
    activation_bytes,
    kept_layer,
    logit_bytes,
    low_rank,
    up_to,
)
from posttrain.models.forward.predictions import gpu_memory_of
from posttrain.models.load import choose_device
from posttrain.models.published.planned import model_to_plan
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import (
    PromptSection,
    RolloutSection,
    ScaleSection,
)
from posttrain.sampling.base import MOST_KEPT
from posttrain.training.batch_fields import replays_sets
from posttrain.training.checks import Components, resolve_components
from posttrain.training.optimizer import BLOCK_IN_8_BITS, EMBEDDING_NAMES, LEAST_IN_8_BITS

SHARES_PROMPTS = ("qwen3", "qwen2", "llama")  # fast sampling path
UNSTATED_PROMPT = 256  # tokens, if the recipe sets no prompt limit
FIRST_COLUMNS, COLUMNS_ALIGNED, GROWTH, STEPS_BETWEEN_LOOKS = 256, 16, 1.5, 8  # for the sampler
BYTES_OF_4_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory per process, in bytes (see module docstring)."""

    weights: int
    gathered: int
    gradients: int
    optimizer: int
    reference: int
    heads: int
    activations: int
    logits: int
    kv_cache: int
    rollouts: int

    def rows(self) -> list[tuple[str, int]]:
        """List table rows: every part, followed by peak sums."""
        names = {"gathered": "gathered layers", "optimizer": "optimizer state", "heads": "heads, critic"}
        names["kv_cache"] = "key/value cache"
        parts = [(names.get(part.name, part.name), getattr(self, part.name)) for part in fields(self)]
        return [*parts, ("most in an update", self.update), ("most while sampling", self.sampling)]

    @property
    def update(self) -> int:
        """Peak memory during updates."""
        return sum(getattr(self, part.name) for part in fields(self)) - self.kv_cache - self.rollouts

    @property
    def sampling(self) -> int:
        """Peak memory during sampling, without gradients; 0 without sampling."""
        if not self.kv_cache:
            return 0
        return self.weights + self.optimizer + self.reference + self.heads + self.kv_cache


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """Weight placement: ``num_parts`` shards per tensor, and whether each process also keeps a full copy."""

    num_parts: int = 1
    keeps_whole: bool = False

    def numel(self, weights: list[Weight]) -> int:
        """Count elements held by the first process (first rows of each tensor)."""
        return sum(w.times * math.prod((-(-w.shape[0] // self.num_parts), *w.shape[1:])) for w in weights)

    def held(self, num_bytes: float, weights: list[Weight]) -> int:
        """Compute bytes held by a process: its shard, plus a full copy if kept."""
        total = sum(w.numel for w in weights)
        if self.num_parts == 1 or not total:
            return round(num_bytes)
        copy_bytes = num_bytes if self.keeps_whole else 0.0
        return round(num_bytes * self.numel(weights) / total + copy_bytes)


def estimate_memory(recipe: Recipe, gpu_bytes: int | None = None) -> Memory | str:
    """Estimate memory for a resolved recipe, or explain why no estimate is available.

    Args:
        gpu_bytes: GPU memory to plan for; None uses this machine.
    """
    try:
        if gpu_bytes is None:
            device = choose_device(recipe.model.device if torch.cuda.is_available() else "cpu")
            gpu_bytes = gpu_memory_of(device)
        model, config = model_to_plan(recipe.model, QK_NORMS)
        return memory_of(recipe.model_copy(update={"model": model}), config, gpu_bytes)
    except PosttrainError as error:
        return str(error)


def memory_of(recipe: Recipe, config: PretrainedConfig, gpu_memory: int | None = None) -> Memory:
    """Compute training memory by part.

    Args:
        config: transformers config for an architecture in ``QK_NORMS``.
        gpu_memory: GPU memory in bytes; None for CPU.

    Raises:
        RecipeError: incompatible recipe components.
    """
    components = resolve_components(recipe)
    config = config.get_text_config()
    adapter = recipe.model.adapter
    size = BYTES[recipe.model.dtype]
    weights = weights_of(config)
    factors: list[Weight] = []
    trained = weights
    if adapter is not None:
        factors = list(low_rank(weights, adapter))
        trained = factors
    layout = layout_of(recipe.scale, components.samples())
    base = layout.held(_base_bytes(weights, size, recipe.model.load_bits), weights)
    micro = micro_batch(components)
    logits = 0
    if not components.only_scores:
        logits = logit_bytes(config, micro, size, gpu_memory, head_trained=adapter is None)
    layer = kept_layer(config, recipe.model, recipe.train, on_gpu=gpu_memory is not None)
    activations = activation_bytes(layer, micro, weights, adapter, logits)
    gathered = 0
    if layout.num_parts > 1:
        gathered = _gathered_bytes([*weights, *factors], size, trained, config.num_hidden_layers)
    critic: list[Weight] = []
    has_values = components.objective.traits.get("head") == "value"
    if has_values and recipe.head is not None and recipe.head.trunk == "separate":
        critic = trained
        activations *= 2
        gathered *= 2
    reference = 0
    has_reference = "reference" in components.parts or bool(recipe.eval.num_kl_prompts)
    if has_reference and adapter is None:  # with an adapter, this is the base model
        apart = layout
        if layout.keeps_whole:
            apart = WeightLayout()  # this copy is not sharded
        reference = apart.held(_base_bytes(weights, size, recipe.model.load_bits), weights)
        if recipe.reference is not None and recipe.eval.num_kl_prompts:
            reference *= 2  # one moves, and evaluations compare with the start
    kv_cache, rollouts = _sampling_bytes(components, config, size, gpu_memory)
    return Memory(
        weights=base + layout.held(4 * sum(w.numel for w in factors), factors),
        gathered=gathered,
        gradients=4 * layout.numel(trained),
        optimizer=_optimizer_bytes(trained, recipe.optimizer.name, layout),
        reference=reference,
        heads=_head_bytes(components, config, critic, layout),
        activations=activations,
        logits=logits,
        kv_cache=kv_cache,
        rollouts=rollouts,
    )


def layout_of(scale: ScaleSection, samples: bool) -> WeightLayout:
    """Choose weight placement; ``samples``: training processes sample with the model."""
    if scale.sharding == "none" or scale.processes == 1:
        return WeightLayout()
    return WeightLayout(scale.processes, samples)


def weights_of(config: PretrainedConfig) -> list[Weight]:
    """List all model tensors, built on the meta device with one layer."""
    one = copy.deepcopy(config)
    one.num_hidden_layers = 1
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(one, dtype=torch.float32)
    linear: dict[str, tuple[int, int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not model.get_output_embeddings():
            shape = module.weight.shape
            linear[f"{name}.weight"] = (shape[0], shape[1]) if isinstance(module, Conv1D) else (shape[1], shape[0])
    return [
        Weight(name, tuple(p.shape), config.num_hidden_layers if ".0." in name else 1, linear.get(name))
        for name, p in model.named_parameters()
    ]


def micro_batch(components: Components) -> Micro:
    """Compute micro-batch size, assuming maximum row lengths."""
    recipe = components.recipe
    train = recipe.train
    rollout = recipe.rollout
    unread = 0 if components.only_scores else 1
    unit = 2 if components.level == "pair" else 1
    if rollout is None:
        assert recipe.data is not None, "a recipe has 'rollout' or 'data'"
        prompt = 0
        answer = recipe.data.max_length
        group = 1
        own = answer - unread
        rows = recipe.data.batch_size * unit
    else:
        prompt, own = longest_row(rollout, recipe.prompt)
        answer = own
        group = rollout.group_size
        if components.unit == "pair":
            group = 2
        rows = rollout.num_prompts * group // train.num_minibatches
        if group == 1:  # no shared prompt
            answer += prompt
            prompt = 0
    units = -(-rows // unit)
    rows = unit * -(-units // recipe.scale.processes)
    most = min(rows, train.micro_batch_rows or rows)
    count = unit
    while count + unit <= most:
        more = count + unit
        groups = -(-more // group)
        if groups * prompt + more * answer > train.micro_batch_tokens:
            break
        count = more
    return Micro(count, -(-count // group), prompt, answer - unread, count * own)


def longest_row(rollout: RolloutSection, prompts: PromptSection) -> tuple[int, int]:
    """Compute maximum prompt and answer lengths allowed by the recipe, in tokens."""
    prompt = prompts.max_prompt_tokens or UNSTATED_PROMPT
    limit = rollout.within(prompt + rollout.max_tokens)
    prompt = min(prompt, limit - 1)
    return prompt, rollout.within(prompt + rollout.max_tokens) - prompt


def _base_bytes(weights: list[Weight], size: int, bits: int | None) -> int:
    """Compute weight bytes. 8-bit linear layers add 4 bytes per row; 4-bit layers add a scale per 64 weights."""
    total = 0.0
    for weight in weights:
        if bits is None or weight.linear is None:
            total += size * weight.numel
        elif bits == 8:
            total += weight.numel + 4 * weight.times * weight.linear[1]
        else:
            total += BYTES_OF_4_BITS * weight.numel
    return round(total)


def _gathered_bytes(weights: list[Weight], size: int, trained: list[Weight], num_layers: int) -> int:
    """Compute bytes gathered by a sharded forward pass.

    Includes tensors outside the layers, two consecutive layers, and one layer's gradients. Gradients for a trained LM
    head are counted with the logits.
    """
    in_layers = [w for w in weights if w.times == num_layers and ".0." in w.name]
    outside = [w for w in weights if w not in in_layers]
    gradients = 4 * sum(w.numel // w.times for w in trained if w in in_layers)
    return size * (sum(w.numel for w in outside) + 2 * sum(w.numel // w.times for w in in_layers)) + gradients


def _optimizer_bytes(trained: list[Weight], name: str, layout: WeightLayout) -> int:
    """Compute optimizer state bytes: two values per weight plus a count by default (AdamW).

    Lion and Muon matrices need one value, Adafactor matrices one per row and column, and 8-bit AdamW about two bytes.
    """
    total = 0
    for weight in trained:
        is_matrix = len(weight.shape) == 2 and not any(part in weight.name for part in EMBEDDING_NAMES)
        numel = layout.numel([weight])
        if name == "lion" or (name == "muon" and is_matrix):
            total += 4 * numel
        elif name == "adafactor" and len(weight.shape) == 2:
            total += 4 * weight.times * (sum(weight.shape) + 1)
        elif name == "adamw_8bit" and weight.numel >= LEAST_IN_8_BITS * weight.times:
            total += 2 * (weight.numel + 4 * weight.numel // BLOCK_IN_8_BITS)
        else:
            total += 8 * numel + 4 * weight.times
    return total


def _head_bytes(components: Components, config: PretrainedConfig, critic: list[Weight], layout: WeightLayout) -> int:
    """Compute bytes for weights, gradients and AdamW state in heads and a separate critic."""
    if components.objective.traits.get("head") is None:
        return 0
    option = components.objective.traits.get("head_outputs")
    rows = 1
    if option is not None:
        classes = int(components.recipe.objective.options[option])
        if classes > 2:
            rows = classes
    learned = [Weight("head", (rows, config.hidden_size), 1), *(w for w in critic if "lm_head" not in w.name)]
    copies = 0
    if layout.keeps_whole:
        copies = 4 * sum(w.numel for w in learned)
    return 16 * layout.numel(learned) + copies


def _sampling_bytes(
    components: Components, config: PretrainedConfig, size: int, gpu_memory: int | None
) -> tuple[int, int]:
    """Compute bytes for the sampler's cache and for rollouts in CPU memory; 0 for supervised recipes.

    Rollouts take 9 bytes per token, plus 4 for weights and for each batch field. Sampling replay adds 16 bytes plus 4
    per kept token (at most 512).
    """
    recipe = components.recipe
    rollout = recipe.rollout
    if rollout is None:
        return 0, 0
    row = longest_row(rollout, recipe.prompt)
    group = 2 if components.unit == "pair" else rollout.group_size
    fields = components.needs | {"sampler_logprobs"}
    each = 9 + 4 * (1 + len(fields))
    if replays_sets(rollout, components.needs):
        each += 16 + 4 * min(rollout.top_k or MOST_KEPT, MOST_KEPT)
    rollouts = rollout.num_prompts * group * sum(row) * each
    if rollout.engine.name == "vllm":  # the server holds the cache
        return 0, rollouts
    return _cache_bytes(rollout, row, recipe.scale.processes, config, size, gpu_memory), rollouts


def _cache_bytes(
    rollout: RolloutSection,
    row: tuple[int, int],
    processes: int,
    config: PretrainedConfig,
    size: int,
    gpu_memory: int | None,
) -> int:
    """Compute key-value cache bytes for all sampling slots, with geometric growth, and for prompts.

    ``row``: maximum prompt and answer lengths in tokens.
    """
    prompt, answer = row
    prompts = -(-rollout.num_prompts // processes)
    slots = min(prompts * rollout.group_size, int(rollout.engine.options.get("slots", 64)))
    shares = gpu_memory is None and config.model_type in SHARES_PROMPTS and rollout.group_size > 1
    before = 0 if shares else prompt
    longest = before + answer
    columns = up_to(COLUMNS_ALIGNED, before + min(answer, FIRST_COLUMNS) + 1)
    if rollout.max_turns is not None:  # at least one token and one reply per turn
        num_turns = min(rollout.max_turns, max(1, answer // 2))
        longest += (num_turns - 1) * (STEPS_BETWEEN_LOOKS - 1)
    while columns <= longest:
        columns = up_to(COLUMNS_ALIGNED, int(columns * GROWTH) + 1)
    tokens = slots * columns
    if shares:
        tokens += -(-slots // rollout.group_size) * prompt
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * head_dim * size * tokens)
