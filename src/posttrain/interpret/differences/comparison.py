"""Two models compared from the inside: what both read, what changed, where they disagree, what the changes do.

Every part gives plain data for ``diff.json``, from which the report is drawn. Both read prompts, with answers that one
of them has sampled.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from posttrain.activity import phase
from posttrain.data.base import Task, build_task, choose_task
from posttrain.errors import RunConflict, UsageError
from posttrain.evaluation.statistics import standard_error
from posttrain.interpret.activations.record import record
from posttrain.interpret.activations.shards import ActivationStore, Documents
from posttrain.interpret.activations.sites import check_layers, device_of, read_config
from posttrain.interpret.differences.causal import Subject, measure_causes
from posttrain.interpret.differences.changes import MEASURES, Changes, Seen, see_changes
from posttrain.interpret.differences.divergence import Patcher, locate_divergence, patch_curves
from posttrain.interpret.differences.recipe import ChangesSection, DiffRecipe
from posttrain.interpret.features.features import rounded, show_token, show_tokens, strongest_tokens
from posttrain.interpret.saes.fitting import StoreRows, first_held_out, fit_sae, median_norm
from posttrain.interpret.saes.sae import CONFIG, SparseAutoencoder, load_sae, save_sae
from posttrain.randomness import permutation
from posttrain.recipes.overriding import flatten
from posttrain.sampling.models import ModelSource, complete_template, grader_for, open_model
from posttrain.sampling.rollout import Grader
from posttrain.store.durable import replace_file, storage_errors
from posttrain.types import Example, Model, Rollout, Tokenizer
from posttrain.untrusted import harmless_json

Observe = Callable[[str], object]
RECIPE, RESULTS = "changes.yaml", "diff.json"
SIDES = ("base", "post")
LEAST_KL = 1e-9  # nats a token below which two models predict the same but for rounding


@dataclass
class Comparison:
    """A comparison in progress; ``report`` becomes ``diff.json``. ``recipe`` has task, template and site."""

    recipe: DiffRecipe
    site: str
    sources: dict[str, ModelSource]
    task: Task
    grader: Grader
    folder: Path
    observe: Observe
    allow_large: bool = False
    report: dict[str, Any] = field(default_factory=dict)
    subjects: dict[str, Subject] = field(default_factory=dict)

    @property
    def changes(self) -> ChangesSection:
        return self.recipe.changes

    def subject(self, name: str) -> Subject:
        """Load a model (``base``, ``post``) ready to answer; both have the template and grader of the post model."""
        if name not in self.subjects:
            model = open_model(self.sources[name], self.recipe.template)
            own = (model.engine, model.tokenizer, self.grader, model.context_tokens, model.model)
            self.subjects[name] = Subject(*own, self.changes.max_tokens or self.sources["post"].max_tokens)
        return self.subjects[name]

    @contextmanager
    def timed(self, part: str, line: str) -> Iterator[None]:
        self.observe(line)
        started = time.monotonic()
        with phase(part):
            yield
        self.report.setdefault("seconds", {})[part] = round(time.monotonic() - started, 1)


def prepare(
    recipe: DiffRecipe,
    base: ModelSource,
    post: ModelSource,
    folder: Path,
    observe: Observe = lambda line: None,
    *,
    allow_large: bool = False,
) -> Comparison:
    """Fill in the task, template and site that a recipe leaves to the post run; nothing is written yet.

    Raises:
        UsageError: no such model, a reward model, or a layer that a model does not have.
        RunConflict: the folder holds something else, or another comparison.
    """
    sources = {"base": base, "post": post}
    layers = 0
    for side, source in sources.items():
        try:
            layers = read_config(source.path).get_text_config().num_hidden_layers
        except UsageError as error:
            raise UsageError(f"{side}: {error}") from None
        source.refuse_scorer()
    task = choose_task(recipe.task, post.name, post.recipe)
    site = recipe.changes.site or f"resid.{max(1, layers // 2)}"
    for source in sources.values():
        check_layers(source.path, [site])
    template = complete_template(recipe.template, post) or post.template
    changes = recipe.changes.model_copy(update={"site": site})
    recipe = recipe.model_copy(update={"task": task, "template": template, "changes": changes})
    _refuse_another(folder, recipe)
    grader = grader_for(post, template)
    return Comparison(recipe, site, sources, build_task(task, "task"), grader, folder, observe, allow_large)


def _refuse_another(folder: Path, recipe: DiffRecipe) -> None:
    path = folder / RECIPE
    if path.is_file():
        stored, now = flatten(yaml.safe_load(path.read_text(encoding="utf-8"))), flatten(recipe.dump())
        changed = sorted(key for key in {**stored, **now} if stored.get(key) != now.get(key))
        if changed:
            shown = ", ".join(f"{key} ({stored.get(key)!r} there, {now.get(key)!r} now)" for key in changed[:3])
            raise RunConflict(
                f"{folder}: this comparison was made by another recipe; it differs in {shown}. Nothing was changed; "
                "choose another name with --run NAME"
            )
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunConflict(f"{folder} holds something else. Nothing was changed; choose another name with --run NAME")


def compare(work: Comparison, about: Mapping[str, object], started: float) -> dict[str, object]:
    """Do all that is not there yet, write ``diff.json`` with ``about`` in front, and return its content."""
    changes, report = work.changes, work.report
    answered, tested = split_examples(work.task, changes)
    with work.timed("answers", f"{len(answered)} prompts are answered {changes.samples} times by {changes.by}"):
        purpose = f"what changed: answers of {changes.by}"
        answers = work.subject(changes.by).answer(answered, changes.samples, changes.temperature, changes.seed, purpose)
    documents = Documents(
        [[*rollout.prompt_ids, *rollout.completion.ids] for rollout in answers],
        [len(rollout.prompt_ids) for rollout in answers],
        {"source": "answers", "task": work.task.name, "split": work.task.split, "by": changes.by},
    )
    with work.timed("recording", f"both models read {documents.num_tokens:,} tokens"):
        store = _record(work, documents)
    rows = StoreRows(store, work.site, "base")
    start = first_held_out(rows, max(1, round(store.num_rows * changes.held_out)), 2)
    with work.timed("dictionaries", "dictionaries of the base are trained"):
        seeds = range(changes.seeds)
        saes = [_fitted(work, f"seed-{seed}", rows, start, changes.seed + seed) for seed in seeds]
        frozen = _fitted(work, "frozen", rows, start, changes.seed, frozen=True)
    with work.timed("changes", "changes of every feature are measured"):
        *seen, of_frozen = (
            see_changes(
                store,
                work.site,
                sae,
                held_out_start=start,
                seed=changes.seed + seed,
                min_documents=changes.min_documents,
                min_change=changes.min_change,
            )
            for sae, seed in zip([*saes, frozen], [*seeds, 0], strict=True)
        )
        _describe_changes(work, store, saes, seen)
        report["frozen"] = describe_seen(of_frozen, frozen)
    with work.timed("divergence", "KL is measured token by token, and patched"):
        _diverge(work, store, documents, saes, seen, (frozen, of_frozen))
    if changes.causal is not None:
        with work.timed("causal", "causal test: the models answer with features taken away or amplified"):
            subjects, limit = {name: work.subject(name) for name in SIDES}, store.limit(work.site, "post")
            report["causal"] = measure_causes(subjects, work.site, tested, changes, saes, seen, limit, work.observe)
    report["documents"] = describe_answers(answers, documents, changes.by)
    report["seconds"]["all"] = round(time.monotonic() - started, 1)
    content = {**about, **report}
    text = harmless_json(json.dumps(content, indent=1, ensure_ascii=False))
    replace_file(work.folder / RESULTS, text.encode() + b"\n")
    return content


def split_examples(task: Task, changes: ChangesSection) -> tuple[list[Example], list[Example]]:
    """Return (those whose answers are recorded, those of the causal test): different ones, drawn by the seed."""
    tested = changes.causal.prompts if changes.causal is not None else 0
    wanted, size = changes.prompts + tested, len(task.examples)
    if wanted > size:
        raise UsageError(
            f"changes.prompts {changes.prompts} and changes.causal.prompts {tested} are {wanted}, but {task.name}/"
            f"{task.split} has {size} examples; set them lower"
        )
    order = permutation(changes.seed, "what changed: examples", 0, size)[:wanted]
    examples = [task.examples[int(i)] for i in order]
    return examples[: changes.prompts], examples[changes.prompts :]


def describe_answers(rollouts: list[Rollout], documents: Documents, by: str) -> dict[str, object]:
    """Count the answers, and measure their length and reward."""
    rewards, answer_tokens = [r.reward for r in rollouts], documents.num_tokens - sum(documents.prompt_lengths)
    return {
        "documents": len(rollouts),
        "tokens": documents.num_tokens,
        "answer_tokens": answer_tokens,
        by: {
            "answers": len(rollouts),
            "reward": sum(rewards) / len(rollouts),
            "reward_error": standard_error(rewards),
            "accuracy": sum(r.parts.get("correct", 0.0) == 1.0 for r in rollouts) / len(rollouts),
            "tokens": answer_tokens / len(rollouts),
        },
    }


def _record(work: Comparison, documents: Documents) -> ActivationStore:
    changes = work.changes

    def begin(_: str) -> None:
        with storage_errors("the comparison", work.folder):
            work.folder.mkdir(parents=True, exist_ok=True)
        replace_file(work.folder / RECIPE, work.recipe.to_yaml().encode())

    store = record(
        [work.sources[side].section() for side in SIDES],
        documents,
        [work.site],
        work.folder / "activations",
        dtype=changes.dtype,
        outliers=changes.outliers,
        allow_large=work.allow_large,
        fewer="changes.prompts",
        ready=begin,
    )
    index = store.index
    work.report["activations"] = {
        "site": work.site,
        "layer_convention": index.layer_convention,
        "rows": index.rows,
        "dropped": index.dropped,
        "norms": {side: median_norm(StoreRows(store, work.site, side)) for side in SIDES},
        "weights": {source.name: source.weights_hash for source in index.sources},
    }
    return store


def _fitted(
    work: Comparison, name: str, rows: StoreRows, start: int, seed: int, *, frozen: bool = False
) -> SparseAutoencoder:
    """Return the dictionary of that name in the folder, trained if it is not there."""
    place, component, settings = work.folder / "dictionaries" / name, work.changes.dictionary, work.changes.train
    device = device_of(work.subject("post").model)
    if not (place / CONFIG).is_file():
        work.observe(f"dictionary {name}: {component.num_features(rows.d)} features, {settings.steps} steps")
        sae = fit_sae(rows, start, component, settings, seed=seed, frozen_decoder=frozen, device=device)
        base = rows.store.index.sources[0].model_dump()
        info = {"model_name": base["model"], "models": [base], "site": work.site, "source": "base", "seed": seed}
        save_sae(sae, place, info)
    return load_sae(place).to(device)


def _describe_changes(
    work: Comparison, store: ActivationStore, saes: list[SparseAutoencoder], seen: list[Seen]
) -> None:
    """Report changes by every dictionary, how the seeds agree, the features of the first, and the mean difference."""
    report, post = work.report, work.subject("post")
    report["dictionaries"] = [describe_seen(view, own) for view, own in zip(seen, saes, strict=True)]
    report["overlap"] = describe_overlap(saes, seen)
    report["features"] = describe_features(
        store, work.site, saes[0], seen[0], post.model, post.tokenizer, work.changes.show
    )
    names, means = mean_differences(store, work.site)
    tokens = strongest_tokens(post.model, means, post.tokenizer)
    norm = report["activations"]["norms"]["base"]
    report["lens"] = [
        {"where": name, "norm": float(mean.norm()) / norm, **entry}
        for name, mean, entry in zip(names, means, tokens, strict=True)
    ]


def _diverge(
    work: Comparison,
    store: ActivationStore,
    documents: Documents,
    saes: list[SparseAutoencoder],
    seen: list[Seen],
    frozen: tuple[SparseAutoencoder, Seen],
) -> None:
    changes, base, post = work.changes, work.subject("base"), work.subject("post")
    ids, lengths, shown = documents.ids, documents.prompt_lengths, changes.kl_documents
    kl = locate_divergence(base.model, post.model, ids[:shown], lengths[:shown], post.tokenizer)
    work.report["divergence"] = kl
    if changes.patching is None:
        return
    if kl["per_token"] < LEAST_KL:
        work.observe("both models predict the same, so there is nothing that patching could recover")
        return
    count = min(changes.patching.documents, len(ids))
    limit = min(store.limit(work.site, source) for source in SIDES)
    patcher = Patcher(base.model, post.model, work.site, ids[-count:], lengths[-count:], limit)
    ranked = frozen[1].changes.ranking().tolist()
    work.report["patching"] = patch_curves(patcher, changes, saes, seen, (frozen[0], ranked), work.observe)


# Features as plain data.

LEAST_COSINE = 0.7  # partners that are less similar do not count
MAX_POINTS = 4096  # features of the scatter
WINDOW = 14  # tokens shown on either side


def number(value: float) -> float | None:
    """Return a number rounded to 5 significant digits; None for one that is not finite."""
    return rounded(value) if math.isfinite(value) else None


def numbers(values: Tensor) -> list[float | None]:
    """Return the first ``MAX_POINTS`` of a vector as plain numbers."""
    return [number(value) for value in values[:MAX_POINTS].double().tolist()]


def count_changes(changes: Changes) -> dict[str, int]:
    """Count the features that were tested, that changed significantly, and that count as changed (rose, fell)."""
    rose = int((changes.changed & (changes.change[1] > 0)).sum())
    return {
        "features": len(changes.tested),
        "tested": int(changes.tested.sum()),
        "significant": int(changes.significant.sum()),
        "changed": changes.num_changed,
        "rose": rose,
        "fell": changes.num_changed - rose,
    }


def describe_seen(seen: Seen, sae: SparseAutoencoder) -> dict[str, object]:
    """Describe one dictionary: its quality, the counts, the null tests, and every feature's numbers."""
    changes = seen.changes
    ratio = changes.ratio[0][changes.tested]
    within = float(((ratio < 1.2) & (ratio > 1 / 1.2)).double().mean())  # nan where none is tested
    return {
        "features": sae.features,
        "kind": sae.kind,
        "quality": seen.quality,
        "counts": count_changes(changes),
        "rate_within_a_fifth": number(within),
        "null": {name: count_changes(null) for name, null in seen.nulls.items()},
        "scaling": {"energy": numbers(seen.energy), "amplification": numbers(seen.amplification)},
        "rates": {
            "base": numbers(changes.base[0]),
            "post": numbers(changes.post[0]),
            "mean_base": numbers(changes.base[1]),
            "mean_post": numbers(changes.post[1]),
            "changed": changes.changed[:MAX_POINTS].tolist(),
            "tested": changes.tested[:MAX_POINTS].tolist(),
        },
    }


def describe_features(
    store: ActivationStore,
    site: str,
    sae: SparseAutoencoder,
    seen: Seen,
    model: Model,
    tokenizer: Tokenizer,
    count: int,
) -> list[dict[str, object]]:
    """Describe the most changed features: with intervals, what they promote, and where they changed."""
    changes = seen.changes
    chosen = changes.ranking()[: min(count, max(1, changes.num_changed))].tolist()
    lens = strongest_tokens(model, sae.W_dec[chosen], tokenizer, 6)
    contexts = feature_contexts(store, site, sae, chosen, tokenizer)
    entries = []
    for index, feature in enumerate(chosen):
        entry: dict[str, object] = {"feature": feature, "documents": int(changes.documents[feature])}
        for row, name in enumerate(MEASURES):
            for key in ("base", "post", "change", "error", "ratio", "low", "high", "adjusted"):
                entry[f"{name}_{key}"] = number(float(getattr(changes, key)[row, feature]))
        entry["amplification"] = number(float(seen.amplification[feature]))
        entries.append(entry | {"changed": bool(changes.changed[feature]), "promotes": lens[index], **contexts[index]})
    return entries


@torch.no_grad()
def mean_differences(store: ActivationStore, site: str, places: int = 4) -> tuple[list[str], Tensor]:
    """Return (names, [n, d]): the mean of post − base over prompts, answers, and single places of the answers."""
    names = ["prompts", "answers", *(f"answers, token {i + 1}" for i in range(places))]
    totals = torch.zeros((len(names), store.width(site)), dtype=torch.float64)
    counts = torch.zeros(len(names), dtype=torch.float64)
    for rows in torch.arange(store.num_rows).split(8192):
        delta = store.gather(rows, site, "post").double() - store.gather(rows, site, "base").double()
        place = store.positions(rows) - store.prompt_lengths(store.documents(rows))
        for index, mask in enumerate([place < 0, place >= 0, *(place == i for i in range(places))]):
            totals[index] += delta[mask].sum(0)
            counts[index] += int(mask.sum())
    kept = [i for i in range(len(names)) if counts[i] > 0]
    return [names[i] for i in kept], (totals[kept] / counts[kept, None]).float()


@torch.no_grad()
def feature_contexts(
    store: ActivationStore,
    site: str,
    sae: SparseAutoencoder,
    features: Sequence[int],
    tokenizer: Tokenizer,
    *,
    count: int = 4,
) -> list[dict[str, Any]]:
    """Return for each feature ``tokens`` [text, share of the change, mean change] and ``contexts`` of most change.

    One for each beginning of a text: ``tokens`` as texts, its activation at each in ``base`` and ``post``, and ``at``,
    the place of the change.
    """
    chosen = torch.tensor(list(features), dtype=torch.long, device=sae.b_dec.device)
    every = torch.arange(store.num_rows)
    documents, tokens = store.documents(every), store.tokens(every)
    sides = []
    for side in ("base", "post"):
        parts = (store.gather(rows, site, side).float().to(chosen.device) for rows in every.split(8192))
        sides.append(torch.cat([sae.encode(x)[:, chosen].cpu() for x in parts]))
    values = torch.stack(sides)  # [2, n, S]
    entries = []
    for column in range(len(features)):
        delta = values[1, :, column] - values[0, :, column]
        sign = 1.0 if float(delta.sum()) >= 0 else -1.0
        entry: dict[str, list[object]] = {"tokens": _where_changed(delta, tokens, tokenizer), "contexts": []}
        seen: set[tuple[str, ...]] = set()  # answers to one prompt begin alike
        for row in (delta * sign).topk(min(len(delta), 50 * count)).indices.tolist():
            context = _context(store, documents, values[:, :, column], row, tokenizer)
            texts = tuple(context["tokens"][: context["at"] + 1])
            if texts not in seen and len(seen) < count:
                seen.add(texts)
                entry["contexts"].append(context)
        entries.append(entry)
    return entries


def _where_changed(delta: Tensor, tokens: Tensor, tokenizer: Tokenizer) -> list[object]:
    """Return the five tokens that carry most of a feature's change: [text, share of Σ|Δ|, mean Δ there]."""
    counts = torch.bincount(tokens)
    signed = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, tokens, delta.double())
    amount = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, tokens, delta.double().abs())
    best = [i for i in amount.topk(min(5, len(counts))).indices.tolist() if amount[i] > 0]
    total = float(amount.sum())
    return [[show_token(tokenizer, i), float(amount[i]) / total, float(signed[i] / counts[i])] for i in best]


def _context(
    store: ActivationStore, documents: Tensor, values: Tensor, row: int, tokenizer: Tokenizer
) -> dict[str, Any]:
    document, position = int(documents[row]), int(store.positions(torch.tensor([row]))[0])
    ids = store.document_tokens(document)
    start, end = max(0, position - WINDOW), min(len(ids), position + WINDOW + 1)
    near = torch.arange(max(0, row - WINDOW), min(len(documents), row + WINDOW + 1))
    near = near[documents[near] == document]
    places = store.positions(near) - start
    near, places = near[(places >= 0) & (places < end - start)], places[(places >= 0) & (places < end - start)]
    shown = torch.zeros((2, end - start))
    shown[:, places] = values[:, near]
    base, post = ([round(value, 3) for value in side] for side in shown.tolist())
    texts = show_tokens(tokenizer, ids[start:end])
    return {"document": document, "tokens": texts, "at": position - start, "base": base, "post": post}


def overlap(
    directions: tuple[Tensor, Tensor], chosen: tuple[Tensor, Tensor], signs: tuple[Tensor, Tensor]
) -> dict[str, float]:
    """Measure how far two dictionaries' changed features are the same ones.

    ``share``: of the first's, those whose most similar feature (by decoder cosine) of the second is one of the second's
    and went the same way. ``by_chance``: that share of all features of the first. ``cosine``: the mean similarity of
    the first's changed features to their partners; ``count`` of them. Of both are given: decoder rows [F, d], the
    changed features, and ``signs`` [F], above 0 where the mean activation rose.
    """
    unit = [x.double() / x.double().norm(dim=1, keepdim=True).clamp_min(1e-12) for x in directions]
    cosine, partner = (x.cpu() for x in (unit[0] @ unit[1].T).max(dim=1))
    is_chosen = torch.zeros(len(unit[1]), dtype=torch.bool)
    is_chosen[chosen[1]] = True
    same = is_chosen[partner] & (cosine >= LEAST_COSINE) & ((signs[0] > 0) == (signs[1] > 0)[partner])
    share, similar = (x[chosen[0]].double().mean() for x in (same, cosine))  # of no features: nan
    found = {"share": share, "by_chance": same.double().mean(), "cosine": similar, "count": len(chosen[0])}
    return {name: float(value) for name, value in found.items()}


def describe_overlap(saes: Sequence[SparseAutoencoder], seen: Sequence[Seen]) -> dict[str, object]:
    """Describe how far the changed features of every two seeds are the same."""
    pairs = []
    for a, b in permutations(range(len(saes)), 2):
        changes = (seen[a].changes, seen[b].changes)
        shared = overlap(
            (saes[a].W_dec, saes[b].W_dec),
            (changes[0].changed.nonzero()[:, 0], changes[1].changed.nonzero()[:, 0]),
            (changes[0].change[1], changes[1].change[1]),
        )
        found = {name: number(value) for name, value in shared.items()}
        pairs.append({"first": a, "second": b, **found, "count": int(shared["count"])})
    shares = [pair["share"] for pair in pairs if pair["share"] is not None]
    return {"pairs": pairs, "share": sum(shares) / len(shares) if shares else None, "least_cosine": LEAST_COSINE}
