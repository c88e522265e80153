"""The logit lens: which tokens a direction promotes and suppresses, and tokens as text.

Nostalgebraist (2020): a direction u of norm 1 gives each token the logit ``W_U (γ ⊙ u)``, minus the mean over the
vocabulary. γ is the gain of the final norm; where that norm subtracts the mean (LayerNorm), u loses its own
first. The norm's division by the size of the residual stream scales all logits alike and is left out, as are biases,
soft caps and the layers in between.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor, nn

from posttrain.data.render.encoding import TextStream, decode_behind
from posttrain.errors import UsageError
from posttrain.interpret.activations.sites import backbone_of
from posttrain.models.forward.forward import causal_lm
from posttrain.types import Model, Tokenizer

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
                values, tokens = logits.topk(count, largest=largest)
                for row_tokens, row_values in zip(tokens.tolist(), values.tolist(), strict=True):
                    lists.append(list(zip(row_tokens, row_values, strict=True)))
        return ends


Likely = tuple[int, float]  # a token's id and its logit


@torch.no_grad()
def build_lens(model: Model) -> Lens:
    """Return the lens of a causal LM, or of a peft model around one; ``UsageError``: no known LM head or final norm."""
    plain = causal_lm(model)
    backbone = backbone_of(model)
    head = plain.get_output_embeddings()
    names = [name for name in _FINAL_NORMS if name in backbone._modules]
    if head is None or len(names) != 1:
        if head is None:
            missing = "LM head"
        else:
            missing = "final norm"
        raise UsageError(f"{type(plain).__name__}: no {missing} that is known here, so there is no logit lens")
    weight = head.weight.detach().float()
    gain, centres = measure_norm(backbone._modules[names[0]], weight.shape[1], weight.device)
    return Lens(weight, gain, centres)


def measure_norm(norm: nn.Module, d: int, device: torch.device) -> tuple[Tensor, bool]:
    """Return (gain [d], whether it subtracts the mean), measured on a vector, so that any architecture will do.

    ``norm(x) − norm(−x)`` is free of a bias, and twice the normed x times the gain.
    """
    x = 1 + torch.rand(d, generator=torch.Generator().manual_seed(0))
    x[1::2] *= -1  # no entry near 0, with or without the mean subtracted
    x = x.to(device)
    exact = copy.deepcopy(norm).float()

    def respond(values: Tensor) -> Tensor:
        up = exact(values[None])
        down = exact(-values[None])
        return torch.sub(up, down)[0] / 2

    plain = respond(x)
    moved = respond(x + 3)
    centres = bool((plain - moved).norm() < 0.01 * plain.norm())
    centred = x
    if centres:
        centred = x - x.mean()
    return plain * centred.square().mean().sqrt() / centred, centres


@lru_cache(maxsize=1 << 16)
def show_token(tokenizer: Tokenizer, token: int) -> str:
    """Return a token as text: bytes that are part of a character as ``\\xe2``, and for an empty one its name."""
    text = decode_behind(tokenizer, [token], [token])  # with the space in front of it
    if not text or "\ufffd" in text:
        text = str(tokenizer.convert_ids_to_tokens(token) or f"<{token}>")
        known = _byte_letters()
        if all(letter in known for letter in text):
            text = bytes(known[letter] for letter in text).decode("utf-8", "backslashreplace")
    return text


@cache
def _byte_letters() -> dict[str, int]:
    """Return the byte that each letter of byte-level tokenizers stands for: itself, or the n-th of the others."""
    from tokenizers.pre_tokenizers import ByteLevel

    own = {letter: ord(letter) for letter in ByteLevel.alphabet() if ord(letter) < 256}
    others = [byte for byte in range(256) if chr(byte) not in own]
    return own | {chr(256 + n): byte for n, byte in enumerate(others)}


def show_tokens(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Return tokens that follow one another as text: a character of several tokens is with the last of them."""
    alone = [show_token(tokenizer, token) for token in tokens]
    stream = TextStream(tokenizer, tokens[:1])
    if not any("\\x" in text or "<0x" in text for text in alone):
        return alone
    shown = []
    for token, own in zip(tokens, alone, strict=True):
        text = stream.push(token).strip("\ufffd")
        shown.append(text or own)
    return shown


@torch.no_grad()
def strongest_tokens(
    model: Model, directions: Tensor, tokenizer: Tokenizer, count: int = 8
) -> list[dict[str, list[list[object]]]]:
    """Return for each direction [n, d] the tokens with the largest and the smallest logits.

    ``{"up": [[text, logit], ...], "down": [...]}``.
    """
    if not len(directions):
        return []
    up, down = build_lens(model).extremes(directions, count)

    def texts(likely: list[Likely]) -> list[list[object]]:
        shown: list[list[object]] = []
        for token, logit in likely:
            shown.append([show_token(tokenizer, token), round(float(logit), 3)])
        return shown

    entries = []
    for rising, falling in zip(up, down, strict=True):
        entries.append({"up": texts(rising), "down": texts(falling)})
    return entries
