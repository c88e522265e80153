"""What layers of a model compute, without the layers above them, logits, or a key-value cache.

Rows are padded on the right and no attention mask is given: attention is causal, so no token sees padding, and SDPA
needs no matrix of scores. Long contexts therefore cost memory in proportion to their length.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.errors import UsageError
from posttrain.interpret.activations.sites import (
    Site,
    backbone_of,
    blocks_of,
    check_sites,
    first_tensor,
    halves_of,
    read_site,
)

_FINAL_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm")


class _Reached(Exception):
    """Everything that is wanted has been computed; the layers above need not run."""


def truncate(model: Any, layer: int) -> Any:
    """The first ``layer`` blocks as a backbone whose ``last_hidden_state`` is ``hidden_states[layer]``, bit for bit.

    The final norm is replaced by the identity. Modules are shared with ``model``, which itself stays as it is: LoRA
    adapters inside the blocks work, and are switched on and off together with the model's. Once ``model`` is let go of,
    so are the blocks above.

    Raises:
        UsageError: the model has fewer layers, or keeps blocks or final norm in a way that is not known here.
    """
    backbone = backbone_of(model)
    check_sites(backbone, [Site(layer, "resid")])
    name, blocks = blocks_of(backbone)
    norms = [norm for norm in _FINAL_NORMS if norm in backbone._modules]
    if len(norms) != 1:
        raise UsageError(f"{type(backbone).__name__}: no final norm that could be left out")
    shorter = copy.copy(backbone)
    shorter._modules = dict(backbone._modules)
    shorter._modules[name] = nn.ModuleList(blocks[:layer])
    shorter._modules[norms[0]] = nn.Identity()
    shorter.config = copy.deepcopy(backbone.config)
    shorten_config(shorter.config.get_text_config(), layer)
    return shorter


class Extractor:
    """Reads sites of one model; made once, called for every batch.

    Args:
        model: a causal LM, a peft model around one, or a (truncated) backbone.
        sites: names, such as ``resid.20``.

    Raises:
        UsageError: no such site in this model, or attention that would build a matrix of scores.
    """

    def __init__(self, model: Any, sites: Sequence[str]) -> None:
        self.backbone = backbone_of(model)
        self.sites = [read_site(name) for name in sites]
        check_sites(self.backbone, self.sites)
        _refuse_eager(self.backbone)
        blocks = blocks_of(self.backbone)[1]
        self._read: list[tuple[Site, nn.Module, bool]] = []  # the site, the module, and whether its input is meant
        for site in self.sites:
            if site.place == "resid":
                self._read.append((site, blocks[max(site.layer, 1) - 1], site.layer == 0))
            else:
                attention, mlp = halves_of(self.backbone, site.layer)
                self._read.append((site, mlp if site.place == "mlp" else attention, False))

    @property
    def device(self) -> torch.device:
        device: torch.device = self.backbone.get_input_embeddings().weight.device
        return device

    @torch.no_grad()
    def __call__(self, documents: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """By site, ``[tokens, d]`` of all tokens of the documents, one document after the other, on the CPU.

        The dtype is the model's. How the documents are put together does not matter, but for rounding.
        """
        tokens, lengths = pad(documents, self.device)
        real = torch.arange(tokens.shape[1], device=self.device) < lengths[:, None]
        found: dict[str, Tensor] = {}
        with self._watching(found, lambda values: values[real]), suppress(_Reached):
            self.backbone(input_ids=tokens, use_cache=False)
        return {str(site): found[str(site)].cpu() for site in self.sites}

    @contextmanager
    def _watching(self, found: dict[str, Tensor], select: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Hooks that copy what is wanted as soon as it is there, and stop the forward pass at the last of it."""

        def keep(site: Site, values: Tensor) -> None:
            found[str(site)] = select(values)
            if len(found) == len(self._read):
                raise _Reached

        def after(site: Site) -> Callable[..., None]:
            return lambda _, __, output: keep(site, first_tensor(output))

        def before(site: Site) -> Callable[..., None]:
            return lambda _, given, named: keep(site, given[0] if given else named["hidden_states"])

        hooks = [
            module.register_forward_pre_hook(before(site), with_kwargs=True)
            if reads_input
            else module.register_forward_hook(after(site))
            for site, module, reads_input in self._read
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def activations_of(model: Any, documents: Sequence[Sequence[int]], sites: Sequence[str]) -> dict[str, Tensor]:
    """By site (``resid.20``), ``[tokens, d]`` of all tokens of the documents, one document after the other.

    For many batches make one ``Extractor``.

    Raises:
        UsageError: no such site in this model.
    """
    return Extractor(model, sites)(documents)


def pad(documents: Sequence[Sequence[int]], device: Any) -> tuple[Tensor, Tensor]:
    """(tokens int64 [B, T], lengths [B]); attention is causal, so what is behind a text is not seen by it."""
    lengths = torch.tensor([len(ids) for ids in documents])
    tokens = torch.zeros((len(documents), int(lengths.max())), dtype=torch.long)
    for row, ids in enumerate(documents):
        tokens[row, : len(ids)] = torch.as_tensor(ids, dtype=torch.long)
    return tokens.to(device), lengths.to(device)


def shorten_config(config: Any, layer: int) -> None:
    """A configuration for the first ``layer`` blocks; lists with an entry per block are cut."""
    for key, value in vars(config).items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(config, key, value[:layer])
    config.num_hidden_layers = layer


def _refuse_eager(backbone: Any) -> None:
    implementation = getattr(backbone.config, "_attn_implementation", "sdpa")
    if implementation == "eager" and hasattr(backbone, "_supports_sdpa") and backbone._supports_sdpa:
        raise UsageError("this model was loaded with eager attention, which keeps all scores; load it with sdpa")
