"""A dictionary of features: sparse autoencoder, crosscoder, difference autoencoder or transcoder.

    pre = Σₘ (xₘ − b_dec[m]) · W_enc[m] + b_enc     f = the kind's selection of pre     x̂ₘ = f · W_dec[:, m] + b_dec[m]

``x`` [n, M, d] are activations of M models at the same tokens; with M = 1 (an autoencoder) the middle axis may be
left out. A difference autoencoder is one with M = 1 on the difference of two models' activations.

A transcoder (Dunefsky et al. 2024) reads what an MLP reads and writes what it gives, y; with a skip (Paulo et al. 2025)
a linear map of its input, which begins at zero, is added:

    pre = x · W_enc + b_enc     f = selection of pre     ŷ = f · W_dec + b_dec [+ x · W_skip]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from posttrain.errors import UsageError
from posttrain.randomness import derive_key
from posttrain.registry import find, register

# The kinds of sparse dictionaries: how pre-activations become features, and what is paid for them.
#
# A kind is a pure, differentiable function of the pre-activations; the matrix products around it, their gradients and
# the loss are the same for every kind (``dictionary_loss``). The loss that all of them share, on inputs scaled to
# E‖x‖ = √d and decoder rows of norm 1, is
#
#     loss = mean over rows of [ mean over the d coordinates of (x − x̂)² + penalty ]
#
# so a penalty is per row, and is weighed against a squared error that is *averaged* over d. That convention decides
# what a coefficient means: an error that is summed over d wants one that is d times as large.
#
# ``needs_rank``: the features of a row compete for a place, so the losers have something to learn from (AuxK).
# ``architecture``: what the trained dictionary is called in SAELens's layout, which is also how it is used:
# ``standard`` relu(pre), ``jumprelu`` relu(pre)·(pre > threshold), ``topk`` the k largest of a row.

Rows = Float[Tensor, "n F"]

# Fewer rows do not tell where the threshold of a batch is.
MIN_SAMPLE_ROWS = 256


@dataclass(frozen=True, slots=True)
class Codes:
    """What a kind makes of a batch.

    ``features`` [n, F], none negative. ``penalty``: mean over the rows, differentiable; None where sparsity is by
    construction. ``threshold`` [F]: the new value of the running threshold; None where it stays or is a parameter.
    """

    features: Tensor
    penalty: Tensor | None = None
    threshold: Tensor | None = None


@register("dictionary", architecture="standard", needs_rank=False)
def l1(pre: Rows, threshold: Tensor, progress: float, *, coefficient: float = 3e-4, warmup: float = 0.05) -> Codes:
    """f = relu(pre), penalty = coefficient · Σⱼ fⱼ‖dⱼ‖ (Bricken et al. 2023; ‖dⱼ‖ = 1 here).

    The original recipe's 3e-4 belongs to an error averaged over d = 5120, as here; it equals 1.54 with a summed error.
    At another d, the same sparsity wants coefficient · d unchanged.

    Args:
        coefficient: of the sum of a row's features.
        warmup: the coefficient rises from 0 over this share of the training.
    """
    features = torch.relu(pre)
    scale = coefficient * min(1.0, progress / warmup if warmup else 1.0)
    return Codes(features, features.sum(dtype=torch.float32) * (scale / len(pre)))


@register("dictionary", architecture="topk", needs_rank=True)
def topk(pre: Rows, threshold: Tensor, progress: float, *, k: int = 32) -> Codes:
    """The k largest pre-activations of each row, where positive (Gao et al. 2024).

    Args:
        k: features per row.
    """
    return Codes(keep_largest(pre, k))


@register("dictionary", architecture="jumprelu", needs_rank=True)
def batchtopk(
    pre: Rows, threshold: Tensor, progress: float, *, k: float = 32, sample: float = 1 / 16, average: float = 0.05
) -> Codes:
    """The n·k largest positive pre-activations of a batch of n rows (Bussmann, Leask & Nanda 2024).

    The value that the last of them exceeds is found among a share of the rows, which are in random order: to select
    among all of them takes longer than the matrix products. Its running average is the threshold that the trained
    dictionary uses, where a row stands alone.

    Args:
        k: features per row, on average.
        sample: share of the rows in which the threshold is found, at least 256 rows; 1 for the exact selection.
        average: weight of a batch in the running average.
    """
    rows = pre.detach()[: max(MIN_SAMPLE_ROWS, math.ceil(len(pre) * sample))].reshape(-1)
    count = min(max(1, round(len(rows) * k / pre.shape[1])), len(rows) - 1)
    bound = rows.topk(count + 1, sorted=False).values.amin().clamp_min(0.0)  # the first that is not kept
    running = torch.where(threshold > 0, threshold.lerp(bound.to(threshold), average), bound.to(threshold))
    # zero where it is not above the bound: one pass, and one for its gradient
    return Codes(torch.nn.functional.threshold(pre, float(bound), 0.0), threshold=running)


@register("dictionary", architecture="jumprelu", needs_rank=False, learns_threshold=True)
def jumprelu(
    pre: Rows,
    threshold: Tensor,
    progress: float,
    *,
    coefficient: float = 0.1,
    target: float | None = 32.0,
    bandwidth: float = 0.1,
    initial_threshold: float = 0.1,
    warmup: float = 0.05,
) -> Codes:
    """f = pre · 1[pre > θ] with a learned θ per feature (Rajamanoharan et al. 2024).

    Penalty: coefficient · L0, or with a ``target`` coefficient · (L0/target − 1)² (their appendix), L0 the mean
    number of active features. The derivatives of the jump with respect to θ are estimated by a rectangular kernel:
    ∂f/∂θ ≈ −(θ/ε)·1[|pre − θ| < ε/2], ∂L0/∂θ ≈ −(1/ε)·1[|pre − θ| < ε/2].
    Departure: ε and the first θ are in units of pre-activations at E‖x‖ = √d (the paper has E‖x‖² = 1).

    Args:
        coefficient: of the penalty.
        target: the L0 that is aimed at; null for a penalty that grows with L0.
        bandwidth: ε.
        initial_threshold: θ at the beginning.
        warmup: the coefficient rises from 0 over this share of the training.
    """
    theta = threshold.to(pre.dtype)
    features: Tensor = _Jump.apply(pre, theta, bandwidth)
    active: Tensor = _Count.apply(pre, theta, bandwidth)
    amount = active if target is None else (active / target - 1).square()
    return Codes(features, amount * (coefficient * min(1.0, progress / warmup if warmup else 1.0)))


def keep_largest(pre: Rows, k: int) -> Tensor:
    """The k largest entries of each row where positive, zero elsewhere."""
    values, places = pre.topk(min(k, pre.shape[1]), dim=-1, sorted=False)
    return torch.zeros_like(pre).scatter(-1, places, torch.relu(values))


class _Jump(torch.autograd.Function):
    """pre · 1[pre > θ] and its estimated derivative with respect to θ [F]."""

    @staticmethod
    def forward(ctx: FunctionCtx, pre: Tensor, theta: Tensor, bandwidth: float) -> Tensor:
        ctx.save_for_backward(pre, theta)
        ctx.bandwidth = bandwidth  # type: ignore[attr-defined]
        return pre * (pre > theta)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        pre, theta = ctx.saved_tensors
        near = (pre - theta).abs() < ctx.bandwidth / 2
        on_theta = (gradients[0] * near).sum(0, dtype=torch.float32) * (-theta.float() / ctx.bandwidth)
        return gradients[0] * (pre > theta), on_theta.to(theta.dtype), None


class _Count(torch.autograd.Function):
    """Mean number of entries above θ in a row, and its estimated derivative with respect to θ [F]."""

    @staticmethod
    def forward(ctx: FunctionCtx, pre: Tensor, theta: Tensor, bandwidth: float) -> Tensor:
        ctx.save_for_backward(pre, theta)
        ctx.bandwidth = bandwidth  # type: ignore[attr-defined]
        return (pre > theta).sum(dtype=torch.float32) / len(pre)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None]:
        pre, theta = ctx.saved_tensors
        near = ((pre - theta).abs() < ctx.bandwidth / 2).sum(0, dtype=torch.float32)
        return None, (near * (-gradients[0] / (ctx.bandwidth * len(pre)))).to(theta.dtype), None


class Dictionary(nn.Module):
    """The weights of a dictionary and how it reads and writes activations.

    Args:
        d: width of an activation.
        num_features: F.
        sources: M.
        kind: a word of kind ``dictionary``.
        options: of that word.
        matryoshka: how many features the nested dictionaries have (Bussmann et al. 2025), rising; the whole is added.
        transcoder: rows of training are pairs [n, 2, d]: what is read, and what is to be written; M is 1.
        skip: with ``W_skip`` [d, d].
        seed: of the first weights: random decoder rows of norm 1 (all sources together), the encoder their transpose.

    Parameters: ``W_enc`` [M, d, F], ``W_dec`` [F, M, d], ``b_enc`` [F], ``b_dec`` [M, d]; ``threshold`` [F] is a
    parameter where the kind learns it, else a buffer. Buffers: ``input_scale`` [M], which activations are multiplied by
    before anything else (``fold`` puts it into the weights), ``since_fired`` [F], rows seen since a feature was active;
    of a transcoder ``output_scale`` [1], which belongs to y.

    Raises:
        UnknownWord, RecipeError: there is no such kind, or an option is wrong.
        UsageError: prefixes that are not rising or exceed F.
    """

    threshold: Tensor
    input_scale: Tensor
    since_fired: Tensor
    output_scale: Tensor
    W_skip: nn.Parameter | None

    def __init__(
        self,
        d: int,
        num_features: int,
        sources: int = 1,
        kind: str = "batchtopk",
        options: Mapping[str, Any] | None = None,
        matryoshka: Sequence[int] | None = None,
        seed: int = 0,
        *,
        transcoder: bool = False,
        skip: bool = False,
    ) -> None:
        super().__init__()
        assert sources == 1 or not transcoder, "a transcoder is of one model"
        assert transcoder or not skip, "a skip is of a transcoder"
        self.d, self.features, self.sources, self.kind = d, num_features, sources, kind
        self.transcoder = transcoder
        entry = find("dictionary", kind, "dictionary")
        self.options = entry.options(options or {}, "dictionary")
        self.codes = entry.bind(self.options, "dictionary")
        self.architecture = str(entry.traits.get("architecture", "standard"))
        self.needs_rank = bool(entry.traits.get("needs_rank"))
        self.learns_threshold = bool(entry.traits.get("learns_threshold"))
        self.prefixes = _prefixes(matryoshka, num_features)
        draws = torch.Generator().manual_seed(derive_key(seed, "dictionary") % 2**63)
        decoder = torch.randn(num_features, sources * d, generator=draws)
        decoder /= decoder.norm(dim=1, keepdim=True)
        self.W_enc = nn.Parameter(decoder.T.reshape(sources, d, num_features).contiguous())
        self.W_dec = nn.Parameter(decoder.reshape(num_features, sources, d))
        self.b_enc = nn.Parameter(torch.zeros(num_features))
        self.b_dec = nn.Parameter(torch.zeros(sources, d))
        threshold = torch.full((num_features,), float(self.options.get("initial_threshold", 0.0)))
        if self.learns_threshold:
            self.threshold = nn.Parameter(threshold)
        else:
            self.register_buffer("threshold", threshold)
        self.register_buffer("input_scale", torch.ones(sources))
        self.register_buffer("since_fired", torch.zeros(num_features, dtype=torch.int64))
        if transcoder:
            self.register_buffer("output_scale", torch.ones(1))
        self.register_parameter("W_skip", nn.Parameter(torch.zeros(d, d)) if skip else None)

    def pre_activations(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:
        """[n, F] from activations [n, M, d] (or [n, d] with one source), in the precision of the weights.

        ``chosen``, int64 [S]: those of these features alone, [n, S].
        """
        flat = self.scaled(x)
        centred = flat if self.transcoder else flat - self.b_dec.reshape(-1)
        weights, bias = self.W_enc.reshape(-1, self.features), self.b_enc
        return centred @ weights + bias if chosen is None else centred @ weights[:, chosen] + bias[chosen]

    def encode(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Features [n, F] of activations [n, M, d] (or [n, d] with one source).

        ``chosen``, int64 [S]: these alone, [n, S]; no others are computed where features do not compete.
        """
        if chosen is not None and self.architecture == "topk":
            return self.encode(x)[:, chosen]
        return self.select(self.pre_activations(x, chosen), chosen)

    def select(self, pre: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Features from pre-activations (of the ``chosen``), as the trained dictionary makes them: row by row."""
        if self.architecture == "topk":
            return keep_largest(pre, int(self.options["k"]))
        positive = torch.relu(pre)
        if self.architecture == "standard":
            return positive
        return positive * (pre > (self.threshold if chosen is None else self.threshold[chosen]))

    def decode(self, features: Tensor, read: Tensor | None = None) -> Tensor:
        """Activations [n, M, d] (with one source [n, d]) from features [n, F].

        ``read``: the rows that the features are of, which a skip needs.
        """
        flat = features.to(self.W_dec.dtype) @ self.W_dec.reshape(self.features, -1) + self.b_dec.reshape(-1)
        if self.W_skip is not None:
            assert read is not None, "a skip adds a map of what was read"
            flat = flat + self.scaled(read) @ self.W_skip
        scale = self.output_scale if self.transcoder else self.input_scale
        x = flat.reshape(-1, self.sources, self.d) / scale[:, None]
        return x[:, 0] if self.sources == 1 else x

    def sides(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What is read and what is to be written, [n, M, d] each, of rows of training; the same of an autoencoder."""
        return (rows[:, :1], rows[:, 1:]) if self.transcoder else (rows, rows)

    def forward(self, x: Tensor) -> Tensor:
        """The reconstruction of ``x``, or what a transcoder writes when it reads ``x``, in its shape."""
        return self.decode(self.encode(x), x).reshape(x.shape)

    def scaled(self, x: Tensor) -> Tensor:
        """[n, M·d]: activations as training sees them, multiplied by ``input_scale``."""
        assert x.numel() == len(x) * self.sources * self.d, f"{tuple(x.shape)} for {self.sources} sources of {self.d}"
        x = x.to(self.W_enc.dtype).reshape(len(x), self.sources, self.d) * self.input_scale[:, None]
        return x.reshape(len(x), -1)

    def scaled_target(self, y: Tensor) -> Tensor:
        """[n, d]: what a transcoder is to write, as training sees it."""
        return y.to(self.W_dec.dtype).reshape(len(y), self.d) * self.output_scale

    @torch.no_grad()
    def prepare(self, sample: Tensor) -> None:
        """Set ``input_scale`` so that E‖xₘ‖ = √d, and ``b_dec`` to the mean, from a sample of activations.

        Of a transcoder, ``output_scale`` and ``b_dec`` are so for what it writes; ``b_enc`` takes the mean of what it
        reads away, where it can go on learning.
        """
        x = sample.float().reshape(len(sample), -1, self.d)
        norms = x.norm(dim=2).mean(0)
        if not bool((norms > 0).all()) or not bool(torch.isfinite(norms).all()):
            raise UsageError("the activations are all zero, or not finite: there is nothing to learn from them")
        scales, means = math.sqrt(self.d) / norms, x.mean(0)
        if self.transcoder:
            self.input_scale.copy_(scales[:1])
            self.output_scale.copy_(scales[1:])
            self.b_enc.copy_(-(means[0] * scales[0]) @ self.W_enc[0])
            self.b_dec.copy_(means[1:] * scales[1:, None])
            return
        self.input_scale.copy_(scales)
        self.b_dec.copy_(means * self.input_scale[:, None])

    @torch.no_grad()
    def normalize(self) -> None:
        """Bring the decoder rows back to norm 1 (all sources of a row together) and a learned threshold to >= 0."""
        rows = self.W_dec.view(self.features, -1)
        rows /= rows.norm(dim=1, keepdim=True).clamp_min(1e-12)
        if self.learns_threshold:
            self.threshold.clamp_(min=0)

    @torch.no_grad()
    def fold(self) -> Dictionary:
        """This dictionary with ``input_scale`` put into the weights, in place.

        With one source the rows of the decoder keep norm 1, so features are in units of the activations: ``b_enc``,
        ``b_dec`` and the threshold are divided by the scale. With several, whose scales differ, a feature keeps its
        value and the rows of the decoder are divided.
        """
        scale = self.input_scale
        if self.transcoder:
            scale = self.output_scale
            for matrix in (self.W_enc, self.W_skip):
                if matrix is not None:
                    matrix.mul_(self.input_scale / scale)
            self.input_scale, self.output_scale = torch.ones_like(scale), torch.ones_like(scale)
        self.b_dec.div_(scale[:, None])
        if self.sources == 1:
            self.b_enc.div_(scale)
            self.threshold.div_(scale)
        else:
            self.W_enc.mul_(scale[:, None, None])
            self.W_dec.div_(scale[:, None])
        self.input_scale = torch.ones_like(scale)
        return self


def _prefixes(prefixes: Sequence[int] | None, num_features: int) -> tuple[int, ...]:
    """The sizes of the nested dictionaries, the whole one last."""
    sizes = [*(prefixes or ()), num_features]
    if len(sizes) > 1 and sizes[-2] == num_features:
        sizes.pop()
    if sizes[0] < 1 or any(a >= b for a, b in pairwise(sizes)):
        raise UsageError(
            f"matryoshka: {list(prefixes or ())}: give rising numbers of features below that of all, {num_features}"
        )
    return tuple(sizes)
