"""The logit lens (nostalgebraist 2020) of one direction: the tokens that it promotes and suppresses.

A direction u of norm 1 gives each token the logit ``W_U (γ ⊙ u)``, minus the mean over the vocabulary. γ is the gain of
the final norm; where that norm subtracts the mean (LayerNorm), u loses its own first. The norm's division by the size
of the residual stream scales all logits alike and is left out, as are biases, soft caps and the layers in between.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from posttrain.errors import UsageError
from posttrain.interpret.activations.sites import backbone_of, load_shortened
from posttrain.models.forward.forward import causal_lm
from posttrain.models.load import load_model, load_tokenizer
from posttrain.models.sources import resolve_model_name
from posttrain.recipes.sections import ModelSection

CONVENTION = (
    "logit of a token = W_U (gain of the final norm * unit decoder row), minus the mean over the vocabulary; without "
    "the norm's division by the size of the residual stream, without biases and soft caps"
)
_MAX_LOGITS = 1 << 24
_FINAL_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm")


@dataclass(frozen=True, slots=True)
class Lens:
    """Unembedding [V, d] and gain [d] of one model, fp32; ``centres``: its final norm subtracts the mean."""

    unembedding: Tensor
    gain: Tensor
    centres: bool

    def to(self, device: torch.device | str) -> Lens:
        """Return the same on a device."""
        return Lens(self.unembedding.to(device), self.gain.to(device), self.centres)

    def logits(self, directions: Tensor) -> Tensor:
        """Return logits [n, V] of directions [n, d] of any norm but 0; see the module for the convention."""
        unit = directions.float()
        unit = unit / unit.norm(dim=1, keepdim=True).clamp_min(1e-12)
        if self.centres:
            unit = unit - unit.mean(1, keepdim=True)
        logits = (unit * self.gain) @ self.unembedding.T
        return logits - logits.mean(1, keepdim=True)

    def extremes(self, directions: Tensor, count: int) -> tuple[list[list[Likely]], list[list[Likely]]]:
        """Return for each direction the ``count`` tokens with the highest logits, falling, and the lowest, rising."""
        size = max(1, _MAX_LOGITS // len(self.unembedding))
        count = min(count, len(self.unembedding))
        ends: tuple[list[list[Likely]], list[list[Likely]]] = ([], [])
        for part in directions.to(self.gain.device).split(size):
            logits = self.logits(part)
            for lists, largest in zip(ends, (True, False), strict=True):
                values, tokens = (x.tolist() for x in logits.topk(count, largest=largest))
                lists += [list(zip(*pair, strict=True)) for pair in zip(tokens, values, strict=True)]
        return ends


Likely = tuple[int, float]  # a token's id and its logit


@torch.no_grad()
def build_lens(model: Any) -> Lens:
    """Return the lens of a causal LM, or of a peft model around one; ``UsageError``: no known LM head or final norm."""
    plain, backbone = causal_lm(model), backbone_of(model)
    head = plain.get_output_embeddings()
    names = [name for name in _FINAL_NORMS if name in backbone._modules]
    if head is None or len(names) != 1:
        missing = "LM head" if head is None else "final norm"
        raise UsageError(f"{type(plain).__name__}: no {missing} that is known here, so there is no logit lens")
    weight = head.weight.detach().float()
    gain, centres = measure_norm(backbone._modules[names[0]], weight.shape[1], weight.device)
    return Lens(weight, gain, centres)


def load_lens(section: ModelSection) -> tuple[Lens, Any]:
    """Return the lens of a model by its name, and its tokenizer; of a plain model one block alone is loaded."""
    source = resolve_model_name(section.name)
    model = load_shortened(AutoModelForCausalLM, section, source, 1)
    if model is not None:
        return build_lens(model), load_tokenizer(section.name, trust_remote_code=section.runs_remote_code)
    loaded = load_model(section, seed=0)
    return build_lens(loaded.model), loaded.tokenizer


def measure_norm(norm: nn.Module, d: int, device: torch.device) -> tuple[Tensor, bool]:
    """Return (gain [d], whether it subtracts the mean), measured on a vector, so that any architecture will do.

    ``norm(x) − norm(−x)`` is free of a bias, and twice the normed x times the gain.
    """
    draws = torch.Generator().manual_seed(0)
    x = 1 + torch.rand(d, generator=draws)
    x[1::2] *= -1  # no entry near 0, with or without the mean subtracted
    x = x.to(device)
    exact = copy.deepcopy(norm).float()

    def respond(values: Tensor) -> Tensor:
        response: Tensor = (exact(values[None]) - exact(-values[None]))[0] / 2
        return response

    plain, moved = respond(x), respond(x + 3)
    centres = bool((plain - moved).norm() < 0.01 * plain.norm())
    centred = x - x.mean() if centres else x
    return plain * centred.square().mean().sqrt() / centred, centres


def show_token(tokenizer: Any, token: int) -> str:
    """Return a token as text; where that is part of a character, or empty, the tokenizer's name for it."""
    text = str(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
    if not text or "\ufffd" in text:
        text = str(tokenizer.convert_ids_to_tokens(token) or f"<{token}>")
    return text


@torch.no_grad()
def strongest_tokens(model: Any, directions: Tensor, tokenizer: Any, count: int = 8) -> list[dict[str, list[Any]]]:
    """Return for each direction [n, d] the tokens with the largest and the smallest logits.

    ``{"up": [[text, logit], ...], "down": [...]}``.
    """
    if not len(directions):
        return []
    up, down = build_lens(model).extremes(directions, count)

    def texts(likely: list[Likely]) -> list[list[Any]]:
        return [[show_token(tokenizer, token), round(float(logit), 3)] for token, logit in likely]

    return [{"up": texts(rising), "down": texts(falling)} for rising, falling in zip(up, down, strict=True)]
