"""A dictionary of features: a sparse autoencoder of one model's activations, or of the difference of two models'.

pre = (x − b_dec) · W_enc + b_enc     f = the kind's selection of pre     x̂ = f · W_dec + b_dec
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posttrain.errors import UsageError
from posttrain.randomness import derive_key
from posttrain.registry import find, register

# The kinds of sparse dictionaries are pure, differentiable functions of the pre-activations. On inputs scaled to
# E‖x‖ = √d and decoder rows of norm 1, all of them share the loss
#
#     loss = mean over rows of [ mean over the d coordinates of (x − x̂)² + penalty ]
#
# so a penalty is per row, and is weighed against a squared error that is *averaged* over d: an error that is summed
# over d needs a coefficient that is d times as large.
#
# ``needs_rank``: the features of a row compete for a place, so the losers have something to learn from (AuxK).
# ``architecture``: the name in SAELens's layout, and how the trained dictionary is used: ``standard`` relu(pre),
# ``jumprelu`` relu(pre)·(pre > threshold), ``topk`` the k largest of a row.

Rows = Float[Tensor, "n F"]

MIN_SAMPLE_ROWS = 256  # for the threshold of a batch


@dataclass(frozen=True, slots=True)
class Codes:
    """Result of a kind for a batch.

    ``features`` [n, F], none negative. ``penalty``: mean over the rows, differentiable; None where sparsity is by
    construction. ``threshold`` [F]: the new value of the running threshold; None where it stays.
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

    The threshold is found in a sample of the rows, because selecting among all of them takes longer than the matrix
    products. The trained dictionary, which reads each row alone, uses its running average.

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


def keep_largest(pre: Rows, k: int) -> Tensor:
    """Return the k largest entries of each row where positive, zero elsewhere."""
    values, places = pre.topk(min(k, pre.shape[1]), dim=-1, sorted=False)
    return torch.zeros_like(pre).scatter(-1, places, torch.relu(values))


class Dictionary(nn.Module):
    """Weights of a dictionary that encodes and decodes activations [n, d].

    Args:
        d: width of an activation.
        num_features: F.
        kind: a component of kind ``dictionary``.
        options: of that component.
        seed: of the first weights: random decoder rows of norm 1, the encoder their transpose.

    Parameters: ``W_enc`` [d, F], ``W_dec`` [F, d], ``b_enc`` [F], ``b_dec`` [d]. Buffers: ``threshold`` [F],
    ``input_scale`` [1], which activations are multiplied by before anything else (``fold`` puts it into the weights),
    ``since_fired`` [F], rows seen since a feature was active.

    Raises:
        UnknownWord, RecipeError: there is no such kind, or an option is wrong.
    """

    threshold: Tensor
    input_scale: Tensor
    since_fired: Tensor

    def __init__(
        self,
        d: int,
        num_features: int,
        kind: str = "batchtopk",
        options: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.d, self.features, self.kind = d, num_features, kind
        entry = find("dictionary", kind, "dictionary")
        self.options = entry.options(options or {}, "dictionary")
        self.codes = entry.bind(self.options, "dictionary")
        self.architecture = str(entry.traits.get("architecture", "standard"))
        self.needs_rank = bool(entry.traits.get("needs_rank"))
        draws = torch.Generator().manual_seed(derive_key(seed, "dictionary") % 2**63)
        decoder = torch.randn(num_features, d, generator=draws)
        decoder /= decoder.norm(dim=1, keepdim=True)
        self.W_enc = nn.Parameter(decoder.T.contiguous())
        self.W_dec = nn.Parameter(decoder)
        self.b_enc = nn.Parameter(torch.zeros(num_features))
        self.b_dec = nn.Parameter(torch.zeros(d))
        self.register_buffer("threshold", torch.zeros(num_features))
        self.register_buffer("input_scale", torch.ones(1))
        self.register_buffer("since_fired", torch.zeros(num_features, dtype=torch.int64))

    def encode(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Return the features [n, F] of activations [n, d], each row by itself.

        ``chosen``, int64 [S]: these alone, [n, S]; no others are computed where features do not compete.
        """
        centred = self.scaled(x) - self.b_dec
        if self.architecture == "topk":
            features = keep_largest(centred @ self.W_enc + self.b_enc, int(self.options["k"]))
            return features if chosen is None else features[:, chosen]
        which = slice(None) if chosen is None else chosen
        pre = centred @ self.W_enc[:, which] + self.b_enc[which]
        positive = torch.relu(pre)
        return positive if self.architecture == "standard" else positive * (pre > self.threshold[which])

    def decode(self, features: Tensor) -> Tensor:
        """Return activations [n, d] from features [n, F]."""
        return (features.to(self.W_dec.dtype) @ self.W_dec + self.b_dec) / self.input_scale

    def forward(self, x: Tensor) -> Tensor:
        """Return the reconstruction of ``x``."""
        return self.decode(self.encode(x))

    def scaled(self, x: Tensor) -> Tensor:
        """Return activations [n, d] as training sees them, multiplied by ``input_scale``."""
        return x.to(self.W_enc.dtype) * self.input_scale

    @torch.no_grad()
    def prepare(self, sample: Tensor) -> None:
        """Set ``input_scale`` so that E‖x‖ = √d, and ``b_dec`` to the mean, from a sample of activations [n, d]."""
        x = sample.float()
        norms = x.norm(dim=1, keepdim=True).mean(0)
        if not bool(norms > 0) or not bool(torch.isfinite(norms)):
            raise UsageError("the activations are all zero, or not finite: there is nothing to learn from them")
        self.input_scale.copy_(math.sqrt(self.d) / norms)
        self.b_dec.copy_(x.mean(0) * self.input_scale)

    @torch.no_grad()
    def normalize(self) -> None:
        """Bring the decoder rows back to norm 1."""
        self.W_dec.div_(self.W_dec.norm(dim=1, keepdim=True).clamp_min(1e-12))

    @torch.no_grad()
    def fold(self) -> Dictionary:
        """Put ``input_scale`` into the weights, in place, and return this dictionary.

        The rows of the decoder keep norm 1, so features are in units of the activations.
        """
        for values in (self.b_enc, self.b_dec, self.threshold):
            values.div_(self.input_scale)
        self.input_scale = torch.ones_like(self.input_scale)
        return self
