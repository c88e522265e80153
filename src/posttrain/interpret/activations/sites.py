"""Where in a transformer activations are read: ``resid.20``, ``mlp.20``, ``attn.20``.

Layer L (1 .. num_layers) is the block with index L − 1. ``resid.L`` is what that block gives, ``hidden_states[L]`` in
transformers (but for the last layer, whose ``hidden_states`` have gone through the final norm; ours have not).
``resid.0`` is what the first block reads, the embeddings. ``mlp.L`` and ``attn.L`` are what the block's two halves add
to the residual stream, after any norm of their own: ``resid.L = resid.(L−1) + attn.L + mlp.L``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.errors import UsageError
from posttrain.models.forward.forward import causal_lm

PLACES = ("resid", "mlp", "attn")
# What architectures call (attention, MLP) of a block. The first pair whose sum is what the block adds is taken; where
# outputs are normed before they are added, the norms come first.
_HALVES = (
    ("post_attention_layernorm", "post_feedforward_layernorm"),
    ("post_self_attn_layernorm", "post_mlp_layernorm"),
    ("self_attn", "mlp"),
    ("attn", "mlp"),
    ("attention", "mlp"),
    ("self_attention", "mlp"),
    ("self_attn", "feed_forward"),
    ("self_attn", "block_sparse_moe"),
)
_PROBE_IDS = (1, 2, 3, 5, 8, 13)


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """A place in a layer; ``str()`` gives its name."""

    layer: int
    place: str

    def __str__(self) -> str:
        return f"{self.place}.{self.layer}"


def read_site(name: str) -> Site:
    """The site called ``resid.20``.

    Raises:
        UsageError: this is no name of a site.
    """
    place, dot, layer = name.partition(".")
    if place not in PLACES or not dot or not layer.isdecimal() or (place != "resid" and int(layer) == 0):
        raise UsageError(f"{name!r} is no site: they are called resid.20, mlp.20 or attn.20 (resid.0: the embeddings)")
    return Site(int(layer), place)


def backbone_of(model: Any) -> Any:
    """The transformer without its LM head: of a causal LM, a peft model around one, or a backbone itself."""
    plain = causal_lm(model)
    return plain.get_decoder() if hasattr(plain, "lm_head") or plain.get_output_embeddings() is not None else plain


def blocks_of(backbone: Any) -> tuple[str, nn.ModuleList]:
    """The blocks of a backbone, in order, and the name under which it holds them.

    Raises:
        UsageError: it keeps them in a way that is not known here.
    """
    lists = [(name, child) for name, child in backbone.named_children() if isinstance(child, nn.ModuleList)]
    expected = backbone.config.get_text_config().num_hidden_layers
    found = [(name, child) for name, child in lists if len(child) == expected] or lists
    if len(found) != 1:
        raise UsageError(f"{type(backbone).__name__}: no single list of {expected} blocks, so its layers are not known")
    return found[0]


def check_sites(backbone: Any, sites: Iterable[Site]) -> None:
    """Refuse layers that the model has not.

    Raises:
        UsageError: the message says how many there are.
    """
    num_layers = len(blocks_of(backbone)[1])
    for site in sites:
        if site.layer > num_layers:
            raise UsageError(f"{site}: this model has {num_layers} layers; give a layer from 0 to {num_layers}")


def halves_of(backbone: Any, layer: int) -> tuple[nn.Module, nn.Module]:
    """The modules that give ``attn.L`` and ``mlp.L``, chosen by measurement: their sum is what the block adds.

    Raises:
        UsageError: no pair of modules of this block does.
    """
    block = blocks_of(backbone)[1][layer - 1]
    pairs = [(getattr(block, a), getattr(block, m)) for a, m in _HALVES if hasattr(block, a) and hasattr(block, m)]
    watched = {id(module): module for pair in pairs for module in pair}
    seen = _probe(backbone, block, list(watched.values()))
    for attention, mlp in pairs:
        if id(attention) in seen and id(mlp) in seen:
            added = seen[id(attention)] + seen[id(mlp)]
            if _agree(added, seen[id(block)] - seen[-1], seen[id(block)]):
                return attention, mlp
    raise UsageError(
        f"{type(block).__name__}: no two modules of it add up to what it adds, so `mlp` and `attn` are not known here; "
        "`resid` is"
    )


def first_tensor(output: Any) -> Tensor:
    """What a module gives: itself, or the first of several."""
    given: Tensor = output[0] if isinstance(output, tuple) else output
    return given


@torch.no_grad()
def _probe(backbone: Any, block: nn.Module, modules: list[nn.Module]) -> dict[int, Tensor]:
    """By id, what the modules and the block give on a few tokens (float32); under -1 what the block reads."""
    seen: dict[int, Tensor] = {}

    def keep(key: int) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            seen[key] = first_tensor(output).float().clone()

        return hook

    def keep_input(_: nn.Module, given: Any, named: Any) -> None:
        seen[-1] = (given[0] if given else named["hidden_states"]).float().clone()

    hooks = [module.register_forward_hook(keep(id(module))) for module in (*modules, block)]
    hooks.append(block.register_forward_pre_hook(keep_input, with_kwargs=True))
    vocabulary = backbone.get_input_embeddings().weight.shape[0]
    ids = torch.tensor([[i % vocabulary for i in _PROBE_IDS]], device=backbone.get_input_embeddings().weight.device)
    try:
        backbone(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _agree(added: Tensor, expected: Tensor, after: Tensor) -> bool:
    """Whether they are equal but for the rounding of sums in the model's precision (bfloat16 at worst)."""
    if added.shape != expected.shape:
        return False
    error = (added - expected).norm()
    return bool(error <= 0.05 * expected.norm() + 2**-8 * after.norm())
