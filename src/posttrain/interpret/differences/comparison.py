"""Two models compared from the inside: what both read, what changed, where they disagree, what the changes do.

Every part gives plain data for ``diff.json``, from which the report is drawn. Both read prompts, with answers that one
of them has sampled."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from posttrain.engines.models import ModelSource, complete_template, grader_for, open_model
from posttrain.engines.rollout import Grader
from posttrain.errors import RunConflict, UsageError
from posttrain.evals.statistics import standard_error
from posttrain.interpret.activations.record import Recorder
from posttrain.interpret.activations.shards import ActivationStore, Documents, column
from posttrain.interpret.activations.sites import check_layers, read_config
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.dictionaries.exchange import CONFIG, load_dictionary, save_dictionary
from posttrain.interpret.dictionaries.fitting import fit_dictionary
from posttrain.interpret.dictionaries.measures import in_batches, measure
from posttrain.interpret.dictionaries.recipe import DictionaryWord
from posttrain.interpret.dictionaries.rows import DIFFERENCE, StoreRows, first_held_out, sample_rows
from posttrain.interpret.differences.causal import Subject, measure_causes
from posttrain.interpret.differences.changes import Seen, mean_differences, scale_difference, see_changes
from posttrain.interpret.differences.divergence import locate_divergence, patch_curves
from posttrain.interpret.differences.findings import (
    describe_difference,
    describe_features,
    describe_overlap,
    describe_seen,
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
    """A comparison under way; ``report`` becomes ``diff.json``.

    ``recipe`` is complete: its task, template and site are known. ``sources``: both models, by ``base`` and ``post``.
    ``allow_large``: activations above 1 GiB may be recorded.
    """

    recipe: DiffRecipe
    sources: dict[str, ModelSource]
    task: Task
    grader: Grader
    folder: Path
    observe: Observe
    allow_large: bool = False
    report: dict[str, Any] = field(default_factory=dict)
    subjects: dict[str, Subject] = field(default_factory=dict)
    dictionaries: list[Dictionary] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)

    @property
    def changes(self) -> ChangesSection:
        return self.recipe.changes

    @property
    def site(self) -> str:
        assert self.changes.site is not None, "prepare fills it in"
        return self.changes.site

    @property
    def device(self) -> torch.device:
        """The device of the post model, and of the dictionaries."""
        device: torch.device = next(self.subject("post").model.parameters()).device
        return device

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
    for side, source in sources.items():
        try:
            read_config(source.path)
        except UsageError as error:
            raise UsageError(f"{side}: {error}") from None
        source.refuse_scorer()
    task = choose_task(recipe.task, post.name, post.recipe)
    layers = read_config(post.path).get_text_config().num_hidden_layers
    site = recipe.changes.site or f"resid.{max(1, layers // 2)}"
    for source in sources.values():
        check_layers(source.path, [site])
    template = complete_template(recipe.template, post) or post.template
    filled = {
        "task": task,
        "template": template,
        "changes": recipe.changes.model_copy(update={"site": site}),
    }
    recipe = recipe.model_copy(update=filled)
    _refuse_another(folder, recipe)
    return Comparison(
        recipe, sources, build_task(task, "task"), grader_for(post, template), folder, observe, allow_large
    )


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


def compare(work: Comparison, about: Mapping[str, Any], started: float | None = None) -> dict[str, Any]:
    """Do all of it, and write ``diff.json`` with ``about`` before it; returns its content.

    Activations and dictionaries that are in the folder already are kept. ``started``: where ``time.monotonic`` stood
    when the work began, if that was before this call.

    Raises:
        UsageError: too few examples or activations, or models that cannot be compared.
    """
    started = time.monotonic() if started is None else started
    changes = work.changes
    asked, tested = split_examples(work.task, changes)
    with work.timed("answers", f"{len(asked)} prompts are answered {changes.samples} times by {changes.by}"):
        answers, documents = _answer(work, asked)
    with work.timed("recording", f"both models read {documents.num_tokens:,} tokens"):
        store = _record(work, documents)
    start = first_held_out(StoreRows(store, None, "base"), max(1, round(store.num_rows * changes.held_out)), 2)
    with work.timed("dictionaries", "dictionaries of the base are trained"):
        rows = StoreRows(store, work.site, "base")
        work.dictionaries = [
            _fitted(work, f"seed-{seed}", rows, start, changes.dictionary, changes.seed + seed)
            for seed in range(changes.seeds)
        ]
    with work.timed("changes", "changes of every feature are measured"):
        frozen = _see(work, store, start)
    with work.timed("difference", "the difference itself is looked at"):
        difference = _look_at_difference(work, store, start)
    with work.timed("divergence", "KL is measured token by token, and patched"):
        _diverge(work, store, documents, frozen, difference)
    if changes.causal is not None:
        with work.timed("causal", "causal test: the models answer with features taken away or amplified"):
            subjects, limit = {name: work.subject(name) for name in SIDES}, _limit(store, work.site, "post")
            work.report["causal"] = measure_causes(
                subjects, work.site, tested, changes, work.dictionaries, work.seen, limit, work.observe
            )
    work.report["documents"] = describe_answers(answers, documents, changes.by)
    work.report["seconds"]["all"] = round(time.monotonic() - started, 1)
    content = dict(about) | work.report
    text = harmless_json(json.dumps(content, indent=1, ensure_ascii=False))
    replace_file(work.folder / RESULTS, text.encode() + b"\n")
    return content


def split_examples(task: Task, changes: ChangesSection) -> tuple[list[Example], list[Example]]:
    """Return (those whose answers are recorded, those of the causal test): different ones, a fixed draw by the seed.

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


def _answer(work: Comparison, examples: Sequence[Example]) -> tuple[list[Rollout], Documents]:
    """Sampled answers in the order of the examples, and as documents: prompt and answer, token by token."""
    changes, task = work.changes, work.task
    rollouts = work.subject(changes.by).answer(
        examples,
        samples=changes.samples,
        temperature=changes.temperature,
        seed=changes.seed,
        purpose=f"what changed: answers of {changes.by}",
    )
    documents = Documents(
        [[*rollout.prompt_ids, *rollout.completion.ids] for rollout in rollouts],
        [len(rollout.prompt_ids) for rollout in rollouts],
        {"source": "answers", "task": task.name, "split": task.split, "by": changes.by},
    )
    return rollouts, documents


def describe_answers(rollouts: Sequence[Rollout], documents: Documents, by: str) -> dict[str, Any]:
    """How many answers there are, how long they are, what they earned: plain data."""
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
    sections = [work.sources[side].section() for side in SIDES]
    recorder = Recorder(sections, documents, [work.site], dtype=changes.dtype, outliers=changes.outliers)
    place = work.folder / "activations"
    recorder.check_room(place, allow_large=work.allow_large, fewer="changes.prompts")
    with storage_errors("the comparison", work.folder):
        work.folder.mkdir(parents=True, exist_ok=True)
    replace_file(work.folder / RECIPE, work.recipe.to_yaml().encode())
    store = recorder.write(place)
    index = store.index
    work.report["activations"] = {
        "site": work.site,
        "layer_convention": index.layer_convention,
        "rows": index.rows,
        "dropped": index.dropped,
        "norms": {source: index.norms[column(work.site, source)].median for source in SIDES},
        "weights": {source.name: source.weights_hash for source in index.sources},
    }
    return store


def _fitted(
    work: Comparison, name: str, rows: StoreRows, start: int, word: DictionaryWord, seed: int, frozen: bool = False
) -> Dictionary:
    """The dictionary of that name in the folder, trained if it is not there."""
    place = work.folder / "dictionaries" / name
    if not (place / CONFIG).is_file():
        work.observe(f"dictionary {name}: {word.num_features(rows.d)} features, {work.changes.train.steps} steps")
        dictionary = fit_dictionary(
            rows, start, word, work.changes.train, seed=seed, frozen_decoder=frozen, device=work.device
        )
        models = [source.model for source in rows.store.index.sources]
        facts = {"model_name": models[0], "models": models, "site": work.site, "source": rows.source, "seed": seed}
        save_dictionary(dictionary, place, facts)
    return load_dictionary(place).to(work.device)


def _see(work: Comparison, store: ActivationStore, start: int) -> tuple[Dictionary, list[int]]:
    """Changes by every dictionary, and how the seeds agree; returns the frozen decoder, and its features by change."""
    changes = work.changes

    def see(dictionary: Dictionary, seed: int) -> Seen:
        return see_changes(
            store,
            work.site,
            dictionary,
            held_out_start=start,
            seed=changes.seed + seed,
            min_documents=changes.min_documents,
            min_change=changes.min_change,
        )

    work.seen = [see(dictionary, seed) for seed, dictionary in enumerate(work.dictionaries)]
    work.report["dictionaries"] = [describe_seen(seen, work.dictionaries[i]) for i, seen in enumerate(work.seen)]
    work.report["overlap"] = describe_overlap(work.dictionaries, work.seen)
    post = work.subject("post")
    work.report["features"] = describe_features(
        store, work.site, work.dictionaries[0], work.seen[0], post.model, post.tokenizer, changes.show
    )
    rows = StoreRows(store, work.site, "base")
    frozen = _fitted(work, "frozen", rows, start, changes.dictionary, changes.seed, frozen=True)
    seen = see(frozen, 0)
    work.report["frozen"] = describe_seen(seen, frozen)
    return frozen, seen.changes.ranking().tolist()


def _look_at_difference(work: Comparison, store: ActivationStore, start: int) -> Dictionary | None:
    """The mean difference through the lens, and a dictionary of the difference."""
    changes, post = work.changes, work.subject("post")
    names, means = mean_differences(store, work.site)
    tokens = strongest_tokens(post.model, means, post.tokenizer)
    norm = work.report["activations"]["norms"]["base"]
    work.report["lens"] = [
        {"where": name, "norm": float(mean.norm()) / norm, **entry}
        for name, mean, entry in zip(names, means, tokens, strict=True)
    ]
    if changes.difference is None:
        return None
    rows = StoreRows(store, work.site, DIFFERENCE)
    if not bool(sample_rows(rows, rows.num_rows, changes.seed).any()):
        work.observe("both models compute the same at this site, so there is no dictionary of their difference")
        return None
    fitted = _fitted(work, "difference", rows, start, changes.difference, changes.seed)
    quality = measure(fitted, in_batches(rows, start, rows.num_rows))
    scaling = scale_difference(store, work.site, fitted)
    work.report["difference"] = describe_difference(fitted, scaling, quality, post.model, post.tokenizer)
    return fitted


def _limit(store: ActivationStore, site: str, source: str) -> float:
    return store.index.limits.get(column(site, source), float("inf"))


def _diverge(
    work: Comparison,
    store: ActivationStore,
    documents: Documents,
    frozen: tuple[Dictionary, list[int]],
    difference: Dictionary | None,
) -> None:
    changes, base, post = work.changes, work.subject("base"), work.subject("post")
    ids, lengths, shown = documents.ids, documents.prompt_lengths, changes.kl_documents
    work.report["divergence"] = locate_divergence(base.model, post.model, ids[:shown], lengths[:shown], post.tokenizer)
    if changes.patching is None:
        return
    if work.report["divergence"]["per_token"] < LEAST_KL:
        work.observe("both models predict the same, so there is nothing that patching could recover")
        return
    count = min(changes.patching.documents, len(ids))
    work.report["patching"] = patch_curves(
        (base.model, post.model),
        work.site,
        (ids[-count:], lengths[-count:]),
        changes,
        work.dictionaries,
        work.seen,
        frozen=frozen,
        difference=difference,
        limit=min(_limit(store, work.site, source) for source in SIDES),
        observe=work.observe,
    )
