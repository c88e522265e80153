"""Two models compared from the inside: what both read, what changed, where they disagree, what the changes do.

Every part gives plain data for ``diff.json``, from which the report is drawn. Both read prompts, with answers that one
of them has sampled."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from posttrain.engines.models import ModelSource, complete_template, grader_for, open_model
from posttrain.engines.rollout import Grader
from posttrain.errors import RunConflict, UsageError
from posttrain.evals.statistics import standard_error
from posttrain.interpret.activations.record import record
from posttrain.interpret.activations.shards import ActivationStore, Documents
from posttrain.interpret.activations.sites import check_layers, device_of, read_config
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.dictionaries.exchange import CONFIG, load_dictionary, save_dictionary
from posttrain.interpret.dictionaries.fitting import StoreRows, first_held_out, fit_dictionary
from posttrain.interpret.dictionaries.measures import median_norm
from posttrain.interpret.differences.causal import Subject, measure_causes
from posttrain.interpret.differences.changes import Seen, see_changes
from posttrain.interpret.differences.divergence import Patcher, locate_divergence, patch_curves
from posttrain.interpret.differences.findings import (
    describe_features,
    describe_overlap,
    describe_seen,
    mean_differences,
)
from posttrain.interpret.differences.recipe import ChangesSection, DiffRecipe
from posttrain.interpret.features.logit_lens import strongest_tokens
from posttrain.randomness import permutation
from posttrain.recipes.document import flatten
from posttrain.store.durable import replace_file, storage_errors
from posttrain.tasks.base import Task, build_task, choose_task
from posttrain.types import Example, Rollout
from posttrain.untrusted import harmless_json

Observe = Callable[[str], Any]
RECIPE, RESULTS = "changes.yaml", "diff.json"
SIDES = ("base", "post")
LEAST_KL = 1e-9  # nats a token below which two models predict the same but for rounding


@dataclass
class Comparison:
    """A comparison in progress; ``report`` becomes ``diff.json``.

    ``recipe`` is complete, with task, template and site. ``sources``: both models, by ``base`` and ``post``.
    ``allow_large``: activations above 1 GiB may be recorded.
    """

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


def compare(work: Comparison, about: Mapping[str, Any], started: float) -> dict[str, Any]:
    """Do all of it, write ``diff.json`` with ``about`` in front, and return its content.

    Activations and dictionaries that are in the folder already are kept. ``started``: ``time.monotonic`` when the work
    began.

    Raises:
        UsageError: too few examples or activations, or models that cannot be compared.
    """
    changes, report = work.changes, work.report
    asked, tested = split_examples(work.task, changes)
    with work.timed("answers", f"{len(asked)} prompts are answered {changes.samples} times by {changes.by}"):
        purpose = f"what changed: answers of {changes.by}"
        answers = work.subject(changes.by).answer(asked, changes.samples, changes.temperature, changes.seed, purpose)
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
        dictionaries = [_fitted(work, f"seed-{seed}", rows, start, changes.seed + seed) for seed in seeds]
        frozen = _fitted(work, "frozen", rows, start, changes.seed, frozen=True)
    with work.timed("changes", "changes of every feature are measured"):
        *seen, of_frozen = (
            see_changes(
                store,
                work.site,
                dictionary,
                held_out_start=start,
                seed=changes.seed + seed,
                min_documents=changes.min_documents,
                min_change=changes.min_change,
            )
            for dictionary, seed in zip([*dictionaries, frozen], [*seeds, 0], strict=True)
        )
        _describe_changes(work, store, dictionaries, seen)
        report["frozen"] = describe_seen(of_frozen, frozen)
    with work.timed("divergence", "KL is measured token by token, and patched"):
        _diverge(work, store, documents, dictionaries, seen, (frozen, of_frozen))
    if changes.causal is not None:
        with work.timed("causal", "causal test: the models answer with features taken away or amplified"):
            subjects, limit = {name: work.subject(name) for name in SIDES}, store.limit(work.site, "post")
            report["causal"] = measure_causes(
                subjects, work.site, tested, changes, dictionaries, seen, limit, work.observe
            )
    report["documents"] = describe_answers(answers, documents, changes.by)
    report["seconds"]["all"] = round(time.monotonic() - started, 1)
    content = {**about, **report}
    text = harmless_json(json.dumps(content, indent=1, ensure_ascii=False))
    replace_file(work.folder / RESULTS, text.encode() + b"\n")
    return content


def split_examples(task: Task, changes: ChangesSection) -> tuple[list[Example], list[Example]]:
    """Return (those whose answers are recorded, those of the causal test): different ones, drawn by the seed.

    Raises:
        UsageError: the task has fewer.
    """
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


def describe_answers(rollouts: list[Rollout], documents: Documents, by: str) -> dict[str, Any]:
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


def _fitted(work: Comparison, name: str, rows: StoreRows, start: int, seed: int, *, frozen: bool = False) -> Dictionary:
    """Return the dictionary of that name in the folder, trained if it is not there."""
    place, word, settings = work.folder / "dictionaries" / name, work.changes.dictionary, work.changes.train
    device = device_of(work.subject("post").model)
    if not (place / CONFIG).is_file():
        work.observe(f"dictionary {name}: {word.num_features(rows.d)} features, {settings.steps} steps")
        dictionary = fit_dictionary(rows, start, word, settings, seed=seed, frozen_decoder=frozen, device=device)
        base = rows.store.index.sources[0].model_dump()
        facts = {"model_name": base["model"], "models": [base], "site": work.site, "source": "base", "seed": seed}
        save_dictionary(dictionary, place, facts)
    return load_dictionary(place).to(device)


def _describe_changes(
    work: Comparison, store: ActivationStore, dictionaries: list[Dictionary], seen: list[Seen]
) -> None:
    """Report changes by every dictionary, how the seeds agree, the features of the first, and the mean difference."""
    report, post = work.report, work.subject("post")
    report["dictionaries"] = [describe_seen(view, own) for view, own in zip(seen, dictionaries, strict=True)]
    report["overlap"] = describe_overlap(dictionaries, seen)
    report["features"] = describe_features(
        store, work.site, dictionaries[0], seen[0], post.model, post.tokenizer, work.changes.show
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
    dictionaries: list[Dictionary],
    seen: list[Seen],
    frozen: tuple[Dictionary, Seen],
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
    work.report["patching"] = patch_curves(patcher, changes, dictionaries, seen, (frozen[0], ranked), work.observe)
