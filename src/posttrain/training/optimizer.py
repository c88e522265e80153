"""Optimizers with state as plain tensors.

Every parameter group has ``lr_ratio``; the loop sets ``group["lr"] = lr * group["lr_ratio"]`` before each step. Norms
and biases (fewer than two dimensions) have no weight decay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from posttrain import registry
from posttrain.acting.methods import IF_ADAMW_TRAINS_SOME
from posttrain.algorithms.objectives.surrogate import NotNegative, Positive
from posttrain.errors import CheckpointError, RecipeError
from posttrain.process_group import whole
from posttrain.recipes.sections import Component, TrainSection
from posttrain.registry import register

Named = Sequence[tuple[str, Parameter]]
Decay = Annotated[float, Field(ge=0, lt=1)]

# Keller Jordan's quintic: x -> a x + b x^3 + c x^5 pushes singular values in (0, 1] towards 1.
_QUINTIC = (3.4445, -4.7750, 2.0315)
LEAST_IN_8_BITS = 4_096  # smallest tensor with 8-bit moments in bitsandbytes
BLOCK_IN_8_BITS = 256  # block size per scale
SHARED_STATE = ("qmap1", "qmap2")  # bitsandbytes quantization maps, shared by all parameters
EMBEDDING_NAMES = ("embed", "wte", "wpe", "lm_head")


def _groups(parameters: Named, lr: float, weight_decay: float, **settings: object) -> list[dict[str, object]]:
    """Split parameters into groups with and without weight decay, dropping empty groups."""
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

    m = β1 m + (1 − β1) g;  v = β2 v + (1 − β2) g²;  with bias-corrected m̂, v̂: p ← p − lr (weight_decay p + m̂ /
    (√v̂ + eps)). Keep parameters in fp32, because bf16 rounds away an update of 1e-5 to a weight of 0.02.

    Args:
        betas: β1 and β2, moment decay rates.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
    """
    groups = _groups(parameters, lr, weight_decay, lr_ratio=1.0)
    fused = all(p.dtype in (torch.float32, torch.float64) for _, p in parameters)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused)


@register("optimizer")
def lion(
    parameters: Named,
    lr: float,
    *,
    betas: tuple[Decay, Decay] = (0.9, 0.99),
    weight_decay: NotNegative = 0.0,
) -> Optimizer:
    """Lion (Chen et al. 2023, "Symbolic discovery of optimization algorithms", algorithm 2): sign of momentum.

    u = sign(β1 m + (1 − β1) g);  p ← p − lr (u + weight_decay p);  m = β2 m + (1 − β2) g. State: one value per
    weight. Every weight moves by lr, so the paper uses 3 to 10 times smaller lr than AdamW, and larger weight decay
    by the same factor.

    Args:
        betas: β1 for the update, β2 for momentum.
        weight_decay: decoupled weight decay.
    """
    return Lion(_groups(parameters, lr, weight_decay, lr_ratio=1.0, betas=betas))


@register("optimizer")
def adafactor(
    parameters: Named,
    lr: float,
    *,
    beta2_decay: Annotated[float, Field(ge=-1, le=0)] = -0.8,
    eps: Positive = 1e-3,
    clip_threshold: Positive = 1.0,
    weight_decay: NotNegative = 0.0,
) -> Optimizer:
    """Adafactor (Shazeer & Stern 2018), as in torch: factored second moments with one value per row and column.

    Steps are relative: lr is multiplied by each tensor's root mean square (at least ``eps``), and capped at 1/√t in
    step t. Typical lr values are 1e-3 to 1e-2. No momentum.

    Args:
        beta2_decay: second moment decay in step t is 1 − t^beta2_decay.
        eps: minimum root mean square for weight tensors.
        clip_threshold: d, maximum root mean square for an update before lr.
        weight_decay: decoupled weight decay.
    """
    groups = _groups(parameters, lr, weight_decay, lr_ratio=1.0)
    return torch.optim.Adafactor(groups, lr=lr, beta2_decay=beta2_decay, eps=(None, eps), d=clip_threshold)


@register("optimizer", package="bitsandbytes", extra="quantize")
def adamw_8bit(
    parameters: Named,
    lr: float,
    *,
    betas: tuple[Decay, Decay] = (0.9, 0.999),
    eps: Positive = 1e-8,
    weight_decay: NotNegative = 0.0,
    paged: bool = False,
) -> Optimizer:
    """AdamW with 8-bit moments from bitsandbytes (Dettmers et al. 2022, "8-bit optimizers via block-wise
    quantization").

    State memory shrinks to a quarter. Tensors with fewer than 4,096 elements keep fp32 moments.

    Args:
        betas: β1 and β2, moment decay rates.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        paged: move moments to CPU memory if GPU memory runs out. No effect without a GPU; bitsandbytes then prints a
            warning.

    Raises:
        MissingExtra: bitsandbytes is not installed.
    """
    from posttrain.models.quantize import adamw_in_8_bits

    groups = _groups(parameters, lr, weight_decay, lr_ratio=1.0)
    return adamw_in_8_bits(groups, lr=lr, betas=betas, eps=eps, paged=paged)


@register("optimizer")
def muon(
    parameters: Named,
    lr: float,
    *,
    momentum: Decay = 0.95,
    ns_steps: Annotated[int, Field(ge=1, le=20)] = 5,
    weight_decay: NotNegative = 0.0,
    adamw_lr_ratio: Annotated[Positive, IF_ADAMW_TRAINS_SOME] = 1.0,
    betas: Annotated[tuple[Decay, Decay], IF_ADAMW_TRAINS_SOME] = (0.9, 0.95),
    eps: Annotated[Positive, IF_ADAMW_TRAINS_SOME] = 1e-10,
) -> Optimizer:
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): orthogonalized momentum.

    For each hidden matrix W [out, in]: m = μ m + (1 − μ) g;  u = μ m + (1 − μ) g (Nesterov);
    W ← W − lr (weight_decay W + √max(1, out/in) · NS(u)). Weights stored as [in, out] (GPT-2) are handled too.
    NS runs ``ns_steps`` steps of a quintic Newton–Schulz iteration, which moves singular values close to 1.
    Embeddings, LM head, norms and biases use AdamW with ``lr * adamw_lr_ratio``.

    The iteration runs in fp32 (bf16 in the original), batched over matrices with equal shapes.

    Args:
        momentum: μ.
        ns_steps: number of Newton–Schulz steps.
        weight_decay: decoupled weight decay.
        adamw_lr_ratio: AdamW learning rate as a multiple of ``lr``.
        betas, eps: AdamW parameters.
    """
    matrices = [(n, p) for n, p in parameters if p.ndim == 2 and not any(part in n for part in EMBEDDING_NAMES)]
    chosen = {id(p) for _, p in matrices}
    others = [(n, p) for n, p in parameters if id(p) not in chosen]
    settings = {"momentum": momentum, "ns_steps": ns_steps, "betas": betas, "eps": eps}
    groups = _groups(matrices, lr, weight_decay, lr_ratio=1.0, orthogonal=True, **settings)
    groups += _groups(others, lr * adamw_lr_ratio, weight_decay, lr_ratio=adamw_lr_ratio, orthogonal=False, **settings)
    return Muon(groups)


def mark_input_first(module: torch.nn.Module) -> None:
    """Mark weights stored as [in, out] (transformers Conv1D). Copied modules are marked again."""
    from transformers.pytorch_utils import Conv1D

    for layer in module.modules():
        if isinstance(layer, Conv1D):
            layer.weight.input_first = True


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Newton–Schulz: move singular values in ``[..., out, in]`` matrices close to 1, in fp32.

    After five steps, singular values within a factor of about 1,000 from the largest end up between roughly 0.7 and
    1.2.
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


class Lion(Optimizer):
    """Lion optimizer. Parameter state: ``exp_avg``."""

    def __init__(self, groups: list[dict[str, object]]) -> None:
        super().__init__(groups, defaults={})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters with gradients."""
        assert closure is None, "gradients are computed before"
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                update = state["exp_avg"].lerp(parameter.grad, 1 - beta1).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"])
                state["exp_avg"].lerp_(parameter.grad, 1 - beta2)


class Muon(Optimizer):
    """Muon for groups with ``orthogonal`` true, AdamW for other groups.

    Matrix state: ``momentum``. Other tensors: ``exp_avg``, ``exp_avg_sq`` and ``step`` (fp32 scalar).
    """

    def __init__(self, groups: list[dict[str, object]]) -> None:
        super().__init__(groups, defaults={})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters with gradients."""
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
        """Update matrices with equal shapes together."""
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
    """Shard an unsharded tensor like its parameter, if necessary."""
    if not hasattr(parameter, "full_tensor"):
        return whole
    from posttrain.training.distributed import part_of

    return part_of(whole, parameter)


def lr_ratios(
    patterns: Mapping[str, float], modules: Sequence[torch.nn.Module], prefixes: Sequence[str]
) -> dict[str, float]:
    """Resolve learning rate ratios by parameter name. A ratio of 0 freezes the parameter.

    The first matching pattern applies. ``prefixes``: name prefixes, one per module.

    Raises:
        RecipeError: pattern without a matching trained parameter.
    """
    trained: dict[str, Parameter] = {}
    for module, prefix in zip(modules, prefixes, strict=True):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                trained[f"{prefix}{name}"] = parameter
    ratios: dict[str, float] = {}
    for pattern, ratio in patterns.items():
        matched = [name for name in trained if fnmatchcase(name, pattern)]
        if not matched:
            shown = ", ".join(sorted(trained)[:4])
            near = registry.suggest(pattern, trained)
            raise RecipeError(
                f"train.lr_ratios: no trained weight matches {pattern!r}.{near} Examples: {shown} ... ; "
                f"* matches any text, as in '*{sorted(trained)[-1].rpartition('.')[2]}'"
            )
        for name in matched:
            ratios.setdefault(name, ratio)
    for name, ratio in ratios.items():
        if ratio == 0:
            trained[name].requires_grad_(False)
    return ratios


def _by_ratio(
    named: Named, head_parameters: Named, ratios: Mapping[str, float], of_heads: float
) -> Iterator[tuple[list[tuple[str, Parameter]], float]]:
    """Yield (parameters, learning rate ratio), first for the model and then for heads."""
    for members, factor in ((named, 1.0), (head_parameters, of_heads)):
        for ratio in dict.fromkeys(ratios.get(name, 1.0) for name, _ in members):
            yield [(n, p) for n, p in members if ratios.get(n, 1.0) == ratio], factor * ratio


def build_optimizer(
    component: Component,
    train: TrainSection,
    model: torch.nn.Module,
    heads: dict[str, torch.nn.Module],
    head_lr_ratio: float = 1.0,
) -> tuple[list[tuple[str, Parameter]], torch.optim.Optimizer]:
    """Collect trained parameters by name (including heads and critics) and build their optimizer.

    ``head_lr_ratio``: head learning rate as a multiple of ``train.lr``.

    Raises:
        RecipeError: unknown optimizer, or bfloat16 trained weights.
    """
    for module in (model, *heads.values()):
        mark_input_first(module)
    ratios = lr_ratios(train.lr_ratios, [model, *heads.values()], ["", *(f"{name}." for name in heads)])
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    coarse = [name for name, p in named if p.dtype not in (torch.float32, torch.float64)]
    if coarse:
        raise RecipeError(
            f"model.dtype: {len(coarse)} trained weights would be bf16, which rounds away small updates; "
            "use model.dtype fp32, or train an fp32 adapter (model.adapter)"
        )
    head_parameters: list[tuple[str, Parameter]] = []
    for head_name, head in heads.items():
        for name, parameter in head.named_parameters():
            if parameter.requires_grad:
                head_parameters.append((f"{head_name}.{name}", parameter))
    entry = registry.find("optimizer", component.name, "optimizer")
    build = entry.bind(component.options, "optimizer")
    optimizer: Optimizer | None = None
    for members, factor in _by_ratio(named, head_parameters, ratios, head_lr_ratio):
        if not members:
            continue
        own: Optimizer = registry.construct("optimizer", build, Optimizer, members, train.lr)
        for group in own.param_groups:
            group["lr_ratio"] = group.get("lr_ratio", 1.0) * factor
        if optimizer is None:
            optimizer = own
            continue
        names = {id(p): n for n, p in members}
        for group in own.param_groups:
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            optimizer.add_param_group({"params": [(names[id(p)], p) for p in group["params"]], **settings})
    if optimizer is None:
        raise RecipeError("train.lr_ratios: all weights are frozen, so nothing can be trained; remove some patterns")
    return [*named, *head_parameters], optimizer


def optimizer_tensors(optimizer: Optimizer, names: Sequence[str]) -> dict[str, Tensor]:
    """Collect optimizer state keyed ``<parameter name>.<state name>``, without copying.

    ``names``: parameter names in creation order. Parameters without steps have no entry. Learning rates are omitted,
    because the schedule determines them.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in _by_name(optimizer, names).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if key in SHARED_STATE:
                continue
            if isinstance(value, int):
                value = torch.tensor(float(value))
            assert isinstance(value, Tensor), f"optimizer state {key!r} is not a tensor and cannot be saved"
            tensors[f"{name}.{key}"] = value.detach()
    return tensors


def restore_optimizer(optimizer: Optimizer, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
    """Restore state from ``optimizer_tensors`` bit for bit, on each parameter's device and with the same sharding.

    ``tensors`` are read one at a time, identically in all processes.

    Raises:
        CheckpointError: unknown parameter, wrong shape or dtype, or missing entry.
    """
    by_name = _by_name(optimizer, names)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    is_fused = isinstance(optimizer, torch.optim.AdamW) and bool(optimizer.defaults.get("fused"))
    restored: dict[Tensor, dict[str, Any]] = {}
    for full_name, value in tensors.items():
        name, _, key = full_name.rpartition(".")
        parameter = by_name.get(name)
        if parameter is None:
            raise CheckpointError(f"optimizer state {full_name!r}: the model trains no parameter {name!r}")
        kept = _kept_state(optimizer, parameter, groups[id(parameter)])
        _check_state(full_name, value, key, parameter, kept)
        state = restored.setdefault(parameter, {})
        if key != "step":
            moved = value.detach().to(parameter.device)
            if value.shape == parameter.shape:
                moved = _part_of(moved, parameter)
            state[key] = moved.clone()
        elif is_fused:
            state[key] = value.detach().to(parameter.device).clone()
        elif is_8_bit(optimizer):
            state[key] = int(value)
        else:
            state[key] = value.detach().to("cpu").clone()
    for parameter, state in restored.items():
        kept = _kept_state(optimizer, parameter, groups[id(parameter)])
        if kept is not None and state.keys() != kept.keys():
            there = ", ".join(sorted(state))
            raise CheckpointError(f"optimizer state: a parameter has {there}, but its optimizer needs {sorted(kept)}")
    if is_8_bit(optimizer):
        from posttrain.models.quantize import add_code_tables

        add_code_tables(optimizer, restored.values())
    optimizer.state.clear()
    optimizer.state.update(restored)


def is_8_bit(optimizer: Optimizer) -> bool:
    """Check for bitsandbytes optimizers, which use a different state layout."""
    return type(optimizer).__module__.startswith("bitsandbytes.")


Kept = dict[str, tuple[tuple[int, ...], torch.dtype]]


def _kept_state(optimizer: Optimizer, parameter: Tensor, group: Mapping[str, Any]) -> Kept | None:
    """List (shape, dtype) for each state tensor; None for unknown optimizers."""
    like = (tuple(parameter.shape), parameter.dtype)
    count = ((), torch.float32)
    if isinstance(optimizer, Lion):
        return {"exp_avg": like}
    if isinstance(optimizer, Muon) and group.get("orthogonal"):
        return {"momentum": like}
    if isinstance(optimizer, torch.optim.AdamW | Muon):
        return {"step": count, "exp_avg": like, "exp_avg_sq": like}
    if isinstance(optimizer, torch.optim.Adafactor):
        if parameter.ndim < 2:
            return {"step": count, "variance": like}
        *before, rows, columns = parameter.shape
        return {
            "step": count,
            "row_var": ((*before, rows, 1), parameter.dtype),
            "col_var": ((*before, 1, columns), parameter.dtype),
        }
    if not is_8_bit(optimizer):
        return None
    if parameter.numel() < LEAST_IN_8_BITS:
        full = (like[0], torch.float32)
        return {"step": count, "state1": full, "state2": full}
    codes = (like[0], torch.uint8)
    scales = ((-(-parameter.numel() // BLOCK_IN_8_BITS),), torch.float32)
    return {"step": count, "state1": codes, "state2": codes, "absmax1": scales, "absmax2": scales}


def _check_state(full_name: str, value: Tensor, key: str, parameter: Tensor, kept: Kept | None) -> None:
    """Reject state tensors that this optimizer could not have produced.

    Raises:
        CheckpointError: wrong shape or dtype, or a step count below 1.
    """
    if key == "step":
        if kept is not None and not (value.dtype == torch.float32 and value.numel() == 1 and bool(value >= 1)):
            raise CheckpointError(f"optimizer state {full_name!r}: not valid optimizer state ({value.dtype})")
        return
    shape, dtype = tuple(parameter.shape), value.dtype
    if kept is not None:
        shape, dtype = kept.get(key, (shape, parameter.dtype))
    if tuple(value.shape) != shape:
        raise CheckpointError(
            f"optimizer state {full_name!r} has shape {tuple(value.shape)}, but its parameter needs {shape}"
        )
    if value.dtype != dtype:
        raise CheckpointError(f"optimizer state {full_name!r}: not valid optimizer state ({value.dtype})")


def _by_name(optimizer: Optimizer, names: Sequence[str]) -> dict[str, Tensor]:
    """Map names to parameters: by stored name if available, otherwise by order."""
    named: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        start = len(named)
        own = group.get("param_names") or names[start : start + len(group["params"])]
        named.update(zip(own, group["params"], strict=True))
    assert sorted(named) == sorted(names), "the optimizer was made with other parameters"
    return named
