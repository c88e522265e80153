"""Where two models disagree, token by token, and how much of it is put right by activations of one in the other.

KL(post ‖ base) of the next token's distribution is measured at the tokens of a document, over the whole vocabulary.
Patching: the base model reads the same tokens, at one site something is added to its activations, and the rest of it
runs on from there. The share recovered is 1 − Σ KL(post ‖ patched base) / Σ KL(post ‖ base) over the tokens of the
answers: 1 where the patched base predicts like the post model, below 0 where it is further away than before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from posttrain.evals.statistics import standard_error
from posttrain.interpret.activations.sites import pad, read_sites, replaced
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.differences.changes import Seen, random_features
from posttrain.interpret.differences.recipe import ChangesSection
from posttrain.interpret.features.logit_lens import show_token
from posttrain.models.forward.micro import by_length, split_padded

# What is added to activations of the base, [n, d], given those of the base and of the post model at the same tokens.
Patch = Callable[[Tensor, Tensor], Tensor]
TOKENS_PER_BATCH = 4096


@dataclass(slots=True)
class _Text:
    """A batch of documents [B, T], padded on the right, and what both models make of it."""

    tokens: Tensor
    wanted: Tensor  # bool [B, T − 1]: whether the token after this state is counted
    real: Tensor  # bool [B, T]
    base: Tensor  # [B, T, d] at the site
    post: Tensor
    post_logits: Tensor  # [M, V] at the wanted states


class Patcher:
    """Patches a base model on fixed documents; made once, asked for many patches.

    Args:
        base, post: causal LMs in eval mode over one vocabulary.
        site: where, such as ``resid.2``.
        documents: token ids.
        prompt_lengths: the tokens of each document before its answer; KL is counted over the answer.
        limit: activations with a larger norm stay as they are.
    """

    def __init__(
        self,
        base: Any,
        post: Any,
        site: str,
        documents: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        limit: float = float("inf"),
    ) -> None:
        self.base, self.site, self.limit = base, site, limit
        self.texts = [self._read(post, rows, prompt_lengths) for rows in _batches(documents)]
        self.tokens = sum(int(text.wanted.sum()) for text in self.texts)
        self.before = sum(self._divergence(text, None) for text in self.texts)

    @property
    def kl(self) -> float:
        """KL(post ‖ base) in nats per token of an answer, before anything is patched."""
        return self.before / max(1, self.tokens)

    def recovered(self, patch: Patch) -> float:
        """The share of the KL that a patch puts right."""
        after = sum(self._divergence(text, patch) for text in self.texts)
        assert self.before > 0, "models that predict the same have nothing to recover"
        return 1.0 - after / self.before

    def mean_difference(self) -> Tensor:
        """[d]: the mean of post − base over all tokens that are patched."""
        sums, count = [], 0
        for text in self.texts:
            kept = self._patched(text)
            sums.append((text.post - text.base)[kept].double().sum(0))
            count += int(kept.sum())
        return (torch.stack(sums).sum(0) / max(1, count)).float()

    @torch.no_grad()
    def _read(self, post: Any, rows: list[tuple[int, Sequence[int]]], prompt_lengths: Sequence[int]) -> _Text:
        device = next(self.base.parameters()).device
        tokens, lengths = pad([ids for _, ids in rows], device)
        starts = torch.tensor([max(1, prompt_lengths[number]) for number, _ in rows], device=device)
        place = torch.arange(1, tokens.shape[1], device=device)
        wanted = (place >= starts[:, None]) & (place < lengths[:, None])
        real = torch.arange(tokens.shape[1], device=device) < lengths[:, None]
        kept: dict[str, Tensor] = {}
        with replaced(post, self.site, lambda x: kept.setdefault("post", x)):
            logits = post(input_ids=tokens.to(next(post.parameters()).device), use_cache=False).logits
        (seen,) = read_sites(self.base, [self.site], input_ids=tokens, use_cache=False)
        return _Text(
            tokens,
            wanted,
            real,
            seen.float(),
            kept["post"].to(device).float(),
            logits[:, :-1].to(device)[wanted].float(),
        )

    def _patched(self, text: _Text) -> Tensor:
        """bool [B, T]: which activations may be changed."""
        return text.real & (text.base.norm(dim=-1) <= self.limit) & (text.post.norm(dim=-1) <= self.limit)

    @torch.no_grad()
    def _divergence(self, text: _Text, patch: Patch | None) -> float:
        added = torch.zeros_like(text.base)
        if patch is not None:
            kept = self._patched(text)
            added[kept] = patch(text.base[kept], text.post[kept]).to(added.dtype)

        def change(x: Tensor) -> Tensor:
            return (x.float() + added).to(x.dtype)

        with nullcontext() if patch is None else replaced(self.base, self.site, change):
            logits = self.base(input_ids=text.tokens, use_cache=False).logits
        return float(divergence(text.post_logits, logits[:, :-1][text.wanted]).sum())


def divergence(post_logits: Tensor, base_logits: Tensor) -> Tensor:
    """float64 [M]: KL(post ‖ base) of two distributions given by their logits [M, V]."""
    p, q = (torch.log_softmax(logits.double(), dim=-1) for logits in (post_logits, base_logits))
    return (p.exp() * (p - q)).sum(-1).clamp_min(0.0)


@torch.no_grad()
def token_kl(
    base: Any, post: Any, documents: Sequence[Sequence[int]], prompt_lengths: Sequence[int]
) -> tuple[list[Tensor], Tensor]:
    """(for each document float64 [tokens], float64 [V]).

    The first: KL(post ‖ base) of the distribution of the token *at* each place; the first token has none: 0. The
    second: how much probability each token of the vocabulary gained, summed over the tokens of the answers.
    """
    kl: list[Tensor] = [torch.zeros(len(ids), dtype=torch.float64) for ids in documents]
    device = next(base.parameters()).device
    moved: Tensor | None = None
    for rows in _batches(documents):
        tokens, lengths = pad([ids for _, ids in rows], device)
        logits = [m(input_ids=tokens.to(next(m.parameters()).device), use_cache=False).logits for m in (post, base)]
        for row, (number, _) in enumerate(rows):
            end, start = int(lengths[row]) - 1, max(0, prompt_lengths[number] - 1)
            kl[number][1:] = divergence(logits[0][row, :end].to(device), logits[1][row, :end]).cpu()
            p, q = (torch.softmax(each[row, start:end].to(device).float(), dim=-1) for each in logits)
            gained = p - q
            total = gained.sum(0, dtype=torch.float64).cpu()
            moved = total if moved is None else moved + total
    return kl, torch.zeros(0, dtype=torch.float64) if moved is None else moved


def feature_patch(dictionary: Dictionary, features: Sequence[int] | None) -> Patch:
    """Σⱼ (fⱼ(post) − fⱼ(base))·dⱼ over some features (None: all of them)."""
    chosen = (
        None if features is None else torch.tensor(list(features), dtype=torch.long, device=dictionary.b_dec.device)
    )

    def patch(base: Tensor, post: Tensor) -> Tensor:
        directions = dictionary.W_dec if chosen is None else dictionary.W_dec[chosen]
        return (dictionary.encode(post, chosen) - dictionary.encode(base, chosen)) @ directions

    return patch


def difference_patch(dictionary: Dictionary, features: Sequence[int]) -> Patch:
    """Σⱼ fⱼ(post − base)·dⱼ over some latents of a dictionary of the difference."""
    chosen = torch.tensor(list(features), dtype=torch.long, device=dictionary.b_dec.device)

    def patch(base: Tensor, post: Tensor) -> Tensor:
        return dictionary.encode(post - base, chosen) @ dictionary.W_dec[chosen]

    return patch


def _batches(documents: Sequence[Sequence[int]]) -> list[list[tuple[int, Sequence[int]]]]:
    """Documents of like length together, with their numbers, as many as fit into ``TOKENS_PER_BATCH``."""
    lengths = [len(ids) for ids in documents]
    order = [number for number in by_length(lengths) if lengths[number] > 1]
    return [[(i, documents[i]) for i in piece] for piece in split_padded(order, lengths, TOKENS_PER_BATCH)]


NUM_PLACES = 48
NUM_TOKENS = 12
NUM_SHOWN = 3


def locate_divergence(
    base: Any, post: Any, documents: Sequence[Sequence[int]], prompt_lengths: Sequence[int], tokenizer: Any
) -> dict[str, Any]:
    """KL(post ‖ base): its mean, how concentrated it is, at which places and tokens it sits, and whole answers."""
    every, moved = token_kl(base, post, documents, prompt_lengths)
    answers = [kl[length:] for kl, length in zip(every, prompt_lengths, strict=True)]
    prompts = torch.cat([kl[1:length] for kl, length in zip(every, prompt_lengths, strict=True)])
    flat = torch.cat(answers)
    ids = torch.tensor([t for d, n in zip(documents, prompt_lengths, strict=True) for t in d[n:]])
    before = torch.tensor([t for d, n in zip(documents, prompt_lengths, strict=True) for t in d[n - 1 : -1]])
    sums = [float(kl.sum()) for kl in answers]
    total = float(flat.sum())
    top = flat.sort(descending=True).values
    return {
        "documents": len(documents),
        "tokens": len(flat),
        "per_answer": fmean(sums),
        "per_answer_error": standard_error(sums),
        "per_token": total / len(flat),
        "per_prompt_token": float(prompts.mean()) if len(prompts) else 0.0,
        "share_of_top_tenth": float(top[: max(1, len(top) // 10)].sum()) / total if total > 0 else None,
        "share_of_top_hundredth": float(top[: max(1, len(top) // 100)].sum()) / total if total > 0 else None,
        "places": _by_place(answers),
        "tokens_at": _by_token(flat, ids, tokenizer),
        "tokens_after": _by_token(flat, before, tokenizer),
        "moved": _moved(moved / len(flat), tokenizer),
        "shown": _shown(documents, prompt_lengths, every, tokenizer),
    }


def _by_place(answers: Sequence[Tensor]) -> list[dict[str, float]]:
    """Mean KL at each place of the answers that reach it, with its standard error."""
    places = []
    for place in range(NUM_PLACES):
        here = [float(kl[place]) for kl in answers if len(kl) > place]
        if len(here) < max(2, len(answers) // 20):
            break
        places.append({"place": place, "kl": fmean(here), "error": standard_error(here), "answers": len(here)})
    return places


def _by_token(kl: Tensor, ids: Tensor, tokenizer: Any) -> list[dict[str, Any]]:
    """The tokens that carry most of the KL: their share of it, and the mean where they stand."""
    size = int(ids.max()) + 1
    sums = torch.zeros(size, dtype=torch.float64).index_add_(0, ids, kl)
    counts = torch.bincount(ids, minlength=size)
    total = float(kl.sum())
    best = sums.topk(min(NUM_TOKENS, size)).indices.tolist()
    return [
        {
            "token": show_token(tokenizer, i),
            "share": float(sums[i]) / total if total > 0 else 0.0,
            "mean": float(sums[i] / counts[i].clamp_min(1)),
            "count": int(counts[i]),
        }
        for i in best
        if counts[i] > 0
    ]


def _moved(moved: Tensor, tokenizer: Any) -> dict[str, list[list[Any]]]:
    """Tokens whose probability rose and fell most, on average over all tokens of the answers."""
    ends = {}
    for name, sign in (("up", 1), ("down", -1)):
        values, ids = (moved * sign).topk(min(8, len(moved)))
        ends[name] = [[show_token(tokenizer, i), sign * v] for v, i in zip(values.tolist(), ids.tolist(), strict=True)]
    return ends


def _shown(
    documents: Sequence[Sequence[int]], prompt_lengths: Sequence[int], every: Sequence[Tensor], tokenizer: Any
) -> list[dict[str, Any]]:
    """The first answers, token by token."""
    return [
        {
            "prompt": tokenizer.decode(list(documents[i][: prompt_lengths[i]]), skip_special_tokens=False),
            "tokens": [show_token(tokenizer, t) for t in documents[i][prompt_lengths[i] :]],
            "kl": [round(float(v), 4) for v in every[i][prompt_lengths[i] :]],
        }
        for i in range(min(NUM_SHOWN, len(documents)))
    ]


def patch_curves(
    models: tuple[Any, Any],
    site: str,
    texts: tuple[Sequence[Sequence[int]], Sequence[int]],
    changes: ChangesSection,
    dictionaries: Sequence[Dictionary],
    seen: Sequence[Seen],
    *,
    frozen: tuple[Dictionary, Sequence[int]],
    difference: Dictionary | None,
    limit: float,
    observe: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The share of KL recovered against the number of features patched into the base.

    ``changed``, ``random`` (rate-matched): one list per seed; ``frozen`` and ``difference``: one. For comparison the
    whole difference (``everything``), the mean difference vector, and all features of each dictionary.
    """
    assert changes.patching is not None
    patcher = Patcher(*models, site, *texts, limit=limit)
    mean = patcher.mean_difference()
    counts = changes.patching.counts
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
    for seed, (dictionary, view) in enumerate(zip(dictionaries, seen, strict=True)):
        ranked = view.changes.ranking().tolist()
        others = random_features(view, ranked[: max(counts)], changes.seed + seed, 0)
        for name, features in (("changed", ranked), ("random", others)):
            curves[name].append([patcher.recovered(feature_patch(dictionary, features[:n])) for n in counts])
        curves["all_features"].append(patcher.recovered(feature_patch(dictionary, None)))
        observe(f"patching, seed {seed}: {curves['changed'][-1][-1]:.1%} by {counts[-1]} changed features")
    dictionary, ranking = frozen
    curves["frozen"] = [patcher.recovered(feature_patch(dictionary, list(ranking[:n]))) for n in counts]
    if difference is not None:
        energy = _energy(difference, patcher)
        order = energy.argsort(descending=True).tolist()
        curves["difference"] = [patcher.recovered(difference_patch(difference, order[:n])) for n in counts]
    return curves


def _energy(dictionary: Dictionary, patcher: Patcher) -> Tensor:
    """[F]: Σf² of the difference on the patched texts."""
    total = torch.zeros(dictionary.features, dtype=torch.float64)
    for text in patcher.texts:
        kept = text.real
        total += dictionary.encode((text.post - text.base)[kept]).double().square().sum(0).cpu()
    return total
