"""Optimizers, and their state as plain tensors.

Every parameter group has ``lr_ratio``; the loop sets ``group["lr"] = lr * group["lr_ratio"]`` before each step. Weight
decay leaves norms and biases (tensors with fewer than two dimensions) alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from posttrain import registry
from posttrain.algorithms.objectives.surrogate import NotNegative, Positive
from posttrain.errors import CheckpointError, RecipeError
from posttrain.process_group import whole
from posttrain.recipes.recipe import Recipe
from posttrain.registry import register

Named = Sequence[tuple[str, Parameter]]
Decay = Annotated[float, Field(ge=0, lt=1)]

# Keller Jordan's quintic: x -> a x + b x^3 + c x^5 pushes singular values in (0, 1] towards 1.
_QUINTIC = (3.4445, -4.7750, 2.0315)
EMBEDDING_NAMES = ("embed", "wte", "wpe", "lm_head")


def _groups(parameters: Named, lr: float, weight_decay: float, **settings: object) -> list[dict[str, object]]:
    """Return the groups with and without weight decay; empty ones are left out."""
    decayed = [(n, p) for n, p in parameters if p.ndim >= 2]
    others = [(n, p) for n, p in parameters if p.ndim < 2]
    groups: list[dict[str, object]] = []
    for members, decay in ((decayed, weight_decay), (others, 0.0)):
        if members:
            groups.append({"params": members, "weight_decay": decay, "lr": lr, **settings})
    return groups


@register("optimizer")
def adamw(
    parameters: Named,
    lr: float,
    *,
    betas: tuple[Decay, Decay] = (0.9, 0.999),
    eps: Positive = 1e-8,
    weight_decay: NotNegative = 0.0,
) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019): Adam with decoupled weight decay.

    m = β1 m + (1 − β1) g;  v = β2 v + (1 − β2) g²;  with bias-corrected m̂, v̂:
    p ← p − lr (weight_decay p + m̂ / (√v̂ + eps)). Keep the parameters in fp32: in bf16 an update
    of 1e-5 next to a weight of 0.02 is rounded away.

    Args:
        betas: β1 and β2, the decay of the two moments.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
    """
    groups = _groups(parameters, lr, weight_decay, lr_ratio=1.0)
    fused = all(p.dtype in (torch.float32, torch.float64) for _, p in parameters)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused)


@register("optimizer")
def muon(
    parameters: Named,
    lr: float,
    *,
    momentum: Decay = 0.95,
    ns_steps: Annotated[int, Field(ge=1, le=20)] = 5,
    weight_decay: NotNegative = 0.0,
    adamw_lr_ratio: Positive = 1.0,
    betas: tuple[Decay, Decay] = (0.9, 0.95),
    eps: Positive = 1e-10,
) -> Optimizer:
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): momentum, orthogonalised.

    For each hidden matrix W [out, in]: m = μ m + (1 − μ) g;  u = μ m + (1 − μ) g (Nesterov);
    W ← W − lr (weight_decay W + √max(1, out/in) · NS(u)), also where a layer keeps W as [in, out] (GPT-2's).
    NS, ``ns_steps`` steps of a quintic Newton–Schulz iteration, replaces the singular values of u by values near 1.
    Embeddings, the output head, norms and biases follow AdamW at ``lr * adamw_lr_ratio``.

    The iteration runs in fp32 (the original uses bf16), over all matrices of one shape at once.

    Args:
        momentum: μ.
        ns_steps: steps of the Newton–Schulz iteration.
        weight_decay: decoupled weight decay.
        adamw_lr_ratio: learning rate of AdamW, as a multiple of ``lr``.
        betas, eps: those of AdamW.
    """
    matrices = [(n, p) for n, p in parameters if p.ndim == 2 and not any(part in n for part in EMBEDDING_NAMES)]
    chosen = {id(p) for _, p in matrices}
    others = [(n, p) for n, p in parameters if id(p) not in chosen]
    settings = {"momentum": momentum, "ns_steps": ns_steps, "betas": betas, "eps": eps}
    groups = _groups(matrices, lr, weight_decay, lr_ratio=1.0, orthogonal=True, **settings)
    groups += _groups(others, lr * adamw_lr_ratio, weight_decay, lr_ratio=adamw_lr_ratio, orthogonal=False, **settings)
    return Muon(groups)


def mark_input_first(module: torch.nn.Module) -> None:
    """Mark the weights that transformers keeps as [in, out] (its Conv1D); copies of a module are marked again."""
    from transformers.pytorch_utils import Conv1D

    for layer in module.modules():
        if isinstance(layer, Conv1D):
            layer.weight.input_first = True


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Newton–Schulz: each matrix of ``[..., out, in]`` with its singular values moved near 1, in fp32.

    After five steps singular values within a factor of about 1,000 of the largest lie in roughly 0.7 to 1.2.
    """
    a, b, c = _QUINTIC
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    is_tall = x.size(-2) > x.size(-1)
    if is_tall:
        x = x.mT
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    if is_tall:
        return x.mT
    return x


class Muon(Optimizer):
    """Groups with ``orthogonal`` true take Muon's step, the others AdamW's.

    State per matrix: ``momentum``. Per other tensor: ``exp_avg``, ``exp_avg_sq`` and ``step`` (fp32 scalar).
    """

    def __init__(self, groups: list[dict[str, object]]) -> None:
        super().__init__(groups, defaults={})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient."""
        assert closure is None, "gradients are computed before"
        for group in self.param_groups:
            ready = [p for p in group["params"] if p.grad is not None]
            if group["orthogonal"]:
                by_shape: dict[torch.Size, list[Parameter]] = {}
                for parameter in ready:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
                for members in by_shape.values():
                    self._step_matrices(group, members)
            else:
                for parameter in ready:
                    self._step_adamw(group, parameter)

    def _step_matrices(self, group: dict[str, Any], members: Sequence[Parameter]) -> None:
        """Update matrices of one shape together."""
        mu, shape = group["momentum"], members[0].shape
        updates = []
        for parameter in members:
            assert parameter.grad is not None
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            state["momentum"].lerp_(parameter.grad, 1 - mu)
            updates.append(whole(parameter.grad.lerp(state["momentum"], mu)))
        directions = orthogonalize(torch.stack(updates), group["ns_steps"])
        for parameter, direction in zip(members, directions, strict=True):
            num_in, num_out = shape if getattr(parameter, "input_first", False) else reversed(shape)
            scale = max(1.0, num_out / num_in) ** 0.5
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(_part_of(direction, parameter), alpha=-group["lr"] * scale)

    def _step_adamw(self, group: dict[str, Any], parameter: Parameter) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        beta1, beta2 = group["betas"]
        state["step"] += 1
        count = int(state["step"])
        state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
        denominator = (state["exp_avg_sq"] / (1 - beta2**count)).sqrt_().add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / (1 - beta1**count))


def _part_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return the part of an unsharded tensor for a parameter, sharded or not."""
    if not hasattr(parameter, "full_tensor"):
        return whole
    from posttrain.training.distributed import part_of

    return part_of(whole, parameter)


def build_optimizer(
    recipe: Recipe, model: torch.nn.Module, heads: dict[str, torch.nn.Module]
) -> tuple[list[tuple[str, Parameter]], torch.optim.Optimizer]:
    """Return the trained parameters by name (heads and critics included) and their optimizer.

    Raises:
        RecipeError: an unknown optimizer, or trained weights in bfloat16.
    """
    for module in (model, *heads.values()):
        mark_input_first(module)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    coarse = [name for name, p in named if p.dtype not in (torch.float32, torch.float64)]
    if coarse:
        raise RecipeError(
            f"model.dtype: {len(coarse)} trained weights would be bf16, where small updates are rounded away; "
            "use model.dtype fp32, or train an adapter (model.adapter), whose weights are fp32"
        )
    entry = registry.find("optimizer", recipe.optimizer.name, "optimizer")
    build = entry.bind(recipe.optimizer.options, "optimizer")
    optimizer = registry.construct("optimizer", build, torch.optim.Optimizer, named, recipe.train.lr)
    head_parameters: list[tuple[str, Parameter]] = []
    for head_name, head in heads.items():
        for name, parameter in head.named_parameters():
            if parameter.requires_grad:
                head_parameters.append((f"{head_name}.{name}", parameter))
    if not head_parameters:
        return [*named], optimizer
    of_parameter = {id(p): n for n, p in head_parameters}
    for group in build(head_parameters, recipe.train.lr).param_groups:
        assert recipe.head is not None
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        settings["lr_ratio"] = settings.get("lr_ratio", 1.0) * recipe.head.lr_ratio
        members = [(of_parameter[id(p)], p) for p in group["params"]]
        optimizer.add_param_group({"params": members, **settings})
    return [*named, *head_parameters], optimizer


def optimizer_tensors(optimizer: Optimizer, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the optimizer's state, keyed ``<parameter name>.<state name>``; the tensors are not copied.

    ``names``: of the parameters that the optimizer was made with, in that order. Parameters that have not been stepped
    have no entry. Learning rates are not state: the schedule gives them.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in _by_name(optimizer, names).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            assert isinstance(value, Tensor), f"optimizer state {key!r} is no tensor and could not be saved"
            tensors[f"{name}.{key}"] = value.detach()
    return tensors


def restore_optimizer(optimizer: Optimizer, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
    """Put state from ``optimizer_tensors`` back, bit for bit, on each parameter's device and sharded as it is.

    ``tensors`` are read one after the other, the same in all processes.

    Raises:
        CheckpointError: an entry of an unknown parameter, of another shape or type; or a missing one.
    """
    by_name = _by_name(optimizer, names)
    is_ours = isinstance(optimizer, torch.optim.AdamW | Muon)
    is_fused = isinstance(optimizer, torch.optim.AdamW) and bool(optimizer.defaults.get("fused"))
    restored: dict[Tensor, dict[str, Tensor]] = {}
    for full_name, value in tensors.items():
        name, _, key = full_name.rpartition(".")
        parameter = by_name.get(name)
        if parameter is None:
            raise CheckpointError(f"optimizer state {full_name!r}: the model trains no parameter {name!r}")
        is_count = key == "step"
        if not is_count and value.shape != parameter.shape:
            raise CheckpointError(
                f"optimizer state {full_name!r} has shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}"
            )
        if is_ours and not _is_left(value, parameter, is_count=is_count):
            raise CheckpointError(f"optimizer state {full_name!r}: no optimizer has left this ({value.dtype})")
        state = restored.setdefault(parameter, {})
        if not is_count:
            state[key] = _part_of(value.detach().to(parameter.device), parameter).clone()
        elif is_fused:
            state[key] = value.detach().to(parameter.device).clone()
        else:
            state[key] = value.detach().to("cpu").clone()
    if is_ours:
        _check_kept(optimizer, restored)
    optimizer.state.clear()
    optimizer.state.update(restored)


def _is_left(value: Tensor, parameter: Tensor, *, is_count: bool) -> bool:
    """Return whether our optimizers can have left this state of a parameter."""
    if is_count:
        return value.dtype == torch.float32 and value.numel() == 1 and bool(value >= 1)
    return value.dtype == parameter.dtype


def _check_kept(optimizer: Optimizer, restored: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
    """Refuse a parameter's state that is not what its group's optimizer keeps.

    Raises:
        CheckpointError: there is more, or less.
    """
    for group in optimizer.param_groups:
        kept = {"step", "exp_avg", "exp_avg_sq"}
        if group.get("orthogonal"):
            kept = {"momentum"}
        for parameter in group["params"]:
            if parameter in restored and restored[parameter].keys() != kept:
                there = ", ".join(sorted(restored[parameter]))
                raise CheckpointError(
                    f"optimizer state: {there} of a parameter, and its optimizer keeps {sorted(kept)}"
                )


def _by_name(optimizer: Optimizer, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the parameters by name: groups made from named parameters have names, others follow the order."""
    named: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        start = len(named)
        own = group.get("param_names") or names[start : start + len(group["params"])]
        named.update(zip(own, group["params"], strict=True))
    assert sorted(named) == sorted(names), "the optimizer was made with other parameters"
    return named
