"""Read and modify the residual stream after a transformer layer: ``resid.20``.

``resid.L`` (L = 1 .. num_layers) is the output of block index L − 1, ``hidden_states[L]`` in transformers; the final
layer is read before the final norm. Computation stops after the last requested site: logits and key-value cache are
never computed. Rows are right-padded without a mask: causal attention never sees the padding, and SDPA avoids a score
matrix.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

from posttrain.errors import UsageError
from posttrain.models.forward.forward import causal_lm, decoder_of
from posttrain.models.load import reading_model
from posttrain.models.sources import adapter_base, resolve_model_name
from posttrain.store.checkpoint_files import digest_of, manifest_digests
from posttrain.types import Model, Tokenizer

_SITE = re.compile(r"resid\.([1-9]\d{0,5})")


def layer_of(site: str) -> int:
    """Parse L from ``resid.L``."""
    match = _SITE.fullmatch(site)
    if match is None:
        raise UsageError(
            f"{site!r} is not a site: give the residual stream after a layer, such as resid.20 (layers count from 1)"
        )
    return int(match[1])


def backbone_of(model: Model) -> Model:
    """Extract the transformer without LM head from a causal LM, peft model or backbone."""
    plain = causal_lm(model)
    if hasattr(plain, "lm_head") or plain.get_output_embeddings() is not None:
        return decoder_of(plain)
    return plain


def blocks_of(backbone: Model) -> nn.ModuleList:
    """List a backbone's blocks in order; ``UsageError``: unknown structure."""
    lists = [child for child in backbone.children() if isinstance(child, nn.ModuleList)]
    expected = backbone.config.get_text_config().num_hidden_layers
    candidates = [child for child in lists if len(child) == expected] or lists
    if len(candidates) != 1:
        raise UsageError(f"{type(backbone).__name__}: no single list of {expected} blocks, so layers cannot be located")
    return candidates[0]


def refuse_layers(sites: Sequence[str], num_layers: int, name: str) -> None:
    """Refuse sites above ``num_layers``."""
    for site in sites:
        if layer_of(site) > num_layers:
            raise UsageError(f"{site}: {name} has {num_layers} layers; give a layer from 1 to {num_layers}")


@contextmanager
def replaced(model: Model, site: str, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Apply ``change`` to a site's output within the context; it keeps the shape [batch, tokens, d]."""
    blocks = blocks_of(backbone_of(model))
    refuse_layers([site], len(blocks), "this model")

    def after(_: nn.Module, __: object, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    hook = blocks[layer_of(site) - 1].register_forward_hook(after)
    try:
        yield
    finally:
        hook.remove()


class _Reached(Exception):
    """Stop the forward pass once all sites are computed."""


def read_sites(model: Model, sites: Sequence[str], **inputs: object) -> list[Tensor]:
    """Run a model up to the last requested site; returns ``[batch, tokens, d]`` per site."""
    seen: dict[str, Tensor] = {}

    def keep(site: str, values: Tensor) -> Tensor:
        seen[site] = values
        if len(seen) == len(sites):
            raise _Reached
        return values

    with ExitStack() as hooks, suppress(_Reached):
        for site in sites:
            hooks.enter_context(replaced(model, site, partial(keep, site)))
        backbone_of(model)(**inputs)
    return [seen[site] for site in sites]


@torch.no_grad()
def read_rows(model: Model, sites: Sequence[str], documents: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Compute ``[tokens, d]`` by site for all tokens, concatenated by document, on the CPU.

    ``model``: a causal LM, peft model or backbone; rows use its dtype. ``documents``: token ids of one batch; batch
    composition affects only rounding.
    """
    tokens, lengths = pad(documents, device_of(model))
    real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    seen = read_sites(model, sites, input_ids=tokens, use_cache=False)
    return {site: values[real].cpu() for site, values in zip(sites, seen, strict=True)}


def device_of(model: Model) -> torch.device:
    """Look up the device holding a model's embeddings."""
    return torch.device(backbone_of(model).get_input_embeddings().weight.device)


def pad(documents: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Pad to (tokens int64 [B, T], lengths [B]), padding on the right."""
    lengths = torch.tensor([len(ids) for ids in documents])
    rows = [torch.as_tensor(ids, dtype=torch.long) for ids in documents]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device), lengths.to(device)


_WEIGHTS = ("model*.safetensors", "adapter_model*.safetensors", "pytorch_model*.safetensors")


def read_model_config(name: str) -> PretrainedConfig:
    """Load a model's configuration without weights; adapters resolve to their base."""
    source = resolve_model_name(name)
    base = adapter_base(source)
    while base is not None:
        source = base
        base = adapter_base(source)
    with reading_model(name, source):
        return AutoConfig.from_pretrained(source)


def check_layers(name: str, sites: Sequence[str]) -> None:
    """Refuse sites beyond the model's layers, using only its configuration."""
    refuse_layers(sites, read_model_config(name).get_text_config().num_hidden_layers, name)


def weights_hash(name: str) -> str:
    """Hash a model's weights with SHA-256, including an adapter's base; ``""`` if no files exist.

    Checkpoints provide digests in a manifest; otherwise files are read (about a second per GB).
    """
    source = resolve_model_name(name)
    try:
        if Path(source).is_dir():
            folder = Path(source)
        else:
            folder = Path(snapshot_download(source, local_files_only=True))
    except LocalEntryNotFoundError:
        return ""
    files = sorted({file for pattern in _WEIGHTS for file in folder.glob(pattern)})
    if not files:
        return ""
    digest = hashlib.sha256()
    known = manifest_digests(folder)
    for file in files:
        known_digest = known.get(file.name) or digest_of(file)
        digest.update(f"{file.name} {known_digest}\n".encode())
    base = adapter_base(source)
    if base is not None:
        digest.update(weights_hash(base).encode())
    return digest.hexdigest()


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Hash a tokenizer's vocabulary; equal hashes mean shared token ids."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]
