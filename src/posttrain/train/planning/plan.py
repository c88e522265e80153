"""Memory and seconds of a recipe on so many GPUs, by part: arithmetic, from the recipe and its model's configuration.

Every GPU has its share of the rows. Memory is that of ``train/memory`` for this share. ``none``: every GPU holds the
whole model. ``fsdp2``: weights, gradients, optimizer, reference and heads are cut into as many parts, and two layers
and what stands outside of the layers are gathered at a time; where the trainer samples, the whole model stays beside
the parts (with its heads), and the reference is whole. The key/value cache and activations are each GPU's own.

Seconds are rates of the data sheet times the shares of them that are assumed (``MFU``, ``BANDWIDTH_SHARE``), with n
matrix weights, answers of the longest kind unless told otherwise, and for each token:

generate
    decoding, step by step (``decoding``): the larger of reading weights and cache and of 2n operations a row,
    but not less than ``SECONDS_PER_LAYER`` for each layer, for the host issues the operations one by one; and 2n for
    each prompt token once. With answers of many lengths, the mean over ``2 * WARM_UP`` batches.
score
    2n for each model that scores: a reference, the trainer's own log-probabilities, a critic, a teacher of that size.
update
    6n (4n under an adapter), 2n more with gradient checkpointing, for each epoch.
sync
    gradients between GPUs, once there and back over the link; with fsdp2 the weights twice more. Weights that go to a
    process that samples ahead, through main memory.

Attention adds 4 · layers · width · (tokens before it) to 2n. Grading by programs is not counted, nor are evaluations,
checkpoints, stragglers among GPUs, and links between nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any

from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import AdapterSection
from posttrain.train.checks import Words, words_of
from posttrain.train.memory import Memory, bytes_of, counted, longest_row, memory_of, weights_of
from posttrain.train.planning.decoding import Decoder
from posttrain.train.planning.gpus import Gpu
from posttrain.train.planning.lengths import Draw, alike, batch_of
from posttrain.train.planning.virtual import simulate, simulate_partial

MFU = 0.4  # of the peak rate, in training and where whole rows are read
BANDWIDTH_SHARE = 0.6  # of the memory's bandwidth, in decoding
LINK_SHARE = 0.7
SECONDS_PER_LAYER = 0.18e-3  # 28 operations a layer and token step: about 5 ms for 28 layers, read and not measured
PIPE_BYTES = 1e9  # a second, into the process that samples ahead
USABLE = 0.92  # of a GPU's memory; the rest is for libraries and fragments
GIB = 2**30
WARM_UP = 8  # batches of the schedule that are not counted
SHARDINGS = ("none", "fsdp2")


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of one rollout batch with all its updates, or of one step on data."""

    generate: float
    score: float
    update: float
    sync: float

    @property
    def total(self) -> float:
        """Where one follows the other."""
        return self.generate + self.score + self.update + self.sync


@dataclass(frozen=True, slots=True)
class Plan:
    """What a recipe would take on ``count`` GPUs.

    ``memory``: of one GPU, by sharding. ``fits``: the shardings that fit. ``micro``: what the activations are of.
    ``changes``: keys that make it fit, each list of them by itself; empty where it fits or nothing helps.
    ``ahead``: seconds of a batch where sampling has as many GPUs of its own, by staleness; ``partial``: where it has
    one (the engines that go on with answers sample in one process), and answers go on across updates.
    """

    count: int
    gpu: Gpu
    memory: dict[str, Memory]
    seconds: Seconds
    updates: int
    changes: list[list[str]]
    ahead: dict[int, float]
    partial: dict[int, float]

    @property
    def fits(self) -> list[str]:
        """The shardings with which one GPU can hold its part."""
        return [name for name, memory in self.memory.items() if most(memory) <= room(self.gpu)]

    @property
    def loading(self) -> int:
        """Bytes of main memory that a process takes while it loads the model, with a copy as the reference."""
        return self.memory["none"].weights + self.memory["none"].reference


def plan_for(recipe: Recipe, count: int, gpu: Gpu, lengths: Draw | None = None) -> Plan:
    """Memory, seconds and schedule of a resolved recipe on ``count`` GPUs.

    Args:
        lengths: of answers, or of rows of data; by default all are the longest.

    Raises:
        UsageError: the model's configuration is not at hand, or of an architecture that was not worked out.
        RecipeError: words of the recipe do not fit one another.
    """
    recipe, config = counted(recipe)
    memory = {name: memory_per_gpu(recipe, config, count, name, gpu) for name in SHARDINGS[: 1 if count == 1 else 2]}
    work = _work(recipe, config, count, gpu, lengths)
    plan = Plan(count, gpu, memory, work.mean(), recipe.train.epochs * recipe.train.minibatches, [], {}, {})
    if not plan.fits:
        plan.changes.extend(_changes(recipe, config, count, gpu))
    if (rollout := recipe.rollout) is not None:
        ahead = sorted({1, rollout.staleness} - {0})
        plan.ahead.update({s: _batch_seconds(recipe, s, work, partial=False) for s in (0, *ahead)})
        if rollout.partial or (lengths is not None and _may_go_on(recipe)):
            plan.partial.update({s: _batch_seconds(recipe, s, work, partial=True) for s in ahead})
    return plan


def most(memory: Memory) -> int:
    """The most bytes that a GPU holds at a time."""
    return max(memory.update, memory.sampling)


def room(gpu: Gpu) -> float:
    """Bytes of a GPU that a plan may fill."""
    return USABLE * gpu.memory * GIB


def memory_per_gpu(recipe: Recipe, config: Any, count: int, sharding: str, gpu: Gpu) -> Memory:
    """The parts that one of ``count`` GPUs holds; ``config`` as ``memory_of`` takes it."""
    whole = memory_of(_share_of(recipe, count), config, int(gpu.memory * GIB))
    if sharding == "none" or count == 1:
        return whole
    parts = {part.name: getattr(whole, part.name) for part in fields(whole)}
    samples = words_of(recipe).samples()
    for name in ("weights", "gradients", "optimizer", "heads", *(() if samples else ("reference",))):
        parts[name] = -(-parts[name] // count)
    size = bytes_of(recipe)
    tensors = weights_of(config.get_text_config())
    of_layers = sum(w.numel // w.times for w in tensors if ".0." in w.name)
    outside = sum(w.numel for w in tensors if ".0." not in w.name)
    parts["weights"] += size * (outside + 2 * of_layers) + (whole.weights if samples else 0)
    parts["heads"] += whole.heads // 4 if samples else 0  # of weight, gradient and two moments
    return Memory(**parts)


def _share_of(recipe: Recipe, count: int) -> Recipe:
    """The recipe of one GPU's rows."""
    if recipe.rollout is not None:
        parts = recipe.train.minibatches
        share = -(-recipe.rollout.prompts // (count * parts)) * parts  # every minibatch is shared
        return recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"prompts": share})})
    assert recipe.data is not None, "a recipe has 'rollout' or 'data'"
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"batch": -(-recipe.data.batch // count)})})


@dataclass(frozen=True, slots=True)
class _Work:
    """What rollout batches take. ``each``: seconds without those of sampling; ``lengths``: of the answers by batch and
    prompt, and ``generate``: the seconds of sampling each batch, in ``2 * WARM_UP`` of them; none where rows are data.
    """

    each: Seconds
    decoder: Decoder | None = None
    lengths: tuple[list[list[int]], ...] = ()
    generate: tuple[float, ...] = ()

    def mean(self) -> Seconds:
        """Of a batch, in the mean."""
        return replace(self.each, generate=fmean(self.generate)) if self.generate else self.each


def _work(recipe: Recipe, config: Any, count: int, gpu: Gpu, lengths: Draw | None) -> _Work:
    words, text = words_of(recipe), config.get_text_config()
    size = bytes_of(recipe)
    peak = {2: gpu.bf16, 4: gpu.fp32, 8: gpu.fp32 / 2}[size] * 1e12
    tensors = weights_of(text)
    n = sum(w.numel for w in tensors if w.linear is not None) + text.hidden_size * text.vocab_size
    rollout, data = recipe.rollout, recipe.data
    batches: tuple[list[list[int]], ...]
    if rollout is not None:
        prompt, longest = longest_row(recipe, rollout)
        of_group, num_prompts = rollout.group, rollout.prompts
    else:
        assert data is not None, "a recipe has 'rollout' or 'data'"
        prompt, longest = 0, data.max_tokens
        of_group, num_prompts = (2 if words.level == "pair" else 1), data.batch
    rows, draw = num_prompts * of_group / count, lengths or alike(longest)
    batches = tuple(batch_of(draw, batch, num_prompts, of_group, longest) for batch in range(2 * WARM_UP))
    answer = fmean(tokens for batch in batches for group in batch for tokens in group)
    width = text.num_attention_heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    per_token = 2 * n + 4 * text.num_hidden_layers * width * (prompt + answer) / 2
    # a prompt that a group shares is computed once, where the rows are packed
    tokens = rows * answer + rows * prompt / (rollout.group if rollout is not None else 1)
    passes = (2 if recipe.model.adapter is not None else 3) + recipe.train.gradient_checkpointing
    update = recipe.train.epochs * passes * per_token * tokens / (MFU * peak)
    score = _num_scorers(recipe, words) * per_token * tokens / (MFU * peak)
    each = Seconds(0.0, score, update, _sync(recipe, config, count, gpu))
    if rollout is None:
        return _Work(each)
    decoder = _decoder(recipe, text, gpu, count, prompt, n * size, per_token / (MFU * peak))
    generate = tuple(decoder.seconds([[(0, end) for end in group] for group in batch]) for batch in batches)
    return _Work(each, decoder, batches, generate)


def _decoder(
    recipe: Recipe, text: Any, gpu: Gpu, count: int, prompt: int, weight_bytes: int, row_seconds: float
) -> Decoder:
    assert recipe.rollout is not None
    slots = int(recipe.rollout.engine.options.get("slots", 64))
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rate = BANDWIDTH_SHARE * gpu.bandwidth * 1e9
    cache = 2 * text.num_hidden_layers * heads * head_dim * bytes_of(recipe) / rate
    least = SECONDS_PER_LAYER * text.num_hidden_layers
    return Decoder(count, slots, recipe.rollout.group, prompt, weight_bytes / rate, cache, row_seconds, least)


def _num_scorers(recipe: Recipe, words: Words) -> int:
    """Forward passes over a batch beside those of its updates."""
    rollout, parts = recipe.rollout, words.parts
    own = rollout is not None and rollout.old_logprobs == "trainer" and "old_logprobs" in words.needs
    taught = "teacher" in parts
    return int("reference" in parts) + int(own) + int("critic" in parts) + int(taught)


def _sync(recipe: Recipe, config: Any, count: int, gpu: Gpu) -> float:
    whole = memory_of(recipe, config)
    gradients = whole.gradients * recipe.train.epochs * recipe.train.minibatches
    between = 2 * (count - 1) / count * gradients / (LINK_SHARE * gpu.link * 1e9)
    ahead = recipe.rollout is not None and recipe.rollout.staleness > 0
    return between + (whole.gradients / PIPE_BYTES if ahead else 0.0)  # gradients: 4 bytes for each trained number


def _may_go_on(recipe: Recipe) -> bool:
    """Whether ``rollout.partial`` is for such a recipe (``train/checks``)."""
    words = words_of(recipe)
    return bool(words.engine.traits.get("goes_on")) and recipe.environment is None and not recipe.tools


def _batch_seconds(recipe: Recipe, staleness: int, work: _Work, *, partial: bool) -> float:
    """Of one batch by the schedule, where sampling has GPUs of its own."""
    assert recipe.rollout is not None
    assert work.decoder is not None
    same = recipe.rollout.partial_tokens if staleness == recipe.rollout.staleness else None
    rollout = {"staleness": staleness, "partial": partial, "partial_tokens": same}
    stale = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update=rollout)})
    alone = work.each.score + work.each.update + work.each.sync
    num = len(work.generate)
    if partial:
        lengths, generate = work.lengths.__getitem__, replace(work.decoder, gpus=1).seconds
        each = simulate_partial(stale, num, lengths=lengths, generate=generate, update=lambda batch: alone)
    else:
        each = simulate(stale, num, generate=work.generate.__getitem__, update=lambda batch: alone)
    return fmean(each[WARM_UP:])


def _changes(recipe: Recipe, config: Any, count: int, gpu: Gpu) -> list[list[str]]:
    """Every single change that makes it fit; where none does, as few of them together as do."""
    ladder = list(_ladder(recipe))

    def fits(changed: Recipe) -> bool:
        return any(most(memory_per_gpu(changed, config, count, name, gpu)) <= room(gpu) for name in SHARDINGS)

    alone = [[key] for key, change in ladder if fits(change(recipe))]
    if alone:
        return alone
    keys = []
    for key, change in ladder:
        recipe = change(recipe)
        keys.append(key)
        if fits(recipe):
            return [keys]
    return []


def _ladder(recipe: Recipe) -> Iterator[tuple[str, Callable[[Recipe], Recipe]]]:
    """Changes from the cheapest to the dearest, as keys with values, and what makes them."""

    def changed(section: str, **values: Any) -> Callable[[Recipe], Recipe]:
        return lambda r: r.model_copy(update={section: getattr(r, section).model_copy(update=values)})

    train, rollout, model = recipe.train, recipe.rollout, recipe.model
    if not train.gradient_checkpointing:
        yield "train.gradient_checkpointing: true", changed("train", gradient_checkpointing=True)
    if train.offload == "none":
        yield "train.offload: optimizer", changed("train", offload="optimizer")
    for divisor in (2, 4, 8, 16):
        tokens = train.tokens_per_micro // divisor
        if tokens >= 256:
            yield f"train.tokens_per_micro: {tokens}", changed("train", tokens_per_micro=tokens)
    yield "train.rows_per_micro: 1", changed("train", rows_per_micro=1)
    if rollout is None and recipe.eval.every and not recipe.eval.beside:  # sharded, no whole model is kept then
        yield "eval.beside: true", changed("eval", beside=True)
    if rollout is not None:
        slots = int(rollout.engine.options.get("slots", 64))
        for fewer in (slots // 4, slots // 16):
            if fewer:
                engine = rollout.engine.model_copy(update={"slots": fewer})
                yield f"rollout.engine.slots: {fewer}", changed("rollout", engine=engine)
    if model.adapter is None and model.init is None:
        yield "model.adapter.rank: 16", changed("model", adapter=AdapterSection(rank=16))
        half = {"adapter": AdapterSection(rank=16), "dtype": "bfloat16"}
        yield "model.adapter.rank: 16 with model.dtype: bfloat16", changed("model", **half)
        yield "model.adapter.rank: 16 with model.load_bits: 4", changed("model", **half, load_bits=4)
    elif model.load_bits is None and model.init is None:
        yield "model.load_bits: 4", changed("model", load_bits=4)
