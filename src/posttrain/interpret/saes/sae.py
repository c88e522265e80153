"""Sparse autoencoder ("dictionary") for one model's activations, or for the difference between two models.

pre = (x − b_dec) · W_enc + b_enc     f = the kind's selection of pre     x̂ = f · W_dec + b_dec

Folders use SAELens's layout: ``sae_weights.safetensors`` (``W_enc`` [d, F], ``W_dec`` [F, d], ``b_enc`` [F],
``b_dec`` [d], plus ``threshold`` [F] for jumprelu) and ``cfg.json``. Architectures: standard, topk and jumprelu;
BatchTopK dictionaries are saved as jumprelu. Unknown tensors, and settings that would change results, are refused.
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

# Dictionary kinds are pure, differentiable functions of pre-activations. Inputs are scaled to E‖x‖ = √d and decoder
# rows have norm 1; all kinds share the loss
#
#     loss = mean over rows of [ mean over the d coordinates of (x − x̂)² + penalty ]
#
# Penalties are per row, relative to a squared error *averaged* over d: with an error summed over d, coefficients are d
# times larger.
#
# ``needs_rank``: a row's features compete, so AuxK trains the losers. ``architecture``: inference form in SAELens's
# layout: ``standard`` relu(pre), ``jumprelu`` relu(pre)·(pre > threshold), ``topk`` the k largest per row.

Rows = Float[Tensor, "n F"]

MIN_SAMPLE_ROWS = 256  # for computing the batch threshold


@dataclass(frozen=True, slots=True)
class Codes:
    """Features computed for a batch.

    ``features`` [n, F], nonnegative. ``penalty``: averaged over rows, differentiable; None if sparse by construction.
    ``threshold`` [F]: updated running threshold; None if unchanged.
    """

    features: Tensor
    penalty: Tensor | None = None
    threshold: Tensor | None = None


@register("dictionary", architecture="standard", needs_rank=False)
def l1(pre: Rows, threshold: Tensor, progress: float, *, coefficient: float = 3e-4, warmup: float = 0.05) -> Codes:
    """f = relu(pre), penalty = coefficient · Σⱼ fⱼ‖dⱼ‖ (Bricken et al. 2023; ‖dⱼ‖ = 1 here).

    The original recipe uses 3e-4 with an error averaged over d = 5120, matching this convention; with summed error it
    equals 1.54. For a different d, keep coefficient · d constant for the same sparsity.

    Args:
        coefficient: weight for the sum of a row's features.
        warmup: fraction of training over which the coefficient rises from 0.
    """
    features = torch.relu(pre)
    reached = 1.0
    if warmup:
        reached = min(1.0, progress / warmup)
    scale = coefficient * reached
    return Codes(features, features.sum(dtype=torch.float32) * (scale / len(pre)))


@register("dictionary", architecture="topk", needs_rank=True)
def topk(pre: Rows, threshold: Tensor, progress: float, *, k: int = 32) -> Codes:
    """Keep the k largest positive pre-activations per row (Gao et al. 2024).

    Args:
        k: features per row.
    """
    return Codes(keep_largest(pre, k))


@register("dictionary", architecture="jumprelu", needs_rank=True)
def batchtopk(
    pre: Rows, threshold: Tensor, progress: float, *, k: float = 32, sample: float = 1 / 16, average: float = 0.05
) -> Codes:
    """Keep the n·k largest positive pre-activations in a batch of n rows (Bussmann, Leask & Nanda 2024).

    The threshold is estimated on a subset of rows, because selection over the full batch takes longer than the matrix
    products. The trained dictionary processes rows independently, using the running average threshold.

    Args:
        k: average features per row.
        sample: fraction of rows for estimating the threshold, at least 256 rows; 1 selects exactly.
        average: weight for the latest batch in the running average.
    """
    num_rows = max(MIN_SAMPLE_ROWS, math.ceil(len(pre) * sample))
    values = pre.detach()[:num_rows].reshape(-1)
    count = min(max(1, round(len(values) * k / pre.shape[1])), len(values) - 1)
    largest = values.topk(count + 1, sorted=False).values
    bound = largest.amin().clamp_min(0.0)  # largest dropped value
    latest = bound.to(threshold)
    running = torch.where(threshold > 0, threshold.lerp(latest, average), latest)
    # zero at or below the bound: one pass forward, one backward
    return Codes(torch.nn.functional.threshold(pre, float(bound), 0.0), threshold=running)


def keep_largest(pre: Rows, k: int) -> Tensor:
    """Keep the k largest positive entries per row, zero elsewhere."""
    values, places = pre.topk(min(k, pre.shape[1]), dim=-1, sorted=False)
    return torch.zeros_like(pre).scatter(-1, places, torch.relu(values))


class SparseAutoencoder(nn.Module):
    """Encoder and decoder weights of a sparse autoencoder for activations [n, d].

    ``kind`` and ``options`` select a registered ``dictionary`` component. Decoder rows are initialized randomly with
    norm 1, the encoder as their transpose.

    Parameters: ``W_enc`` [d, F], ``W_dec`` [F, d], ``b_enc`` [F], ``b_dec`` [d]. Buffers: ``threshold`` [F],
    ``input_scale`` [1], multiplied into activations first (``fold`` merges it into the weights), ``since_fired`` [F],
    rows since last activation.
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
        """Encode activations [n, d] to features [n, F], independently per row.

        ``chosen``, int64 [S]: compute only these features, [n, S]; topk still computes all, because they compete.
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
        """Decode features [n, F] to activations [n, d]."""
        return (features.to(self.W_dec.dtype) @ self.W_dec + self.b_dec) / self.input_scale

    def forward(self, x: Tensor) -> Tensor:
        """Reconstruct ``x``."""
        return self.decode(self.encode(x))

    def scaled(self, x: Tensor) -> Tensor:
        """Scale activations [n, d] by ``input_scale``."""
        return x.to(self.W_enc.dtype) * self.input_scale

    @torch.no_grad()
    def prepare(self, sample: Tensor) -> None:
        """Set ``input_scale`` for E‖x‖ = √d, and ``b_dec`` to the average, from sample activations [n, d]."""
        x = sample.float()
        norms = x.norm(dim=1, keepdim=True).mean(0)
        if not bool(norms > 0) or not bool(torch.isfinite(norms)):
            raise UsageError("activations are all zero or not finite, so training is impossible")
        self.input_scale.copy_(math.sqrt(self.d) / norms)
        self.b_dec.copy_(x.mean(0) * self.input_scale)

    @torch.no_grad()
    def normalize(self) -> None:
        """Normalize decoder rows to norm 1."""
        self.W_dec.div_(self.W_dec.norm(dim=1, keepdim=True).clamp_min(1e-12))

    @torch.no_grad()
    def fold(self) -> SparseAutoencoder:
        """Merge ``input_scale`` into biases and threshold, in place; returns self. Decoder rows keep norm 1."""
        for values in (self.b_enc, self.b_dec, self.threshold):
            values.div_(self.input_scale)
        self.input_scale = torch.ones_like(self.input_scale)
        return self


# Files.

WEIGHTS = "sae_weights.safetensors"
CONFIG = "cfg.json"
LAYOUT_VERSION = "6.0.0"  # SAELens refuses older versions
_MISSING = "missing file; a dictionary is a folder with cfg.json and weights"
_KINDS = {"standard": "l1", "topk": "topk", "jumprelu": "batchtopk"}
_HOOK = re.compile(r"blocks\.([0-9]{1,6})\.hook_resid_(pre|post)")


def site_of_hook(hook: str | None) -> str | None:
    """Map ``blocks.19.hook_resid_post`` and ``blocks.20.hook_resid_pre`` to ``resid.20``; other hooks to None."""
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
    """Save a dictionary for raw activations (``input_scale`` merged), and return its folder.

    ``metadata``: plain data about training. Other tools expect ``model_name`` and ``hook_name``.
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
    """List expected tensor shapes in a dictionary file."""
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
    """Training metadata in ``cfg.json``; all fields are optional."""

    models: list[dict[str, Any]] | None = None
    model_name: str | None = None
    hook_name: str | None = None
    site: str | None = None
    source: str | None = None


class _Configuration(BaseModel):
    """Settings in ``cfg.json``; fields affecting results accept only supported values."""

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
    hook_name: str | None = None  # location used by SAELens before version 6


def read_metadata(folder: str | Path) -> Metadata:
    """Read training metadata, deriving a missing site from the hook name."""
    configuration = _read_configuration(Path(folder) / CONFIG)
    metadata = configuration.metadata or Metadata()
    site = metadata.site or site_of_hook(metadata.hook_name or configuration.hook_name)
    return metadata.model_copy(update={"site": site})


def load_sae(folder: str | Path) -> SparseAutoencoder:
    """Load a dictionary for raw activations in fp32, from a folder in SAELens layout.

    Raises:
        DataError: damaged files, wrong shapes, or an unsupported dictionary.
    """
    place = Path(folder)
    configuration = _read_configuration(place / CONFIG)
    architecture = configuration.architecture
    options: dict[str, object] = {}
    if architecture == "topk":
        if configuration.k is None:
            raise DataError(place / CONFIG, "k is missing, but required for topk; add it")
        options["k"] = configuration.k
    sae = SparseAutoencoder(configuration.d_in, configuration.d_sae, _KINDS[architecture], options)
    tensors = _read_weights(place / WEIGHTS, _shapes(sae), architecture)
    if architecture == "topk" and configuration.rescale_acts_by_decoder_norm:
        norms = tensors["W_dec"].norm(dim=1)  # rescale to decoder rows with norm 1
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
        raise DataError(path, f"unsupported dictionary ({fault}); convert it with SAELens") from None
    except OSError as error:
        raise DataError(path, f"cannot be read ({error})") from None


def _read_weights(path: Path, shapes: Mapping[str, tuple[int, ...]], architecture: str) -> dict[str, Tensor]:
    """Load tensors from a file, refusing missing, misshapen or unknown ones."""
    try:
        tensors = {name: value.float() for name, value in load_file(path).items()}
    except FileNotFoundError:
        raise DataError(path, _MISSING) from None
    except (OSError, SafetensorError) as error:
        raise DataError(path, f"cannot be read ({error})") from None
    scale = tensors.get("scaling_factor")  # SAELens before version 6 stores ones, which have no effect
    if scale is not None and bool((scale == 1).all()):
        del tensors["scaling_factor"]
    missing = [name for name in shapes if name not in tensors]
    if missing:
        raise DataError(path, f"missing tensors: {', '.join(missing)}; found: {', '.join(sorted(tensors))}")
    unused = sorted(tensors.keys() - shapes.keys())
    if unused:
        raise DataError(
            path,
            f"unused tensors for architecture {architecture}: {', '.join(unused)}. Correct the architecture in "
            f"cfg.json; supported: {', '.join(_KINDS)}",
        )
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise DataError(path, f"{name} has shape {tuple(tensors[name].shape)}, but cfg.json implies {shape}")
    return tensors
