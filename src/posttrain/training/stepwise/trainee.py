"""A model that is trained by single calls: its gradients add up until the optimizer takes a step."""

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

ALPHA = 32.0  # of a new adapter, at every rank, as in Tinker
MAX_RANK = 1_024
NEW_ADAPTER_SEED = 0  # if the caller gives none


class AdapterChoice(Options):
    """The adapter of a new model. A rank of 0 trains all weights.

    ``seed``: of the first weights, the same without one. ``train_unembed``: also the output layer, ``train_mlp`` the
    linear layers outside of attention, ``train_attn`` those inside.
    """

    model_config = ConfigDict(frozen=True)

    rank: Annotated[int, Field(ge=0, le=MAX_RANK)]
    seed: Annotated[int | None, Field(ge=0)] = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @property
    def is_whole(self) -> bool:
        """True if all weights are trained."""
        return self.rank == 0


WHOLE = AdapterChoice(rank=0)


class AdamStep(Options):
    """One step of AdamW; defaults are Tinker's. ``grad_clip_norm`` 0 clips nothing."""

    learning_rate: Annotated[float, Field(ge=0)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0)] = 0.0


class TargetLogprobs(Capture):
    """Keeps the log-probabilities of the targets, by row."""

    def __init__(self) -> None:
        super().__init__()
        self.by_row: dict[int, Tensor] = {}

    def watch(self, outputs: Outputs) -> None:
        """Ask for no derivatives."""

    def add(self, rows: Sequence[int], outputs: Outputs, values: Tensor) -> None:
        """Keep those of a micro-batch: ``[T]`` of a row, or ``[T, K]``."""
        kept = outputs.logprobs
        if outputs.candidate_logprobs is not None:
            kept = outputs.candidate_logprobs
        for row, own in zip(rows, kept.detach().float().cpu(), strict=True):
            self.by_row[row] = own


def adapter_section(model: nn.Module, choice: AdapterChoice) -> AdapterSection:
    """Return the section of an adapter on the parts of a model that a caller chose.

    Raises:
        UsageError: no part is chosen, or the model has no such part.
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
        raise UsageError("lora_config: no layer would be trained; set one of train_mlp, train_attn, train_unembed")
    return AdapterSection(rank=choice.rank, alpha=ALPHA, targets=sorted(set(targets)))


def load_with_adapter(section: ModelSection, choice: AdapterChoice) -> LoadedModel:
    """Load the base of a server's models, with a new adapter unless all weights are trained.

    Raises:
        UsageError: a base that cannot be trained, or parts that it does not have.
    """
    merging = section.model_copy(update={"adapter": AdapterSection()})  # an adapter that the base has is merged into it
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
    """A model with its optimizer and the gradients since the last step.

    ``step``: optimizer steps so far. ``loss``: the sum of all losses since the last of them.
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
            raise UsageError(
                "model.dtype: weights in bf16 lose small updates; serve an fp32 model, or train an adapter"
            )
        self.names = [name for name, _ in named]
        self.parameters: list[Parameter] = [parameter for _, parameter in named]
        build = registry.find("optimizer", "adamw").bind({})
        self.optimizer: torch.optim.Optimizer = build(named, AdamStep().learning_rate)
        self.step = 0
        self.loss = 0.0

    @property
    def vocabulary(self) -> int:
        """The number of ids that the model reads and predicts."""
        return int(causal_lm(self.model).get_input_embeddings().weight.shape[0])

    @property
    def context(self) -> int:
        """The number of tokens that the model reads at once."""
        return context_length(self.model.config)

    def evaluate(self, datums: Sequence[Datum], loss: ChosenLoss, *, learns: bool) -> tuple[float, list[Tensor]]:
        """Return the sum of a loss and the log-probabilities of the targets ``[N]`` or ``[N, K]``, by row.

        With ``learns`` the gradients are added to those since the last step.
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
        """Take a step of AdamW along the gradients; return its metrics.

        Raises:
            UsageError: there are no gradients.
            NonFiniteLoss: loss or gradients are not finite; the weights are as before.
        """
        if all(p.grad is None for p in self.parameters):
            raise UsageError("optim_step: there are no gradients since the last step; call forward_backward first")
        for group in self.optimizer.param_groups:
            group["betas"] = (settings.beta1, settings.beta2)
            group["eps"] = settings.eps
            if group["params"][0].ndim >= 2:  # norms and biases do not decay
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
        """Write the weights as a model's folder, and the optimizer's state; return the folder of this step.

        Raises:
            StorageError: the disk is full or not writable.
        """
        optimizer: dict[str, Tensor] = {}
        if with_optimizer:
            optimizer = optimizer_tensors(self.optimizer, self.names)
        state = {"served": {**note, "has_optimizer": with_optimizer, "step": self.step}}
        return save_checkpoint(
            folder, step=self.step, model=self.model, tokenizer=self.loaded.tokenizer, optimizer=optimizer, state=state
        )

    def restore(self, folder: Path, *, with_optimizer: bool) -> None:
        """Take the weights of a saved state, bit for bit, and with them the optimizer's state or a new one.

        Raises:
            CheckpointError: the folder is damaged, or of another model.
        """
        checkpoint = load_checkpoint(folder)
        if checkpoint is None:
            raise CheckpointError(f"{folder}: there is no saved state")
        restore_model(self.model, checkpoint.path)
        self._drop_gradients()
        self.step = 0
        self.optimizer.state.clear()
        if with_optimizer:
            restore_optimizer(self.optimizer, self.names, checkpoint.optimizer)
            self.step = checkpoint.step

    def _drop_gradients(self) -> None:
        """Begin anew to add gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = 0.0
