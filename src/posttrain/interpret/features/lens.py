"""Logit lens: find promoted and suppressed tokens for a direction, and render tokens.

Nostalgebraist (2020): a unit direction u gives token logits ``W_U (γ ⊙ u)``, centered over the vocabulary. γ is the
final norm's gain; for LayerNorm, u is also centered first. The norm's division by residual-stream size scales all
logits equally and is omitted, like biases, soft caps and intermediate layers.
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
    "token logit = W_U (final norm gain * unit decoder row), centered over the vocabulary; without the norm's division "
    "by residual-stream size, biases and soft caps"
)
_MAX_LOGITS = 1 << 24
_FINAL_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm")


@dataclass(frozen=True, slots=True)
class Lens:
    """Unembedding [V, d] and final-norm gain [d], fp32; ``centres``: the norm subtracts the mean (LayerNorm)."""

    unembedding: Tensor
    gain: Tensor
    centres: bool

    def logits(self, directions: Tensor) -> Tensor:
        """Compute logits [n, V] for nonzero directions [n, d]; see the module for the convention."""
        unit = directions.float()
        unit = unit / unit.norm(dim=1, keepdim=True).clamp_min(1e-12)
        if self.centres:
            unit = unit - unit.mean(1, keepdim=True)
        logits = (unit * self.gain) @ self.unembedding.T
        return logits - logits.mean(1, keepdim=True)

    def extremes(self, directions: Tensor, count: int) -> tuple[list[list[Likely]], list[list[Likely]]]:
        """Find the ``count`` highest tokens per direction, descending, and the lowest, ascending."""
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


Likely = tuple[int, float]  # (token id, logit)


@torch.no_grad()
def build_lens(model: Model) -> Lens:
    """Build the lens for a causal LM or peft model; ``UsageError``: unknown LM head or final norm."""
    plain = causal_lm(model)
    backbone = backbone_of(model)
    head = plain.get_output_embeddings()
    names = [name for name in _FINAL_NORMS if name in backbone._modules]
    if head is None or len(names) != 1:
        if head is None:
            missing = "LM head"
        else:
            missing = "final norm"
        raise UsageError(f"{type(plain).__name__}: no {missing} found, so a logit lens is not available")
    weight = head.weight.detach().float()
    gain, centres = measure_norm(backbone._modules[names[0]], weight.shape[1], weight.device)
    return Lens(weight, gain, centres)


def measure_norm(norm: nn.Module, d: int, device: torch.device) -> tuple[Tensor, bool]:
    """Measure (gain [d], centering) on a probe vector, independent of the architecture.

    ``norm(x) − norm(−x)`` cancels any bias, leaving twice the normalized x times the gain.
    """
    x = 1 + torch.rand(d, generator=torch.Generator().manual_seed(0))
    x[1::2] *= -1  # keep entries away from 0, centered or not
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
    """Render a token: partial UTF-8 bytes as ``\\xe2``, empty tokens by name."""
    text = decode_behind(tokenizer, [token], [token])  # including a leading space
    if not text or "\ufffd" in text:
        text = str(tokenizer.convert_ids_to_tokens(token) or f"<{token}>")
        known = _byte_letters()
        if all(letter in known for letter in text):
            text = bytes(known[letter] for letter in text).decode("utf-8", "backslashreplace")
    return text


@cache
def _byte_letters() -> dict[str, int]:
    """Map each letter of byte-level tokenizers to its byte, following GPT-2's encoding."""
    from tokenizers.pre_tokenizers import ByteLevel

    own = {letter: ord(letter) for letter in ByteLevel.alphabet() if ord(letter) < 256}
    others = [byte for byte in range(256) if chr(byte) not in own]
    return own | {chr(256 + n): byte for n, byte in enumerate(others)}


def show_tokens(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Render consecutive tokens; a character split across tokens appears at its final one."""
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
    """Find top and bottom logit-lens tokens for directions [n, d].

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
