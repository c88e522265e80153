"""What one process of a training run holds in memory, part by part, from its recipe and its model's configuration.

Nothing is loaded and nothing runs: shapes come from one layer that is built without memory, the rest is arithmetic. The
numbers are for the longest rows that the recipe allows. With N tokens of a micro-batch in the stream that the trainer
computes over (a prompt that several rows share once; up to a multiple of 128), Q and K slots of queries and keys (a row
that continues a shared prompt has it among its keys), M trained tokens, L layers, width d, MLP width f, widths
a = heads · head_dim and k = kv_heads · head_dim, s bytes of a weight (2 for bfloat16, else 4), the parts are, in bytes:

weights
    s for each number, 4 for each number of an adapter; with ``load_bits`` 1 for each number of a linear layer and 4 for
    each of its rows (8 bits), or 0.516 (4 bits and their scales).
gradients, optimizer state
    4 for each trained number; AdamW keeps two more such numbers and a count for each tensor, Muon one for each matrix.
reference
    s for each number where a stream or an evaluation reads one; nothing with a new adapter, which is switched off.
heads, critic
    16 for each number of a head, and of a critic of its own that is trained (weight, gradient, AdamW's state).
activations
    of a layer and token, in numbers of the weights' type: the inputs of linear layers 2d + a + f; of its norms 2d, with
    norms of queries and keys a + k more, and for RMS norms that are trained the normed values once more; inside of the
    MLP 3f (gated), 4f (GPT-2's GELU) or f. In fp32 the families of ``models/forward/fused.py`` keep no normed values
    and 2f. Attention keeps s · (2aQ + 2kK), 4 · heads · Q and, where a prompt is
    shared, the mask, s · Q · keys of a row. Under an adapter, RMS norms of bfloat16 keep their inputs in 4 bytes, and
    every adapted layer keeps an input of its own in 4 bytes beside 4 · rank. Behind the layers it is
    s · d · (N + M), and N once more where an RMS norm is trained. With
    ``train.gradient_checkpointing`` s · d · N · L and, as far as that is more than the logits, which are gone by then,
    the activations of one layer with 3f · s · N (2f where 2f are kept) for the gradients inside of it.
logits
    of R = min(M, 2^24 / vocabulary) tokens at a time: R · vocabulary · 16 (18 in half precision) for logits,
    probabilities and their gradients; 4 · d · vocabulary more for the gradient of a head that is trained, and on a CPU,
    if R < M, 4 for each probability that is kept, 2^27 at most. On a GPU it is 2^28 in place of 2^24, or a 256th of its
    bytes where that is less, and a sixteenth of its bytes is kept.
key/value cache
    2 · L · k · s for each column of each slot that samples, whose number grows by halves, and for each shared prompt.
    Columns are those of the longest answer (of all turns and replies: ``rollout.max_tokens``) and, between two turns,
    up to 7 that pass on a GPU until the drawn tokens are looked at.
rollouts
    9 for each token of a batch of rollouts, and 4 for each stream and the weights (in main memory).

Not counted: the libraries and the device's own memory, fragments of the allocator, the weights of a teacher or of a
reward model, held-out evaluation, data sets in main memory, and what one operation needs while it runs. Attention that
runs without a fused kernel keeps more.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from posttrain.errors import PosttrainError, UsageError
from posttrain.models.forward.forward import gpu_memory_of, kept_elements, max_logit_elements
from posttrain.models.forward.fused import FAMILIES
from posttrain.models.forward.packing import ROUND_TOKENS
from posttrain.models.load import choose_device, stated_config
from posttrain.models.sources import ADAPTER_CONFIG, is_adapter, resolve_model_name
from posttrain.models.stated_sizes import read_object
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import AdapterSection, RolloutSection
from posttrain.train.checks import Words, words_of
from posttrain.train.optimizer import EMBEDDING_NAMES

# Architectures whose layers are all alike and whose activations were counted: whether queries and keys have norms.
QK_NORMS = {"qwen3": True, "olmo2": True, "qwen2": False, "llama": False, "gpt2": False}
SHARES_PROMPTS = ("qwen3", "qwen2", "llama")  # the sampler's lean path
UNSTATED_PROMPT = 256  # tokens, where the recipe does not bound prompts
FIRST_COLUMNS, COLUMNS_ALIGNED, GROWTH, STEPS_BETWEEN_LOOKS = 256, 16, 1.5, 8  # of the sampler
BYTES_OF_4_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by part; see the module."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    heads: int
    activations: int
    logits: int
    kv_cache: int
    rollouts: int

    def rows(self) -> list[tuple[str, int]]:
        """What a table says: every part, and the most that is held at a time."""
        names = {"optimizer": "optimizer state", "heads": "heads, critic", "kv_cache": "key/value cache"}
        parts = [(names.get(part.name, part.name), getattr(self, part.name)) for part in fields(self)]
        return [*parts, ("most in an update", self.update), ("most while sampling", self.sampling)]

    @property
    def update(self) -> int:
        """The most that is held while gradients are computed."""
        return sum(getattr(self, part.name) for part in fields(self)) - self.kv_cache - self.rollouts

    @property
    def sampling(self) -> int:
        """The most that is held while the model samples: gradients are gone by then. 0 where it does not."""
        kept = self.weights + self.optimizer + self.reference + self.heads
        return kept + self.kv_cache if self.kv_cache else 0


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the model: its place, its shape, in how many layers it is, and in and out of a linear layer."""

    name: str
    shape: tuple[int, ...]
    times: int
    linear: tuple[int, int] | None = None

    @property
    def numel(self) -> int:
        return self.times * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Micro:
    """A micro-batch of rows of the longest kind: ``prompt`` and ``answer`` tokens each, in groups that share prompts.

    ``prompt`` is 0 where rows share nothing; their ``answer`` is then the whole row. One token of a row is left out
    where nothing reads its state.
    """

    rows: int
    groups: int
    prompt: int
    answer: int
    trained: int

    @property
    def tokens(self) -> int:
        return _rounded(self.groups * self.prompt + self.rows * self.answer)

    @property
    def queries(self) -> int:
        return self.groups * self.prompt + self.rows * self.answer

    @property
    def keys(self) -> int:
        return self.groups * self.prompt + self.rows * (self.prompt + self.answer)

    @property
    def masked(self) -> int:
        return self.rows * self.answer * (self.prompt + self.answer) if self.prompt else 0


def stated_memory(recipe: Recipe) -> Memory | str:
    """``memory_of`` a resolved recipe on this machine by the configuration that is at hand, or in a few words why there
    is none."""
    try:
        device = choose_device(recipe.model.device if torch.cuda.is_available() else "cpu")
        return memory_of(*counted(recipe), gpu_memory_of(device))
    except PosttrainError as error:
        return str(error)


def counted(recipe: Recipe) -> tuple[Recipe, Any]:
    """A resolved recipe as ``memory_of`` takes it, and the configuration of its model.

    Raises:
        UsageError: the configuration is not at hand, or of an architecture that was not worked out.
    """
    config = stated_config(recipe.model)
    if config is None:
        raise UsageError(
            f"the configuration of {recipe.model.name} is not at hand (a folder, a run or the hub's cache has one)"
        )
    if config.model_type not in QK_NORMS:
        raise UsageError(
            f"it was not worked out for the architecture {config.model_type} (for {', '.join(QK_NORMS)} it was)"
        )
    return _with_loaded_adapter(recipe), config


def _with_loaded_adapter(recipe: Recipe) -> Recipe:
    """The recipe as if the adapter that its model is were a new one."""
    if recipe.model.init is not None or recipe.model.adapter is not None:
        return recipe
    source = resolve_model_name(recipe.model.name)
    if not is_adapter(source):
        return recipe
    settings = read_object(Path(source) / ADAPTER_CONFIG)
    try:
        section = AdapterSection(rank=settings["r"], targets=settings["target_modules"])
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"{source}: {ADAPTER_CONFIG} does not say r and target_modules") from None
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"adapter": section})})


def memory_of(recipe: Recipe, config: Any, gpu_memory: int | None = None) -> Memory:
    """The memory of training as a resolved recipe says, by part.

    Args:
        config: a transformers configuration of an architecture in ``QK_NORMS``.
        gpu_memory: bytes of the GPU that trains; None for a CPU.

    Raises:
        RecipeError: words of the recipe do not fit one another.
    """
    words, config = words_of(recipe), config.get_text_config()
    adapter, size = recipe.model.adapter, bytes_of(recipe)
    weights = weights_of(config)
    low_rank = list(_low_rank(weights, adapter)) if adapter is not None else []
    trained = low_rank if adapter is not None else weights
    base = _base_bytes(weights, size, recipe.model.load_bits)
    num_trained = sum(w.numel for w in trained)
    micro = micro_batch(recipe, words)
    has_critic = words.objective.traits.get("head") == "value" and recipe.head and recipe.head.trunk == "separate"
    logits = 0 if words.only_scores else _logits(config, micro, size, gpu_memory, head_trained=adapter is None)
    of_layer = _of_layer(config, micro, size, adapter, weights)
    if recipe.train.gradient_checkpointing:
        again = of_layer + (2 if _is_fused(config, size) else 3) * _mlp(config)[0] * size * micro.tokens
        of_layers = size * config.hidden_size * micro.tokens * config.num_hidden_layers + max(again - logits, 0)
    else:
        of_layers = of_layer * config.num_hidden_layers
    activations = of_layers + _behind_layers(config, micro, size, norm_trained=adapter is None)
    reads = "reference" in words.parts or bool(recipe.eval.drift_prompts)
    return Memory(
        weights=base + 4 * sum(w.numel for w in low_rank),
        gradients=4 * num_trained,
        optimizer=_optimizer_bytes(
            trained, recipe.optimizer.name, recipe.train.offload != "none" and gpu_memory is not None
        ),
        reference=base if reads and adapter is None else 0,
        heads=_head_bytes(words, config, trained, critic=bool(has_critic)),
        activations=activations * (2 if has_critic else 1),
        logits=logits,
        kv_cache=_cache_bytes(recipe, config, size, gpu_memory),
        rollouts=_rollout_bytes(recipe, words),
    )


def weights_of(config: Any) -> list[Weight]:
    """All tensors of a model of this configuration, without memory for any: one layer stands for all of them."""
    layers = config.num_hidden_layers
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
        Weight(name, tuple(p.shape), layers if ".0." in name else 1, linear.get(name))
        for name, p in model.named_parameters()
    ]


def micro_batch(recipe: Recipe, words: Words) -> Micro:
    """The rows that go through the trainer at a time when all are as long as the recipe allows."""
    train, rollout, unread = recipe.train, recipe.rollout, 0 if words.only_scores else 1
    unit = 2 if words.level == "pair" else 1
    if rollout is None:
        assert recipe.data is not None, "a recipe has 'rollout' or 'data'"
        prompt, answer, group = 0, recipe.data.max_tokens, 1
        rows = recipe.data.batch * unit
    else:
        prompt, answer = longest_row(recipe, rollout)
        group = 2 if words.unit == "pair" else rollout.group
        rows = rollout.prompts * group // train.minibatches
        if group == 1:
            prompt, answer = 0, prompt + answer
    most = min(rows, train.rows_per_micro or rows)
    count = unit
    while count + unit <= most and _cost(count + unit, group, prompt, answer) <= train.tokens_per_micro:
        count += unit
    trained = count * (longest_row(recipe, rollout)[1] if rollout is not None else answer - unread)
    return Micro(count, -(-count // group), prompt, answer - unread, trained)


def bytes_of(recipe: Recipe) -> int:
    """Bytes of a weight."""
    return {"bfloat16": 2, "float32": 4, "float64": 8}[recipe.model.dtype]


def longest_row(recipe: Recipe, rollout: RolloutSection) -> tuple[int, int]:
    """Tokens of a prompt and of its answer, as long as the recipe allows."""
    prompt = recipe.prompt.max_prompt_tokens or UNSTATED_PROMPT
    prompt = min(prompt, recipe.within(prompt + rollout.max_tokens) - 1)
    return prompt, recipe.within(prompt + rollout.max_tokens) - prompt


def _cost(rows: int, group: int, prompt: int, answer: int) -> int:
    return -(-rows // group) * prompt + rows * answer


def _rounded(tokens: int) -> int:
    return -(-tokens // ROUND_TOKENS) * ROUND_TOKENS


def _low_rank(weights: list[Weight], adapter: AdapterSection) -> Iterator[Weight]:
    """The two factors of each adapted layer."""
    for weight in _targets(weights, adapter):
        assert weight.linear is not None
        size_in, size_out = weight.linear
        yield Weight(f"{weight.name}.A", (adapter.rank, size_in), weight.times)
        yield Weight(f"{weight.name}.B", (size_out, adapter.rank), weight.times)


def _targets(weights: list[Weight], adapter: AdapterSection) -> list[Weight]:
    def is_meant(name: str) -> bool:
        layer = f".{name.removesuffix('.weight')}"
        return adapter.targets == "all-linear" or any(layer.endswith(f".{target}") for target in adapter.targets)

    return [w for w in weights if w.linear is not None and is_meant(w.name)]


def _base_bytes(weights: list[Weight], size: int, bits: int | None) -> int:
    total = 0.0
    for weight in weights:
        if bits is None or weight.linear is None:
            total += size * weight.numel
        elif bits == 8:
            total += weight.numel + 4 * weight.times * weight.linear[1]
        else:
            total += BYTES_OF_4_BITS * weight.numel
    return round(total)


def _optimizer_bytes(trained: list[Weight], name: str, offloaded: bool) -> int:
    """Of all of it; of what is on the GPU at a time, where it is ``offloaded``."""
    total = most = 0
    for weight in trained:
        is_matrix = len(weight.shape) == 2 and not any(part in weight.name for part in EMBEDDING_NAMES)
        by_muon = name == "muon" and is_matrix
        of_weight = 4 * weight.numel if by_muon else 8 * weight.numel + 4 * weight.times
        total += of_weight
        most = max(most, of_weight if by_muon else of_weight // weight.times)
    return most if offloaded else total


def _head_bytes(words: Words, config: Any, trained: list[Weight], *, critic: bool) -> int:
    if words.objective.traits.get("head") is None:
        return 0
    option = words.objective.traits.get("head_outputs")
    classes = int(words.recipe.objective.options[option]) if option is not None else 1
    head = config.hidden_size * (1 if classes <= 2 else classes)
    body = sum(w.numel for w in trained if "lm_head" not in w.name) if critic else 0
    return 16 * (head + body)


def _behind_layers(config: Any, micro: Micro, size: int, *, norm_trained: bool) -> int:
    """Bytes that the final norm and what reads its output keep."""
    normed = 2 if norm_trained and _mlp(config)[2] and not _is_fused(config, size) else 1
    return size * int(config.hidden_size) * (normed * micro.tokens + _rounded(micro.trained))


def _is_fused(config: Any, size: int) -> bool:
    return size == 4 and config.model_type in FAMILIES


def _of_layer(config: Any, micro: Micro, size: int, adapter: AdapterSection | None, weights: list[Weight]) -> int:
    """Bytes that one layer keeps for the backward pass."""
    width, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or width // heads
    queries, keys = heads * head_dim, head_dim * (getattr(config, "num_key_value_heads", None) or heads)
    inner, within, is_rms = _mlp(config)
    if is_fused := _is_fused(config, size):
        within = 2 * inner
    inputs = 2 * width + queries + inner
    normed = 2 * width + (queries + keys if QK_NORMS[config.model_type] else 0)
    attention = size * (2 * queries * micro.queries + 2 * keys * micro.keys)
    attention += 4 * heads * micro.queries + size * micro.masked
    if adapter is None:
        return attention + micro.tokens * size * (inputs + normed * (2 if is_rms and not is_fused else 1) + within)
    targets = [w.linear[0] for w in _targets(weights, adapter) if w.linear is not None]
    own = 4 * adapter.rank * len(targets) + (5 * sum(targets) if adapter.dropout else 0)
    own += 4 * inputs if size == 4 else 0 if adapter.dropout else 4 * sum(targets)
    return attention + micro.tokens * (own + (4 if is_rms else size) * normed + size * within)


def _mlp(config: Any) -> tuple[int, int, bool]:
    """(f; numbers kept inside of the MLP; whether norms are RMS norms)."""
    if config.model_type != "gpt2":
        return config.intermediate_size, 3 * config.intermediate_size, True
    inner = config.n_inner or 4 * config.n_embd
    return inner, (4 if config.activation_function == "gelu_new" else 1) * inner, False


def _logits(config: Any, micro: Micro, size: int, gpu_memory: int | None, *, head_trained: bool) -> int:
    trained = _rounded(micro.trained)
    rows = min(trained, max(1, max_logit_elements(gpu_memory) // config.vocab_size))
    numbers = rows * (16 if size == 4 else 18)
    if head_trained:
        kept = min(trained, kept_elements(gpu_memory) // config.vocab_size) if rows < trained else 0
        numbers += 4 * (config.hidden_size + kept)
    return numbers * config.vocab_size


def _cache_bytes(recipe: Recipe, config: Any, size: int, gpu_memory: int | None) -> int:
    rollout = recipe.rollout
    if rollout is None or rollout.engine.name == "vllm":  # that one's cache is the server's
        return 0
    slots = min(rollout.prompts * rollout.group, int(rollout.engine.options.get("slots", 64)))
    prompt, answer = longest_row(recipe, rollout)
    shares = gpu_memory is None and config.model_type in SHARES_PROMPTS and rollout.group > 1
    before = 0 if shares else prompt
    columns, longest = _aligned(before + min(answer, FIRST_COLUMNS) + 1), before + answer
    if rollout.max_turns is not None:  # a turn has a token, and its reply
        longest += (min(rollout.max_turns, max(1, answer // 2)) - 1) * (STEPS_BETWEEN_LOOKS - 1)
    while columns <= longest:
        columns = _aligned(int(columns * GROWTH) + 1)
    tokens = slots * columns + (-(-slots // rollout.group) * prompt if shares else 0)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim * size * tokens


def _aligned(columns: int) -> int:
    return -(-columns // COLUMNS_ALIGNED) * COLUMNS_ALIGNED


def _rollout_bytes(recipe: Recipe, words: Words) -> int:
    rollout = recipe.rollout
    if rollout is None:
        return 0
    group = 2 if words.unit == "pair" else rollout.group
    tokens = sum(longest_row(recipe, rollout))
    streams = words.needs | {"sampler_logprobs"}
    return rollout.prompts * group * tokens * (9 + 4 * (1 + len(streams)))
