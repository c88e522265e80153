"""Causal tests: generate answers while modifying selected features at one site.

Three tests for a feature set j:

    given     base answers, with features moved to the post model's values:
              x + α·Σⱼ (fⱼ(x_post) − fⱼ(x))·dⱼ, where the post model reads along
    returned  post answers, with features moved to the base model's values
    scaled    post answers with gⱼ·fⱼ·dⱼ instead of fⱼ·dⱼ: 0 removes a feature, 2 doubles it

The reconstruction error is unchanged, so α = 0 or g = 1 reproduces the original model. As a control, each test also
modifies random features with similar rate and strength: any damage to a model lowers scores, so only the difference
counts as evidence.

Both models process the generated text with separate key-value caches; at every position the source computes its
activation before the writer. Interventions are batched and decoded together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, linear_regression
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from posttrain.data.render import decode_response, encode_prompt, stop_ids
from posttrain.data.render.encoding import decode_ids
from posttrain.evaluation.statistics import summarize_seeds
from posttrain.interpret.activations.sites import device_of, read_sites, replaced
from posttrain.interpret.differences.changes import DictionaryChanges, random_features
from posttrain.interpret.differences.changes_recipe import CausalSection, ChangesSection
from posttrain.interpret.differences.divergence import feature_patch
from posttrain.interpret.saes.sae import SparseAutoencoder
from posttrain.sampling.base import num_tokens_of
from posttrain.sampling.rollout import Attempt, RolloutRequest, Sampler, collect
from posttrain.types import Completion, Example, Model, Rollout

# Maps writer and source activations on the same tokens to [rows, d] added to the writer's.
Added = Callable[[Tensor, Tensor], Tensor]
COMPACT_EVERY = 4  # tokens between removals of finished rows
TESTS = {"given": ("base", "post"), "returned": ("post", "base"), "scaled": ("post", None)}  # writer, source
# Factor for the complete intervention: features fully moved, or removed.
WHOLE = {"given": 1.0, "returned": 1.0, "scaled": 0.0}


@dataclass
class _Rows:
    """Rows being decoded: one per intervention and prompt, in this order; finished rows are removed."""

    intervention: Tensor  # int64 [R]
    number: Tensor  # int64 [R], original row index
    tokens: Tensor  # int64 [R, T], next input
    mask: Tensor  # int64 [R, so far], 0 at left padding
    ended: Tensor  # bool [R]
    caches: tuple[Cache, Cache] = field(default_factory=lambda: (DynamicCache(), DynamicCache()))  # writer, source

    def keep(self, rows: Tensor) -> None:
        self.intervention = self.intervention[rows]
        self.number = self.number[rows]
        self.tokens = self.tokens[rows]
        self.mask = self.mask[rows]
        self.ended = self.ended[rows]
        for cache in self.caches:
            cache.batch_select_indices(rows)


@torch.no_grad()
def write_with(
    writer: Model,
    source: Model | None,
    site: str,
    prompts: Sequence[Sequence[int]],
    interventions: Sequence[Added],
    *,
    max_tokens: int,
    stop_ids: frozenset[int],
    num_tokens: int | None = None,
) -> list[list[list[int]]]:
    """Generate greedy completions for every prompt and intervention: [intervention][prompt] -> ids.

    Interventions receive site activations from ``writer`` and ``source`` (None: the writer's) on the same tokens.
    ``stop_ids`` end a completion and are included; ids from ``num_tokens`` on are never generated.
    """
    rows = _start(prompts, len(interventions), device_of(writer))
    num_rows = len(interventions) * len(prompts)
    written: list[list[int]] = [[] for _ in range(num_rows)]
    stops = torch.tensor(sorted(stop_ids), dtype=torch.long, device=rows.tokens.device)
    for step in range(max_tokens):
        logits = _advance(writer, source, site, rows, interventions)
        chosen = logits[:, :num_tokens].argmax(-1)
        for number, token, ended in zip(rows.number.tolist(), chosen.tolist(), rows.ended.tolist(), strict=True):
            if not ended:
                written[number].append(token)
        rows.ended = rows.ended | torch.isin(chosen, stops)
        rows.tokens = chosen[:, None]
        rows.mask = torch.cat([rows.mask, torch.ones_like(rows.tokens)], dim=1)
        if bool(rows.ended.all()):
            break
        if step % COMPACT_EVERY == 0 and bool(rows.ended.any()):
            rows.keep((~rows.ended).nonzero()[:, 0])
    size = len(prompts)
    return [written[start : start + size] for start in range(0, len(written), size)]


def _start(prompts: Sequence[Sequence[int]], count: int, device: torch.device) -> _Rows:
    width = max(map(len, prompts))
    padded = []
    masks = []
    for ids in prompts:
        padding = [0] * (width - len(ids))
        padded.append(padding + list(ids))
        masks.append(padding + [1] * len(ids))
    num_rows = count * len(prompts)
    return _Rows(
        torch.arange(count, device=device).repeat_interleave(len(prompts)),
        torch.arange(num_rows, device=device),
        torch.tensor(padded, device=device).repeat(count, 1),
        torch.tensor(masks, device=device).repeat(count, 1),
        torch.zeros(num_rows, dtype=torch.bool, device=device),
    )


def _advance(writer: Model, source: Model | None, site: str, rows: _Rows, interventions: Sequence[Added]) -> Tensor:
    """Run ``rows.tokens`` through both models; returns next-token logits [R, V]."""
    width = rows.tokens.shape[1]
    positions = (rows.mask.cumsum(1) - 1).clamp_min(0)[:, -width:]
    real = rows.mask[:, -width:].bool()
    read = {"input_ids": rows.tokens, "attention_mask": rows.mask, "position_ids": positions, "use_cache": True}
    other = None
    if source is not None:
        other = _read_source(source, site, read, rows.caches[1], len(interventions))

    def change(x: Tensor) -> Tensor:
        added = torch.zeros_like(x, dtype=torch.float32)
        for number, intervention in enumerate(interventions):
            where = real & (rows.intervention == number)[:, None]
            if bool(where.any()):
                own = x[where].float()
                if other is None:
                    added[where] = intervention(own, own)
                else:
                    added[where] = intervention(own, other[where])
        return (x.float() + added).to(x.dtype)

    with replaced(writer, site, change):
        output = writer(**read, past_key_values=rows.caches[0], logits_to_keep=1)
    logits: Tensor = output.logits[:, -1]
    return logits


def _read_source(source: Model, site: str, read: dict[str, Any], cache: Cache, count: int) -> Tensor:
    """Compute source activations [R, tokens, d], float32; prompts repeat across interventions and run only once."""
    if read["input_ids"].shape != read["attention_mask"].shape:
        (seen,) = read_sites(source, [site], **read, past_key_values=cache)
        return seen.float()
    size = len(read["input_ids"]) // count
    first = {}
    for name, value in read.items():
        if isinstance(value, Tensor):
            first[name] = value[:size]
        else:
            first[name] = value
    (seen,) = read_sites(source, [site], **first, past_key_values=cache)
    cache.batch_select_indices(torch.arange(size, device=seen.device).repeat(count))
    return seen.float().repeat(count, 1, 1)


@dataclass(frozen=True)
class Subject(Sampler):
    """A sampler exposing its model for modification during generation."""

    model: Model
    max_tokens: int

    def prompts(self, examples: Sequence[Example]) -> list[list[int]]:
        """Encode the examples' prompts."""
        template = self.grader.template
        return [encode_prompt(self.tokenizer, template, each.messages, each.variables) for each in examples]

    def answer(
        self, examples: Sequence[Example], samples: int, temperature: float, seed: int, purpose: str
    ) -> list[Rollout]:
        """Sample and grade answers, grouped by example; deterministic given model, seed and purpose."""
        sampling = self.sampling(self.max_tokens, temperature)
        request = RolloutRequest(examples, self.prompts(examples), sampling, (seed, purpose, 0), samples)
        groups, _ = collect(self, request)
        return [rollout for group in groups for rollout in group]


def move_features(sae: SparseAutoencoder, features: Sequence[int], factor: float, limit: float = float("inf")) -> Added:
    """Build the intervention α·Σⱼ (fⱼ(source) − fⱼ(x))·dⱼ; skips activations with a norm above ``limit``."""
    patch = feature_patch(sae, features)

    def added(x: Tensor, source: Tensor) -> Tensor:
        is_within = x.norm(dim=-1, keepdim=True) <= limit
        is_source_within = source.norm(dim=-1, keepdim=True) <= limit
        return factor * patch(x, source) * (is_within & is_source_within)

    return added


def scale_features(
    sae: SparseAutoencoder, features: Sequence[int], factor: float, limit: float = float("inf")
) -> Added:
    """Build the intervention Σⱼ (g − 1)·fⱼ(x)·dⱼ; skips activations with a norm above ``limit``."""
    chosen = torch.tensor(list(features), dtype=torch.long, device=sae.b_dec.device)

    def added(x: Tensor, _: Tensor) -> Tensor:
        features = sae.encode(x, chosen) * (factor - 1.0)
        moved = features @ sae.W_dec[chosen]
        is_within = x.norm(dim=-1, keepdim=True) <= limit
        return moved * is_within

    return added


class CausalTrial:
    """A writer, an optional source, and fixed examples for measuring greedy answers."""

    def __init__(
        self,
        writer: Subject,
        source: Subject | None,
        site: str,
        examples: Sequence[Example],
        measure: Literal["reward", "accuracy"],
    ) -> None:
        self.writer = writer
        self.source = source
        self.site = site
        self.examples = examples
        self.measure = measure
        self.prompts = writer.prompts(examples)

    def outcomes(self, interventions: Sequence[Added]) -> list[float]:
        """Measure mean reward, or accuracy, per intervention."""
        source = None
        if self.source is not None:
            source = self.source.model
        tokenizer = self.writer.tokenizer
        written = write_with(
            self.writer.model,
            source,
            self.site,
            self.prompts,
            interventions,
            max_tokens=self.writer.max_tokens,
            stop_ids=stop_ids(tokenizer, self.writer.grader.template),
            num_tokens=num_tokens_of(tokenizer),
        )
        means = []
        for completions in written:
            grades = self.writer.grader.grade(self._attempts(completions))
            if self.measure == "reward":
                values = [grade.reward for grade in grades]
            else:
                values = [float(grade.parts.get("correct", 0.0) == 1.0) for grade in grades]
            means.append(sum(values) / len(values))
        return means

    def _attempts(self, completions: Sequence[Sequence[int]]) -> list[Attempt]:
        """Convert completions to attempts for grading."""
        tokenizer = self.writer.tokenizer
        template = self.writer.grader.template
        stops = stop_ids(tokenizer, template)
        attempts = []
        for example, prompt, ids in zip(self.examples, self.prompts, completions, strict=True):
            text = decode_response(tokenizer, template, ids, prompt)
            finish: Literal["stop", "length"] = "length"
            if ids and ids[-1] in stops:
                finish = "stop"
            completion = Completion(tuple(ids), (), finish)
            attempts.append(Attempt(example, decode_ids(tokenizer, prompt), text, completion))
        return attempts


def try_factors(
    trial: CausalTrial,
    intervene: Callable[[Sequence[int], float], Added],
    ranked: Sequence[int],
    matched: Sequence[Sequence[int]],
    plan: Sequence[tuple[int, float]],
) -> list[dict[str, Any]]:
    """Measure each (number of features, factor) in the plan for one dictionary; all are decoded together.

    Per point: ``features`` (count), ``dose`` (factor), outcomes for ``changed`` features (``ranked``, most changed
    first) and for each ``random`` set (entry i is rate-``matched`` to ``ranked[i]``), and ``difference``: changed
    minus average random outcome.
    """
    sets = (ranked, *matched)
    interventions = []
    for count, factor in plan:
        for features in sets:
            interventions.append(intervene(features[:count], factor))
    outcomes = trial.outcomes(interventions)
    points = []
    for index, (count, factor) in enumerate(plan):
        start = index * len(sets)
        changed, *others = outcomes[start : start + len(sets)]
        points.append(
            {
                "features": min(count, len(ranked)),
                "dose": factor,
                "changed": changed,
                "random": others,
                "difference": changed - sum(others) / len(others),
            }
        )
    return points


def judge_differences(differences: Sequence[float]) -> dict[str, object]:
    """Average differences over seeds, with a 95 % Student-t interval, and check if it excludes 0."""
    summary = summarize_seeds(differences)
    assert summary is not None, "at least one seed"
    separates = None
    if summary.half_width is not None:
        separates = abs(summary.mean) > summary.half_width
    return {
        "mean": summary.mean,
        "half_width": summary.half_width,
        "seeds": summary.n,
        "values": list(differences),
        "separates": separates,
    }


def measure_causes(
    subjects: Mapping[str, Subject],
    site: str,
    examples: Sequence[Example],
    changes: ChangesSection,
    saes: Sequence[SparseAutoencoder],
    seen: Sequence[DictionaryChanges],
    limit: float,
    observe: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """Measure base and post unmodified, with full activations swapped, and with changed features moved or scaled.

    Gives points (``try_factors``) per test and seed; ``verdicts``: differences over seeds, by test and point
    (``given 16 at 1``), plus slopes over factors.
    """
    settings = changes.causal
    assert settings is not None
    trials = {}
    for test, (writer, source) in TESTS.items():
        reads_along = None
        if source is not None:
            reads_along = subjects[source]
        trials[test] = CausalTrial(subjects[writer], reads_along, site, examples, settings.measure)
    both: list[Added] = [lambda x, _: torch.zeros_like(x), lambda x, source: source - x]
    unchanged = {}
    everything = {}
    for writer, test in (("base", "given"), ("post", "returned")):
        unchanged[writer], everything[writer] = trials[test].outcomes(both)
    points: dict[str, list[list[dict[str, Any]]]] = {test: [] for test in TESTS}
    most = max(*settings.counts, settings.features)
    for seed, (sae, view) in enumerate(zip(saes, seen, strict=True)):
        ranked = view.changes.ranking()[:most].tolist()
        matched = []
        for draw in range(1, 1 + settings.draws):
            matched.append(random_features(view.changes, ranked, changes.seed + seed, draw))
        for test in TESTS:
            if test == "scaled":
                intervene = partial(scale_features, sae, limit=limit)
            else:
                intervene = partial(move_features, sae, limit=limit)
            plan = plan_of(test, settings)
            points[test].append(try_factors(trials[test], intervene, ranked, matched, plan))
        count = min(settings.features, len(ranked))
        point = next(p for p in points["given"][-1] if p["dose"] == 1.0 and p["features"] == count)
        observe(
            f"causal test, seed {seed}: base {settings.measure} {unchanged['base']:.3f}; with "
            f"{point['features']} changed features {point['changed']:.3f}, random features {fmean(point['random']):.3f}"
        )
    return {
        "measure": settings.measure,
        "prompts": len(examples),
        "features": settings.features,
        "unchanged": unchanged,
        "everything": everything,
        **points,
        "verdicts": _verdicts(points, settings.features),
    }


def plan_of(test: str, settings: CausalSection) -> list[tuple[int, float]]:
    """List a test's (features, factor) points: every count at the complete factor, and ``features`` at every factor."""
    whole = WHOLE[test]
    points = {(count, whole) for count in settings.counts}
    points.add((settings.features, whole))
    if test == "given":
        factors = settings.steering_factors
    elif test == "scaled":
        factors = settings.factors
    else:
        factors = []
    points.update((settings.features, factor) for factor in factors)
    return sorted(points)


def _verdicts(points: Mapping[str, list[list[dict[str, Any]]]], features: int) -> dict[str, dict[str, object]]:
    """Judge each point's difference over seeds, and the slope over factors at ``features`` features."""
    verdicts = {}
    for test, of_seeds in points.items():
        first = of_seeds[0]
        for index, point in enumerate(first):
            differences = [of_seed[index]["difference"] for of_seed in of_seeds]
            verdicts[f"{test} {point['features']} at {point['dose']:g}"] = judge_differences(differences)
        same = [i for i, point in enumerate(first) if point["features"] == features]
        if len(same) > 1:
            doses = [first[i]["dose"] for i in same]
            slopes = []
            for of_seed in of_seeds:
                differences = [of_seed[i]["difference"] for i in same]
                slopes.append(linear_regression(doses, differences).slope)
            verdicts[f"{test}, slope"] = judge_differences(slopes)
    return verdicts
