"""Do the changed features do anything? A model answers while something is done to some of its features.

Three treatments, at one site, of the features j of some set:

    given     the base answers, and its features are moved to where the post model has them:
              x + α·Σⱼ (fⱼ(x_post) − fⱼ(x))·dⱼ, where the post model reads along
    returned  the post model answers, and its features are moved to where the base has them
    scaled    the post model answers with gⱼ·fⱼ·dⱼ in place of fⱼ·dⱼ: 0 takes a feature away, 2 doubles it

What the dictionary does not reconstruct stays in place, so a dose α = 0 or g = 1 is the model itself. The same is done
to random features that fire about as often and as strongly; only the difference between the two tells of the features,
for any damage to a model costs it something.

Both models read the text that one of them writes, each with its own keys and values; at every token the donor computes
its activation at the site first, and what is added to the writer's own may depend on both. Many treatments are decoded
side by side, as rows of one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import linear_regression
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from posttrain.engines.base import num_tokens_of
from posttrain.engines.rollout import Attempt, RolloutRequest, Sampler, collect
from posttrain.evals.statistics import summarize_seeds
from posttrain.interpret.activations.sites import read_sites, replaced
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.differences.changes import Seen, random_features
from posttrain.interpret.differences.divergence import feature_patch
from posttrain.interpret.differences.recipe import CausalSection, ChangesSection
from posttrain.render import decode_response, encode_prompt, stop_ids
from posttrain.types import Completion, Example, Rollout

# [rows, d] to be added to the writer's activations, given the writer's and the donor's at the same tokens.
Added = Callable[[Tensor, Tensor], Tensor]
COMPACT_EVERY = 4  # tokens between looks at which rows have ended


@dataclass
class _Rows:
    """The batch being decoded: a row for each treatment and prompt, in that order; ended rows leave it."""

    treatment: Tensor  # int64 [R]
    number: Tensor  # int64 [R], the place of the row among all
    tokens: Tensor  # int64 [R, T] to be read next
    mask: Tensor  # int64 [R, so far], 0 where a prompt was padded on the left
    ended: Tensor  # bool [R]
    caches: tuple[Cache, Cache] = field(default_factory=lambda: (DynamicCache(), DynamicCache()))  # writer, donor

    def keep(self, rows: Tensor) -> None:
        self.treatment, self.number, self.tokens = self.treatment[rows], self.number[rows], self.tokens[rows]
        self.mask, self.ended = self.mask[rows], self.ended[rows]
        for cache in self.caches:
            cache.batch_select_indices(rows)

    def slices(self, num_treatments: int) -> list[slice]:
        """Where the rows of each treatment stand."""
        ends = torch.bincount(self.treatment, minlength=num_treatments).cumsum(0).tolist()
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


@torch.no_grad()
def write_with(
    writer: Any,
    donor: Any | None,
    site: str,
    prompts: Sequence[Sequence[int]],
    treatments: Sequence[Added],
    *,
    max_tokens: int,
    stop_ids: frozenset[int],
    num_tokens: int | None = None,
) -> list[list[list[int]]]:
    """Greedy completions of every prompt under every treatment: [treatment][prompt] -> ids, with the stop token.

    Args:
        writer: the causal LM that writes, in eval mode.
        donor: a causal LM over the same tokens, whose activations the treatments see; None: they see the writer's own.
        site: where something is added, such as ``resid.2``.
        prompts: token ids, none empty.
        treatments: what is added, one for each group of rows.
        max_tokens: of a completion.
        stop_ids: tokens that end it.
        num_tokens: of the tokenizer; ids beyond them are not written.
    """
    device = next(writer.parameters()).device
    rows = _start(prompts, len(treatments), device)
    written: list[list[int]] = [[] for _ in range(len(treatments) * len(prompts))]
    for step in range(max_tokens):
        chosen = _advance(writer, donor, site, rows, treatments)[:, :num_tokens].argmax(-1)
        for number, token, ended in zip(rows.number.tolist(), chosen.tolist(), rows.ended.tolist(), strict=True):
            if not ended:
                written[number].append(token)
        stopped = torch.tensor([token in stop_ids for token in chosen.tolist()], device=device)
        rows.ended = rows.ended | stopped
        rows.tokens = chosen[:, None]
        rows.mask = torch.cat([rows.mask, torch.ones_like(rows.tokens)], dim=1)
        if bool(rows.ended.all()):
            break
        if step % COMPACT_EVERY == 0 and bool(rows.ended.any()):
            rows.keep((~rows.ended).nonzero()[:, 0])
    size = len(prompts)
    return [written[start : start + size] for start in range(0, len(written), size)]


def _start(prompts: Sequence[Sequence[int]], num_treatments: int, device: Any) -> _Rows:
    width = max(map(len, prompts))
    tokens = torch.zeros((len(prompts), width), dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, ids in enumerate(prompts):
        tokens[row, width - len(ids) :] = torch.tensor(list(ids))
        mask[row, width - len(ids) :] = 1
    count = num_treatments * len(prompts)
    return _Rows(
        torch.arange(num_treatments, device=device).repeat_interleave(len(prompts)),
        torch.arange(count, device=device),
        tokens.repeat(num_treatments, 1).to(device),
        mask.repeat(num_treatments, 1).to(device),
        torch.zeros(count, dtype=torch.bool, device=device),
    )


def _advance(writer: Any, donor: Any | None, site: str, rows: _Rows, treatments: Sequence[Added]) -> Tensor:
    """Read ``rows.tokens`` with both models; the logits of the next token of each row [R, V]."""
    positions = (rows.mask.cumsum(1) - 1).clamp_min(0)[:, -rows.tokens.shape[1] :]
    real = rows.mask[:, -rows.tokens.shape[1] :].bool()
    read = {"input_ids": rows.tokens, "attention_mask": rows.mask, "position_ids": positions, "use_cache": True}
    donated = None if donor is None else _donated(donor, site, read, rows.caches[1], len(treatments))

    def change(x: Tensor) -> Tensor:
        added = torch.zeros_like(x, dtype=torch.float32)
        for treatment, own in zip(treatments, rows.slices(len(treatments)), strict=True):
            if own.start < own.stop:
                here, where = x[own].float(), real[own]
                seen = here[where]
                added[own][where] = treatment(seen, seen if donated is None else donated[own][where])
        return (x.float() + added).to(x.dtype)

    with replaced(writer, site, change):
        output = writer(**read, past_key_values=rows.caches[0], logits_to_keep=1)
    logits: Tensor = output.logits[:, -1]
    return logits


def _donated(donor: Any, site: str, read: dict[str, Any], cache: Any, num_treatments: int) -> Tensor:
    """The donor's activations [R, tokens, d], float32. Prompts, the same under every treatment, are read once."""
    is_first = read["input_ids"].shape == read["attention_mask"].shape
    size = len(read["input_ids"]) // num_treatments
    if is_first:
        read = {name: value[:size] if isinstance(value, Tensor) else value for name, value in read.items()}
    (seen,) = read_sites(donor, [site], **read, past_key_values=cache)
    if not is_first:
        return seen.float()
    cache.batch_select_indices(torch.arange(size, device=seen.device).repeat(num_treatments))
    return seen.float().repeat(num_treatments, 1, 1)


Measure = Literal["reward", "accuracy"]


@dataclass(frozen=True)
class Subject(Sampler):
    """A sampler whose model is at hand, to be changed while it answers."""

    model: Any
    max_tokens: int

    def prompts(self, examples: Sequence[Example]) -> list[list[int]]:
        """Return the token ids of the examples' prompts."""
        template = self.grader.template
        return [encode_prompt(self.tokenizer, template, each.messages, each.variables) for each in examples]

    def answer(
        self,
        examples: Sequence[Example],
        *,
        samples: int = 1,
        temperature: float = 0.0,
        seed: int = 0,
        purpose: str = "what changed",
    ) -> list[Rollout]:
        """Graded answers, those to one example together; a function of the model, the seed and the purpose."""
        sampling = self.sampling(self.max_tokens, temperature)
        groups, _ = collect(
            self, RolloutRequest(examples, self.prompts(examples), sampling, (seed, purpose, 0), samples)
        )
        return [rollout for group in groups for rollout in group]


def move_features(dictionary: Dictionary, features: Sequence[int], dose: float, limit: float = float("inf")) -> Added:
    """α·Σⱼ (fⱼ(donor) − fⱼ(x))·dⱼ: some features of the writer, moved towards where the donor has them.

    Activations with a norm above ``limit``, in either model, stay as they are.
    """
    patch = feature_patch(dictionary, features)

    def added(x: Tensor, donor: Tensor) -> Tensor:
        within = (x.norm(dim=-1, keepdim=True) <= limit) & (donor.norm(dim=-1, keepdim=True) <= limit)
        return dose * patch(x, donor) * within

    return added


def scale_features(
    dictionary: Dictionary, features: Sequence[int], factor: float, limit: float = float("inf")
) -> Added:
    """Σⱼ (g − 1)·fⱼ(x)·dⱼ for activations [n, d]; those with a norm above ``limit`` stay as they are."""
    chosen = torch.tensor(list(features), dtype=torch.long, device=dictionary.b_dec.device)

    def added(x: Tensor, _: Tensor) -> Tensor:
        moved = (dictionary.encode(x, chosen) * (factor - 1.0)) @ dictionary.W_dec[chosen]
        return moved * (x.norm(dim=-1, keepdim=True) <= limit)

    return added


def leave(x: Tensor, _: Tensor) -> Tensor:
    """The treatment that does nothing."""
    return torch.zeros_like(x)


def replace_all(x: Tensor, donor: Tensor) -> Tensor:
    """The treatment that puts all of the donor's activations in."""
    return donor - x


class Trial:
    """A writer, a donor that reads along (or none), fixed examples: what greedy answers earn under treatments."""

    def __init__(
        self, writer: Subject, donor: Subject | None, site: str, examples: Sequence[Example], measure: Measure
    ) -> None:
        self.writer, self.donor, self.site, self.examples, self.measure = writer, donor, site, examples, measure
        self.prompts = writer.prompts(examples)

    def outcomes(self, treatments: Sequence[Added]) -> list[float]:
        """For each treatment the mean reward, or the share of right answers."""
        written = write_with(
            self.writer.model,
            None if self.donor is None else self.donor.model,
            self.site,
            self.prompts,
            treatments,
            max_tokens=self.writer.max_tokens,
            stop_ids=stop_ids(self.writer.tokenizer, self.writer.grader.template),
            num_tokens=num_tokens_of(self.writer.tokenizer),
        )
        return [self._mean(completions) for completions in written]

    def _mean(self, completions: Sequence[Sequence[int]]) -> float:
        grader, tokenizer = self.writer.grader, self.writer.tokenizer
        stops = stop_ids(tokenizer, grader.template)
        attempts = []
        for example, prompt, ids in zip(self.examples, self.prompts, completions, strict=True):
            text = decode_response(tokenizer, grader.template, ids, prompt)
            finish: Literal["stop", "length"] = "stop" if ids and ids[-1] in stops else "length"
            asked = tokenizer.decode(list(prompt), skip_special_tokens=False)
            attempts.append(Attempt(example, asked, text, Completion(tuple(ids), (), finish)))
        grades = grader.grade(attempts)
        if self.measure == "reward":
            return sum(grade.reward for grade in grades) / len(grades)
        return sum(float(grade.parts.get("correct", 0.0) == 1.0) for grade in grades) / len(grades)


def try_doses(
    trial: Trial,
    treat: Callable[[Sequence[int], float], Added],
    ranked: Sequence[int],
    matched: Sequence[Sequence[int]],
    plan: Sequence[tuple[int, float]],
) -> list[dict[str, Any]]:
    """What every (number of features, dose) of the plan does, with one dictionary; all are decoded side by side.

    By name: ``features`` (their number), ``dose``, the outcomes of the ``changed`` ones and of each set of rate-matched
    ``random`` ones, and the ``difference``: changed less the mean of the random ones.

    Args:
        treat: (features, dose) -> the treatment.
        ranked: the changed features, the most changed first.
        matched: sets of other features, entry i of each matched to ``ranked[i]``.
    """
    sets = (ranked, *matched)
    outcomes = trial.outcomes([treat(features[:count], dose) for count, dose in plan for features in sets])
    doses = []
    for index, (count, dose) in enumerate(plan):
        changed, *others = outcomes[index * len(sets) : (index + 1) * len(sets)]
        difference = changed - sum(others) / len(others)
        fact = {"features": min(count, len(ranked)), "dose": dose, "changed": changed, "random": others}
        doses.append(fact | {"difference": difference})
    return doses


def judge(differences: Sequence[float]) -> dict[str, Any]:
    """Differences between changed and other features, one per seed: their mean with its 95 % Student-t interval.

    ``separates``: the interval does not hold 0; None where one seed gives no interval.
    """
    summary = summarize_seeds(differences)
    assert summary is not None, "at least one seed"
    separates = None if summary.half_width is None else abs(summary.mean) > summary.half_width
    facts = {"mean": summary.mean, "half_width": summary.half_width, "seeds": summary.n}
    return facts | {"values": list(differences), "separates": separates}


TESTS = ("given", "returned", "scaled")
# At which dose a test does all of what it does: features moved all the way, or taken away.
WHOLE = {"given": 1.0, "returned": 1.0, "scaled": 0.0}


def measure_causes(
    subjects: Mapping[str, Subject],
    site: str,
    examples: Sequence[Example],
    changes: ChangesSection,
    dictionaries: Sequence[Dictionary],
    seen: Sequence[Seen],
    limit: float,
    observe: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """What base and post model earn untouched, with everything of the other, and with changed features treated.

    For each test of ``TESTS`` (see ``causal``) and each seed a list of {features, dose, changed, random, difference};
    ``verdicts``: the differences over seeds, by test and point (``given 16 at 1``), and of the slopes over doses.
    """
    settings = changes.causal
    assert settings is not None
    pairs = {"given": ("base", "post"), "returned": ("post", "base"), "scaled": ("post", None)}
    trials = {
        test: Trial(subjects[writer], subjects[donor] if donor else None, site, examples, settings.measure)
        for test, (writer, donor) in pairs.items()
    }
    writers = {"base": "given", "post": "returned"}
    both = {name: trials[test].outcomes([leave, replace_all]) for name, test in writers.items()}
    facts: dict[str, Any] = {
        "measure": settings.measure,
        "prompts": len(examples),
        "features": settings.features,
        "unchanged": {name: outcome[0] for name, outcome in both.items()},
        "everything": {name: outcome[1] for name, outcome in both.items()},
        **{test: [] for test in TESTS},
    }
    most = max(*settings.counts, settings.features)
    for seed, (dictionary, view) in enumerate(zip(dictionaries, seen, strict=True)):
        ranked = view.changes.ranking()[:most].tolist()
        matched = [random_features(view, ranked, changes.seed + seed, 1 + draw) for draw in range(settings.draws)]
        for test in TESTS:
            treat = partial(scale_features if test == "scaled" else move_features, dictionary, limit=limit)
            facts[test].append(try_doses(trials[test], treat, ranked, matched, plan_of(test, settings)))
        point = next(p for p in facts["given"][-1] if (p["features"], p["dose"]) == (min(settings.features, most), 1.0))
        observe(
            f"causal test, seed {seed}: {settings.measure} of the base {facts['unchanged']['base']:.3f}, given "
            f"{point['features']} changed features {point['changed']:.3f}, random ones "
            f"{point['changed'] - point['difference']:.3f}"
        )
    facts["verdicts"] = _verdicts(facts)
    return facts


def plan_of(test: str, settings: CausalSection) -> list[tuple[int, float]]:
    """(features, dose) of a test: the whole dose to every count, and every dose to the features that are judged by.

    ``returned`` has no further doses: what they would tell, ``given`` tells.
    """
    whole = WHOLE[test]
    doses = {"given": settings.doses, "returned": [], "scaled": settings.factors}[test]
    points = [(count, whole) for count in settings.counts] + [(settings.features, dose) for dose in (whole, *doses)]
    return sorted(set(points))


def _verdicts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """By test and point: mean, half width of the 95 % interval over seeds, whether it separates."""
    differences: dict[str, list[float]] = {}
    for test in TESTS:
        rows = facts[test]
        for index, point in enumerate(rows[0]):
            name = f"{test} {point['features']} at {point['dose']:g}"
            differences[name] = [row[index]["difference"] for row in rows]
        same = [i for i, point in enumerate(rows[0]) if point["features"] == facts["features"]]
        if len(same) > 1:
            doses = [point["dose"] for point in rows[0]]
            differences[f"{test}, slope"] = [
                linear_regression([doses[i] for i in same], [row[i]["difference"] for i in same]).slope for row in rows
            ]
    return {name: judge(values) for name, values in differences.items()}
