"""Compare two models internally: shared inputs, feature changes, divergence, causal effects.

Each part adds plain data to ``diff.json``, used to render the report. Both models read prompts with answers sampled
from one model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from posttrain.activity import phase
from posttrain.data.base import Task, build_task, choose_task
from posttrain.data.rendered import take_rendered
from posttrain.errors import RunConflict, UsageError
from posttrain.evaluation.statistics import standard_error
from posttrain.interpret.activations.record import record_activations
from posttrain.interpret.activations.shards import ActivationStore, Documents
from posttrain.interpret.activations.sites import check_layers, device_of, read_model_config
from posttrain.interpret.differences.causal import Subject, measure_causes
from posttrain.interpret.differences.changes import DictionaryChanges, measure_changes
from posttrain.interpret.differences.changes_recipe import ChangesSection, DiffRecipe
from posttrain.interpret.differences.divergence import Patcher, locate_divergence, patch_curves
from posttrain.interpret.differences.summaries import (
    describe_changed_features,
    describe_dictionary_changes,
    describe_overlap,
    mean_differences,
)
from posttrain.interpret.features.lens import strongest_tokens
from posttrain.interpret.saes.fitting import StoreRows, first_held_out, fit_sae, median_norm
from posttrain.interpret.saes.sae import CONFIG, SparseAutoencoder, load_sae, save_sae
from posttrain.randomness import permutation
from posttrain.recipes.overriding import flatten
from posttrain.sampling.models import ModelSource, complete_template, grader_for, open_model
from posttrain.sampling.rollout import Grader
from posttrain.store.durable import replace_file, storage_errors
from posttrain.types import Example, Rollout
from posttrain.untrusted import harmless_json

Observe = Callable[[str], object]
RECIPE = "changes.yaml"
RESULTS = "diff.json"
SIDES = ("base", "post")
LEAST_KL = 1e-9  # nats per token; smaller values are rounding noise


@dataclass
class ModelComparison:
    """Comparison state; ``report`` becomes ``diff.json``. ``recipe`` includes task, template and site."""

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
        """Load a model (``base``, ``post``) for sampling; both use the post model's template and grader."""
        if name not in self.subjects:
            model = open_model(self.sources[name], self.recipe.template)
            max_tokens = self.changes.max_tokens or self.sources["post"].max_tokens
            self.subjects[name] = Subject(
                model.engine, model.tokenizer, self.grader, model.context_tokens, model.model, max_tokens
            )
        return self.subjects[name]

    @contextmanager
    def timed(self, part: str, line: str) -> Iterator[None]:
        self.observe(line)
        started = time.monotonic()
        with phase(part):
            yield
        seconds = self.report.setdefault("seconds", {})
        seconds[part] = round(time.monotonic() - started, 1)


def prepare_comparison(
    recipe: DiffRecipe,
    base: ModelSource,
    post: ModelSource,
    folder: Path,
    observe: Observe = lambda line: None,
    *,
    allow_large: bool = False,
) -> ModelComparison:
    """Resolve task, template and site from recipe or post run, without writing files.

    Raises:
        UsageError: no such model, a reward model, or a layer beyond the model's depth.
        RunConflict: the folder contains something else, or a different comparison.
    """
    sources = {"base": base, "post": post}
    layers = 0
    for side, source in sources.items():
        try:
            layers = read_model_config(source.path).get_text_config().num_hidden_layers
        except UsageError as error:
            raise UsageError(f"{side}: {error}") from None
        source.refuse_scorer()
    task = choose_task(recipe.task, post.name, post.task)
    site = recipe.changes.site or f"resid.{max(1, layers // 2)}"
    for source in sources.values():
        check_layers(source.path, [site])
    template = complete_template(recipe.template, post) or post.template
    changes = recipe.changes.model_copy(update={"site": site})
    recipe = recipe.model_copy(update={"task": task, "template": template, "changes": changes})
    _refuse_another(folder, recipe)
    grader = grader_for(post, template)
    asked = take_rendered(build_task(task, "task"), grader.template, post.tokenizer)
    for line in asked.warnings:
        observe(line)
    return ModelComparison(recipe, site, sources, asked, grader, folder, observe, allow_large)


def _refuse_another(folder: Path, recipe: DiffRecipe) -> None:
    path = folder / RECIPE
    if path.is_file():
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        stored = flatten(content)
        now = flatten(recipe.dump())
        changed = sorted(key for key in {**stored, **now} if stored.get(key) != now.get(key))
        if changed:
            shown = [f"{key} (stored {stored.get(key)!r}, requested {now.get(key)!r})" for key in changed[:3]]
            raise RunConflict(
                f"{folder}: stored comparison used different settings: {', '.join(shown)}. No files were "
                "changed; choose another name: --run NAME"
            )
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunConflict(f"{folder} contains something else. No files were changed; choose another name: --run NAME")


def compare_models(work: ModelComparison, about: Mapping[str, object], started: float) -> dict[str, object]:
    """Run unfinished parts, write ``diff.json`` starting with ``about``, and return its content."""
    changes = work.changes
    report = work.report
    answered, tested = split_examples(work.task, changes)
    with work.timed("answers", f"sampling {changes.samples} answers to {len(answered)} prompts from {changes.by}"):
        answers = _answer(work, answered)
    documents = Documents(
        data={"source": "answers", "task": work.task.name, "split": work.task.split, "by": changes.by}
    )
    for rollout in answers:
        documents.ids.append([*rollout.prompt_ids, *rollout.completion.ids])
        documents.prompt_lengths.append(len(rollout.prompt_ids))
    with work.timed("recording", f"recording activations on {documents.num_tokens:,} tokens"):
        store = _record(work, documents)
    rows = StoreRows(store, work.site, "base")
    num_held_out = max(1, round(store.num_rows * changes.held_out))
    start = first_held_out(rows, num_held_out, 2)
    with work.timed("dictionaries", "training base dictionaries"):
        seeds = range(changes.seeds)
        saes = [_fitted(work, f"seed-{seed}", rows, start, changes.seed + seed) for seed in seeds]
        frozen = _fitted(work, "frozen", rows, start, changes.seed, frozen=True)
    with work.timed("changes", "measuring feature changes"):
        seen = [_measure(work, store, sae, start, changes.seed + seed) for seed, sae in zip(seeds, saes, strict=True)]
        of_frozen = _measure(work, store, frozen, start, changes.seed)
        _describe_changes(work, store, saes, seen)
        report["frozen"] = describe_dictionary_changes(of_frozen, frozen)
    with work.timed("divergence", "measuring per-token KL and patching"):
        _diverge(work, store, documents, saes, seen, (frozen, of_frozen))
    if changes.causal is not None:
        with work.timed("causal", "causal test: sampling answers with features removed or amplified"):
            subjects = {name: work.subject(name) for name in SIDES}
            limit = store.limit(work.site, "post")
            report["causal"] = measure_causes(subjects, work.site, tested, changes, saes, seen, limit, work.observe)
    report["documents"] = describe_answers(answers, documents, changes.by)
    report["seconds"]["all"] = round(time.monotonic() - started, 1)
    content = {**about, **report}
    text = harmless_json(json.dumps(content, indent=1, ensure_ascii=False))
    replace_file(work.folder / RESULTS, text.encode() + b"\n")
    return content


def _answer(work: ModelComparison, examples: Sequence[Example]) -> list[Rollout]:
    """Sample answers for both models to read."""
    changes = work.changes
    purpose = f"what changed: answers of {changes.by}"
    return work.subject(changes.by).answer(examples, changes.samples, changes.temperature, changes.seed, purpose)


def _measure(
    work: ModelComparison, store: ActivationStore, sae: SparseAutoencoder, held_out_start: int, seed: int
) -> DictionaryChanges:
    """Measure one dictionary's feature changes."""
    return measure_changes(
        store,
        work.site,
        sae,
        held_out_start=held_out_start,
        seed=seed,
        min_documents=work.changes.min_documents,
        min_change=work.changes.min_change,
    )


def split_examples(task: Task, changes: ChangesSection) -> tuple[list[Example], list[Example]]:
    """Draw disjoint examples by seed: (examples for recording, examples for causal tests)."""
    tested = 0
    if changes.causal is not None:
        tested = changes.causal.prompts
    wanted = changes.prompts + tested
    size = len(task.examples)
    if wanted > size:
        raise UsageError(
            f"changes.prompts {changes.prompts} + changes.causal.prompts {tested} = {wanted}, but {task.name}/"
            f"{task.split} has only {size} examples; lower them"
        )
    order = permutation(changes.seed, "what changed: examples", 0, size)[:wanted]
    examples = [task.examples[int(i)] for i in order]
    return examples[: changes.prompts], examples[changes.prompts :]


def describe_answers(rollouts: list[Rollout], documents: Documents, by: str) -> dict[str, object]:
    """Summarize answers: count, length, reward and accuracy."""
    rewards = [r.reward for r in rollouts]
    answer_tokens = documents.num_tokens - sum(documents.prompt_lengths)
    num_correct = sum(r.parts.get("correct", 0.0) == 1.0 for r in rollouts)
    means = {
        "answers": len(rollouts),
        "reward": sum(rewards) / len(rollouts),
        "reward_error": standard_error(rewards),
        "accuracy": num_correct / len(rollouts),
        "tokens": answer_tokens / len(rollouts),
    }
    return {
        "documents": len(rollouts),
        "tokens": documents.num_tokens,
        "answer_tokens": answer_tokens,
        by: means,
    }


def _record(work: ModelComparison, documents: Documents) -> ActivationStore:
    changes = work.changes

    def begin(_: str) -> None:
        with storage_errors("the comparison", work.folder):
            work.folder.mkdir(parents=True, exist_ok=True)
        replace_file(work.folder / RECIPE, work.recipe.to_yaml().encode())

    store = record_activations(
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
    norms = {}
    for side in SIDES:
        norms[side] = median_norm(StoreRows(store, work.site, side))
    work.report["activations"] = {
        "site": work.site,
        "layer_convention": index.layer_convention,
        "rows": index.rows,
        "dropped": index.dropped,
        "norms": norms,
        "weights": {source.name: source.weights_hash for source in index.sources},
    }
    return store


def _fitted(
    work: ModelComparison, name: str, rows: StoreRows, start: int, seed: int, *, frozen: bool = False
) -> SparseAutoencoder:
    """Load a dictionary by name, training it if missing."""
    place = work.folder / "dictionaries" / name
    component = work.changes.dictionary
    settings = work.changes.train
    device = device_of(work.subject("post").model)
    if not (place / CONFIG).is_file():
        work.observe(f"dictionary {name}: {component.num_features(rows.d)} features, {settings.steps} steps")
        sae = fit_sae(rows, start, component, settings, seed=seed, frozen_decoder=frozen, device=device)
        base = rows.store.index.sources[0].model_dump()
        info = {"model_name": base["model"], "models": [base], "site": work.site, "source": "base", "seed": seed}
        save_sae(sae, place, info)
    return load_sae(place).to(device)


def _describe_changes(
    work: ModelComparison, store: ActivationStore, saes: list[SparseAutoencoder], seen: list[DictionaryChanges]
) -> None:
    """Report changes per dictionary, agreement between seeds, top features, and the average difference."""
    report = work.report
    post = work.subject("post")
    report["dictionaries"] = [describe_dictionary_changes(view, own) for view, own in zip(seen, saes, strict=True)]
    report["overlap"] = describe_overlap(saes, seen)
    report["features"] = describe_changed_features(
        store, work.site, saes[0], seen[0], post.model, post.tokenizer, work.changes.show
    )
    names, means = mean_differences(store, work.site)
    tokens = strongest_tokens(post.model, means, post.tokenizer)
    norm = report["activations"]["norms"]["base"]
    report["lens"] = []
    for name, mean, entry in zip(names, means, tokens, strict=True):
        report["lens"].append({"where": name, "norm": float(mean.norm()) / norm, **entry})


def _diverge(
    work: ModelComparison,
    store: ActivationStore,
    documents: Documents,
    saes: list[SparseAutoencoder],
    seen: list[DictionaryChanges],
    frozen: tuple[SparseAutoencoder, DictionaryChanges],
) -> None:
    changes = work.changes
    base = work.subject("base")
    post = work.subject("post")
    ids = documents.ids
    lengths = documents.prompt_lengths
    shown = changes.kl_documents
    kl = locate_divergence(base.model, post.model, ids[:shown], lengths[:shown], post.tokenizer)
    work.report["divergence"] = kl
    if changes.patching is None:
        return
    if kl["per_token"] < LEAST_KL:
        work.observe("predictions are identical, so patching is skipped")
        return
    count = min(changes.patching.documents, len(ids))
    limit = min(store.limit(work.site, source) for source in SIDES)
    patcher = Patcher(base.model, post.model, work.site, ids[-count:], lengths[-count:], limit)
    frozen_sae, of_frozen = frozen
    ranked = of_frozen.changes.ranking().tolist()
    work.report["patching"] = patch_curves(patcher, changes, saes, seen, (frozen_sae, ranked), work.observe)
