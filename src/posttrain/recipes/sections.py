"""The sections of a recipe, with types, bounds and defaults.

Components (objective, reward, task, ...) are not declared here: the signature of the function is their schema
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

# A number of steps; 0 and -1 mean never.
Every = Annotated[int, BeforeValidator(lambda value: 0 if type(value) is int and value == -1 else value)]


EMBEDDED_MODELS = ("tiny", "tiny-sft")  # in the package: a base model, and its run of `tiny/sft` with seed 0


class Section(Options):
    """A part of a recipe; unknown keys are refused."""

    model_config = ConfigDict(validate_default=True)


class Component(Options):
    """A named function with its options; a bare string is a name without options."""

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
    """Return a component from its name or from plain data.

    Raises:
        RecipeError: with the key; it has no name, or one that is no text.
    """
    try:
        return Component.model_validate(value)
    except ValidationError as error:
        raise RecipeError(explain_validation(error, [], where, "a component")) from None


class RewardComponent(Component):
    """A reward with the weight that it has in the sum.

    Args:
        weight: of this reward in the weighted sum.
    """

    weight: Annotated[float, IF_REWARDS_DIFFER] = 1.0


class MaskComponent(Component):
    """A mask over tokens of the optimizer batch.

    Args:
        divisor: the tokens and rows that the means of the loss divide by: ``all``, or those that are ``kept``. With
            ``kept`` the terms of ``regularize`` are of the kept tokens, too.
    """

    divisor: Literal["all", "kept"] = "all"


def as_list(value: object) -> object:
    """Return a list of components from one: a mapping, or names with commas between them (``tensorboard,wandb``)."""
    if isinstance(value, str):
        return [name.strip() for name in value.split(",")]
    if not isinstance(value, Mapping):
        return value
    return [value]


ComponentList = Annotated[list[Component], BeforeValidator(as_list)]
MIXTURE = "mixture"  # the task whose parts are tasks: {name: mixture, parts: [{task: gsm8k, weight: 2}, ...]}
_PART_NAME = re.compile(r"[\w.+-]{1,64}")


class Part(Options):
    """A part of a mixture: its task, its weight, and its name, by default the task's."""

    task: Component
    weight: float = Field(default=1.0, gt=0)
    name: str = ""

    @model_validator(mode="after")
    def _named(self) -> Self:
        if "name" not in self.model_fields_set:
            self.name = self.task.name.rpartition(":")[2]
        return self


def parts_of(component: Component) -> list[Part]:
    """Return the parts of a mixture; of any other task none."""
    if component.name != MIXTURE:
        return []
    return read_parts(component.options.get("parts"), "task")


def task_components(component: Component) -> list[Component]:
    """Return the tasks of a mixture's parts; of any other task itself."""
    return [part.task for part in parts_of(component)] or [component]


def map_tasks(component: Component, change: Callable[[Component], Component]) -> Component:
    """Return ``change`` of a task; of a mixture the same mixture of changed parts."""
    parts = parts_of(component)
    if not parts:
        return change(component)
    changed = [(part.model_copy(update={"task": change(part.task)})).model_dump() for part in parts]
    return Component(name=component.name, **(component.options | {"parts": changed}))


def read_parts(value: object, where: str) -> list[Part]:
    """Read the parts that stand in the key ``parts`` of ``where``.

    Raises:
        RecipeError: the first fault, after its dotted key.
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
            raise RecipeError(f"{key}.task: a part is no mixture itself; write its parts next to the others")
        if ":" not in part.task.name and part.task.name not in registry.names("task"):
            registry.find("task", part.task.name, f"{key}.task")
        if not _PART_NAME.fullmatch(part.name):
            form = f"a part's name is made of letters, digits and _ . + -; got {part.name[:80]!r}"
            raise RecipeError(f"{key}.name: {form}")
        if part.name in parts:
            other = f"{where}.parts.{list(parts).index(part.name)}"
            raise RecipeError(f"{key}.name: {other} is called {part.name!r}, too; give one of them another 'name'")
        parts[part.name] = part
    return list(parts.values())


class TokenizerSection(Section):
    """A byte-level BPE tokenizer trained on the task's own texts (only for ``model.init``).

    Args:
        vocab_size: tokens of the vocabulary.
        num_documents: texts that it is trained on.
    """

    vocab_size: int = Field(default=512, ge=260)
    num_documents: int = Field(default=20_000, ge=1)


class InitSection(Section):
    """A new model with random weights instead of a checkpoint; the vocabulary size comes from the tokenizer.

    Args:
        architecture: transformers' name of it: ``qwen3``, ``llama``, ...
        config: keys of its transformers config.
        tokenizer: its tokenizer, which is trained first.
    """

    architecture: str
    config: dict[str, Any] = Field(default_factory=dict)
    tokenizer: TokenizerSection = Field(default_factory=TokenizerSection)


class AdapterSection(Section):
    """LoRA (Hu et al. 2021) through peft.

    Args:
        kind: the kind of adapter.
        rank: rank of the update.
        alpha: scale times rank; by default the rank, so that the scale is 1 (with ``use_rslora`` its root).
        dropout: dropout on the adapter's input, in training.
        targets: linear layers by the end of their names, or all.
        target_parameters: matrices that are no linear layer's (``experts.gate_up_proj``).
        use_dora: DoRA (Liu et al. 2024).
        use_rslora: rank-stabilized LoRA (Kalajdzievski 2023).
        init_lora_weights: ``default``: B = 0, uniform A; else as in peft.
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
    """The model that is trained.

    Args:
        name: ``tiny``, a directory, a run directory, or a name of the hub.
        init: start from random weights instead.
        adapter: train a LoRA adapter; without it all weights.
        dtype: type of the weights; fp64 is for comparing computations on CPUs.
        load_bits: quantize the linear layers while loading, to 8 bits (LLM.int8's rows) or 4 (NF4 with double
            quantization); needs an ``adapter``, trained in fp32 (QLoRA, Dettmers et al. 2023).
        device: ``auto`` is an NVIDIA GPU where there is one, else the CPU; ``mps`` a Mac's.
        attention: transformers' ``attn_implementation``. With ``sdpa`` batches are packed and torch attends;
            with another one they are padded, and a difference from ``sdpa`` on a small batch is refused.
        trust_remote_code: run Python code that comes with the model; allowed on the command line only.
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
        """True if the model's own Python may run. Files cannot allow that (``untrusted``); the command line can."""
        return self.trust_remote_code or trusts_remote_code()

    @field_validator("attention", mode="before")
    @classmethod
    def _check_attention(cls, value: object) -> object:
        if value in ("flash", "efficient"):
            raise ValueError(f"{value!r} was removed. Use sdpa, which takes torch's fastest, or flash_attention_2")
        return value

    @model_validator(mode="after")
    def _check_bits(self) -> Self:
        if self.load_bits is not None and self.init is not None:
            raise ValueError("'load_bits' quantizes what is loaded, and a new model ('init') is not; leave it out")
        if self.load_bits is not None and self.dtype == "fp64":
            raise ValueError("'load_bits' goes with 'dtype' fp32 or bf16, not with fp64")
        if self.device == "mps" and self.dtype == "fp64":
            raise ValueError("'device' mps has no fp64; use device cpu, or 'dtype' fp32")
        return self


class PromptSection(Section):
    """The way from an example to token ids.

    Args:
        template: template of prompt and answer.
        max_prompt_tokens: longer prompts are dropped, counted and reported.
    """

    template: Component = Component(name="r1_zero")
    max_prompt_tokens: Tokens | None = None


class RolloutSection(Section):
    """Sampling for reinforcement learning: ``num_prompts`` × ``group_size`` completions a batch.

    Args:
        engine: what samples: ``native`` (in this process) or ``vllm``.
        num_prompts: prompts of a batch.
        group_size: completions of each prompt.
        max_tokens: limit of a completion.
        max_total_tokens: limit of a prompt and its answer together; a prompt that leaves no room is dropped and
            counted.
        temperature: of sampling, and of the log-probabilities of objectives that follow the sampler.
        top_k: sample from the k likeliest tokens only. With ``top_k``, ``top_p`` or ``min_p`` an objective that follows
            the sampler computes log-probabilities over the tokens that were kept for each draw, at most 512 (sampling
            replay).
        top_p: sample from the likeliest tokens that have this probability together.
        min_p: sample from the tokens of at least this share of the largest probability.
        min_tokens: an answer (or turn) does not end before it has so many tokens.
        repetition_penalty: divides the positive logits of tokens that prompt or answer have already, and multiplies the
            negative ones. An objective that follows the sampler follows it, and ``min_tokens``, too.
        stop: texts, each of which ends an answer (or turn) where it is complete; it stays in the answer.
        drop_uniform_groups: DAPO's dynamic sampling: sample further prompts until every group has higher and
            lower rewards.
        uniform_by: the part of the reward by which a group is uniform: ``reward`` (the sum), ``correct``, ...
        max_rounds: at most so many batches of prompts are sampled for one batch, with ``drop_uniform_groups``.
        old_logprobs: log-probabilities before the update: the sampler's own, or computed again by the trainer.
        select: which completions are trained on, in what units; by default every one, or the best and the worst
            of each prompt for an objective over pairs.
        label_above: the reward above which a completion is desirable, for objectives that read labels.
        mask_truncated: leave completions that a limit cut off out of the loss (DAPO's overlong filtering);
            their rewards count in the baseline.
        truncated_divisor: the completions that the means of the loss divide by, with ``mask_truncated``: those that are
            ``kept``, or ``all``.
        staleness: S: batch b is sampled with the weights of max(0, b − S) batches, while the trainer works.
        max_turns: limit of turns with an ``environment`` or ``tools`` (8).
        max_turn_tokens: limit of a turn.
        tool_seconds: time limit of a call of a tool (30).
        retries: how often a failed episode is played again from the same seed (2).
        show_tools: describe the tools in the prompt (true).
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
                f"'min_tokens' {self.min_tokens} leaves no token to end with, for at most {longest} are sampled; set "
                "it lower, or raise the limit"
            )
        return self

    @property
    def has_rules(self) -> bool:
        """True if logits are changed by a function of the tokens before."""
        return self.min_tokens > 0 or self.repetition_penalty != 1

    @property
    def is_truncated(self) -> bool:
        """True if answers are drawn from a part of the distribution."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0

    def within(self, context: int) -> int:
        """Return the limit of a prompt and its answer together, for a model with a context of so many tokens."""
        if self.max_total_tokens is None:
            return context
        return min(context, self.max_total_tokens)


# Default limits of a rollout of several turns.
TURN_DEFAULTS: dict[str, int | float | bool] = {"max_turns": 8, "tool_seconds": 30.0, "retries": 2, "show_tools": True}


class DataSection(Section):
    """Supervised rows.

    Args:
        batch_size: examples of a step.
        max_length: tokens of a row; longer rows are dropped and counted.
        train_on: ``assistant`` (every turn of the assistant, its end token included), ``response`` (what
            follows the last message of the user) or ``all``; by default ``assistant`` for rows with
            ``messages``, else ``response``. A chat template that rewrites earlier turns gets one example a
            turn.
        label_above: for objectives that read labels, the rating above which an answer is desirable. Without it
            a pair's better answer is desirable, and other scores must be 1 or 0.
    """

    batch_size: Few = 16
    max_length: Tokens = Field(default=1024, ge=2)
    train_on: Literal["assistant", "response", "all"] | None = None
    label_above: float | None = None


class TrainSection(Section):
    """The training loop. One rollout batch serves ppo_epochs × num_minibatches steps.

    Args:
        steps: number of optimizer steps.
        num_epochs: in place of ``steps``: passes over the data (the prompts, where the model samples).
        lr: learning rate, at its highest.
        lr_ratios: learning rates of weights by their names, as multiples of ``lr``: ``{"*embed_tokens*": 0.1}``. ``*``
            stands for any text, the first pattern that matches counts, and 0 freezes.
        warmup_steps: steps in which the learning rate rises linearly from 0.
        schedule: course of the learning rate after the warm-up; ``linear`` and ``cosine`` fall towards ``lr *
            min_lr_ratio``.
        min_lr_ratio: the learning rate at the end, as a share of ``lr``.
        max_grad_norm: gradients are clipped to this norm; null: never.
        micro_batch_tokens: tokens of one forward pass; changes memory and speed, no result.
        micro_batch_rows: rows of one forward pass, if fewer.
        gradient_checkpointing: compute activations again in the backward pass: less memory, a third more time.
        precision: of the products in the model while it is trained; weights, optimizer state, log-probabilities
            and the LM head are fp32 (TF32 with ``tf32`` and, on a GPU, ``bf16``). The native engine samples in
            the weights' own type.
        deterministic: a GPU adds up in one order, so that a resumed run equals the undisturbed one bit for bit.
        ppo_epochs: passes over a rollout batch.
        num_minibatches: parts into which each pass divides it, one optimizer step each.
        seed: seed of all random numbers.
        save_every: steps between checkpoints (0 or -1: at the end only).
        skip_zero_rows: leave rows that cannot change the gradient, such as those of groups with equal rewards, out of
            the update; the gradient is the same up to rounding. Metrics of the update are then of the other rows.
        keep_checkpoints: so many newest checkpoints are kept, and the best.
        strict: end the run at an update that its records do not give; without it that is a notice.
        router_aux_loss_coef: weight of the loss that balances the routers of a mixture of experts, over all tokens of
            an update; by default what the model's configuration asks for (``output_router_logits``).
        neftune_noise_alpha: α of the noise on the embeddings in training (NEFTune); by default none.
        ema_decay: keep an exponential moving average of the weights, of which an update keeps this share. It is
            evaluated next to the weights, and ``posttrain runs export NAME --to FOLDER --weights ema`` gives it away.
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
        """The number of steps that one rollout batch serves; 1 for supervised training."""
        return self.ppo_epochs * self.num_minibatches

    @model_validator(mode="before")
    @classmethod
    def _one_length(cls, value: object) -> object:
        if not isinstance(value, Mapping) or value.get("num_epochs") is None:
            return value
        if value.get("steps") is not None:
            raise ValueError("'steps' and 'num_epochs' both say how long the training is; give exactly one of them")
        return {**value, "steps": None}

    @model_validator(mode="after")
    def _some_length(self) -> Self:
        if self.steps is None and self.num_epochs is None:
            raise ValueError("nothing says how long the training is; give 'steps' or 'num_epochs'")
        return self


class ScaleSection(Section):
    """Several processes that train one model, each on its share of the prompts, rows and micro-batches.

    Results are those of one process but for the order of sums.

    Args:
        processes: number of processes, one for each GPU.
        sharding: ``none``, or ``fsdp2`` (Zhao et al. 2023), next to a whole model where the trainer samples.
        checkpoint: every process writes its share (``sharded``), or rank 0 the ``whole``.
        launcher: ``local`` starts them on this machine (or uses those of torchrun or srun); ``torchrun`` waits
            for such; ``ray`` has the cluster at RAY_ADDRESS place them.
        timeout_seconds: how long a process waits for the others.
        restarts: how often, under ``ray``, lost processes are started again (3).
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
            raise ValueError("'restarts' is for 'launcher: ray', which starts lost processes again; leave it out")
        return self
