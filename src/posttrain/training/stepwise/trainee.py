"""Model trained through individual calls. Gradients accumulate until an optimizer step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field
from torch import Tensor, nn
from torch.nn import Parameter
from transformers.pytorch_utils import Conv1D

from posttrain import registry
from posttrain.errors import CheckpointError, RecipeError, UsageError
from posttrain.models.config import context_length
from posttrain.models.forward.forward import Forward, causal_lm
from posttrain.models.load import LoadedModel, load_model, quantized_bits
from posttrain.models.lora import apply_adapter
from posttrain.option_types import Options
from posttrain.recipes.sections import AdapterSection, ModelSection, TrainSection
from posttrain.training.checkpoint import load_checkpoint, restore_model, save_checkpoint
from posttrain.training.optimizer import optimizer_tensors, restore_optimizer
from posttrain.training.records.capture import Capture
from posttrain.training.step import Method, accumulate, apply_update
from posttrain.training.stepwise.datums import Datum, collate_datums
from posttrain.training.stepwise.losses import ChosenLoss, token_sum
from posttrain.types import Outputs

ALPHA = 32.0  # alpha for a new adapter at every rank, as in Tinker
MAX_RANK = 1_024
NEW_ADAPTER_SEED = 0  # default if no seed is given


class AdapterChoice(Options):
    """Adapter settings for a new model. Rank 0 trains all weights.

    ``seed``: initialization seed (fixed by default). ``train_unembed``: include the output layer; ``train_mlp``:
    linear layers outside attention; ``train_attn``: linear layers inside attention.
    """

    model_config = ConfigDict(frozen=True)

    rank: Annotated[int, Field(ge=0, le=MAX_RANK)]
    seed: Annotated[int | None, Field(ge=0)] = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @property
    def is_whole(self) -> bool:
        """True if training all weights."""
        return self.rank == 0


WHOLE = AdapterChoice(rank=0)


class AdamStep(Options):
    """AdamW step with Tinker defaults. ``grad_clip_norm`` 0 disables clipping."""

    learning_rate: Annotated[float, Field(ge=0)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0)] = 0.0


class TargetLogprobs(Capture):
    """Stores target log-probabilities by row."""

    def __init__(self) -> None:
        super().__init__()
        self.by_row: dict[int, Tensor] = {}

    def watch(self, outputs: Outputs) -> None:
        """Requests no derivatives."""

    def add(self, rows: Sequence[int], outputs: Outputs, values: Tensor) -> None:
        """Store log-probabilities from a micro-batch: ``[T]`` or ``[T, K]`` per row."""
        kept = outputs.logprobs
        if outputs.candidate_logprobs is not None:
            kept = outputs.candidate_logprobs
        for row, own in zip(rows, kept.detach().float().cpu(), strict=True):
            self.by_row[row] = own


def adapter_section(model: nn.Module, choice: AdapterChoice) -> AdapterSection:
    """Build an adapter section for the chosen model parts.

    Raises:
        UsageError: no parts chosen, or none present in the model.
    """
    head = causal_lm(model).get_output_embeddings()
    targets = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | Conv1D):
            continue
        wanted = choice.train_mlp
        if module is head:
            wanted = choice.train_unembed
        elif "attn" in name or "attention" in name:
            wanted = choice.train_attn
        if wanted:
            targets.append(name.rpartition(".")[2])
    if not targets:
        raise UsageError("lora_config: no layers to train; set one of train_mlp, train_attn, train_unembed")
    return AdapterSection(rank=choice.rank, alpha=ALPHA, targets=sorted(set(targets)))


def load_with_adapter(section: ModelSection, choice: AdapterChoice) -> LoadedModel:
    """Load the server's base model, adding a new adapter unless training all weights.

    Raises:
        UsageError: untrainable base model, or missing model parts.
    """
    merging = section.model_copy(update={"adapter": AdapterSection()})  # merges an existing adapter into the base
    loaded = load_model(merging, seed=0)
    model: Any = loaded.model
    if choice.is_whole and quantized_bits(model) is not None:
        raise UsageError("lora_config: quantized weights cannot be trained; give a rank above 0, such as 16")
    if choice.is_whole:
        model.requires_grad_(True)
    else:
        seed = choice.seed
        if seed is None:
            seed = NEW_ADAPTER_SEED
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", message=".*tie_word_embeddings"
                )  # saved as an adapter, never merged here
                model = apply_adapter(model, adapter_section(model, choice), seed)
        except RecipeError as error:
            raise UsageError(str(error).replace("model.adapter", "lora_config")) from error
    model.eval()
    return LoadedModel(model, loaded.tokenizer, loaded.source)


class Trainee:
    """Trained model with optimizer and accumulated gradients.

    ``step``: optimizer steps so far. ``loss``: sum of losses since the last step.
    """

    def __init__(self, section: ModelSection, choice: AdapterChoice) -> None:
        self.choice = choice
        self.loaded = load_with_adapter(section, choice)
        self.model = self.loaded.model
        self.forward = Forward(self.model)
        self.options = TrainSection()
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        coarse = [name for name, p in named if p.dtype not in (torch.float32, torch.float64)]
        if coarse:
            raise UsageError("model.dtype: bf16 weights lose small updates; serve an fp32 model, or train an adapter")
        self.names = [name for name, _ in named]
        self.parameters: list[Parameter] = [parameter for _, parameter in named]
        build = registry.find("optimizer", "adamw").bind({})
        self.optimizer: torch.optim.Optimizer = build(named, AdamStep().learning_rate)
        self.step = 0
        self.loss = 0.0

    @property
    def vocabulary(self) -> int:
        """Vocabulary size in token ids."""
        return int(causal_lm(self.model).get_input_embeddings().weight.shape[0])

    @property
    def context(self) -> int:
        """Context length in tokens."""
        return context_length(self.model.config)

    def evaluate(self, datums: Sequence[Datum], loss: ChosenLoss, *, learns: bool) -> tuple[float, list[Tensor]]:
        """Compute a summed loss and target log-probabilities ``[N]`` or ``[N, K]`` by row.

        With ``learns``, gradients are accumulated.
        """
        batch = collate_datums(datums, loss.fields)
        method = Method(self.forward, loss.objective, token_sum, entropy="none", name=loss.name)
        seen = TargetLogprobs()
        total, _ = accumulate(method, batch, self.options, learns=learns, capture=seen)
        if learns and not math.isfinite(total):
            self._drop_gradients()
            raise UsageError(
                f"loss_fn: {loss.name} is {total} on these rows; all gradients since the last step were dropped"
            )
        if learns:
            self.loss += total
        logprobs = []
        for row, datum in enumerate(datums):
            own = seen.by_row[row][1 : 1 + len(datum.ids)]
            if datum.targets.ndim == 2:
                own = own[:, : datum.targets.shape[1]]
            elif own.ndim == 2:
                own = own[:, 0]
            logprobs.append(own)
        return total, logprobs

    def update(self, settings: AdamStep) -> dict[str, float]:
        """Run an AdamW step with accumulated gradients; returns metrics.

        Raises:
            UsageError: no gradients.
            NonFiniteLoss: non-finite loss or gradients. Weights are unchanged.
        """
        if all(p.grad is None for p in self.parameters):
            raise UsageError("optim_step: no gradients since the last step; call forward_backward first")
        for group in self.optimizer.param_groups:
            group["betas"] = (settings.beta1, settings.beta2)
            group["eps"] = settings.eps
            if group["params"][0].ndim >= 2:  # no decay for norms and biases
                group["weight_decay"] = settings.weight_decay
        most: float | None = None
        if settings.grad_clip_norm > 0:
            most = settings.grad_clip_norm
        loss = self.loss
        self.loss = 0.0
        number = self.step + 1
        norm = apply_update(self.optimizer, self.parameters, settings.learning_rate, most, loss, number)
        self.step = number
        return {"grad_norm": norm, "loss_sum": loss, "step": float(number)}

    def save(self, folder: Path, *, with_optimizer: bool, note: dict[str, object]) -> Path:
        """Save weights as a model folder, plus optimizer state; returns the step folder.

        Raises:
            StorageError: full or read-only disk.
        """
        optimizer: dict[str, Tensor] = {}
        if with_optimizer:
            optimizer = optimizer_tensors(self.optimizer, self.names)
        state = {"served": {**note, "has_optimizer": with_optimizer, "step": self.step}}
        return save_checkpoint(
            folder, step=self.step, model=self.model, tokenizer=self.loaded.tokenizer, optimizer=optimizer, state=state
        )

    def restore(self, folder: Path, *, with_optimizer: bool) -> None:
        """Load saved weights bit for bit, with their optimizer state or a fresh optimizer.

        Raises:
            CheckpointError: damaged folder, or different model.
        """
        checkpoint = load_checkpoint(folder)
        if checkpoint is None:
            raise CheckpointError(f"{folder}: no saved state")
        restore_model(self.model, checkpoint.path)
        self._drop_gradients()
        self.step = 0
        self.optimizer.state.clear()
        if with_optimizer:
            restore_optimizer(self.optimizer, self.names, checkpoint.optimizer)
            self.step = checkpoint.step

    def _drop_gradients(self) -> None:
        """Clear accumulated gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = 0.0
