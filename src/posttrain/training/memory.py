"""Estimate of the memory of one training process, part by part, from its recipe and its model's configuration.

Nothing is loaded: shapes come from one layer that is built without memory, the rest is arithmetic, for the longest
rows that the recipe allows (docs/how-to/fit-in-memory.md has the limits). With N tokens of a micro-batch in the
trainer's pass (a shared prompt counts once), Q and K slots of queries and keys, L layers, width d, MLP width f,
attention widths a and k, s bytes of a weight, a layer keeps for the backward pass, in bytes:

- the inputs of its linear layers, s · N · (2d + a + f), and of its norms, s · N · 2d (a + k more for norms of queries
  and keys), twice for RMS norms that are trained; inside of the MLP s · N · 3f (gated), 4f (GPT-2's GELU) or f. In fp32
  the families of ``models/forward/fused.py`` keep no normed values and 2f;
- attention: s · (2aQ + 2kK) + 4 · heads · Q, and the mask, s · Q · keys of a row, where a prompt is shared;
- under an adapter, norms in 4 bytes, and of every adapted layer an input in 4 bytes next to 4 · rank.

Those families on a GPU with products in 16 bits (weights in bf16, or ``train.precision: bf16``) keep, with r bytes of a
residual (those of a weight), r · N · 2d and r · N · (a + k) for the inputs of norms, 2 · N · (2d + 3f) for those of
products and SwiGLU, and no mask; an adapter without autocast has an input of 4 bytes for each of its layers.

With ``train.gradient_checkpointing`` that is one layer's, as far as it is more than the logits, and s · d · N · L.

Of P processes (``scale.processes``) each computes a P-th of the rows. With ``scale.sharding: fsdp2`` it holds a P-th of
the rows of each tensor, gradient and moment (the first process has the most); and while it computes, the tensors
outside of the layers, two layers, and the gradients of one. If the processes sample with the model, each has a whole
copy of it, and of a reference, in addition.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from posttrain.errors import PosttrainError
from posttrain.models.forward.fused import FAMILIES
from posttrain.models.forward.packing import ROUND_TOKENS
from posttrain.models.forward.predictions import gpu_memory_of, kept_elements, max_logit_elements
from posttrain.models.load import choose_device
from posttrain.models.published.planned import model_to_plan
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import AdapterSection, RolloutSection
from posttrain.training.checks import Components, resolve_components
from posttrain.training.optimizer import BLOCK_IN_8_BITS, EMBEDDING_NAMES, LEAST_IN_8_BITS

# Architectures whose activations were counted: whether queries and keys have norms.
QK_NORMS = {"qwen3": True, "olmo2": True, "qwen2": False, "llama": False, "gpt2": False}
SHARES_PROMPTS = ("qwen3", "qwen2", "llama")  # the sampler's fast path
UNSTATED_PROMPT = 256  # tokens, where the recipe does not bound prompts
FIRST_COLUMNS, COLUMNS_ALIGNED, GROWTH, STEPS_BETWEEN_LOOKS = 256, 16, 1.5, 8  # of the sampler
BYTES_OF_4_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)
BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by part of one process; see the module."""

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
        """Return the rows of a table: every part, and the largest sums held at a time."""
        names = {"gathered": "gathered layers", "optimizer": "optimizer state", "heads": "heads, critic"}
        names["kv_cache"] = "key/value cache"
        parts = [(names.get(part.name, part.name), getattr(self, part.name)) for part in fields(self)]
        return [*parts, ("most in an update", self.update), ("most while sampling", self.sampling)]

    @property
    def update(self) -> int:
        """Peak while gradients are computed."""
        return sum(getattr(self, part.name) for part in fields(self)) - self.kv_cache - self.rollouts

    @property
    def sampling(self) -> int:
        """Peak while the model samples, without gradients; 0 where it does not."""
        if not self.kv_cache:
            return 0
        return self.weights + self.optimizer + self.reference + self.heads + self.kv_cache


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the model: its name, its shape, in how many layers it is, and in and out of a linear layer."""

    name: str
    shape: tuple[int, ...]
    times: int
    linear: tuple[int, int] | None = None

    @property
    def numel(self) -> int:
        return self.times * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """The place of the weights: ``num_parts`` of each tensor, one in a process, and whether it has a whole copy too."""

    num_parts: int = 1
    keeps_whole: bool = False

    def numel(self, weights: list[Weight]) -> int:
        """Return the numbers of these weights in the part of the first process: the first rows of each."""
        return sum(w.times * math.prod((-(-w.shape[0] // self.num_parts), *w.shape[1:])) for w in weights)

    def held(self, num_bytes: float, weights: list[Weight]) -> int:
        """Return how many of the bytes of these weights a process holds, its part and a copy."""
        total = sum(w.numel for w in weights)
        if self.num_parts == 1 or not total:
            return round(num_bytes)
        copy_bytes = num_bytes if self.keeps_whole else 0.0
        return round(num_bytes * self.numel(weights) / total + copy_bytes)


@dataclass(frozen=True, slots=True)
class Micro:
    """A micro-batch of the longest rows: ``prompt`` and ``answer`` tokens each, in groups that share prompts.

    ``prompt`` is 0 where rows share nothing; their ``answer`` is then the whole row. One token of a row is left out
    where nothing reads its state.
    """

    rows: int
    groups: int
    prompt: int
    answer: int
    trained: int

    @property
    def queries(self) -> int:
        return self.groups * self.prompt + self.rows * self.answer

    @property
    def keys(self) -> int:
        return self.queries + self.rows * self.prompt


def estimate_memory(recipe: Recipe, gpu_bytes: int | None = None) -> Memory | str:
    """Return ``memory_of`` a resolved recipe, or the reason why there is no estimate.

    Args:
        gpu_bytes: memory of the GPU to plan for; None for what trains on this machine.
    """
    try:
        if gpu_bytes is None:
            device = choose_device(recipe.model.device if torch.cuda.is_available() else "cpu")
            gpu_bytes = gpu_memory_of(device)
        return memory_of(*model_to_plan(recipe, QK_NORMS), gpu_bytes)
    except PosttrainError as error:
        return str(error)


def memory_of(recipe: Recipe, config: PretrainedConfig, gpu_memory: int | None = None) -> Memory:
    """Return the memory of training a resolved recipe, by part.

    Args:
        config: a transformers configuration of an architecture in ``QK_NORMS``.
        gpu_memory: bytes of the GPU that trains; None for a CPU.

    Raises:
        RecipeError: parts of the recipe do not fit one another.
    """
    components = resolve_components(recipe)
    config = config.get_text_config()
    adapter = recipe.model.adapter
    size = BYTES[recipe.model.dtype]
    weights = weights_of(config)
    low_rank: list[Weight] = []
    trained = weights
    if adapter is not None:
        low_rank = list(_low_rank(weights, adapter))
        trained = low_rank
    layout = layout_of(recipe, components)
    base = layout.held(_base_bytes(weights, size, recipe.model.load_bits), weights)
    micro = micro_batch(recipe, components)
    logits = 0
    if not components.only_scores:
        logits = _logits(config, micro, size, gpu_memory, head_trained=adapter is None)
    activations = _activations(recipe, config, micro, size, weights, logits, on_gpu=gpu_memory is not None)
    gathered = 0
    if layout.num_parts > 1:
        gathered = _gathered_bytes([*weights, *low_rank], size, trained, config.num_hidden_layers)
    critic: list[Weight] = []
    has_values = components.objective.traits.get("head") == "value"
    if has_values and recipe.head is not None and recipe.head.trunk == "separate":
        critic = trained
        activations *= 2
        gathered *= 2
    reference = 0
    has_reference = "reference" in components.parts or bool(recipe.eval.num_kl_prompts)
    if has_reference and adapter is None:  # under an adapter it is the base
        apart = layout
        if layout.keeps_whole:
            apart = WeightLayout()  # that copy is not sharded
        reference = apart.held(_base_bytes(weights, size, recipe.model.load_bits), weights)
    return Memory(
        weights=base + layout.held(4 * sum(w.numel for w in low_rank), low_rank),
        gathered=gathered,
        gradients=4 * layout.numel(trained),
        optimizer=_optimizer_bytes(trained, recipe.optimizer.name, layout),
        reference=reference,
        heads=_head_bytes(components, config, critic, layout),
        activations=activations,
        logits=logits,
        kv_cache=_cache_bytes(recipe, config, size, gpu_memory),
        rollouts=_rollout_bytes(recipe, components),
    )


def layout_of(recipe: Recipe, components: Components) -> WeightLayout:
    """Return where the weights of a recipe's run are."""
    scale = recipe.scale
    if scale.sharding == "none" or scale.processes == 1:
        return WeightLayout()
    return WeightLayout(scale.processes, components.samples())


def weights_of(config: PretrainedConfig) -> list[Weight]:
    """Return all tensors of a model of this configuration, built on the meta device with one layer."""
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


def micro_batch(recipe: Recipe, components: Components) -> Micro:
    """Return the rows of a micro-batch when all are as long as the recipe allows."""
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
        prompt, own = longest_row(recipe, rollout)
        answer = own
        group = rollout.group_size
        if components.unit == "pair":
            group = 2
        rows = rollout.num_prompts * group // train.num_minibatches
        if group == 1:  # nothing shares the prompt
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


def longest_row(recipe: Recipe, rollout: RolloutSection) -> tuple[int, int]:
    """Return the largest number of tokens of a prompt and of its answer that the recipe allows."""
    prompt = recipe.prompt.max_prompt_tokens or UNSTATED_PROMPT
    limit = rollout.within(prompt + rollout.max_tokens)
    prompt = min(prompt, limit - 1)
    return prompt, rollout.within(prompt + rollout.max_tokens) - prompt


def _up_to(multiple: int, number: int) -> int:
    return -(-number // multiple) * multiple


def _low_rank(weights: list[Weight], adapter: AdapterSection) -> Iterator[Weight]:
    """Yield the two factors of each adapted layer."""
    for weight in weights:
        layer = f".{weight.name.removesuffix('.weight')}"
        is_meant = adapter.targets == "all-linear" or any(layer.endswith(f".{target}") for target in adapter.targets)
        if weight.linear is not None and is_meant:
            size_in, size_out = weight.linear
            yield Weight(f"{weight.name}.A", (adapter.rank, size_in), weight.times)
            yield Weight(f"{weight.name}.B", (size_out, adapter.rank), weight.times)


def _base_bytes(weights: list[Weight], size: int, bits: int | None) -> int:
    """Return bytes of all weights; linear layers have 4 more a row in 8 bits, and a scale for 64 numbers in 4 bits."""
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
    """Return bytes that a pass of a sharded model gathers: what is outside of the layers, all the time; one layer and
    the next, and a layer's gradients. The gradient of a trained head counts with the logits.
    """
    in_layers = [w for w in weights if w.times == num_layers and ".0." in w.name]
    outside = [w for w in weights if w not in in_layers]
    gradients = 4 * sum(w.numel // w.times for w in trained if w in in_layers)
    return size * (sum(w.numel for w in outside) + 2 * sum(w.numel // w.times for w in in_layers)) + gradients


def _optimizer_bytes(trained: list[Weight], name: str, layout: WeightLayout) -> int:
    """Return bytes of the state: two numbers a weight, and a count, for AdamW; one for Lion and for Muon's matrices."""
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
    """Return bytes of the weight, gradient and AdamW state of a head, and of a separate critic."""
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


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer of the model as it is computed: widths in numbers, and ``size``, the bytes of a number of its weights.

    ``queries``, ``keys``: of all heads of a token. ``inner``: of the feed-forward part. ``is_half``: products are
    computed in 16 bits on a GPU. ``is_fused``: our own kernels compute norms and gates.
    """

    family: str
    width: int
    heads: int
    queries: int
    keys: int
    inner: int
    size: int
    is_autocast: bool
    is_half: bool
    is_fused: bool
    keeps_gelu: bool

    @property
    def is_gpt2(self) -> bool:
        return self.family == "gpt2"

    @property
    def inputs(self) -> int:
        """The inputs of the linear layers."""
        return 2 * self.width + self.queries + self.inner

    @property
    def normed(self) -> int:
        """The inputs of the norms."""
        if QK_NORMS[self.family]:
            return 2 * self.width + self.queries + self.keys
        return 2 * self.width

    @property
    def between(self) -> int:
        """The numbers that are kept between the two products of the feed-forward part."""
        if self.is_gpt2 and self.keeps_gelu:
            return 4 * self.inner
        if self.is_gpt2:
            return self.inner
        if self.is_fused:
            return 2 * self.inner
        return 3 * self.inner


def _layer_of(recipe: Recipe, config: PretrainedConfig, size: int, *, on_gpu: bool) -> _Layer:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    num_key_heads = getattr(config, "num_key_value_heads", None) or heads
    is_autocast = recipe.train.precision == "bf16"
    is_half = on_gpu and (size == 2 or is_autocast)
    has_kernels = size == 4
    if is_half:
        has_kernels = not recipe.model.load_bits
    if config.model_type == "gpt2":
        inner = config.n_inner or 4 * config.n_embd
    else:
        inner = config.intermediate_size
    return _Layer(
        family=config.model_type,
        width=config.hidden_size,
        heads=heads,
        queries=heads * head_dim,
        keys=num_key_heads * head_dim,
        inner=inner,
        size=size,
        is_autocast=is_autocast,
        is_half=is_half,
        is_fused=config.model_type in FAMILIES and has_kernels,
        keeps_gelu=getattr(config, "activation_function", None) == "gelu_new",
    )


def _activations(
    recipe: Recipe,
    config: PretrainedConfig,
    micro: Micro,
    size: int,
    weights: list[Weight],
    logits: int,
    *,
    on_gpu: bool,
) -> int:
    """Return bytes that the layers, the final norm and its reader keep for the backward pass."""
    layer = _layer_of(recipe, config, size, on_gpu=on_gpu)
    adapter = recipe.model.adapter
    tokens = _up_to(ROUND_TOKENS, micro.queries)
    if adapter is None:
        of_token = _trained_bytes(layer)
    else:
        factors = [w for w in _low_rank(weights, adapter) if w.name.endswith(".A")]
        of_token = _adapted_bytes(layer, adapter, factors)
    of_layer = _attention_bytes(layer, micro) + tokens * of_token
    of_layers = of_layer * config.num_hidden_layers
    if recipe.train.gradient_checkpointing:  # the inputs of the layers, and one layer that is computed again
        gates = 3
        if layer.is_fused:
            gates = 2
        again = of_layer + gates * layer.inner * size * tokens
        of_layers = size * layer.width * tokens * config.num_hidden_layers + max(again - logits, 0)
    num_final = 1
    if adapter is None and not layer.is_gpt2 and not layer.is_fused:
        num_final = 2
    return int(of_layers + size * layer.width * (num_final * tokens + _up_to(ROUND_TOKENS, micro.trained)))


def _attention_bytes(layer: _Layer, micro: Micro) -> int:
    """Return bytes of queries, keys, values and outputs, of the normalizers, and of the mask where there is one."""
    number = layer.size
    seen = layer.keys
    if layer.is_half:
        number = 2
        if _repeats_keys():
            seen = layer.queries
    kept = number * (2 * layer.queries * micro.queries + 2 * seen * micro.keys) + 4 * layer.heads * micro.queries
    if micro.prompt and not layer.is_half:
        kept += layer.size * micro.rows * micro.answer * (micro.prompt + micro.answer)
    return kept


def _trained_bytes(layer: _Layer) -> int:
    """Return bytes that a token leaves in norms and products of a layer, all of whose weights are trained."""
    if layer.is_half and layer.is_fused:
        return layer.size * layer.normed + 2 * 2 * layer.inner + 2 * (2 * layer.width + layer.inner)
    num_norms = 2
    if layer.is_gpt2 or layer.is_fused:
        num_norms = 1
    return layer.size * (layer.inputs + num_norms * layer.normed + layer.between)


def _adapted_bytes(layer: _Layer, adapter: AdapterSection, factors: list[Weight]) -> int:
    """Return bytes that a token leaves in a layer under an adapter, whose first factors are ``factors``."""
    targets = [w.shape[1] for w in factors]
    inner = adapter.rank * len(targets)  # between the two factors
    if layer.is_half and layer.is_fused:
        kept = layer.size * layer.normed + 2 * 2 * layer.inner
        number = 4
        own = sum(targets)
        if layer.is_autocast:
            number = 2
        if layer.is_autocast and not adapter.dropout:
            # layers of one place share their input; attention keeps its own output
            places = {(w.name.rsplit(".", 3)[0], w.shape[1]) for w in factors if ".o_proj." not in w.name}
            own = sum(size_in for _, size_in in places)
        kept += number * (own + inner)
        if adapter.dropout:
            kept += sum(targets)
        return kept
    kept = 4 * inner + layer.size * layer.between
    if adapter.dropout:
        kept += 5 * sum(targets)
    if layer.size == 4:
        kept += 4 * layer.inputs
    elif not adapter.dropout:
        kept += 4 * sum(targets)
    if layer.is_gpt2:
        return kept + layer.size * layer.normed
    return kept + 4 * layer.normed


@cache
def _repeats_keys() -> bool:
    """Return True where variable-length attention wants a key for every query head (torch 2.11)."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" not in inspect.signature(varlen_attn).parameters


def _logits(config: PretrainedConfig, micro: Micro, size: int, gpu_memory: int | None, *, head_trained: bool) -> int:
    """Return bytes of the logits, probabilities and gradients of the tokens that are computed at a time (16 or 18 bytes
    each), and of a trained head's gradient and kept probabilities."""
    trained = _up_to(ROUND_TOKENS, micro.trained)
    rows = min(trained, max(1, max_logit_elements(gpu_memory) // config.vocab_size))
    numbers = rows * (16 if size == 4 else 18)
    if head_trained:
        kept = 0
        if rows < trained:
            kept = min(trained, kept_elements(gpu_memory) // config.vocab_size)
        numbers += 4 * (config.hidden_size + kept)
    return int(numbers * config.vocab_size)


def _cache_bytes(recipe: Recipe, config: PretrainedConfig, size: int, gpu_memory: int | None) -> int:
    """Return bytes of the keys and values of each slot that samples, whose columns grow by halves, and of prompts."""
    rollout = recipe.rollout
    if rollout is None or rollout.engine.name == "vllm":  # that one's cache is the server's
        return 0
    prompts = -(-rollout.num_prompts // recipe.scale.processes)
    slots = min(prompts * rollout.group_size, int(rollout.engine.options.get("slots", 64)))
    prompt, answer = longest_row(recipe, rollout)
    shares = gpu_memory is None and config.model_type in SHARES_PROMPTS and rollout.group_size > 1
    before = 0 if shares else prompt
    longest = before + answer
    columns = _up_to(COLUMNS_ALIGNED, before + min(answer, FIRST_COLUMNS) + 1)
    if rollout.max_turns is not None:  # a turn has a token, and its reply
        num_turns = min(rollout.max_turns, max(1, answer // 2))
        longest += (num_turns - 1) * (STEPS_BETWEEN_LOOKS - 1)
    while columns <= longest:
        columns = _up_to(COLUMNS_ALIGNED, int(columns * GROWTH) + 1)
    tokens = slots * columns
    if shares:
        tokens += -(-slots // rollout.group_size) * prompt
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * head_dim * size * tokens)


def _rollout_bytes(recipe: Recipe, components: Components) -> int:
    """Return bytes in main memory: 9 a token of a batch of rollouts, and 4 for each batch field and the weights."""
    rollout = recipe.rollout
    if rollout is None:
        return 0
    group = 2 if components.unit == "pair" else rollout.group_size
    fields = components.needs | {"sampler_logprobs"}
    return rollout.num_prompts * group * sum(longest_row(recipe, rollout)) * (9 + 4 * (1 + len(fields)))
