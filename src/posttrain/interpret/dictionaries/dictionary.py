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
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.errors import UsageError
from posttrain.interpret.dictionaries.words import keep_largest
from posttrain.randomness import derive_key
from posttrain.registry import find


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

    def pre_activations(self, x: Tensor) -> Tensor:
        """[n, F] from activations [n, M, d] (or [n, d] with one source), in the precision of the weights."""
        flat, _ = self._flat(x)
        centred = flat if self.transcoder else flat - self.b_dec.reshape(-1)
        return centred @ self.W_enc.reshape(-1, self.features) + self.b_enc

    def encode(self, x: Tensor) -> Tensor:
        """Features [n, F] of activations [n, M, d] (or [n, d] with one source)."""
        return self.select(self.pre_activations(x))

    def select(self, pre: Tensor) -> Tensor:
        """Features [n, F] from pre-activations, as the trained dictionary makes them: each row by itself."""
        if self.architecture == "topk":
            return keep_largest(pre, int(self.options["k"]))
        positive = torch.relu(pre)
        return positive if self.architecture == "standard" else positive * (pre > self.threshold)

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
        return self._flat(x)[0]

    def scaled_target(self, y: Tensor) -> Tensor:
        """[n, d]: what a transcoder is to write, as training sees it."""
        return y.to(self.W_dec.dtype).reshape(len(y), self.d) * self.output_scale

    def _flat(self, x: Tensor) -> tuple[Tensor, int]:
        rows = len(x)
        assert x.numel() == rows * self.sources * self.d, f"{tuple(x.shape)} for {self.sources} sources of {self.d}"
        x = x.to(self.W_enc.dtype).reshape(rows, self.sources, self.d) * self.input_scale[:, None]
        return x.reshape(rows, -1), rows

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
