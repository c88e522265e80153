"""What a reconstruction costs a model: its own activations at one site replaced while it predicts.

A transcoder stands in for what computes its target from its site: what it makes of the site is put at the target, and
the MLP that would have written it no longer counts.

CE recovered = (CE_without − CE_spliced) / (CE_without − CE), where ``without`` puts zeros (or the mean) at the site; KL
recovered = 1 − KL(model ‖ spliced) / KL(model ‖ without). 1: nothing is lost; 0: as bad as nothing there at all. Zeros
are what published figures compare with; the mean is the harder baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import UsageError
from posttrain.interpret.activations.sites import replaced
from posttrain.interpret.dictionaries.dictionary import Dictionary


@dataclass(frozen=True, slots=True)
class Recovered:
    """Means over the predicted tokens; cross entropies and KL in nats. ``tokens``: how many were predicted."""

    tokens: int
    ce: float
    ce_spliced: float
    ce_zero: float
    ce_mean: float
    kl_spliced: float
    kl_zero: float
    kl_mean: float

    def numbers(self) -> dict[str, float]:
        """With the shares recovered, for a file."""
        metrics = {name: float(getattr(self, name)) for name in self.__slots__}
        for base in ("zero", "mean"):
            lost = metrics[f"ce_{base}"] - self.ce
            metrics[f"ce_recovered_{base}"] = (metrics[f"ce_{base}"] - self.ce_spliced) / lost if lost else float("nan")
            kl = metrics[f"kl_{base}"]
            metrics[f"kl_recovered_{base}"] = 1 - self.kl_spliced / kl if kl else float("nan")
        return metrics


@torch.no_grad()
def recover(
    model: Any,
    dictionary: Dictionary,
    site: str,
    documents: Sequence[Sequence[int]],
    limit: float = float("inf"),
    target: str | None = None,
) -> Recovered:
    """What is recovered on documents (token ids), one at a time.

    Left as they are, in every variant, because a dictionary does not learn them: the first token of a document, and
    activations with a norm above ``limit``.

    Args:
        model: a causal LM in eval mode.
        dictionary: on raw activations of that site, with one source.
        target: the site that a transcoder writes; everything is replaced there.

    Raises:
        UsageError: no document with two tokens, a dictionary of several sources, or a transcoder without a target.
    """
    if dictionary.transcoder != (target is not None):
        raise UsageError("splicing a transcoder takes the site that it reads and the target that it writes")
    written = target or site
    texts = [ids for ids in documents if len(ids) > 1]
    if dictionary.sources != 1 or not texts:
        raise UsageError("splicing takes a dictionary of one model's activations, and a document of two tokens")
    device = next(model.parameters()).device
    dictionary = dictionary.to(device)
    mean = _mean_activation(model, written, texts, device, dictionary.d)
    zero = torch.zeros_like(mean)
    latest: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        latest[:] = [x]
        return x

    def spliced(x: Tensor) -> Tensor:
        return dictionary(latest[0].reshape(-1, dictionary.d).float() if dictionary.transcoder else x)

    variants: dict[str, Callable[[Tensor], Tensor]] = {
        "spliced": spliced,
        "zero": lambda x: zero.expand_as(x),
        "mean": lambda x: mean.expand_as(x),
    }
    sums = dict.fromkeys(("ce", *(f"{what}_{name}" for what in ("ce", "kl") for name in variants)), 0.0)
    for ids in texts:
        tokens = torch.tensor([list(ids)], device=device)
        clean = _log_probs(model, tokens)
        sums["ce"] += _cross_entropy(clean, tokens)
        for name, change in variants.items():
            reading = replaced(model, site, keep) if dictionary.transcoder else nullcontext()
            with reading, replaced(model, written, _but_for_outliers(change, limit)):
                changed = _log_probs(model, tokens)
            sums[f"ce_{name}"] += _cross_entropy(changed, tokens)
            sums[f"kl_{name}"] += float((clean.exp() * (clean - changed)).sum(dtype=torch.float64))
    count = sum(len(ids) - 1 for ids in texts)
    return Recovered(count, **{name: value / count for name, value in sums.items()})


def _but_for_outliers(change: Callable[[Tensor], Tensor], limit: float) -> Callable[[Tensor], Tensor]:
    def changed(values: Tensor) -> Tensor:
        new = change(values.reshape(-1, values.shape[-1]).float()).reshape(values.shape).to(values.dtype)
        stays = values.float().norm(dim=-1, keepdim=True) > limit
        stays[:, 0] = True
        return torch.where(stays, values, new)

    return changed


def _log_probs(model: Any, tokens: Tensor) -> Tensor:
    """float32 [T − 1, V]: of the tokens after the first."""
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits.float(), dim=-1)


def _cross_entropy(log_probs: Tensor, tokens: Tensor) -> float:
    return -float(log_probs.gather(1, tokens[0, 1:, None]).sum(dtype=torch.float64))


def _mean_activation(model: Any, site: str, texts: Sequence[Sequence[int]], device: torch.device, width: int) -> Tensor:
    """[d]: over all tokens but the first of each document."""
    total, count = torch.zeros(width, dtype=torch.float64, device=device), 0

    def add(values: Tensor) -> Tensor:
        nonlocal total, count
        total += values[0, 1:].sum(0, dtype=torch.float64)
        count += values.shape[1] - 1
        return values

    with replaced(model, site, add):
        for ids in texts:
            model(input_ids=torch.tensor([list(ids)], device=device), use_cache=False)
    return (total / count).float()
