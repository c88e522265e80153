"""Heads on the last hidden states: numbers (values, rewards, classes of steps) and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from posttrain.models.config import Model
from posttrain.models.forward.fused import TokenScores
from posttrain.randomness import derive_key


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
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        numbers = F.linear(hidden.to(dtype), self.weight.to(dtype))
        return numbers[:, 0] if self.weight.shape[0] == 1 else numbers


def score_logits(
    logits: Tensor, targets: Tensor, temperature: float, entropy: str, candidates: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute log-probabilities ``[M]`` for ``targets`` under ``logits [M, V]``, entropies ``[M]``, candidate scores.

    Candidate log-probabilities are ``[M, K]`` for ``candidates [M, K]``, else None. Results are fp32 or float64.
    """
    scaled = logits if logits.dtype == torch.float64 else logits.float()
    scaled = scaled if temperature == 1.0 else scaled / temperature
    if entropy != "differentiable":
        ids = targets[:, None] if candidates is None else torch.cat([targets[:, None], candidates], dim=1)
        logprobs, entropies = TokenScores.apply(scaled, ids, entropy == "detached")
        return logprobs[:, 0], entropies, None if candidates is None else logprobs[:, 1:]
    table = scaled.log_softmax(dim=-1)
    # 0 · (−inf) marks an impossible token, which adds nothing.
    entropies = -torch.linalg.vecdot(table.exp(), table.clamp(min=torch.finfo(table.dtype).min))
    of_candidates = None if candidates is None else table.gather(-1, candidates)
    return table.gather(-1, targets[:, None])[:, 0], entropies, of_candidates


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
            slopes = [  # per state
                torch.autograd.grad(x.sum(), states, retain_graph=True)[0] if x.requires_grad else None for x in results
            ]
        outputs = tuple(x.detach() for x in results)
        ctx.save_for_backward(*slopes)
        ctx.mark_non_differentiable(*(x for x, slope in zip(outputs, slopes, strict=True) if slope is None))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        pairs = zip(gradients, ctx.saved_tensors, strict=True)
        parts = [(g[:, None] * slope).to(slope.dtype) for g, slope in pairs if slope is not None]
        return sum(parts[1:], start=parts[0]), None, None
