"""Per-token KL between two models, and the fraction recovered by patching activations.

KL(post ‖ base) compares next-token distributions over the full vocabulary. Patching: the base model reads the
document, a term is added to its activations at one site, and all later layers run as usual. The fraction recovered is
1 − Σ KL(post ‖ patched base) / Σ KL(post ‖ base), summed over response tokens: 1 if the patched base predicts like
post, negative if patching increases KL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from posttrain.data.render.encoding import decode_ids
from posttrain.evaluation.statistics import standard_error
from posttrain.interpret.activations.record import plan_batches
from posttrain.interpret.activations.sites import device_of, pad, read_sites, replaced
from posttrain.interpret.differences.changes import DictionaryChanges, random_features
from posttrain.interpret.differences.changes_recipe import ChangesSection
from posttrain.interpret.features.lens import show_token, show_tokens
from posttrain.interpret.saes.sae import SparseAutoencoder
from posttrain.types import Model, Tokenizer

# Computes [n, d], added to base activations, from base and post activations on the same tokens.
Patch = Callable[[Tensor, Tensor], Tensor]
TOKENS_PER_BATCH = 4096
NUM_PLACES = 48
NUM_TOKENS = 12
NUM_SHOWN = 3


@dataclass(slots=True)
class _Text:
    """Documents [B, T], right-padded, with activations and logits from both models."""

    tokens: Tensor
    wanted: Tensor  # bool [B, T − 1]: states whose next token counts
    real: Tensor  # bool [B, T]: activations allowed to change
    base: Tensor  # [B, T, d] at the site
    post: Tensor
    post_logits: Tensor  # [M, V] at wanted states


class Patcher:
    """Patches a base model on fixed documents; create once, then try many patches.

    KL covers response tokens, after ``prompt_lengths`` tokens per document. Activations with a norm above ``limit``
    are never patched.
    """

    def __init__(
        self,
        base: Model,
        post: Model,
        site: str,
        documents: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        limit: float = float("inf"),
    ) -> None:
        self.base = base
        self.site = site
        self.texts = []
        for chosen in _batches(documents):
            self.texts.append(self._read(post, chosen, documents, prompt_lengths, limit))
        self.tokens = sum(int(text.wanted.sum()) for text in self.texts)
        self.before = sum(self._divergence(text, None) for text in self.texts)

    @property
    def kl(self) -> float:
        """KL(post ‖ base) before patching, in nats per response token."""
        return self.before / max(1, self.tokens)

    def recovered(self, patch: Patch) -> float:
        """Compute the fraction of KL recovered by a patch."""
        assert self.before > 0, "recovery is undefined without KL"
        after = sum(self._divergence(text, patch) for text in self.texts)
        return 1.0 - after / self.before

    def mean_difference(self) -> Tensor:
        """Average post − base [d] over patchable tokens."""
        sums = []
        for text in self.texts:
            moved = (text.post - text.base)[text.real]
            sums.append(moved.double().sum(0))
        count = sum(int(text.real.sum()) for text in self.texts)
        mean = torch.stack(sums).sum(0) / max(1, count)
        return mean.float()

    @torch.no_grad()
    def _read(
        self,
        post: Model,
        chosen: list[int],
        documents: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        limit: float,
    ) -> _Text:
        device = device_of(self.base)
        tokens, lengths = pad([documents[number] for number in chosen], device)
        starts = torch.tensor([max(1, prompt_lengths[number]) for number in chosen], device=device)
        place = torch.arange(tokens.shape[1], device=device)
        is_token = place < lengths[:, None]
        is_answer = is_token & (place >= starts[:, None])
        wanted = is_answer[:, 1:]
        kept: dict[str, Tensor] = {}
        with replaced(post, self.site, lambda x: kept.setdefault("post", x)):
            logits = post(input_ids=tokens.to(device_of(post)), use_cache=False).logits
        (seen,) = read_sites(self.base, [self.site], input_ids=tokens, use_cache=False)
        base = seen.float()
        there = kept["post"].to(device).float()
        is_within = (base.norm(dim=-1) <= limit) & (there.norm(dim=-1) <= limit)
        real = is_token & is_within
        post_logits = logits[:, :-1].to(device)[wanted].float()
        return _Text(tokens, wanted, real, base, there, post_logits)

    @torch.no_grad()
    def _divergence(self, text: _Text, patch: Patch | None) -> float:
        added = torch.zeros_like(text.base)
        if patch is not None:
            moved = patch(text.base[text.real], text.post[text.real])
            added[text.real] = moved.to(added.dtype)

        def change(x: Tensor) -> Tensor:
            return (x.float() + added).to(x.dtype)

        place: AbstractContextManager[None] = nullcontext()
        if patch is not None:
            place = replaced(self.base, self.site, change)
        with place:
            logits = self.base(input_ids=text.tokens, use_cache=False).logits
        base_logits = logits[:, :-1][text.wanted]
        return float(divergence(text.post_logits, base_logits).sum())


def divergence(post_logits: Tensor, base_logits: Tensor) -> Tensor:
    """Compute KL(post ‖ base) from logits [M, V]; returns float64 [M]."""
    p = torch.log_softmax(post_logits.double(), dim=-1)
    q = torch.log_softmax(base_logits.double(), dim=-1)
    return (p.exp() * (p - q)).sum(-1).clamp_min(0.0)


@torch.no_grad()
def token_kl(
    base: Model, post: Model, documents: Sequence[Sequence[int]], prompt_lengths: Sequence[int]
) -> tuple[list[Tensor], Tensor]:
    """Compute per-token KL per document, float64 [tokens], assigned to the predicted token, and gained probability
    [V].

    Gained probability is post − base per vocabulary entry, float64, summed over response positions.
    """
    kl: list[Tensor] = [torch.zeros(len(ids), dtype=torch.float64) for ids in documents]
    device = device_of(base)
    moved = torch.zeros(0, dtype=torch.float64)
    for chosen in _batches(documents):
        tokens, lengths = pad([documents[number] for number in chosen], device)
        post_logits = post(input_ids=tokens.to(device_of(post)), use_cache=False).logits.to(device)
        base_logits = base(input_ids=tokens.to(device_of(base)), use_cache=False).logits.to(device)
        for row, number in enumerate(chosen):
            end = int(lengths[row]) - 1
            start = max(0, prompt_lengths[number] - 1)
            kl[number][1:] = divergence(post_logits[row, :end], base_logits[row, :end]).cpu()
            p = torch.softmax(post_logits[row, start:end].float(), dim=-1)
            q = torch.softmax(base_logits[row, start:end].float(), dim=-1)
            gained = (p - q).sum(0, dtype=torch.float64).cpu()
            if len(moved):
                moved = gained + moved
            else:
                moved = gained
    return kl, moved


def feature_patch(sae: SparseAutoencoder, features: Sequence[int] | None) -> Patch:
    """Build the patch Σⱼ (fⱼ(post) − fⱼ(base))·dⱼ for selected features (None: all)."""
    device = sae.b_dec.device
    chosen = None
    if features is not None:
        chosen = torch.tensor(list(features), dtype=torch.long, device=device)

    def patch(base: Tensor, post: Tensor) -> Tensor:
        directions: Tensor = sae.W_dec
        if chosen is not None:
            directions = sae.W_dec[chosen]
        moved = sae.encode(post, chosen) - sae.encode(base, chosen)
        return moved @ directions

    return patch


def _batches(documents: Sequence[Sequence[int]]) -> list[list[int]]:
    """Batch document indices by similar length, skipping documents shorter than 2 tokens."""
    numbers = [number for number, ids in enumerate(documents) if len(ids) > 1]
    lengths = [len(documents[number]) for number in numbers]
    pieces = plan_batches(lengths, None, TOKENS_PER_BATCH)
    return [[numbers[i] for i in piece] for piece in pieces]


def locate_divergence(
    base: Model, post: Model, documents: Sequence[Sequence[int]], prompt_lengths: Sequence[int], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Measure KL(post ‖ base): averages, profile by position and token, and example answers."""
    every, moved = token_kl(base, post, documents, prompt_lengths)
    answers = []
    prompts = []
    tokens: list[int] = []  # response tokens
    before: list[int] = []  # preceding tokens
    for ids, length, kl in zip(documents, prompt_lengths, every, strict=True):
        prompts.append(kl[1:length])
        answers.append(kl[length:])
        tokens += ids[length:]
        before += ids[length - 1 : -1]
    of_prompts = torch.cat(prompts)
    flat = torch.cat(answers)
    sums = [float(kl.sum()) for kl in answers]
    per_prompt_token = 0.0
    if len(of_prompts):
        per_prompt_token = float(of_prompts.mean())
    shown = []
    for ids, length, kl in zip(documents[:NUM_SHOWN], prompt_lengths, every, strict=False):
        entry = {
            "prompt": decode_ids(tokenizer, ids[:length]),
            "tokens": show_tokens(tokenizer, ids[length:]),
            "kl": [round(float(value), 4) for value in kl[length:]],
        }
        shown.append(entry)
    return {
        "documents": len(documents),
        "tokens": len(flat),
        "per_answer": fmean(sums),
        "per_answer_error": standard_error(sums),
        "per_token": float(flat.sum()) / len(flat),
        "per_prompt_token": per_prompt_token,
        "places": _by_place(answers),
        "tokens_at": _by_token(flat, tokens, tokenizer),
        "tokens_after": _by_token(flat, before, tokenizer),
        "moved": _most_moved(moved / len(flat), tokenizer),
        "shown": shown,
    }


def _by_place(answers: Sequence[Tensor]) -> list[dict[str, float]]:
    """Average KL by response position, while at least 2 answers, and 5 % of all, are long enough."""
    fewest = max(2, len(answers) // 20)
    places: list[dict[str, float]] = []
    for place in range(NUM_PLACES):
        here = [float(kl[place]) for kl in answers if len(kl) > place]
        if len(here) < fewest:
            break
        places.append({"place": place, "kl": fmean(here), "error": standard_error(here), "answers": len(here)})
    return places


def _most_moved(moved: Tensor, tokenizer: Tokenizer) -> dict[str, list[list[object]]]:
    """Find tokens gaining (``up``) and losing (``down``) most probability: [text, gain per token]."""
    ends = {}
    for name, sign in (("up", 1), ("down", -1)):
        values, ids = (moved * sign).topk(min(8, len(moved)))
        tokens: list[list[object]] = []
        for value, i in zip(values.tolist(), ids.tolist(), strict=True):
            tokens.append([show_token(tokenizer, i), sign * value])
        ends[name] = tokens
    return ends


def _by_token(kl: Tensor, tokens: Sequence[int], tokenizer: Tokenizer) -> list[dict[str, object]]:
    """Find tokens contributing most KL, with their fraction and per-occurrence average."""
    ids = torch.tensor(tokens)
    counts = torch.bincount(ids)
    sums = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, ids, kl)
    total = float(kl.sum())
    entries: list[dict[str, object]] = []
    for i in sums.topk(min(NUM_TOKENS, len(counts))).indices.tolist():
        if counts[i] == 0:
            continue
        share = 0.0
        if total > 0:
            share = float(sums[i]) / total
        mean = float(sums[i] / counts[i])
        entries.append({"token": show_token(tokenizer, i), "share": share, "mean": mean, "count": int(counts[i])})
    return entries


def patch_curves(
    patcher: Patcher,
    changes: ChangesSection,
    saes: Sequence[SparseAutoencoder],
    seen: Sequence[DictionaryChanges],
    frozen: tuple[SparseAutoencoder, Sequence[int]],
    observe: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """Measure KL recovered as a function of the number of patched features.

    ``changed``, ``random`` (rate-matched): one curve per seed; ``frozen``: a single curve. References: the full
    difference (``everything``), the average difference vector, and all features per dictionary.
    """
    assert changes.patching is not None
    mean = patcher.mean_difference()
    counts = changes.patching.counts

    def curve(sae: SparseAutoencoder, features: Sequence[int]) -> list[float]:
        shares = []
        for count in counts:
            patch = feature_patch(sae, features[:count])
            shares.append(patcher.recovered(patch))
        return shares

    curves: dict[str, Any] = {
        "kl_per_token": patcher.kl,
        "tokens": patcher.tokens,
        "counts": counts,
        "everything": patcher.recovered(lambda base, post: post - base),
        "mean_vector": patcher.recovered(lambda base, post: mean.expand_as(base)),
        "changed": [],
        "random": [],
        "all_features": [],
    }
    for seed, (sae, view) in enumerate(zip(saes, seen, strict=True)):
        ranked = view.changes.ranking()[: max(counts)].tolist()
        others = random_features(view.changes, ranked, changes.seed + seed, 0)
        changed = curve(sae, ranked)
        curves["changed"].append(changed)
        curves["random"].append(curve(sae, others))
        everything = feature_patch(sae, None)
        curves["all_features"].append(patcher.recovered(everything))
        observe(f"patching, seed {seed}: {counts[-1]} changed features recover {changed[-1]:.1%}")
    frozen_sae, most_changed = frozen
    curves["frozen"] = curve(frozen_sae, most_changed)
    return curves
