"""A dictionary of features: a sparse autoencoder of one model's activations, or of the difference of two models'.

pre = (x − b_dec) · W_enc + b_enc     f = the kind's selection of pre     x̂ = f · W_dec + b_dec

Its folder has SAELens's layout: ``sae_weights.safetensors`` (``W_enc`` [d, F], ``W_dec`` [F, d], ``b_enc`` [F],
``b_dec`` [d], and for jumprelu ``threshold`` [F]) and ``cfg.json``. The architectures are standard, topk and jumprelu,
which a BatchTopK dictionary becomes. A tensor that is not used, or a setting that would change the result, is refused.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from pydantic import BaseModel, PositiveInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from posttrain.errors import DataError, UsageError
from posttrain.randomness import derive_key
from posttrain.registry import find, register
from posttrain.store.durable import replace_file, storage_errors, write_json
from posttrain.untrusted import first_fault

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
    reached = 1.0
    if warmup:
        reached = min(1.0, progress / warmup)
    scale = coefficient * reached
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
    num_rows = max(MIN_SAMPLE_ROWS, math.ceil(len(pre) * sample))
    values = pre.detach()[:num_rows].reshape(-1)
    count = min(max(1, round(len(values) * k / pre.shape[1])), len(values) - 1)
    largest = values.topk(count + 1, sorted=False).values
    bound = largest.amin().clamp_min(0.0)  # the first that is not kept
    latest = bound.to(threshold)
    running = torch.where(threshold > 0, threshold.lerp(latest, average), latest)
    # zero where it is not above the bound: one pass, and one for its gradient
    return Codes(torch.nn.functional.threshold(pre, float(bound), 0.0), threshold=running)


def keep_largest(pre: Rows, k: int) -> Tensor:
    """Return the k largest entries of each row where positive, zero elsewhere."""
    values, places = pre.topk(min(k, pre.shape[1]), dim=-1, sorted=False)
    return torch.zeros_like(pre).scatter(-1, places, torch.relu(values))


class SparseAutoencoder(nn.Module):
    """Weights of a dictionary that encodes and decodes activations [n, d].

    ``kind`` and ``options`` are of a component of kind ``sae``. First weights: random decoder rows of norm 1,
    the encoder their transpose.

    Parameters: ``W_enc`` [d, F], ``W_dec`` [F, d], ``b_enc`` [F], ``b_dec`` [d]. Buffers: ``threshold`` [F],
    ``input_scale`` [1], which activations are multiplied by before anything else (``fold`` puts it into the weights),
    ``since_fired`` [F], rows seen since a feature was active.
    """

    threshold: Tensor
    input_scale: Tensor
    since_fired: Tensor

    def __init__(
        self,
        d: int,
        num_features: int,
        kind: str = "batchtopk",
        options: Mapping[str, object] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.d = d
        self.features = num_features
        self.kind = kind
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
            if chosen is None:
                return features
            return features[:, chosen]
        if chosen is None:
            encoder: Tensor = self.W_enc
            bias: Tensor = self.b_enc
            threshold = self.threshold
        else:
            encoder = self.W_enc[:, chosen]
            bias = self.b_enc[chosen]
            threshold = self.threshold[chosen]
        pre = centred @ encoder + bias
        positive = torch.relu(pre)
        if self.architecture == "standard":
            return positive
        return positive * (pre > threshold)

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
    def fold(self) -> SparseAutoencoder:
        """Put ``input_scale`` into the weights, in place; decoder rows keep norm 1. Returns this dictionary."""
        for values in (self.b_enc, self.b_dec, self.threshold):
            values.div_(self.input_scale)
        self.input_scale = torch.ones_like(self.input_scale)
        return self


# Files.

WEIGHTS = "sae_weights.safetensors"
CONFIG = "cfg.json"
LAYOUT_VERSION = "6.0.0"  # SAELens refuses older ones
_MISSING = "there is no such file; a dictionary is a folder with cfg.json and weights"
_KINDS = {"standard": "l1", "topk": "topk", "jumprelu": "batchtopk"}
_HOOK = re.compile(r"blocks\.([0-9]{1,6})\.hook_resid_(pre|post)")


def site_of_hook(hook: str | None) -> str | None:
    """Return ``resid.20`` for ``blocks.19.hook_resid_post`` and ``blocks.20.hook_resid_pre``; None for another hook."""
    match = _HOOK.fullmatch(hook or "")
    if not match:
        return None
    layer = int(match[1])
    if match[2] == "post":
        layer += 1
    if layer:
        return f"resid.{layer}"
    return None


def save_sae(sae: SparseAutoencoder, folder: str | Path, metadata: Mapping[str, object] | None = None) -> Path:
    """Write a dictionary that takes raw activations (``input_scale`` folded into the weights), and return its folder.

    ``metadata``: what it was trained on, as plain data. Other tools look for ``model_name`` and ``hook_name``.
    """
    place = Path(folder)
    folded = copy.deepcopy(sae).to("cpu", torch.float32).fold()
    with storage_errors("the dictionary", place):
        place.mkdir(parents=True, exist_ok=True)
    tensors = {name: getattr(folded, name).detach().contiguous() for name in _shapes(folded)}
    replace_file(place / WEIGHTS, save(tensors))
    configuration: dict[str, object] = {
        "architecture": folded.architecture,
        "d_in": folded.d,
        "d_sae": folded.features,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "reshape_activations": "none",
    }
    if folded.architecture == "topk":
        configuration["k"] = int(folded.options["k"])
        configuration["rescale_acts_by_decoder_norm"] = False
    about: dict[str, object] = {"model_name": None, "hook_name": None, "context_size": None, "prepend_bos": False}
    if metadata is not None:
        about |= metadata
    about |= {"sae_lens_version": LAYOUT_VERSION, "kind": folded.kind, "options": folded.options}
    configuration["metadata"] = about
    write_json(place / CONFIG, configuration, indent=2, ensure_ascii=False)
    return place


def _shapes(sae: SparseAutoencoder) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a dictionary's file."""
    d = sae.d
    features = sae.features
    shapes: dict[str, tuple[int, ...]] = {
        "W_enc": (d, features),
        "W_dec": (features, d),
        "b_enc": (features,),
        "b_dec": (d,),
    }
    if sae.architecture == "jumprelu":
        shapes["threshold"] = (features,)
    return shapes


class Metadata(BaseModel, extra="allow"):
    """The part of ``cfg.json`` about what a dictionary was trained on; all of it may be missing."""

    models: list[dict[str, Any]] | None = None
    model_name: str | None = None
    hook_name: str | None = None
    site: str | None = None
    source: str | None = None


class _Configuration(BaseModel):
    """The settings of ``cfg.json``; those that would change the result have the only values that can be used."""

    architecture: Literal["standard", "topk", "jumprelu"] = "standard"
    d_in: PositiveInt
    d_sae: PositiveInt
    k: PositiveInt | None = None
    apply_b_dec_to_input: bool = True
    rescale_acts_by_decoder_norm: bool = False
    normalize_activations: Literal["none"] | None = None
    reshape_activations: Literal["none"] | None = None
    activation_fn: Literal["relu"] | None = None
    activation_fn_str: Literal["relu"] | None = None
    finetuning_scaling_factor: Literal[False] | None = None
    metadata: Metadata | None = None
    hook_name: str | None = None  # SAELens before version 6 has it here


def read_metadata(folder: str | Path) -> Metadata:
    """Read what a dictionary was trained on; a missing site is filled in from the hook's name."""
    configuration = _read_configuration(Path(folder) / CONFIG)
    metadata = configuration.metadata or Metadata()
    site = metadata.site or site_of_hook(metadata.hook_name or configuration.hook_name)
    return metadata.model_copy(update={"site": site})


def load_sae(folder: str | Path) -> SparseAutoencoder:
    """Load a dictionary on raw activations in fp32, from a folder that this package or SAELens wrote.

    Raises:
        DataError: damaged files, shapes that do not fit, or a dictionary that cannot be used here.
    """
    place = Path(folder)
    configuration = _read_configuration(place / CONFIG)
    architecture = configuration.architecture
    options: dict[str, object] = {}
    if architecture == "topk":
        if configuration.k is None:
            raise DataError(place / CONFIG, "says nothing of k, which a topk dictionary needs; add it")
        options["k"] = configuration.k
    sae = SparseAutoencoder(configuration.d_in, configuration.d_sae, _KINDS[architecture], options)
    tensors = _read_weights(place / WEIGHTS, _shapes(sae), architecture)
    if architecture == "topk" and configuration.rescale_acts_by_decoder_norm:
        norms = tensors["W_dec"].norm(dim=1)  # its features are those of a dictionary with rows of norm 1
        tensors["W_enc"] = tensors["W_enc"] * norms
        tensors["b_enc"] = tensors["b_enc"] * norms
        tensors["W_dec"] = tensors["W_dec"] / norms[:, None]
    if not configuration.apply_b_dec_to_input:
        tensors["b_enc"] = tensors["b_enc"] + tensors["b_dec"] @ tensors["W_enc"]
    with torch.no_grad():
        for name, values in tensors.items():
            getattr(sae, name).copy_(values)
    return sae.requires_grad_(False)


def _read_configuration(path: Path) -> _Configuration:
    try:
        return _Configuration.model_validate_json(path.read_bytes(), strict=True)
    except FileNotFoundError:
        raise DataError(path, _MISSING) from None
    except ValidationError as error:
        fault = first_fault(error)
        raise DataError(path, f"this dictionary cannot be used here ({fault}); convert it with SAELens") from None
    except OSError as error:
        raise DataError(path, f"cannot be read ({error})") from None


def _read_weights(path: Path, shapes: Mapping[str, tuple[int, ...]], architecture: str) -> dict[str, Tensor]:
    """Read the tensors of a file, and refuse one that is missing, has another shape, or is not used here."""
    try:
        tensors = {name: value.float() for name, value in load_file(path).items()}
    except FileNotFoundError:
        raise DataError(path, _MISSING) from None
    except (OSError, SafetensorError) as error:
        raise DataError(path, f"cannot be read ({error})") from None
    scale = tensors.get("scaling_factor")  # files of SAELens before version 6 hold ones, which scale nothing
    if scale is not None and bool((scale == 1).all()):
        del tensors["scaling_factor"]
    missing = [name for name in shapes if name not in tensors]
    if missing:
        raise DataError(path, f"has no tensor {', '.join(missing)}; there are: {', '.join(sorted(tensors))}")
    unused = sorted(tensors.keys() - shapes.keys())
    if unused:
        raise DataError(
            path,
            f"has tensors that a {architecture} dictionary does not use: {', '.join(unused)}. It is of another "
            f"architecture than cfg.json says; here are {', '.join(_KINDS)}",
        )
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise DataError(path, f"{name} has the shape {tuple(tensors[name].shape)}, but cfg.json means {shape}")
    return tensors
