"""Heads on the last hidden states: numbers (values, rewards, classes of steps) and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from posttrain.models.forward.fused import TokenScores
from posttrain.randomness import derive_key
from posttrain.types import Model


def hidden_size(model: Model) -> int:
    """Look up the hidden width read by the language-model head (plain or peft)."""
    return int(model.get_output_embeddings().weight.shape[1])


class ScalarHead(nn.Module):
    """Bias-free linear layer producing ``outputs`` numbers per hidden state: ``W h``, in fp32 or wider.

    Args:
        hidden: hidden width d.
        outputs: 1 for values and rewards, C for classes.
        seed: determines all weights, on every device.
        init_std: weights are drawn from N(0, init_std²).
    """

    def __init__(self, hidden: int, outputs: int = 1, *, seed: int = 0, init_std: float = 0.02) -> None:
        super().__init__()
        assert outputs >= 1, "a head gives at least one number"
        generator = torch.Generator().manual_seed(derive_key(seed, "scalar head") >> 1)
        self.weight = nn.Parameter(torch.randn(outputs, hidden, generator=generator, dtype=torch.float32) * init_std)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[M]`` for one output, else ``[M, C]``, from ``hidden [M, d]``, in fp32 or float64."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        numbers = F.linear(hidden.to(dtype), self.weight.to(dtype))
        if len(self.weight) == 1:
            return numbers[:, 0]
        return numbers


def score_logits(
    logits: Tensor, targets: Tensor, temperature: float, entropy: str, candidates: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute log-probabilities ``[M]`` for ``targets`` under ``logits [M, V]``, entropies ``[M]``, candidate scores.

    Candidate log-probabilities are ``[M, K]`` for ``candidates [M, K]``, else None. Results are fp32 or float64.
    """
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1.0:
        scaled = scaled / temperature
    if entropy == "differentiable":
        table = scaled.log_softmax(dim=-1)
        # 0 · (−inf) marks an impossible token, which adds nothing.
        entropies = -torch.linalg.vecdot(table.exp(), table.clamp(min=torch.finfo(table.dtype).min))
        logprobs = table.gather(-1, targets[:, None])[:, 0]
        if candidates is None:
            return logprobs, entropies, None
        return logprobs, entropies, table.gather(-1, candidates)
    ids = targets[:, None]
    if candidates is not None:
        ids = torch.cat([ids, candidates], dim=1)
    logprobs, entropies = TokenScores.apply(scaled, ids, entropy == "detached")
    if candidates is None:
        return logprobs[:, 0], entropies, None
    return logprobs[:, 0], entropies, logprobs[:, 1:]


def _slope(result: Tensor, states: Tensor) -> Tensor | None:
    """Differentiate each number ``[M]`` by its state: ``[M, d]``; None for constants."""
    if not result.requires_grad:
        return None
    return torch.autograd.grad(result.sum(), states, retain_graph=True)[0]


class WithSlopes(torch.autograd.Function):
    """Evaluate ``run(states, ids)`` (``[M]`` tensors) on hidden states ``[M, d]`` under a frozen head.

    Differentiating a token's log-probability with respect to its state gives ``u = W^T (e_y - p) / temperature``,
    independent of the objective. The forward pass therefore computes u, and the backward pass just scales it: ``g u``.
    This costs two vocabulary-sized products; recomputing logits would need a third. Only ``[M, d]`` is stored.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, run: Callable[[Tensor, Any], tuple[Tensor, ...]], ids: Any) -> Any:
        with torch.enable_grad():
            states = states.detach().requires_grad_()
            results = run(states, ids)
            slopes = [_slope(x, states) for x in results]
        outputs = tuple(x.detach() for x in results)
        constants = [x for x, slope in zip(outputs, slopes, strict=True) if slope is None]
        ctx.save_for_backward(*slopes)
        ctx.mark_non_differentiable(*constants)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        pairs = zip(gradients, ctx.saved_tensors, strict=True)
        parts = [(g[:, None] * slope).to(slope.dtype) for g, slope in pairs if slope is not None]
        return sum(parts[1:], start=parts[0]), None, None
