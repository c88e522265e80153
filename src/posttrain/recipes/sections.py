"""Recipe sections with types, bounds and defaults.

Components (objective, reward, task, ...) are not declared here: each function's signature is its schema
(``registry``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from posttrain import registry
from posttrain.acting import sections as conditions
from posttrain.acting.methods import IF_REWARDS_DIFFER
from posttrain.errors import RecipeError
from posttrain.option_types import Few, Options, Seed, StopTexts, Tokens
from posttrain.other_names import short_dtype
from posttrain.registry import explain_validation
from posttrain.untrusted import trusts_remote_code

# Step count; 0 and -1 disable.
Every = Annotated[int, BeforeValidator(lambda value: 0 if type(value) is int and value == -1 else value)]


EMBEDDED_MODELS = ("tiny", "tiny-sft")  # shipped models: a base model, and a `tiny/sft` run with seed 0


class Section(Options):
    """Recipe section. Unknown keys are rejected."""

    model_config = ConfigDict(validate_default=True)


class Component(Options):
    """Named function with options. A plain string is a name without options."""

    model_config = ConfigDict(extra="allow")
    name: str

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        return {"name": value}

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def read_component(value: object, where: str) -> Component:
    """Parse a component from a name or plain data.

    Raises:
        RecipeError: missing name, or a name that isn't text. The message starts with the key.
    """
    try:
        return Component.model_validate(value)
    except ValidationError as error:
        raise RecipeError(explain_validation(error, [], where, "a component")) from None


class RewardComponent(Component):
    """Weighted reward.

    Args:
        weight: multiplier in the reward sum.
    """

    weight: Annotated[float, IF_REWARDS_DIFFER] = 1.0


class MaskComponent(Component):
    """Mask over optimizer batch tokens.

    Args:
        divisor: normalize the loss by ``all`` tokens and rows, or only by ``kept`` ones. ``kept`` also restricts the
            ``regularize`` terms to kept tokens.
    """

    divisor: Literal["all", "kept"] = "all"


def as_list(value: object) -> object:
    """Wrap a single mapping in a list, or split comma-separated names (``tensorboard,wandb``)."""
    if isinstance(value, str):
        return [name.strip() for name in value.split(",")]
    if not isinstance(value, Mapping):
        return value
    return [value]


ComponentList = Annotated[list[Component], BeforeValidator(as_list)]
MIXTURE = "mixture"  # task that combines other tasks: {name: mixture, parts: [{task: gsm8k, weight: 2}, ...]}
_PART_NAME = re.compile(r"[\w.+-]{1,64}")


class Part(Options):
    """Mixture part: a task, a weight, and a name (defaults to the task name)."""

    task: Component
    weight: float = Field(default=1.0, gt=0)
    name: str = ""

    @model_validator(mode="after")
    def _named(self) -> Self:
        if "name" not in self.model_fields_set:
            self.name = self.task.name.rpartition(":")[2]
        return self


def parts_of(component: Component) -> list[Part]:
    """List a mixture's parts; empty for any other task."""
    if component.name != MIXTURE:
        return []
    return read_parts(component.options.get("parts"), "task")


def task_components(component: Component) -> list[Component]:
    """List a mixture's tasks, or just the given task."""
    return [part.task for part in parts_of(component)] or [component]


def map_tasks(component: Component, change: Callable[[Component], Component]) -> Component:
    """Apply ``change`` to a task, or to every task in a mixture."""
    parts = parts_of(component)
    if not parts:
        return change(component)
    changed = [(part.model_copy(update={"task": change(part.task)})).model_dump() for part in parts]
    return Component(name=component.name, **(component.options | {"parts": changed}))


def read_parts(value: object, where: str) -> list[Part]:
    """Parse the list under ``{where}.parts``.

    Raises:
        RecipeError: first invalid entry, with its dotted key.
    """
    if not isinstance(value, list) or not value:
        form = "give a list of parts, each with a task, such as [{task: gsm8k, weight: 2}]"
        raise RecipeError(f"{where}.parts: {form}")
    parts: dict[str, Part] = {}
    for number, entry in enumerate(value):
        key = f"{where}.parts.{number}"
        try:
            part = Part.model_validate(entry)
        except ValidationError as error:
            raise RecipeError(explain_validation(error, Part.model_fields, key, "a part")) from None
        if part.task.name == MIXTURE:
            raise RecipeError(f"{key}.task: mixtures cannot be nested; list all parts in one mixture")
        if ":" not in part.task.name and part.task.name not in registry.names("task"):
            registry.find("task", part.task.name, f"{key}.task")
        if not _PART_NAME.fullmatch(part.name):
            form = f"part names may contain letters, digits and _ . + -; got {part.name[:80]!r}"
            raise RecipeError(f"{key}.name: {form}")
        if part.name in parts:
            other = f"{where}.parts.{list(parts).index(part.name)}"
            raise RecipeError(f"{key}.name: {other} is also called {part.name!r}; give one part a different 'name'")
        parts[part.name] = part
    return list(parts.values())


class TokenizerSection(Section):
    """Byte-level BPE tokenizer trained on task texts. Used only with ``model.init``.

    Args:
        vocab_size: number of vocabulary entries.
        num_documents: number of training texts.
    """

    vocab_size: int = Field(default=512, ge=260)
    num_documents: int = Field(default=20_000, ge=1)


class InitSection(Section):
    """Randomly initialized model. The trained tokenizer sets the vocabulary size.

    Args:
        architecture: transformers architecture name, e.g. ``qwen3`` or ``llama``.
        config: transformers config keys.
        tokenizer: tokenizer to train first.
    """

    architecture: str
    config: dict[str, Any] = Field(default_factory=dict)
    tokenizer: TokenizerSection = Field(default_factory=TokenizerSection)


class AdapterSection(Section):
    """LoRA adapter (Hu et al. 2021), using peft.

    Args:
        kind: adapter type.
        rank: LoRA rank.
        alpha: LoRA alpha. Defaults to the rank, which gives a scale of 1 (sqrt(rank) with ``use_rslora``).
        dropout: dropout on adapter inputs during training.
        targets: linear layers matched by name suffix, or ``all-linear``.
        target_parameters: weight matrices outside linear layers, e.g. ``experts.gate_up_proj``.
        use_dora: use DoRA (Liu et al. 2024).
        use_rslora: use rank-stabilized LoRA (Kalajdzievski 2023).
        init_lora_weights: ``default`` sets B = 0 and draws A uniformly; other values follow peft.
    """

    kind: Literal["lora"] = "lora"
    rank: Few = 16
    alpha: float | None = Field(default=None, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: Annotated[list[str], Field(min_length=1)] | Literal["all-linear"] = "all-linear"
    target_parameters: list[str] = Field(default_factory=list)
    use_dora: bool = False
    use_rslora: bool = False
    init_lora_weights: Literal["default", "gaussian", "orthogonal"] = "default"


class ModelSection(Section):
    """Model to train.

    Args:
        name: ``tiny``, a local directory, a run directory, or a Hub name.
        init: start from random weights instead.
        adapter: train a LoRA adapter. Without it, all weights are trained.
        dtype: weight dtype. Use fp64 only to compare computations on CPU.
        load_bits: quantize linear layers at load time to 8 bits (LLM.int8 rows) or 4 bits (NF4, double quantization).
            Requires an ``adapter``, which trains in fp32 (QLoRA, Dettmers et al. 2023).
        device: ``auto`` picks an NVIDIA GPU if available, otherwise CPU. ``mps`` uses a Mac GPU.
        attention: transformers ``attn_implementation``. ``sdpa`` runs packed batches through torch attention. Other
            values pad, and are rejected if they differ from ``sdpa`` on a small batch.
        trust_remote_code: run Python code shipped with the model. Allowed only on the command line.
    """

    name: str = "tiny"
    init: InitSection | None = None
    adapter: AdapterSection | None = None
    dtype: Annotated[Literal["fp32", "bf16", "fp64"], BeforeValidator(short_dtype)] = "fp32"
    load_bits: Literal[4, 8] | None = None
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    attention: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    trust_remote_code: bool = False

    @property
    def runs_remote_code(self) -> bool:
        """True if the model's Python code may run. Only the command line can allow this (``untrusted``)."""
        return self.trust_remote_code or trusts_remote_code()

    @field_validator("attention", mode="before")
    @classmethod
    def _check_attention(cls, value: object) -> object:
        if value in ("flash", "efficient"):
            raise ValueError(f"{value!r} was removed. Use sdpa (picks the fastest torch kernel) or flash_attention_2")
        return value

    @model_validator(mode="after")
    def _check_bits(self) -> Self:
        if self.load_bits is not None and self.init is not None:
            raise ValueError("'load_bits' quantizes loaded weights, but 'init' creates new ones; remove one key")
        if self.load_bits is not None and self.dtype == "fp64":
            raise ValueError("'load_bits' needs 'dtype' fp32 or bf16, not fp64")
        if self.device == "mps" and self.dtype == "fp64":
            raise ValueError("'device' mps has no fp64; use device cpu, or 'dtype' fp32")
        return self


class PromptSection(Section):
    """Conversion from examples to token ids.

    Args:
        template: prompt and answer template.
        max_prompt_tokens: drop longer prompts. Dropped prompts are counted and reported.
    """

    template: Component = Component(name="r1_zero")
    max_prompt_tokens: Tokens | None = None


class RolloutSection(Section):
    """Sampling for reinforcement learning: ``num_prompts`` × ``group_size`` completions per batch.

    Args:
        engine: sampling engine, ``native`` (same process) or ``vllm``.
        num_prompts: prompts per batch.
        group_size: completions per prompt.
        max_tokens: maximum completion length in tokens.
        max_total_tokens: maximum tokens for prompt plus answer. Prompts without room for an answer are dropped and
            counted.
        temperature: sampling temperature. Objectives that follow the sampler also scale log-probabilities by it.
        top_k: sample only from the k most likely tokens. With ``top_k``, ``top_p`` or ``min_p``, objectives that
            follow the sampler compute log-probabilities over the kept tokens at each position, at most 512 (sampling
            replay).
        top_p: sample only from the most likely tokens whose probabilities add up to this value.
        min_p: sample only tokens with at least this fraction of the highest probability.
        min_tokens: minimum tokens per answer (or turn).
        repetition_penalty: divide positive logits, and multiply negative logits, for tokens already in the prompt or
            answer. Objectives that follow the sampler apply both this and ``min_tokens``.
        stop: strings that end an answer (or turn). The stop string is kept.
        drop_uniform_groups: DAPO dynamic sampling: keep sampling new prompts until every group has unequal rewards.
        uniform_by: reward component used to detect uniform groups: ``reward`` (the sum), ``correct``, ...
        max_rounds: maximum prompt batches to sample per training batch, with ``drop_uniform_groups``.
        old_logprobs: log-probabilities before the update, taken from the ``sampler`` or recomputed by the ``trainer``.
        router_replay: train mixture-of-experts policies with the experts chosen while sampling (R3, arXiv 2510.11370).
            Gate weights are the trainer's. Reference, teacher and a separate critic route by themselves.
        select: completions to train on, and their units. Defaults to all, or to the best and worst per prompt for
            pairwise objectives.
        label_above: completions with rewards above this value are labeled desirable, for objectives that use labels.
        mask_truncated: exclude completions that hit a length limit from the loss (DAPO overlong filtering). Their
            rewards still count in the baseline.
        truncated_divisor: with ``mask_truncated``, average the loss over ``kept`` completions or over ``all``.
        staleness: S. Batch b is sampled with weights after max(0, b − S) batches, while the trainer runs.
        max_turns: maximum turns with an ``environment`` or ``tools`` (default 8).
        max_turn_tokens: maximum tokens per turn.
        tool_seconds: timeout per tool call in seconds (default 30).
        retries: number of times to replay a failed episode with the same seed (default 2).
        show_tools: describe tools in the prompt (default true).
    """

    engine: Component = Component(name="native")
    num_prompts: Few = 16
    group_size: Few = 8
    max_tokens: Tokens = 256
    max_total_tokens: int | None = Field(default=None, ge=2)
    temperature: float = Field(default=1.0, ge=1e-5)
    top_k: int | None = Field(default=None, ge=1)
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    min_tokens: int = Field(default=0, ge=0)
    repetition_penalty: float = Field(default=1.0, gt=0, le=10)
    stop: StopTexts = Field(default_factory=list)
    drop_uniform_groups: bool = False
    uniform_by: Annotated[str, conditions.IF_GROUPS_ARE_DROPPED] = "reward"
    max_rounds: Annotated[int, conditions.IF_GROUPS_ARE_DROPPED] = Field(default=4, ge=1)
    old_logprobs: Annotated[Literal["sampler", "trainer"], conditions.IF_OLD_LOGPROBS_ARE_READ] = "sampler"
    router_replay: Annotated[bool, conditions.IF_ROUTING_DIFFERS] = False
    select: Component | None = None
    label_above: Annotated[float, conditions.IF_LABELS_ARE_READ] = 0.5
    mask_truncated: bool = False
    truncated_divisor: Annotated[Literal["kept", "all"], conditions.IF_TRUNCATED_ARE_MASKED] = "kept"
    staleness: Annotated[int, conditions.IF_SEVERAL_BATCHES] = Field(default=0, ge=0, le=64)
    max_turns: int | None = Field(default=None, ge=1, le=10_000)
    max_turn_tokens: Annotated[Tokens | None, conditions.IF_TURN_IS_SHORTER] = None
    tool_seconds: float | None = Field(default=None, gt=0, le=86_400)
    retries: int | None = Field(default=None, ge=0, le=1000)
    show_tools: bool | None = None

    @model_validator(mode="after")
    def _check_min_tokens(self) -> Self:
        longest = self.max_turn_tokens or self.max_tokens
        if self.min_tokens >= longest:
            raise ValueError(
                f"'min_tokens' {self.min_tokens} leaves no room for an end token: the limit is {longest} tokens; "
                "lower it, or raise the limit"
            )
        return self

    @property
    def has_rules(self) -> bool:
        """True if logits depend on earlier tokens through penalties or minimum lengths."""
        return self.min_tokens > 0 or self.repetition_penalty != 1

    @property
    def is_truncated(self) -> bool:
        """True if top_k, top_p or min_p truncates the sampling distribution."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0

    def within(self, context: int) -> int:
        """Compute the maximum prompt-plus-answer tokens for a given context length."""
        if self.max_total_tokens is None:
            return context
        return min(context, self.max_total_tokens)


# Defaults for multi-turn rollouts.
TURN_DEFAULTS: dict[str, int | float | bool] = {"max_turns": 8, "tool_seconds": 30.0, "retries": 2, "show_tools": True}


class DataSection(Section):
    """Supervised data.

    Args:
        batch_size: examples per step.
        max_length: maximum tokens per row. Longer rows are dropped and counted.
        train_on: ``assistant`` (all assistant turns, including end tokens), ``response`` (everything after the last
            user message) or ``all``. Defaults to ``assistant`` for rows with ``messages``, otherwise ``response``. If
            the chat template rewrites earlier turns, each turn becomes a separate example.
        label_above: answers rated above this value are labeled desirable, for objectives that use labels. By default,
            chosen answers in pairs are desirable, and other scores must be 1 or 0.
    """

    batch_size: Few = 16
    max_length: Tokens = Field(default=1024, ge=2)
    train_on: Literal["assistant", "response", "all"] | None = None
    label_above: float | None = None


class TrainSection(Section):
    """Training loop. Each rollout batch is used for ppo_epochs × num_minibatches steps.

    Args:
        steps: number of optimizer steps.
        num_epochs: passes over the data (prompts for rollouts). Replaces ``steps``.
        lr: peak learning rate.
        lr_ratios: learning rate multipliers by weight name, e.g. ``{"*embed_tokens*": 0.1}``. ``*`` matches any text,
            the first matching pattern applies, and 0 freezes.
        warmup_steps: linear learning rate warmup steps.
        schedule: learning rate schedule after warmup. ``linear`` and ``cosine`` decay to ``lr * min_lr_ratio``.
        min_lr_ratio: final learning rate as a fraction of ``lr``.
        max_grad_norm: gradient clipping norm; null disables clipping.
        micro_batch_tokens: tokens per forward pass. Affects memory and speed, not results.
        micro_batch_rows: maximum rows per forward pass.
        gradient_checkpointing: recompute activations during backward. Saves memory but takes about a third more time.
        precision: matrix multiplication precision during training. Weights, optimizer state, log-probabilities and
            the LM head stay in fp32 (TF32 with ``tf32`` and, on GPU, with ``bf16``). The native engine samples in the
            weight dtype.
        deterministic: use deterministic GPU reductions, so resumed runs match uninterrupted runs bit for bit.
        ppo_epochs: passes over each rollout batch.
        num_minibatches: optimizer steps per pass over a rollout batch.
        seed: random seed.
        save_every: steps between checkpoints; 0 or -1 saves only the final one.
        skip_zero_rows: skip rows that cannot contribute to the gradient, e.g. groups with equal rewards. The gradient
            is unchanged up to rounding. Update metrics then cover only the remaining rows.
        keep_checkpoints: number of recent checkpoints to keep, in addition to the best.
        strict: stop training if an update does not match its records. By default, only print a notice.
        router_aux_loss_coef: load-balancing loss weight for mixture-of-experts routers, over all tokens in an update.
            Defaults to the model config (``output_router_logits``).
        neftune_noise_alpha: NEFTune embedding noise α during training. Disabled by default.
        ema_decay: decay for an exponential moving average (EMA) of the weights. Evaluations report both. Export the
            average with ``posttrain runs export NAME --to FOLDER --weights ema``.
    """

    steps: int | None = Field(default=100, ge=1)
    num_epochs: float | None = Field(default=None, gt=0, le=100_000)
    lr: float = Field(default=1e-4, gt=0)
    lr_ratios: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Annotated[Literal["constant", "linear", "cosine"], conditions.IF_RATE_FALLS] = "constant"
    min_lr_ratio: Annotated[float, conditions.IF_SCHEDULED] = Field(default=0.0, ge=0, le=1)
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    micro_batch_tokens: int = Field(default=16_384, ge=1)
    micro_batch_rows: int | None = Field(default=None, ge=1)
    gradient_checkpointing: bool = False
    precision: Annotated[Literal["fp32", "tf32", "bf16"], BeforeValidator(short_dtype)] = "fp32"
    deterministic: Annotated[bool, conditions.IF_ON_GPU] = False
    ppo_epochs: int = Field(default=1, ge=1)
    num_minibatches: int = Field(default=1, ge=1)
    seed: Seed = 0
    save_every: Annotated[Every, conditions.IF_WITHIN_RUN] = Field(default=0, ge=0)
    skip_zero_rows: bool = True
    keep_checkpoints: Annotated[int, conditions.IF_CHECKPOINTS_ARE_DELETED] = Field(default=2, ge=1)
    strict: bool = False
    router_aux_loss_coef: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    neftune_noise_alpha: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    ema_decay: float | None = Field(default=None, gt=0, lt=1)

    @property
    def updates_per_batch(self) -> int:
        """Steps per rollout batch; 1 for supervised training."""
        return self.ppo_epochs * self.num_minibatches

    @model_validator(mode="before")
    @classmethod
    def _one_length(cls, value: object) -> object:
        if not isinstance(value, Mapping) or value.get("num_epochs") is None:
            return value
        if value.get("steps") is not None:
            raise ValueError("'steps' and 'num_epochs' both set the training length; give exactly one")
        return {**value, "steps": None}

    @model_validator(mode="after")
    def _some_length(self) -> Self:
        if self.steps is None and self.num_epochs is None:
            raise ValueError("no training length; give 'steps' or 'num_epochs'")
        return self


class ScaleSection(Section):
    """Multi-process training. Processes divide prompts, rows and micro-batches.

    Results match single-process training except for summation order.

    Args:
        processes: number of processes, one per GPU.
        sharding: ``none``, or ``fsdp2`` (Zhao et al. 2023). Sampling in the trainer also keeps a full model copy.
        checkpoint: ``sharded`` writes one part per process; ``whole`` writes everything from rank 0.
        launcher: ``local`` starts processes on this machine, or joins torchrun or srun. ``torchrun`` requires
            torchrun or srun. ``ray`` places processes on the cluster at RAY_ADDRESS.
        timeout_seconds: maximum time to wait for another process.
        restarts: number of times ``ray`` restarts lost processes (default 3).
    """

    processes: int = Field(default=1, ge=1, le=4096)
    sharding: Literal["none", "fsdp2"] = "none"
    checkpoint: Literal["whole", "sharded"] = "whole"
    launcher: Literal["local", "torchrun", "ray"] = "local"
    timeout_seconds: float = Field(default=1800.0, gt=0)
    restarts: int | None = Field(default=None, ge=0, le=1000)

    @model_validator(mode="after")
    def _check_restarts(self) -> Self:
        if self.restarts is not None and self.launcher != "ray":
            raise ValueError("'restarts' works only with 'launcher: ray'; remove it")
        return self
