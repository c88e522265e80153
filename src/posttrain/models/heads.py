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
    """The width of the hidden states that the language-model head of ``model`` (plain or peft) reads."""
    return int(model.get_output_embeddings().weight.shape[1])


class ScalarHead(nn.Module):
    """One linear layer from a hidden state to ``outputs`` numbers: ``W h``, in fp32 at least.

    Args:
        hidden: the width of the hidden states, d.
        outputs: 1 for a value or a reward, C for classes.
        seed: the weights are a function of ``seed`` alone, the same on every device.
        init_std: they are drawn from N(0, init_std²).
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
    """Return log-probabilities ``[M]`` of ``targets`` under ``logits [M, V]``, entropies ``[M]``, and candidates'.

    The last are ``[M, K]`` for ``candidates [M, K]``, or None; all are in fp32 or float64.
    """
    scaled = logits if logits.dtype == torch.float64 else logits.float()
    scaled = scaled if temperature == 1.0 else scaled / temperature
    if entropy != "differentiable":
        ids = targets[:, None] if candidates is None else torch.cat([targets[:, None], candidates], dim=1)
        logprobs, entropies = TokenScores.apply(scaled, ids, entropy == "detached")
        return logprobs[:, 0], entropies, None if candidates is None else logprobs[:, 1:]
    table = scaled.log_softmax(dim=-1)
    # 0 · (−inf) is a token that cannot occur: it adds nothing.
    entropies = -torch.linalg.vecdot(table.exp(), table.clamp(min=torch.finfo(table.dtype).min))
    of_candidates = None if candidates is None else table.gather(-1, candidates)
    return table.gather(-1, targets[:, None])[:, 0], entropies, of_candidates


class WithSlopes(torch.autograd.Function):
    """The tensors ``[M]`` of ``run(states, ids)`` for hidden states ``[M, d]`` under a head that is not trained.

    The gradient of a token's log-probability by its state, ``u = W^T (e_y - p) / temperature``, does not depend on the
    objective. So it is formed in the forward pass, and the backward pass is ``g u``: two products with the vocabulary,
    where logits computed again cost a third, and only ``[M, d]`` is kept.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, run: Callable[[Tensor, Any], tuple[Tensor, ...]], ids: Any) -> Any:
        with torch.enable_grad():
            states = states.detach().requires_grad_()
            results = run(states, ids)
            slopes = [  # of each number by its own state
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
